"""How attention's kernels are proved: errors against fp64, and speed beside cuDNN's."""

from collections.abc import Callable
from dataclasses import replace

from fagen.build import Binary
from fagen.kinds.forward.operands import alike, arguments, launch, outputs
from fagen.kinds.forward.plan import Plan
from fagen.kinds.forward.shapes import LONG_KEYS
from fagen.kinds.forward.verify import dense, varlen
from fagen.measure.cells import compare, speeds
from fagen.measure.sequences import quick_sizes
from fagen.measure.timing import BURST, SUSTAINED
from fagen.measure.verification import Contender, Rule, Verification
from fagen.problem import standard_sizes
from fagen.records import Speed

Say = Callable[[str], None]

# Two sustained rounds, one in each order: with hundreds of kernels seconds of each count.
_REGIMES = (replace(SUSTAINED, rounds=2), BURST)


def rule(plan: Plan) -> Rule:
    """The rule for kernels of one length, or of sequences of their own lengths."""
    return varlen.RULE if plan.varlen else dense.RULE


def _speeds(plan: Plan, binary: Binary, progress: Say | None) -> tuple[Speed, ...]:
    sizes = LONG_KEYS if plan.splits else standard_sizes(plan.head_dim)
    peers = ["cudnn"] + ["fa2"] * plan.splits  # which splits the keys too
    return speeds(compare(plan, binary, sizes, peers=peers, regimes=_REGIMES, progress=progress))


CONTENDER = Contender(
    arguments=arguments,
    outputs=lambda of, given: outputs(of, given[0]),
    launch=launch,
    alike=alike,
    error=dense.kernel_error,
)
VARLEN = replace(CONTENDER, error=varlen.contender_error, quick=quick_sizes)
VERIFICATION = Verification(rule, _speeds, CONTENDER, VARLEN)
