"""How attention's kernels are proved: errors against fp64, and speed beside cuDNN's."""

from dataclasses import replace

from fagen.build import Binary
from fagen.kinds.forward.operands import alike, arguments, launch, outputs
from fagen.kinds.forward.plan import Plan
from fagen.kinds.forward.shapes import LONG_KEYS
from fagen.kinds.forward.verify import dense, varlen
from fagen.kinds.verification import Say, beside_peers
from fagen.measure.sequences import quick_sizes
from fagen.measure.verification import Contender, Rule, Verification
from fagen.problem import standard_sizes
from fagen.records import Speed


def rule(plan: Plan) -> Rule:
    """The rule for kernels of one length, or of sequences of their own lengths."""
    return varlen.RULE if plan.varlen else dense.RULE


def _speeds(plan: Plan, binary: Binary, progress: Say | None) -> tuple[Speed, ...]:
    if plan.num_splits > 1:  # beside who splits the keys too
        return beside_peers(plan, binary, LONG_KEYS, progress, ("cudnn", "fa2"))
    return beside_peers(plan, binary, standard_sizes(plan.head_dim), progress)


CONTENDER = Contender(
    arguments=arguments,
    outputs=lambda plan, arguments: outputs(plan, arguments[0]),
    launch=launch,
    alike=alike,
    error=dense.kernel_error,
)
VARLEN = replace(CONTENDER, error=varlen.contender_error, quick=quick_sizes)
VERIFICATION = Verification(rule, _speeds, CONTENDER, VARLEN)
