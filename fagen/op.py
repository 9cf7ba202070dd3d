"""A Binary goes in, torch.ops.fagen.<slug> comes out; or one call of its C function, unregistered.

`torch.ops.fagen.emulated` runs any schedule on CPU tensors, without a Binary.
"""

import ctypes
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fagen import emulator
from fagen.build import Binary
from fagen.errors import BuildError, DeviceError, FagenError
from fagen.plan import Plan, plan
from fagen.schedule import Schedule

MAX_SIZE = 1 << 30  # of any dimension
ALIGNMENT = 16  # bytes, of base pointers and strides: what TMA asks for

Op = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


# ---- the torch op -------------------------------------------------------------------------------

_loading = threading.Lock()
_loaded: dict[str, tuple[str, Op]] = {}  # slug → hash of its source, op


def load(binary: Binary) -> Op:
    """Register `binary` as torch.ops.fagen.<slug>(q, k, v, scale) -> (out, lse) and return the op.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), all on one device, the last dimension
    contiguous, base pointers and other strides multiples of 16 bytes; scale finite and positive, H
    a multiple of Hk. out (B, Sq, H, Dv) in their dtype; lse (B, H, Sq) in fp32, natural logarithm,
    minus infinity beside a zero output for a row that sees no key. On CPU tensors the schedule is
    emulated. The op raises ValueError that names a wrong argument, also where a gradient would be
    needed. From any thread, as often as you like: the second time costs nothing.

    Raises FagenError where this process has another source under the slug, BuildError where there
    is no binding or it does not load.
    """
    with _loading:
        if known := _loaded.get(binary.slug):
            if known[0] != binary.source_hash:
                raise FagenError(
                    f"{binary.slug}: this process has loaded source {known[0][:12]} under that "
                    f"name, so {binary.source_hash[:12]} cannot be another op: use a new process, "
                    "or op.call_kernel, which registers nothing"
                )
            return known[1]
        op = _register(binary)
        _loaded[binary.slug] = binary.source_hash, op
        return op


