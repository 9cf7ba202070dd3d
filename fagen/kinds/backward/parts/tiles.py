"""Keys: which rows see them; tiles: who deals them."""

from collections.abc import Iterator
from dataclasses import replace

from fagen.kinds.backward.parts.launcher import cuts_rows
from fagen.kinds.params import CU_SEQLENS_Q, TO_INT32, VARLEN_KEYS, given
from fagen.part import (
    DIVISOR,
    INT,
    INT64,
    Argument,
    Array,
    Barrier,
    Constant,
    Field,
    Part,
    Strided,
    Struct,
    Type,
    amount,
    pointer_to,
)
from fagen.schedule import Values
from fagen.vocab import Mask

_ROWS_TO_WRITE = Type("Rows<Element>")
_TILE_STAGES, _ONE = amount("tile_stages"), amount(1)
_VARLEN_TEXTS = "slots.cuh.j2", "list_tiles.cuh.j2", "varlen.cuh.j2"
_L2_SHARE = Constant(
    "l2_share_bytes",
    "bytes of the L2 cache for Q, dO and dQ",
    name="l2_share",
    type=INT64,
)
_OF_A_LAUNCH = "of a launch of a kernel before or after, whose grid may not hold all of them"


def rounds(values: Values) -> str:
    """How a tile's heads and blocks of rows follow each other, as files of all slots are named.

    Where tiles of a head begin with the same block and have more or fewer, each block for all
    heads: so tiles keep step. Head by head those with fewer would wait for the one that adds to
    dQ first. Of a window each tile begins further on than the one before, and waits for none; head
    by head tiles beside each other then have the same rows, which stay in the L2 cache.
    """
    mask = values["mask"]
    alike = mask.last_by_row and not (mask.first_by_row and mask.first_steady)
    together = alike and values["rounds_fit"]
    # beside 48 rows loops over heads take registers that there are not
    return "block_by_block" if together or values["last_makes_more"] else "head_by_head"


def works_out_anew(values: Values) -> bool:
    """Whether consumers work their tile out once more to store its gradients: for registers."""
    dense = values["lengths"] == "equal" and not values["persistent"]
    dense = dense and not values["mask"].tables
    by_blocks = rounds(values) == "block_by_block"
    return dense and values["partition"] == "keys" and (by_blocks or values["kept"] != "none")


def keys(values: Values) -> Iterator[Part]:
    """Yield which rows see a tile's keys."""
    mask = values["mask"]
    first, last = (
        f"backward/keys/{'rising' if by_row else 'same'}_{end}.cuh"
        for end, by_row in (("first", mask.first_by_row), ("last", mask.last_by_row))
    )
    search = ("backward/keys/search.cuh",) if mask.by_row else ()
    seen = "attention/keys/by_row.cuh.j2" if mask.by_row else "attention/keys/every.cuh"
    find = f"backward/keys/{'find_by_block' if mask.row_tables else 'find_blocks'}.cuh"
    yield Part(
        params=tuple(given(mask, _by_sequence(values))),
        device=(seen, *search, last, first, "backward/keys/blocks.cuh", find),
    )


def _by_sequence(values: Values) -> bool:
    """Whether sequences of one length differ in which keys their rows see."""
    return bool(values["mask"].tables) and values["lengths"] == "equal"


def tiles(values: Values) -> Iterator[Part]:
    """Yield who deals tiles."""
    if values["cluster"] > 1:
        yield Part(
            device=("backward/tiles/cluster_rank.cuh",),
            kernel=("sm90/sync_cluster.cuh",),
            exit=("backward/tiles/leave_cluster.cuh",),
        )
    else:
        yield Part(kernel=("sm90/sync.cuh",))
    varlen = values["lengths"] == "varlen"
    yield _varlen(values["mask"]) if varlen else _dense(values)
    tile = _tile(values)
    yield Part(structs=(tile,))
    if _by_sequence(values) or (varlen and values["partition"] == "gradients"):
        yield Part(
            entry=("backward/tiles/share_tile.cuh",),
            kernel=("backward/tiles/shared_tile.cuh",),
            shared=(Array("tile", tile.type, aligned=False),),
        )
    elif varlen:
        yield Part(entry=("backward/tiles/found_tile.cuh",))
    if values["persistent"]:
        yield _persistent(tile)
    if works_out_anew(values):
        yield Part(device=("backward/tiles/own_tile_anew.cuh",))
    if rounds(values) == "head_by_head":
        yield Part(device=("backward/tiles/order.cuh",))


