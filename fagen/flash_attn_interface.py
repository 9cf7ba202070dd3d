"""FlashAttention-3's forward calls in, fagen's answers out, in FlashAttention-3's layout.

Code that imports from `flash_attn_interface` runs with `fagen.flash_attn_interface` instead. Names,
order and defaults of arguments are those of FlashAttention-3's module; what fagen has no kernels
for yet raises NotImplementedError, which names the argument or the function.
"""

from collections.abc import Sequence
from functools import partial
from operator import index
from typing import NoReturn

import torch
from torch import Tensor

from fagen.runtime.argument_types import names_types
from fagen.runtime.arguments import E4M3, refuse_rank
from fagen.runtime.attention import attention
from fagen.runtime.cache import as_packed, attention_cache
from fagen.runtime.checks import shape_of
from fagen.runtime.combine import combine
from fagen.runtime.flash_attn_arguments import (
    descales_of,
    filled,
    is_causal,
    lengths_of,
    refuse_missing,
    refuse_wrong_hints,
    refuse_yet,
)
from fagen.runtime.varlen import attention_varlen


@names_types
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(softmax_scale · q kᵀ) v, as FlashAttention-3's function of this name does.

    q (B, Sq, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv) in fp16, bf16 or e4m3; H a multiple of
    Hk. softmax_scale is 1/√D if left out. The causal mask is aligned to the bottom right. Of
    tensors whose last dimension is not contiguous a copy is made.

    q_descale, k_descale and v_descale, (B, Hk) each in fp32, are what e4m3 tensors are to be
    multiplied by; that of q is of all query heads of a KV head; None is 1. Beside 16-bit tensors
    they are not read. window_size is (left, right), where a negative number is no bound: windows
    that amount to no mask or to the causal one are taken.

    With deterministic the gradient of q has the same bits in each call too, which all else has
    anyway. These change nothing here: pack_gqa, num_splits and sm_margin, hints about the order of
    the work, of which sizes alone decide.

    Returns out (B, Sq, H, Dv), in q's dtype or of e4m3 in bf16, and with return_attn_probs also the
    log-sum-exp (B, H, Sq) in fp32, natural logarithm: zeros and minus infinity for a row that sees
    no key.

    Raises NotImplementedError for qv, other windows, attention_chunk and softcap above 0;
    ValueError for a wrong argument, hints among them; and what else fagen.attention raises.
    """
    if not q.dim() == k.dim() == v.dim() == 4:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            refuse_rank(name, tensor)
    refuse = partial(refuse_yet, "flash_attn_func")
    refuse_missing(refuse, qv, attention_chunk, softcap)
    refuse_wrong_hints(num_splits, sm_margin)
    causal = is_causal(refuse, window_size, q.shape[1], k.shape[1], causal=causal)
    if q.dtype == E4M3:
        sizes = q.shape[0], q.shape[2], k.shape[2]
        q_descale, k_descale, v_descale = descales_of(q, sizes, q_descale, k_descale, v_descale)
    else:
        q_descale = k_descale = v_descale = None
    return attention(
        q if q.stride(3) == 1 else q.contiguous(),
        k if k.stride(3) == 1 else k.contiguous(),
        v if v.stride(3) == 1 else v.contiguous(),
        causal=causal,
        scale=softmax_scale,
        return_lse=return_attn_probs,
        deterministic=deterministic,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )


@names_types
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of packed sequences, as FlashAttention-3's function of this name does.

    q (total_q, H, D), k (total_k, Hk, D) and v (total_k, Hk, Dv) in fp16, bf16 or e4m3;
    cu_seqlens_q and cu_seqlens_k (B + 1), seqused_k (B) in int32; see fagen.attention_varlen. Of
    tensors whose last dimension is not contiguous a copy is made. Descales, (B, Hk) each, are as of
    flash_attn_func.

    max_seqlen_q and max_seqlen_k only tell which window_size is no window, and fagen.recording of
    lengths: these are read on the device. deterministic is as of flash_attn_func; pack_gqa,
    num_splits and sm_margin change nothing here.

    Returns out (total_q, H, Dv), in q's dtype or of e4m3 in bf16, and with return_attn_probs also
    the log-sum-exp (H, total_q) in fp32, natural logarithm: zeros and minus infinity for a row that
    sees no key.

    Raises NotImplementedError for what flash_attn_func has not either, and seqused_q; ValueError
    for a wrong argument; and what else fagen.attention_varlen does.
    """
    refuse = partial(refuse_yet, "flash_attn_varlen_func")
    refuse_missing(refuse, qv, attention_chunk, softcap)
    refuse_wrong_hints(num_splits, sm_margin)
    if seqused_q is not None:
        refuse("seqused_q", "None is none")
    if q.dtype != E4M3:
        q_descale = k_descale = v_descale = None
    elif q.dim() == k.dim() == 3 and cu_seqlens_q.dim() == 1:  # else they are refused below
        sizes = cu_seqlens_q.shape[0] - 1, q.shape[1], k.shape[1]
        q_descale, k_descale, v_descale = descales_of(q, sizes, q_descale, k_descale, v_descale)
    return attention_varlen(
        q if q.dim() != 3 or q.stride(2) == 1 else q.contiguous(),
        k if k.dim() != 3 or k.stride(2) == 1 else k.contiguous(),
        v if v.dim() != 3 or v.stride(2) == 1 else v.contiguous(),
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k=seqused_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=is_causal(refuse, window_size, max_seqlen_q, max_seqlen_k, causal=causal),
        scale=softmax_scale,
        return_lse=return_attn_probs,
        deterministic=deterministic,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
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
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention over a dense cache of keys and values, as FlashAttention-3's function does.

    q (B, Sq, H, D), k_cache (B, S, Hk, D) and v_cache (B, S, Hk, Dv) in fp16 or bf16, caches of any
    strides that are multiples of 16 bytes with the last dimension contiguous. cache_seqlens says
    where each sequence's keys end: (B) in int32, or one number for all; at S if left out.
    cache_leftpad, (B) in int32, says where they begin. What caches hold elsewhere is not used, and
    may be no number. The causal mask is aligned to the bottom right of each sequence.

    With cu_seqlens_q, (B + 1) in int32, q is (total_q, H, D), sequence after sequence.

    Up to 256 rows of Sq queries times H / Hk heads are computed by fagen.attention_decode, more by
    fagen.attention_varlen, or fagen.attention where there are no lengths; queries packed by
    cu_seqlens_q by attention_varlen always. Lengths are read on the device alone.

    These change nothing here: num_splits, pack_gqa, sm_margin and scheduler_metadata, which are
    hints; max_seqlen_q, which only tells which window_size is none, and fagen.recording of lengths;
    cu_seqlens_k_new, which is about a k that is not taken; rotary_interleaved; descales, beside
    16-bit tensors.

    Returns out (B, Sq, H, Dv) or (total_q, H, Dv) in q's dtype, and with return_softmax_lse also
    the log-sum-exp (B, H, Sq) or (H, total_q) in fp32, natural logarithm: zeros and minus infinity
    for a row that sees no key.

    Raises NotImplementedError for page_table and block_table, k and v, rotary embeddings,
    cache_batch_idx, qv, windows, attention_chunk, softcap and e4m3; ValueError for a wrong
    argument, and where a gradient would be needed, whichever of them computes; and what else those
    three do.
    """
    refuse = partial(refuse_yet, "flash_attn_with_kvcache")
    refuse_missing(refuse, qv, attention_chunk, softcap)
    refuse_wrong_hints(num_splits, sm_margin)
    if not (
        (page_table is block_table is k is v is cache_batch_idx is None)
        and (rotary_cos is rotary_sin is rotary_seqlens is None)
    ):  # the tuples below take time
        for name, given, instead in (
            ("page_table", page_table, "caches are dense: (batch, seqlen, heads, head_dim)"),
            ("block_table", block_table, "caches are dense: (batch, seqlen, heads, head_dim)"),
            ("k", k, "write it to k_cache first, and count it in cache_seqlens"),
            ("v", v, "write it to v_cache first, and count it in cache_seqlens"),
            ("rotary_cos", rotary_cos, "turn q before, and keys before they are written"),
            ("rotary_sin", rotary_sin, "turn q before, and keys before they are written"),
            ("rotary_seqlens", rotary_seqlens, "turn q before, and keys before they are written"),
            (
                "cache_batch_idx",
                cache_batch_idx,
                "k_cache[cache_batch_idx] is a copy that is taken",
            ),
        ):
            if given is not None:
                refuse(name, instead)
    if E4M3 in (q.dtype, k_cache.dtype, v_cache.dtype):
        refuse("e4m3, with q_descale, k_descale and v_descale,", "keep the cache in 16 bits")
    if torch.is_grad_enabled() and (
        q.requires_grad or k_cache.requires_grad or v_cache.requires_grad
    ):
        raise ValueError(
            "flash_attn_with_kvcache: q, k_cache or v_cache requires a gradient, and over a cache "
            "there are none: fagen.attention has them, and attention_varlen with seqused_k; or "
            "call it under torch.no_grad()"
        )
    packed = cu_seqlens_q is not None
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if packed and tensor is q:
            if q.dim() != 3:
                raise ValueError(
                    f"q has {q.dim()} dimensions; with cu_seqlens_q it must have 3: (total, "
                    "heads, head_dim)"
                )
        else:
            refuse_rank(name, tensor)
    batch, room = k_cache.shape[:2]
    if isinstance(cache_seqlens, int):
        cache_seqlens = filled(cache_seqlens, batch, q)
    elif cache_seqlens is not None and not isinstance(cache_seqlens, Tensor):
        cache_seqlens = filled(index(cache_seqlens), batch, q)  # NumPy's, say
    cache_seqlens = lengths_of("cache_seqlens", cache_seqlens, k_cache)
    cache_leftpad = lengths_of("cache_leftpad", cache_leftpad, k_cache)
    queries = (max_seqlen_q or q.shape[0]) if packed else q.shape[1]
    causal = is_causal(refuse, window_size, queries, room, causal=causal)
    q = q if q.stride(-1) == 1 else q.contiguous()
    if cu_seqlens_q is None:
        return attention_cache(
            q,
            k_cache,
            v_cache,
            seqused_k=cache_seqlens,
            leftpad_k=cache_leftpad,
            causal=causal,
            scale=softmax_scale,
            return_lse=return_softmax_lse,
        )
    if v_cache.shape[:2] != k_cache.shape[:2]:
        raise ValueError(
            f"v_cache has shape {shape_of(v_cache)}; it must be (batch = {batch}, seqlen = "
            f"{room}, kv_heads, head_dim) as k_cache"
        )
    sequences = as_packed(k_cache, v_cache, cache_seqlens, cache_leftpad)
    if sequences is None:
        refuse(
            f"cu_seqlens_q over caches of shape {shape_of(k_cache)} and such strides",
            "sequences of k_cache and v_cache have to be the same whole number of rows apart",
        )
    return attention_varlen(
        q,
        sequences[0],
        sequences[1],
        cu_seqlens_q,
        sequences[2],
        seqused_k=sequences[3],
        max_seqlen_q=max_seqlen_q,
        causal=causal,
        scale=softmax_scale,
        return_lse=return_softmax_lse,
    )


@names_types
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
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """Return what flash_attn_with_kvcache takes as scheduler_metadata, which it does not read.

    That is (1) in int32 on the device of cache_seqlens: kernels find their work by themselves, from
    the lengths that they are called with.
    """
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
    fp32, natural logarithm. Both may be without B. See fagen.combine. What is given as `out` is
    written to, and says the dtype where out_dtype does not.

    Returns out (B, Sq, H, Dv) in out_dtype, else in out_partial's dtype, and the log-sum-exp (B,
    Sq, H) in fp32, as there a view of (B, H, Sq).

    Raises ValueError where `out` has another shape or dtype, and as fagen.combine does.
    """
    if out is not None:
        out_dtype = out_dtype or out.dtype
        if out.shape != out_partial.shape[1:] or out.dtype != out_dtype:
            raise ValueError(
                f"out has shape {shape_of(out)} in {out.dtype}; it must be "
                f"({', '.join(map(str, out_partial.shape[1:]))}) in {out_dtype}"
            )
    lses = torch.atleast_2d(lse_partial).transpose(-1, -2)
    made, lse = combine(
        out_partial, lses if lses.stride(-1) == 1 else lses.contiguous(), out_dtype=out_dtype
    )
    return made if out is None else out.copy_(made), lse.transpose(-1, -2)


# ---- of that module, and not there yet ----------------------------------------------------------


def flash_attn_qkvpacked_func(*_: object, **__: object) -> NoReturn:
    """Raise NotImplementedError: flash_attn_func takes *qkv.unbind(-3) without a copy."""
    raise NotImplementedError(
        "flash_attn_qkvpacked_func is not there yet in fagen; flash_attn_func takes "
        "*qkv.unbind(-3) without a copy"
    )
