"""The Plan's numbers, and the words of a refusal."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fagen import registry
from fagen.errors import OverBudget, ScheduleError
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import Plan, plan
from tests.strategies import fp8_schedules, schedules

FIRST = dict(head_dim=128, dtype="fp16", mask="causal", block_m=128, block_n=128, output="reuse_v")


def planned(**changes) -> Plan:
    return plan(Schedule.make(**{**FIRST, **changes}))


def test_the_first_schedule_in_numbers():
    worked = planned(output="own")
    assert worked.shared_bytes == 32_768 + 65_536 + 65_536 + 32_768 + 1_024
    assert worked.threads == 384
    assert (worked.s_accumulators, worked.pv_accumulators, worked.p_registers) == (64, 64, 32)
    assert (worked.qk_steps, worked.pv_steps) == (8, 8)
    assert worked.qk_inputs == (64, 65, 66)
    assert worked.pv_inputs == (64, 65, 66, 67, 68)
    assert worked.longest_first


@pytest.mark.parametrize(
    ("head_dim", "padded", "swizzle", "slabs"),
    [
        (16, 16, 32, 1),
        (24, 32, 64, 1),
        (64, 64, 128, 1),
        (72, 80, 32, 5),
        (80, 80, 32, 5),
        (96, 96, 64, 3),
        (128, 128, 128, 2),
        (192, 192, 128, 3),
        (248, 256, 128, 4),
    ],
)
def test_the_swizzle_is_the_widest_that_divides_the_padded_row(head_dim, padded, swizzle, slabs):
    worked = planned(head_dim=head_dim, block_n=64)
    assert worked.head_dim_padded == worked.head_dim_v_padded == padded
    assert worked.qk_swizzle.bytes == worked.v_swizzle.bytes == swizzle
    assert worked.qk_slabs == worked.v_slabs == slabs
    assert worked.qk_slab * slabs == padded


def test_row_sums_by_the_tensor_cores_are_eight_columns_of_the_pv_gemm():
    threads = planned(head_dim=64)
    assert not threads.sum_by_tensor
    assert (threads.o_columns, threads.pv_accumulators) == (64, 32)
    assert threads.pv_inputs == (32, 33, 34, 35, 36)
    tensor = planned(head_dim=64, sum="tensor", maximum="online")
    assert tensor.sum_by_tensor and tensor.head_dim_v_padded == 64
    assert (tensor.o_columns, tensor.pv_accumulators) == (72, 36)
    assert tensor.pv_inputs == (36, 37, 38, 39, 40)
    assert (tensor.qk_inputs, tensor.pv_steps) == (threads.qk_inputs, threads.pv_steps)


def test_a_row_max_is_lazy_where_the_schedule_says_so_up_to_what_16_bits_hold():
    assert [planned(maximum=maximum).lazy_max for maximum in ("lazy", "online")] == [True, False]
    held = {dtype: planned(dtype=dtype).max_partial_sum for dtype in ("fp16", "bf16")}
    assert held == {"fp16": 2.0**15, "bf16": 2.0**12}


@pytest.mark.parametrize(
    ("changes", "skips_blocks", "skips_steps"),
    [
        ({}, False, False),  # both warpgroups' rows end in the same block of keys
        ({"block_n": 96}, True, False),
        ({"block_m": 192}, True, True),
        ({"block_m": 256, "block_n": 64, "stages": 3}, True, False),
        ({"block_m": 192, "mask": "full"}, False, False),
        ({"block_m": 192, "intra_warpgroup": False}, False, False),
    ],
)
def test_of_consumers_that_skip_masked_blocks_three_skip_steps_where_they_have_no_rows(
    changes, skips_blocks, skips_steps
):
    worked = planned(**{**dict(head_dim=64, output="own"), **changes})
    assert (worked.skips_masked_blocks, worked.skips_steps) == (skips_blocks, skips_steps)


def test_q_has_as_many_buffers_as_the_schedule_says():
    one, two = planned(), planned(q_stages=2)
    assert (one.q_stages, two.q_stages) == (1, 2)
    assert two.shared_bytes - one.shared_bytes == 128 * 128 * 2


def test_without_a_producer_no_warp_has_registers_of_its_own():
    worked = planned(producer="none", order="persistent")
    assert (worked.threads, worked.producer_registers, worked.consumer_registers) == (256, 0, 0)
    assert worked.launch_registers == worked.registers.limit == 255
    assert not worked.longest_first
    assert "setmaxnreg" not in worked.ledger


@pytest.mark.parametrize("kind", [schedules(), fp8_schedules()], ids=["16 bits", "e4m3"])
@settings(deadline=None)
@given(data=st.data())
def test_a_plan_exists_only_if_everything_fits(kind, data):
    try:
        worked = plan(data.draw(kind))
    except OverBudget:
        return
    assert not worked.ledgers.over()
    assert worked.shared_bytes == sum(row.amount for row in worked.shared.rows) <= 232_448
    assert worked.s_accumulators + worked.pv_accumulators < worked.registers.limit
    assert worked.qk_slab * worked.qk_slabs == worked.head_dim_padded >= worked.head_dim
    assert worked.o_slab * worked.o_slabs == worked.head_dim_v_padded >= worked.head_dim_v
    launched = worked.threads * -(-worked.launch_registers // 8) * 8
    assert launched <= 65_536
    if not worked.fp8:
        assert worked.v_slab * worked.v_slabs == worked.head_dim_v_padded
        return
    assert worked.p_registers * 4 == worked.s_accumulators
    assert worked.head_dim_v_padded % worked.v_rows_slab == 0
    assert worked.v_slab * worked.v_slabs == worked.block_n == 32 * worked.pv_steps
    if worked.scales_by_block:
        assert worked.block_n % worked.group_keys == worked.scale_rows % worked.group_keys == 0
        assert worked.group_keys >= 32  # whole steps of the second GEMM


def test_a_plan_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        planned().block_n = 64  # type: ignore[misc]


def test_the_ledger_shows_rows_sum_limit_and_source():
    text = planned().ledger
    for said in ("q ", "32,768", "v_or_o", "164,864  of 232,448", "227 KiB", "186  of 232"):
        assert said in text


def test_the_explanation_shows_formulae_numbers_and_the_solved_limit():
    text = planned().explained()
    sizes = "block_m = 128, block_n = 128, d = 128, d_v = 128, stages = 2, q_stages = 1, e = 2"
    assert f"with {sizes}" in text
    assert "Max(block_m·d_v·e, block_n·d_v·e·stages)" in text
    taken = "-block_m·d·e·q_stages - block_m·q_stages/4 - block_m/16 - 32·stages + 232312"
    assert f"so block_n <= ({taken})/(e·stages·(d + d_v)) = 194.8" in text
    assert "so block_n <= 4·(412 - d_v)/(e + 4) = 189.3" in text
    assert text.endswith("the widest block_n that fits is 176")


def test_a_refusal_has_place_rows_sum_limit_source_and_the_nearest_that_fits():
    text = """\
