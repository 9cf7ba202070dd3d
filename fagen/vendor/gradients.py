"""A folder's kernels in, which of them compute the gradients of others' results, and how, out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fagen.dispatch.select import buildable
from fagen.errors import ScheduleError
from fagen.problem import Problem
from fagen.registry import from_slug
from fagen.schedule import Schedule
from fagen.signature import Scalar, Signature
from fagen.vocab import BACKWARD, FORWARD

if TYPE_CHECKING:
    from fagen.vendor.contents import Kernel

PREFIX = "d"  # an argument or result called so is the gradient of the tensor whose name follows


@dataclass(frozen=True)
class Gradient:
    """A kernel of a folder, and the one there that computes the gradients of what it gives.

    Where the folder has none, `backward` is None and `missing` the slug of one that would.
    `repeating` is one that gives the same bits in each call, which may be `backward` too.
    """

    forward: "Kernel"
    backward: "Kernel | None"
    repeating: "Kernel | None"
    missing: str

    @property
    def passed(self) -> tuple[str, ...]:
        """What `backward` takes of a call, by name: its arguments, results and their gradients."""
        assert self.backward
        return passed(self.backward.signature, self.forward.signature)

    @property
    def suffix(self) -> str:
        """The form of the call in a name of Python: none of sequences of one length."""
        return self.forward.signature.form.title().replace(" ", "")

    @property
    def arity(self) -> int:
        """How many arguments the call takes."""
        return len(self.forward.signature.arguments)

    @property
    def differentiated(self) -> tuple[str, ...]:
        """The inputs of a call whose gradients it gives, in its order."""
        assert self.backward
        return tuple(tensor.name.removeprefix(PREFIX) for tensor in self.backward.signature.outputs)

    @property
    def results(self) -> tuple[str, ...]:
        """The gradients of the call's results that it takes."""
        return tuple(f"{PREFIX}{tensor.name}" for tensor in self.forward.signature.outputs)

    @property
    def optional(self) -> tuple[str, ...]:
        """Those of them that may be left out, where the loss is of other results alone."""
        assert self.backward
        return tuple(t.name for t in self.backward.signature.inputs if t.may_be_none)

    @property
    def numbers(self) -> tuple[str, ...]:
        """The numbers of the call."""
        return tuple(scalar.name for scalar in self.forward.signature.numbers)

    @property
    def missing_repeating(self) -> str:
        """The slug of one like `backward`, or `missing`, with the same bits in each call."""
        schedule = self.backward.schedule if self.backward else from_slug(self.missing)
        return schedule.but(deterministic=True).slug


def gradients_of(kernels: Sequence["Kernel"]) -> Mapping[str, Gradient]:
    """Return by slug the kernels whose results have gradients, by one of them or by another."""
    by_slug = {}
    for forward in kernels:
        every = [kernel for kernel in kernels if differentiates(kernel.schedule, forward.schedule)]
        repeating = (kernel for kernel in every if Problem.of(kernel.schedule).deterministic)
        missing = "" if every else gradients_slug(forward.schedule)
        if every or missing:
            backward = next(iter(every), None)
            by_slug[forward.slug] = Gradient(forward, backward, next(repeating, None), missing)
    return by_slug


def differentiates(backward: Schedule, forward: Schedule) -> bool:
    """Whether kernels of `backward` compute the gradients of what those of `forward` give."""
    if backward.kind != BACKWARD or forward.kind != FORWARD:
        return False
    return replace(Problem.of(backward), kind=FORWARD, deterministic=False) == Problem.of(forward)


def gradients_slug(schedule: Schedule) -> str:
    """Return the slug of the kernel that fagen would take for that, "" where there is none."""
    if schedule.kind != FORWARD:
        return ""
    try:
        return buildable(replace(Problem.of(schedule), kind=BACKWARD)).schedules[0].slug
    except ScheduleError:
        return ""


def passed(backward: Signature, forward: Signature) -> tuple[str, ...]:
    """Return what the kernel of gradients takes of a call: its arguments by their names.

    Each is an argument or a result of the call, or the gradient of a result. What else it has is
    left to its default.
    """
    results = [tensor.name for tensor in forward.outputs]
    available = {argument.name for argument in forward.arguments} | {*results}
    available |= {f"{PREFIX}{name}" for name in results}
    for argument in backward.arguments:
        if isinstance(argument, Scalar):
            free = argument.default is not None
        else:
            free = argument.may_be_none
        assert free or argument.name in available, f"{backward.kind}: {argument.name} is of no call"
    return tuple(argument.name for argument in backward.arguments if argument.name in available)
