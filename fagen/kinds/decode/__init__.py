"""Decoding: attention of a few queries over many keys, whose splits thread blocks share."""

from fagen.kind import Kind
from fagen.kinds.decode.defaults import (
    MANY_KEYS,
    Tile,
    counted_keys,
    deal_for,
    derived,
    num_splits_for,
    rows_for,
    steps,
    tile_for,
)
from fagen.kinds.decode.keys import Schedule
from fagen.kinds.decode.plan import plan
from fagen.records import DecodeError, DecodeSpeed

__all__ = [
    "KIND",
    "MANY_KEYS",
    "Tile",
    "counted_keys",
    "deal_for",
    "derived",
    "num_splits_for",
    "rows_for",
    "tile_for",
]

KIND = Kind(
    name="decode",
    schedule=Schedule,
    plan=plan,
    errors=DecodeError,
    speeds=DecodeSpeed,
    emulate="fagen.kinds.decode.emulate:compute",
    verification="fagen.kinds.decode.verify:VERIFICATION",
    space="fagen.kinds.decode.space:SPACE",
    steps=steps,
)
