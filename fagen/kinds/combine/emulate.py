"""Partial outputs and their LSEs in, what the kernel makes of them out, to the bit, in torch.

The fold is that of fagen.kinds.combine.fold: fp32 operations in the order of the splits, each
rounded by itself, so that a CPU has the bits that a GPU has.
"""

import math

import torch
from torch import Tensor

from fagen.kinds.combine import fold
from fagen.kinds.combine.plan import Plan
from fagen.kinds.combine.reference import counting

_FRACTION_BITS = 23  # of fp32
_BIAS = 127


def compute(
    plan: Plan,
    outs: Tensor,
    lses: Tensor,
    num_splits: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Combine outs (splits, …, Sq, H, Dv) and lses (splits, …, H, Sq) as the Plan's kernel does.

    A packed row before the first sequence or behind the last has no split.
    """
    rows = counting(lses.transpose(-1, -2), num_splits, cu_seqlens)  # (splits, …, Sq, H)
    total = outs.new_zeros(outs.shape[1:], dtype=torch.float32)
    maximum = outs.new_full(rows.shape[1:], -math.inf, dtype=torch.float32)
    summed = torch.zeros_like(maximum)
    for out, lse in zip(outs, rows, strict=True):
        old, own = weights(lse, maximum)
        summed = summed * old + own
        number = out.float().masked_fill((own == 0)[..., None], 0)
        total = total * old[..., None] + number * own[..., None]
        maximum = torch.fmax(maximum, lse)
    inverse = torch.where(summed == 0, 0, 1 / summed)
    combined = (total * inverse[..., None]).to(getattr(torch, plan.out_dtype.torch))
    return combined, (maximum + log_above(summed)).transpose(-1, -2).contiguous()


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
