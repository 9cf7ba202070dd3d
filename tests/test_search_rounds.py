"""Timing side by side, without a GPU: what is run, in which order, beside whom, what is wrong."""

import math
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from fagen.errors import DeviceError, VerificationError
from fagen.kinds.backward.oracle import gradients
from fagen.kinds.decode import verify as decode_proof
from fagen.kinds.forward.oracle import reference
from fagen.measure import inputs as measure_inputs
from fagen.measure import rounds
from fagen.measure.gradients import output_gradient
from fagen.measure.peers import peer
from fagen.measure.rotating import ROTATED_BYTES, buffers_for, cache_bytes
from fagen.measure.rounds import BRIEF, CUDNN, Lap
from fagen.measure.sequences import quick_sizes
from fagen.measure.timing import Call
from fagen.measure.verification import contender_of
from fagen.problem import Cell, Problem, Sizes, VarlenSizes
from fagen.registry import plan_of
from fagen.vocab import MASKS, PLAIN_MASKS
from tests.made_up_gpu import kernel, plugged_in

MIXED = ((300, 300), (5, 70), (95, 95), (1, 1), (64, 200))
LENGTHS = VarlenSizes.of(MIXED, 4, 2)
DENSE = Problem("fp16", 64, 64, "causal")
VARLEN = replace(DENSE, lengths="varlen")
SMALL = Sizes(1, 2, 1, 64, 64)

ANCHOR, *KERNELS = (
    f"fwd_fp16_d64_causal_m{m}n{n}" for m, n in product((64, 128, 192), (64, 96, 128))
)
PACKED_KERNELS = ("fwd_fp16_d64_causal_m64n64_varlen", "fwd_fp16_d64_causal_m128n64_varlen")
DECODING = ("dec_fp16_d64_causal_r8n128", "dec_fp16_d64_causal_r16n64_c8_streamk")
BACKWARD = "bwd_fp16_d64_causal_m128n128"
PACKED_BACKWARD = "bwd_fp16_d64_causal_m64n64_varlen"


def cell(slug: str, sizes: Sizes | None = None) -> Cell:
    """What a kernel is timed at here."""
    usual = {"d": Sizes(2, 8, 2, 1, 300)}.get(slug[0], LENGTHS if "varlen" in slug else SMALL)
    problem = VARLEN if "varlen" in slug else DENSE
    kind = {"b": "backward", "d": "decode"}.get(slug[0], "forward")
    return Cell(replace(problem, kind=kind), sizes or usual)


def timed(*slugs: str, repeats: tuple[int, ...] = (0,), anchor: str = "") -> tuple[Lap, ...]:
    beside = kernel(anchor or slugs[0])
    return rounds.side_by_side(
        cell(slugs[0]), [*map(kernel, slugs)], beside, regime=BRIEF, repeats=repeats
    )


@pytest.fixture
def gpu(monkeypatch):
    with plugged_in(monkeypatch) as gpu:
        yield gpu


@pytest.fixture
def gpu_with_torch(monkeypatch):
    with plugged_in(monkeypatch, torch=True) as gpu:
        yield gpu


# ---- the order ----------------------------------------------------------------------------------


def test_every_kernel_runs_in_every_round_with_the_anchor_before_and_after_each_group(gpu):
    laps = timed(*KERNELS[:6], repeats=(0, 1), anchor=ANCHOR)
    assert sorted((lap.slug, lap.repeat) for lap in laps) == sorted(product(KERNELS[:6], (0, 1)))
    ran = [slug for slug, _ in gpu.ran]
    assert ran.count(ANCHOR) == 2 * 3 and ran[0] == ran[5] == ran[8] == ANCHOR


def test_the_order_differs_from_round_to_round_and_is_repeatable(gpu):
    first, again = (timed(*KERNELS, repeats=(0, 1), anchor=ANCHOR) for _ in range(2))
    names = [lap.slug for lap in first]
    assert names == [lap.slug for lap in again] and names[:8] != names[8:]


def test_a_time_stands_beside_the_faster_anchor_next_to_it(gpu, monkeypatch):
    def time_round(call, *_):
        call.run()
        return float(len(gpu.ran)), [1_700]  # a second more each time

    monkeypatch.setattr(rounds, "time_round", time_round)
    laps = timed(*KERNELS[:2], anchor=ANCHOR)
    assert [lap.anchor_seconds for lap in laps] == [1.0, 1.0]  # the later one took 4
    assert [lap.sm_clock_mhz for lap in laps] == [1_700, 1_700]


