"""What a search of the backward pass tries, sums up against an SM, and predicts."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from typing import Any, ClassVar

from fagen.errors import ScheduleError
from fagen.kinds.backward.cost import predictor
from fagen.kinds.backward.formulae import Budget, budget
from fagen.kinds.backward.keys import Schedule
from fagen.kinds.backward.rules import DQ_BY, PARTITIONS


def _examples() -> Iterator[Budget]:
    """The ledgers of each way in which warpgroups part the work: roles have their own."""
    for partition, dq_by in product(PARTITIONS, DQ_BY):
        keys = {
            "partition": partition,
            "dq_by": dq_by,
            "block_n": 64 if partition == PARTITIONS[1] else 128,
        }
        with suppress(ScheduleError):  # some do not go together
            yield budget(Schedule.make(dtype="fp16", head_dim=64, mask="full", block_m=64, **keys))


class Backward:
    """What fagen.search.kinds.Space asks for."""

    defaults: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "block_m": (64, 128),
        "block_n": (64, 128, 192),
        "stages": (1, 2, 3),
        "do_stages": (1, 2, 3),
        "ds_stages": (1, 2),
        "partition": PARTITIONS,
        "dq_by": DQ_BY,
        "dq_slices": (1, 2),
        "intra_warpgroup": (False, True),
    }
    problem_keys = ("dtype", "head_dim", "head_dim_v", "mask", "deterministic", "lengths")
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
    budgets = tuple(dict.fromkeys(ledger.name for cost in _examples() for ledger in cost.every()))
    shape_keys = ()
    shapes = ()
    promised = ()
    predictor = staticmethod(predictor)

    @staticmethod
    def shapes_like(values: Mapping[str, Any]) -> tuple[Mapping[str, int], ...]:
        """Return none: standard shapes are for all of them."""
        return ()

    @staticmethod
    def sums(values: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
        """Yield (name, sum, limit) of each ledger that does not fit."""
        cost = budget(Schedule.make(**{key: values[key] for key in Backward.summed_keys}))
        for ledger in cost.over():
            yield ledger.name, ledger.total, ledger.limit


SPACE = Backward()
