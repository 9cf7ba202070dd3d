"""Turn a schedule of the backward pass into its ledgers: shared memory, and registers by a model.

S, dP and the gradients of K and V lie transposed, keys along the rows of the accumulators.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from fagen.arch import SM90
from fagen.errors import ScheduleError
from fagen.kinds.backward.keys import Schedule
from fagen.kinds.backward.rules import FP32_BYTES, dq_columns, ones_in_shared_memory
from fagen.ledger import Ledger, Margin, Row, first_that_fits, rows, solved, symbols
from fagen.vocab import DTYPES

# Addresses, loop state, barriers and the statistics of a few columns. Where nvcc 13.0 spills in no
# kernel that was tried, so many are left beside the rest; with eight fewer some spill. One gradient
# leaves room to order things so that fewer do.
WORKING_REGISTERS = {"keys": 36, "gradients": 32}
# Eight of those are what statistics are multiplied by, where it does not lie in shared memory.
WORKING_WITHOUT_ONES = 28
SCORE_REGISTERS = 0  # of what a score keeps for its derivative: nothing where it is S

ADDERS = 2  # threads that add dQ up, in turns: one that waits for others alone is too slow
SEQUENCE_BYTES = 6 * 4  # where a sequence lies, of a length of its own, as all threads read it
TILE_BYTES = 10 * 4  # a tile that was drawn, as all threads read it
TILE_STAGES = 2  # tiles drawn and not yet done
FLAG_BYTES = 4  # whether there are more of them, for the warp that rounds dQ
PIECE_BYTES = 2 * SM90.warpgroup_threads * 16  # of sums of dQ: sixteen columns of 64 rows
PIECES = 6  # of these on their way to the warp that rounds them
# of a row's LSE and delta, as numbers that tensor cores multiply: 16 of 16 bits, one step of K
MULTIPLIED_BYTES = 32
# of both, where the ones that they are multiplied by lie in shared memory: in 16 bytes side by side
TOGETHER_BYTES = 16
ONES_BYTES = 3 * 128  # three core matrices

SHARED = "shared memory of a thread block"
REGISTERS = "registers of a consumer thread"
MARGIN = Margin(kernels=7, least=-8, most=2)  # of tests/register_margins.json
REGISTER_FILE = "register file of a thread block"

# d, d_v padded; own: columns of dQ's accumulator in a warpgroup, in the first where they differ;
# slices: of dQ; e bytes per element
SYMBOLS = (
    *("block_m", "block_n", "d", "d_v", "own", "slices", "cluster"),
    *("stages", "do_stages", "ds_stages", "e"),
)


@dataclass(frozen=True)
class Budget:
    """The ledgers of a schedule; of registers one for each role of consumers."""

    shared: Ledger
    registers: tuple[Ledger, ...]
    register_file: Ledger

    def every(self) -> tuple[Ledger, ...]:
        """Return them all."""
        return (self.shared, *self.registers, self.register_file)

    def over(self) -> tuple[Ledger, ...]:
        """Return the ledgers that do not fit."""
        return tuple(ledger for ledger in self.every() if not ledger.fits)


def padded_head_dims(schedule: Schedule) -> tuple[int, int]:
    """Return how many columns of shared memory Q and K take, and V and dO."""
    asked = schedule.backward
    dtype = DTYPES[asked.dtype]
    return dtype.filled_up(asked.head_dim), dtype.filled_up(asked.head_dim_v)


def threads(schedule: Schedule) -> int:
    """Return threads per block: the consumers, and a warpgroup that loads and adds dQ up."""
    return (schedule.consumers + 1) * SM90.warpgroup_threads


def statistics_bytes(schedule: Schedule) -> int:
    """Return the bytes of the LSEs and deltas of a block of rows."""
    block_m = schedule.tile.block_m
    together = ones_in_shared_memory(schedule.values())
    return (TOGETHER_BYTES if together else MULTIPLIED_BYTES) * block_m


def budget(schedule: Schedule) -> Budget:
    """Return all ledgers of a schedule, whether they fit or not."""
    sizes = _sizes(schedule)
    align = SM90.smem_tile_alignment
    shared = Ledger(
        SHARED,
        f"bytes, each array rounded up to {align:,}",
        rows(sizes, align, shared_formulae, _shared_choices(schedule)),
        SM90.smem_per_block,
        SM90.source("smem_per_block"),
    )
    return Budget(shared, tuple(_registers(schedule, sizes)), _register_file(schedule))


def roles(schedule: Schedule) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Return the roles of consumers: name, key of their registers, what they compute."""
    if schedule.warps.partition == "gradients":
        key = "consumer_registers"
        return ("dV consumer", key, ("dv", "dq")), ("dK consumer", key, ("dk", "dq"))
    if schedule.warps.dq_by == "one" and schedule.consumers > 1:
        last = ("dQ consumer", "dq_registers", ("dk", "dv", "dq"))
        return ("consumer", "consumer_registers", ("dk", "dv")), last
    return (("consumer", "consumer_registers", ("dk", "dv", "dq")),)


