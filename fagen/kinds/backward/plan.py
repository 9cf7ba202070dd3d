"""Turn a schedule of the backward pass into its Plan: every number that its templates print."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from fagen.arch import SM90
from fagen.kind import Role
from fagen.kinds.attention import Budgeted, Gemm, carried, padded_head_dims
from fagen.kinds.backward import rules
from fagen.kinds.backward.formulae import (
    ADDERS,
    BUDGET,
    PIECES,
    TILE_STAGES,
    record_bytes,
    roles,
    threads,
)
from fagen.kinds.backward.keys import Schedule
from fagen.kinds.backward.parts import choices_of, parts
from fagen.kinds.backward.parts.sums import row_block
from fagen.kinds.backward.rules import (
    dq_columns,
    dq_transposed,
    ones_in_shared_memory,
    shares_rows,
)
from fagen.kinds.backward.signature import key_blocks_of, row_blocks_of, signature
from fagen.kinds.budget import Budget, Ledgers
from fagen.kinds.scores import names_of_rows
from fagen.launch import Grid, Launch, Launches, Product
from fagen.part import Array, Parts
from fagen.scores import Score, Sloped
from fagen.signature import Extent, Signature
from fagen.vocab import DTYPES, Dtype, Mask, Swizzle, swizzle_of

_ROW_THREADS = 256  # of a thread block that prepares rows, or rounds their dQ
_LOAD_BYTES = 16


@dataclass(frozen=True)
class Plan(Budgeted):
    """A schedule that fits, worked out.  There is no Plan that does not fit.

    Sizes are in elements, registers per thread, slabs in columns; padded is in shared memory.
    """

    kind: ClassVar[str] = "backward"
    budget: ClassVar[Budget] = BUDGET
    thrifty: ClassVar[str] = "a smaller block_m needs"
    blocks: ClassVar[int] = 1  # that an SM should hold at least
    row_threads: ClassVar[int] = _ROW_THREADS
    dq_adders: ClassVar[int] = ADDERS
    tile_stages: ClassVar[int] = TILE_STAGES
    pieces: ClassVar[int] = PIECES
    rounding_blocks: ClassVar[int] = 8  # of round_dq's, for an SM, where some are left
    sms: ClassVar[int] = SM90.sm_count
    line_bytes: ClassVar[int] = SM90.l2_line_bytes

    schedule: Schedule
    slug: str
    dtype: Dtype
    mask: Mask
    score: Score
    sink: Dtype | None
    varlen: bool  # the GPU reads where sequences lie, and how long they are
    deterministic: bool

    head_dim: int
    head_dim_v: int
    head_dim_padded: int
    head_dim_v_padded: int
    block_m: int
    block_n: int
    stages: int
    do_stages: int
    ds_stages: int

    consumers: int  # warpgroups, of 64 keys each
    threads: int
    row_lanes: int  # of row_threads, that share a row of O
    producer_registers: int
    consumer_registers: int
    dq_registers: int  # of the consumer that computes dQ
    launch_registers: int
    max_spill_bytes: int

    partition: str  # "keys" | "gradients"
    dq_by: str  # "all" | "one"
    dq_transposed: bool  # its columns are the rows of accumulators
    dq_columns: int  # of an accumulator of dQ; of several the last may have fewer
    dq_rest: int  # the last one's
    dq_parts: int  # warpgroups that compute dQ
    dq_slices: int
    cluster: int  # thread blocks that share rows, and dQ
    persistent: bool  # thread blocks draw tiles
    intra_warpgroup: bool
    under_dp: bool  # exponentials stand before the wait for dP
    postprocess: bool  # dQ of heads that are done is rounded while others are in work
    keeps_k: bool  # in registers, for S
    ones_in_shared_memory: bool  # that statistics are multiplied by
    record_bytes: int  # of a block of rows in the workspace: dQ, LSE, delta, maybe a counter

    qk_swizzle: Swizzle
    v_swizzle: Swizzle
    ds_swizzle: Swizzle
    qk_slab: int
    v_slab: int
    ds_slab: int
    l2_share_bytes: int  # for the Q, dO and dQ of heads in work

    ledgers: Ledgers

    @property
    def counts_steps(self) -> bool:
        """Whether consumers need a number for even and odd uses of dQ's buffer."""
        return rules.counts_steps(self.schedule.values())

    @property
    def consumers_differ(self) -> bool:
        """Whether the last of those that are else alike computes dQ, or more of it."""
        return self.dq_by == "one" or rules.last_makes_more(self.schedule.values())

    @property
    def defers_dq(self) -> bool:
        """Whether the last slice of dQ is handed on in the next step."""
        return rules.defers_dq(self.schedule.values())

    @property
    def dq_row_step(self) -> int:
        """Rows between the parts of dQ of two warpgroups; 0 where they have the same rows."""
        own = self.dq_columns if self.dq_transposed else SM90.wgmma_m
        return 0 if shares_rows(self.schedule.values()) else own

    @property
    def dq_column_step(self) -> int:
        """The same of columns."""
        own = SM90.wgmma_m if self.dq_transposed else self.dq_columns
        return own if shares_rows(self.schedule.values()) else 0

    @property
    def step_clocks(self) -> int:
        """Of a step, roughly: its products at three quarters of what tensor cores can do."""
        columns = 3 * self.head_dim_padded + 2 * self.head_dim_v_padded
        return 2 * self.block_m * self.block_n * columns * 4 // (3 * SM90.tensor_flops)

    @property
    def tile_clocks(self) -> float:
        """Of a tile beside its steps, roughly."""
        return 12e3 if self.mask.last_by_row else 8e3

    @property
    def sloped(self) -> Sloped:
        """What an element of S becomes, and the slope of that, as C++."""
        return self.score.sloped(names_of_rows())

    @property
    def slopes_fit(self) -> bool:
        """Whether P times the slopes of scores stays in fp32."""
        return rules.slopes_fit(self.schedule.values())

    @property
    def describing(self) -> str:
        """The text that makes wgmma's descriptors."""
        by_layer = rules.keeps_descriptors(self.schedule.values())
        return f"sm90/describe{'_by_layer' if by_layer else ''}.cuh"

    @property
    def passes(self) -> bool:
        """Whether there are blocks of rows that see keys of some consumers alone."""
        return rules.passes(self.schedule.values())

    @property
    def gemms(self) -> tuple["Gemm", ...]:
        """The wgmma instructions."""
        d, d_v, own = self.head_dim_padded, self.head_dim_v_padded, self.dtype.ptx
        dq = "dQ, transposed: K by dS, as it lies transposed."
        if not self.dq_transposed:
            dq = "dQ: dS by K, dS as it lies transposed."
        of_statistics = "S or dP, to begin with: of numbers of rows."
        of_keys = "S: keys in registers by rows as they lie."
        of_rows = "S, or dP: keys by rows, both operands as they lie."
        of_dv = "dV, or dK if it is as wide: P by dO, dS by Q."
        along = {"a_along_m": True, "b_along_n": True}
        in_registers = {"a_in_registers": True}
        gradient = {"a_in_registers": True, "b_along_n": True}
        numbers = {"a_in_registers": not self.ones_in_shared_memory}
        rows = self.block_m
        gemms = (
            (True, Gemm("statistics", of_statistics, rows, "bf16", **numbers)),
            (self.keeps_k, Gemm("kept", of_keys, rows, own, **in_registers)),
            (True, Gemm("scores", of_rows, rows, own)),
            (True, Gemm("gradient", of_dv, d_v, own, **gradient)),
            (d != d_v, Gemm("gradient", "dK: dS by Q.", d, own, **gradient)),
            (True, Gemm("dq", dq, self.dq_columns, own, **along)),
            (
                self.dq_rest != self.dq_columns,
                Gemm("dq", "The rest of its columns.", self.dq_rest, own, **along),
            ),
        )
        return tuple(gemm for used, gemm in gemms if used)

    @property
    def roles(self) -> tuple[Role, ...]:
        """Whose registers setmaxnreg sets."""
        return (
            *(
                Role(name, getattr(self.schedule.warps, key))
                for name, key, _ in roles(self.schedule.values())
            ),
            Role("producer", self.producer_registers),
        )

    @cached_property
    def parts(self) -> Parts:
        """What the kernels are made of."""
        return parts(self.schedule.values())

    @property
    def row_block(self) -> tuple[Array, ...]:
        """What there is of a block of rows in the workspace."""
        return tuple(row_block(choices_of(self.schedule.values())))

    @property
    def tile_readers(self) -> int:
        """Warps that multiply, and threads that add dQ up: of whom each takes every tile."""
        return self.consumers * SM90.warpgroup_threads // SM90.warp_threads + ADDERS

    @cached_property
    def signature(self) -> Signature:
        """What a call takes and gives."""
        return signature(self)

    @property
    def launches(self) -> Launches:
        """Rows are prepared, the gradients computed, and dQ's sums rounded.

        Where a group's heads are shared out, parts of dK and dV are summed up before that.
        """
        if self.varlen:
            return self._varlen_launches()
        row_blocks, key_blocks = Product(row_blocks_of(self)), Product(key_blocks_of(self))
        rows_of_keys = Product((Extent("seqlen_k", per=SM90.wgmma_m),))
        rows, heads, batch = (Product((factor,)) for factor in row_blocks.factors)
        row_grid = rounding = Grid(rows, heads, batch)
        if self.postprocess:  # how much is left only the device knows
            rounding = replace(Grid(row_blocks), resident=True, per_sm=self.rounding_blocks)
        kv_heads = Product((Extent("kv_heads"),))
        return Launches(
            (
                Launch("prepare_rows", row_grid, self.row_threads),
                Launch(
                    "attention_backward",
                    Grid(key_blocks, resident=self.persistent),
                    self.threads,
                    self.shared_bytes,
                ),
                Launch("sum_shares", Grid(rows_of_keys, kv_heads, batch), self.row_threads),
                Launch("round_dq", rounding, self.row_threads),
                *self._of_sinks,
            ),
            workspace=Product((Extent(number=self.record_bytes), *row_blocks.factors)),
            shares=True,
            empty=("batch", "heads"),
        )

    @property
    def _of_sinks(self) -> tuple[Launch, ...]:
        """What adds up what rows have of the gradients of sinks."""
        heads = Grid(Product((Extent("heads"),)))
        return (Launch("sum_sinks", heads, self.row_threads),) * (self.sink is not None)

    def _varlen_launches(self) -> Launches:
        """The same, with room for the blocks of each sequence."""
        rows, keys = row_blocks_of(self), key_blocks_of(self)
        row_grid = Grid(Product(rows[:1]), Product(rows[1:]))
        prepared = replace(row_grid, x=Product((replace(rows[0], plus=1),)))  # one lists tiles
        return Launches(
            (
                Launch("prepare_rows", prepared, self.row_threads),
                Launch(
                    "attention_backward",
                    Grid(Product(keys)),
                    self.threads,
                    self.shared_bytes,
                    overlaps=True,
                ),
                Launch("round_dq", row_grid, self.row_threads),
                *self._of_sinks,
            ),
            workspace=Product((*rows, Extent(number=self.record_bytes))),
            shares=True,
            empty=("heads",),
        )


