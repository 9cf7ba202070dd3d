"""The ledgers against figures that others published or that can be worked out by hand."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fagen import registry
from fagen.arch import SM90
from fagen.kinds.forward.formulae import BUDGET
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.quantize.keys import Schedule as Quantizer
from fagen.kinds.quantize.rules import HALVES_STEP
from tests.schedule_helpers import amounts
from tests.strategies import columns, fp8_schedules, schedules

# FlashAttention-3's tiles for 16-bit inputs with head_dim_v <= 256, and P from registers, by
# head_dim, head_dim_v, block_m, block_n; columns "smem B" and "S+P+O" of the published table
TILES = {
    (64, 64, 192, 128): (90_112, (64, 32, 32)),
    (64, 256, 128, 96): None,
    (128, 128, 128, 176): (212_992, (88, 44, 64)),
    (128, 128, 128, 128): (163_840, (64, 32, 64)),
    (192, 192, 128, 112): (221_184, (56, 28, 96)),
    (192, 128, 128, 128): (212_992, (64, 32, 64)),
    (192, 192, 128, 96): None,
    (256, 256, 128, 80): (229_376, (40, 20, 128)),
    (256, 256, 128, 64): None,
}


def schedule(head_dim, head_dim_v, block_m, block_n, **more):
    keys = dict(dtype="fp16", mask="full", head_dim=head_dim, head_dim_v=head_dim_v)
    keys |= dict(block_m=block_m, block_n=block_n, output="reuse_v")
    return Schedule.make(**keys | more)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_of_flash_attention_3_fits_with_the_sums_that_are_published(tile):
    cost = BUDGET.of(schedule(*tile))
    assert not cost.over()
    if TILES[tile]:
        shared, registers = amounts(cost.shared), amounts(cost.registers)
        sums = registers["s"], registers["p"], registers["o"]
        assert (cost.shared.total - shared["barriers"], sums) == TILES[tile]


@pytest.mark.parametrize(
    ("tile", "ledgers"),
    [
        ((256, 256, 128, 96), ["shared memory"]),
        ((192, 192, 128, 128), ["shared memory"]),
        ((192, 128, 128, 144), ["shared memory"]),
        ((128, 128, 128, 208), ["shared memory", "registers"]),
    ],
)
def test_one_step_past_a_known_limit_does_not_fit(tile, ledgers):
    over = BUDGET.of(schedule(*tile)).over()
    assert [ledger.name.split(" of ")[0] for ledger in over] == ledgers


@pytest.mark.parametrize(
    ("tile", "bytes_without_barriers"),
    [  # column "smem B" of the published table of its fp8 tiles
        ((64, 64, 192, 160), 77_824),
        ((96, 96, 192, 128), 104_448),
        ((128, 128, 128, 224), 188_416),
        ((192, 192, 128, 160), 208_896),
        ((256, 256, 128, 128), 229_376),
    ],
)
def test_so_are_those_of_its_tiles_of_fp8(tile, bytes_without_barriers):
    shared = BUDGET.of(schedule(*tile, dtype="e4m3", v_layout="rows")).shared
    assert shared.total - amounts(shared)["barriers"] == bytes_without_barriers


def test_output_takes_vs_space_unless_it_owns_some():
    shared = amounts(BUDGET.of(schedule(128, 128, 128, 64)).shared)
    own = amounts(BUDGET.of(schedule(128, 128, 128, 64, output="own")).shared)
    assert shared["v_or_o"] == own["v"] == 2 * 64 * 128 * 2
    assert own["o"] == 128 * 128 * 2
    # V's ring of two blocks of 16 keys is smaller than O: then O's size counts
    tall = amounts(BUDGET.of(schedule(128, 128, 128, 16)).shared)
    assert tall["v_or_o"] == 128 * 128 * 2


def test_each_array_is_rounded_up_to_the_alignment_of_its_tile():
    shared = amounts(BUDGET.of(schedule(16, 24, 64, 16)).shared)
    assert shared == {
        "q": 2_048,  # 64 × 16 × 2
        "k": 1_024,  # 2 × 16 × 16 × 2
        "v_or_o": 4_096,  # 64 × 32 × 2, since 24 columns are padded to 32
        "barriers": 1_024,  # 8 × (4 × 2 stages + 2 for Q + 1 for O)
    }


def test_a_second_q_costs_its_buffer_and_its_barriers():
    one = amounts(BUDGET.of(schedule(128, 128, 128, 64)).shared)
    two = amounts(BUDGET.of(schedule(128, 128, 128, 64, q_stages=2)).shared)
    assert two == one | {"q": 2 * one["q"]}  # eight more barriers go into the same 1,024 bytes
    formula = BUDGET.of(schedule(128, 128, 128, 64, q_stages=2)).shared.rows[-1]
    assert (formula.name, formula.formula) == (
        "barriers",
        "block_m·q_stages/4 + block_m/16 + 32·stages + 8",
    )
    own = BUDGET.of(schedule(128, 128, 128, 64, output="own")).shared.rows[-1]
    assert own.formula == "block_m·q_stages/4 + block_m/16 + 32·stages", (
        "O in a buffer of its own needs none"
    )


def test_row_sums_by_the_tensor_cores_cost_ones_and_four_registers_of_o():
    threads = BUDGET.of(schedule(64, 64, 128, 128))
    tensor = BUDGET.of(schedule(64, 64, 128, 128, sum="tensor", maximum="online"))
    assert amounts(tensor.shared) == amounts(threads.shared) | {"ones": 2_048}  # 16 × 64 × 2
    assert amounts(threads.registers)["o"] == 64 // 2
    assert amounts(tensor.registers) == amounts(threads.registers) | {"o": (64 + 8) // 2}
    # 24 columns of V are filled up to 32, and so are the ones beside them
    narrow = amounts(BUDGET.of(schedule(64, 24, 64, 64, sum="tensor", maximum="online")).shared)
    assert narrow["ones"] == 16 * 32 * 2


@pytest.mark.parametrize("kind", [schedules(), fp8_schedules()], ids=["16 bits", "e4m3"])
@settings(deadline=None)
@given(data=st.data())
def test_shared_memory_is_the_sum_of_whole_arrays(kind, data):
    schedule = data.draw(kind)
    values = schedule.values()
    m, n, stages, q_stages = (values[key] for key in ("block_m", "block_n", "stages", "q_stages"))
    e = 1 if values["dtype"] == "e4m3" else 2
    d, d_v = (columns(values[key], values["dtype"]) for key in ("head_dim", "head_dim_v"))
    rows, space = values["v_layout"] == "rows", values["output"] == "reuse_v"
    v, o = stages * n * d_v * e, m * d_v * 2
    leaving = {"own": [v, o], "half": [v, o // 2], "reuse_v": [max(v, o)]}[values["output"]]
    arrays = [q_stages * m * d * e, stages * n * d * e, *leaving]
    arrays += [v] if rows else []
    group = math.gcd(n, values["scale_rows"])
    arrays += [stages * n // group * 16] if values["scale_rows"] else []
    arrays += [16 * d_v * 2] if values["sum"] == "tensor" else []
    arrays += [m * d_v * 4] if values["totals"] == "shared" else []
    barriers = (6 if rows else 4) * stages + 2 * q_stages * schedule.consumers + space
    assert BUDGET.of(schedule).shared.total == sum(
        -(-a // 1024) * 1024 for a in [*arrays, 8 * barriers]
    )


def _alone(schedule: Schedule) -> Schedule:
    """The same without a partner: causal pairs, which cost the same, do not take every block_n."""
    return schedule.but(cluster=1)


@settings(deadline=None)
@given(schedules())
def test_a_narrower_tile_never_costs_more(schedule):
    block_n = schedule.tile.block_n
    if block_n > 16:
        cost, less = BUDGET.of(schedule), BUDGET.of(_alone(schedule).but(block_n=block_n - 16))
        assert less.shared.total < cost.shared.total
        assert less.registers.total < cost.registers.total


@pytest.mark.parametrize(
    ("block_m", "producer", "threads", "launch", "usable"),
    [
        (64, "warp", 256, 255, 232),
        (128, "warp", 384, 168, 232),
        (192, "warp", 512, 128, 160),
        (256, "warp", 640, 96, 112),
        (64, "none", 128, 255, 255),
        (128, "none", 256, 255, 255),
        (192, "none", 384, 168, 168),
        (256, "none", 512, 128, 128),
    ],
)
def test_registers_are_dealt_as_the_hardware_does(block_m, producer, threads, launch, usable):
    worked = registry.plan(schedule(64, 64, block_m, 64, producer=producer))
    assert (worked.threads, worked.launch_registers) == (threads, launch)
    assert worked.registers.limit == usable
    assert not worked.ledgers.over()


@pytest.mark.parametrize(
    ("block_m", "producer", "consumer", "fits"),
    [
        (64, 56, 256, True),
        (128, 24, 240, True),
        (128, 40, 232, True),
        (128, 24, 248, False),
        (128, 32, 240, False),
        (192, 32, 160, True),
        (192, 40, 160, False),
        (192, 24, 168, False),
        (256, 32, 112, True),
        (256, 40, 112, False),
        (256, 24, 120, False),
    ],
)
def test_setmaxnreg_never_asks_for_more_than_the_launch_brought(block_m, producer, consumer, fits):
    cost = BUDGET.of(
        schedule(
            *(64, 64, block_m, 64),
            producer_registers=producer,
            consumer_registers=consumer,
        )
    )
    assert (cost.over() == ()) is fits


def test_256_registers_are_255_to_use():
    cost = BUDGET.of(schedule(64, 64, 64, 64, consumer_registers=256))
    assert cost.registers.limit == 255
    assert SM90.source("max_registers_per_thread") in str(cost.registers)


@settings(max_examples=50, deadline=None)
@given(schedules())
def test_what_is_offered_fits_and_the_next_wider_tile_does_not(schedule):
    schedule = _alone(schedule)
    offers = BUDGET.nearest(schedule)
    if not BUDGET.of(schedule).over():
        return
    assert offers
    for offer in offers:
        assert not BUDGET.of(schedule.but(**offer)).over()
        if offer.keys() == {"block_n"}:
            wider = schedule.but(block_n=offer["block_n"] + 16)
            assert BUDGET.of(wider).over()


@settings(max_examples=20, deadline=None)
@given(schedules())
def test_the_solved_limit_is_the_one_that_trying_finds(schedule):
    schedule = _alone(schedule)
    solved = [
        float(match[1])
        for line in BUDGET.explained(schedule)
        if (match := re.search(r"block_n <= .* = (-?[\d.]+)$", line))
    ]
    assert len(solved) == 2
    for block_n in range(16, 257, 16):
        cost = BUDGET.of(schedule.but(block_n=block_n))
        for ledger, bound in zip((cost.shared, cost.registers), solved, strict=True):
            # shared memory is rounded up array by array, which the solved formula leaves out
            slack = len(cost.shared.rows) * SM90.smem_tile_alignment if ledger is cost.shared else 0
            if block_n > bound + 0.05:
                assert not ledger.fits
            elif ledger.total + slack <= ledger.limit:
                assert block_n <= bound + 0.05
            elif ledger is cost.registers:
                assert ledger.fits


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
@pytest.mark.parametrize("scales", ["head", "tensor", "block"])
def test_every_quantiser_fits_a_multiprocessor(head_dim, scales):
    for rotary in ("none", "pairs", *(["halves"] if head_dim % HALVES_STEP == 0 else [])):
        for layout in ("rows", "columns"):
            keys = dict(head_dim=head_dim, scales=scales, rotary=rotary, layout=layout)
            worked = registry.plan(Quantizer.make(dtype="fp16", **keys))
            held = worked.threads * worked.blocks
            assert worked.blocks >= 1
            assert held * worked.launch_registers <= SM90.registers_per_sm
            assert worked.shared_bytes * worked.blocks <= SM90.smem_per_block
