"""The launcher: how many thread blocks a call has, and what they go by."""

from collections.abc import Iterator

from fagen.part import Constant, Part
from fagen.schedule import Values
from fagen.vocab import DTYPES, MASKS, ORDERS


def launcher(values: Values) -> Iterator[Part]:
    """What the host works out of tiles and their order."""
    yield _PACKS[values["lengths"], values["pack_gqa"], DTYPES[values["dtype"]].fp8]
    names = (_COUNTING[values["pack_gqa"]].get(name, name) for name in _texts(values))
    yield Part(host=tuple(f"forward/launcher/{name}.cuh" for name in names))
    yield _FILLING[values["fill"]]


# by whether a call has as many splits as fill the SMs: what these cost
_FILLING = {
    False: Part(),
    True: Part(
        constants=(
            Constant("filling.sm_count", "that splits are to fill"),
            Constant("filling.most_keys", "of a split", name="split_keys"),
            Constant("filling.unit", "of costs, that a block of keys takes", name="cost_unit"),
            Constant("filling.unit_cost", "of a tile of a split, beside its blocks"),
            Constant("filling.combine_cost", "of its partial output"),
        ),
    ),
}
# by that, and whether rows differ in the last key that they see: the texts that count splits
_SPLITS = {
    (False, False): ("split_blocks", "split"),
    (False, True): ("split_blocks", "split"),
    (True, False): ("units", "fill", "split"),
    (True, True): ("units_by_row", "fill", "seen_splits"),
}
# by lengths, whether heads share tiles, and whether a thread's two rows share a descale of Q then:
# which heads do, and how many there are
_OF_PACKS = "forward/launcher/packs.cuh", "forward/launcher/packed_heads.cuh"
_VARLEN_PACKS = Part(
    constants=(
        Constant("tile.most_unused", "rows of a warpgroup, which has whole queries of a group"),
    ),
    host=(
        *("forward/launcher/varlen_pack.cuh", "forward/launcher/packs.cuh"),
        "forward/launcher/varlen_packed_heads.cuh",
    ),
)
_PACKS = {
    ("equal", False, False): Part(),
    ("equal", False, True): Part(),
    ("varlen", False, False): Part(),
    ("varlen", False, True): Part(),
    ("equal", True, False): Part(host=("forward/launcher/pack.cuh", *_OF_PACKS)),
    ("equal", True, True): Part(host=("forward/launcher/pack_of_eight.cuh", *_OF_PACKS)),
    ("varlen", True, False): _VARLEN_PACKS,
}
# by whether they do, the texts that count tiles
_COUNTING: dict[bool, dict[str, str]] = {
    False: {},
    True: {
        name: f"packed_{name}"
        for name in ("in_order", "in_parts", "tiles", "empty_tiles", "l2_share")
    },
}


# by whether rows differ in what they see, and sequences too
_EMPTY = {
    (False, False): "empty_keys",
    (True, False): "empty_tiles",
    (True, True): "any_empty_tiles",
}


# by whether some tiles are in parts, and whether two blocks have neighbours
_IN_ORDER: dict[tuple[bool, bool], tuple[str, ...]] = {
    (False, False): ("in_order",),
    (False, True): ("pairs_in_order",),
    (True, False): ("in_parts", "parts"),
}


def _texts(values: Values) -> tuple[str, ...]:
    order, paired = ORDERS[values["order"]], values["cluster"] > 1
    mask = MASKS[values["mask"]]
    empty = _EMPTY[mask.by_row, bool(mask.tables)]
    if values["lengths"] == "varlen":
        return ("varlen", *(("exceeds_l2",) if values["head_major"] else ()))
    if values["num_splits"] > 1:
        return "count_blocks", *_SPLITS[values["fill"], MASKS[values["mask"]].last_by_row]
    if not order.longest_first:
        return *_IN_ORDER[order.parts, paired], empty
    if order.dynamic:
        return "tiles", "empty_tiles", "l2_share", "drawn"
    return *(("pairs",) if paired else ("tiles", "single")), empty, "l2_share", "sections"
