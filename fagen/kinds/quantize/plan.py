"""Turn a quantiser's schedule into its Plan: every number that its templates print."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from fagen.arch import SM90
from fagen.kinds.attention import carried
from fagen.kinds.quantize.keys import Quantize, Schedule
from fagen.kinds.quantize.rules import block_rows
from fagen.kinds.quantize.signature import signature
from fagen.kinds.streaming import Streaming, table, warps_that_fit
from fagen.launch import Grid, Launch, Launches, Product
from fagen.signature import Extent, Signature
from fagen.vocab import LEAST_MAXIMUM, Dtype

WARP_ROWS = 16  # of one mma instruction, and of V's groups of keys
CHUNK_COLUMNS = 32  # four lanes share a row, with 16 bytes each

_TALL = 4  # chunks of two rows that a lane has registers for; of wider rows it holds one at a time,
_SMALL = 64  # unless so few rows make a thread block that three still fit beside each other
_EMBEDDING = 24  # registers that cosines, sines and their products take in wide rows
_MEANS = 8  # registers that means take where rotated rows are wide or no whole chunks,
_MEANS_OF_PARTS = 32  # in parts of rows,
_TRANSPOSED_MEANS = 56  # and where both parts are under way at once
_COLUMN_THREADS = 256
_COLUMN_BLOCKS = 4  # of these; more would leave a thread too few registers for 8 loads under way
_COLUMN_ROWS = 512  # what is found of so many is written once, a hundredth of what was read
_LEAST_REGISTERS = (
    56  # more thread blocks than these allow are not needed to fill the memory's queues
)


@dataclass(frozen=True)
class Plan(Streaming):
    """A quantiser, worked out.  Every schedule of one fits."""

    kind: ClassVar[str] = "quantize"
    largest: ClassVar[float] = SM90.e4m3_max
    least: ClassVar[float] = LEAST_MAXIMUM  # that a maximum is taken for
    column_threads: ClassVar[int] = _COLUMN_THREADS  # of a block that reads columns for their
    column_blocks: ClassVar[int] = _COLUMN_BLOCKS  # numbers; that an SM should hold at least;
    column_rows: ClassVar[int] = _COLUMN_ROWS  # per thread block

    schedule: Schedule
    slug: str
    dtype: Dtype

    head_dim: int
    rotary: bool
    pairs: bool  # of neighbouring columns; else of columns half a row apart
    angles: int  # of a row
    rotate: bool
    hadamard: int  # columns that are rotated together
    norm: float  # what makes that rotation orthonormal; 1 without one

    scales: str
    by_block: bool
    by_tensor: bool
    by_column: bool
    center: bool  # means of columns are taken off
    scale_rows: int  # 0 where scales are not by block

    columns: bool  # transposed, in the order of vocab.KEY_ORDER
    rows: int  # per thread block
    warps: int
    threads: int
    blocks: int  # that an SM should hold at least
    launch_registers: int  # per thread, that so many blocks leave it

    chunks: int  # of 32 columns
    ragged: bool  # the last chunk is half empty
    parts: int  # in which a warp goes through its rows
    height: int  # rows that a lane holds at a time
    reduce_threads: int  # threads that make one descale of many maxima, or of columns' numbers
    column_lanes: int  # threads that share a row, 8 columns each
    column_numbers: int  # found of a column: its sum, and for scales its extremes
    shared_bytes: int

    @property
    def reads(self) -> str:
        """How often the input is read, in words."""
        if self.readings == 1:
            return "once"
        names = "means" if self.by_block else "descales and means" if self.center else "descales"
        often = {2: "twice", 3: "three times"}[self.readings]
        return f"once where {names} are given, else {often}"

    @property
    def readings(self) -> int:
        """How often a call reads its input where nothing is given."""
        return 1 + self.reads_columns + (not self.by_block and not self.by_column)

    @property
    def reads_columns(self) -> bool:
        """Whether a kernel of its own finds means or scales of columns."""
        return self.center or self.by_column

    @property
    def reasons(self) -> str:
        """Why so many blocks, to be printed below the ledger."""
        values = self.height * self.chunks * 8
        registers = _registers(values, self.parts, self.schedule.quantize)
        together, fit = warps_that_fit(registers, 28)
        return (
            f"values that a lane holds    {self.height} rows x {self.chunks} chunks x 8 = "
            f"{values}\n"
            f"registers for them and all  {registers}\n"
            f"{fit}\n"
            f"so many thread blocks       {together} / {self.warps} warps, rounded "
            f"down = {self.blocks}"
        )

    @property
    def ledger(self) -> str:
        """What an SM holds of it, to be printed."""
        rows = [
            ("rows of a head per thread block", f"{self.rows}"),
            ("threads per thread block", f"{self.threads}"),
            ("thread blocks per SM", f"{self.blocks}"),
            self.registers_held,
            ("bytes of shared memory per block", f"{self.shared_bytes:,}"),
            ("kernels", f"{len(self.launches.kernels)}"),
            ("the input is read", self.reads),
        ]
        return table(rows, 34)

    @cached_property
    def signature(self) -> Signature:
        """What a call takes and gives."""
        return signature(self)

    @property
    def launches(self) -> Launches:
        """One kernel; two more before it for each thing that is to be found first.

        Those are numbers of columns, and the maxima of a head or tensor.
        """
        heads, batch = Extent("heads"), Extent("batch")
        tiles = Extent("seqlen", per=self.rows)
        grid = Grid(Product((heads, tiles, batch)))
        kernels = [Launch("quantize", grid, self.threads, self.shared_bytes)]
        fp32 = Extent(number=4)
        workspace = None
        unless = "mean" if self.by_block else "descale"
        if not (self.by_block or self.by_column):
            single = Grid(Product() if self.by_tensor else Product((heads, batch)))
            kernels = [
                Launch("find_maxima", grid, self.threads, unless=unless),
                Launch("reduce_maxima", single, self.reduce_threads, unless=unless),
                *kernels,
            ]
            workspace = Product((batch, heads, tiles, fp32))
        if self.reads_columns:
            of_columns = Extent("seqlen", per=self.column_rows)
            blocks_of_columns = Grid(Product((heads, of_columns, batch)))
            of_a_head = Grid(Product((heads, batch)))
            kernels = [
                Launch("find_columns", blocks_of_columns, self.column_threads, unless=unless),
                Launch("reduce_columns", of_a_head, self.reduce_threads, unless=unless),
                *kernels,
            ]
            # maxima, of which there are fewer, come later and take the same place
            numbers = Extent(number=self.column_numbers * self.head_dim)
            workspace = Product((batch, heads, of_columns, numbers, fp32))
        if workspace is None:
            return Launches(tuple(kernels))
        return Launches(tuple(kernels), workspace, unless=unless)

    def _recorded(self) -> dict[str, Any]:
        return {"kernels": len(self.launches.kernels), "reads": self.reads}


def plan(schedule: Schedule) -> Plan:
    """Work a quantiser out."""
    keys = schedule.quantize
    chunks = -(-keys.head_dim // CHUNK_COLUMNS)
    rows = block_rows(schedule.values())
    small = keys.scales == "block" and rows <= _SMALL
    parts = 1 if chunks <= _TALL or small else 2
    hadamard = keys.head_dim & -keys.head_dim  # the largest power of two that divides it
    warps = rows // WARP_ROWS
    threads = warps * SM90.warp_threads
    by_block = keys.scales == "block"
    by_column = keys.scales == "column"
    of_columns = keys.center or by_column
    held = 8 * chunks * (2 // parts)
    registers = _registers(held, parts, keys)
    blocks = SM90.warps_resident(registers) // warps
    columns = keys.layout == "columns"
    return Plan(
        **carried(Plan, schedule, "rotary"),
        rotary=keys.rotary != "none",
        pairs=keys.rotary == "pairs",
        angles=keys.head_dim // 2,
        hadamard=hadamard,
        norm=hadamard**-0.5 if keys.rotate else 1.0,
        by_block=by_block,
        by_tensor=keys.scales == "tensor",
        by_column=by_column,
        columns=columns,
        rows=rows,
        warps=warps,
        threads=threads,
        blocks=blocks,
        launch_registers=SM90.registers_left(threads * blocks),
        chunks=chunks,
        ragged=keys.head_dim % CHUNK_COLUMNS > 0,
        parts=parts,
        height=2 // parts,
        reduce_threads=SM90.max_threads_per_block if keys.scales == "tensor" or of_columns else 256,
        column_lanes=keys.head_dim // 8,
        column_numbers=3 if by_column else 1,
        # tile, tops, means and scales of columns, each as aligned as it is in the kernel
        shared_bytes=(rows * chunks * CHUNK_COLUMNS if columns else 0)
        + 4 * warps
        + 4 * chunks * CHUNK_COLUMNS * (keys.center + by_column),
    )


def _registers(values: int, parts: int, keys: Quantize) -> int:
    """What a thread is given: the more thread blocks an SM holds, the more is loaded
    while others compute and store.

    A lane has its values in the place of half as many registers of input, and some 18 for
    addresses, signs and what it packs; in parts, more than one of these is under way. Where wide
    rows are embedded, cosines and sines are too; where rows are rotated and then less their means,
    these may be.
    """
    extra = _EMBEDDING if keys.rotary != "none" and parts > 1 else 0
    wide = keys.head_dim > _TALL * CHUNK_COLUMNS
    if keys.rotate and keys.center and (wide or keys.head_dim % CHUNK_COLUMNS):
        of_parts = _TRANSPOSED_MEANS if keys.layout == "columns" else _MEANS_OF_PARTS
        extra = of_parts if parts > 1 else _MEANS
    return max(values + (64 if parts > 1 else 18) + extra, _LEAST_REGISTERS)
