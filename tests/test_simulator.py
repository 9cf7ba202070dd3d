"""Kernels' own text on the simulated GPU: right whatever happens when, and faults show."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fagen import registry, simulator
from fagen.errors import BuildError, DeviceError, VerificationError
from fagen.kinds.backward.plan import Plan
from fagen.kinds.backward.verify import Case, case, errors_of, inputs, judged_by
from fagen.problem import Sizes
from fagen.render import render
from fagen.simulator.translate import translated
from tests.backward_helpers import NARROW, SPREAD, extreme_sizes, planned
from tests.cli_helpers import QUANTIZER, fagen
from tests.often import some

DETERMINISTIC = ("bwd_fp16_d64_causal_m64n64_det", "bwd_bf16_d192_full_m64n64_det")
PAIRS = ("bwd_bf16_d256_causal_m64n64_dss1_c2",)
COMMITTED = tuple(path.stem for path in registry.schedules("backward"))
PERSISTENT = "bwd_fp16_d128_causal_m64n128_persist_post"
OFTEN = (SPREAD[0], SPREAD[2], SPREAD[8], SPREAD[10], DETERMINISTIC[0], PAIRS[0], PERSISTENT)


# in e4m3: V as it comes; V transposed in the kernel, a descale for each block; each block's PV
# added to O in parts, two at a time, or one while the next block's P is worked out
FP8 = (
    "fwd_e4m3_d64_full_m128n128",
    "fwd_e4m3_d128_full_m128n128_vrows_sblock",
    "fwd_e4m3_d96_causal_m128n64_nointra_pm1_pc32",
    "fwd_e4m3_d128_full_m128n64_vrows_pm1_pc64",
)
FORWARD = [path.stem for path in registry.schedules("forward") if "e4m3" not in path.stem]
FORWARD += FP8
# ping-pong; chunks; a cluster, V's space for O, promoted sums
FORWARD_OFTEN = (
    "fwd_fp16_d128_causal_m128n128",
    "fwd_fp16_d256_causal_m128n64_split4",
    "fwd_fp16_d256_full_m64n64_vspace_pm64_smemtotals_c2",
    FP8[0],
    FP8[2],
)


Found = tuple[bool, tuple[Tensor, ...]]


def backward(plan: Plan, library: Path, sizes: Sizes, seed: int) -> Found:
    """Whether dq, dk and dv keep the rule of the proof, and they."""
    return of_case(plan, library, sizes, seed, case(plan, sizes, seed=seed % 2, device="cpu"))


def of_case(plan: Plan, library: Path, sizes: Sizes, seed: int, of: Case) -> Found:
    """The same of tensors that are there."""
    given, exact, rough = of
    named = dict(zip((one.name for one in plan.signature.arguments), given, strict=True))
    into = {f"d{name}": torch.full_like(named[name], math.nan) for name in "qkv"}
    simulator.call(plan, library, seed=seed, **named, **into)
    return errors_of(sizes, tuple(into.values()), exact, rough).ok, tuple(into.values())


@pytest.mark.parametrize("slug", some((*SPREAD, *DETERMINISTIC, *PAIRS, *COMMITTED), OFTEN))
def test_the_backward_kernels_are_right_whatever_happens_when(slug):
    plan = replace(planned(slug), l2_share_bytes=1)  # sections of one head
    assert simulator.check(plan, render(plan).kernel, seeds=1) == (6 if plan.varlen else 10)


def for_multiprocessors(plan: Plan, count: int) -> str:
    """The text of a kernel that deals its tiles out as to so many."""
    kernel, most = render(plan).kernel, f"kMultiprocessors = {plan.multiprocessors};"
    assert kernel.count(most) == 1
    return kernel.replace(most, f"kMultiprocessors = {count};")


EXTREME = (*NARROW, *SPREAD, *DETERMINISTIC, *PAIRS)
EXTREME_OFTEN = NARROW[:1]


@pytest.mark.parametrize("slug", some(EXTREME, EXTREME_OFTEN))
def test_the_backward_kernels_are_right_for_one_head_large_groups_and_any_rows_to_keys(slug):
    plan = planned(slug)
    # a thread block has a head of a group where they are shared out, else all; and grids of two
    # heads of one batch at most, before and after
    in_parts = for_multiprocessors(plan, 1)
    assert in_parts.count("kMostGrid = 65535;") == 1
    for text in (render(plan).kernel, in_parts.replace("kMostGrid = 65535;", "kMostGrid = 2;")):
        library = simulator.build(text)
        for seed, sizes in enumerate(extreme_sizes(plan)):
            assert backward(plan, library, sizes, seed)[0], sizes


@pytest.mark.parametrize("slug", some((SPREAD[0], SPREAD[5], SPREAD[9]), (SPREAD[0],)))
def test_a_gradient_of_the_output_may_have_strides_of_0(slug):
    plan = planned(slug)
    sizes = Sizes(2, 3, 1, plan.block_m + 9, plan.block_n + 5)
    dout, *qkv = inputs(plan, sizes, device="cpu")
    of = judged_by(plan, dout[:1, :1, :1].expand_as(dout), *qkv)
    assert of[0][0].stride() == (0, 0, 0, 1)
    assert of_case(plan, simulator.build(render(plan).kernel), sizes, 0, of)[0]


@pytest.mark.parametrize("slug", some(FORWARD, FORWARD_OFTEN))
def test_the_forward_kernels_are_right_whatever_happens_when(slug):
    plan = registry.plan_of(slug)
    assert simulator.check(plan, render(plan).kernel, seeds=1) == (10 if plan.splits else 7)


def test_the_command_says_what_was_found():
    slug = "bwd_fp16_d64_causal_m64n64"
    answer = fagen("simulate", slug, "--seeds", "1")
    assert answer.exit_code == 0, answer.output
    assert answer.stdout == f"{slug}: 10 runs, all right\n"
    refused = fagen("simulate", QUANTIZER)
    assert refused.exit_code == VerificationError.exit_code
    assert "have no proof on the simulator" in refused.stderr


@pytest.mark.parametrize("stays", some(("", "_persist_post"), ("",)))
def test_gradients_in_a_fixed_order_are_the_same_bits_whatever_happens_when(stays):
    sizes = Sizes(1, 2, 1, 100, 300)
    found = {}
    slugs = [f"{slug}{stays}" for slug in ("bwd_fp16_d64_causal_m64n64", DETERMINISTIC[0])]
    for slug in slugs:
        plan = planned(slug)
        library = simulator.build(render(plan).kernel)
        runs = [backward(plan, library, sizes, seed)[1] for seed in range(0, 12, 2)]
        found[slug] = [all(map(torch.equal, column, runs[0])) for column in runs]
        assert all(torch.equal(one, runs[0][i]) for run in runs for i, one in enumerate(run) if i)
    assert all(found[slugs[1]])
    assert not all(found[slugs[0]]), "the order of additions never changed"


# of two that add in turns; and what is made known too early
ORDER_FAULTS = {
    "a part is added before its turn": "await_count(added, turn);",
    "it counts before it is there": "await_additions();\n",
    "a late one misses its phase": "shared.dq_full[adder]",
}


@pytest.mark.parametrize("name", some(ORDER_FAULTS, list(ORDER_FAULTS)[:2]))
def test_additions_in_order_need_each_of_their_waits(name):
    plan = planned(DETERMINISTIC[0])
    kernel, right = render(plan).kernel, ORDER_FAULTS[name]
    assert right in kernel
    broken = kernel.replace(right, "shared.dq_full[0]" if "full" in right else "")
    library = simulator.build(broken)
    sizes = Sizes(1, 2, 1, 64 * 5 + 3, 261)
    runs = [attempt(plan, library, sizes, seed) for seed in range(0, 16, 2)]
    dqs = [run and run[1][0] for run in runs]
    assert not all(dq is not None and torch.equal(dq, dqs[0]) for dq in dqs)


FAULTS = {
    "Q is not waited for": "shared.q_full[q.stage].wait(q.phase);",
    "nor is dO": "shared.dout_full[q.stage].wait(q.phase);",
    "others add before the first part is there": "await_count(added, min(turn, 1));",
    "the buffer of dQ is not waited for": "shared.dq_empty[part].wait(q.stage ^ 1);",
    "dS is used before all have met": "    barrier_sync(kAllConsumers, kConsumers * kWarpgroup);\n"
    "    QueryGradient",
    "S is read before it is there": "    wgmma_wait<1>();\n    fence_operand(s);",
    "dQ is overwritten before it has been read": "cute::tma_store_wait<0>();  // it has been read",
}


def attempt(plan: Plan, library: Path, sizes: Sizes, seed: int) -> Found | None:
    """What `backward` found, unless the kernel is stuck."""
    try:
        return backward(plan, library, sizes, seed)
    except DeviceError:
        return None


def is_right(plan: Plan, library: Path, sizes: Sizes, seed: int) -> bool:
    found = attempt(plan, library, sizes, seed)
    return found is not None and found[0]


@pytest.mark.parametrize("name", some(FAULTS, list(FAULTS)[1:3]))
def test_a_wait_that_is_missing_shows(name):
    plan = planned(SPREAD[0])
    kernel, wait = render(plan).kernel, FAULTS[name]
    assert wait in kernel
    broken = kernel.replace(wait, "QueryGradient" if "QueryGradient" in wait else "")
    library = simulator.build(broken)
    sizes = Sizes(1, 2, 1, 64 * 5 + 3, 261)
    assert not all(is_right(plan, library, sizes, seed) for seed in range(8))


# of thread blocks that stay, whose tiles share all that there is one of
PERSISTENT_FAULTS = {
    "K and V come while they are read": "shared.dout_empty[(dout.stage + kDoStages - 1)",
    "dV goes where dS is still read": "barrier_sync(kAllConsumers, kConsumers * kWarpgroup);  // a",
    "dK goes where dQ is still read": "empty.wait(dq_phase);",
    "dQ goes where dK is still read": "shared.dq_empty[part].wait(dq_phase);",
    "dS goes where dV is still read": "shared.dv_empty.wait(phase ^ 1);",
    "they are given back before they are read": "cute::tma_store_wait<0>();  // the space is free",
    "a gradient is stored before it is there": "full.wait(phase);\n#pragma unroll 1",
}


# dQ of sections that are done, by a warp of its own
ROUNDED = (
    PERSISTENT,
    "bwd_bf16_d64_full_m128n128_det_underdp_persist_post",
    "bwd_bf16_d48_causal_m64n128_persist_post",
)
ROUNDED_FAULTS = {
    "sums are read before they are there": (
        "if (int(acquire(added) - count) < 0) {\n    return false;",
        "if (false) {\n    return false;",
    ),
    "a piece is read before it has come": (
        "shared.piece_full[stage].wait(taken++ / kPieces % 2);",
        "taken++;",
    ),
    "a tile counts before its sums are there": (
        "await_additions();\n      release(\n",
        "release(\n",
    ),
}


def rounds_are_right(slug: str, change: tuple[str, str] = ("", "")) -> bool:
    """Of heads that have a section each, all but a few; `change` a wait in the kernel's text."""
    plan = replace(planned(slug), l2_share_bytes=1)
    kernel = for_multiprocessors(plan, 4)
    assert change[0] in kernel
    library = simulator.build(kernel.replace(*change))
    many = Sizes(2, 4, 4, 64 + 9, 2 * 128 + 3), Sizes(1, 6, 3, 130, 300), Sizes(3, 2, 2, 300, 131)
    return all(is_right(plan, library, sizes, seed) for seed in range(16) for sizes in many)


