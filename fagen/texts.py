"""Masks and scores that a schedule says by texts, in; names that schedules have for them, out.

What a call gives to a text stands beside it, in two tables of its section: `parameters`, where a
number is a constant of the kernel, and `tables`.
"""

import re
from collections.abc import Iterator
from typing import Any

from fagen import masking, scoring
from fagen.errors import ExpressionError
from fagen.expr.declare import Scope, scope_of
from fagen.expr.parse import read
from fagen.schedule.faults import Fault, refusal
from fagen.toml_lines import Origin

_TEXTS = {"mask": masking.named, "score": scoring.named}
_GIVEN = "parameters", "tables"


def by_names(tables: dict[str, Any], origin: Origin) -> dict[str, Any]:
    """Return a schedule's tables with names in place of texts, which are known from then on.

    Raises ScheduleError for a text that says no mask or no score of kernels, and for what is
    declared and in no text.
    """
    found = dict(tables)
    faults: list[Fault] = []
    for section, table in tables.items():
        if isinstance(table, dict) and any(map(_is_text, table.items())):
            found[section] = own = {k: v for k, v in table.items() if k not in _GIVEN}
            faults += _named(section, own, table)
    if faults:
        raise refusal(faults, origin)
    return found


def _is_text(item: tuple[str, Any]) -> bool:
    """Whether a key of a table is a text, or declares something for one."""
    key, value = item
    if key in _GIVEN:
        return isinstance(value, dict)
    return key in _TEXTS and isinstance(value, str) and not re.fullmatch(r"\w*", value)


def _named(section: str, own: dict[str, Any], table: dict[str, Any]) -> Iterator[Fault]:
    """Put names in place of the texts of a table, which has all; yield what is wrong."""
    given = [table.get(name, {}) for name in _GIVEN]
    try:
        scope: Scope = scope_of(*(one if isinstance(one, dict) else {} for one in given))
    except ExpressionError as error:
        yield (section, _GIVEN[0]), str(error)
        return
    unread = set(scope)
    for key in [key for key in _TEXTS if _is_text((key, table.get(key)))]:
        names = {*re.findall(r"[A-Za-z_]\w*", table[key])}
        of_text = {name: one for name, one in scope.items() if name in names}
        unread -= names
        try:
            own[key] = _TEXTS[key](read(key, table[key], of_text))
        except ExpressionError as error:
            yield (section, key), str(error)
    if unread:
        listed = ", ".join(sorted(unread))
        yield (section, _GIVEN[0]), f"says {listed}, which no text of this table reads"
