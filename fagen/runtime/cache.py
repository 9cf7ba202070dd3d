"""attention_cache(q, k, v, …): queries over a cache with lengths in, the kernel for so many called.

Few rows of queries go to the kernels of decoding, many to those of varlen sequences, as which the
sequences of a cache can be read where they are. Nothing is read on the host.
"""

from typing import Any

import torch
from torch import Tensor

from fagen.runtime.arguments import refuse_rank
from fagen.runtime.attention import attention
from fagen.runtime.decode import attention_decode
from fagen.runtime.offsets import evenly
from fagen.runtime.varlen import attention_varlen

# of queries that share a KV head: up to four tiles of decoding, which part the keys of a sequence
# among SMs and read them again for each; an estimate, not measured
FEW_ROWS = 256

_MOST_ROWS = 1 << 30  # of a packed tensor

Varlen = tuple[Tensor, Tensor, Tensor, Tensor | None]  # k, v, cu_seqlens_k, seqused_k


def attention_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    causal: bool,
    scale: float | None = None,
    return_lse: bool = False,
    **mask: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute what fagen.attention_decode does, for any number of queries.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), seqused_k and leftpad_k (B) in int32;
    returns out (B, Sq, H, Dv), and with return_lse also the log-sum-exp (B, H, Sq) in fp32. Many
    rows are computed by fagen.attention_varlen, or without lengths by fagen.attention. Where the
    strides of k and v let no kernel read them as packed, both are made contiguous first: a copy
    reads keys once, and attention_decode for every tile of rows. `mask` is what else these calls
    take of one, a window or chunks, a softcap and sinks.

    Raises as these do.
    """
    refuse_rank(q=q, k=k, v=v)
    batch, queries, heads, _ = q.shape
    few = queries * heads <= FEW_ROWS * k.shape[2]
    if not few and seqused_k is None and leftpad_k is None:
        return attention(q, k, v, causal=causal, scale=scale, return_lse=return_lse, **mask)
    varlen = None if few else as_varlen(k, v, seqused_k, leftpad_k)
    if varlen is None and not few:
        k, v = k.contiguous(), v.contiguous()
        varlen = as_varlen(k, v, seqused_k, leftpad_k)
    if varlen is None:
        return attention_decode(
            q,
            k,
            v,
            seqused_k=seqused_k,
            leftpad_k=leftpad_k,
            causal=causal,
            scale=scale,
            return_lse=return_lse,
            **mask,
        )
    starts = evenly(batch, queries, q.device)
    k, v, cu_seqlens_k, used = varlen
    results = attention_varlen(
        q.flatten(0, 1),
        k,
        v,
        starts,
        cu_seqlens_k,
        seqused_k=used,
        causal=causal,
        scale=scale,
        return_lse=return_lse,
        **mask,
    )
    if isinstance(results, Tensor):
        return results.unflatten(0, (batch, queries))
    out, lse = results
    lse = lse.unflatten(1, (batch, queries)).transpose(0, 1).contiguous()
    return out.unflatten(0, (batch, queries)), lse


def as_varlen(
    k: Tensor, v: Tensor, seqused_k: Tensor | None, leftpad_k: Tensor | None
) -> Varlen | None:
    """Return a cache's keys and values as sequences packed into one, without a copy, and offsets.

    k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv) become (total, Hk, D) and (total, Hk, Dv), where a
    sequence begins as many rows after the last one as it does in memory; what lies between belongs
    to other heads or to nobody, and no sequence uses it. None where a sequence is no whole number
    of rows after the last, or not the same one in both, or where there are too many rows.
    """
    (batch, keys), apart = k.shape[:2], _rows_apart(k)
    if v.shape[:2] != k.shape[:2] or apart != _rows_apart(v):
        return None
    if apart < keys or batch * apart > _MOST_ROWS:
        return None
    total = (batch - 1) * apart + keys
    starts = evenly(batch, apart, k.device)
    used = seqused_k
    if leftpad_k is not None:
        first = leftpad_k.clamp(0, keys)
        starts = torch.cat((starts[:-1] + first, starts[-1:]))
        end = keys if seqused_k is None else seqused_k.clamp(0, keys)
        used = (end - first).clamp(min=0)
    elif seqused_k is not None:
        used = seqused_k.clamp(0, keys)
    elif apart > keys:
        used = starts.new_full((batch,), keys)
    along = 0 if keys == 1 else 1  # a row of each sequence is the next one
    varlen_k, varlen_v = (
        x.as_strided((total, *x.shape[2:]), (x.stride(along), *x.stride()[2:])) for x in (k, v)
    )
    return varlen_k, varlen_v, starts, used


def _rows_apart(x: Tensor) -> int:
    """By how many rows of x (B, S, H, D) its sequences are apart; 0 where by no whole number."""
    rows: int
    (batch, rows), (between, of_row) = x.shape[:2], x.stride()[:2]
    if batch < 2 or rows < 2:  # nobody steps along one of them
        return rows
    return 0 if of_row == 0 or between % of_row else between // of_row
