"""Turn a schedule of attention into its ledgers: shared memory, exactly; registers, by a model."""

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations
from typing import Any

from fagen.arch import SM90
from fagen.kinds.attention import padded_head_dims
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
from fagen.kinds.forward.parts import parts
from fagen.kinds.forward.rules import consumers, possible_outputs
from fagen.kinds.forward.structure import keys_of_a_scale, one_part, threads, tile_stages
from fagen.ledger import Ledger, Margin, symbols
from fagen.part import Memory
from fagen.schedule import Schedule, Values
from fagen.vocab import DTYPES, OUT_DTYPES, swizzle_of

# The model's two constants, per consumer thread: the running maximum, sum and scale of two rows,
# and addresses, loop state and barriers.  How far they are off is measured in the machine code.
SOFTMAX_REGISTERS = 6
WORKING_REGISTERS = 20

REGISTERS = "registers of a consumer thread"
MARGIN = Margin(kernels=29, least=-1, most=63)  # of tests/register_margins.json

# the keys that a sum depends on
SUMMED = (
    *("dtype", "head_dim", "head_dim_v", "block_m", "block_n", "stages", "output"),
    *("producer", "producer_registers", "consumer_registers", "q_stages", "sum"),
    *(
        "v_layout",
        "v_row_stages",
        "transposes",
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


# ---- the formulae -------------------------------------------------------------------------------


def shared_formulae(
    memory: Memory, group_keys: int, v_slab: int, out_bytes: int, tile_stages: int
) -> Mapping[str, Any]:
    """Return each array in shared memory with its bytes, before rounding up to the alignment.

    `group_keys` share a scale, `v_slab` columns lie in a slab of V, an element of O has
    `out_bytes`, or as many as the others where that is 0.
    """
    m, n, d, d_v, stages, q_stages, e = symbols(SYMBOLS).values()
    return memory.rows(
        {
            "block_m": m,
            "block_n": n,
            "head_dim_padded": d,
            "head_dim_v_padded": d_v,
            "stages": stages,
            "q_stages": q_stages,
            "element_bytes": e,
            "out_element_bytes": out_bytes or e,
            "consumers": m / SM90.wgmma_m,
            "warpgroup": SM90.warpgroup_threads,
            "groups": n / group_keys,
            "step_k": SM90.wgmma_k_bytes / e,
            "v_slab": v_slab,
            "tile_stages": tile_stages,
        }
    )


@cache
def register_formulae(
    row_sum: str, promoted: bool, part_columns: int, whole: bool, intra_warpgroup: bool
) -> Mapping[str, Any]:
    """Return the registers of one consumer thread by what they hold.

    `promoted`: O is added to a second one, or, of so many columns if not 0, that one to O; these
    are as many as are under way at a time, of all of which a part is if `whole`.
    """
    import sympy

    n, d_v, e = (symbols(SYMBOLS)[name] for name in ("block_n", "d_v", "e"))
    # a warpgroup's 64 × n fp32 accumulator lies in 128 threads: n / 2 registers each
    per_thread = sympy.Rational(SM90.wgmma_m, SM90.warpgroup_threads)
    ones = SM90.wgmma_n_step if row_sum == "tensor" else 0
    rows = {"s": n * per_thread, "o": (d_v + ones) * per_thread}
    p = n * per_thread * e / 4
    if promoted and (intra_warpgroup or not part_columns):
        rows["o_fp32"] = (part_columns or d_v) * per_thread
    elif promoted:  # once S is done, some of whose registers P has taken
        rows["s"] = sympy.Max(rows["s"] - p, part_columns * per_thread)
    rows["p"] = p
    rows["softmax"] = sympy.Integer(SOFTMAX_REGISTERS)
    # with nothing else in flight than these there are no descriptors of S to keep, and in one part
    # none of V but the first
    alone = promoted and part_columns and not intra_warpgroup
    spared = 10 if promoted and whole else 4 if alone else 0
    rows["working"] = sympy.Integer(WORKING_REGISTERS - spared)
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
    parts = _columns_under_way(values), one_part(values)
    choices = values["sum"], promoted, *parts, values["intra_warpgroup"]
    unit = str(MARGIN)
    yield Account(REGISTERS, unit, register_formulae, choices, usable, source, "block_n")
    if values["producer"] == "warp":
        quantum = SM90.register_quantum
        roles = {
            "producer": (1, "producer_registers"),
            "consumers": (consumers(values), "consumer_registers"),
        }
        yield register_file(values, roles, in_block, -(-launched // quantum) * quantum)


def _columns_under_way(values: Values) -> int:
    """How many of PV's columns are: of two parts where there are two and S is done."""
    columns: int = values["promote_columns"]
    return columns if values["intra_warpgroup"] or one_part(values) else 2 * columns


def _shared_choices(values: Values) -> tuple[Any, ...]:
    dtype, out_dtype = DTYPES[values["dtype"]], OUT_DTYPES[values["out_dtype"]]
    _, d_v = padded_head_dims(values)
    return (
        parts(values).memory,
        keys_of_a_scale(values["block_n"], values["scale_rows"]),
        # only beside ones is V summed by slabs
        swizzle_of(d_v * dtype.bytes).bytes // dtype.bytes if values["sum"] == "tensor" else 0,
        0 if out_dtype.bytes == dtype.bytes else out_dtype.bytes,
        tile_stages(values),
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
