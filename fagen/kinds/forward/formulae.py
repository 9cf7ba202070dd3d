"""Turn a schedule of attention into its ledgers: shared memory, exactly; registers, by a model."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any

from fagen.arch import SM90
from fagen.errors import ScheduleError
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.rules import consumers, possible_outputs
from fagen.ledger import Ledger, Margin, Row, first_that_fits, rows, solved, summed, symbols
from fagen.vocab import DTYPES, ORDERS, OUT_DTYPES

# The model's two constants, per consumer thread: the running maximum, sum and scale of two rows,
# and addresses, loop state and barriers.  How far they are off is measured in the machine code.
SOFTMAX_REGISTERS = 6
WORKING_REGISTERS = 20

FP32_BYTES = 4
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

# the names of the ledgers
SHARED = "shared memory of a thread block"
REGISTERS = "registers of a consumer thread"
MARGIN = Margin(kernels=29, least=-1, most=63)  # of tests/register_margins.json
REGISTER_FILE = "register file of a thread block"

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


@dataclass(frozen=True)
class Budget:
    """The three ledgers of a schedule."""

    shared: Ledger
    registers: Ledger
    register_file: Ledger

    def over(self) -> tuple[Ledger, ...]:
        """Return the ledgers that do not fit."""
        return tuple(
            ledger
            for ledger in (self.shared, self.registers, self.register_file)
            if not ledger.fits
        )


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


def skips_idle_warpgroups(schedule: Schedule) -> bool:
    """Whether consumers without rows of a tile go on to the next one.

    Not where all must have read V before O is stored through its space.
    """
    return (
        schedule.attention.lengths == "varlen"
        and schedule.consumers > 1
        and schedule.overlap.intra_warpgroup
        and schedule.pipeline.output != "reuse_v"
    )


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


def padded(columns: int, schedule: Schedule) -> int:
    """Return how many columns of shared memory a head dim takes."""
    return _padded(columns, schedule.attention.dtype)


def padded_head_dims(head_dim: int, head_dim_v: int, dtype: str) -> tuple[int, int]:
    """Return how many columns of shared memory Q and K take, and V and O."""
    return _padded(head_dim, dtype), _padded(head_dim_v, dtype)


@cache
def _padded(columns: int, dtype: str) -> int:
    return DTYPES[dtype].filled_up(columns)


def threads(schedule: Schedule) -> int:
    """Return threads per block; a producer is a whole warpgroup, since setmaxnreg acts on one."""
    return _threads(schedule.consumers, schedule.warps.producer)


@cache
def _threads(consumers: int, producer: str) -> int:
    return (consumers + (producer == "warp")) * SM90.warpgroup_threads


def launch_registers(schedule: Schedule) -> int:
    """Return registers per thread at launch: an even share of the file, in whole quanta."""
    return SM90.registers_left(threads(schedule))


def budget(schedule: Schedule) -> Budget:
    """Return all ledgers of a schedule, whether they fit or not."""
    return Budget(_shared(schedule), _registers(schedule), _register_file(schedule))


def sums(values: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield (name, sum, limit) of each ledger that does not fit, and nothing more: for a search.

    `values` are those of a schedule's keys that keep the rules between keys; SUMMED count.
    """
    sizes = _sizes(values)
    shared = summed(SYMBOLS, shared_formulae, _shared_choices(values), SM90.smem_tile_alignment)
    registers = summed(SYMBOLS, register_formulae, _register_choices(values), 1)
    of_consumers = consumers(values)
    in_block = _threads(of_consumers, values["producer"])
    kept = values["producer_registers"] + of_consumers * values["consumer_registers"]
    for name, total, limit in (
        (SHARED, shared(*sizes.values()), SM90.smem_per_block),
        (
            REGISTERS,
            registers(*sizes.values()),
            _usable(values["consumer_registers"], SM90.registers_left(in_block)),
        ),
        (
            REGISTER_FILE,
            SM90.warpgroup_threads * kept,
            _launched(in_block),
        ),
    ):
        if total > limit:
            yield name, total, limit


