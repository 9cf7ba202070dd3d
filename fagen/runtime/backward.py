"""A kernel and a call's arguments in, its results out: with gradients where they are asked for.

A call that torch does not trace goes by a node of autograd's graph in C++. What is traced, and all
where that cannot be built, goes by `torch.ops.fagen.<slug>_with_grad`, which is registered with
Autograd: torch.compile traces both passes as one op each; so do calls that give more than the
scale, to a mask or a score. Either keeps q, k, v, out and the log-sum-exp, of varlen sequences also
their offsets, and what is given, and nothing else.

Which kernel computes the gradients, dispatch tables say as they do for attention itself: by the
sizes of q and k, of varlen sequences by what one has of them in the mean, and by whether the call
wanted it deterministic, or torch does when the backward pass runs.
"""

import ctypes
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_tracing
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from fagen.arch import SM90
from fagen.build.autograd import build_autograd
from fagen.errors import FagenError, ScheduleError
from fagen.kind import Plan
from fagen.kinds.backward.signature import order_of
from fagen.kinds.scores import rules_of_slopes
from fagen.problem import Problem
from fagen.registry import plan_of
from fagen.runtime import op
from fagen.runtime.argument_types import flag, refuse_tangents
from fagen.runtime.call import (
    MOST_KNOWN,
    CallKey,
    Door,
    Ready,
    Sizes,
    known_calls,
    traced,
    untraced,
)
from fagen.runtime.op import Kernel, Named, Once
from fagen.vocab import BACKWARD

_ops = torch.library.Library("fagen", "FRAGMENT")
_LOGGER = logging.getLogger("fagen")


def results(
    call: str,
    kernel: Kernel,
    arguments: tuple[Any, ...],
    return_lse: bool,
    deterministic: bool = False,
    named: Named | None = None,
) -> Any:
    """Return out, with return_lse (out, lse), of a public call: by what torch can trace if `named`.

    Of a `call` that is "" no gradient is computed.

    `arguments` are the op's, the first three q, k and v. Raises ValueError where a gradient would
    be needed that no kernel computes, and what readying one of gradients raises.
    """
    if deterministic is not False:
        deterministic = flag("deterministic", deterministic)
    if forward_ad._current_level >= 0:
        refuse_tangents(*arguments[:3])
    plain = named is None and not (_is_tracing() or peek_interpreter_stack())
    if call and is_grad_enabled() and (plain or named):
        q, k, v = arguments[:3]
        needed = q.requires_grad or k.requires_grad or v.requires_grad
        for more in () if needed else arguments[4:]:  # sinks
            needed |= isinstance(more, Tensor) and more.requires_grad
        if needed and kernel.gradients_by == call:
            number = None
            if kernel.numbers:
                in_order = deterministic or torch.are_deterministic_algorithms_enabled()
                number = kernel.numbers.get(in_order)
            if number is None:  # else all is known of such a call
                offsets = arguments[4] if q.dim() == 3 else None
                if named:
                    _traced(kernel.slug, q, k, offsets, deterministic)
                else:
                    number = _numbered(kernel, q, k, offsets, deterministic)
            if number is not None:
                way = _node[len(arguments) > 4]
                both = way(number, deterministic, return_lse, *arguments)
            else:
                name = _registered_for(kernel.slug, q.device.type)
                with_grad = getattr(torch.ops.fagen, name).default
                both = with_grad(*arguments, deterministic=deterministic)
            return both if return_lse else both[0]
    if plain:
        if return_lse:
            both = kernel.below(*arguments)
            if not both[0].requires_grad:
                return both
        else:
            out = kernel.direct(*arguments)
            if not out.requires_grad:
                return out
    # refuses a gradient
    return (kernel.op if return_lse else kernel.out_only)(*arguments)


# ---- which kernel --------------------------------------------------------------------------------


def _key(slug: str, device: torch.device, deterministic: bool) -> CallKey:
    """The key of gradients of what a forward kernel computes: in order if torch now wants that."""
    problem = Problem.of(plan_of(slug).schedule)
    return CallKey(
        device, replace(problem, kind=BACKWARD, deterministic=_in_order(device, deterministic))
    )


def _in_order(device: torch.device, deterministic: bool) -> bool:
    """Whether sums are to have one order, where a usual kernel's dq has not."""
    is_asked = bool(deterministic or torch.are_deterministic_algorithms_enabled())
    return is_asked and not _has_an_order(device)


