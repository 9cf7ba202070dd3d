"""Which schedules serve a problem on a card: what tables say, what is committed, what is derived.

A user's own table and fagen's become one list of rows, of which the first that fits a call serves
it. What no row is for, the plainest committed schedule of the problem serves, or one that its kind
derives, so that no supported problem is without a kernel. The gradients of a problem are another
problem, of another kind.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import cache, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from fagen.dispatch.rows import (
    MOST,
    OPEN_KEYS,
    TILE,
    Limits,
    Row,
    Tiles,
    clocks,
    first_fit,
    measures,
    measures_of,
)
from fagen.dispatch.tables import NAME, chunks_of, in_order, table_at, users_table
from fagen.errors import OverBudget, ScheduleError
from fagen.expr.words import PLAIN
from fagen.kind import Step
from fagen.paths import locate
from fagen.problem import Problem, Sizes, solves
from fagen.registry import committed_file, from_slug, given, kind, plan, read, schedules
from fagen.schedule import Schedule
from fagen.toml_lines import near_word
from fagen.vocab import DTYPES, MASKS, PASSES, SIXTEEN_BITS, V_LAYOUTS

Choice = str | Path | Schedule | None  # a file, a slug, or the thing itself


# A row in the hands of a call: its slug, what bounds it by queries, tiles, query rows and keys, all
# its limits, and what its tiles cost. Without a slug it means the usual schedule of the problem.
Fit = tuple[str | None, int, int, int, int, int, Limits, Tiles]


def first_slug(
    rows: "Rows | tuple[Any, ...]",
    batch: Any,
    heads: Any,
    kv_heads: Any,
    queries: Any,
    keys: Any,
    *,
    surely: Callable[[Any], bool] | None = None,
    ready: Callable[[str], bool] | None = None,
    sized: Callable[..., str] | None = None,
) -> str | None:
    """Return the slug for a call of such sizes; `surely`, of first_fit, where they are traced.

    `rows` may be a plain tuple of what Rows has: torch.compile of 2.11 takes no other apart.

    A row for few queries is passed over where its kernel is not `ready`, where a size other
    than keys is left open, and where heads form no groups, as the kernel will say. `sized` is
    sized_slug, or what calls it untraced.
    """
    card, only, few_tiles, others, many, few_queries, few_rows, few_of_all, several = rows
    if not others:
        return only
    few: str | None = None
    if many and surely is None and type(keys) is int:  # soon: this is in each call's time
        query_rows = batch * heads * queries
        if queries <= few_queries or query_rows <= few_rows:
            tiles = batch * heads * ((queries + TILE - 1) // TILE)
            for few, queries_to, tiles_to, _, least, most, *_ in few_tiles:  # noqa: B007
                if queries <= queries_to and tiles <= tiles_to and least <= keys <= most:
                    break
            else:
                few = None
        if few is None and query_rows > few_of_all:
            for most, slug, several_tiles in many:
                if keys <= most:
                    if several_tiles:
                        return _cheapest(several_tiles, batch, heads, kv_heads, queries, keys)
                    return slug
        if few is None:
            for slug, _, _, rows_to, least, most, _, tiles in others:
                if query_rows <= rows_to and least <= keys <= most:
                    if tiles:
                        break
                    return slug
    elif few_tiles and all((size <= MOST) is True for size in (batch, heads, kv_heads, queries)):
        few = _first(few_tiles, measures(batch, heads, kv_heads, queries, keys), surely or bool)
    if few is not None and kv_heads > 0 and heads % kv_heads == 0:
        if few in several:
            few = (sized or sized_slug)(few, card, batch, heads, kv_heads, queries)
        if ready is None or ready(few):
            return few
    return _first(others, measures(batch, heads, kv_heads, queries, keys), surely or bool)


class Rows(NamedTuple):
    """What serves the calls of a problem on a card: numbers, words and tuples of these.

    `only` is for every call where there are no rows; else the first that fits serves it, of those
    for few queries or tiles and then of the others. None of the former fits a call of more than
    `few_queries` queries and `few_rows` query rows, and of more than `few_of_all` query rows none
    but those by keys, which `many` has in rising order. A slug of `several` stands for one of its
    kind that sizes tell. None is the usual schedule of the problem.
    """

    card: str
    only: str | None
    few_tiles: tuple[Fit, ...] = ()
    others: tuple[Fit, ...] = ()
    # up to so many keys; of several slugs, with what their tiles cost, the cheapest
    many: tuple[tuple[int, str | None, tuple[tuple[str | None, Tiles], ...]], ...] = ()
    few_queries: int = -1
    few_rows: int = -1
    few_of_all: int = -1
    several: tuple[str, ...] = ()

    @classmethod
    def of(cls, rows: tuple[Row, ...], card: str) -> "Rows":
        """The same as a list of rows, of which one fits any call."""
        if len(rows) == 1:
            return cls(card, rows[0].slug or None)
        few_tiles = [row for row in rows if row.for_few_tiles]
        by_keys = [] if any(row.group_rows for row in rows) else filter(_by_keys, rows)
        return cls(
            card=card,
            only=None,
            few_tiles=tuple(map(_fit, few_tiles)),
            others=tuple(_fit(row) for row in rows if not row.for_few_tiles),
            many=tuple(_ranges(by_keys)),
            few_queries=max((r.queries_to for r in few_tiles if r.tiles_to == MOST), default=-1),
            few_rows=max((TILE * r.tiles_to for r in few_tiles if r.tiles_to < MOST), default=-1),
            few_of_all=max((r.rows_to for r in rows if r.for_few_rows), default=-1),
            several=tuple({r.slug: 0 for r in few_tiles if kind(from_slug(r.slug).kind).steps}),
        )

    def slugs(
        self, query_rows: int | None = None, keys: int | None = None
    ) -> tuple[str | None, ...]:
        """Return the slugs of calls of so many query rows and keys, where None is any number.

        Those for few queries or tiles are left out; the last is the one for the most.
        """
        if not self.others:
            return (self.only,)
        query_rows, keys = (
            size if size is None else min(size, MOST) for size in (query_rows, keys)
        )
        by_most: list[tuple[int, int, str | None]] = []
        ends = False
        for slug, _, _, rows_to, least, most, _, tiles in self.others:
            if ends and not tiles:  # of several any may be the cheapest
                break
            fewer = query_rows is None or query_rows <= rows_to
            if fewer and (keys is None or least <= keys <= most):
                by_most.append((rows_to, most, slug))
                ends = (query_rows is not None or rows_to == MOST) and (
                    keys is not None or (least, most) == (0, MOST)
                )
                if ends and not tiles:
                    break
        return tuple(slug for *_, slug in sorted(by_most, key=lambda entry: entry[:2]))


def _first(
    rows: tuple[Fit, ...], of_call: tuple[Any, ...], surely: Callable[[Any], bool]
) -> str | None:
    return first_fit([(row[0], row[-2], row[-1]) for row in rows], of_call, surely)


def _fit(row: Row) -> Fit:
    bounds = row.queries_to, row.tiles_to, row.rows_to, row.keys_from, row.keys_to
    return row.slug or None, *bounds, row.limits, row.tiles


def _ranges(
    by_keys: Iterable[Row],
) -> Iterator[tuple[int, str | None, tuple[tuple[str | None, Tiles], ...]]]:
    """What `many` of Rows has, of rows by keys."""
    rising = sorted(by_keys, key=lambda row: row.keys_to)
    for most, alike in groupby(rising, key=lambda row: row.keys_to):
        first, *more = alike
        several = tuple((row.slug or None, row.tiles) for row in (first, *more) if more)
        yield most, first.slug or None, several


@lru_cache(10_000)
def _cheapest(
    several: tuple[tuple[str | None, Tiles], ...],
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
) -> str | None:
    """The slug whose tiles take the fewest clocks, the first of those that take as many."""
    of_call = batch * heads, batch * kv_heads, queries, keys
    return min(several, key=lambda one: clocks(one[1], *of_call))[0]


def select(problem: Problem, card: str) -> Rows:
    """What serves a problem on a card, "" for the one that tables name first.

    Raises ScheduleError where a table is wrong.
    """
    return Rows.of(flattened(problem, card), card)


def flattened(problem: Problem, card: str) -> tuple[Row, ...]:
    """The rows of tables for a problem as one list, of which the first that fits a call serves it.

    The last fits any call, without a slug where no row of a table is for it. Each table's are of
    this card, or of another where neither table has it. Raises ScheduleError where one is wrong.
    """
    decodes = bool(PASSES[problem.kind].computes)
    users, owns = (
        _rows_of(table, replace(problem, out_dtype=None))
        for table in (users_table(), table_at(locate("schedules") / NAME))
    )
    has_card = any(row.card == card for row in owns)
    first, second = _on(card, users, or_another=decodes or not has_card), _on(card, owns)
    if decodes:
        own = [row for row in (*first, *second) if not asked_beside(from_slug(row.slug))]
        rows = by_steps(from_slug(own[0].slug), own) if own else ()
        # how chunks are dealt, a kernel's own schedule says
        any_tiles = dict.fromkeys(replace(row, group_tiles_from=0) for row, _ in rows)
        return *any_tiles, Row(card, "")
    return tuple(replace(row, slug=_writing(row, problem)) for row in _overlaid(first, second))


def row_for(problem: Problem, sizes: Sizes, card: str) -> Row:
    """The row that serves a problem at these sizes; its slug is "" where no table has one."""
    rows = flattened(problem, card)
    row = first_fit(((row, row.limits, row.tiles) for row in rows), measures_of(sizes))
    assert row, problem  # the last fits any
    return row


class Served(NamedTuple):
    """The schedule that serves a call, and why: a row of a table, or none, and then a default.

    Without a row it is the plainest committed schedule of the problem, or `derived`.
    """

    schedule: Schedule
    row: Row | None
    derived: bool


def serve(problem: Problem, sizes: Sizes, card: str) -> Served:
    """The schedule that serves a problem at these sizes on a card, "" for none in particular.

    Raises ScheduleError where there is none, or where a dispatch table is wrong.
    """
    row = row_for(problem, sizes, card)
    if row.for_few_tiles:
        return Served(sized(row.slug, sizes, card), row, derived=False)
    if row.slug:
        return Served(buildable(problem, row.slug).schedules[0], row, derived=False)
    if not PASSES[problem.kind].computes:
        schedules, derived = buildable(problem)
        return Served(schedules[0], None, derived)
    keys = {key: getattr(problem, key) for key in ("dtype", "head_dim", "head_dim_v", "mask")}
    some = kind(problem.kind).schedule.make(**keys, **problem.variant, rows=8, block_n=64)
    usual = sized(some.slug, sizes)
    return Served(usual, None, derived=not committed_file(usual.slug).exists())


def _rows_of(table: Iterable[Row], problem: Problem) -> list[Row]:
    """The rows of a problem, and those with plain scores, as if they were with its own.

    For a cap or sinks mostly change little of what a tile costs: where they do, a row says what it
    costs beside tiles of the others. Rows without clocks stand by themselves.
    """
    own = [row for row in table if row.problem == problem]
    if not problem.variant or not all(row.step_clocks for row in own):
        return own
    plain = [row for row in table if row.problem == replace(problem, score=PLAIN, sink="")]
    slugs = {row.slug: _of_variant(row.slug, problem) for row in plain}
    slugs = {plain: slug for plain, slug in slugs.items() if slug not in {r.slug for r in own}}
    return own + [replace(row, slug=slugs[row.slug]) for row in plain if slugs.get(row.slug)]


@cache
def _of_variant(slug: str, problem: Problem) -> str:
    """The slug of the same tile with a problem's scores; "" where that does not fit an SM."""
    # how much spills is another score's own
    own = {"max_spill_bytes": None} if problem.score != PLAIN else {}
    try:
        schedule = from_slug(slug).but(**problem.variant, **own)
        plan(schedule)
    except (OverBudget, ScheduleError):
        return ""
    return schedule.slug


