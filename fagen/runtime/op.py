"""A Binary goes in, torch.ops.fagen.<slug> comes out; `emulated` runs a slug's Plan on CPU tensors.

What an op takes and gives is its Plan's signature; `<slug>_without_<output>` leaves an output out.
"""

import ctypes
import re
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from threading import RLock
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C import _is_tracing
from torch._C._functorch import (
    get_unwrapped,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
)
from torch.compiler import is_compiling

from fagen.arch import SM90
from fagen.build import Binary, build
from fagen.errors import BuildError, DeviceError, FagenError, RefusedBuild
from fagen.kind import Plan, load_named
from fagen.registry import kind, plan, plan_of
from fagen.render import render
from fagen.runtime.c_interface import info_of, library_at
from fagen.runtime.checks import allocated, checked
from fagen.schedule import Schedule
from fagen.signature import Tensor as Expected

Op = Callable[..., Any]

REGISTERING = RLock()  # torch is told of ops one after the other
_ops = torch.library.Library("fagen", "FRAGMENT")


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Once(dict[Key, Value]):
    """A cache whose values are made once each, whichever thread asks first; the others wait for it.

    What is there is read as of any dict, without a lock: `cache.get(key) or cache.made(key)`. By
    `lock` one value is made at a time, of all caches that share it.
    """

    def __init__(
        self, make: Callable[..., Value], lock: AbstractContextManager[Any] | None = None
    ) -> None:
        super().__init__()
        self.make = make
        self._lock = lock
        self._making: dict[Key, AbstractContextManager[Any]] = {}

    def made(self, key: Key, *more: Any) -> Value:
        """Return the value of a key, by `make(key, *more)` where there is none yet.

        What that raises reaches who asked; the next one tries again.
        """
        with self._lock or self._making.setdefault(key, RLock()):
            if key not in self:
                self[key] = self.make(key, *more)
        return self[key]


class Named(NamedTuple):
    """A kernel by name, as torch.compile is told of it."""

    slug: str
    op: str  # the name of its op
    ends: str  # what that of the op which leaves an output out ends with, "" where there is none
    refusal: str  # how a gradient is refused where the op does not
    placed: int  # how many arguments the op takes by place
    keywords: tuple[str, ...]  # the others
    scale: float  # what a call of attention means that leaves it out
    gradients_by: str  # the public call that has gradients of it


@dataclass(slots=True)  # read soonest
class Kernel:
    """A kernel that is loaded, or emulated, and the ways into it: all take arguments by place.

    `op` gives all outputs and `out_only` the first: torch can trace, transform and record them, and
    they refuse a gradient. `below` and `direct` do the same sooner, for a call of which torch does
    none of that; where an output of theirs requires a gradient, the others would have refused.
    """

    slug: str
    op: Op
    out_only: Op
    below: Op
    direct: Op
    scale: float
    gradients_by: str
    plan: Plan | None = None  # None where torch.compile has told of it by name alone
    # of a call's sizes the node of gradients, by whether these have one order; None is of any sizes
    numbers: dict[bool, int] | None = None

    def of_sizes(self) -> "Kernel":
        """Return the same for calls of some sizes, whose nodes it can keep."""
        ways = self.op, self.out_only, self.below, self.direct
        return Kernel(self.slug, *ways, self.scale, self.gradients_by, self.plan, {})

    def results(self, *arguments: Any) -> Any:
        """Return all outputs, the sooner way if that will do."""
        if not (is_compiling() or _is_tracing() or peek_interpreter_stack()):
            results = self.below(*arguments)
            if not results[0].requires_grad:
                return results
        return self.op(*arguments)


