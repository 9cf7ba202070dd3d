"""What a search of attention's schedules tries, sums up against an SM, and predicts."""

from fagen.kinds.forward.cost import predictor
from fagen.kinds.forward.formulae import BUDGET, SUMMED
from fagen.kinds.space import Space
from fagen.vocab import OUTPUTS

SPACE = Space(
    defaults={
        "block_m": (64, 128, 192, 256),
        "block_n": tuple(range(16, 257, 16)),
        "stages": (2, 3),
        "q_stages": (1, 2),
        "output": OUTPUTS,
        "producer": ("warp", "none"),
        "inter_warpgroup": (True, False),
        "intra_warpgroup": (True, False),
        "cluster": (1, 2),
    },
    budget=BUDGET,
    summed_keys=SUMMED,
    predictor=predictor,
    problem_keys=("dtype", "head_dim", "head_dim_v", "mask", "lengths", "score", "sink"),
)