def _tile(values: Values) -> Struct:
    """Some keys with query heads that see them, and which blocks of rows these are."""
    last = ("full_last", "last") if values["mask"].first_by_row else ("last",)
    blocks = ("first_head", "last_head", "first", "full_first", *last)
    if values["lengths"] == "varlen":
        note = (
            "kBlockN keys of one KV head with all of its query heads, and the blocks first … "
            "last - 1 of kBlockM rows that see some of them. Of the full ones every row sees all."
        )
        return Struct("Tile", _ints("first_key", "kv_head", *blocks), note)
    note = (
        "kBlockN keys of one KV head with a share of its query heads, and the blocks first … "
        "last - 1 of kBlockM rows that see some of them"
    )
    if values["cluster"] > 1:
        note += ", or of the keys of the cluster's other thread block"
    note += ". Of the full ones every row sees all of its own."
    share = Field("share", INT, note="of the group's query heads")
    fields = *_ints("first_key", "kv_head", "batch"), share, *_ints(*blocks)
    return Struct("Tile", fields, note)


def _ints(*names: str) -> tuple[Field, ...]:
    return tuple(Field(name, INT) for name in names)


_OF_SEQUENCES = (
    "One of the sequences that lie one after another: how many rows it has and keys it sees, "
    "behind which of all these it ends, how many keys it holds, seen or not, the first slot of "
    "its blocks of rows, and where a tile's part of dK and dV is kept if others have parts too"
)


_OF_SEQUENCE = _ints("seqlen_q", "seqlen_k", "end_q", "end_k", "held_k", "first_slot", "kept")


def _sequence(mask: Mask) -> Struct:
    """One of varlen sequences, with what its mask is given."""
    rows = tuple(Field(name, TO_INT32, note="of its first row") for name in mask.row_tables)
    note = f"{_OF_SEQUENCES}{', and what its mask is given' * bool(mask.given)}."
    return Struct("Sequence", (*_OF_SEQUENCE, *_ints(*mask.numbers), *rows), note)


def _bytes_of(ints: tuple[Field, ...], mask: Mask) -> int:
    """How many bytes a struct of ints takes that has what a mask is given: pointers come last."""
    pointers = len(mask.row_tables)
    numbers = len(ints) + len(mask.numbers)
    return 4 * (numbers + numbers % 2 * (pointers > 0)) + 8 * pointers


def _dense(values: Values) -> Part:
    """Sequences of one length; tiles in an order that the host works out."""
    to_key_blocks = pointer_to(Type("KeyBlock"))
    own_tile = () if values["persistent"] else ("backward/tiles/own_tile.cuh",)
    lengths: tuple[str, ...] = ("backward/tiles/one_length.cuh",)
    entry: tuple[str, ...] = ()
    shared: tuple[Array, ...] = ()
    sequences: tuple[str, ...] = ()
    deals, dealt = ("dense", _CUT) if cuts_rows(values["mask"]) else ("whole", _TAILS)
    if _by_sequence(values):
        lengths = "attention/keys/sequence.cuh.j2", "backward/tiles/lengths_by_sequence.cuh"
        sequences = ("attention/keys/sequences.cuh.j2",)
        entry = tuple(
            f"backward/tiles/{text}.cuh" for text in ("found_by_sequence", "share_sequence")
        )
        own_tile = ()
        own = Type("Sequence", _bytes_of(_ints("seqlen_q", "seqlen_k"), values["mask"]))
        shared = (Array("sequence", own, aligned=False),)
    return Part(
        head=("sm90/fast_divisor.cuh", "backward/tiles/tensors.cuh", *lengths),
        methods=("backward/tiles/records.cuh",),
        device=(*sequences, f"backward/tiles/{deals}.cuh.j2", "backward/tiles/dense_rows.cuh.j2"),
        entry=entry,
        kernel=own_tile,
        shared=shared,
        constants=(_L2_SHARE,),
        params=(
            Field("dk_rows", _ROWS_TO_WRITE, Strided("dk", "Element")),
            Field("dv_rows", _ROWS_TO_WRITE, Strided("dv", "Element")),
            Field("key_blocks", to_key_blocks, note="(batch, kv_heads, blocks of keys, shares)"),
            *(Field(name, INT, Argument(name)) for name in ("heads", "kv_heads")),
            Field("shares", INT, note="in which a group is dealt to thread blocks"),
            Field("share_heads", INT, note="heads of one; the last may have fewer"),
            *(Field(name, INT, Argument(name)) for name in ("seqlen_q", "seqlen_k")),
            *(Field(name, INT) for name in ("m_blocks", "n_blocks")),
            Field("sections", INT),
            Field("section_tiles", DIVISOR, note="of heads whose Q, dO and dQ share the L2 cache"),
            *(Field(name, DIVISOR) for name in ("section_heads", "last_section_heads")),
            Field("batch_shares", DIVISOR, note="shares of all groups of a batch"),
            Field("shares_divisor", DIVISOR, note="and of one"),
            Field("first_head", INT, note=_OF_A_LAUNCH),
            Field("first_batch", INT),
            Field("cut_keys", INT, note="that rows see which have tiles of their own"),
            Field("kept_keys", INT, note="of whose dK and dV there are parts"),
            *dealt,
        ),
    )


