"""A problem in, schedules for it out, most promising first, where no measurement says better."""

import math
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

from fagen.arch import SM90
from fagen.errors import ScheduleError
from fagen.kinds.forward.cost import predictor
from fagen.kinds.forward.formulae import BUDGET
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.rules import possible_outputs, rules
from fagen.problem import Problem, standard_sizes
from fagen.vocab import DTYPES

SEQLENS = (1_024, 4_096, 16_384)  # at which a prediction counts
# What is tried in 16 bits.  Where the prediction knows no difference the earlier goes first.
BLOCK_M = (128, 192, 256, 64)
BLOCK_N = range(16, 257, 16)
STAGES = (2, 3, 4)
Q_STAGES = (2, 1)

# In e4m3: two warpgroups, since three leave a thread too few registers at wide head dims.
FP8_BLOCK_M = 128
FP8_BLOCK_N = (128, 96, 64, 32)
# Each block's PV goes to fp32 sums, so many columns at a time: narrower ones keep tensor cores less
# busy, and take fewer registers.
FP8_COLUMNS = (64, 32)


@cache
def derived_schedules(problem: Problem) -> tuple[Schedule, ...]:
    """Return schedules that compute a problem, most promising first; O is in the usual type.

    All fit, but registers are a model: a compiler may spill.  So each needs fewer registers than
    those before it, of those that a thread has, and the last far fewer.
    Raises ScheduleError, which says why, where no kernel computes such a problem.
    """
    fp8 = DTYPES[problem.dtype].fp8
    candidates: list[Schedule] = []
    most = -1
    for schedule in _in_fp8(problem) if fp8 else _in_16_bits(problem):
        registers = BUDGET.of(schedule).registers
        if (free := registers.limit - registers.total) > most:
            candidates.append(schedule)
            most = free
    if not candidates:
        raise ScheduleError(
            f"no usual tile fits an SM at head dims {problem.head_dim} and {problem.head_dim_v}"
        )
    return tuple(candidates)


def _in_16_bits(problem: Problem) -> list[Schedule]:
    """All tiles that fit, each with the loads that are predicted best, by predicted time."""
    named = ("dtype", "head_dim", "head_dim_v", "mask", "lengths")
    keys = {key: getattr(problem, key) for key in named} | problem.variant
    base = Schedule.make(**keys, block_m=64, block_n=16).values()  # refuses what none computes
    predict = predictor([standard_sizes(problem.head_dim, seqlen) for seqlen in SEQLENS])
    outputs = possible_outputs(problem.head_dim_v, problem.dtype)
    best: dict[tuple[int, int], tuple[float, dict[str, Any]]] = {}
    for m, n, stages, q_stages, output in product(BLOCK_M, BLOCK_N, STAGES, Q_STAGES, outputs):
        tile = {"block_m": m, "block_n": n}
        chosen = {**keys, **tile, "stages": stages, "q_stages": q_stages, "output": output}
        chosen["pack_gqa"] = problem.varlen  # as the committed ones of varlen sequences
        values = base | chosen
        for key, derive in Schedule.keys.derived.items():
            if key not in chosen:
                values[key] = derive(values)
        if next(rules(values), None) or next(BUDGET.sums(values), None):
            continue
        seconds = math.prod(predict(values))
        if (m, n) not in best or seconds < best[m, n][0]:
            best[m, n] = seconds, chosen
    in_order = sorted(best.values(), key=lambda timed: timed[0])
    return [Schedule.make(**chosen) for _, chosen in in_order]


def _in_fp8(problem: Problem) -> Iterator[Schedule]:
    """The most keys in a step first."""
    # With a buffer of its own O is not in the way of the next V.
    outputs = possible_outputs(problem.head_dim_v, problem.dtype)
    columns = tuple(dict.fromkeys(_part(problem, most) for most in FP8_COLUMNS))
    for block_n, part, output in product(FP8_BLOCK_N, columns, outputs):
        schedule = Schedule.make(
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            dtype=problem.dtype,
            mask=problem.mask,
            block_m=FP8_BLOCK_M,
            block_n=block_n,
            output=output,
            v_layout=problem.v_layout,
            lengths=problem.lengths,
            promote=1,
            promote_columns=part,
            **({"scales": "block", "scale_rows": problem.scale_rows} if problem.scale_rows else {}),
            **problem.variant,
        )
        if next(BUDGET.sums(schedule.values()), None) is None:
            yield schedule


def _part(problem: Problem, most: int) -> int:
    """Return the widest part of PV, of so many columns at most; 0 where that is all of it."""
    columns = DTYPES[problem.dtype].filled_up(problem.head_dim_v)
    widths = range(SM90.wgmma_n_step, most + 1, SM90.wgmma_n_step)
    part = max(width for width in widths if columns % width == 0)
    return part if part < columns else 0
