"""Gradients of attention(…): an op with a forward kernel's outputs, whose backward is a kernel's.

`torch.ops.fagen.<slug>_with_grad` calls the forward kernel, keeps q, k, v, out and the log-sum-exp,
of packed sequences also their offsets, and nothing else, and is registered with Autograd: so
torch.compile traces both passes as one op each. A call that torch does not trace goes by an
autograd.Function that does the same, in less of the host's time. One that needs no gradient never
comes here.

Which kernel computes the gradients, dispatch tables say as they do for attention itself: by the
sizes of q and k when the backward pass runs, and by whether the call wanted it deterministic, or
torch does then.
"""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fagen.arch import SM90
from fagen.dispatch.choice import (
    Candidates,
    Served,
    candidates,
    for_few,
    for_keys,
    serving,
    slugs_for,
)
from fagen.errors import ScheduleError, UntunedWarning
from fagen.picking import search_command
from fagen.problem import Problem
from fagen.registry import plan_of
from fagen.runtime import op
from fagen.runtime.arguments import surely
from fagen.runtime.once import Once, untraced
from fagen.runtime.ready import first_ready
from fagen.vocab import BACKWARD

_ops = torch.library.Library("fagen", "FRAGMENT")


class _Gradients:
    """The kernels of the gradients of a problem on a device: what tables have, what is ready."""

    def __init__(self, of: Problem, device: torch.device, served: Served) -> None:
        self.of, self.device, self.served = of, device, served
        # ops and their slugs by the slug of a table, None for the usual one
        self.ready: Once[str | None, tuple[op.Op, str]] = Once(self._make_ready)

    def op_for(self, q: Tensor, k: Tensor) -> op.Op:
        """The op for tensors of these sizes, readied if need be."""
        slug = _slug_for(self.served, q, k)
        found, _ = self.ready.get(slug) or self.ready.made(slug)
        return found

    def _make_ready(self, slug: str | None) -> tuple[op.Op, str]:
        said = not_ready(self.of.deterministic, packed=self.of.varlen)
        schedules, derived = candidates_for(self.of, slug)
        chosen, made = first_ready(schedules, self.device, not_ready=said)
        if derived:
            call = "fagen.attention_varlen" if self.of.varlen else "fagen.attention"
            warnings.warn(
                f"no schedule was tuned for the gradients of {self.of}: {chosen.slug} is "
                f"derived. To search for a faster one, which {call} then takes: "
                f"{search_command(chosen.slug)}",
                UntunedWarning,
                stacklevel=6,
            )
        return made, chosen.slug


def _slug_for(served: Served, q: Tensor, k: Tensor) -> str | None:
    """The slug that tables have for tensors of these sizes; None is the usual one."""
    slug = served.always
    if served.by_keys:
        slug = for_keys(served.by_keys, k.shape[1], surely)
        if served.few and slug not in served.long:
            slug = for_few(served.few, q.numel(), surely) or slug
    return slug


def not_ready(deterministic: bool, *, packed: bool) -> str:
    """Return how a refusal begins where kernels of gradients would have to be built."""
    more = ", deterministic=True" if deterministic else ""
    prepare, call, of = "prepare", "attention", "dtype, head dim, device and size"
    if packed:  # lengths do not choose
        prepare, call, of = "prepare_varlen", "attention_varlen", "dtype, head dim and device"
    return (
        f"the kernels of the backward pass are not ready: call fagen.{prepare}(…, gradient=True"
        f"{more}) first, or fagen.{call}(…) once with tensors of this {of} that require a "
        "gradient; "
    )


