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

    Where the folder has none, `by` is None and `wanted` the slug of one that would. `repeating` is
    one that gives the same bits in each call, which may be `by` too.
    """

    of: "Kernel"
    by: "Kernel | None"
    repeating: "Kernel | None"
    wanted: str

    @property
    def passed(self) -> tuple[str, ...]:
        """What `by` takes of a call: its arguments, results and the gradients of these, by name."""
        assert self.by
        return passed(self.by.signature, self.of.signature)

    @property
    def suffix(self) -> str:
        """The form of the call in a name of Python: none of sequences of one length."""
        return self.of.signature.form.title().replace(" ", "")

    @property
    def taken(self) -> int:
        """How many arguments the call takes."""
        return len(self.of.signature.arguments)

    @property
    def given(self) -> tuple[str, ...]:
        """The inputs of a call whose gradients it gives, in its order."""
        assert self.by
        return tuple(tensor.name.removeprefix(PREFIX) for tensor in self.by.signature.outputs)

    @property
    def results(self) -> tuple[str, ...]:
        """The gradients of the call's results that it takes."""
        return tuple(f"{PREFIX}{tensor.name}" for tensor in self.of.signature.outputs)

    @property
    def optional(self) -> tuple[str, ...]:
        """Those of them that may be left out, where the loss is of other results alone."""
        assert self.by
        return tuple(t.name for t in self.by.signature.inputs if t.may_be_none)

    @property
    def numbers(self) -> tuple[str, ...]:
        """The numbers of the call."""
        return tuple(scalar.name for scalar in self.of.signature.numbers)

    @property
    def repeating_wanted(self) -> str:
        """The slug of a kernel that does as `by`, or `wanted`, with the same bits in each call."""
        by = self.by.schedule if self.by else from_slug(self.wanted)
        return by.but(deterministic=True).slug


def gradients_of(kernels: Sequence["Kernel"]) -> Mapping[str, Gradient]:
    """Return by slug the kernels whose results have gradients, by one of them or by another."""
    by_slug = {}
    for of in kernels:
        every = [kernel for kernel in kernels if differentiates(kernel.schedule, of.schedule)]
        repeating = (one for one in every if Problem.of(one.schedule).deterministic)
        lacking = "" if every else wanted(of.schedule)
        if every or lacking:
            by = next(iter(every), None)
            by_slug[of.slug] = Gradient(of, by, next(repeating, None), lacking)
    return by_slug


def differentiates(by: Schedule, of: Schedule) -> bool:
    """Whether kernels of `by` compute the gradients of what those of `of` give."""
    if by.kind != BACKWARD or of.kind != FORWARD:
        return False
    return replace(Problem.of(by), kind=FORWARD, deterministic=False) == Problem.of(of)


def wanted(of: Schedule) -> str:
    """Return the slug of the kernel that fagen would take for that, "" where there is none."""
    if of.kind != FORWARD:
        return ""
    try:
        return buildable(replace(Problem.of(of), kind=BACKWARD)).schedules[0].slug
    except ScheduleError:
        return ""


def passed(by: Signature, of: Signature) -> tuple[str, ...]:
    """Return what the kernel of gradients takes of a call: its arguments by their names.

    Each is an argument or a result of the call, or the gradient of a result. What else it has is
    left to its default.
    """
    results = [tensor.name for tensor in of.outputs]
    there = {argument.name for argument in of.arguments} | {*results}
    there |= {f"{PREFIX}{name}" for name in results}
    for argument in by.arguments:
        if isinstance(argument, Scalar):
            free = argument.default is not None
        else:
            free = argument.may_be_none
        assert free or argument.name in there, f"{by.kind}: {argument.name} is of no call"
    return tuple(one.name for one in by.arguments if one.name in there)
