"""Heads of a KV head that share a tile's rows: kernels on the simulated GPU, their emulation."""

from functools import partial
from typing import Any

import pytest
import torch

from fagen import registry, simulator
from fagen.arch import SM90
from fagen.errors import ScheduleError
from fagen.kinds.forward import Schedule
from fagen.kinds.forward.emulate import compute
from fagen.kinds.forward.emulate.rows import heads_of_a_tile, tiles_of
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.verify.varlen import case_error
from fagen.measure.sequences import Case
from fagen.render import render
from tests.often import some
from tests.tensors import normal
from tests.test_simulator import may_part, with_lanes_together

# whether rows are masked, warpgroups skip blocks, or have none in some tiles
DENSE = (
    "fwd_fp16_d64_causal_m128n128_packgqa",
    "fwd_bf16_d64_full_m192n64_packgqa_s3_q2",
    "fwd_fp16_d48v32_causal_m256n64_packgqa_q2_reusev_nointer",
)
VARLEN = (
    "fwd_fp16_d64_causal_m128n64_varlen_packgqa",
    "fwd_bf16_d64_full_m64n48_varlen_packgqa_q2",
    "fwd_fp16_d64_causal_m256n32_varlen_packgqa_s4_q2_nointer",
)
# V transposed before all tiles, which are dealt or drawn; in each, with sinks, of capped scores
FP8 = (
    "fwd_e4m3_d64_full_m128n64_packgqa_vrows_pretrans_pm1_pc32",
    "fwd_e4m3_d64_causal_m64n64_packgqa_vrows_pretrans_pm1_pc32",
    "fwd_e4m3_d64_causal_m128n64_sinkbf16_packgqa_vrows",
    "fwd_e4m3_d64_causal_m64n64_softcap_packgqa_vrows_pm1_pc32",
)
# groups that fill a warpgroup's rows; that leave some empty; of which some share tiles; none do
SIZES = (
    *((2, 8, 1, 17, 70), (1, 16, 2, 40, 200), (1, 5, 1, 65, 100), (2, 14, 1, 19, 19)),
    *((1, 65, 1, 3, 50), (2, 2, 2, 150, 90), (1, 8, 2, 70, 3), (1, 8, 2, 5, 0), (1, 64, 1, 1, 9)),
)


def built(slug: str) -> Any:
    plan = registry.plan_of(slug)
    kernel = render(plan).kernel
    return plan, simulator.build(with_lanes_together(kernel) if may_part(plan) else kernel)


