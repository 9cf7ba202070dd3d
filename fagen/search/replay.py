"""Search over a recording: a store in, its compile results and times out, without compiler or GPU.

What was not recorded cannot be found, so a replay's space has the recorded points alone.  A round
that was not recorded is answered by one that was.
"""

import time
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from statistics import median_low

from fagen.errors import FagenError
from fagen.registry import from_slug
from fagen.search.choice import Chooser
from fagen.search.executor import Work
from fagen.search.space import Survey, normalised
from fagen.search.store import Store
from fagen.search.tasks import Compiled, Round, Time, Timed


@dataclass(frozen=True)
class Recording:
    """What a store knows of one card: compile results and times by slug."""

    card: tuple[str, str]
    compiler: str
    compiled: dict[str, Compiled]
    targets: dict[str, str]  # by slug
    times: dict[tuple[str, str], dict[str, list[Time]]]  # of slug and target, by size
    wrong: dict[str, str]

    def slugs(self, target: str) -> set[str]:
        """The kernels of a target that were compiled, and timed if they were good."""
        timed = {slug for slug, other in self.times if other == target}
        return {
            slug
            for slug, compiled in self.compiled.items()
            if self.targets[slug] == target and (slug in timed or compiled.outcome != "good")
        }


@cache
def recording(path: str) -> Recording:
    """Read a recording.  Raises FagenError where nothing was timed."""
    with Store(Path(path), read_only=True) as store:
        cards = store.cards()
        if not cards:
            raise FagenError(f"{path}: nothing was timed there")
        card = cards[0]
        rows = store.compiled()
        compiled = {row.compiled.slug: row.compiled for row in rows}
        targets = {row.compiled.slug: row.target for row in rows}
        times: dict[tuple[str, str], dict[str, list[Time]]] = {}
        for row in store.timed():
            if (row.card, row.driver) == card:
                by_size = times.setdefault((row.time.slug, row.target), {})
                by_size.setdefault(str(row.time.size), []).append(row.time)
        wrong = {row.slug: row.said for row in store.wrong()}
    compiler = next((kernel.compiler for kernel in compiled.values()), "")
    return Recording(card, compiler, compiled, targets, times, wrong)


@dataclass(frozen=True)
class Replay:
    """What stands in for compiler and GPU: the recording at an absolute path.

    It takes `pace` seconds for each kernel that is compiled, and for each in a round.
    """

    path: str
    pace: float

    def compile(self, slug: str) -> Compiled:
        """What became of a schedule then."""
        time.sleep(self.pace)
        recorded = recording(self.path)
        unknown = Compiled(slug, self.source_hash(slug), recorded.compiler, "not recorded")
        return recorded.compiled.get(slug, unknown)

    send = compile

    def time(self, task: Round, gpu: int) -> Timed:
        """The times of then, or what is nearest to them."""
        time.sleep(self.pace * len(task.kernels))
        recorded = recording(self.path)
        times, wrong = [], []
        for slug in [*(compiled.slug for compiled in task.kernels), task.target.peer.name]:
            if slug in recorded.wrong:
                wrong.append((slug, recorded.wrong[slug]))
                continue
            by_size = recorded.times.get((slug, task.target.name), {})
            for size in task.sizes:
                recorded_times = by_size.get(str(size), [])
                for number in task.repeats if recorded_times else ():
                    times.append(_answer(recorded_times, task.regime, number))
        return Timed(*recorded.card, tuple(times), tuple(wrong))

    def source_hash(self, slug: str) -> str:
        """Of the source as it was."""
        compiled = recording(self.path).compiled.get(slug)
        return compiled.source_hash if compiled else f"unknown {slug}"

    def compiler(self) -> str:
        """The compiler of then."""
        return recording(self.path).compiler

    def cards(self) -> tuple[int, ...]:
        """One GPU."""
        return (0,)

    def card(self, gpu: int) -> tuple[str, str]:
        """The card of then."""
        return recording(self.path).card


def work(path: Path | str, pace: float = 0.0) -> Work:
    """A search's work, done by a Replay."""
    replay = Replay(str(Path(path).absolute()), pace)
    return Work(**{field.name: getattr(replay, field.name) for field in fields(Work)})


def only_recorded(path: Path | str, survey: Survey) -> Survey:
    """Leave a survey the points that were recorded, at the sizes that were.

    Raises FagenError where there is none of them.
    """
    recorded = recording(str(Path(path).absolute()))
    recorded_sizes = {
        size
        for (_, target), by_size in recorded.times.items()
        if target == survey.target.name
        for size in by_size
    }
    kept = [at for at, size in enumerate(survey.sizes) if str(size) in recorded_sizes]
    keys_of = Chooser(survey, 1.0).keys
    recorded_keys = {keys_of(from_slug(s)) for s in recorded.slugs(survey.target.name)}
    points = tuple(
        replace(point, seconds=tuple(point.seconds[at] for at in kept))
        for point in survey.points
        if point.keys in recorded_keys
    )
    if not kept or not points:
        raise FagenError(f"{path}: nothing of {survey.target.name} was recorded there")
    sizes = tuple(survey.sizes[at] for at in kept)
    weights = normalised([survey.weights[at] for at in kept])
    return replace(survey, sizes=sizes, weights=weights, points=points)


def _answer(times: list[Time], regime: str, number: int) -> Time:
    """The time of that round, else of the middle one of its regime, else of any."""
    same = [time for time in times if time.regime == regime]
    exact = next((time for time in same if time.repeat == number), None)
    if exact:
        return exact
    ratios = {time.seconds / time.anchor_seconds: time for time in same or times}
    return replace(ratios[median_low(ratios)], regime=regime, repeat=number)