def _has_an_order(device: torch.device) -> bool:
    """Whether a usual kernel's dq is the same from call to call: on a GPU it is not."""
    return bool(device.type == "cpu")


def _door(name: str, call: str, prepare: str, noun: str) -> Door:
    not_ready = (
        f"the kernels of the backward pass are not ready: call {prepare}(…, gradient=True{{more}}) "
        f"first, or {call}(…) once with tensors of this {noun} that require a gradient; "
    )
    return Door(name, _key, not_ready, "the gradients of {}", call)


_DENSE = _door("gradients", "fagen.attention", "fagen.prepare", "dtype, head dim, device and size")
_PACKED = _door(
    "gradients_varlen",
    "fagen.attention_varlen",
    "fagen.prepare_varlen",
    "dtype, head dim and device",
)


def _sizes(q: Tensor, k: Tensor, offsets: Tensor | None) -> Sizes:
    if q.dim() == 4:
        return q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1]
    number = 1 if offsets is None else offsets.shape[0] - 1
    number = number if number > 0 else 1
    mean_q, mean_k = (-(-tensor.shape[0] // number) for tensor in (q, k))  # of a sequence
    return number, q.shape[1], k.shape[1], mean_q, mean_k


def kernel_of_gradients(
    slug: str,
    device: torch.device,
    q: Tensor,
    k: Tensor,
    offsets: Tensor | None,
    deterministic: bool,
) -> Kernel:
    """Return the kernel of the gradients of a forward kernel, for such q and k, readied if need be.

    `offsets` are those of varlen sequences, of which the number alone counts; without them all are
    taken for one.

    Raises ValueError where none computes them, ScheduleError where a dispatch table is wrong, and
    what readying a kernel raises.
    """
    door, shape = (_DENSE if q.dim() == 4 else _PACKED), q.shape
    known_key = slug, device, _in_order(device, deterministic)
    call = *known_key, shape, k.shape, offsets is None or offsets.shape
    try:
        if kernel := door.known.get(call):
            return kernel
    except TypeError:  # sizes that are left open are no keys
        pass
    ready = door.alike.get(known_key) or door.ready(_key(slug, device, deterministic), known_key)
    return _ready(door, ready, _sizes(q, k, offsets), call, slug)


def _ready(
    door: Door, ready: Ready, sizes: Sizes | None, call: tuple[Any, ...], forward: str, **how: Any
) -> Kernel:
    key, name = ready.key, (forward, ready.key.device.type)
    ready.look_up()
    if name not in _registered:  # for programs that were exported elsewhere
        _registered.made(name)
    try:
        with _with_node(key.device):
            kernel = door.find(ready, sizes, call, **how)
        _number(forward, kernel.slug, key.device)
        return kernel
    except ScheduleError:
        assert key.problem
        faults = rules_of_slopes({"score": key.problem.score, "partition": "gradients"})
        why = next((f"score {sentence}" for _, sentence in faults), "none fits an SM")
        raise ValueError(
            f"q, k or v requires a gradient, and no kernel computes those of {key.problem}: {why}"
            "; call it under torch.no_grad(), or "
            "torch.nn.functional.scaled_dot_product_attention"
        ) from None


def prepare_gradients(
    kernel: Kernel,
    device: torch.device,
    deterministic: bool,
    rows: int | None = None,
    keys: int | None = None,
) -> None:
    """Ready the kernels of a kernel's gradients, for so many query rows and keys; None is any."""
    key = _key(kernel.slug, device, deterministic)
    door = _PACKED if key.problem and key.problem.varlen else _DENSE
    ready = door.ready(key)
    table = ready.look_up()
    for slug in table.slugs(rows, keys) if table else (None,):
        _ready(door, ready, None, (), kernel.slug, slug=slug)


# ---- eager ---------------------------------------------------------------------------------------


def _numbered(
    kernel: Kernel, q: Tensor, k: Tensor, offsets: Tensor | None, deterministic: bool
) -> int | None:
    """Ready the kernel of a kernel's gradients; return the number of both at the node, if any."""
    gradients = kernel_of_gradients(kernel.slug, q.device, q, k, offsets, deterministic)
    number = _numbers.get((kernel.slug, gradients.slug))
    if number is not None and kernel.numbers is not None and not _by_mean(kernel, q, deterministic):
        in_order = deterministic or torch.are_deterministic_algorithms_enabled()
        kernel.numbers[in_order] = number
    return number


def _by_mean(kernel: Kernel, q: Tensor, deterministic: bool) -> bool:
    """Whether it depends on a sequence's mean length: a forward kernel is for all lengths."""
    ready = _PACKED.alike.get((kernel.slug, q.device, _in_order(q.device, deterministic)))
    return q.dim() == 3 and ready is not None and bool(ready.rows and ready.rows.others)


# torch.ops.fagen.attention_with_grad and that of varlen sequences, which do what <slug>_with_grad
# does in less of the host's time; None where they cannot be built. They are for tensors on a GPU:
# others may have no compiler.
_node: list[Any] = []
_numbers: dict[tuple[str, str], int] = {}  # of a kernel and that of its gradients, to the node


class Sooner:
    """fagen.attention by the node's library alone, of sizes that gradients were computed of.

    `attend` takes q, k, v, causal, scale, return_lse and deterministic, and returns None of a call
    that it does not know, or that is out of the ordinary; `key_of` takes the first four. Without
    the library they are None.
    """

    attend: Callable[..., Any] | None = None
    key_of: Callable[..., bytes | None] | None = None

    def remember(self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
        """Have `attend` know of such calls that this is their kernel."""
        if self.key_of and kernel.numbers and len(known_calls) < MOST_KNOWN:
            key = self.key_of(q, k, v, causal)
            if key is not None:
                known_calls[key] = kernel.numbers, kernel.scale


SOONER = Sooner()


@contextmanager
def _with_node(device: torch.device) -> Iterator[None]:
    """Load the node, built beside what is built meanwhile, before the first gradients on a GPU."""
    if _node or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        yield
        return
    with ThreadPoolExecutor(1) as pool:
        built = pool.submit(build_autograd)
        yield
    with op.REGISTERING:
        if _node:
            return
        try:
            _load_node(built.result())
        except (FagenError, OSError) as error:
            _LOGGER.info("gradients go by Python: %s", error)
            _node.append(None)


def _load_node(library: Path | None) -> None:
    torch.ops.load_library(library)
    _ops.define("kernels_anew(str slug, bool deterministic, Tensor q, Tensor k) -> int")
    _ops.impl("kernels_anew", _numbered_anew, "CompositeExplicitAutograd")
    for name in ("attention_with_grad", "attention_varlen_with_grad"):
        op_of_node = getattr(torch.ops.fagen, name).default
        _node.append(_in_cpp(library, "call_sooner", getattr(op_of_node, "_op", op_of_node)))
    attend = _in_cpp(library, "attend_sooner", known_calls)
    if attend is not known_calls:
        SOONER.attend, SOONER.key_of = attend, _in_cpp(library, "key_of_call", known_calls)


def _in_cpp(library: Path | None, name: str, of: Any) -> Any:
    """Return a function of the node's library that is made of something; that where there is none.

    There is none where Python's headers were missing.
    """
    try:
        make = ctypes.PyDLL(str(library))[f"fagen_{name}"]
    except AttributeError:
        return of
    make.argtypes, make.restype = (ctypes.py_object,), ctypes.py_object
    return make(of)


def _number(forward: str, gradients: str, device: torch.device) -> None:
    """Tell the node of a kernel and that of its gradients."""
    if not _node or not _node[0] or (forward, gradients) in _numbers or _is_given_more(forward):
        return
    if device.type == "cuda":
        names = f"fagen::{forward}_no_grad", f"fagen::{gradients}_no_grad", f"fagen::{gradients}"
        viewed = op.viewed(forward), op.viewed(gradients)
        _numbers[forward, gradients] = torch.ops.fagen.number_kernels(*names, forward, *viewed)


def _is_given_more(slug: str) -> bool:
    """Whether a forward kernel takes more than the node knows of: what it gives a mask, a score."""
    given = {argument.name for argument in plan_of(slug).signature.positional}
    return not given <= _KNOWN


_KNOWN = {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "scale", "seqused_k"}


def _numbered_anew(slug: str, deterministic: bool, q: Tensor, k: Tensor) -> int:
    """What the node asks where torch wants another order than when the forward pass ran."""
    gradients = kernel_of_gradients(slug, q.device, q, k, None, deterministic)
    _number(slug, gradients.slug, q.device)
    return _numbers[slug, gradients.slug]


def _laid_out(dout: Tensor) -> Tensor:
    """dout as kernels take it: its last dimension contiguous, all else in whole pieces of TMA."""
    step = SM90.tma_alignment // dout.element_size()
    *strides, last = dout.stride()
    # where it begins in its storage, since what torch traces has no address
    if last == 1 and all(along % step == 0 for along in (*strides, dout.storage_offset())):
        return dout
    return dout.clone(memory_format=torch.contiguous_format)


# ---- by name, as torch.compile traces it ---------------------------------------------------------


def _traced(slug: str, q: Tensor, k: Tensor, offsets: Tensor | None, deterministic: bool) -> Kernel:
    door = "gradients" if q.dim() == 4 else "gradients_varlen"
    return traced(door, _sizes(q, k, offsets), slug, q.device, deterministic)[1]


@untraced
def _registered_for(slug: str, place: str) -> str:
    """Ready the op that has gradients, and return its name."""
    return _registered.get((slug, place)) or _registered.made((slug, place))


def _register(key: tuple[str, str]) -> str:
    """Give the op with gradients the forward kernel on a type of device; return its name."""
    slug, place = key
    name = _defined.get(slug) or _defined.made(slug)
    forward = op.emulated(slug) if place == "cpu" else getattr(torch.ops.fagen, slug).default
    _ops.impl(name, _as_registered(forward), place.upper())
    return name


def _define(slug: str) -> str:
    name, plan = f"{slug}_with_grad", plan_of(slug)
    signature = plan.signature
    schema = f"{signature.asked_in_order}, *, bool deterministic=False"
    _ops.define(f"{name}({schema}) -> {signature.returns}")
    fake = _as_registered(op.fakes(plan)[""])
    torch.library.register_fake(f"fagen::{name}", fake, lib=_ops)
    torch.library.register_autograd(
        f"fagen::{name}", _backward(plan), setup_context=_keep, lib=_ops
    )
    return name


_defined: Once[str, str] = Once(_define, op.REGISTERING)
_registered: Once[tuple[str, str], str] = Once(_register, op.REGISTERING)


def _as_registered(forward: op.Op) -> op.Op:
    """A forward pass that takes what the registered op does, of which the last is for gradients."""

    def run(*arguments: Any, deterministic: bool = False) -> Any:
        return forward(*arguments)

    return run


def _keep(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, bool],
    output: tuple[Tensor, Tensor],
) -> None:
    """Keep all tensors and numbers, and whether dq is to be deterministic."""
    ctx.deterministic = keyword_only_inputs["deterministic"]
    tensors = [x if isinstance(x, Tensor) else None for x in inputs]
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(plan: Plan) -> op.Op:
    """What takes back a forward kernel's op."""
    slug, names = plan.slug, tuple(argument.name for argument in plan.signature.positional)

    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        pairs = zip(tensors, ctx.numbers, strict=True)
        inputs = (number if tensor is None else tensor for tensor, number in pairs)
        arguments = dict(zip(names, inputs, strict=True))
        if dout is None:  # only the log-sum-exp was used
            dout = torch.zeros_like(out)
        dlse = None if dlse is None else dlse.contiguous()
        found = gradients(slug, arguments, dout, out, lse, dlse, deterministic=ctx.deterministic)
        deltas = dict(zip(("q", "k", "v", "sinks"), found, strict=False))
        # of what a call leaves out nothing is said
        needed = dict(zip(names, ctx.needs_input_grad, strict=False))
        return tuple(deltas[name] if name in deltas and needed[name] else None for name in names)

    return backward


@untraced
def _order_of(slug: str) -> tuple[str, ...]:
    """The arguments of the gradients of what a forward kernel computes, by name."""
    forward: Any = plan_of(slug)
    return order_of((forward.mask, forward.score))


def gradients(
    slug: str,
    arguments: dict[str, Any],
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, ...]:
    """Return dq, dk and dv of what a forward kernel of this slug computes, and that of sinks.

    `arguments` are its own by name, out and lse what it gave. Raises as kernel_of_gradients does,
    and where one of them requires a gradient while torch is asked for some.
    """
    q, k, offsets = arguments["q"], arguments["k"], arguments.get("cu_seqlens_k")
    if is_dynamo_compiling():
        kernel = _traced(slug, q, k, offsets, deterministic)
        # where it begins in its storage is not told then
        dout = dout.clone(memory_format=torch.contiguous_format)
    else:
        kernel = kernel_of_gradients(slug, out.device, q, k, offsets, deterministic)
        dout = _laid_out(dout)
    operands = arguments | {"dout": dout, "out": out, "lse": lse, "dlse": dlse}
    found: tuple[Tensor, ...] = kernel.op(
        *(operands[name] for name in _order_of(slug) if name in operands)
    )
    return found
