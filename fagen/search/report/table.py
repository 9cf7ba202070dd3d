"""Which kernel for how many keys: by these runs, and by fagen's own dispatch table beside them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fagen.dispatch.rows import MOST, Row, first_fit, measures_of
from fagen.dispatch.tables import NAME, table_at
from fagen.paths import locate
from fagen.search.report.words import Name, name
from fagen.search.results import Result
from fagen.toml_lines import printable


@dataclass(frozen=True)
class Range:
    """A kernel for a range of keys."""

    keys: str
    name: Name


@dataclass(frozen=True)
class Served:
    """A row of the table, what these runs say of its kernel, and what the row was measured by.

    `same` is whether they take that kernel too; None where they cannot tell.
    """

    sizes: str
    name: Name
    same: bool | None
    words: str
    than: Name  # the kernel that these runs take in its place; () where they take it too
    by: Name


def ranges(result: Result) -> Iterator[Range]:
    """The kernels that these runs give a dispatch table."""
    for least, most, slug in result.ranges():
        yield Range(_keys(least, most), name(slug))
    for group, most, slug in result.groups():
        upto = f", at most {most:,.0f} query rows" if math.isfinite(most) else ""
        yield Range(f"{group} rows to a KV head{upto}", name(slug))


def served(result: Result) -> Iterator[Served]:
    """The rows of fagen's table for what the target computes, on its card."""
    slug = result.lead.slug if result.lead else next((m.slug for m in result.compiled), None)
    if slug is None or result.by_groups:
        return
    problem = Row(result.card, slug).problem
    rows = [
        row
        for row in table_at(locate("schedules") / NAME)
        if row.card == result.card and row.problem == problem and not row.for_few_tiles
    ]
    for row in sorted(rows, key=lambda row: (not row.for_few_rows, row.rows_to, row.keys_from)):
        same, words, than = _beside(result, row, rows)
        sizes = _keys(row.keys_from, math.inf if row.keys_to == MOST else row.keys_to)
        if row.for_few_rows:
            sizes = f"at most {row.rows_to:,} query rows"
        yield Served(
            sizes=f"{sizes}, where its tiles take the fewest clocks" if row.tiles else sizes,
            name=name(row.slug),
            same=same,
            words=words,
            than=name(than),
            by=name(printable(row.by)),
        )


def _keys(least: int, most: float) -> str:
    if most == math.inf:
        return f"{least:,} keys and more" if least else "any number of keys"
    return f"{least:,} … {most:,.0f} keys" if least else f"to {most:,.0f} keys"


def _beside(result: Result, row: Row, rows: Sequence[Row]) -> tuple[bool | None, str, str]:
    """Whether these runs take a row's kernel too, the same in words, and which else they take.

    Of several rows for the same keys one serves each size.
    """
    lead = result.lead
    if lead is None:
        return None, "nothing was timed here", ""
    if row.for_few_rows:
        return None, "calls with few rows were not searched", ""
    if result.target.varlen:  # a row is for all lengths, and so is the leader
        others = dict.fromkeys(result.sizes, lead.slug)
    else:
        sizes = [s for s in result.sizes if s.square and row.keys_from <= s.seqlen_k <= row.keys_to]
        if row.tiles:
            several = [(own, own.limits, own.tiles) for own in rows if own.tiles]
            sizes = [size for size in sizes if first_fit(several, measures_of(size)) == row]
        others = {size: result.best_at(size, lead.slug) for size in sizes}
    if not others:
        return None, "no such length was searched", ""
    others = {size: slug for size, slug in others.items() if slug != row.slug}
    if not others:
        return True, "the same", ""
    behind = {size: result.behind(row.slug, slug, size) for size, slug in others.items()}
    timed = {size: log for size, log in behind.items() if log is not None}
    if not timed:
        return False, "not timed here; instead", next(iter(others.values()))
    size = max(timed, key=timed.__getitem__)
    by = math.expm1(timed[size])
    at = size.lengths if size.varlen else f"{size.seqlen_k:,} keys"
    return False, f"at {at} it takes {by:.1%} longer than", others[size]