def _register(binary: Binary) -> Op:
    if binary.binding is None:
        raise BuildError(
            f"{binary.slug} was built without its torch binding: build it again where torch is "
            "installed"
        )
    try:
        torch.ops.load_library(binary.binding)
    except OSError as error:
        raise BuildError(f"{binary.binding} does not load: {error}") from error
    linked = _info(binary.binding, binary.slug).source_hash
    if linked != binary.source_hash:  # the loader took a library of the same name for it
        raise BuildError(
            f"{binary.binding} was linked to source {linked[:12]}, not {binary.source_hash[:12]}: "
            "use a new process"
        )
    tell = _library_at(binary.binding)[f"fagen_{binary.slug}_refused"]

    def fake(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        try:
            return _outputs(plan_of(binary.slug), q, k, v, scale)
        except ValueError as refusal:
            tell(str(refusal).encode())  # the op calls this through C, which loses exceptions
            raise

    for name in (binary.slug, f"{binary.slug}_no_grad"):
        torch.library.register_fake(f"fagen::{name}", fake, lib=_ops)
    return getattr(torch.ops.fagen, binary.slug).default  # type: ignore[no-any-return]


def _outputs(of: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return outputs without numbers, or refuse: what torch asks while it traces."""
    refuse_arguments(of, q, k, v, scale, have_data=False)
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_empty(batch, seqlen_q, heads, of.head_dim_v)
    return out, q.new_empty(batch, heads, seqlen_q, dtype=torch.float32)


@cache
def plan_of(slug: str) -> Plan:
    """Return the Plan that a slug stands for."""
    return plan(Schedule.from_slug(slug))


# ---- the emulated op ----------------------------------------------------------------------------


def _emulated(q: Tensor, k: Tensor, v: Tensor, scale: float, slug: str) -> tuple[Tensor, Tensor]:
    refuse_arguments(plan_of(slug), q, k, v, scale)
    with torch.no_grad():
        return emulator.emulate(plan_of(slug), q, k, v, scale)


def _fake_emulated(
    q: Tensor, k: Tensor, v: Tensor, scale: float, slug: str
) -> tuple[Tensor, Tensor]:
    return _outputs(plan_of(slug), q, k, v, scale)


_ops = torch.library.Library("fagen", "FRAGMENT")
_ops.define(
    "emulated(Tensor q, Tensor k, Tensor v, float scale, str slug) -> (Tensor out, Tensor lse)"
)
_ops.impl("emulated", _emulated, "CPU")
torch.library.register_fake("fagen::emulated", _fake_emulated, lib=_ops)


# ---- arguments ----------------------------------------------------------------------------------


def refuse_arguments(
    of: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float, *, have_data: bool = True
) -> None:
    """Raise ValueError where the kernel cannot take these tensors, in the words of its binding.

    Without data, as in tracing, addresses are not looked at and sizes may be symbols.
    """

    def hold(condition: Any, said: Callable[[], str]) -> None:
        # torch._check_value: a symbolic condition becomes a guard or an assertion of the graph
        torch._check_value(condition, lambda: f"fagen::{of.slug}: {said()}")

    def alone(name: str, tensor: Tensor, dimensions: str, columns: int) -> None:
        dtype = of.dtype.torch
        step = ALIGNMENT // of.dtype.bytes
        hold(
            tensor.dim() == 4 and tensor.shape[3] == columns,
            lambda: (
                f"{name} has shape {_shape(tensor)}; this kernel takes ({dimensions}, {columns})"
            ),
        )
        hold(
            tensor.dtype == getattr(torch, dtype),
            lambda: (
                f"{name} is not {dtype}, which this kernel takes; {name}.to(torch.{dtype}) "
                "converts it"
            ),
        )
        for size in tensor.shape:
            hold(
                # a bound on a symbol would be one more demand on whoever exports
                not isinstance(size, int) or size <= MAX_SIZE,
                lambda: f"{name} has shape {_shape(tensor)}; no size may exceed {MAX_SIZE}",
            )
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
                (tensor.shape[i] <= 1) | (strides[i] % step == 0),
                lambda i=i: (  # type: ignore[misc]
                    f"{name} has stride {strides[i]} in dimension {i}, which must be a multiple of "
                    f"{step} elements ({ALIGNMENT} bytes); {name}.contiguous() makes it so"
                ),
            )
        if have_data:
            hold(
                tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT == 0,
                lambda: (
                    f"{name} does not begin at a multiple of {ALIGNMENT} bytes; {name}.clone() does"
                ),
            )

    alone("q", q, "batch, seqlen_q, heads", of.head_dim)
    alone("k", k, "batch, seqlen_k, kv_heads", of.head_dim)
    alone("v", v, "batch, seqlen_k, kv_heads", of.head_dim_v)
    for name, tensor in (("k", k), ("v", v)):
        hold(
            tensor.device == q.device,
            lambda name=name: (  # type: ignore[misc]
                f"{name} is not on the device of q; {name}.to(q.device) moves it there"
            ),
        )
    hold(k.shape[0] == q.shape[0], lambda: f"k has batch {k.shape[0]}, but q has {q.shape[0]}")
    for i in range(3):
        hold(
            v.shape[i] == k.shape[i],
            lambda: (
                f"v has shape {_shape(v)}, but k has {_shape(k)}; "
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


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(map(str, tensor.shape))})"


# ---- the C interface ----------------------------------------------------------------------------


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
    return _info(binary.library, binary.slug)


def call_kernel(
    binary: Binary, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float
) -> None:
    """Enqueue the kernel on the current stream of q's device, registering nothing.

    Arguments as of the op; `out` (B, Sq, H, Dv) may have any strides that q may have, `lse`
    (B, H, Sq) in fp32 is contiguous in its last dimension, or None.  Raises ValueError for a wrong
    argument, DeviceError where there is no Hopper GPU or it refuses.
    """
    bind_kernel(binary.slug, binary.library, q, k, v, out, lse, scale)()


def bind_kernel(
    slug: str,
    path: Path,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
) -> Callable[[], None]:
    """Return a function that enqueues the kernel in the library at `path` on these very tensors.

    The tensors must outlive it.  Arguments and errors as of call_kernel, those of the arguments
    now, those of the GPU at each call.
    """
    refuse_arguments(plan_of(slug), q, k, v, scale)
    _refuse_outputs(plan_of(slug), q, out, lse)
    if q.device.type != "cuda":
        raise DeviceError(f"{slug}: q is on {q.device}; the kernel runs on a Hopper GPU")
    args = kernel_args(q, k, v, out, lse, scale)
    library = _library_at(path)
    launch, device = library[f"fagen_{slug}"], q.device

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
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float
) -> KernelArgs:
    """Describe one call to the C interface; the tensors must outlive it."""
    args = KernelArgs(struct_bytes=ctypes.sizeof(KernelArgs), scale=scale)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        setattr(args, name, tensor.data_ptr())
        for dimension, stride in zip(("batch", "seq", "head"), tensor.stride(), strict=False):
            setattr(args, f"{name}_stride_{dimension}", stride)
    if lse is not None:
        args.lse = lse.data_ptr()
        args.lse_stride_batch, args.lse_stride_head, _ = lse.stride()
    args.batch, args.seqlen_q, args.heads, _ = q.shape
    _, args.seqlen_k, args.kv_heads, _ = k.shape
    return args


def _refuse_outputs(of: Plan, q: Tensor, out: Tensor, lse: Tensor | None) -> None:
    batch, seqlen_q, heads, _ = q.shape
    asked: list[tuple[str, Tensor, tuple[int, ...], torch.dtype]] = [
        ("out", out, (batch, seqlen_q, heads, of.head_dim_v), q.dtype)
    ]
    if lse is not None:
        asked.append(("lse", lse, (batch, heads, seqlen_q), torch.float32))
    for name, tensor, shape, dtype in asked:
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != q.device:
            raise ValueError(
                f"fagen::{of.slug}: {name} is {tensor.dtype} {_shape(tensor)} on {tensor.device}; "
                f"it must be {dtype} {shape} on {q.device}"
            )
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"fagen::{of.slug}: {name} is not contiguous in its last dimension")


@cache
def _library_at(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} does not load: {error}") from error


def _info(path: Path, slug: str) -> KernelInfo:
    ask = _library_at(path)[f"fagen_{slug}_info"]
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
