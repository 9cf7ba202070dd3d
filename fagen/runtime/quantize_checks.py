"""A quantiser's Plan and tensors in, a refusal or outputs to be filled out."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fagen.e4m3 import E4M3
from fagen.kinds.quantize.keys import Schedule
from fagen.kinds.quantize.plan import Plan, plan
from fagen.runtime.checks import (
    ALIGNMENT,
    Hold,
    holding,
    refuse_address,
    refuse_strides,
    shape_of,
)
from fagen.vocab import KEY_ORDER

MAX_BATCH = 65_535  # thread blocks in two of a grid's directions,
MAX_SEQLEN = 65_535 * 32  # in one of them of 32 rows or more
MAX_HEADS = 1 << 30

Rotary = tuple[Tensor, Tensor]  # cosines and sines


@cache
def plan_of(slug: str) -> Plan:
    """Return the Plan that a quantiser's slug stands for."""
    return plan(Schedule.from_slug(slug))


def traced_outputs(
    of: Plan,
    x: Tensor,
    descale: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs without numbers, or refuse: what torch asks while it traces."""
    refuse_arguments(of, x, descale, cos, sin, have_data=False)
    values, found = outputs_for(of, x)
    return values, found if descale is None else x.new_empty(0, dtype=torch.float32)


def outputs_for(of: Plan, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values and descales, without numbers, that a kernel makes of x."""
    batch, seqlen, heads, head_dim = x.shape
    step = len(KEY_ORDER)
    padded = (seqlen + step - 1) // step * step
    shape = (batch, heads, head_dim, padded) if of.columns else (batch, seqlen, heads, head_dim)
    scales: tuple[Any, ...] = () if of.by_tensor else (batch, heads)
    scales += ((seqlen + of.scale_rows - 1) // of.scale_rows,) if of.by_block else ()
    return x.new_empty(shape, dtype=E4M3), x.new_empty(scales, dtype=torch.float32)


def refuse_arguments(
    of: Plan,
    x: Tensor,
    descale: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    have_data: bool = True,
) -> None:
    """Raise ValueError where the kernel cannot take these tensors, in the words of its binding.

    Without data, as in tracing, addresses are not looked at and sizes may be symbols.
    """

    hold, dtype = holding(of.slug), of.dtype.torch
    hold(
        x.dim() == 4 and x.shape[3] == of.head_dim,
        lambda: (
            f"x has shape {shape_of(x)}; this kernel takes (batch, seqlen, heads, {of.head_dim})"
        ),
    )
    hold(
        x.dtype == getattr(torch, dtype),
        lambda: f"x is not {dtype}, which this kernel takes; x.to(torch.{dtype}) converts it",
    )
    for size, most in zip(x.shape, (MAX_BATCH, MAX_SEQLEN, MAX_HEADS), strict=False):
        hold(
            not isinstance(size, int) or size <= most,
            lambda: (
                f"x has shape {shape_of(x)}; no more than {MAX_BATCH} batches, {MAX_SEQLEN} rows "
                f"and {MAX_HEADS} heads will do"
            ),
        )
    refuse_strides(hold, "x", x, ALIGNMENT // of.dtype.bytes)
    if have_data:
        refuse_address(hold, "x", x)
    for name, tensor in (("cos", cos), ("sin", sin)):
        hold(
            (tensor is not None) == of.rotary,
            lambda name=name: (  # type: ignore[misc]
                f"{name} is {'missing' if of.rotary else 'given'}; this kernel has "
                f"{'a' if of.rotary else 'no'} rotary embedding"
            ),
        )
        if tensor is not None:
            _refuse_angles(of, name, tensor, x, hold, have_data=have_data)
    if descale is None:
        return
    hold(not of.by_block, lambda: "descales of blocks are found, they cannot be given")
    shape = () if of.by_tensor else (x.shape[0], x.shape[2])
    hold(
        tuple(descale.shape) == shape,
        lambda: f"descale has shape {shape_of(descale)}; it must be ({', '.join(map(str, shape))})",
    )
    hold(
        descale.dtype == torch.float32,
        lambda: "descale is not float32; descale.float() converts it",
    )
    hold(
        descale.device == x.device,
        lambda: "descale is not on the device of x; descale.to(x.device) moves it there",
    )


def _refuse_angles(
    of: Plan,
    name: str,
    tensor: Tensor,
    x: Tensor,
    hold: Hold,
    *,
    have_data: bool,
) -> None:
    """Refuse cosines or sines, as refuse_arguments does."""
    shape = (x.shape[0], x.shape[1], of.angles)
    hold(
        tuple(tensor.shape) == shape,
        lambda: f"{name} has shape {shape_of(tensor)}; it must be ({', '.join(map(str, shape))})",
    )
    hold(
        tensor.dtype == x.dtype,
        lambda: f"{name} is not {of.dtype.torch}, as x is; {name}.to(x.dtype) converts it",
    )
    hold(
        tensor.device == x.device,
        lambda: f"{name} is not on the device of x; {name}.to(x.device) moves it there",
    )
    step = ALIGNMENT // of.dtype.bytes
    for i, stride in enumerate(tensor.stride()):
        hold(
            (tensor.shape[i] <= 1) | (stride == 1 if i == 2 else stride % step == 0),
            lambda i=i, stride=stride: (  # type: ignore[misc]
                f"{name} has stride {stride} in dimension {i}; {name}.contiguous() helps"
            ),
        )
    if have_data:
        refuse_address(hold, name, tensor)
