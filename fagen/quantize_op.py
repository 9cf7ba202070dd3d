"""quantize(x, …): fp16 or bf16 in, e4m3 with descales out, by the quantiser that this takes.

On CPU tensors `torch.ops.fagen.quantized` computes what its kernel would, and nothing is built.
"""

import ctypes
import math
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fagen import op
from fagen.arch import SM90
from fagen.build import Binary, build
from fagen.errors import DeviceError, FagenError, ScheduleError
from fagen.op.arguments import ALIGNMENT, shape_of
from fagen.op.c_interface import library_at
from fagen.quantizer import QuantizePlan, QuantizeSchedule, plan_quantizer, reference
from fagen.quantizer.plan import KEY_ORDER
from fagen.quantizer.reference import E4M3, Quantized
from fagen.quantizer.schedule import TABLE
from fagen.render import render
from fagen.vocab import DTYPES

MAX_BATCH = 65_535  # thread blocks in two of a grid's directions,
MAX_SEQLEN = 65_535 * 32  # in one of them of 32 rows or more
MAX_HEADS = 1 << 30

Key = tuple[torch.device, torch.dtype, int, bool, str, int, str]

NOT_READY = (
    "the quantiser is not ready: call fagen.quantize(…) once, with such arguments and on this "
    "device; "
)

# What has been readied in this process. A call finds its kernel here or takes the long way once.
_ready: dict[Key, op.Op] = {}
_readying = threading.Lock()


def quantize(
    x: Tensor,
    *,
    rotate: bool = False,
    scales: str = "block",
    scale_rows: int = 128,
    layout: str = "rows",
    descale: Tensor | float | None = None,
    seed: int = 0,
) -> Quantized:
    """Turn x (B, S, H, D) in fp16 or bf16 into e4m3 values and the descales that belong to them.

    A number of x is its value times its descale. D is a multiple of 16 up to 256; any strides that
    are multiples of 16 bytes will do, with the last dimension contiguous.

    With `rotate`, rows are multiplied by random signs, those of `seed`, and by a Hadamard matrix:
    outliers are spread over their row, and Q and K that are rotated by the same seed have the
    products that they had.

    values: (B, S, H, D); or with layout="columns" (B, H, D, S rounded up to 16), which is what
    kernels read V fastest in: each 16 keys in the order of P, and zeros past S.

    descale, fp32: (B, H, blocks of scale_rows rows) with scales="block", (B, H) with "head", one
    number with "tensor". Those of a head or a tensor may be given, as a tensor or a number, which
    saves reading x twice; values beyond 448 descales then become 448.

    Raises ValueError for a wrong argument, also where a gradient would be needed; DeviceError where
    the GPU is no Hopper; ToolchainError and BuildError where the kernel cannot be built.
    """
    if x.dim() != 4:
        raise ValueError(
            f"x has {x.dim()} dimensions; it must have 4: (batch, seqlen, heads, head_dim)"
        )
    key = (x.device, x.dtype, x.shape[3], rotate, scales, scale_rows, layout)
    kernel = _ready.get(key) or _make_ready(key)
    if descale is None:
        return Quantized(*kernel(x, seed, None))
    given = _given(descale, x, scales)
    return Quantized(kernel(x, seed, given)[0], given)


def _given(descale: Tensor | float, x: Tensor, scales: str) -> Tensor:
    """A descale that was given, as the op takes it; what cannot be one is left to the op."""
    if not isinstance(descale, Tensor):
        if not 0 < descale < math.inf:
            raise ValueError(f"descale is {descale:g}; it must be finite and above 0")
        descale = torch.full((), descale, dtype=torch.float32, device=x.device)
    if scales == "head" and descale.dim() == 0:
        return descale.expand(x.shape[0], x.shape[2])
    return descale


def prepare_quantizer(
    *,
    dtype: torch.dtype,
    head_dim: int,
    rotate: bool = False,
    scales: str = "block",
    scale_rows: int = 128,
    layout: str = "rows",
    device: torch.device,
    progress: Callable[[str], None] | None = None,
) -> str:
    """Ready the kernel that quantize(…) would use for such tensors; return its slug.

    On a GPU it is built, loaded and run once, after which calls can be captured; on a CPU there is
    nothing to build. `progress` is called with a line before what takes long. Raises as quantize
    does.
    """
    key = (device, dtype, head_dim, rotate, scales, scale_rows, layout)
    kernel = _make_ready(key, progress)
    if device.type == "cuda":
        with torch.no_grad():
            kernel(torch.zeros(1, 1, 1, head_dim, dtype=dtype, device=device), 0, None)
    return _schedule(key).slug


