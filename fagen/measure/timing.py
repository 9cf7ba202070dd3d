"""Calls in, times out: two regimes, because a power-capped card has two speeds.

A long run of attention pulls the SM clock down, by a different amount for each kernel; a short run
after a pause does not. `SUSTAINED` measures the first, `BURST` the second, and both shuffle the
order of the calls in every round, so that no implementation always follows the same one.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from fagen.measure.card import Clock


@dataclass(frozen=True)
class Call:
    """`run` computes and returns the output, or all of them if there are several to compare.

    `within` is entered once around many runs of it.
    """

    run: Callable[[], Any]
    within: Callable[[], AbstractContextManager[object]] = nullcontext

    def once(self) -> Any:
        """One run, by itself."""
        with self.within():
            return self.run()


@dataclass(frozen=True)
class Regime:
    """How one implementation is run in one round, in seconds; at least one warm call.

    On scores whose standard deviation is `sigma`, where inputs are N(0, 1).
    """

    name: str
    idle: float
    warm: float
    timed: float
    rounds: int
    sigma: float = 1.0


def captured(call: Call, runs: int) -> Call:
    """So many runs of a call as one: a CUDA graph, since the host is slower than a short kernel."""
    output = call.once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), call.within():
        for _ in range(runs):
            call.run()

    def replay() -> Any:
        graph.replay()
        return output

    return Call(replay)


SUSTAINED = Regime("sustained", idle=0.0, warm=0.150, timed=0.150, rounds=3)
BURST = Regime("burst", idle=0.040, warm=0.0, timed=0.006, rounds=5)
WAKING = 0.010  # seconds
REGIMES = {regime.name: regime for regime in (SUSTAINED, BURST)}


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median over the rounds; spread is (max - min) / median."""

    seconds: float
    spread: float
    sm_clock_mhz: int | None


def time_calls(
    calls: Mapping[str, Call], regime: Regime, *, clock: Clock | None = None, seed: int = 0
) -> dict[str, Timing]:
    """Time every call of `calls` under `regime`, each round in a new random order.

    The calls go to the current stream. Raises whatever a call raises.
    """
    clock = clock or Clock()
    estimates = {name: estimate(call) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    clocks: dict[str, list[int]] = {name: [] for name in calls}
    for order in orders(list(calls), regime.rounds, seed):
        for name in order:
            time.sleep(regime.idle)
            spent, readings = time_round(calls[name], regime, estimates[name], clock)
            seconds[name].append(spent)
            clocks[name] += readings
    return {name: summary(seconds[name], clocks[name]) for name in calls}


def orders(names: Sequence[str], rounds: int, seed: int) -> list[list[str]]:
    """A random order of `names` for each round, the same for the same seed.

    In no two rounds that follow each other does everybody come after the same one. (Of three names
    chance alone gave the same order three times.)
    """
    dice = random.Random(seed)
    sequences: list[list[str]] = []
    while len(sequences) < rounds:
        order = dice.sample(names, len(names))
        if not sequences or len(names) < 2 or _neighbours(order) != _neighbours(sequences[-1]):
            sequences.append(order)
    return sequences


def _neighbours(order: Sequence[str]) -> set[tuple[str, str]]:
    """Who comes after whom; of two names, who is first."""
    around = pairwise([*order, order[0]]) if len(order) > 2 else [tuple(order)]
    return {(before, after) for before, after in around}


def repeats(seconds: float, span: float) -> int:
    """How many calls of `span` fill `seconds`: one at least."""
    return max(1, math.ceil(seconds / max(span, 1e-7)))


def summary(seconds: Sequence[float], clocks: Sequence[int]) -> Timing:
    """Median and spread of the rounds, median of the clock readings."""
    middle = statistics.median(seconds)
    return Timing(
        seconds=middle,
        spread=(max(seconds) - min(seconds)) / middle,
        sm_clock_mhz=round(statistics.median(clocks)) if clocks else None,
    )


def estimate(call: Call) -> float:
    """Seconds of one call, roughly; the first run, which may compile, is not counted.

    An idle GPU needs milliseconds to reach its clock, so the runs grow until they last longer.
    """
    with call.within():
        call.run()
        torch.cuda.synchronize()
        runs, lasted = 1, 0.0
        while lasted < WAKING:
            runs *= 4
            start, end = _event(), _event()
            start.record()
            for _ in range(runs):
                call.run()
            end.record()
            end.synchronize()
            lasted = float(start.elapsed_time(end)) / 1e3
    return lasted / runs


def time_round(call: Call, regime: Regime, span: float, clock: Clock) -> tuple[float, list[int]]:
    """Seconds per call of one round, and the clocks read while the timed calls ran.

    Everything is enqueued at once, so that the GPU passes from warm-up to timing without a pause;
    the clock is read by the waiting host.
    """
    start, end = _event(), _event()
    run, timed = call.run, repeats(regime.timed, span)
    with call.within():
        for _ in range(repeats(regime.warm, span)):
            run()
        start.record()
        for _ in range(timed):
            run()
        end.record()
    readings: list[int] = []
    while not end.query():
        if start.query() and (mhz := clock.mhz()) is not None:
            readings.append(mhz)
        time.sleep(0.001)
    return start.elapsed_time(end) / 1e3 / timed, readings


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
