"""Tensors that tests are made of: the same numbers each time."""

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaves(*tensors: Tensor) -> list[Tensor]:
    """Copies that require a gradient."""
    return [x.detach().clone().requires_grad_() for x in tensors]


def ints(*numbers: int) -> Tensor:
    """Lengths, or offsets, as calls take them."""
    return torch.tensor(numbers, dtype=torch.int32)
