"""Tensors as FlashAttention-3 takes them in, as fagen's kernels read them out.

Its kernels have head dims that fagen's have not, and take sequences of one length beside those of
lengths of their own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fagen.arch import SM90
from fagen.flash_attn_interface.arguments import lengths_of, readable
from fagen.runtime.arguments import needs_gradient, refuse_rank
from fagen.runtime.cache import as_varlen
from fagen.runtime.checks import shape_of
from fagen.runtime.offsets import evenly

_TAKEN = SM90.head_dims(2)
_STEP, LEAST, MOST = _TAKEN.step, _TAKEN[0], _TAKEN[-1]  # of head dims in 16 bits


def attend_other(
    call: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    *at: Tensor,
    return_lse: bool,
    **more: Any,
) -> Any:
    """Return what a call of fagen gives for such tensors, in 16 bits, also for other head dims.

    q and k of too few columns are filled up with zeros, which changes no product, and so is v, of
    whose columns as many are dropped again. Of more columns of v than a kernel has each call takes
    a part; scores are computed anew for each.
    """
    q_shape, v_shape = q.shape, v.shape
    columns, wide = (q_shape[-1], v_shape[-1]) if q_shape and v_shape else (0, 0)
    is_taken = columns >= LEAST and LEAST <= wide <= MOST
    if is_taken or not (columns and wide) or columns % _STEP or wide % _STEP or columns > MOST:
        return call(q, k, v, *at, scale=scale, return_lse=return_lse, **more)
    scale = columns**-0.5 if scale is None else scale
    q, k = filled_up(q, LEAST), filled_up(k, LEAST)
    parts = -(-wide // MOST)
    width = -(-wide // (parts * _STEP)) * _STEP
    outs, lse = [], None
    for i, part in enumerate(v.split(width, -1)):
        first = return_lse and i == 0
        results = call(q, k, filled_up(part, LEAST), *at, scale=scale, return_lse=first, **more)
        out, lse = results if first else (results, lse)
        outs.append(out[..., : part.shape[-1]])
    whole = torch.cat(outs, -1)
    return (whole, lse) if return_lse else whole


def filled_up(x: Tensor, columns: int) -> Tensor:
    """Return x with zeros behind its columns, up to so many at least."""
    missing = columns - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing > 0 else x


def as_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k and v as sequences one after another, both offsets, and seqused_k.

    Without cu_seqlens_q, q is (B, Sq, H, D), and without cu_seqlens_k k and v are (B, Sk, Hk, …).
    Where no gradient is needed nothing is copied but what lies no whole number of rows apart.
    Raises ValueError where they are not of so many sequences.
    """
    if cu_seqlens_q is None:
        refuse_rank(q=q)
        cu_seqlens_q = evenly(q.shape[0], q.shape[1], q.device)
        q = q.flatten(0, 1)
    if cu_seqlens_k is not None:
        return q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k
    refuse_rank(k=k, v=v)
    batch, keys = cu_seqlens_q.shape[0] - 1, k.shape[1]
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != batch or x.shape[1] != keys:
            raise ValueError(
                f"{name} has shape {shape_of(x)}; without cu_seqlens_k it must be (batch = "
                f"{batch}, seqlen = {keys}, kv_heads, head_dim)"
            )
    seqused_k = lengths_of("seqused_k", seqused_k, batch, k, "k")
    k, v = readable(k), readable(v)
    needs = torch.is_grad_enabled() and needs_gradient(k, v)
    varlen = None if needs else as_varlen(k, v, seqused_k, None)
    if varlen is None:
        varlen = k.flatten(0, 1), v.flatten(0, 1), evenly(batch, keys, k.device), seqused_k
    k, v, cu_seqlens_k, seqused_k = varlen
    return q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k
