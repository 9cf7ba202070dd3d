"""Schedules of e4m3: their keys, rules and ledgers, and the numbers of their Plans."""

import math

import pytest
from hypothesis import given

from fagen.arch import SM90
from fagen.errors import OverBudget
from fagen.kinds.forward.formulae import BUDGET
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import Plan, plan
from tests.schedule_helpers import amounts
from tests.strategies import fp8_schedules

FIRST = dict(head_dim=128, dtype="e4m3", mask="full", block_m=128, block_n=128)
SIXTEEN = FIRST | dict(dtype="fp16")
EACH = dict(maximum="online")


def planned(**changes) -> Plan:
    return plan(Schedule.make(**FIRST | changes))


# ---- keys ---------------------------------------------------------------------------------------


def test_what_is_left_out_follows_from_the_dtype():
    values = Schedule.make(**FIRST).values()
    keys = (
        *("out_dtype", "v_layout", "scales", "scale_rows", "v_scales"),
        *("maximum", "p_offset", "promote", "totals"),
    )
    e4m3 = ["bf16", "columns", "head", 0, "column", "online", 8.0, 0, ""]
    assert [values[key] for key in keys] == e4m3
    sixteen = Schedule.make(**SIXTEEN).values()
    assert [sixteen[key] for key in keys] == ["fp16", "", "", 0, "", "lazy", 0.0, 0, ""]
    assert Schedule.make(**FIRST, scales="block").fp8.scale_rows == 64
    assert Schedule.make(**FIRST, promote=4).softmax.totals == "registers"


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(
    ("threshold", "offset"), [(0, 8), (0.75, 8), (0.875, 7), (4, 4), (3.75, 5), (7.875, 0)]
)
def test_the_offset_is_what_the_threshold_leaves_of_e4m3_in_whole(threshold, offset, mask):
    keys = FIRST | dict(mask=mask, maximum="online", rescale_threshold=threshold)
    assert Schedule.make(**keys).fp8.p_offset == offset
    for block_n in (32, 256):  # a lazy row max leaves as much as a true one
        lazy = FIRST | dict(mask=mask, head_dim=64, block_n=block_n, maximum="lazy")
        assert Schedule.make(**lazy).fp8.p_offset == 8


# ---- rules --------------------------------------------------------------------------------------


def test_o_of_16_bits_has_the_type_of_its_inputs_whether_or_not_that_is_said():
    assert Schedule.make(**SIXTEEN, out_dtype="fp16") == Schedule.make(**SIXTEEN)


@given(fp8_schedules())
def test_p_has_its_place_in_every_schedule(schedule):
    most = schedule.fp8.p_offset + schedule.softmax.rescale_threshold
    assert most <= math.log2(SM90.e4m3_max)


# ---- ledgers ------------------------------------------------------------------------------------


def test_the_first_schedule_in_numbers():
    worked = planned()
    assert worked.shared_bytes == 16_384 + 32_768 + 32_768 + 32_768 + 1_024
    assert (worked.s_accumulators, worked.pv_accumulators, worked.p_registers) == (64, 64, 16)
    assert (worked.qk_steps, worked.pv_steps) == (4, 4)
    assert worked.pv_inputs == (64, 65, 66, 67, 68)
    assert (worked.dtype.name, worked.out_dtype.name) == ("e4m3", "bf16")
    assert worked.fp8 and not worked.v_rows and not worked.scales_by_block
    assert (worked.qk_slab, worked.qk_slabs) == (128, 1)
    assert (worked.o_slab, worked.o_slabs) == (64, 2)
    assert (worked.v_slab, worked.v_slabs) == (128, 1)


def test_a_true_row_max_rescales_only_where_it_grew():
    worked, lazy, sixteen = planned(), planned(maximum="lazy"), plan(Schedule.make(**SIXTEEN))
    assert [of.skips_rescaling for of in (worked, lazy, sixteen)] == [True, False, False]
    assert [of.lazy_max for of in (worked, lazy, sixteen)] == [False, True, True]
    assert not plan(Schedule.make(**SIXTEEN, **EACH)).skips_rescaling
    assert plan(Schedule.make(**SIXTEEN, **EACH, rescale_threshold=2.0)).skips_rescaling


