"""Tensors in, one call of a kernel's C function out; and what a kernel says of itself."""

import ctypes
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fagen.errors import BuildError, DeviceError
from fagen.kind import Plan
from fagen.runtime.checks import Sizes, check_outputs, checked, refuse_unknown
from fagen.signature import Signature, random_words

_SCALARS: Mapping[str, Any] = {"float": ctypes.c_float, "int": ctypes.c_int64}


class _Info(ctypes.Structure):
    """FagenKernelInfo of the C interface."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("launch_registers", ctypes.c_uint32),
        ("slug", ctypes.c_char_p),
        ("source_hash", ctypes.c_char_p),
    )


class KernelInfo(NamedTuple):
    """What a compiled kernel says of itself: bytes and threads per block, registers per thread."""

    shared_bytes: int
    threads: int
    launch_registers: int
    slug: str
    source_hash: str


def bind(
    plan: Plan, library: Path, *, workspace: Tensor | None = None, **call: Any
) -> Callable[[], None]:
    """Return a function that enqueues the kernel in `library` on these very tensors.

    All inputs by the names of the Plan's signature, outputs by theirs as results; these may have
    any strides that inputs may have, and an omittable one may be left out. The function enqueues on
    the current stream of the leading input's device, and keeps the tensors and the workspace: its
    own, or one of `workspace_for` that calls on the same stream may share.
    Raises ValueError for a wrong argument, DeviceError where the tensors are on no GPU; so does the
    function where the GPU refuses.
    """
    sizes = _checked(plan, call)
    device = call[plan.signature.leader.name].device
    if device.type != "cuda":
        raise DeviceError(
            f"{plan.slug}: {plan.signature.leader.name} is on {device}; the kernel runs on a "
            "Hopper GPU"
        )
    launch = described(plan, library, call, sizes, workspace)

    def enqueue() -> None:
        # a context costs microseconds, which a short kernel does not hide
        current = torch.cuda.current_device() == device.index
        with nullcontext() if current else torch.cuda.device(device):
            launch(torch.cuda.current_stream(device).cuda_stream)

    return enqueue


def described(
    plan: Plan,
    library: Path,
    call: Mapping[str, Any],
    sizes: Sizes | None = None,
    workspace: Tensor | None = None,
) -> Callable[[int | None], None]:
    """Return a function that calls the kernel on these very tensors, on a stream; see `bind`.

    Where the tensors are is not looked at; `sizes` are those of arguments that were checked.
    """
    sizes = _checked(plan, call) if sizes is None else sizes
    args = arguments(plan, call, sizes)
    loaded = library_at(library)
    if workspace is None:
        workspace = _workspace(plan, library, args, call)
    args.workspace, args.workspace_bytes = workspace.data_ptr(), len(workspace)
    function = loaded[f"fagen_{plan.slug}"]

    passed = ctypes.byref(args)

    def launch(stream: int | None, _held: Any = (call, workspace)) -> None:
        if status := function(passed, ctypes.c_void_p(stream)):
            message = loaded[f"fagen_{plan.slug}_message"]
            message.restype = ctypes.c_char_p
            words = f"{plan.slug}: {message(status).decode()}"
            raise ValueError(words) if status < plan.signature.refusals else DeviceError(words)

    return launch


def workspace_for(plan: Plan, library: Path, **call: Any) -> Tensor:
    """Return a workspace for calls with such arguments as `bind` takes; (bytes) of uint8."""
    return _workspace(plan, library, arguments(plan, call, _checked(plan, call)), call)


def _workspace(
    plan: Plan, library: Path, args: ctypes.Structure, call: Mapping[str, Any]
) -> Tensor:
    # where it may hold anything, NaN: a kernel that reads what nobody wrote is found out
    anything = 0 if plan.launches.zeroed else 0xFF
    needed = max(0, workspace_bytes(plan.slug, library, args))  # none where the call is refused
    device = call[plan.signature.leader.name].device
    return torch.full((needed,), anything, dtype=torch.uint8, device=device)


def _checked(plan: Plan, call: Mapping[str, Any]) -> Sizes:
    refuse_unknown(plan, call)
    sizes = checked(plan, call)
    check_outputs(plan, call, sizes)
    return sizes


def call(plan: Plan, library: Path, **call_arguments: Any) -> None:
    """Enqueue the kernel once; see `bind`."""
    bind(plan, library, **call_arguments)()


def workspace_bytes(slug: str, library: Path, args: ctypes.Structure) -> int:
    """Return how large a workspace this call needs, as its library says; -1: it is refused."""
    ask = library_at(library)[f"fagen_{slug}_workspace"]
    ask.restype = ctypes.c_int64
    return int(ask(ctypes.byref(args)))


def arguments(plan: Plan, call: Mapping[str, Any], sizes: Sizes) -> ctypes.Structure:
    """Describe one call to the C interface, but for its workspace; the tensors must outlive it."""
    signature = plan.signature
    args = struct_of(signature)()
    args.struct_bytes, args.version = ctypes.sizeof(args), signature.version
    for expected in signature.tensors:
        tensor = call.get(expected.name) if expected.present else None
        if expected.made:
            setattr(args, f"{expected.name}_given", int(tensor is not None))
            tensor = call.get(expected.result) if tensor is None else tensor
        if tensor is None:
            continue
        setattr(args, expected.name, tensor.data_ptr())
        for i, dim in enumerate(expected.dims):
            if dim.stride:
                # a size of 1 that serves for all is never stepped along
                steps = tensor.shape[i] > 1 or not dim.broadcast
                stride = tensor.stride(i) if steps else 0
                setattr(args, f"{expected.name}_stride_{dim.stride}", stride)
    for name, size in sizes.items():
        setattr(args, name, size)
    for scalar in signature.numbers:
        value = call.get(scalar.name, scalar.default)
        if scalar.words:
            value = (ctypes.c_uint32 * scalar.words)(*random_words(value, scalar.words))
        setattr(args, scalar.in_struct, value)
    return args


@cache
def struct_of(signature: Signature) -> type[ctypes.Structure]:
    """Return the ctypes twin of the signature's C struct, field by field as templates/abi.h.j2."""
    fields: list[tuple[str, Any]] = [
        ("struct_bytes", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
    ]
    fields += [(tensor.name, ctypes.c_void_p) for tensor in signature.tensors]
    fields += [
        (f"{tensor.name}_stride_{word}", ctypes.c_int64)
        for tensor in signature.tensors
        for word in tensor.strides
    ]
    fields += [(size.name, ctypes.c_int32) for size in signature.sizes]
    fields += [
        (f"{tensor.name}_given", ctypes.c_uint32) for tensor in signature.tensors if tensor.made
    ]
    fields += [
        (
            scalar.in_struct,
            ctypes.c_uint32 * scalar.words if scalar.words else _SCALARS[scalar.type],
        )
        for scalar in signature.scalars
    ]
    return type(signature.struct, (ctypes.Structure,), {"_fields_": fields})


@cache
def library_at(path: Path) -> ctypes.CDLL:
    """Load a library, once for all.  Raises BuildError where it does not load."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} does not load: {error}") from error


def info_of(path: Path, slug: str) -> KernelInfo:
    """Ask the kernel of a library, or of one linked to it, what it is; needs no GPU.

    Raises BuildError where it does not load.
    """
    ask = library_at(path)[f"fagen_{slug}_info"]
    ask.restype = ctypes.POINTER(_Info)
    info = ask().contents
    fields: dict[str, Any] = {name: getattr(info, name) for name in KernelInfo._fields}
    fields |= {"slug": info.slug.decode(), "source_hash": info.source_hash.decode()}
    return KernelInfo(**fields)
