"""A Plan and tensors in, a ValueError out where its kernel cannot take them."""

import ctypes
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import Plan, plan
from fagen.vocab import KEY_ORDER

MAX_SIZE = 1 << 30  # of any dimension
ALIGNMENT = 16  # bytes, of base pointers and strides: what TMA asks for
KEYS = len(KEY_ORDER)  # to a multiple of which V by columns is filled up

Hold = Callable[[Any, Callable[[], str]], None]  # a condition; what is said where it is not met


@cache
def plan_of(slug: str) -> Plan:
    """Return the Plan that a slug stands for."""
    return plan(Schedule.from_slug(slug))


def holding(slug: str) -> Hold:
    """Return what raises ValueError, in words that begin with the op, unless a condition holds."""

    def hold(condition: Any, said: Callable[[], str]) -> None:
        # torch._check_value: a symbolic condition becomes a guard or an assertion of the graph
        torch._check_value(condition, lambda: f"fagen::{slug}: {said()}")

    return hold


def refuse_strides(hold: Hold, name: str, tensor: Tensor, step: int) -> None:
    """Refuse strides of 4 dimensions that TMA cannot follow: `step` elements are its alignment."""
    strides = tensor.stride()
    hold(
        strides[3] == 1,
        lambda: (
            f"{name} has stride {strides[3]} in its last dimension, which must be 1; "
            f"{name}.contiguous() makes it so"
        ),
    )
    for i in range(3):
        hold(
            # without keys, V by columns has strides that mean nothing
            (tensor.shape[i] <= 1) | (tensor.shape[3] == 0) | (strides[i] % step == 0),
            lambda i=i: (  # type: ignore[misc]
                f"{name} has stride {strides[i]} in dimension {i}, which must be a multiple of "
                f"{step} elements ({ALIGNMENT} bytes); {name}.contiguous() makes it so"
            ),
        )


def refuse_address(hold: Hold, name: str, tensor: Tensor) -> None:
    """Refuse a tensor with data that begins where TMA cannot."""
    hold(
        tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT == 0,
        lambda: f"{name} does not begin at a multiple of {ALIGNMENT} bytes; {name}.clone() does",
    )


