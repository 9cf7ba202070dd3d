"""Read and write dispatch tables: which kernel for which problem, size and card.

fagen's own table lies in schedules/, a user's in the folder of their configuration; a row of the
latter goes before one of the former.
"""

import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from fagen import outputs
from fagen.dispatch.rows import BOUNDS, MOST, Row
from fagen.errors import ScheduleError
from fagen.paths import config_folder, make_folder
from fagen.registry import from_slug
from fagen.toml_lines import (
    Origin,
    dotted,
    nearest_or_all,
    printable,
    quoted,
    read_text,
    read_toml,
    shown,
)
from fagen.vocab import FORWARD, PASSES

NAME = "dispatch.toml"
WHAT = "dispatch table"
MAX_BYTES = 131_072  # of a table; fagen's own is a quarter of that
_NEEDED = ("card", "slug")
_KEYS = ("keys_from", "keys_to")
_FEW_TILES = ("queries_to", "tiles_to")  # with keys or without
_FEW_ROWS = "rows_to"
_GROUP = "group_rows"  # of decoding, with rows_to or without
_SIZES = (_GROUP, _FEW_ROWS, *_FEW_TILES, *_KEYS)  # as they are written
_CLOCKS = ("step_clocks", "tile_clocks")
_COMBINE = "combine_clocks"  # where keys are in splits, beside those
_MOST_CLOCKS = {**dict.fromkeys(_CLOCKS, 16_384), _COMBINE: 2**18}  # so that no sum overflows
_NUMBERS = (*_SIZES, *_CLOCKS, _COMBINE)
# What numbers count, which are 1 or more then
_COUNTED = {_GROUP: "rows"} | {bound.name: bound.words for bound in BOUNDS if bound.words}
_COUNTED |= dict.fromkeys((*_CLOCKS, _COMBINE), "clocks")
# Keys of tables as they were, and what became of them
_RENAMED = {"from": "keys_from", "to": "keys_to"}
_TOLD_BY_SLUG = ("dtype", "head_dim", "head_dim_v", "mask", "v_layout", "scale_rows")


# ---- reading -------------------------------------------------------------------------------------


def users_table() -> tuple[Row, ...]:
    """Read a user's own table, empty where there is none.  Raises ScheduleError, with the line."""
    folder = config_folder()
    return table_at(folder / NAME) if folder else ()


@cache
def table_at(path: Path) -> tuple[Row, ...]:
    """Read a table; one that is not there is empty.  Raises ScheduleError, with the line."""
    if not _is_there(path):
        return ()
    return _rows(read_text(path, WHAT, MAX_BYTES), path)


def _rows(text: str, path: Path) -> tuple[Row, ...]:
    tables, origin = read_toml(text, str(path))
    listed = tables.pop("kernel", [])
    if tables or not isinstance(listed, list):
        key = next(iter(tables), "kernel")
        raise ScheduleError(
            f"{origin.at(key)}: {dotted((key,))}: a dispatch table has [[kernel]] tables, and "
            "nothing else"
        )
    rows = tuple(_row(table, number, origin) for number, table in enumerate(listed))
    _refuse_unclear(path, rows)
    return rows


