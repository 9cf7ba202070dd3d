"""A problem and its rows in, schedules that decode it out, the most promising first."""

from collections.abc import Iterator

from fagen.arch import SM90
from fagen.errors import OverBudget
from fagen.kinds.decode.keys import Schedule
from fagen.kinds.decode.plan import plan

ROWS = (8, 16, 32, 64)  # of queries, that a kernel is made for
_NARROW = 64  # columns up to which a step has 128 keys: with 64 it would end too soon
_UNITS = 128  # of a sequence, at least: a few less than there are multiprocessors
_CHUNKS = (16, 32, 64)
# output tiles from which on a thread block has whole ones, or nearly, and most are written once
_IN_RUNS = 2 * SM90.sm_count


def rows_for(rows: int) -> int:
    """Return the rows of the kernel for so many; of more than there are it takes several tiles."""
    return next((most for most in ROWS if rows <= most), ROWS[-1])


def chunks_for(kv_heads: int) -> int:
    """Return into how many chunks keys are cut, so that one long sequence is work for all."""
    return next((chunks for chunks in _CHUNKS if chunks * kv_heads >= _UNITS), _CHUNKS[-1])


def deal_for(rows: int, kv_heads: int, batch: int) -> str:
    """Return how chunks are dealt, by rows of queries to a KV head: bits are the same."""
    tiles = -(-rows // rows_for(rows)) * kv_heads * batch
    return "run" if tiles >= _IN_RUNS else "turn"


def derived(
    *,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    mask: str,
    rows: int,
    chunks: int,
    by: str = "turn",
    maximum: str = "lazy",
) -> tuple[Schedule, ...]:
    """Return schedules for so many rows of queries of a KV head; each needs less than the last.

    All fit a multiprocessor. Where chunks cannot be dealt `by` runs, for want of registers or with
    a unified maximum, they are dealt in turns. Raises ScheduleError where no kernel computes such a
    problem.
    """
    most = rows_for(rows)
    keys = {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v, "mask": mask}
    if maximum == "unified":
        keys |= {"maximum": maximum, "speculate": True}
        by = "turn"
    block_n = 128 if max(head_dim, head_dim_v) <= _NARROW else 64
    return tuple(
        _fitting(
            Schedule.make(**keys, rows=tile, block_n=block_n, chunks=chunks, by=deal)
            for tile in reversed([tile for tile in ROWS if tile <= most])
            for deal in dict.fromkeys((by, "turn"))
        )
    )


def _fitting(schedules: Iterator[Schedule]) -> Iterator[Schedule]:
    for schedule in schedules:
        try:
            plan(schedule)
        except OverBudget:
            continue
        yield schedule