def _on(card: str, rows: list[Row], *, or_another: bool = True) -> list[Row]:
    """The rows of a card, or else of the first that there is."""
    own = [row for row in rows if row.card == card]
    if not own and or_another:
        own = [row for row in rows if row.card == rows[0].card]
    return in_order(own)


def _writing(row: Row, problem: Problem) -> str:
    """A row's slug, with O in the problem's dtype: a table has one kernel for all of them."""
    return row.slug and _with_out(from_slug(row.slug), problem.out_dtype).slug


def _with_out(schedule: Schedule, out_dtype: str | None) -> Schedule:
    if out_dtype in (None, Problem.of(schedule).out_dtype):
        return schedule
    return schedule.but(out_dtype=out_dtype)


def _overlaid(first: list[Row], second: list[Row]) -> Iterator[Row]:
    """Rows in one list, those of `second` for what no row of `first` is for.

    Who has rows for few queries keeps them beside those of the other table for others.
    """
    yield from (row for row in (*first, *second) if row.for_few_tiles)
    few = [row for row in first if row.for_few_rows]
    most = few[-1].rows_to if few else 0
    few += [row for row in second if row.for_few_rows and row.rows_to > most]
    over, under = ([row for row in rows if _by_keys(row)] for rows in (first, second))
    parts = [(row, row.keys_from) for row in over]
    parts += [(part, row.keys_from) for row in under for part in _beside(row, over)]
    # for accuracy: they go before those for few query rows
    long = {row.slug for row, begins in parts if begins > OPEN_KEYS}
    long -= {row.slug for row, begins in parts if begins <= OPEN_KEYS}
    ranges = sorted((row for row, _ in parts), key=lambda row: row.keys_from)
    yield from (replace(row, for_accuracy=True) for row in ranges if row.slug in long)
    yield from few
    yield from (row for row in _without_gaps(ranges) if row.slug not in long)


