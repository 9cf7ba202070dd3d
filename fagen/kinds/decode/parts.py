"""The parts of a decoding kernel: what keys of a schedule mean for its text and its memory.

Slots: tile (what every kernel has), deals (who takes which splits), keys (which a query sees),
loads (how Q, K and V come), scores (how they become P, and what P is relative to), steps (the
products), combine (where outputs of splits go, and how they become one).
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from fagen.kinds.combining import EVERY_SPLIT, combining
from fagen.kinds.decode.rules import (
    combines_in_shared,
    is_paged,
    k_is_wider,
    prefetches,
    reads_pairs,
    shares_lines,
)
from fagen.kinds.scores import elements, factor, factor_log2
from fagen.kinds.sinks import sinks_of_call
from fagen.part import (
    BOOL,
    DESCRIPTOR,
    DIVISOR,
    ELEMENT,
    FLOAT,
    HEADERS,
    INT,
    INT64,
    TMA_HEADERS,
    Argument,
    Array,
    Barrier,
    Computed,
    Constant,
    Divisor,
    Field,
    Part,
    Parts,
    Place,
    TensorMap,
    Type,
    amount,
    choices,
    pointer_to,
)
from fagen.schedule import Values
from fagen.vocab import DTYPES, MASKS, SCORES

# the keys that choose parts, and what rules make of others; sizes are none of them
CHOSEN = ("dtype", "mask", "score", "by", "sink", "maximum", "speculate")
RULES: tuple[Callable[[Values], Any], ...] = (
    k_is_wider,
    prefetches,
    combines_in_shared,
    shares_lines,
    reads_pairs,
    is_paged,
)

# the order of members of SharedStorage and of Params, by name: machine code holds their offsets
_SHARED = (
    *("ring", "q", "p", "maxima", "sums", "combined"),
    *("full", "empty", "q_full", "q_empty"),
)
_PARAMS = (
    *("seqused_k", "leftpad_k", "partials", "reference", "shares", "combined", "out", "lse"),
    *("out_stride_batch", "out_stride_seq", "out_stride_head"),
    *("lse_stride_batch", "lse_stride_head"),
    *("batch", "heads", "kv_heads", "group", "seqlen_q", "seqlen_k"),
    *("tile_positions", "tile_heads", "q_bytes", "split_units"),
    *("abreast", "tile_groups", "level", "whole", "prefetched_keys"),
    *("kv_heads_divisor", "row_tiles", "head_tiles", "heads_divisor", "seqlen_q_divisor"),
    *("scale", "scale_log2", "inverse_scale"),
    *("least_blocks", "alone", "whole_groups", "of_run", "shorter_runs", "whole_rows"),
    *("adjacent", "next_begins"),
    *("block_table", "block_table_stride", "page_size", "box_shift"),
    *("block_pages", "block_rest"),
)

_TO_INT32 = pointer_to(Type("int32_t"), const=True)
_STAGES, _Q_STAGES, _WARPS = amount("stages"), amount("q_stages"), amount("warps")


def parts(values: Values) -> Parts:
    """Return the parts of a kernel with these values of a schedule's keys."""
    return _parts(choices(values, CHOSEN, RULES))


@cache
def _parts(chosen: tuple[tuple[str, Any], ...]) -> Parts:
    values = dict(chosen)
    # which keys are skipped hangs on what the mask shows
    of_units = (keys, deals) if MASKS[values["mask"]].given else (deals, keys)
    slots = tile, *of_units, loads, scores, steps, combine
    every = tuple(part for slot in slots for part in slot(values))
    return Parts(every, _SECTIONS, shared_order=_SHARED, params_order=_PARAMS)


_SECTIONS = (
    *("decode/head.j2", "sm90/ring.cuh", "parts/device.j2", "decode/wgmma.j2"),
    *("decode/producer.j2", "decode/consumer.j2", "decode/kernel.j2", "parts/kernels.j2"),
)


