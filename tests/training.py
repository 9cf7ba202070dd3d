"""A layer whose attention is fagen's, and a few steps of training it, by several processes too."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.multiprocessing
from torch import Tensor

import fagen

STEPS, HEADS = 12, 2
RANKS, WRAPS = 2, ("ddp", "fsdp2")


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
def process_group(backend: str, folder: Path, rank: int = 0, ranks: int = 1) -> Iterator[None]:
    """A process group of this process, or of so many that call it with the same new folder."""
    torch.distributed.init_process_group(
        backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks
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
    x, target = (torch.randn(2, 64, HEADS * head_dim, device=device) for _ in range(2))
    losses_ = []
    for _ in range(STEPS):
        with torch.autocast(device, torch.bfloat16):
            loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses_.append(loss.item())
    return losses_


# ---- by several processes -----------------------------------------------------------------------


def shared_gradients(head_dim: int, device: str, folder: Path) -> dict[str, list[Tensor]]:
    """By wrapper, the gradient of each of RANKS processes, which have a part of a batch each."""
    torch.multiprocessing.spawn(_one_rank, (head_dim, device, folder), nprocs=RANKS)
    ranks = [torch.load(folder / str(rank)) for rank in range(RANKS)]
    return {wrap: [rank[wrap] for rank in ranks] for wrap in WRAPS}


def mean_gradient(head_dim: int, device: str) -> Tensor:
    """The mean of the gradients of these parts, by this process alone."""
    gradients = []
    for rank in range(RANKS):
        layer = _layer(head_dim).to(device)
        _lose(layer, rank, head_dim, device)
        assert layer.qkv.weight.grad is not None
        gradients.append(layer.qkv.weight.grad.cpu())
    return torch.stack(gradients).mean(0)


def _layer(head_dim: int) -> Layer:
    torch.manual_seed(0)
    return Layer(head_dim)


def _lose(layer: torch.nn.Module, part: int, head_dim: int, device: str) -> None:
    """Find the gradients of one part of a batch, of which each has sequences of its own."""
    dice = torch.Generator().manual_seed(part)
    x, target = torch.randn(2, 2, 64, HEADS * head_dim, generator=dice).to(device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        loss = (layer(x) - target).square().mean()
    loss.backward()


def _one_rank(rank: int, head_dim: int, device: str, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    gradients = {}
    with process_group({"cpu": "gloo", "cuda": "nccl"}[device], folder, rank, RANKS):
        mesh = init_device_mesh(device, (RANKS,))  # a GPU is taken by itself where there is one
        wraps = torch.nn.parallel.DistributedDataParallel, partial(fully_shard, mesh=mesh)
        for wrap, by in zip(WRAPS, wraps, strict=True):
            layer = _layer(head_dim).to(device)
            _lose(by(layer), rank, head_dim, device)
            gradient = layer.qkv.weight.grad
            assert gradient is not None
            if wrap == "fsdp2":  # each has rows of it
                assert gradient.to_local().shape[0] * RANKS == gradient.shape[0]
                gradient = gradient.full_tensor()
            gradients[wrap] = gradient.cpu()
    torch.save(gradients, folder / str(rank))
