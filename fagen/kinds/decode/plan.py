"""Turn a schedule of decoding into its Plan: every number that its templates print."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from fagen.combining import Combination, Combining
from fagen.kind import Role
from fagen.kinds.attention import Budgeted, Gemm, carried
from fagen.kinds.budget import FP32_BYTES, Budget, Ledgers
from fagen.kinds.decode.formulae import (
    BUDGET,
    THREADS,
    WARPS,
    padded_head_dims,
    registers_left,
)
from fagen.kinds.decode.keys import Schedule
from fagen.kinds.decode.parts import parts
from fagen.kinds.decode.rules import (
    HEADS_OF_BLOCK,
    LONGEST_LEAST,
    MOST_BLOCKS,
    SWIZZLE,
    all_rows,
    is_paged,
    shares_lines,
    split_blocks,
)
from fagen.kinds.decode.signature import signature
from fagen.kinds.scores import names_of_keys
from fagen.launch import Grid, Launch, Launches
from fagen.part import Parts
from fagen.schedule import Values
from fagen.scores import Score
from fagen.signature import Signature
from fagen.vocab import DTYPES, Dtype, Mask, Swizzle

_LAZY_ABOVE = 8.0
# How many powers of 2 scores may be above a reference that was given, and the mean of P in a split
# below 1. In fp16 P is finite up to 2^16, and one of 2^-12 is off by 2^-13 of itself at most, so
# that the mean is too. bf16 has fp32's range, of which O leaves room for V.
_NARROW = 14.0, 12.0
_WIDE = 60.0, 60.0


@dataclass(frozen=True)
class Plan(Budgeted, Combining):
    """A schedule that fits, worked out.  There is no Plan that does not fit.

    Sizes are in elements, registers per thread, slabs in columns; padded is in shared memory.
    """

    kind: ClassVar[str] = "decode"
    budget: ClassVar[Budget] = BUDGET
    thrifty: ClassVar[str] = "fewer rows or blocks need"
    swizzle: ClassVar[Swizzle] = SWIZZLE
    roles: ClassVar[tuple[Role, ...]] = ()  # no warp sets its registers
    # of a row that a thread block has combined splits of: their number, its maximum and sum
    combined_bytes: ClassVar[int] = 3 * FP32_BYTES
    most_blocks: ClassVar[int] = MOST_BLOCKS
    heads_of_block: ClassVar[int] = HEADS_OF_BLOCK
    longest_least: ClassVar[int] = LONGEST_LEAST

    schedule: Schedule
    slug: str
    dtype: Dtype
    mask: Mask
    score: Score
    sink: Dtype | None  # in which a call has one more logit of each head's rows

    head_dim: int
    head_dim_v: int
    head_dim_padded: int
    head_dim_v_padded: int
    rows: int  # of all KV heads
    kv_heads: int  # that a thread block reads side by side
    block_n: int
    num_splits: int
    paged: bool  # keys and values lie in pages
    stream_k: bool  # a thread block's splits follow each other, and it combines them
    stages: int
    q_stages: int
    fixed: bool  # P is relative to numbers that the caller gives
    slab: int

    threads: int
    blocks: int  # that an SM should hold
    launch_registers: int
    max_spill_bytes: int

    combination: Combination

    ledgers: Ledgers

    # A score may be so many powers of 2 above the number that P is relative to: P and its sums are
    # finite, and as exact.
    rescale_threshold: float
    least_mean: float  # of P over the keys of a split, relative to such a number of the caller's

    @property
    def score_element(self) -> str:
        """What an element of S becomes, as C++."""
        return self.score.element(names_of_keys(bool(self.mask.given)))

    @property
    def half_slab(self) -> int:
        """How many columns two KV heads that are read together have in the slab that they share."""
        return self.head_dim % self.slab

    @property
    def shared_slab(self) -> int:
        """Which slab that is, of both heads'."""
        return self.head_dim // self.slab

    @property
    def pair_slabs(self) -> int:
        """How many slabs both heads have."""
        return 2 * self.head_dim // self.slab

    @property
    def pads_v(self) -> bool:
        """Whether some rows of Oᵀ are no column of V."""
        return self.head_dim_v < self.head_dim_v_padded

    @property
    def eviction(self) -> str:
        """What L2 does with K and V once read: a line may have parts of two heads' rows."""
        return "NORMAL" if shares_lines(self.schedule.values()) else "FIRST"

    @property
    def prefetch_warp(self) -> int:
        """Which asks for first keys while the launch before ends.

        Where nobody is waited for, the one that loads is at it already, unless it would wait for
        a block table too.
        """
        return 0 if self.stream_k or self.paged else WARPS

    @property
    def bytes_in_flight(self) -> int:
        """Of K and V, that an SM's loads may have under way."""
        return self.blocks * self.shared.rows[0].amount

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """The wgmma instructions."""
        number, own_rows = self.dtype.ptx, self.rows // self.kv_heads
        return (
            Gemm("scores", "Sᵀ = or += K Qᵀ, both as they lie.", own_rows, number),
            Gemm("output", "Oᵀ += Vᵀ Pᵀ, V as it lies.", own_rows, number, a_along_m=True),
        )

    def split_keys(self, length: int, group: int) -> int:
        """Return how many keys a split of a sequence of so many has, by heads of a KV head."""
        return split_blocks(length, self.block_n, self.num_splits, group) * self.block_n

    @property
    def ledger(self) -> str:
        """The ledgers, to be printed."""
        return f"{super().ledger}\n\nbytes of K and V under way per SM  {self.bytes_in_flight:,}"

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
        """Splits are computed by blocks that stay, and combined by a kernel that overlaps them."""
        grid = Grid(self.combination.units, resident=True, per_sm=self.blocks)
        decode = Launch(
            "decode", grid, self.threads, self.shared_bytes, overlaps=True, threads_as="threads"
        )
        # where thread blocks have combined all splits, or no sequence has two
        complete = "" if self.fixed else "whole" if self.stream_k else "alone"
        kernels = decode, replace(self.combination.launch, needless=complete)
        workspace = self.combination.workspace(self.combined_bytes if self.stream_k else 0)
        return Launches(kernels, workspace=workspace, empty=("batch", "heads", "seqlen_q"))

    def _recorded(self) -> dict[str, Any]:
        return {"bytes_in_flight": self.bytes_in_flight}


