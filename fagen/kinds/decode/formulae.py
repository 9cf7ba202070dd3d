"""Turn a schedule of decoding into its ledgers: shared memory, and registers by a model.

S and O lie transposed: keys, and columns of V, along the rows of the accumulators.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from fagen.arch import SM90
from fagen.errors import ScheduleError
from fagen.kinds.decode.keys import Schedule
from fagen.kinds.decode.rules import padded, share
from fagen.ledger import Ledger, Margin, first_that_fits, rows, solved, summed, symbols
from fagen.vocab import DTYPES

# addresses, loop state, barriers and a unit's numbers; P on its way takes half a register for each
# row beside them
WORKING_REGISTERS = 52

FP32_BYTES = 4
WARPS = SM90.warpgroup_threads // SM90.warp_threads  # that compute
THREADS = SM90.warpgroup_threads + SM90.warp_threads  # with the one that loads

SHARED = "shared memory of a thread block"
REGISTERS = "registers of a thread"
MARGIN = Margin(kernels=8, least=-4, most=24)  # of tests/register_margins.json

# d, d_v padded; e bytes per element
SYMBOLS = ("rows", "block_n", "d", "d_v", "stages", "q_stages", "e")
# the keys that they depend on
SUMMED = (
    *("rows", "block_n", "head_dim", "head_dim_v", "dtype", "stages", "q_stages", "blocks"),
    *("speculate", "by"),
)


@dataclass(frozen=True)
class Budget:
    """The ledgers of a schedule."""

    shared: Ledger
    registers: Ledger

    def over(self) -> tuple[Ledger, ...]:
        """Return the ledgers that do not fit."""
        return tuple(ledger for ledger in (self.shared, self.registers) if not ledger.fits)


def budget(schedule: Schedule) -> Budget:
    """Return both ledgers of a schedule, whether they fit or not."""
    sizes, blocks = _sizes(schedule), schedule.grid.blocks
    align = SM90.smem_tile_alignment
    shared = Ledger(
        SHARED,
        f"bytes, each array rounded up to {align:,}",
        rows(sizes, align, shared_formulae, (k_is_wider(schedule),)),
        share(blocks),
        SM90.source("smem_per_block")
        if share(blocks) == SM90.smem_per_block
        else f"{SM90.source('smem_per_sm')}, for {blocks} blocks",
    )
    registers = Ledger(
        REGISTERS,
        str(MARGIN),
        rows(sizes, 1, register_formulae, _forms(schedule)),
        registers_left(blocks),
        f"{blocks * THREADS // SM90.warp_threads} warps on {SM90.issued_warps} schedulers, "
        f"{SM90.source('registers_per_sm')}",
    )
    return Budget(shared, registers)


def registers_left(blocks: int) -> int:
    """Return how many registers a thread may have where so many blocks share an SM."""
    return SM90.registers_of_warps(blocks * THREADS // SM90.warp_threads)


def k_is_wider(schedule: Schedule) -> bool:
    """Whether a buffer of the ring is as wide as K, else as V."""
    d, d_v = padded_head_dims(schedule)
    return d >= d_v


def padded_head_dims(schedule: Schedule) -> tuple[int, int]:
    """Return how many columns of shared memory Q and K take, and V."""
    asked = schedule.decode
    return padded(asked.head_dim, asked.dtype), padded(asked.head_dim_v, asked.dtype)


@cache
def shared_formulae(k_wider: bool) -> Mapping[str, Any]:
    """Return each array in shared memory with its bytes, before rounding up to the alignment."""
    m, n, d, d_v, stages, q_stages, e = symbols(SYMBOLS).values()
    return {
        "ring": stages * n * (d if k_wider else d_v) * e,
        "q": q_stages * m * d * e,
        "p": 2 * m * n * e,  # of this step, and of the one whose product is under way
        "statistics": 2 * WARPS * m * FP32_BYTES,  # maxima and sums
        "barriers": SM90.mbarrier_bytes * 2 * (stages + q_stages),
    }


@cache
def register_formulae(speculates: bool, by_runs: bool) -> Mapping[str, Any]:
    """Return the registers of one thread that computes, by what they hold."""
    import sympy

    m, n, _, d_v, *_ = symbols(SYMBOLS).values()
    # a warpgroup's 64 × rows fp32 accumulator lies in 128 threads
    per_thread = m / sympy.Integer(SM90.warpgroup_threads)
    folded = {"folded": d_v * per_thread + m / 2} if by_runs else {}
    return {
        "s": n * per_thread,
        "o": d_v * per_thread,
        **folded,  # O of the chunks before, with their maxima and sums
        # of a quarter of the rows: reference, sum, what a step adds that may be done again
        "statistics": (3 if speculates else 2) * m / sympy.Integer(4),
        "working": WORKING_REGISTERS + m / 2,
    }


def sums(values: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield (name, sum, limit) of each ledger that does not fit, and nothing more: for a search.

    `values` are those of a schedule's keys that keep the rules between keys; SUMMED count.
    """
    dtype, blocks = values["dtype"], values["blocks"]
    d, d_v = (padded(values[key], dtype) for key in ("head_dim", "head_dim_v"))
    tile = values["rows"], values["block_n"], d, d_v
    sizes = *tile, values["stages"], values["q_stages"], DTYPES[dtype].bytes
    forms = values["speculate"], values["by"] == "stream_k"
    shared = summed(SYMBOLS, shared_formulae, (d >= d_v,), SM90.smem_tile_alignment)
    registers = summed(SYMBOLS, register_formulae, forms, 1)
    for name, total, limit in (
        (SHARED, shared(*sizes), share(blocks)),
        (REGISTERS, registers(*sizes), registers_left(blocks)),
    ):
        if total > limit:
            yield name, total, limit


