"""The parts of a forward kernel: what keys of a schedule mean for its text and its memory.

Slots: tiles (who deals them), keys (which of them a tile sees), loads (how Q, K and V come), values
(how V lies), scores (softmax), steps (in which order GEMMs and softmax run), output (how O leaves).
"""

from functools import cache
from typing import Any

from fagen.part import Part, Parts
from fagen.schedule import Values

# the keys that choose parts; sizes are none of them
CHOSEN = (
    *("dtype", "mask", "lengths", "order", "cluster", "producer", "v_layout", "num_splits"),
    *("scales", "scale_rows", "v_scales", "maximum", "sum", "promote", "promote_columns"),
    *("totals", "rescale_threshold", "p_offset"),
    *("intra_warpgroup", "inter_warpgroup", "output", "out_dtype"),
)

# the order of members of SharedStorage and of Params, by name: machine code holds their offsets
LAYOUT: tuple[str, ...] = ()


def parts(values: Values) -> Parts:
    """Return the parts of a kernel with these values of a schedule's keys."""
    return _parts(*(values[key] for key in CHOSEN))


@cache
def _parts(*choices: Any) -> Parts:
    values = dict(zip(CHOSEN, choices, strict=True))
    slots = tiles, keys, loads, v, scores, steps, output
    return Parts(tuple(slot(values) for slot in slots), LAYOUT)


def tiles(values: Values) -> Part:
    """Who deals tiles."""
    return Part()


def keys(values: Values) -> Part:
    """Which keys a tile sees."""
    return Part()


def loads(values: Values) -> Part:
    """How Q, K and V come into shared memory."""
    return Part()


def v(values: Values) -> Part:
    """How V lies, and what it is multiplied by."""
    return Part()


def scores(values: Values) -> Part:
    """How scores become P."""
    return Part()


def steps(values: Values) -> Part:
    """In which order GEMMs and softmax run."""
    return Part()


def output(values: Values) -> Part:
    """How O leaves."""
    return Part()
