"""The emulated e4m3 kernel against fp64 over what its bytes stand for, and how bytes are made."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from fagen.e4m3 import (
    Quantized,
    by_columns,
    by_rows,
    rotate,
    rounded,
    to_e4m3,
)
from fagen.kinds.forward.emulate import emulate, emulate_fp8
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.plan import Plan, plan
from fagen.vocab import KEY_ORDER
from tests.tensors import normal

SHAPES = [  # batch, queries, keys, heads, KV heads
    (1, 64, 64, 1, 1),
    (2, 130, 200, 4, 2),
    (1, 1, 300, 2, 1),
    (1, 97, 33, 2, 2),
]


def planned(**changes) -> Plan:
    keys = dict(head_dim=64, dtype="e4m3", mask="full", block_m=64, block_n=64, out_dtype="fp16")
    return plan(Schedule.make(**keys | changes))


def made(plan: Plan, shape: tuple[int, ...] = SHAPES[0], seed: int = 0) -> list[Quantized]:
    """Q, K and V as a Plan's scales want them, heads and rows of very different sizes."""
    batch, seqlen_q, seqlen_k, heads, kv_heads = shape
    sizes = ((seqlen_q, heads, plan.head_dim), (seqlen_k, kv_heads, plan.head_dim))
    tensors = []
    for at, (length, count, columns) in enumerate((*sizes, (seqlen_k, kv_heads, plan.head_dim_v))):
        x = normal(batch, length, count, columns, seed=seed + at)
        x = x * (1 + torch.arange(length) // 32 % 3)[:, None, None]
        tensors.append(x)
    return quantised(plan, *tensors)


def quantised(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> list[Quantized]:
    fp8 = plan.schedule.fp8
    scales = (fp8.scales, fp8.scales, fp8.v_scales)
    pairs = zip((q, k, v), scales, strict=True)
    return [rounded(x, shared, plan.scales.rows) for x, shared in pairs]


def numbers(plan: Plan, q: Quantized, k: Quantized, v: Quantized) -> list[Tensor]:
    """What bytes stand for."""
    by_block = plan.scales.v_by_block
    values = v.real(plan.scales.rows) if by_block else v.values.float() * v.descale[:, None]
    return [q.real(plan.scales.rows), k.real(plan.scales.rows), values]


def attend(plan: Plan, q: Quantized, k: Quantized, v: Quantized, scale: float = 0.125, **more):
    """Attention with sums in fp32, unless asked for others: what is left are its roundings."""
    more = {"hopper_sums": False} | more
    values = v.values if plan.v_rows else by_columns(v.values)
    descales = q.descale, k.descale, v.descale
    return emulate_fp8(plan, q.values, k.values, values, scale, *descales, **more)


def exact(plan: Plan, q: Quantized, k: Quantized, v: Quantized, scale: float = 0.125):
    return reference(*numbers(plan, q, k, v), mask=plan.mask.name, scale=scale)


# ---- the kernel ---------------------------------------------------------------------------------


BY_HEAD = [dict(scales="head", v_layout=layout) for layout in ("rows", "columns")]
BY_BLOCK = [
    dict(scales="block", scale_rows=rows, v_scales=v_scales, **maximum)
    for rows, v_scales, maximum in product(
        (32, 64), ("column", "block"), ({}, dict(rescale_threshold=4.0), dict(maximum="lazy"))
    )
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("form", [*BY_HEAD, *BY_BLOCK], ids=str)
def test_whatever_shares_a_scale_only_the_rounding_of_p_is_lost(shape, mask, form):
    plan = planned(mask=mask, **form)
    held_against_fp64(plan, made(plan, shape))


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("scales", [{}, dict(scales="block", scale_rows=32)], ids=str)
def test_means_are_added_to_what_bytes_stand_for(mask, scales):
    """Of V to rows that see a key, of K to the log-sum-exp: O does not notice."""
    plan = planned(mask=mask, **scales)
    tensors = made(plan, (2, 130, 100, 4, 2))
    v_mean, k_mean = normal(2, 2, 64, seed=7), normal(1, 2, 64, seed=8)
    q, k, v = numbers(plan, *tensors)
    real = q, k + k_mean[:, None], v + v_mean[:, None]
    expected, expected_lse = reference(*real, mask=mask, scale=0.125)
    out, lse = attend(plan, *tensors, v_mean=v_mean, k_mean=k_mean)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=3e-5)
    assert (out - expected).square().mean().sqrt() <= 0.03 * v.square().mean().sqrt()
    rows = 130 if mask == "full" else 100
    assert not out[:, : 130 - rows].any()


def held_against_fp64(plan: Plan, tensors: list[Quantized], lse_off: float = 2e-5) -> None:
    out, lse = attend(plan, *tensors)
    expected, expected_lse = exact(plan, *tensors)
    # row sums are of p before it was rounded; minus infinity is that of rows without a key alone
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=lse_off)
    # an element of P is off by a sixteenth of itself at most, and by less than the least step
    largest = numbers(plan, *tensors)[2].abs().amax()
    assert (out - expected).abs().amax() <= (2**-4 + 2**-9) * largest
    assert (out - expected).square().mean().sqrt() <= 0.03 * expected.square().mean().sqrt()
    assert out.dtype == torch.float16


def test_equal_scores_make_a_mean_without_error():
    plan = planned()
    q, k, v = made(plan, (1, 64, 128, 1, 1))
    q = Quantized(torch.zeros_like(q.values), q.descale)
    out, lse = attend(plan, q, k, v)
    mean = numbers(plan, q, k, v)[2].mean(1, keepdim=True)
    torch.testing.assert_close(out.float(), mean.expand_as(out), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(128)))