def ready(
    schedules: Sequence[Schedule],
    device: torch.device,
    *,
    not_ready: str,
    progress: Callable[[str], None] | None = None,
) -> Kernel:
    """Return the kernel of the first of these schedules that builds: on a CPU the first, emulated.

    One that spills is passed over for the next, and the cache remembers that it does. On each
    device it is built and loaded once; `progress` is called with a line before what takes long.
    Raises FagenError, in words that begin with `not_ready`, where a CUDA graph is captured and it
    is not ready; DeviceError where the device is no Hopper GPU; RefusedBuild where none is left;
    ToolchainError and BuildError where it cannot be built.
    """
    if device.type == "cpu":
        return kernel_of(plan(schedules[0]), "cpu")
    if device.type != "cuda":
        raise DeviceError(
            f"tensors are on {device}; a kernel runs on a Hopper GPU, or on a CPU emulated"
        )
    refuse_other_than_hopper(device)
    *others, last = schedules
    for schedule in others:
        try:
            return _built.made((schedule.slug, device), schedule, not_ready, progress)
        except RefusedBuild:
            if progress:
                progress(f"{schedule.slug} spills; trying the next")
    return _built.made((last.slug, device), last, not_ready, progress)


def _build(
    slug_and_device: tuple[str, torch.device],
    schedule: Schedule,
    not_ready: str,
    progress: Callable[[str], None] | None,
) -> Kernel:
    if torch.cuda.is_current_stream_capturing():
        raise FagenError(
            f"{not_ready}{schedule.slug} cannot be built while a CUDA graph is captured"
        )
    planned = plan(schedule)
    load(build(render(planned), planned, binding=True, progress=progress))
    return kernel_of(planned, "cuda")


# on each device a first call has work to do
_built: Once[tuple[str, torch.device], Kernel] = Once(_build)


def forget() -> None:
    """Forget what was built; what is registered with torch stays so."""
    _built.clear()


def run_once(plan: Plan, device: torch.device, op: Op | None = None) -> None:
    """Run a kernel with all sizes 1, so that whatever it has to do once is done."""
    signature = plan.signature
    sizes = dict.fromkeys((size.name for size in signature.sizes), 1)
    arguments: dict[str, Any] = {scalar.name: 1 for scalar in signature.numbers}
    for tensor in signature.inputs:
        if not tensor.may_be_none or tensor.missing:
            shape = [dim.extent.at(sizes) for dim in tensor.dims]
            dtype = getattr(torch, tensor.dtype.torch)
            arguments[tensor.name] = torch.zeros(shape, device=device).to(dtype)
    with torch.no_grad():
        (op or getattr(torch.ops.fagen, plan.slug).default)(**arguments)


def refuse_other_than_hopper(device: torch.device) -> None:
    """Raise DeviceError for a GPU that no kernel runs on."""
    capability = torch.cuda.get_device_capability(device)
    if capability != SM90.capability:
        raise DeviceError(
            f"{device} is a {torch.cuda.get_device_name(device)} of compute capability "
            f"{capability[0]}.{capability[1]}, and kernels are machine code for Hopper (9.0); "
            "tensors on the CPU are computed by an emulation of the same schedule"
        )


def load(binary: Binary) -> Op:
    """Register `binary` as torch.ops.fagen.<slug> and return the op.

    It takes and returns what its Plan's signature says (docs/call.md has tables): tensors on one
    device, and beside it there is fagen.<slug>_without_<output>, `out_only`. On CPU tensors it is
    emulated. The op raises ValueError that names a wrong argument, also where a gradient would be
    needed. From any thread, as often as you like: the second time costs nothing.

    Raises FagenError where this process has another source under the slug, BuildError where there
    is no binding or it does not load.
    """
    loaded, op = _loaded.get(binary.slug) or _loaded.made(binary.slug, binary)
    if loaded.source_hash != binary.source_hash:
        raise FagenError(
            f"{binary.slug}: this process has loaded source {loaded.source_hash[:12]} under that "
            "name, so "
            f"{binary.source_hash[:12]} cannot be another op: use a new process, or "
            "runtime.c_interface.bind, which registers nothing"
        )
    return op


def _load(_: str, binary: Binary) -> tuple[Binary, Op]:
    return binary, _register(binary)


