"""Gradients of attention(…): an op with a forward kernel's outputs, whose backward is a kernel's.

`torch.ops.fagen.<slug>_with_grad` calls the forward kernel, keeps q, k, v, out and the log-sum-exp,
and nothing else, and is registered with Autograd: so torch.compile traces both passes as one op
each. A call that needs no gradient never comes here.
"""

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fagen.arch import SM90
from fagen.errors import OverBudget, ScheduleError
from fagen.kinds.backward.keys import Schedule
from fagen.problem import Problem
from fagen.registry import plan, plan_of
from fagen.runtime import op
from fagen.runtime.ready import first_ready, refuse_tracing

_TILES = ((128, 128), (64, 128), (64, 64))  # rows by keys, by how fast they are where they fit
_NOT_READY = (
    "the kernels of the backward pass are not ready: call fagen.attention(…) once outside of "
    "torch.compile with tensors of this dtype, head dim and device that require a gradient; "
)
_NOT_DETERMINISTIC = (
    "fagen's gradient of q is added up in any order, so that its last bits differ from call to "
    "call, and torch.use_deterministic_algorithms(True) forbids that; with warn_only=True this is "
    "a warning"
)

_ops = torch.library.Library("fagen", "FRAGMENT")
_gradients: dict[tuple[str, torch.device], op.Op] = {}  # forward slug, device → backward op


def with_gradient(slug: str, problem: Problem, forward: op.Op, device: torch.device) -> op.Op:
    """Return an op that gives (out, lse) as the op `forward` of this slug does, and has gradients.

    Raises ValueError where no kernel computes the gradients of this problem, and what readying a
    kernel raises.
    """
    if (slug, device) not in _gradients:
        refuse_tracing(_NOT_READY)
        _, _gradients[slug, device] = first_ready(candidates(problem), device, not_ready=_NOT_READY)
    return _registered(slug, forward if device.type == "cuda" else op.emulated(slug), device.type)


def candidates(problem: Problem) -> list[Schedule]:
    """Return the schedules that compute the gradients of a problem, the fastest first.

    Raises ValueError where none fits a multiprocessor.
    """
    found = list(_fitting(problem))
    if not found:
        raise ValueError(
            f"q, k or v requires a gradient, and no kernel computes those of {problem} yet, only "
            "of fp16 and bf16 up to head dim 128; call it under torch.no_grad(), or "
            "torch.nn.functional.scaled_dot_product_attention"
        )
    return found


def _fitting(problem: Problem) -> Iterator[Schedule]:
    for block_m, block_n in _TILES:
        try:
            schedule = Schedule.make(
                dtype=problem.dtype,
                head_dim=problem.head_dim,
                head_dim_v=problem.head_dim_v,
                mask=problem.mask,
                block_m=block_m,
                block_n=block_n,
            )
            plan(schedule)
        except (ScheduleError, OverBudget):
            continue
        yield schedule


@cache
def _registered(slug: str, forward: op.Op, place: str) -> op.Op:
    """Define the op with gradients, and give it the forward kernel on a type of device."""
    name = f"{slug}_with_grad"
    if not hasattr(torch.ops.fagen, name):
        _ops.define(f"{name}(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor, Tensor)")
        fake = op.fakes(plan_of(slug))[""]
        torch.library.register_fake(f"fagen::{name}", fake, lib=_ops)
        torch.library.register_autograd(
            f"fagen::{name}", _backward(slug), setup_context=_keep, lib=_ops
        )
    _ops.impl(name, forward, place.upper())
    return getattr(torch.ops.fagen, name).default  # type: ignore[no-any-return]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _backward(slug: str) -> Any:
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None:  # only the log-sum-exp was used
            dout = torch.zeros_like(out)
        if q.device.type == "cuda":
            _refuse_nondeterministic()
        dlse = None if dlse is None else dlse.contiguous()
        gradients = _gradients[slug, q.device](_laid_out(dout), q, k, v, out, lse, ctx.scale, dlse)
        wanted = zip(ctx.needs_input_grad, gradients, strict=False)
        return *(gradient if needed else None for needed, gradient in wanted), None

    return backward


def _laid_out(dout: Tensor) -> Tensor:
    """dout as kernels take it: its last dimension contiguous, all else in whole pieces of TMA."""
    step = SM90.tma_alignment // dout.element_size()
    *strides, last = dout.stride()
    # where it begins in its storage, since what torch traces has no address
    pieces = all(along % step == 0 for along in (*strides, dout.storage_offset()))
    return dout if last == 1 and pieces else dout.contiguous()


def _refuse_nondeterministic() -> None:
    if not torch.are_deterministic_algorithms_enabled():
        return
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(_NOT_DETERMINISTIC)
    warnings.warn(_NOT_DETERMINISTIC, stacklevel=2)
