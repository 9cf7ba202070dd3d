"""Which schedule serves a problem at given sizes on a card: what tables say, what is committed.

A dispatch table goes first, by queries, query rows and keys; then the plainest committed schedule
that computes the problem; then one that its kind derives, so that no supported problem is without a
kernel. The gradients of a problem are another problem, of another kind.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fagen.dispatch.tables import MOST, TILE, Row, group_rows_for, rows_for
from fagen.errors import ScheduleError
from fagen.paths import locate
from fagen.problem import Problem, Sizes, solves
from fagen.registry import committed_file, from_slug, given, kind, plan, read, schedules
from fagen.schedule import Schedule
from fagen.toml_lines import near_word
from fagen.vocab import DTYPES, FORWARD, PASSES, SIXTEEN_BITS, V_LAYOUTS

KIND = FORWARD  # of the schedules that compute attention itself

Choice = str | Path | Schedule | None  # a file, a slug, or the thing itself
# rising sizes, each with the slug for at most so much; None is the usual schedule of a problem
Upto = tuple[tuple[float, str | None], ...]

# Keys that torch.compile or torch.export leaves open count as so many, since a comparison would
# bound them. Rows of the table for more keys are for accuracy: sums over so many need fp32 totals.
OPEN_KEYS = 131_072


class Candidates(NamedTuple):
    """Schedules for a problem: one that was chosen, or those `derived`, most promising first.

    A compiler may refuse a derived one, for registers are a model; then the next is meant.
    """

    schedules: tuple[Schedule, ...]
    derived: bool


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


class Picked(NamedTuple):
    """The schedule that serves a call, and why: a row of a table, or none, and then a default.

    Without a row it is the plainest committed schedule of the problem, or `derived`.
    """

    schedule: Schedule
    row: Row | None
    derived: bool


def pick(problem: Problem, sizes: Sizes, card: str) -> Schedule:
    """The schedule that serves a problem at these sizes on a card, "" for none in particular.

    Raises ScheduleError where there is none, or where a dispatch table is wrong.
    """
    return picked(problem, sizes, card).schedule


def picked(problem: Problem, sizes: Sizes, card: str) -> Picked:
    """The schedule that pick(…) returns, and why it is that one.  Raises as pick does."""
    rows, slugs = _rows(problem, card)
    served = _served(problem, rows, slugs, names=[str(number) for number in range(len(rows))])
    if name := for_narrow(served.narrow, sizes.batch * sizes.heads, sizes.seqlen_q, sizes.seqlen_k):
        row = rows[int(name)]
        return Picked(meant(slugs[int(name)], sizes, card), row, derived=False)
    elements = sizes.batch * sizes.heads * sizes.seqlen_q * problem.head_dim
    name = slugs_for(served, sizes.seqlen_k, elements)[-1]
    if name is None:
        found = candidates(problem)
        return Picked(found.schedules[0], None, found.derived)
    return Picked(choose(problem, slugs[int(name)]), rows[int(name)], derived=False)


def serving(problem: Problem, card: str) -> Served:
    """What dispatch tables have for a problem.  Raises ScheduleError where one is wrong."""
    rows, slugs = _rows(problem, card)
    return _served(problem, rows, slugs, names=slugs)


def _rows(problem: Problem, card: str) -> tuple[tuple[Row, ...], list[str]]:
    """The rows for a problem, and the slug of each with O in the problem's dtype."""
    rows = rows_for(problem, card, own=locate("schedules"))
    return rows, [writing(from_slug(row.slug), problem.out_dtype).slug for row in rows]


def _served(
    problem: Problem, rows: Sequence[Row], slugs: Sequence[str], names: Sequence[str]
) -> Served:
    """What rows say, each by its name: its slug, or what else tells which row it is."""
    found = list(zip(rows, slugs, names, strict=True))
    few = tuple(
        (min(int(row.rows) * problem.head_dim, MOST), name) for row, _, name in found if row.few
    )
    narrow = tuple(
        Narrow(row.queries, row.tiles, row.least, row.most, name)
        for row, _, name in found
        if row.narrow
    )
    queries = max((one.queries for one in narrow if one.tiles == math.inf), default=-1.0)
    query_rows = max((one.tiles * TILE for one in narrow if one.tiles != math.inf), default=-1.0)
    by_keys = [one for one in found if not (one[0].few or one[0].narrow)]
    ranges = tuple(_without_gaps((row, name) for row, _, name in by_keys))
    if not few and not narrow and len(ranges) == 1:
        return Served(ranges[0][1], (), (), frozenset())
    long = {slug for row, slug, _ in by_keys if row.begins > OPEN_KEYS}
    long -= {slug for row, slug, _ in by_keys if row.begins <= OPEN_KEYS}
    by_accuracy = frozenset(name for _, s, name in by_keys if s in long)
    return Served(None, few, ranges, by_accuracy, narrow, queries, query_rows)


def _without_gaps(by_keys: Iterable[tuple[Row, str]]) -> Iterator[tuple[float, str | None]]:
    """The ends of rows with their slugs, and those of what no row is for with None."""
    end: float = -1
    for row, slug in by_keys:
        if row.least > end + 1:
            yield row.least - 1, None
        yield row.most, slug
        end = row.most
    if end < math.inf:
        yield math.inf, None


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
    """The schedule that a row's slug means for a call on a card: its kind may have several.

    Raises ScheduleError where a dispatch table is wrong.
    """
    usual = suited(slug, sizes)
    if usual.kind not in PASSES or not PASSES[usual.kind].computes:
        return usual
    found = for_group(decoding(Problem.searched(usual), card), *of_group(usual, sizes))
    return from_slug(found) if found else usual


