"""Turn a schedule of combining into its Plan: every number that its templates print."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from fagen.arch import SM90
from fagen.kind import Role
from fagen.kinds.combine import fold
from fagen.kinds.combine.keys import Schedule
from fagen.kinds.combine.rules import LOAD_BYTES, lanes
from fagen.kinds.combine.signature import signature
from fagen.launch import Grid, Launch, Launches, Product
from fagen.signature import Extent, Signature
from fagen.vocab import PARTIALS, Dtype

_WORDS = LOAD_BYTES // 4  # registers that a load fills
_OTHERS = 32  # registers for addresses, steps, weights and what is counted


@dataclass(frozen=True)
class Plan:
    """Combining, worked out.  Every schedule of it fits."""

    kind: ClassVar[str] = "combine"
    max_spill_bytes: ClassVar[int] = 0  # per thread
    roles: ClassVar[tuple[Role, ...]] = ()  # no warp is specialised
    modelled_registers: ClassVar[int] = 0
    spill_remedy: ClassVar[str] = "fewer splits under way, a smaller unroll, take fewer"
    shared_bytes: ClassVar[int] = 0

    schedule: Schedule
    slug: str
    dtype: Dtype  # of the partial outputs
    out_dtype: Dtype

    head_dim: int
    packed: bool
    vector: int  # elements of a load
    out_words: int  # registers that they take as output
    lanes: int  # that share a row
    ragged: bool  # some of them are idle
    rows: int  # per thread block
    one_row: bool  # a warp has lanes of one row only
    threads: int
    blocks: int  # that a multiprocessor should hold at least
    launch_registers: int  # per thread, that so many blocks leave it

    unroll: int  # splits whose loads are under way together
    weighing: int  # neighbouring lanes that share the work of weighing them
    held: int  # weights that each of these works out

    log2_e: float = fold.LOG2_E
    ln_2: float = fold.LN_2
    rounder: float = fold.ROUND
    least_exponent: float = fold.LEAST_EXPONENT
    sqrt_half_bits: int = fold.SQRT_HALF_BITS
    exp2: tuple[float, ...] = fold.EXP2
    log: tuple[float, ...] = fold.LOG

    @property
    def headers(self) -> tuple[str, ...]:
        """What declares the element types."""
        found = dict.fromkeys((self.dtype.header, self.out_dtype.header))
        return tuple(name for name in found if name != PARTIALS["fp32"].header)

    @property
    def converted(self) -> bool:
        """Whether a partial output is widened to fp32."""
        return self.dtype.bytes < PARTIALS["fp32"].bytes

    @property
    def rounded(self) -> bool:
        """Whether the output is narrower than fp32."""
        return self.out_dtype.bytes < PARTIALS["fp32"].bytes

    @property
    def bytes_in_flight(self) -> int:
        """Of partial outputs, that a multiprocessor's loads may have under way."""
        return self.threads * self.blocks * self.unroll * LOAD_BYTES

    @property
    def row_bytes(self) -> tuple[int, int]:
        """What a row moves: of each split, and besides."""
        fp32 = PARTIALS["fp32"].bytes
        partial = self.head_dim * self.dtype.bytes + fp32
        return partial, self.head_dim * self.out_dtype.bytes + fp32

    @property
    def bytes_moved(self) -> str:
        """The bytes that a call must move, as a formula of its sizes."""
        partial, whole = self.row_bytes
        return f"{self._rows} · (splits · {partial:,} + {whole:,})"

    def moved(self, rows: int, splits: int) -> int:
        """Return the bytes that a call must move."""
        partial, whole = self.row_bytes
        return rows * (splits * partial + whole)

    @property
    def reasons(self) -> str:
        """Why so many blocks, to be printed below the ledger."""
        share = SM90.registers_per_sm // SM90.issued_warps
        wanted = _registers(self.unroll, self.vector)
        warps = self.threads // SM90.warp_threads
        partial, whole = self.row_bytes
        return (
            f"registers for loads         {self.unroll} splits x {_WORDS} = "
            f"{self.unroll * _WORDS}\n"
            f"registers for them and all  + {self.vector} sums + {_OTHERS} others = {wanted}\n"
            f"warps that then fit         {share:,} / ({wanted} x {SM90.warp_threads}), rounded "
            f"down, x {SM90.issued_warps} schedulers = {_warps_together(wanted)}\n"
            f"so many thread blocks       {_warps_together(wanted)} / {warps} warps, rounded "
            f"down = {self.blocks}\n"
            f"bytes moved                 {self.bytes_moved}\n"
            f"  of a split                {self.head_dim} x {self.dtype.bytes} + 4 of its LSE = "
            f"{partial:,}\n"
            f"  of the output             {self.head_dim} x {self.out_dtype.bytes} + 4 of its LSE "
            f"= {whole:,}"
        )

    @property
    def ledger(self) -> str:
        """What a multiprocessor holds of it, to be printed."""
        held = self.threads * self.blocks
        rows = [
            ("lanes per row", f"{self.lanes}"),
            ("rows per thread block", f"{self.rows}"),
            ("threads per thread block", f"{self.threads}"),
            ("thread blocks per multiprocessor", f"{self.blocks}"),
            (
                "registers per thread",
                f"{self.launch_registers}, {held * self.launch_registers:,} of "
                f"{SM90.registers_per_sm:,} in all",
            ),
            ("bytes under way per multiprocessor", f"{self.bytes_in_flight:,}"),
            ("thread blocks", f"{self.launches.kernels[0].grid.x}"),
        ]
        return "\n".join(f"{name:<36}{said}" for name, said in rows)

    @cached_property
    def signature(self) -> Signature:
        """What a call takes and gives."""
        return signature(self)

    @property
    def _rows(self) -> Product:
        batch = () if self.packed else (Extent("batch"),)
        return Product((*batch, Extent("seqlen"), Extent("heads")))

    @property
    def launches(self) -> Launches:
        """One kernel; it waits for the end of the launch before it, which may make the partials."""
        grid = Grid(Product(self._rows.factors, per=self.rows))
        return Launches((Launch("combine", grid, self.threads, overlaps=True),))

    def explained(self) -> str:
        """Return the ledger, why so many thread blocks share a multiprocessor, and the bytes."""
        return f"{self.ledger}\n\n{self.reasons}"

    def record(self) -> dict[str, Any]:
        """Return keys and ledger, for JSON."""
        return {
            "schedule": self.slug,
            "keys": self.schedule.values(),
            "threads": self.threads,
            "blocks": self.blocks,
            "registers": self.launch_registers,
            "bytes_in_flight": self.bytes_in_flight,
            "bytes_moved": self.bytes_moved,
        }


