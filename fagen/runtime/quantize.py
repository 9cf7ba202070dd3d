"""quantize(x, …): fp16 or bf16 in, e4m3 with descales out, by the quantiser that this takes.

On CPU tensors `torch.ops.fagen.quantized` computes what its kernel would, and nothing is built.
"""

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fagen.build import Binary, build
from fagen.e4m3 import Quantized
from fagen.errors import DeviceError, FagenError, ScheduleError
from fagen.kinds.quantize.keys import Schedule
from fagen.kinds.quantize.plan import plan
from fagen.render import render
from fagen.runtime import op
from fagen.runtime.arguments import refuse_other_than_hopper
from fagen.runtime.quantize_c import (
    QuantizeArgs,
    RotaryQuantizeArgs,
    bind_quantizer,
    quantizer_args,
)
from fagen.runtime.quantize_checks import (
    Rotary,
    outputs_for,
    plan_of,
    refuse_arguments,
    traced_outputs,
)
from fagen.runtime.quantize_emulated import emulation
from fagen.vocab import DTYPES, USUAL_SCALE_ROWS

__all__ = [
    "Quantized",
    "QuantizeArgs",
    "RotaryQuantizeArgs",
    "bind_quantizer",
    "load",
    "outputs_for",
    "plan_of",
    "prepare_quantizer",
    "quantize",
    "quantizer_args",
    "refuse_arguments",
]

Key = tuple[torch.device, torch.dtype, int, bool, str, int, str, str]

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
    scale_rows: int = USUAL_SCALE_ROWS,
    layout: str = "rows",
    descale: Tensor | float | None = None,
    seed: int = 0,
    rotary: Rotary | None = None,
    rotary_pairs: bool = False,
) -> Quantized:
    """Turn x (B, S, H, D) in fp16 or bf16 into e4m3 values and the descales that belong to them.

    A number of x is its value times its descale. D is a multiple of 16 up to 256; any strides that
    are multiples of 16 bytes will do, with the last dimension contiguous.

    With `rotate`, rows are multiplied by random signs, those of `seed`, and by a Hadamard matrix:
    outliers are spread over their row, and Q and K that are rotated by the same seed have the
    products that they had.

    `rotary`, cosines and sines, (S, D / 2) or (B, S, D / 2) in x's dtype, applies a rotary
    embedding first, of columns half a row apart, or with `rotary_pairs` of neighbouring ones, and
    rounds what it gives to x's dtype. Columns half a row apart need a D that is a multiple of 64.

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
    embedding = "none" if rotary is None else "pairs" if rotary_pairs else "halves"
    key = (x.device, x.dtype, x.shape[3], rotate, scales, scale_rows, layout, embedding)
    kernel = _ready.get(key) or _make_ready(key)
    more = {} if rotary is None else _rotary(rotary, x)
    if descale is None:
        return Quantized(*kernel(x, seed, None, **more))
    given = _given(descale, x, scales)
    return Quantized(kernel(x, seed, given, **more)[0], given)


def _rotary(rotary: Rotary, x: Tensor) -> dict[str, Tensor]:
    """Cosines and sines as the op takes them: one of every batch."""
    return {
        name: tensor.expand(x.shape[0], -1, -1) if tensor.dim() == 2 else tensor
        for name, tensor in zip(("cos", "sin"), rotary, strict=True)
    }


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
    scale_rows: int = USUAL_SCALE_ROWS,
    layout: str = "rows",
    rotary: str = "none",
    device: torch.device,
    progress: Callable[[str], None] | None = None,
) -> str:
    """Ready the kernel that quantize(…) would use for such tensors; return its slug.

    On a GPU it is built, loaded and run once, after which calls can be captured; on a CPU there is
    nothing to build. `progress` is called with a line before what takes long. Raises as quantize
    does. `rotary` is "halves" or "pairs" where calls will have one.
    """
    key = (device, dtype, head_dim, rotate, scales, scale_rows, layout, rotary)
    kernel = _make_ready(key, progress)
    if device.type == "cuda":
        x = torch.zeros(1, 1, 1, head_dim, dtype=dtype, device=device)
        angles = x[0, ..., : head_dim // 2]
        with torch.no_grad():
            kernel(x, 0, None, **({} if rotary == "none" else {"cos": angles, "sin": angles}))
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
            kernel = emulation(schedule.slug)
        else:
            refuse_other_than_hopper(device, on_cpu="are quantised by torch")
            kernel = _built(schedule, progress)
        _ready[key] = kernel
        return kernel


def _built(schedule: Schedule, progress: Callable[[str], None] | None) -> op.Op:
    if torch.cuda.is_current_stream_capturing():
        raise FagenError(
            NOT_READY + f"{schedule.slug} cannot be built while a CUDA graph is captured"
        )
    planned = plan(schedule)
    return load(build(render(planned), planned, binding=True, progress=progress))


def _schedule(key: Key) -> Schedule:
    """The schedule that a call's arguments amount to; ValueError where there is none."""
    _, dtype, head_dim, rotate, scales, scale_rows, layout, rotary = key
    names = {getattr(torch, row.torch): row.name for row in DTYPES.values()}
    keys: dict[str, Any] = {"scale_rows": scale_rows} if scales == "block" else {}
    try:
        return Schedule.make(
            dtype=names.get(dtype, str(dtype).removeprefix("torch.")),
            head_dim=head_dim,
            rotary=rotary,
            rotate=rotate,
            scales=scales,
            layout=layout,
            **keys,
        )
    except ScheduleError as error:
        said = [line.rpartition("quantize.")[2] for line in str(error).splitlines()]
        raise ValueError(f"fagen.quantize: {'; '.join(said)}") from None


# ---- the ops ------------------------------------------------------------------------------------


def load(binary: Binary) -> op.Op:
    """Register `binary` as torch.ops.fagen.<slug>(x, seed=0, descale=None) and return the op.

    x (B, S, H, D) on one device, the last dimension contiguous, base pointer and other strides
    multiples of 16 bytes. Of a schedule with a rotary embedding the op also takes cos and sin, by
    name, (B, S, D / 2) each in x's dtype. Returns (values, descale), shaped as quantize(…) says;
    where a descale is given, an empty tensor in its place, since no output may be an input. On CPU
    tensors it is computed by torch. The op raises ValueError that names a wrong argument, also
    where a gradient would be needed.  Raises as fagen.op.load does.
    """

    def outputs(
        x: Tensor,
        seed: int = 0,
        descale: Tensor | None = None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return traced_outputs(plan_of(binary.slug), x, descale, cos, sin)

    return op.load(binary, outputs)


# ---- the emulated op ----------------------------------------------------------------------------
