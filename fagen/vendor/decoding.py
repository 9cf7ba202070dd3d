"""Schedules of decoding in, the rows out by which a folder chooses among their kernels.

They say what fagen.attention_decode chooses, where the folder has it, and else what comes nearest.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fagen.dispatch.choice import Grouped, asked_beside, decoding
from fagen.dispatch.tables import MOST
from fagen.kind import Step
from fagen.problem import Problem
from fagen.registry import kind
from fagen.schedule import Schedule
from fagen.vendor.table import Row, Table, simplified
from fagen.vocab import DECODE, MASKS, ONE_QUERY

_Places = Mapping[int, Schedule]  # schedules by their places in the folder


def table_of_decoding(schedules: Sequence[Schedule]) -> Table:
    """Return the rows for schedules of decoding.

    Kernels that must be given more than others take another struct: they are called by their own
    names.
    """
    usual = [schedule for schedule in schedules if not asked_beside(schedule)]
    by_problem: dict[Problem, dict[int, Schedule]] = {}
    for place, schedule in enumerate(usual):
        any_mask = replace(Problem.searched(schedule), mask="")
        by_problem.setdefault(any_mask, {})[place] = schedule
    rows = [
        row
        for problem, places in by_problem.items()
        for mask in MASKS
        for row in _rows(replace(problem, mask=mask), places)
    ]
    tile = max((step.rows for schedule in usual[:1] for step in _steps(schedule)), default=0)
    return Table(DECODE, tuple(rows), f"pick_{DECODE}", f"{DECODE.capitalize()}Kernel", tile)


def _rows(problem: Problem, places: _Places) -> Iterator[Row]:
    """The rows of a problem, where the folder has these kernels of it and of its other masks."""
    own = {place: s for place, s in places.items() if Problem.searched(s) == problem}
    usual = _for_any(problem, own) if own else []
    single = _for_any(replace(problem, mask=ONE_QUERY), places)
    single = [replace(row, problem=problem) for row in single]
    if single != usual:
        yield from (replace(row, queries_to=1) for row in single)
    yield from usual


def _for_any(problem: Problem, places: _Places) -> list[Row]:
    """The rows of calls with any number of queries, whose kernels may be any of these."""
    steps = list(_steps(next(iter(places.values())).but(mask=problem.mask)))
    table = decoding(problem, "")
    most = max(step.rows for step in steps)
    blocks = []
    for rows in sorted({*(s.rows for s in steps), *(s.values()["rows"] for s in places.values())}):
        of = min((step.rows for step in steps if step.rows >= rows), default=most)
        there = [step for step in steps if step.rows == of]
        blocks.append((rows, _of_group(problem, rows, there, places, table)))
    blocks[-1] = MOST, blocks[-1][1]
    return [replace(row, group_to=end) for end, rows in _distinct(blocks) for row in rows]


def _of_group(
    problem: Problem,
    rows: int,
    steps: Iterable[Step],
    places: _Places,
    table: Iterable[Grouped],
) -> list[Row]:
    """The rows of calls with so many rows of a group, by KV heads."""
    by_heads = {step.kv_heads: list[Row]() for step in steps}
    for step in steps:
        by_heads[step.kv_heads] += _of_step(problem, rows, step, places, table)
    blocks = [(kv_heads, simplified(found)) for kv_heads, found in by_heads.items()]
    return [replace(row, kv_heads_from=least) for least, rows in _distinct(blocks) for row in rows]


def _of_step(
    problem: Problem, rows: int, step: Step, places: _Places, table: Iterable[Grouped]
) -> Iterator[Row]:
    """The rows of a step: those of dispatch tables, and the nearest kernel to the step's own."""
    slugs = {schedule.slug: place for place, schedule in places.items()}
    chunks = step.schedule.values()["chunks"]
    for row in table:
        if (row.group, row.chunks) == (step.rows, chunks) and row.slug in slugs:
            yield Row(problem, slugs[row.slug], rows_to=int(min(row.most, MOST)))
    nearest = min(places, key=lambda place: _distance(places[place], rows, step.schedule))
    yield Row(problem, nearest, group_tiles_from=step.tiles)


def _distinct(blocks: Sequence[tuple[int, list[Row]]]) -> Iterator[tuple[int, list[Row]]]:
    """Blocks of rows, each for what those before are not for; without any that the next repeats."""
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if after is None or block[1] != after[1]:
            yield block


def _distance(schedule: Schedule, rows: int, wanted: Schedule) -> tuple[Any, ...]:
    """How far a schedule is from the one that so many rows of a group are to have.

    The fewest rows and chunks that are enough are the nearest, else the most.
    """
    own, other = schedule.values(), wanted.values()
    of_rows, of_chunks = own["rows"], own["chunks"]
    few_rows, few_chunks = of_rows < rows, of_chunks < other["chunks"]
    return (
        *(few_rows, -of_rows if few_rows else of_rows),
        *(few_chunks, -of_chunks if few_chunks else of_chunks),
        own["by"] != other["by"],
        schedule.slug != wanted.slug,
        own["mask"] != other["mask"],
    )


def _steps(schedule: Schedule) -> Iterator[Step]:
    steps = kind(schedule.kind).steps
    assert steps, f"{schedule.kind}: what serves which sizes is not said"
    yield from steps(schedule)