@pytest.mark.parametrize("slug", some(DENSE, DENSE[:1]))
def test_heads_share_the_rows_of_a_tile(slug: str) -> None:
    plan, library = built(slug)
    dtype = getattr(torch, plan.dtype.torch)
    unit = torch.finfo(dtype).eps
    for seed, (batch, heads, kv_heads, seqlen_q, seqlen_k) in enumerate(SIZES):
        q = normal(batch, seqlen_q, heads, plan.head_dim, seed=seed, dtype=dtype)
        k = normal(batch, seqlen_k, kv_heads, plan.head_dim, seed=seed + 1, dtype=dtype)
        v = normal(batch, seqlen_k, kv_heads, plan.head_dim_v, seed=seed + 2, dtype=dtype)
        scale = plan.head_dim**-0.5
        out = torch.full((*q.shape[:3], plan.head_dim_v), 7.0, dtype=dtype)
        lse = torch.full((batch, heads, seqlen_q), 7.0)
        simulator.call(plan, library, seed=seed, q=q, k=k, v=v, scale=scale, out=out, lse=lse)
        expected, expected_lse = reference(q, k, v, mask=plan.mask.name, scale=scale)
        torch.testing.assert_close(out.double(), expected, rtol=2 * unit, atol=2 * unit)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)
        emulated, emulated_lse = compute(plan, q, k, v, scale)
        assert (emulated != out).float().mean() < 0.03  # but for the order of sums the same
        torch.testing.assert_close(emulated_lse, lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("slug", some(FP8, FP8[:1]))
def test_in_e4m3_each_keeps_the_descale_of_its_own_head(slug: str) -> None:
    """They are the bits of tiles of one head, in the emulation too."""
    both = [built(one) for one in (slug, slug.replace("_packgqa", ""))]
    plan = both[0][0]
    for seed, (batch, heads, kv_heads, seqlen_q, seqlen_k) in enumerate(SIZES):
        q, k, v = (
            normal(batch, length, count, plan.head_dim, seed=seed + i).to(torch.float8_e4m3fn)
            for i, (length, count) in enumerate(((seqlen_q, heads), *((seqlen_k, kv_heads),) * 2))
        )
        of_heads = normal(batch, heads, 1, seed=seed).abs() + 0.1
        of_v = normal(batch, kv_heads, plan.head_dim_v, seed=seed)
        given = {"q_descale": of_heads, "k_descale": of_heads[:, :kv_heads], "v_mean": of_v}
        given |= {"v_descale": of_v.abs() + 0.1, "k_mean": of_v[..., : plan.head_dim]}
        if plan.sink:
            given["sinks"] = normal(heads, seed=seed, dtype=torch.bfloat16)
        if plan.score.acts:
            given |= {"softcap": 3.0, "k_mean": None}
        call = {"q": q, "k": k, "v": v, "scale": plan.head_dim**-0.5, **given}
        results, emulated = [], []
        for one, library in both:
            out = torch.full((*q.shape[:3], plan.head_dim_v), 7.0, dtype=torch.bfloat16)
            lse = torch.full((batch, heads, seqlen_q), 7.0)
            simulator.call(one, library, seed=seed, **call, out=out, lse=lse)
            results.append((out, lse))
            emulated.append(compute(one, **call))
        torch.testing.assert_close(*results, rtol=0, atol=0)
        torch.testing.assert_close(*emulated, rtol=0, atol=1e-5)


@pytest.mark.parametrize("slug", some(VARLEN, VARLEN[:1]))
def test_they_do_where_sequences_have_lengths_of_their_own(slug: str) -> None:
    plan, library = built(slug)
    m, n = plan.block_m, plan.block_n
    lengths = ((3, 3), (17, 17), (1, n + 3), (m // 2 + 1, 5), (0, 4), (m + 3, 2 * n + 1), (5, 0))
    for seed, heads in enumerate((1, 2, 3, 5, 7, 8, 12, 13, 16, 65)):
        of = heads * 2, 2
        case = Case(lengths, *of, gap=3, used=True, poisoned=heads % 2 == 0)
        run = partial(simulator.call, plan, library, seed=seed)
        assert case_error(plan, run, case, seed=seed, device="cpu").ok, case


def test_so_many_share_tiles_as_make_the_fewest() -> None:
    plan = registry.plan_of(DENSE[0])
    shares = {(8, 4_096): 1, (8, 17): 4, (8, 9): 8, (8, 100): 8, (4, 521): 4, (5, 300): 5}
    assert {of: heads_of_a_tile(plan, *of) for of in shares} == shares


def test_of_varlen_sequences_a_group_alone_says_so() -> None:
    """A sequence's bits do not depend on the others, nor on its own length."""
    plan = registry.plan_of(VARLEN[0])
    shares = {1: 1, 2: 2, 3: 3, 5: 5, 6: 3, 7: 7, 8: 8, 10: 10, 11: 1, 12: 4, 14: 7, 64: 64, 65: 5}
    assert {group: heads_of_a_tile(plan, group, 9) for group in shares} == shares
    assert {group: heads_of_a_tile(plan, group, 9_999) for group in shares} == shares


@pytest.mark.parametrize("heads", [1, 3, 8, 64])
def test_tiles_have_each_query_of_each_head_once(heads: int) -> None:
    plan = registry.plan_of(DENSE[0])
    seen = [
        (int(query), int(head))
        for rows in tiles_of(plan, heads, 300, torch.device("cpu"))
        for query, head in zip(rows.query[rows.real], rows.head[rows.real], strict=True)
    ]
    assert sorted(seen) == [(query, head) for query in range(300) for head in range(heads)]
    assert SM90.wgmma_m % heads <= plan.tile.most_unused


@pytest.mark.parametrize(
    ("slug", "why"),
    [
        ("fwd_e4m3_d64_causal_m128n64_varlen_packgqa", "share tiles in 16 bits so far"),
        ("fwd_e4m3_d64_causal_m128n64_packgqa_sblock", "a block's rows are of one head"),
        ("fwd_e4m3_d64_causal_m128n64_packgqa_lazymax", "raised for rows of one head"),
        ("fwd_fp16_d64_causal_m128n64_packgqa_split4", "splits are of a head each"),
        ("fwd_fp16_d64_causal_m128n64_packgqa_noprod", "which copies several heads in a box"),
        ("fwd_fp16_d64_causal_m128n64_packgqa_c2", "pack_gqa = true"),
    ],
)
def test_what_does_not_go_with_them_is_refused(slug: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        Schedule.from_slug(slug)