def nearest(schedule: Schedule) -> tuple[dict[str, Any], ...]:
    """Return the least changes that make a schedule fit: keys with new values, None to leave out.

    As few keys as possible at once, and of each the value nearest to the one it has. Where a wider
    block_n fits if O is stored through V's space, that is offered too: it is the kernel to be had.
    """
    options = _options(schedule)
    for count in range(1, len(options) + 1):
        found = [
            changes
            for keys in combinations(options, count)
            if (changes := _first_that_fits(schedule, [options[key] for key in keys]))
        ]
        if found:
            narrowed = max(changes.get("block_n", 0) for changes in found)
            wider = _first_that_fits(schedule, [options["block_n"], options["output"]])
            enough = count > 1 or {"output": "reuse_v"} in found
            if wider and wider["block_n"] > narrowed > 0 and not enough:
                found.append(wider)
            return tuple(sorted(found, key=lambda changes: "block_n" not in changes))
    return ()


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
    asked: bool,
    splits: bool,
) -> Mapping[str, Any]:
    """Return each array in shared memory with its bytes, before rounding up to the alignment.

    `out_bytes` are those of an element of O, 0 where it has as many as the others; `group_keys`,
    which share a scale, where blocks have some, else it is 0, and `totals` where sums are promoted;
    `drawn`: tiles that are drawn, in a ring that passes them on; `varlen`: they are of packed
    sequences; `votes`: the warps of a warpgroup vote on how to go on; `asked`: a warp of its own
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
        + (1 if asked else 0)
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


def _sizes(values: Mapping[str, Any]) -> dict[str, int]:
    return {
        "block_m": values["block_m"],
        "block_n": values["block_n"],
        "d": _padded(values["head_dim"], values["dtype"]),
        "d_v": _padded(values["head_dim_v"], values["dtype"]),
        "stages": values["stages"],
        "q_stages": values["q_stages"],
        "e": DTYPES[values["dtype"]].bytes,
    }


def _shared_choices(
    values: Mapping[str, Any],
) -> tuple[str, str, str, int, str, str, int, int, bool, bool, bool, bool]:
    output, row_sum, v_layout = (values[key] for key in ("output", "sum", "v_layout"))
    group_keys = keys_of_a_scale(values["block_n"], values["scale_rows"])
    by_block = values["scale_rows"] > 0
    out_bytes = OUT_DTYPES[values["out_dtype"]].bytes
    as_others = out_bytes == DTYPES[values["dtype"]].bytes
    of_scales = group_keys if by_block else 0
    of_out = 0 if as_others else out_bytes
    v_scales, totals = values["v_scales"], values["totals"]
    drawn = tile_stages(ORDERS[values["order"]].dynamic, values["lengths"])
    of_tiles = drawn, values["lengths"] == "varlen"
    votes = finds_spread(values["dtype"], values["maximum"], values["intra_warpgroup"])
    of_call = scheduler_warp(values["lengths"], v_layout), values["num_splits"] > 1
    of_scale = of_scales, v_scales, totals, of_out
    return output, row_sum, v_layout, *of_scale, *of_tiles, votes, *of_call


def _register_choices(values: Mapping[str, Any]) -> tuple[str, bool, int, bool]:
    promoted = values["totals"] == "registers"
    return values["sum"], promoted, values["promote_columns"], values["intra_warpgroup"]


def _shared(schedule: Schedule) -> Ledger:
    values, align = schedule.values(), SM90.smem_tile_alignment
    return Ledger(
        SHARED,
        f"bytes, each array rounded up to {align:,}",
        rows(_sizes(values), align, shared_formulae, _shared_choices(values)),
        SM90.smem_per_block,
        SM90.source("smem_per_block"),
    )


def _registers(schedule: Schedule) -> Ledger:
    values = schedule.values()
    usable = _usable(schedule.warps.consumer_registers, launch_registers(schedule))
    source = (
        f"consumer_registers = {schedule.warps.consumer_registers}"
        if schedule.warps.consumer_registers == usable
        else SM90.source("max_registers_per_thread")
        if usable == SM90.max_registers_per_thread
        else f"{SM90.registers_per_sm:,} in {threads(schedule)} threads"
    )
    return Ledger(
        REGISTERS,
        str(MARGIN),
        rows(_sizes(values), 1, register_formulae, _register_choices(values)),
        usable,
        source,
    )


def _usable(consumer_registers: int, launch_registers: int) -> int:
    return min(consumer_registers or launch_registers, SM90.max_registers_per_thread)


def _register_file(schedule: Schedule) -> Ledger:
    """What setmaxnreg asks for, of what the launch brought; asking for more would wait for ever."""
    warps, group = schedule.warps, SM90.warpgroup_threads
    asked = (
        Row("producer", group * warps.producer_registers, f"{group}·producer_registers"),
        Row(
            "consumers",
            schedule.consumers * group * warps.consumer_registers,
            f"{schedule.consumers}·{group}·consumer_registers",
        ),
    )
    return Ledger(
        REGISTER_FILE,
        "registers after setmaxnreg",
        asked,
        _launched(threads(schedule)),
        f"{threads(schedule)} threads at launch, {SM90.source('registers_per_sm')}",
    )


@cache
def _launched(threads: int) -> int:
    quantum = SM90.register_quantum
    return -(-SM90.registers_left(threads) // quantum) * quantum * threads


# ---- the nearest schedule that fits -------------------------------------------------------------


def _options(schedule: Schedule) -> dict[str, list[dict[str, Any]]]:
    """Return, by key, the values that ask for less, nearest first; None leaves a key out."""
    values, said = schedule.values(), schedule.settings()
    registers = {key: None for key in ("producer_registers", "consumer_registers") if key in said}
    totals = {"totals": None} if "totals" in said else {}
    outputs = possible_outputs(values["head_dim_v"], values["dtype"], values["out_dtype"])
    thriftier = outputs[outputs.index(values["output"]) + 1 :] if values["num_splits"] == 1 else ()
    return {
        "block_m": [{"block_m": m, **registers} for m in _below(values["block_m"], SM90.wgmma_m)],
        "block_n": [{"block_n": n} for n in _below(values["block_n"], 16)],
        "stages": [{"stages": n} for n in range(values["stages"] - 1, 1, -1)],
        "q_stages": [{"q_stages": 1}] if values["q_stages"] > 1 else [],
        "output": [{"output": output} for output in thriftier],
        "promote": [{"promote": 0, **totals}] if values["promote"] else [],
        "totals": [{"totals": "shared"}] if values["totals"] == "registers" else [],
        "registers": [registers] if registers else [],
    }


def _below(value: int, step: int) -> range:
    return range(value - step, 0, -step)


def _first_that_fits(
    schedule: Schedule, options: list[list[dict[str, Any]]]
) -> dict[str, Any] | None:
    def fits(changes: Mapping[str, Any]) -> bool:
        try:
            return not budget(schedule.but(**changes)).over()
        except ScheduleError:
            return False

    return first_that_fits(options, fits)


# ---- the explanation ----------------------------------------------------------------------------


def explain_lines(schedule: Schedule) -> Iterator[str]:
    """Yield lines: the formulae, the numbers in them, and the largest block_n they allow."""
    sizes = _sizes(schedule.values())
    yield "with " + ", ".join(f"{name} = {value}" for name, value in sizes.items())
    own = budget(schedule)
    values = schedule.values()
    yield from solved(own.shared, shared_formulae(*_shared_choices(values)), sizes, "block_n")
    formulae = register_formulae(*_register_choices(values))
    yield from solved(own.registers, formulae, sizes, "block_n")
    yield ""
    step = DTYPES[values["dtype"]].wgmma_k
    every = [{"block_n": n} for n in _below(SM90.wgmma_n_max + step, step)]
    widest = _first_that_fits(schedule, [every]) or {"block_n": "none"}
    yield (
        f"in whole arrays and steps of {step}, the widest block_n that fits is {widest['block_n']}"
    )