def _make_ready(key: Key, progress: Callable[[str], None] | None = None) -> op.Op:
    """The long way to a kernel: choose, build, load.  Raises as quantize does."""
    if torch.compiler.is_compiling():
        raise FagenError(NOT_READY + "it cannot be built while torch.compile traces the call")
    device = key[0]
    with _readying:
        if key in _ready:
            return _ready[key]
        if device.type not in ("cpu", "cuda"):
            raise DeviceError(
                f"x is on {device}; a kernel runs on a Hopper GPU, or on a CPU emulated"
            )
        schedule = _schedule(key)
        if device.type == "cpu":
            kernel = _emulation(schedule.slug)
        else:
            _refuse_other_than_hopper(device)
            kernel = _built(schedule, progress)
        _ready[key] = kernel
        return kernel


def _built(schedule: QuantizeSchedule, progress: Callable[[str], None] | None) -> op.Op:
    if torch.cuda.is_current_stream_capturing():
        raise FagenError(
            NOT_READY + f"{schedule.slug} cannot be built while a CUDA graph is captured"
        )
    planned = plan_quantizer(schedule)
    return load(build(render(planned), planned, binding=True, progress=progress))


def _refuse_other_than_hopper(device: torch.device) -> None:
    found = torch.cuda.get_device_capability(device)
    if found != SM90.capability:
        raise DeviceError(
            f"{device} is a {torch.cuda.get_device_name(device)} of compute capability "
            f"{found[0]}.{found[1]}, and kernels are machine code for Hopper (9.0); tensors on the "
            "CPU are quantised by torch"
        )


def _schedule(key: Key) -> QuantizeSchedule:
    """The schedule that a call's arguments amount to; ValueError where there is none."""
    _, dtype, head_dim, rotate, scales, scale_rows, layout = key
    names = {getattr(torch, row.torch): row.name for row in DTYPES.values()}
    keys: dict[str, Any] = {"scale_rows": scale_rows} if scales == "block" else {}
    try:
        return QuantizeSchedule.make(
            dtype=names.get(dtype, str(dtype).removeprefix("torch.")),
            head_dim=head_dim,
            rotate=rotate,
            scales=scales,
            layout=layout,
            **keys,
        )
    except ScheduleError as error:
        said = [line.rpartition(f"{TABLE}.")[2] for line in str(error).splitlines()]
        raise ValueError(f"fagen.quantize: {'; '.join(said)}") from None


@cache
def plan_of(slug: str) -> QuantizePlan:
    """Return the Plan that a quantiser's slug stands for."""
    return plan_quantizer(QuantizeSchedule.from_slug(slug))


# ---- the ops ------------------------------------------------------------------------------------


