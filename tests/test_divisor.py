"""A kernel divides by multiplying: exact for all that it divides, here as in its own code."""

import re

from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import plan
from fagen.render import render
from tests.programs import answers, compiled

NUMERATORS = 1 << 31  # n is below
NEAR_POWERS = {(1 << bits) + off for bits in range(1, 31) for off in range(-3, 4)}
DIVISORS = sorted(set(range(1, 2001)) | {d for d in NEAR_POWERS if 0 < d <= 1 << 30})

PROGRAM = """\
{divisor}
int main() {{
  for (int d, n; std::scanf("%d %d", &d, &n) == 2;) {{
    const {name} by(d);
    std::printf("%u %d %d\\n", by.multiplier, by.shift, by.divide(n));
  }}
}}
"""


def constants(divisor: int) -> tuple[int, int]:
    """Multiplier and shift, as the constructor on the host works them out."""
    if divisor == 1:
        return 0, 0
    shift = 0
    while (2 << shift) < divisor:
        shift += 1
    return ((1 << (32 + shift)) + divisor - 1) // divisor, shift


def divide(n: int, multiplier: int, shift: int) -> int:
    return (n * multiplier >> 32) >> shift if multiplier else n


def edges(divisor: int) -> list[int]:
    """Numerators on both sides of where the quotient grows: of the first, the middle, the last."""
    last = (NUMERATORS - 1) // divisor
    multiples = {k * divisor for k in (1, 2, 3, last // 2, last - 1, last, last + 1)}
    near = {n + off for n in multiples for off in (-1, 0, 1)}
    return sorted(n for n in near | {0, NUMERATORS - 1} if 0 <= n < NUMERATORS)


def test_a_product_and_a_shift_are_the_quotient_at_every_edge():
    for divisor in DIVISORS:
        multiplier, shift = constants(divisor)
        assert multiplier < 1 << 32, divisor
        for n in edges(divisor):
            assert divide(n, multiplier, shift) == n // divisor, (n, divisor)


def test_the_multiplier_is_as_near_as_the_theorem_asks_so_that_it_holds_between_the_edges_too():
    """Exact below 2^N where 2^(N+l) <= m d <= 2^(N+l) + 2^l, with l the bits of d rounded up."""
    for divisor in DIVISORS[1:]:
        multiplier, shift = constants(divisor)
        bits = (divisor - 1).bit_length()
        assert shift == bits - 1
        assert 0 <= multiplier * divisor - (1 << (31 + bits)) <= 1 << bits, divisor


def test_the_kernels_own_code_gives_the_same(tmp_path):
    kernel = render(plan(Schedule.from_slug("fwd_fp16_d64_causal_m64n64"))).kernel
    divisor = re.search(r"^struct (\w*Divisor) \{.*?^\};", kernel, re.M | re.S)
    assert divisor
    program = compiled(PROGRAM.format(divisor=divisor[0], name=divisor[1]), tmp_path)
    pairs = [(divisor, n) for divisor in DIVISORS for n in edges(divisor)]
    expected = [f"{m} {s} {n // d}" for d, n in pairs for m, s in [constants(d)]]
    assert answers(program, pairs) == expected
