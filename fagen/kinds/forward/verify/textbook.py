"""Attention in e4m3 as a textbook has it: what a kernel's error is held against.

P is relative to the row's true maximum, times 2^8, rounded to e4m3 and multiplied with V's bytes;
all other numbers are exact, or nearly so. A kernel that finds its maxima block by block, or adds
up in fewer bits, should not be far from it.
"""

import math

import torch
from torch import Tensor

from fagen.e4m3 import to_e4m3
from fagen.kinds.forward.operands import Operands, of_v, real
from fagen.kinds.forward.oracle import visible
from fagen.kinds.forward.plan import Plan
from fagen.kinds.verification import scored

_OFFSET = 2.0**8
_SCORES = 1 << 24  # held at a time


def textbook(plan: Plan, operands: Operands, scale: float) -> Tensor:
    """Compute out (B, Sq, H, Dv) in fp32 of what the Plan's kernel takes, V's bytes row-major."""
    q, k, _ = real(plan, operands)
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    out = q.new_zeros(batch, seqlen_q, heads, operands.v.shape[-1])
    if out.numel() == 0 or seqlen_k == 0:
        return out
    group = heads // kv_heads
    keys = k.permute(0, 2, 3, 1)
    values = operands.v.float()
    if plan.scales.v_by_block:
        values = values * of_v(plan, operands)
    values = values.permute(0, 2, 1, 3)
    height = max(1, _SCORES // (batch * heads * seqlen_k))
    for top in range(0, seqlen_q, height):
        bottom = min(top + height, seqlen_q)
        queries = q[:, top:bottom].permute(0, 2, 1, 3)
        scores = queries.reshape(batch, kv_heads, group * (bottom - top), -1) @ keys * scale
        rows = torch.arange(top, bottom, device=q.device).repeat(group)
        scores = scored(plan.score.as_usual, scores, rows, seqlen_q, group)
        attended = visible(plan.mask, rows, seqlen_q, seqlen_k)
        if attended is not None:
            scores = scores.masked_fill(~attended, -math.inf)
        highest = scores.amax(-1, keepdim=True)
        empty = highest == -math.inf
        p = _OFFSET * torch.exp(scores - highest.masked_fill(empty, 0.0))
        tile = to_e4m3(p).float() @ values / p.sum(-1, keepdim=True)
        if not plan.scales.v_by_block:
            tile = tile * operands.v_descale[:, :, None]
        if operands.v_mean is not None:
            tile = tile + operands.v_mean[:, :, None]
        tile = tile.masked_fill(empty, 0.0).view(batch, heads, bottom - top, -1)
        out[:, top:bottom] = tile.permute(0, 2, 1, 3)
    return out
