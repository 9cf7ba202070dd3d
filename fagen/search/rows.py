"""What a store of search results holds, row by row: each a model, which checks what is read.

A store may come from anywhere, and what it says goes into schedules, tables and pages.
"""

import re
from collections.abc import Sequence
from datetime import date
from functools import cache, cached_property, partial
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Json,
    ValidationError,
    model_validator,
)

from fagen.errors import FagenError
from fagen.problem import DETERMINISTIC, Problem, Sizes, VarlenSizes, lengths_from, lengths_in_words
from fagen.registry import from_slug
from fagen.search.kinds import space_of
from fagen.search.marks import PEER_NAMES
from fagen.search.shapes import MAX_SEQUENCES, MAX_SIZE
from fagen.search.tasks import Compiled, Time
from fagen.toml_lines import shown
from fagen.vocab import DTYPES, LENGTHS, MASKS, PASSES

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


class Row(BaseModel):
    """A row of a table, or a part of one; its fields are the columns."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class _OfSlug(Row):
    """A row about a kernel of a target."""

    target: Name
    slug: Name

    @property
    def peer(self) -> str | None:
        """The peer that it is about instead."""
        return None

    @property
    def stands(self) -> bool:
        """Whether the slug is still a schedule's."""
        return self.peer is not None or _computed(self.slug) is not None

    @model_validator(mode="after")
    def _belongs(self) -> Self:
        """Refuse a slug that never was one of the target."""
        # what is no schedule any more says what it computes all the same, in the same place
        head = self.target.removesuffix(DETERMINISTIC).removesuffix(_VARLEN)
        varlen = _VARLEN in self.slug or _VARLEN not in self.target
        alike = f"_{head}_" in f"_{self.slug}" and varlen and _SLUG.fullmatch(self.slug)
        targets = (self.target, None) if alike else (self.target,)
        if self.peer is None and _computed(self.slug) not in targets:
            raise ValueError(f"{shown(self.slug)} is no schedule of {shown(self.target)}")
        return self


class _Sized(Row):
    batch: Size
    heads: Size
    kv_heads: Size
    seqlen_q: Size
    seqlen_k: Size
    lengths: str = ""  # of varlen sequences, as lengths_in_words says it

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}")
        try:
            self.size  # noqa: B018 - it is made once
        except ValueError as error:
            raise ValueError(f"lengths: {error}") from None
        return self

    @cached_property
    def size(self) -> Sizes:
        """The sizes."""
        return sizes_from(**{name: getattr(self, name) for name in _Sized.model_fields})


# ---- rows ---------------------------------------------------------------------------------------

LATER = "score", "sink", "cache"  # of problems: keys that a target says where they are not as usual
_TYPES = {
    **dict.fromkeys(LATER, str),
    "dtype": str,
    "mask": str,
    "deterministic": bool,
    "lengths": str,
}  # of what is computed; else numbers
_VARLEN = f"_{LENGTHS[1]}"  # in a slug, and at the end of a target's name
_SLUG = re.compile(r"[a-z0-9_]{1,200}")


class CardRow(Row):
    """A card and its driver."""

    name: Name
    driver: Name


class AnchorRow(_OfSlug):
    """The anchor of a target on a card and driver."""

    card: Name
    driver: Name


class KernelRow(_OfSlug):
    """What became of a kernel; rows have rising numbers, by which a reader knows what is new."""

    number: int


class CompiledRow(KernelRow):
    """A compile result as it is kept."""

    source_hash: Name
    compiler: Name
    outcome: Name
    note: str
    registers: Count | None
    spill_bytes: Count | None
    cpu_seconds: Annotated[float, Field(ge=0)]

    @cached_property
    def compiled(self) -> Compiled:
        """The result."""
        return Compiled(**self.model_dump(exclude={"number", "target"}))


class WrongRow(KernelRow):
    """What is wrong with a kernel, on a card and driver."""

    source_hash: Name
    card: Name
    driver: Name
    said: str


class TimedRow(_Sized, KernelRow):
    """A time as it is kept: of which source, on which card and driver.

    A peer's has no source, and its target beside its name.
    """

    source_hash: Line
    card: Name
    driver: Name
    regime: Literal["brief", "long"]
    round: Count
    seconds: Seconds
    anchor_seconds: Seconds
    mhz: Count | None

    @property
    def peer(self) -> str | None:
        """The peer whose time it is."""
        name = self.slug.removesuffix(f" {self.target}")
        return name if not self.source_hash and name in PEER_NAMES else None

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        if not self.source_hash and not self.peer:
            raise ValueError(f"{shown(self.slug)} has no source, and is no peer there")
        return self

    @cached_property
    def time(self) -> Time:
        """The time."""
        times = self.seconds, self.anchor_seconds, self.mhz
        return Time(self.peer or self.slug, self.size, self.regime, self.round, *times)


