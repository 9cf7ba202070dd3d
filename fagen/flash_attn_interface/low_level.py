"""FlashAttention-3's two passes below its calls, as other libraries import them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fagen.dispatch.select import buildable
from fagen.flash_attn_interface.arguments import (
    is_variant,
    readable,
    refuse_others,
    refuse_yet,
    scale_of,
    variant_of,
    written,
)
from fagen.flash_attn_interface.calls import flash_attn_func, flash_attn_varlen_func
from fagen.flash_attn_interface.kvcache import flash_attn_with_kvcache
from fagen.flash_attn_interface.layout import as_sequences
from fagen.runtime.argument_types import flag, names_types
from fagen.runtime.arguments import E4M3, needs_gradient, refuse_rank, settled
from fagen.runtime.attention import ATTENTION
from fagen.runtime.backward import gradients
from fagen.runtime.call import untraced
from fagen.runtime.checks import shape_of
from fagen.runtime.offsets import used_queries
from fagen.runtime.varlen import VARLEN, refuse_wrong_lengths
from fagen.variants import said

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


@names_types
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    s_aux: Tensor | None = None,
    window_size: Sequence[int] | Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute what the three calls do, in the form that they have below FlashAttention-3's.

    With cu_seqlens_q, cu_seqlens_k or seqused_q it is flash_attn_varlen_func, else with seqused_k,
    leftpad_k or what belongs to a cache flash_attn_with_kvcache, else flash_attn_func. `out_`, or
    `out` in older releases, is written to where it is given; window_size is how they give bounds.

    Returns out, the log-sum-exp and two empty tensors: nothing is left of splits. Raises as these
    three do.
    """
    window = _window(window_size_left, window_size_right, window_size)
    flag("rotary_interleaved", rotary_interleaved)
    common: dict[str, Any] = dict(
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
        s_aux=s_aux,
    )
    lengths = cu_seqlens_k, seqused_q
    of_cache = k_new, v_new, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin
    needed = torch.is_grad_enabled() and needs_gradient(q, k, v)
    if any(x is not None for x in of_cache) or (
        seqused_k is not None and all(x is None for x in lengths) and not needed
    ):
        for name, value in zip(("cu_seqlens_k", "seqused_q"), lengths, strict=True):
            if value is not None:
                refuse_yet("_flash_attn_forward", f"{name} over a cache", "None is none")
        both = flash_attn_with_kvcache(
            q,
            k,
            v,
            k_new,
            v_new,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            cache_seqlens=seqused_k,
            cache_batch_idx=kv_batch_idx,
            cache_leftpad=leftpad_k,
            page_table=page_table,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            return_softmax_lse=True,
            **common,
        )
    elif any(x is not None for x in (cu_seqlens_q, seqused_k, *lengths)):
        longest = max_seqlen_q, max_seqlen_k
        at = cu_seqlens_q, cu_seqlens_k, *longest, seqused_q, seqused_k
        both = flash_attn_varlen_func(q, k, v, *at, return_attn_probs=True, **common)
    else:
        both = flash_attn_func(q, k, v, return_attn_probs=True, **common)
    result, lse = both
    result = written("out_", out if out_ is None else out_, result)
    nothing = lse.new_empty(0)
    return result, lse, nothing, nothing


@names_types
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    *,
    window_size: Sequence[int] | Tensor | None = None,
    causal: bool | None = None,
) -> Tensor | Gradients:
    """Write the gradients of a forward pass to dq, dk and dv, those of them that are given.

    q, k, v, lengths and masks are as of the forward pass that gave out and softmax_lse; dout is the
    gradient of out. `causal` is is_causal, as older releases say.

    Returns the row sums of dout · out, (B, H, Sq) or (H, total_q) in fp32. With window_size, in
    which older releases take bounds, returns dq, dk, dv and those sums, as these do.

    Raises NotImplementedError for e4m3; ValueError for a wrong argument; and what else the backward
    pass of fagen.attention does.
    """
    called = "_flash_attn_backward"
    _, cap = refuse_others(called, None, 0, softcap, sm_margin=sm_margin)
    if q.dtype == E4M3:
        refuse_yet(called, "e4m3", "q, k and v in 16 bits have gradients")
    deterministic, scale = flag("deterministic", deterministic), scale_of(softmax_scale)
    if dout.shape != out.shape:
        raise ValueError(f"dout has shape {shape_of(dout)}; it must be out's, {shape_of(out)}")
    dout, q, k, v, out = map(readable, (dout, q, k, v, out))
    queries = q.shape[-3] if cu_seqlens_q is None or max_seqlen_q is None else max_seqlen_q
    keys = k.shape[-3] if cu_seqlens_k is None or max_seqlen_k is None else max_seqlen_k
    window = _window(window_size_left, window_size_right, window_size)
    causal = is_causal if causal is None else causal
    how = variant_of(called, window, queries, keys, causal=causal, softcap=cap)
    variant, more = how["causal"], {}
    if is_variant(how):
        seen = how.get("window"), None, how.get("softcap")
        words = said(_flash_attn_backward, variant, *seen, None, None, {})
        variant, more = words.variant, dict(zip(words.names, words.values, strict=True))
    sums = torch.linalg.vecdot(dout.float(), out.float()).transpose(-1, -2).contiguous()
    shapes = q.shape, k.shape, v.shape
    kind = q.device, q.dtype, settled(q.shape[-1]), settled(v.shape[-1]), variant
    call: dict[str, Any] = dict(scale=q.shape[-1] ** -0.5 if scale is None else scale, **more)
    dense = cu_seqlens_q is cu_seqlens_k is sequed_q is sequed_k is None
    if dense:
        refuse_rank(q=q, k=k, v=v)
    else:
        if cu_seqlens_q is None:
            softmax_lse = softmax_lse.transpose(0, 1).flatten(1)
            dout, out = dout.flatten(0, 1), out.flatten(0, 1)
        if cu_seqlens_k is None:
            # without what lies between sequences, which would have gradients too
            k, v = k.contiguous(), v.contiguous()
        q, k, v, *at = as_sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, sequed_k)
        if sequed_q is not None:
            refuse_wrong_lengths(sequed_q, *at)
            at = [*used_queries(sequed_q, *at)]
        call |= zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_k"), at, strict=True)
    call |= dict(q=q, k=k, v=v)
    with torch.no_grad():
        gradients_of_inputs = gradients(
            _forward_of(kind, dense=dense),
            call,
            dout,
            out,
            readable(softmax_lse),
            deterministic=deterministic,
        )
        results = [
            written(name, target, gradient.reshape(shape))
            for name, target, gradient, shape in zip(
                ("dq", "dk", "dv"), (dq, dk, dv), gradients_of_inputs, shapes, strict=True
            )
        ]
    return sums if window_size is None else (results[0], results[1], results[2], sums)


@untraced
def _forward_of(kind: Any, *, dense: bool) -> str:
    """The slug of a kernel whose gradients these are.  Raises ValueError where there is none."""
    key = (ATTENTION if dense else VARLEN).key_of(*kind)
    assert key.problem
    return buildable(key.problem).schedules[0].slug


def _window(left: Any, right: int, both: Any) -> Any:
    """The bounds of a window, by one of the ways in which releases take them."""
    if both is not None:
        return both
    return (left, right) if isinstance(left, int) else left