def load(binary: Binary) -> op.Op:
    """Register `binary` as torch.ops.fagen.<slug>(x, seed=0, descale=None) and return the op.

    x (B, S, H, D) on one device, the last dimension contiguous, base pointer and other strides
    multiples of 16 bytes. Returns (values, descale), shaped as quantize(…) says; where a descale is
    given, an empty tensor in its place, since no output may be an input. On CPU tensors it is
    computed by torch. The op raises ValueError that names a wrong argument, also where a gradient
    would be needed.  Raises as fagen.op.load does.
    """

    def outputs(x: Tensor, seed: int = 0, descale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return _outputs(plan_of(binary.slug), x, descale)

    return op.load(binary, outputs)


# ---- the emulated op ----------------------------------------------------------------------------


def _emulated(x: Tensor, seed: int, descale: Tensor | None, slug: str) -> tuple[Tensor, Tensor]:
    of = plan_of(slug)
    refuse_arguments(of, x, descale)
    with torch.no_grad():
        spread = descale
        if descale is not None:
            spread = descale.reshape((1, 1, 1) if descale.dim() == 0 else (*descale.shape, 1))
        values, found = reference.quantize(of, x, seed, spread)
    if descale is not None:
        return values, x.new_empty(0, dtype=torch.float32)
    if of.by_block:
        return values, found
    if not of.by_tensor:
        return values, found[..., 0].contiguous()
    least = found.new_full((1,), of.least / of.largest)  # of a tensor without a number
    return values, torch.cat((found.flatten(), least)).amax()


def _outputs(of: QuantizePlan, x: Tensor, descale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return outputs without numbers, or refuse: what torch asks while it traces."""
    refuse_arguments(of, x, descale, have_data=False)
    values, found = outputs_for(of, x)
    return values, found if descale is None else x.new_empty(0, dtype=torch.float32)


def outputs_for(of: QuantizePlan, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values and descales, without numbers, that a kernel makes of x."""
    batch, seqlen, heads, head_dim = x.shape
    step = len(KEY_ORDER)
    padded = (seqlen + step - 1) // step * step
    shape = (batch, heads, head_dim, padded) if of.columns else (batch, seqlen, heads, head_dim)
    scales: tuple[Any, ...] = () if of.by_tensor else (batch, heads)
    scales += ((seqlen + of.scale_rows - 1) // of.scale_rows,) if of.by_block else ()
    return x.new_empty(shape, dtype=E4M3), x.new_empty(scales, dtype=torch.float32)


def _fake_emulated(
    x: Tensor, seed: int, descale: Tensor | None, slug: str
) -> tuple[Tensor, Tensor]:
    return _outputs(plan_of(slug), x, descale)


@cache
def _emulation(slug: str) -> op.Op:
    def emulated(x: Tensor, seed: int, descale: Tensor | None) -> tuple[Tensor, Tensor]:
        needed = x.requires_grad or (descale is not None and descale.requires_grad)
        if needed and torch.is_grad_enabled():
            raise ValueError(
                f"fagen::{slug}: x or descale requires a gradient, which rounding to e4m3 has not; "
                "call it under torch.no_grad()"
            )
        return torch.ops.fagen.quantized(x, seed, descale, slug)  # type: ignore[no-any-return]

    return emulated


_ops = torch.library.Library("fagen", "FRAGMENT")
_ops.define(
    "quantized(Tensor x, int seed, Tensor? descale, str slug) -> (Tensor values, Tensor descale)"
)
_ops.impl("quantized", _emulated, "CPU")
torch.library.register_fake("fagen::quantized", _fake_emulated, lib=_ops)


# ---- arguments ----------------------------------------------------------------------------------


def refuse_arguments(
    of: QuantizePlan, x: Tensor, descale: Tensor | None, *, have_data: bool = True
) -> None:
    """Raise ValueError where the kernel cannot take these tensors, in the words of its binding.

    Without data, as in tracing, addresses are not looked at and sizes may be symbols.
    """

    def hold(condition: Any, said: Callable[[], str]) -> None:
        # torch._check_value: a symbolic condition becomes a guard or an assertion of the graph
        torch._check_value(condition, lambda: f"fagen::{of.slug}: {said()}")

    dtype, step = of.dtype.torch, ALIGNMENT // of.dtype.bytes
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
    strides = x.stride()
    hold(
        strides[3] == 1,
        lambda: (
            f"x has stride {strides[3]} in its last dimension, which must be 1; x.contiguous() "
            "makes it so"
        ),
    )
    for i in range(3):
        hold(
            (x.shape[i] <= 1) | (strides[i] % step == 0),
            lambda i=i: (  # type: ignore[misc]
                f"x has stride {strides[i]} in dimension {i}, which must be a multiple of {step} "
                f"elements ({ALIGNMENT} bytes); x.contiguous() makes it so"
            ),
        )
    if have_data:
        hold(
            x.numel() == 0 or x.data_ptr() % ALIGNMENT == 0,
            lambda: f"x does not begin at a multiple of {ALIGNMENT} bytes; x.clone() does",
        )
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


# ---- the C interface ----------------------------------------------------------------------------


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
        ("signs", ctypes.c_uint32 * reference.SIGN_WORDS),
        *((name, ctypes.c_int32) for name in ("batch", "heads", "seqlen", "reserved")),
    )


def bind_quantizer(
    binary: Binary,
    x: Tensor,
    values: Tensor,
    descale: Tensor,
    *,
    seed: int = 0,
    given: Tensor | None = None,
) -> Callable[[], None]:
    """Return a function that enqueues the kernel on these very tensors, registering nothing.

    `values` and `descale` are as outputs_for(…) makes them. The tensors must outlive it. Raises
    ValueError for a wrong argument, DeviceError where x is on no GPU; so does the function where
    the GPU refuses.
    """
    of = plan_of(binary.slug)
    refuse_arguments(of, x, given)
    if x.device.type != "cuda":
        raise DeviceError(f"{of.slug}: x is on {x.device}; the kernel runs on a Hopper GPU")
    workspace = None
    if not of.by_block and given is None:
        numbers = x.shape[0] * x.shape[2] * -(-x.shape[1] // of.rows)
        workspace = x.new_empty(numbers, dtype=torch.float32)
    used = descale if given is None else given
    args = quantizer_args(of, x, values, used, workspace, seed)
    library = library_at(binary.library)
    launch, device = library[f"fagen_{of.slug}"], x.device

    def enqueue(_held: Any = (workspace, used)) -> None:
        with torch.cuda.device(device):
            stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
            status = launch(ctypes.byref(args), stream)
        if status:
            message = library[f"fagen_{of.slug}_message"]
            message.restype = ctypes.c_char_p
            raise DeviceError(f"{of.slug}: {message(status).decode()}")

    return enqueue


def quantizer_args(
    of: QuantizePlan,
    x: Tensor,
    values: Tensor,
    descale: Tensor,
    workspace: Tensor | None,
    seed: int,
) -> QuantizeArgs:
    """Describe one call to the C interface; without a workspace descales are given, or of blocks.

    The tensors must outlive it.
    """
    args = QuantizeArgs(struct_bytes=ctypes.sizeof(QuantizeArgs))
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
    if of.rotate:
        args.signs = (ctypes.c_uint32 * reference.SIGN_WORDS)(*reference.sign_words(seed))
    return args
