"""Quantisers: fp16 or bf16 tensors become e4m3 ones with descales, rotated if asked."""

from fagen.kind import Kind
from fagen.kinds.quantize.keys import Schedule
from fagen.kinds.quantize.plan import plan
from fagen.records import Bandwidth, RoundingError

KIND = Kind(
    name="quantize",
    schedule=Schedule,
    plan=plan,
    errors=RoundingError,
    speeds=Bandwidth,
    emulate="fagen.kinds.quantize.emulate:compute",
    verification="fagen.kinds.quantize.verify:VERIFICATION",
)