[attention]
head_dim = 256
dtype = "bf16"
mask = "full"
[tile]
block_m = 128
block_n = 176
[pipeline]
output = "reuse_v"
"""
    with pytest.raises(OverBudget) as error:
        plan(registry.parse(text, "mine.toml"))
    lines = str(error.value).splitlines()
    assert lines[0].startswith("mine.toml:7: tile.block_n = 176: ")
    assert lines[-1] == "  fits with block_n = 80"
    said = " ".join(str(error.value).split())
    for part in ("q 65,536", "k 180,224", "v_or_o 180,224", "barriers 1,024"):
        assert part in said
    assert "sum 427,008 > 232,448 (CUDA C++ Programming Guide" in said
    assert "sum 286 > 232 (consumer_registers = 232)" in said


@pytest.mark.parametrize(
    ("changes", "offer"),
    [
        ({"head_dim": 256, "block_m": 192}, "fits with block_m = 128 and block_n = 80"),
        ({"output": "own", "stages": 3}, "block_n = 96, or with block_m = 64, or with stages = 2"),
        (
            {"output": "own", "head_dim": 256, "block_n": 96},
            'fits with block_n = 48, or with block_n = 80 and output = "reuse_v"',
        ),
        (
            {"output": "own", "head_dim": 256, "block_n": 64},
            'fits with block_n = 48, or with block_m = 64, or with output = "half"',
        ),
        (
            {"stages": 3, "q_stages": 2},
            "block_n = 96, or with block_m = 64, or with stages = 2, or with q_stages = 1",
        ),
        ({"consumer_registers": 248}, "consumer_registers left out"),
    ],
)
def test_a_refusal_offers_the_least_change(changes, offer):
    with pytest.raises(OverBudget) as error:
        planned(**changes)
    assert offer in str(error.value).splitlines()[-1]


def test_a_rule_is_never_broken_by_an_offer():
    with pytest.raises(OverBudget) as error:
        planned(inter_warpgroup=True, block_n=256)
    assert "block_m = 64" not in str(error.value)


def test_search_can_tell_wrong_from_too_large():
    assert not issubclass(OverBudget, ScheduleError)


@pytest.mark.parametrize(
    ("slug", "skips"),
    [
        ("fwd_fp16_d256_causal_m128n64_reusev_nointer", True),  # 2 blocks of K are prefetched
        ("fwd_fp16_d256_causal_m128n48_reusev_nointer", False),  # 3, and there is room for 2
        ("fwd_fp16_d256_causal_m128n48_s3_reusev_nointer", True),
        ("fwd_fp16_d128_causal_m192n64_reusev_nointer", False),
        ("fwd_fp16_d128_causal_m192n64_s3_reusev_nointer", True),
        ("fwd_fp16_d128_causal_m192n64", True),  # O needs no V to be gone
    ],
)
def test_masked_blocks_are_skipped_only_where_k_can_be_prefetched_before_o_has_left_vs_space(
    slug, skips
):
    assert registry.plan_of(slug).skips_masked_blocks is skips
