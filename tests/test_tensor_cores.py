"""What a wgmma adds up, against sums worked out by hand in exact rational arithmetic."""

import math
from fractions import Fraction

import pytest
import torch

from fagen.tensor_cores import product

E4M3 = torch.float8_e4m3fn
# products at once, exponent of subnormal factors, bits of fraction of a term and of a sum
FORMS = {
    E4M3: (32, -6, 13, 13),
    torch.float16: (16, -14, 25, 23),
    torch.bfloat16: (16, -126, 25, 23),
}


def exponent(x: float) -> int:
    return math.frexp(x)[1] - 1


def cut(x: Fraction, below: int) -> Fraction:
    """Cut x off towards zero below 2 ** below."""
    unit = Fraction(2) ** below
    return int(x / unit) * unit


def added(a: list[float], b: list[float], onto: float, dtype: torch.dtype) -> float:
    """One wgmma's sum of products, worked out term by term."""
    _, least, term_bits, sum_bits = FORMS[dtype]
    terms = [
        (Fraction(x) * Fraction(y), max(exponent(x), least) + max(exponent(y), least))
        for x, y in zip(a, b, strict=True)
        if x and y
    ]
    if onto:
        terms.append((Fraction(onto), exponent(onto)))
    if not terms:
        return 0.0
    largest = max(exponent for _, exponent in terms)
    total = sum(cut(term, largest - term_bits) for term, _ in terms)
    return float(cut(total, exponent(float(total)) - sum_bits)) if total else 0.0


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Numbers of a type from its largest to its subnormal ones, a fifth of them zero."""
    wide = (-9, 7) if dtype == E4M3 else (-22, 12)
    x = torch.randn(shape) * torch.exp2(torch.randint(*wide, shape).float())
    return (x.clamp(-448, 448) * (torch.rand(shape) > 0.2)).to(dtype).float()


@pytest.mark.parametrize("dtype", FORMS, ids=str)
def test_sums_are_those_of_exact_arithmetic_cut_off_where_the_hardware_cuts(dtype):
    torch.manual_seed(0)
    step = FORMS[dtype][0]
    for size in (0.0, 2.0**-18, 1.0, 2.0**11, 2.0**21):
        a, b = drawn(dtype, 2, 3, 2 * step + 5), drawn(dtype, 2, 2 * step + 5, 4)
        onto = torch.randn(2, 3, 4) * size
        sums = product(a, b, dtype, onto)
        for at in ((i, j, k) for i in range(2) for j in range(3) for k in range(4)):
            expected = float(onto[at])
            for left in range(0, a.shape[-1], step):
                steps = slice(left, left + step)
                row, column = a[at[0], at[1], steps].tolist(), b[at[0], steps, at[2]].tolist()
                expected = added(row, column, expected, dtype)
            assert sums[at].item() == expected


def test_a_products_exponent_is_the_sum_of_its_factors_and_a_subnormal_has_the_smallest():
    """1.75 · 1.75 counts as 2^0 and 2^-9 as 2^-6, so what is beside them is cut off elsewhere."""
    a, b = torch.zeros(1, 1, 32), torch.zeros(1, 32, 1)
    a[..., 0], b[:, 0] = 1.75, 1.75
    a[..., 1:3], b[:, 1:3] = 2.0**-6, 2.0**-7  # two of 2^-13, which the sum's last bit holds
    assert product(a, b, E4M3).item() == 1.75**2 + 2.0**-12
    a[..., 0], b[:, 0] = 2.0**-9, 448.0  # 0.875, of exponent -6 + 8, beside which 2^-11 is the last
    a[..., 1:3], b[:, 1:3] = 2.0**-6, 2.0**-6
    assert product(a, b, E4M3).item() == 0.875
    a[..., 0] = 0  # a zero has no exponent
    assert product(a, b, E4M3).item() == 2.0**-11


def test_the_order_of_products_within_one_instruction_does_not_matter_and_that_of_steps_does():
    torch.manual_seed(0)
    a, b = drawn(E4M3, 1, 8, 128), drawn(E4M3, 1, 128, 8)
    within = torch.cat([torch.randperm(32) + left for left in range(0, 128, 32)])
    assert torch.equal(product(a, b, E4M3), product(a[..., within], b[:, within], E4M3))
    steps = torch.arange(128).view(4, 32).flip(0).flatten()
    assert not torch.equal(product(a, b, E4M3), product(a[..., steps], b[:, steps], E4M3))


def test_what_is_no_number_stays_in_its_row_and_column():
    a, b = torch.ones(1, 2, 32), torch.ones(1, 32, 2)
    a[0, 0, 3] = math.nan
    sums = product(a, b, E4M3)
    assert sums[0, 0].isnan().all() and (sums[0, 1] == 32).all()
    b[0, 4, 1] = math.inf
    assert product(a.nan_to_num(), b, torch.bfloat16)[0, 1].tolist() == [32, math.inf]
