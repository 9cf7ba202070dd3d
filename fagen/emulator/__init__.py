"""A Plan and tensors in, what its kernel computes out: its tiles, order and roundings, in torch.

Beside it the reference in fp64 that both are measured against, and what makes fp8 tensors of
others. Everything works on any device.
"""

from fagen.emulator.exact import reference
from fagen.emulator.fp8 import emulate_fp8
from fagen.emulator.quantisation import (
    KEY_ORDER,
    Quantised,
    by_columns,
    by_rows,
    quantise,
    random_signs,
    rotate,
    to_e4m3,
)
from fagen.emulator.tiles import emulate

__all__ = [
    "KEY_ORDER",
    "Quantised",
    "by_columns",
    "by_rows",
    "emulate",
    "emulate_fp8",
    "quantise",
    "random_signs",
    "reference",
    "rotate",
    "to_e4m3",
]
