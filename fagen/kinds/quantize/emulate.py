"""A Plan and a tensor in, what its quantiser makes of it out, in torch."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fagen.kinds.quantize import reference

if TYPE_CHECKING:
    from fagen.kinds.quantize.plan import Plan


def compute(
    plan: "Plan",
    x: Tensor,
    seed: int,
    descale: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return values and descales; arguments as of the kernel's op, shapes as of its signature."""
    spread = descale
    if descale is not None:
        spread = descale.reshape((1, 1, 1) if descale.dim() == 0 else (*descale.shape, 1))
    rotary = None if cos is None or sin is None else (cos, sin)
    values, found = reference.quantize(plan, x, seed, spread, rotary)
    if descale is not None:
        return values, x.new_empty(0, dtype=torch.float32)
    if plan.by_block:
        return values, found
    if not plan.by_tensor:
        return values, found[..., 0].contiguous()
    least = found.new_full((1,), plan.least / plan.largest)  # of a tensor without a number
    return values, torch.cat((found.flatten(), least)).amax()