def _by_keys(row: Row) -> bool:
    return not (row.for_few_tiles or row.for_few_rows)


def _beside(row: Row, others: Iterable[Row]) -> Iterator[Row]:
    """What of a row's keys is left beside rows in rising order that do not overlap."""
    least = row.keys_from
    for other in others:
        if least < other.keys_from <= row.keys_to:
            yield replace(row, keys_from=least, keys_to=other.keys_from - 1)
        elif least < other.keys_from:
            break
        least = max(least, other.keys_to + 1)
    if least <= row.keys_to:
        yield replace(row, keys_from=least)


def _without_gaps(by_keys: Iterable[Row]) -> Iterator[Row]:
    """Rows by rising keys, and one without a slug for each range that none of them is for."""
    begin = 0
    for row in by_keys:
        if row.keys_from > begin:
            yield Row("", "", begin, row.keys_from - 1)
        yield row
        begin = row.keys_to + 1
    if begin <= MOST:
        yield Row("", "", begin)


def by_steps(
    schedule: Schedule, measured: Collection[Row] = (), ends: Iterable[int] = ()
) -> Iterator[tuple[Row, Step]]:
    """Rows of decoding with bounds for what a call has, and the steps that they are of.

    Each step has those `measured` of its rows of a group and chunks of keys, and then one without a
    slug for its own schedule. `schedule` is any of the problem; groups end at `ends` too.
    """
    steps_of = kind(schedule.kind).steps
    assert steps_of, f"{schedule.kind}: what serves which sizes is not said"
    steps = [*steps_of(schedule)]
    groups = sorted({step.rows for step in steps}.union(ends))
    most = max(step.rows for step in steps)
    for end in groups:
        rows = min((step.rows for step in steps if step.rows >= end), default=most)
        group_to = MOST if end == groups[-1] else end
        for step in (step for step in steps if step.rows == rows):
            for row in measured:
                if (row.group_rows, chunks_of(row)) == (rows, step.num_splits):
                    yield replace(row, group_to=group_to, kv_heads_from=step.kv_heads), step
            row = Row("", "", group_to=group_to, kv_heads_from=step.kv_heads)
            yield replace(row, group_tiles_from=step.tiles), step


