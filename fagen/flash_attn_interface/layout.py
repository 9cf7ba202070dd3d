"""Tensors as FlashAttention-3 takes them in, as fagen's kernels read them out.

Its kernels have head dims that fagen's have not, and take sequences of one length beside those of
lengths of their own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fagen.arch import SM90
from fagen.flash_attn_interface.arguments import lengths_of
from fagen.runtime.arguments import needs_gradient
from fagen.runtime.cache import Varlen, as_varlen
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
    columns, wide = (x.shape[-1] if x.dim() else 0 for x in (q, v))
    refused = not (columns and wide) or columns % _STEP or wide % _STEP or columns > MOST
    if refused or (columns >= LEAST and LEAST <= wide <= MOST):
        return call(q, k, v, *at, scale=scale, return_lse=return_lse, **more)
    scale = columns**-0.5 if scale is None else scale
    q, k = filled_up(q, LEAST), filled_up(k, LEAST)
    parts = -(-wide // MOST)
    width = -(-wide // (parts * _STEP)) * _STEP
    outs, lse = [], None
    for i, part in enumerate(v.split(width, -1)):
        first = return_lse and i == 0
        found = call(q, k, filled_up(part, LEAST), *at, scale=scale, return_lse=first, **more)
        out, lse = found if first else (found, lse)
        outs.append(out[..., : part.shape[-1]])
    made = torch.cat(outs, -1)
    return (made, lse) if return_lse else made


def filled_up(x: Tensor, columns: int) -> Tensor:
    """Return x with zeros behind its columns, up to so many at least."""
    missing = columns - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing > 0 else x


def varlen_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return q (B, Sq, H, D) as (B · Sq, H, D), and its offsets."""
    return q.flatten(0, 1), evenly(q.shape[0], q.shape[1], q.device)


def varlen_keys(k: Tensor, v: Tensor, seqused_k: Tensor | None, batch: int) -> Varlen:
    """Return k and v of sequences of one length as one tensor each, their offsets, and seqused_k.

    Where no gradient is needed nothing is copied but what lies no whole number of rows apart.
    Raises ValueError where they are not of so many sequences.
    """
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != batch or x.shape[1] != k.shape[1]:
            raise ValueError(
                f"{name} has shape {shape_of(x)}; without cu_seqlens_k it must be (batch = "
                f"{batch}, seqlen = {k.shape[1]}, kv_heads, head_dim)"
            )
    seqused_k = lengths_of("seqused_k", seqused_k, batch, k, "k")
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    varlen = None
    if not (torch.is_grad_enabled() and needs_gradient(k, v)):
        varlen = as_varlen(k, v, seqused_k, None)
    if varlen is None:
        offsets = evenly(batch, k.shape[1], k.device)
        varlen = k.flatten(0, 1), v.flatten(0, 1), offsets, seqused_k
    return varlen