def test_descales_of_blocks_that_are_all_one_number_are_a_heads():
    by_head, other = planned(), planned(scales="block", scale_rows=32)
    tensors = made(by_head, (1, 96, 150, 2, 1))
    ones = [Quantized(x.values, torch.ones(1, 1, 1)) for x in tensors]
    blocks = [Quantized(x.values, torch.ones(1, 1, -(-x.values.shape[1] // 32))) for x in tensors]
    blocks[2] = ones[2]
    for a, b in zip(attend(by_head, *ones, 0.002), attend(other, *blocks, 0.002), strict=True):
        assert torch.equal(a, b)


def test_a_block_of_v_that_is_much_smaller_does_not_lose_its_weight():
    """Its probabilities shrink with its descale, yet count in the row's sum as they are."""
    plan = planned(scales="block", scale_rows=32, v_scales="block")
    q, k, v = (x.real(32) for x in made(plan, (1, 64, 64, 1, 1)))
    for size in (0.0, 1e-6, 1e4):
        v[:, :32] = v[:, :32].sign() * size
        tensors = [rounded(x, "block", 32) for x in (q, k, v)]
        out, lse = attend(plan, *tensors)
        expected, expected_lse = exact(plan, *tensors)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)
        assert (out - expected).abs().amax() <= 0.07 * v.abs().amax()


@pytest.mark.parametrize("v_scales", ["column", "block"])
def test_a_row_with_one_key_that_matters_is_that_keys_v(v_scales):
    """Its p is a power of two and not rounded, whatever V's scale in that block is."""
    plan = planned(scales="block", scale_rows=32, v_scales=v_scales)
    q, k, v = torch.zeros(1, 4, 1, 64), torch.zeros(1, 128, 1, 64), normal(1, 128, 1, 64)
    v[:, 32:64] *= 0.7
    q[..., 0], k[:, 40, :, 0] = 30, 30
    tensors = quantised(plan, q, k, v)
    out, _ = attend(plan, *tensors, 1.0)
    expected = numbers(plan, *tensors)[2][:, 40:41].expand_as(out)
    torch.testing.assert_close(out.float(), expected, rtol=1e-3, atol=1e-5)


def test_p_stays_in_the_range_of_e4m3_whatever_the_threshold():
    """A row max as stale as it may be: P is 2 to the 8.75, and not cut off."""
    plan = planned(head_dim=16, maximum="online", rescale_threshold=4.0, p_offset=4.75)
    k = torch.zeros(1, 128, 1, 16)
    k[:, :64, :, 0] = 4 * math.log(2)  # met second
    q = torch.zeros(1, 1, 1, 16)
    q[..., 0] = 1
    ones = torch.ones(1, 1, 1)
    tensors = [Quantized(to_e4m3(x), ones) for x in (q, k, torch.ones(1, 128, 1, 16))]
    p = 2 ** (plan.softmax.p_offset + float(tensors[1].values.float().amax()) / math.log(2))
    assert 400 < p < 448
    out, _ = attend(plan, *tensors, 1.0)
    rounded = to_e4m3(torch.tensor([p, 2**4.75])).float()
    expected = float(rounded.sum() / (p + 2**4.75))
    assert out[0, 0, 0, 0].item() == pytest.approx(expected, rel=1e-3)


# ---- the lazy row max ---------------------------------------------------------------------------


SLOPES = (1.0, -1.0, 0.0, 2.0**-4, 2.0**-6)  # of rows, in turn: so a warp has some of each


def steep(plan: Plan, shape: tuple[int, ...], levels: tuple[float, ...]) -> list[Quantized]:
    """Little noise upon scores that have a level, in log2 units, in each block, by rows' slopes."""
    _, seqlen_q, seqlen_k, _, _ = shape
    q, k, v = numbers(plan, *made(plan, shape))
    of_key = torch.tensor(levels).repeat_interleave(plan.block_n)[:seqlen_k]
    q, k = q / 16, k / 16
    q[..., 0] = torch.tensor(SLOPES)[torch.arange(seqlen_q) % len(SLOPES)][:, None]
    k[..., 0] = of_key[:, None] * math.log(2) / 0.125
    return quantised(plan, q, k, v)


@pytest.mark.parametrize("shape", [(1, 130, 250, 4, 2), (2, 200, 140, 2, 1)], ids=str)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("more", [{}, dict(scales="block", scale_rows=32)], ids=str)
@pytest.mark.parametrize(
    "levels", [(400, 150, -300, 100), (-600, 300, -200, 100), (12, 9, 4, 0)], ids=str
)
@pytest.mark.parametrize("maximum", ["lazy", "online"])
def test_a_row_max_follows_scores_that_rise_and_fall_by_hundreds(
    levels, more, mask, shape, maximum
):
    """By more than exp2 holds: a lazy guess is infinite in some rows, and zero in others."""
    plan = planned(mask=mask, maximum=maximum, **more)
    # scores are sums in fp32, as inexact as they are large
    held_against_fp64(plan, steep(plan, shape, levels), lse_off=1e-3)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_an_outlier_in_one_column_of_v_costs_the_others_nothing(mask):
    """By column; a scale of a block of rows enters the exponents, and P of all others goes down."""
    off = {}
    for v_scales in ("column", "block"):
        plan = planned(mask=mask, scales="block", scale_rows=64, v_scales=v_scales)
        q, k, v = numbers(plan, *made(plan, (1, 64, 512, 1, 1)))
        v[:, 500, :, 5] = 4096
        tensors = quantised(plan, q, k, v)
        out, _ = attend(plan, *tensors)
        truth = reference(*numbers(plan, *tensors)[:2], v, mask=mask, scale=0.125)[0]
        others = torch.arange(64) != 5
        off[v_scales] = float((out - truth)[..., others].square().mean().sqrt())
    assert 3 * off["column"] < off["block"]


def test_without_keys_or_queries_there_is_nothing_to_compute():
    plan = planned()
    for queries, keys in ((0, 5), (5, 0)):
        q = to_e4m3(torch.zeros(1, queries, 1, 64))
        k = to_e4m3(torch.zeros(1, keys, 1, 64))
        ones = torch.ones(1, 1, 1)
        out, lse = emulate_fp8(plan, q, k, by_columns(k), 1.0, ones, ones, ones)
        assert out.shape == (1, queries, 1, 64) and not out.any()
        assert (lse == -math.inf).all()


# ---- whose row max is raised, in 16 bits as well ------------------------------------------------

FORMS = (
    dict(dtype="fp16"),
    dict(),
    dict(scales="block", scale_rows=64),
)


def run(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of numbers by an emulated Plan of any dtype."""
    if plan.dtype.name == "fp16":
        return emulate(plan, q.half(), k.half(), v.half(), 0.125)
    return attend(plan, *quantised(plan, q, k, v))


def both(q: Tensor, k: Tensor, v: Tensor, **keys) -> tuple[tuple[Tensor, Tensor], ...]:
    """With a lazy row max, and with one that is raised whenever it can be."""
    lazy, online = (run(planned(maximum=how, **keys), q, k, v) for how in ("lazy", "online"))
    return lazy, online


@pytest.mark.parametrize("levels", [(-600, -300, -40, 0), (600, 300, 60, 0), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_lazy_and_online_are_the_same_where_both_raise_or_neither(levels, form):
    """Each row's maximum is in its first block, or each block outgrows the last, or none does."""
    q, k, v = (normal(1, rows, heads, 64) for rows, heads in ((70, 2), (256, 1), (256, 1)))
    q[..., 0], q[..., 1:], k[..., 1:] = 1, 0, 0
    k[..., 0] = torch.tensor(levels).repeat_interleave(64)[:, None] * 8 * math.log(2)
    results, expected = both(q, k, v, **form)
    assert torch.equal(results[0], expected[0]) and torch.equal(results[1], expected[1])


@pytest.mark.parametrize("form", [FORMS[0], dict(p_offset=4.0)], ids=str)
def test_one_rows_rise_raises_its_warp_and_no_other(form):
    q, k, v = normal(1, 40, 1, 64), normal(1, 128, 1, 64, seed=1), normal(1, 128, 1, 64, seed=2)
    q[..., 0], q[:, 20, :, 0] = 1, 64
    k[:, :64, :, 0], k[:, 64:, :, 0] = 8, 0  # every row's maximum rises in its second block
    (lively, _), (moved, _) = both(q, k, v, **form)
    q[:, 20, :, 0] = -64  # which falls, and leaves scales as they are
    (calm, _), _ = both(q, k, v, **form)
    warp = slice(16, 32)
    assert torch.equal(lively[:, warp], moved[:, warp])
    for others in (slice(16), slice(32, 40)):
        assert torch.equal(lively[:, others], calm[:, others])
        assert not torch.equal(lively[:, others], moved[:, others])


# ---- Hopper's sums ------------------------------------------------------------------------------


def test_hoppers_sums_lose_more_the_longer_they_are_and_promoting_helps():
    """Every p is 256, and V's values have one sign, so that a sum grows beyond its terms."""
    plain, promoted = planned(head_dim=16), planned(head_dim=16, promote=1)
    off = {}
    for keys in (256, 2048):
        q, k, v = made(plain, (1, 4, keys, 1, 1))
        q = Quantized(torch.zeros_like(q.values), q.descale)
        v = Quantized(to_e4m3(v.values.float().abs()), v.descale)
        mean = numbers(plain, q, k, v)[2].mean(1, keepdim=True)
        off[keys] = [
            float((attend(plan, q, k, v, hopper_sums=True)[0] / mean - 1).abs().amax())
            for plan in (plain, promoted)
        ]
        torch.testing.assert_close(  # in fp32 it matters little where one adds up
            attend(promoted, q, k, v)[0], attend(plain, q, k, v)[0], rtol=1e-3, atol=1e-4
        )
    assert off[2048][0] > 4 * off[256][0] > 0
    assert off[2048][1] < off[2048][0] / 20
    assert off[2048][1] < 0.01


# ---- how bytes are made -------------------------------------------------------------------------


def test_rounding_is_to_the_nearest_then_to_even_and_stops_at_448():
    x = torch.tensor([17.0, 19.0, 18.9, 447.0, 449.0, 1e9, -1e9, 2.0**-10, 3 * 2.0**-10, math.nan])
    rounded = to_e4m3(x).float()
    assert rounded[:-1].tolist() == [16, 20, 18, 448, 448, 448, -448, 0, 2**-8]
    assert rounded[-1].isnan()


@pytest.mark.parametrize("scales", ["head", "tensor", "column", "block"])
def test_the_largest_magnitude_of_what_shares_a_scale_becomes_448(scales):
    x = normal(2, 100, 3, 48) * torch.tensor([1.0, 5.0, 0.1])[:, None]
    x[0, 0, 0, 0] = -4000
    rows = 32 if scales == "block" else 0
    quantized = rounded(x, scales, rows)
    assert quantized.values[0, 0, 0, 0].float() == -448
    largest = {
        "head": x.abs().amax((1, 3))[..., None],
        "tensor": x.abs().amax().expand(2, 3, 1),
        "column": x.abs().amax(1),
        "block": torch.stack([part.abs().amax((1, 3)) for part in x.split(32, 1)], -1),
    }
    torch.testing.assert_close(quantized.descale, largest[scales] / 448)
    by_column = quantized.descale[:, None] if scales == "column" else None
    real = quantized.real(rows) if by_column is None else quantized.values.float() * by_column
    step = quantized.descale.amax() if by_column is None else by_column
    assert ((real - x).abs() <= x.abs() * 2**-4 * 1.0001 + step * 2**-10).all()


def test_columns_without_a_row_have_scales():
    none = rounded(torch.zeros(2, 0, 3, 48), "column")
    assert none.descale.shape == (2, 3, 48) and (none.descale > 0).all()


def test_transposed_v_has_the_keys_of_each_sixteen_in_the_order_of_p():
    v = torch.arange(35.0).view(1, 35, 1, 1).expand(1, 35, 2, 3)
    columns = by_columns(v)
    assert columns.shape == (1, 2, 3, 48)
    assert columns[0, 1, 2, :16].tolist() == list(KEY_ORDER)
    assert columns[0, 0, 0, 16:32].tolist() == [16 + key for key in KEY_ORDER]
    assert columns[0, 0, 0, 32:].tolist() == [32, 33, *[0] * 2, 34, *[0] * 11]
    assert torch.equal(by_rows(columns, 35), v)


def test_a_rotation_by_no_signs_is_the_matrix_that_sylvester_wrote_down():
    rotated = rotate(torch.eye(4), torch.ones(4)) * 2
    assert rotated.tolist() == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
