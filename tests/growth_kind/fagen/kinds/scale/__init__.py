"""Scaling: a tensor times a number."""

from fagen.kind import Kind
from fagen.kinds.scale.keys import Schedule
from fagen.kinds.scale.plan import plan
from fagen.records import Bandwidth, RoundingError

KIND = Kind(
    name="scale",
    schedule=Schedule,
    plan=plan,
    errors=RoundingError,
    speeds=Bandwidth,
    emulate="fagen.kinds.scale.emulate:compute",
    verification="fagen.kinds.scale.verify:VERIFICATION",
)
