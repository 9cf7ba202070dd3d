"""Evidence as a value, as JSON for people and as that of a ledger: out, and back if it can be."""

import dataclasses
import json
import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_origin, get_type_hints

from fagen.errors import VerificationError
from fagen.records import Divisor
from fagen.registry import kind_of_slug
from fagen.render import Hashes
from fagen.toml_lines import dotted

MOST_BYTES = 131_072  # of a kernel's evidence
_MOST_CHARACTERS = 500  # of a text in it
_COUNTS = 2**63  # all whole numbers are below
_PARTS = ("errors", "speeds")  # a record for each shape


@dataclass(frozen=True)
class Evidence:
    """That one source, compiled one way, gave these errors and speeds on one card; UTC day.

    `device`, `launcher` and `constants` are hashes of its text, see fagen.render.Hashes. With the
    launcher a kernel of this kind ran: this one, or another whose launcher is the same.
    """

    slug: str
    device: str
    launcher: str
    constants: str
    machine_code: str  # hash
    flags: str
    cutlass: str
    compiler: str
    card: str
    driver: str
    torch: str
    date: str
    yardstick: str  # beside what its speeds were measured
    errors: tuple[Any, ...]  # records of the kind's
    speeds: tuple[Any, ...]

    @property
    def hashes(self) -> Hashes:
        """Those of its text."""
        return Hashes(self.device, self.launcher, self.constants)

    def speeds_in_words(self) -> list[str]:
        """Each speed, with its ratio to the yardstick, which is named."""
        return [speed.in_words(self.yardstick) for speed in self.speeds]


def encoded(evidence: Evidence) -> dict[str, Any]:
    """A dict for JSON: measured numbers to four digits, more than any of them is good for."""
    fields: dict[str, Any] = _short(dataclasses.asdict(evidence))
    return fields


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.4g}")
    return value


def laid_out(fields: Mapping[str, Any]) -> str:
    """JSON for people, a line for each field and each shape, so that a diff says what moved."""
    lines = ",\n ".join(f"{json.dumps(key)}: {_value(value)}" for key, value in fields.items())
    return f"{{\n {lines}\n}}\n"


def _value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        rows = ",\n  ".join(map(_value, value))
        return f"[\n  {rows}\n ]"
    return json.dumps(value, allow_nan=False)


def in_columns(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the records of all shapes as columns: each name once, in a ledger's line."""

    def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
        return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}

    return {key: columns(value) if key in _PARTS else value for key, value in fields.items()}


def in_rows(columns: Any) -> list[dict[str, Any]]:
    """Records out of columns.  Raises ValueError where these are none, or not alike in length."""
    if not isinstance(columns, dict) or not all(isinstance(one, list) for one in columns.values()):
        raise ValueError(f"these are no columns: {json.dumps(columns)[:40]}")
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def decoded(slug: str, json_of: Any, where: str) -> Evidence:
    """Evidence out of what JSON says, or out of its text; `where` is for messages.

    Raises VerificationError where it is none, or that of another kernel than `slug`.
    """
    try:
        fields = json.loads(json_of) if isinstance(json_of, str) else json_of
        kind = kind_of_slug(slug)
        parts = {"errors": kind.errors, "speeds": kind.speeds}
        evidence: Evidence = _record(Evidence, fields, parts)
    except (ValueError, RecursionError) as error:
        raise unreadable(where, error) from error
    if evidence.slug != slug:
        raise VerificationError(f"{where}: is the evidence of {evidence.slug}, not of {slug}")
    return evidence


def unreadable(where: str, why: object) -> VerificationError:
    """Say that something is no evidence."""
    return VerificationError(
        f"{where}: not evidence that this fagen can read: {why}; `fagen verify` writes it anew"
    )


def _record(record: type, fields: Any, parts: Mapping[str, type] | None = None) -> Any:
    """A dataclass from a dict with exactly its fields; ValueError for anything else."""
    types = _types(record)
    if not isinstance(fields, dict) or fields.keys() != types.keys():
        odd = sorted(fields.keys() ^ types) if isinstance(fields, dict) else [type(fields).__name__]
        names = ", ".join(dotted((name,)) for name in odd)
        names = textwrap.shorten(names, 300, placeholder=" …")
        raise ValueError(f"{record.__name__} has missing or unknown fields: {names}")
    values = dict(fields)
    for name, (type_, is_tuple) in types.items():
        value = fields[name]
        if is_tuple and isinstance(value, list):
            values[name] = tuple(_record((parts or {})[name], part) for part in value)
        elif is_tuple or not _is(value, type_):
            raise ValueError(f"{name} is {json.dumps(value)[:40]}")
    return record(**values)


@cache  # 6,000 records are read for a list of all kernels
def _types(record: type) -> dict[str, tuple[Any, bool]]:
    """Each field's type, and whether it is a tuple."""
    hints = get_type_hints(record, include_extras=True)
    types = {field.name: hints[field.name] for field in dataclasses.fields(record)}
    return {name: (type_, get_origin(type_) is tuple) for name, type_ in types.items()}


def is_text(value: Any) -> bool:
    """Whether it is a line that a terminal can show: refusals and lists quote it as it is."""
    return isinstance(value, str) and value.isprintable() and len(value) <= _MOST_CHARACTERS


def _is(value: Any, type_: Any) -> bool:
    """Whether a value out of JSON is of a field's type, and may have been found."""
    kind = type(value)
    if type_ is Divisor:
        return kind in _NUMBERS and 0 < value < math.inf
    if type_ is float and kind in _NUMBERS:
        return bool(0 <= value < (_COUNTS if kind is int else math.inf))
    if type_ is bool or kind is bool:
        return type_ is kind
    if not isinstance(value, type_):
        return False
    if kind is str:
        return is_text(value)
    return value is None or 0 <= value < (_COUNTS if kind is int else math.inf)


_NUMBERS = (int, float)
