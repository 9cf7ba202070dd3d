"""Read what a space says of one key: a value, a list, or a range of whole numbers."""

from collections.abc import Sequence
from typing import Any

from fagen.schedule.faults import Fault
from fagen.toml_lines import nearest_or_all, shown

EXAMPLE = "{ from = 64, to = 256, step = 16 }"
_NEEDED = ("from", "to")
_PARTS = (*_NEEDED, "step")


def listed(path: tuple[str, ...], value: Any, most: int) -> tuple[Sequence[Any], list[Fault]]:
    """Return the values that are meant, or what is wrong with how they are said.

    Of a range no value is made: it may stand for any number of them, and for `most` at most.
    """
    if isinstance(value, list):
        return value, [] if value else [(path, "says no value")]
    if not isinstance(value, dict):
        return [value], []
    faults: list[Fault] = []
    for name, part in value.items():
        if name not in _PARTS:
            faults.append(((*path, name), f"is no part of a range{nearest_or_all(name, _PARTS)}"))
        elif type(part) is not int:  # true is no number
            faults.append(((*path, name), f"= {shown(part)} must be a whole number"))
        elif name == "step" and part < 1:
            faults.append(((*path, name), f"= {shown(part)} must be 1 or more"))
    if left := [name for name in _NEEDED if name not in value]:
        faults.append((path, f"is a range without {' and '.join(left)}; one looks like {EXAMPLE}"))
    if faults:
        return (), faults
    first, last, step = value["from"], value["to"], value.get("step", 1)
    if last < first:
        return (), [(path, f"is a range from {shown(first)} down to {shown(last)}: no value")]
    if (count := (last - first) // step + 1) > most:
        count_shown = f"{count:,}" if count.bit_length() <= 64 else shown(count)
        return (), [(path, f"stands for {count_shown} values; a space has {most:,} points at most")]
    return range(first, last + 1, step), []