# ---- schedules -----------------------------------------------------------------------------------


class Buildable(NamedTuple):
    """Schedules for a problem: one that was chosen, or those `derived`, most promising first.

    A compiler may refuse a derived one, for registers are a model; then the next is taken.
    """

    schedules: tuple[Schedule, ...]
    derived: bool


def buildable(problem: Problem, schedule: Choice = None) -> Buildable:
    """What to build for a problem: that schedule, or the usual one, or those derived.

    Raises ScheduleError where it computes something else, or where no kernel computes the problem.
    """
    if schedule is None:
        return _usual(problem)
    chosen = given(schedule)
    if not solves(chosen, problem):
        raise ScheduleError(
            f"{chosen.slug} computes {Problem.of(chosen)}; the call asks for {problem}"
        )
    if chosen.kind != problem.kind and (more := asked_beside(chosen)):
        raise ScheduleError(f"{chosen.slug} takes {', '.join(more)} too, which no such call gives")
    return Buildable((chosen,), derived=False)


def sized(slug: str, sizes: Sizes, card: str | None = None) -> Schedule:
    """The schedule that a slug stands for at these sizes: its kind may have several.

    On a card dispatch tables say which, "" for the one that they name first, else its steps. Raises
    ScheduleError where a table is wrong.
    """
    schedule = from_slug(slug)
    if kind(schedule.kind).steps is None:
        return schedule
    own = "" if card is None else row_for(Problem.searched(schedule), sizes, card).slug
    if own:
        return from_slug(own)
    step = first_fit(
        ((step, row.limits, ()) for row, step in by_steps(schedule)), measures_of(sizes)
    )
    assert step, slug  # the last fits any
    return step.derive()


