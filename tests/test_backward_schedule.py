"""A schedule of the backward pass: its keys and slug, what is refused, and its ledgers."""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fagen import registry
from fagen.arch import SM90
from fagen.errors import OverBudget, ScheduleError
from fagen.kinds.backward.formulae import SYMBOLS, shared_formulae
from fagen.kinds.backward.keys import Schedule
from fagen.kinds.backward.rules import DQ_BY, KEPT, PARTITIONS
from fagen.ledger import rows
from fagen.problem import Problem, Sizes, flops
from fagen.render import kernel_text
from fagen.vocab import MASKS, SIXTEEN_BITS
from tests.backward_helpers import planned
from tests.schedule_helpers import amounts


@st.composite
def keys(draw: st.DrawFn) -> dict[str, object]:
    """Draw keys that keep every rule but those between them."""
    said = dict(
        split=draw(st.sampled_from([None, *PARTITIONS])),
        dq_by=draw(st.sampled_from([None, *DQ_BY])),
        dq_slices=draw(st.sampled_from([None, 1, 2])),
        intra_warpgroup=draw(st.booleans()),
        under_dp=draw(st.booleans()),
        kept=draw(st.sampled_from([None, *KEPT])),
    )
    return {key: value for key, value in said.items() if value is not None} | dict(
        dtype=draw(st.sampled_from(sorted(SIXTEEN_BITS))),
        head_dim=draw(st.integers(2, 32)) * 8,
        head_dim_v=draw(st.integers(2, 32)) * 8,
        mask=draw(st.sampled_from(sorted(MASKS))),
        block_m=draw(st.sampled_from([64, 80, 96, 112, 128])),
        block_n=draw(st.sampled_from([64, 128, 192])),
        stages=draw(st.integers(1, 4)),
        do_stages=draw(st.integers(1, 4)),
        ds_stages=draw(st.integers(1, 2)),
    )


def test_both_head_dims_dtypes_and_masks_are_committed():
    committed = [registry.read(path).values() for path in registry.schedules("backward")]
    cases = {(keys["dtype"], keys["head_dim"], keys["mask"]) for keys in committed}
    assert cases == {(t, d, m) for t in ("fp16", "bf16") for d in (64, 128, 256) for m in MASKS}


def test_what_is_left_out_follows_from_what_the_slug_says():
    keys = dict(dtype="fp16", head_dim=64, mask="full", block_m=128, block_n=128)
    schedule = Schedule.make(**keys, stages=1)
    assert schedule.backward.head_dim_v == 64
    assert schedule.pipeline.do_stages == schedule.pipeline.stages == 1
    assert schedule.slug == "bwd_fp16_d64_full_m128n128_s1"
    warps = schedule.warps
    assert (warps.producer_registers, warps.consumer_registers) == (40, 232)


@pytest.mark.parametrize("slug", ["bwd_fp16_d96_full_m64n128", "bwd_bf16_d64_full_m64n128"])
def test_a_tile_whose_dq_does_not_part_is_refused_with_one_that_does(slug):
    with pytest.raises(ScheduleError, match=r"block_m = 64 does not go with block_n = 128") as no:
        registry.from_slug(f"{slug}_dqall")
    assert "slabs of" in str(no.value) and "use block_n = 64" in str(no.value)
    assert planned(slug.replace("n128", "n64")).dq_columns in (64, 96)
    # left out, one warpgroup computes it all
    alone = planned(slug)
    assert (alone.dq_by, alone.dq_parts, alone.dq_columns) == ("one", 1, alone.head_dim_padded)


@pytest.mark.parametrize(
    ("slug", "registers"),
    [  # of a producer, a consumer, the one that computes dQ
        ("bwd_fp16_d96_full_m64n128", (32, 232, 240)),
        ("bwd_bf16_d72_causal_m64n128", (32, 232, 240)),
        ("bwd_fp16_d128v112_full_m64n128_dqone", (32, 232, 240)),
        ("bwd_fp16_d128_full_m64n128_dqone", (24, 232, 248)),
        ("bwd_fp16_d64_full_m64n128", (24, 232, 248)),
        ("bwd_fp16_d128_full_m64n128", (40, 232, 232)),
        ("bwd_fp16_d96_full_m64n128_persist", (40, 224, 240)),
    ],
)
def test_a_producer_of_several_boxes_has_registers_for_them(slug, registers):
    warps = planned(slug).schedule.warps
    assert (warps.producer_registers, warps.consumer_registers, warps.dq_registers) == registers
    assert sum(registers) <= 512 - 8, "three warpgroups share the file"


