"""What a store of search results holds, row by row, and whether a row that was read can be one.

A store may come from anywhere, and what it says goes into schedules, tables and pages.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache, partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fagen.errors import FagenError
from fagen.problem import DETERMINISTIC, Problem, Sizes, VarlenSizes, lengths_from
from fagen.registry import from_slug
from fagen.search.kinds import space_of
from fagen.search.marks import PEER_NAMES
from fagen.search.shapes import MAX_SEQUENCES, MAX_SIZE
from fagen.search.tasks import Compiled, Time
from fagen.toml_lines import shown
from fagen.vocab import DTYPES, LENGTHS, MASKS, PASSES


@dataclass(frozen=True)
class CompiledRow:
    """A compile result as it is kept."""

    target: str
    made: Compiled


@dataclass(frozen=True)
class TimedRow:
    """A time as it is kept: of which source, on which card and driver."""

    target: str
    source_hash: str
    card: str
    driver: str
    time: Time


# ---- columns ------------------------------------------------------------------------------------


def _in_one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line of printable text")
    return text


def _a_date(text: str) -> str:
    if date.fromisoformat(text).isoformat() != text:
        raise ValueError("must be a date such as 2026-11-21")
    return text


Line = Annotated[str, AfterValidator(_in_one_line)]
Name = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_in_one_line)]
Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Seconds = Annotated[float, Field(ge=1e-9, le=1e6)]  # between these all that is made of them is
Weight = Annotated[float, Field(gt=0)]


class _Row(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class _Card(_Row):
    name: Name
    driver: Name


class _Anchor(_Row):
    target: Name
    card: Name
    driver: Name
    slug: Name


class _Compiled(_Row):
    target: Name
    slug: Name
    source_hash: Name
    compiler: Name
    outcome: Name
    note: str
    registers: Count | None
    spill_bytes: Count | None
    cpu_seconds: Annotated[float, Field(ge=0)]


class WrongRow(_Row):
    """What is wrong with a kernel, on a card and driver."""

    target: Name
    slug: Name
    source_hash: Name
    card: Name
    driver: Name
    said: str


class _Sized(_Row):
    batch: Size
    heads: Size
    kv_heads: Size
    seqlen_q: Size
    seqlen_k: Size
    lengths: str = ""  # of varlen sequences, as lengths_in_words says it

    def sizes(self) -> Sizes:
        """Return them.  Raises Damaged where they do not go together."""
        if self.heads % self.kv_heads:
            raise Damaged(f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}")
        plain = self.batch, self.heads, self.kv_heads, self.seqlen_q, self.seqlen_k
        try:
            return sizes_from(*plain, self.lengths)
        except ValueError as error:
            raise Damaged(f"lengths: {error}") from None


class _Timed(_Sized):
    target: Name
    source_hash: Line  # none of a peer's
    card: Name
    driver: Name
    slug: Name
    regime: Literal["brief", "long"]
    round: Count
    seconds: Seconds
    anchor_seconds: Seconds
    mhz: Count | None


class Session(_Row):
    """A day (in UTC) on which something was searched, by which fagen, and a note about it."""

    date: Annotated[str, AfterValidator(_a_date)]
    version: Name
    note: Line = ""


class _Space(_Row):
    name: Name
    text: str


class _Weighed(_Sized):
    weight: Weight


class _Survey(_Row):
    """What fagen.search.run.summary says, as JSON."""

    space: Line
    kind: str
    target: dict[str, str | int | bool]
    total: Count
    fit: Count
    refused: list[tuple[Line, Count, Line]]
    tiles: list[tuple[Size, Size, Line]]
    cells: list[tuple[Size, Size]]
    sizes: Annotated[list[_Weighed], Field(min_length=1)]
    predicted: list[tuple[Line, Annotated[float, Field(gt=0)]]]


# ---- rows ---------------------------------------------------------------------------------------

_TYPES = {
    "dtype": str,
    "mask": str,
    "deterministic": bool,
    "lengths": str,
}  # of what is computed; else numbers
_PACKED = f"_{LENGTHS[1]}"  # in a slug, and at the end of a target's name
_SLUG = re.compile(r"[a-z0-9_]{1,200}")
_Checked = TypeVar("_Checked", bound=_Row)


class Damaged(Exception):  # noqa: N818 - it names what is wrong
    """A row that no search has written; in which file and table, its reader knows."""


def card(values: Sequence[Any]) -> tuple[str, str]:
    """Return a card and its driver.  Raises Damaged, as all these."""
    row = _checked(_Card, values)
    return row.name, row.driver


def session(values: Sequence[Any]) -> Session:
    """Return when something was searched."""
    return _checked(Session, values)


def space(values: Sequence[Any]) -> tuple[str, str]:
    """Return a space's name and its text."""
    row = _checked(_Space, values)
    return row.name, row.text


def anchor(values: Sequence[Any]) -> tuple[tuple[str, str, str], str]:
    """Return a target on a card and driver, and its anchor."""
    row = _checked(_Anchor, values)
    _check_slug(row.slug, row.target)
    return (row.target, row.card, row.driver), row.slug