_loaded: Once[str, tuple[Binary, Op]] = Once(_load, REGISTERING)  # by slugs, with their ops


def viewed(slug: str) -> int:
    """Return where the function is that computes as a loaded op does, of C++ alone; 0: nowhere."""
    binary, _ = _loaded[slug]
    if not (binary.binding and binary.plan.signature.is_viewed):
        return 0
    function = library_at(binary.binding)[f"fagen_{slug}_viewed"]
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def out_only(op: Op) -> Op:
    """Return what gives the first output only: of a loaded kernel an op that costs less."""
    slug = getattr(op, "__name__", "").partition(".")[0]
    is_loaded = slug in _loaded and _loaded[slug][1] is op
    ends = named(_loaded[slug][0].plan, "cuda").ends if is_loaded else ""
    return getattr(torch.ops.fagen, f"{slug}{ends}").default if ends else _first_of(op)


def _first_of(op: Op) -> Op:
    def first(*arguments: Any, **named: Any) -> Tensor:
        result: Tensor = op(*arguments, **named)[0]
        return result

    return first


def kernel_of(plan: Plan, place: str) -> Kernel:
    """Return the ways into a kernel on devices of a type: loaded, or on CPUs emulated."""
    name = named(plan, place)
    kernel = replace(traced_kernel(name), plan=plan)
    if place == "cpu":
        return kernel
    below = _called_below(plan.slug), _called_below(f"{plan.slug}{name.ends}")
    if _names_some(plan):
        below = _by_place(below[0], name), _by_place(below[1], name)
    return replace(kernel, below=below[0], direct=below[1])


def _names_some(plan: Plan) -> bool:
    """Whether an op must be given some arguments by name, also where torch lets it be otherwise."""
    return "*" in plan.signature.asked_by_place


def named(plan: Plan, place: str) -> Named:
    """Tell of a ready kernel by name, on devices of a type."""
    slug, signature, scale = plan.slug, plan.signature, getattr(plan, "head_dim", 1) ** -0.5
    placed = len(signature.positional)
    by_name = tuple(argument.name for argument in signature.arguments[placed:])
    if place == "cpu":
        emulated(plan)
        refusal = f"fagen::{slug}: {signature.gradient_refused}"
        name = slug, f"{slug}_emulated", "", refusal
        by_name = by_name if _names_some(plan) else ()
    else:
        ends = [f"_without_{tensor.name}" for tensor in signature.omittable]
        name = slug, slug, "".join(ends[:1]), ""
    return Named(*name, placed, by_name, scale, signature.gradients_by)


def traced_kernel(name: Named) -> Kernel:
    """Return the ways into a kernel that torch.compile can trace."""
    op = _by_place(getattr(torch.ops.fagen, name.op).default, name)
    first = _first_of(op)
    if name.ends:
        first = _by_place(getattr(torch.ops.fagen, f"{name.op}{name.ends}").default, name)
    return Kernel(name.slug, op, first, op, first, name.scale, name.gradients_by)


