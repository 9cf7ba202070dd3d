"""A cell in, its tensors out: what every implementation is given, and which rows see a key."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from fagen.kind import Plan
from fagen.problem import Cell, Lengths, Problem, Sizes
from fagen.vocab import DTYPES, MASKS, Dtype, Mask

SEQLENS = (512, 2_048, 4_096, 16_384)  # of the benchmark's grid


class Attends(Protocol):
    """What is asked of a Plan of attention."""

    @property
    def dtype(self) -> Dtype:
        """Of Q, K and V."""

    @property
    def head_dim(self) -> int:
        """Columns of Q and K."""

    @property
    def head_dim_v(self) -> int:
        """Columns of V."""


def cell_of(plan: Plan, sizes: Sizes) -> Cell:
    """The cell in which a Plan's kernel is timed at these sizes, beside others of its problem."""
    return Cell(Problem.of(plan.schedule).opened(), sizes)


def inputs(
    cell: Cell, *, device: torch.device | str = "cuda", seed: int = 0, sigma: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv): N(0, 1), contiguous, repeatable.

    q is multiplied by `sigma`, the standard deviation of the scores under the customary scale; a
    power of two changes nothing else.

    For e4m3 in fp16: what is quantised, and what others compute the same problem with. Of packed
    sequences S is all of theirs, and B 1.
    """
    problem, sizes = cell.problem, cell.sizes
    kind = DTYPES[problem.dtype]
    dtype = torch.float16 if kind.fp8 else getattr(torch, kind.torch)
    generator = torch.Generator(device=device).manual_seed(seed)

    batch, queries, keys = sizes.batch, sizes.seqlen_q, sizes.seqlen_k
    if sizes.varlen:
        batch, queries, keys = 1, sizes.total_q, sizes.total_k

    def normal(seqlen: int, heads: int, dim: int) -> Tensor:
        shape = (batch, seqlen, heads, dim)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    return (
        normal(queries, sizes.heads, problem.head_dim) * sigma,
        normal(keys, sizes.kv_heads, problem.head_dim),
        normal(keys, sizes.kv_heads, problem.head_dim_v),
    )


def offsets(sizes: Sizes, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Where the queries and the keys of each sequence begin once they are packed: int32."""
    ends = torch.tensor([(0, 0), *sizes.sequences], dtype=torch.int64, device="cpu").cumsum(0)
    at_q, at_k = ends.to(device=device, dtype=torch.int32).unbind(1)
    return at_q.contiguous(), at_k.contiguous()


def usual(
    mask: Mask, batch: int, seqlen_q: int, seqlen_k: int, device: torch.device | str
) -> dict[str, Any]:
    """What a call gives to a mask where nobody says: numbers, and tables alike of all sequences."""
    given = mask.usual(seqlen_q, seqlen_k)
    call: dict[str, Any] = {one.name: given[one.name] for one in mask.parameters}
    for name in mask.batch_tables:
        call[name] = torch.tensor(given[name] * batch, dtype=torch.int32, device=device)
    for name in mask.row_tables:
        own = given[name][0][torch.arange(seqlen_q, device=device)].int()
        call[name] = own.expand(batch, seqlen_q).contiguous()
    return call


def usual_packed(
    mask: Mask, lengths: Lengths, device: torch.device | str, gap: int = 0
) -> dict[str, Any]:
    """The same for packed sequences of (queries, keys), with `gap` rows before and behind them all.

    Numbers are usual for the most queries and the most keys, those of tables for each sequence.
    """
    most_q, most_k = (max(counts, default=0) for counts in zip(*lengths, strict=True))
    given = mask.usual(most_q, most_k)
    call: dict[str, Any] = {one.name: given[one.name] for one in mask.parameters}
    own = [usual(mask, 1, *counts, device) for counts in lengths]
    around = torch.zeros(gap, dtype=torch.int32, device=device)
    for name in mask.batch_tables:
        call[name] = torch.cat([one[name] for one in own])
    for name in mask.row_tables:
        call[name] = torch.cat([around, *(one[name][0] for one in own), around])
    return call


def mask_of(mask: Mask, given: Mapping[str, Any], sequence: int, rows: slice) -> Mask:
    """The mask of one of several packed sequences, whose queries are these, with what is given."""
    own = dict(given)
    own |= {name: given[name][sequence, None].long() for name in mask.batch_tables}
    own |= {name: given[name][None, rows].long() for name in mask.row_tables}
    return mask.bound(own)


def heavy_keys(mask: Mask, seqlen_q: int, seqlen_k: int) -> tuple[int, ...]:
    """Keys of which each row that sees any sees one, as usual: those that it sees first, or nearly.

    It is key 0 where all rows see that. A row sees no other than one of them and the next.
    """
    found: list[int] = []
    for row in reversed(range(seqlen_q)):
        first, last = (int(end) for end in mask.keys(row, seqlen_q, seqlen_k))
        first, last = max(0, first), min(last, seqlen_k)
        if first < last and (not found or found[-1] >= last):
            found.append(first)
    return tuple(reversed(found))


def softmax_scale(head_dim: int) -> float:
    """The customary scale of q k^T."""
    return 1.0 / math.sqrt(head_dim)


def rows_with_keys(cell: Cell) -> Tensor:
    """Which query rows see a key: (Sq,) of bool, on the CPU."""
    seqlen_q, seqlen_k = cell.sizes.seqlen_q, cell.sizes.seqlen_k
    row = torch.arange(seqlen_q, device="cpu")
    first, last = MASKS[cell.problem.mask].keys(row, seqlen_q, seqlen_k)
    least = torch.as_tensor(first, device="cpu").clamp(min=0)
    return (torch.as_tensor(last, device="cpu").clamp(max=seqlen_k) > least).expand(seqlen_q)
