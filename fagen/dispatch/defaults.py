"""A problem in e4m3 in, a schedule of usual tiles out, where no measurement says better."""

from functools import cache
from itertools import product

from fagen.errors import OverBudget, ScheduleError
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import plan
from fagen.kinds.forward.rules import possible_outputs
from fagen.vocab import DTYPES

FP8 = next(row.name for row in DTYPES.values() if row.fp8)
BLOCK_M = 128  # two warpgroups: three leave a thread too few registers at wide head dims
BLOCK_N = (128, 96, 64, 32)


@cache
def usual_schedule(
    head_dim: int, head_dim_v: int, mask: str, v_layout: str, scale_rows: int
) -> Schedule:
    """Return the schedule with the most keys per step that fits; scale_rows is 0 for no blocks.

    Raises ScheduleError where none fits.
    """
    # With a buffer of its own O is not in the way of the next V.
    for block_n, output in product(BLOCK_N, possible_outputs(head_dim_v, FP8)):
        schedule = Schedule.make(
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=FP8,
            mask=mask,
            block_m=BLOCK_M,
            block_n=block_n,
            output=output,
            v_layout=v_layout,
            **({"scales": "block", "scale_rows": scale_rows} if scale_rows else {}),
        )
        try:
            plan(schedule)
        except OverBudget:
            continue
        return schedule
    raise ScheduleError(
        f"no usual tile fits a multiprocessor at head dims {head_dim} and {head_dim_v}"
    )
