"""Turn what a user writes (TOML, keys, a slug) into a Schedule, or into all its faults, located."""

from pathlib import Path
from typing import Any, Self

from pydantic import PrivateAttr, ValidationError, model_validator

from fagen.errors import ScheduleError
from fagen.schedule.faults import BrokenRules, faults, refusal
from fagen.schedule.keys import (
    DERIVED,
    REQUIRED,
    SECTIONS,
    Attention,
    Build,
    Fp8,
    Grid,
    Overlap,
    Pipeline,
    Section,
    Softmax,
    Tile,
    Warps,
    default,
    rules,
)
from fagen.schedule.slug import read_slug, write_slug
from fagen.toml_lines import Origin, read_text, read_toml


class Schedule(Section):
    """What attention is computed and how one multiprocessor is used; every key has its value.

    Two schedules are equal where they say the same, whatever was left out and wherever they lie.
    """

    attention: Attention
    tile: Tile
    pipeline: Pipeline = Pipeline()
    warps: Warps = Warps()
    overlap: Overlap = Overlap()
    softmax: Softmax = Softmax()
    fp8: Fp8 = Fp8()
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
        if broken := [((SECTIONS[key], key), said) for key, said in rules(values)]:
            raise BrokenRules(broken)
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
        schedule = cls.make(**read_slug(slug))
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
            if key in REQUIRED or value != default(key, values)
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
        return write_slug(self.settings())


# ---- reading ------------------------------------------------------------------------------------


def read_schedule(path: Path | str) -> Schedule:
    """Read a schedule's file.  Raises ScheduleError with all faults, each with file and line."""
    return parse_schedule(read_text(path), str(path))


def parse_schedule(text: str, where: str = "schedule") -> Schedule:
    """Read a schedule from TOML text; `where` names it in messages.  Raises ScheduleError."""
    return _validated(*read_toml(text, where))


def _validated(tables: dict[str, Any], origin: Origin) -> Schedule:
    try:
        schedule = Schedule.model_validate(tables)
    except ValidationError as invalid:
        raise refusal(faults(invalid), origin) from None
    schedule._origin = origin
    return schedule


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a schedule, for editors that read a `#:schema` line."""
    schema = Schedule.model_json_schema()
    for table in (schema, *schema["$defs"].values()):
        for key, rule in table["properties"].items():
            rule.pop("title", None)
            if key in DERIVED or table is schema:  # what is printed there is no value of a key
                rule.pop("default", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
