"""Tiles: who deals them; and which keys a tile sees."""

from collections.abc import Iterator

from fagen.kinds.params import CU_SEQLENS_Q, VARLEN_KEYS, given
from fagen.kinds.scores import factor
from fagen.part import (
    BOOL,
    DIVISOR,
    FLOAT,
    INT,
    INT64,
    UINT32,
    Argument,
    Array,
    Barrier,
    Constant,
    Divisor,
    Field,
    Part,
    Ratio,
    Type,
    Union,
    amount,
    pointer_to,
)
from fagen.schedule import Values
from fagen.vocab import DTYPES, MASKS, ORDERS

_COUNTED = Type("Counted", 16)
_FLOAT4 = Type("float4", 16)
# where a row of Q is, by lengths and whether a tile's are of several heads
_Q_ROWS = {
    ("equal", False): "forward/tiles/q_row.cuh",
    ("varlen", False): "forward/tiles/varlen_q_row.cuh",
    ("equal", True): "forward/tiles/packed_q_row.cuh",
}


def tiles(values: Values) -> Iterator[Part]:
    """Who deals tiles."""
    lengths = values["lengths"]
    if DTYPES[values["dtype"]].fp8:
        yield Part(consumer=(_Q_ROWS[lengths, values["pack_gqa"]],))
    if lengths == "varlen":
        yield from _varlen(values)
    elif values["num_splits"] > 1:
        yield _split(values)
        yield _dealt(values)
    else:
        yield from _equal(values)
    if values["cluster"] > 1:
        yield Part(constants=(Constant("order.cluster", "thread blocks that share K and V"),))
    if ORDERS[values["order"]].dynamic:
        yield _ring(Type("Tile", _tile_bytes(values)), lengths)


