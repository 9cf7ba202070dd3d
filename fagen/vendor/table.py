"""The dispatcher's rows: which kernel of a folder serves a problem at which sizes.

They are the rows that fagen itself chooses by, for the kernels that are in the folder: one list per
problem, of which the first row that fits is taken.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from fagen.dispatch.rows import BOUNDS, GROUP_TILE, MOST, TILE, Bound, Row, without_repeats
from fagen.dispatch.select import asked_beside, buildable, by_steps, flattened
from fagen.expr.words import PLAIN
from fagen.problem import Problem
from fagen.schedule import Schedule
from fagen.vocab import (
    BACKWARD,
    DTYPES,
    FORWARD,
    MASKS,
    ONE_QUERY,
    OUT_DTYPES,
    PARTIALS,
    PASSES,
    PLAIN_MASKS,
    SCORES,
    V_LAYOUTS,
)

# The words of a problem, by its field; in C a word is its place from 1 on, "" is 0.
WORDS: Mapping[str, tuple[str, ...]] = {
    "dtype": tuple(DTYPES),
    "mask": tuple(PLAIN_MASKS),
    "out_dtype": tuple(OUT_DTYPES),
    "v_layout": tuple(V_LAYOUTS),
    "sink": tuple(PARTIALS),
}
# What chooses among kernels of varlen sequences in C is called so, after the folder's name.
VARLEN = ("varlen", "varlen_fp8", f"{BACKWARD}_varlen")
# Words of a struct's form that are of no mask, score or sinks.
_OF_LAYOUT = "varlen", "fp8", "unified"


class Field(NamedTuple):
    """A field of a problem, and its words with their numbers in C; none where it is a number."""

    name: str
    upper: str  # as constants have it
    constants: tuple[tuple[str, int], ...]
    names: tuple[tuple[str, int], ...]  # in Python: dtypes as array libraries call them

    @classmethod
    def of(cls, name: str) -> "Field":
        """The field of that name."""
        words = [*enumerate(WORDS.get(name, ()), 1)]
        dtypes = {**DTYPES, **PARTIALS}
        names = ((dtypes[word].torch if word in dtypes else word, n) for n, word in words)
        return cls(name, name.upper(), tuple((w.upper(), n) for n, w in words), tuple(names))


FIELDS = tuple(
    Field.of(field.name)
    for field in fields(Problem)
    # which all of a table share
    if field.name not in ("kind", "deterministic", "lengths", "score", "cache")
)


def in_c(problem: Problem) -> dict[str, int]:
    """Return a problem's fields as the C struct has them; a mask that a struct tells is 0."""
    values = {field.name: getattr(problem, field.name) for field in FIELDS}
    if problem.mask not in PLAIN_MASKS:
        values["mask"] = ""
    return {
        name: WORDS[name].index(value) + 1 if name in WORDS and value else int(value or 0)
        for name, value in values.items()
    }


class Entry(NamedTuple):
    """A row for calls of a problem."""

    problem: Problem
    row: Row
    kernel: int  # the place of its slug among the folder's; -1 where none may serve such calls
    numbers: tuple[int, ...]  # the problem's fields, as C has them
    usual: int  # 1 where O is in the dtype that a call has if it does not say


@dataclass(frozen=True)
class Table:
    """All rows of a kind, in the order in which they are tried."""

    kind: str
    rows: tuple[Entry, ...] = ()

    @property
    def pick(self) -> str:
        """What finds one in C, after the folder's name."""
        return "pick" if self.kind == FORWARD else f"pick_{self.kind}"

    @property
    def struct(self) -> str:
        """What it is found as in C, after the folder's name."""
        return "Kernel" if self.kind == FORWARD else f"{self.kind.title().replace('_', '')}Kernel"

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """By what its rows choose: some row bounds each of these."""
        rows = [entry.row for entry in self.rows]
        return tuple(b for b in BOUNDS if any(getattr(row, b.name) != b.open for row in rows))

    @property
    def measured(self) -> tuple[str, ...]:
        """What of a call these are of."""
        return tuple(dict.fromkeys(bound.measure for bound in self.bounds))

    @property
    def by_clocks(self) -> bool:
        """Whether some of its rows are chosen by what their tiles cost."""
        return any(entry.row.tiles for entry in self.rows)

    @property
    def tile(self) -> int:
        """Queries of a tile, as its rows count them."""
        return GROUP_TILE if "group_tiles" in self.measured else TILE

    @property
    def words(self) -> tuple[str, ...]:
        """What the rows are for, in words."""
        single = {entry.problem: entry.row.queries_to == 1 for entry in self.rows}  # the last says
        return tuple(f"{rows} of one query" if few else f"{rows}" for rows, few in single.items())

    @property
    def refused(self) -> tuple[Entry, ...]:
        """The rows whose calls no kernel of the folder serves."""
        return tuple(entry for entry in self.rows if entry.kernel < 0)


