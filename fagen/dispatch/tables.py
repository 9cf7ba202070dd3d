"""Read and write dispatch tables: which kernel for which problem, size and card.

fagen's own table lies in schedules/, a user's in the folder of their configuration; a row of the
latter goes before one of the former.
"""

import math
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from fagen import outputs
from fagen.errors import FagenError, ScheduleError
from fagen.paths import config_folder, make_folder
from fagen.problem import Problem
from fagen.registry import from_slug
from fagen.toml_lines import (
    Origin,
    comments,
    dotted,
    nearest_or_all,
    one_of,
    printable,
    quoted,
    read_text,
    read_toml,
    shown,
)
from fagen.vocab import DTYPES, MASKS, PASSES

NAME = "dispatch.toml"
WHAT = "dispatch table"
MAX_BYTES = 131_072  # of a table; fagen's own is a quarter of that
MOST = 2**63 - 1  # of any size: what TOML promises to read back, and torch to count
_KEYS = {"card": str, "dtype": str, "head_dim": int, "mask": str, "slug": str}
_MAY = {"head_dim_v": int, "v_layout": str, "scale_rows": int}
_MAY |= {"from": int, "to": int, "rows_to": int}  # sizes of calls: by keys, or by query rows
# and by queries of a call, and their tiles: any of these beside from and to
_NARROW = ("queries_to", "tiles_to")
_MAY |= dict.fromkeys(_NARROW, int) | {"by": str}
_GROUP = "group_rows"  # and of decoding by rows of queries, with rows_to or without
_MAY |= {_GROUP: int}
_SIZES = ("from", "to", "rows_to", *_NARROW)  # what a row may be for
TILE = 128  # queries of a tile, as such rows count them
_WORDS: Mapping[str, Mapping[str, Any]] = {"dtype": DTYPES, "mask": MASKS}


@dataclass(frozen=True, order=True)
class Row:
    """For key sequences from `least` to `most` long, on this card, the kernel is `slug`.

    Or, with a number of `rows`, for calls with at most so many query rows in all (batch · heads ·
    seqlen_q), whatever the number of keys: large tiles of few rows leave multiprocessors idle.
    Only rows from very many keys on go before these, since they are for accuracy.
    Or, with `queries` or `tiles`, for calls with at most so many of either: tiles of TILE queries
    of a head, batch · heads · ⌈seqlen_q / TILE⌉ of them. Such rows go before all others, those
    for the fewest first: their kernels share the keys of a tile among multiprocessors.
    Or, with a `group`, for calls of decoding, whose queries of a KV head's group of heads, rounded
    up, are so many rows; with `rows` too for those with at most so many query rows in all.
    One of packed sequences is for all calls of its problem: the host knows no length, and what it
    does know of a call would let a sequence's bits depend on the others.
    `by` says what measured that, as a path from fagen's root or in words; "" where nothing is said.
    Which pass it is for, the slug says by how it begins, and whether it is deterministic.
    One kernel of e4m3 stands for its like with O in another type: O's has no part in its speed, and
    its problem leaves it open.
    """

    card: str
    problem: Problem
    least: int
    most: float  # infinity where there is no end
    slug: str
    rows: float = math.inf  # of queries at most; infinity where only keys count
    queries: float = math.inf  # of a sequence, at most
    tiles: float = math.inf
    group: int = 0  # 0 where it is not for decoding
    by: str = field(default="", compare=False)
    where: str = field(default="", compare=False)  # file:line, of a row that was read
    begun: int | None = field(default=None, compare=False)  # of a part: the whole row's `least`

    @classmethod
    def of(
        cls,
        card: str,
        slug: str,
        least: int = 0,
        most: float = math.inf,
        *,
        rows: float = math.inf,
        queries: float = math.inf,
        tiles: float = math.inf,
        group: int = 0,
        by: str = "",
    ) -> "Row":
        """The row that gives a kernel what it computes.  Raises ScheduleError for no slug."""
        problem = _problem_of(slug, own=bool(group))
        return cls(card, problem, least, most, slug, rows, queries, tiles, group, by)

    @property
    def begins(self) -> int:
        """From how many keys on it is, in its table: other rows may have left a part of it."""
        return self.least if self.begun is None else self.begun

    @property
    def few(self) -> bool:
        """Whether it is for few query rows, and so not for a range of keys."""
        return self.rows != math.inf

    @property
    def narrow(self) -> bool:
        """Whether it is for few queries or tiles."""
        return min(self.queries, self.tiles) != math.inf


# ---- which rows serve a problem ------------------------------------------------------------------


def rows_for(problem: Problem, card: str, *, own: Path) -> tuple[Row, ...]:
    """The rows for a problem; () if there are none.

    Those for few queries or tiles go first, a user's before all, then those for few query rows,
    the fewest first, then the others by rising key length. Of the latter two a row of a user's
    table takes the sizes that it is for; the others stay with the table in the folder
    `own`, of whose rows parts may be left then. Each table's are of this card, or of another where
    neither table has it. What no row is for is left out: a default serves it. Raises ScheduleError
    where a table is wrong.
    """
    any_out = replace(problem, out_dtype=None)
    users, owns = (
        [row for row in table if row.problem == any_out]
        for table in (users_table(), table_at(own / NAME))
    )
    here = any(row.card == card for row in owns)
    first = _on(card, users, or_another=not here)
    return tuple(_overlaid(first, _on(card, owns, or_another=True)))