_CUT = (
    Field("cut", INT, note="blocks of rows that have tiles of their own"),
    Field("flat_shares", INT, note="of all groups of all batches"),
    Field("first_paired", INT, note="where tiles of rows before the cut begin"),
    Field("first_mixed", INT, note="block of keys of the other tiles from there on"),
    Field("paired_heads", DIVISOR, note="of a block of keys, from there on"),
)
_TAILS = (Field("tail_blocks", INT, note="of keys, the last ones, whose tiles come late"),)


def _varlen(mask: Mask) -> Part:
    """Varlen sequences: the GPU reads where they lie."""
    sequence = _sequence(mask)
    sequence_type = Type("Sequence", _bytes_of(_OF_SEQUENCE, mask))
    return Part(
        structs=(sequence,),
        head=("backward/tiles/varlen_tensors.cuh", "backward/tiles/varlen_list.cuh"),
        methods=("backward/tiles/varlen_records.cuh",),
        device=("sm90/dependent_launch.cuh", *(f"backward/tiles/{text}" for text in _VARLEN_TEXTS)),
        entry=("backward/tiles/varlen_entry.cuh",),
        shared=(Array("sequence", sequence_type, aligned=False),),
        constants=(
            _L2_SHARE,
            Constant("sms", "of the largest Hopper GPU", name="multiprocessors"),
            Constant("step_clocks", "of a step, roughly"),
        ),
        params=(
            replace(CU_SEQLENS_Q, value=Argument("cu_seqlens_q")),
            *VARLEN_KEYS,
            Field("offsets", INT, Argument("offsets"), "one more than there are sequences"),
            Field("kv_heads", INT, Argument("kv_heads")),
            Field("m_slots", INT, note="for blocks of rows of all sequences; see Slots"),
            Field("dk_rows", _ROWS_TO_WRITE, Strided("dk", "Element")),
            Field("dv_rows", _ROWS_TO_WRITE, Strided("dv", "Element")),
            Field("key_blocks", pointer_to(Type("KeyBlock")), note="parts of groups"),
            Field("most_tiles", INT, note="of a KV head"),
            Field("most_kept", INT, note="parts of dK and dV of a KV head; 0: no group is shared"),
            Field("section_heads", INT, note="KV heads whose Q, dO and dQ share the L2 cache"),
            Field("list", pointer_to(Type("TileList"))),
            Field("listed", pointer_to(Type("ListedTile"))),
            Field("first_head", INT, note=_OF_A_LAUNCH),
        ),
    )


def _persistent(tile: Struct) -> Part:
    """Thread blocks draw tiles, and pass them on through a ring."""
    return Part(
        device=("backward/tiles/persistent.cuh",),
        constants=(
            Constant("tile_stages", "tiles drawn and not yet done"),
            Constant("tile_readers", "warps that multiply, and threads that add dQ up"),
        ),
        shared=(
            Barrier("tile_full", (_TILE_STAGES,), _ONE),
            Barrier("tile_empty", (_TILE_STAGES,), amount("tile_readers")),
            Array(
                "tiles",
                tile.type,
                (_TILE_STAGES,),
                note="in work, and next",
                aligned=False,
            ),
        ),
        params=(Field("tiles", INT),),
    )