def plan(schedule: Schedule) -> Plan:
    """Work a schedule out.  Raises OverBudget, with every sum that does not fit and what would."""
    ledgers = BUDGET.kept(schedule, "rows")
    values = schedule.values()
    dtype = DTYPES[values["dtype"]]
    d, d_v = padded_head_dims(values)
    fixed = values["maximum"] == "fixed"
    above, below = _NARROW if dtype.narrow else _WIDE
    return Plan(
        **carried(Plan, schedule) | {"rows": all_rows(values)},
        head_dim_padded=d,
        head_dim_v_padded=d_v,
        paged=is_paged(values),
        stream_k=values["by"] == "stream_k",
        fixed=fixed,
        slab=SWIZZLE.bytes // dtype.bytes,
        threads=THREADS,
        launch_registers=registers_left(values["blocks"]),
        combination=_combination(values),
        ledgers=ledgers,
        rescale_threshold=above if fixed else _LAZY_ABOVE,
        least_mean=2.0**-below,
    )


def _combination(values: Values) -> Combination:
    """Combine 8 splits at a time: faster where a row fills warps; nvcc spills elsewhere.

    So it does with 16 where a warp weighs splits, and lanes are beyond a row's end, if their number
    is no power of two.
    """
    num_splits, resumes = values["num_splits"], values["by"] == "stream_k"
    several = not resumes and values["maximum"] == "lazy"
    combination = Combination(num_splits, values["head_dim_v"], 8, resumes=resumes, several=several)
    if combination.lanes % 32 == 0 and not combination.ragged:
        return combination
    scarce = several and combination.ragged and num_splits.bit_count() > 1
    return replace(combination, window=4 if scarce else 16)
