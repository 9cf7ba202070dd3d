"""Fit the constants of fagen/kinds/forward/cost.py to what searches measured: ~2 minutes, no GPU.

    python benchmarks/search/refit.py --out refit.json   fit, then leave out each head dim in turn
    python benchmarks/search/refit.py --fit              fit only, and print the constants

The data are many-*.json and the stores beside this file. A residual is the logarithm of a predicted
by a measured time. What it differs by from its problem's mean at a size counts in full: a search
needs the order of a problem's kernels, not their level. Rank correlations are of a head dim's
kernels of all its problems, each less its problem's mean, by constants fitted without that head
dim.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fagen import search
from fagen.kinds.forward import cost
from fagen.problem import Sizes
from fagen.registry import from_slug
from fagen.search.choice import spearman
from fagen.search.marks import BRIEF
from fagen.vocab import FORWARD, SIXTEEN_BITS

HERE = Path(__file__).parent
CONSTANTS = (
    *("SHARPNESS", "INSTRUCTIONS_PER_SCORE", "INSTRUCTIONS", "MAXIMUM", "FETCH", "WAIT", "CLASH"),
    *("NO_PRODUCER", "REQUEST", "SECTOR", "UNALIGNED", "EPILOGUE", "TURNS", "SHARED_OUTPUT"),
    *("HEAD_START", "DRAWN"),
)
OLD = 0.25  # weight of the stores: other revisions, kernels that are far from the best
LEVEL = 0.3  # weight of a problem's mean residual
OUTLIER = 0.15  # a residual beyond this counts linearly
PRIOR = 0.05  # weight of a constant's logarithm away from where it began
STEP = 0.02  # of a constant's logarithm, for a derivative


@dataclass(frozen=True)
class Searched:
    """The kernels of one problem: microseconds at each of the sizes."""

    problem: str  # as slugs begin
    sizes: tuple[Sizes, ...]
    microseconds: Mapping[str, Sequence[float]]  # by slug
    weight: float = 1.0
    padded: tuple[int, int] | None = None  # columns in shared memory, where they were others

    @property
    def head_dims(self) -> str:
        """As slugs say them: 'd128', 'd192v128'."""
        return self.problem.split("_")[1]

    @cached_property
    def _values(self) -> list[Mapping[str, Any]]:
        return [from_slug(slug).values() for slug in self.microseconds]

    @cached_property
    def _measured(self) -> list[list[float]]:
        return [[math.log(time * 1e-6) for time in times] for times in self.microseconds.values()]

    def residuals(self) -> list[list[float]]:
        """log(predicted / measured) of each kernel at each size, by the constants as they are."""
        with _laid_out(self.padded):
            predict = cost.predictor(self.sizes)
            return [
                [math.log(p) - m for p, m in zip(predict(values), measured, strict=True)]
                for values, measured in zip(self._values, self._measured, strict=True)
            ]

    def pairs(self) -> list[tuple[float, float]]:
        """Predicted and measured time of each kernel: mean logarithms, less the problem's mean."""
        measured = [_mean(logs) for logs in self._measured]
        predicted = [m + _mean(r) for m, r in zip(measured, self.residuals(), strict=True)]
        both = (predicted, measured)
        middle = [_mean(logs) for logs in both]
        return [(p - middle[0], m - middle[1]) for p, m in zip(*both, strict=True)]

    def loss(self) -> float:
        """By how much what is predicted fastest is slower than what was: 0.05 is 5 %."""
        pairs = self.pairs()
        return math.exp(min(pairs)[1] - min(measured for _, measured in pairs)) - 1


def many() -> list[Searched]:
    """What many.py found."""
    searched = []
    for path in sorted(HERE.glob("many-*.json")):
        for record in json.loads(path.read_text())["searched"]:
            problem = record["problem"]
            timed = {f"fwd_{problem}_{t}": times for t, times in record["microseconds"].items()}
            sizes = tuple(Sizes(*size) for size in record["sizes"])
            padded = tuple(record["padded"]) if "padded" in record else None
            searched.append(Searched(problem, sizes, timed, padded=padded))
    return searched


def stores() -> list[Searched]:
    """What searches of the forward pass found in 16 bits: e4m3 slugs meant other kernels then."""
    searched = []
    for path in sorted(HERE.glob("*.sqlite")):
        for result in search.found(path):
            slugs = result.marks.slugs(BRIEF)
            timed = {
                slug: [1e6 * (result.marks.seconds(slug, size) or 0.0) for size in result.sizes]
                for slug in slugs
            }
            forward = result.target.kind == FORWARD
            if timed and forward and result.target.dtype in SIXTEEN_BITS:
                searched.append(Searched(result.target.name, result.sizes, timed, weight=OLD))
    return searched


def constants() -> dict[str, float]:
    """The constants as they are."""
    return {name: float(getattr(cost, name)) for name in CONSTANTS}


@contextmanager
def using(values: Mapping[str, float]) -> Iterator[None]:
    """Predict by other constants for a while."""
    before = constants()
    try:
        _put(values)
        yield
    finally:
        _put(before)