def group_rows_for(problem: Problem, card: str, *, own: Path) -> tuple[Row, ...]:
    """The rows for a problem of decoding: a user's before those in the folder `own`.

    Of each table by rising query rows, of this card or of another where it has none of this.
    Raises ScheduleError where a table is wrong.
    """
    any_out = replace(problem, out_dtype=None)
    tables = (users_table(), table_at(own / NAME))
    listed = ([row for row in table if row.problem == any_out] for table in tables)
    return tuple(row for rows in listed for row in _on(card, rows, or_another=True))


def _on(card: str, rows: list[Row], *, or_another: bool) -> list[Row]:
    """The rows of a card, or else of the first that there is."""
    here = [row for row in rows if row.card == card]
    if not here and or_another:
        here = [row for row in rows if row.card == rows[0].card]
    return sorted(here, key=_place)


def _overlaid(first: list[Row], second: list[Row]) -> Iterator[Row]:
    """Rows in their places, those of `second` for what no row of `first` is for."""
    yield from (row for row in (*first, *second) if row.narrow)
    first, second = ([row for row in rows if not row.narrow] for rows in (first, second))
    few = [row for row in first if row.few]
    most = few[-1].rows if few else 0
    yield from few
    yield from (row for row in second if row.few and row.rows > most)
    over = [row for row in first if not row.few]
    parts = [part for row in second if not row.few for part in _beside(row, over)]
    yield from sorted([*over, *parts], key=lambda row: row.least)


def _beside(row: Row, taken: Iterable[Row]) -> Iterator[Row]:
    """What of a row's keys is left beside rows in rising order that do not overlap."""
    least = row.least
    for other in taken:
        if least < other.least and row.most >= least:
            end = min(row.most, other.least - 1)
            yield replace(row, least=least, most=end, begun=row.least)
        if other.most == math.inf:
            return
        least = max(least, int(other.most) + 1)
    if least <= row.most:
        yield replace(row, least=least, begun=row.least)


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
    for _, group in groupby(sorted(rows, key=_place), key=lambda row: (row.card, row.problem)):
        for first, second in pairwise(group):
            at = second.where or printable(str(path))
            both = f"{at}: {first.slug} and {second.slug} are both for"
            way_out = "a call belongs to one of them; leave one out, or give it another"
            if (first.queries, first.tiles) != (second.queries, second.tiles):
                continue
            if first.group != second.group or (first.group and _cut(first) != _cut(second)):
                continue
            if first.few and first.rows == second.rows:
                rows_to = f"at most {first.rows} query rows"
                raise ScheduleError(f"{both} {rows_to}: {way_out} rows_to")
            if not first.few and second.least <= first.most:
                most = min(first.most, second.most)
                keys = f"{second.least} keys" + (f" to {most}" if most < math.inf else " and more")
                raise ScheduleError(f"{both} {keys}: {way_out} from or to")


def _cut(row: Row) -> Any:
    """Into how many chunks a kernel cuts keys, which calls choose by their KV heads."""
    return from_slug(row.slug).values()["chunks"]


def _place(row: Row) -> tuple[Any, ...]:
    """Where a row stands in its table: beside those of its problem, by rising sizes."""
    cut = _cut(row) if row.group else 0
    sizes = row.queries, row.tiles, row.group, cut, row.rows, row.least
    return row.card, row.problem, *sizes