def _registers(schedule: Schedule, sizes: Mapping[str, int]) -> Iterator[Ledger]:
    for role, key, computes in roles(schedule):
        most = getattr(schedule.warps, key)
        yield Ledger(
            f"registers of a {role}'s thread",
            str(MARGIN),
            rows(sizes, 1, register_formulae, _choices(schedule, computes)),
            min(most, SM90.max_registers_per_thread),
            f"{key} = {most}",
        )


def _shared_choices(schedule: Schedule) -> tuple[bool, int, bool, bool, bool, bool, bool]:
    """Whether consumers part by gradients, how many blocks share rows, and of varlen sequences.

    Then whether ones lie in shared memory, whether all meet for dQ, whether tiles are drawn, and
    whether dQ is rounded meanwhile.
    """
    varlen = schedule.backward.lengths == "varlen"
    ones = ones_in_shared_memory(schedule.values())
    meet = schedule.warps.dq_by == "all"
    by_gradients = schedule.warps.partition == "gradients"
    stays, rounds = schedule.grid.persistent, schedule.overlap.postprocess
    return by_gradients, schedule.grid.cluster, varlen, ones, meet, stays, rounds


def _choices(
    schedule: Schedule, computes: tuple[str, ...]
) -> tuple[tuple[str, ...], bool, bool, str, bool]:
    """What a role computes, whether alone dQ, whether the next S is issued; what is kept; ones."""
    alone = schedule.warps.dq_by == "one" and "dq" in computes
    ahead = schedule.overlap.intra_warpgroup and "dv" in computes
    ones = ones_in_shared_memory(schedule.values())
    return computes, alone, ahead, schedule.warps.kept, ones


@cache
def shared_formulae(
    by_gradients: bool,
    shared_by: int,
    varlen: bool = False,
    ones: bool = False,
    meet: bool = False,
    persistent: bool = False,
    postprocess: bool = False,
) -> Mapping[str, Any]:
    """Return each array in shared memory with its bytes, before rounding up to the alignment."""
    import sympy

    m, n, d, d_v, _, slices, cluster, *depths, e = symbols(SYMBOLS).values()
    stages, do_stages, ds_stages = depths
    consumers = 2 if by_gradients else n / SM90.wgmma_m
    # Q, dO, P and dS full and empty for each stage; each warpgroup's dQ full for each that adds,
    # and empty; K and V full, or, where they come with Q and dO, dK and dV full, dV empty, and
    # tiles full and empty
    barriers = 2 * (stages + do_stages + 2 * ds_stages) + (ADDERS + 1) * consumers
    barriers += 3 + 2 * TILE_STAGES if persistent else 2
    if postprocess:
        barriers += PIECES
    pieces = {"sums": sympy.Integer(PIECES * PIECE_BYTES)} if postprocess else {}
    p, numbers = {}, {"statistics": MULTIPLIED_BYTES * stages * m}
    if by_gradients:
        p = {"p": ds_stages * m * n * e}
    peer = {}
    if shared_by > 1:  # what dQ of both blocks' keys takes of the other's
        peer = {"k_peer": n * d * e / cluster, "ds_peer": ds_stages * m * n * e}
        barriers += ds_stages
    last = {"barriers": SM90.mbarrier_bytes * barriers}
    if ones:  # small arrays, one behind the other
        if not by_gradients:  # P has no barriers, and dS none where all meet
            barriers -= 2 * ds_stages * (2 if meet else 1)
        last = {"barriers": SM90.mbarrier_bytes * barriers}
        together = TOGETHER_BYTES * stages * m + ONES_BYTES
        numbers, last = {}, {"statistics, ones, barriers": together + last["barriers"]}
    # there is room beside them
    if varlen:
        last = {f"{name}, sequence": bytes + SEQUENCE_BYTES for name, bytes in last.items()}
    if persistent:
        tiles = TILE_STAGES * TILE_BYTES + (FLAG_BYTES if postprocess else 0)
        last = {f"{name}, tiles": bytes + tiles for name, bytes in last.items()}
    return {
        "k": n * d * e,
        "v": n * d_v * e,
        "q": stages * m * d * e,
        "do": do_stages * m * d_v * e,
        "ds": ds_stages * m * n * e,
        **p,
        **peer,
        "dq": FP32_BYTES * m * d / cluster / slices,
        **pieces,
        **numbers,
        **last,
    }