def _is_there(path: Path) -> bool:
    """Whether there is such a file.  Raises ScheduleError where there is something else."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True  # who reads it says what is wrong
    if not stat.S_ISREG(mode):
        raise ScheduleError(f"{printable(str(path))}: is no file, and so no dispatch table")
    return True


def _refuse_unclear(path: Path, rows: Iterable[Row]) -> None:
    """Refuse a table by which a call belongs to two rows."""

    def alike(row: Row) -> tuple[Any, ...]:
        return *_calls(row), row.for_few_rows

    for _, group in groupby(in_order(rows), key=alike):
        for first, second in pairwise(group):
            at = second.where or printable(str(path))
            both = f"{at}: {first.slug} and {second.slug} are both for"
            way_out = "a call belongs to one of them; leave one out, or give it another"
            if first.for_few_rows and first.rows_to == second.rows_to:
                rows_to = f"at most {first.rows_to} query rows"
                raise ScheduleError(f"{both} {rows_to}: {way_out} {_FEW_ROWS}")
            if first.step_clocks and second.step_clocks and _keys(first) == _keys(second):
                continue
            if not first.for_few_rows and second.keys_from <= first.keys_to:
                most = min(first.keys_to, second.keys_to)
                keys = f"{second.keys_from} keys" + (f" to {most}" if most < MOST else " and more")
                raise ScheduleError(f"{both} {keys}: {way_out} keys_from or keys_to")


def _keys(row: Row) -> tuple[int, int]:
    return row.keys_from, row.keys_to


def _calls(row: Row) -> tuple[Any, ...]:
    """What calls a row is for, but for their query rows and keys."""
    cut = chunks_of(row) if row.group_rows else 0
    return row.card, row.problem, row.queries_to, row.tiles_to, row.group_rows, cut


def chunks_of(row: Row) -> Any:
    """Into how many chunks a kernel cuts keys, which calls choose by their KV heads."""
    return from_slug(row.slug).values()["num_splits"]


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Rows as a table lists them: beside those of their problem, by rising sizes."""
    return sorted(rows, key=lambda row: (*_calls(row), row.rows_to, row.keys_from))


def _row(table: Any, number: int, origin: Origin) -> Row:
    def wrong(key: str, message: str) -> ScheduleError:
        at = origin.at("kernel", str(number), key)
        return ScheduleError(f"{at}: [[kernel]] number {number + 1}: {message}")

    if not isinstance(table, dict):
        raise wrong("", f"{shown(table)} is no table")
    for key, value in table.items():
        if key in _RENAMED:
            raise wrong(key, f"{key} is called {_RENAMED[key]} now")
        if key in _TOLD_BY_SLUG:
            raise wrong(key, f"{key} is told by the slug now: leave it out")
        if key not in (*_NEEDED, *_NUMBERS, "by"):
            near = nearest_or_all(key, (*_NEEDED, *_NUMBERS, "by"), " of ")
            raise wrong(key, f"{dotted((key,))} is not one{near}")
        _refuse_value(key, value, wrong)
    if missing := [key for key in _NEEDED if key not in table]:
        raise wrong("", f"without {', '.join(missing)}")
    by_keys = " and ".join(key for key in (*_KEYS, *_FEW_TILES) if key in table)
    if _GROUP in table and by_keys:
        raise wrong(_GROUP, f"{_GROUP} goes without {by_keys}: no choice of decoding is by lengths")
    if _FEW_ROWS in table and by_keys:
        raise wrong(
            _FEW_ROWS,
            f"{_FEW_ROWS} goes without {by_keys}: such a row serves calls with few query rows "
            f"whatever their number of keys; leave out {by_keys}, or {_FEW_ROWS}",
        )
    row = Row(**table, where=origin.at("kernel", str(number)))
    try:
        problem = row.problem
    except ScheduleError as error:
        why = "; ".join(str(error).splitlines())
        raise wrong("slug", f"slug = {shown(row.slug)}: {why}") from None
    if _GROUP in table and not PASSES[problem.kind].computes:
        raise wrong(_GROUP, f"{_GROUP} is for kernels of decoding; {row.slug} is none")
    # of gradients the mean of a sequence's keys may choose
    by_mean = _KEYS if PASSES[problem.kind].gradients else ()
    beside = [key for key in table if key in _SIZES and key not in by_mean]
    if problem.varlen and beside:
        raise wrong(
            beside[0],
            f"{row.slug} is for varlen sequences, whose kernel is one for all sizes: leave out "
            f"{' and '.join(beside)}",
        )
    _refuse_clocks(table, row, wrong)
    if row.keys_to < row.keys_from:
        raise wrong("keys_to", f"keys_from {row.keys_from} to {row.keys_to} is no range")
    return row


