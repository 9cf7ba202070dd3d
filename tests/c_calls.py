"""Calls of kernels' C functions that nothing runs: arguments of any sizes, somewhere in memory."""

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any

from fagen.kind import Plan
from fagen.render import environment
from fagen.runtime.c_interface import struct_of
from fagen.signature import Tensor
from tests.stubs import STUB

SOMEWHERE = 4096  # an address that nothing reads


def dense(tensor: Tensor, sizes: Mapping[str, int]) -> dict[str, int]:
    """The strides of a tensor whose dimensions follow each other in memory."""
    strides, step = {}, 1
    for dim in reversed(tensor.dims):
        if dim.stride:
            strides[f"{tensor.name}_stride_{dim.stride}"] = step
        step *= max(1, dim.extent.at(sizes))
    return strides


def arguments(plan: Plan, sizes: Mapping[str, int]) -> Any:
    """A call of these sizes with all that it may take, and more workspace than there is."""
    words = struct_of(plan.signature)
    args = words(struct_bytes=ctypes.sizeof(words), version=plan.signature.version)
    if hasattr(args, "scale"):
        args.scale = 0.1
    for tensor in plan.signature.tensors:
        setattr(args, tensor.name, SOMEWHERE if tensor.present else 0)
        for name, stride in dense(tensor, sizes).items() if tensor.present else ():
            setattr(args, name, min(stride, 1 << 40))
    for name, size in sizes.items():
        setattr(args, name, size)
    args.workspace, args.workspace_bytes = SOMEWHERE, (1 << 63) - 1
    return args


def changed(plan: Plan, sizes: Mapping[str, int], changes: Mapping[str, Any]) -> Any:
    """A call of these sizes with some fields changed; strides are those of the sizes then."""
    then = {name: max(0, int(changes.get(name, size))) for name, size in sizes.items()}
    args = arguments(plan, then)
    for key, value in changes.items():
        setattr(args, key, value)
    return args


def launchers_of(plans: Iterable[Plan]) -> str:
    """C++ of several kernels' launchers, which check a call, and launch nothing."""
    texts = (environment().from_string(STUB).render(plan=plan) for plan in plans)
    shared = ("noted_call", "args_bytes")  # functions that there is one of
    lines = "\n".join(texts).splitlines()
    return "\n".join(line for line in lines if not any(name in line for name in shared))
