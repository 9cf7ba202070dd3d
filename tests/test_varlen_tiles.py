"""Varlen sequences: whose turn tiles are, and their order where L2 does not hold K and V."""

import math

import pytest
import torch

from fagen import simulator
from fagen.kinds.forward.structure import head_major
from fagen.measure.sequences import Case
from fagen.render import render
from tests.often import some
from tests.varlen_helpers import is_right, offsets, packed, planned

PING_PONG = "fwd_fp16_d64_causal_m128n64_varlen"  # which also skips blocks that are masked
THREE = "fwd_fp16_d64_full_m192n48_varlen_s3_q2"
FOUR = "fwd_bf16_d64_causal_m256n64_varlen_s4_q2_nointer"
HALVES = "fwd_fp16_d128_causal_m128n32_varlen_half"
FP8 = "fwd_e4m3_d64_full_m192n32_varlen_s3"
TIGHT = "fwd_fp16_d64_causal_m192n64_varlen_s3"  # skips as many blocks as can be in turns
SLUGS = (PING_PONG, THREE, FOUR, HALVES, FP8, TIGHT)
each_kernel = pytest.mark.parametrize("slug", some(SLUGS, (PING_PONG, FOUR, FP8)))

SHORT = ((7, 9), (64, 64), (1, 1))
# short ones, long ones, those whose last tile has rows for some; of few keys, of many, of none
MIXED = ((3, 3), (200, 90), (5, 7), (65, 70), (9, 0), (40, 40), (300, 100), *SHORT * 8)


@each_kernel
def test_short_sequences_between_long_ones_are_right_whatever_happens_when(slug: str) -> None:
    library = simulator.build(render(planned(slug)).kernel)
    cases = (Case(SHORT * 12, 3, 1, gap=2, poisoned=True), Case(MIXED, 2, 2), Case(MIXED, 2, 1))
    assert all(is_right(slug, library, case, seed) for seed, case in enumerate(cases))


@each_kernel
def test_its_bits_are_the_same_whichever_warpgroup_has_a_sequence(slug: str) -> None:
    """Sequences of the same numbers, of which each warpgroup has some."""
    plan, lengths, copies = planned(slug), (50, 200, 90), 6
    library = simulator.build(render(plan).kernel)
    dtype: torch.dtype = getattr(torch, plan.dtype.torch)
    q, k, v = packed([(length, length) for length in lengths], torch.float32, plan.head_dim)[:3]
    at = offsets(lengths * copies)
    named = {
        name: x[:, :1].repeat(copies, 1, 1).to(dtype) for name, x in (("q", q), ("k", k), ("v", v))
    }
    out = torch.full((len(named["q"]), 1, plan.head_dim_v), math.nan)
    out = out.to(getattr(torch, plan.out_dtype.torch))
    lse = torch.full((1, len(out)), math.nan)
    simulator.call(
        plan, library, **named, cu_seqlens_q=at, cu_seqlens_k=at, scale=0.125, out=out, lse=lse
    )
    for x in (out, lse.T):
        every = x.unflatten(0, (copies, sum(lengths)))
        assert not every.isnan().any() and all(torch.equal(result, every[0]) for result in every)


def test_as_many_blocks_are_skipped_in_turns_as_leave_a_stage() -> None:
    """With as many as there are stages these sequences wait for each other for ever."""
    tight = {
        slug: planned(slug).pipeline.skips_masked_blocks
        for slug in (TIGHT, TIGHT.removesuffix("_s3"))
    }
    assert list(tight.values()) == [True, False]
    lengths = ((193, 193), (167, 167), (187, 187), (190, 190), (112, 241), (193, 193))
    for slug in tight:
        library = simulator.build(render(planned(slug)).kernel)
        assert is_right(slug, library, Case(lengths, 1, 1), seed=1)


def test_who_passes_over_tiles_and_who_does_not() -> None:
    """Not one alone, nor where O goes through V's space, which all must have read."""
    passing = {slug: planned(slug).pipeline.skips_idle_warpgroups for slug in SLUGS}
    assert passing == dict.fromkeys(SLUGS, True)
    for slug in (
        "fwd_fp16_d64_causal_m64n64_varlen",
        "fwd_bf16_d64_causal_m128n48_varlen_q2_reusev",
        "fwd_fp16_d64_causal_m128n64_varlen_nointra",
        "fwd_fp16_d64_causal_m128n64",
    ):
        assert not planned(slug).pipeline.skips_idle_warpgroups


# ---- under a causal mask, where L2 is small -----------------------------------------------------

SMALL_CACHE = (
    "fwd_fp16_d64_causal_m64n64_varlen",
    "fwd_fp16_d64_causal_m128n64_varlen",  # in ping-pong, which skips blocks that are masked
    "fwd_bf16_d64_causal_m256n64_varlen_s4_q2_nointer",
)
# Four SMs are simulated: of five KV heads the last two fill up, and of many the last.
FEW = ((530, 530), (9, 0), (129, 129))
MANY = ((530, 530), (9, 0), (200, 331), (3, 3), (70, 9), (1, 400), (129, 129))
SHARED_OUT = (
    Case(FEW, 5, 5),
    Case(FEW, 15, 5, gap=1),
    Case(MANY, 5, 5, poisoned=True),
    Case(MANY * 5, 4, 4),  # more than a warp has lanes
    Case(((530, 530),), 4, 1),  # all heads are the last ones
    Case(((5, 0), (0, 5), (90, 0)), 6, 3),
)


def kernel_of(slug: str) -> str:
    """The text of a kernel to which the L2 cache is small."""
    text = render(planned(slug)).kernel
    large = f"kL2Bytes = {planned(slug).order.l2_bytes};"
    assert large in text
    return text.replace(large, "kL2Bytes = 0;")


@pytest.mark.parametrize("slug", some(SMALL_CACHE, SMALL_CACHE[:1]))
def test_first_heads_one_by_one_and_last_ones_by_length_are_all_there_are(slug: str) -> None:
    library = simulator.build(kernel_of(slug))
    assert all(is_right(slug, library, case, seed) for seed, case in enumerate(SHARED_OUT))


def test_more_sequences_than_a_block_has_threads_are_all_counted() -> None:
    slug = SMALL_CACHE[0]
    number = planned(slug).threads + 40
    case = Case(tuple((i % 3, i * 5 % 7) for i in range(number)), 1, 1, poisoned=True)
    assert is_right(slug, simulator.build(render(planned(slug)).kernel), case, seed=1)


def test_where_the_cache_holds_k_and_v_and_in_e4m3_classes_alone_count() -> None:
    full, eight = (
        planned(slug)
        for slug in ("fwd_fp16_d64_full_m64n64_varlen", "fwd_e4m3_d64_causal_m64n64_varlen")
    )
    assert not any(head_major(plan.schedule.values()) for plan in (full, eight))
    assert "kL2Bytes" not in render(full).kernel + render(eight).kernel