def _refuse_clocks(table: Any, row: Row, wrong: Callable[[str, str], ScheduleError]) -> None:
    """Refuse clocks of tiles where they tell no time of a call."""
    if not (told := [key for key in (*_CLOCKS, _COMBINE) if key in table]):
        return
    if not {*told}.issuperset(_CLOCKS):
        raise wrong(told[0], f"{told[0]} alone tells no time: {' and '.join(_CLOCKS)} go together")
    for key in told:
        if table[key] > _MOST_CLOCKS[key]:
            raise wrong(key, f"{key} is {table[key]}; it must be {_MOST_CLOCKS[key]} or less")
    if row.for_few_tiles or row.for_few_rows or row.group_rows:
        raise wrong(told[0], f"{told[0]} goes with {' and '.join(_KEYS)} alone")
    if row.problem.kind != FORWARD:
        raise wrong(told[0], f"{told[0]} is for attention; {row.slug} is for other")
    values = from_slug(row.slug).values()
    if (_COMBINE in told) != values["fill"]:
        takes = "has none" if values["fill"] else "has"
        raise wrong(
            told[-1],
            f"{_COMBINE} is for kernels whose splits fill the SMs, which need it beside "
            f"{' and '.join(_CLOCKS)}; the row of {row.slug} {takes}",
        )
    if values["num_splits"] > 1 and not values["fill"]:
        raise wrong(told[0], f"{told[0]} is not for splits that do not fill, as of {row.slug}")


def _refuse_value(key: str, value: Any, wrong: Callable[[str, str], ScheduleError]) -> None:
    """Refuse what cannot be a key's value, whatever the others say."""
    is_size = key in _NUMBERS
    is_of_type: bool = type(value) is (int if is_size else str)  # true and false are no numbers
    if not is_of_type:
        needed = "a whole number" if is_size else "text"
        raise wrong(key, f"{key} is not {needed}: {shown(value)}")
    least = int(key in _COUNTED)
    if is_size and not least <= value <= MOST:
        bound = f"{least} or more" if value < least else f"{MOST} or less"
        counted = f" {_COUNTED[key]}" if key in _COUNTED else ""
        raise wrong(key, f"{key} is {shown(value)}; it must be {bound}{counted}")


# ---- writing -------------------------------------------------------------------------------------


_UNBOUND = {field.name: field.default for field in fields(Row)}
_COMMENTS = (
    "# Which kernel for a problem, size and card, measured `by` what, or so far predicted.",
    "# `fagen search --write` writes rows by keys; a table in your configuration goes before.",
)


def written(rows: Iterable[Row]) -> str:
    """Return a table's text."""
    lines = list(_COMMENTS)
    for row in in_order(rows):
        lines += ["", "[[kernel]]", f"card = {quoted(row.card)}"]
        sizes = ((key, getattr(row, key)) for key in _NUMBERS)
        lines += [f"{key} = {size}" for key, size in sizes if size != _UNBOUND[key]]
        lines.append(f"slug = {quoted(row.slug)}")
        if row.by:
            lines.append(f"by = {quoted(row.by)}")
    return "\n".join(lines) + "\n"


def update(path: Path, rows: Sequence[Row]) -> None:
    """Put rows into the table at `path`, in place of those of the same card and problem.

    Rows by keys replace no rows for few query rows, queries or tiles, nor these those.  Raises
    ScheduleError where a call would then belong to two rows, or where the table could not be read
    back, FagenError as need_room does; it is left as it was.
    """
    need_room(path)

    def sort(row: Row) -> tuple[Any, ...]:
        if row.group_rows:
            return row.card, row.problem, row.group_rows, chunks_of(row)
        return row.card, row.problem, row.for_few_rows, row.for_few_tiles

    new = set(map(sort, rows))
    kept = [row for row in table_at(path) if sort(row) not in new]
    text = written([*kept, *rows])
    if len(text.encode()) > MAX_BYTES:
        raise ScheduleError(f"{printable(str(path))}: more than {MAX_BYTES:,} bytes with new rows")
    _refuse_unclear(path, [*kept, *rows])
    _rows(text, path)
    make_folder(path.parent)
    outputs.write(path, text, outputs.anything, f"a {WHAT}")
    table_at.cache_clear()


def need_room(path: Path) -> None:
    """Raise FagenError where rows cannot be put into `path` without a loss.

    It may be a table of any rows, which are kept; comments that somebody wrote there would be lost.
    """
    outputs.refuse_loss(path, outputs.anything, f"a {WHAT}")
    if not _is_there(path):
        return
    table_at(path)
    way_out = "nothing was written: take them out, or name another folder"
    outputs.refuse_comments(path, read_text(path, WHAT, MAX_BYTES), _COMMENTS, way_out)
