"""How attention's kernels are proved: errors against fp64, and speed beside cuDNN's."""

from collections.abc import Callable
from dataclasses import replace

from fagen.build import Binary
from fagen.kinds.forward import accuracy, varlen_accuracy
from fagen.kinds.forward.operands import alike, arguments, launch, outputs
from fagen.kinds.forward.plan import Plan
from fagen.kinds.forward.shapes import LONG_KEYS
from fagen.measure.cells import compare, speeds
from fagen.measure.proof import Proof, Trial
from fagen.measure.sequences import quick_sizes
from fagen.measure.timing import BURST, SUSTAINED
from fagen.problem import standard_sizes
from fagen.records import ShapeError, Speed

Say = Callable[[str], None]

# Two sustained rounds, one in each order: with hundreds of kernels seconds of each count.
_REGIMES = (replace(SUSTAINED, rounds=2), BURST)


def _errors(plan: Plan, binary: Binary, progress: Say | None) -> tuple[ShapeError, ...]:
    if plan.varlen:
        return varlen_accuracy.check(plan, binary, progress)
    return accuracy.check(plan, binary, progress=progress)


def _simulated(
    plan: Plan, run: Callable[..., None], progress: Say | None
) -> tuple[ShapeError, ...]:
    if plan.varlen:
        return varlen_accuracy.simulated(plan, run, progress)
    return accuracy.simulated(plan, run, progress)


def _speeds(plan: Plan, binary: Binary, progress: Say | None) -> tuple[Speed, ...]:
    sizes = LONG_KEYS if plan.splits else standard_sizes(plan.head_dim)
    peers = ["cudnn"] + ["fa2"] * plan.splits  # which splits the keys too
    return speeds(compare(plan, binary, sizes, peers=peers, regimes=_REGIMES, progress=progress))


TRIAL = Trial(
    arguments=arguments,
    outputs=lambda of, given: outputs(of, given[0]),
    launch=launch,
    alike=alike,
    error=accuracy.kernel_error,
)
PACKED = replace(TRIAL, error=varlen_accuracy.trial_error, quick=quick_sizes)
PROOF = Proof(_errors, _speeds, TRIAL, _simulated, PACKED)
