"""Rows: kernels for calls within bounds, in one list of which the first that fits serves a call.

A dispatch table's rows, what `select` makes of them, and the dispatchers of vendored folders are
such lists.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

from fagen.arch import SM90
from fagen.combining import Filling
from fagen.problem import Problem, Sizes
from fagen.registry import from_slug
from fagen.vocab import MASKS, MOST_PARTS, ORDERS

MOST = 2**63 - 1  # of any size: what TOML promises to read back, and torch to count
TILE = 128  # queries of a tile of attention, as rows count them
GROUP_TILE = 64  # the same of a KV head's group of heads, as decoding has them

# Keys that torch.compile or torch.export leaves open count as so many, since a comparison would
# bound them. Rows of a table for more keys are for accuracy: sums over so many need fp32 totals.
OPEN_KEYS = 131_072


@dataclass(frozen=True)
class Bound:
    """A field of rows: the least, or else the most, that something of a call may be."""

    name: str
    measure: str
    least: bool = False
    words: str = ""  # what a row of a table counts by it

    @property
    def open(self) -> int:
        """What a row has that does not bound it."""
        return 0 if self.least else MOST


# What tells most calls apart goes first. Query rows are those of a call, and so are tiles of
# queries of a head. A group is the queries of a KV head's heads, and has tiles too.
BOUNDS = (
    Bound("queries_to", "queries", words="queries"),
    Bound("group_to", "group"),
    Bound("kv_heads_from", "kv_heads", least=True),
    Bound("group_tiles_from", "group_tiles", least=True),
    Bound("tiles_to", "tiles", words=f"tiles of {TILE} queries"),
    Bound("rows_to", "query_rows", words="query rows in all"),
    Bound("keys_from", "keys", least=True),
    Bound("keys_to", "keys"),
)
MEASURES = tuple(dict.fromkeys(bound.measure for bound in BOUNDS))
Limits = tuple[tuple[int, bool, int], ...]  # a measure's place, whether it is the least, how much
# What a kernel's tiles cost: whether a row sees keys as far as its place says, whether heads of a
# group share tiles, rows of a tile, how many tiles run at once, keys of a step, clocks of a step
# and of a tile beside its steps; of how many splits the keys may be, and clocks of combining the
# rows of a tile, or without splits of what is done before to a KV head's V of a step; by what
# costs of a unit and of a partial output a launcher chooses how many splits; of how many parts a
# tile of the last round may be, each of which takes a step more and one to be added; () where no
# row says.
Tiles = tuple[int, ...]
# Where tiles are drawn, a call ends later than its mean SM by a mean tile over that.
DRAWN_LAST = 12
COMBINING = 10_000  # clocks, of a launch that combines splits
# A kernel that transposes V before all tiles takes a launch, and an SM a clock for so many bytes.
TRANSPOSED_LAUNCH, TRANSPOSED_BYTES = 2_000, 4
MOST_SHARED = 100_000  # queries, up to which tiles that heads share are counted as such


@dataclass(frozen=True)
class Row:
    """For calls within these bounds, on this card, the kernel is `slug`, or with "" the usual one.

    Rows for few queries or tiles go before all others, those for the fewest first: their kernels
    share the keys of a tile among SMs. Rows for few query rows go before those by keys alone, since
    large tiles of few rows leave SMs idle; but not before rows from more than OPEN_KEYS keys on,
    which are for accuracy. One of varlen sequences has no bounds: the host knows no length, and
    what it does know of a call would let a sequence's bits depend on the others. But one of their
    gradients may be for some keys, those of a sequence in the mean: of dQ the order of additions is
    open anyway. One of `group_rows` is for decoding with so many rows of queries to a KV head,
    rounded up.

    Several rows for the same calls say what their tiles cost: `step_clocks` each block of keys,
    `tile_clocks` beside those. Of these the kernel serves whose rounds of tiles take the fewest
    clocks, which the ends of tiles and of the last round decide. Where a kernel's splits of the
    keys fill the SMs it says `combine_clocks` too, of a tile's rows. Sizes that a trace leaves open
    are served by the last.

    `by` says what measured that, as a path from fagen's root or in words; `where` is its line in a
    table. Which pass it is for, the slug says by how it begins. A kernel of e4m3 stands for its
    like with O in another type, which has no part in its speed.
    """

    card: str
    slug: str
    keys_from: int = 0
    keys_to: int = MOST
    rows_to: int = MOST
    queries_to: int = MOST
    tiles_to: int = MOST
    group_rows: int = 0  # 0 where it is not for decoding
    group_to: int = MOST
    kv_heads_from: int = 0
    group_tiles_from: int = 0
    step_clocks: int = 0
    tile_clocks: int = 0
    combine_clocks: int = 0
    for_accuracy: bool = field(default=False, compare=False)  # from very many keys on
    by: str = field(default="", compare=False)
    where: str = field(default="", compare=False)  # file:line

    @property
    def problem(self) -> Problem:
        """What its kernel computes, O's type left open.  Raises ScheduleError for no slug."""
        return _problem(self.slug, own=bool(self.group_rows))

    @property
    def for_few_tiles(self) -> bool:
        """Whether it is for few queries or tiles."""
        return min(self.queries_to, self.tiles_to) != MOST

    @property
    def for_few_rows(self) -> bool:
        """Whether it is for few query rows."""
        return self.rows_to != MOST

    @property
    def limits(self) -> Limits:
        """Its bounds, as first_fit reads them."""
        values = ((bound, getattr(self, bound.name)) for bound in BOUNDS)
        return tuple(
            (MEASURES.index(bound.measure), bound.least, value)
            for bound, value in values
            if value != bound.open
        )

    @property
    def tiles(self) -> Tiles:
        """What its tiles cost, as first_fit reads it."""
        if not self.step_clocks:
            return ()
        values = from_slug(self.slug).values()
        # thread blocks of a cluster have neighbouring tiles, and end together
        rows, at_once = values["block_m"] * values["cluster"], SM90.sm_count // values["cluster"]
        ways = int(MASKS[values["mask"]].by_row), int(values["pack_gqa"])
        step = values["block_n"], self.step_clocks, self.tile_clocks
        more = self.combine_clocks
        if values.get("transposes") == "kernel":
            more = values["block_n"] * values["head_dim_v"] // TRANSPOSED_BYTES
        filling = Filling.of(values["head_dim_v"]) if values["num_splits"] > 1 else Filling(0, 0)
        costs = filling.unit_cost, filling.combine_cost
        parts = MOST_PARTS if ORDERS[values["order"]].parts else 0
        return *ways, rows, at_once, *step, values["num_splits"], more, *costs, parts

    def includes(self, other: "Row") -> bool:
        """Whether it is for all calls that another is for."""
        return all(
            getattr(other, bound.name) >= getattr(self, bound.name)
            if bound.least
            else getattr(other, bound.name) <= getattr(self, bound.name)
            for bound in BOUNDS
        )


