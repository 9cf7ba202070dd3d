"""FlashAttention-3's attention over a cache, and what belongs to it."""

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from fagen.flash_attn_interface.arguments import (
    NO_WINDOW,
    forward_only,
    given,
    lengths_of,
    readable,
    refuse_given,
    refuse_others,
    refuse_yet,
    scale_of,
    variant_of,
    written,
)
from fagen.runtime.argument_types import flag, names_types, refuse_other_types
from fagen.runtime.arguments import E4M3, refuse_rank
from fagen.runtime.cache import as_varlen, attention_cache
from fagen.runtime.checks import shape_of
from fagen.runtime.combine import combine
from fagen.runtime.decode import attention_decode
from fagen.runtime.varlen import attention_varlen

_LONGEST = 2**31 - 1
_NO_GRADIENT = (
    "flash_attn_with_kvcache: q, k_cache or v_cache requires a gradient, and over a cache there "
    "are none: fagen.attention has them, and attention_varlen with seqused_k; or call it under "
    "torch.no_grad()"
)


@names_types
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention over a cache of keys and values, as FlashAttention-3's function does.

    q (B, Sq, H, D), k_cache (B, S, Hk, D) and v_cache (B, S, Hk, Dv) in fp16 or bf16, caches of any
    strides that are multiples of 16 bytes with the last dimension contiguous. cache_seqlens says
    where each sequence's keys end: (B) in int32, or one number for all; at S if left out.
    cache_leftpad, (B) in int32, says where they begin. What caches hold elsewhere is not used, and
    may be no number. The causal mask is aligned to the bottom right of each sequence.

    With page_table, or block_table, (B, entries) in int32, k_cache is (pages, page_size, Hk, D) and
    v_cache (pages, page_size, Hk, Dv), as fagen.attention_decode takes them, which computes all
    queries then, reading keys again for every 64 rows. cache_seqlens is given then.

    With cu_seqlens_q, (B + 1) in int32, q is (total_q, H, D), sequence after sequence.

    Up to 256 rows of Sq queries times H / Hk heads are computed by fagen.attention_decode, more by
    fagen.attention_varlen, or fagen.attention where there are no lengths; queries packed by
    cu_seqlens_q by attention_varlen always. Lengths are read on the device alone.

    These change nothing here: num_splits, pack_gqa, sm_margin and scheduler_metadata, which are
    hints; max_seqlen_q, which only tells which window_size is none, and fagen.recording of lengths;
    cu_seqlens_k_new, which is about a k that is not taken; rotary_interleaved and rotary_seqlens,
    which are about rotary embeddings that are not taken; descales, beside 16-bit tensors.

    Returns out (B, Sq, H, Dv) or (total_q, H, Dv) in q's dtype, and with return_softmax_lse also
    the log-sum-exp (B, H, Sq) or (H, total_q) in fp32, natural logarithm: zeros and minus infinity
    for a row that sees no key. Where q or a cache requires a gradient it is computed all the same,
    and its backward pass refused.

    Raises NotImplementedError for k and v, rotary embeddings, cache_batch_idx, qv, e4m3, pages
    beside cu_seqlens_q, and a backward pass;
    ValueError for a wrong argument, and traced by torch.compile also where a gradient would be
    needed; and what else those three do.
    """
    called = "flash_attn_with_kvcache"
    others = qv, attention_chunk, softcap, num_splits, sm_margin, pack_gqa
    chunk, cap = refuse_others(called, *others)
    if not ((k is v is cache_batch_idx is None) and (rotary_cos is rotary_sin is None)):
        refuse_given(
            called,
            k=k,
            v=v,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            cache_batch_idx=cache_batch_idx,
        )
    if E4M3 in (q.dtype, k_cache.dtype, v_cache.dtype):
        e4m3 = "e4m3, with q_descale, k_descale and v_descale,"
        refuse_yet(called, e4m3, "keep the cache in 16 bits")
    if return_softmax_lse is not False:
        return_softmax_lse = flag("return_softmax_lse", return_softmax_lse)
    if rotary_interleaved is not True:
        flag("rotary_interleaved", rotary_interleaved)
    varlen = cu_seqlens_q is not None
    if not varlen:
        refuse_rank(q=q)
    elif q.dim() != 3:
        raise ValueError(
            f"q has {q.dim()} dimensions; with cu_seqlens_q it must have 3: (total, heads, "
            "head_dim)"
        )
    refuse_rank(k_cache=k_cache, v_cache=v_cache)
    batch, room = k_cache.shape[:2]
    table = _table(called, page_table, block_table, cache_seqlens, k_cache, varlen=varlen)
    if table is not None:
        batch, room = len(table), room * table.shape[1]
        if not isinstance(cache_seqlens, Tensor):
            length = _length(cache_seqlens)
            cache_seqlens = torch.full((batch,), length, dtype=torch.int32, device=k_cache.device)
    one_length = not (cache_seqlens is None or isinstance(cache_seqlens, Tensor))
    if (one_length or varlen) and v_cache.shape[:2] != k_cache.shape[:2]:
        raise ValueError(
            f"v_cache has shape {shape_of(v_cache)}; it must be (batch = {batch}, seqlen = "
            f"{room}, kv_heads, head_dim) as k_cache"
        )
    if one_length:
        length = _length(cache_seqlens)
        # nothing is written on the device
        k_cache, v_cache = k_cache[:, : max(0, length)], v_cache[:, : max(0, length)]
        cache_seqlens = None
    cache_seqlens = lengths_of("cache_seqlens", cache_seqlens, batch, k_cache, "k_cache")
    cache_leftpad = lengths_of("cache_leftpad", cache_leftpad, batch, k_cache, "k_cache")
    queries = (max_seqlen_q or q.shape[0]) if varlen else q.shape[1]
    more: dict[str, Any] = dict(causal=causal, chunk=chunk, softcap=cap, s_aux=s_aux)
    how = variant_of(called, window_size, queries, room, **more)
    q = q if q.stride(-1) == 1 else q.contiguous()
    scale = None if softmax_scale is None else scale_of(softmax_scale)
    needs = q.requires_grad or k_cache.requires_grad or v_cache.requires_grad
    needs = needs or (s_aux is not None and s_aux.requires_grad)
    if table is not None:
        how |= dict(scale=scale, return_lse=return_softmax_lse, block_table=table)
        how |= dict(seqused_k=cache_seqlens, leftpad_k=cache_leftpad)
        if not needs:
            return attention_decode(q, k_cache, v_cache, **how)
        leaves = given(q, k_cache, v_cache, s_aux)
        return forward_only(_NO_GRADIENT, leaves, attention_decode, q, k_cache, v_cache, **how)
    if cu_seqlens_q is None and not needs:
        return attention_cache(
            q,
            k_cache,
            v_cache,
            seqused_k=cache_seqlens,
            leftpad_k=cache_leftpad,
            scale=scale,
            return_lse=return_softmax_lse,
            **how,
        )
    caches = q, k_cache, v_cache
    leaves = given(q, k_cache, v_cache, s_aux)
    how |= dict(scale=scale, return_lse=return_softmax_lse)
    if cu_seqlens_q is None:
        how |= dict(seqused_k=cache_seqlens, leftpad_k=cache_leftpad)
        return forward_only(_NO_GRADIENT, leaves, attention_cache, *caches, **how)
    sequences = as_varlen(k_cache, v_cache, cache_seqlens, cache_leftpad)
    if sequences is None:
        refuse_yet(
            called,
            f"cu_seqlens_q over caches of shape {shape_of(k_cache)} and such strides",
            "sequences of k_cache and v_cache have to be the same whole number of rows apart",
        )
    keys, values, cu_seqlens_k, used = sequences
    packed = q, keys, values, cu_seqlens_q, cu_seqlens_k
    how |= dict(seqused_k=used, max_seqlen_q=max_seqlen_q)
    return forward_only(_NO_GRADIENT, leaves, attention_varlen, *packed, **how)


def _table(
    called: str,
    page_table: Tensor | None,
    block_table: Tensor | None,
    cache_seqlens: Any,
    k_cache: Tensor,
    *,
    varlen: bool,
) -> Tensor | None:
    """Return the pages of each sequence; None where the cache has none."""
    if page_table is None and block_table is None:
        return None
    if page_table is not None and block_table is not None:
        raise ValueError("page_table and block_table are two names of one table; give one of them")
    name = "block_table" if page_table is None else "page_table"
    table = block_table if page_table is None else page_table
    assert table is not None
    if varlen:
        refuse_yet(
            called, f"cu_seqlens_q beside {name}", "give q as (batch, queries, heads, head_dim)"
        )
    if cache_seqlens is None:
        raise ValueError(f"cache_seqlens is missing; with {name} it must be given")
    if table.dim() != 2 or table.dtype != torch.int32:
        raise ValueError(
            f"{name} has shape {shape_of(table)} in {table.dtype}; it must be (batch, entries) in "
            "torch.int32"
        )
    if table.device != k_cache.device:
        raise ValueError(
            f"{name} is not on the device of k_cache; {name}.to(k_cache.device) moves it there"
        )
    return readable(table)


def _length(cache_seqlens: Any) -> int:
    length = index(cache_seqlens)
    if abs(length) > _LONGEST:
        raise ValueError(f"cache_seqlens is {length}, which is no int32")
    return length


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = NO_WINDOW,
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """Return what flash_attn_with_kvcache takes as scheduler_metadata, which it does not read.

    That is (1) in int32 on the device of cache_seqlens: kernels find their work by themselves, from
    the lengths that they are called with. Raises TypeError or ValueError for an argument that is
    none.
    """
    refuse_other_types(get_scheduler_metadata, locals())
    called = "get_scheduler_metadata"
    refuse_others(called, None, attention_chunk, 0.0, num_splits, sm_margin, pack_gqa)
    return cache_seqlens.new_zeros(1, dtype=torch.int32)


@names_types
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Combine what attention gave for several splits of the keys, as FlashAttention-3's does.

    out_partial (splits, B, Sq, H, Dv) in fp32, fp16 or bf16; lse_partial (splits, B, Sq, H) in
    fp32, natural logarithm. Both may be without B. See fagen.combine; a Dv that is no multiple of 8
    is filled up with zeros, in a copy. What is given as `out` is written to, and says the dtype
    where out_dtype does not.

    Returns out (B, Sq, H, Dv) in out_dtype, else in out_partial's dtype, and the log-sum-exp (B,
    Sq, H) in fp32, as there a view of (B, H, Sq).

    Raises ValueError where `out` has another shape or dtype, and as fagen.combine does.
    """
    if out is not None:
        out_dtype = out_dtype or out.dtype
        if any(n > 1 and not step for n, step in zip(out.shape, out.stride(), strict=True)):
            raise ValueError(
                f"out has strides {out.stride()}: several of its elements are one in memory, and "
                "each is written to; torch.empty_like(out).contiguous() makes one"
            )
        if out.requires_grad and torch.is_grad_enabled():
            raise ValueError("out requires a gradient, and is written to: pass out.detach()")
    columns = out_partial.shape[-1]
    if columns % 8 or (out_partial.dim() > 1 and out_partial.stride(-1) != 1):
        out_partial = torch.nn.functional.pad(out_partial, (0, -columns % 8)).contiguous()
    lses = readable(torch.atleast_2d(lse_partial).transpose(-1, -2))
    combined, lse = combine(out_partial, lses, out_dtype=out_dtype)
    return written("out", out, combined[..., :columns]), lse.transpose(-1, -2)
