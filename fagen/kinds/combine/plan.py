"""Turn a schedule of combining into its Plan: every number that its templates print."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from fagen.arch import SM90
from fagen.combining import Combining
from fagen.kinds.attention import carried
from fagen.kinds.combine.keys import Schedule
from fagen.kinds.combine.signature import rows_of, signature
from fagen.kinds.streaming import Streaming, table, warps_that_fit
from fagen.launch import Grid, Launch, Launches, Product
from fagen.ledger import Ledger, Row
from fagen.signature import Signature
from fagen.vocab import PARTIALS, Dtype

LOAD_BYTES = 16
_THREADS = 128  # of a thread block, at most: it takes whole rows
_LOADS = 2  # that a lane makes of a row, at most
_STAGES = 8  # splits whose loads are under way
_OTHERS = 32  # registers for addresses, steps, an LSE, a weight and what is counted


@dataclass(frozen=True)
class Plan(Streaming, Combining):
    """Combining, worked out: it fits."""

    kind: ClassVar[str] = "combine"

    schedule: Schedule
    slug: str
    dtype: Dtype  # of the partial outputs
    out_dtype: Dtype

    head_dim: int
    varlen: bool
    vector: int  # elements of a load
    out_words: int  # registers that they take as output
    lanes: int  # that share a row
    loads: int  # of a row, that each of them makes
    ragged: bool  # some of these are beyond its end
    rows: int  # per thread block
    one_row: bool  # a warp has lanes of one row only
    threads: int
    blocks: int  # that an SM's registers should suffice for
    launch_registers: int  # per thread, that so many blocks leave it

    stages: int  # splits whose loads are under way
    weighing: int  # neighbouring lanes that share the work of weighing them
    held: int  # weights that each of these works out
    shared: Ledger

    @property
    def shared_bytes(self) -> int:
        """Of a thread block."""
        return self.shared.total

    @property
    def headers(self) -> tuple[str, ...]:
        """What declares the element types."""
        headers = dict.fromkeys((self.dtype.header, self.out_dtype.header))
        return tuple(name for name in headers if name != PARTIALS["fp32"].header)

    @property
    def converted(self) -> bool:
        """Whether a partial output is widened to fp32."""
        return self.dtype.bytes < PARTIALS["fp32"].bytes

    @property
    def rounded(self) -> bool:
        """Whether the output is narrower than fp32."""
        return self.out_dtype.bytes < PARTIALS["fp32"].bytes

    @property
    def full_blocks(self) -> int:
        """Thread blocks that an SM holds where each has all of its ring."""
        block_bytes = self.shared_bytes + SM90.smem_reserved
        return min(self.blocks, SM90.smem_per_sm // block_bytes)

    @property
    def bytes_in_flight(self) -> int:
        """Of partial outputs, that an SM's loads may have under way."""
        return self.full_blocks * self.shared_bytes

    @property
    def row_bytes(self) -> tuple[int, int]:
        """What a row moves: of each split, and besides."""
        fp32 = PARTIALS["fp32"].bytes
        partial = self.head_dim * self.dtype.bytes + fp32
        return partial, self.head_dim * self.out_dtype.bytes + fp32

    def moved(self, rows: int, splits: int) -> int:
        """Return the bytes that a call must move."""
        partial, whole = self.row_bytes
        return rows * (splits * partial + whole)

    @property
    def reasons(self) -> str:
        """Why so many blocks, and what a call moves, to be printed below the ledger."""
        sums, warps = self.vector * self.loads, self.threads // SM90.warp_threads
        registers = _registers(sums, self.held)
        together, fit = warps_that_fit(registers, 26)
        partial, whole = self.row_bytes
        block_bytes = self.shared_bytes + SM90.smem_reserved
        return (
            f"registers per thread      {sums} sums + {registers - sums} others = {registers}\n"
            f"{fit}\n"
            f"so many thread blocks     {together} / {warps} warps, rounded down = "
            f"{together // warps}\n"
            f"and by shared memory      {SM90.smem_per_sm:,} / {block_bytes:,}, rounded down = "
            f"{SM90.smem_per_sm // block_bytes}, from {self.stages} splits on\n"
            f"bytes that a call moves   {Product(rows_of(self))} · "
            f"(splits · {partial:,} + {whole:,})\n"
            f"  of a split              {self.head_dim} x {self.dtype.bytes} + 4 of its LSE = "
            f"{partial:,}\n"
            f"  of the output           {self.head_dim} x {self.out_dtype.bytes} + 4 of its LSE "
            f"= {whole:,}"
        )

    @property
    def ledger(self) -> str:
        """What an SM holds of it, to be printed."""
        rows = [
            ("lanes per row", f"{self.lanes}, {self.loads} loads of {LOAD_BYTES} bytes each"),
            ("rows per thread block", f"{self.rows}"),
            ("threads per thread block", f"{self.threads}"),
            (
                "thread blocks per SM",
                f"{self.blocks}, from {self.stages} splits on {self.full_blocks}",
            ),
            self.registers_held,
            ("bytes under way per SM", f"{self.bytes_in_flight:,}"),
            ("thread blocks of a call", f"{self.launches.kernels[0].grid.x}"),
        ]
        return f"{table(rows, 36)}\n\n{self.shared}"

    @cached_property
    def signature(self) -> Signature:
        """What a call takes and gives."""
        return signature(self)

    @property
    def launches(self) -> Launches:
        """One kernel; it waits for the end of the launch before it, which may make the partials."""
        grid = Grid(Product(rows_of(self), per=self.rows))
        kernel = Launch("combine", grid, self.threads, self.shared_bytes, overlaps=True)
        return Launches((kernel,))

    def _recorded(self) -> dict[str, Any]:
        return {"bytes_in_flight": self.bytes_in_flight, "row_bytes": self.row_bytes}


