"""Turn a Schedule into a Plan: every number that a template prints, for a schedule that fits."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar

from fagen.arch import SM90
from fagen.combining import Combination, Combining, split_blocks
from fagen.kind import Role
from fagen.kinds.attention import Budgeted, Gemm, carried, padded_head_dims
from fagen.kinds.budget import Budget, Ledgers
from fagen.kinds.forward.exponents import Exponents
from fagen.kinds.forward.formulae import BUDGET
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.parts import parts
from fagen.kinds.forward.signature import signature, tiles_of
from fagen.kinds.forward.structure import (
    RULES,
    TRANSPOSERS,
    keys_of_a_scale,
    threads,
    unrolls_copies,
)
from fagen.launch import Grid, Launch, Launches, Product
from fagen.part import Parts
from fagen.signature import Extent, Signature
from fagen.vocab import DTYPES, MASKS, ORDERS, OUT_DTYPES, Dtype, Mask, Swizzle, swizzle_of

# A draw takes about a microsecond, as a block does. Drawn a whole tile ahead, tiles would go to
# blocks with the longest way to go as soon as to those that come free next.
_DRAW_AHEAD = 2

_COUNTER_BYTES = 4  # of the tiles that blocks have drawn
_EMPTY, _EMPTY_VARLEN = ("batch", "heads", "seqlen_q"), ("heads", "total_q")

# Of scores whose standard deviation is 8, blocks after so many keys rarely outgrow P: a sixth of
# the misses of a tile that finds no maximum first.
_SPREAD_KEYS = 512

# With so many tiles for each SM the last section of heads ends, for 97 shapes of 100,
# within 3 % of the greedy order of all tiles (tests/test_order.py). Four times as many end within
# 2 % for 98, where their K and V fit the L2 cache.
_SECTION_ROUNDS = 2


@dataclass(frozen=True)
class Plan(Budgeted, Combining, Exponents):
    """A schedule that fits, worked out.  There is no Plan that does not fit.

    Sizes are in elements, registers per thread, slabs in columns; padded is in shared memory.
    """

    kind: ClassVar[str] = "forward"
    blocks: ClassVar[int] = 1  # that an SM should hold at least
    budget: ClassVar[Budget] = BUDGET
    thrifty: ClassVar[str] = "a narrower block_n needs"
    l2_bytes: ClassVar[int] = SM90.l2_bytes
    draw_ahead: ClassVar[int] = _DRAW_AHEAD  # blocks before a tile's end the next one is drawn
    section_rounds: ClassVar[int] = _SECTION_ROUNDS  # tiles for each SM that a section of heads has
    transposers: ClassVar[int] = TRANSPOSERS  # warps that transpose V where it comes row-major

    schedule: Schedule
    slug: str
    dtype: Dtype  # of Q, K and V
    out_dtype: Dtype  # of O
    mask: Mask
    varlen: bool  # sequences have lengths of their own, which the GPU reads

    head_dim: int
    head_dim_v: int
    head_dim_padded: int
    head_dim_v_padded: int
    block_m: int
    block_n: int
    stages: int
    q_stages: int

    num_splits: int  # of a sequence's keys, at most

    consumers: int  # warpgroups
    threads: int
    producer_registers: int  # 0 where no warp is specialised
    consumer_registers: int  # 0 where no warp is specialised
    launch_registers: int

    masked_steps: bool  # blocks after a tile's last one may be seen in part
    inter_warpgroup: bool
    intra_warpgroup: bool
    output: str
    sum_by_tensor: bool
    lazy_max: bool  # the row max is raised only where sums get too large without
    # how large that is: what a lane's share of a row's P may add up to; 0 where what is too large
    # for P becomes its largest number, and is found there
    max_partial_sum: float
    spread_blocks: int  # after a tile's first that find their row max before P, in case
    rescale_threshold: float  # log2 units
    skips_rescaling: bool  # a warp votes whether any row max has changed enough
    largest_output: float  # to which O is limited, where rounding P may lead beyond V; else 0
    descales: bool  # Q, K and V come with factors, and V is to lie along its keys
    # where there are descales; elsewhere false and zero
    v_rows: bool  # V comes row-major, to be transposed by the producer
    scale_rows: int  # of a block of scales; 0: each (batch, head) has one, or by strides of 0 all
    v_scales_by_block: bool  # as K's, in the exponents; else V has one for each column
    group_keys: int  # of a step, that lie in one such block
    scales_before_qk: (
        bool  # consumers read them before S = QKᵀ, a long GEMM there, and not after it
    )
    p_offset: float  # log2 units
    promote: int  # blocks after which sums move to a second accumulator; 0: never
    # or of each block so many columns of PV are added up at a time, and then to O; 0: all, in O
    part_columns: int

    dynamic: bool  # the producer draws tiles from a counter
    tile_stages: int  # and passes them on through a ring of so many; else 0
    tile_readers: int  # warps that read it
    cluster: int  # thread blocks that share K and V
    skips_masked_blocks: bool  # consumers skip blocks whose keys their rows do not see
    skips_steps: bool  # a consumer without rows skips all but the first
    skips_idle_warpgroups: bool  # or goes on to the next tile, whose rows it then has
    lays_q_anew: bool  # the descriptors of a single buffer of Q are worked out in each step
    l2_share_bytes: int  # of the L2 cache, for the K and V that blocks share
    max_spill_bytes: int  # per thread

    qk_swizzle: Swizzle
    v_swizzle: Swizzle  # as wgmma reads it
    v_rows_swizzle: Swizzle  # row-major, where the producer transposes it
    o_swizzle: Swizzle
    qk_slab: int
    v_slab: int
    v_rows_slab: int
    o_slab: int
    o_columns: int  # that all PV GEMMs of a block give

    ledgers: Ledgers

    @property
    def producer_warp(self) -> bool:
        """Whether a warp loads, and others compute."""
        return self.producer_registers > 0

    @property
    def unrolled_copies(self) -> int:
        """How many copies a thread issues without a loop: of all of a tile, or one."""
        return SM90.wgmma_n_max // 32 if unrolls_copies(self.schedule.values()) else 1

    @property
    def k_ahead(self) -> int:
        """Blocks that K is loaded ahead of V: as many as a consumer skips before it stores O."""
        far = self.skips_masked_blocks and self.output == "reuse_v"
        return -(-self.block_m // self.block_n) if far else 1

    @property
    def transposed_loads(self) -> int:
        """How many units a transposer has in flight."""
        return 4 if unrolls_copies(self.schedule.values()) else 2

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """The wgmma instructions that consumers issue."""
        number, sixteen_bits = self.dtype.ptx, self.dtype.bytes == 2
        columns = "kPartColumns" if self.part_columns else "kOutputColumns"
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
                self.part_columns or self.o_columns,
                number,
                a_in_registers=True,
                b_along_n=sixteen_bits,
                sixteen_bits=sixteen_bits,
            ),
        )

    @property
    def combination(self) -> Combination:
        """The kernel that combines them."""
        return Combination(self.num_splits, self.head_dim_v)

    def split_keys(self, length: int) -> int:
        """Return how many keys a split of a sequence of so many keys has."""
        return split_blocks(length, self.block_n, self.num_splits) * self.block_n

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
        kernel = self._kernel(Grid(tiles, resident=True, cluster=self.cluster))
        empty = _EMPTY_VARLEN if self.varlen else _EMPTY
        if not self.dynamic:
            return Launches((kernel,), empty=empty)
        counter = Product((Extent(number=_COUNTER_BYTES),))
        return Launches((kernel,), counter, zeroed=True, empty=empty)

    def _kernel(self, grid: Grid) -> Launch:
        name, memory = "attention_forward", self.shared_bytes
        return Launch(name, grid, self.threads, memory, threads_as="threads")


_OF_STRUCTURE = {field.name for field in fields(Plan)}  # rules that are fields of a Plan too


def plan(schedule: Schedule) -> Plan:
    """Work a schedule out.  Raises OverBudget, with every sum that does not fit and what would."""
    ledgers = BUDGET.kept(schedule, "block_n")
    values = schedule.values()
    dtype, out_dtype = DTYPES[values["dtype"]], OUT_DTYPES[values["out_dtype"]]
    mask, order = MASKS[values["mask"]], ORDERS[values["order"]]
    d, d_v = padded_head_dims(values)
    block_n = schedule.tile.block_n
    v_width = block_n if dtype.fp8 else d_v
    qk_swizzle, v_swizzle, v_rows_swizzle = (
        swizzle_of(columns * dtype.bytes) for columns in (d, v_width, d_v)
    )
    qk_slab, v_slab, v_rows_slab = (
        swizzle.bytes // dtype.bytes for swizzle in (qk_swizzle, v_swizzle, v_rows_swizzle)
    )
    o_swizzle = swizzle_of(d_v * out_dtype.bytes)
    o_slab = o_swizzle.bytes // out_dtype.bytes
    softmax = schedule.softmax
    sum_by_tensor, online = softmax.sum == "tensor", softmax.maximum == "online"
    in_block = threads(values)
    structure = {name: rule(values) for name, rule in RULES.items()}
    o_columns = d_v + (SM90.wgmma_n_step if sum_by_tensor else 0)
    part_columns = softmax.promote_columns
    return Plan(
        **carried(Plan, schedule, "promote"),
        **{name: value for name, value in structure.items() if name in _OF_STRUCTURE},
        varlen=values["lengths"] == "varlen",
        head_dim_padded=d,
        head_dim_v_padded=d_v,
        consumers=schedule.consumers,
        threads=in_block,
        launch_registers=SM90.registers_left(in_block),
        masked_steps=mask.last_by_row or not schedule.overlap.intra_warpgroup,
        sum_by_tensor=sum_by_tensor,
        lazy_max=softmax.maximum == "lazy",
        # one would wait for its own latency
        max_partial_sum=dtype.max_partial_sum,
        spread_blocks=-(-_SPREAD_KEYS // block_n) if structure["finds_spread"] else 0,
        skips_rescaling=not online or dtype.fp8 or softmax.rescale_threshold > 0,
        largest_output=dtype.largest if out_dtype == dtype else 0.0,
        descales=dtype.fp8,
        v_rows=schedule.fp8.v_layout == "rows",
        v_scales_by_block=schedule.fp8.v_scales == "block",
        group_keys=keys_of_a_scale(block_n, schedule.fp8.scale_rows),
        promote=0 if part_columns else softmax.promote,
        part_columns=part_columns,
        dynamic=order.dynamic,
        tile_readers=_tile_readers(schedule, structure["scheduler_warp"]) if order.dynamic else 0,
        l2_share_bytes=SM90.l2_bytes // 2,  # each half holds its own copy of what both halves read
        qk_swizzle=qk_swizzle,
        v_swizzle=v_swizzle,
        v_rows_swizzle=v_rows_swizzle,
        o_swizzle=o_swizzle,
        qk_slab=qk_slab,
        v_slab=v_slab,
        v_rows_slab=v_rows_slab,
        o_slab=o_slab,
        o_columns=o_columns,
        ledgers=ledgers,
    )


def _tile_readers(schedule: Schedule, draws: bool) -> int:
    """Return how many warps follow the producer's tiles: consumers, transposers, that of scales."""
    consumers = schedule.consumers * SM90.warpgroup_threads // SM90.warp_threads
    transposers = TRANSPOSERS if schedule.fp8.v_layout == "rows" else 0
    scales = schedule.fp8.scales == "block" and not transposers  # else a transposer writes them too
    # where a warp of its own draws tiles, the producer reads them too
    return consumers + transposers + scales + draws
