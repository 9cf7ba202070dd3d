"""Choose what to compile next: points with predictions and what is known so far in, a point out.

Three in four are those that look fastest, the prediction corrected by what has been timed, and few
of one tile until it has shown itself fast; the fourth is of the tile that was tried least, so that
a wrong prediction comes to light.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter
from statistics import StatisticsError, correlation
from typing import Any

from fagen.schedule import Schedule
from fagen.search.kinds import space_of
from fagen.search.space import Point, Survey

TRUSTED = 0.6  # rank correlation from which a prediction may leave points out
ENOUGH = 24  # timed points from which that correlation is believed
EXPLORED = 4  # every so many-th point is of the tile tried least
REPEATED = 0.02  # what each point of a tile that was tried adds to the next one's, in logarithms
SPOILT = 0.25  # what a point that cannot be used counts as slower than predicted, in logarithms
_SHRINK = 2.0  # as many points at zero are added to each group of a correction
_SWEEPS = 6
_FRESH = 6  # results that make a new correction worth its time

Cell = tuple[Any, ...]


class Chooser:
    """Hands out the points of one survey, each once."""

    def __init__(self, survey: Survey, prune: float) -> None:
        self.survey = survey
        self._prune = prune
        self._cell_at = [survey.names.index(name) for name in space_of(survey.kind).tile_keys]
        self._logs = {p.keys: math.log(survey.predicted(p)) for p in survey.points}
        self._found: dict[Cell, float | None] = {}  # keys → log(seconds); None: spoilt
        self._given: set[Cell] = set()
        self._tried: dict[Cell, int] = {}
        self._left: list[tuple[float, Point]] = []  # by the corrected prediction
        self._stale = _FRESH

    def known(self, schedule: Schedule) -> bool:
        """Note that a schedule was tried before this chooser was asked; whether it is a point."""
        keys = self.keys(schedule)
        if keys not in self._logs:
            return False
        self._give(keys)
        return True

    def tell(self, schedule: Schedule, seconds: float | None) -> None:
        """Note a schedule's measured seconds, on any scale; None where it cannot be used."""
        keys = self.keys(schedule)
        if keys in self._logs and keys not in self._found:
            self._found[keys] = None if seconds is None else math.log(seconds)
            self._stale += 1

    def next(self) -> Schedule | None:
        """The next schedule to try; None where there is none left."""
        if self._stale >= _FRESH:
            self._reorder()
        self._left = left = [scored for scored in self._left if scored[1].keys not in self._given]
        if not left:
            return None
        exploring = len(self._given) % EXPLORED == EXPLORED - 1

        def rank(scored: tuple[float, Point]) -> float:
            tried = self._tried.get(self._cell(scored[1].keys), 0)
            return tried if exploring else scored[0] + REPEATED * tried

        _, chosen = min(left, key=rank)
        self._give(chosen.keys)
        return self.survey.schedule(chosen)

    @property
    def correlation(self) -> float | None:
        """Rank correlation of prediction and measurement; None where too little is known."""
        pairs = [(self._logs[keys], seconds) for keys, seconds in self._timed()]
        return spearman(pairs) if len(pairs) >= ENOUGH else None

    def _timed(self) -> list[tuple[Cell, float]]:
        return [(keys, seconds) for keys, seconds in self._found.items() if seconds is not None]

    def _give(self, keys: Cell) -> None:
        self._given.add(keys)
        cell = self._cell(keys)
        self._tried[cell] = self._tried.get(cell, 0) + 1

    def _cell(self, keys: Cell) -> Cell:
        return tuple(keys[at] for at in self._cell_at)

    def keys(self, schedule: Schedule) -> Cell:
        """A schedule's keys as its point has them: None where the space leaves a key out."""
        values, settings = schedule.values(), schedule.settings()
        return tuple(
            None if name in self.survey.left_out and name not in settings else values[name]
            for name in self.survey.names
        )

    def _reorder(self) -> None:
        """Rank what is left by its corrected prediction; leave out what is hopeless."""
        self._stale = 0
        correction = self._correction()
        limit = math.inf
        trusted = self.correlation
        if trusted is None or trusted >= TRUSTED:
            limit = min(self._logs.values(), default=0.0) + math.log(self._prune)

        def corrected(point: Point) -> float:
            return self._logs[point.keys] + sum(
                groups.get(part, 0.0)
                for groups, part in zip(correction, self._parts(point.keys), strict=True)
            )

        left = (p for p in self.survey.points if p.keys not in self._given)
        near = ((corrected(p), p) for p in left if self._logs[p.keys] <= limit)
        self._left = sorted(near, key=itemgetter(0))

    def _parts(self, keys: Cell) -> tuple[Any, ...]:
        """What a correction looks at: each key by itself, and the tile as a whole."""
        return (*keys, self._cell(keys))

    def _correction(self) -> list[dict[Any, float]]:
        """Fit log(measured / predicted) as a sum over the parts, each drawn towards zero."""
        groups: list[dict[Any, float]] = [{} for _ in range(len(self.survey.names) + 1)]
        timed = self._timed()
        if not timed:
            return groups
        # measured times are relative to something: only how they differ from each other counts
        level = sum(seconds - self._logs[keys] for keys, seconds in timed) / len(timed)
        rest = {keys: seconds - self._logs[keys] - level for keys, seconds in timed}
        rest |= {keys: SPOILT for keys, seconds in self._found.items() if seconds is None}
        parts = {keys: self._parts(keys) for keys in rest}
        for _ in range(_SWEEPS):
            for at, group in enumerate(groups):
                sums: dict[Any, list[float]] = {}
                for keys, error in rest.items():
                    sums.setdefault(parts[keys][at], []).append(error)
                moves = {part: sum(e) / (len(e) + _SHRINK) for part, e in sums.items()}
                for part, move in moves.items():
                    group[part] = group.get(part, 0.0) + move
                for keys in rest:
                    rest[keys] -= moves[parts[keys][at]]
        return groups


def spearman(pairs: Iterable[tuple[float, float]]) -> float:
    """Rank correlation of two figures, equal ones sharing their ranks; 0 where one is constant."""
    listed = list(pairs)
    if len(listed) < 2:
        return 0.0
    try:
        return correlation(*(_ranks(side) for side in zip(*listed, strict=True)))
    except StatisticsError:  # one is constant
        return 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    middle = {x: (bisect_left(order, x) + bisect_right(order, x)) / 2 for x in {*values}}
    return [middle[value] for value in values]
