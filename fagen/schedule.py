"""Turn what a user writes (TOML, keys, a slug) into a Schedule, or into all its faults, located."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from fagen.arch import SM90
from fagen.errors import ScheduleError
from fagen.toml_lines import Origin, read_toml
from fagen.vocab import CODES, DTYPES, LATER, MASKS, ORDERS, OUTPUTS, P_HOMES, PRODUCERS

MAX_BYTES = 16_384  # of a schedule file; the longest sensible one is an eighth of that


@dataclass(frozen=True)
class _OneOf:
    """The words that a key may have: those of a vocabulary table."""

    words: Iterable[str]

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        return core_schema.literal_schema(list(self.words))


def _derived(description: str, **limits: Any) -> Any:
    """Declare a key whose default other keys decide (DERIVED); its own default is never seen."""
    return Field(default=None, description=description, **limits)


def _registers(description: str) -> Any:
    return _derived(
        description,
        ge=SM90.setmaxnreg_min,
        le=SM90.setmaxnreg_max,
        multiple_of=SM90.register_quantum,
    )


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Attention(_Section):
    """What is computed."""

    head_dim: int = Field(ge=16, le=256, multiple_of=8, description="columns of Q and K")
    head_dim_v: int = _derived(
        "columns of V and O; head_dim if left out", ge=16, le=256, multiple_of=8
    )
    dtype: Annotated[str, _OneOf(DTYPES)] = Field(description="of Q, K, V and O")
    mask: Annotated[str, _OneOf(MASKS)] = Field(description="which keys a query sees")


class Tile(_Section):
    """What one thread block holds at a time."""

    block_m: int = Field(
        ge=SM90.wgmma_m,
        le=3 * SM90.wgmma_m,
        multiple_of=SM90.wgmma_m,
        description="query rows per thread block",
    )
    block_n: int = Field(ge=16, le=SM90.wgmma_n_max, multiple_of=16, description="keys per step")


class Pipeline(_Section):
    """How loads run ahead of the arithmetic."""

    stages: int = Field(default=2, ge=2, le=8, description="depth of the K and V rings")
    output: Annotated[str, _OneOf(OUTPUTS)] = Field(
        default="v_space",
        description='"v_space": O leaves through V\'s shared memory; "own": a buffer of its own',
    )


class Warps(_Section):
    """Who does what in a thread block."""

    producer: Annotated[str, _OneOf(PRODUCERS)] = Field(
        default="warp",
        description='"warp": a specialised TMA producer; "none": consumers load for themselves',
    )
    consumers: int = _derived("consumer warpgroups; block_m / 64 if left out", ge=1, le=3)
    producer_registers: int = _registers("setmaxnreg of the producer; derived if left out")
    consumer_registers: int = _registers("setmaxnreg of the consumers; derived if left out")


class Overlap(_Section):
    """What runs under what."""

    inter_warpgroup: bool = _derived(
        "ping-pong: one warpgroup's softmax under the other's GEMMs; "
        "true if left out, where there are a producer warp and two consumers or more"
    )
    intra_warpgroup: bool = Field(
        default=True, description="the next QKᵀ issued before this block's softmax"
    )


class Softmax(_Section):
    """How scores become probabilities."""

    p: Annotated[str, _OneOf(P_HOMES)] = Field(
        default="registers", description="from where P reaches the second GEMM"
    )
    rescale_threshold: float = Field(
        default=0.0,
        ge=0,
        le=15,  # P grows to 2 to this power; one more would leave fp16's range
        multiple_of=0.125,
        description="log2 units; > 0 keeps a row's old maximum while it is close enough",
    )


class Grid(_Section):
    """How thread blocks take tiles."""

    order: Annotated[str, _OneOf(ORDERS)] = _derived(
        "persistent, lpt (longest first) or single; what suits the mask if left out"
    )
    cluster: int = Field(default=1, ge=1, le=1, description="thread blocks that share K and V")


class Build(_Section):
    """What the compiler may do."""

    max_spill_bytes: int = Field(
        default=0, ge=0, le=4096, description="bytes per thread that may spill to local memory"
    )


class _BrokenRules(ValueError):  # noqa: N818 - it never leaves this module
    """Rules that hold between keys, broken: (key path, sentence) each."""

    def __init__(self, faults: list[tuple[tuple[str, str], str]]) -> None:
        super().__init__()
        self.faults = faults


class Schedule(_Section):
    """What attention is computed and how one multiprocessor is used; every key has its value.

    Two schedules are equal where they say the same, whatever was left out and wherever they lie.
    """

    attention: Attention
    tile: Tile
    pipeline: Pipeline = Pipeline()
    warps: Warps = Warps()
    overlap: Overlap = Overlap()
    softmax: Softmax = Softmax()
    grid: Grid = Grid()
    build: Build = Build()

    _origin: Origin = PrivateAttr(default=Origin("schedule"))

    @model_validator(mode="after")
    def _complete(self) -> Self:
        """Give every key that was left out its value, then hold the rules between keys."""
        values = self.values()
        for key, derive in DERIVED.items():
            if values[key] is None:
                values[key] = derive(values)
        for name in type(self).model_fields:
            section = getattr(self, name)
            filled = {key: values[key] for key in type(section).model_fields}
            self.__dict__[name] = section.model_copy(update=filled)
        if faults := [((SECTIONS[key], key), said) for key, said in _rules(values)]:
            raise _BrokenRules(faults)
        return self

    @classmethod
    def make(cls, **keys: Any) -> "Schedule":
        """Make a schedule from keys without their sections.  Raises ScheduleError, all faults."""
        tables: dict[str, Any] = {}
        for key, value in keys.items():
            if key in SECTIONS:
                tables.setdefault(SECTIONS[key], {})[key] = value
            else:
                tables[key] = value
        return _validated(tables, Origin("schedule"))

    @classmethod
    def from_slug(cls, slug: str) -> "Schedule":
        """Read a slug back.  Raises ScheduleError where it is not exactly some schedule's slug."""
        read = _SLUG.fullmatch(slug)
        if not read:
            raise ScheduleError(
                f"{slug!r} is no slug; one looks like fwd_fp16_d128_causal_m128n128"
            )
        keys: dict[str, Any] = {name: _number(text) for name, text in read.groupdict().items()}
        for said in keys.pop("rest").split("_")[1:]:
            keys.update(_decoded(said, slug))
        schedule = cls.make(**{key: value for key, value in keys.items() if value is not None})
        if schedule.slug != slug:
            raise ScheduleError(f"{slug!r} is no slug; that schedule's is {schedule.slug}")
        return schedule

    @property
    def origin(self) -> Origin:
        """Where it was written, for messages."""
        return self._origin

    def values(self) -> dict[str, Any]:
        """Return every key, without its section, with its value."""
        return {
            key: value
            for name in type(self).model_fields
            for key, value in getattr(self, name).__dict__.items()
        }

    def settings(self) -> dict[str, Any]:
        """Return the keys that say something: the required ones, and those not at their default."""
        values = self.values()
        return {
            key: value
            for key, value in values.items()
            if key in REQUIRED or value != _default(key, values)
        }

    def but(self, **changes: Any) -> "Schedule":
        """Return this schedule with some keys changed; None takes a key back to its default.

        What was derived is derived again.  Raises ScheduleError.
        """
        keys = {**self.settings(), **changes}
        return Schedule.make(**{key: value for key, value in keys.items() if value is not None})

    @property
    def slug(self) -> str:
        """The name of this schedule, its file, kernel, C function, cache entry and op."""
        keys = self.settings()
        own_v = f"v{keys['head_dim_v']}" if "head_dim_v" in keys else ""
        said = [
            f"fwd_{keys['dtype']}_d{keys['head_dim']}{own_v}_{keys['mask']}"
            f"_m{keys['block_m']}n{keys['block_n']}"
        ]
        for code in CODES:
            if code.key in keys:
                value = keys[code.key]
                number = f"{code.letters}{value:g}".replace(".", "p") if not code.words else ""
                said.append(code.words[value] if code.words else number)
        return "_".join(said)


