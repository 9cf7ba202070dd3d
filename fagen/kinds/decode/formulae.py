"""Turn a schedule of decoding into its ledgers: shared memory, and registers by a model.

S and O lie transposed: keys, and columns of V, along the rows of the accumulators.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from fagen.arch import SM90
from fagen.kinds.budget import (
    SHARED,
    Account,
    Budget,
    Changes,
    below,
    shared_memory,
)
from fagen.kinds.decode.parts import parts
from fagen.kinds.decode.rules import all_rows, combines_in_shared, padded, share
from fagen.ledger import Margin, symbols
from fagen.part import Memory
from fagen.schedule import Schedule, Values
from fagen.vocab import DTYPES

# addresses, loop state, barriers and a unit's numbers; P on its way takes half a register for each
# row beside them
WORKING_REGISTERS = 52

WARPS = SM90.warpgroup_threads // SM90.warp_threads  # that compute
THREADS = SM90.warpgroup_threads + SM90.warp_threads  # with the one that loads

REGISTERS = "registers of a thread"
MARGIN = Margin(kernels=8, least=-3, most=22)  # of tests/register_margins.json

# d, d_v padded; e bytes per element
SYMBOLS = ("rows", "kv_heads", "block_n", "d", "d_v", "stages", "q_stages", "e")
# the keys that they depend on
SUMMED = (
    *("rows", "kv_heads", "block_n", "head_dim", "head_dim_v", "dtype", "stages", "q_stages"),
    *("blocks", "speculate", "by"),
)


def registers_left(blocks: int) -> int:
    """Return how many registers a thread may have where so many blocks share an SM."""
    return SM90.registers_of_warps(blocks * THREADS // SM90.warp_threads)


def padded_head_dims(values: Values) -> tuple[int, int]:
    """Return how many columns of shared memory Q and K take, and V."""
    dtype = values["dtype"]
    return padded(values["head_dim"], dtype), padded(values["head_dim_v"], dtype)


@cache
def shared_formulae(memory: Memory) -> Mapping[str, Any]:
    """Return each array in shared memory with its bytes, before rounding up to the alignment."""
    m, h, n, d, d_v, stages, q_stages, e = symbols(SYMBOLS).values()
    sizes = {"rows": m, "kv_heads": h, "block_n": n, "element_bytes": e}
    sizes |= {"stages": stages, "q_stages": q_stages}
    return memory.rows({**sizes, "head_dim_padded": d, "head_dim_v_padded": d_v, "warps": WARPS})


@cache
def register_formulae(speculates: bool, stream_k: bool, in_shared: bool) -> Mapping[str, Any]:
    """Return the registers of one thread that computes, by what they hold."""
    import sympy

    m, _, n, _, d_v, *_ = symbols(SYMBOLS).values()
    # a warpgroup's 64 × rows fp32 accumulator lies in 128 threads
    per_thread = m / sympy.Integer(SM90.warpgroup_threads)
    combined = {"combined": d_v * per_thread + m / 2} if stream_k and not in_shared else {}
    return {
        "s": n * per_thread,
        "o": d_v * per_thread,
        **combined,  # O of the splits before, with their maxima and sums
        # of a quarter of the rows: reference, sum, what a step adds that may be done again
        "statistics": (3 if speculates else 2) * m / sympy.Integer(4),
        "working": WORKING_REGISTERS + m / 2,
    }


def _sizes(values: Values) -> dict[str, int]:
    tile = all_rows(values), values["kv_heads"], values["block_n"], *padded_head_dims(values)
    rings = values["stages"], values["q_stages"]
    return dict(zip(SYMBOLS, (*tile, *rings, DTYPES[values["dtype"]].bytes), strict=True))


def _accounts(values: Values) -> Iterator[Account]:
    blocks = values["blocks"]
    room = share(blocks)
    source = (
        SM90.source("smem_per_block")
        if room == SM90.smem_per_block
        else f"{SM90.source('smem_per_sm')}, for {blocks} blocks"
    )
    yield shared_memory(shared_formulae, (parts(values).memory,), "stages", room, source)
    forms = values["speculate"], values["by"] == "stream_k", combines_in_shared(values)
    source = (
        f"{blocks * THREADS // SM90.warp_threads} warps on {SM90.issued_warps} schedulers, "
        f"{SM90.source('registers_per_sm')}"
    )
    limit, unit = registers_left(blocks), str(MARGIN)
    yield Account(REGISTERS, unit, register_formulae, forms, limit, source, "rows")


def _options(schedule: Schedule) -> Iterator[list[Changes]]:
    """Yield for each key the values that ask for less, nearest first."""
    values = schedule.values()
    yield [{"stages": count} for count in below(values["stages"], 1, 3)]
    yield [{"blocks": count, "stages": None} for count in below(values["blocks"], 1)]
    yield [{"q_stages": 1}] if values["q_stages"] > 1 else []
    yield [{"rows": rows} for rows in below(values["rows"], SM90.wgmma_n_step)]
    yield [{"block_n": SM90.wgmma_m}] if values["block_n"] > SM90.wgmma_m else []


BUDGET = Budget((SHARED, REGISTERS), _sizes, _accounts, _options)