def with_gradient(
    slug: str,
    forward: op.Op,
    device: torch.device,
    *,
    deterministic: bool = False,
    keys: int | None = None,
    elements: int | None = None,
) -> op.Op:
    """Return what gives (out, lse) as the op `forward` of this slug does, and has gradients.

    With `deterministic` their sums have one order, else where torch asks for that. Their kernels
    for so many keys and elements of q are ready then, where None is any number; those for others
    are readied when a backward pass needs them. Raises ValueError where no kernel computes the
    gradients of this problem, ScheduleError where a dispatch table is wrong, and what readying a
    kernel raises.
    """
    found = _gradients_of(slug, device, deterministic)
    for choice in slugs_for(found.served, keys, elements):
        found.ready.made(choice)
    _registered.made((slug, device.type))  # for programs that were exported elsewhere
    eager = op.below(forward if device.type == "cuda" else op.emulated(slug))
    backward = _backward(slug)

    def differentiable(*given: Any) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = _Eager.apply(eager, backward, deterministic, *given)
        return made

    return differentiable


def with_gradient_by_name(found: op.Named, q: Tensor, k: Tensor, *, deterministic: bool) -> op.Op:
    """Return the same for q and k of these sizes, as torch.compile can trace it, of a ready kernel.

    It is torch.ops.fagen.<slug>_with_grad.
    """
    slug = found[0]
    _named(slug, q.device, deterministic, _traced_slug(slug, q, k, deterministic))
    name = _registered_for(slug, q.device.type)
    return partial(getattr(torch.ops.fagen, name).default, deterministic=deterministic)


def _traced_slug(slug: str, q: Tensor, k: Tensor, deterministic: bool) -> str | None:
    return _slug_for(Served(*_told(slug, q.device, deterministic)), q, k)


@untraced
def _told(slug: str, device: torch.device, deterministic: bool) -> Any:
    return tuple(_gradients_of(slug, device, deterministic).served)


@untraced
def _named(slug: str, device: torch.device, deterministic: bool, choice: str | None) -> op.Named:
    """Ready a kernel of gradients, and tell of it by name."""
    _, found = _gradients_of(slug, device, deterministic).ready.made(choice)
    return op.named(found, device.type)


@untraced
def _registered_for(slug: str, place: str) -> str:
    """Ready the op that has gradients, and return its name."""
    return _registered.made((slug, place))


def _gradients_of(slug: str, device: torch.device, asked: bool) -> _Gradients:
    """What tables have for the gradients of what a kernel computes.

    They are deterministic where the call asked for it, or torch does now.
    """
    wanted = asked or torch.are_deterministic_algorithms_enabled()
    of = slug, device, wanted and _sums_in_any_order(device)
    return _gradients.get(of) or _gradients.made(of)


def _look_up(of: tuple[str, torch.device, bool]) -> _Gradients:
    slug, device, deterministic = of
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    problem = Problem.of(plan_of(slug).schedule)
    problem = replace(problem, kind=BACKWARD, deterministic=deterministic)
    return _Gradients(problem, device, serving(problem, card))


# by the forward kernel's slug, and whether they are deterministic
_gradients: Once[tuple[str, torch.device, bool], _Gradients] = Once(_look_up)


def _sums_in_any_order(device: torch.device) -> bool:
    """Whether a usual kernel's dq may differ from call to call; on a CPU it never does."""
    return bool(device.type == "cuda")


def candidates_for(problem: Problem, slug: str | None = None) -> Candidates:
    """Return the schedules for gradients: that of a slug, or the usual ones.

    Raises ValueError where no kernel computes them.
    """
    try:
        return candidates(problem, slug)
    except ScheduleError:
        if slug is not None:
            raise
        raise ValueError(
            f"q, k or v requires a gradient, and no kernel computes those of {problem}: none "
            "fits a multiprocessor; call it under torch.no_grad(), or "
            "torch.nn.functional.scaled_dot_product_attention"
        ) from None


def _register(of: tuple[str, str]) -> str:
    """Give the op with gradients the forward kernel on a type of device; return its name."""
    slug, place = of
    name = _defined.get(slug) or _defined.made(slug)
    forward = op.emulated(slug) if place == "cpu" else getattr(torch.ops.fagen, slug).default
    _ops.impl(name, _as_registered(forward), place.upper())
    return name


