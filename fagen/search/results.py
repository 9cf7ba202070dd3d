"""Say what a store's times mean: leaders, which kernel for which length, schedules to write."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from fagen.dispatch import tables as dispatch_table
from fagen.paths import write_whole
from fagen.problem import Problem, Sizes
from fagen.registry import DEFAULT, from_slug
from fagen.schedule import Schedule
from fagen.search.choice import spearman
from fagen.search.marks import BRIEF, LONG, Lead, Marks
from fagen.search.space import mean, normalised, space_of
from fagen.search.store import Store
from fagen.search.tasks import GOOD, Compiled

WORTH = 0.01  # by which a kernel must be faster at one size to be preferred there


@dataclass(frozen=True)
class Result:
    """All that is known of one target on one card."""

    target: Problem
    card: str
    driver: str
    survey: dict[str, Any]  # see run.summary
    sizes: tuple[Sizes, ...]
    marks: Marks
    compiled: tuple[Compiled, ...]
    wrong: dict[str, str]
    anchor: str | None

    @property
    def kind(self) -> str:
        """Of the schedules; a store may be older than the second kind."""
        return str(self.survey.get("kind", DEFAULT))

    @property
    def lead(self) -> Lead | None:
        """The fastest kernel of all."""
        return self.marks.leader()

    @property
    def correlation(self) -> float | None:
        """Rank correlation of predicted and measured times; None of fewer than two kernels."""
        pairs = self.pairs()
        return spearman([pair[1:] for pair in pairs]) if len(pairs) > 1 else None

    def pairs(self) -> list[tuple[str, float, float]]:
        """Each timed kernel with its predicted and its measured time: weighted means, seconds."""
        found, weights = [], self.marks.weights
        predict = space_of(self.kind).predictor(self.sizes)
        for slug in self.marks.slugs():
            measured = [self.marks.seconds(slug, size) for size in self.sizes]
            known = [one for one in measured if one is not None]
            predicted = mean(predict(from_slug(slug).values()), weights)
            found.append((slug, predicted, mean(known, weights)))
        return found

    def ranges(self) -> list[tuple[int, float, str]]:
        """Which kernel is to be used from how many keys to how many.

        It is the fastest of all, but where another is faster by more than the noise and than WORTH.
        """
        lead = self.lead
        square = [size for size in self.sizes if size.square]
        if lead is None or not square:
            return []
        chosen = [
            (size.seqlen_k, self.best_at(size, lead.slug))
            for size in sorted(square, key=lambda size: size.seqlen_k)
        ]
        runs = [[*run] for _, run in groupby(chosen, key=lambda one: one[1])]
        found: list[tuple[int, float, str]] = []
        least = 0
        for run, after in zip(runs, [*runs[1:], None], strict=True):
            most = math.isqrt(run[-1][0] * after[0][0]) if after else math.inf
            found.append((least, most, run[0][1]))
            least = 0 if math.isinf(most) else int(most) + 1
        return found

    def best_at(self, size: Sizes, leader: str) -> str:
        """The kernel for one size: `leader`, unless another is worth it there."""
        lead = self.marks.lead_at(size)
        regime = LONG if self.marks.rounds(leader, size, LONG) else BRIEF
        if lead is None or lead.slug == leader:
            return leader
        ours, theirs = (self.marks.at(slug, size, regime) for slug in (leader, lead.slug))
        if ours is None or theirs is None or ours - theirs < max(WORTH, 2 * lead.error):
            return leader
        return lead.slug

    def rows(self) -> list[dispatch_table.Row]:
        """The rows of a dispatch table that say so."""
        return [
            dispatch_table.Row.of(self.card, slug, least, most)
            for least, most, slug in self.ranges()
        ]


def results(store: Store) -> tuple[Result, ...]:
    """Read a store: a Result for each target that was surveyed, on each card.

    Where a kernel was rendered anew since, only the last source counts.
    """
    latest: dict[str, Compiled] = {}
    target_of: dict[str, str] = {}
    for _, row in store.compiled():
        latest[row.made.slug] = row.made
        target_of[row.made.slug] = row.target
    timed = [row for _, row in store.timed()]
    found = []
    for name, survey in store.surveys().items():
        counts = [dict(size) for size in survey["sizes"]]
        weights = normalised([size.pop("weight") for size in counts])
        sizes = tuple(Sizes(**size) for size in counts)
        for card, driver in store.cards() or [("no card", "")]:
            marks = Marks(sizes, weights)
            for one in timed:
                here = (one.target, one.card, one.driver) == (name, card, driver)
                made = latest.get(one.time.slug)
                if here and (made is None or made.source_hash == one.source_hash):
                    marks.add(one.time)
            wrong = {
                row.slug: row.said
                for _, row in store.wrong()
                if (row.card, row.driver) == (card, driver) and target_of.get(row.slug) == name
            }
            found.append(
                Result(
                    target=Problem(**survey["target"]),
                    card=card,
                    driver=driver,
                    survey=survey,
                    sizes=sizes,
                    marks=marks,
                    compiled=tuple(m for s, m in latest.items() if target_of[s] == name),
                    wrong=wrong,
                    anchor=store.anchors().get((name, card, driver)),
                )
            )
    return tuple(sorted(found, key=_place))


def _place(result: Result) -> tuple[Any, ...]:
    t = result.target
    return t.dtype, t.head_dim, t.head_dim_v, t.mask != "full", t.mask, result.card


# ---- writing ------------------------------------------------------------------------------------


def write(found: Sequence[Result], folder: Path) -> list[Path]:
    """Write the best schedules as TOML, and the dispatch table with them; return the paths.

    Raises ScheduleError where there is a table that they cannot be added to; nothing is written.
    """
    paths = []
    table = folder / dispatch_table.NAME
    dispatch_table.update(table, [row for result in found for row in result.rows()])
    for result in found:
        for slug in dict.fromkeys(row.slug for row in result.rows()):
            schedule = from_slug(slug)
            path = folder / schedule.kind / f"{slug}.toml"
            if not path.exists():  # what someone wrote about it is kept
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, toml(schedule, _why(result, slug)))
                paths.append(path)
    return [*paths, table]


def _why(result: Result, slug: str) -> str:
    over = result.marks.over_peer(slug)
    peer = f", {over:.2f} × cuDNN" if over else ""
    return f"Found by `fagen search` on {result.card}{peer}."


def toml(schedule: Schedule, why: str) -> str:
    """Return a schedule's TOML: the keys that say something."""
    settings, sections = schedule.settings(), schedule.keys.sections
    lines = ["#:schema schedule.schema.json", f"# {why}"]
    for section in dict.fromkeys(sections.values()):
        said = {key: value for key, value in settings.items() if sections[key] == section}
        if said:
            lines += ["", f"[{section}]", *(f"{k} = {json.dumps(v)}" for k, v in said.items())]
    return "\n".join(lines) + "\n"


