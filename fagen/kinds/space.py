"""What a kind of attention says for a search of its schedules, declared: see fagen.search.kinds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fagen.kinds.budget import Budget
from fagen.problem import Sizes
from fagen.schedule import Values

Predictor = Callable[[Values], tuple[float, ...]]  # of a schedule's values, seconds at each size

_EXAMPLE = {"head_dim": 64, "dtype": "fp16", "mask": "full", "block_m": 64, "block_n": 64}


def _no_shapes(values: Values) -> tuple[Mapping[str, int], ...]:
    """Standard shapes are for all of them."""
    return ()


@dataclass(frozen=True)
class Space:
    """What fagen.search.kinds.Space asks for."""

    defaults: Mapping[str, tuple[Any, ...]]
    budget: Budget
    summed_keys: tuple[str, ...]
    predictor: Callable[[Sequence[Sizes]], Predictor]
    problem_keys: tuple[str, ...]
    tile_keys: tuple[str, str] = ("block_m", "block_n")
    example: Mapping[str, Any] = field(default_factory=lambda: _EXAMPLE)
    shape_keys: tuple[str, ...] = ()
    shapes: tuple[Mapping[str, int], ...] = ()
    shapes_like: Callable[[Values], tuple[Mapping[str, int], ...]] = _no_shapes
    promised: tuple[str, ...] = ()

    @property
    def budgets(self) -> tuple[str, ...]:
        """The names of the sums."""
        return self.budget.names

    def sums(self, values: Values) -> Iterator[tuple[str, int, int]]:
        """Yield (name, sum, limit) of each that does not fit, of a schedule's values."""
        return self.budget.sums(values)
