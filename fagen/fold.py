"""The fold of partial outputs in the order of their splits: its definition, and its numbers.

A split is (o, lse): its output, normalised by its own sum, and its log-sum-exp in natural
logarithm. Beginning with m = -inf, s = 0, acc = 0, each split in turn does

    d = lse - m                       how far it lies above the largest LSE so far
    w = exp(-|d|)                     as below
    old, own = (w, 1) if d > 0 else (1, w);   (1, 0) where lse = -inf
    s = s · old + own
    acc = acc · old + o · own         o counts as 0 where own = 0: it may hold anything
    m = max(m, lse)                   the other one where one is not a number

and after the last one

    out = acc · (1 / s), rounded once more to its dtype;   0 where s = 0
    lse = m + ln(s);   -inf where s = 0

Kernels that merge chunks of their own keep an LSE in two parts, since fp32 rounds that of large
scores: the score m that P is relative to, before it is scaled, and the sum of P, s. A chunk is
(o, m, s), o a sum of P V that is not normalised. The fold is the same but for

    d = (its m - the largest m so far) · scale
    s = s · old + its s · own

and lse = m · scale + ln(s) at the end. Where a chunk saw no key m is -inf, and o a number or NaN.

All of it is fp32, each operation rounded to nearest by itself: no fused multiply-add, no
approximation of the hardware, no flushed subnormals. So the bits of out and lse depend on the
splits and their order alone: not on threads, tiles or batch, not on whether a kernel reads the
partials from memory or folds them as it makes them, not on a GPU or a CPU. One of old and own is
exactly 1, so one split comes out as it went in, and s lies in 1 … the number of splits. A split
without keys, lse = -inf, changes nothing; nor does one that lies 86 below, whose weight is 0.
No +inf is made of finite numbers: where nothing was seen the LSE is -inf. An LSE that is not a
number makes the row's output and LSE so; +inf takes all weight.

exp(-a), a >= 0:

    x = a · -LOG2_E;   0 if x < LEAST_EXPONENT
    y = x + ROUND;  n = y - ROUND;  f = x - n           n is the nearest whole number
    p = EXP2[-1];  p = p · f + c for the other c of EXP2, backwards;  p = p · f + 1
    p · 2^n                                              exact: a product of normal numbers

ln(s), s >= 1:

    e = (bits(s) - SQRT_HALF_BITS) >> 23                 s · 2^-e in √½ … √2
    t = s · 2^-e - 1                                     both exact
    q = LOG[-1];  q = q · t + c for the other c of LOG, backwards
    e · LN_2 + (t + (t · t) · q)

Both are within 1.5 units in the last place.
"""

import struct


def _fp32(number: float) -> float:
    """The fp32 number nearest to this one."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


LOG2_E = _fp32(1.4426950408889634)
LN_2 = _fp32(0.6931471805599453)
ROUND = 1.5 * 2**23  # what is added to it has no fraction
LEAST_EXPONENT = -125.0  # so that p · 2^n is no subnormal number
SQRT_HALF_BITS = 0x3F3504F3

# (2^f - 1) / f for |f| <= 1/2, and (ln(1 + t) - t) / t² for 1 + t in √½ … √2: fitted to the least
# relative error, 2e-9 and 3e-8 before they were rounded to fp32
EXP2 = tuple(
    map(
        _fp32,
        (0.69314718, 0.24022648, 0.055503324, 0.0096184369, 0.0013398875, 0.0001535336),
    )
)
LOG = tuple(
    map(
        _fp32,
        (
            *(-0.49999982, 0.33333933, -0.25002584, 0.19963476),
            *(-0.16551794, 0.148837, -0.14426842, 0.089794345),
        ),
    )
)
