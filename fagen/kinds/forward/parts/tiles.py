"""Tiles: who deals them; and which keys a tile sees."""

from collections.abc import Iterator

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
    amount,
    pointer_to,
)
from fagen.schedule import Values
from fagen.vocab import DTYPES, MASKS, ORDERS

_TILE, _VARLEN_TILE = Type("Tile", 48), Type("Tile", 64)


def tiles(values: Values) -> Iterator[Part]:
    """Who deals tiles."""
    order = ORDERS[values["order"]]
    varlen, splits = values["lengths"] == "varlen", values["num_splits"] > 1
    which = "varlen_" if varlen else ""
    if DTYPES[values["dtype"]].fp8:
        yield Part(consumer=(f"forward/tiles/{which}q_row.cuh",))
    if varlen:
        yield _varlen(values)
        yield from _found(values)
    elif splits:
        yield _split()
        yield from _dealt(values)
    else:
        yield _dense(values)
        yield from _drawn() if order.dynamic else _dealt(values)
    if values["cluster"] > 1:
        yield Part(constants=(Constant("cluster", "thread blocks that share K and V"),))
    if order.dynamic:
        yield Part(
            constants=(
                Constant("tile_stages", "tiles drawn and not yet done"),
                Constant("tile_readers", "warps that ask for them"),
                Constant(
                    "draw_ahead",
                    "blocks before its end that a tile's successor is drawn: "
                    "enough to hide the answer's way",
                ),
            ),
            shared=(
                Barrier("tile_full", (amount("tile_stages"),), amount(1)),
                Barrier("tile_empty", (amount("tile_stages"),), amount("tile_readers")),
                Array(
                    "tiles",
                    _VARLEN_TILE if varlen else _TILE,
                    (amount("tile_stages"),),
                    row="barriers",
                    note="in work, and next",
                    aligned=False,
                ),
            ),
            params=(
                Field(
                    "tiles_drawn",
                    pointer_to(UINT32),
                    Argument("workspace"),
                    "beyond the first of each block",
                ),
            ),
        )
    if values["scheduler_warp"]:
        yield Part(shared=(Barrier("tile_wanted", (), amount(1)),))


def _varlen(values: Values) -> Part:
    """Tiles of sequences of lengths of their own, which the GPU reads."""
    to_int32 = pointer_to(Type("int32_t"), const=True)
    head_major = values["head_major"]
    return Part(
        head=("forward/tiles/sequence.cuh", "forward/tiles/tile.cuh.j2"),
        constants=((Constant("l2_bytes", type=INT64, name="l2_bytes"),) if head_major else ()),
        params=(
            Field("cu_seqlens_q", to_int32, note="where sequences begin, and the last one ends"),
            Field("cu_seqlens_k", to_int32, Argument("cu_seqlens_k"), "the same of keys"),
            Field(
                "seqused_k",
                to_int32,
                Argument("seqused_k"),
                "of how many keys each is to see the first ones; null: of all",
            ),
            Field("batch", INT),
            Field("total_q", INT, Argument("total_q")),
            Field("total_k", INT, Argument("total_k")),
            Field("heads", INT, Argument("heads")),
            *((Field("exceeds_l2", BOOL, note="K and V do"),) if head_major else ()),
            Field("heads_per_kv_head", DIVISOR, Divisor(Ratio("heads", "kv_heads"))),
        ),
    )


def _split() -> Part:
    """Tiles of splits of the keys, each of which gives a partial output."""
    return Part(
        head=("forward/tiles/tile.cuh.j2",),
        kernels=("forward/tiles/splits_of.cuh.j2",),
        params=(
            *(Field(name, INT, Argument(name)) for name in ("batch", "heads")),
            *(Field(name, INT, Argument(name)) for name in ("seqlen_q", "seqlen_k")),
            Field("chunk_blocks", INT, note="blocks of keys of a chunk, at most"),
            Field("slots", INT, note="of tiles, over all chunks; some may see no key"),
            Field("kv_heads", DIVISOR, Divisor(Argument("kv_heads"))),
            Field("heads_per_kv_head", DIVISOR, Divisor(Ratio("heads", "kv_heads"))),
            Field("chunk_tiles", DIVISOR, note="tiles of a chunk"),
            Field("kv_head_tiles", DIVISOR, note="and those of one KV head"),
            Field("scale", FLOAT, Argument("scale"), "of S"),
        ),
    )


