"""Turn fp16 or bf16 tensors into e4m3 ones with scales: its own schedule and Plan.

The same flow as attention's: a schedule goes in, a Plan comes out, templates/quantize.cu.j2 makes
C++ of it. `fagen.quantizer.reference` says in torch what the kernel computes.
"""

from fagen.quantizer.either import AnySchedule, from_any_slug, parse_any, read_any
from fagen.quantizer.plan import QuantizePlan, plan_quantizer
from fagen.quantizer.schedule import QuantizeSchedule, parse_quantizer, read_quantizer

__all__ = [
    "AnySchedule",
    "QuantizePlan",
    "QuantizeSchedule",
    "from_any_slug",
    "parse_any",
    "parse_quantizer",
    "plan_quantizer",
    "read_any",
    "read_quantizer",
]
