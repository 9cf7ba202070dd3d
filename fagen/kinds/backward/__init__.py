"""Attention's backward pass: the gradients of Q, K and V from that of the output."""

from fagen.kind import Kind
from fagen.kinds.backward.defaults import derived
from fagen.kinds.backward.keys import Schedule
from fagen.kinds.backward.plan import plan
from fagen.records import GradientError, Speed

KIND = Kind(
    name="backward",
    schedule=Schedule,
    plan=plan,
    errors=GradientError,
    speeds=Speed,
    emulate="fagen.kinds.backward.emulate:compute",
    verification="fagen.kinds.backward.verify:VERIFICATION",
    space="fagen.kinds.backward.space:SPACE",
    derive=derived,
)
