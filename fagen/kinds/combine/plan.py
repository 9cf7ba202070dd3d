"""Turn a schedule of combining into its Plan: every number that its templates print."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar

from fagen.arch import SM90
from fagen.combining import Combining
from fagen.kinds.attention import carried
from fagen.kinds.combine.keys import Schedule
from fagen.kinds.combine.parts import parts
from fagen.kinds.combine.rules import LOAD_BYTES, is_ragged, lanes, row_loads
from fagen.kinds.combine.signature import rows_of, signature
from fagen.kinds.streaming import Streaming, table, warps_that_fit
from fagen.launch import Grid, Launch, Launches, Product
from fagen.ledger import Ledger, symbols
from fagen.ledger import rows as rows_at
from fagen.part import Memory, Parts
from fagen.signature import Signature
from fagen.vocab import PARTIALS, Dtype

_THREADS = 128  # of a thread block, at most: it takes whole rows
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
    sink: Dtype | None  # in which a call has one more logit of each head's rows

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

    @cached_property
    def shared(self) -> Ledger:
        """What loads that are under way take of shared memory."""
        sizes = {"loads": self.loads, "stages": self.stages, "threads": self.threads}
        lines = rows_at(sizes, 1, shared_formulae, (self.parts.memory, tuple(sizes)))
        return Ledger("shared memory", "bytes", lines, SM90.smem_static, SM90.source("smem_static"))

    @property
    def shared_bytes(self) -> int:
        """Of a thread block."""
        return self.shared.total

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
    def parts(self) -> Parts:
        """What the kernel is made of."""
        return parts(self.schedule.values())

    @cached_property
    def signature(self) -> Signature:
        """What a call takes and gives."""
        return signature(self)

    @property
    def launches(self) -> Launches:
        """One kernel; it waits for the end of the launch before it, which may make the partials."""
        grid = Grid(Product(rows_of(self), per=self.rows))
        kernel = Launch(
            "combine", grid, self.threads, self.shared_bytes, overlaps=True, threads_as="threads"
        )
        rows = ("seqlen", "heads") if self.varlen else ("batch", "seqlen", "heads")
        return Launches((kernel,), empty=rows)

    def _recorded(self) -> dict[str, Any]:
        return {"bytes_in_flight": self.bytes_in_flight, "row_bytes": self.row_bytes}


def plan(schedule: Schedule) -> Plan:
    """Work a schedule out: every one of them fits."""
    keys = schedule.combine
    dtype, out_dtype = PARTIALS[keys.dtype], PARTIALS[keys.out_dtype]
    vector = LOAD_BYTES // dtype.bytes
    values = schedule.values()
    row_lanes = lanes(values)
    loads = -(-row_loads(values) // row_lanes)
    rows = _THREADS // row_lanes
    threads = rows * row_lanes
    weighing = min(row_lanes, _STAGES)
    held = _STAGES // weighing
    together = SM90.warps_resident(_registers(vector * loads, held))
    blocks = together * SM90.warp_threads // threads
    return Plan(
        **carried(Plan, schedule),
        varlen=keys.layout == "varlen",
        vector=vector,
        out_words=vector * out_dtype.bytes // 4,
        lanes=row_lanes,
        loads=loads,
        ragged=is_ragged(values),
        rows=rows,
        one_row=row_lanes >= SM90.warp_threads,
        threads=threads,
        blocks=blocks,
        launch_registers=SM90.registers_left(threads * blocks),
        stages=_STAGES,
        weighing=weighing,
        held=held,
    )


@cache
def shared_formulae(memory: Memory, sizes: tuple[str, ...]) -> Mapping[str, Any]:
    """Return each array in shared memory with its bytes."""
    return memory.rows(symbols(sizes))


def _registers(sums: int, held: int) -> int:
    """What a thread is given, in eights: its sums, its LSEs and weights, and all else."""
    quantum = SM90.register_quantum
    return -(-(sums + 2 * (held - 1) + _OTHERS) // quantum) * quantum
