"""What a kind of attention says for a search of its schedules, declared."""

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
    """What is tried and summed up, and how its times are predicted; values are of a schedule."""

    # what is tried of keys that a file leaves out; None leaves the key at its own default
    defaults: Mapping[str, tuple[Any, ...]]
    budget: Budget
    summed_keys: tuple[str, ...]  # that the sums depend on
    predictor: Callable[[Sequence[Sizes]], Predictor]
    # what says what is computed, fields of a Problem: no matter of speed
    problem_keys: tuple[str, ...]
    tile_keys: tuple[str, str] = ("block_m", "block_n")  # a tile's height and width
    # values of the required keys, beside which one key can be judged
    example: Mapping[str, Any] = field(default_factory=lambda: _EXAMPLE)
    # what a file's shapes have to say, each, beside seqlen: nothing else gives it
    shape_keys: tuple[str, ...] = ()
    # shapes of a file that says none, as it would; none: standard ones
    shapes: tuple[Mapping[str, int], ...] = ()
    # shapes for who has a schedule's values and no file; none: those of such a file
    shapes_like: Callable[[Values], tuple[Mapping[str, int], ...]] = _no_shapes
    # keys on which bits depend that calls have by a rule: what a search writes keeps to it; none
    # where a table's row may change any
    promised: tuple[str, ...] = ()

    @property
    def budgets(self) -> tuple[str, ...]:
        """The names of the sums."""
        return self.budget.names

    def sums(self, values: Values) -> Iterator[tuple[str, int, int]]:
        """Yield (name, sum, limit) of each that does not fit, of a schedule's values."""
        return self.budget.sums(values)
