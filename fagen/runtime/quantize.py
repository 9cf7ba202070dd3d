"""quantize(x, …): fp16 or bf16 in, e4m3 with descales out, by the quantiser that this takes."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fagen.e4m3 import Quantized
from fagen.kinds.quantize.keys import Schedule
from fagen.runtime.arguments import schedule_of, word_of
from fagen.runtime.op import Op
from fagen.runtime.ready import ready, refuse_tracing, run_once
from fagen.vocab import SCALE_ROWS_DEFAULT

Rotary = tuple[Tensor, Tensor]  # cosines and sines
Key = tuple[torch.device, torch.dtype, int, bool, str, int, str, str]

NOT_READY = (
    "the quantiser is not ready: call fagen.quantize(…) once, with such arguments and on this "
    "device; "
)

# What has been readied in this process. A call finds its kernel here or takes the long way once.
_ready: dict[Key, Op] = {}


def quantize(
    x: Tensor,
    *,
    rotate: bool = False,
    scales: str = "block",
    scale_rows: int = SCALE_ROWS_DEFAULT,
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
    scale_rows: int = SCALE_ROWS_DEFAULT,
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
    kernel, slug = _make_ready(key, progress), _schedule(key).slug
    if device.type == "cuda":
        run_once(kernel, slug, device)
    return slug


def _make_ready(key: Key, progress: Callable[[str], None] | None = None) -> Op:
    """The long way to a kernel: choose, build, load.  Raises as quantize does."""
    refuse_tracing(NOT_READY)
    _ready[key] = ready(_schedule(key), key[0], not_ready=NOT_READY, progress=progress)
    return _ready[key]


def _schedule(key: Key) -> Schedule:
    """The schedule that a call's arguments amount to; ValueError where there is none."""
    _, dtype, head_dim, rotate, scales, scale_rows, layout, rotary = key
    return schedule_of(
        Schedule,
        dtype=word_of(dtype),
        head_dim=head_dim,
        rotary=rotary,
        rotate=rotate,
        scales=scales,
        layout=layout,
        **({"scale_rows": scale_rows} if scales == "block" else {}),
    )