# ---- telling ------------------------------------------------------------------------------------


def told(result: Result) -> Iterator[str]:
    """Yield lines: how far the search came, the leader, and where another is faster."""
    good = sum(made.outcome == GOOD for made in result.compiled)
    marks, lead = result.marks, result.lead
    yield (
        f"{result.target.name} on {result.card}: {result.survey['fit']:,} of "
        f"{result.survey['total']:,} points fit; {len(result.compiled)} compiled, {good} well, "
        f"{len(marks.slugs())} timed"
    )
    if result.correlation is not None:
        yield f"  prediction and measurement: rank correlation {result.correlation:.2f}"
    if lead is None:
        yield "  nothing was timed at every shape yet"
        return
    faster = math.exp(-(marks.mark(lead.slug) or 0.0))
    over = marks.over_peer(lead.slug)
    yield f"  {lead.slug}: {faster:.3f} × {result.anchor or 'the anchor'}" + (
        f", {over:.3f} × cuDNN" if over else ""
    )
    if lead.second:
        sure = "more than the noise" if lead.sure else "within the noise"
        yield f"  ahead of {lead.second} by {lead.lead:.1%} ± {lead.error:.1%}: {sure}"
    for least, most, slug in result.ranges():
        if slug != lead.slug:
            upto = f"to {most:.0f}" if math.isfinite(most) else "on"
            yield f"  from {least} keys {upto}: {slug}"


def record(result: Result) -> dict[str, Any]:
    """What is known of a target, for JSON."""
    marks, lead = result.marks, result.lead
    return {
        "target": result.target.name,
        "card": result.card,
        "driver": result.driver,
        "points": result.survey["total"],
        "fit": result.survey["fit"],
        "compiled": len(result.compiled),
        "timed": len(marks.slugs()),
        "correlation": result.correlation,
        "anchor": result.anchor,
        "leader": lead and lead.slug,
        "lead": lead and lead.second and lead.lead,
        "lead_error": lead and lead.error,
        "over_anchor": lead and math.exp(-(marks.mark(lead.slug) or 0.0)),
        "over_cudnn": lead and marks.over_peer(lead.slug),
        "ranges": [
            [least, most if math.isfinite(most) else None, s] for least, most, s in result.ranges()
        ],
    }


def surveyed(survey: dict[str, Any]) -> Iterator[str]:
    """Yield lines on a survey: what was refused and why, what remains, the predicted best."""
    t = survey["target"]
    yield f"{Problem(**t).name}: {survey['total']:,} points, {survey['fit']:,} fit"
    for reason, points, example in survey["refused"]:
        yield f"  {points:>7,} refused: {reason}"
        yield f"          such as {example}"
    yield f"  predicted best, mean over {len(survey['sizes'])} shapes:"
    for slug, time in survey["predicted"]:
        yield f"  {time * 1e6:>9.1f} µs  {slug}"