def test_causal_consumers_skip_fully_masked_blocks_in_e4m3_too():
    masks = ("causal", "full")
    assert [planned(mask=mask, block_m=192, head_dim=64).skips_masked_blocks for mask in masks] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("block_n", "swizzle", "slabs"), [(96, 32, 3), (128, 128, 1), (160, 32, 5), (192, 64, 3)]
)
def test_v_transposed_has_rows_of_block_n_bytes(block_n, swizzle, slabs):
    worked = planned(block_n=block_n, head_dim=64)
    assert (worked.v_swizzle.bytes, worked.v_slabs) == (swizzle, slabs)
    assert worked.v_slab * worked.v_slabs == block_n


def test_a_head_dim_is_filled_up_to_32():
    worked = planned(head_dim=80, head_dim_v=48)
    assert (worked.head_dim_padded, worked.head_dim_v_padded) == (96, 64)
    assert (worked.qk_swizzle.bytes, worked.o_swizzle.bytes) == (32, 128)


def test_v_that_is_transposed_in_the_kernel_lies_there_twice():
    plain, rows = (BUDGET.of(Schedule.make(**FIRST, v_layout=v)) for v in ("columns", "rows"))
    found = amounts(rows.shared)
    assert found["vt"] == found["v"] == 32_768
    assert rows.shared.total - plain.shared.total == 32_768
    (barriers,) = (row.formula for row in rows.shared.rows if row.name == "barriers")
    assert barriers == "block_m·q_stages/4 + 48·stages"


@pytest.mark.parametrize(("v_scales", "formula"), [("column", "16"), ("block", "4")])
def test_each_block_of_keys_with_scales_of_its_own_costs_some_bytes_a_stage(v_scales, formula):
    """Four of K's scale, or sixteen with V's logarithm and inverse."""
    plain = BUDGET.of(Schedule.make(**FIRST)).shared
    keys = dict(scales="block", scale_rows=64, v_scales=v_scales)
    blocks = BUDGET.of(Schedule.make(**FIRST, **keys)).shared
    assert blocks.total - plain.total == SM90.smem_tile_alignment  # rounded up
    assert "scales" not in {row.name for row in plain.rows}
    (scales,) = (row for row in blocks.rows if row.name == "scales")
    assert (scales.amount, scales.formula) == (1_024, f"block_n·stages/{formula}")


def test_o_in_vs_space_has_elements_of_two_bytes():
    shared = BUDGET.of(Schedule.make(**FIRST, output="reuse_v", stages=2)).shared
    assert amounts(shared)["v_or_o"] == max(2 * 128 * 128, 128 * 128 * 2)
    wide = BUDGET.of(Schedule.make(**FIRST | dict(block_n=64), output="reuse_v")).shared
    assert amounts(wide)["v_or_o"] == 128 * 128 * 2


def test_promoted_sums_are_a_second_o_in_the_registers():
    schedule = Schedule.make(**FIRST | dict(head_dim=64), promote=4)
    found = amounts(BUDGET.of(schedule).registers)
    assert (found["o"], found["o_fp32"]) == (32, 32)
    with pytest.raises(OverBudget, match=r"o_fp32 +64"):
        planned(promote=4)
    changes = BUDGET.nearest(Schedule.make(**FIRST, promote=4))
    for change in ({"promote": 0}, {"block_n": 96}, {"totals": "shared"}):
        assert change in changes


def test_or_they_are_in_shared_memory():
    plain, promoted = (
        BUDGET.of(Schedule.make(**FIRST, **keys)) for keys in ({}, dict(promote=4, totals="shared"))
    )
    assert promoted.registers.total == plain.registers.total
    found = {row.name: (row.amount, row.formula) for row in promoted.shared.rows}
    assert found["totals"] == (128 * 128 * 4, "4·block_m·d_v")
    assert promoted.shared.total == plain.shared.total + 65_536
    wide = FIRST | dict(head_dim=256, block_n=64, promote=4, totals="shared")
    assert {"promote": 0, "totals": None} in BUDGET.nearest(Schedule.make(**wide))


@pytest.mark.parametrize("keys", [{}, dict(scales="block", scale_rows=64)], ids=str)
def test_the_explanation_steps_as_the_schedule_does(keys):
    assert list(BUDGET.explained(Schedule.make(**FIRST, **keys)))[-1] == (
        "in whole arrays and steps of 32, the widest block_n that fits is 224"
    )