def tile(values: Values) -> Iterator[Part]:
    """What every kernel has."""
    dtype = DTYPES[values["dtype"]]
    yield Part(
        about=("decode/about.cuh.j2",),
        headers=(*HEADERS, *TMA_HEADERS, "cstring", dtype.header),
        constants=(
            Constant("head_dim"),
            Constant("head_dim_v"),
            Constant("head_dim_padded", "in shared memory, in whole slabs"),
            Constant("head_dim_v_padded"),
            Constant("rows", "of queries that a unit of work has at most"),
            Constant("block_n", "keys of a step"),
            Constant("blocks", "that share an SM"),
            Constant("most_blocks", "of keys, up to which a sequence is one split"),
            Constant("heads_of_block", "of a KV head: a split has a block for so many at least,"),
            Constant("longest_least", "up to so many blocks"),
            Constant("threads", "a warpgroup that computes, a warp that loads"),
            Constant("launch_registers"),
            Constant("dtype.wgmma_k", "the K of every wgmma", name="step_k"),
            Constant("slab", "columns: tiles lie as slabs of 128 bytes, all rows of one together"),
            Constant("swizzle.cute", name="descriptor", type=DESCRIPTOR),
        ),
        params=(
            *(_size(name) for name in ("batch", "heads", "kv_heads", "seqlen_q")),
            Field("seqlen_k", INT, _ROOM if values["is_paged"] else Argument("seqlen_k")),
        ),
    )


def _size(name: str) -> Field:
    return Field(name, INT, Argument(name))


# of a sequence, in pages: without a page there is no key
_ROOM = Computed(
    "a.pages == 0 ? 0 : int(std::min<int64_t>(int64_t(a.entries) * a.page_size, 1 << 30))"
)


def deals(values: Values) -> Iterator[Part]:
    """Who takes which splits."""
    way = values["by"]
    texts = f"decode/deals/{way}"
    prefetched = values["prefetches"]
    run = "decode/scores/fixed/run.cuh" if values["maximum"] == "fixed" else f"{texts}/run.cuh"
    whole: tuple[str, ...] = ()
    given = bool(MASKS[values["mask"]].given)
    launch = [f"{texts}/launch.cuh{'.j2' * (way == 'stream_k')}"]
    if way == "stream_k":
        launch.append(f"{texts}/launch_{'even' if values['shares_lines'] else 'whole'}.cuh")
        if prefetched:  # nor do registers that spill leave room for turns behind whole tiles
            run, whole = f"{texts}/run_turns.cuh", (f"{texts}/first_of_whole.cuh",)
            launch.append(f"{texts}/launch_turns.cuh")
        launch.append(f"{texts}/grid.cuh")
    if prefetched:
        launch.append(f"{texts}/launch_prefetching.cuh")
    yield Part(
        about=(f"{texts}/about.cuh",),
        device=(
            f"decode/keys/{'seen_sequence.cuh.j2' if given else 'sequence.cuh'}",
            "decode/deals/unit.cuh",
            f"{texts}/units.cuh.j2",
            *whole,
            *(("decode/deals/pairs.cuh",) if values["reads_pairs"] else ()),
        ),
        loader=(f"{texts}/first.cuh", run) if prefetched else (run,),
        consumer=(f"{texts}/consumer.cuh", run),
        host=(
            f"decode/deals/launch_rows{_of_pairs(values)}.cuh",
            f"decode/deals/launch_keys{'_of_window' * (values['mask'] == 'window')}.cuh",
            "decode/deals/launch.cuh",
            *launch,
        ),
        params=(
            Field("seqused_k", _TO_INT32, Argument("seqused_k"), "(batch); may be null"),
            Field("leftpad_k", _TO_INT32, Argument("leftpad_k"), "(batch); may be null"),
            Field("group", INT, note="query heads of a KV head"),
            Field("tile_positions", INT, note="of queries, and their heads: kRows are most"),
            Field("tile_heads", DIVISOR),
            Field("split_units", INT, note="units of work of a split: KV heads and tiles of rows"),
            Field("kv_heads_divisor", DIVISOR, Divisor(Argument("kv_heads"))),
            Field("row_tiles", DIVISOR),
            Field("head_tiles", DIVISOR),
            Field("least_blocks", INT, note="of keys, that a split has"),
            *(_STREAM_K if way == "stream_k" else (_ALONE,)),
        ),
    )


