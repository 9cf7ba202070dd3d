"""Recorded searches: those that are committed, and one made up whose times are like real ones."""

import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path

from fagen.paths import locate
from fagen.search.declared import Declared, parse_space
from fagen.search.executor import Work
from fagen.search.rows import Session
from fagen.search.run import summary
from fagen.search.space import Survey, survey
from fagen.search.store import Store
from fagen.search.tasks import GOOD, Compiled, Round, Time

STORES = sorted(locate("cli.py").parent.glob("benchmarks/search/*.sqlite"))
DATABASES = [path for path in STORES if "backward" not in path.stem]  # of hundreds of kernels
CARD = ("NVIDIA H200", "580.1")


def toml(**tables: object) -> str:
    """Return TOML with these tables; of a list of them one after another."""

    def said(value: object) -> str:
        if isinstance(value, dict):
            return "{ " + ", ".join(f"{key} = {said(item)}" for key, item in value.items()) + " }"
        return json.dumps(value)

    lines = []
    for name, table in tables.items():
        several = isinstance(table, list)
        for row in table if several else [table]:
            lines += ["", f"[[{name}]]" if several else f"[{name}]"]
            lines += [f"{key} = {said(value)}" for key, value in row.items()]
    return "\n".join(lines) + "\n"


HALF = {"dtype": "fp16", "head_dim": 128}
SPACE = toml(
    attention={**HALF, "mask": ["full", "causal"]},
    shapes=[{"seqlen": seqlen} for seqlen in (512, 2048, 16384)],
)


@cache
def space(text: str = SPACE) -> Declared:
    """Return a small space."""
    return parse_space(text, "small.toml")


@cache  # which takes a second, for one that nobody changes
def surveyed(text: str = SPACE, target: int = 0) -> Survey:
    """Return all points of one of its targets."""
    return survey(space(text), space(text).targets()[target])


def record(path: Path, kernels: int = 120, text: str = SPACE, seed: int = 0) -> Path:
    """Write a store in which that many kernels of each target were compiled, and most timed.

    A time is the prediction, off by what each key's value always costs, by a kernel's own luck, and
    by a per cent of noise.
    """
    dice = random.Random(seed)
    declared = space(text)
    with Store(path) as store:
        store.put_session(Session(date="2026-11-21", version="0.1.0", note="as they were made up"))
        store.put_space(declared.name, declared.text)
        for number, target in enumerate(declared.targets()):
            survey = surveyed(text, number)
            store.put_survey(target, summary(survey, declared))
            costs = {
                (name, value): dice.gauss(0, 0.03)
                for point in survey.points
                for name, value in zip(survey.names, point.keys, strict=True)
            }
            points = dice.sample(survey.points, min(kernels, len(survey.points)))
            luck = {point: dice.gauss(0, 0.01) for point in points}
            anchor = points[0].seconds
            for point in points:
                schedule = survey.schedule(point)
                spills = dice.random() < 0.1
                outcome = "spills" if spills and point is not points[0] else GOOD
                source = f"hash of {schedule.slug}"
                compiled = Compiled(schedule.slug, source, "nvcc 13.0", outcome, "", 180, 0, 7.0)
                store.put_compiled(target, compiled, "")
                if outcome != GOOD:
                    continue
                off = luck[point] + sum(
                    costs[name, value] for name, value in zip(survey.names, point.keys, strict=True)
                )
                seconds = [mean * math.exp(off) for mean in point.seconds]
                times = list(brief(schedule.slug, survey.sizes, seconds, anchor, dice))
                store.put_timed(target, CARD, {schedule.slug: source}, times, [], [])
            beside = [1.05 * mean for mean in anchor]
            peers = list(brief(target.peer.name, survey.sizes, beside, anchor, None))
            store.put_timed(target, CARD, {}, peers, [], [])
            store.put_anchor(target, CARD, survey.schedule(points[0]).slug)
    return path


def brief(slug, sizes, seconds, anchor, dice: random.Random | None) -> Iterator[Time]:
    """Yield two brief rounds at each size, with noise where there are dice."""
    for size, mean, beside in zip(sizes, seconds, anchor, strict=True):
        for number in (0, 1):
            noise = math.exp(dice.gauss(0, 0.005)) if dice else 1.0
            yield Time(slug, size, "brief", number, mean * noise, beside, 1700)


def two_cards() -> tuple[int, ...]:
    """Stand in for a machine with two GPUs."""
    return (0, 1)


class Traffic:
    """What an executor's GPUs are given to time: runs of kernels by GPU, and how many GPUs at once.

    How long that takes is not asked: on a busy machine it says little.
    """

    def __init__(self) -> None:
        self.runs = Counter()
        self.at_once = 0
        self._going = []

    def watch(self, monkeypatch, executor: type) -> "Traffic":
        """Count from now on what executors of this type are asked."""
        ask = executor.time

        def counted(self_, task, gpu):
            answer = ask(self_, task, gpu)
            self.runs[gpu] += len(task.kernels) * len(task.sizes) * len(task.repeats)
            self._going = [future for future in self._going if not future.done()] + [answer]
            self.at_once = max(self.at_once, len(self._going))
            return answer

        monkeypatch.setattr(executor, "time", counted)
        return self

    @property
    def longest(self) -> int:
        """The runs of the busiest GPU: what the whole has to wait for."""
        return max(self.runs.values())


class AtOnce:
    """An executor that answers before it is asked again: a replay in it is the same each time.

    With processes, what is chosen next depends on which of them answers first.
    """

    compile_slots = 2
    gpus = (0,)

    def __init__(self, work: Work, **_: object) -> None:
        self.work, self.card = work, work.card(0)

    def compile(self, slug: str) -> Future:
        return self._answered(self.work.compile(slug))

    def time(self, task: Round, gpu: int) -> Future:
        return self._answered(self.work.time(task, gpu))

    def close(self) -> None:
        pass

    @staticmethod
    def _answered(answer: object) -> Future:
        future: Future = Future()
        future.set_result(answer)
        return future
