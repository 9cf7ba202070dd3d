"""Turn a schedule of the backward pass into its ledgers: shared memory, and registers by a model.

S, dP and the gradients of K and V lie transposed, keys along the rows of the accumulators.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from fagen.arch import SM90
from fagen.kinds.attention import padded_head_dims
from fagen.kinds.backward.parts import choices_of, parts
from fagen.kinds.backward.parts.steps import statistics
from fagen.kinds.backward.parts.sums import row_block
from fagen.kinds.backward.rules import consumers, dq_columns, ones_in_shared_memory
from fagen.kinds.budget import (
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
from fagen.part import Memory
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
TILE_STAGES = 2  # tiles drawn and not yet done
PIECES = 6  # of sums of dQ on their way to the warp that rounds them

MARGIN = Margin(kernels=7, least=-8, most=2)  # of tests/register_margins.json
ROLES = ("consumer", "dV consumer", "dK consumer", "dQ consumer")

# d, d_v padded; own: columns of dQ's accumulator in a warpgroup, in the first where they differ;
# slices: of dQ; dq_parts: warpgroups that compute it; e bytes per element
SYMBOLS = (
    *("block_m", "block_n", "d", "d_v", "own", "slices", "cluster"),
    *("stages", "do_stages", "ds_stages", "dq_parts", "e"),
)


def threads(values: Values) -> int:
    """Return threads per block: the consumers, and a warpgroup that loads and adds dQ up."""
    return (consumers(values) + 1) * SM90.warpgroup_threads


def statistics_bytes(values: Values) -> int:
    """Return the bytes of the LSEs and deltas of a block of rows."""
    return int(statistics(choices_of(values)).bytes_at(values))


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
    columns = dq_columns(values)
    tile = values["block_m"], values["block_n"], d, d_v, columns[0], values["dq_slices"]
    rings = (values[key] for key in ("cluster", "stages", "do_stages", "ds_stages"))
    numbers = *tile, *rings, len(columns), DTYPES[values["dtype"]].bytes
    return dict(zip(SYMBOLS, numbers, strict=True))


def _accounts(values: Values) -> Iterator[Account | Ledger]:
    ones, one_adder = ones_in_shared_memory(values), values["dq_by"] == "one"
    yield shared_memory(shared_formulae, (parts(values).memory,), "d")
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


def part_sizes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that parts name, of a ledger's: numbers or symbols."""
    m, n, d, d_v, _, slices, cluster, stages, do_stages, ds_stages, dq_parts, e = sizes.values()
    return {
        "block_m": m,
        "block_n": n,
        "head_dim_padded": d,
        "head_dim_v_padded": d_v,
        "dq_slices": slices,
        "cluster": cluster,
        "stages": stages,
        "do_stages": do_stages,
        "ds_stages": ds_stages,
        "dq_parts": dq_parts,
        "element_bytes": e,
        "dq_adders": ADDERS,
        "tile_stages": TILE_STAGES,
        "pieces": PIECES,
        "warpgroup": SM90.warpgroup_threads,
    }


def shared_formulae(memory: Memory) -> Mapping[str, Any]:
    """Return each array in shared memory with its bytes, before rounding up to the alignment."""
    return memory.rows(part_sizes(symbols(SYMBOLS)))


def record_bytes(values: Values) -> int:
    """Return the bytes that a block of rows takes of the workspace."""
    sizes = part_sizes(_sizes(values))
    total = sum(int(array.bytes_at(sizes)) for array in row_block(choices_of(values)))
    return -(-total // SM90.l2_line_bytes) * SM90.l2_line_bytes


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
