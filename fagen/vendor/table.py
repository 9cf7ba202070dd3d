"""The dispatcher's rows: which kernel of a folder serves a problem at which sizes.

They say what fagen.dispatch says, for the kernels that are in the folder, in one list per problem
of which the first row that fits is taken.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from fagen.dispatch.choice import KIND, candidates, serving
from fagen.dispatch.tables import MOST, TILE
from fagen.problem import Problem, Sizes
from fagen.registry import from_slug
from fagen.schedule import Schedule
from fagen.vendor.gradients import problem_of
from fagen.vocab import BACKWARD, DTYPES, MASKS, OUT_DTYPES, PASSES, SCALE_ROWS, V_LAYOUTS

# The words of a problem, by its field; in C a word is its place from 1 on, "" is 0.
WORDS: Mapping[str, tuple[str, ...]] = {
    "dtype": tuple(DTYPES),
    "mask": tuple(MASKS),
    "out_dtype": tuple(OUT_DTYPES),
    "v_layout": tuple(V_LAYOUTS),
}

# What chooses among kernels of packed sequences in C is called so, after the folder's name.
PACKED = ("varlen", "varlen_fp8", f"{BACKWARD}_varlen")

_SHARED = ("kind", "deterministic", "lengths")  # by all problems of a table


@dataclass(frozen=True)
class Bound:
    """A field of rows: the least, or else the most, that something of a call may be."""

    name: str
    of: str
    least: bool = False

    @property
    def open(self) -> int:
        """What a row has that does not bound it."""
        return 0 if self.least else MOST

    def holds(self, row: "Row", of: int) -> bool:
        """Whether so much of it is within a row."""
        bound: int = getattr(row, self.name)
        return bound == self.open or (of >= bound if self.least else of <= bound)


# What tells most calls apart goes first.
BOUNDS = (
    Bound("queries_to", "queries"),
    Bound("group_to", "group"),
    Bound("kv_heads_from", "kv_heads", least=True),
    Bound("group_tiles_from", "group_tiles", least=True),
    Bound("tiles_to", "tiles"),
    Bound("rows_to", "query_rows"),
    Bound("keys_from", "keys", least=True),
    Bound("keys_to", "keys"),
)

# Sizes of a call as they are; what else is bounded is a product of some.
PLAIN = frozenset({"queries", "keys", "kv_heads"})


@dataclass(frozen=True)
class Row:
    """For calls of a problem that are within these bounds.

    Queries are a sequence's, rows those of a call, tiles of queries of a head; a group is the
    queries of a KV head's heads, and has tiles too. `kernel` is its place among the folder's of the
    table; -1 where none of them may serve such calls, and then `wanted` is the slug of one that
    would.
    """

    problem: Problem
    kernel: int
    keys_from: int = 0
    keys_to: int = MOST
    rows_to: int = MOST
    queries_to: int = MOST
    tiles_to: int = MOST
    group_to: int = MOST
    kv_heads_from: int = 0
    group_tiles_from: int = 0
    wanted: str = ""

    @property
    def values(self) -> tuple[str, ...]:
        """The problem's fields, as C has them."""
        return tuple(f"{said}" for said in in_c(self.problem).values())

    @property
    def usual(self) -> int:
        """1 where O is in the dtype that a call has if it does not say."""
        return int(self.problem.out_dtype == DTYPES[self.problem.dtype].out)

    def includes(self, other: "Row") -> bool:
        """Whether it is for all calls of its problem that another is for."""
        return all(bound.holds(self, getattr(other, bound.name)) for bound in BOUNDS)

    def serves(self, sizes: Sizes, tile: int) -> bool:
        """Whether it is for a call of such sizes, where tiles have so many queries."""
        heads = sizes.batch * sizes.heads
        group = sizes.seqlen_q * (sizes.heads // sizes.kv_heads) if sizes.kv_heads else 0
        told = {
            "keys": sizes.seqlen_k,
            "queries": sizes.seqlen_q,
            "query_rows": heads * sizes.seqlen_q,
            "tiles": heads * -(-sizes.seqlen_q // tile),
            "kv_heads": sizes.kv_heads,
            "group": group,
            "group_tiles": sizes.batch * sizes.kv_heads * -(-group // tile),
        }
        return all(bound.holds(self, told[bound.of]) for bound in BOUNDS)


@dataclass(frozen=True)
class Field:
    """A field of a problem in C, and the names of its values."""

    name: str
    words: tuple[tuple[str, int], ...]  # with their numbers; none where it is a number itself

    @property
    def upper(self) -> str:
        """The name as constants have it."""
        return self.name.upper()

    @property
    def names(self) -> tuple[tuple[str, int], ...]:
        """The same words as Python has them, dtypes as array libraries call them."""
        words = WORDS.get(self.name, ())
        return tuple((DTYPES[w].torch if w in DTYPES else w, n) for n, w in enumerate(words, 1))


@dataclass(frozen=True)
class Table:
    """All rows of a kind, in the order in which they are tried; `kernel` is a place among its own.

    In C `pick` is what finds one, and `struct` what it is found as, after the folder's name.
    """

    kind: str
    rows: tuple[Row, ...]
    pick: str = "pick"
    struct: str = "Kernel"
    tile: int = TILE  # queries of a tile, as rows count them

    most = MOST  # what is open to the top

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields of a problem."""
        return tuple(
            Field(
                field.name,
                tuple((w.upper(), n) for n, w in enumerate(WORDS.get(field.name, ()), 1)),
            )
            for field in fields(Problem)
            if field.name not in _SHARED
        )

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """By what its rows choose: some row bounds each of these."""
        return tuple(
            bound
            for bound in BOUNDS
            if any(getattr(row, bound.name) != bound.open for row in self.rows)
        )

    @property
    def measured(self) -> tuple[str, ...]:
        """What of a call these are of."""
        return tuple(dict.fromkeys(bound.of for bound in self.bounds))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What the rows are for."""
        return tuple(dict.fromkeys(row.problem for row in self.rows))

    @property
    def said(self) -> tuple[str, ...]:
        """The same in words."""
        single = {row.problem: row.queries_to == 1 for row in self.rows}  # as the last one says
        return tuple(f"{one} of one query" if few else f"{one}" for one, few in single.items())

    def picked(self, problem: Problem, sizes: Sizes) -> Row | None:
        """The row that serves a problem at these sizes; None where it has none for the problem."""
        for row in self.rows:
            if row.problem == problem and row.serves(sizes, self.tile):
                return row
        return None

    @property
    def scale_rows(self) -> tuple[int, ...]:
        """How many rows may share a scale."""
        return SCALE_ROWS

    @property
    def narrow(self) -> bool:
        """Whether some rows are for few queries or tiles."""
        return bool({"queries", "tiles"} & {*self.measured})

    @property
    def refused(self) -> tuple[Row, ...]:
        """The rows whose calls no kernel of the folder serves."""
        return tuple(row for row in self.rows if row.kernel < 0)


def in_c(problem: Problem) -> dict[str, int]:
    """Return a problem's fields as the C struct has them."""
    said = vars(problem)
    return {
        name: WORDS[name].index(value) + 1 if name in WORDS and value else int(value or 0)
        for name, value in said.items()
        if name not in _SHARED
    }


def table_of(schedules: Sequence[Schedule]) -> Table:
    """Return the dispatcher's rows for schedules that compute a problem.

    Those of packed sequences, which take another struct, have a table of their own.
    """
    return Table(KIND, _by_problem([s for s in schedules if not Problem.of(s).varlen]))


def table_of_gradients(schedules: Sequence[Schedule]) -> Table:
    """Return the rows for schedules of the gradients of a problem's results.

    Nothing was measured that would choose among several of one problem: the first is taken. Those
    of packed sequences have a table of their own here too.
    """
    rows = _first([s for s in schedules if not Problem.of(s).varlen])
    return Table(BACKWARD, rows, f"pick_{BACKWARD}", f"{BACKWARD.capitalize()}Kernel")


def table_of_packed(schedules: Sequence[Schedule], form: str) -> Table:
    """Return the rows for schedules of packed sequences that all take one struct, of this form.

    They are those of `table_of`, or of `table_of_gradients`, and none has bounds: what a struct
    says of sizes is no matter of theirs.
    """
    gradients = PASSES[schedules[0].kind].gradients
    words = [BACKWARD] * gradients + form.split()
    name, struct = "_".join(words), "".join(word.capitalize() for word in words)
    rows = _first(schedules) if gradients else _by_problem(schedules)
    assert name in PACKED, name
    return Table(name, rows, f"pick_{name}", f"{struct}Kernel")


def _by_problem(schedules: Sequence[Schedule]) -> tuple[Row, ...]:
    """The rows of schedules that compute a problem, as dispatch tables have it."""
    by_problem: dict[Problem, dict[str, int]] = {}
    for place, schedule in enumerate(schedules):
        by_problem.setdefault(Problem.of(schedule), {})[schedule.slug] = place
    listed = (simplified([*_rows(problem, places)]) for problem, places in by_problem.items())
    return tuple(row for rows in listed for row in rows)


def _first(schedules: Sequence[Schedule]) -> tuple[Row, ...]:
    """A row for each problem whose gradients schedules compute: the first of these."""
    first: dict[Problem, int] = {}
    for place, schedule in enumerate(schedules):
        first.setdefault(problem_of(schedule), place)
    return tuple(Row(problem, place) for problem, place in first.items())


def _rows(problem: Problem, places: Mapping[str, int]) -> Iterator[Row]:
    """The rows of one problem, whose kernels have these places in the folder.

    What another kernel would serve falls to one that is there, the usual one or the first, rather
    not one for few queries or tiles. But ranges of very many keys do not: their kernels are there
    for accuracy, not for speed.
    """
    served = serving(problem, "")
    narrow = [row for row in served.narrow if row.slug in places]
    for row in narrow:
        end, queries, tiles = (_whole(most) for most in (row.most, row.queries, row.tiles))
        place = places[row.slug]
        yield Row(problem, place, row.least, end, queries_to=queries, tiles_to=tiles)
    few = {row.slug for row in narrow}
    usual = places[min(places, key=lambda slug: (_cuts_keys(slug), slug in few))]
    if not served.always and len(places) > 1:
        usual = places.get(candidates(problem).schedules[0].slug, usual)
    begin, rest = 0, []
    for most, slug in served.by_keys or ((math.inf, served.always),):
        end = _whole(most)
        if slug and slug in served.long:
            missing = "" if slug in places else slug
            yield Row(problem, places.get(slug, -1), begin, end, wanted=missing)
        else:
            rest.append(Row(problem, places.get(slug or "", usual), begin, end))
        begin = end + 1
    for elements, slug in served.few:
        if slug and slug in places:
            yield Row(problem, places[slug], rows_to=int(elements) // problem.head_dim)
    yield from _joined(rest)


def simplified(rows: Sequence[Row]) -> list[Row]:
    """The same choice by fewer rows of a problem: without any whose calls go on to its kernel."""
    found: list[Row] = []
    for row in reversed(rows):
        if not (found and row.kernel == found[-1].kernel and found[-1].includes(row)):
            found.append(row)
    return found[::-1]


def _cuts_keys(slug: str) -> bool:
    return "chunks" in from_slug(slug).settings()


def _whole(most: float) -> int:
    return MOST if most == math.inf else int(most)


def _joined(rows: Sequence[Row]) -> Iterator[Row]:
    """Rows by rising keys, those that meet and name one kernel as one."""
    last = rows[0] if rows else None
    for row in rows[1:]:
        assert last
        if row.kernel == last.kernel and row.keys_from == last.keys_to + 1:
            last = replace(last, keys_to=row.keys_to)
        else:
            yield last
            last = row
    if last:
        yield last
