"""Declare the tables of a schedule: strict sections, words of a vocabulary, derived defaults."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from fagen.schedule.slug import SlugForm

Values = Mapping[str, Any]  # of all keys, without their tables
Derived = Mapping[str, Callable[[Values], Any]]
Broken = Iterator[tuple[str, str]]  # of rules: a key, and a sentence about it
Former = Mapping[str | tuple[str, object], str]


class Section(BaseModel):
    """A table of a schedule: strict, frozen, and without keys of a user's own making."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class OneOf:
    """The words or numbers that a key may have: those of a vocabulary table."""

    words: Iterable[str | int]

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        return core_schema.literal_schema(list(self.words))


@dataclass(frozen=True)
class Known(OneOf):
    """Words of a table to which calls add: those that it has when a schedule is read.

    What is said of the key are the `named` ones, whatever calls have added by then.
    """

    named: Iterable[str] = ()

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        def found(value: Any, one_of: Callable[[Any], Any]) -> Any:
            is_new = isinstance(value, str) and value in self.words
            return value if is_new else one_of(value)

        named = core_schema.literal_schema(list(self.named))
        return core_schema.no_info_wrap_validator_function(found, named)


def derived(description: str, **limits: Any) -> Any:
    """Declare a key whose default other keys decide (Keys.derived); its own is never seen."""
    return Field(default=None, description=description, **limits)


@dataclass(frozen=True)
class Keys:
    """All keys of one kind of schedule: derived defaults, rules, slug, and the kind's own tables.

    `derived` gives the default of a key from the values of others, in an order that works: a
    frozen structural rule over keys that the slug holds. `rules` yields (key, sentence) for each
    rule between keys that is broken. `former` says of a key, or of (key, value), that schedules
    once had what became of it: "is called x now", or "is gone: …" with what to do instead.
    """

    derived: Derived
    slug: SlugForm
    rules: Callable[[Values], Broken] = lambda _: iter(())
    former: Former = field(default_factory=dict)
    tables: Mapping[str, type[Section]] = field(default_factory=dict)

    @cached_property
    def sections(self) -> Mapping[str, str]:
        """The table of each key."""
        return {key: name for name, table in self.tables.items() for key in table.model_fields}

    @cached_property
    def fields(self) -> Mapping[str, FieldInfo]:
        """The declaration of each key."""
        return {key: self.tables[name].model_fields[key] for key, name in self.sections.items()}

    @cached_property
    def required(self) -> frozenset[str]:
        """The keys that every schedule says."""
        return frozenset(key for key, field in self.fields.items() if field.is_required())

    def default(self, key: str, values: Values) -> Any:
        """Return what a key is where it is left out and the others have these values."""
        return self.derived[key](values) if key in self.derived else self.fields[key].default
