"""Decoding, emulated: against fp64, at its edges, and bit for bit alone."""

import math

import pytest
import torch

from fagen.arch import SM90
from fagen.errors import VerificationError
from fagen.kinds.decode.emulate import compute
from fagen.kinds.decode.oracle import attend, spans
from fagen.kinds.decode.rules import least_blocks
from fagen.kinds.decode.verify import RULE, Case, inputs, outputs, verification_cases
from fagen.measure.verification import check
from fagen.problem import Sizes
from tests.decode_helpers import SPREAD, planned
from tests.often import some
from tests.varlen_helpers import emulated

FIRST = planned(SPREAD[0])


# in CI swapped rows, a head dim of V's own, a unified maximum and runs; twenty seconds each
OFTEN = (SPREAD[0], SPREAD[3], *SPREAD[-3:-1])


@pytest.mark.parametrize("slug", some(SPREAD, OFTEN))
def test_it_is_near_fp64_and_uses_nothing_outside_of_a_sequence(slug):
    plan = planned(slug)
    cases = [case for case in verification_cases(plan) if case.sizes.seqlen_k < 8_000]
    errors = check(plan, RULE, emulated(plan), cases=cases, device="cpu")
    assert {error.heads // error.kv_heads for error in errors} >= {1, 3, 5, 6, 7, 8, 12, 16, 32}
    assert {error.seqlen_q for error in errors} >= {1, 2, 3, 4, 9, 16}


def test_a_wrong_output_and_one_that_depends_on_others_are_found():
    def wrong(**named):
        emulated(FIRST)(**named)
        named["out"][0, 0, 0, 0] += 0.01

    def not_alone(**named):
        emulated(FIRST)(**named)
        named["out"] *= 1 + 2**-9 * (len(named["q"]) > 1)

    case = Case(Sizes(2, 4, 2, 1, 90), (90, 70))
    for kernel, message in ((wrong, "error"), (not_alone, r"differing \d{2,}")):
        with pytest.raises(VerificationError, match=message):
            check(FIRST, RULE, kernel, cases=[case], device="cpu")
    assert check(FIRST, RULE, emulated(FIRST), cases=[case], device="cpu")[0].differing == 0


def test_keys_outside_of_a_sequence_are_no_numbers_in_these_cases():
    named = inputs(FIRST, Case(Sizes(2, 2, 1, 1, 50), (40, 50), (0, 3)), seed=0, device="cpu")
    for x in (named["k"], named["v"]):
        assert x[0, 40:].isnan().all() and x[1, :3].isnan().all()
        assert not x[0, :40].isnan().any() and not x[1, 3:].isnan().any()


@pytest.mark.parametrize("group", [1, 15, 16, 128])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 1_023, 1_024, 1_025, 8_192, 8_193, 131_072])
def test_a_split_is_whole_blocks_and_there_are_no_more_than_asked_for(length, group):
    for plan in map(planned, SPREAD):
        keys = plan.split_keys(length, group)
        assert keys % plan.block_n == 0 and keys > 0
        assert -(-length // keys) <= plan.num_splits
        # one block less to a split would make too many, or too short ones
        fewer = keys - plan.block_n
        assert (
            not fewer
            or -(-length // fewer) > plan.num_splits
            or fewer < least_blocks(group) * plan.block_n
            or length <= keys
        )


def test_a_short_sequence_is_one_split_and_more_heads_have_longer_ones():
    for group, least in ((1, 1), (5, 1), (8, 2), (11, 3), (12, 4), (64, 4)):
        assert FIRST.split_keys(320, group) == 320
        assert FIRST.split_keys(321, group) == FIRST.split_keys(1_024, group) == 64 * least


def test_from_a_thousand_keys_on_there_are_sixteen_splits_of_a_power_of_two():
    for length in (1_024, 2_048, 8_192, 131_072):
        assert FIRST.split_keys(length, 4) == length // 16


def in_turns(plan, kv_heads, lengths):
    """The keys of each unit of up to 32 sequences, by number: one split of several blocks first,
    the last of several splits last where sequences are alike.
    """
    first, usual, last = [], [], []
    alike = len(set(lengths)) == 1
    for length in lengths:
        split = plan.split_keys(length, 4) or 1
        *others, end = [min(split, length - begin) for begin in range(0, max(1, length), split)]
        usual += [keys for keys in others for _ in range(kv_heads)]
        place = usual if others or length <= plan.block_n else first
        place = last if others and alike else place
        place += [end] * kv_heads
    return first + usual + last


def busiest(plan, kv_heads, lengths, per_sm=2):
    """The keys of the SM that has most, over what each would have at best.

    Blocks take units in turns, back and forth, and neighbours in number are on different SMs.
    """
    windows = (lengths[first : first + 32] for first in range(0, len(lengths), 32))
    units = [keys for window in windows for keys in in_turns(plan, kv_heads, window)]
    loads = [0] * SM90.sm_count
    slots = min(len(units), per_sm * SM90.sm_count)
    for number, keys in enumerate(units):
        turn, slot = divmod(number, slots)
        loads[(slots - 1 - slot if turn % 2 else slot) % SM90.sm_count] += keys
    return max(loads) / max(sum(units) / SM90.sm_count, max(units))


@pytest.mark.parametrize(
    ("lengths", "most"),
    [
        ([1_024], 1.0),
        ([8_192], 1.0),
        ([131_072], 1.0),
        ([8_192] * 8, 1.04),
        ([4_096] * 32, 1.04),
        ([2_048] * 128, 1.04),
        ([15_454] * 29, 1.03),  # of 16 splits the last is short
        ([131_072, *[1_024] * 31], 1.07),  # a long one among short ones
        ([131_072, *[1_024] * 31][::-1], 1.07),
        ([1_000 + 517 * i for i in range(64)], 1.05),
        ([(7_919 * i) % 32_768 for i in range(256)], 1.05),
    ],
)
def test_multiprocessors_have_about_as_many_keys_each_whatever_the_lengths(lengths, most):
    assert busiest(FIRST, 8, lengths) <= most


def test_it_does_not_matter_where_in_the_cache_keys_lie():
    named = inputs(FIRST, Case(Sizes(1, 4, 2, 2, 300)), seed=3, device="cpu")
    out, lse = compute(FIRST, **named)
    moved = {**named}
    for name in ("k", "v"):
        wide = torch.full((1, 500, *named[name].shape[2:]), math.nan, dtype=named[name].dtype)
        wide[:, 77:377] = named[name]
        moved[name] = wide
    moved["seqused_k"] = torch.tensor([377], dtype=torch.int32)
    moved["leftpad_k"] = torch.tensor([77], dtype=torch.int32)
    for result, other in zip(compute(FIRST, **moved), (out, lse), strict=True):
        assert torch.equal(result, other)


def test_each_query_has_the_bits_that_it_has_alone():
    """With the keys that it sees: a mask takes away what is not there."""
    named = inputs(FIRST, Case(Sizes(1, 4, 2, 1, 64)), seed=5, device="cpu")
    more = {**named, "q": torch.cat((torch.randn_like(named["q"]), named["q"]), 1)}
    out, lse = compute(FIRST, **named)
    both, lses = compute(FIRST, **more)
    assert torch.equal(both[:, 1:], out) and torch.equal(lses[..., 1:], lse)


def test_lengths_are_cut_off_where_the_cache_ends():
    k = torch.empty(4, 10, 1, 1)
    used = torch.tensor([12, -3, 7, 10], dtype=torch.int32)
    pads = torch.tensor([-1, 0, 9, 4], dtype=torch.int32)
    assert list(spans(k, used, pads)) == [(0, 10), (0, 0), (0, 0), (4, 10)]
    assert list(spans(k, None, None)) == [(0, 10)] * 4


def test_without_keys_there_are_zeros_and_minus_infinity():
    named = inputs(FIRST, Case(Sizes(3, 4, 2, 5, 20), (0, 20, 3)), seed=0, device="cpu")
    out, lse = compute(FIRST, **named)
    assert torch.equal(out[0], torch.zeros_like(out[0])) and torch.all(lse[0] == -math.inf)
    # of five queries over three keys the first two see none
    assert torch.all(lse[2, :, :2] == -math.inf) and torch.all(out[2, :2] == 0)
    assert torch.isfinite(lse[2, :, 2:]).all() and torch.isfinite(lse[1]).all()


def test_one_key_far_above_the_others_takes_all_weight_wherever_it_is():
    named = inputs(FIRST, Case(Sizes(1, 1, 1, 1, 700)), seed=1, device="cpu")
    for key in (0, 63, 64, 350, 699):
        k = named["k"].clone()
        k[0, key, 0] = named["q"][0, 0, 0] * 30
        out, lse = compute(FIRST, **{**named, "k": k})
        assert torch.equal(out[0, 0, 0], named["v"][0, key, 0])
        expected = attend(named["q"], k, named["v"], mask=FIRST.mask, scale=named["scale"])
        assert torch.allclose(lse.double(), expected[1], rtol=1e-5)


def test_scores_of_any_size_keep_their_accuracy():
    """Common offsets of ten thousand, and scores that rise from key to key."""
    for case in (
        Case(Sizes(1, 2, 1, 1, 900), rises=True, sigma=100.0),
        Case(Sizes(1, 2, 1, 3, 900), sigma=50.0),
    ):
        check(FIRST, RULE, emulated(FIRST), cases=[case], device="cpu")


def test_rows_whose_reference_is_far_off_have_the_bits_of_their_own_maxima():
    plan = planned(f"{SPREAD[0]}_fixed")
    case = Case(Sizes(1, 3, 1, 2, 700), sigma=2.0, references=(0.0, -1e3, 1e3))
    named = inputs(plan, case, seed=2, device="cpu")
    out, lse = compute(plan, **named)
    exact, exact_lse = compute(FIRST, **{k: x for k, x in named.items() if k != "reference"})
    assert torch.equal(out[:, :, 1:], exact[:, :, 1:])
    assert torch.equal(lse[:, 1:], exact_lse[:, 1:])
    assert torch.allclose(lse[:, 0], exact_lse[:, 0], atol=1e-5)


def test_a_reference_that_is_no_number_changes_nothing_where_a_row_sees_no_key_of_a_chunk():
    plan = planned(f"{SPREAD[0]}_fixed")
    bad = (math.inf, math.nan, 3e38, -math.inf)
    case = Case(Sizes(2, 4, 1, 5, 128), (66, 2), references=bad)
    named = inputs(plan, case, seed=4, device="cpu")
    results = compute(plan, **named)
    exact = compute(FIRST, **{k: x for k, x in named.items() if k != "reference"})
    assert all(torch.equal(*pair) for pair in zip(results, exact, strict=True))
    assert results[1].isneginf().any()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("at", [-45.0, -9.0, -8.0, 0.0, 9.0, 10.0, 40.0, 45.0, math.nan, math.inf])
def test_a_reference_costs_no_accuracy_wherever_it_lies(dtype, at):
    """Many equal scores in the last place that P has room for are the worst: all err alike."""
    plan = planned(f"dec_{dtype}_d64_causal_r8n128_fixed")
    named = inputs(plan, Case(Sizes(1, 2, 1, 1, 4_096), references=(at,)), 0, device="cpu")
    named["k"][:] = named["k"][:, :1]
    named["v"] = named["v"].abs() + 1
    out, lse = compute(plan, **named)
    del named["reference"]
    expected, expected_lse = attend(**named, mask=plan.mask)
    error = ((out.double() - expected) / expected).abs().max()
    assert error < (2**-10 if dtype == "fp16" else 2**-7)
    assert torch.allclose(lse.double(), expected_lse, atol=1e-4)


def test_outputs_are_full_of_what_is_no_number():
    named = inputs(FIRST, Case(Sizes(2, 4, 2, 3, 5)), seed=0, device="cpu")
    assert all(tensor.isnan().all() for tensor in outputs(named).values())
