"""Turn a schedule of attention into its ledgers: shared memory, exactly; registers, by a model."""

import math
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations
from typing import Any

from fagen.arch import SM90
from fagen.kinds.attention import padded_head_dims
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
from fagen.kinds.forward.rules import consumers, possible_outputs
from fagen.ledger import Ledger, Margin, symbols
from fagen.schedule import Schedule, Values
from fagen.vocab import DTYPES, ORDERS, OUT_DTYPES

# The model's two constants, per consumer thread: the running maximum, sum and scale of two rows,
# and addresses, loop state and barriers.  How far they are off is measured in the machine code.
SOFTMAX_REGISTERS = 6
WORKING_REGISTERS = 20

# of a tile that is passed on, and how many of them: the one in work and the next
TILE_BYTES = 48
TILE_STAGES = 2
# the same of varlen sequences: of short ones each warpgroup may have one in work
VARLEN_TILE_BYTES = 64
VARLEN_TILE_STAGES = 6
WARPS = 4  # of a warpgroup, a byte each for their votes
# of a group of keys with scales of its own: K's, or K's, V's logarithm and V's inverse in one load
K_SCALE_BYTES = 4
KEY_SCALES_BYTES = 16

REGISTERS = "registers of a consumer thread"
MARGIN = Margin(kernels=29, least=-1, most=63)  # of tests/register_margins.json

# the keys that a sum depends on
SUMMED = (
    *("dtype", "head_dim", "head_dim_v", "block_m", "block_n", "stages", "output"),
    *("producer", "producer_registers", "consumer_registers", "q_stages", "sum"),
    *(
        "v_layout",
        "promote",
        "promote_columns",
        "intra_warpgroup",
        "totals",
        "scale_rows",
        "v_scales",
        "out_dtype",
        "order",
        "lengths",
    ),
    "num_splits",
)

# d, d_v padded; e bytes per element
SYMBOLS = ("block_m", "block_n", "d", "d_v", "stages", "q_stages", "e")


def keys_of_a_scale(block_n: int, scale_rows: int) -> int:
    """Return how many keys of a step share a scale; all of them where scale_rows is 0.

    A step need not hold whole blocks of scales, nor a block whole steps: it is what divides both.
    """
    return math.gcd(block_n, scale_rows)


def finds_spread(dtype: str, maximum: str, intra_warpgroup: bool) -> bool:
    """Whether a tile whose scores are widely spread goes on in a way of its own.

    Where P has so few powers of two that such scores often outgrow it under a lazy maximum.
    """
    return maximum == "lazy" and DTYPES[dtype].narrow and intra_warpgroup


def skips_idle_warpgroups(values: Values) -> bool:
    """Whether consumers without rows of a tile go on to the next one.

    Not where all must have read V before O is stored through its space.
    """
    several = values["lengths"] == "varlen" and consumers(values) > 1
    return several and values["intra_warpgroup"] and values["output"] != "reuse_v"


def scheduler_warp(lengths: str, v_layout: str) -> bool:
    """Whether a warp of its own draws tiles, whose number the GPU alone knows.

    Where all warps beside the producer's transpose V, that one draws them.
    """
    return lengths == "varlen" and v_layout != "rows"


def tile_stages(dynamic: bool, lengths: str) -> int:
    """Return how many tiles that were drawn a ring holds; none where nobody draws them."""
    if not dynamic:
        return 0
    return VARLEN_TILE_STAGES if lengths == "varlen" else TILE_STAGES


def threads(values: Values) -> int:
    """Return threads per block; a producer is a whole warpgroup, since setmaxnreg acts on one."""
    groups = consumers(values) + int(values["producer"] == "warp")
    return groups * SM90.warpgroup_threads


# ---- the formulae -------------------------------------------------------------------------------


