"""Search: spaces, an executor and a store go in, the best schedules come out, all is remembered.

One loop hands out work and takes in results.  Everything goes through the store first, also what
another process put there, so that a search that was killed goes on where it was.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from fagen.dispatch.select import serve
from fagen.errors import BuildError, CacheError, DeviceError, FagenError, ToolchainError
from fagen.problem import Problem, solves
from fagen.registry import from_slug, read, schedules
from fagen.search.declared import Declared, Effort
from fagen.search.executor import Executor
from fagen.search.kinds import space_of
from fagen.search.rows import LATER, TimedRow, WrongRow, columns_of
from fagen.search.space import Survey, survey
from fagen.search.store import Store
from fagen.search.tasks import FAILED, Compiled, Round, Timed
from fagen.search.tournament import ROUND, STAGES, Tournament, jobs_of

TICK = 0.2  # seconds between looks at what others found, and at the clock
LAST_MINUTE = 45.0  # seconds kept for the last target's long runs
LAST_ROUND = 3.0  # seconds before the end from which none is begun
AHEAD = 2  # kernels that wait to be compiled, so that no processor does
PATIENCE = 2.0  # seconds until one asks again after what another process compiles
TELL = 5.0  # seconds between lines of progress

Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """How a search ended; what it found is in the store."""

    tournaments: tuple[Tournament, ...]
    card: tuple[str, str]
    interrupted: bool
    out_of_time: bool


class Search:
    """One process's part in a search; `run` does it all."""

    def __init__(
        self,
        spaces: Sequence[Declared],
        executor: Executor,
        store: Store,
        *,
        minutes: float | None = None,
        say: Say = lambda line: None,
        only: Callable[[Survey], Survey] = lambda survey: survey,
    ) -> None:
        self._executor, self._store, self._say = executor, store, say
        self._compiler = executor.work.compiler()
        self._began = time.monotonic()
        self._deadline = self._began + minutes * 60 if minutes else float("inf")
        self._compiling: dict[Future[Compiled], tuple[Tournament, str]] = {}
        self._timing: dict[Future[Timed], tuple[Tournament, Round, Any]] = {}
        self._alone: list[tuple[Tournament, Round]] = []  # of a round that failed, one by one
        self._seen = [0, 0, 0]  # the last numbers read from the store
        self._hashes: dict[str, str] = {}
        self._told = 0.0
        self._tournaments = []
        for space in spaces:
            store.put_space(space.name, space.text)
            for target in space.targets():
                surveyed = only(survey(space, target))
                store.put_survey(target, summary(surveyed, space))
                first = anchors(surveyed, space.effort)
                now = serving(surveyed, executor.card[0])
                self._tournaments.append(Tournament(surveyed, space.effort, first, now))
        shares = [tournament.effort.share for tournament in self._tournaments]
        ready = self._deadline - LAST_MINUTE - self._began
        if minutes:
            for tournament, upto in zip(self._tournaments, accumulate(shares), strict=True):
                tournament.until = self._began + max(0.5 * minutes * 60, ready) * upto / sum(shares)

    def run(self) -> Outcome:
        """Search until all is done, time is up, or Ctrl-C is pressed."""
        interrupted = False
        try:
            self._news()
            anchors = self._store.anchors()
            for tournament in self._tournaments:
                if anchor := anchors.get((tournament.target.name, *self._executor.card)):
                    tournament.fix_anchor(anchor)
            while not all(tournament.done for tournament in self._tournaments):
                if time.monotonic() > self._deadline:
                    break
                self._hand_out()
                busy: list[Future[Any]] = [*self._compiling, *self._timing]
                if busy:
                    wait(busy, timeout=TICK, return_when=FIRST_COMPLETED)
                else:
                    time.sleep(TICK / 4)
                self._take_in()
                self._news()
                self._progress()
        except KeyboardInterrupt:
            interrupted = True
        late = time.monotonic() > self._deadline
        return Outcome(tuple(self._tournaments), self._executor.card, interrupted, late)

    # ---- handing out

    def _hand_out(self) -> None:
        now = time.monotonic()
        free = set(self._executor.gpus) - {gpu for _, _, gpu in self._timing.values()}
        for gpu in sorted(free, key=str):
            if work := self._next_round(now):
                tournament, task = work
                self._timing[self._executor.time(task, gpu)] = (tournament, task, gpu)
        # a round of each target before more of any: what is found says what is worth compiling
        for most in (ROUND, math.inf):
            for tournament in self._tournaments:
                self._compile(tournament, most, now)

    def _compile(self, tournament: Tournament, most: float, now: float) -> None:
        """Have kernels compiled while there is room, until so many of the target are ahead."""
        while (
            len(self._compiling) < self._executor.compile_slots + AHEAD
            and tournament.ahead < most
            and (slug := tournament.next_compile(now))
        ):
            tournament.compiling(slug)
            if self._store.claim(f"compile {slug}"):
                self._compiling[self._executor.compile(slug)] = (tournament, slug)
            else:
                tournament.compiling_elsewhere(slug, now + PATIENCE)

    def _next_round(self, now: float) -> tuple[Tournament, Round] | None:
        if now + LAST_ROUND > self._deadline:
            return None
        if self._alone:
            return self._alone.pop()
        for tournament in self._tournaments:
            if task := tournament.next_round(now, self._claim):
                return tournament, task
        return None

    def _claim(self, job: str) -> bool:
        """Take a job; what another process did until then is known when this returns."""
        claim = self._store.claim(job)
        if claim:
            self._news()
        return claim

    # ---- taking in

    def _take_in(self) -> None:
        for compiled in [future for future in self._compiling if future.done()]:
            tournament, slug = self._compiling.pop(compiled)
            self._take_compiled(tournament, slug, compiled)
        for timed in [future for future in self._timing if future.done()]:
            tournament, task, _ = self._timing.pop(timed)
            tournament.round_over(task)
            self._take_timed(tournament, task, timed)

    def _take_compiled(self, tournament: Tournament, slug: str, future: Future[Compiled]) -> None:
        try:
            compiled = future.result()
        except (ToolchainError, CacheError, DeviceError):
            raise
        except Exception as error:
            note = f"{type(error).__name__}: {error}"
            compiled = Compiled(slug, self._hash(slug), self._compiler, FAILED, note)
        self._hashes[slug] = compiled.source_hash
        self._store.put_compiled(tournament.target, compiled, f"compile {slug}")
        tournament.add_compiled(compiled, ready=True)

    def _take_timed(self, tournament: Tournament, task: Round, future: Future[Timed]) -> None:
        hashes = {compiled.slug: compiled.source_hash for compiled in task.kernels}
        try:
            timed = future.result()
        except BuildError:
            raise  # the kernel is gone: that is no fault of its own
        except Exception as error:
            if len(task.kernels) > 1:  # which one was it?
                self._alone += [(tournament, single) for single in tournament.one_by_one(task)]
                return
            why = ((task.kernels[0].slug, f"{type(error).__name__}: {error}"),)
            timed = Timed(*self._executor.card, (), why)
        card = (timed.card, timed.driver)
        if card != self._executor.card:
            raise FagenError(
                f"a GPU is {' with driver '.join(card)}, another "
                f"{' with driver '.join(self._executor.card)}: search one kind at a time"
            )
        wrong = {**_untimed(task, timed), **dict(timed.wrong)}
        self._store.put_timed(
            tournament.target, card, hashes, timed.times, wrong.items(), jobs_of(task)
        )
        if task.anchor.slug in hashes and timed.times:
            kept = self._store.put_anchor(tournament.target, card, task.anchor.slug)
            tournament.fix_anchor(kept)

    def _news(self) -> None:
        """Take in what the store has that was not seen yet: ours, and others'."""
        by_target = {tournament.target.name: tournament for tournament in self._tournaments}
        for row in self._store.compiled(self._seen[0]):
            self._seen[0] = row.number
            compiled = row.compiled
            if (
                (tournament := by_target.get(row.target))
                and compiled.compiler == self._compiler
                and self._is_current(compiled.slug, compiled.source_hash)
            ):
                tournament.add_compiled(compiled)
        for timed in self._store.timed(self._seen[1]):
            self._seen[1] = timed.number
            if (tournament := by_target.get(timed.target)) and self._is_ours(timed):
                tournament.add_time(timed.time)
        for wrong in self._store.wrong(self._seen[2]):
            self._seen[2] = wrong.number
            if (tournament := by_target.get(wrong.target)) and self._is_ours(wrong):
                tournament.add_wrong(wrong.slug, wrong.said)

    def _is_ours(self, row: TimedRow | WrongRow) -> bool:
        """Whether a row is of this card and driver, and of a source as it is rendered today."""
        same_card = (row.card, row.driver) == self._executor.card
        return same_card and self._is_current(row.slug, row.source_hash)

    def _is_current(self, slug: str, source_hash: str) -> bool:
        return not source_hash or source_hash == self._hash(slug)  # a peer has no source

    def _hash(self, slug: str) -> str:
        if slug not in self._hashes:
            self._hashes[slug] = self._executor.work.source_hash(slug)
        return self._hashes[slug]

    # ---- saying

    def _progress(self) -> None:
        now = time.monotonic()
        if now - self._told >= TELL:
            self._told = now
            for tournament in self._tournaments:
                if not tournament.done:
                    self._say(f"{standing(tournament)}{_left(self._deadline - now)}")
                    break


