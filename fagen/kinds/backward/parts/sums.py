"""Sums: how dQ is added up and rounded; outputs: how dK and dV leave."""

from collections.abc import Iterator

from fagen.kinds.backward.parts.steps import statistics, texts
from fagen.kinds.backward.parts.tiles import rounds
from fagen.kinds.sinks import sinks_of_call
from fagen.part import (
    DIVISOR,
    FLOAT,
    INT,
    UINT32,
    Amount,
    Argument,
    Array,
    Barrier,
    Constant,
    Divisor,
    Field,
    Part,
    Strided,
    TensorMap,
    Type,
    amount,
    pointer_to,
)
from fagen.schedule import Values
from fagen.vocab import SCORES

_ONE, _PER_WARP = amount(1), amount("warpgroup", per=32)
_ROWS_TO_READ, _ROWS_TO_WRITE = Type("Rows<const Element>"), Type("Rows<Element>")
_NUMBERS = Type("Numbers")
_DQ = amount("block_m", "head_dim_padded")


def sums(values: Values) -> Iterator[Part]:
    """Yield how dQ is added up, and rounded."""
    shape = "batch, heads, m_blocks" if values["lengths"] == "equal" else "heads, m_slots"
    yield Part(
        head=("backward/sums/row_block.cuh.j2",),
        role=texts("roles", f"add_dq{'_persistent' if values['persistent'] else ''}.cuh"),
        constants=(
            Constant("dq_columns", _dq_columns_note(values)),
            *((Constant("dq_rest", "of the last warpgroup"),) if values["leaves_rest"] else ()),
            Constant("dq_row_step", "rows between the parts of dQ of two warpgroups"),
            Constant("dq_column_step", "and columns; of both one is 0"),
            Constant("dq_parts", "warpgroups that compute dQ"),
            Constant("dq_adders", "threads that add it up, in turns"),
            Constant("dq_slices", "in which each hands it on"),
            Constant(
                "line_bytes",
                "of the L2 cache: additions that begin within one take longer",
                name="line",
            ),
        ),
        shared=(
            Array("dq", FLOAT, (Amount(("block_m", "head_dim_padded"), ("cluster", "dq_slices")),)),
            Barrier(
                "dq_full",
                (amount("dq_adders"), amount("dq_parts")),
                _PER_WARP,
                note="for each that adds, so that none misses a phase",
            ),
            Barrier("dq_empty", (amount("dq_parts"),), _ONE),
        ),
        params=(
            Field("out_rows", _ROWS_TO_READ, Strided("out", "const Element")),
            Field("dout_rows", _ROWS_TO_READ, Strided("dout", "const Element")),
            Field("dq_rows", _ROWS_TO_WRITE, Strided("dq", "Element")),
            Field("lse", _NUMBERS, Strided("lse")),
            Field("dlse", _NUMBERS, Strided("dlse"), "dlse.data may be null"),
            Field("row_blocks", pointer_to(Type("RowBlock")), Argument("workspace"), f"({shape})"),
        ),
    )
    yield _added_up(values)
    rounded_after = Part(device=texts("sums", "round_dq.cuh.j2"))
    yield _rounded_meanwhile() if values["postprocess"] else rounded_after
    if values["sink"]:
        yield from sinks_of_call(values["sink"])
        yield _of_sinks(values)


def _of_sinks(values: Values) -> Part:
    """The gradients of sinks: of each head what its blocks of rows have, in their order."""
    varlen = values["lengths"] == "varlen"
    return Part(
        device=texts("sums", f"sum_sinks{'_varlen' if varlen else ''}.cuh"),
        params=(
            Field("dsinks", pointer_to(Type("Sink")), Argument("dsinks")),
            *(() if varlen else (Field("batches", INT, Argument("batch")),)),
        ),
    )


def _added_up(values: Values) -> Part:
    """How a step's dQ gets into the sums, which are cleared before."""
    pair, persistent, slices = values["cluster"] > 1, values["persistent"], values["slices_dq"]
    varlen = values["lengths"] == "varlen"
    cleared = f"clear_pair{'_and_sink' * bool(values['sink'])}"
    passes_on = "pass_slices_on.cuh" if slices else "pass_dq_on.cuh.j2"
    return Part(
        device=(
            *texts("rows", "varlen.cuh" if varlen else "dense.cuh.j2"),
            *texts("sums", f"{cleared}.cuh" if pair else "clear.cuh.j2"),
            *texts("rows", *("sum_of_block.cuh",) * bool(values["sink"])),
            *texts("rows", "prepare.cuh.j2", "prepare_rows.cuh.j2"),
        ),
        producer=texts(
            "sums",
            "global.cuh",
            "turn_counted_on.cuh" if values["mask"].row_tables else "turn.cuh",
            "add.cuh",
            "unequal_parts.cuh" if values["leaves_rest"] else "equal_parts.cuh",
            "own_half.cuh" if pair else "own.cuh",
            "in_order.cuh" if values["deterministic"] else "any_order.cuh",
            f"add_dq{'_persistent' if persistent else ''}.cuh.j2",
        ),
        rounds=texts("sums", f"{rounds(values)}.cuh"),
        consumer=texts(
            "sums",
            "hand_on.cuh",
            "defer_slice.cuh" if values["defers_dq"] else passes_on,
        ),
    )