@cache
def shared_formulae(
    output: str,
    row_sum: str,
    v_layout: str,
    group_keys: int,
    v_scales: str,
    totals: str,
    out_bytes: int,
    drawn: int,
    varlen: bool,
    votes: bool,
    scheduler_warp: bool,
    splits: bool,
) -> Mapping[str, Any]:
    """Return each array in shared memory with its bytes, before rounding up to the alignment.

    `out_bytes` are those of an element of O, 0 where it has as many as the others; `group_keys`,
    which share a scale, where blocks have some, else it is 0, and `totals` where sums are promoted;
    `drawn`: tiles that are drawn, in a ring that passes them on; `varlen`: they are of packed
    sequences; `votes`: the warps of a warpgroup vote on how to go on; `scheduler_warp`: one
    draws tiles when it is asked to; `splits`: O goes from registers to the workspace.
    """
    import sympy

    m, n, d, d_v, stages, q_stages, e = symbols(SYMBOLS).values()
    v, o = stages * n * d_v * e, m * d_v * (out_bytes or e)
    parts = 2 if output == "half" else 1
    rows = {"q": q_stages * m * d * e, "k": stages * n * d * e}
    rows |= {"v_or_o": sympy.Max(v, o)} if output == "reuse_v" else {"v": v, "o": o / parts}
    if splits:
        del rows["o"]
    if v_layout == "rows":
        rows["vt"] = v  # the same, transposed
    if group_keys:
        of_a_group = KEY_SCALES_BYTES if v_scales == "block" else K_SCALE_BYTES
        rows["scales"] = of_a_group * stages * n / group_keys
    if totals == "shared":
        rows["totals"] = FP32_BYTES * m * d_v
    if row_sum == "tensor":
        rows["ones"] = SM90.wgmma_k_bytes * d_v  # beside V, for one step of the PV GEMM
    # full and empty for each stage of K and of V (and of V transposed), and of Q for each
    # warpgroup's rows; O empty; of the tiles that are drawn, beside these
    readers = m / SM90.wgmma_m
    barriers = (
        (6 if v_layout == "rows" else 4) * stages
        + 2 * q_stages * readers
        + (1 if output == "reuse_v" else 0)
        + 2 * drawn
        + (1 if scheduler_warp else 0)
    )
    tiles = (VARLEN_TILE_BYTES if varlen else TILE_BYTES) * drawn
    votes_bytes = WARPS * readers if votes else 0
    rows["barriers"] = SM90.mbarrier_bytes * barriers + tiles + votes_bytes
    return rows


@cache
def register_formulae(
    row_sum: str, promoted: bool, promote_columns: int, intra_warpgroup: bool
) -> Mapping[str, Any]:
    """Return the registers of one consumer thread by what they hold.

    `promoted`: O is added to a second one, or, of so many columns if not 0, that one to O.
    """
    import sympy

    n, d_v, e = (symbols(SYMBOLS)[name] for name in ("block_n", "d_v", "e"))
    # a warpgroup's 64 × n fp32 accumulator lies in 128 threads: n / 2 registers each
    per_thread = sympy.Rational(SM90.wgmma_m, SM90.warpgroup_threads)
    ones = SM90.wgmma_n_step if row_sum == "tensor" else 0
    rows = {"s": n * per_thread, "o": (d_v + ones) * per_thread}
    if promoted and (intra_warpgroup or not promote_columns):
        rows["o_fp32"] = (promote_columns or d_v) * per_thread
    elif promoted:  # two parts of PV, once S is done
        rows["s"] = sympy.Max(rows["s"], 2 * promote_columns * per_thread)
    rows["p"] = n * per_thread * e / 4
    rows["softmax"] = sympy.Integer(SOFTMAX_REGISTERS)
    rows["working"] = sympy.Integer(WORKING_REGISTERS)
    return rows


# ---- of a schedule ------------------------------------------------------------------------------


def _sizes(values: Values) -> dict[str, int]:
    dtype = values["dtype"]
    d, d_v = padded_head_dims(values)
    numbers = values["block_m"], values["block_n"], d, d_v, values["stages"], values["q_stages"]
    return dict(zip(SYMBOLS, (*numbers, DTYPES[dtype].bytes), strict=True))


