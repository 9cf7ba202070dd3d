"""A Plan and tensors in, what its kernel computes out: its tiles, order and roundings, in torch.

Works on any device.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fagen.kinds.forward.emulate.fp8 import emulate_fp8
from fagen.kinds.forward.emulate.tiles import emulate

if TYPE_CHECKING:
    from fagen.kinds.forward.plan import Plan

__all__ = ["compute", "emulate", "emulate_fp8"]


def compute(
    plan: "Plan", q: Tensor, k: Tensor, v: Tensor, scale: float, **of_fp8: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return out and lse; arguments as of the kernel's op.

    A descale that is None is 1, a mean that is None nothing.
    """
    if not of_fp8:
        return emulate(plan, q, k, v, scale)
    one = torch.ones(1, 1, 1, device=q.device)
    given = (of_fp8[f"{name}_descale"] for name in ("q", "k", "v"))
    descales = (one if descale is None else descale for descale in given)
    means = {name: of_fp8[name] for name in ("v_mean", "k_mean")}
    return emulate_fp8(plan, q, k, v, scale, *descales, **means)
