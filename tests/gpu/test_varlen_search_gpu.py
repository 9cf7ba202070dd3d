"""A search's round over varlen sequences on a Hopper GPU, and what torch computes beside it."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from fagen.kinds.backward.oracle import gradients
from fagen.measure import rounds
from fagen.measure.gradients import attended_varlen, output_gradient, varlen_lengths
from fagen.measure.inputs import cell_of, inputs, offsets, softmax_scale
from fagen.measure.peers import peer
from fagen.measure.rounds import BRIEF, Kernel
from fagen.measure.verification import contender_of
from fagen.problem import Cell, Problem, VarlenSizes
from fagen.vocab import MASKS, PLAIN_MASKS

pytestmark = pytest.mark.gpu

SLUGS = (
    "fwd_fp16_d64_causal_m64n64_varlen",
    "fwd_e4m3_d64_causal_m64n64_varlen",
    "bwd_fp16_d64_causal_m64n64_varlen",
    "bwd_bf16_d128_full_m64n128_varlen",
)
MIXED = VarlenSizes.of([(300, 300), (5, 70), (95, 95), (1, 1), (700, 1_500), (64, 64)], 8, 2)
TINY = VarlenSizes.of([(1 + i * 37 % 64,) * 2 for i in range(1_024)], 16, 16)


@pytest.mark.parametrize("slug", SLUGS)
def test_a_search_checks_and_times_a_kernel_beside_flashattention_2(
    built_together: Any, slug: str
) -> None:
    built = built_together(SLUGS)(slug)
    kernel = Kernel(slug, built.binary.library)
    for sizes in (MIXED, TINY):
        case = cell_of(built.plan, sizes)
        rounds.quick_check(case, kernel)
        laps = rounds.side_by_side(case, [kernel], kernel, regime=BRIEF, repeats=(0, 1))
        assert {lap.slug for lap in laps} == {slug, "fa2"}
        assert all(0 < lap.seconds < 1e-2 for lap in laps)


@pytest.mark.parametrize("mask", list(PLAIN_MASKS))
def test_torchs_packed_passes_are_near_fp64_sequence_by_sequence(mask: str, hopper: None) -> None:
    case = Cell(Problem("fp16", 64, 64, mask, kind="backward", lengths="varlen"), MIXED)
    q, k, v = inputs(case)
    lengths = varlen_lengths(MIXED, q.device)
    made = attended_varlen(q[0], k[0], v[0], lengths, causal=mask == "causal")
    assert made.lse.shape == (MIXED.heads, MIXED.total_q)
    found = peer("fa2").bind(case, q, k, v).once()
    at_q, at_k = (at.tolist() for at in offsets(MIXED, "cpu"))
    dout, scale = output_gradient(q, v), softmax_scale(64)
    for (top, bottom), (first, last) in zip(pairwise(at_q), pairwise(at_k), strict=True):
        rows, keys = slice(top, bottom), slice(first, last)
        own = dout[:, rows], q[:, rows], k[:, keys], v[:, keys]
        out, lse, *exact = gradients(*own, mask=MASKS[mask], scale=scale)
        assert (made.out[rows] - out[0]).abs().max() < 5e-3
        assert (made.lse[:, rows] - lse[0]).abs().max() < 1e-3
        for one, other, of in zip(found, exact, (rows, keys, keys), strict=True):
            assert (one[of] - other[0]).abs().max() < 0.02 * (1 + other.abs().max())


def test_gradients_are_given_what_torch_computed(built_together: Any) -> None:
    built = built_together(SLUGS)(SLUGS[2])
    case = cell_of(built.plan, MIXED)
    given = contender_of(built.plan).arguments(built.plan, *inputs(case), MIXED)
    names = [one.name for one in built.plan.signature.arguments]
    named = dict(zip(names, given, strict=False))
    assert named["out"].shape == (MIXED.total_q, 8, 64) and named["out"].dtype == torch.float16
    assert named["lse"].shape == (8, MIXED.total_q) and named["lse"].isfinite().all()