def correlation(data: Sequence[Searched]) -> float:
    """Rank correlation of predicted and measured times over the kernels of some problems."""
    return spearman([pair for problem in data for pair in problem.pairs()])


def fit(data: Sequence[Searched], rounds: int = 12) -> dict[str, float]:
    """The constants that fit best, begun from those as they are, by Levenberg and Marquardt."""
    start = [math.log(value) for value in constants().values()]
    with using(constants()):

        def residuals(x: Sequence[float]) -> list[float]:
            _put({name: math.exp(log) for name, log in zip(CONSTANTS, x, strict=True)})
            drawn = [PRIOR * (a - b) for a, b in zip(x, start, strict=True)]
            return [*_weighted(data), *drawn]

        x, damping = start, 1e-2
        now = residuals(x)
        for _ in range(rounds):
            slopes = []
            for at in range(len(x)):
                moved = residuals([log + STEP * (i == at) for i, log in enumerate(x)])
                slopes.append([(b - a) / STEP for a, b in zip(now, moved, strict=True)])
            step = _descend(residuals, x, now, slopes, damping)
            if step is None:
                break
            better, after, damping = step
            done = _square(now) - _square(after) < 1e-4 * _square(now)
            x, now = better, after
            if done:
                break
        return {name: math.exp(log) for name, log in zip(CONSTANTS, x, strict=True)}


def _descend(
    residuals: Any,
    x: Sequence[float],
    now: Sequence[float],
    slopes: Sequence[Sequence[float]],
    damping: float,
) -> tuple[list[float], list[float], float] | None:
    """A better x with its residuals and the next damping; None where none is found."""
    square = [[_dot(a, b) for b in slopes] for a in slopes]
    down = [-_dot(slope, now) for slope in slopes]
    for _ in range(6):
        damped = [
            [v + (i == j) * damping * (v + 1e-6) for j, v in enumerate(row)]
            for i, row in enumerate(square)
        ]
        step = _solved(damped, down)
        better = [a + max(-0.7, min(0.7, b)) for a, b in zip(x, step, strict=True)]
        after = residuals(better)
        if _square(after) < _square(now):
            return better, after, max(damping / 3, 1e-6)
        damping *= 5
    return None


def _weighted(data: Sequence[Searched]) -> Iterator[float]:
    for problem in data:
        rows = problem.residuals()
        means = [_mean(column) for column in zip(*rows, strict=True)]
        share = problem.weight / len(rows) ** 0.25  # many kernels of a problem tell much the same
        for row in rows:
            for residual, mean in zip(row, means, strict=True):
                yield _bent(share * (residual - mean))
        for mean in means:
            yield _bent(problem.weight * LEVEL * mean)


def _bent(x: float) -> float:
    if abs(x) <= OUTLIER:
        return x
    return math.copysign(math.sqrt(2 * OUTLIER * abs(x) - OUTLIER**2), x)


@contextmanager
def _laid_out(padded: tuple[int, int] | None) -> Iterator[None]:
    """Predict for other columns of shared memory than head dims take today."""
    usual = cost.padded_head_dims
    if padded:
        cost.padded_head_dims = lambda *_: padded
    try:
        yield
    finally:
        cost.padded_head_dims = usual


def _put(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        setattr(cost, name, value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(map(float.__mul__, a, b))


def _square(values: Sequence[float]) -> float:
    return _dot(values, values)


def _solved(matrix: Sequence[Sequence[float]], constants: Sequence[float]) -> list[float]:
    """Solve a positive definite system by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, constants, strict=True)]
    for i, pivot in enumerate(rows):
        for row in rows[i + 1 :]:
            factor = row[i] / pivot[i]
            row[i:] = [a - factor * b for a, b in zip(row[i:], pivot[i:], strict=True)]
    solution: list[float] = []
    for i in reversed(range(len(rows))):
        rest = _dot(rows[i][i + 1 : -1], solution)
        solution.insert(0, (rows[i][-1] - rest) / rows[i][i])
    return solution


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in values.items()}


def main() -> int:
    """Fit, and say how well it predicts what it has not seen."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write constants and correlations to this file")
    parser.add_argument("--fit", action="store_true", help="leave nothing out")
    options = parser.parse_args()
    data = [*many(), *stores()]
    fitted = _rounded(fit(data))
    for name, value in fitted.items():
        print(f"{name} = {value:g}")
    if options.fit:
        return 0
    left_out = {}
    _put(fitted)
    for dims in dict.fromkeys(problem.head_dims for problem in data):
        unseen = [problem for problem in data if problem.head_dims == dims]
        constants = _rounded(fit([x for x in data if x.head_dims != dims], rounds=4))
        with using(constants):
            kernels = sum(len(problem.microseconds) for problem in unseen)
            rank = round(correlation(unseen), 3)
            worst = max(problem.loss() for problem in unseen)
        left_out[dims] = {"kernels": kernels, "correlation": rank, "constants": constants}
        print(
            f"{dims:9} {kernels:4} kernels  {rank:6.2f}  worst choice {worst:5.1%} off", flush=True
        )
    if options.out:
        kept = {"fitted": fitted, "left_out": left_out}
        options.out.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
