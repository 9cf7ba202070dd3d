"""A Binary goes in, torch.ops.fagen.<slug> comes out; `emulated` runs a slug's Plan on CPU tensors.

What an op takes and gives is its Plan's signature; `<slug>_without_<output>` leaves an output out.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.compiler import is_compiling

from fagen.build import Binary
from fagen.errors import BuildError, FagenError
from fagen.kind import Plan, load_named
from fagen.registry import kind, plan_of
from fagen.runtime.c_interface import info_of, library_at
from fagen.runtime.checks import allocated, checked
from fagen.runtime.once import Once

Op = Callable[..., Any]

# A kernel by name, as torch.compile is told of it: its slug; its op's name; what ends that of the
# op which leaves an output out, "" where there is none; how a gradient is refused where the op does
# not.
Named = tuple[str, str, str, str]

REGISTERING = RLock()  # torch is told of ops one after the other
_alone: dict[Op, Op] = {}
_below: dict[Op, Op] = {}
_ops = torch.library.Library("fagen", "FRAGMENT")


def load(binary: Binary) -> Op:
    """Register `binary` as torch.ops.fagen.<slug> and return the op.

    It takes and returns what its Plan's signature says (docs/call.md has tables): tensors on one
    device, and beside it there is fagen.<slug>_without_<output> for `alone`. On CPU tensors it is
    emulated. The op raises ValueError that names a wrong argument, also where a gradient would be
    needed. From any thread, as often as you like: the second time costs nothing.

    Raises FagenError where this process has another source under the slug, BuildError where there
    is no binding or it does not load.
    """
    source, op = _loaded.get(binary.slug) or _loaded.made(binary.slug, binary)
    if source != binary.source_hash:
        raise FagenError(
            f"{binary.slug}: this process has loaded source {source[:12]} under that name, so "
            f"{binary.source_hash[:12]} cannot be another op: use a new process, or "
            "runtime.c_interface.bind, which registers nothing"
        )
    return op


def _load(slug: str, binary: Binary) -> tuple[str, Op]:
    op = _register(binary)
    _below[op] = _called_below(slug)
    for tensor in plan_of(slug).signature.omittable:
        variant = f"{slug}_without_{tensor.name}"
        _alone[op] = first = getattr(torch.ops.fagen, variant).default
        _below[first] = _called_below(variant)
    return binary.source_hash, op


_loaded: Once[str, tuple[str, Op]] = Once(_load, REGISTERING)  # slug → hash of its source, op


def alone(op: Op) -> Op:
    """Return what gives the first output only: of a loaded kernel an op that costs less."""
    return _alone.get(op) or _first_of(op)


def _first_of(op: Op) -> Op:
    def first(*given: Any, **named: Any) -> Tensor:
        result: Tensor = op(*given, **named)[0]
        return result

    return first


def direct(op: Op) -> Op:
    """Return what does as `alone`, sooner, for a call that torch neither traces nor transforms.

    It takes all its arguments by place, too. It refuses no gradient: its output requires one where
    `alone` would have refused.
    """
    return below(alone(op))


def below(op: Op) -> Op:
    """Return what does as `op`, sooner, for a call that torch neither traces nor transforms.

    It refuses no gradient, and computes none: it is for who does.
    """
    return _below.get(op, op)


def named(slug: str, place: str) -> Named:
    """Tell of a ready kernel by name, on devices of a type."""
    signature = plan_of(slug).signature
    if place == "cpu":
        emulated(slug)
        return slug, f"{slug}_emulated", "", f"fagen::{slug}: {signature.gradient_refused}"
    ends = [f"_without_{tensor.name}" for tensor in signature.omittable]
    return slug, slug, "".join(ends[:1]), ""


def by_name(found: Named) -> tuple[Op, Op]:
    """Return the op of a kernel and what is `alone` of it: all of this torch.compile can trace."""
    _, name, end, refused = found
    op = getattr(torch.ops.fagen, name).default
    if refused:
        op = _refusing(op, refused)
    return op, getattr(torch.ops.fagen, f"{name}{end}").default if end else _first_of(op)


def _called_below(name: str) -> Op:
    """Return what torch.ops.fagen.<name> calls once no gradient is needed, less a Python call."""
    op = getattr(torch.ops.fagen, f"{name}_no_grad").default
    return getattr(op, "_op", op)  # type: ignore[no-any-return]


def _register(binary: Binary) -> Op:
    if binary.binding is None:
        raise BuildError(
            f"{binary.slug} was built without its torch binding: build it again where torch is "
            "installed"
        )
    try:
        torch.ops.load_library(binary.binding)
    except OSError as error:
        raise BuildError(f"{binary.binding} does not load: {error}") from error
    linked = info_of(binary.binding, binary.slug).source_hash
    if linked != binary.source_hash:  # the loader took a library of the same name for it
        raise BuildError(
            f"{binary.binding} was linked to source {linked[:12]}, not {binary.source_hash[:12]}: "
            "use a new process"
        )
    tell = library_at(binary.binding)[f"fagen_{binary.slug}_refused"]

    def telling(outputs: Callable[..., Any], *given: Any, **named: Any) -> Any:
        try:
            return outputs(*given, **named)
        except ValueError as refusal:
            tell(str(refusal).encode())  # the op calls this through C, which loses exceptions
            raise

    of = plan_of(binary.slug)
    emulated(binary.slug)  # what the op calls on CPU tensors
    for end, fake in fakes(of).items():
        for name in (f"{binary.slug}{end}", f"{binary.slug}{end}_no_grad"):
            torch.library.register_fake(f"fagen::{name}", partial(telling, fake), lib=_ops)
    return getattr(torch.ops.fagen, binary.slug).default  # type: ignore[no-any-return]


def fakes(of: Plan) -> dict[str, Callable[..., Any]]:
    """Return what makes outputs without numbers, by the end of an op's name."""

    def fake(*given: Any, **named: Any) -> Any:
        return _single(_traced(of, given, named))

    def fewer(*given: Any, **named: Any) -> Any:
        made = _traced(of, given, named)
        outputs = of.signature.outputs
        kept = [one for one, of_it in zip(made, outputs, strict=True) if not of_it.omittable]
        return _single(tuple(kept))

    variants = {f"_without_{tensor.name}": fewer for tensor in of.signature.omittable}
    return {"": fake, **variants}


