"""Tensors in, one call of a kernel's C function out; and what a kernel says of itself."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fagen.build import Binary
from fagen.errors import BuildError, DeviceError
from fagen.kinds.forward.plan import Plan
from fagen.runtime.checks import plan_of, refuse_arguments, shape_of


class KernelArgs(ctypes.Structure):
    """FagenForwardArgs of the C interface."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse")),
        *(
            (f"{name}_stride_{dimension}", ctypes.c_int64)
            for name in ("q", "k", "v", "out")
            for dimension in ("batch", "seq", "head")
        ),
        ("lse_stride_batch", ctypes.c_int64),
        ("lse_stride_head", ctypes.c_int64),
        *(
            (name, ctypes.c_int32)
            for name in ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k")
        ),
        ("scale", ctypes.c_float),
    )


class Fp8KernelArgs(KernelArgs):
    """FagenForwardArgs of an e4m3 kernel."""

    _fields_ = (
        *((f"{name}_descale", ctypes.c_void_p) for name in ("q", "k", "v")),
        *(
            (f"{name}_descale_stride_{dimension}", ctypes.c_int64)
            for name in ("q", "k", "v")
            for dimension in ("batch", "head", "block")
        ),
    )


class _Info(ctypes.Structure):
    """FagenKernelInfo of the C interface."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("launch_registers", ctypes.c_uint32),
        ("producer_registers", ctypes.c_uint32),
        ("consumer_registers", ctypes.c_uint32),
        ("slug", ctypes.c_char_p),
        ("source_hash", ctypes.c_char_p),
    )


@dataclass(frozen=True)
class KernelInfo:
    """What a compiled kernel says of itself: bytes and threads per block, registers per thread."""

    shared_bytes: int
    threads: int
    launch_registers: int
    producer_registers: int
    consumer_registers: int
    slug: str
    source_hash: str


def kernel_info(binary: Binary) -> KernelInfo:
    """Ask a built kernel what it is; needs no GPU.  Raises BuildError where it does not load."""
    return info_of(binary.library, binary.slug)


def call_kernel(
    binary: Binary,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> None:
    """Enqueue the kernel on the current stream of q's device, registering nothing.

    Arguments as of the op; `out` (B, Sq, H, Dv) may have any strides that q may have, `lse`
    (B, H, Sq) in fp32 is contiguous in its last dimension, or None.  Raises ValueError for a wrong
    argument, DeviceError where there is no Hopper GPU or it refuses.
    """
    descales = q_descale, k_descale, v_descale
    bind_kernel(binary.slug, binary.library, q, k, v, out, lse, scale, *descales)()


def bind_kernel(
    slug: str,
    path: Path,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Callable[[], None]:
    """Return a function that enqueues the kernel in the library at `path` on these very tensors.

    The tensors must outlive it.  Arguments and errors as of call_kernel, those of the arguments
    now, those of the GPU at each call.
    """
    of, descales = plan_of(slug), (q_descale, k_descale, v_descale)
    refuse_arguments(of, q, k, v, scale, *descales)
    _refuse_outputs(of, q, out, lse)
    if q.device.type != "cuda":
        raise DeviceError(f"{slug}: q is on {q.device}; the kernel runs on a Hopper GPU")
    return enqueuer(slug, path, kernel_args(of, q, k, v, out, lse, scale, *descales), q.device)


def enqueuer(
    slug: str, path: Path, args: ctypes.Structure, device: torch.device
) -> Callable[[], None]:
    """Return a function that calls the C function in the library at `path` with these arguments.

    It enqueues on the current stream of `device`; DeviceError, in the kernel's words, where that
    fails.
    """
    library = library_at(path)
    launch = library[f"fagen_{slug}"]

    def enqueue() -> None:
        with torch.cuda.device(device):
            stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
            status = launch(ctypes.byref(args), stream)
        if status:
            message = library[f"fagen_{slug}_message"]
            message.restype = ctypes.c_char_p
            raise DeviceError(f"{slug}: {message(status).decode()}")

    return enqueue


def kernel_args(
    of: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    *descales: Tensor | None,
) -> KernelArgs:
    """Describe one call to the C interface; the tensors must outlive it."""
    args = Fp8KernelArgs() if of.fp8 else KernelArgs()
    args.struct_bytes = ctypes.sizeof(args)
    args.scale = scale
    rows = ("batch", "seq", "head")
    columns = ("batch", "head", "seq")  # from a row of the transposed V to the next
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        setattr(args, name, tensor.data_ptr())
        order = columns if name == "v" and of.fp8 and not of.v_rows else rows
        for dimension, stride in zip(order, tensor.stride(), strict=False):
            setattr(args, f"{name}_stride_{dimension}", stride)
    if lse is not None:
        args.lse = lse.data_ptr()
        args.lse_stride_batch, args.lse_stride_head, _ = lse.stride()
    args.batch, args.seqlen_q, args.heads, _ = q.shape
    _, args.seqlen_k, args.kv_heads, _ = k.shape
    for name, descale in zip(("q", "k", "v"), descales, strict=False):
        if descale is None:
            continue
        setattr(args, f"{name}_descale", descale.data_ptr())
        for i, dimension in enumerate(("batch", "head", "block")):
            # a size of 1 serves for all: it is never stepped along
            stride = descale.stride(i) if descale.shape[i] > 1 else 0
            setattr(args, f"{name}_descale_stride_{dimension}", stride)
    return args


def _refuse_outputs(of: Plan, q: Tensor, out: Tensor, lse: Tensor | None) -> None:
    batch, seqlen_q, heads, _ = q.shape
    out_dtype = getattr(torch, of.out_dtype.torch)
    asked: list[tuple[str, Tensor, tuple[int, ...], torch.dtype]] = [
        ("out", out, (batch, seqlen_q, heads, of.head_dim_v), out_dtype)
    ]
    if lse is not None:
        asked.append(("lse", lse, (batch, heads, seqlen_q), torch.float32))
    for name, tensor, shape, dtype in asked:
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != q.device:
            raise ValueError(
                f"fagen::{of.slug}: {name} is {tensor.dtype} {shape_of(tensor)} on "
                f"{tensor.device}; it must be {dtype} {shape} on {q.device}"
            )
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"fagen::{of.slug}: {name} is not contiguous in its last dimension")


@cache
def library_at(path: Path) -> ctypes.CDLL:
    """Load a library, once for all.  Raises BuildError where it does not load."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} does not load: {error}") from error


def info_of(path: Path, slug: str) -> KernelInfo:
    """Ask the kernel of a library, or of one linked to it, what it is."""
    ask = library_at(path)[f"fagen_{slug}_info"]
    ask.restype = ctypes.POINTER(_Info)
    said = ask().contents
    return KernelInfo(
        shared_bytes=said.shared_bytes,
        threads=said.threads,
        launch_registers=said.launch_registers,
        producer_registers=said.producer_registers,
        consumer_registers=said.consumer_registers,
        slug=said.slug.decode(),
        source_hash=said.source_hash.decode(),
    )
