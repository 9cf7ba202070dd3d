"""What Hopper's tensor cores add up, to the bit, in torch: a GEMM of wgmma instructions on a CPU.

One wgmma adds all products of its step, 32 of e4m3 or 16 of 16 bits, and the accumulator at once,
as was measured on an H100. All terms are aligned to the largest exponent among them and cut off
towards zero below so many bits of fraction; a product's exponent is the sum of its factors', also
where its significand is 2 or more, and a subnormal factor has the exponent of the smallest normal
number. The sum is cut off towards zero once more, to the bits of the accumulator. Works on any
device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fagen.arch import SM90

_HELD = 1 << 15  # sums held at a time: what a core's cache keeps


class Adder(NamedTuple):
    """How one wgmma adds up products of a type."""

    products: int  # at once
    least: int  # the exponent of a subnormal factor
    aligned_bits: int  # of fraction, that a term keeps beside the largest exponent
    sum_bits: int  # of fraction, that the sum keeps
    exact: torch.dtype  # in which terms in units of the last aligned bit add up exactly


_E4M3_BITS = SM90.fp8_accumulator_bits
_BITS = SM90.aligned_bits, SM90.accumulator_bits
ADDERS = {
    torch.float8_e4m3fn: Adder(32, -6, _E4M3_BITS, _E4M3_BITS, torch.float32),
    torch.float16: Adder(16, -14, *_BITS, torch.float64),
    torch.bfloat16: Adder(16, -126, *_BITS, torch.float64),
}


def product(a: Tensor, b: Tensor, dtype: torch.dtype, onto: Tensor | None = None) -> Tensor:
    """Return a (…, m, k) times b (…, k, n) as wgmma adds it up onto what is there, in fp32.

    Both hold numbers of `dtype` in fp32, and have the same leading dimensions.
    """
    adder = ADDERS[dtype]
    shape = *a.shape[:-1], b.shape[-1]
    missing = -a.shape[-1] % adder.products
    a = torch.nn.functional.pad(a, (0, missing)).flatten(0, -3).to(adder.exact)
    b = torch.nn.functional.pad(b, (0, 0, 0, missing)).flatten(0, -3).to(adder.exact)
    sums = a.new_zeros(shape) if onto is None else onto.to(adder.exact)
    result = torch.empty(shape, dtype=torch.float32, device=a.device).flatten(0, -3)
    sums = sums.flatten(0, -3)
    height = max(1, _HELD // max(1, b.shape[-1]))
    for head in range(len(a)):
        for top in range(0, a.shape[1], height):
            rows = slice(top, top + height)
            total = sums[head, rows]
            for left in range(0, a.shape[-1], adder.products):
                step = slice(left, left + adder.products)
                total = _one_step(a[head, rows, step], b[head, step], total, adder)
            result[head, rows] = total.float()
    return result.view(shape)


def _one_step(a: Tensor, b: Tensor, onto: Tensor, adder: Adder) -> Tensor:
    """Add what one wgmma does: a (m, products) times b (products, n) onto (m, n)."""
    largest = torch.maximum(_largest_product(a, b, adder), _exponent(onto))
    per_unit = _power_of_two(adder.aligned_bits - largest, adder)
    total = (onto * per_unit).trunc_()
    terms = torch.empty_like(total)
    for column, row in zip(a.split(1, 1), b, strict=True):
        torch.mul(column, row, out=terms)
        total += terms.mul_(per_unit).trunc_()
    total /= per_unit
    per_unit = _power_of_two(adder.sum_bits - _exponent(total), adder)
    return (total * per_unit).trunc_().div_(per_unit)


def _largest_product(a: Tensor, b: Tensor, adder: Adder) -> Tensor:
    """Return the largest exponent among products (m, n), and a very small one where all are zero.

    Powers of two of that many times the exponents add up to less than one more of them would be.
    """
    times = adder.products.bit_length()
    a_exponents, b_exponents = _factor_exponents(a, adder), _factor_exponents(b, adder)
    # relative to the largest of each row and column: all fp64 has room for
    a_largest, b_largest = a_exponents.amax(1, keepdim=True), b_exponents.amax(0, keepdim=True)
    powers = (
        torch.exp2(((x - most) * times).to(torch.float64)).masked_fill_(values == 0, 0.0)
        for x, most, values in ((a_exponents, a_largest, a), (b_exponents, b_largest, b))
    )
    sums = torch.mm(*powers)
    relative = torch.div(_exponent(sums), times, rounding_mode="floor")
    return torch.where(sums == 0, _NONE, relative + a_largest + b_largest)


# bias and place of the exponent in a number's bits
_LAYOUT = {torch.float32: (127, 23, torch.int32), torch.float64: (1023, 52, torch.int64)}
_NONE = -100  # the exponent beside which nothing else is cut off: below what any sum ends in


def _power_of_two(exponent: Tensor, adder: Adder) -> Tensor:
    """Return exact powers of two, made of their bits."""
    bias, place, of_bits = _LAYOUT[adder.exact]
    return ((exponent.to(of_bits) + bias) << place).view(adder.exact)


def _factor_exponents(x: Tensor, adder: Adder) -> Tensor:
    return _exponent(x).clamp_min(adder.least)


def _exponent(x: Tensor) -> Tensor:
    """Return the exponent of each number, and _NONE of what is smaller or zero."""
    _, exponent = torch.frexp(x)  # x = a fraction in [1/2, 1) · 2 ^ exponent
    return torch.where(x == 0, _NONE, exponent - 1).clamp_min(_NONE)
