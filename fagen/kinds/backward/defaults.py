"""A problem in, schedules that compute its gradients out, the fastest first."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from fagen.errors import OverBudget, ScheduleError
from fagen.expr.words import PLAIN
from fagen.kinds.backward.keys import Schedule
from fagen.kinds.backward.plan import plan
from fagen.problem import Problem

TILES = ((128, 128), (64, 128), (64, 64))  # rows by keys, by how fast they are where they fit
# Masks take a few registers more than plain ones. So many bytes of spills, which are of what a tile
# needs once, cost less than a smaller tile; up to so many columns exponentials that stand under dP
# take fewer.
_SPILLS, _UNDER_DP = 128, 64


def derived(problem: Problem) -> Iterator[Schedule]:
    """Yield the schedules that fit an SM; none where no kernel has such gradients.

    Of each tile the one that issues S a step ahead goes first; only by gradients there is one. They
    have two buffers of dS, but where none of these fits beside LSEs of scores.
    """
    found = list(_fitting(problem, 2))
    if not found and problem.score != PLAIN:
        found = list(_fitting(problem, 1))
    yield from found


def _fitting(problem: Problem, ds_stages: int) -> Iterator[Schedule]:
    masked: dict[str, Any] = {}
    if problem.mask not in ("full", "causal"):
        under_dp = max(problem.head_dim, problem.head_dim_v) <= _UNDER_DP
        masked = {"under_dp": under_dp}
        if problem.score == PLAIN:  # others may spill any number
            masked["max_spill_bytes"] = _SPILLS
    for (block_m, block_n), ahead in product(TILES, (True, False)):
        try:
            schedule = Schedule.make(
                dtype=problem.dtype,
                head_dim=problem.head_dim,
                head_dim_v=problem.head_dim_v,
                mask=problem.mask,
                deterministic=problem.deterministic,
                lengths=problem.lengths,
                score=problem.score,
                sink=problem.sink,
                block_m=block_m,
                block_n=block_n,
                intra_warpgroup=ahead,
                ds_stages=ds_stages,
                **masked,
            )
            plan(schedule)
        except (ScheduleError, OverBudget):
            continue
        yield schedule
