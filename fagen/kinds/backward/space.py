"""What a search of the backward pass tries, sums up against a multiprocessor, and predicts."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from fagen.kinds.backward.cost import predictor
from fagen.kinds.backward.formulae import REGISTER_FILE, REGISTERS, SHARED, budget
from fagen.kinds.backward.keys import Schedule


class Backward:
    """What fagen.search.space.Space asks for."""

    defaults: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "block_m": (64, 128),
        "block_n": (64, 128, 192),
        "stages": (1, 2, 3),
        "do_stages": (1, 2, 3),
        "ds_stages": (1, 2),
    }
    problem_keys = ("dtype", "head_dim", "head_dim_v", "mask")
    tile_keys = ("block_m", "block_n")
    example: ClassVar[Mapping[str, Any]] = {
        "head_dim": 64,
        "dtype": "fp16",
        "mask": "full",
        "block_m": 64,
        "block_n": 64,
    }
    # all that a schedule says: a key that is new here is summed up too
    summed_keys = tuple(Schedule.keys.sections)
    budgets = (SHARED, REGISTERS, REGISTER_FILE)
    predictor = staticmethod(predictor)

    @staticmethod
    def sums(values: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
        """Yield (name, sum, limit) of each ledger that does not fit."""
        cost = budget(Schedule.make(**{key: values[key] for key in Backward.summed_keys}))
        for ledger in cost.over():
            yield ledger.name, ledger.total, ledger.limit


SPACE = Backward()
