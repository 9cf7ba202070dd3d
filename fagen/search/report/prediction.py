"""The plot of predicted and measured times."""

import math
from dataclasses import dataclass

from fagen.search.report.speeds import Tick
from fagen.search.results import Result

PLOT = 420.0  # width and height of a plot's inside, in its own units


@dataclass(frozen=True)
class Dot:
    """A kernel."""

    x: float
    y: float
    title: str
    kind: str  # leader | kernel


@dataclass(frozen=True)
class Plot:
    """Prediction across, measurement up, both logarithmic and of the same extent."""

    dots: tuple[Dot, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    size: float


def plot(result: Result) -> Plot | None:
    """Each timed kernel's place; None of fewer than two."""
    pairs = result.pairs()
    if len(pairs) < 2:
        return None
    lead = result.lead
    sides = [[seconds for _, seconds, _ in pairs], [seconds for _, _, seconds in pairs]]
    # the same factor on both axes, so that a step means the same across and up
    extent = max(math.log(max(side) / min(side)) for side in sides) * 1.12 or 0.1
    starts = [(math.log(max(side)) + math.log(min(side)) - extent) / 2 for side in sides]

    def place(seconds: float, axis: int) -> float:
        return round(PLOT * (math.log(seconds) - starts[axis]) / extent, 1)

    dots = [
        Dot(
            x=place(predicted, 0),
            y=round(PLOT - place(measured, 1), 1),
            title=f"{slug}: {predicted * 1e6:.0f} µs predicted, {measured * 1e6:.0f} µs measured",
            kind="leader" if lead and slug == lead.slug else "kernel",
        )
        for slug, predicted, measured in pairs
    ]
    ticks = [
        [Tick(place(at / 1e6, axis), f"{at:g}") for at in round_numbers(starts[axis], extent)]
        for axis in (0, 1)
    ]
    return Plot(
        dots=tuple(sorted(dots, key=lambda dot: dot.kind == "leader")),
        x_ticks=tuple(ticks[0]),
        y_ticks=tuple(Tick(round(PLOT - tick.at, 1), tick.text) for tick in ticks[1]),
        size=PLOT,
    )


def round_numbers(start: float, extent: float) -> list[float]:
    """Microseconds to be marked on a logarithmic axis, some three to nine."""
    low, high = math.exp(start) * 1e6, math.exp(start + extent) * 1e6
    finest = math.floor(math.log10(min(low, high - low))) - 1
    powers = range(finest, math.ceil(math.log10(high)) + 1)
    steps = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    if len(marks := [mark for mark in steps if low <= mark <= high]) >= 3:
        return marks
    # too little for 1, 2 and 5: evenly many microseconds apart
    step = next(step for step in steps if (high - low) / step <= 8)
    return [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
