"""Declare the keys of scaling."""

from typing import Annotated, ClassVar

from pydantic import Field

from fagen.schedule import Code, Keys, OneOf, Section, SlugForm
from fagen.schedule import Schedule as AnySchedule
from fagen.vocab import SIXTEEN_BITS


class Scale(Section):
    """What is scaled."""

    dtype: Annotated[str, OneOf(SIXTEEN_BITS)] = Field(description="of the tensor")
    head_dim: int = Field(ge=8, le=256, multiple_of=8, description="columns")
    threads: int = Field(default=128, ge=32, le=256, multiple_of=32, description="of a block")


class Schedule(AnySchedule):
    """What is scaled; every key has its value."""

    kind: ClassVar[str] = "scale"
    scale: Scale
    keys: ClassVar[Keys] = Keys(
        tables={"scale": Scale},
        derived={},
        rules=lambda keys: iter(()),
        slug=SlugForm("scale_{dtype}_d{head_dim}", (Code("threads", "t"),), "scale_fp16_d64"),
    )
