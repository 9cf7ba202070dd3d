"""Evidence: that this very source ran on a GPU, right and how fast.

A line of a ledger for each committed schedule goes in and out, or a file in a user's folder;
`faults` checks generated/ against fresh renderings. Needs neither torch nor a GPU.
"""

from fagen.evidence.audit import FLAGS, faults, is_current, of_source, renew, staleness
from fagen.evidence.record import Evidence
from fagen.evidence.store import (
    UNVERIFIED,
    Line,
    Rendering,
    drop,
    forms,
    launchers,
    need_room,
    note,
    outlived,
    read,
    read_excuses,
    read_line,
    write,
)

__all__ = [
    "FLAGS",
    "UNVERIFIED",
    "Evidence",
    "Line",
    "Rendering",
    "drop",
    "faults",
    "forms",
    "is_current",
    "launchers",
    "need_room",
    "note",
    "of_source",
    "outlived",
    "read",
    "read_excuses",
    "read_line",
    "renew",
    "staleness",
    "write",
]
