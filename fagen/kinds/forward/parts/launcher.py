"""The launcher: how many thread blocks a call has, and what they go by."""

from collections.abc import Iterator

from fagen.part import Part
from fagen.schedule import Values
from fagen.vocab import MASKS, ORDERS


def launcher(values: Values) -> Iterator[Part]:
    """What the host works out of tiles and their order."""
    names = _texts(values)
    yield Part(host=tuple(f"forward/launcher/{name}.cuh" for name in names))


def _texts(values: Values) -> tuple[str, ...]:
    order, paired = ORDERS[values["order"]], values["cluster"] > 1
    empty = "empty_tiles" if MASKS[values["mask"]].by_row else "empty_keys"
    if values["lengths"] == "varlen":
        return ("varlen", *(("exceeds_l2",) if values["head_major"] else ()))
    if values["num_splits"] > 1:
        return ("split",)
    if not order.longest_first:
        return "pairs_in_order" if paired else "in_order", empty
    if order.dynamic:
        return "tiles", "empty_tiles", "l2_share", "drawn"
    return *(("pairs",) if paired else ("tiles", "single")), empty, "l2_share", "sections"
