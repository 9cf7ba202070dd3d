"""Evidence that one source ran, right and how fast: read and written beside its kernel."""

import dataclasses
import datetime
import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from fagen import outputs
from fagen.errors import FagenError, ScheduleError, VerificationError
from fagen.paths import locate, make_folder
from fagen.records import Divisor
from fagen.registry import ENTRIES, committed_file, from_slug, kind_of_slug
from fagen.toml_lines import dotted, read_text, read_toml, shown
from fagen.vocab import yardstick

UNVERIFIED = "unverified.toml"
LEDGER = "ledger.jsonl"  # of a wheel
_BYTES = 131_072  # of it, or of a kernel's evidence, at most
_LINE = 500  # characters of a text in either
_COUNTS = 2**63  # all whole numbers are below
_HASH = re.compile(rb'"([0-9a-f]{64})"')
_END = 4_096  # bytes of a kernel's text in which its last function is
_OF_SLUG = re.compile(r"[a-z0-9]+_d\d+")  # its dtype and head dim, behind the prefix of its kind


@dataclass(frozen=True)
class Evidence:
    """That one source, compiled one way, gave these errors and speeds on one card; UTC day."""

    slug: str
    source_hash: str  # of the tokens: comments and white space do not count
    host_hash: str  # of the launcher's tokens alone, without the slug
    flags: tuple[str, ...]
    cutlass: str
    machine_code: str  # hash
    compiler: str
    card: str
    driver: str
    torch: str
    date: str
    errors: tuple[Any, ...]  # records of the kind's
    speeds: tuple[Any, ...]

    @property
    def yardstick(self) -> str:
        """Beside what its speeds were measured: whose, and in which dtype where that is another."""
        dtype = _folder(self.slug).name.partition("_")[0]
        speeds: Any = kind_of_slug(self.slug).speeds  # whichever record: it names its peer
        return yardstick(speeds.beside, dtype)

    def speeds_in_words(self) -> list[str]:
        """Each speed, with its ratio to the yardstick, which is named."""
        return [speed.in_words(self.yardstick) for speed in self.speeds]


@dataclass(frozen=True)
class Excuse:
    """Why a committed kernel's evidence could not be renewed at once, and since when."""

    date: str
    reason: str


def home(slug: str, folder: Path | None = None) -> Path:
    """Where a kernel and its evidence lie: generated/<kind>/<dtype>_d<head dim>/, or `folder`.

    A folder that a user named is flat.
    """
    return locate("generated") / _folder(slug) if folder is None else folder


@cache  # lists ask several times for each of all kernels
def _folder(slug: str) -> Path:
    kind = kind_of_slug(slug)
    found = _OF_SLUG.match(slug, len(ENTRIES[kind.name].prefix))
    if found is None:
        from_slug(slug)  # says what is wrong with it
        raise ScheduleError(f"{shown(slug)} names no dtype and head dim")
    return Path(kind.name, found[0])


def place(slug: str, folder: Path | None = None) -> Path:
    """Make the folder in which a kernel and its evidence lie, unless it is there; return it.

    Raises FagenError where a link in generated/ leads elsewhere, OSError where it cannot be made.
    """
    found = home(slug, folder)
    if folder is None:
        outputs.refuse_way(locate("generated"), str(_folder(slug) / f"{slug}.json"))
    make_folder(found)
    return found


def need_room(slug: str, folder: Path | None = None) -> None:
    """Raise FagenError where evidence could not be written: something else is in its place."""
    path = place(slug, folder) / f"{slug}.json"
    outputs.refuse_loss(path, _own(slug, folder), f"the evidence of {slug}")


def _own(slug: str, folder: Path | None) -> outputs.Own:
    """How evidence of `slug` is known: by its name there; in generated/ all is fagen's."""

    def own(content: bytes) -> bool:
        with suppress(ValueError, RecursionError, TypeError, KeyError):
            return bool(json.loads(content.decode("utf-8-sig"))["slug"] == slug)
        return content.startswith(_text({"slug": slug}).rstrip("}\n").encode())

    return outputs.anything if folder is None else own


def evidence_path(slug: str, folder: Path | None = None) -> Path:
    """Where the evidence of `slug` lies."""
    return home(slug, folder) / f"{slug}.json"


