"""Scores that rise and fall along the keys, for maxima that a kernel has to raise while it runs."""

import math

import torch
from torch import Tensor

LEVELS = (5.0, 1.5, -1.0, 2.5, 0.0)  # log2 units, of the first keys to the last, which come first
SLOPES = (1.0, -1.0, 0.0, 0.25, 2.0**-5)


def levels(seqlen: int, device: str = "cuda") -> Tensor:
    """Of each key, what its scores are in a row of slope 1: wherever a tile may begin or end."""
    of_key = torch.arange(seqlen, device=device) * len(LEVELS) // seqlen
    return torch.tensor(LEVELS, device=device)[of_key] * math.log(2)


def slopes(seqlen: int, device: str = "cuda") -> Tensor:
    """Of each row, what its levels are multiplied by: rows of each kind lie in one warp."""
    return torch.tensor(SLOPES, device=device)[torch.arange(seqlen, device=device) % len(SLOPES)]
