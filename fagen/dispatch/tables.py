"""Read and write dispatch tables: which kernel for which problem, size and card.

fagen's own table lies in schedules/, a user's in the folder of their configuration; a row of the
latter goes before one of the former.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from fagen.errors import ScheduleError
from fagen.paths import config_folder, write_whole
from fagen.problem import Problem
from fagen.registry import from_slug
from fagen.toml_lines import Origin, read_toml
from fagen.vocab import DTYPES, MASKS

NAME = "dispatch.toml"
_KEYS = {"card": str, "dtype": str, "head_dim": int, "mask": str, "slug": str}
_MAY = {"head_dim_v": int, "v_layout": str, "scale_rows": int}
_MAY |= {"from": int, "to": int, "rows_to": int}  # sizes of calls: by keys, or by query rows


@dataclass(frozen=True, order=True)
class Row:
    """For key sequences from `least` to `most` long, on this card, the kernel is `slug`.

    Or, with a number of `rows`, for calls with at most so many query rows in all (batch · heads ·
    seqlen_q), whatever the number of keys: large tiles of few rows leave multiprocessors idle.
    Only rows from very many keys on go before these, since they are for accuracy.
    One kernel of e4m3 stands for its like with O in another type: O's has no part in its speed, and
    its problem leaves it open.
    """

    card: str
    problem: Problem
    least: int
    most: float  # infinity where there is no end
    slug: str
    rows: float = math.inf  # of queries at most; infinity where only keys count

    @classmethod
    def of(
        cls,
        card: str,
        slug: str,
        least: int = 0,
        most: float = math.inf,
        *,
        rows: float = math.inf,
    ) -> "Row":
        """The row that gives a kernel what it computes.  Raises ScheduleError for no slug."""
        return cls(card, _problem_of(slug), least, most, slug, rows)

    @property
    def few(self) -> bool:
        """Whether it is for few query rows, and so not for a range of keys."""
        return math.isfinite(self.rows)


def rows_for(problem: Problem, card: str, *, own: Path) -> tuple[Row, ...]:
    """The rows for a problem, which leave no call out; () if there are none.

    Those for few query rows, the fewest first, go before the others by rising key length. Both are
    of this card before another, and of a user's table before that in the folder `own`, each kind by
    itself: who has measured by keys alone keeps what is known of few rows.  Raises ScheduleError
    where a table is wrong.
    """
    any_out = replace(problem, out_dtype=None)
    few: list[Row] = []
    by_keys: list[Row] = []
    for table in (table_at(config_folder() / NAME), table_at(own / NAME)):
        fitting = [row for row in table if row.problem == any_out]
        here = [row for row in fitting if row.card == card]
        others = [row for row in fitting if row.card == fitting[0].card]
        chosen = sorted(here or others, key=_place)
        few = few or [row for row in chosen if row.few]
        by_keys = by_keys or [row for row in chosen if not row.few]
    return (*few, *by_keys)


@cache
def table_at(path: Path) -> tuple[Row, ...]:
    """Read a table; one that is not there is empty.  Raises ScheduleError, with the line."""
    if not path.is_file():
        return ()
    tables, origin = read_toml(path.read_text(encoding="utf-8"), str(path))
    listed = tables.pop("kernel", [])
    if tables or not isinstance(listed, list):
        raise ScheduleError(f"{path}: a dispatch table has [[kernel]] tables, and nothing else")
    rows = tuple(_row(table, number, origin) for number, table in enumerate(listed, 1))
    _refuse_unclear(path, rows)
    return rows


def _refuse_unclear(path: Path, rows: Iterable[Row]) -> None:
    """Refuse a table by which a call belongs to two rows, or falls between them."""
    for _, group in groupby(sorted(rows, key=_place), key=lambda row: (row.card, row.problem)):
        ordered = [*group]
        for first, second in pairwise(ordered):
            if first.few and first.rows == second.rows:
                raise ScheduleError(
                    f"{path}: {first.slug} and {second.slug} are both for at most "
                    f"{first.rows:.0f} query rows: a call belongs to one of them; leave one out, "
                    "or give it another rows_to"
                )
            if not first.few and second.least != first.most + 1:
                raise ScheduleError(
                    f"{path}: {first.slug} ends at {first.most:g} keys and {second.slug} begins at "
                    f"{second.least}: every length belongs to one of them"
                )
        if (last := ordered[-1]).few:
            raise ScheduleError(
                f"{path}: {last.slug} is for at most {last.rows:.0f} query rows, and no row is for "
                f"more: every call belongs to one; add a row of {last.card} without rows_to"
            )


def _place(row: Row) -> tuple[str, Problem, float, int]:
    """Where a row stands in its table: beside those of its problem, by rising sizes."""
    return row.card, row.problem, row.rows, row.least


def _row(table: Any, number: int, origin: Origin) -> Row:
    def wrong(said: str) -> ScheduleError:
        return ScheduleError(f"{origin.where}: [[kernel]] number {number}: {said}")

    if not isinstance(table, dict):
        raise wrong("is no table")
    for key, kind in _KEYS.items():
        if type(table.get(key)) is not kind:  # true and false are no numbers
            raise wrong(f"{key} is missing, or not {'a whole number' if kind is int else 'text'}")
    for key in table.keys() - _KEYS.keys():
        if key not in _MAY:
            raise wrong(f"{key} is not one of {', '.join((*_KEYS, *_MAY))}")
        if type(table[key]) is not _MAY[key]:
            raise wrong(f"{key} is not {'a whole number' if _MAY[key] is int else 'text'}")
    if "rows_to" in table:
        if table["rows_to"] < 1:
            raise wrong(f"rows_to is {table['rows_to']}; it must be 1 or more query rows in all")
        if by_keys := " and ".join(key for key in ("from", "to") if key in table):
            raise wrong(
                f"rows_to goes without {by_keys}: such a row serves calls with few query rows "
                f"whatever their number of keys; leave out {by_keys}, or rows_to"
            )
    if table["dtype"] not in DTYPES or table["mask"] not in MASKS:
        raise wrong(f"there is no {table['dtype']} with {table['mask']}")
    row = Row(
        card=table["card"],
        problem=Problem(
            dtype=table["dtype"],
            head_dim=table["head_dim"],
            head_dim_v=table["head_dim_v"] if "head_dim_v" in table else table["head_dim"],
            mask=table["mask"],
            v_layout=table.get("v_layout", ""),
            scale_rows=table.get("scale_rows", 0),
        ),
        least=table.get("from", 0),
        most=table.get("to", math.inf),
        slug=table["slug"],
        rows=table.get("rows_to", math.inf),
    )
    computed = _problem_of(row.slug)
    if computed != row.problem:
        said = "computes something else"
        if computed.opened() == row.problem.opened():
            said = f'is for v_layout = "{computed.v_layout}" and scale_rows = {computed.scale_rows}'
        raise wrong(f"{row.slug} {said}")
    if not 0 <= row.least <= row.most:
        raise wrong(f"from {row.least} to {row.most:g} is no range")
    return row


def _problem_of(slug: str) -> Problem:
    """What a slug's schedule computes, the type of O left open."""
    return replace(Problem.of(from_slug(slug)), out_dtype=None)


