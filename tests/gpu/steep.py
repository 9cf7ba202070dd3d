"""Scores that rise and fall along the keys, for maxima that a kernel has to raise while it runs."""

import math

import torch
from torch import Tensor

from fagen.kinds.forward.plan import Plan

LEVELS = (5.0, 1.5, -1.0, 2.5, 0.0)  # log2 units, of the first keys to the last, which come first
SLOPES = (1.0, -1.0, 0.0, 0.25, 2.0**-5)


def levels(seqlen: int, device: str = "cuda") -> Tensor:
    """Of each key, what its scores are in a row of slope 1: wherever a tile may begin or end."""
    of_key = torch.arange(seqlen, device=device) * len(LEVELS) // seqlen
    return torch.tensor(LEVELS, device=device)[of_key] * math.log(2)


def slopes(seqlen: int, device: str = "cuda") -> Tensor:
    """Of each row, what its levels are multiplied by: rows of each kind lie in one warp."""
    return torch.tensor(SLOPES, device=device)[torch.arange(seqlen, device=device) % len(SLOPES)]


def coarseness(of: Plan) -> float:
    """What an e4m3 kernel's output may be off by here, of its size, beside a textbook's error.

    Keys of one level have nearly equal scores. Relative to the row's true maximum their P is a
    power of two, which e4m3 holds: a textbook is exact. Relative to an older maximum, as a lazy one
    or one with a threshold may be, P is anywhere between two numbers of e4m3, all of them off by
    the same up to 2^-4; and the row's sum, of P before it was rounded, does not make that good. So
    it is of a row in which a few keys have much of the weight: on an H100 one with two of 15 and
    12 % was off by 2.4 of a textbook's error, and a textbook whose maxima were off by a fraction of
    a power of two was off by as much.
    """
    softmax = of.schedule.softmax
    exact = softmax.maximum == "online" and softmax.rescale_threshold == 0
    return 0.0 if exact else 2.0**-4