@lru_cache(10_000)
def sized_slug(slug: str, card: str, batch: int, heads: int, kv_heads: int, queries: int) -> str:
    """The slug that a row's slug stands for in such a call: keys have no say."""
    return sized(slug, Sizes(batch, heads, kv_heads, queries, 1), card).slug


def asked_beside(schedule: Schedule) -> list[str]:
    """What a kernel of another kind must be given beside what its problem says."""
    inputs = plan(schedule).signature.inputs
    told = "q", "k", "v", "sinks", *MASKS[schedule.values()["mask"]].given
    return [x.name for x in inputs if not x.may_be_none and x.name not in told]


def _usual(problem: Problem) -> Buildable:
    any_out = replace(problem, out_dtype=None)
    fitting = [schedule for schedule in committed(problem.kind) if solves(schedule, any_out)]
    if fitting:
        return Buildable((_with_out(min(fitting, key=_rank), problem.out_dtype),), derived=False)
    if problem.variant:
        usual = _usual(replace(problem, score=PLAIN, sink=""))
        slugs = (_of_variant(schedule.slug, problem) for schedule in usual.schedules)
        if found := tuple(from_slug(slug) for slug in slugs if slug):
            return Buildable(found, usual.derived)
    if problem.dtype not in DTYPES:
        near = near_word(problem.dtype, DTYPES)
        mean = f"; did you mean {near}?" if near else ""
        raise ScheduleError(f"no kernel computes {problem}; one takes {', '.join(DTYPES)}{mean}")
    if DTYPES[problem.dtype].fp8:
        layout, rows = problem.v_layout or V_LAYOUTS[0], problem.scale_rows or 0
        any_out = replace(any_out, v_layout=layout, scale_rows=rows)
    derive = kind(problem.kind).derive
    # of gradients only some are derived
    derived = tuple(s for s in derive(any_out) if solves(s, any_out)) if derive else ()
    if not derived:
        no_gradients = PASSES[problem.kind].gradients and DTYPES[problem.dtype].fp8
        way_out = f"; {' and '.join(SIXTEEN_BITS)} have gradients" if no_gradients else ""
        raise ScheduleError(f"no kernel computes {problem}{way_out}")
    return Buildable(tuple(_with_out(s, problem.out_dtype) for s in derived), derived=True)


def _rank(schedule: Schedule) -> tuple[bool, int, str]:
    """The one with the fewest keys away from their defaults goes first, one of chunks last."""
    return "num_splits" in schedule.settings(), len(schedule.settings()), schedule.slug


@cache
def committed(name: str) -> tuple[Schedule, ...]:
    """The committed schedules of a kind that computes problems, read once."""
    return tuple(map(read, schedules(name)))