@cache
def _problem(slug: str, *, own: bool) -> Problem:
    """What a slug's schedule computes, the type of O left open.

    With `own` its kind is the schedule's, also where that computes a pass in its own way.
    Raises ScheduleError where that is no attention.
    """
    schedule = from_slug(slug)
    return replace((Problem.searched if own else Problem.of)(schedule), out_dtype=None)


Choice = TypeVar("Choice")


def measures(batch: Any, heads: Any, kv_heads: Any, queries: Any, keys: Any) -> tuple[Any, ...]:
    """Return what rows bound, in the order of MEASURES, then heads and KV heads, of a call."""
    group = queries * (heads // kv_heads) if (kv_heads == 0) is False else 0
    group_tiles = batch * kv_heads * ((group + GROUP_TILE - 1) // GROUP_TILE)
    tiles, query_rows = batch * heads * ((queries + TILE - 1) // TILE), batch * heads * queries
    return (
        queries,
        group,
        kv_heads,
        group_tiles,
        tiles,
        query_rows,
        keys,
        batch * heads,
        batch * kv_heads,
    )


def measures_of(sizes: Sizes) -> tuple[Any, ...]:
    """Return the same of sizes."""
    s = sizes
    return measures(s.batch, s.heads, s.kv_heads, s.seqlen_q, s.seqlen_k)


def clocks(tiles: Tiles, heads: int, kv_heads: int, queries: int, keys: int) -> int:
    """Return what a call costs in such tiles, of so many heads and KV heads in all.

    Tiles that see all keys take as long, and every round as the first, but that those of the last
    one may be in parts. Under a mask by row they are drawn, longest first, so that SMs end together
    but for the last; where few differ in length, someone has as many as there are rounds, each as
    long as the first of the last round. Heads that share tiles are as one of more queries. What is
    done to V before is dealt to all SMs.
    """
    by_row, shared, rows, at_once, step_keys, step, tile, splits, before, *_, parts = tiles
    if splits > 1:
        return _clocks_of_splits(tiles, heads, queries, keys)
    if before:
        before = TRANSPOSED_LAUNCH + kv_heads * -(-keys // step_keys) * before // at_once
    # many queries have few empty rows, and no more heads share tiles
    shared = shared and 0 < kv_heads <= heads and queries <= MOST_SHARED
    group = min(heads // kv_heads, GROUP_TILE) if shared else 1
    if -(-queries * group // rows) >= group * -(-queries // rows):  # no tile is spared
        group = 1
    heads //= group
    longest = -(-keys // step_keys) * step + tile
    if not by_row:
        whole, last = divmod(heads * -(-queries * group // rows), at_once)
        of_last = longest if last else 0
        for count in range(2, min(parts, 2 * at_once // last if last else 0) + 1):
            of_part = (-(-keys // (step_keys * count)) + 1) * step + tile
            of_last = min(of_last, -(-last * count // at_once) * of_part + count * step)
        return before + whole * longest + of_last
    seeing = min(queries, keys)
    count = max(1, -(-seeing * group // rows))
    steps = (count - 1) * -(-(keys - seeing) // step_keys)  # that all of them have
    span = step_keys * group  # rows that see a step more than those before them
    steps += -(-rows * (count * (count - 1) // 2) // span) + -(-keys // step_keys)
    steps += (count - 1) * max(0, span - rows) // (2 * span)  # where a step ends within a tile
    of_head = steps * step + count * tile
    mean = heads * of_head // at_once + of_head // (DRAWN_LAST * count)
    rounds = max(0, heads * count - 1) // at_once  # before the last
    place = rounds * at_once // max(1, heads)  # in a head, from the end, of the last one's first
    seen = keys - seeing + min(seeing, (count - place) * rows // group)
    return before + max(longest, mean, (rounds + 1) * (-(-seen // step_keys) * step + tile))


def _clocks_of_splits(tiles: Tiles, heads: int, queries: int, keys: int) -> int:
    """The same of tiles of splits, as many of the keys as the launcher takes; they are combined.

    A tile sees a split where its last row does. Of splits all keys but the last one's are seen in
    steps of the same number.
    """
    by_row, _, rows, at_once, step_keys, step, tile, most, combine, *costs, _ = tiles
    filling, taken = Filling(*costs), 0
    blocks, count = -(-keys // step_keys), -(-queries // rows)
    if heads * count > at_once:  # tiles by themselves fill SMs, and partial outputs are large
        return MOST
    least: int | None = None
    for splits in range(min(most, max(1, -(-keys // Filling.most_keys))), most + 1):
        of_split, units = max(1, -(-blocks // splits)), 0
        for first in range(0, blocks, of_split):
            unseen = (first * step_keys - keys + queries) // rows if by_row else 0
            units += heads * (count - min(count, max(0, unseen)))
        cost = filling.cost(of_split, units)
        if least is None or cost < least:
            least, taken = cost, -(-units // at_once) * (of_split * step + tile)
    return COMBINING + taken + heads * queries * combine // (rows * at_once)


def first_fit(
    rows: Iterable[tuple[Choice, Limits, Tiles]],
    of_call: Sequence[Any],
    surely: Callable[[Any], bool] = bool,
) -> Choice | None:
    """Return what the first row has within whose limits a call is.

    Where that one says what its tiles cost, it is the cheapest of those that say so. A comparison
    of a size that is traced is neither true nor false; `surely` tells whether it always holds. A
    size that may be either counts as many, keys as OPEN_KEYS; and nothing tells then what is the
    cheapest: the last of them is taken, as for the most.
    """
    cheapest: Choice | None = None
    least: int | None = None
    of_tiles = [of_call[place] for place in (_HEADS, _HEADS + 1, _QUERIES, _KEYS)]
    known = all((size <= MOST) is True for size in of_tiles)  # of open ones it is not even False
    for choice, limits, tiles in rows:
        for place, at_least, limit in limits:
            size = of_call[place]
            fits = size >= limit if at_least else size <= limit
            if fits is True:
                continue
            if fits is False or not (surely(fits) or _may_be(size, place, at_least, limit, surely)):
                break
        else:
            if not tiles:
                return choice if least is None else cheapest
            cost = clocks(tiles, *of_tiles) if known else 0
            if least is None or not known or cost < least:
                cheapest, least = choice, cost
    return cheapest


_QUERIES, _HEADS = MEASURES.index("queries"), len(MEASURES)
_KEYS = MEASURES.index("keys")


def _may_be(size: Any, place: int, least: bool, limit: int, surely: Callable[[Any], bool]) -> bool:
    """Whether what an open size counts as is within a limit, beyond which it need not be."""
    assumed = OPEN_KEYS if place == _KEYS else MOST
    if least:
        return assumed >= limit and not surely(size < limit)
    return assumed <= limit and not surely(size > limit)


def without_repeats(rows: Sequence[Row]) -> list[Row]:
    """The same choice by fewer rows: without any whose calls go on to its kernel."""
    kept: list[Row] = []
    for row in reversed(rows):
        last = kept[-1] if kept else None
        # without clocks it would be no choice of several any more
        if not (last and (row.slug, row.tiles) == (last.slug, last.tiles) and last.includes(row)):
            kept.append(row)
    return kept[::-1]
