"""A layer whose attention is fagen's, and a few steps of training it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

import fagen

STEPS, HEADS = 12, 2


class Layer(torch.nn.Module):
    """Causal self-attention of two heads, without more."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.qkv = torch.nn.Linear(HEADS * head_dim, 3 * HEADS * head_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, self.head_dim)).unbind(2)
        return fagen.attention(q, k, v, causal=True).flatten(-2).float()


@contextmanager
def process_group(backend: str, folder: Path) -> Iterator[None]:
    """A process group of this process."""
    torch.distributed.init_process_group(
        backend, init_method=f"file://{folder}/meeting", rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def losses(
    wrap: Callable[[torch.nn.Module], torch.nn.Module], head_dim: int, device: str
) -> list[float]:
    """Of each step of a wrapped layer that learns one batch, under autocast in bf16."""
    torch.manual_seed(0)
    layer = wrap(Layer(head_dim).to(device))
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    x, wanted = (torch.randn(2, 64, HEADS * head_dim, device=device) for _ in range(2))
    found = []
    for _ in range(STEPS):
        with torch.autocast(device, torch.bfloat16):
            loss = (layer(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