def variant_of(form: str) -> str:
    """Return the words of a struct's form that are of what mask, score or sinks are given."""
    return " ".join(word for word in form.split() if word not in _OF_LAYOUT)


def _is_told(schedule: Schedule) -> bool:
    """Whether fields of a problem and a struct's form tell what a kernel computes.

    They do not of a text to which a call gives nothing.
    """
    values = schedule.values()
    mask, score = values["mask"], values.get("score", PLAIN)
    is_plain = score == PLAIN or bool(SCORES[score].given)
    return is_plain and (mask in PLAIN_MASKS or bool(MASKS[mask].given))


def table_of(schedules: Sequence[Schedule], form: str = "") -> Table:
    """Return the rows for schedules of one kind that all take one struct, of this form.

    Nothing was measured that would choose among several kernels of gradients: the first is taken.
    Rows of varlen sequences have no bounds: what a struct says of sizes
    is no matter of theirs. Kernels of decoding that must be given more than others take another
    struct: they are called by their own names. Of other kinds than attention's there are none.
    """
    kind = schedules[0].kind
    if kind not in PASSES:
        return Table(kind)
    by_problem: dict[Problem, list[Schedule]] = {}
    rows: dict[Problem, list[Row]]
    places = {schedule.slug: place for place, schedule in enumerate(schedules)}
    schedules = [schedule for schedule in schedules if _is_told(schedule)]
    if PASSES[kind].computes:
        form = variant_of(form)
        usual = [schedule for schedule in schedules if not asked_beside(schedule)]
        for schedule in usual:
            problem = Problem.searched(schedule)
            any_mask = replace(problem, mask="") if problem.mask in PLAIN_MASKS else problem
            by_problem.setdefault(any_mask, []).append(schedule)
        rows = {
            problem: [*_decoding(problem, own)]
            for any_mask, own in by_problem.items()
            for problem in (
                replace(any_mask, mask=mask)
                for mask in ((any_mask.mask,) if any_mask.mask else PLAIN_MASKS)
            )
        }
    else:
        for schedule in schedules:
            problem = replace(Problem.of(schedule), kind=FORWARD, deterministic=False)
            by_problem.setdefault(problem, []).append(schedule)
        rows = {
            problem: _attending(problem, own) if kind == FORWARD else [Row("", own[0].slug)]
            for problem, own in by_problem.items()
        }
    entries = []
    for problem, listed in rows.items():
        usual_out = int(problem.out_dtype == DTYPES[problem.dtype].out)
        numbers = tuple(in_c(problem).values())
        entries += [Entry(problem, r, places.get(r.slug, -1), numbers, usual_out) for r in listed]
    is_plain = kind == FORWARD and not variant_of(form)
    name = "_".join([kind] * (not is_plain) + form.split()) or kind
    assert not is_plain or not form or name in VARLEN, name
    return Table(name, tuple(entries))


# ---- attention -----------------------------------------------------------------------------------


def _attending(problem: Problem, schedules: Sequence[Schedule]) -> list[Row]:
    """The rows of one problem that these kernels of a folder compute.

    What another kernel would serve falls to one that is there, the usual one or the first, rather
    not one for few queries or tiles. But ranges of very many keys do not: their kernels are there
    for accuracy, not for speed.
    """
    rows, slugs = flattened(problem, ""), [schedule.slug for schedule in schedules]
    few = {row.slug for row in rows if row.for_few_tiles}
    usual = min(schedules, key=lambda own: ("num_splits" in own.settings(), own.slug in few)).slug
    if len(slugs) > 1 and not (len(rows) == 1 and rows[0].slug):
        default = buildable(problem).schedules[0].slug
        usual = default if default in slugs else usual
    own: list[Row] = []
    for row in (listed := [*_without_absent(rows, slugs)]):
        if row.for_few_tiles or row.for_few_rows:
            own += [row] * (row.slug in slugs)
        elif row.for_accuracy:
            own.append(row)
        else:  # rows before it are for fewer keys, and after the last there is none
            slug = row.slug if row.slug in slugs else usual
            last = row.keys_to == listed[-1].keys_to
            # of several the first that fits is not all: theirs are no other row's keys
            least = row.keys_from if row.tiles else 0
            most = MOST if last else row.keys_to
            own.append(replace(row, slug=slug, keys_from=least, keys_to=most))
    return without_repeats(own)


