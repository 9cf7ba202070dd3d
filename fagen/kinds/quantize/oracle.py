"""What a quantiser computes, in torch: its maxima, rotation, roundings and the order of its keys.

Works on any device. But for the rounding of sums inside the rotation, which the kernel takes in
another order, it is the kernel's arithmetic, fp32 as there.
"""

import torch
from torch import Tensor

from fagen.e4m3 import Centered, Quantized, by_columns, hadamard, mean_of, random_signs, rounded
from fagen.kinds.quantize.plan import Plan


def quantize(
    plan: Plan,
    x: Tensor,
    seed: int = 0,
    descale: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    mean: Tensor | None = None,
) -> Quantized | Centered:
    """Quantise x (B, S, H, D) as the Plan's kernel does.

    `seed` is of the rotation's signs. `descale` gives the scales, (B, H, 1), of columns (B, H, D),
    or what spreads to it, where they are not by block, `mean` (B, H, D) what to take off columns
    where the Plan does. `rotary` are cosines and sines, (B, S, D / 2) or what spreads to it, if the
    Plan has them.
    """
    y = x.float() if rotary is None else embedded(x, *rotary, pairs=plan.pairs).float()
    if plan.rotate:
        y = hadamard(y * random_signs(plan.head_dim, seed).to(x.device), plan.hadamard)
    norm = plan.norm
    if plan.center:
        y, norm = y * norm, 1.0
        mean = mean_of(y) if mean is None else mean
        y = y - mean[:, None]
    e4m3 = rounded(y, plan.schedule.quantize.scales, plan.scale_rows, norm=norm, descale=descale)
    values = by_columns(e4m3.values) if plan.columns else e4m3.values
    return Quantized(values, e4m3.descale) if mean is None else Centered(values, e4m3.descale, mean)


def embedded(x: Tensor, cos: Tensor, sin: Tensor, *, pairs: bool) -> Tensor:
    """Apply a rotary embedding to x (B, S, H, D), in fp32 and rounded to what x is.

    Of `pairs` of neighbouring columns, or of columns half a row apart.
    """
    shape = (-1, 2) if pairs else (2, -1)
    a, b = x.float().unflatten(-1, shape).unbind(-1 if pairs else -2)
    cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1 if pairs else -2)
    return turned.flatten(-2).to(x.dtype)