def plan(schedule: Schedule) -> Plan:
    """Work out how partial outputs are combined."""
    keys = schedule.combine
    dtype, out_dtype = PARTIALS[keys.dtype], PARTIALS[keys.out_dtype]
    vector = LOAD_BYTES // dtype.bytes
    shared = lanes(keys.dtype, keys.head_dim)
    rows = keys.threads // shared
    threads = rows * shared
    weighing = min(shared, keys.unroll)
    wanted = _registers(keys.unroll, vector)
    blocks = _warps_together(wanted) // (threads // SM90.warp_threads)
    return Plan(
        schedule=schedule,
        slug=schedule.slug,
        dtype=dtype,
        out_dtype=out_dtype,
        head_dim=keys.head_dim,
        packed=keys.layout == "packed",
        vector=vector,
        out_words=vector * out_dtype.bytes // 4,
        lanes=shared,
        ragged=shared * vector > keys.head_dim,
        rows=rows,
        one_row=shared >= SM90.warp_threads,
        threads=threads,
        blocks=blocks,
        launch_registers=_share(threads * blocks),
        unroll=keys.unroll,
        weighing=weighing,
        held=keys.unroll // weighing,
    )


def _registers(unroll: int, vector: int) -> int:
    """What a thread is given: the splits under way, its sums, and all else."""
    return unroll * _WORDS + vector + _OTHERS


def _share(threads: int) -> int:
    """How many registers each of so many threads may have at most."""
    quantum = SM90.register_quantum
    share = SM90.registers_per_sm // threads // quantum * quantum
    return min(share, SM90.max_registers_per_thread)


def _warps_together(registers: int) -> int:
    """How many warps a multiprocessor holds: each of its schedulers has registers of its own.

    Registers are given out in eights.
    """
    quantum = SM90.register_quantum
    given = -(-registers // quantum) * quantum
    share = SM90.registers_per_sm // SM90.issued_warps
    return share // (given * SM90.warp_threads) * SM90.issued_warps
