"""The name of a kind in, what it says for a search of its schedules out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from fagen import registry
from fagen.errors import ScheduleError
from fagen.kind import load_named
from fagen.problem import Sizes


class Space(Protocol):
    """What a kind says for a search of its schedules; its `space` names such a thing."""

    @property
    def defaults(self) -> Mapping[str, tuple[Any, ...]]:
        """What is tried of keys that a file leaves out; None leaves the key at its own default."""

    @property
    def problem_keys(self) -> tuple[str, ...]:
        """The keys that say what is computed, fields of a Problem: no matter of speed."""

    @property
    def tile_keys(self) -> tuple[str, str]:
        """The keys of a tile's height and width."""

    @property
    def example(self) -> Mapping[str, Any]:
        """Values of the required keys, beside which one key can be judged."""

    @property
    def summed_keys(self) -> tuple[str, ...]:
        """The keys that the sums depend on."""

    @property
    def budgets(self) -> tuple[str, ...]:
        """The names of the sums."""

    @property
    def shape_keys(self) -> tuple[str, ...]:
        """What a file's shapes have to say, each, beside seqlen: nothing else gives it."""

    @property
    def shapes(self) -> Sequence[Mapping[str, int]]:
        """Shapes of a file that says none, as it would; none: standard ones."""

    def shapes_like(self, values: Mapping[str, Any]) -> Sequence[Mapping[str, int]]:
        """Shapes for who has a schedule's values and no file; none: those of such a file."""

    @property
    def promised(self) -> tuple[str, ...]:
        """Keys on which bits depend that calls have by a rule: what a search writes keeps to it.

        () where a table's row may change any.
        """

    def sums(self, values: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
        """Yield (name, sum, limit) of each that does not fit, of a schedule's values."""

    def predictor(self, sizes: Sequence[Sizes]) -> Callable[[Mapping[str, Any]], tuple[float, ...]]:
        """Return a function from a schedule's values to its predicted seconds at each size."""


@cache
def space_of(kind: str) -> Space:
    """What a kind says for a search.  Raises ScheduleError where it is not searched."""
    if not (name := registry.kind(kind).space):
        searched = ", ".join(name for name in registry.ENTRIES if registry.kind(name).space)
        raise ScheduleError(
            f"schedules of the kind {kind} are not searched; those of {searched} are"
        )
    space: Space = load_named(name)
    return space
