"""Declare every key of a schedule of attention: its section, its values, its default."""

from typing import Annotated, ClassVar

from pydantic import Field

from fagen.arch import SM90
from fagen.expr.words import MASKS as NAMED_MASKS
from fagen.expr.words import PLAIN
from fagen.kinds.attention import HEAD_DIM, SCORE_KEY, registers
from fagen.kinds.forward.rules import KEYS, consumers
from fagen.kinds.scores import Build
from fagen.kinds.sinks import NO_SINK, SINK_KEY, SINK_WORDS
from fagen.schedule import Keys, Known, OneOf, Section, derived
from fagen.schedule import Schedule as AnySchedule
from fagen.scores import NAMED as NAMED_SCORES
from fagen.vocab import (
    DTYPES,
    KERNEL_SCALES,
    LENGTHS,
    MASKS,
    MAXIMA,
    ORDERS,
    OUT_DTYPES,
    OUTPUTS,
    PRODUCERS,
    SCALE_ROWS,
    SCALE_ROWS_DEFAULT,
    SCORES,
    SUMS,
    TANHS,
    TOTALS,
    TRANSPOSITIONS,
    V_LAYOUTS,
    V_SCALES,
)


class Attention(Section):
    """What is computed."""

    head_dim: int = Field(description="columns of Q and K", **HEAD_DIM)
    head_dim_v: int = derived("columns of V and O; head_dim by default", **HEAD_DIM)
    dtype: Annotated[str, OneOf(DTYPES)] = Field(
        description="of Q, K and V; e4m3 comes with descales, see [fp8]"
    )
    out_dtype: Annotated[str, OneOf(OUT_DTYPES)] = derived(
        "of O; by default that of Q, and bf16 with e4m3"
    )
    mask: Annotated[str, Known(MASKS, NAMED_MASKS)] = Field(
        description="which keys a query sees; causal is aligned to the bottom right"
    )
    score: Annotated[str, Known(SCORES, NAMED_SCORES)] = Field(default=PLAIN, description=SCORE_KEY)
    sink: Annotated[str, OneOf(SINK_WORDS)] = Field(default=NO_SINK, description=SINK_KEY)
    lengths: Annotated[str, OneOf(LENGTHS)] = Field(
        default="equal",
        description='"equal": all sequences have one length; "varlen": each has its own, from '
        "cu_seqlens, which the GPU reads",
    )


class Tile(Section):
    """What one thread block holds at a time."""

    block_m: int = Field(
        ge=SM90.wgmma_m,
        le=4 * SM90.wgmma_m,
        multiple_of=SM90.wgmma_m,
        description="query rows per thread block",
    )
    block_n: int = Field(ge=16, le=SM90.wgmma_n_max, multiple_of=16, description="keys per step")
    pack_gqa: bool = Field(
        default=False,
        description="the heads of a KV head share a tile's rows, each query's side by side: fewer "
        "rows stay empty where queries are few",
    )


class Split(Section):
    """How the keys of a sequence are parted."""

    num_splits: int = Field(
        default=1,
        ge=1,
        le=128,
        description="splits of a sequence's keys (split-KV), at most: equal ones in whole "
        "blocks, by the sequence's own length; above 1 each is a unit of work, and a second "
        "kernel combines them",
    )
    fill: bool = Field(
        default=False,
        description="whether a call has as many splits, num_splits at most, as fill the SMs best: "
        "by its tiles too",
    )


class Pipeline(Section):
    """How loads run ahead of the arithmetic."""

    stages: int = Field(default=2, ge=2, le=8, description="buffers of K, and of V")
    v_row_stages: int = derived(
        "buffers of row-major V, before it is transposed: 1, or as many as stages, the default",
        ge=0,
        le=8,
    )
    q_stages: int = Field(
        default=1, ge=1, le=2, description="buffers of Q; with 2 the next tile's Q loads early"
    )
    output: Annotated[str, OneOf(OUTPUTS)] = Field(
        default="own",
        description='shared memory through which O is stored: "own", a buffer of its own; '
        '"half", one of half the size, used twice; "reuse_v", that of V',
    )


class Warps(Section):
    """Who does what in a thread block."""

    producer: Annotated[str, OneOf(PRODUCERS)] = Field(
        default="warp",
        description='"warp": a specialised TMA producer warp; "none": consumers load for '
        "themselves",
    )
    producer_registers: int = registers("setmaxnreg of the producer")
    consumer_registers: int = registers("setmaxnreg of the consumers")


