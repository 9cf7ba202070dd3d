"""A Plan and tensors in, what its kernels compute out: their tiles and roundings, in torch.

Works on any device. dQ is a sum over blocks of keys, which the kernel adds up in any order: here it
is that of the keys.
"""

import math

import torch
from torch import Tensor

from fagen.kinds.backward.plan import Plan

_LOG2_E = 1.44269504089


def compute(
    plan: Plan,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv as the Plan's kernels compute them; arguments as of their op.

    dout and out (B, Sq, H, Dv), q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) in the Plan's
    dtype, lse and dlse (B, H, Sq) in fp32.
    """
    seqlen_q, seqlen_k, kv_heads = q.shape[1], k.shape[1], k.shape[2]
    group = q.shape[2] // kv_heads
    queries, grad, found = (x.transpose(1, 2).float() for x in (q, dout, out))
    keys, values = (x.transpose(1, 2).float().repeat_interleave(group, 1) for x in (k, v))
    delta = (grad * found).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    # infinity in a row that sees no key: its P is 0
    offset = plan.p_offset(seqlen_k)
    reference = torch.where(lse == -math.inf, math.inf, lse * _LOG2_E - offset)
    delta = delta.masked_fill(lse == -math.inf, 0)
    scale_log2 = float(torch.tensor(scale).float() * torch.tensor(_LOG2_E).float())

    unscale = 2.0**-offset

    dq = torch.zeros_like(queries)
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    row = torch.arange(seqlen_q, device=q.device)[:, None]
    first, last = plan.mask.keys(row, seqlen_q, seqlen_k)
    for left in range(0, seqlen_k if seqlen_q else 0, plan.block_n):
        block = slice(left, min(left + plan.block_n, seqlen_k))
        key = torch.arange(block.start, block.stop, device=q.device)
        scores = queries @ keys[:, :, block].mT
        p = torch.exp2(scores * scale_log2 - reference[..., None])
        p = p.masked_fill(~((key >= first) & (key < last)), 0)
        if plan.split == "gradients":  # P reaches who makes dS in 16 bits
            p = p.to(q.dtype).float()
        ds = p * (grad @ values[:, :, block].mT - delta[..., None])
        # what the tensor cores read next is rounded
        p, ds = (x.to(q.dtype).float() for x in (p, ds))
        dv[:, :, block] = p.mT @ grad * unscale
        dk[:, :, block] = ds.mT @ queries * (scale * unscale)
        dq += ds @ keys[:, :, block]

    def grouped(x: Tensor) -> Tensor:
        return x.unflatten(1, (kv_heads, group)).sum(2).transpose(1, 2).to(q.dtype).contiguous()

    dq = (dq * (scale * unscale)).transpose(1, 2).to(q.dtype).contiguous()
    return dq, grouped(dk), grouped(dv)
