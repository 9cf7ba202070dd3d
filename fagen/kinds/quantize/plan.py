"""Turn a quantiser's schedule into its Plan: every number that its templates print."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from fagen.arch import SM90
from fagen.kinds.attention import carried
from fagen.kinds.quantize.keys import Schedule
from fagen.kinds.quantize.parts import parts
from fagen.kinds.quantize.rules import (
    CHUNK_COLUMNS,
    WARP_ROWS,
    block_rows,
    has_ragged_chunk,
    is_wide,
    passes,
)
from fagen.kinds.quantize.signature import signature
from fagen.kinds.streaming import Streaming, table, warps_that_fit
from fagen.launch import Grid, Launch, Launches, Product
from fagen.part import Parts
from fagen.signature import Extent, Signature
from fagen.vocab import LEAST_MAXIMUM, Dtype

_EMBEDDING = 24  # registers that cosines, sines and their products take in wide rows
_MEANS = 8  # registers that means take where rotated rows are wide or no whole chunks,
_MEANS_OF_PASSES = 32  # in two passes,
_TRANSPOSED_MEANS = 56  # and where both passes are under way at once
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
    warp_rows: ClassVar[int] = WARP_ROWS

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
    passes: int  # in which a warp goes through its rows
    height: int  # rows that a lane holds at a time
    reduce_threads: int  # threads that make one descale of many maxima, or of columns' numbers
    column_lanes: int  # threads that share a row, 8 columns each
    column_numbers: int  # found of a column: its sum, and for scales its extremes
    shared_bytes: int

    @property
    def by_block(self) -> bool:
        """Whether blocks of rows have scales of their own."""
        return self.scale_rows > 0

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
    def reads_again(self) -> bool:
        """Whether the last kernel reads rows for their values alone."""
        return not self.by_block or self.passes > 1

    @property
    def lacks_norm(self) -> bool:
        """Whether what maxima are of has still to be multiplied by the rotation's norm."""
        return self.rotate and not self.center

    @property
    def parts(self) -> Parts:
        """The parts that the kernels are made of."""
        return parts(self.schedule.values())

    @property
    def reasons(self) -> str:
        """Why so many blocks, to be printed below the ledger."""
        values = self.height * self.chunks * 8
        registers = _registers(values, self.schedule)
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
        empty = "batch", "heads", "seqlen"
        tiles = Extent("seqlen", per=self.rows)
        grid = Grid(Product((heads, tiles, batch)))
        kernels = [Launch("quantize", grid, self.threads)]
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
            return Launches(tuple(kernels), empty=empty)
        return Launches(tuple(kernels), workspace, unless=unless, empty=empty)

    def _recorded(self) -> dict[str, Any]:
        return {"kernels": len(self.launches.kernels), "reads": self.reads}


def plan(schedule: Schedule) -> Plan:
    """Work a quantiser out."""
    keys = schedule.quantize
    values = schedule.values()
    chunks = -(-keys.head_dim // CHUNK_COLUMNS)
    rows = block_rows(values)
    height = 2 // passes(values)
    hadamard = keys.head_dim & -keys.head_dim  # the largest power of two that divides it
    warps = rows // WARP_ROWS
    threads = warps * SM90.warp_threads
    by_column = keys.scales == "column"
    of_columns = keys.center or by_column
    registers = _registers(8 * chunks * height, schedule)
    blocks = SM90.warps_resident(registers) // warps
    columns = keys.layout == "columns"
    return Plan(
        **carried(Plan, schedule, "rotary"),
        rotary=keys.rotary != "none",
        pairs=keys.rotary == "pairs",
        angles=keys.head_dim // 2,
        hadamard=hadamard,
        norm=hadamard**-0.5 if keys.rotate else 1.0,
        by_tensor=keys.scales == "tensor",
        by_column=by_column,
        columns=columns,
        rows=rows,
        warps=warps,
        threads=threads,
        blocks=blocks,
        launch_registers=SM90.registers_left(threads * blocks),
        chunks=chunks,
        ragged=has_ragged_chunk(values),
        passes=passes(values),
        height=height,
        reduce_threads=SM90.max_threads_per_block if keys.scales == "tensor" or of_columns else 256,
        column_lanes=keys.head_dim // 8,
        column_numbers=3 if by_column else 1,
        # tile, tops, means and scales of columns, each as aligned as it is in the kernel
        shared_bytes=(rows * chunks * CHUNK_COLUMNS if columns else 0)
        + 4 * warps
        + 4 * chunks * CHUNK_COLUMNS * (keys.center + by_column),
    )


def _registers(values: int, schedule: Schedule) -> int:
    """What a thread is given: the more thread blocks an SM holds, the more is loaded
    while others compute and store.

    A lane has its values in the place of half as many registers of input, and some 18 for
    addresses, signs and what it packs; in two passes, more than one of these is under way. Where
    wide rows are embedded, cosines and sines are too; where rows are rotated and then less their
    means, these may be.
    """
    keys, raw = schedule.quantize, schedule.values()
    in_passes = passes(raw) > 1
    extra = _EMBEDDING if keys.rotary != "none" and in_passes else 0
    if keys.rotate and keys.center and (is_wide(raw) or has_ragged_chunk(raw)):
        of_passes = _TRANSPOSED_MEANS if keys.layout == "columns" else _MEANS_OF_PASSES
        extra = of_passes if in_passes else _MEANS
    return max(values + (64 if in_passes else 18) + extra, _LEAST_REGISTERS)