class Session(Row):
    """A day (in UTC) on which something was searched, by which fagen, and a note about it."""

    date: Annotated[str, AfterValidator(_a_date)]
    version: Name
    note: Line = ""


class SpaceRow(Row):
    """A space that was searched."""

    name: Name
    text: str


class _Weighed(_Sized):
    weight: Weight


class Survey(Row):
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

    @model_validator(mode="after")
    def _is_of_a_problem(self) -> Self:
        try:
            keys = space_of(self.kind).problem_keys
        except FagenError as error:
            raise ValueError(str(error)) from None
        if self.kind not in PASSES:
            raise ValueError(f"there is no problem of the kind {shown(self.kind)}")
        types = {field: type(value) for field, value in self.target.items()}
        taken = {key: _TYPES.get(key, int) for key in keys if key not in LATER or key in types}
        if types != taken:
            raise ValueError(f"target has not {', '.join(keys)}")
        dtype, mask = self.target["dtype"], self.target["mask"]
        if dtype not in DTYPES or mask not in MASKS:
            raise ValueError(f"there is no {shown(dtype)} with {shown(mask)}")
        if (lengths := self.target.get("lengths", LENGTHS[0])) not in LENGTHS:
            raise ValueError(f"there are no {shown(lengths)} lengths")
        return self

    @property
    def problem(self) -> Problem:
        """What it is of."""
        keys: dict[str, Any] = dict(self.target)
        return Problem(**keys, kind=self.kind)


class SurveyRow(Row):
    """A target's name, and what was found in its space."""

    target: str
    found: Json[Survey]

    @model_validator(mode="after")
    def _is_of_the_target(self) -> Self:
        if (name := self.found.problem.name) != self.target:
            raise ValueError(f"it is of {name}, and called {shown(self.target)}")
        return self


# ---- reading ------------------------------------------------------------------------------------

_Read = TypeVar("_Read", bound=Row)


class Damaged(Exception):  # noqa: N818 - it names what is wrong
    """A row that no search has written; in which file and table, its reader knows."""


def read(row: type[_Read], values: Sequence[Any]) -> _Read:
    """Take values in the order of a row's fields.  Raises Damaged where they are no such row."""
    try:
        return row.model_validate(dict(zip(row.model_fields, values, strict=True)))
    except ValidationError as invalid:
        error = invalid.errors(include_url=False)[0]
    path, kind = shown(".".join(map(str, error["loc"])))[1:-1], error["type"]
    message = error["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        raise Damaged("it is no JSON")
    if kind in ("extra_forbidden", "missing"):
        raise Damaged(f"{path} is {'not known' if kind == 'extra_forbidden' else 'missing'}")
    if isinstance(error["input"], dict):  # of the whole row, or of sizes in it
        raise Damaged(message)
    raise Damaged(f"{path} = {shown(error['input'])}: {message[0].lower()}{message[1:]}")


def columns_of(size: Sizes) -> dict[str, Any]:
    """Sizes as they are kept: lengths of varlen sequences in words."""
    names = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k")
    counts = {name: getattr(size, name) for name in names}
    return counts | ({"lengths": lengths_in_words(size.sequences)} if size.varlen else {})


def sizes_from(
    batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int, lengths: str = ""
) -> Sizes:
    """Return sizes by their columns.

    Raises ValueError where lengths in words are none, or go with other sizes.
    """
    plain = Sizes(batch, heads, kv_heads, seqlen_q, seqlen_k)
    if not lengths:
        return plain
    sizes = VarlenSizes.of(_lengths(lengths), heads, kv_heads)
    counts = Sizes(sizes.batch, sizes.heads, sizes.kv_heads, sizes.seqlen_q, sizes.seqlen_k)
    if counts != plain or max(sizes.total_q, sizes.total_k) > MAX_SIZE:
        raise ValueError(f"{shown(lengths)} does not go with the sizes beside it")
    return sizes


_lengths = cache(partial(lengths_from, most=MAX_SEQUENCES))


@cache
def _computed(slug: str) -> str | None:
    """The target of a schedule; None where the slug is none's."""
    try:
        return Problem.searched(from_slug(slug)).name
    except FagenError:
        return None
