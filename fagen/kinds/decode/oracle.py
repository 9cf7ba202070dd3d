"""What decoding computes, in fp64, sequence by sequence, on any device."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fagen.expr.words import PLAIN
from fagen.scores import SCORES, Score
from fagen.vocab import Mask


def spans(
    k: Tensor, seqused_k: Tensor | None, leftpad_k: Tensor | None
) -> Iterator[tuple[int, int]]:
    """Yield where the keys of each sequence begin and end in k (B, Sk, Hk, D).

    Lengths beyond the cache are cut off at its end, paddings below 0 at its beginning.
    """
    batch, seqlen_k = k.shape[:2]
    ends = [seqlen_k] * batch if seqused_k is None else seqused_k.tolist()
    firsts = [0] * batch if leftpad_k is None else leftpad_k.tolist()
    for first, end in zip(firsts, ends, strict=True):
        begin, over = max(first, 0), min(end, seqlen_k)
        yield (begin, over) if begin < over else (0, 0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    scale: float,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    given: Mapping[str, Any] | None = None,
    score: Score = SCORES[PLAIN],
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Return out (B, Sq, H, Dv) and lse (B, H, Sq), both computed in `dtype`.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv); of a sequence only the keys of its span
    are looked at. A row that sees no key has an out of zeros and an lse of minus infinity. `given`
    is what a call gives to the mask, as usual if left out; a `score` has what it is given.
    """
    batch, seqlen_q, heads, _ = q.shape
    out = torch.zeros(batch, seqlen_q, heads, v.shape[3], dtype=dtype, device=q.device)
    lse = torch.full((batch, heads, seqlen_q), -math.inf, dtype=dtype, device=q.device)
    row = torch.arange(seqlen_q, device=q.device)[:, None]
    head = torch.arange(heads, device=q.device)[:, None, None]
    for number, (first, last) in enumerate(spans(k, seqused_k, leftpad_k)):
        if first == last or not q.numel():
            continue
        queries = q[number].transpose(0, 1).to(dtype)
        keys, values = (
            x[number, first:last]
            .transpose(0, 1)
            .to(dtype)
            .repeat_interleave(heads // k.shape[2], 0)
            for x in (k, v)
        )
        key = torch.arange(last - first, device=q.device)
        own = mask.bound({name: _whole(x) for name, x in given.items()}, number) if given else mask
        unseen = ~own.sees(row, key, seqlen_q, last - first)
        of_heads = {"head": head, "kv_head": head * k.shape[2] // heads, "heads": heads}
        where = {"q_idx": row, "k_idx": key, "len_q": seqlen_q, "len_k": last - first}
        scores = score.whole(queries @ keys.mT * scale, **where, **of_heads, batch=number)
        scores = scores.masked_fill(unseen, -math.inf)
        log_sum = scores.logsumexp(-1, keepdim=True)
        p = torch.exp(scores - log_sum.masked_fill(log_sum == -math.inf, 0))
        out[number], lse[number] = (p @ values).transpose(0, 1), log_sum.squeeze(-1)
    return out, lse


def _whole(x: Any) -> Any:
    """A number, or a tensor by whose numbers one may index."""
    return x.long() if isinstance(x, Tensor) else x