def row_block(values: Values) -> Iterator[Array]:
    """Yield what there is of a block of rows in the workspace; `values` are choices."""
    shared_by = (amount("cluster"),) if values["cluster"] > 1 else ()
    half = ", of the half that a block of a cluster computes" if shared_by else ""
    first = "parts of dQ that are there" if values["deterministic"] else "1 once dQ's first part is"
    yield _noted("dq", FLOAT, "in the order of the threads' accumulators", _DQ)
    numbers = "-LSE / scale, and -delta; where a row sees no key -2^127 and 0, so that its P is 0"
    if SCORES[values["score"]].acts:
        numbers = "-delta, and behind them -LSE * log2(e); where a row sees no key 0 and -inf"
    yield _noted("statistics", statistics(values), numbers)
    yield _noted("added", UINT32, first + half, *shared_by)
    if values["persistent"]:
        yield _noted("drawn", UINT32, "of the very first: tiles that thread blocks have drawn")
    if values["postprocess"]:
        rounded = "of the very first: blocks of rows that warps have drawn to round their dQ"
        yield _noted("rounded", UINT32, rounded)
        done = "of sections of heads, in as many records: threads that have added a tile's dQ"
        yield _noted("done", UINT32, done)
    if values["sink"]:
        yield _noted("dsink", FLOAT, "what its rows have of the gradient of their head's sink")


def _noted(name: str, type: Type, note: str, *dims: Amount) -> Array:
    return Array(name, type, dims, note=note, aligned=False)


def _dq_columns_note(values: Values) -> str:
    """What an accumulator of dQ holds."""
    shared = values["shares_rows"]
    if values["dq_transposed"]:
        rows = "rows of a warpgroup's own"
        rows = "all rows, beside 64 columns for each warpgroup" if shared else rows
        return f"of an accumulator of dQ, which lies transposed: {rows}"
    whole = shared or values["dq_by"] == "one"
    note = f"that a warpgroup computes, of {'all rows' if whole else '64 rows of its own'}"
    return f"{note}; the last the rest" if values["leaves_rest"] else note


def _rounded_meanwhile() -> Part:
    """A spare warp rounds dQ of finished heads."""
    flag = "1 once the last one is drawn"
    return Part(
        head=("backward/sums/piece.cuh",),
        device=texts("sums", "sections.cuh", "round_rest.cuh.j2"),
        producer=texts("sums", "has_counted.cuh", "rounder.cuh.j2"),
        role=("backward/roles/round_dq.cuh",),
        constants=(Constant("pieces", "of sums of dQ, on their way to the warp that rounds them"),),
        shared=(
            Array("pieces", Type("Piece", amount("warpgroup", 32)), (amount("pieces"),), "sums"),
            Barrier("piece_full", (amount("pieces"),), _ONE, transactions=True),
            Array("no_more_tiles", UINT32, row="tiles", note=flag, aligned=False),
        ),
        params=(
            Field("row_blocks_count", INT, note="of all heads"),
            Field(
                "early_blocks",
                INT,
                note="the first of those, whose dQ may be rounded before all tiles are done",
            ),
            Field("m_blocks_divisor", DIVISOR),
            Field("heads_divisor", DIVISOR, Divisor(Argument("heads"))),
            Field("section_blocks", DIVISOR, note="of rows of a section"),
        ),
    )


def outputs(values: Values) -> Iterator[Part]:
    """Yield how dK and dV leave."""
    persistent = values["persistent"]
    yield _left(values)
    rows = amount("block_n") if persistent else amount("warpgroup_rows")
    maps = (
        TensorMap("dk", (amount("qk_slab"), rows), "qk_swizzle", stand_in="q"),
        TensorMap("dv", (amount("v_slab"), rows), "v_swizzle", "head_dim_v", stand_in="dout"),
    )
    if not persistent:
        yield Part(named_barriers=("kStore",), maps=maps)
    else:
        full = amount("consumers", "warpgroup")
        yield Part(
            maps=maps,
            shared=(
                Barrier("dk_full", (), full, note="of what leaves by way of dQ's space"),
                Barrier("dv_full", (), full, note="and dS's"),
                Barrier("dv_empty", (), _ONE),
            ),
        )
    varlen = "_varlen" if values["lengths"] == "varlen" else ""
    yield Part(
        head=("backward/outputs/key_block.cuh",),
        device=(f"backward/outputs/sum_shares{varlen}.cuh",),
    )


def _left(values: Values) -> Part:
    """How consumers leave dK and dV, and who stores them."""
    varlen, by_keys = values["lengths"] == "varlen", values["partition"] == "keys"
    kept = ("keep.cuh", "share_of_varlen.cuh") if varlen else ("share_of.cuh", "keep.cuh")
    first = *kept, "round_rows.cuh"
    if values["persistent"]:
        return Part(
            producer=texts("outputs", "store_gradients.cuh"),
            consumer=texts("outputs", *first, "pass_on.cuh"),
        )
    return Part(
        consumer=texts(
            "outputs",
            *first,
            f"copy_rows{'_varlen' if varlen else ''}.cuh",
            "store.cuh",
            f"leave_{'both' if by_keys else 'each'}.cuh.j2",
        )
    )
