"""A problem and its rows in, schedules that decode it out, the most promising first."""

from collections.abc import Iterator

from fagen.errors import OverBudget
from fagen.kinds.decode.keys import Schedule
from fagen.kinds.decode.plan import plan

ROWS = (8, 16, 32, 64)  # of queries, that a kernel is made for
_NARROW = 64  # columns up to which a step has 128 keys: with 64 it would end too soon
_UNITS = 128  # of a sequence, at least: a few less than there are multiprocessors
_CHUNKS = (16, 32, 64)


def rows_for(rows: int) -> int:
    """Return the rows of the kernel for so many; of more than there are it takes several tiles."""
    return next((most for most in ROWS if rows <= most), ROWS[-1])


def chunks_for(kv_heads: int) -> int:
    """Return into how many chunks keys are cut, so that one long sequence is work for all."""
    return next((chunks for chunks in _CHUNKS if chunks * kv_heads >= _UNITS), _CHUNKS[-1])


def derived(
    *, dtype: str, head_dim: int, head_dim_v: int, mask: str, rows: int, chunks: int
) -> tuple[Schedule, ...]:
    """Return schedules for so many rows of queries of a KV head; each needs less than the last.

    All fit a multiprocessor. Raises ScheduleError where no kernel computes such a problem.
    """
    most = rows_for(rows)
    keys = {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v, "mask": mask}
    block_n = 128 if max(head_dim, head_dim_v) <= _NARROW else 64
    return tuple(
        _fitting(
            Schedule.make(**keys, rows=tile, block_n=block_n, chunks=chunks)
            for tile in reversed([tile for tile in ROWS if tile <= most])
        )
    )


def _fitting(schedules: Iterator[Schedule]) -> Iterator[Schedule]:
    for schedule in schedules:
        try:
            plan(schedule)
        except OverBudget:
            continue
        yield schedule
