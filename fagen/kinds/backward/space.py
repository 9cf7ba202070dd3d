"""What a search of the backward pass tries, sums up against an SM, and predicts."""

from fagen.kinds.backward.cost import predictor
from fagen.kinds.backward.formulae import BUDGET
from fagen.kinds.backward.keys import Schedule
from fagen.kinds.backward.rules import DQ_BY, PARTITIONS
from fagen.kinds.space import Space

SPACE = Space(
    defaults={
        "block_m": (64, 128),
        "block_n": (64, 128, 192),
        "stages": (1, 2, 3),
        "do_stages": (1, 2, 3),
        "ds_stages": (1, 2),
        "partition": PARTITIONS,
        "dq_by": DQ_BY,
        "dq_slices": (1, 2),
        "intra_warpgroup": (False, True),
    },
    budget=BUDGET,
    # all that a schedule says: a key that is new here is summed up too
    summed_keys=tuple(Schedule.keys.sections),
    predictor=predictor,
    problem_keys=("dtype", "head_dim", "head_dim_v", "mask", "deterministic", "lengths"),
)
