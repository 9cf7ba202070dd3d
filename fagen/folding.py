"""Partial outputs and their LSEs in, one output and its LSE out, to the bit, in torch.

The fold is that of fagen.fold: fp32 operations in the order of the splits, each rounded by itself,
so that a CPU has the bits that a GPU has.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from fagen import fold

_FRACTION_BITS = 23  # of fp32
_BIAS = 127


def folded(splits: Iterable[tuple[Tensor, Tensor]], like: Tensor) -> tuple[Tensor, Tensor]:
    """Fold (output, LSE) of each split, (…, D) and (…), in fp32; `like` is an output's shape.

    Without a split, or where none saw a key, that is 0 and minus infinity.
    """
    total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    maximum = total.new_full(like.shape[:-1], -math.inf)
    summed = torch.zeros_like(maximum)
    for out, lse in splits:
        old, own = weights(lse, maximum)
        summed = summed * old + own
        number = out.float().masked_fill((own == 0)[..., None], 0)
        total = total * old[..., None] + number * own[..., None]
        maximum = torch.fmax(maximum, lse)
    inverse = torch.where(summed == 0, 0, 1 / summed)
    return total * inverse[..., None], maximum + log_above(summed)


def merged(
    chunks: Iterable[tuple[Tensor, Tensor, Tensor]], like: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Merge the chunks of rows: sums of P V (…, D), the scores P is relative to, sums of P (…).

    Scores are before `scale`; like `folded` otherwise.
    """
    total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    reference = total.new_full(like.shape[:-1], -math.inf)
    summed = torch.zeros_like(reference)
    for out, score, own_sum in chunks:
        own_reference = torch.where(own_sum > 0, score, -math.inf).masked_fill(
            own_sum.isnan(), math.nan
        )
        rise = (own_reference - reference) * scale
        old, own = weights(
            rise.masked_fill(own_reference == -math.inf, -math.inf), torch.zeros_like(rise)
        )
        total = total * old[..., None] + out * own[..., None]
        summed = summed * old + own_sum * own
        reference = torch.fmax(reference, own_reference)
    inverse = torch.where(summed == 0, 0, 1 / summed)
    # of no key, even beside a V that is not finite
    total = total.masked_fill((summed == 0)[..., None], 0)
    return total * inverse[..., None], reference * scale + log_above(summed)


def weights(lse: Tensor, maximum: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the sum so far and a split's own output are multiplied by."""
    difference = lse - maximum
    weight = exp_below(difference)
    none, rises = lse == -math.inf, difference > 0
    old = torch.where(rises & ~none, weight, 1)
    own = torch.where(rises, 1, weight).masked_fill(none, 0)
    return old, own


def exp_below(difference: Tensor) -> Tensor:
    """Return exp(-|difference|), below 2^LEAST_EXPONENT 0."""
    x = difference.abs() * -fold.LOG2_E
    rounded = x + fold.ROUND
    whole = rounded - fold.ROUND
    fraction = x - whole
    p = torch.full_like(x, fold.EXP2[-1])
    for term in (*fold.EXP2[-2::-1], 1.0):
        p = p * fraction + term
    scale = (rounded.view(torch.int32) + _BIAS << _FRACTION_BITS).view(torch.float32)
    return torch.where(x < fold.LEAST_EXPONENT, 0, p * scale)


def log_above(number: Tensor) -> Tensor:
    """Return ln(number) of numbers that are 1 at least."""
    exponent = number.view(torch.int32) - fold.SQRT_HALF_BITS >> _FRACTION_BITS
    scale = (_BIAS - exponent << _FRACTION_BITS).view(torch.float32)
    t = number * scale - 1
    q = torch.full_like(t, fold.LOG[-1])
    for term in fold.LOG[-2::-1]:
        q = q * t + term
    return exponent.float() * fold.LN_2 + (t + t * t * q)