@pytest.mark.parametrize("slug", some(ROUNDED, ROUNDED[:1]))
def test_dq_of_sections_that_are_done_is_rounded_meanwhile(slug):
    assert rounds_are_right(slug)


@pytest.mark.parametrize("name", some(ROUNDED_FAULTS, list(ROUNDED_FAULTS)[:2]))
def test_who_rounds_needs_each_of_its_waits(name):
    assert not rounds_are_right(PERSISTENT, ROUNDED_FAULTS[name])


def tiles_are_right(old: str, new: str) -> bool:
    """With a change to the kernel's text."""
    plan = planned(PERSISTENT)
    kernel = render(plan).kernel
    assert kernel.count(old) == 1
    library = simulator.build(kernel.replace(old, new))
    # four thread blocks for 24 tiles of two steps and less, and for as many of one
    many = Sizes(2, 4, 4, 64 + 9, 2 * 128 + 3), Sizes(2, 4, 4, 60, 2 * 128 + 3)
    return all(is_right(plan, library, sizes, seed) for seed in range(12) for sizes in many)


@pytest.mark.parametrize("name", some(PERSISTENT_FAULTS, list(PERSISTENT_FAULTS)[1:2]))
def test_tiles_of_one_thread_block_need_each_of_their_waits(name):
    wait = PERSISTENT_FAULTS[name]
    assert not tiles_are_right(wait, f"if (false) {wait}")


