"""Combining: partial outputs of several splits of the keys become one output, with one LSE."""

from fagen.kind import Kind
from fagen.kinds.combine.keys import Schedule
from fagen.kinds.combine.plan import plan
from fagen.records import MergeBandwidth, MergeError

KIND = Kind(
    name="combine",
    schedule=Schedule,
    plan=plan,
    errors=MergeError,
    speeds=MergeBandwidth,
    emulate="fagen.kinds.combine.emulate:compute",
    verification="fagen.kinds.combine.verify:VERIFICATION",
)
