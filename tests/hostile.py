"""Inputs that are hard on a softmax in blocks: for tests with and without a GPU."""

import torch
from torch import Tensor


def needle(
    rows: int, keys: int, columns: int, height: float, dtype: torch.dtype, first: int = 1
) -> tuple[Tensor, Tensor]:
    """Return q and k whose first keys have a score of `height`, and all others 0."""
    q = torch.zeros(1, rows, 1, columns, dtype=dtype)
    k = torch.zeros(1, keys, 1, columns, dtype=dtype)
    q[..., 0] = 1
    k[:, :first, :, 0] = height
    return q, k
