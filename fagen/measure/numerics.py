"""How far numbers are from others: units in the last place, root mean squares, and what may be."""

import math

import torch
from torch import Tensor

from fagen.problem import Cell
from fagen.vocab import DTYPES

AGREEMENT = 8  # units in the last place that two right kernels may differ by, at the largest output
FP8_AGREEMENT = 0.1  # of the output's size, root mean squares: e4m3 of N(0, 1) is off by 0.05


def unit_in_last_place(value: float, dtype: torch.dtype) -> float:
    """The distance of neighbouring numbers of `dtype` at |value|; the smallest one at 0."""
    info = torch.finfo(dtype)
    exponent = math.floor(math.log2(max(abs(value), info.smallest_normal)))
    return math.ldexp(info.eps, exponent)


def largest(x: Tensor) -> float:
    """max |x|, 0 of nothing; torch's maximum is NaN where any number is."""
    return float(x.abs().max()) if x.numel() else 0.0


def rms(x: Tensor) -> float:
    """The root mean square, 0 of nothing."""
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def disagreement(cell: Cell, out: Tensor, judge: Tensor) -> tuple[float, float]:
    """By how much an output differs from another implementation's, and by how much it may."""
    difference = out.float() - judge.float()
    if DTYPES[cell.problem.dtype].fp8:
        return rms(difference), FP8_AGREEMENT * rms(judge)
    return largest(difference), AGREEMENT * unit_in_last_place(largest(judge), judge.dtype)