def _accounts(values: Values) -> Iterator[Account | Ledger]:
    yield shared_memory(shared_formulae, _shared_choices(values), "block_n")
    in_block = threads(values)
    launched, setmaxnreg = SM90.registers_left(in_block), values["consumer_registers"]
    usable = min(setmaxnreg or launched, SM90.max_registers_per_thread)
    source = (
        f"consumer_registers = {setmaxnreg}"
        if setmaxnreg == usable
        else SM90.source("max_registers_per_thread")
        if usable == SM90.max_registers_per_thread
        else f"{SM90.registers_per_sm:,} in {in_block} threads"
    )
    promoted = values["totals"] == "registers"
    choices = values["sum"], promoted, values["promote_columns"], values["intra_warpgroup"]
    unit = str(MARGIN)
    yield Account(REGISTERS, unit, register_formulae, choices, usable, source, "block_n")
    if values["producer"] == "warp":
        quantum = SM90.register_quantum
        roles = {
            "producer": (1, "producer_registers"),
            "consumers": (consumers(values), "consumer_registers"),
        }
        yield register_file(values, roles, in_block, -(-launched // quantum) * quantum)


def _shared_choices(values: Values) -> tuple[Any, ...]:
    dtype, lengths, v_layout = values["dtype"], values["lengths"], values["v_layout"]
    group_keys = keys_of_a_scale(values["block_n"], values["scale_rows"])
    out_bytes = OUT_DTYPES[values["out_dtype"]].bytes
    return (
        values["output"],
        values["sum"],
        v_layout,
        group_keys if values["scale_rows"] else 0,
        values["v_scales"],
        values["totals"],
        0 if out_bytes == DTYPES[dtype].bytes else out_bytes,
        tile_stages(ORDERS[values["order"]].dynamic, lengths),
        lengths == "varlen",
        finds_spread(dtype, values["maximum"], values["intra_warpgroup"]),
        scheduler_warp(lengths, v_layout),
        values["num_splits"] > 1,
    )


def _options(schedule: Schedule) -> list[list[Changes]]:
    """Return, key by key, the values that ask for less; those of block_n and O come first."""
    values = schedule.values()
    registers = registers_left_out(schedule, "producer_registers", "consumer_registers")
    totals = registers_left_out(schedule, "totals")
    outputs = possible_outputs(values["head_dim_v"], values["dtype"], values["out_dtype"])
    thriftier = outputs[outputs.index(values["output"]) + 1 :] if values["num_splits"] == 1 else ()
    return [
        [{"block_m": m, **registers} for m in below(values["block_m"], SM90.wgmma_m)],
        [{"block_n": n} for n in below(values["block_n"], 16)],
        [{"stages": n} for n in below(values["stages"], 1, 2)],
        [{"q_stages": 1}] if values["q_stages"] > 1 else [],
        [{"output": output} for output in thriftier],
        [{"promote": 0, **totals}] if values["promote"] else [],
        [{"totals": "shared"}] if values["totals"] == "registers" else [],
        [registers] if registers else [],
    ]


class _Budget(Budget):
    def nearest(self, schedule: Schedule) -> tuple[Changes, ...]:
        """Return the least changes that make a schedule fit.

        As few keys as possible at once, and of each the value nearest to the one it has. Where a
        wider block_n fits if O is stored through V's space, that is offered too: it is the kernel
        to be had.
        """
        options = _options(schedule)
        _, widths, _, _, outputs, *_ = options
        for count in range(1, len(options) + 1):
            several = (self.first(schedule, [*some]) for some in combinations(options, count))
            if offers := [changes for changes in several if changes]:
                narrowed = max(changes.get("block_n", 0) for changes in offers)
                wider = self.first(schedule, [widths, outputs])
                enough = count > 1 or {"output": "reuse_v"} in offers
                if wider and wider["block_n"] > narrowed > 0 and not enough:
                    offers.append(wider)
                return tuple(sorted(offers, key=lambda changes: "block_n" not in changes))
        return ()

    def explained(self, schedule: Schedule) -> Iterator[str]:
        """Yield lines: the formulae, the numbers in them, and the largest block_n they allow."""
        yield from super().explained(schedule)
        yield ""
        step = DTYPES[schedule.values()["dtype"]].wgmma_k
        every: list[Changes] = [{"block_n": n} for n in below(SM90.wgmma_n_max + step, step)]
        widest = self.first(schedule, [every]) or {"block_n": "none"}
        yield (
            f"in whole arrays and steps of {step}, the widest block_n that fits is "
            f"{widest['block_n']}"
        )


BUDGET = _Budget((SHARED, REGISTERS, REGISTER_FILE), _sizes, _accounts, _options)