def _untimed(task: Round, timed: Timed) -> dict[str, str]:
    """The kernels of which a time is missing: to ask again would not bring it."""
    timed_rounds = {(time.slug, time.size, time.repeat) for time in timed.times}
    return {
        compiled.slug: f"no time came back at {size}"
        for compiled in task.kernels
        for size in task.sizes
        for number in task.repeats
        if (compiled.slug, size, number) not in timed_rounds
    }


def standing(tournament: Tournament) -> str:
    """One line on how a tournament stands."""
    entries = tournament.entries.values()
    compiled = sum(entry.compiled is not None for entry in entries)
    bad = sum(entry.compiled is not None and not entry.good for entry in entries)
    at = min(tournament.stage, len(STAGES) - 1)
    stage = f"{STAGES[at].regime} {at + 1}/{len(STAGES)}"
    line = (
        f"{tournament.target.name}: {compiled} compiled ({bad} unfit), {tournament.timed} timed, "
        f"{tournament.left()} left to try, {'done' if tournament.done else stage}"
    )
    if lead := tournament.marks.leader():
        faster = math.exp(-(tournament.marks.mark(lead.slug, lead.regime) or 0.0))
        line += f"; {lead.slug} {faster:.3f} × anchor"
        if over := tournament.marks.over_peer(lead.slug, lead.regime):
            line += f", {over:.3f} × {tournament.target.peer.title}"
    return line


