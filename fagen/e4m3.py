"""e4m3 in torch: rounding with scales, random rotations, and V transposed as kernels read it.

What the quantisers compute and attention in e4m3 takes. Works on any device.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fagen.arch import SM90
from fagen.signature import random_words
from fagen.vocab import KEY_ORDER, LEAST_MAXIMUM

E4M3 = torch.float8_e4m3fn
SIGN_WORDS = 8  # of 32 signs each: enough for 256 columns


class Quantized(NamedTuple):
    """An e4m3 tensor and what its values are to be multiplied by, in fp32.

    values: (B, S, H, D), or transposed (B, H, D, S rounded up to 16), each 16 keys in KEY_ORDER.
    descale: (B, H, blocks), one block where scales are not by block; of fagen.quantize then (B, H),
    or one number; (B, H, D) where they are by column.
    """

    values: Tensor
    descale: Tensor

    def real(self, scale_rows: int) -> Tensor:
        """Return the numbers (B, S, H, D), fp32, that row-major values are; 0 where one block."""
        descale = self.descale[(..., *(None,) * (3 - self.descale.dim()))]
        length = self.values.shape[1]
        return self.values.float() * rows_of(descale, scale_rows, length).transpose(1, 2)


class Centered(NamedTuple):
    """The same of a tensor less the means of its columns over its rows, (B, H, D) in fp32."""

    values: Tensor
    descale: Tensor
    mean: Tensor


def rounded(
    x: Tensor,
    scales: str,
    scale_rows: int = 0,
    *,
    norm: float = 1.0,
    descale: Tensor | None = None,
) -> Quantized:
    """Round x (B, S, H, D) times `norm` to e4m3, row-major.

    The `tensor`, a `head`, a `column` of a head or a `block` of rows shares a scale, if `descale`
    does not give them. Descales of a tensor are as many as those of its heads, and equal.
    """
    x = x.float()
    if scales == "column":
        return _by_column(x, norm, descale)
    batch, length, heads, _ = x.shape
    by_block = scales == "block"
    blocks = -(-length // scale_rows) if by_block else 1
    factor = torch.tensor(norm, dtype=torch.float32, device=x.device)
    if descale is None:
        largest = x.abs().amax(-1).transpose(1, 2)  # (B, H, S)
        missing = blocks * scale_rows - length if by_block else int(length == 0)
        largest = torch.nn.functional.pad(largest, (0, missing))
        largest = largest.unflatten(-1, (blocks, -1)).amax(-1) if blocks else largest
        if scales == "tensor" and largest.numel():
            largest = largest.amax().expand(batch, heads, 1)
        # on a GPU torch multiplies by the inverse of a number that it is to divide by
        e4m3_max = torch.tensor(SM90.e4m3_max, dtype=torch.float32, device=x.device)
        descale = (largest * factor).clamp_min(LEAST_MAXIMUM) / e4m3_max
    descale = descale.float().expand(batch, heads, blocks).contiguous()
    scale = rows_of(factor / descale, scale_rows, length)
    return Quantized(to_e4m3(x * scale.transpose(1, 2)), descale)


def _by_column(x: Tensor, norm: float, descale: Tensor | None) -> Quantized:
    """The same where each column of a head has a scale, (B, H, D)."""
    batch, length, heads, columns = x.shape
    factor = torch.tensor(norm, dtype=torch.float32, device=x.device)
    if descale is None:
        largest = x.abs().amax(1) if length else x.new_zeros(batch, heads, columns)
        e4m3_max = torch.tensor(SM90.e4m3_max, dtype=torch.float32, device=x.device)
        descale = (largest * factor).clamp_min(LEAST_MAXIMUM) / e4m3_max
    descale = descale.float().expand(batch, heads, columns).contiguous()
    return Quantized(to_e4m3(x * (factor / descale)[:, None]), descale)


def mean_of(x: Tensor) -> Tensor:
    """Return the means of columns over rows of x (B, S, H, D): (B, H, D), fp32; 0 of no rows."""
    batch, length, heads, columns = x.shape
    return x.float().mean(1) if length else x.new_zeros(batch, heads, columns, dtype=torch.float32)


def rows_of(descale: Tensor, scale_rows: int, length: int) -> Tensor:
    """Return a descale (B, H, blocks) for each of `length` rows: (B, H, length, 1)."""
    if descale.shape[-1] > 1:
        descale = descale.repeat_interleave(scale_rows, -1)[..., :length]
    return descale.expand(*descale.shape[:-1], length)[..., None]


def to_e4m3(x: Tensor) -> Tensor:
    """Round as cvt.rn.satfinite does: to the nearest, ties to even, never beyond 448."""
    return x.clamp(-SM90.e4m3_max, SM90.e4m3_max).to(E4M3)


# ---- rotation -----------------------------------------------------------------------------------


@cache
def sign_words(seed: int) -> tuple[int, ...]:
    """Return the signs of a rotation: bit c % 32 of word c / 32 negates column c.

    They are SplitMix64's numbers, lower half first: a few lines in any language.
    """
    return random_words(seed, SIGN_WORDS)


def random_signs(head_dim: int, seed: int = 0) -> Tensor:
    """Return the signs of `head_dim` columns, fp32."""
    words = sign_words(seed)
    bits = [words[column // 32] >> column % 32 & 1 for column in range(head_dim)]
    return 1.0 - 2.0 * torch.tensor(bits, dtype=torch.float32, device="cpu")


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """Multiply the rows of x (…, D) by signs, then by a Hadamard matrix of length-one rows.

    Q and K rotated by the same signs have the products that they had, and an outlier's size is
    spread over its row. The matrix is block-diagonal where D is no power of two: as many blocks of
    the largest power of two that divides it as there are. In fp32.
    """
    width = x.shape[-1] & -x.shape[-1]
    return hadamard(x.float() * signs, width) * width**-0.5


def hadamard(x: Tensor, width: int) -> Tensor:
    """Multiply rows by a Hadamard matrix of ones and minus ones, again and again."""
    half = 1
    while half < width:
        pairs = x.unflatten(-1, (-1, 2, half))
        even, odd = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((even + odd, even - odd), -2).flatten(-3)
        half *= 2
    return x


# ---- transposed V -------------------------------------------------------------------------------


def by_columns(v: Tensor) -> Tensor:
    """Turn V's rows (B, S, H, D) into columns (B, H, D, S to 16) with keys in KEY_ORDER.

    What pads S is zero.
    """
    batch, length, heads, columns = v.shape
    groups = -(-length // len(KEY_ORDER))
    filled = v.new_zeros(batch, heads, columns, groups * len(KEY_ORDER))
    filled[..., :length] = v.permute(0, 2, 3, 1)
    return filled.unflatten(-1, (groups, len(KEY_ORDER)))[..., list(KEY_ORDER)].flatten(-2)


def by_rows(v: Tensor, length: int) -> Tensor:
    """Undo `by_columns`: (B, H, D, S to 16) into (B, S, H, D)."""
    places = [KEY_ORDER.index(key) for key in range(len(KEY_ORDER))]
    keys = v.unflatten(-1, (-1, len(KEY_ORDER)))[..., places].flatten(-2)
    return keys[..., :length].permute(0, 3, 1, 2)
