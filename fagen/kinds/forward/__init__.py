"""Attention's forward pass: softmax(scale · Q Kᵀ) V and the log-sum-exp of each row."""

from fagen.kind import Kind
from fagen.kinds.forward.defaults import derived_schedules
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import plan
from fagen.records import ShapeError, Speed

KIND = Kind(
    name="forward",
    schedule=Schedule,
    plan=plan,
    errors=ShapeError,
    speeds=Speed,
    emulate="fagen.kinds.forward.emulate:compute",
    verification="fagen.kinds.forward.verify:VERIFICATION",
    space="fagen.kinds.forward.space:SPACE",
    derive=derived_schedules,
)
