"""What schedules of all kinds share: tables, keys or a slug in, a Schedule or all faults out.

A kind declares its sections, and in `Schedule.keys` all that is to be said between them; which
kind a file is of, fagen.registry tells.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Self

from pydantic import PrivateAttr, ValidationError, model_validator

from fagen.errors import ScheduleError
from fagen.schedule.faults import BrokenRules, faults, refusal
from fagen.schedule.section import (
    Broken,
    Derived,
    Former,
    Keys,
    Known,
    OneOf,
    Section,
    Values,
    derived,
)
from fagen.schedule.slug import Code, SlugForm
from fagen.toml_lines import Origin, shown

__all__ = [
    "Broken",
    "Code",
    "Derived",
    "Former",
    "Keys",
    "Known",
    "OneOf",
    "Schedule",
    "Section",
    "SlugForm",
    "Values",
    "derived",
]


class Schedule(Section):
    """What a kernel computes and how one SM is used; every key has its value.

    Two schedules are equal where they say the same, whatever was left out and wherever they lie.
    """

    kind: ClassVar[str]  # its name in fagen.registry
    keys: ClassVar[Keys]

    _origin: Origin = PrivateAttr(default=Origin("schedule"))

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Have a kind's keys know its tables."""
        super().__pydantic_init_subclass__(**kwargs)
        tables: dict[str, Any] = {
            name: field.annotation for name, field in cls.model_fields.items()
        }
        keys = replace(cls.keys, tables=tables)
        kinds = {key: field.annotation for key, field in keys.fields.items()}
        cls.keys = replace(keys, slug=keys.slug.with_codes_of(kinds))

    @model_validator(mode="after")
    def _complete(self) -> Self:
        """Give every key that was left out its value, then check the rules between keys."""
        values = self.values()
        for key, derive in self.keys.derived.items():
            if values[key] is None:
                values[key] = derive(values)
        for name in type(self).model_fields:
            section = getattr(self, name)
            filled = {key: values[key] for key in type(section).model_fields}
            self.__dict__[name] = section.model_copy(update=filled)
        sections = self.keys.sections
        if broken := [((sections[key], key), message) for key, message in self.keys.rules(values)]:
            raise BrokenRules(broken)
        return self

    @classmethod
    def make(cls, **keys: Any) -> Self:
        """Make a schedule from keys without their sections.  Raises ScheduleError, all faults."""
        return cls._made(keys, "schedule")

    @classmethod
    def _made(cls, keys: dict[str, Any], where: str) -> Self:
        tables: dict[str, Any] = {}
        for key, value in keys.items():
            if key in cls.keys.sections:
                tables.setdefault(cls.keys.sections[key], {})[key] = value
            else:
                tables[key] = value
        return cls.checked(tables, Origin(where))

    @classmethod
    def checked(cls, tables: dict[str, Any], origin: Origin) -> Self:
        """Make a schedule from its tables.  Raises ScheduleError with all faults, located."""
        try:
            schedule = cls.model_validate(tables)
        except ValidationError as invalid:
            raise refusal(faults(invalid, cls.keys), origin) from None
        schedule._origin = origin
        return schedule

    @classmethod
    def from_slug(cls, slug: str) -> Self:
        """Read a slug back.  Raises ScheduleError where it is not exactly some schedule's slug."""
        if not isinstance(slug, str):
            raise TypeError(f"from_slug: slug is of type {type(slug).__name__}; it must be a str")
        schedule = cls._made(cls.keys.slug.read(slug), slug)
        if schedule.slug != slug:
            raise ScheduleError(f"{shown(slug)} is no slug; that schedule's is {schedule.slug}")
        return schedule

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON Schema of this kind, for editors that read a `#:schema` line."""
        schema = cls.model_json_schema()
        kind = {"const": cls.kind, "description": "what kind of kernel; its tables say it too"}
        schema["properties"] = {"kind": kind, **schema["properties"]}
        for table in (schema, *schema["$defs"].values()):
            for key, rule in table["properties"].items():
                rule.pop("title", None)
                # what is printed there is no value of a key
                if key in cls.keys.derived or table is schema:
                    rule.pop("default", None)
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}

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
            if key in self.keys.required or value != self.keys.default(key, values)
        }

    def but(self, **changes: Any) -> Self:
        """Return this schedule with some keys changed; None takes a key back to its default.

        What was derived is derived again.  Raises ScheduleError.
        """
        keys = {**self.settings(), **changes}
        return self.make(**{key: value for key, value in keys.items() if value is not None})

    @property
    def tile_words(self) -> str:
        """Its tile, as a list of schedules shows it: height and width, where it has both."""
        values = self.values()
        height = values.get("block_m", values.get("rows"))
        return f"{height}x{values['block_n']}" if "block_n" in values else ""

    def columns(self) -> dict[str, str]:
        """Return what a list of schedules shows of this one: dtype, head_dim, mask, tile."""
        values = self.values()
        shown = {key: str(values.get(key, "")) for key in ("dtype", "head_dim", "mask")}
        if "head_dim_v" in values and values["head_dim_v"] != values["head_dim"]:
            shown["head_dim"] += f"/{values['head_dim_v']}"
        return {**shown, "tile": self.tile_words}

    @cached_property
    def slug(self) -> str:
        """The name of this schedule, its file, kernel, C function, cache entry and op."""
        return self.keys.slug.write(self.settings())
