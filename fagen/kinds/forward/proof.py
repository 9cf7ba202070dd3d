"""How attention's kernels are proved: errors against fp64, and speed beside cuDNN's."""

from collections.abc import Callable
from dataclasses import replace

from fagen.build import Binary
from fagen.kinds.forward.accuracy import check, kernel_error, simulated
from fagen.kinds.forward.operands import alike, arguments, launch, outputs
from fagen.kinds.forward.plan import Plan
from fagen.kinds.forward.varlen_accuracy import (
    check_cases,
    kernel_of,
    small_cases,
    verification_cases,
)
from fagen.measure.card import hopper
from fagen.measure.cells import compare, speeds
from fagen.measure.proof import Proof, Trial
from fagen.measure.timing import BURST, SUSTAINED
from fagen.problem import standard_sizes
from fagen.records import ShapeError, Speed

Say = Callable[[str], None]

# Two sustained rounds, one in each order: with hundreds of kernels seconds of each count.
_REGIMES = (replace(SUSTAINED, rounds=2), BURST)


def _errors(plan: Plan, binary: Binary, progress: Say | None) -> tuple[ShapeError, ...]:
    if plan.varlen:
        hopper()
        kernel = kernel_of(plan, binary.library)
        return check_cases(plan, verification_cases(plan), kernel, progress=progress)
    return check(plan, binary, progress=progress)


def _simulated(
    plan: Plan, run: Callable[..., None], progress: Say | None
) -> tuple[ShapeError, ...]:
    if plan.varlen:
        cases = small_cases(plan)
        return check_cases(plan, cases, lambda given: run(**given), device="cpu", progress=progress)
    return simulated(plan, run, progress)


def _speeds(plan: Plan, binary: Binary, progress: Say | None) -> tuple[Speed, ...]:
    sizes = standard_sizes(plan.head_dim)
    return speeds(compare(plan, binary, sizes, regimes=_REGIMES, progress=progress))


TRIAL = Trial(
    arguments=arguments,
    outputs=lambda of, given: outputs(of, given[0]),
    launch=launch,
    alike=alike,
    error=kernel_error,
)
PROOF = Proof(_errors, _speeds, TRIAL, _simulated)
