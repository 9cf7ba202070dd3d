"""Old names of what select.py and rows.py have, until runtime/ has moved over."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from fagen.dispatch.rows import MOST, OPEN_KEYS, TILE
from fagen.dispatch.select import (
    Buildable,
    Choice,
    asked_beside,
    buildable,
    committed,
    flattened,
    select,
    serve,
    sized,
)
from fagen.dispatch.tables import chunks_of
from fagen.paths import locate
from fagen.problem import Problem, Sizes
from fagen.schedule import Schedule
from fagen.vocab import FORWARD

__all__ = ["MOST", "Choice", "asked_beside", "committed", "locate"]

KIND = FORWARD  # of the schedules that compute attention itself
Upto = tuple[tuple[float, str | None], ...]
Candidates = Buildable


class Narrow(NamedTuple):
    """A slug for calls of so many queries and tiles at most, and of keys in a range."""

    queries: float
    tiles: float
    least: int
    most: float
    slug: str


class Served(NamedTuple):
    """The slugs that tables have for a problem on a card.

    `always` is for every call, None where no table has any. Or `few` are for calls whose q has few
    elements, and `by_keys` for the others; those of `long` go before `few`. The first of `narrow`
    that fits goes before all of these; none does where queries are more than `few_queries`, and
    query rows of a batch more than `few_rows`.
    """

    always: str | None
    few: Upto
    by_keys: Upto
    long: frozenset[str]  # of by_keys, for more than OPEN_KEYS alone
    narrow: tuple[Narrow, ...] = ()
    few_queries: float = -1
    few_rows: float = -1


def pick(problem: Problem, sizes: Sizes, card: str) -> Schedule:
    return serve(problem, sizes, card).schedule


def serving(problem: Problem, card: str) -> Served:
    rows = flattened(problem, card)

    def bound(most: int) -> float:
        return math.inf if most == MOST else most

    narrow = tuple(
        Narrow(bound(r.queries_to), bound(r.tiles_to), r.keys_from, r.keys_to, r.slug)
        for r in rows
        if r.for_few_tiles
    )
    few = tuple((min(r.rows_to * problem.head_dim, MOST), r.slug) for r in rows if r.for_few_rows)
    compiled = select(problem, card)
    if not compiled.others:
        return Served(compiled.only, (), (), frozenset())
    by_keys = tuple((math.inf if most == MOST else most, slug) for most, slug in compiled.many)
    front = [r for r in rows if not r.for_few_tiles]
    long = set()
    for r in front:
        if r.for_few_rows or r.keys_from <= OPEN_KEYS:
            break
        long.add(r.slug)
    queries = max((one.queries for one in narrow if one.tiles == math.inf), default=-1.0)
    query_rows = max((one.tiles * TILE for one in narrow if one.tiles != math.inf), default=-1.0)
    return Served(None, few, by_keys, frozenset(long), narrow, queries, query_rows)


def slugs_for(served: Served, keys: int | None, elements: int | None) -> list[str | None]:
    """The slugs for so many keys and elements of q, where None is any number.

    The last is that for the most; None where no table has one.
    """
    if not served.by_keys:
        return [served.always]
    ranges = served.by_keys
    by_keys = [slug for _, slug in ranges] if keys is None else [for_keys(ranges, keys)]
    long = [slug for slug in by_keys if slug in served.long]
    if long == by_keys:
        return [*long]
    if elements is None:
        return [*(slug for _, slug in served.few), *by_keys]
    slug = for_few(served.few, elements)
    return [slug, *long] if slug else [*by_keys]


# A comparison of a traced size is neither True nor False; `surely` tells whether it always holds.


def for_keys(ranges: Upto, keys: Any, surely: Callable[[Any], bool] = bool) -> str | None:
    """The slug for so many keys; left open, they count as OPEN_KEYS, or as what comes nearest."""
    for most, slug in ranges:
        fits = keys <= most
        if fits is True:
            return slug
        # `if fits` would settle a size that is left open
        if fits is not False and (surely(fits) or (most >= OPEN_KEYS and not surely(keys > most))):
            return slug
    return ranges[-1][1]


def for_few(few: Upto, elements: Any, surely: Callable[[Any], bool] = bool) -> str | None:
    """The slug for so few elements of q; None where they are many or left open."""
    for most, slug in few:
        fits = elements <= most
        if fits is True or (fits is not False and surely(fits)):
            return slug
    return None


def for_narrow(
    narrow: Iterable[Narrow],
    heads: Any,
    queries: Any,
    keys: Any,
    surely: Callable[[Any], bool] = bool,
) -> str | None:
    """The slug for a call of few queries, with so many heads in all its batches; None: no such.

    Keys that are left open count as in `for_keys`; where others are, they are many.
    """
    tiles = heads * ((queries + TILE - 1) // TILE)
    for row in narrow:
        if _holds(queries <= row.queries, surely) and _holds(tiles <= row.tiles, surely):
            fits = keys <= row.most
            if not (_holds(fits, surely) or (row.most >= OPEN_KEYS and fits is not False)):
                continue
            fits = keys >= row.least
            if _holds(fits, surely) or (fits is not False and not surely(keys < row.least)):
                return row.slug
    return None


def _holds(fits: Any, surely: Callable[[Any], bool]) -> bool:
    return fits is True or (fits is not False and surely(fits))


def meant(slug: str, sizes: Sizes, card: str) -> Schedule:
    return sized(slug, sizes, card)


def suited(slug: str, sizes: Sizes) -> Schedule:
    return sized(slug, sizes)


class Grouped(NamedTuple):
    """A slug for calls of decoding, by rows of a group, query rows in all and chunks of keys."""

    group: int
    most: float
    chunks: int
    slug: str


def decoding(problem: Problem, card: str) -> tuple[Grouped, ...]:
    return tuple(
        dict.fromkeys(
            Grouped(row.group_rows, row.rows_to, chunks_of(row), str(row.slug))
            for row in flattened(problem, card)
            if row.slug
        )
    )


def for_group(rows: Iterable[Grouped], group: int, query_rows: int, chunks: int) -> str | None:
    """The slug for a call of decoding; None where no table has one."""
    for row in rows:
        if row.group == group and row.chunks == chunks and query_rows <= row.most:
            return row.slug
    return None


def of_group(usual: Schedule, sizes: Sizes) -> tuple[int, int, int]:
    """Return what tells a call's row: rows of a group, query rows in all, chunks of keys.

    `usual` is the schedule that such calls get without one.
    """
    values = usual.values()
    return values["rows"], sizes.batch * sizes.heads * sizes.seqlen_q, values["chunks"]


def choose(problem: Problem, choice: Choice = None) -> Schedule:
    return buildable(problem, choice).schedules[0]


candidates = buildable
