"""Turn a Schedule into a Plan: every number that a template prints, for a schedule that fits."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from fagen.arch import SM90
from fagen.combining import Combination, Combining, Filling, split_blocks
from fagen.kind import Role
from fagen.kinds.attention import Budgeted, Gemm, carried
from fagen.kinds.budget import Budget, Ledgers
from fagen.kinds.forward.concerns import (
    Order,
    Pipeline,
    Scales,
    Tile,
    Transposition,
    order,
    pipeline,
    scales,
    tile,
)
from fagen.kinds.forward.formulae import BUDGET
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.parts import parts
from fagen.kinds.forward.signature import signature, tiles_of
from fagen.kinds.forward.softmax import Softmax, softmax
from fagen.kinds.forward.structure import filling, numbers_sequences, seen_ends, threads
from fagen.kinds.scores import names
from fagen.launch import Grid, Launch, Launches, Product
from fagen.part import Parts
from fagen.scores import Score
from fagen.signature import Extent, Signature
from fagen.vocab import DTYPES, FP32, Dtype, Mask

_COUNTER_BYTES = 4  # of the tiles that blocks have drawn
_FEW_SPLITS = 4  # where as many as fill the SMs are combined: with many rows seldom more
_EMPTY, _EMPTY_VARLEN = ("batch", "heads", "seqlen_q"), ("heads", "total_q")


@dataclass(frozen=True)
class Plan(Budgeted, Combining):
    """A schedule that fits, worked out.  There is no Plan that does not fit.

    Sizes are in elements, registers per thread, slabs in columns; padded is in shared memory.
    """

    kind: ClassVar[str] = "forward"
    blocks: ClassVar[int] = 1  # that an SM should hold at least
    budget: ClassVar[Budget] = BUDGET
    thrifty: ClassVar[str] = "a narrower block_n needs"

    schedule: Schedule
    slug: str
    dtype: Dtype  # of Q, K and V
    out_dtype: Dtype  # of O
    mask: Mask
    score: Score
    sink: Dtype | None  # in which a call has one more logit of each head's rows
    varlen: bool  # the GPU reads where sequences lie, and how long they are
    descales: bool  # Q, K and V come with factors, and V is to lie along its keys
    v_rows: bool  # which comes row-major, to be transposed by the producer

    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    num_splits: int  # of a sequence's keys, at most
    output: str

    consumers: int  # warpgroups
    threads: int
    producer_registers: int  # 0 where no warp is specialised
    consumer_registers: int  # 0 where no warp is specialised
    launch_registers: int
    max_spill_bytes: int  # per thread

    tile: Tile
    pipeline: Pipeline
    softmax: Softmax
    scales: Scales
    order: Order

    ledgers: Ledgers

    @property
    def producer_warp(self) -> bool:
        """Whether a warp loads, and others compute."""
        return self.producer_registers > 0

    @property
    def product_scale(self) -> str:
        """What a product is multiplied by before it becomes a score, as C++."""
        if not self.descales:
            return "params.product_scale"
        of_block = " * key_scales[i / (kBlockN / 2 / kGroups)]" * self.scales.by_block
        return f"product_scale{of_block}"

    @property
    def numbers_sequences(self) -> bool:
        """Whether a tile of varlen sequences knows the number of its sequence."""
        return numbers_sequences(self.schedule.values())

    @property
    def scores_by_block(self) -> bool:
        """Whether blocks of S have factors of their own where P is made of it."""
        return self.scales.by_block and not self.score.acts

    @property
    def adds_mean(self) -> bool:
        """Whether what was taken off K is added to LSE: of its product and no other score."""
        return self.descales and not self.score.acts

    @property
    def score_element(self) -> str:
        """What an element of S becomes, as C++."""
        own_lengths = self.varlen or bool(self.mask.tables)
        return self.score.element(names(self.tile.pack_gqa, own_lengths))

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """The wgmma instructions that consumers issue."""
        number, sixteen_bits = self.dtype.ptx, self.dtype.bytes == 2
        columns = "kPartColumns" if self.softmax.part_columns else "kOutputColumns"
        return (
            Gemm(
                "qk",
                "S = or += Q Kᵀ, kStepK columns of each, both from shared memory.",
                self.block_n,
                number,
                sixteen_bits=sixteen_bits,
            ),
            Gemm(
                "pv",
                f"{columns} columns of O = or += P V, kStepK keys of each, P from registers.",
                self.softmax.part_columns or self.tile.o_columns,
                number,
                a_in_registers=True,
                b_along_n=sixteen_bits,
                sixteen_bits=sixteen_bits,
            ),
        )

    @property
    def combination(self) -> Combination:
        """The kernel that combines them."""
        window = _FEW_SPLITS if self.schedule.split.fill else Combination.window
        return Combination(self.num_splits, self.head_dim_v, window, descaled=self.descales)

    @property
    def transposition(self) -> Transposition:
        """The kernel that transposes V before all tiles."""
        return Transposition(self.head_dim_v, self.order.dynamic, self.parts_bytes)

    @property
    def part_counters(self) -> int:
        """How many warpgroups' rows may have parts."""
        return self.consumers * self.order.most_units // 2

    @property
    def parts_bytes(self) -> int:
        """What parts of tiles leave, and how many of each have ended."""
        if not self.order.most_parts:
            return 0
        numbers = self.tile.head_dim_v_padded // 2 + 4  # of a thread: of O, and two rows' own
        of_part = self.consumers * SM90.warpgroup_threads * numbers * FP32.bytes
        return self.part_counters * FP32.bytes + self.order.most_units * of_part

    @property
    def filling(self) -> Filling:
        """How many splits fill the SMs."""
        return filling(self.schedule.values())

    def split_keys(self, length: int, queries: int = 1, heads: int = 1) -> int:
        """Return how many keys a split of a sequence of so many keys has.

        Those that fill the SMs hang on a call's queries and heads of all batches too.
        """
        splits = self.num_splits
        if self.schedule.split.fill:
            ends = seen_ends(self.mask, self.block_m, self.block_n, queries, length)
            splits = self.filling.splits(length, self.block_n, ends, heads, splits)
        return split_blocks(length, self.block_n, splits) * self.block_n

    @property
    def roles(self) -> tuple[Role, ...]:
        """Whose registers setmaxnreg sets."""
        if not self.producer_warp:
            return ()
        return (
            Role("consumer", self.consumer_registers),
            Role("producer", self.producer_registers),
        )

    @cached_property
    def parts(self) -> Parts:
        """What the kernel is made of."""
        return parts(self.schedule.values())

    @cached_property
    def signature(self) -> Signature:
        """What a call takes and gives."""
        return signature(self)

    @property
    def launches(self) -> Launches:
        """One kernel, whose thread blocks take tiles of block_m rows of a head each.

        Or of splits of their keys, which a second one combines.
        """
        tiles = Product(tiles_of(self))
        if self.num_splits > 1:
            units = Product((*tiles.factors, Extent(number=self.num_splits)))
            grid = Grid(units, resident=True)
            kernels = replace(self._kernel(grid), overlaps=True), self.combination.launch
            return Launches(kernels, self.combination.workspace(), empty=_EMPTY)
        kernel = self._kernel(Grid(tiles, resident=True, cluster=self.order.cluster))
        empty = _EMPTY_VARLEN if self.varlen else _EMPTY
        if self.pipeline.transposes_before:
            before = self.transposition.launch
            kernels = before, replace(kernel, overlaps=True)
            return Launches(kernels, self.transposition.workspace, empty=empty)
        if not self.order.dynamic:
            return Launches((kernel,), empty=empty)
        counter = Product((Extent(number=_COUNTER_BYTES),))
        return Launches((kernel,), counter, zeroed=True, empty=empty)

    def _kernel(self, grid: Grid) -> Launch:
        name, memory = "attention_forward", self.shared_bytes
        return Launch(name, grid, self.threads, memory, threads_as="threads")


def plan(schedule: Schedule) -> Plan:
    """Work a schedule out.  Raises OverBudget, with every sum that does not fit and what would."""
    ledgers = BUDGET.kept(schedule, "block_n")
    values = schedule.values()
    in_block = threads(values)
    return Plan(
        **carried(Plan, schedule, "scales", "order"),
        varlen=values["lengths"] == "varlen",
        descales=DTYPES[values["dtype"]].fp8,
        v_rows=values["v_layout"] == "rows",
        consumers=schedule.consumers,
        threads=in_block,
        launch_registers=SM90.registers_left(in_block),
        tile=tile(values),
        pipeline=pipeline(values),
        softmax=softmax(values),
        scales=scales(values),
        order=order(values),
        ledgers=ledgers,
    )
