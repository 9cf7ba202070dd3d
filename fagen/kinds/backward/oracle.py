"""What the gradients should be, in fp64, row block by row block, on any device."""

import math

import torch
from torch import Tensor

from fagen.expr.words import PLAIN
from fagen.kinds.verification import scored
from fagen.scores import SCORES, Score
from fagen.vocab import Mask

_REFERENCE_SCORES = 1 << 23  # fp64 scores held at a time: 64 MiB each of five


_OF_SINKS = 2.0**-6  # of the largest: sums of many rows whose signs differ, of O in 16 bits


def gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    scale: float,
    dlse: Tensor | None = None,
    score: Score = SCORES[PLAIN],
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    """Return out, lse, and the gradients dq, dk and dv of sum(out · dout) + sum(lse · dlse).

    With sinks (H,), logits without values, which the softmax of a head's rows has too, their
    gradient comes last.

    dout (B, Sq, H, Dv), q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) in any dtype, dlse
    (B, H, Sq); results are in `dtype`, in which everything is computed. A row that sees no key has
    an out of zeros and an lse of minus infinity, and gives no gradient.

    With P = exp(scale · q kᵀ - lse): dv = Pᵀ dout, dS = P (dout vᵀ - sum(dout · out) + dlse),
    dq = scale · dS k, dk = scale · dSᵀ q (FlashAttention-2, Dao 2023, algorithm 2). What a score
    makes of scale · q kᵀ torch differentiates, and dS takes that as a factor.
    """
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    keys, values = (x.transpose(1, 2).to(dtype).repeat_interleave(group, 1) for x in (k, v))
    out = torch.zeros(batch, heads, seqlen_q, v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.full((batch, heads, seqlen_q), -math.inf, dtype=dtype, device=q.device)
    dq = torch.zeros(batch, heads, seqlen_q, q.shape[-1], dtype=dtype, device=q.device)
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    key = torch.arange(seqlen_k, device=q.device)
    dsinks = torch.zeros(heads, dtype=dtype, device=q.device)
    own_sinks = dsinks if sinks is None else sinks.to(dtype)[:, None, None]
    height = max(1, _REFERENCE_SCORES // max(1, batch * heads * seqlen_k))
    has_rows = seqlen_k or sinks is not None
    for top in range(0, seqlen_q if has_rows else 0, height):
        part = slice(top, min(top + height, seqlen_q))
        queries, grad = (x[:, part].transpose(1, 2).to(dtype) for x in (q, dout))
        row = torch.arange(part.start, part.stop, device=q.device)[:, None]
        scores = queries @ keys.mT * scale
        slope = None
        if not score.is_plain:
            scores, slope = slopes(score, scores, row, seqlen_q, kv_heads)
        scores = scores.masked_fill(~mask.sees(row, key, seqlen_q, seqlen_k), -math.inf)
        log_sum = scores.logsumexp(-1, keepdim=True)
        if sinks is not None:
            log_sum = torch.logaddexp(log_sum, own_sinks)
        p = torch.exp(scores - log_sum.masked_fill(log_sum == -math.inf, 0))
        output = p @ values
        delta = (grad * output).sum(-1, keepdim=True)
        if dlse is not None:
            delta = delta - dlse[:, :, part, None].to(dtype)
        ds = p * (grad @ values.mT - delta)
        ds = ds if slope is None else torch.where(p == 0, 0, ds * slope)
        if sinks is not None:
            weight = torch.exp(own_sinks - log_sum).masked_fill(log_sum == -math.inf, 0)
            dsinks -= (weight * delta).sum((0, 2, 3))
        out[:, :, part], lse[:, :, part] = output, log_sum.squeeze(-1)
        dq[:, :, part] = scale * ds @ keys
        dk += scale * ds.mT @ queries
        dv += p.mT @ grad

    def grouped(x: Tensor) -> Tensor:
        return x.unflatten(1, (kv_heads, group)).sum(2).transpose(1, 2)

    found = out.transpose(1, 2), lse, dq.transpose(1, 2), grouped(dk), grouped(dv)
    return found if sinks is None else (*found, dsinks)


def slopes(
    score: Score, scores: Tensor, row: Tensor, seqlen_q: int, kv_heads: int
) -> tuple[Tensor, Tensor]:
    """What scaled products (B, H, rows, Sk) become, and its derivative by autograd."""
    batch, heads, rows, seqlen_k = scores.shape
    by_group = scores.reshape(batch, kv_heads, heads // kv_heads * rows, seqlen_k)
    with torch.enable_grad():
        inside = by_group.detach().requires_grad_()
        own = row[:, 0].repeat(heads // kv_heads)
        outside = scored(score, inside, own, seqlen_q, heads // kv_heads)
        (slope,) = torch.autograd.grad(outside.sum(), inside)
    return outside.detach().view_as(scores), slope.view_as(scores)


def sinks_hold(found: Tensor, exact: Tensor) -> bool:
    """Whether a gradient of sinks is as near to that in fp64 as O and deltas in 16 bits allow."""
    most = _OF_SINKS * max(1.0, float(exact.abs().max()))
    return bool(((found.double() - exact.double()).abs() <= most).all())
