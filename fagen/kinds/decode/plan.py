"""Turn a schedule of decoding into its Plan: every number that its templates print."""

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from fagen.arch import SM90
from fagen.combining import Combination, Combining, chunk_blocks
from fagen.kind import Role
from fagen.kinds.attention import over_budget
from fagen.kinds.decode.formulae import (
    FP32_BYTES,
    THREADS,
    budget,
    explain_lines,
    k_is_wider,
    nearest,
    padded_head_dims,
    registers_left,
)
from fagen.kinds.decode.keys import Schedule
from fagen.kinds.decode.rules import SWIZZLE, straddles
from fagen.kinds.decode.signature import signature
from fagen.launch import Grid, Launch, Launches
from fagen.ledger import Ledger
from fagen.signature import Signature
from fagen.vocab import DTYPES, MASKS, Dtype, Mask, Swizzle

_LAZY_ABOVE = 8.0
# How many powers of 2 scores may be above a reference that was given, and the mean of P in a chunk
# below 1. In fp16 P is finite up to 2^16, and one of 2^-12 is off by 2^-13 of itself at most, so
# that the mean is too. bf16 has fp32's range, of which O leaves room for V.
_NARROW = 14.0, 12.0
_WIDE = 60.0, 60.0


@dataclass(frozen=True)
class Gemm:
    """A wgmma instruction of 64 rows: what it makes, and how A lies in shared memory."""

    name: str
    says: str
    rows: int  # its N
    sets: bool = False  # it may take the place of what was there
    a_along_m: bool = False  # M and not K along A's rows

    @property
    def accumulators(self) -> int:
        """Fp32 registers of a thread."""
        return self.rows * SM90.wgmma_m // SM90.warpgroup_threads

    @property
    def inputs(self) -> tuple[int, ...]:
        """The numbers of the asm operands that follow these: A, B, whether to add."""
        return tuple(range(self.accumulators, self.accumulators + 3))


@dataclass(frozen=True)
class Plan(Combining):
    """A schedule that fits, worked out.  There is no Plan that does not fit.

    Sizes are in elements, registers per thread, slabs in columns; padded is in shared memory.
    """

    kind: ClassVar[str] = "decode"
    roles: ClassVar[tuple[Role, ...]] = ()  # no warp sets its registers
    # of a row that a thread block has folded chunks of: their number, its maximum and sum
    folded_bytes: ClassVar[int] = 3 * FP32_BYTES

    schedule: Schedule
    slug: str
    dtype: Dtype
    mask: Mask

    head_dim: int
    head_dim_v: int
    head_dim_padded: int
    head_dim_v_padded: int
    k_is_wider: bool  # a buffer of the ring is as wide as K
    rows: int
    block_n: int
    num_splits: int
    by_runs: bool  # a thread block's chunks follow each other, and it folds them
    stages: int
    q_stages: int
    unified: bool  # P is relative to numbers that the caller gives
    speculates: bool  # P is computed before it is known whether its maxima still serve
    swizzle: Swizzle
    slab: int

    threads: int
    blocks: int  # that an SM should hold
    launch_registers: int
    max_spill_bytes: int

    combination: Combination

    shared: Ledger
    registers: Ledger

    # A score may be so many powers of 2 above the number that P is relative to: P and its sums are
    # finite, and as exact.
    rescale_threshold: float
    least_mean: float  # of P over the keys of a chunk, relative to such a number of the caller's

    @property
    def pads_v(self) -> bool:
        """Whether some rows of Oᵀ are no column of V."""
        return self.head_dim_v < self.head_dim_v_padded

    @property
    def shares_lines(self) -> bool:
        """Whether a line of L2 may have parts of two heads' rows of K or V."""
        return straddles(self.dtype.name, self.head_dim, self.head_dim_v)

    @property
    def prefetches(self) -> bool:
        """Whether first keys are asked for while the launch before ends: not beside spills."""
        return not self.max_spill_bytes

    @property
    def shared_bytes(self) -> int:
        """Of a thread block of the first kernel."""
        return self.shared.total

    @property
    def bytes_in_flight(self) -> int:
        """Of K and V, that an SM's loads may have under way."""
        return self.blocks * self.shared.rows[0].amount

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """The wgmma instructions."""
        return (
            Gemm("scores", "Sᵀ = or += K Qᵀ, both as they lie.", self.rows, sets=True),
            Gemm("output", "Oᵀ += Vᵀ Pᵀ, V as it lies.", self.rows, a_along_m=True),
        )

    @property
    def modelled_registers(self) -> int:
        """Of a thread that computes, by the ledger."""
        return self.registers.total

    @property
    def spill_remedy(self) -> str:
        """What a schedule may change against spills; {spilled} is how many bytes there are."""
        return (
            "fewer rows or blocks need fewer registers, "
            "max_spill_bytes = {spilled} under [build] tolerates it"
        )

    def chunk_keys(self, length: int) -> int:
        """Return how many keys a chunk of a sequence of so many has."""
        return chunk_blocks(length, self.block_n, self.num_splits) * self.block_n

    @property
    def ledger(self) -> str:
        """The ledgers, to be printed."""
        flying = f"bytes of K and V under way per SM  {self.bytes_in_flight:,}"
        return f"{self.shared}\n\n{self.registers}\n\n{flying}"

    @cached_property
    def signature(self) -> Signature:
        """What a call takes and gives."""
        return signature(self)

    @property
    def launches(self) -> Launches:
        """Chunks are computed by blocks that stay, and merged by a kernel that overlaps them."""
        grid = Grid(self.combination.units, resident=True, per_sm=self.blocks)
        decode = Launch("decode", grid, self.threads, self.shared_bytes, overlaps=True)
        kernels = decode, self.combination.launch
        workspace = self.combination.workspace(self.folded_bytes if self.by_runs else 0)
        return Launches(kernels, workspace=workspace)

    def explained(self) -> str:
        """Return the ledgers with their formulae, the numbers in them, and the solved limits."""
        return "\n".join([self.ledger, "", *explain_lines(self.schedule)])

    def record(self) -> dict[str, Any]:
        """Return keys and ledgers, for JSON."""
        ledgers = {"shared": self.shared, "registers": self.registers}
        return {
            "schedule": self.slug,
            "keys": self.schedule.values(),
            "threads": self.threads,
            "bytes_in_flight": self.bytes_in_flight,
            **{name: {**asdict(one), "total": one.total} for name, one in ledgers.items()},
        }


