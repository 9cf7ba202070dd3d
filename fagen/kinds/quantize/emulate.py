"""A Plan and a tensor in, what its quantiser makes of it out, in torch."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fagen.kinds.quantize import oracle

if TYPE_CHECKING:
    from fagen.kinds.quantize.plan import Plan


def compute(
    plan: "Plan",
    x: Tensor,
    seed: int,
    descale: Tensor | None = None,
    mean: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return values, descales and means; arguments as of the kernel's op, shapes as it says."""
    spread = descale
    if descale is not None and not plan.by_column:
        spread = descale.reshape((1, 1, 1) if descale.dim() == 0 else (*descale.shape, 1))
    rotary = None if cos is None or sin is None else (cos, sin)
    values, scales, *means = oracle.quantize(plan, x, seed, spread, rotary, mean)
    nothing = x.new_empty(0, dtype=torch.float32)
    descales = nothing if descale is not None else _as_found(plan, scales)
    return values, descales, *(tensor if mean is None else nothing for tensor in means)


def _as_found(plan: "Plan", scales: Tensor) -> Tensor:
    """Descales as the kernel writes them."""
    if plan.by_block or plan.by_column:
        return scales
    if not plan.by_tensor:
        return scales[..., 0].contiguous()
    least = scales.new_full((1,), plan.least / plan.largest)  # of a tensor without a number
    return torch.cat((scales.flatten(), least)).amax()
