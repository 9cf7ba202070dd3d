"""Which rows a tile has: queries of a head, or of several that share it."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fagen.arch import SM90
from fagen.kinds.forward.plan import Plan

_ROWS_OF_A_THREAD = 8  # which are so far from each other
_SEVERAL = 3  # heads, with which sequences of a few tokens fill rows enough


class Rows(NamedTuple):
    """A tile's rows: of each its query and which of the heads that share the tile it is of.

    The tile is of the queries top … bottom - 1. A row that is not `real` is zeros, and nobody's.
    """

    top: int
    bottom: int
    query: Tensor
    head: Tensor
    real: Tensor

    def of(self, x: Tensor) -> Tensor:
        """Return its rows of x (B, Sq, Hk, G, pack, D): (B, Hk, G, rows, D)."""
        rows = x[:, self.query.clamp(max=x.shape[1] - 1), :, :, self.head]
        return rows.masked_fill(~self.real.view(-1, 1, 1, 1, 1), 0).permute(1, 2, 3, 0, 4)

    def put(self, into: Tensor, rows: Tensor) -> None:
        """Write its rows (B, Hk, G, rows, D) into a tensor (B, Sq, Hk, G, pack, D)."""
        query, head = self.query[self.real], self.head[self.real]
        into[:, query, :, :, head] = rows[..., self.real, :].permute(3, 0, 1, 2, 4)


def heads_of_a_tile(plan: Plan, group: int, seqlen_q: int) -> int:
    """Return how many heads of a group share a tile's rows, as the launcher says."""
    rows = SM90.wgmma_m
    possible = [heads for heads in range(1, min(group, rows) + 1) if group % heads == 0]
    if not plan.tile.pack_gqa:
        return 1
    if plan.descales:  # a thread's two rows share one
        possible = [heads for heads in possible if _ROWS_OF_A_THREAD % heads == 0]
    if plan.varlen:
        full, most = (
            max(heads for heads in possible if rows % heads <= unused)
            for unused in (1, plan.tile.most_unused)
        )
        return full if full >= _SEVERAL else most

    def tiles(heads: int) -> int:
        return -(-seqlen_q // (plan.consumers * (rows // heads))) * (group // heads)

    return min(possible, key=tiles)


def tiles_of(plan: Plan, heads: int, seqlen_q: int, device: torch.device) -> Iterator[Rows]:
    """Yield the tiles of so many heads together."""
    queries = SM90.wgmma_m // heads  # of a warpgroup
    step = plan.consumers * queries
    for top in range(0, seqlen_q, step):
        bottom = min(top + step, seqlen_q)
        if heads == 1:
            query = torch.arange(top, bottom, device=device)
            yield Rows(top, bottom, query, torch.zeros_like(query), query >= 0)
            continue
        row = torch.arange(-(-(bottom - top) // queries) * SM90.wgmma_m, device=device)
        place = row % SM90.wgmma_m
        query = top + row // SM90.wgmma_m * queries + place // heads
        real = (place // heads < queries) & (query < seqlen_q)
        yield Rows(top, bottom, query, place % heads, real)
