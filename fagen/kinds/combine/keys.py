"""Declare every key of a schedule of combining: the partial outputs and the output."""

from typing import Annotated, ClassVar

from pydantic import Field

from fagen.kinds.combine.rules import KEYS
from fagen.kinds.sinks import NO_SINK, SINK_KEY, SINK_WORDS
from fagen.schedule import Keys, OneOf, Section, derived
from fagen.schedule import Schedule as AnySchedule
from fagen.vocab import LAYOUTS, PARTIALS


class Combine(Section):
    """What is combined."""

    dtype: Annotated[str, OneOf(PARTIALS)] = Field(description="of the partial outputs")
    head_dim: int = Field(ge=8, le=512, multiple_of=8, description="columns of V")
    out_dtype: Annotated[str, OneOf(PARTIALS)] = derived("of the output; dtype by default")
    layout: Annotated[str, OneOf(LAYOUTS)] = Field(
        default="dense",
        description='"dense": (batch, seqlen) rows; "varlen": sequences of different lengths, '
        "each with its own number of splits",
    )
    sink: Annotated[str, OneOf(SINK_WORDS)] = Field(default=NO_SINK, description=SINK_KEY)


class Schedule(AnySchedule):
    """What is combined; every key has its value."""

    kind: ClassVar[str] = "combine"
    keys: ClassVar[Keys] = KEYS

    combine: Combine
