"""Two schedules in, whether one computes the gradients of the other's results, and by what call."""

from dataclasses import replace

from fagen.dispatch.select import buildable
from fagen.errors import ScheduleError
from fagen.problem import Problem
from fagen.schedule import Schedule
from fagen.signature import Scalar, Signature
from fagen.vocab import BACKWARD, FORWARD

PREFIX = "d"  # an argument or result called so is the gradient of the tensor whose name follows


def problem_of(by: Schedule) -> Problem:
    """Return the problem whose gradients a schedule computes."""
    return replace(Problem.of(by), kind=FORWARD, deterministic=False)


def differentiates(by: Schedule, of: Schedule) -> bool:
    """Whether kernels of `by` compute the gradients of what those of `of` give."""
    if by.kind != BACKWARD or of.kind != FORWARD:
        return False
    return problem_of(by) == Problem.of(of)


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
