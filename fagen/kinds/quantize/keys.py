"""Declare every key of a quantiser's schedule: the input, its rotation, its scales, its layout.

[quantize]
dtype = "fp16"        # of the input: fp16 | bf16
head_dim = 128        # a multiple of 16
rotary = "none"       # rotary embedding before all else: "halves" | "pairs" of columns
rotate = true         # by random signs and a Hadamard matrix: outliers are spread out
center = false        # less the means of columns over all rows of a head
scales = "block"      # one per "tensor", "head", "column" of a head, or "block" of scale_rows rows
scale_rows = 64
layout = "rows"       # row-major, as the input | "columns": transposed, as the PV GEMM reads V
"""

from typing import Annotated, ClassVar

from pydantic import Field

from fagen.kinds.quantize.rules import DERIVED, FORMER, SLUG, block_rows, rules
from fagen.schedule import Keys, OneOf, Section, derived
from fagen.schedule import Schedule as AnySchedule
from fagen.vocab import (
    QUANTIZED_SCALES,
    ROTARIES,
    SCALE_ROWS,
    SCALE_ROWS_DEFAULT,
    SIXTEEN_BITS,
    V_LAYOUTS,
)


class Quantize(Section):
    """What is quantised, and how."""

    dtype: Annotated[str, OneOf(SIXTEEN_BITS)] = Field(description="of the input")
    head_dim: int = Field(ge=16, le=256, multiple_of=16, description="columns")
    rotary: Annotated[str, OneOf(ROTARIES)] = Field(
        default="none",
        description="RoPE first: pairs of columns half a row apart, or neighbours",
    )
    rotate: bool = Field(
        default=False,
        description="random signs and a Hadamard matrix, block-diagonal where head_dim is no "
        "power of two",
    )
    center: bool = Field(
        default=False,
        description="subtract the means of a head's columns over its rows, after the rotation",
    )
    scales: Annotated[str, OneOf(QUANTIZED_SCALES)] = Field(
        default="block",
        description="what shares a scale: a head, a tensor, a block of scale_rows rows, or, for "
        "V, a column of a head",
    )
    scale_rows: Annotated[int, OneOf(SCALE_ROWS)] = derived(
        f'rows per scale, with scales = "block"; {SCALE_ROWS_DEFAULT} by default'
    )
    layout: Annotated[str, OneOf(V_LAYOUTS)] = Field(
        default="rows",
        description='"rows": row-major, as the input; "columns": transposed, in the key order '
        "of P, for V",
    )


class Schedule(AnySchedule):
    """What a quantiser does; every key has its value."""

    kind: ClassVar[str] = "quantize"

    quantize: Quantize

    keys: ClassVar[Keys] = Keys(
        tables={"quantize": Quantize}, derived=DERIVED, rules=rules, slug=SLUG, former=FORMER
    )

    def columns(self) -> dict[str, str]:
        """Return what a list of schedules shows of this one."""
        keys = self.quantize
        return {
            "dtype": keys.dtype,
            "head_dim": f"{keys.head_dim}",
            "mask": "",
            "tile": f"{block_rows(self.values())} rows",
        }