def nearest(schedule: Schedule) -> tuple[dict[str, Any], ...]:
    """Return changes of keys that make a schedule fit: of each key alone the nearest.

    None leaves a key out.
    """

    def fits(changes: Mapping[str, Any]) -> bool:
        try:
            return not budget(schedule.but(**changes)).over()
        except ScheduleError:
            return False

    found = (first_that_fits([options], fits) for options in _options(schedule))
    return tuple(changes for changes in found if changes)


def _options(schedule: Schedule) -> Iterator[list[dict[str, Any]]]:
    """Yield for each key the values that ask for less, nearest first."""
    values, step = schedule.values(), SM90.wgmma_n_step
    yield [{"stages": count} for count in range(values["stages"] - 1, 2, -1)]
    yield [{"blocks": count, "stages": None} for count in range(values["blocks"] - 1, 0, -1)]
    yield [{"q_stages": 1}] if values["q_stages"] > 1 else []
    yield [{"rows": rows} for rows in range(values["rows"] - step, 0, -step)]
    yield [{"block_n": SM90.wgmma_m}] if values["block_n"] > SM90.wgmma_m else []


def explain_lines(schedule: Schedule) -> Iterator[str]:
    """Yield lines: the formulae, the numbers in them, and the most rows that they allow."""
    sizes, own = _sizes(schedule), budget(schedule)
    yield "with " + ", ".join(f"{name} = {value}" for name, value in sizes.items())
    yield from solved(own.shared, shared_formulae(k_is_wider(schedule)), sizes, "stages")
    yield from solved(own.registers, register_formulae(*_forms(schedule)), sizes, "rows")


def _forms(schedule: Schedule) -> tuple[bool, bool]:
    return schedule.softmax.speculate, schedule.split.by == "stream_k"


def _sizes(schedule: Schedule) -> dict[str, int]:
    d, d_v = padded_head_dims(schedule)
    return {
        "rows": schedule.tile.rows,
        "block_n": schedule.tile.block_n,
        "d": d,
        "d_v": d_v,
        "stages": schedule.pipeline.stages,
        "q_stages": schedule.pipeline.q_stages,
        "e": DTYPES[schedule.decode.dtype].bytes,
    }
