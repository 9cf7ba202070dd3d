"""A file of spaces, or a slug, goes in; the spaces that it declares come out.

A file is one space, or several as tables of an array `space`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fagen.errors import ScheduleError
from fagen.search.declared import MAX_POINTS, MAX_TIMES, Declared, declared_by, space_like
from fagen.toml_lines import Origin, dotted, printable, read_text, read_toml, refuse_long

ARRAY = "space"
WHAT = "search space"
MAX_BYTES = 262_144  # of a file: some 3,000 shapes
MAX_SPACES = 64
MANY_TIMES = 4 * MAX_TIMES  # predicted, of all spaces of a file


def read_spaces(path: Path | str) -> tuple[Declared, ...]:
    """Read a file of spaces, or the space of a slug.

    Raises ScheduleError with the first faults of the first space that has any, each with file and
    line.
    """
    if Path(path).suffix != ".toml" and not _exists(path):
        return (space_like(str(path)),)
    return parse_spaces(read_text(path, WHAT, MAX_BYTES), str(path))


def parse_spaces(text: str, where: str) -> tuple[Declared, ...]:
    """Read spaces from TOML text; `where` names it in messages.  Raises as read_spaces does."""
    refuse_long(text, where, WHAT, MAX_BYTES)
    tables, origin = read_toml(text, where)
    if ARRAY not in tables:
        return (declared_by(tables, origin, text),)
    listed = tables[ARRAY]
    if not isinstance(listed, list) or not all(isinstance(space, dict) for space in listed):
        raise ScheduleError(f"{origin.at(ARRAY)}: several spaces are [[{ARRAY}]] tables")
    if beside := [key for key in tables if key != ARRAY]:
        raise ScheduleError(
            f"{origin.at(beside[0])}: {dotted((beside[0],))} stands beside [[{ARRAY}]] tables: put "
            f"it into one, as [{ARRAY}.{dotted((beside[0],))}]"
        )
    if not 0 < len(listed) <= MAX_SPACES:
        raise ScheduleError(
            f"{printable(where)}: {len(listed)} spaces; a file has 1 to {MAX_SPACES}"
        )
    spaces = tuple(
        declared_by(space, _within(origin, number), text) for number, space in enumerate(listed)
    )
    points = sum(space.points for space in spaces)
    times = sum(space.points * len(space.shapes) for space in spaces)
    if points > MAX_POINTS or times > MANY_TIMES:
        raise ScheduleError(
            f"{printable(where)}: {points:,} points in {len(spaces)} spaces, {times:,} times with "
            f"their shapes; {MAX_POINTS:,} and {MANY_TIMES:,} at most: make several files of it"
        )
    refuse_twice(spaces)
    return spaces


def refuse_twice(spaces: Sequence[Declared]) -> None:
    """Raise ScheduleError where two spaces search the same problem: its times would be mixed up."""
    searched: dict[str, Declared] = {}
    for space in spaces:
        for name in {target.name: target for target in space.targets()}:
            if (other := searched.setdefault(name, space)) is not space:
                raise ScheduleError(
                    f"{space.name}: {name} is searched in another space too, of {other.name}: a "
                    "search has one for each problem"
                )


def _within(origin: Origin, number: int) -> Origin:
    """Where the keys of one space of several are."""
    return replace(origin, within=(ARRAY, str(number)))


def _exists(path: Path | str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # no name that a file can have
        return False
