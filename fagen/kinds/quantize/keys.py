"""Declare every key of a quantiser's schedule: the input, its rotation, its scales, its layout."""

from typing import Annotated, ClassVar

from pydantic import Field

from fagen.kinds.quantize.rules import KEYS, block_rows
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
    keys: ClassVar[Keys] = KEYS

    quantize: Quantize

    @property
    def tile_words(self) -> str:
        """The rows of a thread block, as a list of schedules shows them."""
        return f"{block_rows(self.values())} rows"