def read(slug: str, folder: Path | None = None) -> Evidence | None:
    """The evidence of `slug`; None if there is none, VerificationError if it cannot be read."""
    if folder is None and (ledger := _shipped()) is not None:
        return _evidence(slug, ledger[slug]["evidence"], slug) if slug in ledger else None
    path = evidence_path(slug, folder)
    return _read_file(path) if path.exists() else None


def _shipped() -> Mapping[str, Any] | None:
    """What a wheel has in the place of generated/, by slug; None in a checkout."""
    with suppress(FagenError):
        if locate("generated"):
            return None
    path = None
    with suppress(FagenError):
        path = locate("shipped") / LEDGER
    return _ledger(path) if path else None


@cache
def _ledger(path: Path) -> Mapping[str, Any]:
    try:
        lines = map(json.loads, path.read_bytes().splitlines())
        return {line["slug"]: line for line in lines}
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise VerificationError(f"{path}: cannot be read: {error}; reinstall fagen") from error


def rendered_hash(slug: str, folder: Path | None = None) -> str | None:
    """The hash that a kernel in generated/ says of itself; None where there is no such kernel."""
    if folder is None and (ledger := _shipped()) is not None:
        said = ledger[slug].get("rendered") if slug in ledger else None
        return said if isinstance(said, str) else None
    path = home(slug, folder) / f"{slug}.cu"
    text = path.read_bytes() if path.exists() else b""
    found = _HASH.findall(text[-_END:])
    return found[-1].decode() if found else None


def outlived(folder: Path | None, like: str) -> Iterator[Evidence]:
    """Yield the evidence that lies where that of the slug `like` would and has lost its schedule.

    In generated/ such a slug is no committed schedule's; in a user's folder it is no schedule's at
    all, as after a change of defaults. What cannot be read is left out.
    """
    for path in sorted(home(like, folder).glob("*.json")):
        with suppress(FagenError):
            if not _is_of_a_schedule(path.stem, committed=folder is None):
                yield _read_file(path)


def launchers(slug: str, folder: Path | None) -> frozenset[str]:
    """The launchers that ran on a GPU, as hashes, by the evidence beside that of `slug`.

    In generated/ of all kernels of its kind, else of `folder`. What cannot be read is left out.
    """
    root = locate("generated") / kind_of_slug(slug).name if folder is None else folder
    found = set()
    for path in root.glob("*/*.json" if folder is None else "*.json"):
        with suppress(FagenError):
            found.add(_read_file(path).host_hash)
    return frozenset(found)


def _is_of_a_schedule(slug: str, *, committed: bool) -> bool:
    """Whether there is a schedule with this slug: a committed one, or any."""
    if committed:
        return committed_file(slug).exists()
    try:
        return bool(from_slug(slug))
    except ScheduleError:
        return False


def _read_file(path: Path) -> Evidence:
    return _evidence(path.stem, _text_of(path, "evidence", _BYTES), path.name)


def _evidence(slug: str, said: Any, name: str) -> Evidence:
    """Judge what is said of a kernel, as JSON or as what JSON says; `name` is for messages."""
    try:
        data = json.loads(said) if isinstance(said, str) else said
        kind = kind_of_slug(slug)
        found: Evidence = _decoded(Evidence, data, {"errors": kind.errors, "speeds": kind.speeds})
    except (ValueError, RecursionError) as error:
        raise VerificationError(
            f"{name}: not evidence that this fagen can read: {error}; `fagen verify` writes it anew"
        ) from error
    if found.slug != slug:
        raise VerificationError(f"{name}: is the evidence of {found.slug}, not of {slug}")
    return found


def write(evidence: Evidence, folder: Path | None = None) -> Path:
    """Write <slug>.json in one step, so that no reader ever sees half of it; return the path.

    Raises FagenError where something is there that is no evidence of this kernel.
    """
    slug = evidence.slug
    path = place(slug, folder) / f"{slug}.json"
    text = _text(_encoded(evidence))
    outputs.write(path, text, _own(slug, folder), f"the evidence of {slug}")
    return path


def read_excuses(folder: Path | None = None) -> dict[str, Excuse]:
    """What generated/unverified.toml says, by slug; empty where there is no such file.

    The file holds a table per kernel: `[slug]`, `date = "2026-01-31"`, `reason = "..."`. Raises
    VerificationError where an entry lacks either, or where one is no line of text.
    """
    if folder is None:
        folder = locate("generated" if _shipped() is None else "shipped")
    path = folder / UNVERIFIED
    if not path.exists():
        return {}
    return dict(_excuses(_text_of(path, "list of excuses", _BYTES), path.name))


