"""One target's search: what is known goes in, what to compile and to time next comes out.

First every kernel that compiles is timed briefly; of these a quarter, then a sixteenth go on for
more rounds; the last few, at each size, are timed in runs long enough to reach the power limit,
until the leader's lead exceeds the noise.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fagen.problem import Problem, Sizes
from fagen.registry import from_slug
from fagen.schedule import Schedule
from fagen.search.choice import Chooser
from fagen.search.declared import Effort
from fagen.search.marks import BRIEF, LONG, Marks
from fagen.search.space import Survey
from fagen.search.tasks import GOOD, Compiled, Round, Time

ROUND = 8  # kernels side by side


@dataclass(frozen=True)
class Stage:
    """Rounds that the fastest `keep` of the kernels run."""

    regime: str
    repeats: tuple[int, ...]
    keep: float
    least: int


STAGES = (
    Stage(BRIEF, (0, 1), 1.0, 1),
    Stage(BRIEF, (2, 3), 1 / 4, 8),
    Stage(BRIEF, (4, 5, 6), 1 / 16, 4),
    Stage(LONG, (0, 1), 0.0, 2),
    Stage(LONG, (2,), 0.0, 2),
    Stage(LONG, (3,), 0.0, 2),
)
SCREEN, FINAL = 0, 3  # places in STAGES
SECONDS = {BRIEF: 0.010, LONG: 0.25}  # of one kernel, size and round, roughly


@dataclass
class Entry:
    """A kernel in the tournament; `made` has its library once this process can time it."""

    slug: str
    schedule: Schedule
    compiled: Compiled | None = None
    ready: bool = False
    wrong: str = ""

    @property
    def good(self) -> bool:
        """Whether there is anything to be timed."""
        return bool(self.compiled and self.compiled.outcome == GOOD and not self.wrong)


def job_of(slug: str, regime: str, repeats: Sequence[int], sizes: Sequence[Sizes]) -> str:
    """The name under which a kernel's part of a round is claimed."""
    return f"time {slug} {regime} {repeats[0]} {sizes[0] if len(sizes) == 1 else 'all'}"


def jobs_of(task: Round) -> list[str]:
    """The names of all parts of a round."""
    return [
        job_of(compiled.slug, task.regime, task.repeats, task.sizes) for compiled in task.kernels
    ]


