"""The backward pass on a Hopper GPU: its numbers, their bits from call to call, strides, graphs."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from fagen import flow, registry
from fagen.dispatch.select import buildable
from fagen.kinds.backward import operands
from fagen.kinds.backward import verify as verification
from fagen.problem import Problem, Sizes
from fagen.runtime import op
from fagen.runtime.c_interface import call
from fagen.vocab import FORWARD
from tests.backward_helpers import NARROW, SPREAD, extreme_sizes
from tests.gpu.helpers import graph_of, spoil

pytestmark = pytest.mark.gpu

_ALL = [path.stem for path in registry.schedules("backward")]
COMMITTED = [slug for slug in _ALL if "varlen" not in slug]  # others: test_varlen_backward_gpu.py
SLUGS = list(dict.fromkeys([*COMMITTED, *SPREAD, *NARROW]))
CALLS = 50


@pytest.mark.parametrize("slug", SLUGS)
def test_gradients_are_near_fp64(pair_of, slug):
    plan, binary = pair_of(slug)
    assert (
        len(verification.VERIFICATION.errors(plan, binary, print))
        == len(verification.verification_sizes(plan)) + 1
    )


@pytest.mark.parametrize("slug", SLUGS)
def test_gradients_of_one_head_large_groups_and_any_rows_to_keys_are_near_fp64(pair_of, slug):
    plan, binary = pair_of(slug)
    # of so many sequences a thread block goes through all heads of a group
    many = [Sizes(140, heads, 1, plan.block_m + 3, plan.block_n + 1) for heads in (3, 6, 8)]
    for seed, sizes in enumerate((*extreme_sizes(plan), *many)):
        error = verification.size_error(
            plan, partial(call, plan, binary.library), sizes, seed, "cuda"
        )
        assert error.ok, error


MANY = ("bwd_fp16_d128_causal_m64n128", "bwd_fp16_d128_causal_m64n128_persist_post")


@pytest.mark.parametrize("slug", MANY)
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(65_537, 1, 1, 5, 9),
        Sizes(1, 65_537, 65_537, 5, 9),
        Sizes(2, 65_538, 2, 5, 9),
    ],
    ids=("sequences", "heads", "heads of a group"),
)
def test_gradients_of_more_than_65535_sequences_or_heads_are_near_fp64(pair_of, slug, sizes):
    plan, binary = pair_of(slug)
    error = verification.size_error(plan, partial(call, plan, binary.library), sizes, 1, "cuda")
    assert error.ok, error


@pytest.mark.parametrize("slug", SLUGS)
def test_dk_and_dv_have_the_same_bits_in_every_call(pair_of, slug):
    """And dq, which thread blocks add up in any order, is as near to fp64 each time."""
    plan, binary = pair_of(slug)
    sizes = Sizes(2, 4, 2, 1_023, 1_217)
    given, exact, rough = verification.case(plan, sizes, seed=1)
    first = None
    for _ in range(CALLS):
        found = verification.dense(plan, partial(call, plan, binary.library))(given)
        first = first or found
        assert all(map(torch.equal, found[1:], first[1:]))  # and the gradient of sinks
        assert verification.errors_of(sizes, found, exact, rough).ok


@pytest.mark.parametrize("slug", COMMITTED)
def test_the_second_call_into_the_same_workspace_is_as_right_as_the_first(pair_of, slug):
    plan, binary = pair_of(slug)
    sizes = Sizes(2, 4, 4, 300, 500)
    given, exact, rough = verification.case(plan, sizes)
    found = operands.outputs(plan, given)
    enqueue = operands.launch(plan, binary.library, given, found)
    for _ in range(3):
        enqueue()
        assert verification.errors_of(sizes, found, exact, rough).ok
        spoil(*found)


def packed(dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """q, k and v as slices of one projection."""
    widths = [x.shape[2] * x.shape[3] for x in (q, k, v)]
    whole = torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1)
    parts = whole.split(widths, dim=-1)
    return dout, *(
        part.unflatten(-1, x.shape[2:]) for part, x in zip(parts, (q, k, v), strict=True)
    )


def heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All stored (B, H, S, D)."""
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)


def one_row_for_all(dout: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """dout of strides 0, as a sum over rows leaves it."""
    return dout[:1, :1, :1].expand_as(dout), *others


@pytest.mark.parametrize("stored", [packed, heads_first, one_row_for_all])
@pytest.mark.parametrize("slug", COMMITTED)
def test_strides_are_free(pair_of, slug, stored):
    plan, binary = pair_of(slug)
    sizes = Sizes(2, 4, 2, 333, 333)
    dout, q, k, v = stored(*verification.inputs(plan, sizes, seed=2))
    tensors, exact, rough = verification.judged_by(plan, dout, q, k, v)
    (out,) = heads_first(tensors[4])
    found = op.load(binary)(*tensors[:4], out, *tensors[5:])
    assert verification.errors_of(sizes, found, exact, rough).ok


@pytest.mark.parametrize("slug", COMMITTED)
def test_a_graph_replays_it_on_other_numbers(pair_of, slug):
    plan, binary = pair_of(slug)
    sizes = Sizes(1, 4, 2, 257, 300)
    kernel = op.load(binary)
    given, *_ = verification.case(plan, sizes, seed=1)
    graph, results = graph_of(lambda: kernel(*given))
    other, exact, rough = verification.case(plan, sizes, seed=3)
    for old, new in zip(given, other, strict=True):
        if isinstance(old, Tensor):
            old.copy_(new)
    graph.replay()
    assert verification.errors_of(sizes, results, exact, rough).ok


@pytest.mark.parametrize("slug", COMMITTED)
def test_the_forward_kernels_own_out_and_lse_serve(pair_of, slug):
    """What training gives: out and lse of fagen's forward kernel, not of the reference."""
    plan, binary = pair_of(slug)
    forward = buildable(replace(Problem.of(plan.schedule), kind=FORWARD, deterministic=False))
    _, of_forward = flow.built(forward.schedules[0], binding=True)
    sizes = Sizes(2, 8, 2, 1_000, 1_100)
    (dout, q, k, v, _, _, scale, *given, _), exact, rough = verification.case(plan, sizes)
    out, lse = op.load(of_forward)(q, k, v, scale, *given)
    found = op.load(binary)(dout, q, k, v, out, lse, scale, *given)
    assert verification.errors_of(sizes, found, exact, rough).ok


def test_speeds_are_told_beside_cudnns(pair_of):
    plan, binary = pair_of("bwd_fp16_d128_causal_m64n128")
    speeds = verification.VERIFICATION.speeds(plan, binary, print)
    assert [speed.regime for speed in speeds] == ["sustained", "burst"]
    assert all(speed.cudnn_tflops and speed.tflops > 100 for speed in speeds)
