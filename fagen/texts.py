"""Masks and scores that a schedule says by texts, in; names that schedules have for them, out.

And back, where the text is known; of one that is not, a name says the hash alone.

What a call gives to a text stands beside it, in two tables of its section: `parameters`, where a
number is a constant of the kernel, and `tables`.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fagen import masking, scoring
from fagen.errors import ExpressionError, ScheduleError
from fagen.expr import words
from fagen.expr.declare import Scope, scope_of
from fagen.expr.parse import read
from fagen.expr.tree import INT, MOST_GIVEN, Name, Table
from fagen.given import SAID
from fagen.schedule.faults import Fault, refusal
from fagen.toml_lines import Origin, shown
from fagen.vocab import MASKS, SCORES

_TEXTS = {"mask": masking.named, "score": scoring.named}
_KNOWN: Mapping[str, Mapping[str, Any]] = {"mask": MASKS, "score": SCORES}
_GIVEN = "parameters", "tables"
_HASH = re.compile(r"_((mask|score)[0-9a-f]{10})(?=_|$)")
# what calls have names for, and files say where a call's window is in a text of its mask
_OF_CALLS = [given for word in words.MASKS.values() for given in word.given]


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
        numbers, by_tables = (one if isinstance(one, dict) else {} for one in given)
        scope: Scope = scope_of(numbers, by_tables, _OF_CALLS)
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


# ---- back ----------------------------------------------------------------------------------------


def refuse_unsaid(slug: str) -> None:
    """Raise ScheduleError for a slug that names a text by its hash, where nobody has said it."""
    for name, kind in _HASH.findall(slug):
        if name not in _KNOWN[kind]:
            raise ScheduleError(
                f"{shown(slug)}: {name} is a {kind} by its text, of which slugs have a hash alone; "
                f"name a file that has the text: `fagen pick --{kind} TEXT … --toml` writes that "
                "of a call, and so does fagen.pick(…).toml, also of a function"
            )


def with_texts(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return keys with texts in place of names, and what is given to these as tables of TOML."""
    texts = {key: SAID[name] for key, name in settings.items() if key in _TEXTS and name in SAID}
    given = {one.name: one for text in texts.values() for one in text.given}
    tables: dict[str, list[str]] = {name: [] for name in _GIVEN}
    for name in sorted(given):
        kind, said = _declaration(given[name])
        inline = ", ".join(f"{key} = {json.dumps(value)}" for key, value in said.items())
        tables[kind].append(f"{name} = {{ {inline} }}")
    own = {**settings, **{key: text.text for key, text in texts.items()}}
    return own, {name: lines for name, lines in tables.items() if lines}


def _declaration(given: Name | Table) -> tuple[str, dict[str, Any]]:
    """Return in which table a file declares it, and how."""
    said: dict[str, Any] = {"dtype": given.type}
    if isinstance(given, Table):
        said["over"] = [getattr(dim, "name", dim) for dim in given.over]
        flags = {"rising": given.rising, "gradient": given.gradient}
        return _GIVEN[1], said | {flag: True for flag, is_so in flags.items() if is_so}
    ends = {"min": given.least, "max": given.most}
    far = MOST_GIVEN if given.type == INT else math.inf
    return _GIVEN[0], said | {end: number for end, number in ends.items() if abs(number) != far}
