"""Search: spaces, a lab and a store go in, the best schedules come out, and all is remembered.

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

from fagen.dispatch.choice import meant, pick
from fagen.errors import BuildError, CacheError, DeviceError, FagenError, ToolchainError
from fagen.problem import Problem, Sizes, lengths_in_words, solves
from fagen.registry import from_slug, read, schedules
from fagen.search.contest import HEAT, STAGES, Contest, jobs_of
from fagen.search.declared import Declared, Effort
from fagen.search.kinds import space_of
from fagen.search.lab import Lab
from fagen.search.space import Survey, survey
from fagen.search.store import Store
from fagen.search.tasks import FAILED, Compiled, Heat, Timed
from fagen.vocab import PASSES

TICK = 0.2  # seconds between looks at what others found, and at the clock
LAST_MINUTE = 45.0  # seconds kept for the last target's long runs
LAST_HEAT = 3.0  # seconds before the end from which none is begun
AHEAD = 2  # kernels that wait to be compiled, so that no processor does
PATIENCE = 2.0  # seconds until one asks again after what another process compiles
TELL = 5.0  # seconds between lines of progress

Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """How a search ended; what it found is in the store."""

    contests: tuple[Contest, ...]
    card: tuple[str, str]
    interrupted: bool
    out_of_time: bool


class Search:
    """One process's part in a search; `run` does it all."""

    def __init__(
        self,
        spaces: Sequence[Declared],
        lab: Lab,
        store: Store,
        *,
        minutes: float | None = None,
        say: Say = lambda line: None,
        only: Callable[[Survey], Survey] = lambda survey: survey,
    ) -> None:
        self._lab, self._store, self._say = lab, store, say
        self._compiler = lab.work.compiler()
        self._began = time.monotonic()
        self._deadline = self._began + minutes * 60 if minutes else float("inf")
        self._compiling: dict[Future[Compiled], tuple[Contest, str]] = {}
        self._timing: dict[Future[Timed], tuple[Contest, Heat, Any]] = {}
        self._alone: list[tuple[Contest, Heat]] = []  # kernels of a heat that failed, one by one
        self._seen = [0, 0, 0]  # the last numbers read from the store
        self._hashes: dict[str, str] = {}
        self._told = 0.0
        self._contests = []
        for space in spaces:
            store.put_space(space.name, space.text)
            for target in space.targets():
                found = only(survey(space, target))
                store.put_survey(target, summary(found, space))
                first = anchors(found, space.effort)
                now = serving(found, lab.card[0])
                self._contests.append(Contest(found, space.effort, first, now))
        shares = [contest.effort.share for contest in self._contests]
        ready = self._deadline - LAST_MINUTE - self._began
        if minutes:
            for contest, upto in zip(self._contests, accumulate(shares), strict=True):
                contest.until = self._began + max(0.5 * minutes * 60, ready) * upto / sum(shares)

    def run(self) -> Outcome:
        """Search until all is done, time is up, or Ctrl-C is pressed."""
        interrupted = False
        try:
            self._news()
            for contest in self._contests:
                if known := self._store.anchors().get((contest.target.name, *self._lab.card)):
                    contest.fix_anchor(known)
            while not all(contest.done for contest in self._contests):
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
        return Outcome(tuple(self._contests), self._lab.card, interrupted, late)

    # ---- handing out

    def _hand_out(self) -> None:
        now = time.monotonic()
        free = set(self._lab.gpus) - {gpu for _, _, gpu in self._timing.values()}
        for gpu in sorted(free, key=str):
            if work := self._next_heat(now):
                contest, heat = work
                self._timing[self._lab.time(heat, gpu)] = (contest, heat, gpu)
        # a heat of each target before more of any: what is found says what is worth compiling
        for most in (HEAT, math.inf):
            for contest in self._contests:
                self._compile(contest, most, now)

    def _compile(self, contest: Contest, most: float, now: float) -> None:
        """Have kernels compiled while there is room, until so many of the target are ahead."""
        while (
            len(self._compiling) < self._lab.compile_slots + AHEAD
            and contest.ahead < most
            and (slug := contest.next_compile(now))
        ):
            contest.compiling(slug)
            if self._store.claim(f"compile {slug}"):
                self._compiling[self._lab.compile(slug)] = (contest, slug)
            else:
                contest.compiling_elsewhere(slug, now + PATIENCE)

    def _next_heat(self, now: float) -> tuple[Contest, Heat] | None:
        if now + LAST_HEAT > self._deadline:
            return None
        if self._alone:
            return self._alone.pop()
        for contest in self._contests:
            if heat := contest.next_heat(now, self._claim):
                return contest, heat
        return None

    def _claim(self, job: str) -> bool:
        """Take a job; what another process did until then is known when this returns."""
        taken = self._store.claim(job)
        if taken:
            self._news()
        return taken

    # ---- taking in

    def _take_in(self) -> None:
        for made in [future for future in self._compiling if future.done()]:
            contest, slug = self._compiling.pop(made)
            self._take_compiled(contest, slug, made)
        for timed in [future for future in self._timing if future.done()]:
            contest, heat, _ = self._timing.pop(timed)
            contest.heat_over(heat)
            self._take_timed(contest, heat, timed)

    def _take_compiled(self, contest: Contest, slug: str, future: Future[Compiled]) -> None:
        try:
            made = future.result()
        except (ToolchainError, CacheError, DeviceError):
            raise
        except Exception as error:
            note = f"{type(error).__name__}: {error}"
            made = Compiled(slug, self._hash(slug), self._compiler, FAILED, note)
        self._hashes[slug] = made.source_hash
        self._store.put_compiled(contest.target, made, f"compile {slug}")
        contest.add_compiled(made, ready=True)

    def _take_timed(self, contest: Contest, heat: Heat, future: Future[Timed]) -> None:
        hashes = {made.slug: made.source_hash for made in heat.kernels}
        try:
            found = future.result()
        except BuildError:
            raise  # the kernel is gone: that is no fault of its own
        except Exception as error:
            if len(heat.kernels) > 1:  # which one was it?
                self._alone += [(contest, one) for one in contest.one_by_one(heat)]
                return
            said = ((heat.kernels[0].slug, f"{type(error).__name__}: {error}"),)
            found = Timed(*self._lab.card, (), said)
        card = (found.card, found.driver)
        if card != self._lab.card:
            raise FagenError(
                f"a GPU is {' with driver '.join(card)}, another "
                f"{' with driver '.join(self._lab.card)}: search one kind at a time"
            )
        wrong = {**_untimed(heat, found), **dict(found.wrong)}
        self._store.put_timed(
            contest.target, card, hashes, found.times, wrong.items(), jobs_of(heat)
        )
        if heat.anchor.slug in hashes and found.times:
            kept = self._store.put_anchor(contest.target, card, heat.anchor.slug)
            contest.fix_anchor(kept)

    def _news(self) -> None:
        """Take in what the store has that was not seen yet: ours, and others'."""
        by_target = {contest.target.name: contest for contest in self._contests}
        for number, row in self._store.compiled(self._seen[0]):
            self._seen[0] = number
            contest, made = by_target.get(row.target), row.made
            if (
                contest
                and made.compiler == self._compiler
                and made.source_hash == self._hash(made.slug)
            ):
                contest.add_compiled(made)
        for number, timed in self._store.timed(self._seen[1]):
            self._seen[1] = number
            contest, one = by_target.get(timed.target), timed.time
            current = not timed.source_hash or timed.source_hash == self._hash(one.slug)
            if contest and (timed.card, timed.driver) == self._lab.card and current:
                contest.add_time(one)
        for number, wrong in self._store.wrong(self._seen[2]):
            self._seen[2] = number
            contest = by_target.get(wrong.target)
            current = wrong.source_hash == self._hash(wrong.slug)
            if contest and (wrong.card, wrong.driver) == self._lab.card and current:
                contest.add_wrong(wrong.slug, wrong.said)

    def _hash(self, slug: str) -> str:
        if slug not in self._hashes:
            self._hashes[slug] = self._lab.work.source_hash(slug)
        return self._hashes[slug]

    # ---- saying

    def _progress(self) -> None:
        now = time.monotonic()
        if now - self._told >= TELL:
            self._told = now
            for contest in self._contests:
                if not contest.done:
                    self._say(f"{standing(contest)}{_left(self._deadline - now)}")
                    break


