"""Split-KV of forward tiles: its schedules, what its plans launch, its emulation against fp64."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fagen.dispatch.rows import COMBINING, MOST, Row, clocks
from fagen.kinds.forward.cost import grid, seconds
from fagen.kinds.forward.emulate import emulate, emulate_fp8
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.structure import seen_ends
from fagen.kinds.forward.verify.dense import shape_error
from fagen.kinds.forward.verify.fp8 import fp8_error
from fagen.measure.inputs import cell_of, inputs
from fagen.problem import Sizes
from fagen.registry import plan_of
from fagen.render import kernel_text
from fagen.vocab import MASKS
from tests.cli_helpers import fagen
from tests.schedule_helpers import but

SLUGS = (
    "fwd_fp16_d128_causal_m128n128_split4",
    "fwd_bf16_d64_full_m128n128_split16_q2",
    "fwd_fp16_d256_causal_m128n64_split64",
    "fwd_bf16_d72v104_causal_m64n48_split3",
    "fwd_fp16_d128_full_m128n64_split5_pm2_smemtotals",
    "fwd_bf16_d96_causal_m192n80_split7_onlinemax",
    "fwd_fp16_d192_full_m128n80_split8_fill",
)


FP8 = (
    "fwd_e4m3_d128_full_m128n128_split4_nointer_vrows_pm1_pc64",
    "fwd_e4m3_d64_causal_m64n64_split3_pm1_pc32",
)


@pytest.mark.parametrize("slug", [*SLUGS, *FP8])
def test_its_schedule_reads_back_and_its_text_renders(slug):
    plan = plan_of(slug)
    assert plan.schedule.slug == slug and plan.schedule.grid.order == "persistent"
    assert plan.num_splits > 1 and "o" not in {row.name for row in plan.shared.rows}
    text = kernel_text(plan)
    assert f"kNumSplits = {plan.num_splits};" in text
    assert "atomic" not in text.replace("std::atomic", "").replace("#include <atomic>", "")
    assert "cudaMemset" not in text


def test_one_chunk_is_no_split():
    plan = plan_of(but("fwd_fp16_d64_causal_m128n64", {"num_splits": 1}).slug)
    assert plan.num_splits == 1
    assert [kernel.kernel for kernel in plan.launches.kernels] == ["attention_forward"]


@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 300),
    st.integers(0, 9_000),
    st.sampled_from(SLUGS),
)
def test_the_workspace_holds_a_record_for_each_row_of_each_chunk(
    batch, group, kv_heads, queries, keys, slug
):
    plan = plan_of(slug)
    heads = group * kv_heads
    sizes = dict(batch=batch, heads=heads, kv_heads=kv_heads, seqlen_q=queries, seqlen_k=keys)
    launches = plan.launches
    main, merge = launches.kernels
    assert (main.kernel, merge.kernel) == ("attention_forward", "combine_partial_outputs")
    assert main.overlaps and merge.overlaps and not launches.zeroed
    rows = batch * heads * queries
    assert launches.workspace.at(sizes) == 4 * (plan.head_dim_v + 2) * rows * plan.num_splits
    tiles = batch * heads * -(-queries // plan.block_m)
    assert main.grid.x.at(sizes) == tiles * plan.num_splits
    assert merge.grid.x.at(sizes) * (merge.threads // plan.combination.lanes) >= rows
    # chunks: whole blocks, equally long but for the last, and no more than there are
    step = plan.split_keys(keys, queries, batch * heads)
    assert step % plan.block_n == 0 and (keys == 0 or 0 < -(-keys // step) <= plan.num_splits)


@pytest.mark.parametrize("mask", ["full", "causal"])
@given(st.integers(1, 9), st.integers(1, 2_000), st.integers(1, 30_000))
def test_splits_that_fill_take_no_longer_than_any_other_number_of_them(mask, heads, queries, keys):
    """By rounds of 132 units that see a key, and few of those that take as long."""
    plan = plan_of(f"fwd_fp16_d192_{mask}_m128n80_split8_fill")
    costs, seen = plan.filling, keys - queries if mask == "causal" else keys
    blocks = math.ceil(keys / 80)

    def cost(splits):
        split = -(-blocks // splits)
        units = heads * sum(
            min(keys, max(0, seen + row + 128)) > first
            for row in range(0, queries, 128)
            for first in range(0, keys, split * 80)
        )
        combining = units * costs.combine_cost // 132
        return -(-units // 132) * (16 * split + costs.unit_cost) + combining, splits

    splits = min(range(1, 9), key=cost)
    assert plan.split_keys(keys, queries, heads) == 80 * -(-blocks // splits)


@pytest.mark.parametrize("mask", ["full", "causal"])
@given(st.integers(1, 9), st.integers(1, 2_000), st.integers(1, 30_000))
def test_rows_count_clocks_of_as_many_splits_as_the_launcher_takes(mask, heads, queries, keys):
    """A number of splits of their own took fewer clocks in one call of twelve, 15 % at most."""
    slug = f"fwd_fp16_d192_{mask}_m128n80_split8_fill"
    row = Row("", slug, step_clocks=100, tile_clocks=700, combine_clocks=1)
    tiles = math.ceil(queries / 128)
    split = plan_of(slug).split_keys(keys, queries, heads) // 80
    ends = seen_ends(MASKS[mask], 128, 80, queries, keys)
    rounds = math.ceil(heads * sum(math.ceil(end / split) for end in ends) / 132)
    taken = COMBINING + rounds * (100 * split + 700) + heads * queries // (128 * 132)
    expected = taken if heads * tiles <= 132 else MOST
    assert clocks(row.tiles, heads, heads, queries, keys) == expected


def test_splits_that_fill_are_as_many_as_rounds_of_sms_ask_for():
    plan = plan_of("fwd_fp16_d128_full_m128n128_split16_fill")
    keys = 360 * 128  # of blocks that the numbers below divide
    numbers = {9: 14, 16: 8, 22: 6, 33: 4, 44: 3, 66: 2, 88: 3, 99: 4, 132: 1}
    for tiles, splits in numbers.items():
        assert -(-keys // plan.split_keys(keys, 128, tiles)) == splits, tiles
    assert plan.split_keys(1) == 128  # no split without keys
    # sums over more keys than these are inexact
    assert -(-600_000 // plan.split_keys(600_000, 1, 132)) == 5


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(SLUGS),
    st.integers(1, 200),
    st.integers(0, 900),
    st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.integers(0, 99),
)
def test_its_emulation_keeps_the_rule_of_the_proof(slug, queries, keys, heads, seed):
    """Against fp64, beside torch's own rounding; rows without a key are 0 and minus infinity."""
    plan = plan_of(slug)
    cell = cell_of(plan, Sizes(1, *heads, queries, keys))
    error = shape_error(cell, partial(emulate, plan), *inputs(cell, seed=seed, device="cpu"))
    assert error.ok, error


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(FP8),
    st.integers(1, 150),
    st.integers(0, 700),
    st.sampled_from([(1, 1), (4, 2)]),
    st.integers(0, 99),
)
def test_in_e4m3_it_keeps_the_rule_beside_a_textbook(slug, queries, keys, heads, seed):
    """Its splits share a row's scale, and descales and means are applied once they are combined."""
    plan = plan_of(slug)
    cell = cell_of(plan, Sizes(1, *heads, queries, keys))

    def kernel(operands, scale):
        named = operands._asdict()
        return emulate_fp8(plan, **named, scale=scale, hopper_sums=False)

    error = fp8_error(plan, cell, kernel, *inputs(cell, seed=seed, device="cpu"))
    assert error.ok, error