def written(rows: Iterable[Row]) -> str:
    """Return a table's text."""
    lines = [
        "# Which kernel for which problem and size, as measured on a card. `fagen search --write`",
        "# writes the rows by keys; a table like this in your configuration folder goes before it.",
    ]
    for row in sorted(rows, key=_place):
        problem = row.problem
        lines += ["", "[[kernel]]", f"card = {json.dumps(row.card)}"]
        lines += [f"dtype = {json.dumps(problem.dtype)}", f"head_dim = {problem.head_dim}"]
        if problem.head_dim_v != problem.head_dim:
            lines.append(f"head_dim_v = {problem.head_dim_v}")
        lines.append(f"mask = {json.dumps(problem.mask)}")
        if problem.v_layout:
            lines.append(f"v_layout = {json.dumps(problem.v_layout)}")
        if problem.scale_rows:
            lines.append(f"scale_rows = {problem.scale_rows}")
        if row.few:
            lines.append(f"rows_to = {row.rows:.0f}")
        if row.least:
            lines.append(f"from = {row.least}")
        if math.isfinite(row.most):
            lines.append(f"to = {row.most:.0f}")
        lines.append(f"slug = {json.dumps(row.slug)}")
    return "\n".join(lines) + "\n"


def update(path: Path, rows: Sequence[Row]) -> None:
    """Put rows into the table at `path`, in place of those of the same card and problem.

    Rows by keys replace no rows for few query rows, nor these those.  Raises ScheduleError where a
    call would then belong to two rows, or to none; the table is left as it was.
    """
    new = {(row.card, row.problem, row.few) for row in rows}
    kept = [row for row in table_at(path) if (row.card, row.problem, row.few) not in new]
    _refuse_unclear(path, [*kept, *rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, written([*kept, *rows]))
    table_at.cache_clear()