def _define(slug: str) -> str:
    name, signature = f"{slug}_with_grad", plan_of(slug).signature
    asked = f"{signature.asked_in_order}, *, bool deterministic=False"
    _ops.define(f"{name}({asked}) -> {signature.returns}")
    fake = _as_registered(op.fakes(plan_of(slug))[""])
    torch.library.register_fake(f"fagen::{name}", fake, lib=_ops)
    torch.library.register_autograd(
        f"fagen::{name}", _backward(slug), setup_context=_keep_traced, lib=_ops
    )
    return name


_defined: Once[str, str] = Once(_define, op.REGISTERING)
_registered: Once[tuple[str, str], str] = Once(_register, op.REGISTERING)


def _as_registered(forward: op.Op) -> op.Op:
    """A forward pass that takes what the registered op does, of which the last is for gradients."""

    def run(*given: Any, deterministic: bool = False) -> Any:
        return forward(*given)

    return run


class _Eager(torch.autograd.Function):  # type: ignore[misc]
    """The registered op for what torch does not trace, without torch.library's detours."""

    @staticmethod
    def forward(
        ctx: Any, forward: op.Op, backward: op.Op, deterministic: bool, *given: Any
    ) -> tuple[Tensor, Tensor]:
        output: tuple[Tensor, Tensor] = forward(*given)
        ctx.gradients = backward
        _keep(ctx, given, output, deterministic)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        return None, None, None, *ctx.gradients(ctx, dout, dlse)


def _keep_traced(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, bool],
    output: tuple[Tensor, Tensor],
) -> None:
    """Keep what the backward pass needs, of arguments as torch.library names them."""
    _keep(ctx, inputs, output, keyword_only_inputs["deterministic"])


def _keep(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor], deterministic: bool
) -> None:
    """Keep all tensors, of the numbers the scale, and whether dq is to be deterministic."""
    ctx.deterministic = deterministic
    tensors = [x if isinstance(x, Tensor) else None for x in inputs]
    (ctx.scale,) = (x for x in inputs if not (x is None or isinstance(x, Tensor)))
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(slug: str) -> op.Op:
    """What takes back a forward kernel's op, whose last arguments are the kernel's own."""
    taken = tuple(one.name for one in plan_of(slug).signature.positional)

    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *inputs, out, lse = ctx.saved_tensors
        given = dict(zip(taken, inputs, strict=True)) | {"scale": ctx.scale}
        if dout is None:  # only the log-sum-exp was used
            dout = torch.zeros_like(out)
        dlse = None if dlse is None else dlse.contiguous()
        made = gradients(slug, given, dout, out, lse, dlse, deterministic=ctx.deterministic)
        wanted = zip(ctx.needs_input_grad[-len(taken) :], made, strict=False)
        found = [gradient if needed else None for needed, gradient in wanted]
        return *found, *[None] * (len(taken) - len(found))

    return backward


def gradients(
    slug: str,
    given: dict[str, Any],
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of what a forward kernel of this slug computes.

    `given` are its arguments by name, out and lse what it gave. Raises as with_gradient does, and
    where one of them requires a gradient while torch is asked for some.
    """
    q, k = given["q"], given["k"]
    if is_dynamo_compiling():
        choice = _traced_slug(slug, q, k, deterministic)
        compute, _ = op.by_name(_named(slug, q.device, deterministic, choice))
        # where it begins in its storage is not told then
        dout = dout.clone(memory_format=torch.contiguous_format)
    else:
        compute = _gradients_of(slug, out.device, deterministic).op_for(q, k)
        dout = _laid_out(dout)
    dq, dk, dv = compute(dout=dout, **given, out=out, lse=lse, dlse=dlse)
    return dq, dk, dv


def _laid_out(dout: Tensor) -> Tensor:
    """dout as kernels take it: its last dimension contiguous, all else in whole pieces of TMA."""
    step = SM90.tma_alignment // dout.element_size()
    *strides, last = dout.stride()
    # where it begins in its storage, since what torch traces has no address
    if last == 1 and all(along % step == 0 for along in (*strides, dout.storage_offset())):
        return dout
    return dout.clone(memory_format=torch.contiguous_format)