@pytest.mark.parametrize("slug", SLUGS[:2])
def test_a_chunk_far_above_the_others_takes_all_weight(slug):
    """Scores that rise from chunk to chunk, by more than fp32's exponents hold."""
    plan = plan_of(slug)
    torch.manual_seed(0)
    dtype, keys = getattr(torch, plan.dtype.torch), 12 * plan.block_n
    q = torch.ones(1, 7, 2, plan.head_dim, dtype=dtype)
    rising = torch.arange(keys, dtype=torch.float32) // plan.block_n * 4
    for direction in (rising, rising.flip(0)):
        k = (direction[None, :, None, None] * torch.ones(1, 1, 1, plan.head_dim)).to(dtype)
        v = torch.randn(1, keys, 1, plan.head_dim_v).to(dtype)
        out, lse = emulate(plan, q, k, v, 1.0)
        exact, exact_lse = reference(q, k, v, mask=plan.mask.name, scale=1.0)
        finite = exact_lse > -math.inf
        assert torch.allclose(lse.double()[finite], exact_lse[finite], rtol=1e-6)
        assert (out.double() - exact).abs().max() < 8e-3


def test_the_bits_of_a_sequence_are_its_own():
    """Its chunks follow from its own length, so neighbours and other heads change nothing."""
    plan = plan_of(SLUGS[0])
    torch.manual_seed(0)
    q = torch.randn(3, 20, 4, 128).half()
    k, v = torch.randn(2, 3, 1_000, 2, 128).half()
    out, lse = emulate(plan, q, k, v, 0.1)
    for i in range(3):
        result = emulate(plan, q[i : i + 1], k[i : i + 1], v[i : i + 1], 0.1)
        assert torch.equal(result[0][0], out[i]) and torch.equal(result[1][0], lse[i])


def test_a_few_tiles_are_predicted_to_gain_by_chunks():
    sizes = Sizes(1, 32, 8, 128, 100_000)
    usual, split = (
        seconds(plan_of(slug).schedule.values(), sizes)
        for slug in ("fwd_fp16_d128_causal_m128n128", "fwd_fp16_d128_causal_m128n128_split4")
    )
    assert 3 < usual / split < 4.2  # 32 tiles, 128 chunks of them, 132 SMs
    assert grid(128, 128, "full", "persistent", sizes, num_splits=4) == (196, 1)
    # as many rounds of whole chunks as the SM with the most has
    assert grid(128, 128, "full", "persistent", sizes, num_splits=16)[1] == 4


@pytest.mark.parametrize("others", [(), ("fwd_fp16_d128_full_m128n128",), SLUGS[:1]])
def test_a_vendored_folder_says_what_becomes_of_a_workspace(others, tmp_path):
    """A kernel that draws tiles wants zeros there, one that splits keys leaves anything."""
    answer = fagen("vendor", "fwd_fp16_d128_causal_m128n128", *others, "-o", str(tmp_path / "it"))
    assert answer.exit_code == 0, answer.output
    (header,) = (tmp_path / "it" / "include").glob("*.h")
    text = " ".join(header.read_text().replace("//", "").split())
    assert ("zeros before each call: some kernels leave" in text) == (others == SLUGS[:1])
