"""Partial outputs and their LSEs in, what the kernel makes of them out, to the bit, in torch."""

import torch
from torch import Tensor

from fagen.combining import combined
from fagen.kinds.combine.oracle import counting
from fagen.kinds.combine.plan import Plan


def compute(
    plan: Plan,
    outs: Tensor,
    lses: Tensor,
    num_splits: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Combine outs (splits, …, Sq, H, Dv) and lses (splits, …, H, Sq) as the Plan's kernel does.

    Of sinks (H) each follows the last split of its head's rows.
    A packed row before the first sequence or behind the last has no split.
    """
    rows = counting(lses.transpose(-1, -2), num_splits, cu_seqlens)  # (splits, …, Sq, H)
    like = outs.new_empty(outs.shape[1:])
    out, lse = combined(zip(outs, rows, strict=True), like, sinks)
    return out.to(getattr(torch, plan.out_dtype.torch)), lse.transpose(-1, -2).contiguous()