# ---- what the declarations above say, by key ----------------------------------------------------

_FIELDS = {
    (name, key): field
    for name, section in Schedule.model_fields.items()
    for key, field in section.annotation.model_fields.items()  # type: ignore[union-attr]
}
SECTIONS: Mapping[str, str] = {key: name for name, key in _FIELDS}
REQUIRED = frozenset(key for (_, key), field in _FIELDS.items() if field.is_required())
_CONSTANTS = {
    key: field.default
    for (_, key), field in _FIELDS.items()
    if not field.is_required() and field.default is not None
}

# Keys whose default follows from others, in an order that works.  A slug leaves such a key out
# where it has that value, and still reads back: what it follows from is in the slug.
DERIVED: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "head_dim_v": lambda keys: keys["head_dim"],
    "consumers": lambda keys: keys["block_m"] // SM90.wgmma_m,
    # three consumers use up the register file exactly; one or two leave it to the limit per thread
    "producer_registers": lambda keys: _unless_none(keys, 32 if keys["consumers"] > 2 else 24),
    "consumer_registers": lambda keys: _unless_none(keys, 160 if keys["consumers"] > 2 else 240),
    "inter_warpgroup": lambda keys: keys["consumers"] > 1 and keys["producer"] == "warp",
    "order": lambda keys: MASKS[keys["mask"]].order,
}


