"""FlashAttention-3's attention of whole tensors, and of sequences one after another."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fagen.flash_attn_interface.arguments import (
    NO_WINDOW,
    descales_of,
    forward_only,
    is_variant,
    refuse_others,
    scale_of,
    variant_of,
)
from fagen.flash_attn_interface.layout import LEAST, MOST, as_sequences, attend_other
from fagen.runtime.argument_types import flag, names_types, whole
from fagen.runtime.arguments import E4M3, refuse_rank
from fagen.runtime.attention import attention
from fagen.runtime.checks import shape_of
from fagen.runtime.varlen import attention_varlen

_NO_GRADIENT = (
    "{}: e4m3 tensors have no gradients yet in fagen; q, k and v in 16 bits have, and under "
    "torch.no_grad() none is asked for"
)


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
    window_size: Sequence[int] | Tensor = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(softmax_scale · q kᵀ) v, as FlashAttention-3's function of this name does.

    q (B, Sq, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv) in fp16, bf16 or e4m3; H a multiple of
    Hk. softmax_scale is 1/√D if left out. The causal mask is aligned to the bottom right. Of
    tensors whose last dimension is not contiguous a copy is made. D of 8 in 16 bits is filled up
    with zeros, and a Dv above 256 is computed in several calls, each of which reads q and k.

    q_descale, k_descale and v_descale, (B, Hk) each in fp32, are what e4m3 tensors are to be
    multiplied by; that of q is of all query heads of a KV head; None is 1. Beside 16-bit tensors
    they are not read. window_size is (left, right), both included, where a negative number is no
    bound, and with attention_chunk a query sees the keys of its own chunk alone. softcap above 0 is
    the cap of scores, and s_aux, (H,), has a sink of each head.

    With deterministic the gradient of q has the same bits in each call too, which all else has
    anyway. These change nothing here: pack_gqa, num_splits and sm_margin, hints about the order of
    the work, of which sizes alone decide.

    Returns out (B, Sq, H, Dv), in q's dtype or of e4m3 in bf16, and with return_attn_probs also the
    log-sum-exp (B, H, Sq) in fp32, natural logarithm: zeros and minus infinity for a row that sees
    no key. Of e4m3 tensors that require gradients it is computed, and its backward pass refused.

    Raises NotImplementedError for qv, and for a backward pass in e4m3; ValueError for a wrong
    argument, hints among them; and what else fagen.attention raises.
    """
    q_shape, v_shape = q.shape, v.shape
    if not len(q_shape) == len(v_shape) == k.dim() == 4:
        refuse_rank(q=q, k=k, v=v)
    others = qv, attention_chunk, softcap, num_splits, sm_margin, pack_gqa
    chunk, cap = refuse_others("flash_attn_func", *others)
    more: dict[str, Any] = dict(causal=causal, chunk=chunk, softcap=cap, s_aux=s_aux)
    how = variant_of("flash_attn_func", window_size, q_shape[1], k.shape[1], **more)
    q = q if q.stride(3) == 1 else q.contiguous()
    k = k if k.stride(3) == 1 else k.contiguous()
    v = v if v.stride(3) == 1 else v.contiguous()
    if return_attn_probs is not False:
        return_attn_probs = flag("return_attn_probs", return_attn_probs)
    scale = None if softmax_scale is None else scale_of(softmax_scale)
    is_e4m3 = q.dtype == E4M3
    if not (is_e4m3 or is_variant(how)) and LEAST <= v_shape[3] <= MOST and q_shape[3] >= LEAST:
        return attention(
            q,
            k,
            v,
            causal=how["causal"],
            scale=scale,
            return_lse=return_attn_probs,
            deterministic=deterministic,
        )
    how |= dict(return_lse=return_attn_probs, deterministic=deterministic)
    if not is_e4m3:
        return attend_other(attention, q, k, v, scale, **how)
    heads = q.shape[0], q.shape[2], k.shape[2]
    how |= descales_of(q, heads, q_descale, k_descale, v_descale)
    refusal = _NO_GRADIENT.format("flash_attn_func")
    return forward_only(refusal, (q, k, v), attention, q, k, v, scale=scale, **how)


