"""Evidence as a value, as JSON for people and as that of a ledger: out, and back if it can be."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fagen import decoding
from fagen.errors import VerificationError
from fagen.registry import kind_of_slug
from fagen.render import Hashes

MOST_BYTES = 131_072  # of a kernel's evidence
_MOST_CHARACTERS = 500  # of a text in it
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
    if not isinstance(columns, dict) or not all(isinstance(x, list) for x in columns.values()):
        raise ValueError(f"these are no columns: {json.dumps(columns)[:40]}")
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def decoded(slug: str, json_of: Any, where: str) -> Evidence:
    """Evidence out of what JSON says, or out of its text; `where` is for messages.

    Raises VerificationError where it is none, or that of another kernel than `slug`.
    """
    try:
        fields = json.loads(json_of) if isinstance(json_of, str) else json_of
        kind: Any = kind_of_slug(slug)
        evidence = decoding.decoded(
            Evidence,
            fields,
            longest=_MOST_CHARACTERS,
            errors=tuple[kind.errors, ...],
            speeds=tuple[kind.speeds, ...],
        )
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
