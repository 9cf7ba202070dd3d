"""Evidence: that this very source ran on a GPU, right and how fast.

`<slug>.json` beside the kernel goes in and out; `faults` checks generated/ against a fresh
rendering. Needs neither torch nor a GPU.
"""

from fagen.evidence.audit import Fault, faults, of_source, renew, staleness
from fagen.evidence.store import (
    UNVERIFIED,
    Evidence,
    Excuse,
    evidence_path,
    home,
    launchers,
    need_room,
    outlived,
    place,
    read,
    read_excuses,
    rendered_hash,
    write,
)
from fagen.records import Bandwidth, RoundingError, ShapeError, Speed

__all__ = [
    "UNVERIFIED",
    "Bandwidth",
    "Evidence",
    "Excuse",
    "Fault",
    "RoundingError",
    "ShapeError",
    "Speed",
    "evidence_path",
    "faults",
    "home",
    "launchers",
    "need_room",
    "of_source",
    "outlived",
    "place",
    "read",
    "read_excuses",
    "rendered_hash",
    "renew",
    "staleness",
    "write",
]