def picked_to_decode(problem: Problem, sizes: Sizes, card: str) -> Picked:
    """The schedule that decodes a problem at these sizes, keys apart, and why it is that one.

    Raises ScheduleError where no kernel does, or where a dispatch table is wrong.
    """
    keys = ("dtype", "head_dim", "head_dim_v", "mask")
    of = {key: getattr(problem, key) for key in keys}
    some = kind(problem.kind).schedule.make(**of, rows=8, block_n=64)
    usual = suited(some.slug, sizes)
    rows = group_rows_for(Problem.searched(usual), card, own=locate("schedules"))
    found, (group, *_) = meant(some.slug, sizes, card), of_group(usual, sizes)
    row = next((row for row in rows if (row.slug, row.group) == (found.slug, group)), None)
    return Picked(found, row, derived=not (row or committed_file(found.slug).exists()))


def suited(slug: str, sizes: Sizes) -> Schedule:
    """The schedule that a slug stands for at these sizes where no table has another."""
    schedule = from_slug(slug)
    sized = kind(schedule.kind).sized
    return sized(schedule, sizes) if sized else schedule


class Grouped(NamedTuple):
    """A slug for calls of decoding, by rows of a group, query rows in all and chunks of keys."""

    group: int
    most: float
    chunks: int
    slug: str


def decoding(problem: Problem, card: str) -> tuple[Grouped, ...]:
    """What dispatch tables have for a problem of decoding; the first that fits a call counts.

    Kernels that take more than such calls give are none.  Raises ScheduleError where a table is
    wrong.
    """
    rows = group_rows_for(problem, card, own=locate("schedules"))
    found = ((row, from_slug(row.slug)) for row in rows)
    return tuple(
        Grouped(row.group, row.rows, schedule.values()["chunks"], row.slug)
        for row, schedule in found
        if not asked_beside(schedule)
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
    """The schedule that a caller has chosen, or else the usual one of a problem.

    Raises ScheduleError where it computes something else, or where no kernel computes the problem.
    """
    return candidates(problem, choice).schedules[0]


def candidates(problem: Problem, choice: Choice = None) -> Candidates:
    """What to build for a problem: that choice, or the usual schedule, or those derived.

    Raises ScheduleError as choose() does.
    """
    if choice is None:
        return _usual(problem)
    schedule = given(choice)
    if not solves(schedule, problem):
        raise ScheduleError(
            f"{schedule.slug} computes {Problem.of(schedule)}; the call asks for {problem}"
        )
    if schedule.kind != problem.kind and (more := asked_beside(schedule)):
        raise ScheduleError(
            f"{schedule.slug} takes {', '.join(more)} too, which no such call gives"
        )
    return Candidates((schedule,), derived=False)


def asked_beside(schedule: Schedule) -> list[str]:
    """What a kernel of another kind must be given beside q, k and v."""
    inputs = plan(schedule).signature.inputs
    return [one.name for one in inputs if not one.may_be_none and one.name not in ("q", "k", "v")]


def writing(schedule: Schedule, out_dtype: str | None) -> Schedule:
    """Return the schedule with O in this dtype: a table has one kernel for all of them."""
    if out_dtype in (None, Problem.of(schedule).out_dtype):
        return schedule
    return schedule.but(out_dtype=out_dtype)


def _usual(problem: Problem) -> Candidates:
    any_out = replace(problem, out_dtype=None)
    fitting = [schedule for schedule in committed(problem.kind) if solves(schedule, any_out)]
    if fitting:
        return Candidates((writing(min(fitting, key=_rank), problem.out_dtype),), derived=False)
    if problem.dtype not in DTYPES:
        near = near_word(problem.dtype, DTYPES)
        mean = f"; did you mean {near}?" if near else ""
        raise ScheduleError(f"no kernel computes {problem}; one takes {', '.join(DTYPES)}{mean}")
    if DTYPES[problem.dtype].fp8:
        layout, rows = problem.v_layout or V_LAYOUTS[0], problem.scale_rows or 0
        any_out = replace(any_out, v_layout=layout, scale_rows=rows)
    derive = kind(problem.kind).derive
    # of gradients only some are derived
    found = tuple(s for s in derive(any_out) if solves(s, any_out)) if derive else ()
    if not found:
        few = PASSES[problem.kind].gradients and DTYPES[problem.dtype].fp8
        way_out = f"; {' and '.join(SIXTEEN_BITS)} have gradients" if few else ""
        raise ScheduleError(f"no kernel computes {problem}{way_out}")
    return Candidates(
        tuple(writing(schedule, problem.out_dtype) for schedule in found), derived=True
    )


def _rank(schedule: Schedule) -> tuple[bool, int, str]:
    """The one with the fewest keys away from their defaults goes first, one of chunks last."""
    return "chunks" in schedule.settings(), len(schedule.settings()), schedule.slug


@cache
def committed(name: str) -> tuple[Schedule, ...]:
    """The committed schedules of a kind that computes problems, read once."""
    return tuple(map(read, schedules(name)))
