"""Inputs that are hard on a softmax in blocks: for tests with and without a GPU."""

import torch
from torch import Tensor


def one_score(
    rows: int, keys: int, columns: int, size: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return q (1, rows, 1, columns) and k (1, keys, 1, columns) of which all products are equal.

    A power of two, positive or negative as `size` is, for a scale that is no power of two.
    """
    q = torch.zeros(1, rows, 1, columns, dtype=dtype)
    k = torch.zeros(1, keys, 1, columns, dtype=dtype)
    q[..., 0], k[..., 0] = 2.0**8, 2.0**8 if size > 0 else -(2.0**8)
    return q, k


def needle(
    rows: int, keys: int, columns: int, height: float, dtype: torch.dtype, first: int = 1
) -> tuple[Tensor, Tensor]:
    """Return q and k whose first keys have a score of `height`, and all others 0."""
    q = torch.zeros(1, rows, 1, columns, dtype=dtype)
    k = torch.zeros(1, keys, 1, columns, dtype=dtype)
    q[..., 0] = 1
    k[:, :first, :, 0] = height
    return q, k