def _of_pairs(values: Values) -> str:
    return "_of_pairs" if values["reads_pairs"] else ""


_ALONE = Field("alone", BOOL, note="no sequence has two splits: nothing is left to combine")
_STREAM_K = (
    Field("abreast", DIVISOR, note="blocks that go through a run together, a tile of output each"),
    Field("tile_groups", DIVISOR, note="of so many tiles, that a sequence has"),
    Field(
        "whole_groups", INT, note="of tiles that are alike and stay whole; then splits go in turns"
    ),
    Field("of_run", INT, note="of them, for each run; how many come before those of one more"),
    Field("shorter_runs", INT),
    Field("whole_rows", INT, note="of queries, of such tiles' sequences"),
    Field("level", BOOL, note="runs of whole groups: few have one less than others"),
    Field("whole", BOOL, note="no tile is cut: they are level, and for want of lengths alike"),
)


def keys(values: Values) -> Iterator[Part]:
    """Which keys a query sees."""
    mask = MASKS[values["mask"]]
    seen = "attention/keys/by_row.cuh.j2" if mask.by_row else "attention/keys/every.cuh"
    yield Part(
        device=("decode/keys/lengths.cuh.j2", seen),
        consumer=("decode/keys/mask.cuh.j2",),
        params=(
            *(Field(one.name, INT, Argument(one.name)) for one in mask.parameters),
            *(Field(name, _TO_INT32, Argument(name)) for name in mask.batch_tables),
        ),
    )


def loads(values: Values) -> Iterator[Part]:
    """How Q, K and V come into shared memory."""
    widest = "head_dim_padded" if values["k_is_wider"] else "head_dim_v_padded"
    prefetched, own = values["prefetches"], _of_pairs(values)
    lines = _LINES | ({"heads_in_row": "in_row"} if values["reads_pairs"] else {})
    buffer = amount("block_n", widest, *(("kv_heads",) if values["reads_pairs"] else ()))
    lying = "paged" if values["is_paged"] else "pairs" if values["reads_pairs"] else "dense"
    yield Part(
        loader=(
            f"decode/loads/{lying}.cuh.j2",
            f"decode/loads/queries{own}.cuh",
            f"decode/loads/unit{'_of_pages' * values['is_paged']}.cuh",
            *(_prefetch(values) if prefetched else ()),
        ),
        host=("decode/loads/launch_pages.cuh.j2",) if values["is_paged"] else (),
        kernel=("decode/loads/prefetching.cuh",) if prefetched else (),
        maps=(
            TensorMap("q", (_SLAB, "tile_heads", "tile_positions"), dims=_HEADS_FIRST, **_LINES),
            *(_PAGE_MAPS if values["is_paged"] else _dense_maps(lines)),
        ),
        shared=(
            Array("ring", ELEMENT, (_STAGES, buffer)),
            Array("q", ELEMENT, (_Q_STAGES, amount("rows", "head_dim_padded"))),
            Barrier("full", (_STAGES,), amount(1), transactions=True, aligned=True),
            Barrier("empty", (_STAGES,), _WARPS),
            Barrier("q_full", (_Q_STAGES,), amount(1), transactions=True),
            Barrier("q_empty", (_Q_STAGES,), _WARPS),
        ),
        params=(
            Field("q_bytes", INT, note="of a tile's rows"),
            *((_ADJACENT,) if values["reads_pairs"] else ()),
            *(_PAGES if values["is_paged"] else ()),
            *(
                (Field("prefetched_keys", INT, note="of a thread block's first unit, at most"),)
                if prefetched
                else ()
            ),
        ),
        constants=(
            Constant("stages", "buffers of the ring, in which blocks of K and V alternate"),
            Constant("q_stages"),
            *(_PAIRS if values["reads_pairs"] else ()),
            *((_SHORT_BOX,) if values["is_paged"] else ()),
            *((Constant("prefetch_warp", "that asks L2 for first keys"),) if prefetched else ()),
        ),
    )


