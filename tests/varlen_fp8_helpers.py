"""Packed sequences in e4m3, each with descales of its own, and what they stand for."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fagen.e4m3 import to_e4m3
from tests.varlen_helpers import LENGTHS, exact, packed

E4M3 = torch.float8_e4m3fn


class Packed8(NamedTuple):
    """What the call takes, without and with names, and q, k and v that it means."""

    tensors: tuple[Tensor, ...]  # q, k, v and both offsets
    named: dict[str, Any]
    real: tuple[Tensor, Tensor, Tensor]

    def exact(self, *, causal: bool = False) -> tuple[Tensor, Tensor]:
        """Out and log-sum-exp in fp64."""
        return exact(*self.real, *self.tensors[3:], causal=causal)


def packed8(
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    *,
    by_column: bool = False,
    gap: int = 0,
) -> Packed8:
    """q of 4 heads, k and v of 2; descales differ fourfold from sequence to sequence.

    With `by_column` V has one for each column, and K and V a mean.
    """
    *qkv, at_q, at_k = packed(lengths, torch.float32, head_dim, head_dim_v, gap)
    batch, columns_v = len(lengths), head_dim_v or head_dim
    scale = 2.0 ** -(4 + torch.arange(batch) % 3 * 2.0)[:, None]  # each of them exact
    descales = [
        scale * (1 + torch.arange(heads) / 8)[None] if name != "v" else scale.expand(batch, heads)
        for name, heads in (("q", 4), ("k", 2), ("v", 2))
    ]
    means: dict[str, Tensor] = {}
    if by_column:
        descales[2] = descales[2][..., None] * (1 + torch.arange(columns_v) / columns_v)
        means["v_mean"] = torch.linspace(-1, 1, batch * 2 * columns_v).view(batch, 2, columns_v)
        means["k_mean"] = torch.linspace(1, -1, batch * 2 * head_dim).view(batch, 2, head_dim)
    bytes_, real = [], []
    for name, x, descale, at in zip("qkv", qkv, descales, (at_q, at_k, at_k), strict=True):
        values, meant = torch.zeros(x.shape).to(E4M3), torch.zeros(x.shape)
        for one, (begin, end) in enumerate(pairwise(at.tolist())):
            own = descale[one] if descale.dim() == 3 else descale[one][:, None]
            values[begin:end] = to_e4m3(x[begin:end] / own)
            meant[begin:end] = values[begin:end].float() * own
            if f"{name}_mean" in means:
                meant[begin:end] += means[f"{name}_mean"][one]
        bytes_.append(values)
        real.append(meant)
    names = ("q_descale", "k_descale", "v_descale")
    named = {**dict(zip(names, descales, strict=True)), **means}
    return Packed8((*bytes_, at_q, at_k), named, (real[0], real[1], real[2]))


def far(out: Tensor, right: Tensor) -> float:
    """The root mean square of a difference, relative to what is right."""
    difference = out.double() - right
    return float(difference.square().mean().sqrt() / right.square().mean().sqrt())