def _untimed(heat: Heat, found: Timed) -> dict[str, str]:
    """The kernels of which a time is missing: to ask again would not bring it."""
    there = {(one.slug, one.size, one.round) for one in found.times}
    return {
        made.slug: f"no time came back at {size}"
        for made in heat.kernels
        for size in heat.sizes
        for number in heat.rounds
        if (made.slug, size, number) not in there
    }


def standing(contest: Contest) -> str:
    """One line on how a contest stands."""
    entries = contest.entries.values()
    compiled = sum(entry.made is not None for entry in entries)
    bad = sum(entry.made is not None and not entry.good for entry in entries)
    at = min(contest.stage, len(STAGES) - 1)
    stage = f"{STAGES[at].regime} {at + 1}/{len(STAGES)}"
    line = (
        f"{contest.target.name}: {compiled} compiled ({bad} unfit), {contest.timed} timed, "
        f"{contest.left()} left to try, {'done' if contest.done else stage}"
    )
    if lead := contest.marks.leader():
        faster = math.exp(-(contest.marks.mark(lead.slug, lead.regime) or 0.0))
        line += f"; {lead.slug} {faster:.3f} × anchor"
        if over := contest.marks.over_peer(lead.slug, lead.regime):
            line += f", {over:.3f} × {contest.target.peer.title}"
    return line


