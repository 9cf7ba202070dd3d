"""Declare every key of a schedule of decoding: its section, values, default."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from fagen.arch import SM90
from fagen.kinds.decode.rules import DEALT, DERIVED, SLUG, rules
from fagen.schedule import Keys, OneOf, Section, derived
from fagen.schedule import Schedule as AnySchedule
from fagen.vocab import MASKS, SIXTEEN_BITS

# rows of 8 columns keep the 16-byte steps that TMA needs
_HEAD_DIM: dict[str, Any] = {"ge": 16, "le": SM90.wgmma_n_max, "multiple_of": 8}


class Decode(Section):
    """What is computed."""

    head_dim: int = Field(description="columns of Q and K", **_HEAD_DIM)
    head_dim_v: int = derived("columns of V and O; head_dim if left out", **_HEAD_DIM)
    dtype: Annotated[str, OneOf(SIXTEEN_BITS)] = Field(description="of Q, K, V and O")
    mask: Annotated[str, OneOf(MASKS)] = Field(description="which keys a query sees")


class Tile(Section):
    """What a unit of work has, and a step of it."""

    rows: int = Field(
        ge=SM90.wgmma_n_step,
        le=SM90.wgmma_m,
        multiple_of=SM90.wgmma_n_step,
        description="of queries, those of a KV head's group for one position after another, at "
        "most; the N of each product",
    )
    block_n: int = Field(
        ge=SM90.wgmma_m,
        le=2 * SM90.wgmma_m,
        multiple_of=SM90.wgmma_m,
        description="keys of a step",
    )


class Split(Section):
    """How the keys of a sequence are parted."""

    chunks: int = Field(
        default=16,
        ge=1,
        le=128,
        description="that a sequence's keys are cut into, at most: equally long ones, in whole "
        "blocks of keys, by its own length alone",
    )
    by: Annotated[str, OneOf(DEALT)] = Field(
        default="turn",
        description='how chunks are dealt to thread blocks: "turn": to each in turn; "run": as '
        "many that follow each other, which it folds in registers, from a tile's first one on. "
        "Bits are the same",
    )


class Pipeline(Section):
    """How loads run ahead of the arithmetic."""

    stages: int = derived(
        "buffers of the ring in which blocks of K and V alternate; up to 12 of what fits if left "
        "out, of two thread blocks an odd number from 5 on",
        ge=3,
        le=24,
    )
    q_stages: int = derived(
        "buffers of the queries' rows; 2 if left out, 1 of more than 32 rows", ge=1, le=2
    )


class Softmax(Section):
    """How maxima of rows are found."""

    maximum: Annotated[str, OneOf(("lazy", "unified"))] = Field(
        default="lazy",
        description='what P is relative to: "lazy": a maximum that the row has in some block; '
        '"unified": a number for each head that the caller gives, and where a row of a chunk is '
        "much larger or much smaller its own maximum (FlashDecoding++)",
    )
    speculate: bool = derived(
        "P is computed with the maxima of the steps before, and again where scores have outgrown "
        "them by 2^8; else that is asked first. True if left out, false of more than 32 rows, "
        "which leave no registers for it"
    )


class Grid(Section):
    """How thread blocks share a multiprocessor."""

    blocks: int = derived(
        "thread blocks of a multiprocessor; 2 if left out, 1 of more than 32 rows, of more than 24 "
        "in runs, or where they would have fewer than 4 buffers each",
        ge=1,
        le=4,
    )


class Build(Section):
    """What the compiler may do."""

    max_spill_bytes: int = Field(
        default=0, ge=0, le=4096, description="bytes per thread that may spill to local memory"
    )


class Schedule(AnySchedule):
    """What is computed and how one multiprocessor is used; every key has its value."""

    kind: ClassVar[str] = "decode"

    decode: Decode
    tile: Tile
    split: Split = Split()
    pipeline: Pipeline = Pipeline()
    softmax: Softmax = Softmax()
    grid: Grid = Grid()
    build: Build = Build()

    keys: ClassVar[Keys] = Keys(
        tables={
            "decode": Decode,
            "tile": Tile,
            "split": Split,
            "pipeline": Pipeline,
            "softmax": Softmax,
            "grid": Grid,
            "build": Build,
        },
        derived=DERIVED,
        rules=rules,
        slug=SLUG,
    )

    def columns(self) -> dict[str, str]:
        """Return what a list of schedules shows of this one."""
        asked, tile = self.decode, self.tile
        own_v = "" if asked.head_dim_v == asked.head_dim else f"/{asked.head_dim_v}"
        return {
            "dtype": asked.dtype,
            "head_dim": f"{asked.head_dim}{own_v}",
            "mask": asked.mask,
            "tile": f"{tile.rows}x{tile.block_n}",
        }