class Overlap(Section):
    """What runs under what."""

    inter_warpgroup: bool = derived(
        "ping-pong: softmax of one warpgroup under the GEMMs of another; by default "
        "on with a producer warp and two consumers or more"
    )
    intra_warpgroup: bool = Field(
        default=True, description="issue QKᵀ of a block together with PV of the block before"
    )


class Softmax(Section):
    """How scores become probabilities."""

    sum: Annotated[str, OneOf(SUMS)] = Field(
        default="threads",
        description='who sums the rows of P; "tensor": the PV GEMM, by columns of ones beside '
        'V; needs maximum = "online"',
    )
    maximum: Annotated[str, OneOf(MAXIMA)] = derived(
        '"lazy": the row max is updated only where P or its sums grow too large; '
        '"online": in every block, before the exponentials; by default online in e4m3, else lazy'
    )
    rescale_threshold: float = Field(
        default=0.0,
        ge=0,
        le=15,  # P grows to 2 to this power; one more would leave fp16's range
        multiple_of=0.125,
        description="log2; above 0 a row max is kept while the new one is this close "
        '(conditional rescaling); needs maximum = "online"',
    )
    tanh: Annotated[str, OneOf(TANHS)] = Field(
        default="mufu",
        description='of the score softcap: "mufu", an instruction; "curve", where a row\'s largest '
        "score is small: its exponents are a polynomial of products; else as before",
    )
    promote: int = Field(
        default=0,
        ge=0,
        le=64,
        description="blocks of keys after which PV is added to an fp32 accumulator, because "
        "tensor cores truncate sums, in e4m3 to 14 bits; 0: never",
    )
    promote_columns: int = Field(
        default=0,
        ge=0,
        le=SM90.wgmma_n_max,
        multiple_of=SM90.wgmma_n_step,
        description="with promote = 1 in e4m3: columns of PV that are promoted at a time, which "
        "takes registers for so many columns beside O; 0: all, by a second O",
    )
    totals: Annotated[str, OneOf(TOTALS)] = derived(
        "where that fp32 accumulator is; registers by default"
    )


class Fp8(Section):
    """Keys of e4m3 alone: its scales, the layout of V, and the range of P."""

    v_layout: Annotated[str, OneOf(V_LAYOUTS)] = derived(
        '"columns": V is transposed, keys in the order of P, as fagen.quantize '
        'writes it; "rows": row-major, see transposes; by default columns, '
        "with varlen rows"
    )
    transposes: Annotated[str, OneOf(TRANSPOSITIONS)] = derived(
        'what transposes row-major V: "producer", warps of each thread block; "kernel", one '
        "before, once for all tiles, into the workspace; producer by default"
    )
    scales: Annotated[str, OneOf(KERNEL_SCALES)] = derived(
        "what shares a scale of Q and of K: a head, or a block of its rows; head by default"
    )
    scale_rows: Annotated[int, OneOf(SCALE_ROWS)] = derived(
        f'rows per scale, with scales = "block"; {SCALE_ROWS_DEFAULT} by default'
    )
    v_scales: Annotated[str, OneOf(V_SCALES)] = derived(
        "what shares a scale of V: a column of a head, or a block of scale_rows "
        "keys, whose scale enters the exponents; column by default"
    )
    p_offset: float = derived(
        "log2; P is scaled up by 2 to this power, and what is then below 2^-10 is "
        "lost; by default 8, less with a rescale_threshold or a lazy row max",
        ge=0,
        le=8,
        multiple_of=0.125,
    )


class Grid(Section):
    """How thread blocks take tiles."""

    order: Annotated[str, OneOf(ORDERS)] = derived(
        "tile scheduler: persistent, head by head; parts, so too, but tiles of a last round that "
        "leaves SMs idle in parts of their keys; lpt, longest tiles first; "
        "dynamic, longest first through an atomic counter; by default what suits the mask"
    )
    cluster: int = Field(
        default=1,
        ge=1,
        le=2,
        description="thread blocks that share K and V by multicast",
    )


class Schedule(AnySchedule):
    """What attention is computed and how one SM is used; every key has its value."""

    kind: ClassVar[str] = "forward"
    keys: ClassVar[Keys] = KEYS

    attention: Attention
    tile: Tile
    split: Split = Split()
    pipeline: Pipeline = Pipeline()
    warps: Warps = Warps()
    overlap: Overlap = Overlap()
    softmax: Softmax = Softmax()
    fp8: Fp8 = Fp8()
    grid: Grid = Grid()
    build: Build = Build()

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return consumers(self.values())
