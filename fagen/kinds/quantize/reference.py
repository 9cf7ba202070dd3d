"""What a quantiser computes, in torch: its maxima, rotation, roundings and the order of its keys.

Works on any device. But for the rounding of sums inside the rotation, which the kernel takes in
another order, it is the kernel's arithmetic, fp32 as there.
"""

import torch
from torch import Tensor

from fagen.e4m3 import Quantized, by_columns, hadamard, random_signs, rounded
from fagen.kinds.quantize.plan import Plan


def quantize(
    plan: Plan,
    x: Tensor,
    seed: int = 0,
    descale: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
) -> Quantized:
    """Quantise x (B, S, H, D) as the Plan's kernel does.

    `seed` is of the rotation's signs. `descale` gives the scales, (B, H, 1) or what spreads to it,
    where they are not by block. `rotary` are cosines and sines, (B, S, D / 2) or what spreads to
    it, if the Plan has them.
    """
    y = x.float() if rotary is None else embedded(x, *rotary, pairs=plan.pairs).float()
    if plan.rotate:
        y = hadamard(y * random_signs(plan.head_dim, seed).to(x.device), plan.hadamard)
    made = rounded(y, plan.scales, plan.scale_rows, norm=plan.norm, descale=descale)
    return Quantized(by_columns(made.values), made.descale) if plan.columns else made


def embedded(x: Tensor, cos: Tensor, sin: Tensor, *, pairs: bool) -> Tensor:
    """Apply a rotary embedding to x (B, S, H, D), in fp32 and rounded to what x is.

    Of `pairs` of neighbouring columns, or of columns half a row apart.
    """
    shape = (-1, 2) if pairs else (2, -1)
    a, b = x.float().unflatten(-1, shape).unbind(-1 if pairs else -2)
    cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1 if pairs else -2)
    return turned.flatten(-2).to(x.dtype)