def _unless_none(keys: Mapping[str, Any], registers: int) -> int:
    return registers if keys["producer"] == "warp" else 0


def _default(key: str, values: Mapping[str, Any]) -> Any:
    return DERIVED[key](values) if key in DERIVED else _CONSTANTS[key]


def _rules(keys: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, sentence) for each rule between keys that is broken."""
    rows = SM90.wgmma_m * keys["consumers"]
    if keys["block_m"] != rows:
        yield (
            "consumers",
            f"{keys['consumers']} does not go with block_m = {keys['block_m']}: a warpgroup takes "
            f"{SM90.wgmma_m} rows; use block_m = {rows}, or consumers = "
            f"{keys['block_m'] // SM90.wgmma_m}",
        )
    if keys["inter_warpgroup"] and keys["consumers"] < 2:
        yield (
            "inter_warpgroup",
            "true needs two warpgroups that take turns; use block_m = 128, or leave it out",
        )
    if keys["producer"] == "none":
        for key in ("producer_registers", "consumer_registers"):
            if keys[key]:
                yield (
                    key,
                    'has no meaning with producer = "none": no warp gives registers away; '
                    "leave it out",
                )


# ---- reading ------------------------------------------------------------------------------------


def read_schedule(path: Path | str) -> Schedule:
    """Read a schedule's file.  Raises ScheduleError with all faults, each with file and line."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ScheduleError(f"{path}: cannot be read: {reason}") from None
    if len(content) > MAX_BYTES:
        raise ScheduleError(f"{path}: longer than {MAX_BYTES:,} bytes; this is no schedule")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ScheduleError(f"{path}:{line}: this is not UTF-8 text") from None
    return parse_schedule(text, str(path))


def parse_schedule(text: str, where: str = "schedule") -> Schedule:
    """Read a schedule from TOML text; `where` names it in messages.  Raises ScheduleError."""
    return _validated(*read_toml(text, where))


def _validated(tables: dict[str, Any], origin: Origin) -> Schedule:
    try:
        schedule = Schedule.model_validate(tables)
    except ValidationError as invalid:
        faults = sorted(dict.fromkeys(_faults(invalid)), key=lambda fault: origin.line(fault[0]))
        raise ScheduleError(
            "\n".join(f"{origin.at(*path)}: {'.'.join(path)} {said}" for path, said in faults)
        ) from None
    schedule._origin = origin
    return schedule


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a schedule, for editors that read a `#:schema` line."""
    schema = Schedule.model_json_schema()
    for table in (schema, *schema["$defs"].values()):
        for key, rule in table["properties"].items():
            rule.pop("title", None)
            if key not in _CONSTANTS:
                rule.pop("default", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


# ---- faults, in words ---------------------------------------------------------------------------


def _faults(invalid: ValidationError) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (key path, sentence) of everything that pydantic found."""
    for error in invalid.errors(include_url=False):
        broken = error.get("ctx", {}).get("error")
        if isinstance(broken, _BrokenRules):
            yield from broken.faults
            continue
        path = tuple(str(step) for step in error["loc"])
        kind, value = error["type"], error["input"]
        if kind == "extra_forbidden":
            yield path, _unknown(path)
        elif len(path) == 1:
            keys = ", ".join(key for key in _keys_of(path[0]) if key in REQUIRED)
            yield path, f"is missing: a table with {keys}" if kind == "missing" else "is no table"
        elif kind == "missing":
            yield path, f"is missing: {_expected(path)}"
        else:
            yield path, f"= {_shown(value)}{_refused(path, value)}"


