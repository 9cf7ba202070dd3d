"""16-bit tensors of a cell in, what the kernels of the backward pass take out, and their launch."""

import math
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fagen.kinds.backward.plan import Plan
from fagen.kinds.backward.reference import gradients
from fagen.measure.gradients import attended, output_gradient
from fagen.measure.inputs import softmax_scale
from fagen.problem import Problem
from fagen.runtime.c_interface import bind

BACKEND = "flash"  # of torch: its forward pass is quick, and its causal mask aligned as fagen's


def arguments(of: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """What the Plan's op takes for q, k and v: dout, these, a forward pass's out and lse, a scale.

    The forward pass is that of torch's FLASH_ATTENTION, or one in fp32 where that does not take
    them. Where the op takes sequences of lengths of their own these are of equal ones, packed.
    """
    dout, (out, lse), scale = (
        output_gradient(q, v),
        _results(of, q, k, v),
        softmax_scale(of.head_dim),
    )
    if of.varlen:
        dout, *qkv, out = (x.flatten(0, 1) for x in (dout, q, k, v, out))
        log_sums = lse.transpose(0, 1).flatten(1).contiguous()
        return dout, *qkv, _offsets(q), _offsets(k), out, log_sums, scale
    return dout, q, k, v, out, lse, scale


def _offsets(x: Tensor) -> Tensor:
    """Where sequences of x (B, S, H, D) begin once they are packed, and the last one ends."""
    batch, seqlen = x.shape[:2]
    return torch.arange(batch + 1, dtype=torch.int32, device=x.device) * seqlen


def _results(of: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if q.is_cuda and of.head_dim == of.head_dim_v and (of.mask.causal or not of.mask.by_row):
        with suppress(RuntimeError):  # as torch refuses
            found = attended(BACKEND, q, k, v, causal=of.mask.causal)
            return found.out, found.lse
    dout = torch.zeros_like(output_gradient(q, v))
    scale = softmax_scale(of.head_dim)
    out, lse, *_ = gradients(dout, q, k, v, mask=of.mask, scale=scale, dtype=torch.float32)
    return out.to(q.dtype).contiguous(), lse


def outputs(of: Plan, given: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Where the Plan's kernels may write the gradients of these arguments: dq, dk, dv, all NaN."""
    named = dict(zip((one.name for one in of.signature.arguments), given, strict=False))
    return tuple(
        torch.full_like(named[name], math.nan, memory_format=torch.contiguous_format)
        for name in ("q", "k", "v")
    )


def launch(
    of: Plan, library: Path, given: tuple[Any, ...], into: tuple[Tensor, ...]
) -> Callable[[], None]:
    """The kernels through their C interface, on the current stream; the workspace is full of NaN.

    Arguments as of the op, in its order; what is left out at their end is null.
    """
    named = dict(zip((one.name for one in of.signature.arguments), given, strict=False))
    dq, dk, dv = into
    return bind(of, library, **named, dq=dq, dk=dk, dv=dv)


def alike(of: Plan) -> Hashable:
    """Kernels with the same take the same arguments, and write to the same outputs."""
    return Problem.of(of.schedule)
