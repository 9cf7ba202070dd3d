"""Decoding: attention of a few queries over many keys, whose chunks thread blocks share."""

from fagen.kind import Kind
from fagen.kinds.decode.defaults import chunks_for, deal_for, derived, rows_for, sized, steps
from fagen.kinds.decode.keys import Schedule
from fagen.kinds.decode.plan import plan
from fagen.records import DecodeError, DecodeSpeed

__all__ = ["KIND", "chunks_for", "deal_for", "derived", "rows_for"]

KIND = Kind(
    name="decode",
    schedule=Schedule,
    plan=plan,
    errors=DecodeError,
    speeds=DecodeSpeed,
    emulate="fagen.kinds.decode.emulate:compute",
    proof="fagen.kinds.decode.verify:PROOF",
    space="fagen.kinds.decode.space:SPACE",
    sized=sized,
    steps=steps,
)