def _unknown(path: tuple[str, ...]) -> str:
    name = path[-1]
    known = list(Schedule.model_fields) if len(path) == 1 else _keys_of(path[0])
    if name in SECTIONS:
        return f"belongs under [{SECTIONS[name]}]"
    table = "a table of a schedule" if len(path) == 1 else f"a key of [{path[0]}]"
    close = get_close_matches(name, known, 1) or get_close_matches(name, SECTIONS, 1)
    if close:
        place = f" under [{SECTIONS[close[0]]}]" if close[0] not in known else ""
        return f"is not {table}; did you mean {close[0]}{place}?"
    return f"is not {table}: {', '.join(known)}"


def _keys_of(section: str) -> list[str]:
    return [key for name, key in _FIELDS if name == section]


def _property(path: tuple[str, ...]) -> dict[str, Any]:
    section, key = path[:2]
    schema = Schedule.model_json_schema()["$defs"][section.capitalize()]
    found: dict[str, Any] = schema["properties"][key]
    return found


def _expected(path: tuple[str, ...]) -> str:
    rule = _property(path)
    if words := rule.get("enum"):
        return " or ".join(f'"{word}"' for word in words)
    if rule["type"] == "boolean":
        return "true or false"
    kind = "a whole number" if rule["type"] == "integer" else "a number"
    least, most, step = rule["minimum"], rule["maximum"], rule.get("multipleOf", 1)
    if least == most:
        return f"{least}"
    steps = f" in steps of {step}" if step != 1 else ""
    return f"{kind} from {least} to {most}{steps}"


def _refused(path: tuple[str, ...], value: Any) -> str:
    """Say why a value is refused, and which one is near."""
    if isinstance(value, str | int) and (later := LATER.get((path[-1], value))):
        return f": {later}; until then {_expected(path)}"
    rule = _property(path)
    near = ""
    if isinstance(value, str) and (
        close := get_close_matches(value.lower(), rule.get("enum", ()), 1)
    ):
        near = f'; did you mean "{close[0]}"?'
    elif isinstance(value, int | float) and not isinstance(value, bool) and "minimum" in rule:
        step = rule.get("multipleOf", 1)
        if rule["minimum"] <= value <= rule["maximum"]:  # false for nan
            near = f"; the nearest is {round(value / step) * step:g}"
    return f" must be {_expected(path)}{near}"


def _shown(value: Any) -> str:
    """Return a value as TOML would say it, cut where it is long."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        quoted = '"' + value.encode("unicode_escape").decode() + '"'
        return quoted if len(quoted) <= 60 else quoted[:56] + '…"'
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    return str(value)


# ---- slugs --------------------------------------------------------------------------------------

_SLUG = re.compile(
    r"fwd_(?P<dtype>[a-z0-9]+)_d(?P<head_dim>\d{1,4})(?:v(?P<head_dim_v>\d{1,4}))?"
    r"_(?P<mask>[a-z]+)_m(?P<block_m>\d{1,4})n(?P<block_n>\d{1,4})(?P<rest>(?:_[a-z0-9]+)*)"
)


def _number(text: str | None) -> Any:
    """Return a number where `text` is one (3p5 is 3.5), else the text."""
    if text and re.fullmatch(r"\d{1,6}", text):
        return int(text)
    if text and re.fullmatch(r"\d{1,6}p\d{1,6}", text):
        return float(text.replace("p", "."))
    return text


def _decoded(said: str, slug: str) -> dict[str, Any]:
    for code in CODES:
        for value, word in (code.words or {}).items():
            if word == said:
                return {code.key: value}
    for code in CODES:
        value = _number(said.removeprefix(code.letters))
        if code.letters and said.startswith(code.letters) and not isinstance(value, str):
            return {code.key: value}
    raise ScheduleError(f"{slug!r} is no slug: {said!r} in it means nothing")
