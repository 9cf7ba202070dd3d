"""What FlashAttention-2 computes, by its formulae: P and dS rounded as they are, sums in fp32."""

import math

import torch
from torch import Tensor

from fagen.expr.words import PLAIN
from fagen.kinds.backward.oracle import slopes
from fagen.scores import SCORES, Score
from fagen.vocab import Mask


def attention_and_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    score: Score = SCORES[PLAIN],
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, dq, dk and dv in the dtype of q, whose dtype P and dS have in products.

    With sinks (H,) the softmax has one logit more.

    dout, q (B, Sq, H, D), k and v (B, Sk, Hk, D); every row sees a key.
    """
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    queries, grad = (x.transpose(1, 2).float() for x in (q, dout))
    keys, values = (x.transpose(1, 2).float().repeat_interleave(group, 1) for x in (k, v))
    row, key = (torch.arange(x.shape[1], device=q.device) for x in (q, k))
    unseen = ~mask.sees(row[:, None], key, q.shape[1], k.shape[1])
    scores, slope = queries @ keys.mT * scale, torch.ones(())
    if not score.is_plain:
        scores, slope = slopes(score, scores, row[:, None], q.shape[1], k.shape[2])
    scores = scores.masked_fill(unseen, -math.inf)
    most, lse = scores.amax(-1, keepdim=True), scores.logsumexp(-1, keepdim=True)
    p = torch.exp(scores - most)
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        own = sinks.float()[:, None, None]
        total, lse = total + torch.exp(own - most), torch.logaddexp(lse, own)
    out = (p.to(dtype).float() @ values / total).to(dtype)
    p = torch.exp(scores - lse)
    delta = (grad * out.float()).sum(-1, keepdim=True)
    ds = (p * (grad @ values.mT - delta) * slope).to(dtype).float()
    p = p.to(dtype).float()

    def grouped(x: Tensor) -> Tensor:
        return x.unflatten(1, (k.shape[2], group)).sum(2).transpose(1, 2).to(dtype)

    dq = (ds @ keys * scale).transpose(1, 2).to(dtype)
    return (
        out.transpose(1, 2).contiguous(),
        dq,
        grouped(ds.mT @ queries * scale),
        grouped(p.mT @ grad),
    )
