"""The fold of partial outputs, emulated: against fp64, at its edges, and bit for bit."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fagen import combining
from fagen.combining import exp_below, log_above
from fagen.kinds.combine.emulate import compute
from fagen.kinds.combine.oracle import combine
from fagen.kinds.combine.verify import RULE, Case, inputs
from fagen.measure.verification import check
from tests.combine_helpers import planned
from tests.tensors import normal
from tests.varlen_helpers import emulated

DENSE, PACKED = planned("comb_fp32_d16"), planned("comb_fp32_d16_varlen")


def partials(splits: int, rows: int = 5, heads: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    outs = normal(splits, 2, rows, heads, 16, seed=seed)
    return outs, normal(splits, 2, heads, rows, seed=seed + 1)


def units(result: Tensor, expected: Tensor) -> Tensor:
    """How many units in the last place of fp32 numbers lie from numbers in fp64."""
    spacing = torch.from_numpy(np.spacing(expected.abs().float().numpy())).double()
    return ((result.double() - expected) / spacing).abs()


# ---- its functions ------------------------------------------------------------------------------


def test_exponentials_are_within_two_units_of_what_their_argument_becomes():
    difference = torch.linspace(-86.6, 86.6, 200_001)
    exponent = (difference.abs() * -combining.LOG2_E).double()
    assert units(exp_below(difference), torch.exp2(exponent)).max() < 1.5


def test_exponentials_have_their_exact_values():
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, 87.0, -1e30, math.nan])
    results = exp_below(x)
    assert results[:6].tolist() == [1, 1, 0, 0, 0, 0]
    assert results[6].isnan()


def test_no_weight_is_a_subnormal_number():
    weights = exp_below(torch.linspace(80, 95, 100_001))
    assert torch.all((weights == 0) | (weights >= torch.finfo(torch.float32).tiny))


def test_logarithms_are_within_two_units():
    sums = torch.cat((torch.linspace(1, 2, 100_001), torch.linspace(2, 256, 100_001)))[1:]
    assert units(log_above(sums), sums.double().log()).max() < 1.5
    assert log_above(torch.ones(1)) == 0


# ---- the fold -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "slug", ["comb_fp32_d16", "comb_fp32_d8_obf16_varlen", "comb_fp16_d16_varlen", "comb_bf16_d24"]
)
def test_it_is_near_fp64_and_takes_no_notice_of_what_does_not_count(slug):
    plan = planned(slug)
    errors = check(plan, RULE, emulated(plan), device="cpu")
    assert {error.splits for error in errors} >= {1, 2, 3, 16, 255, 256}


def test_it_is_what_is_written_down_step_by_step():
    outs, lses = partials(9)
    results = compute(DENSE, outs, lses)
    fp32 = np.float32
    for row in range(5):
        maximum, total, acc = fp32(-np.inf), fp32(0), np.zeros(16, np.float32)
        for out, lse in zip(outs[:, 1, row, 2].numpy(), lses[:, 1, 2, row].numpy(), strict=True):
            d = lse - maximum
            w = exp_below(torch.tensor([d])).numpy()[0]
            old, own = (w, fp32(1)) if d > 0 else (fp32(1), w)
            total = total * old + own
            acc = acc * old + out * own
            maximum = max(maximum, lse)
        assert np.array_equal(results[0][1, row, 2].numpy(), acc * (fp32(1) / total))
        assert results[1][1, 2, row] == maximum + log_above(torch.tensor([total])).item()


def test_one_split_comes_out_as_it_went_in():
    outs, lses = partials(1)
    out, lse = compute(DENSE, outs, lses)
    assert torch.equal(out, outs[0]) and torch.equal(lse, lses[0])


def test_empty_splits_change_no_bit_wherever_they_stand():
    outs, lses = partials(4)
    nothing = torch.full_like(outs[:1], math.nan), torch.full_like(lses[:1], -math.inf)
    more = torch.cat((nothing[0], outs[:2], nothing[0], outs[2:], nothing[0]))
    more_lses = torch.cat((nothing[1], lses[:2], nothing[1], lses[2:], nothing[1]))
    for x, other in zip(compute(DENSE, outs, lses), compute(DENSE, more, more_lses), strict=True):
        assert torch.equal(x, other)


@pytest.mark.parametrize("splits", [0, 1, 5])
def test_where_no_split_saw_a_key_there_are_zeros_and_minus_infinity(splits):
    outs = torch.full((splits, 1, 2, 3, 16), math.nan)
    out, lse = compute(DENSE, outs, torch.full((splits, 1, 3, 2), -math.inf))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.all(lse == -math.inf)


def test_a_common_offset_of_the_lses_changes_no_output():
    outs, lses = partials(6)
    lses = (lses * 64).round() / 64  # exact beside the offset
    out, lse = compute(DENSE, outs, lses)
    for offset in (1e4, -3e4):
        moved, moved_lse = compute(DENSE, outs, lses + offset)
        assert torch.equal(moved, out)
        assert torch.allclose(moved_lse, lse + offset, rtol=1e-7)


def test_a_dominant_split_is_the_output():
    outs, lses = partials(3)
    lses[1] += 1e4
    out, lse = compute(DENSE, outs, lses)
    assert torch.equal(out, outs[1]) and torch.equal(lse, lses[1])


def test_what_is_no_number_stays_in_its_row():
    outs, lses = partials(3)
    expected = compute(DENSE, outs, lses)
    lses[1, 0, 0, 0] = math.nan
    out, lse = compute(DENSE, outs, lses)
    assert out[0, 0, 0].isnan().all() and lse[0, 0, 0].isnan()
    assert torch.equal(out[1], expected[0][1]) and torch.equal(out[0, 1:], expected[0][0, 1:])


# ---- varlen rows --------------------------------------------------------------------------------


def test_a_sequence_has_the_bits_that_it_has_alone():
    case = Case(8, 6, 4, 3)
    named = inputs(PACKED, case, seed=4)
    out, lse = compute(PACKED, **named)
    starts = named["cu_seqlens"].tolist()
    counts = named["num_splits"].clamp(0, case.splits)
    for count, first, end in zip(counts, starts, starts[1:], strict=False):
        parts = named["outs"][:count, None, first:end], named["lses"][:count, None, :, first:end]
        own, own_lse = compute(DENSE, *parts)
        assert torch.equal(out[first:end], own[0])
        assert torch.equal(lse[:, first:end], own_lse[0])


def test_rows_before_the_first_sequence_and_behind_the_last_have_no_split():
    outs, lses = partials(2)
    counts = torch.tensor([2], dtype=torch.int32)
    starts = torch.tensor([1, 4], dtype=torch.int32)
    out, lse = compute(PACKED, outs[:, 0], lses[:, 0], counts, starts)
    assert torch.all(out[[0, 4]] == 0) and torch.all(lse[:, [0, 4]] == -math.inf)
    expected, expected_lse = combine(outs[:, 0, 1:4], lses[:, 0, :, 1:4])
    assert torch.allclose(out[1:4].double(), expected)
    assert torch.allclose(lse[:, 1:4].double(), expected_lse)


@pytest.mark.parametrize(("count", "meant"), [(-7, 0), (0, 0), (1, 1), (2, 2), (3, 2), (999, 2)])
def test_a_number_of_splits_that_there_are_not_means_none_or_all(count, meant):
    outs, lses = partials(2)
    packing = (torch.tensor([count], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32))
    results = compute(PACKED, outs[:, 0], lses[:, 0], *packing)
    expected = compute(DENSE, outs[:meant, :1], lses[:meant, :1])
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result, other[0])
