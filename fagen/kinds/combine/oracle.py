"""What combining computes, in fp64: outputs weighted by the exponentials of their LSEs.

Works on any device, on the splits that count alone: the others may hold anything.
"""

import math

import torch
from torch import Tensor


def combine(
    outs: Tensor,
    lses: Tensor,
    num_splits: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Combine outs (splits, …, Sq, H, Dv) and lses (splits, …, H, Sq); both come out in fp64.

    With num_splits and cu_seqlens a varlen sequence has so many splits; a row before the first
    sequence or behind the last has none. Where no split counts, the output is 0 and the LSE minus
    infinity. Of sinks (H) each is one more, without an output.
    """
    rows = counting(lses.double().transpose(-1, -2), num_splits, cu_seqlens)
    lse = rows.logsumexp(0)
    lse = lse if sinks is None else lse.logaddexp(sinks.double())
    weight = torch.exp(rows - lse.masked_fill(lse == -math.inf, 0))
    out = torch.zeros(outs.shape[1:], dtype=torch.float64, device=outs.device)
    for part, share in zip(outs, weight, strict=True):
        out += part.double().masked_fill((share == 0)[..., None], 0) * share[..., None]
    return out, lse.transpose(-1, -2)


def counting(
    rows: Tensor, num_splits: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return LSEs (splits, …, Sq, H), minus infinity where a split does not count."""
    if num_splits is None or cu_seqlens is None:
        return rows
    counts = split_counts(num_splits, cu_seqlens, rows.shape[1])
    index = torch.arange(len(rows), device=rows.device)[:, None]
    return rows.masked_fill((index >= counts)[..., None], -math.inf)


def split_counts(num_splits: Tensor, cu_seqlens: Tensor, rows: int) -> Tensor:
    """Return how many splits each of so many rows of varlen sequences has."""
    row = torch.arange(rows, device=cu_seqlens.device)
    started = torch.searchsorted(cu_seqlens.contiguous(), row, right=True)
    none = num_splits.new_zeros(1)
    return torch.cat((none, num_splits, none))[started]
