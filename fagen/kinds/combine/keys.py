"""Declare every key of a schedule of combining: the partial outputs and the output.

[combine]
dtype = "fp32"        # of the partial outputs: fp32 | fp16 | bf16
head_dim = 128        # columns of V, a multiple of 8
out_dtype = "bf16"    # as dtype if left out
layout = "dense"      # or "varlen": rows of all sequences one after the other
"""

from typing import Annotated, ClassVar

from pydantic import Field

from fagen.kinds.combine.rules import DERIVED, FORMER, SLUG
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


class Schedule(AnySchedule):
    """What is combined; every key has its value."""

    kind: ClassVar[str] = "combine"

    combine: Combine

    keys: ClassVar[Keys] = Keys(
        tables={"combine": Combine}, derived=DERIVED, slug=SLUG, former=FORMER
    )

    def columns(self) -> dict[str, str]:
        """Return what a list of schedules shows of this one."""
        keys = self.combine
        return {
            "dtype": keys.dtype,
            "head_dim": f"{keys.head_dim}",
            "mask": "",
            "tile": "",
        }
