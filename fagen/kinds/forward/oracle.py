"""The reference in fp64 that kernels and their emulation are measured against."""

import math

import torch
from torch import Tensor

from fagen.expr.words import PLAIN
from fagen.kinds.verification import scored
from fagen.scores import SCORES, Score
from fagen.vocab import MASKS, Mask

_REFERENCE_SCORES = 1 << 24  # fp64 scores held at a time: 128 MiB


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: str | Mask,
    scale: float,
    score: Score = SCORES[PLAIN],
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Compute attention, with a mask of vocab's: as usual, or bound to what a call gives.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) in any dtype. Returns out (B, Sq, H, Dv)
    and the log-sum-exp (B, H, Sq), both in `dtype`: zeros and minus infinity where a row sees no
    key.
    """
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    out = q.new_zeros(batch, seqlen_q, heads, v.shape[-1], dtype=dtype)
    lse = q.new_full((batch, heads, seqlen_q), -math.inf, dtype=dtype)
    if out.numel() == 0 or seqlen_k == 0:
        return out, lse

    group = heads // kv_heads
    keys = k.permute(0, 2, 3, 1).to(dtype)
    values = v.permute(0, 2, 1, 3).to(dtype)
    height = max(1, _REFERENCE_SCORES // (batch * heads * seqlen_k))
    for top in range(0, seqlen_q, height):
        bottom = min(top + height, seqlen_q)
        queries = q[:, top:bottom].permute(0, 2, 1, 3).to(dtype)
        scores = queries.reshape(batch, kv_heads, group * (bottom - top), -1) @ keys * scale
        rows = torch.arange(top, bottom, device=q.device).repeat(group)
        scores = scored(score, scores, rows, seqlen_q, group)
        attended = visible(mask, rows, seqlen_q, seqlen_k)
        if attended is not None:
            scores = scores.masked_fill(~attended, -math.inf)
        log_sum = scores.logsumexp(-1, keepdim=True)
        weights = torch.exp(scores - log_sum.masked_fill(log_sum == -math.inf, 0.0))
        tile = (weights @ values).view(batch, heads, bottom - top, -1)
        out[:, top:bottom] = tile.permute(0, 2, 1, 3)
        lse[:, :, top:bottom] = log_sum.view(batch, heads, bottom - top)
    return out, lse


def visible(mask: str | Mask, rows: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor | None:
    """Which keys these query rows see, (rows, Sk) of bool; None where they see all."""
    own = MASKS[mask] if isinstance(mask, str) else mask
    if not own.by_row:
        return None
    key = torch.arange(seqlen_k, device=rows.device)
    pairs: Tensor = own.sees(rows[:, None], key, seqlen_q, seqlen_k)
    return pairs