def plan(schedule: Schedule) -> Plan:
    """Work a schedule out: every one of them fits."""
    keys = schedule.combine
    dtype, out_dtype = PARTIALS[keys.dtype], PARTIALS[keys.out_dtype]
    vector = LOAD_BYTES // dtype.bytes
    lanes = _lanes(dtype, keys.head_dim)
    loads = -(-_row_loads(dtype, keys.head_dim) // lanes)
    rows = _THREADS // lanes
    threads = rows * lanes
    weighing = min(lanes, _STAGES)
    held = _STAGES // weighing
    together = SM90.warps_resident(_registers(vector * loads, held))
    blocks = together * SM90.warp_threads // threads
    return Plan(
        **carried(Plan, schedule),
        varlen=keys.layout == "varlen",
        vector=vector,
        out_words=vector * out_dtype.bytes // 4,
        lanes=lanes,
        loads=loads,
        ragged=lanes * loads * vector > keys.head_dim,
        rows=rows,
        one_row=lanes >= SM90.warp_threads,
        threads=threads,
        blocks=blocks,
        launch_registers=SM90.registers_left(threads * blocks),
        stages=_STAGES,
        weighing=weighing,
        held=held,
        shared=_ring(loads, threads),
    )


def _ring(loads: int, threads: int) -> Ledger:
    """What the loads that are under way take of shared memory."""
    row = Row("ring", _STAGES * loads * threads * LOAD_BYTES, "16·loads·stages·threads")
    source = SM90.source("smem_static")
    return Ledger("shared memory", "bytes", (row,), SM90.smem_static, source)


def _lanes(dtype: Dtype, head_dim: int) -> int:
    """How many lanes share a row, each with its loads: a power of two, or whole warps.

    What is left over of them is idle.
    """
    needed = -(-_row_loads(dtype, head_dim) // _LOADS)
    if needed > SM90.warp_threads:
        return -(-needed // SM90.warp_threads) * SM90.warp_threads
    return 1 << (needed - 1).bit_length()


def _row_loads(dtype: Dtype, head_dim: int) -> int:
    """How many loads a row takes."""
    return head_dim * dtype.bytes // LOAD_BYTES


def _registers(sums: int, held: int) -> int:
    """What a thread is given, in eights: its sums, its LSEs and weights, and all else."""
    quantum = SM90.register_quantum
    return -(-(sums + 2 * (held - 1) + _OTHERS) // quantum) * quantum