@pytest.mark.parametrize(
    ("slug", "parts"),
    [
        ("bwd_fp16_d256_full_m64n64", (128, 128)),
        ("bwd_bf16_d192v128_causal_m64n64", (128, 64)),
        ("bwd_bf16_d160_causal_m64n64", (96, 64)),
        ("bwd_fp16_d64v256_full_m64n64", (64,)),
    ],
)
def test_wide_heads_are_parted_by_gradients_and_dq_by_whole_slabs(slug, parts):
    plan = planned(slug)
    assert (plan.partition, plan.consumers, plan.dq_parts) == ("gradients", 2, len(parts))
    assert (plan.dq_columns, plan.dq_rest) == (parts[0], parts[-1])
    assert [role.name for role in plan.roles] == ["dV consumer", "dK consumer", "producer"]
    assert len(plan.ledgers.by_role) == 2


@pytest.mark.parametrize(
    ("slug", "cure"),
    [
        ("bwd_fp16_d128_full_m128n128", {"block_m": 64}),
        ("bwd_fp16_d96_full_m128n128", {"block_m": 64}),
        ("bwd_fp16_d256_full_m64n64_s3", {"stages": 2}),
        ("bwd_fp16_d128_full_m64n128_s4", {"stages": 2}),
        ("bwd_fp16_d128_full_m64n128_pr240", {"producer_registers": None}),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(slug, cure):
    schedule = registry.from_slug(slug)
    with pytest.raises(OverBudget, match="does not fit an SM") as refused:
        registry.plan(schedule)
    ((key, value),) = cure.items()
    written = f"{key} left out" if value is None else f"{key} = {value}"
    assert re.search(rf"with {written}\b", str(refused.value)), refused.value
    assert registry.plan(schedule.but(**cure))


def test_where_nothing_near_fits_it_says_so():
    with pytest.raises(OverBudget, match="nothing near it fits"):
        planned("bwd_fp16_d256_full_m64n64_s4_dos4")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(keys())
def test_a_plan_fits_and_its_text_renders(keys):
    try:
        plan = registry.plan(Schedule.make(**keys))
    except (OverBudget, ScheduleError):
        return
    assert plan.shared_bytes <= SM90.smem_per_block
    registers = dict(zip(plan.roles, plan.ledgers.by_role, strict=False))
    for role, ledger in registers.items():
        assert ledger.total <= role.registers <= SM90.setmaxnreg_max
    assert not plan.ledgers.over()
    parts = (*(plan.dq_columns,) * (plan.dq_parts - 1), plan.dq_rest)
    assert sum(parts) * 64 == plan.block_m * plan.head_dim_padded
    slab = plan.ds_slab if plan.dq_transposed else plan.qk_slab
    assert all(columns % slab == 0 for columns in parts)
    assert plan.slug in kernel_text(plan)
    assert Schedule.from_slug(plan.slug) == plan.schedule


# FlashAttention-3's tiles (hopper/flash_bwd_launch_template.h), and the sums of its shared memory
# without barriers; the statistics of its rows lie without gaps
FLASH_ATTENTION_3 = {
    (64, 128, 128): 198_656,
    (96, 64, 128): 156_672,
    (128, 64, 128): 197_632,
    (128, 80, 128): 231_424,
    # of wide heads P lies in shared memory too, and dO and dS have one buffer
    (192, 64, 96): 222_208,
    (256, 64, 80): 201_728,
}


@pytest.mark.parametrize("tile", FLASH_ATTENTION_3, ids=str)
def test_the_arrays_of_flash_attention_3_take_as_many_bytes_by_our_formulae(tile):
    """Whether or not keys say them: a consumer has 64 keys, of which 96 and 80 are no multiples.

    P lies in shared memory by gradients alone, with tiles of 64 x 64. And of 256 columns their dQ
    is added up from registers, by atomics, where ours always passes through shared memory.
    """
    head_dim, block_m, block_n = tile
    wide = head_dim > 128
    stages = 1 if wide else 2
    numbers = (block_m, block_n, head_dim, head_dim, head_dim, 1, 1, 2, stages, stages, 2)
    sizes = dict(zip(SYMBOLS, numbers, strict=True))
    found = {row.name: row.amount for row in rows(sizes, 1, shared_formulae, (wide, 1))}
    own = ({"p"} if wide else set()) | ({"dq"} if head_dim < 256 else set())
    ours = sum(found[name] for name in {"k", "v", "q", "do", "ds"} | own)
    their_statistics = 2 * 2 * 4 * (-(-block_m // 64) * 64)  # LSEs and deltas of whole 64 rows
    assert ours + their_statistics == FLASH_ATTENTION_3[tile]
    if wide:
        with pytest.raises(ScheduleError, match=f"tile.block_n = {block_n} must be .* steps of 64"):
            registry.from_slug(f"bwd_fp16_d{head_dim}_full_m{block_m}n{block_n}")
    else:
        assert found["statistics"] == 2 * 2 * 16 * block_m  # as tensor cores multiply them


@pytest.mark.parametrize("tile", [(64, 128, 128), (128, 64, 128)], ids=str)
def test_of_its_tiles_that_keys_can_say_the_ledger_adds_what_is_rounded_up(tile):
    head_dim, block_m, block_n = tile
    shared = planned(f"bwd_fp16_d{head_dim}_causal_m{block_m}n{block_n}").shared
    ours = amounts(shared)
    assert ours.pop("statistics") == 2 * 32 * block_m and ours.pop("barriers") == 1_024
    assert sum(ours.values()) == FLASH_ATTENTION_3[tile] - 2 * 2 * 4 * block_m


def test_its_tile_of_80_rows_takes_all_of_shared_memory():
    plan = planned("bwd_fp16_d128_full_m80n128")
    statistics, ones, barriers = 2 * 80 * 16, 3 * 128, 16 * 8
    arrays = FLASH_ATTENTION_3[128, 80, 128] - 2 * 2 * 4 * 128
    assert arrays + statistics + ones + barriers == plan.shared_bytes == SM90.smem_per_block
    assert (plan.dq_transposed, plan.shares_rows, plan.dq_columns) == (True, True, 80)


@pytest.mark.parametrize(
    ("slug", "rows", "kept"),
    [
        ("bwd_fp16_d64_full_m96n128", 48, {}),
        ("bwd_fp16_d64_full_m96n128_keepk", 48, {"k": 16}),
        ("bwd_bf16_d64_full_m112n64_keepk", 112, {"k": 16}),
    ],
)
def test_64_columns_of_dq_part_by_rows_and_keys_are_as_many_registers(slug, rows, kept):
    plan = planned(slug)
    assert (plan.dq_transposed, plan.shares_rows, plan.dq_columns) == (True, False, rows)
    found = amounts(plan.registers)
    assert {name: found[name] for name in ("k",) if name in found} == kept
    names = [gemm.name for gemm in plan.gemms]
    assert ("kept" in names) == bool(kept) and "scores" in names


def test_the_explanation_solves_for_the_widest_heads():
    said = planned("bwd_fp16_d64_full_m128n128").explained()
    widest = [float(found) for found in re.findall(r"so d <= .* = ([\d.]+)$", said, re.M)]
    assert len(widest) == 2 and all(64 <= d < 96 for d in widest)
    with pytest.raises(OverBudget):
        planned("bwd_fp16_d80_full_m128n128")
    assert "block_m·block_n·ds_stages·e" in said


def test_the_explanation_solves_for_v_where_a_consumer_has_dv_alone():
    said = planned("bwd_bf16_d256_full_m64n64_dss1_intra_c2").explained()
    widest = re.findall(r"so (d|d_v) <= .* = ([\d.]+)$", said, re.M)
    assert [key for key, _ in widest] == ["d", "d_v", "d"]
    assert all(float(found) >= 256 for _, found in widest)


def test_launches_and_workspace_are_those_of_whole_blocks():
    plan = planned("bwd_fp16_d128_causal_m64n128")
    sizes = dict(batch=2, heads=6, kv_heads=3, seqlen_q=130, seqlen_k=129)
    before, main, shares, after = plan.launches.kernels
    for grid in (before.grid, after.grid):
        assert [one.at(sizes) for one in (grid.x, grid.y, grid.z)] == [3, 6, 2]
    assert main.grid.x.at(sizes) == 2 * 3 * 2
    assert [one.at(sizes) for one in (shares.grid.x, shares.grid.y, shares.grid.z)] == [3, 3, 2]
    a_block = 4 * 64 * 128 + 32 * 64 + 128  # and a counter, in a line of its own
    assert plan.launches.workspace.at(sizes) == 3 * 6 * 2 * a_block
    assert plan.launches.shares and not plan.launches.zeroed


def test_thread_blocks_that_stay_are_no_more_than_multiprocessors():
    plain, stays = (planned(f"bwd_fp16_d128_causal_m64n128{end}") for end in ("", "_persist"))
    resident = [[each.grid.resident for each in of.launches.kernels] for of in (plain, stays)]
    assert resident == [[False] * 4, [False, True, False, False]]
    assert stays.record_bytes == plain.record_bytes  # a second counter has room beside the first
    rounds = planned("bwd_fp16_d128_causal_m64n128_persist_post")
    last = rounds.launches.kernels[-1].grid
    assert last.resident and last.per_sm * rounds.row_threads == 2_048
    assert rounds.record_bytes == plain.record_bytes  # and two more
    assert rounds.shared_bytes == stays.shared_bytes + 6 * 4_096  # six pieces on their way


def test_flops_are_two_and_a_half_times_those_of_the_forward_pass():
    sizes, of = Sizes(2, 4, 2, 300, 500), planned("bwd_fp16_d128_causal_m64n128").schedule
    assert Problem.of(of) == Problem("fp16", 128, 128, "causal", "fp16", "", 0, "backward")
    assert flops(Problem.of(of), sizes) == 2.5 * flops(Problem("fp16", 128, 128, "causal"), sizes)
    own_v = Problem("fp16", 128, 64, "full", kind="backward")
    assert flops(own_v, sizes) == 2 * 2 * 4 * (3 * 128 + 2 * 64) * 300 * 500