def _prefetch(values: Values) -> tuple[str, ...]:
    if values["is_paged"]:
        return ("decode/loads/prefetch_pages.cuh",)
    return f"decode/loads/prefetch_block{_of_pairs(values)}.cuh", "decode/loads/prefetch.cuh"


def _dense_maps(lines: dict[str, Any]) -> tuple[TensorMap, ...]:
    return (
        TensorMap("k", (_SLAB, amount("block_n")), stand_in="q", **lines),
        TensorMap("v", (_SLAB, amount("block_n")), columns="head_dim_v", stand_in="q", **lines),
    )


_ADJACENT = Field("adjacent", BOOL, note="rows of a tile's KV heads, in the cache")
_PAIRS = (
    Constant("kv_heads", "that a thread block reads side by side"),
    Constant("own_rows", "of queries, for each of them", value=amount("rows", per="kv_heads")),
    Constant("half_slab", "columns of a head in the slab that two share"),
    Constant("shared_slab", "which that is"),
    Constant("pair_slabs", "of two heads' rows that are adjacent: of others there is one more"),
)
_SLAB, _HEADS_FIRST = amount("slab"), ("head", "seq", "batch")
# a row of a box has 128 bytes: twice that, as L2 may fetch, is slower out of memory
_LINES: dict[str, Any] = {"swizzle": "swizzle", "promotion": 128}


def _page_map(tensor: str, columns: str, width: str, rows: str) -> TensorMap:
    """A map of all pages: the outermost dimension is the page, whose stride may be any."""
    place = Place(
        f"params.seqlen_k > 0 ? a.{tensor} : a.q",
        (width, "params.seqlen_k > 0 ? a.page_size : 0", "a.kv_heads", "a.pages"),
        tuple(f"a.{tensor}_stride_{dim}" for dim in ("seq", "head", "page")),
    )
    name = tensor if rows == "box_rows" else f"{tensor}_row"
    return TensorMap(name, (_SLAB, rows), columns=columns, of=tensor, place=place, **_LINES)


_PAGE_MAPS = tuple(
    _page_map(*of, rows)
    for rows in ("box_rows", "1")
    for of in (("k", "head_dim", "kHeadDim"), ("v", "head_dim_v", "kHeadDimV"))
)
_SHORT_BOX = Constant("short_box", "rows of a page, below which boxes are many", value=amount(16))
_PAGES = (
    Field("block_table", _TO_INT32, Argument("block_table"), "(batch, entries): pages"),
    Field("block_table_stride", INT64, Argument("block_table_stride_batch")),
    Field("page_size", DIVISOR),
    Field("box_shift", INT, note="2 to this: rows of a page, that a box has"),
    Field("block_pages", INT, note="that a block of keys has, and how many rows more"),
    Field("block_rest", INT),
)


def scores(values: Values) -> Iterator[Part]:
    """How scores become P."""
    way = values["maximum"]
    folder, fixed = f"decode/scores/{way}", way == "fixed"
    score = SCORES[values["score"]]
    yield from elements(values, "decode/scores/elements.cuh.j2")
    yield Part(
        about=("decode/scores/about.cuh.j2",),
        device=(f"{folder}/device.cuh",) if fixed else (),
        loader=(f"{folder}/loader.cuh",) if fixed else (),
        consumer=(
            *(() if fixed else (f"decode/scores/takes{_of_pairs(values)}.cuh",)),
            f"{folder}/consumer.cuh",
            "decode/scores/softmax.cuh",
            *(
                (f"{folder}/has_references.cuh", "decode/scores/speculative.cuh")
                if values["speculate"]
                else ("decode/scores/settled.cuh",)
            ),
        ),
        kernel=("sm90/overlap_launches.cuh", f"{folder}/roles.cuh"),
        host=(f"{folder}/launch{'' if score.is_plain else '_scored'}.cuh",) if fixed else (),
        shared=(
            Array("p", ELEMENT, (amount(2), amount("rows", "block_n")), note="keys side by side"),
            Array("maxima", FLOAT, (_WARPS, amount("rows")), row="statistics"),
        ),
        params=(
            Field("scale", FLOAT, factor(values), "of S"),
            Field("scale_log2", FLOAT, factor_log2(values), "times log2(e)"),
            *(_FIXED if fixed else ()),
        ),
        constants=(
            Constant("rescale_threshold", "log2 units that scores may outgrow their reference by"),
            *(
                (Constant("least_mean", "of a row's P in a split: with less roundings would tell"),)
                if fixed
                else ()
            ),
        ),
    )