def _by_place(op: Op, name: Named) -> Op:
    """Return an op that takes all arguments by place, and refuses gradients."""
    if name.refusal:
        op = _refusing(op, name.refusal)
    if not name.keywords:
        return op
    placed, keywords = name.placed, name.keywords

    def call(*arguments: Any) -> Any:
        more = dict(zip(keywords, arguments[placed:], strict=False))
        return op(*arguments[:placed], **more)

    return call


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

    def telling(outputs: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            return outputs(*arguments, **named)
        except ValueError as refusal:
            tell(str(refusal).encode())  # the op calls this through C, which loses exceptions
            raise

    emulated(binary.plan)  # what the op calls on CPU tensors
    for end, fake in fakes(binary.plan).items():
        for name in (f"{binary.slug}{end}", f"{binary.slug}{end}_no_grad"):
            torch.library.register_fake(f"fagen::{name}", partial(telling, fake), lib=_ops)
    return getattr(torch.ops.fagen, binary.slug).default  # type: ignore[no-any-return]


def fakes(plan: Plan) -> dict[str, Callable[..., Any]]:
    """Return what makes outputs without numbers, or refuses, by the end of an op's name."""
    signature = plan.signature

    def fake(kept: Container[Expected], *by_place: Any, **named: Any) -> Any:
        arguments = _named(plan, by_place, named)
        outputs = allocated(plan, arguments, checked(plan, arguments, have_data=False))
        pairs = zip(outputs, signature.outputs, strict=True)
        some = tuple(output for output, expected in pairs if expected in kept)
        return some if len(some) > 1 else some[0]

    kept = {"": signature.outputs}
    kept |= {f"_without_{tensor.name}": signature.kept for tensor in signature.omittable}
    return {end: partial(fake, outputs) for end, outputs in kept.items()}


def _named(plan: Plan, by_place: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name; those left out are None or their default."""
    arguments = plan.signature.arguments
    names = [argument.name for argument in arguments]
    defaults = {argument.name: getattr(argument, "default", None) for argument in arguments}
    return {**defaults, **dict(zip(names, by_place, strict=False)), **named}


# ---- emulated ops --------------------------------------------------------------------------------


def emulated(plan: Plan | str) -> Op:
    """Return torch.ops.fagen.<slug>_emulated, a Plan computed in torch on CPU tensors.

    It takes and returns what the kernel's op does, all by place where torch lets it.
    Raises ScheduleError for a word that is no slug.
    """
    slug = plan if isinstance(plan, str) else plan.slug
    return _emulated.get(slug) or _emulated.made(slug, plan)


def _emulate(slug: str, plan: Plan | str) -> Op:
    plan = plan_of(plan) if isinstance(plan, str) else plan
    compute = load_named(kind(plan.kind).emulate)
    name = f"{slug}_emulated"

    def run(*by_place: Any, **named: Any) -> Any:
        arguments = _named(plan, by_place, named)
        checked(plan, arguments)
        # a caller's autocast would round what kernels sum in fp32
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                return compute(plan, **arguments)
        except (MemoryError, RuntimeError) as error:
            if refusal := _too_large(slug, arguments, error):
                raise refusal from None
            raise

    _ops.define(f"{name}({plan.signature.asked_by_place}) -> {plan.signature.returns}")
    _ops.impl(name, run, "CPU")
    torch.library.register_fake(f"fagen::{name}", fakes(plan)[""], lib=_ops)
    return getattr(torch.ops.fagen, name).default  # type: ignore[no-any-return]


def _too_large(slug: str, call: Mapping[str, Any], error: Exception) -> MemoryError | None:
    """Return how much memory an emulation asked for in vain, and for what; else None."""
    allocation = _ALLOCATING.search(str(error))
    if not allocation and not isinstance(error, MemoryError):
        return None
    much = f"{int(allocation[1]):,} bytes at once" if allocation else "more memory than there is"
    shapes = (f"{n} {tuple(x.shape)}" for n, x in call.items() if isinstance(x, Tensor))
    return MemoryError(
        f"fagen::{slug}: on CPU tensors the kernel is emulated, which took {much} for "
        f"{', '.join(shapes)}: call it for fewer sequences or heads, or on a Hopper GPU"
    )


_ALLOCATING = re.compile(r"tried to allocate (\d+) bytes")
_emulated: Once[str, Op] = Once(_emulate, REGISTERING)


def _refusing(op: Op, why: str) -> Op:
    """Return an op that raises ValueError where a gradient would be needed."""

    def refusing(*arguments: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            tensors = [x for x in (*arguments, *named.values()) if isinstance(x, Tensor)]
            if any(map(_requires_gradient, tensors)):
                raise ValueError(why)
        return op(*arguments, **named)

    return refusing


def _requires_gradient(tensor: Tensor) -> bool:
    """Whether a tensor does, or what torch.func has wrapped in it."""
    while not tensor.requires_grad and not is_compiling() and is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return bool(tensor.requires_grad)