def _left(seconds: float) -> str:
    if math.isinf(seconds):
        return ""
    return f"; {int(max(0, seconds)) // 60}:{int(max(0, seconds)) % 60:02} left"


def anchors(survey: Survey, effort: Effort) -> list[str]:
    """The kernels to measure others by, first choice first."""
    slugs = [effort.anchor] if effort.anchor else []
    slugs += sorted(
        (s.slug for s in map(read, schedules(survey.kind)) if solves(s, survey.target)), key=len
    )
    slugs += [survey.schedule(point).slug for point in survey.best[:3]]
    fitting = (slug for slug in slugs if solves(from_slug(slug), survey.target))
    return list(dict.fromkeys(fitting))


def serving(survey: Survey, card: str) -> list[str]:
    """The kernels that calls of these sizes get today, by dispatch tables or by default."""
    if not survey.points:
        return []
    any_of = survey.schedule(survey.points[0])
    # what a target leaves open, as layout and scales of e4m3, all its points have in common
    problem = replace(Problem.searched(any_of), out_dtype=None)
    served = (serve(problem, size, card).schedule for size in survey.sizes)
    return list(dict.fromkeys(row.slug for row in served if row.kind == survey.kind))


def summary(survey: Survey, declared: Declared) -> dict[str, Any]:
    """What a store keeps of a survey: counts, reasons, the predicted best."""
    return {
        "space": declared.name,
        "kind": survey.kind,
        "target": {
            key: getattr(survey.target, key)
            for key in space_of(survey.kind).problem_keys
            if key not in LATER or key in survey.target.variant
        },
        "total": survey.total,
        "fit": len(survey.points),
        "refused": [[r.reason, r.points, r.example] for r in survey.refusals],
        "tiles": [[m, n, why] for (m, n), why in sorted(survey.reasons.items())],
        "cells": [[m, n] for m, n in sorted(survey.cells)],
        "sizes": [
            columns_of(size) | {"weight": weight}
            for size, weight in zip(survey.sizes, survey.weights, strict=True)
        ],
        "predicted": [
            [survey.schedule(point).slug, survey.predicted(point)] for point in survey.best[:10]
        ],
    }
