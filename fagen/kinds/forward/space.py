"""What a search of attention's schedules tries, sums up against an SM, and predicts."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fagen.kinds.forward.cost import predictor
from fagen.kinds.forward.formulae import REGISTER_FILE, REGISTERS, SHARED, SUMMED, sums
from fagen.vocab import OUTPUTS


class Forward:
    """What fagen.search.kinds.Space asks for."""

    defaults: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "block_m": (64, 128, 192, 256),
        "block_n": tuple(range(16, 257, 16)),
        "stages": (2, 3),
        "q_stages": (1, 2),
        "output": OUTPUTS,
        "producer": ("warp", "none"),
        "inter_warpgroup": (True, False),
        "intra_warpgroup": (True, False),
        "cluster": (1, 2),
    }
    problem_keys = ("dtype", "head_dim", "head_dim_v", "mask", "lengths")
    tile_keys = ("block_m", "block_n")
    example: ClassVar[Mapping[str, Any]] = {
        "head_dim": 64,
        "dtype": "fp16",
        "mask": "full",
        "block_m": 64,
        "block_n": 64,
    }
    summed_keys = SUMMED
    budgets = (SHARED, REGISTERS, REGISTER_FILE)
    sums = staticmethod(sums)
    shape_keys = ()
    shapes = ()
    promised = ()
    predictor = staticmethod(predictor)

    @staticmethod
    def shapes_like(values: Mapping[str, Any]) -> tuple[Mapping[str, int], ...]:
        """Return none: standard shapes are for all of them."""
        return ()


SPACE = Forward()
