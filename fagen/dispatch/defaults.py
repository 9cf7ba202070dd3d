"""A problem in e4m3 in, a schedule of usual tiles out, where no measurement says better."""

from functools import cache
from itertools import product

from fagen.errors import OverBudget, ScheduleError
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import plan
from fagen.kinds.forward.rules import possible_outputs
from fagen.problem import Problem

BLOCK_M = 128  # two warpgroups: three leave a thread too few registers at wide head dims
BLOCK_N = (128, 96, 64, 32)


@cache
def usual_schedule(problem: Problem) -> Schedule:
    """Return the schedule with the most keys per step that fits; O is in the dtype's usual type.

    Raises ScheduleError where none fits.
    """
    # With a buffer of its own O is not in the way of the next V.
    for block_n, output in product(BLOCK_N, possible_outputs(problem.head_dim_v, problem.dtype)):
        schedule = Schedule.make(
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            dtype=problem.dtype,
            mask=problem.mask,
            block_m=BLOCK_M,
            block_n=block_n,
            output=output,
            v_layout=problem.v_layout,
            **({"scales": "block", "scale_rows": problem.scale_rows} if problem.scale_rows else {}),
        )
        try:
            plan(schedule)
        except OverBudget:
            continue
        return schedule
    raise ScheduleError(
        "no usual tile fits a multiprocessor at head dims "
        f"{problem.head_dim} and {problem.head_dim_v}"
    )
