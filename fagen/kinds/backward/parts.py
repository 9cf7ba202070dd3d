"""The parts of a backward kernel: what keys of a schedule mean for its text and its memory.

Slots: tiles (who deals them), keys (which rows see them), loads (how Q, K, V and dO come), scores
(P and dS), steps (in which order GEMMs run), sums (how dQ is added up and rounded), outputs (how dK
and dV leave).
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from fagen.kinds.backward.rules import dq_transposed, ones_in_shared_memory
from fagen.part import Part, Parts
from fagen.schedule import Values

# the keys that choose parts, and what rules make of others; sizes are none of them
CHOSEN = (
    *("dtype", "mask", "lengths", "deterministic", "persistent", "cluster"),
    *("partition", "dq_by", "kept", "intra_warpgroup", "under_dp", "postprocess"),
)
RULES: Mapping[str, Callable[[Values], Any]] = {
    "ones_in_shared_memory": ones_in_shared_memory,
    "dq_transposed": dq_transposed,
}

# the order of members of SharedStorage and of Params, by name: machine code holds their offsets
LAYOUT: tuple[str, ...] = ()


def parts(values: Values) -> Parts:
    """Return the parts of a kernel with these values of a schedule's keys."""
    chosen = (values[key] for key in CHOSEN)
    return _parts(*chosen, *(rule(values) for rule in RULES.values()))


@cache
def _parts(*choices: Any) -> Parts:
    values = dict(zip((*CHOSEN, *RULES), choices, strict=True))
    slots = tiles, keys, loads, scores, steps, sums, outputs
    return Parts(tuple(slot(values) for slot in slots), LAYOUT)


def tiles(values: Values) -> Part:
    """Who deals tiles."""
    return Part()


def keys(values: Values) -> Part:
    """Which rows see a tile's keys."""
    return Part()


def loads(values: Values) -> Part:
    """How Q, K, V and dO come into shared memory."""
    return Part()


def scores(values: Values) -> Part:
    """How scores become P, and P and dP become dS."""
    return Part()


def steps(values: Values) -> Part:
    """In which order GEMMs run, and who runs them."""
    return Part()


def sums(values: Values) -> Part:
    """How dQ is added up, and rounded."""
    return Part()


def outputs(values: Values) -> Part:
    """How dK and dV leave."""
    return Part()