def _dense(values: Values) -> Part:
    """Tiles of equally long sequences, in an order that the host works out."""
    order, paired = ORDERS[values["order"]], values["cluster"] > 1
    rows = "m_pairs" if paired else "m_blocks"
    unused = not order.dynamic and (order.longest_first or paired)
    params = [
        Field("heads", DIVISOR, Divisor(Argument("heads"))),
        Field("heads_per_kv_head", DIVISOR, Divisor(Ratio("heads", "kv_heads"))),
        Field("seqlen_q", INT, Argument("seqlen_q")),
        Field("seqlen_k", INT, Argument("seqlen_k")),
        Field(
            rows,
            INT if order.longest_first else DIVISOR,
            note=f"{'pairs of ' if paired else ''}tiles of one head",
        ),
        Field(
            "slots",
            INT,
            note=f"of tiles, over all heads and batches{'; some may be unused' if unused else ''}",
        ),
        Field("has_empty_tiles", BOOL, note="whose rows see no key"),
    ]
    constants = []
    if order.longest_first:
        params += [
            Field("sections", INT),
            Field("section_slots", DIVISOR),
            Field(
                "section_heads",
                DIVISOR,
                note="heads of any batch whose K and V share the L2 cache",
            ),
            Field("last_section_heads", DIVISOR),
        ]
        constants += [
            Constant(
                "l2_share_bytes",
                "bytes of the L2 cache for K and V",
                name="l2_share",
                type=INT64,
            )
        ]
    if order.dynamic:
        params += [
            Field("m_end", INT),
            Field("tiles", INT, note="of all tiles; slots are for those that see a key"),
        ]
        constants += [Constant("section_rounds", "tiles for each SM in the last section of heads")]
    return Part(
        head=("forward/tiles/tile.cuh.j2",), constants=tuple(constants), params=tuple(params)
    )


def _drawn() -> Iterator[Part]:
    """The longest first, to whoever comes free: the producer draws them from a counter."""
    yield Part(
        device=(
            "forward/tiles/of_head.cuh",
            "forward/tiles/longest_first.cuh.j2",
            "forward/tiles/drawn.cuh",
            "forward/tiles/by_block.cuh",
            "forward/tiles/empty.cuh.j2",
        ),
        producer=("forward/tiles/scheduler.cuh", "forward/tiles/produce_drawn.cuh.j2"),
    )


def _dealt(values: Values) -> Iterator[Part]:
    """In an order that each thread block, or cluster, works out by itself."""
    longest_first, paired = ORDERS[values["order"]].longest_first, values["cluster"] > 1
    order = "forward/tiles/serpentine.cuh" if longest_first else "forward/tiles/round_robin.cuh"
    takers = "forward/tiles/by_cluster.cuh" if paired else "forward/tiles/by_block.cuh"
    if values["num_splits"] > 1:
        yield Part(device=(takers, order, "forward/tiles/of_chunks.cuh", "forward/tiles/dealt.cuh"))
    else:
        in_order = "forward/tiles/pairs_in_order.cuh" if paired else "forward/tiles/in_order.cuh"
        yield Part(
            device=(
                "forward/tiles/of_head.cuh",
                "forward/tiles/longest_first.cuh.j2" if longest_first else in_order,
                takers,
                order,
                "forward/tiles/dealt.cuh",
                "forward/tiles/empty.cuh.j2",
            )
        )
    if values["producer"] == "warp":
        yield Part(producer=("forward/tiles/produce_dealt.cuh.j2",))


def _found(values: Values) -> Iterator[Part]:
    """Of sequences of lengths of their own: a warp finds out which tiles there are."""
    turns = values["skips_idle_warpgroups"]
    yield Part(
        device=(
            "forward/tiles/varlen/sequences.cuh",
            "forward/keys/first_tile_by_row.cuh"
            if MASKS[values["mask"]].last_by_row
            else "forward/keys/first_tile.cuh",
            "forward/tiles/varlen/finder.j2",
            *(("forward/tiles/varlen/turns.cuh",) if turns else ()),
            "forward/tiles/varlen/ring.cuh.j2",
        )
    )
    if not turns or values["v_layout"] == "rows":
        yield Part(device=("forward/tiles/varlen/empty.cuh",))
    if values["scheduler_warp"]:
        yield Part(
            producer=(
                "forward/tiles/varlen/scheduler_warp.cuh.j2",
                "forward/tiles/varlen/requests.cuh",
                "forward/tiles/varlen/produce_requested.cuh.j2",
            )
        )
    else:
        yield Part(
            producer=(
                "forward/tiles/varlen/scheduler.cuh.j2",
                "forward/tiles/varlen/produce_drawn.cuh.j2",
            )
        )


def keys(values: Values) -> Iterator[Part]:
    """Which keys a tile sees."""
    varlen, by_row = values["lengths"] == "varlen", MASKS[values["mask"]].by_row
    which = "varlen_" if varlen else ""
    names = [f"{which}row_keys.cuh" if by_row else f"{which}length.cuh"]
    names.append("mask_rows.cuh.j2" if by_row else "mask_end.cuh")
    if values["finds_spread"]:
        names.append("seen_rows.cuh.j2" if by_row else "seen_end.cuh")
    yield Part(
        head=("forward/keys/blocks.cuh.j2",),
        device=(
            "forward/keys/varlen_lengths.cuh" if varlen else "forward/keys/lengths.cuh",
            *(("attention/keys/by_row.cuh.j2",) if by_row else ()),
            "forward/keys/by_row.cuh.j2" if by_row else "forward/keys/every.cuh.j2",
            "forward/keys/of_pair.cuh" if values["cluster"] > 1 else "forward/keys/of_tile.cuh",
            *(("forward/keys/within.cuh.j2",) if values["num_splits"] > 1 else ()),
        ),
        consumer=tuple(f"forward/keys/{name}" for name in names),
    )
