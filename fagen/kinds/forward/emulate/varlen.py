"""A Plan and sequences that lie one after another in, what its kernel computes of each out."""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from fagen.kinds.forward.emulate.tiles import emulate
from fagen.kinds.forward.plan import Plan


def emulate_varlen(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention as the Plan's kernel does: sequence by sequence, each as `emulate` does.

    q (total_q, H, D), k (total_k, Hk, D), v (total_k, Hk, Dv); offsets (B + 1) and seqused_k (B) in
    int32. Returns out (total_q, H, Dv) and the log-sum-exp (H, total_q) in fp32: zeros and minus
    infinity where a row sees no key, and where it is of no sequence.
    """
    total, heads, _ = q.shape
    out = q.new_zeros(total, heads, v.shape[-1])
    lse = q.new_full((heads, total), -math.inf, dtype=torch.float32)
    for rows, keys in sequences(cu_seqlens_q, cu_seqlens_k, seqused_k, total, len(k)):
        found, of_rows = emulate(plan, q[None, rows], k[None, keys], v[None, keys], scale)
        out[rows], lse[:, rows] = found[0], of_rows[0]
    return out, lse


def sequences(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    total_q: int,
    total_k: int,
) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and the keys of each sequence, within the tensors whatever offsets say."""
    at_q, at_k = _pairs(cu_seqlens_q, total_q), _pairs(cu_seqlens_k, total_k)
    used = None if seqused_k is None else seqused_k.tolist()
    for place, (rows, (first, last)) in enumerate(zip(at_q, at_k, strict=True)):
        if used is not None:
            last = min(last, first + max(0, used[place]))
        yield slice(*rows), slice(first, last)


def _pairs(offsets: Tensor, total: int) -> Iterator[tuple[int, int]]:
    for first, last in pairwise(offsets.tolist()):
        begin = max(0, first)
        yield begin, max(begin, min(last, total))
