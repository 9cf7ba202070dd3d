"""Turn a schedule of the backward pass into its ledgers: shared memory, and registers by a model.

S, dP and the gradients of K and V lie transposed, keys along the rows of the accumulators.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from fagen.arch import SM90
from fagen.kinds.attention import padded_head_dims
from fagen.kinds.backward.rules import consumers, dq_columns, ones_in_shared_memory
from fagen.kinds.budget import (
    FP32_BYTES,
    REGISTER_FILE,
    SHARED,
    Account,
    Budget,
    Changes,
    below,
    register_file,
    registers_left_out,
    shared_memory,
)
from fagen.ledger import Ledger, Margin, symbols
from fagen.schedule import Schedule, Values
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

MARGIN = Margin(kernels=7, least=-8, most=2)  # of tests/register_margins.json
ROLES = ("consumer", "dV consumer", "dK consumer", "dQ consumer")

# d, d_v padded; own: columns of dQ's accumulator in a warpgroup, in the first where they differ;
# slices: of dQ; e bytes per element
SYMBOLS = (
    *("block_m", "block_n", "d", "d_v", "own", "slices", "cluster"),
    *("stages", "do_stages", "ds_stages", "e"),
)


def threads(values: Values) -> int:
    """Return threads per block: the consumers, and a warpgroup that loads and adds dQ up."""
    return (consumers(values) + 1) * SM90.warpgroup_threads


def statistics_bytes(values: Values) -> int:
    """Return the bytes of the LSEs and deltas of a block of rows."""
    together = ones_in_shared_memory(values)
    return (TOGETHER_BYTES if together else MULTIPLIED_BYTES) * int(values["block_m"])


def roles(values: Values) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Return the roles of consumers: name, key of their registers, what they compute."""
    plain, of_dv, of_dk, of_dq = ROLES
    if values["partition"] == "gradients":
        key = "consumer_registers"
        return (of_dv, key, ("dv", "dq")), (of_dk, key, ("dk", "dq"))
    if values["dq_by"] == "one" and consumers(values) > 1:
        last = (of_dq, "dq_registers", ("dk", "dv", "dq"))
        return (plain, "consumer_registers", ("dk", "dv")), last
    return ((plain, "consumer_registers", ("dk", "dv", "dq")),)


def _registers(role: str) -> str:
    return f"registers of a {role}'s thread"


def _sizes(values: Values) -> dict[str, int]:
    d, d_v = padded_head_dims(values)
    own = dq_columns(values)[0]
    tile = values["block_m"], values["block_n"], d, d_v, own, values["dq_slices"]
    rings = (values[key] for key in ("cluster", "stages", "do_stages", "ds_stages"))
    return dict(zip(SYMBOLS, (*tile, *rings, DTYPES[values["dtype"]].bytes), strict=True))


def _accounts(values: Values) -> Iterator[Account | Ledger]:
    ones, one_adder = ones_in_shared_memory(values), values["dq_by"] == "one"
    by_gradients = values["partition"] == "gradients"
    choices = (
        by_gradients,
        values["cluster"],
        values["lengths"] == "varlen",
        ones,
        not one_adder,
        values["persistent"],
        values["postprocess"],
    )
    yield shared_memory(shared_formulae, choices, "d")
    for role, key, computes in roles(values):
        own = (
            computes,
            one_adder and "dq" in computes,
            values["intra_warpgroup"] and "dv" in computes,
            values["kept"],
            ones,
        )
        # who has no dK holds nothing that is as wide as Q and K
        unknown = "d" if "dk" in computes else "d_v"
        limit, source = values[key], f"{key} = {values[key]}"
        limit = min(limit, SM90.max_registers_per_thread)
        unit = str(MARGIN)
        yield Account(_registers(role), unit, register_formulae, own, limit, source, unknown)
    count, in_block = consumers(values), threads(values)
    by_role = {role: (1, key) for role, key, _ in roles(values)}
    if len(by_role) == 1:
        by_role = {"consumers": (count, "consumer_registers")}
    elif one_adder:
        by_role["consumer"] = count - 1, "consumer_registers"
    groups = {"producer": (1, "producer_registers"), **by_role}
    yield register_file(values, groups, in_block, SM90.registers_left(in_block))


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
    computes: tuple[str, ...], waits: bool, ahead: bool, kept: str = "none", ones: bool = False
) -> Mapping[str, Any]:
    """Return the registers of one consumer thread by what they hold, at the most.

    `computes` says which gradients, `waits` that dQ waits until dV's P is free; `ahead`: the next
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
        most = [2 * s, (1 if waits else 2) * packed + dq]
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


def _options(schedule: Schedule) -> Iterator[list[Changes]]:
    """Yield for each key, and for tiles, the values that ask for less, nearest first."""
    values = schedule.values()
    keys = ("producer_registers", "consumer_registers", "dq_registers")
    registers = registers_left_out(schedule, *keys)
    block_m, block_n = values["block_m"], values["block_n"]
    tiles = ((m, n) for m in _heights(block_m) for n in _heights(block_n))
    smaller = sorted(tiles, key=lambda tile: tile[0] * tile[1], reverse=True)[1:]
    now = {"block_m": block_m, "block_n": block_n}
    yield [
        {key: rows for key, rows in zip(now, tile, strict=True) if rows != now[key]} | registers
        for tile in smaller
    ]
    for key in ("stages", "do_stages", "ds_stages"):
        yield [{key: count} for count in below(values[key], 1)]
    yield [registers] if registers else []


def _heights(rows: int) -> tuple[int, ...]:
    return rows, *range((rows - 1) // SM90.wgmma_m * SM90.wgmma_m, 0, -SM90.wgmma_m)


BUDGET = Budget((SHARED, *map(_registers, ROLES), REGISTER_FILE), _sizes, _accounts, _options)
