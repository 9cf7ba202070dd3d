"""Bounds of time that hold on slower cores, and on busy ones."""

import time
import timeit
from collections.abc import Callable
from typing import Any


def least_seconds(work: Callable[[], float | None], limit: float) -> float:
    """CPU-seconds that a core of 3 GHz would take for work, the least of up to five times.

    Work that goes on in other processes, or counts seconds its own way, returns them.
    """
    least = float("inf")
    for _ in range(5):  # others use the core by fits and starts
        before = _slowness()
        took = _cpu_seconds(work)
        least = min(least, took / max(before, _slowness()))
        if least <= limit:
            break
    return least


def seconds_of_recording(door: Any, call: Callable[[], object]) -> float:
    """CPU-seconds that a call of a door takes longer because its `note` is set, at the least.

    What `note` counted are multiples of 30,000 calls.
    """

    def calls() -> float:
        return timeit.Timer(call, timer=time.process_time).timeit(500) / 500

    def cost() -> float:
        note, without, noted = door.note, [], []
        for _ in range(60):  # in turns: a core is not always equally fast
            door.note = None
            without.append(calls())
            door.note = note
            noted.append(calls())
        return min(noted) - min(without)

    return least_seconds(cost, 1e-6)


def _cpu_seconds(work: Callable[[], float | None]) -> float:
    began = time.process_time()
    seconds = work()
    return time.process_time() - began if seconds is None else seconds


def _slowness() -> float:
    """How much longer this core takes at present than one of 3 GHz with nothing beside it."""
    return max(1.0, _cpu_seconds(lambda: _count(2_400_000)) / 0.2)


def _count(steps: int) -> None:
    sum(i * i % 7 for i in range(steps))
