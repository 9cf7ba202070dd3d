"""Declare every key of a schedule of attention's backward pass: its section, values, default."""

from typing import Annotated, ClassVar

from pydantic import Field

from fagen.arch import SM90
from fagen.expr.words import MASKS as NAMED_MASKS
from fagen.expr.words import PLAIN
from fagen.kinds.attention import HEAD_DIM, SCORE_KEY, registers
from fagen.kinds.backward.rules import (
    BYTES,
    DQ_BY,
    KEPT,
    KEYS,
    PARTITIONS,
    consumers,
)
from fagen.kinds.scores import Build
from fagen.kinds.sinks import NO_SINK, SINK_KEY, SINK_WORDS
from fagen.schedule import Keys, Known, OneOf, Section, derived
from fagen.schedule import Schedule as AnySchedule
from fagen.scores import NAMED as NAMED_SCORES
from fagen.vocab import LENGTHS, MASKS, SCORES, SIXTEEN_BITS


class Backward(Section):
    """What is computed."""

    head_dim: int = Field(description="columns of Q and K", **HEAD_DIM)
    head_dim_v: int = derived("columns of V and O; head_dim by default", **HEAD_DIM)
    dtype: Annotated[str, OneOf(SIXTEEN_BITS)] = Field(
        description="of Q, K, V, O and all gradients"
    )
    mask: Annotated[str, Known(MASKS, NAMED_MASKS)] = Field(
        description="which keys a query sees; causal is aligned to the bottom right"
    )
    score: Annotated[str, Known(SCORES, NAMED_SCORES)] = Field(default=PLAIN, description=SCORE_KEY)
    sink: Annotated[str, OneOf(SINK_WORDS)] = Field(default=NO_SINK, description=SINK_KEY)
    lengths: Annotated[str, OneOf(LENGTHS)] = Field(
        default=LENGTHS[0],
        description='"equal": all sequences have one length; "varlen": each has its own, as in '
        "the forward pass",
    )
    deterministic: bool = Field(
        default=False,
        description="dQ has the same bits in every call: its parts are added in the order of "
        "the keys",
    )


class Tile(Section):
    """What one thread block holds: its keys for good, query rows a step at a time."""

    block_m: int = Field(
        ge=SM90.wgmma_m * 3 // 4,
        le=2 * SM90.wgmma_m,
        multiple_of=SM90.wgmma_k_bytes // BYTES,
        description="query rows per step; dQ is computed transposed where this is no multiple "
        "of 64",
    )
    block_n: int = Field(
        ge=SM90.wgmma_m,
        le=3 * SM90.wgmma_m,
        multiple_of=SM90.wgmma_m,
        description="keys per thread block; 64 per consumer warpgroup",
    )


class Grid(Section):
    """How thread blocks take tiles."""

    persistent: bool = Field(
        default=False,
        description="by keys: persistent thread blocks draw tiles from a counter, and load the "
        "next tile while dK and dV are stored",
    )
    cluster: int = Field(
        default=1,
        ge=1,
        le=2,
        description="2: thread blocks of neighbouring keys share the loads of Q and dO, and "
        "compute half of dQ's columns each",
    )


class Pipeline(Section):
    """How loads run ahead of the arithmetic."""

    stages: int = Field(default=2, ge=1, le=4, description="buffers of Q")
    do_stages: int = derived("buffers of dO; as many as of Q by default", ge=1, le=4)
    ds_stages: int = Field(
        default=2,
        ge=1,
        le=2,
        description="buffers of dS; with 1 the warpgroups wait for each other twice a step",
    )
    dq_slices: int = derived(
        "parts in which a warpgroup hands on its dQ, through as much less shared "
        "memory; 2 by default above head dim 192",
        ge=1,
        le=2,
    )


class Warps(Section):
    """Who does what in a thread block, and with how many registers."""

    partition: Annotated[str, OneOf(PARTITIONS)] = derived(
        'what consumers divide among themselves: "keys", 64 each with both '
        'gradients; "gradients", dV and dK of the same 64 keys; by default gradients above 128 '
        "columns"
    )
    dq_by: Annotated[str, OneOf(DQ_BY)] = derived(
        'who computes dQ: "all" consumers, each its part, once they have met; or "one", the last '
        "of them, for which the others do not wait; all if left out, where dQ parts evenly"
    )
    kept: Annotated[str, OneOf(KEPT)] = Field(
        default=KEPT[0],
        description='operand of S that a consumer keeps in registers: "none", or its 64 keys of '
        'K ("k")',
    )
    producer_registers: int = registers("setmaxnreg of the producer")
    consumer_registers: int = registers("setmaxnreg of the consumers")
    dq_registers: int = registers(
        "setmaxnreg of the consumer that computes dQ; derived if left out, as that of the others "
        "where all do"
    )


class Overlap(Section):
    """What runs under what."""

    intra_warpgroup: bool = Field(
        default=False,
        description="by gradients: issue S of a step together with dV of the step before",
    )
    under_dp: bool = Field(
        default=False,
        description="by keys: exponentials stand before the wait for dP in machine code too",
    )
    postprocess: bool = Field(
        default=False,
        description="with persistent: a spare warp rounds dQ of finished heads meanwhile, and a "
        "kernel after it the rest",
    )


class Schedule(AnySchedule):
    """What is differentiated and how one SM is used; every key has its value."""

    kind: ClassVar[str] = "backward"
    keys: ClassVar[Keys] = KEYS

    backward: Backward
    tile: Tile
    pipeline: Pipeline = Pipeline()
    warps: Warps = Warps()
    overlap: Overlap = Overlap()
    grid: Grid = Grid()
    build: Build = Build()

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return consumers(self.values())
