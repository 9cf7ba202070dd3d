"""Turn what a space declares into points that fit, with predictions, and reasons for the rest."""

import math
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from operator import itemgetter
from typing import Any

from fagen import registry
from fagen.kinds.space import Space
from fagen.problem import Problem, Sizes
from fagen.schedule import Keys, Schedule
from fagen.search.declared import Declared, keys_of
from fagen.search.kinds import space_of

Derive = Callable[[Mapping[str, Any]], Any]  # a key's value, of those that it follows from


@dataclass(frozen=True)
class Point:
    """A schedule that fits, by the keys that the space tries, and its predicted times."""

    keys: tuple[Any, ...]
    seconds: tuple[float, ...]  # predicted, of each size


@dataclass(frozen=True)
class Refusal:
    """Why some points are none, how many, and one of them."""

    reason: str
    points: int
    example: str


@dataclass(frozen=True)
class Survey:
    """All points of one target: those that fit, and why the others do not."""

    kind: str
    target: Problem
    names: tuple[str, ...]  # of the keys that are tried
    left_out: frozenset[str]  # those of them that a point may leave at their default
    sizes: tuple[Sizes, ...]
    weights: tuple[float, ...]  # of the sizes; they add up to 1
    total: int
    refusals: tuple[Refusal, ...]
    points: tuple[Point, ...]
    reasons: Mapping[tuple[int, int], str]  # why a whole tile has no point
    cells: frozenset[tuple[int, int]]  # each tile that was looked at

    def keys(self, point: Point) -> dict[str, Any]:
        """A point's keys, with what is computed."""
        problem = {key: getattr(self.target, key) for key in space_of(self.kind).problem_keys}
        return {**problem, **dict(zip(self.names, point.keys, strict=True))}

    def schedule(self, point: Point) -> Schedule:
        """The schedule that a point is."""
        keys = {key: value for key, value in self.keys(point).items() if value is not None}
        return registry.kind(self.kind).schedule.make(**keys)

    @cached_property
    def best(self) -> tuple[Point, ...]:
        """The points, fastest predicted first."""
        return tuple(sorted(self.points, key=self.predicted))

    def predicted(self, point: Point) -> float:
        """The weighted geometric mean of a point's predicted times, in seconds."""
        return mean(point.seconds, self.weights)


def normalised(weights: Sequence[float]) -> tuple[float, ...]:
    """Return weights that add up to 1 and are all above 0, of any that are finite and above 0."""
    most = max(weights)
    scaled = [max(weight / most, sys.float_info.min) for weight in weights]
    total = math.fsum(scaled)
    return tuple(weight / total for weight in scaled)


def mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted geometric mean of a figure of each size."""
    logs = (weight * math.log(v) for v, weight in zip(values, weights, strict=True))
    return math.exp(math.fsum(logs) / math.fsum(weights))


# ---- enumerating --------------------------------------------------------------------------------


def survey(declared: Declared, target: Problem) -> Survey:
    """Look at every point of a target."""
    space, keys = space_of(declared.kind), keys_of(declared.kind)
    tried = {
        key: values for key, values in declared.values.items() if key not in space.problem_keys
    }
    names, sizes = tuple(tried), declared.sizes(target)
    base, predict = _base(target, space, keys), space.predictor(sizes)
    stated = {*space.problem_keys, *(name for name in names if None not in tried[name])}
    base, derived = _derived_once(base, tried, keys, stated)
    m_at, n_at = map(names.index, space.tile_keys)

    sized_by = itemgetter(*space.summed_keys)
    rules, sums = keys.rules, space.sums
    over: dict[tuple[Any, ...], tuple[str, int, int] | None] = {}
    counts: dict[str, int] = {}
    examples: dict[str, str] = {}
    cells: dict[tuple[int, int], str | None] = {}
    points = []
    total = 0
    for combination in product(*tried.values()):
        total += 1
        values = base | dict(zip(names, combination, strict=True))
        for key, derive in derived:
            if values.get(key) is None:
                values[key] = derive(values)
        refused: tuple[str, Any, Any] | None
        if broken := next(rules(values), None):
            refused = (f"rule of {broken[0]}", *broken)
        else:
            sized = sized_by(values)
            if sized not in over:
                over[sized] = next(sums(values), None)
            refused = over[sized]
        cell = (combination[m_at], combination[n_at])
        if refused is None:
            points.append(Point(combination, predict(values)))
            cells[cell] = None
        else:
            reason = refused[0]
            counts[reason] = counts.get(reason, 0) + 1
            if reason not in examples:
                examples[reason] = _example(refused, values, names, space, keys)
            if cell not in cells or (cells[cell] and reason in space.budgets):
                cells[cell] = reason
    reasons = sorted(counts, key=lambda reason: (reason in space.budgets, reason))
    return Survey(
        kind=declared.kind,
        target=target,
        names=names,
        left_out=frozenset(name for name in names if None in tried[name]),
        sizes=sizes,
        weights=normalised([shape.weight for shape in declared.shapes]),
        total=total,
        refusals=tuple(Refusal(r, counts[r], examples[r]) for r in reasons),
        points=tuple(points),
        reasons={cell: reason for cell, reason in cells.items() if reason},
        cells=frozenset(cells),
    )


def _base(target: Problem, space: Space, keys: Keys) -> dict[str, Any]:
    """Every key's value before the space has its say; what is derived comes later."""
    values: dict[str, Any] = {key: getattr(target, key) for key in space.problem_keys}
    for key in keys.sections:
        if key not in values and key not in keys.required and key not in keys.derived:
            values[key] = keys.default(key, values)
    return values


def _derived_once(
    base: Mapping[str, Any],
    tried: Mapping[str, Sequence[Any]],
    keys: Keys,
    stated: Container[str],
) -> tuple[dict[str, Any], list[tuple[str, Derive]]]:
    """Derive what is the same for every point; return base with it, and what is left to derive."""
    same = {key: value for key, value in base.items() if key not in tried}
    left = []
    for key, derive in keys.derived.items():
        if key not in stated:
            if key not in tried:
                with suppress(KeyError):  # it follows from what points differ in
                    same[key] = derive(same)
                    continue
            left.append((key, derive))
    return {**base, **same}, left


def _example(
    refused: tuple[str, Any, Any],
    values: Mapping[str, Any],
    names: Sequence[str],
    space: Space,
    keys: Keys,
) -> str:
    """Say which point is refused, by its keys that are not at their default, and why."""
    reason, what, limit = refused
    limit_text = f"{what:,} > {limit:,}" if reason in space.budgets else f"{what} {limit}"
    settings = [
        f"{name} = {values[name]}"
        for name in names
        if name in keys.required or values[name] != keys.default(name, values)
    ]
    return f"{', '.join(settings)}: {limit_text}"