def _row(table: Any, number: int, origin: Origin) -> Row:
    def wrong(key: str, said: str) -> ScheduleError:
        at = origin.at("kernel", str(number), key)
        return ScheduleError(f"{at}: [[kernel]] number {number + 1}: {said}")

    if not isinstance(table, dict):
        raise wrong("", f"{shown(table)} is no table")
    for key, value in table.items():
        if key not in _KEYS and key not in _MAY:
            told = nearest_or_all(key, (*_KEYS, *_MAY), " of ")
            raise wrong(key, f"{dotted((key,))} is not one{told}")
        _refuse_value(key, value, wrong)
    if missing := [key for key in _KEYS if key not in table]:
        raise wrong("", f"without {', '.join(missing)}")
    by_keys = " and ".join(key for key in ("from", "to", *_NARROW) if key in table)
    if _GROUP in table and by_keys:
        raise wrong(_GROUP, f"{_GROUP} goes without {by_keys}: no choice of decoding is by lengths")
    if "rows_to" in table and by_keys:
        said = (
            f"rows_to goes without {by_keys}: such a row serves calls with few query rows "
            f"whatever their number of keys; leave out {by_keys}, or rows_to"
        )
        raise wrong("rows_to", said)
    try:
        computed = _problem_of(table["slug"], own=_GROUP in table)
    except ScheduleError as error:
        said = f"slug = {shown(table['slug'])}: " + "; ".join(str(error).splitlines())
        raise wrong("slug", said) from None
    if _GROUP in table and not PASSES[computed.kind].computes:
        raise wrong(_GROUP, f"{_GROUP} is for kernels of decoding; {table['slug']} is none")
    row = Row(
        card=table["card"],
        problem=Problem(
            dtype=table["dtype"],
            head_dim=table["head_dim"],
            head_dim_v=table["head_dim_v"] if "head_dim_v" in table else table["head_dim"],
            mask=table["mask"],
            v_layout=table.get("v_layout", ""),
            scale_rows=table.get("scale_rows", 0),
            kind=computed.kind,
            deterministic=computed.deterministic,
            lengths=computed.lengths,
        ),
        least=table.get("from", 0),
        most=table.get("to", math.inf),
        slug=table["slug"],
        rows=table.get("rows_to", math.inf),
        queries=table.get("queries_to", math.inf),
        tiles=table.get("tiles_to", math.inf),
        group=table.get(_GROUP, 0),
        by=table.get("by", ""),
        where=origin.at("kernel", str(number)),
    )
    if computed.varlen and (sizes := [key for key in _SIZES if key in table]):
        said = (
            f"{row.slug} is for packed sequences, whose kernel is one for all sizes: leave out "
            f"{' and '.join(sizes)}"
        )
        raise wrong(sizes[0], said)
    if computed != row.problem:
        said = f"computes something else: {computed}"
        if computed.opened() == row.problem.opened():
            said = f'is for v_layout = "{computed.v_layout}" and scale_rows = {computed.scale_rows}'
        raise wrong("slug", f"{row.slug} {said}")
    if row.most < row.least:
        raise wrong("to", f"from {row.least} to {row.most} is no range")
    return row


def _refuse_value(key: str, value: Any, wrong: Callable[[str, str], ScheduleError]) -> None:
    """Refuse what cannot be a key's value, whatever the others say."""
    kind: type = _KEYS.get(key) or _MAY[key]
    right: bool = type(value) is kind  # true and false are no numbers
    if not right:
        needed = "a whole number" if kind is int else "text"
        raise wrong(key, f"{key} is not {needed}: {shown(value)}")
    if kind is int:
        of = {"rows_to": " query rows in all", "queries_to": " queries", "tiles_to": " tiles"}
        of |= {_GROUP: " rows"}
        least = int(key in of)
        if not least <= value <= MOST:
            bound = f"{least} or more" if value < least else f"{MOST} or less"
            raise wrong(key, f"{key} is {shown(value)}; it must be {bound}{of.get(key, '')}")
    if (words := _WORDS.get(key)) and value not in words:
        raise wrong(key, f"{key} = {shown(value)} {one_of(words, value)}")


def _problem_of(slug: str, *, own: bool = False) -> Problem:
    """What a slug's schedule computes, the type of O left open.

    With `own` its kind is the schedule's, also where that computes a pass in its own way.
    Raises ScheduleError where that is no attention.
    """
    schedule = from_slug(slug)
    return replace((Problem.searched if own else Problem.of)(schedule), out_dtype=None)


# ---- writing -------------------------------------------------------------------------------------


_COMMENTS = (
    "# Which kernel for a problem, size and card, measured `by` what, or so far predicted.",
    "# `fagen search --write` writes rows by keys; a table in your configuration goes before.",
)


def written(rows: Iterable[Row]) -> str:
    """Return a table's text."""
    lines = list(_COMMENTS)
    for row in sorted(rows, key=_place):
        problem = row.problem
        lines += ["", "[[kernel]]", f"card = {quoted(row.card)}"]
        lines += [f"dtype = {quoted(problem.dtype)}", f"head_dim = {problem.head_dim}"]
        if problem.head_dim_v != problem.head_dim:
            lines.append(f"head_dim_v = {problem.head_dim_v}")
        lines.append(f"mask = {quoted(problem.mask)}")
        if problem.v_layout:
            lines.append(f"v_layout = {quoted(problem.v_layout)}")
        if problem.scale_rows:
            lines.append(f"scale_rows = {problem.scale_rows}")
        if row.group:
            lines.append(f"{_GROUP} = {row.group}")
        if row.few:
            lines.append(f"rows_to = {int(row.rows)}")
        if row.queries != math.inf:
            lines.append(f"queries_to = {int(row.queries)}")
        if row.tiles != math.inf:
            lines.append(f"tiles_to = {int(row.tiles)}")
        if row.least:
            lines.append(f"from = {row.least}")
        if row.most != math.inf:
            lines.append(f"to = {int(row.most)}")
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
        if row.group:
            return row.card, row.problem, row.group, _cut(row)
        return row.card, row.problem, row.few, row.narrow

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
    said = map(str.strip, comments(read_text(path, WHAT, MAX_BYTES)))
    if mine := [comment for comment in said if comment not in _COMMENTS]:
        raise FagenError(
            f"{printable(str(path))}: its comments would be lost, such as {shown(mine[0])}; "
            "nothing was written: take them out, or name another folder"
        )
