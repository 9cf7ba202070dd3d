"""A Plan and packed sequences in, what its kernel computes out: each sequence by itself."""

import torch
from torch import Tensor

from fagen.kinds.forward.emulate.tiles import emulate
from fagen.kinds.forward.plan import Plan
from fagen.problem import intervals


def emulate_varlen(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of packed sequences as the Plan's kernel does.

    q (total_q, H, D), k (total_k, Hk, D), v (total_k, Hk, Dv) in the Plan's dtype; where sequences
    begin, and the last one ends, (B + 1), and how many keys of each count, (B), in int32. Lengths
    that lead out of the tensors are cut off. Returns out (total_q, H, Dv) in that dtype and the
    log-sum-exp (H, total_q) in fp32; a row of no sequence is one that sees no key.
    """
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
    queries = intervals(cu_seqlens_q.tolist(), q.shape[0])
    keys = intervals(cu_seqlens_k.tolist(), k.shape[0])
    used = seqused_k.tolist() if seqused_k is not None else [k.shape[0]] * len(keys)
    for (top, bottom), (first, last), count in zip(queries, keys, used, strict=True):
        of_k = slice(first, min(last, first + max(0, count)))
        sequence = q[None, top:bottom], k[None, of_k], v[None, of_k]
        found, log_sum = emulate(plan, *sequence, scale)
        out[top:bottom], lse[:, top:bottom] = found[0], log_sum[0]
    return out, lse