def _left(seconds: float) -> str:
    if math.isinf(seconds):
        return ""
    return f"; {int(max(0, seconds)) // 60}:{int(max(0, seconds)) % 60:02} left"


def anchors(found: Survey, effort: Effort) -> list[str]:
    """The kernels to measure others by, first choice first."""
    slugs = [effort.anchor] if effort.anchor else []
    slugs += sorted(
        (s.slug for s in map(read, schedules(found.kind)) if solves(s, found.target)), key=len
    )
    slugs += [found.schedule(point).slug for point in found.best[:3]]
    fitting = (slug for slug in slugs if solves(from_slug(slug), found.target))
    return list(dict.fromkeys(fitting))


def serving(found: Survey, card: str) -> list[str]:
    """The kernels that calls of these sizes get today, by dispatch tables or by default."""
    if not found.points:
        return []
    any_of = found.schedule(found.points[0])
    if PASSES[found.kind].computes:  # by a rule and rows of its own
        slugs = (meant(any_of.slug, size, card).slug for size in found.sizes)
        return list(dict.fromkeys(slugs))
    # what a target leaves open, as layout and scales of e4m3, all its points have in common
    problem = replace(Problem.of(any_of), out_dtype=None)
    served = (pick(problem, size, card) for size in found.sizes)
    return list(dict.fromkeys(one.slug for one in served if one.kind == found.kind))


def summary(found: Survey, declared: Declared) -> dict[str, Any]:
    """What a store keeps of a survey: counts, reasons, the predicted best."""
    return {
        "space": declared.name,
        "kind": found.kind,
        "target": {key: getattr(found.target, key) for key in space_of(found.kind).problem_keys},
        "total": found.total,
        "fit": len(found.points),
        "refused": [[r.reason, r.points, r.example] for r in found.refusals],
        "tiles": [[m, n, why] for (m, n), why in sorted(found.reasons.items())],
        "cells": [[m, n] for m, n in sorted(found.cells)],
        "sizes": [
            _said(size) | {"weight": weight}
            for size, weight in zip(found.sizes, found.weights, strict=True)
        ],
        "predicted": [
            [found.schedule(point).slug, found.predicted(point)] for point in found.best[:10]
        ],
    }


def _said(size: Sizes) -> dict[str, Any]:
    """Sizes as a store keeps them: lengths of packed sequences in words."""
    names = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k")
    said = {name: getattr(size, name) for name in names}
    return said | ({"lengths": lengths_in_words(size.sequences)} if size.packed else {})