def refuse_arguments(
    of: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    *,
    have_data: bool = True,
) -> None:
    """Raise ValueError where the kernel cannot take these tensors, in the words of its binding.

    Without data, as in tracing, addresses are not looked at and sizes may be symbols.
    """
    v_columns = of.fp8 and not of.v_rows

    hold = holding(of.slug)

    def alone(name: str, tensor: Tensor, dimensions: str, columns: int, at: int = 3) -> None:
        dtype = of.dtype.torch
        hold(
            tensor.dim() == 4 and tensor.shape[at] == columns,
            lambda: f"{name} has shape {shape_of(tensor)}; this kernel takes ({dimensions})",
        )
        hold(
            tensor.dtype == getattr(torch, dtype),
            lambda: (
                f"{name} is not {dtype}, which this kernel takes; "
                + (
                    f"fagen.quantize({name}) makes it so, with its descale"
                    if of.fp8
                    else f"{name}.to(torch.{dtype}) converts it"
                )
            ),
        )
        for size in tensor.shape:
            hold(
                # a bound on a symbol would be one more demand on whoever exports
                not isinstance(size, int) or size <= MAX_SIZE,
                lambda: f"{name} has shape {shape_of(tensor)}; no size may exceed {MAX_SIZE}",
            )
        refuse_strides(hold, name, tensor, ALIGNMENT // of.dtype.bytes)
        if have_data:
            refuse_address(hold, name, tensor)

    def beside(name: str, tensor: Tensor) -> None:
        hold(
            tensor.device == q.device,
            lambda: f"{name} is not on the device of q; {name}.to(q.device) moves it there",
        )

    def scales(name: str, descale: Tensor | None, heads: int, rows: int) -> None:
        if descale is None:
            hold(
                not of.scales_by_block,
                lambda: (
                    f"{name} is missing; this kernel has scales by block of {of.scale_rows} rows"
                ),
            )
            return
        sizes, batch = descale.shape, q.shape[0]
        blocks = -(-rows // of.scale_rows) if of.scales_by_block else 1
        kind = f"blocks of {of.scale_rows} rows" if of.scales_by_block else "one block"
        hold(
            len(sizes) == 3
            and ((sizes[0] == batch) | (sizes[0] == 1))
            and ((sizes[1] == heads) | (sizes[1] == 1))
            and sizes[2] == blocks,
            lambda: (
                f"{name} has shape {shape_of(descale)}; it must be ({batch} or 1, {heads} or 1, "
                f"{blocks}): batch, heads, {kind}"
            ),
        )
        hold(
            descale.dtype == torch.float32,
            lambda: f"{name} is not float32; {name}.float() converts it",
        )
        beside(name, descale)
        for i in range(2):
            hold(
                (sizes[i] <= 1) | (descale.stride(i) <= MAX_SIZE),
                lambda i=i: (  # type: ignore[misc]
                    f"{name} has stride {descale.stride(i)} in dimension {i}, which must not "
                    f"exceed {MAX_SIZE}; {name}.contiguous() helps"
                ),
            )
        hold(
            (sizes[2] <= 1) | (descale.stride(2) == 1),
            lambda: (
                f"{name} has stride {descale.stride(2)} from block to block, which must be 1; "
                f"{name}.contiguous() makes it so"
            ),
        )

    alone("q", q, f"batch, seqlen_q, heads, {of.head_dim}", of.head_dim)
    alone("k", k, f"batch, seqlen_k, kv_heads, {of.head_dim}", of.head_dim)
    if v_columns:
        alone("v", v, f"batch, kv_heads, {of.head_dim_v}, keys", of.head_dim_v, at=2)
    else:
        alone("v", v, f"batch, seqlen_k, kv_heads, {of.head_dim_v}", of.head_dim_v)
    beside("k", k)
    beside("v", v)
    hold(k.shape[0] == q.shape[0], lambda: f"k has batch {k.shape[0]}, but q has {q.shape[0]}")
    if v_columns:
        keys = -(-k.shape[1] // KEYS) * KEYS
        for i, size in ((0, k.shape[0]), (1, k.shape[2]), (3, keys)):
            hold(
                v.shape[i] == size,
                lambda: (
                    f"v has shape {shape_of(v)}, but k has {shape_of(k)}; by columns v must be "
                    f"({k.shape[0]}, {k.shape[2]}, {of.head_dim_v}, {keys}): its keys are filled "
                    f"up to a multiple of {KEYS}"
                ),
            )
    else:
        for i in range(3):
            hold(
                v.shape[i] == k.shape[i],
                lambda: (
                    f"v has shape {shape_of(v)}, but k has {shape_of(k)}; "
                    "all but the last size must be equal"
                ),
            )
    heads, kv_heads = q.shape[2], k.shape[2]
    hold(
        heads == 0 if kv_heads == 0 else heads % kv_heads == 0,
        lambda: f"q has {heads} heads, which is not a multiple of the {kv_heads} heads of k",
    )
    if isinstance(scale, float | int):  # a symbol is looked at when it has a value
        scale32 = ctypes.c_float(scale).value
        hold(
            math.isfinite(scale32) and scale32 > 0,
            lambda: f"scale is {scale:g}; it must be finite and above 0 as a float32",
        )
    if of.fp8:
        scales("q_descale", q_descale, heads, q.shape[1])
        scales("k_descale", k_descale, kv_heads, k.shape[1])
        scales("v_descale", v_descale, kv_heads, k.shape[1])
    else:
        hold(
            q_descale is None and k_descale is None and v_descale is None,
            lambda: f"descales go with e4m3; this kernel takes {of.dtype.torch}",
        )


def shape_of(tensor: Tensor) -> str:
    """Return a tensor's shape, to be printed."""
    return f"({', '.join(map(str, tensor.shape))})"
