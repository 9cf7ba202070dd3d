"""FlashAttention-3's backward pass by itself: what a forward pass gave in, gradients out."""

from typing import Any

import torch
from torch import Tensor

from fagen.dispatch.select import buildable
from fagen.flash_attn_interface.arguments import (
    mask_of,
    refuse_others,
    refuse_yet,
    scale_of,
)
from fagen.flash_attn_interface.layout import varlen_keys, varlen_queries
from fagen.runtime.argument_types import flag
from fagen.runtime.arguments import E4M3, refuse_rank, settled
from fagen.runtime.attention import ATTENTION
from fagen.runtime.backward import gradients
from fagen.runtime.call import untraced
from fagen.runtime.checks import shape_of
from fagen.runtime.offsets import used_queries
from fagen.runtime.varlen import VARLEN, refuse_wrong_lengths

_CALLED = "_flash_attn_backward"

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def gradients_of(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    lengths: dict[str, Tensor | None],
    longest: tuple[int | None, int | None],
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    deterministic: bool,
    sm_margin: int,
) -> Gradients:
    """Return dq, dk and dv of one forward pass, and the row sums of dout · out.

    `lengths` are cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k, in this order, and `longest`
    the two max_seqlen. The sums are (B, H, Sq), or (H, total_q), in fp32.
    """
    refuse_others(_CALLED, None, 0, softcap, sm_margin=sm_margin)
    if q.dtype == E4M3:
        refuse_yet(_CALLED, "e4m3", "q, k and v in 16 bits have gradients")
    deterministic, scale = flag("deterministic", deterministic), scale_of(softmax_scale)
    if dout.shape != out.shape:
        raise ValueError(f"dout has shape {shape_of(dout)}; it must be out's, {shape_of(out)}")
    tensors = (x if x.stride(-1) == 1 else x.contiguous() for x in (dout, q, k, v, out))
    dout, q, k, v, out = tensors
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = lengths.values()
    queries = q.shape[-3] if cu_seqlens_q is None or longest[0] is None else longest[0]
    keys = k.shape[-3] if cu_seqlens_k is None or longest[1] is None else longest[1]
    causal = mask_of(_CALLED, window_size, queries, keys, causal=causal)
    sums = torch.linalg.vecdot(dout.float(), out.float()).transpose(-1, -2).contiguous()
    shapes = q.shape, k.shape, v.shape
    kind = q.device, q.dtype, settled(q.shape[-1]), settled(v.shape[-1]), causal
    dense = all(x is None for x in lengths.values())
    given: dict[str, Any] = dict(scale=q.shape[-1] ** -0.5 if scale is None else scale)
    if dense:
        for name, x in (("q", q), ("k", k), ("v", v)):
            refuse_rank(name, x)
    else:
        if cu_seqlens_q is None:
            refuse_rank("q", q)
            softmax_lse = softmax_lse.transpose(0, 1).flatten(1)
            dout, out = dout.flatten(0, 1), out.flatten(0, 1)
            q, cu_seqlens_q = varlen_queries(q)
        if cu_seqlens_k is None:
            refuse_rank("k", k)
            refuse_rank("v", v)
            # without what lies between sequences, which would have gradients too
            k, v = k.contiguous(), v.contiguous()
            batch = cu_seqlens_q.shape[0] - 1
            k, v, cu_seqlens_k, seqused_k = varlen_keys(k, v, seqused_k, batch)
        at = cu_seqlens_q, cu_seqlens_k, seqused_k
        if seqused_q is not None:
            refuse_wrong_lengths(seqused_q, *at)
            at = used_queries(seqused_q, *at)
        given |= zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_k"), at, strict=True)
    slug = _forward_of(kind, dense=dense)
    given |= dict(q=q, k=k, v=v)
    lse = softmax_lse if softmax_lse.stride(-1) == 1 else softmax_lse.contiguous()
    with torch.no_grad():
        made = gradients(slug, given, dout, out, lse, deterministic=deterministic)
    dq, dk, dv = (x.reshape(shape) for x, shape in zip(made, shapes, strict=True))
    return dq, dk, dv, sums


@untraced
def _forward_of(kind: Any, *, dense: bool) -> str:
    """The slug of a kernel whose gradients these are.  Raises ValueError where there is none."""
    key = (ATTENTION if dense else VARLEN).key_of(*kind)
    assert key.problem
    return buildable(key.problem).schedules[0].slug