@lru_cache(maxsize=1)  # a list of all kernels asks for each of them
def _excuses(text: str, name: str) -> Mapping[str, Excuse]:
    try:
        tables, origin = read_toml(text, name)
    except ScheduleError as error:
        raise VerificationError(str(error)) from error
    excuses = {}
    for slug, entry in tables.items():
        if not isinstance(entry, dict) or set(entry) != {"date", "reason"}:
            said = f"{origin.at(slug)}: [{dotted((slug,))}] needs a date and a reason alone"
            raise VerificationError(said)
        date, reason = entry["date"], entry["reason"]
        date = date.isoformat() if isinstance(date, datetime.date) else date
        if not all(map(_is_text, (slug, date, reason))):
            said = f"{origin.at(slug)}: [{dotted((slug,))}] needs a line of text each as its name, "
            raise VerificationError(f"{said}date and reason, of at most {_LINE} characters")
        excuses[slug] = Excuse(date, reason)
    return excuses


def _text_of(path: Path, what: str, most: int) -> str:
    """The text of a file here.  Raises VerificationError where it can be none of `what`."""
    try:
        return read_text(path, what, most)
    except ScheduleError as error:
        raise VerificationError(str(error)) from None


def _encoded(evidence: Evidence) -> dict[str, Any]:
    """A dict for JSON: measured numbers to four digits, more than any of them is good for."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [short(item) for item in value]
        if isinstance(value, float) and math.isfinite(value):
            return float(f"{value:.4g}")
        return value

    found: dict[str, Any] = short(dataclasses.asdict(evidence))
    return found


def _text(data: dict[str, Any]) -> str:
    """JSON with a line for each field and each shape: short, and a diff says what moved."""

    def said(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n  ".join(map(said, value))
            return f"[\n  {rows}\n ]"
        return json.dumps(value, allow_nan=False)

    fields = ",\n ".join(f"{json.dumps(key)}: {said(value)}" for key, value in data.items())
    return f"{{\n {fields}\n}}\n"


def _decoded(record: type, data: Any, parts: Mapping[str, type] | None = None) -> Any:
    """A dataclass from a dict with exactly its fields; ValueError for anything else."""
    fields = _fields(record)
    if not isinstance(data, dict) or data.keys() != fields.keys():
        odd = sorted(data.keys() ^ fields) if isinstance(data, dict) else [type(data).__name__]
        said = textwrap.shorten(", ".join(dotted((name,)) for name in odd), 300, placeholder=" …")
        raise ValueError(f"{record.__name__} has missing or unknown fields: {said}")
    values = dict(data)
    for name, (wanted, several) in fields.items():
        value = data[name]
        if several:
            kind = (parts or {}).get(name)
            if not isinstance(value, list) or not (kind or all(map(_is_text, value))):
                raise ValueError(f"{name} is {json.dumps(value)[:40]}")
            values[name] = tuple(_decoded(kind, part) if kind else part for part in value)
        elif not _is(value, wanted):
            raise ValueError(f"{name} is {json.dumps(value)[:40]}")
    return record(**values)


@cache  # 6,000 records are read for a list of all kernels
def _fields(record: type) -> dict[str, tuple[Any, bool]]:
    """Each field's type, and whether it is a tuple."""
    hints = get_type_hints(record, include_extras=True)
    types = {field.name: hints[field.name] for field in dataclasses.fields(record)}
    return {name: (wanted, get_origin(wanted) is tuple) for name, wanted in types.items()}


def _is_text(value: Any) -> bool:
    """Whether it is a line that a terminal can show: refusals and lists quote it as it is."""
    return isinstance(value, str) and value.isprintable() and len(value) <= _LINE


def _is(value: Any, wanted: Any) -> bool:
    """Whether a value out of JSON is of a field's type, and may have been found."""
    kind = type(value)
    if wanted is Divisor:
        return kind in _NUMBERS and 0 < value < math.inf
    if wanted is float and kind in _NUMBERS:
        return bool(0 <= value < (_COUNTS if kind is int else math.inf))
    if wanted is bool or kind is bool:
        return wanted is kind
    if not isinstance(value, wanted):
        return False
    if kind is str:
        return _is_text(value)
    return value is None or 0 <= value < (_COUNTS if kind is int else math.inf)


_NUMBERS = (int, float)
