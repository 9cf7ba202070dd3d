"""A Plan and tensors in, what its kernel computes out: its tiles, order and roundings, in torch.

Works on any device.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fagen.kinds.forward.emulate.fp8 import emulate_fp8
from fagen.kinds.forward.emulate.sequences import emulate_varlen
from fagen.kinds.forward.emulate.tiles import emulate

if TYPE_CHECKING:
    from fagen.kinds.forward.plan import Plan

__all__ = ["compute", "emulate", "emulate_fp8", "emulate_varlen"]


def compute(
    plan: "Plan", q: Tensor, k: Tensor, v: Tensor, scale: float, **more: Any
) -> tuple[Tensor, Tensor]:
    """Return out and lse; arguments as of the kernel's op.

    A descale that is None is 1, a mean that is None nothing.
    """
    if plan.varlen:
        return emulate_varlen(plan, q, k, v, scale=scale, **more)
    if not more:
        return emulate(plan, q, k, v, scale)
    unit = torch.ones(1, 1, 1, dtype=torch.float32, device=q.device)
    descales = (more[f"{name}_descale"] for name in ("q", "k", "v"))
    q_descale, k_descale, v_descale = (unit if x is None else x for x in descales)
    means = more["v_mean"], more["k_mean"]
    return emulate_fp8(plan, q, k, v, scale, q_descale, k_descale, v_descale, *means)