@cache
def register_formulae(
    computes: tuple[str, ...], alone: bool, ahead: bool, kept: str = "none", ones: bool = False
) -> Mapping[str, Any]:
    """Return the registers of one consumer thread by what they hold, at the most.

    `computes` says which gradients, `alone` that dQ waits until dV's P is free; `ahead`: the next
    step's S is issued within a step; `kept`: what of its keys is there; `ones`: that what
    statistics are multiplied by is not.
    """
    import sympy

    m, _, d, d_v, own, *_, e = symbols(SYMBOLS).values()
    # a warpgroup's 64 × n fp32 accumulator lies in 128 threads: n / 2 registers each
    per_thread = sympy.Rational(SM90.wgmma_m, SM90.warpgroup_threads)
    s = m * per_thread
    packed = s * e / 4
    dq = own * per_thread if "dq" in computes else 0
    held = {"dk": d * per_thread, "dv": d_v * per_thread}
    both = "dk" in computes and "dv" in computes
    if both:  # S and dP; then P and dS in 16 bits, beside dQ
        most = [2 * s, (1 if alone else 2) * packed + dq]
    else:  # S or dP, and P; then one of them in 16 bits, or the next S, beside dQ
        most = [s + packed, (s if ahead else packed) + dq]
    working = WORKING_REGISTERS["keys" if both else "gradients"]
    if both and ones:
        working = WORKING_WITHOUT_ONES
    return {
        **{name: held[name] for name in held if name in computes},
        **({"k": d * per_thread * e / 4} if kept == "k" else {}),
        "s, dp": sympy.Max(*most),
        "score": sympy.Integer(SCORE_REGISTERS),
        "working": sympy.Integer(working),
    }


def nearest(schedule: Schedule) -> tuple[dict[str, Any], ...]:
    """Return changes of keys that make a schedule fit: of each key alone the nearest, or of tiles.

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
    """Yield for each key, and for tiles, the values that ask for less, nearest first."""
    values, said = schedule.values(), schedule.settings()
    registers: dict[str, Any] = {
        key: None
        for key in ("producer_registers", "consumer_registers", "dq_registers")
        if key in said
    }
    now = values["block_m"], values["block_n"]
    tiles = [(m, n) for m in _below(now[0]) for n in _below(now[1]) if (m, n) != now]
    yield [
        {
            key: new
            for key, new, old in zip(("block_m", "block_n"), tile, now, strict=True)
            if new != old
        }
        | registers
        for tile in sorted(tiles, key=lambda tile: tile[0] * tile[1], reverse=True)
    ]
    for key in ("stages", "do_stages", "ds_stages"):
        yield [{key: count} for count in range(values[key] - 1, 0, -1)]
    yield [registers] if registers else []


def _below(rows: int) -> tuple[int, ...]:
    return rows, *range((rows - 1) // SM90.wgmma_m * SM90.wgmma_m, 0, -SM90.wgmma_m)


def explain_lines(schedule: Schedule) -> Iterator[str]:
    """Yield lines: the formulae, the numbers in them, and the widest heads that they allow."""
    sizes, own = _sizes(schedule), budget(schedule)
    yield "with " + ", ".join(f"{name} = {value}" for name, value in sizes.items())
    yield from solved(own.shared, shared_formulae(*_shared_choices(schedule)), sizes, "d")
    for ledger, (_, _, computes) in zip(own.registers, roles(schedule), strict=True):
        formulae = register_formulae(*_choices(schedule, computes))
        # who has no dK holds nothing that is as wide as Q and K
        yield from solved(ledger, formulae, sizes, "d" if "dk" in formulae else "d_v")


def _sizes(schedule: Schedule) -> dict[str, int]:
    tile, pipeline = schedule.tile, schedule.pipeline
    d, d_v = padded_head_dims(schedule)
    return {
        "block_m": tile.block_m,
        "block_n": tile.block_n,
        "d": d,
        "d_v": d_v,
        "own": dq_columns(schedule.values())[0],
        "slices": pipeline.dq_slices,
        "cluster": schedule.grid.cluster,
        "stages": pipeline.stages,
        "do_stages": pipeline.do_stages,
        "ds_stages": pipeline.ds_stages,
        "e": DTYPES[schedule.backward.dtype].bytes,
    }


def _register_file(schedule: Schedule) -> Ledger:
    """What setmaxnreg asks for, of what the launch brought; asking for more would wait for ever."""
    warps, group, count = schedule.warps, SM90.warpgroup_threads, threads(schedule)
    alone = {name: (1, key) for name, key, _ in roles(schedule)}
    if len(alone) == 1:
        alone = {"consumers": (schedule.consumers, "consumer_registers")}
    elif schedule.warps.dq_by == "one":
        alone["consumer"] = schedule.consumers - 1, "consumer_registers"
    asked = {"producer": (1, "producer_registers"), **alone}
    lines = tuple(
        Row(name, groups * group * getattr(warps, key), f"{groups}·{group}·{key}")
        for name, (groups, key) in asked.items()
    )
    return Ledger(
        REGISTER_FILE,
        "registers after setmaxnreg",
        lines,
        SM90.registers_left(count) * count,
        f"{count} threads at launch, {SM90.source('registers_per_sm')}",
    )
