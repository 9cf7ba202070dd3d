"""Kernels in, errors against fp64 and times beside their peers out: what needs a Hopper GPU."""

from fagen.measure.card import hopper
from fagen.measure.cells import bench, compare
from fagen.measure.peers import PEERS, installed
from fagen.measure.rows import Row, table, write_rows
from fagen.measure.timing import BURST, REGIMES, SUSTAINED
from fagen.measure.verification import verify

__all__ = [
    "BURST",
    "PEERS",
    "REGIMES",
    "SUSTAINED",
    "Row",
    "bench",
    "compare",
    "hopper",
    "installed",
    "table",
    "verify",
    "write_rows",
]
