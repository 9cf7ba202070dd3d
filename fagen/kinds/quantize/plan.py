"""Turn a quantiser's schedule into its Plan: every number that its templates print."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from fagen.arch import SM90
from fagen.kind import Role
from fagen.kinds.quantize.keys import Schedule
from fagen.kinds.quantize.signature import signature
from fagen.launch import Grid, Launch, Launches, Product
from fagen.signature import Extent, Signature
from fagen.vocab import DTYPES, LEAST_MAXIMUM, Dtype

WARP_ROWS = 16  # of one mma instruction, and of V's groups of keys
CHUNK_COLUMNS = 32  # four lanes share a row, with 16 bytes each
ROTATED_BY_MMA = 16  # columns; what is left of a Hadamard matrix is additions inside a thread

_TALL = 4  # chunks of two rows that a lane has registers for; of wider rows it holds one at a time,
_SMALL = 64  # unless so few rows make a thread block that three still fit beside each other
_EMBEDDING = 24  # registers that cosines, sines and their products take in wide rows
_LEAST_REGISTERS = (
    56  # more thread blocks than these allow are not needed to fill the memory's queues
)


@dataclass(frozen=True)
class Plan:
    """A quantiser, worked out.  Every schedule of one fits."""

    kind: ClassVar[str] = "quantize"
    max_spill_bytes: ClassVar[int] = 0  # per thread
    roles: ClassVar[tuple[Role, ...]] = ()  # no warp is specialised
    modelled_registers: ClassVar[int] = 0
    spill_remedy: ClassVar[str] = ""  # no key bears on it

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
    scale_rows: int  # 0 where scales are not by block
    largest: float  # of e4m3
    least: float  # that a maximum is taken for

    columns: bool  # transposed, in the order of vocab.KEY_ORDER
    rows: int  # per thread block
    warps: int
    threads: int
    blocks: int  # that a multiprocessor should hold at least
    launch_registers: int  # per thread, that so many blocks leave it

    chunks: int  # of 32 columns
    ragged: bool  # the last chunk is half empty
    parts: int  # in which a warp goes through its rows
    height: int  # rows that a lane holds at a time
    reduce_threads: int  # threads that make one descale of many maxima
    shared_bytes: int

    @property
    def reads(self) -> str:
        """How often the input is read, in words."""
        return "once" if self.by_block else "once where descales are given, else twice"

    @property
    def reasons(self) -> str:
        """Why so many blocks, to be printed below the ledger."""
        values = self.height * self.chunks * 8
        share = SM90.registers_per_sm // SM90.issued_warps
        wanted = _registers(values, self.parts, self.rotary)
        together = SM90.warps_resident(wanted)
        return (
            f"values that a lane holds    {self.height} rows x {self.chunks} chunks x 8 = "
            f"{values}\n"
            f"registers for them and all  {wanted}\n"
            f"warps that then fit         {share:,} / ({wanted} x {SM90.warp_threads}), rounded "
            f"down, x {SM90.issued_warps} schedulers = {together}\n"
            f"so many thread blocks       {together} / {self.warps} warps, rounded "
            f"down = {self.blocks}"
        )

    @property
    def ledger(self) -> str:
        """What a multiprocessor holds of it, to be printed."""
        held = self.threads * self.blocks
        rows = [
            ("rows of a head per thread block", f"{self.rows}"),
            ("threads per thread block", f"{self.threads}"),
            ("thread blocks per multiprocessor", f"{self.blocks}"),
            (
                "registers per thread",
                f"{self.launch_registers}, {held * self.launch_registers:,} of "
                f"{SM90.registers_per_sm:,} in all",
            ),
            ("bytes of shared memory per block", f"{self.shared_bytes:,}"),
            ("kernels", f"{len(self.launches.kernels)}"),
            ("the input is read", self.reads),
        ]
        return "\n".join(f"{name:<34}{said}" for name, said in rows)

    @cached_property
    def signature(self) -> Signature:
        """What a call takes and gives."""
        return signature(self)

    @property
    def launches(self) -> Launches:
        """One kernel; two more before it where the maxima of a head or tensor are to be found."""
        heads, batch = Product((Extent("heads"),)), Product((Extent("batch"),))
        tiles = Extent("seqlen", per=self.rows)
        grid = Grid(heads, Product((tiles,)), batch)
        main = Launch("quantize", grid, self.threads, self.shared_bytes)
        if self.by_block:
            return Launches((main,))
        one = Grid(Product()) if self.by_tensor else Grid(heads, batch)
        maxima = Launch("find_maxima", grid, self.threads, unless="descale")
        descales = Launch("reduce_maxima", one, self.reduce_threads, unless="descale")
        fp32 = Extent(number=4)
        workspace = Product((Extent("batch"), Extent("heads"), tiles, fp32))
        return Launches((maxima, descales, main), workspace, unless="descale")

    def explained(self) -> str:
        """Return the ledger, and why so many thread blocks share a multiprocessor."""
        return f"{self.ledger}\n\n{self.reasons}"

    def record(self) -> dict[str, Any]:
        """Return keys and ledger, for JSON."""
        return {
            "schedule": self.slug,
            "keys": self.schedule.values(),
            "threads": self.threads,
            "blocks": self.blocks,
            "registers": self.launch_registers,
            "shared_bytes": self.shared_bytes,
            "kernels": len(self.launches.kernels),
            "reads": self.reads,
        }


def plan(schedule: Schedule) -> Plan:
    """Work a quantiser out."""
    keys = schedule.quantize
    chunks = -(-keys.head_dim // CHUNK_COLUMNS)
    small = keys.scales == "block" and keys.rows <= _SMALL
    parts = 1 if chunks <= _TALL or small else 2
    hadamard = keys.head_dim & -keys.head_dim  # the largest power of two that divides it
    warps = keys.rows // WARP_ROWS
    threads = warps * SM90.warp_threads
    by_block = keys.scales == "block"
    wanted = _registers(8 * chunks * (2 // parts), parts, keys.rotary != "none")
    blocks = SM90.warps_resident(wanted) // warps
    columns = keys.layout == "columns"
    return Plan(
        schedule=schedule,
        slug=schedule.slug,
        dtype=DTYPES[keys.dtype],
        head_dim=keys.head_dim,
        rotary=keys.rotary != "none",
        pairs=keys.rotary == "pairs",
        angles=keys.head_dim // 2,
        rotate=keys.rotate,
        hadamard=hadamard,
        norm=hadamard**-0.5 if keys.rotate else 1.0,
        scales=keys.scales,
        by_block=by_block,
        by_tensor=keys.scales == "tensor",
        scale_rows=keys.scale_rows,
        largest=SM90.e4m3_max,
        least=LEAST_MAXIMUM,
        columns=columns,
        rows=keys.rows,
        warps=warps,
        threads=threads,
        blocks=blocks,
        launch_registers=SM90.registers_left(threads * blocks),
        chunks=chunks,
        ragged=keys.head_dim % CHUNK_COLUMNS > 0,
        parts=parts,
        height=2 // parts,
        reduce_threads=SM90.max_threads_per_block if keys.scales == "tensor" else 256,
        # tile and tops, each as aligned as it is in the kernel
        shared_bytes=(keys.rows * chunks * CHUNK_COLUMNS if columns else 0) + 4 * warps,
    )


def _registers(values: int, parts: int, rotary: bool) -> int:
    """What a thread is given: the more thread blocks a multiprocessor holds, the more is loaded
    while others compute and store.

    A lane has its values in the place of half as many registers of input, and some 18 for
    addresses, signs and what it packs; in parts, more than one of these is under way. Where wide
    rows are embedded, cosines and sines are too.
    """
    extra = _EMBEDDING if rotary and parts > 1 else 0
    return max(values + (64 if parts > 1 else 18) + extra, _LEAST_REGISTERS)
