"""Declare every key of a schedule of decoding: its section, values, default."""

from typing import Annotated, ClassVar

from pydantic import Field

from fagen.arch import SM90
from fagen.expr.words import MASKS as NAMED_MASKS
from fagen.expr.words import PLAIN
from fagen.kinds.attention import HEAD_DIM, SCORE_KEY
from fagen.kinds.decode.rules import DEALT, KEYS
from fagen.kinds.scores import Build
from fagen.kinds.sinks import NO_SINK, SINK_KEY, SINK_WORDS
from fagen.schedule import Keys, Known, OneOf, Section, derived
from fagen.schedule import Schedule as AnySchedule
from fagen.scores import NAMED as NAMED_SCORES
from fagen.vocab import CACHES, MASKS, SCORES, SIXTEEN_BITS


class Decode(Section):
    """What is computed."""

    head_dim: int = Field(description="columns of Q and K", **HEAD_DIM)
    head_dim_v: int = derived("columns of V and O; head_dim by default", **HEAD_DIM)
    dtype: Annotated[str, OneOf(SIXTEEN_BITS)] = Field(description="of Q, K, V and O")
    mask: Annotated[str, Known(MASKS, NAMED_MASKS)] = Field(
        description="which keys a query sees; causal is aligned to the bottom right"
    )
    score: Annotated[str, Known(SCORES, NAMED_SCORES)] = Field(default=PLAIN, description=SCORE_KEY)
    sink: Annotated[str, OneOf(SINK_WORDS)] = Field(default=NO_SINK, description=SINK_KEY)
    cache: Annotated[str, OneOf(CACHES)] = Field(
        default=CACHES[0],
        description='"dense": each sequence has its own rows of K and V; "paged": K and V are '
        "pages, of a size that calls have, and a block table lists those of each sequence",
    )


class Tile(Section):
    """What a unit of work has, and a step of it."""

    rows: int = Field(
        ge=SM90.wgmma_n_step,
        le=SM90.wgmma_m,
        multiple_of=SM90.wgmma_n_step,
        description="query rows of a tile, at most: queries times heads per KV head; N of each "
        "wgmma",
    )
    kv_heads: int = Field(
        default=1,
        ge=1,
        le=2,
        description="KV heads of a tile, each with so many rows: 2 read whole lines of L2 where "
        "heads share some",
    )
    block_n: int = Field(
        ge=SM90.wgmma_m,
        le=2 * SM90.wgmma_m,
        multiple_of=SM90.wgmma_m,
        description="keys per step",
    )


class Split(Section):
    """How the keys of a sequence are parted."""

    num_splits: int = Field(
        default=16,
        ge=1,
        le=128,
        description="splits of a sequence's keys (split-KV), at most: equal ones in whole "
        "blocks, by the sequence's own length",
    )
    by: Annotated[str, OneOf(DEALT)] = Field(
        default="round_robin",
        description='how splits are scheduled: "round_robin", one after the other over thread '
        'blocks; "stream_k", consecutive ones per thread block, combined in registers (stream-K). '
        "Bits are the same",
    )


class Pipeline(Section):
    """How loads run ahead of the arithmetic."""

    stages: int = derived(
        "buffers of the ring in which blocks of K and V alternate; by default up to "
        "12 of what fits, with two thread blocks an odd number from 5 on",
        ge=3,
        le=24,
    )
    q_stages: int = derived(
        "buffers of Q; 2 by default, 1 above 32 rows and in stream-K above 16", ge=1, le=2
    )


class Softmax(Section):
    """How maxima of rows are found."""

    maximum: Annotated[str, OneOf(("lazy", "fixed"))] = Field(
        default="lazy",
        description='"lazy": the row max is updated only where scores outgrow it; "fixed": '
        "given by the caller per head, with a fallback per row (FlashDecoding++)",
    )
    speculate: bool = derived(
        "compute P from the row max of earlier steps, and again where scores have "
        "outgrown it by 2^8; by default up to 32 rows"
    )


class Grid(Section):
    """How thread blocks share an SM."""

    blocks: int = derived(
        "thread blocks per SM; by default 2, and 1 above 32 rows, above 24 in stream-K of wide "
        "heads, or where they would have fewer than 4 buffers each",
        ge=1,
        le=4,
    )


class Schedule(AnySchedule):
    """What is computed and how one SM is used; every key has its value."""

    kind: ClassVar[str] = "decode"
    keys: ClassVar[Keys] = KEYS

    decode: Decode
    tile: Tile
    split: Split = Split()
    pipeline: Pipeline = Pipeline()
    softmax: Softmax = Softmax()
    grid: Grid = Grid()
    build: Build = Build()