_FIXED = (
    Field("reference", pointer_to(FLOAT, const=True), Argument("reference"), "(heads), base e"),
    Field("inverse_scale", FLOAT),
)


def steps(values: Values) -> Iterator[Part]:
    """The products of a step."""
    yield Part(
        consumer=(
            "decode/steps/arrive.cuh",
            f"decode/steps/products{_of_pairs(values)}.cuh",
            "decode/steps/buffers.cuh",
            f"decode/steps/clear{_of_pairs(values)}.cuh",
            "decode/steps/steps.cuh.j2",
        ),
    )


def combine(values: Values) -> Iterator[Part]:
    """Where outputs of splits go, and how they become one."""
    in_registers = values["by"] == "stream_k"
    way = (
        ("registers", "shared")[values["combines_in_shared"]] if in_registers else values["maximum"]
    )
    start, by_blocks = _COMBINE[way]
    yield combining(start, in_registers=by_blocks, sink=bool(values["sink"]))
    yield from sinks_of_call(values["sink"])
    yield Part(
        head=("decode/combine/combined.cuh.j2",) if in_registers else (),
        methods=("decode/combine/combined_of.cuh",) if in_registers else (),
        host=("decode/combine/launch.cuh",)
        if in_registers
        else ("decode/combine/launch_next.cuh",)
        if by_blocks
        else (),
        consumer=(
            "decode/combine/sums.cuh",
            f"decode/combine/rows{_of_pairs(values)}.cuh",
            _NUMBERS[values["reads_pairs"]],
            "decode/combine/partial.cuh",
            *_FINISH[way],
        ),
        shared=(
            Array("sums", FLOAT, (_WARPS, amount("rows")), row="statistics", aligned=False),
            *((_COMBINED_NUMBERS,) if values["combines_in_shared"] else ()),
        ),
        params=(_COMBINED,) if in_registers else (_NEXT_BEGINS,) if by_blocks else (),
    )


# where a row's splits begin, and whether thread blocks give outputs too
_COMBINE = {
    "lazy": ("decode/combine/several.cuh.j2", True),
    "fixed": (EVERY_SPLIT, False),
    "registers": ("decode/combine/rest.cuh.j2", True),
    "shared": ("decode/combine/rest.cuh.j2", True),
}
# of each column of a thread's part of an accumulator, its numbers, score and sum, for all threads
_COMBINED_NUMBERS = Array(
    "combined",
    FLOAT,
    (amount("rows", per=4), amount("head_dim_v_padded", per=32, plus=2), amount(128)),
    aligned=False,
)
_NUMBERS = "decode/combine/numbers.cuh.j2", "decode/combine/numbers_of_pairs.cuh"
_NEXT_BEGINS = Field(
    "next_begins", BOOL, note="the launch after that which combines, under the end of this one"
)
_COMBINED = Field("combined", pointer_to(Type("Combined")), note="(batch, seqlen_q, heads)")
_SHARE, _STORED = "decode/combine/share.cuh", "decode/combine/stored.cuh.j2"
_FINISH = {
    "lazy": (_SHARE, "decode/combine/output.cuh.j2", "decode/combine/partials.cuh"),
    "fixed": ("decode/scores/fixed/finish.cuh.j2",),
    "registers": (_SHARE, "decode/combine/registers.cuh", _STORED),
    "shared": (_SHARE, "decode/combine/shared.cuh", _STORED),
}