def test_calls_that_are_shorter_than_the_hosts_run_many_at_a_time(monkeypatch):
    """Else their times would be the host's; what is said is the time of one."""
    with plugged_in(monkeypatch, seconds=8e-6) as gpu:
        laps = timed(*KERNELS[:2], anchor=ANCHOR)
    assert gpu.captured == [rounds.RUNS] * 3  # the anchor too
    assert [lap.anchor_seconds for lap in laps] == [6e-3 / rounds.RUNS] * 2


# ---- beside whom --------------------------------------------------------------------------------


def test_cudnn_runs_along_where_it_can(gpu, monkeypatch):
    assert {lap.slug for lap in timed(*KERNELS[:2])} == {*KERNELS[:2]}
    monkeypatch.setattr(rounds, "_beside", lambda cell: Call(lambda: torch.zeros(1)))
    assert {lap.slug for lap in timed(*KERNELS[:2])} == {*KERNELS[:2], CUDNN}


@pytest.mark.parametrize(
    ("slugs", "beside", "called"),
    [
        ((BACKWARD,), CUDNN, {"cudnn", "cudnn_backward"}),
        (PACKED_KERNELS, "fa2", {"forward"}),
        ((PACKED_BACKWARD,), "fa2", {"forward", "backward"}),
    ],
)
def test_kernels_run_beside_the_pass_of_their_peer(gpu_with_torch, slugs, beside, called):
    laps = timed(*slugs, repeats=(0, 1))
    assert {lap.slug for lap in laps} == {*slugs, beside} and len(laps) == 2 * len(slugs) + 2
    assert {*gpu_with_torch.called} == called
    assert all(lap.seconds == lap.anchor_seconds for lap in laps)


def test_without_flashattention_2_packed_kernels_run_alone(gpu):
    assert [lap.slug for lap in timed(PACKED_KERNELS[1])] == [PACKED_KERNELS[1]]


@pytest.mark.parametrize("mask", PLAIN_MASKS)
def test_flashattention_2_computes_each_sequence_by_itself(gpu_with_torch, mask):
    at = Cell(replace(VARLEN, mask=mask), LENGTHS)
    q, k, v = measure_inputs.inputs(at, device="cpu")
    out = peer("fa2").bind(at, q, k, v).once()
    by = replace(at, problem=replace(at.problem, kind="backward"))
    taken_back = peer("fa2").bind(by, q, k, v).once()
    assert out.shape == (465, 4, 64) and [len(x) for x in taken_back] == [465, 666, 666]
    at_q, at_k = (ends.tolist() for ends in measure_inputs.offsets(LENGTHS, "cpu"))
    for (top, bottom), (first, last) in zip(pairwise(at_q), pairwise(at_k), strict=True):
        own = q[:, top:bottom], k[:, first:last], v[:, first:last]
        exact, _ = reference(*own, mask=mask, scale=64**-0.5)
        assert (out[top:bottom] - exact[0]).abs().max() < 5e-3
        dout = output_gradient(q, v)[:, top:bottom]
        exact = gradients(dout, *own, mask=MASKS[mask], scale=64**-0.5)[2:]
        rows = slice(top, bottom), slice(first, last), slice(first, last)
        for result, other, where in zip(taken_back, exact, rows, strict=True):
            assert (result[where] - other[0]).abs().max() < 2e-2


@pytest.mark.parametrize("name", ["cudnn", "efficient", "flex"])
def test_other_peers_say_that_they_are_not_timed_over_packed_sequences(name):
    at = Cell(VARLEN, LENGTHS)
    with pytest.raises(DeviceError, match="it is not timed over varlen sequences"):
        peer(name).bind(at, *measure_inputs.inputs(at, device="cpu"))


# ---- keys that come from memory -----------------------------------------------------------------


def test_keys_and_values_of_decoding_come_from_memory_in_every_call(gpu, monkeypatch):
    calls = []

    def refuse(name):
        calls.append(name)
        raise DeviceError("there is no cuDNN here")

    monkeypatch.setattr(rounds, "peer", refuse)
    laps = timed(*DECODING, repeats=(0, 1))
    assert sorted((lap.slug, lap.repeat) for lap in laps) == sorted(product(DECODING, (0, 1)))
    # six milliseconds went to three calls
    assert {lap.seconds for lap in laps} == {2e-3} == {lap.anchor_seconds for lap in laps}
    assert gpu.captured == [1] * 3 and calls == [CUDNN]  # graphs: two kernels and the anchor
    for slug in DECODING:
        assert len(set(gpu.turns(slug))) == 3, "each turn has keys of its own"
        assert all(time != other for time, other in pairwise(gpu.turns(slug)))
    assert len({keys for _, keys in gpu.ran}) == 3, "all kernels have the same"