def plan(schedule: Schedule) -> Plan:
    """Work a schedule out.  Raises OverBudget, with every sum that does not fit and what would."""
    cost = budget(schedule)
    if cost.over():
        raise over_budget(schedule, "rows", cost.over(), nearest(schedule))
    asked, tile, pipeline = schedule.decode, schedule.tile, schedule.pipeline
    dtype = DTYPES[asked.dtype]
    d, d_v = padded_head_dims(schedule)
    unified = schedule.softmax.maximum == "fixed"
    above, below = _NARROW if dtype.narrow else _WIDE
    return Plan(
        schedule=schedule,
        slug=schedule.slug,
        dtype=dtype,
        mask=MASKS[asked.mask],
        head_dim=asked.head_dim,
        head_dim_v=asked.head_dim_v,
        head_dim_padded=d,
        head_dim_v_padded=d_v,
        k_is_wider=k_is_wider(schedule),
        rows=tile.rows,
        block_n=tile.block_n,
        num_splits=schedule.split.num_splits,
        by_runs=schedule.split.by == "stream_k",
        stages=pipeline.stages,
        q_stages=pipeline.q_stages,
        unified=unified,
        speculates=schedule.softmax.speculate,
        swizzle=SWIZZLE,
        slab=SWIZZLE.bytes // dtype.bytes,
        threads=THREADS,
        blocks=schedule.grid.blocks,
        launch_registers=registers_left(schedule.grid.blocks),
        max_spill_bytes=schedule.build.max_spill_bytes,
        combination=_combination(schedule.split.num_splits, asked.head_dim_v),
        shared=cost.shared,
        registers=cost.registers,
        rescale_threshold=above if unified else _LAZY_ABOVE,
        least_mean=2.0**-below,
    )


def _combination(num_splits: int, head_dim_v: int) -> Combination:
    """Fold 8 chunks at a time, which is faster where a row fills warps; nvcc spills elsewhere."""
    combination = Combination(num_splits, head_dim_v, window=8)
    whole = combination.lanes % 32 == 0 and not combination.ragged
    return combination if whole else replace(combination, window=16)
