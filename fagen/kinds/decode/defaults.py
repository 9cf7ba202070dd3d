"""A problem and its rows in, schedules that decode it out, the most promising first."""

import math
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, NamedTuple

from fagen.arch import SM90
from fagen.errors import OverBudget
from fagen.expr.words import PLAIN
from fagen.kind import Step
from fagen.kinds.decode.cost import first_tiles, whole_tiles
from fagen.kinds.decode.keys import Schedule
from fagen.kinds.decode.plan import plan
from fagen.kinds.decode.rules import MOST_BLOCKS, straddles
from fagen.vocab import CACHES

ROWS = (8, 16, 32, 64)  # of queries, that a kernel is made for
_SHORTEST = 64  # keys of a step
_NARROW = 64  # columns up to which a step has 128 keys: with 64 it would end too soon
_UNITS = 128  # of a sequence, at least: a few less than there are SMs
# Into how many splits keys are cut from so many KV heads on.
_CUTS = (*((_UNITS // num_splits, num_splits) for num_splits in (16, 32)), (0, 64))
_TIMED_IN_RUNS = 64, 96, 128, 192, 256  # head dims: others are dealt in turns
# output tiles of a thread block from which on runs were faster (benchmarks/notes/log.md)
_IN_RUNS = 1.5
_IN_RUNS_OF_16 = 0.95  # the same of 16 rows: one tile each is enough
_MOST_IN_RUNS = 16  # rows, up to which two thread blocks fit beside each other,
_MOST_IN_SHARED = 32  # and where splits are combined in shared memory
# Rows from which on tiles stay whole if there are so many: for nearly each SM, three thread blocks
# of four, or at most one for each SM; nearly each thread block.
_MANY_WHOLE, _ONE = 16, 0.96
_SOME_WHOLE, _SOME_OF_SLOTS, _OF_SMS = 8, 0.75, 0.7
# The same where that was measured for fewer rows: of few KV heads; at most one for each SM.
_TIMED_FOR_FEW_ROWS, _SOME_WHOLE_OF_FEW = (128,), 4
_FEW_WHOLE = {128: 2, 192: 4}
# The same on a card whose memory, of 4.8 TB/s and not 3.35, waits for whole tiles' steps where many
# splits are short ones: by head dim, for up to so many rows and less than so many KV heads, from so
# many tiles for each SM on.
_QUICK_MEMORY = "H200"
_FEW_OF_QUICK = {64: ((8, 4, 1.01),), 128: ((5, 4, 0.95), (8, 8, 0.8)), 192: ((5, 4, 0.8),)}
_SOME_OF_SLOTS_OF_QUICK = 0.79
_MOST_OF_SLOTS = 0.93
_LEAST_IN_TWO = 48  # rows above which two tiles of 32 are better than one of 64
_TIMED_IN_SHARED = (128,)  # head dims of which that was measured
# Columns beyond which 32 rows in runs spill some bytes, once a split, and so many were timed.
_WIDEST, _SPILL, _SPILLING_ROWS = 192, 56, 32
# Buffers of 8 rows where heads share lines of L2, which stay there for as long, and thread blocks
# have several units of work, or runs.
_SHARED_LINES_STAGES = 3
# Head dims of which a thread block reads two KV heads side by side, whose rows share lines of L2,
# where it has several units of work, and up to how many rows of each.
_PAIRED, _MOST_PAIRED = (96,), ROWS[0]
# Of those head dims an SM has so many thread blocks of so many rows where sequences are cut into so
# many splits, since two had one or two of these.
_THREE, _THREE_ROWS, _SHORT_SPLITS = 3, 16, 64
# Buffers and thread blocks to an SM that were faster than the usual ones (benchmarks/notes/log.md),
# by head dims, rows, splits and how these are dealt.
_RINGS: dict[tuple[int, int, int, int, str], dict[str, int]] = {
    **{(256, 256, 16, num_splits, "stream_k"): {"stages": 3} for _, num_splits in _CUTS},
    **{(256, 256, 8, num_splits, "stream_k"): {"stages": 5} for _, num_splits in _CUTS},
    (192, 128, 8, 32, "stream_k"): {"blocks": 1},
    (128, 128, 8, 64, "stream_k"): {"stages": 7, "blocks": 1},
}
# Rows where no sequence has two splits: two thread blocks share an SM, and one begins where the
# other ends.
_MOST_ALONE = 32
# Of a cache: up to so many keys one tile for each SM leaves memory waiting for thread blocks.
_FEW_KEYS = 2_048
MANY_KEYS = _FEW_KEYS + 1  # as many as any
_WIDE = 128  # columns beyond which an SM has one thread block, at most two else


def rows_for(rows: int) -> int:
    """Return the rows of the kernel for so many; of more than there are it takes several tiles."""
    return next((most for most in ROWS if rows <= most), ROWS[-1])


def num_splits_for(kv_heads: int) -> int:
    """Return into how many splits keys are cut, so that one long sequence is work for all."""
    return next(num_splits for least, num_splits in _CUTS if kv_heads >= least)


def has_one_split(head_dim: int, keys: int) -> bool:
    """Whether no sequence of up to so many keys has two splits."""
    return -(-keys // _block_n(head_dim)) <= MOST_BLOCKS


def counted_keys(keys: int) -> int:
    """Return how many keys a cache has, as far as that chooses its kernel."""
    exact = -(-keys // _SHORTEST) * _SHORTEST
    return exact if exact <= 2 * _SHORTEST * MOST_BLOCKS else min(max(keys, _FEW_KEYS), MANY_KEYS)


class Tile(NamedTuple):
    """What serves calls of some sizes: bits are the same with any but for `num_splits`.

    `several`: a thread block has several units of work; of `side_by_side` KV heads each. With
    `usual_ring` its buffers are as many as an SM has room for, whatever is faster elsewhere.
    """

    rows: int
    num_splits: int
    by: str
    several: bool
    side_by_side: int = 1
    usual_ring: bool = False


def tile_for(
    head_dim: int,
    rows: int,
    kv_heads: int,
    batch: int,
    *,
    alike: bool,
    keys: int = MANY_KEYS,
    card: str = "",
) -> Tile:
    """Return the rows of a call's kernel, into how many splits keys are cut, and who has which.

    Sequences that have one split each are units of work, whose outputs nobody combines. `keys` are
    what the cache has room for, as counted_keys(…), and `card` is the GPU's name.
    """
    num_splits, tile = num_splits_for(kv_heads), rows_for(rows)
    if has_one_split(head_dim, keys):
        return Tile(min(tile, _MOST_ALONE), num_splits, "round_robin", several=False)
    deal = partial(deal_for, head_dim, alike=alike, keys=keys, card=card)
    if head_dim in _PAIRED and rows <= _MOST_PAIRED and kv_heads % 2 == 0:
        pairs = kv_heads // 2
        by = deal(rows, pairs, batch, pairs=True)
        several = by == "stream_k" or kv_heads * batch * num_splits > _slots(head_dim)
        if several:
            return Tile(tile, num_splits, by, several=True, side_by_side=2)
    two = alike and rows > _LEAST_IN_TWO
    for fewer in dict.fromkeys((tile, min(tile, _MOST_IN_SHARED) if two else tile)):
        by = deal(rows, kv_heads, batch, tile=fewer)
        if by == "stream_k":
            # one thread block to an SM would go through two tiles
            behind = alike and -(-rows // fewer) * kv_heads * batch > SM90.sm_count
            short = head_dim == _WIDE and num_splits == _SHORT_SPLITS
            usual = behind and short and _QUICK_MEMORY in card.split()
            return Tile(fewer, num_splits, by, several=True, usual_ring=usual)
    units = -(-rows // tile) * kv_heads * batch * num_splits
    # a branch: torch.compile may leave sizes open, and a key can have no comparison of those
    several = True if units > _slots(head_dim) else False  # noqa: SIM210
    return Tile(tile, num_splits, "round_robin", several=several)


def deal_for(
    head_dim: int,
    rows: int,
    kv_heads: int,
    batch: int,
    *,
    tile: int = 0,
    alike: bool = False,
    keys: int = MANY_KEYS,
    pairs: bool = False,
    card: str = "",
) -> str:
    """Return how splits are dealt, by rows of queries to a KV head, in tiles of so many rows.

    `alike` are the sequences of a call without lengths: their tiles stay whole in runs, if they
    share out well. With `pairs` KV heads are counted by twos. Bits are the same either way.
    """
    tile = tile or rows_for(rows)
    of_sequence = -(-rows // tile) * kv_heads
    if alike and _in_registers(head_dim, tile):
        slots, tiles = SM90.sm_count * (1 if head_dim > _WIDEST else 2), of_sequence * batch
        # where registers spill nothing comes behind whole tiles
        turns = not pairs and (head_dim <= _WIDEST or tile <= _MOST_IN_RUNS)
        # a second tile of narrow heads takes as long as the first
        lone = head_dim <= _NARROW and tile == ROWS[0] and slots < tiles < _IN_RUNS * slots
        even = not pairs and straddles("fp16", head_dim)
        whole = whole_tiles(of_sequence, batch, slots, even=even)
        whole = whole or (turns and first_tiles(of_sequence, batch, slots))
        least = _FEW_WHOLE.get(head_dim, _SOME_WHOLE)
        few = least <= rows <= _MOST_IN_RUNS and keys > _FEW_KEYS and not even
        of_sms = _few_from(head_dim, rows, kv_heads, card)
        few = few and of_sms <= tiles / SM90.sm_count <= 1  # one for most SMs
        enough = _whole_from(head_dim, rows, kv_heads, slots, even=even, card=card)
        if whole and not lone and (few or tiles >= enough):
            return "stream_k"
    least = _runs_from(head_dim, tile)
    return "stream_k" if least and of_sequence * batch >= least else "round_robin"


def _whole_from(
    head_dim: int, rows: int, kv_heads: int, slots: int, *, even: bool, card: str
) -> float:
    """From how many tiles on they stay whole where sequences are alike.

    Partial outputs of few rows cost less than thread blocks without a tile, but not where few KV
    heads have many splits.
    """
    if _MANY_WHOLE <= rows <= _LEAST_IN_TWO:
        return _ONE * SM90.sm_count
    timed = head_dim in _TIMED_FOR_FEW_ROWS and kv_heads < _CUTS[1][0]
    least = _SOME_WHOLE_OF_FEW if timed else _SOME_WHOLE
    some = least <= rows < _MANY_WHOLE or even
    waits = head_dim == _WIDE and kv_heads < _CUTS[0][0] and _QUICK_MEMORY in card.split()
    some_of_slots = _SOME_OF_SLOTS_OF_QUICK if waits else _SOME_OF_SLOTS
    return (some_of_slots if some else _MOST_OF_SLOTS) * slots


def _few_from(head_dim: int, rows: int, kv_heads: int, card: str) -> float:
    """From how many for each SM on tiles of few rows stay whole, where no SM has two."""
    if _QUICK_MEMORY in card.split():
        for most_rows, below, of_sms in _FEW_OF_QUICK.get(head_dim, ()):
            if rows <= most_rows and kv_heads < below:
                return of_sms
    return _OF_SMS


def _in_registers(head_dim: int, tile: int) -> bool:
    """Whether runs of tiles that stay whole were faster, whose splits are combined in registers.

    Not where sums take the registers of a second thread block, nor where nobody measured it.
    """
    most = _MOST_IN_SHARED if head_dim in _TIMED_IN_SHARED else _MOST_IN_RUNS
    return head_dim in _TIMED_IN_RUNS and (head_dim > _WIDEST or tile <= most)


def _runs_from(head_dim: int, tile: int) -> int:
    """From how many tiles of so many rows on splits are dealt in runs; 0: never.

    In runs where most tiles are one thread block's, and that was faster: not for eight rows of wide
    heads, whose partial outputs are small beside keys.
    """
    if not _in_registers(head_dim, tile) or (head_dim > _WIDE and tile == ROWS[0]):
        return 0
    per_slot = _IN_RUNS_OF_16 if tile == 16 and head_dim > _NARROW else _IN_RUNS
    return math.ceil(per_slot * _slots(head_dim))


def _block_n(columns: int) -> int:
    return 128 if columns <= _NARROW else 64


def _slots(head_dim: int) -> int:
    """Thread blocks that a GPU has place for."""
    return SM90.sm_count * (1 if head_dim > _WIDE else 2)


def derived(
    *,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    mask: str,
    rows: int,
    num_splits: int,
    by: str = "round_robin",
    several: bool = False,
    side_by_side: int = 1,
    usual_ring: bool = False,
    maximum: str = "lazy",
    **variant: str,
) -> tuple[Schedule, ...]:
    """Return schedules for so many rows of queries of a KV head; each needs less than the last.

    `variant` is what they say of scores. All fit an SM. Where splits cannot be dealt `by` runs, for
    want of registers or with a unified maximum, they are dealt in turns, `several` to a thread
    block. Raises ScheduleError where no kernel computes such a problem.
    """
    most = rows_for(rows)
    keys = {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v, "mask": mask}
    keys |= variant
    if maximum == "fixed":
        keys |= {"maximum": maximum, "speculate": True}
        by, side_by_side = "round_robin", 1
    if head_dim_v != head_dim or variant.get("cache", CACHES[0]) != CACHES[0]:
        side_by_side = 1
    columns = max(head_dim, head_dim_v)
    block_n, widest = _block_n(columns), columns > _WIDEST
    short = head_dim == head_dim_v in _PAIRED and num_splits == _SHORT_SPLITS and several
    # with a score any number may
    spills = {} if variant.get("score", PLAIN) != PLAIN else {"max_spill_bytes": _SPILL}
    three = {"blocks": _THREE} if short and maximum == "lazy" else {}
    rings = {} if usual_ring else _RINGS
    # a pair's buffers are as many
    shallow = {"stages": _SHARED_LINES_STAGES} if straddles(dtype, head_dim, head_dim_v) else {}
    return tuple(
        _fitting(
            Schedule.make(
                **keys,
                rows=tile,
                block_n=block_n,
                num_splits=num_splits,
                by=deal,
                kv_heads=heads,
                **(shallow if tile == ROWS[0] and (several or deal == "stream_k") else {}),
                **rings.get((head_dim, head_dim_v, tile, num_splits, deal), {}),
                **(three if tile == _THREE_ROWS and deal == "round_robin" else {}),
                **(spills if widest and tile == _SPILLING_ROWS and deal == "stream_k" else {}),
            )
            for heads in dict.fromkeys((side_by_side, 1))
            for tile in reversed([tile for tile in ROWS if tile <= most])
            for deal in dict.fromkeys((by, "round_robin"))
        )
    )


def steps(schedule: Schedule) -> Iterator[Step]:
    """Give the schedules that serve the problem of one, by what calls they serve."""
    values = schedule.values()
    keys = "dtype", "head_dim", "head_dim_v", "mask", "score", "sink", "cache"
    fields = {key: values[key] for key in keys if values.get(key)}  # without sinks it is no key
    head_dim = fields["head_dim"]
    shared_lines = straddles(fields["dtype"], head_dim, fields["head_dim_v"])
    for rows in ROWS:
        paired = 2 if head_dim in _PAIRED and rows <= _MOST_PAIRED else 1
        for kv_heads, num_splits in (*_CUTS[:-1], *(((2, 64),) if paired > 1 else ()), _CUTS[-1]):
            dealt, side = {}, paired if kv_heads else 1
            if runs_from := side * _runs_from(head_dim, rows):
                dealt[runs_from] = Tile(
                    rows, num_splits, "stream_k", several=True, side_by_side=side
                )
            if shared_lines and rows in (ROWS[0], _THREE_ROWS):
                several_from = _slots(head_dim) // num_splits + 1
                dealt[several_from] = Tile(
                    rows, num_splits, "round_robin", several=True, side_by_side=side
                )
            dealt[0] = Tile(rows, num_splits, "round_robin", several=False)
            for tiles, tile in dealt.items():
                first = partial(_first, **fields, **tile._asdict())
                yield Step(rows, kv_heads, tiles, num_splits, first)


@cache
def _first(**keys: Any) -> Schedule:
    return derived(**keys)[0]


def _fitting(schedules: Iterator[Schedule]) -> Iterator[Schedule]:
    for schedule in schedules:
        try:
            plan(schedule)
        except OverBudget:
            continue
        yield schedule