def _tile_bytes(values: Values) -> int:
    """Return how many bytes a tile takes that is passed on."""
    if values["lengths"] == "equal":
        return 48
    mask = MASKS[values["mask"]]
    numbers, pointers = len(mask.numbers), len(mask.row_tables)
    before = 12 + 4 * bool(values["numbers_sequences"])
    before, numbers = max(before, 16 * (pointers > 0)), numbers + numbers % 2 * (pointers > 0)
    sequence = 16 + 4 * numbers + 8 * pointers
    behind = 12 + 8 * bool(values["skips_idle_warpgroups"]) + 4 * mask.first_by_row
    total = before + sequence + behind + 4 * bool(values["skips_masked_blocks"])
    return max(64, -(-total // 16) * 16)


def _ring(tile: Type, lengths: str) -> Part:
    """Tiles that somebody draws are passed on to all others."""
    stages = (amount("tile_stages"),)
    tiles = Array(
        *("tiles", tile, stages),
        row="barriers",
        note="in work, and next",
        aligned=False,
    )
    counted = Array(
        *("counted", _COUNTED, (amount("tile_stages", 4),)),
        note="by warps",
        aligned=False,
    )
    both = Union((tiles, counted), row="barriers", note="the second first", aligned=False)
    note = "blocks before its end that a tile's successor is drawn: enough to hide the answer's way"
    drawn = "beyond the first of each block"
    return Part(
        constants=(
            Constant("order.tile_stages", "tiles drawn and not yet done"),
            Constant("order.tile_readers", "warps that ask for them"),
            Constant("order.draw_ahead", note),
        ),
        shared=(
            Barrier("tile_full", stages, amount(1)),
            Barrier("tile_empty", stages, amount("tile_readers")),
            both if lengths == "varlen" else tiles,
        ),
        params=(Field("tiles_drawn", pointer_to(UINT32), Argument("workspace"), drawn),),
    )


# by whether rows differ in the last key that they see, which rises steadily; by whether first heads
_FIRST_TILES = {
    False: "forward/keys/first_tile.cuh",
    True: "forward/keys/first_tile_by_row.cuh",
}
_HEADS = {
    False: ("forward/tiles/varlen/by_kv_head.cuh", "forward/tiles/varlen/counted.cuh"),
    True: ("forward/tiles/varlen/by_head.cuh", "forward/tiles/varlen/counted_steps.cuh"),
}


def _varlen(values: Values) -> Iterator[Part]:
    """Tiles of varlen sequences: the GPU finds out which there are."""
    turns = values["skips_idle_warpgroups"]
    heads, counted = _HEADS[values["head_major"]]
    yield Part(
        head=("forward/tiles/varlen/sequence.cuh.j2", "forward/tiles/varlen/tile.cuh.j2", counted),
        device=(
            "forward/tiles/varlen/sequences.cuh.j2",
            "forward/tiles/varlen/finder.cuh.j2",
            "forward/tiles/varlen/turns.cuh" if turns else "forward/tiles/varlen/no_turns.cuh",
            "forward/tiles/varlen/ring.cuh.j2",
        ),
        finder=(
            *_rows_of_finder(values),
            _FIRST_TILES[MASKS[values["mask"]].last_by_row and MASKS[values["mask"]].steady],
            heads,
        ),
        kernel=("forward/tiles/varlen/count.cuh",),
        params=(
            CU_SEQLENS_Q,
            *VARLEN_KEYS,
            Field("batch", INT),
            *_heads(values, INT, Argument("heads")),
        ),
    )
    if values["head_major"]:
        yield Part(
            constants=(Constant("order.l2_bytes", type=INT64),),
            params=(Field("exceeds_l2", BOOL, note="K and V do"),),
        )
    if not turns or values["transposes"] == "producer":
        yield Part(device=("forward/tiles/varlen/empty.cuh",))
    if values["scheduler_warp"]:
        yield Part(
            producer=(
                "forward/tiles/varlen/scheduler_warp.cuh",
                "forward/tiles/varlen/requests.cuh",
                "forward/tiles/varlen/produce_requested.cuh.j2",
            ),
            shared=(Barrier("tile_wanted", (), amount(1)),),
        )
    else:
        yield Part(
            producer=(
                "forward/tiles/varlen/scheduler.cuh",
                "forward/tiles/varlen/produce_drawn.cuh.j2",
            )
        )


def _rows_of_finder(values: Values) -> Iterator[str]:
    """Yield the texts that say how many tiles a head has, and where they begin."""
    packed = "packed_" * values["pack_gqa"]
    yield f"forward/tiles/varlen/{packed}rows.cuh"
    if values["skips_idle_warpgroups"]:
        yield f"forward/tiles/varlen/{packed}warpgroups.cuh"


def _heads(values: Values, of: Type, heads: Argument | Divisor) -> tuple[Field, ...]:
    """How many heads there are; where several share a tile's rows they count as one."""
    group = Divisor(Ratio("heads", "kv_heads"))
    if not values["pack_gqa"]:
        return Field("heads", of, heads), Field("heads_per_kv_head", DIVISOR, group)
    return (
        Field("heads", of, note="each of those that share a tile's rows"),
        Field("heads_per_kv_head", DIVISOR),
        Field("pack", DIVISOR, note="heads that share a tile's rows"),
        Field("queries", INT, note="that a warpgroup has rows of"),
        Field("tile_queries", DIVISOR, note="and a tile"),
    )


# by whether a call has as many as fill the SMs
_ABOUT_SPLITS = {
    False: "forward/tiles/about_splits.cuh.j2",
    True: "forward/tiles/about_fill.cuh.j2",
}
# by whether they are all of a split, or those that see a key of it
_OF_SPLITS = {False: "forward/tiles/of_splits.cuh", True: "forward/tiles/of_seen_splits.cuh"}
_COUNTS_OF_SPLITS = {
    False: (
        Field("slots", INT, note="of tiles, over all splits; some may see no key"),
        Field("kv_heads", DIVISOR, Divisor(Argument("kv_heads"))),
        Field("split_tiles", DIVISOR, note="tiles of a split"),
        Field("kv_head_tiles", DIVISOR, note="and those of one KV head"),
    ),
    True: (
        Field("slots", INT, note="of tiles that see a key of a split, over all of them"),
        Field("m_blocks", INT, note="tiles of one head"),
        Field("flat_heads", DIVISOR, note="of all batches"),
        Field("first_seeing", INT, None, "of these, of each split", (amount("num_splits"),)),
    ),
}


def _split(values: Values) -> Part:
    """Tiles of splits of the keys, each of which gives a partial output."""
    seen = bool(values["fill"]) and MASKS[values["mask"]].last_by_row
    return Part(
        about=(_ABOUT_SPLITS[values["fill"]],),
        headers=("cstring",),
        head=("forward/tiles/split_tile.cuh.j2",),
        device=(_OF_SPLITS[seen],),
        kernels=("forward/tiles/splits_of.cuh.j2",),
        params=(
            *(Field(name, INT, Argument(name)) for name in ("batch", "heads")),
            *(Field(name, INT, Argument(name)) for name in ("seqlen_q", "seqlen_k")),
            Field("split_blocks", INT, note="blocks of keys of a split, at most"),
            Field("heads_per_kv_head", DIVISOR, Divisor(Ratio("heads", "kv_heads"))),
            *_COUNTS_OF_SPLITS[seen],
            Field("scale", FLOAT, factor(values), "of S"),
        ),
    )


# of equal lengths, by longest_first and whether a cluster takes two: how many tiles a head has, and
# which one a number means
_NUMBERED = {
    (False, False): (
        Field("m_blocks", DIVISOR, note="tiles of one head"),
        "forward/tiles/in_order.cuh",
    ),
    (False, True): (
        Field("m_pairs", DIVISOR, note="pairs of tiles of one head"),
        "forward/tiles/pairs_in_order.cuh",
    ),
    (True, False): (
        Field("m_blocks", INT, note="tiles of one head"),
        "forward/tiles/longest_first.cuh.j2",
    ),
    (True, True): (
        Field("m_pairs", INT, note="pairs of tiles of one head"),
        "forward/tiles/longest_first.cuh.j2",
    ),
}


# by whether tiles of a last round that leaves SMs idle are in parts of their keys
_IN_PARTS = {True: "forward/tiles/in_parts.cuh"}
_OF_PARTS = Part(
    constants=(
        Constant("order.most_parts", "of a tile's keys"),
        Constant("order.most_units", "parts of all tiles"),
        Constant("order.tile_blocks", "what a tile takes beside its blocks, in such"),
        Constant("order.part_blocks", "and a part of one that leaves, and again when it is added"),
        Constant("part_counters", "of a tile's warpgroups"),
    ),
    shared=(
        Array("parts_before", UINT32, (amount("consumers"),), note="that ended", aligned=False),
    ),
    params=(
        Field("whole", INT, note="tiles, which go before parts"),
        Field("parts", DIVISOR, note="of each of the others"),
        Field("part_blocks", INT, note="blocks of keys of each"),
        Field("parts_ended", pointer_to(UINT32), note="of each tile's warpgroups"),
        Field("partials", pointer_to(_FLOAT4), note="what parts leave"),
    ),
)
_PARTS = {False: Part(), True: _OF_PARTS}
# by whether a tile's rows are of several heads
_OF_HEADS = {False: "forward/tiles/of_head.cuh.j2", True: "forward/tiles/of_packed_head.cuh.j2"}


def _equal(values: Values) -> Iterator[Part]:
    """Tiles of equally long sequences, in an order that the host works out."""
    order = ORDERS[values["order"]]
    rows, numbered = _NUMBERED[order.longest_first, values["cluster"] > 1]
    numbered = _IN_PARTS.get(order.parts, numbered)
    yield _PARTS[order.parts]
    yield Part(
        head=("forward/tiles/tile.cuh.j2",),
        device=(_OF_HEADS[values["pack_gqa"]], numbered),
        params=(
            *_heads(values, DIVISOR, Divisor(Argument("heads"))),
            Field("seqlen_q", INT, Argument("seqlen_q")),
            Field("seqlen_k", INT, Argument("seqlen_k")),
            rows,
            Field("slots", INT, note="of tiles, over all heads and batches"),
            Field("has_empty_tiles", BOOL, note="whose rows see no key"),
        ),
    )
    if order.longest_first:
        together = "heads of any batch whose K and V share the L2 cache"
        share = "bytes of the L2 cache for K and V"
        yield Part(
            constants=(Constant("order.l2_share_bytes", share, name="l2_share", type=INT64),),
            params=(
                Field("sections", INT),
                Field("section_slots", DIVISOR),
                Field("section_heads", DIVISOR, note=together),
                Field("last_section_heads", DIVISOR),
            ),
        )
    if order.dynamic:
        rounds = "tiles for each SM in the last section of heads"
        yield Part(
            device=("forward/tiles/drawn.cuh", "forward/tiles/by_block.cuh"),
            producer=("forward/tiles/scheduler.cuh", "forward/tiles/produce_drawn.cuh.j2"),
            constants=(Constant("order.section_rounds", rounds),),
            params=(
                Field("m_end", INT),
                Field("tiles", INT, note="of all tiles; slots are for those that see a key"),
            ),
        )
    else:
        yield _dealt(values)
    yield Part(device=("forward/tiles/empty.cuh.j2",))


_ROUNDS = {False: "forward/tiles/round_robin.cuh", True: "forward/tiles/serpentine.cuh"}
_TAKERS = {1: "forward/tiles/by_block.cuh", 2: "forward/tiles/by_cluster.cuh"}


def _dealt(values: Values) -> Part:
    """In an order that each thread block, or cluster, works out by itself."""
    rounds, takers = _ROUNDS[ORDERS[values["order"]].longest_first], _TAKERS[values["cluster"]]
    warp = values["producer"] == "warp"
    return Part(
        device=(takers, rounds, "forward/tiles/dealt.cuh"),
        producer=("forward/tiles/produce_dealt.cuh.j2",) if warp else (),
    )


# by whether rows differ in the keys that they see
_BLOCKS = {
    False: ("forward/keys/every.cuh.j2",),
    True: ("attention/keys/by_row.cuh.j2", "forward/keys/by_row.cuh.j2"),
}
_LENGTHS = {False: "length.cuh", True: "row_keys.cuh"}
# by which of a row's first and last key depend on the row
_MASKS = {
    (False, False): "mask_end.cuh",
    (False, True): "mask_rows.cuh.j2",
    (True, False): "mask_ends.cuh.j2",
    (True, True): "mask_ends.cuh.j2",
}
_SEEN = {False: "seen_end.cuh", True: "seen_rows.cuh.j2"}
_OF_TILES = {1: "forward/keys/of_tile.cuh", 2: "forward/keys/of_pair.cuh"}  # by cluster


def _of_tiles(values: Values) -> tuple[str, ...]:
    """The text that gives a tile's blocks by its number, unless the finder has its own."""
    if not values["pack_gqa"]:
        return (_OF_TILES[values["cluster"]],)
    return ("forward/keys/of_packed_tile.cuh.j2",) if values["lengths"] == "equal" else ()


def keys(values: Values) -> Iterator[Part]:
    """Which keys a tile sees."""
    mask = MASKS[values["mask"]]
    own_lengths = values["lengths"] == "varlen" or bool(mask.tables)
    by_row, which = mask.by_row, "varlen_" * own_lengths
    packed = "packed_" * (by_row and values["pack_gqa"])
    by_sequence = bool(mask.tables) and values["lengths"] == "equal"
    yield Part(
        params=tuple(given(mask, by_sequence)),
        head=("forward/keys/blocks.cuh.j2", *("attention/keys/sequence.cuh.j2",) * by_sequence),
        device=(
            f"forward/keys/{which}lengths.cuh",
            *_BLOCKS[by_row],
            *_of_tiles(values),
            *("attention/keys/sequences.cuh.j2",) * by_sequence,
        ),
        consumer=(
            f"forward/keys/{which}{packed}{_LENGTHS[by_row]}",
            f"forward/keys/{_MASKS[mask.first_by_row, mask.last_by_row]}",
        ),
    )
    if values["finds_spread"]:
        yield Part(consumer=(f"forward/keys/{_SEEN[by_row]}",))
    if values["num_splits"] > 1:
        yield Part(device=("forward/keys/within.cuh.j2",))