class Tournament:
    """The state of one target's search.  It decides and remembers; others do and keep."""

    def __init__(
        self, survey: Survey, effort: Effort, anchors: list[str], serving: Sequence[str] = ()
    ) -> None:
        self.survey, self.effort = survey, effort
        self.target: Problem = survey.target
        self.marks = Marks(survey.sizes, survey.weights)
        self.chooser = Chooser(survey, effort.prune)
        self.entries: dict[str, Entry] = {}
        self.stage = SCREEN
        self.until = math.inf  # no more points are chosen from then on
        self.done = False
        self._anchors = anchors
        self._field: dict[Sizes, list[str]] = {}
        self._busy: set[str] = set()
        self._compiling: set[str] = set()
        self._elsewhere: dict[str, float] = {}  # compiled by others; when to look again
        self._best, self._since_best = math.inf, 0
        self._spent = False  # the chooser has no point left
        for slug in serving:  # so that what is found is not slower than what there was
            self._entry(slug)

    # ---- what is known

    def add_compiled(self, compiled: Compiled, *, ready: bool = False) -> None:
        """Take a compile result: a kept one, or one of this process, `ready` to be timed."""
        entry = self._entry(compiled.slug)
        self._compiling.discard(compiled.slug)
        if entry.compiled is None and compiled.outcome != GOOD:
            self.chooser.tell(entry.schedule, None)
        if not entry.ready:
            entry.compiled, entry.ready = compiled, ready and compiled.outcome == GOOD

    def add_time(self, time: Time) -> None:
        """Take a time, and learn from it once a kernel has been timed at every size."""
        self.marks.add(time)
        entry = self.entries.get(time.slug)
        mark = self.marks.mark(time.slug, BRIEF)
        if entry is None or mark is None or self.stage != SCREEN:
            return
        first = all(self.marks.has(time.slug, s, BRIEF, (0, 1)) for s in self.survey.sizes)
        if first and time.regime == BRIEF and time.repeat <= 1:
            self.chooser.tell(entry.schedule, math.exp(mark))
            better = mark < self._best - self.marks.noise(BRIEF)
            self._since_best = 0 if better else self._since_best + 1
            self._best = min(self._best, mark)

    def add_wrong(self, slug: str, message: str) -> None:
        """Take it that a kernel is not to be timed."""
        entry = self._entry(slug)
        entry.wrong = entry.wrong or message
        self.chooser.tell(entry.schedule, None)

    def _entry(self, slug: str) -> Entry:
        if slug not in self.entries:
            entry = self.entries[slug] = Entry(slug, from_slug(slug))
            self.chooser.known(entry.schedule)
        return self.entries[slug]

    # ---- the anchor

    @property
    def anchor(self) -> str | None:
        """The kernel that all others are timed beside: the first on the list that is right."""
        for slug in self._anchors:
            entry = self.entries.get(slug)
            if entry is None or entry.compiled is None or entry.good:
                return slug
        return None

    def fix_anchor(self, slug: str) -> None:
        """Have this anchor and no other: times beside another one mean nothing here."""
        self._anchors = [slug]

    # ---- what to compile

    def next_compile(self, now: float) -> str | None:
        """The slug of the next kernel to compile; None where there is none now."""
        if self.done:
            return None
        for slug in self._wanted():
            entry = self.entries.get(slug)
            idle = slug not in self._compiling and now >= self._elsewhere.get(slug, 0.0)
            if idle and (entry is None or not entry.ready):
                return slug
        if self.open(now):
            chosen = self.chooser.next()
            if chosen:
                return chosen.slug
            self._spent = True
        return None

    def compiling(self, slug: str) -> None:
        """Note that a kernel is being compiled."""
        self._entry(slug)
        self._compiling.add(slug)

    def compiling_elsewhere(self, slug: str, again: float) -> None:
        """Note that another process is at it, and when to ask whether it still is."""
        self._compiling.discard(slug)
        self._elsewhere[slug] = again

    def open(self, now: float) -> bool:
        """Whether more points are to be tried."""
        return (
            self.stage == SCREEN
            and not self._spent
            and now < self.until
            and len(self.entries) < self.effort.compile
            and self._since_best < self.effort.patience
            and self.anchor is not None
        )

    def _wanted(self) -> Iterator[str]:
        """Kernels that this process must have at hand: the anchor, and those to be timed."""
        if anchor := self.anchor:
            yield anchor
        for slug, entry in self.entries.items():
            untried = entry.compiled is None
            if (untried or entry.good) and not entry.ready and (untried or self._missing(slug)):
                yield slug

    # ---- what to time

    def next_round(self, now: float, claim: Callable[[str], bool]) -> Round | None:
        """The next kernels to time; None where there are none now.

        `claim` is asked for the job of each kernel, and says whether it is ours; it may bring news.
        """
        if self.anchor is None:
            self.done = True  # nothing that could be compared with is right
        anchor = self.entries.get(self.anchor or "")
        if self.done or anchor is None or not anchor.ready or anchor.compiled is None:
            return None
        if not self._checked(anchor):
            return self._round(anchor.compiled, [anchor.slug], self.survey.sizes, claim)
        for _ in STAGES:
            if task := self._stage_round(anchor.compiled, claim):
                return task
            if self.done or not self._stage_over(now):
                break
            self._advance()
        return None

    def _checked(self, entry: Entry) -> bool:
        """Whether the kernel has been checked against the reference: it has times."""
        return any(self.marks.repeats(entry.slug, s, BRIEF) for s in self.survey.sizes)

    def _stage_round(self, anchor: Compiled, claim: Callable[[str], bool]) -> Round | None:
        if self.done:
            return None
        stage = STAGES[self.stage]
        if stage.regime == BRIEF:
            return self._round(anchor, self._waiting(self.survey.sizes), self.survey.sizes, claim)
        for size in self.survey.sizes:
            if task := self._round(anchor, self._waiting((size,)), (size,), claim):
                return task
        return None

    def _round(
        self,
        anchor: Compiled,
        waiting: list[str],
        sizes: tuple[Sizes, ...],
        claim: Callable[[str], bool],
    ) -> Round | None:
        stage = STAGES[self.stage]
        chosen: list[Compiled] = []
        for slug in waiting:
            compiled = self.entries[slug].compiled
            job = job_of(slug, stage.regime, stage.repeats, sizes)
            free = compiled and job not in self._busy and claim(job)
            # another process may have timed it since, and given it up
            if free and compiled and set(sizes) & set(self._missing(slug)):
                chosen.append(compiled)
                self._busy.add(job)
            if len(chosen) == ROUND:
                break
        if not chosen:
            return None
        check = self.stage == SCREEN
        kernels = tuple(chosen)
        return Round(self.target, sizes, anchor, kernels, stage.regime, stage.repeats, check)

    def one_by_one(self, task: Round) -> list[Round]:
        """Split a round that failed, to see by which of its kernels."""
        self._busy.update(jobs_of(task))
        return [replace(task, kernels=(compiled,)) for compiled in task.kernels]

    def round_over(self, task: Round) -> None:
        """Note that a round has come back, well or not."""
        self._busy.difference_update(jobs_of(task))

    def _missing(self, slug: str) -> list[Sizes]:
        """The sizes at which this stage has no times of a kernel yet."""
        stage = STAGES[self.stage]
        sizes = [size for size in self.survey.sizes if self._runs(slug, size)]
        return [s for s in sizes if not self.marks.has(slug, s, stage.regime, stage.repeats)]

    def _runs(self, slug: str, size: Sizes) -> bool:
        return self.stage == SCREEN or slug in self._field.get(size, ())

    def _waiting(self, sizes: tuple[Sizes, ...]) -> list[str]:
        """The kernels at hand that lack times at these sizes."""
        return [
            slug
            for slug, entry in self.entries.items()
            if entry.good and entry.ready and set(sizes) & set(self._missing(slug))
        ]

    # ---- stages

    def _stage_over(self, now: float) -> bool:
        if self._busy or self._compiling or self.open(now):
            return False
        return not any(
            entry.compiled is None or (entry.good and self._missing(slug))
            for slug, entry in self.entries.items()
            if not entry.wrong
        )

    def _advance(self) -> None:
        """Go on to the next stage with whom it takes, or be done."""
        self.stage += 1
        if self.stage > FINAL:
            lead = self.marks.leader()
            ahead = [self.marks.lead_at(size) for size in self.survey.sizes]
            if lead is None or (lead.sure and all(x is None or x.sure for x in ahead)):
                self.done = True
        if self.stage == (len(STAGES) if self.effort.long_runs else FINAL):
            self.done = True
        if self.done:
            return
        stage = STAGES[self.stage]
        order = [slug for slug in self.marks.ranked(BRIEF) if self._still_good(slug)]
        count = max(stage.least, math.ceil(len(order) * stage.keep))
        first = order[:count]
        self._field = {}
        for size in self.survey.sizes:
            at = [slug for slug in self.marks.ranked_at(size, BRIEF) if self._still_good(slug)]
            self._field[size] = list(dict.fromkeys([*first, *at[: max(2, count // 4)]]))
        if stage.regime == BRIEF:  # a brief round costs little: all sizes for all of them
            everyone = list(dict.fromkeys(slug for field in self._field.values() for slug in field))
            self._field = dict.fromkeys(self.survey.sizes, everyone)
        for slug, entry in self.entries.items():
            runs = slug == self.anchor or any(slug in field for field in self._field.values())
            if entry.compiled and entry.compiled.packed and not runs:  # a megabyte each
                entry.compiled, entry.ready = replace(entry.compiled, packed=b""), False
        if not order:
            self.done = True

    def _still_good(self, slug: str) -> bool:
        entry = self.entries.get(slug)
        return entry is not None and entry.good

    # ---- how it stands

    @property
    def ahead(self) -> int:
        """How many kernels are being compiled, or wait for their first times."""
        good = [entry for entry in self.entries.values() if entry.ready and entry.good]
        return len(self._compiling) + sum(not self._checked(entry) for entry in good)

    @property
    def timed(self) -> int:
        """How many kernels were timed at every size."""
        return len(self.marks.slugs())

    def left(self) -> int:
        """How many points might still be tried."""
        return max(0, min(self.effort.compile, len(self.survey.points)) - len(self.entries))
