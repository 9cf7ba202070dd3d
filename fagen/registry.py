"""The kinds of kernels by name, and which kind a schedule is of; each is imported when needed.

Adding a kind is one line here.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fagen.errors import ScheduleError
from fagen.paths import locate, path_of
from fagen.texts import by_names, refuse_unsaid, with_texts
from fagen.toml_lines import Origin, one_of, read_text, read_toml, refuse_long, shown

if TYPE_CHECKING:  # pydantic takes a moment
    from fagen.kind import Kind, Plan
    from fagen.schedule import Keys, Schedule


@dataclass(frozen=True)
class Entry:
    """Where a kind is, how its slugs begin, and the table that only its schedules have."""

    name: str
    module: str
    prefix: str
    table: str


ENTRIES = {
    entry.name: entry
    for entry in (
        Entry("forward", "fagen.kinds.forward", "fwd_", "attention"),
        Entry("backward", "fagen.kinds.backward", "bwd_", "backward"),
        Entry("quantize", "fagen.kinds.quantize", "quant_", "quantize"),
        Entry("combine", "fagen.kinds.combine", "comb_", "combine"),
        Entry("decode", "fagen.kinds.decode", "dec_", "decode"),
    )
}
DEFAULT = "forward"  # where a schedule neither says its kind nor has a kind's own table
KIND = "kind"  # the key that says it, above all tables


@cache
def kind(name: str) -> "Kind":
    """Return a kind by name.  Raises ScheduleError, with all names, where there is none."""
    if name not in ENTRIES:
        raise ScheduleError(f"there is no kind {shown(name)}; there are {', '.join(ENTRIES)}")
    loaded: Kind = import_module(ENTRIES[name].module).KIND
    return loaded


def kind_of_slug(slug: str) -> "Kind":
    """Return the kind whose slugs begin so.  Raises ScheduleError where none does."""
    for entry in ENTRIES.values():
        if slug.startswith(entry.prefix):
            return kind(entry.name)
    starts = ", ".join(entry.prefix for entry in ENTRIES.values())
    raise ScheduleError(f"{shown(slug)} is no slug; one begins with {starts}")


# ---- schedules ----------------------------------------------------------------------------------


def read(path: Path | str) -> "Schedule":
    """Read a schedule's file.

    Raises ScheduleError with the first twenty faults, each with file and line, and how many more
    there are; TypeError where `path` is no path.
    """
    path = path_of(path, "read_schedule")
    return parse(read_text(path), str(path))


def parse(text: str, where: str = "schedule") -> "Schedule":
    """Read a schedule from TOML text, of 16 KiB at most; `where` names it in messages.

    Raises ScheduleError as `read` does, TypeError where `text` is none.
    """
    for name, value in (("text", text), ("where", where)):
        if not isinstance(value, str):
            raise TypeError(
                f"parse_schedule: {name} is of type {type(value).__name__}; it must be a str"
            )
    refuse_long(text, where)
    tables, origin = read_toml(text, where)
    schedule = kind(named(tables, origin)).schedule
    return schedule.checked(by_names(tables, origin), origin)


def from_slug(slug: str) -> "Schedule":
    """Read a slug back.  Raises ScheduleError where it is not exactly some schedule's slug."""
    own = kind_of_slug(slug).schedule
    refuse_unsaid(slug)
    return own.from_slug(slug)


def given(choice: "str | Path | Schedule") -> "Schedule":
    """Return the schedule of a TOML file's path, of a slug, or itself.

    Raises ScheduleError where it cannot be read.
    """
    if isinstance(choice, str) and not choice.endswith(".toml"):
        return from_slug(choice)
    return read(choice) if isinstance(choice, str | Path) else choice


def plan(schedule: "Schedule") -> "Plan":
    """Work a schedule out.  Raises OverBudget, with every sum that does not fit and what would."""
    return kind(schedule.kind).plan(schedule)


def written(schedule: "Schedule", why: str) -> str:
    """Return a schedule's TOML: the keys that say something, below why they do."""
    tables = in_tables(schedule.settings(), schedule.keys)
    return "\n".join(["#:schema schedule.schema.json", f"# {why}", *tables]) + "\n"


def in_tables(settings: Mapping[str, Any], keys: "Keys", prefix: str = "") -> Iterator[str]:
    """Yield lines of TOML that say these keys, each table of a schedule below an empty line."""
    sections = {keys.sections[key]: None for key in keys.sections if key in settings}
    for section in sections:
        own = {key: value for key, value in settings.items() if keys.sections[key] == section}
        own, given = with_texts(own)
        yield from ("", f"[{prefix}{section}]")
        yield from (f"{key} = {json.dumps(value)}" for key, value in own.items())
        for name, lines in given.items():
            yield from ("", f"[{prefix}{section}.{name}]", *lines)


@cache
def plan_of(slug: str) -> "Plan":
    """Return the Plan that a slug stands for.  Raises ScheduleError where it is none."""
    return plan(from_slug(slug))


def schedules(name: str) -> tuple[Path, ...]:
    """Return the files of the committed schedules of a kind, by name."""
    return tuple(sorted((locate("schedules") / name).glob("*.toml")))


def committed_file(slug: str) -> Path:
    """Return where the schedule with this slug lies if it is committed."""
    own = (entry.name for entry in ENTRIES.values() if slug.startswith(entry.prefix))
    return locate("schedules") / next(own, DEFAULT) / f"{slug}.toml"


def named(tables: dict[str, Any], origin: Origin) -> str:
    """Take the kind out of a schedule's tables, or tell it from the table that only it has."""
    if KIND not in tables:
        own = [entry.name for entry in ENTRIES.values() if entry.table in tables]
        return own[0] if own else _default(tables, origin)
    name = tables.pop(KIND)
    if isinstance(name, str) and name in ENTRIES:
        return name
    raise ScheduleError(f"{origin.at(KIND)}: {KIND} = {shown(name)} {one_of(ENTRIES, name)}")


def _default(tables: dict[str, Any], origin: Origin) -> str:
    """Return the default kind, but where a table is nearly that of another."""
    others = [entry.table for entry in ENTRIES.values() if entry.name != DEFAULT]
    for name in tables:
        if close := get_close_matches(name, others, 1):
            raise ScheduleError(
                f"{origin.at(name)}: {shown(name)} is a table of no kind of schedule; did you mean "
                f"{close[0]}?"
            )
    return DEFAULT
