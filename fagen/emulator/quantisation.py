"""Turn 16-bit Q, K and V into e4m3 with scales: rotated, rounded, V laid out as kernels want it.

This is what a quantisation kernel computes, in plain torch; a scale is the largest magnitude of
what shares it over 448.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fagen.arch import SM90

E4M3 = torch.float8_e4m3fn

LEAST_MAXIMUM = 2.0**-60  # nothing is divided by zero, and what V's descales do stays in fp32

# The keys of each 16 as V's columns hold them: what a thread has of two neighbouring 8 × 8 bricks
# of S is then, in its order, what the second product reads of P.
KEY_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


@dataclass(frozen=True)
class Quantised:
    """A tensor in e4m3, and what its values are to be multiplied by: fp32, (B, heads, blocks)."""

    values: Tensor
    descale: Tensor

    def real(self, scale_rows: int) -> Tensor:
        """Return the values (B, S, heads, D) in fp32 that this stands for; 0 where one block."""
        length = self.values.shape[1]
        return self.values.float() * rows_of(self.descale, scale_rows, length).transpose(1, 2)


def quantise(x: Tensor, scales: str, scale_rows: int = 0) -> Quantised:
    """Round x (B, S, heads, D) to e4m3; the `tensor`, a `head` or a `block` of rows shares a scale.

    Descales of a tensor are as many as those of its heads, and equal.
    """
    x = x.float()
    batch, length, heads, _ = x.shape
    largest = x.abs().amax(-1).transpose(1, 2)  # (B, heads, S)
    if scales == "block":
        blocks = -(-length // scale_rows)
        missing = blocks * scale_rows - length
        largest = torch.nn.functional.pad(largest, (0, missing))
        largest = largest.view(batch, heads, blocks, scale_rows).amax(-1)
    else:
        largest = largest.amax(-1, keepdim=True)
        if scales == "tensor":
            largest = largest.amax().expand(batch, heads, 1)
    largest = largest.clamp(min=LEAST_MAXIMUM)
    factor = rows_of(SM90.e4m3_max / largest, scale_rows, length)
    return Quantised(to_e4m3(x * factor.transpose(1, 2)), largest / SM90.e4m3_max)


def rows_of(descale: Tensor, scale_rows: int, length: int) -> Tensor:
    """Return a descale (B, heads, blocks) for each of `length` rows: (B, heads, length, 1)."""
    if descale.shape[-1] > 1:
        descale = descale.repeat_interleave(scale_rows, -1)[..., :length]
    return descale.expand(*descale.shape[:-1], length)[..., None]


def to_e4m3(x: Tensor) -> Tensor:
    """Round as cvt.rn.satfinite does: to the nearest, ties to even, never beyond 448."""
    return x.clamp(-SM90.e4m3_max, SM90.e4m3_max).to(E4M3)


# ---- rotation -----------------------------------------------------------------------------------


def random_signs(head_dim: int, seed: int = 0) -> Tensor:
    """Return `head_dim` random signs, fp32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (head_dim,), generator=generator).mul(2).sub(1).float()


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """Multiply the rows of x (…, D) by random signs, then by a Hadamard matrix of length-one rows.

    Q and K rotated by the same signs have the products that they had, and an outlier's size is
    spread over its row. The matrix is block-diagonal where D is no power of two: as many blocks of
    the largest power of two that divides it as there are. In fp32.
    """
    columns = x.shape[-1]
    width = columns & -columns
    rotated = (x.float() * signs).reshape(-1, columns // width, width)
    half = 1
    while half < width:
        pairs = rotated.reshape(-1, width // (2 * half), 2, half)
        one, other = pairs.unbind(-2)
        rotated = torch.stack((one + other, one - other), -2)
        half *= 2
    return rotated.reshape(x.shape) * width**-0.5


# ---- V by columns -------------------------------------------------------------------------------


def by_columns(v: Tensor) -> Tensor:
    """Turn V's rows (B, S, heads, D) into columns (B, heads, D, S to 16) with keys in KEY_ORDER.

    What S was filled up with is zero.
    """
    batch, length, heads, columns = v.shape
    groups = -(-length // len(KEY_ORDER))
    filled = v.new_zeros(batch, heads, columns, groups * len(KEY_ORDER))
    filled[..., :length] = v.permute(0, 2, 3, 1)
    return filled.unflatten(-1, (groups, len(KEY_ORDER)))[..., list(KEY_ORDER)].flatten(-2)


def by_rows(v: Tensor, length: int) -> Tensor:
    """Undo `by_columns`: (B, heads, D, S to 16) into (B, S, heads, D)."""
    places = [KEY_ORDER.index(key) for key in range(len(KEY_ORDER))]
    keys = v.unflatten(-1, (-1, len(KEY_ORDER)))[..., places].flatten(-2)
    return keys[..., :length].permute(0, 3, 1, 2)