def test_cudnn_goes_through_the_same_keys_without_a_mask(gpu, monkeypatch):
    bound = []

    class Peer:
        def bind(self, at, q, k, v):
            bound.append((at.problem.mask, k.data_ptr()))
            return Call(lambda: gpu.ran.append((CUDNN, k.data_ptr())))

    monkeypatch.setattr(rounds, "peer", lambda name: Peer())
    assert {lap.slug for lap in timed(DECODING[0])} == {DECODING[0], CUDNN}
    assert {mask for mask, _ in bound} == {"full"}
    ours, theirs = gpu.turns(DECODING[0]), gpu.turns(CUDNN)
    assert theirs == [keys for _, keys in bound] and set(ours) == set(theirs)


def test_there_are_ten_times_as_many_keys_as_the_l2_cache_holds():
    for sizes in (Sizes(1, 32, 8, 1, 1_024), Sizes(32, 32, 8, 1, 4_096)):
        size_in_bytes = cache_bytes(DENSE, sizes)
        assert size_in_bytes == 2 * sizes.batch * sizes.seqlen_k * 8 * 64 * 2
        assert buffers_for(DENSE, sizes) * size_in_bytes >= ROTATED_BYTES
    assert buffers_for(DENSE, Sizes(1, 1, 1, 1, 1)) == 512, "and not a million of the smallest"


# ---- what is wrong ------------------------------------------------------------------------------


def is_off(tensors):
    (tensors["out"] if "dq" not in tensors else tensors["dk"]).add_(0.5)


def reads_a_neighbour(tensors):
    """What leaves NaN of a neighbour in a row."""
    rows = tensors["out"] if "dq" not in tensors else tensors["dq"]
    rows[int(tensors["cu_seqlens_q"][1]) - 1] = math.nan


def forgets_rows_behind(tensors):
    end = int(tensors["cu_seqlens_q"][-1])
    (tensors["lse"][:, end:] if "dq" not in tensors else tensors["dq"][end:]).fill_(7)


def scales(name):
    return lambda tensors: tensors[name].mul_(1.5)


FEW_PACKED = VarlenSizes.of(((70, 90), (0, 3), (5, 0), (64, 64)), 2, 1)
FEW_DECODED = (Sizes(2, 4, 2, 1, 70), Sizes(1, 8, 2, 3, 40))
CHECKED = {
    KERNELS[0]: (Sizes(1, 3, 3, 130, 67),),
    BACKWARD: (Sizes(1, 3, 3, 130, 67),),
    PACKED_KERNELS[0]: (FEW_PACKED,),
    PACKED_BACKWARD: (FEW_PACKED,),
    **dict.fromkeys([*DECODING, "dec_fp16_d64_causal_r8n64_c3_fixed"], FEW_DECODED),
}
WRONG = [
    *product(CHECKED, [None, is_off]),
    *product([PACKED_KERNELS[0], PACKED_BACKWARD], [reads_a_neighbour, forgets_rows_behind]),
    *product([BACKWARD], [scales("dq"), scales("dk"), scales("dv")]),
]


@pytest.mark.parametrize(("slug", "wrong"), WRONG)
def test_a_right_kernel_passes_the_quick_check_and_a_wrong_one_does_not(
    gpu_with_torch, slug, wrong, monkeypatch
):
    gpu = gpu_with_torch
    gpu.checks(slug, *CHECKED[slug])
    if wrong is not None:
        gpu.wrong[slug] = wrong
        message = r"error .* (of|\(allowed) .* at |dq .* of .* dk .* of .* dv .* at "
        with pytest.raises(VerificationError, match=message):
            rounds.quick_check(cell(slug), kernel(slug))
        return
    if slug == KERNELS[0]:  # of what torch has on a CPU nothing is like it
        monkeypatch.setattr(rounds, "_expected", lambda at: None)
    rounds.quick_check(cell(slug), kernel(slug))
    beside_torch = slug[0] != "d" and slug != KERNELS[0]
    assert len(gpu.ran) >= len(CHECKED[slug]) + beside_torch
    assert bool(gpu.called) == beside_torch


