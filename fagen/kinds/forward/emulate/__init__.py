"""A Plan and tensors in, what its kernel computes out: its tiles, order and roundings, in torch.

Works on any device.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fagen.kinds.forward.emulate.fp8 import emulate_fp8
from fagen.kinds.forward.emulate.sequences import emulate_varlen
from fagen.kinds.forward.emulate.sequences import own as _own
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
    plan = replace(plan, score=plan.score.bound(plan.score.taken(more)))
    given = plan.mask.taken(more)
    sinks = {"sinks": more.pop("sinks")} if plan.sink else {}
    if plan.mask.tables and not plan.varlen:
        return _by_sequence(plan, q, k, v, scale, given, more, sinks)
    if plan.varlen:
        return emulate_varlen(plan, q, k, v, scale=scale, given=given, **more, **sinks)
    plan = replace(plan, mask=plan.mask.bound(given))
    if not more:
        return emulate(plan, q, k, v, scale, **sinks)
    unit = torch.ones(1, 1, 1, dtype=torch.float32, device=q.device)
    descales = (more[f"{name}_descale"] for name in ("q", "k", "v"))
    q_descale, k_descale, v_descale = (unit if x is None else x for x in descales)
    means = more["v_mean"], more["k_mean"]
    return emulate_fp8(plan, q, k, v, scale, q_descale, k_descale, v_descale, *means, **sinks)


def _by_sequence(
    plan: "Plan",
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    given: Any,
    more: Any,
    sinks: Any,
) -> tuple[Tensor, Tensor]:
    """Return what a kernel computes whose mask differs from sequence to sequence."""
    found = []
    for number in range(len(q)):
        score = plan.score.of_sequence(number)
        own = replace(plan, mask=plan.mask.bound(given, number), score=score)
        numbers = {name: _own(x, number) for name, x in more.items()}
        numbers |= {name: score.numbers[name] for name in score.given}
        q_own, k_own, v_own = (x[number : number + 1] for x in (q, k, v))
        found.append(compute(own, q_own, k_own, v_own, scale, **numbers, **sinks))
    if not found:
        return emulate(plan, q, k, v, scale, **sinks)
    out, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
    return out, lse
