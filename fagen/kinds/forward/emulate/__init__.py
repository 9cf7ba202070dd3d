"""A Plan and tensors in, what its kernel computes out: its tiles, order and roundings, in torch.

Beside it the reference in fp64 that both are measured against. Everything works on any device.
"""

from fagen.kinds.forward.emulate.fp8 import emulate_fp8
from fagen.kinds.forward.emulate.tiles import emulate
from fagen.kinds.forward.reference import reference

__all__ = ["emulate", "emulate_fp8", "reference"]
