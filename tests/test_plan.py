"""What a schedule is worked out to: the numbers of Plans, and what holds for every one of them."""

import dataclasses
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from fagen import registry
from fagen.arch import SM90
from fagen.errors import OverBudget, ScheduleError
from fagen.kind import Plan
from fagen.kinds.combine.plan import LOAD_BYTES
from fagen.kinds.decode.rules import share
from fagen.problem import Problem, Sizes, flops
from fagen.registry import plan_of
from fagen.render import kernel_text
from fagen.schedule import Schedule
from fagen.vocab import PLAIN_MASKS
from tests.combine_helpers import SPREAD as COMBINING
from tests.decode_helpers import SPREAD as DECODING
from tests.strategies import (
    backward_keys,
    combining,
    decoding,
    fp8_schedules,
    quantizers,
    schedules,
)

# ---- numbers ------------------------------------------------------------------------------------


def swizzled(head_dim: int, padded: int, swizzle: int, slabs: int) -> tuple[str, dict[str, Any]]:
    """The widest swizzle that divides the padded row; block_n does not count."""
    facts = dict.fromkeys(("tile.head_dim_padded", "tile.head_dim_v_padded"), padded)
    facts |= dict.fromkeys(("tile.qk_swizzle.bytes", "tile.v_swizzle.bytes"), swizzle)
    facts |= dict.fromkeys(("tile.qk_slab", "tile.v_slab"), padded // slabs)
    return f"fwd_fp16_d{head_dim}_causal_m128n64_reusev", facts


def skips(slug: str, blocks: bool, steps: bool = False) -> tuple[str, dict[str, Any]]:
    """Consumers that skip masked blocks; of three those that skip steps where they have no rows."""
    return f"fwd_{slug}", {"pipeline.skips_masked_blocks": blocks, "pipeline.skips_steps": steps}


def maxima(slug: str, *, lazy: bool, skips: bool) -> tuple[str, dict[str, Any]]:
    """When row maxima are raised, and whether warps vote on it."""
    return f"fwd_{slug}", {"softmax.lazy_max": lazy, "softmax.skips_rescaling": skips}


def dealt(slug: str, threads: int, launched: int, usable: int) -> tuple[str, dict[str, Any]]:
    """Registers as the hardware deals them: of a thread at launch, and what a consumer may use."""
    numbers = {"threads": threads, "launch_registers": launched, "ledgers.registers.limit": usable}
    return f"fwd_fp16_d64_full_{slug}", numbers


def roles(slug: str, producer: int, consumer: int, dq: int) -> tuple[str, dict[str, Any]]:
    """Registers of a producer, which needs more for several boxes, and of consumers."""
    names = ("producer_registers", "consumer_registers", "dq_registers")
    return f"bwd_{slug}", dict(zip(names, (producer, consumer, dq), strict=True))


def parted(slug: str, *parts: int) -> tuple[str, dict[str, Any]]:
    """Wide heads are parted by gradients, and dQ by whole slabs."""
    columns = {"dq_parts": len(parts), "dq_columns": parts[0], "dq_rest": parts[-1]}
    return f"bwd_{slug}", {"partition": "gradients", "consumers": 2, **columns}


def transposed(slug: str, rows: int, shares: bool = False) -> tuple[str, dict[str, Any]]:
    """Where a step has no whole 64 rows; 64 columns of dQ part by rows."""
    return f"bwd_{slug}", {
        "dq_transposed": True,
        "dq_row_step": 0 if shares else rows,
        "dq_columns": rows,
    }


FACTS = (
    (
        "fwd_fp16_d128_causal_m128n128",
        {
            "shared_bytes": 32_768 + 65_536 + 65_536 + 32_768 + 1_024,
            "threads": 384,
            "tile.o_columns": 128,
            "softmax.lazy_max": True,
            "softmax.max_partial_sum": 2.0**15,
            "softmax.skips_rescaling": True,
            "pipeline.q_stages": 1,
        },
    ),
    (
        "fwd_e4m3_d128_full_m128n128",
        {
            "shared_bytes": 16_384 + 32_768 + 32_768 + 32_768 + 1_024,
            "tile.o_columns": 128,
            "dtype.name": "e4m3",
            "out_dtype.name": "bf16",
            "descales": True,
            "v_rows": False,
            "scales.by_block": False,
            "tile.qk_slab": 128,
            "tile.o_slab": 64,
            "tile.v_slab": 128,
            "softmax.lazy_max": False,
            "softmax.skips_rescaling": True,  # where no maximum of a warp grew
        },
    ),
    ("fwd_fp16_d128_causal_m128n128_q2", {"pipeline.q_stages": 2}),
    *(
        swizzled(*numbers)
        for numbers in (
            *((16, 16, 32, 1), (24, 32, 64, 1), (64, 64, 128, 1), (72, 80, 32, 5), (80, 80, 32, 5)),
            *((96, 96, 64, 3), (128, 128, 128, 2), (192, 192, 128, 3), (248, 256, 128, 4)),
        )
    ),
    # V transposed has rows of block_n bytes
    *(
        (f"fwd_e4m3_d64_full_m128n{n}", {"tile.v_swizzle.bytes": bytes, "tile.v_slab": bytes})
        for n, bytes in ((96, 32), (128, 128), (160, 32), (192, 64))
    ),
    (
        "fwd_e4m3_d80v48_full_m128n128",  # head dims are filled up to 32
        {
            "tile.head_dim_padded": 96,
            "tile.head_dim_v_padded": 64,
            "tile.qk_swizzle.bytes": 32,
            "tile.o_swizzle.bytes": 128,
        },
    ),
    # row sums by the tensor cores are eight columns of the PV GEMM
    *(
        (
            f"fwd_fp16_d64_causal_m128n128{end}",
            {
                "softmax.sum_by_tensor": columns == 72,
                "tile.head_dim_v_padded": 64,
                "tile.o_columns": columns,
            },
        )
        for end, columns in (("", 64), ("_tensorsum_onlinemax", 72))
    ),
    (
        "fwd_fp16_d128_causal_m128n128_onlinemax",
        {"softmax.lazy_max": False, "softmax.skips_rescaling": False},
    ),
    ("fwd_bf16_d128_causal_m128n128", {"softmax.max_partial_sum": 2.0**12}),
    ("fwd_fp16_d128_full_m128n128_onlinemax_t2", {"softmax.skips_rescaling": True}),
    (
        "fwd_e4m3_d128_full_m128n128_lazymax",
        {"softmax.lazy_max": True, "softmax.skips_rescaling": True},
    ),
    # both warpgroups' rows end in the same block of keys
    skips("fp16_d64_causal_m128n128", False),
    skips("fp16_d64_causal_m128n96", True),
    skips("fp16_d64_causal_m192n128", True, True),
    skips("fp16_d64_causal_m256n64_s3", True),
    skips("fp16_d64_full_m192n128", False),
    skips("fp16_d64_causal_m192n128_nointra", False),
    skips("e4m3_d64_causal_m192n128", True, True),
    skips("e4m3_d64_full_m192n128", False),
    # only where K can be prefetched before O has left V's space: 2 blocks, or 3 and room for 2
    skips("fp16_d256_causal_m128n64_reusev_nointer", True),
    skips("fp16_d256_causal_m128n48_reusev_nointer", False),
    skips("fp16_d256_causal_m128n48_s3_reusev_nointer", True),
    skips("fp16_d128_causal_m192n64_reusev_nointer", False),
    skips("fp16_d128_causal_m192n64_s3_reusev_nointer", True, True),
    skips("fp16_d128_causal_m192n64", True, True),  # O needs no V to be gone
    dealt("m64n64", 256, 255, 232),
    dealt("m128n64", 384, 168, 232),
    dealt("m192n64", 512, 128, 160),
    dealt("m256n64", 640, 96, 112),
    dealt("m64n64_noprod", 128, 255, 255),
    dealt("m128n64_noprod", 256, 255, 255),
    dealt("m192n64_noprod", 384, 168, 168),
    dealt("m256n64_noprod", 512, 128, 128),
    (
        "fwd_fp16_d128_causal_m128n128_reusev_noprod_persistent",
        {"producer_registers": 0, "consumer_registers": 0, "roles": (), "producer_warp": False},
    ),
    roles("fp16_d64_full_m128n128", 40, 232, 232),
    roles("fp16_d96_full_m64n128", 32, 232, 240),
    roles("bf16_d72_causal_m64n128", 32, 232, 240),
    roles("fp16_d128v112_full_m64n128_dqone", 32, 232, 240),
    roles("fp16_d128_full_m64n128_dqone", 24, 232, 248),
    roles("fp16_d64_full_m64n128", 24, 232, 248),
    roles("fp16_d128_full_m64n128", 40, 232, 232),
    roles("fp16_d96_full_m64n128_persist", 40, 224, 240),
    parted("fp16_d256_full_m64n64", 128, 128),
    parted("bf16_d192v128_causal_m64n64", 128, 64),
    parted("bf16_d160_causal_m64n64", 96, 64),
    parted("fp16_d64v256_full_m64n64", 64),
    transposed("fp16_d128_full_m80n128", 80, True),
    transposed("fp16_d64_full_m96n128", 48),
    transposed("fp16_d64_full_m96n128_keepk", 48),
    transposed("bf16_d64_full_m112n64_keepk", 112),
    # a tile whose dQ does not part among warpgroups is computed by one
    ("bwd_fp16_d96_full_m64n128", {"dq_by": "one", "dq_parts": 1, "dq_columns": 96}),
    ("bwd_bf16_d64_full_m64n128", {"dq_by": "one", "dq_parts": 1, "dq_columns": 64}),
    ("bwd_fp16_d96_full_m64n64", {"dq_by": "all", "dq_columns": 96}),
    ("bwd_bf16_d64_full_m64n64", {"dq_by": "all", "dq_columns": 64}),
    ("bwd_fp16_d64_full_m128n128_s1", {"stages": 1, "do_stages": 1, "head_dim_v": 64}),
)


@pytest.mark.parametrize(("slug", "facts"), FACTS, ids=[slug for slug, _ in FACTS])
def test_a_plan_has_the_numbers_that_can_be_worked_out_by_hand(slug, facts):
    plan = plan_of(slug)
    assert {name: attrgetter(name)(plan) for name in facts} == facts


def test_by_gradients_each_consumer_has_a_ledger_of_its_own():
    plan = plan_of("bwd_fp16_d256_full_m64n64")
    assert [role.name for role in plan.roles] == ["dV consumer", "dK consumer", "producer"]
    assert len(plan.ledgers.by_role) == 2
    for slug, kept in (("bwd_fp16_d64_full_m96n128", 0), ("bwd_fp16_d64_full_m96n128_keepk", 16)):
        plan = plan_of(slug)
        rows = {row.name: row.amount for row in plan.ledgers.registers.rows}
        assert rows.get("k", 0) == kept
        assert ("kept" in [gemm.name for gemm in plan.gemms]) == bool(kept)


def test_a_plan_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan_of("fwd_fp16_d128_causal_m128n128").block_n = 64  # type: ignore[attr-defined]


# ---- of every schedule --------------------------------------------------------------------------


def forward_fits(plan: Any) -> None:
    tile, scales = plan.tile, plan.scales
    assert plan.shared_bytes == sum(row.amount for row in plan.shared.rows) <= 232_448
    assert sum(gemm.accumulators for gemm in plan.gemms) < plan.ledgers.registers.limit
    assert tile.head_dim_padded % tile.qk_slab == 0 and tile.head_dim_padded >= plan.head_dim
    assert tile.head_dim_v_padded % tile.o_slab == 0 and tile.head_dim_v_padded >= plan.head_dim_v
    assert plan.threads * -(-plan.launch_registers // 8) * 8 <= 65_536
    if not plan.descales:
        assert tile.head_dim_v_padded % tile.v_slab == 0
        return
    assert tile.head_dim_v_padded % tile.v_rows_slab == 0
    assert plan.block_n % tile.v_slab == plan.block_n % 32 == 0
    if scales.by_block:
        assert plan.block_n % scales.group_keys == scales.rows % scales.group_keys == 0
        assert scales.group_keys >= 32  # whole steps of the second GEMM


def backward_fits(plan: Any) -> None:
    assert plan.shared_bytes <= SM90.smem_per_block
    for role, ledger in zip(plan.roles, plan.ledgers.by_role, strict=False):
        assert ledger.total <= role.registers <= SM90.setmaxnreg_max
    parts = (*(plan.dq_columns,) * (plan.dq_parts - 1), plan.dq_rest)
    assert sum(parts) * 64 == plan.block_m * plan.head_dim_padded
    slab = plan.ds_slab if plan.dq_transposed else plan.qk_slab
    assert all(columns % slab == 0 for columns in parts)


def decode_fits(plan: Any) -> None:
    assert plan.shared_bytes <= share(plan.blocks) <= SM90.smem_per_block
    assert (plan.shared_bytes + SM90.smem_reserved) * plan.blocks <= SM90.smem_per_sm
    warps = plan.blocks * plan.threads // SM90.warp_threads
    assert SM90.warps_resident(plan.ledgers.registers.limit) >= warps
    assert plan.ledgers.registers.total <= plan.ledgers.registers.limit == plan.launch_registers
    merge = plan.combination
    assert merge.lanes * 2 >= plan.head_dim_v and merge.threads % merge.lanes == 0
    assert merge.lanes % merge.window == 0


def combine_fits(plan: Any) -> None:
    assert plan.shared.fits
    assert plan.rows * plan.lanes == plan.threads <= 128
    assert plan.lanes * plan.loads * LOAD_BYTES >= plan.head_dim * plan.dtype.bytes
    assert 1 <= plan.full_blocks <= plan.blocks
    assert plan.threads * plan.blocks * plan.launch_registers <= SM90.registers_per_sm
    assert (plan.shared_bytes + SM90.smem_reserved) * plan.full_blocks <= SM90.smem_per_sm


def quantize_fits(plan: Any) -> None:
    assert plan.blocks >= 1
    assert plan.threads * plan.blocks * plan.launch_registers <= SM90.registers_per_sm
    assert plan.shared_bytes * plan.blocks <= SM90.smem_per_block


def made(keys: dict[str, Any]) -> Schedule | None:
    """A schedule of the backward pass, if these keys keep the rules."""
    try:
        return registry.kind("backward").schedule.make(**keys)
    except ScheduleError:
        return None


KINDS: dict[str, tuple[Any, Callable[[Any], None], int, bool]] = {  # and whether texts are rendered
    "16 bits": (schedules(), forward_fits, 100, False),
    "e4m3": (fp8_schedules(), forward_fits, 100, False),
    "backward": (backward_keys().map(made).filter(bool), backward_fits, 60, True),
    "decode": (decoding(), decode_fits, 60, True),
    "combine": (combining(), combine_fits, 60, True),
    "quantize": (quantizers(), quantize_fits, 200, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_exists_only_if_everything_fits_and_its_text_renders(kind):
    drawn, fits, examples, renders = KINDS[kind]

    @settings(max_examples=examples, deadline=None, suppress_health_check=[*HealthCheck])
    @given(drawn)
    def holds(schedule: Schedule) -> None:
        assert type(schedule).from_slug(schedule.slug) == schedule
        try:
            plan: Any = registry.plan(schedule)
        except OverBudget as refused:
            assert "fits with" in str(refused) or "nothing near it fits" in str(refused)
            return
        if hasattr(plan, "ledgers"):
            assert not plan.ledgers.over()
        fits(plan)
        assert not renders or plan.slug in kernel_text(plan)

    holds()


# ---- launches -----------------------------------------------------------------------------------


def grids(plan: Plan, **sizes: int) -> Iterator[list[int]]:
    for kernel in plan.launches.kernels:
        yield [extent.at(sizes) for extent in (kernel.grid.x, kernel.grid.y, kernel.grid.z)]


def test_gradients_launch_whole_blocks():
    plan = plan_of("bwd_fp16_d128_causal_m64n128")
    sizes = dict(batch=2, heads=6, kv_heads=3, seqlen_q=130, seqlen_k=129)
    before, (tiles, *_), shares, after = grids(plan, **sizes)
    assert (before, tiles, shares, after) == ([3, 6, 2], 2 * 3 * 2, [3, 3, 2], [3, 6, 2])
    a_block = 4 * 64 * 128 + 32 * 64 + 128  # and a counter, in a line of its own
    assert plan.launches.workspace.at(sizes) == 3 * 6 * 2 * a_block
    assert plan.launches.shares and not plan.launches.zeroed


def test_thread_blocks_that_stay_are_no_more_than_multiprocessors():
    plain, stays = (plan_of(f"bwd_fp16_d128_causal_m64n128{end}") for end in ("", "_persist"))
    resident = [
        [kernel.grid.resident for kernel in plan.launches.kernels] for plan in (plain, stays)
    ]
    assert resident == [[False] * 4, [False, True, False, False]]
    assert stays.record_bytes == plain.record_bytes  # a second counter has room beside the first
    rounds = plan_of("bwd_fp16_d128_causal_m64n128_persist_post")
    last = rounds.launches.kernels[-1].grid
    assert last.resident and last.per_sm * rounds.row_threads == 2_048
    assert rounds.record_bytes == plain.record_bytes  # and two more
    assert rounds.shared_bytes == stays.shared_bytes + 6 * 4_096  # six pieces on their way


def test_decoding_launches_chunks_and_what_combines_them():
    plan = plan_of(DECODING[0])
    decode, merge = plan.launches.kernels
    sizes = dict(batch=3, heads=32, kv_heads=8, seqlen_q=2, seqlen_k=1_000)
    assert plan.launches.workspace.at(sizes) == 3 * 32 * 2 * 16 * (128 + 2) * 4
    assert not plan.launches.zeroed and decode.overlaps and merge.overlaps
    assert decode.grid.x.at(sizes) == 3 * 32 * 2 * 16
    assert str(decode.grid).startswith("(min(seqlen_q · heads · batch · 16, 2 · SMs)")
    assert merge.grid.x.at(sizes) == 3 * 32 * 2 / 2
    assert merge.threads == 128 and decode.threads == 160
    runs = plan_of(f"{DECODING[0]}_streamk").launches
    assert runs.workspace.at(sizes) == 3 * 32 * 2 * (16 * (128 + 2) + 3) * 4


def test_combining_says_what_is_moved():
    plan = plan_of("comb_fp32_d128_obf16")
    assert plan.moved(rows=10, splits=4) == 10 * (4 * (128 * 4 + 4) + 128 * 2 + 4)
    assert "batch · seqlen · heads · (splits · 516 + 260)" in plan.explained()
    grid = plan.launches.kernels[0].grid.x
    assert grid.at(dict(batch=3, seqlen=5, heads=7)) == -(-105 // plan.rows)
    assert plan.launches.kernels[0].overlaps and not plan.launches.needs_workspace
    assert plan.record()["row_bytes"] == (516, 260)


def test_a_struct_is_the_same_for_dense_and_varlen_rows():
    dense, varlen = (plan_of(slug).signature for slug in COMBINING[:2])
    for view in (lambda s: [(t.name, t.strides) for t in s.tensors], lambda s: s.sizes):
        assert view(dense) == view(varlen)
    assert [tensor.name for tensor in dense.inputs] == ["outs", "lses"]


@pytest.mark.parametrize("slug", [*DECODING, *COMBINING])
def test_enough_bytes_are_under_way_to_cover_the_memorys_latency(slug):
    # so many TB/s for a microsecond, of which an SM has its share
    speed = 4.8e12 if slug in COMBINING else 4.6e12
    assert plan_of(slug).bytes_in_flight >= speed * 1e-6 / SM90.sm_count


def test_registers_are_dealt_to_schedulers():
    warps = (4, 5, 8, 10, 12, 13, 64)
    assert [*map(SM90.registers_of_warps, warps)] == [255, 255, 255, 168, 168, 128, 32]


# ---- what is committed --------------------------------------------------------------------------


def test_gradients_of_both_dtypes_and_masks_and_four_head_dims_are_committed():
    committed = [registry.read(path).values() for path in registry.schedules("backward")]
    cases = {(keys["dtype"], keys["head_dim"], keys["mask"]) for keys in committed}
    of = {(d, m) for d in (64, 128, 192, 256) for m in PLAIN_MASKS}
    of |= {(d, "window") for d in (64, 128, 256)}
    assert cases == {(t, d, m) for t in ("fp16", "bf16") for d, m in of}


def test_flops_of_gradients_are_two_and_a_half_times_those_of_the_forward_pass():
    sizes, schedule = Sizes(2, 4, 2, 300, 500), plan_of("bwd_fp16_d128_causal_m64n128").schedule
    problem = Problem.of(schedule)
    assert problem == Problem("fp16", 128, 128, "causal", "fp16", "", 0, "backward")
    assert flops(problem, sizes) == 2.5 * flops(Problem("fp16", 128, 128, "causal"), sizes)
    own_v = Problem("fp16", 128, 64, "full", kind="backward")
    assert flops(own_v, sizes) == 2 * 2 * 4 * (3 * 128 + 2 * 64) * 300 * 500