@pytest.mark.parametrize("slug", [PACKED_KERNELS[0], BACKWARD])
def test_a_kernel_that_is_wrong_at_the_cells_own_sizes_alone_is_found(gpu_with_torch, slug):
    gpu_with_torch.checks(slug)
    rounds.quick_check(cell(slug), kernel(slug))
    gpu_with_torch.wrong[slug] = is_off
    with pytest.raises(VerificationError, match=r"differs from torch by .* at "):
        rounds.quick_check(cell(slug), kernel(slug))


def test_where_no_backend_of_torch_can_the_check_in_fp64_stands_alone(gpu, monkeypatch):
    backends = []

    def refuse(name):
        backends.append(name)
        raise DeviceError(f"{name} has no such head dims")

    monkeypatch.setattr(rounds, "peer", refuse)
    gpu.checks(KERNELS[0], *CHECKED[KERNELS[0]])
    rounds.quick_check(cell(KERNELS[0]), kernel(KERNELS[0]))
    assert backends == ["cudnn", "fa2", "efficient"]


# ---- what kernels are given ---------------------------------------------------------------------


def test_packed_kernels_are_given_all_sequences_with_the_same_offsets():
    q, k, v = measure_inputs.inputs(Cell(VARLEN, LENGTHS), device="cpu")
    assert q.shape == (1, 465, 4, 64) and k.shape == v.shape == (1, 666, 2, 64)
    plan = plan_of(PACKED_KERNELS[0])
    arguments = contender_of(plan).arguments(plan, q, k, v, LENGTHS)
    assert arguments[3].tolist() == [0, 300, 305, 400, 401, 465]
    assert arguments[4].tolist() == [0, 300, 370, 465, 466, 666]
    assert all(at.dtype == torch.int32 and at.is_contiguous() for at in arguments[3:5])
    into = contender_of(plan).outputs(plan, arguments)
    assert [tuple(x.shape) for x in into] == [(465, 4, 64), (4, 465)]
    # beside others of a cell of one length they are of equal ones
    q, k, v = measure_inputs.inputs(Cell(VARLEN, Sizes(3, 4, 2, 9, 7)), device="cpu")
    *_, at_q, at_k, _, _ = contender_of(plan).arguments(plan, q, k, v)
    assert (at_q.tolist(), at_k.tolist()) == ([0, 9, 18, 27], [0, 7, 14, 21])


def test_packed_kernels_of_e4m3_are_given_a_scale_for_each_head():
    plan = plan_of("fwd_e4m3_d64_causal_m64n64_varlen")
    tensors = measure_inputs.inputs(Cell(replace(VARLEN, dtype="e4m3"), LENGTHS), device="cpu")
    arguments = contender_of(plan).arguments(plan, *tensors, LENGTHS)
    assert arguments[0].dtype == torch.float8_e4m3fn and arguments[6] is None
    assert [tuple(x.shape) for x in arguments[7:10]] == [(1, 4, 1), (1, 2, 1), (1, 2, 64)]


@pytest.mark.parametrize("slug", [*PACKED_KERNELS, "bwd_fp16_d128_causal_m64n128_varlen"])
def test_packed_kernels_are_checked_where_they_go_wrong_soonest_and_like_they_are_timed(slug):
    plan, long = plan_of(slug), VarlenSizes.of([(16_384, 16_384)] * 20, 32, 8)
    around, mixed, tiny, like = quick_sizes(plan, long)
    assert {(0, 0), (0, 1), (plan.block_m + 1, plan.block_n - 1)} <= {*around.sequences}
    assert (0, 0) in mixed.sequences and tiny.batch > 64
    assert (like.heads, like.kv_heads) == (32, 8) and like.total_k <= 8 * 1_024


@pytest.mark.parametrize("sizes", [Sizes(128, 32, 8, 1, 2_048), Sizes(1, 512, 1, 1, 131_072)])
def test_decoding_is_checked_like_it_is_timed_and_never_at_large_sizes(sizes):
    for slug in DECODING:
        *_, like = decode_proof._quick(plan_of(slug), sizes)
        assert like.heads == sizes.heads and like.seqlen_q == sizes.seqlen_q
        assert like.batch <= 3 and like.seqlen_k <= min(sizes.seqlen_k, 32_768)