@names_types
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] | Tensor = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute flash_attn_func of the three tensors that lie in one, which is not copied.

    qkv is (B, S, 3, H, D), or (B, S, H + 2 Hk, D) with H as num_heads_q. All else is as of
    flash_attn_func; its gradient is one tensor, for which those of the three are copied.

    Raises ValueError for another shape, and as flash_attn_func does.
    """
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif qkv.dim() == 4 and num_heads_q is not None:
        heads = whole("num_heads_q", num_heads_q)
        kv_heads = (qkv.shape[2] - heads) // 2
        if heads < 0 or kv_heads < 0 or heads + 2 * kv_heads != qkv.shape[2]:
            raise ValueError(
                f"qkv has shape {shape_of(qkv)}, and num_heads_q is {heads}; it must be (batch, "
                "seqlen, num_heads_q + 2 · kv_heads, head_dim)"
            )
        q, k, v = qkv.split((heads, kv_heads, kv_heads), 2)
    else:
        raise ValueError(
            f"qkv has shape {shape_of(qkv)}; it must be (batch, seqlen, 3, heads, head_dim), or "
            "(batch, seqlen, heads + 2 · kv_heads, head_dim) with num_heads_q"
        )
    descales = q_descale, k_descale, v_descale
    bounds = window_size, attention_chunk, softcap
    of_order = None, deterministic, sm_margin  # pack_gqa is a hint
    of_both = softmax_scale, causal, None, *descales, *bounds, 1, *of_order
    return flash_attn_func(q, k, v, *of_both, return_attn_probs, s_aux=s_aux)


@names_types
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] | Tensor = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of sequences that lie one after another, as FlashAttention-3's does.

    q (total_q, H, D), k (total_k, Hk, D) and v (total_k, Hk, Dv) in fp16, bf16 or e4m3;
    cu_seqlens_q and cu_seqlens_k (B + 1), seqused_q and seqused_k (B) in int32; see
    fagen.attention_varlen. Without cu_seqlens_q, q is (B, Sq, H, D), and without cu_seqlens_k k and
    v are (B, Sk, Hk, D) and (B, Sk, Hk, Dv). Of tensors whose last dimension is not contiguous a
    copy is made. Descales, (B, Hk) each, and head dims are as of flash_attn_func.

    max_seqlen_q and max_seqlen_k only tell which window_size is no window, and fagen.recording of
    lengths: these are read on the device. deterministic is as of flash_attn_func; pack_gqa,
    num_splits and sm_margin change nothing here.

    Returns out (total_q, H, Dv), in q's dtype or of e4m3 in bf16, and with return_attn_probs also
    the log-sum-exp (H, total_q) in fp32, natural logarithm; of q (B, Sq, H, D) they are (B, Sq, H,
    Dv) and (B, H, Sq). Zeros and minus infinity for a row that sees no key, and for rows behind
    seqused_q. Of e4m3 tensors that require gradients it is computed, and its backward pass refused.

    Raises NotImplementedError for what flash_attn_func has not either; ValueError for a wrong
    argument; and what else fagen.attention_varlen does.
    """
    called = "flash_attn_varlen_func"
    others = qv, attention_chunk, softcap, num_splits, sm_margin, pack_gqa
    chunk, cap = refuse_others(called, *others)
    if return_attn_probs is not False:
        return_attn_probs = flag("return_attn_probs", return_attn_probs)
    dense = None  # batch and queries, of one length
    if cu_seqlens_q is None or cu_seqlens_k is None:
        if cu_seqlens_q is None:
            refuse_rank(q=q)
            dense = q.shape[0], q.shape[1]
            max_seqlen_q = dense[1]
        if cu_seqlens_k is None:
            refuse_rank(k=k)
            max_seqlen_k = k.shape[1]
        packed = as_sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k)
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k = packed
    q = q if q.stride()[-1:] == (1,) else q.contiguous()
    k = k if k.stride()[-1:] == (1,) else k.contiguous()
    v = v if v.stride()[-1:] == (1,) else v.contiguous()
    scale = None if softmax_scale is None else scale_of(softmax_scale)
    queries = q.shape[0] if max_seqlen_q is None else max_seqlen_q
    keys = k.shape[0] if max_seqlen_k is None else max_seqlen_k
    more: dict[str, Any] = dict(causal=causal, chunk=chunk, softcap=cap, s_aux=s_aux)
    how = variant_of(called, window_size, queries, keys, **more)
    q_shape, v_shape, is_e4m3 = q.shape, v.shape, q.dtype == E4M3
    more_than_causal = is_variant(how)
    is_usual = not (dense or is_e4m3 or more_than_causal) and len(q_shape) == len(v_shape) == 3
    if is_usual and LEAST <= v_shape[2] <= MOST and q_shape[2] >= LEAST:
        return attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            causal=how["causal"],
            scale=scale,
            return_lse=return_attn_probs,
            deterministic=deterministic,
        )
    at = cu_seqlens_q, cu_seqlens_k
    how |= dict(
        return_lse=return_attn_probs,
        deterministic=deterministic,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    if not is_e4m3:
        results = attend_other(attention_varlen, q, k, v, scale, *at, **how)
    else:
        if q.dim() == k.dim() == 3 and cu_seqlens_q.dim() == 1:  # else they are refused below
            sizes = cu_seqlens_q.shape[0] - 1, q.shape[1], k.shape[1]
            how |= descales_of(q, sizes, q_descale, k_descale, v_descale)
        refusal, arguments = _NO_GRADIENT.format(called), (q, k, v, *at)
        results = forward_only(refusal, (q, k, v), attention_varlen, *arguments, scale=scale, **how)
    if dense is None:
        return results
    if isinstance(results, Tensor):
        return results.unflatten(0, dense)
    out, lse = results
    return out.unflatten(0, dense), lse.unflatten(1, dense).transpose(0, 1).contiguous()