def plan(schedule: Schedule) -> Plan:
    """Work a schedule out.  Raises OverBudget, with every sum that does not fit and what would."""
    ledgers = BUDGET.kept(schedule, "block_n")
    values = schedule.values()
    dtype = DTYPES[values["dtype"]]
    d, d_v = padded_head_dims(values)
    columns, transposed = dq_columns(values), dq_transposed(values)
    # columns of dS that one product reads
    together = columns[0] if transposed else values["block_m"]
    qk_swizzle, v_swizzle, ds_swizzle = (
        swizzle_of(width * dtype.bytes) for width in (rules.whole_columns(values), d_v, together)
    )
    loads = -(-values["head_dim_v"] * dtype.bytes // _LOAD_BYTES)  # of a row
    in_block = threads(values)
    return Plan(
        **carried(Plan, schedule),
        varlen=values["lengths"] == "varlen",
        head_dim_padded=d,
        head_dim_v_padded=d_v,
        consumers=schedule.consumers,
        threads=in_block,
        row_lanes=1 << (loads - 1).bit_length(),
        launch_registers=SM90.registers_left(in_block),
        dq_transposed=transposed,
        dq_columns=columns[0],
        dq_rest=columns[-1],
        dq_parts=len(columns),
        keeps_k=values["kept"] == "k",
        ones_in_shared_memory=ones_in_shared_memory(values),
        record_bytes=record_bytes(values),
        qk_swizzle=qk_swizzle,
        v_swizzle=v_swizzle,
        ds_swizzle=ds_swizzle,
        qk_slab=qk_swizzle.bytes // dtype.bytes,
        v_slab=v_swizzle.bytes // dtype.bytes,
        ds_slab=ds_swizzle.bytes // dtype.bytes,
        l2_share_bytes=SM90.l2_bytes // 5 * (2 if values["deterministic"] else 1),
        ledgers=ledgers,
    )
