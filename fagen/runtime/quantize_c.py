"""Tensors in, one call of a quantiser's C function out, registering nothing."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fagen.build import Binary
from fagen.e4m3 import SIGN_WORDS, sign_words
from fagen.errors import DeviceError
from fagen.kinds.quantize.plan import Plan
from fagen.runtime.c_interface import enqueuer
from fagen.runtime.quantize_checks import Rotary, plan_of, refuse_arguments


class QuantizeArgs(ctypes.Structure):
    """FagenQuantizeArgs of the C interface."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("struct_bytes", "given")),
        *((name, ctypes.c_void_p) for name in ("input", "out", "descale", "workspace")),
        *(
            (f"{tensor}_stride_{dimension}", ctypes.c_int64)
            for tensor, dimensions in (
                ("in", ("batch", "seq", "head")),
                ("out", ("batch", "head", "row")),
                ("descale", ("batch", "head", "block")),
            )
            for dimension in dimensions
        ),
        ("signs", ctypes.c_uint32 * SIGN_WORDS),
        *((name, ctypes.c_int32) for name in ("batch", "heads", "seqlen", "reserved")),
    )


class RotaryQuantizeArgs(QuantizeArgs):
    """FagenQuantizeArgs of a kernel with a rotary embedding."""

    _fields_ = (
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        *(
            (f"{name}_stride_{dimension}", ctypes.c_int64)
            for name in ("cos", "sin")
            for dimension in ("batch", "seq")
        ),
    )


def bind_quantizer(
    binary: Binary,
    x: Tensor,
    values: Tensor,
    descale: Tensor,
    *,
    seed: int = 0,
    given: Tensor | None = None,
    rotary: Rotary | None = None,
) -> Callable[[], None]:
    """Return a function that enqueues the kernel on these very tensors, registering nothing.

    `values` and `descale` are as outputs_for(…) makes them. The tensors must outlive it. Raises
    ValueError for a wrong argument, DeviceError where x is on no GPU; so does the function where
    the GPU refuses.
    """
    of = plan_of(binary.slug)
    refuse_arguments(of, x, given, *(rotary or ()))
    if x.device.type != "cuda":
        raise DeviceError(f"{of.slug}: x is on {x.device}; the kernel runs on a Hopper GPU")
    workspace = None
    if not of.by_block and given is None:
        numbers = x.shape[0] * x.shape[2] * -(-x.shape[1] // of.rows)
        workspace = x.new_empty(numbers, dtype=torch.float32)
    used = descale if given is None else given
    args = quantizer_args(of, x, values, used, workspace, seed, rotary)
    enqueue = enqueuer(of.slug, binary.library, args, x.device)

    def run(_held: Any = (workspace, used, rotary)) -> None:
        enqueue()

    return run


def quantizer_args(
    of: Plan,
    x: Tensor,
    values: Tensor,
    descale: Tensor,
    workspace: Tensor | None,
    seed: int,
    rotary: Rotary | None = None,
) -> QuantizeArgs:
    """Describe one call to the C interface; without a workspace descales are given, or of blocks.

    The tensors must outlive it.
    """
    args = QuantizeArgs() if rotary is None else RotaryQuantizeArgs()
    args.struct_bytes = ctypes.sizeof(args)
    args.given = not of.by_block and workspace is None
    args.input, args.out, args.descale = x.data_ptr(), values.data_ptr(), descale.data_ptr()
    args.workspace = workspace.data_ptr() if workspace is not None else None
    args.batch, args.seqlen, args.heads, _ = x.shape
    out_order = ("batch", "head", "row") if of.columns else ("batch", "row", "head")
    for tensor, name, order in (
        (x, "in", ("batch", "seq", "head")),
        (values, "out", out_order),
        (descale, "descale", ("batch", "head", "block")),
    ):
        for dimension, stride in zip(order, tensor.stride(), strict=False):
            setattr(args, f"{name}_stride_{dimension}", stride)
    for name, angles in zip(("cos", "sin"), rotary or (), strict=False):
        setattr(args, name, angles.data_ptr())
        for dimension, stride in zip(("batch", "seq"), angles.stride(), strict=False):
            setattr(args, f"{name}_stride_{dimension}", stride)
    if of.rotate:
        args.signs = (ctypes.c_uint32 * SIGN_WORDS)(*sign_words(seed))
    return args