def compiled(values: Sequence[Any]) -> CompiledRow | None:
    """Return a compile result; None of a slug that is no schedule's any more, as all below."""
    row = _checked(_Compiled, values)
    if not _check_slug(row.slug, row.target):
        return None
    fields = {name: value for name, value in row if name != "target"}
    return CompiledRow(row.target, Compiled(**fields))


def wrong(values: Sequence[Any]) -> WrongRow | None:
    """Return what is wrong with a kernel."""
    row = _checked(WrongRow, values)
    return row if _check_slug(row.slug, row.target) else None


def timed(values: Sequence[Any]) -> TimedRow | None:
    """Return a time; a peer's has no source, and its target beside its name."""
    row = _checked(_Timed, values)
    size, slug = row.sizes(), row.slug
    if row.source_hash:
        if not _check_slug(slug, row.target):
            return None
    else:
        named = (name for name in sorted(PEER_NAMES) if slug == f"{name} {row.target}")
        if (peer := next(named, None)) is None:
            raise Damaged(f"{shown(slug)} has no source, and is no peer there")
        slug = peer
    time = Time(slug, size, row.regime, row.round, row.seconds, row.anchor_seconds, row.mhz)
    return TimedRow(row.target, row.source_hash, row.card, row.driver, time)


def survey(values: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """Return a target's name, and what was found in its space."""
    name, text = values
    if not isinstance(text, str):
        raise Damaged("it is no text")
    try:
        row = _Survey.model_validate_json(text)
    except ValidationError as invalid:
        raise Damaged(_first(invalid)) from None
    for size in row.sizes:
        size.sizes()
    try:
        keys = space_of(row.kind).problem_keys
    except FagenError as error:
        raise Damaged(str(error)) from None
    if row.kind not in PASSES:
        raise Damaged(f"there is no problem of the kind {shown(row.kind)}")
    types = {field: type(value) for field, value in row.target.items()}
    if types != {key: _TYPES.get(key, int) for key in keys}:
        raise Damaged(f"target has not {', '.join(keys)}")
    target: dict[str, Any] = dict(row.target)
    if target["dtype"] not in DTYPES or target["mask"] not in MASKS:
        raise Damaged(f"there is no {shown(target['dtype'])} with {shown(target['mask'])}")
    if target.get("lengths", LENGTHS[0]) not in LENGTHS:
        raise Damaged(f"there are no {shown(target['lengths'])} lengths")
    if (computed := Problem(**target, kind=row.kind).name) != name:
        raise Damaged(f"it is of {computed}, and called {shown(name)}")
    return name, row.model_dump(mode="json")


def _checked(row: type[_Checked], values: Sequence[Any]) -> _Checked:
    """Take values in the order of a row's fields."""
    try:
        return row.model_validate(dict(zip(row.model_fields, values, strict=True)))
    except ValidationError as invalid:
        raise Damaged(_first(invalid)) from None


def _first(invalid: ValidationError) -> str:
    error = invalid.errors(include_url=False)[0]
    path, kind = shown(".".join(map(str, error["loc"])))[1:-1], error["type"]
    if kind == "json_invalid":
        return "it is no JSON"
    if kind in ("extra_forbidden", "missing"):
        return f"{path} is {'not known' if kind == 'extra_forbidden' else 'missing'}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{path} = {shown(error['input'])}: {message[0].lower()}{message[1:]}"


def sizes_from(
    batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int, lengths: str = ""
) -> Sizes:
    """Return sizes, of varlen sequences by their lengths in words.

    Raises ValueError where these are none, or go with other sizes.
    """
    plain = batch, heads, kv_heads, seqlen_q, seqlen_k
    if not lengths:
        return Sizes(*plain)
    sizes = VarlenSizes.of(_lengths(lengths), heads, kv_heads)
    counts = sizes.batch, sizes.heads, sizes.kv_heads, sizes.seqlen_q, sizes.seqlen_k
    if counts != plain or max(sizes.total_q, sizes.total_k) > MAX_SIZE:
        raise ValueError(f"{shown(lengths)} does not go with the sizes beside it")
    return sizes


_lengths = cache(partial(lengths_from, most=MAX_SEQUENCES))


@cache
def _problem(slug: str) -> str | None:
    try:
        return Problem.searched(from_slug(slug)).name
    except FagenError:
        return None


def _check_slug(slug: str, target: str) -> bool:
    """Whether a slug is still a schedule's.  Raises Damaged where it never was one of the target.

    What it may not be any more says what it computes all the same, in the same place.
    """
    computed = _problem(slug)
    head = target.removesuffix(DETERMINISTIC).removesuffix(_PACKED)
    alike = f"_{head}_" in f"_{slug}" and (_PACKED in slug or _PACKED not in target)
    if computed is None and _SLUG.fullmatch(slug) and alike:
        return False
    if computed != target:
        raise Damaged(f"{shown(slug)} is no schedule of {shown(target)}")
    return True