def _traced(of: Plan, given: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return outputs without numbers, or refuse: what torch asks while it traces."""
    arguments = _named(of, given, named)
    return allocated(of, arguments, checked(of, arguments, have_data=False))


def _named(of: Plan, given: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name; those left out are None or their default."""
    arguments = of.signature.arguments
    names = [argument.name for argument in arguments]
    defaults = {argument.name: getattr(argument, "default", None) for argument in arguments}
    return {**defaults, **dict(zip(names, given, strict=False)), **named}


def _single(made: tuple[Tensor, ...]) -> Any:
    return made if len(made) > 1 else made[0]


# ---- emulated ops --------------------------------------------------------------------------------


def emulated(slug: str) -> Op:
    """Return torch.ops.fagen.<slug>_emulated, the Plan computed in torch on CPU tensors.

    It takes and returns what the kernel's op does, all by place where torch lets it.
    Raises ScheduleError where it is no slug.
    """
    return _emulated.get(slug) or _emulated.made(slug)


def _emulate(slug: str) -> Op:
    of = plan_of(slug)
    compute = load_named(kind(of.kind).emulate)
    name = f"{slug}_emulated"

    def run(*given: Any, **named: Any) -> Any:
        arguments = _named(of, given, named)
        checked(of, arguments)
        # a caller's autocast would round what kernels sum in fp32
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                return compute(of, **arguments)
        except (MemoryError, RuntimeError) as error:
            if told := _too_large(slug, arguments, error):
                raise told from None
            raise

    _ops.define(f"{name}({of.signature.asked_by_place}) -> {of.signature.returns}")
    _ops.impl(name, run, "CPU")
    torch.library.register_fake(f"fagen::{name}", fakes(of)[""], lib=_ops)
    return getattr(torch.ops.fagen, name).default  # type: ignore[no-any-return]


def _too_large(slug: str, given: Mapping[str, Any], error: Exception) -> MemoryError | None:
    """Return how much memory an emulation asked for in vain, and for what; else None."""
    asked = _ALLOCATING.search(str(error))
    if not asked and not isinstance(error, MemoryError):
        return None
    much = f"{int(asked[1]):,} bytes at once" if asked else "more memory than there is"
    shapes = (f"{n} {tuple(x.shape)}" for n, x in given.items() if isinstance(x, Tensor))
    return MemoryError(
        f"fagen::{slug}: on CPU tensors the kernel is emulated, which took {much} for "
        f"{', '.join(shapes)}: call it for fewer sequences or heads, or on a Hopper GPU"
    )


_ALLOCATING = re.compile(r"tried to allocate (\d+) bytes")
_emulated: Once[str, Op] = Once(_emulate, REGISTERING)


def emulation(slug: str) -> Op:
    """Return what is called as the op of this slug on CPU tensors; ValueError for a gradient."""
    run = emulated(slug)
    return _refusing(run, f"fagen::{slug}: {plan_of(slug).signature.gradient_refused}")


def _refusing(op: Op, why: str) -> Op:
    """Return an op that raises ValueError where a gradient would be needed."""

    def refusing(*given: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            tensors = [one for one in (*given, *named.values()) if isinstance(one, Tensor)]
            if any(map(_requires_gradient, tensors)):
                raise ValueError(why)
        return op(*given, **named)

    return refusing


def _requires_gradient(tensor: Tensor) -> bool:
    """Whether a tensor does, or what torch.func has wrapped in it."""
    while not tensor.requires_grad and not is_compiling() and is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return bool(tensor.requires_grad)