def test_k_and_v_are_not_let_go_before_dq_is_there():
    let_go = "    arrive(shared.dout_empty[q.stage]);  // and K and V, if this was the last step\n"
    before = "    issue_dk(dk, d_scores);\n    wgmma_wait<1>();\n    fence_operand(dq);\n"
    assert not tiles_are_right(before + let_go, let_go + before)


def test_thread_blocks_that_stay_draw_all_tiles_though_none_has_a_row():
    plan = planned(PERSISTENT)
    assert backward(plan, simulator.build(render(plan).kernel), Sizes(2, 3, 3, 0, 300), 0)[0]


def test_a_barrier_that_nobody_arrives_at_is_told():
    plan = planned(SPREAD[0])
    kernel = render(plan).kernel
    arrival = "arrive(shared.q_empty[q.stage]);"
    assert arrival in kernel
    library = simulator.build(kernel.replace(arrival, ""))
    with pytest.raises(DeviceError, match="simulator, seed 0: nobody can go on") as refused:
        backward(plan, library, Sizes(1, 2, 1, 400, 100), 0)
    assert "1 threads from 0 on wait for the mbarrier at byte" in str(refused.value)
    # and the next call is as if nothing had been
    whole = simulator.build(kernel)
    assert backward(plan, whole, Sizes(1, 2, 1, 400, 100), 0)[0]


def test_one_arrival_too_many_is_told():
    plan = planned(SPREAD[0])
    kernel = render(plan).kernel
    arrival = "shared.k_full.arrive_and_expect_tx(sizeof(shared.k));"
    assert arrival in kernel
    library = simulator.build(kernel.replace(arrival, arrival * 2))
    with pytest.raises(DeviceError, match="more arrive at the mbarrier at byte"):
        backward(plan, library, Sizes(1, 1, 1, 400, 100), 0)


def test_an_instruction_that_it_does_not_know_is_refused_by_name():
    with pytest.raises(BuildError, match=r"does not know the instruction 'fence\.acq_rel\.gpu;'"):
        translated('void f() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }')