def _without_absent(rows: Iterable[Row], slugs: Collection[str]) -> Iterator[Row]:
    """Rows, and of several for the same calls those that a folder has, or one if it has one."""
    for clocks, alike in groupby(rows, key=lambda r: r.step_clocks and (r.keys_from, r.keys_to)):
        if not clocks:
            yield from alike
            continue
        first, *others = alike
        there = [row for row in (first, *others) if row.slug in slugs]
        if len(there) > 1:
            yield from there
        else:
            # splits alone do not serve calls of many tiles
            whole = (row for row in (*there, first, *others) if not row.combine_clocks)
            yield replace(next(whole, first), step_clocks=0, tile_clocks=0, combine_clocks=0)


# ---- decoding ------------------------------------------------------------------------------------


def _decoding(problem: Problem, schedules: Sequence[Schedule]) -> Iterator[Row]:
    """The rows of a problem, where a folder has these kernels of it and of its other masks."""
    own = [schedule for schedule in schedules if Problem.searched(schedule) == problem]
    usual = _by_steps(problem, own) if own else []
    if problem.mask not in PLAIN_MASKS:
        yield from usual
        return
    single = _by_steps(replace(problem, mask=ONE_QUERY), schedules)
    if single != usual:
        yield from (replace(row, queries_to=1) for row in single)
    yield from usual


def _by_steps(problem: Problem, schedules: Sequence[Schedule]) -> list[Row]:
    """The rows of calls with any number of queries, whose kernels may be any of these.

    For what neither a dispatch table's nor a step's own kernel is there, it is the nearest. They
    are blocks by rows of a group, and in these by KV heads.
    """
    slugs = {schedule.slug for schedule in schedules}
    measured = [row for row in flattened(problem, "") if row.slug in slugs]
    ends = {schedule.values()["rows"] for schedule in schedules}
    rows = []
    for row, step in by_steps(schedules[0].but(mask=problem.mask), measured, ends):
        slug = row.slug
        if not slug:
            distance = partial(_distance, rows=row.group_to, ideal=step.derive())
            slug = min(schedules, key=distance).slug
        rows.append(replace(row, card="", slug=slug, group_rows=0))
    blocks = groupby(rows, attrgetter("group_to", "kv_heads_from"))
    rows = [row for _, block in blocks for row in without_repeats([*block])]
    return _distinct("group_to", _distinct("kv_heads_from", rows))


def _distinct(name: str, rows: Iterable[Row]) -> list[Row]:
    """Rows without those blocks, of one value of this bound, that the next repeats for more."""
    anywhere: dict[str, Any] = {name: 0}
    blocks = [[*block] for _, block in groupby(rows, attrgetter(name))]
    unbound = [[replace(row, **anywhere) for row in block] for block in blocks]
    pairs = zip(blocks, unbound, [*unbound[1:], []], strict=True)
    return [row for block, own, after in pairs if own != after for row in block]


def _distance(schedule: Schedule, rows: int, ideal: Schedule) -> tuple[Any, ...]:
    """How far a schedule is from the one that so many rows of a group are to have.

    The fewest rows and chunks that are enough are the nearest, else the most.
    """
    own, other = schedule.values(), ideal.values()
    few_rows, few_chunks = own["rows"] < rows, own["num_splits"] < other["num_splits"]
    return (
        *(few_rows, -own["rows"] if few_rows else own["rows"]),
        *(few_chunks, -own["num_splits"] if few_chunks else own["num_splits"]),
        own["by"] != other["by"],
        schedule.slug != ideal.slug,
        own["mask"] != other["mask"],
    )
