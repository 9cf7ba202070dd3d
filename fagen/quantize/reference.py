"""What a quantiser computes, in torch: its maxima, rotation, roundings and the order of its keys.

Works on any device. But for the rounding of sums inside the rotation, which the kernel takes in
another order, it is the kernel's arithmetic, fp32 as there.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fagen.quantize.plan import KEY_ORDER, QuantizePlan

SIGN_WORDS = 8  # of 32 signs each: enough for 256 columns


@dataclass(frozen=True)
class Quantized:
    """An e4m3 tensor and its scales: a number is its e4m3 value times its descale.

    values: (B, S, H, D), or in columns (B, H, D, S rounded up to 16), each 16 keys in KEY_ORDER.
    descale: (B, H, blocks), one block where scales are not by block; equal numbers throughout
    where there is one of the tensor. top: (B, H), the largest descale of a head.
    """

    values: Tensor
    descale: Tensor
    top: Tensor


def random_signs(seed: int) -> tuple[int, ...]:
    """Return signs for the rotation: bit c % 32 of word c / 32 negates column c."""
    bits = random.Random(seed)
    return tuple(bits.getrandbits(32) for _ in range(SIGN_WORDS))


def sign_words(signs: Sequence[float]) -> tuple[int, ...]:
    """Return signs, a number for each column of which only the sign counts, as such words."""
    words = [0] * SIGN_WORDS
    for column, sign in enumerate(signs):
        words[column // 32] |= (sign < 0) << column % 32
    return tuple(words)


def rotated(plan: QuantizePlan, x: Tensor, signs: Sequence[int]) -> Tensor:
    """Negate columns of x (…, D) and rotate its rows, in fp32; without a rotation, widen them."""
    if not plan.rotate:
        return x.float()
    return _hadamard(plan, x.float() * _factors(plan, signs, x.device)) * plan.norm


def unrotated(plan: QuantizePlan, y: Tensor, signs: Sequence[int]) -> Tensor:
    """Take the rotation back: `rotated` of the result is y again."""
    if not plan.rotate:
        return y.float()
    return _hadamard(plan, y.float()) * plan.norm * _factors(plan, signs, y.device)


def quantize(
    plan: QuantizePlan,
    x: Tensor,
    signs: Sequence[int] = (0,) * SIGN_WORDS,
    descale: Tensor | None = None,
) -> Quantized:
    """Quantise x (B, S, H, D) as the Plan's kernel does.

    `descale` gives the scales, (B, H, 1) or what spreads to it, where they are not by block.
    """
    batch, seqlen, heads, head_dim = x.shape
    y = x.float()
    if plan.rotate:
        y = _hadamard(plan, y * _factors(plan, signs, x.device))
    y = y.permute(0, 2, 1, 3)  # (B, H, S, D)
    norm = torch.tensor(plan.norm, dtype=torch.float32, device=x.device)
    rows = plan.scale_rows or max(seqlen, 1)
    blocks = -(-seqlen // rows)
    if descale is None:
        filled = torch.nn.functional.pad(y, (0, 0, 0, blocks * rows - seqlen))
        maxima = filled.abs().reshape(batch, heads, blocks, rows * head_dim).amax(-1)
        if plan.by_tensor:
            maxima = maxima.amax().expand_as(maxima)
        descale = (maxima * norm).clamp_min(plan.least) / plan.largest
    descale = descale.float().expand(batch, heads, blocks).contiguous()
    scale = (norm / descale).repeat_interleave(rows, -1)[..., :seqlen, None]
    values = (y * scale).clamp(-plan.largest, plan.largest).to(torch.float8_e4m3fn)
    values = in_columns(values) if plan.columns else values.permute(0, 2, 1, 3).contiguous()
    return Quantized(values, descale, descale.amax(-1))


def dequantized(plan: QuantizePlan, quantized: Quantized, seqlen: int) -> Tensor:
    """Return what the e4m3 values stand for, (B, S, H, D) in fp32, still rotated."""
    values = quantized.values.float()
    values = _from_columns(values, seqlen) if plan.columns else values.permute(0, 2, 1, 3)
    rows = plan.scale_rows or max(seqlen, 1)
    factors = quantized.descale.repeat_interleave(rows, -1)[..., :seqlen, None]
    return (values * factors).permute(0, 2, 1, 3)


def in_columns(rows: Tensor) -> Tensor:
    """Transpose (B, H, S, D) as the second GEMM wants V: keys last, filled up, in KEY_ORDER."""
    batch, heads, seqlen, head_dim = rows.shape
    step = len(KEY_ORDER)
    padded = -(-seqlen // step) * step
    filled = rows.new_zeros(batch, heads, padded, head_dim)
    filled[:, :, :seqlen] = rows
    groups = filled.view(batch, heads, -1, step, head_dim)[:, :, :, list(KEY_ORDER)]
    return groups.reshape(batch, heads, padded, head_dim).transpose(-1, -2).contiguous()


def _from_columns(columns: Tensor, seqlen: int) -> Tensor:
    batch, heads, head_dim, padded = columns.shape
    step = len(KEY_ORDER)
    groups = columns.transpose(-1, -2).reshape(batch, heads, padded // step, step, head_dim)
    keys = torch.empty_like(groups)
    keys[:, :, :, list(KEY_ORDER)] = groups
    return keys.view(batch, heads, padded, head_dim)[:, :, :seqlen]


def _factors(plan: QuantizePlan, signs: Sequence[int], device: torch.device) -> Tensor:
    bits = [signs[column // 32] >> column % 32 & 1 for column in range(plan.head_dim)]
    return 1.0 - 2.0 * torch.tensor(bits, dtype=torch.float32, device=device)


def _hadamard(plan: QuantizePlan, x: Tensor) -> Tensor:
    """Multiply rows by a Hadamard matrix of ones and minus ones, again and again."""
    step = 1
    while step < plan.hadamard:
        pairs = x.unflatten(-1, (-1, 2, step))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        step *= 2
    return x
