"""The launcher: how many thread blocks a call has, and what they go by."""

from collections.abc import Iterator

from fagen.part import Constant, Part
from fagen.schedule import Values
from fagen.vocab import MASKS, ORDERS


def launcher(values: Values) -> Iterator[Part]:
    """What the host works out of tiles and their order."""
    yield _PACKS[values["lengths"], values["pack_gqa"]]
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
# by lengths, and whether heads share tiles: which do, and how many heads there are then
_PACKS = {
    ("equal", False): Part(),
    ("varlen", False): Part(),
    ("equal", True): Part(
        host=(
            *("forward/launcher/pack.cuh", "forward/launcher/packs.cuh"),
            "forward/launcher/packed_heads.cuh",
        ),
    ),
    ("varlen", True): Part(
        constants=(
            Constant("tile.most_unused", "rows of a warpgroup, which has whole queries of a group"),
        ),
        host=(
            *("forward/launcher/varlen_pack.cuh", "forward/launcher/packs.cuh"),
            "forward/launcher/varlen_packed_heads.cuh",
        ),
    ),
}
# by that the texts that count tiles
_COUNTING: dict[bool, dict[str, str]] = {
    False: {},
    True: {name: f"packed_{name}" for name in ("in_order", "tiles", "empty_tiles", "l2_share")},
}


# by whether rows differ in what they see, and sequences too
_EMPTY = {
    (False, False): "empty_keys",
    (True, False): "empty_tiles",
    (True, True): "any_empty_tiles",
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
        return "pairs_in_order" if paired else "in_order", empty
    if order.dynamic:
        return "tiles", "empty_tiles", "l2_share", "drawn"
    return *(("pairs",) if paired else ("tiles", "single")), empty, "l2_share", "sections"
