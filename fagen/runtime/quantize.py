"""quantize(x, …): fp16 or bf16 in, e4m3 with descales out, by the quantiser that this takes."""

from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from fagen.e4m3 import Centered, Quantized
from fagen.kinds.quantize.keys import Schedule
from fagen.runtime.argument_types import flag, names_types, positive, refuse_tangents, whole
from fagen.runtime.arguments import refuse_rank, schedule_of, settled, word_of
from fagen.runtime.call import CallKey, Door, traced
from fagen.vocab import SCALE_ROWS_DEFAULT

Rotary = tuple[Tensor, Tensor]  # cosines and sines


def _key(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    rotate: bool,
    center: bool,
    scales: str,
    scale_rows: int,
    layout: str,
    rotary: str,
) -> CallKey:
    """The key of a call; ValueError where no quantiser is what its arguments amount to."""
    schedule = schedule_of(
        Schedule,
        dtype=word_of(dtype),
        head_dim=settled(head_dim),
        rotary=rotary,
        rotate=rotate,
        center=center,
        scales=scales,
        layout=layout,
        **({"scale_rows": scale_rows} if scales == "block" else {}),
    )
    return CallKey(device, derived=(schedule,))


QUANTIZE = Door(
    "quantize",
    _key,
    "the quantiser is not ready: call fagen.quantize(…) once, with such arguments and on this "
    "device; ",
)


class _Keys(TypedDict, total=False):
    """What every call may say."""

    rotate: bool
    scales: str
    scale_rows: int
    layout: str
    descale: Tensor | float | None
    seed: int
    rotary: Rotary | None
    rotary_pairs: bool


@overload
def quantize(x: Tensor, *, center: Literal[False] = ..., **keys: Unpack[_Keys]) -> Quantized: ...


@overload
def quantize(
    x: Tensor, *, center: Literal[True], mean: Tensor | None = ..., **keys: Unpack[_Keys]
) -> Centered: ...


@overload
def quantize(x: Tensor, *, center: bool = ..., **keys: Unpack[_Keys]) -> Quantized | Centered: ...


@names_types
def quantize(
    x: Tensor,
    *,
    rotate: bool = False,
    center: bool = False,
    scales: str = "block",
    scale_rows: int = SCALE_ROWS_DEFAULT,
    layout: str = "rows",
    descale: Tensor | float | None = None,
    mean: Tensor | None = None,
    seed: int = 0,
    rotary: Rotary | None = None,
    rotary_pairs: bool = False,
) -> Quantized | Centered:
    """Turn x (B, S, H, D) in fp16 or bf16 into e4m3 values and the descales that belong to them.

    A number of x is its value times its descale, plus its column's mean with `center`. D is a
    multiple of 16 up to 256; any strides that are multiples of 16 bytes will do, with the last
    dimension contiguous.

    With `rotate`, rows are multiplied by random signs, those of `seed`, and by a Hadamard matrix:
    outliers are spread over their row, and Q and K that are rotated by the same seed have the
    products that they had.

    `rotary`, cosines and sines, (S, D / 2) or (B, S, D / 2) in x's dtype, applies a rotary
    embedding first, of columns half a row apart, or with `rotary_pairs` of neighbouring ones, and
    rounds what it gives to x's dtype. Columns half a row apart need a D that is a multiple of 64.

    With `center` the means of a head's columns over its rows are taken off first, after a rotation,
    and returned: attention takes those of K and V as k_mean and v_mean.

    values: (B, S, H, D); or with layout="columns" (B, H, D, S rounded up to 16), which is what
    kernels read V fastest in: each 16 keys in the order of P, and zeros past S.

    descale, fp32: (B, H, blocks of scale_rows rows) with scales="block", (B, H) with "head",
    (B, H, D) with "column", for V, one number with "tensor". But for those of blocks they may be
    given, as a tensor or a number, and so may the means (B, H, D), in fp32; both together where
    both are found. That saves reading x more than once, as for keys that are appended to others;
    values beyond 448 descales then become 448.

    Returns values and descale, with `center` also mean (B, H, D) in fp32, zeros of no rows.

    Raises ValueError for a wrong argument, also where a gradient would be needed; DeviceError where
    the GPU is no Hopper; ToolchainError and BuildError where the kernel cannot be built.
    """
    if x.dim() != 4:
        refuse_rank(x=x)
    if not (
        (type(rotate) is type(center) is type(rotary_pairs) is bool)
        and (type(seed) is type(scale_rows) is int and max(abs(seed), scale_rows) < 1 << 63)
    ):
        rotate, center = flag("rotate", rotate), flag("center", center)
        rotary_pairs = flag("rotary_pairs", rotary_pairs)
        seed, scale_rows = whole("seed", seed), whole("scale_rows", scale_rows)
    if mean is not None and not center:
        raise ValueError("mean goes with center=True, which takes it off")
    embedding = "none" if rotary is None else "pairs" if rotary_pairs else "halves"
    keys = rotate, center, scales, scale_rows, layout, embedding
    parts = (x.device, x.dtype, x.shape[3], *keys)
    if is_compiling():
        _, kernel = traced("quantize", None, *parts[:2], settled(parts[2]), *keys)
    else:
        kernel = QUANTIZE.known.get(parts) or QUANTIZE.find(
            QUANTIZE.ready(_key(*parts)), call=parts
        )
    more = () if rotary is None else _rotary(rotary, x)
    if forward_ad._current_level >= 0:
        refuse_tangents(x)
    fixed = None if descale is None else _given(descale, x, scales)
    if not center:
        values, descales = kernel.results(x, seed, fixed, *more)
        return Quantized(values, descales if fixed is None else fixed)
    values, descales, means = kernel.results(x, seed, fixed, mean)
    return Centered(values, descales if fixed is None else fixed, means if mean is None else mean)


def _rotary(rotary: Rotary, x: Tensor) -> Rotary:
    """Cosines and sines as the op takes them: one of every batch."""
    cos, sin = (t.expand(x.shape[0], -1, -1) if t.dim() == 2 else t for t in rotary)
    return cos, sin


def _given(descale: Tensor | float, x: Tensor, scales: str) -> Tensor:
    """A descale that was given, as the op takes it; what cannot be one is left to the op."""
    if not isinstance(descale, Tensor):
        number = positive("descale", descale)
        descale = torch.full((), number, dtype=torch.float32, device=x.device)
    if scales == "head" and descale.dim() == 0:
        return descale.expand(x.shape[0], x.shape[2])
    if scales == "column" and descale.dim() == 0:
        return descale.expand(x.shape[3]).contiguous().expand(x.shape[0], x.shape[2], -1)
    return descale
