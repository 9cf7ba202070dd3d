"""Say what a store's times mean: leaders, which kernel for which length, schedules to write."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from fagen import outputs
from fagen.arch import SM90
from fagen.dispatch import tables as dispatch_table
from fagen.dispatch.rows import MOST, Row
from fagen.dispatch.select import sized
from fagen.paths import make_folder
from fagen.problem import Problem, Sizes
from fagen.registry import from_slug, written
from fagen.search.choice import spearman
from fagen.search.kinds import space_of
from fagen.search.marks import BRIEF, LONG, Lead, Marks
from fagen.search.rows import sizes_from
from fagen.search.space import mean, normalised
from fagen.search.store import Store
from fagen.search.tasks import GOOD, Compiled
from fagen.vocab import PASSES

WORTH = 0.01  # by which a kernel must be faster at one size to be preferred there
# Calls with no more query rows make at most two tiles, of the tallest, for each SM: how
# tall tiles are matters more to them than how many keys they have.
FEW_ROWS = 2 * SM90.sm_count * 256


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
    date: str = ""  # of the last search of the store; "" where none is kept

    @property
    def kind(self) -> str:
        """Of the schedules."""
        return self.target.kind

    @property
    def lead(self) -> Lead | None:
        """The fastest kernel of all."""
        return self.marks.leader()

    @property
    def correlation(self) -> float | None:
        """Rank correlation of predicted and measured times; None of fewer than two kernels."""
        pairs = self.pairs()
        return spearman([pair[1:] for pair in pairs]) if len(pairs) > 1 else None

    @property
    def regime(self) -> str:
        """Of the runs by which the fastest kernel is told: long ones, where there are any."""
        return self.lead.regime if self.lead else BRIEF

    @property
    def over_anchor(self) -> float | None:
        """The leader's speed ÷ the anchor's, in the runs by which it leads."""
        lead = self.lead
        mark = self.marks.mark(lead.slug, lead.regime) if lead else None
        return None if mark is None else math.exp(-mark)

    @property
    def over_peer(self) -> float | None:
        """The leader's speed ÷ the peer's, in the runs by which it leads; None without these."""
        return self.marks.over_peer(self.lead.slug, self.lead.regime) if self.lead else None

    def pairs(self) -> list[tuple[str, float, float]]:
        """Each timed kernel with its predicted and its measured time: weighted means, seconds.

        Of brief runs, which all of them have had.
        """
        kernels, weights = [], self.marks.weights
        predict = space_of(self.kind).predictor(self.sizes)
        for slug in self.marks.slugs():
            measured = [self.marks.seconds(slug, size, BRIEF) for size in self.sizes]
            timed = [seconds for seconds in measured if seconds is not None]
            predicted = mean(predict(from_slug(slug).values()), weights)
            kernels.append((slug, predicted, mean(timed, weights)))
        return kernels

    @property
    def by_groups(self) -> bool:
        """Whether calls choose by rows of queries: then `groups` says it, not ranges and few."""
        return bool(PASSES[self.kind].computes)

    def groups(self) -> list[tuple[int, float, str]]:
        """Which kernel for how many rows of a group, up to how many query rows in all.

        It is the fastest on average for so many rows of a group, but where another is faster by
        more than the noise and than WORTH; all of the bits that calls have.
        """
        if not self.by_groups or (slug := next(iter(self.marks.slugs()), None)) is None:
            return []
        calls: dict[tuple[Any, ...], list[Sizes]] = {}
        keys = space_of(self.kind).promised
        for size in self.sizes:
            values = sized(slug, size).values()
            bits = tuple(values[key] for key in keys)
            calls.setdefault((values["rows"], values["num_splits"], bits), []).append(size)
        chosen: list[tuple[int, float, str]] = []
        for (rows, _, bits), sizes in sorted(calls.items()):
            like = [
                kernel
                for kernel in self.marks.slugs()
                if bits == tuple(from_slug(kernel).values()[key] for key in keys)
            ]
            if like:
                chosen += [(rows, most, best) for most, best in _ends(self._best_like(like, sizes))]
        return chosen

    def _best_like(self, slugs: Sequence[str], sizes: Sequence[Sizes]) -> list[tuple[int, str]]:
        """The kernel of these for the sizes of each number of query rows, which rise.

        By brief runs, which all have had.
        """
        leader = min(slugs, key=lambda slug: self._mean_log(slug, sizes, BRIEF))
        chosen = []
        for rows, group in groupby(sorted(sizes, key=_query_rows), key=_query_rows):
            alike = list(group)
            best = min(slugs, key=lambda slug: self._mean_log(slug, alike, BRIEF))
            ahead = self._mean_log(leader, alike, BRIEF) - self._mean_log(best, alike, BRIEF)
            leads = [self.marks.lead_at(size) for size in alike]
            error = max((lead.error for lead in leads if lead), default=0.0)
            chosen.append((rows, leader if ahead < max(WORTH, 2 * error) else best))
        return chosen

    def _mean_log(self, slug: str, sizes: Sequence[Sizes], regime: str | None = None) -> float:
        """A kernel's weighted mean over some sizes, in the runs of a regime or in its longest."""
        weights = dict(zip(self.sizes, self.marks.weights, strict=True))
        logs = [(self.marks.at(slug, size, regime), weights[size]) for size in sizes]
        summed = sum(math.inf if log is None else log * weight for log, weight in logs)
        return summed / sum(weights[size] for size in sizes)

    def ranges(self) -> list[tuple[int, float, str]]:
        """Which kernel is to be used from how many keys to how many.

        It is the fastest of all, but where another is faster by more than the noise and than WORTH.
        """
        if self.by_groups:
            return []
        if self.target.varlen:  # no choice is by lengths
            return [(0, math.inf, self.lead.slug)] if self.lead else []
        chosen: list[tuple[int, float, str]] = []
        least = 0
        for most, slug in _ends(self._chosen(self._many(), key=lambda size: size.seqlen_k)):
            chosen.append((least, most, slug))
            least = int(most) + 1 if math.isfinite(most) else 0
        return chosen

    def few(self) -> list[tuple[int, str]]:
        """Which kernel is to be used up to how many query rows, whatever the number of keys.

        It is chosen as in ranges, of the sizes with few rows; none serves more than these have.
        """
        if self.by_groups or self.target.varlen:
            return []
        many = self._many()
        sizes = [size for size in self.sizes if size not in many]
        chosen = self._chosen(sizes, key=_query_rows)
        return [(int(min(end, chosen[-1][0])), slug) for end, slug in _ends(chosen)]

    def _many(self) -> list[Sizes]:
        return [size for size in self.sizes if _query_rows(size) > FEW_ROWS]

    def _chosen(self, sizes: Sequence[Sizes], key: Callable[[Sizes], int]) -> list[tuple[int, str]]:
        """The kernel for the sizes of each length or number of rows, which rise."""
        if (lead := self.lead) is None:
            return []
        groups = groupby(sorted(sizes, key=key), key=key)
        return [(value, self._best_of(list(group), lead.slug)) for value, group in groups]

    def _best_of(self, sizes: Sequence[Sizes], leader: str) -> str:
        """The kernel for some sizes: `leader`, unless one that is worth it there is faster."""
        candidates = dict.fromkeys(self.best_at(size, leader) for size in sizes)
        return min(candidates, key=lambda slug: self._mean_log(slug, sizes))

    def best_at(self, size: Sizes, leader: str) -> str:
        """The kernel for one size: `leader`, unless another is worth it there."""
        lead = self.marks.lead_at(size)
        if lead is None or lead.slug == leader:
            return leader
        behind = self.behind(leader, lead.slug, size)
        if behind is None or behind < max(WORTH, 2 * lead.error):
            return leader
        return lead.slug

    def behind(self, slug: str, other: str, size: Sizes) -> float | None:
        """The log of how much longer one kernel takes than another, by long runs where both have.

        None where there are no runs of both.
        """
        for regime in (LONG, BRIEF):
            ours, theirs = (self.marks.at(own, size, regime) for own in (slug, other))
            if ours is not None and theirs is not None:
                return ours - theirs
        return None

    def rows(self) -> list[Row]:
        """The rows of a dispatch table that say so."""
        by = f"fagen search, {self.date}" if self.date else "fagen search"
        if self.by_groups:
            return [
                Row(self.card, slug, rows_to=_bound(most), group_rows=group, by=by)
                for group, most, slug in self.groups()
            ]
        few = [Row(self.card, slug, rows_to=rows, by=by) for rows, slug in self.few()]
        by_keys = self.ranges()
        return [
            *few,
            *(Row(self.card, slug, least, _bound(most), by=by) for least, most, slug in by_keys),
        ]


def _bound(most: float) -> int:
    return MOST if math.isinf(most) else int(most)


def _query_rows(size: Sizes) -> int:
    """How many there are in all."""
    return size.batch * size.heads * size.seqlen_q


def _ends(chosen: Sequence[tuple[int, str]]) -> Iterator[tuple[float, str]]:
    """Yield up to where each kernel goes, of sizes in rising order with their kernels.

    Two meet at the geometric mean of their sizes; the last has no end.
    """
    for (size, slug), (after, other) in pairwise(chosen):
        if slug != other:
            yield math.isqrt(size * after), slug
    if chosen:
        yield math.inf, chosen[-1][1]


def results(store: Store) -> tuple[Result, ...]:
    """Read a store: a Result for each target that was surveyed, on each card.

    Where a kernel was rendered anew since, only the last source counts.
    """
    latest: dict[str, Compiled] = {}
    target_by_slug: dict[str, str] = {}
    for row in store.compiled():
        latest[row.compiled.slug] = row.compiled
        target_by_slug[row.compiled.slug] = row.target
    timed = store.timed()
    dates = [session.date for session in store.sessions()]
    targets = []
    for name, survey in store.surveys().items():
        counts = [dict(size) for size in survey["sizes"]]
        weights = normalised([size.pop("weight") for size in counts])
        sizes = tuple(sizes_from(**size) for size in counts)
        for card, driver in store.cards() or [("no card", "")]:
            marks = Marks(sizes, weights)
            for run in timed:
                same = (run.target, run.card, run.driver) == (name, card, driver)
                compiled = latest.get(run.time.slug)
                if same and (compiled is None or compiled.source_hash == run.source_hash):
                    marks.add(run.time)
            wrong = {
                row.slug: row.said
                for row in store.wrong()
                if (row.card, row.driver) == (card, driver) and target_by_slug.get(row.slug) == name
            }
            targets.append(
                Result(
                    target=target_of_survey(survey),
                    card=card,
                    driver=driver,
                    survey=survey,
                    sizes=sizes,
                    marks=marks,
                    compiled=tuple(m for s, m in latest.items() if target_by_slug[s] == name),
                    wrong=wrong,
                    anchor=store.anchors().get((name, card, driver)),
                    date=dates[-1] if dates else "",
                )
            )
    return tuple(sorted(targets, key=_place))


def target_of_survey(survey: Mapping[str, Any]) -> Problem:
    """What a survey is of."""
    return Problem(**survey["target"], kind=survey["kind"])


def _place(result: Result) -> tuple[Any, ...]:
    t = result.target
    return (
        list(PASSES).index(t.kind),
        t.dtype,
        t.head_dim,
        t.head_dim_v,
        t.mask != "full",
        t.mask,
        t.varlen,
        result.card,
    )


# ---- writing ------------------------------------------------------------------------------------


def write(targets: Sequence[Result], folder: Path) -> list[Path]:
    """Write the best schedules as TOML, and the dispatch table with them; return the paths.

    Raises ScheduleError where there is a table that they cannot be added to, FagenError where its
    comments would be lost, or where a link leads out of the folder; nothing is written.
    """
    texts = {}
    for result in targets:
        for slug in dict.fromkeys(row.slug for row in result.rows()):
            schedule = from_slug(slug)
            texts[f"{schedule.kind}/{slug}.toml"] = written(schedule, _why(result, slug))
    for path in texts:
        outputs.refuse_way(folder, path)
    table = folder / dispatch_table.NAME
    dispatch_table.update(table, [row for result in targets for row in result.rows()])
    fresh = [path for path in texts if not (folder / path).exists()]  # what is there is kept
    for path in fresh:
        make_folder((folder / path).parent)
        outputs.write(folder / path, texts[path], outputs.nothing, "a schedule")
    return [*(folder / path for path in fresh), table]


def _why(result: Result, slug: str) -> str:
    over = result.marks.over_peer(slug, result.regime)
    peer = f", {over:.2f} × {result.target.peer.title}" if over else ""
    return f"Found by `fagen search` on {result.card}{peer}."


# ---- telling ------------------------------------------------------------------------------------


def told(result: Result) -> Iterator[str]:
    """Yield lines: how far the search came, the leader, and where another is faster."""
    good = sum(compiled.outcome == GOOD for compiled in result.compiled)
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
    over = result.over_peer
    yield (
        f"  {lead.slug}: {result.over_anchor:.3f} × {result.anchor or 'the anchor'}"
        + (f", {over:.3f} × {result.target.peer.title}" if over else "")
        + f", in {lead.regime} runs"
    )
    if lead.second:
        sure = "more than the noise" if lead.sure else "within the noise"
        yield f"  ahead of {lead.second} by {lead.lead:.1%} ± {lead.error:.1%}: {sure}"
    for least, most, slug in result.ranges():
        if slug != lead.slug:
            upto = f"to {most:.0f}" if math.isfinite(most) else "on"
            yield f"  from {least} keys {upto}: {slug}"
    for size in result.sizes if result.target.varlen else ():
        if (slug := result.best_at(size, lead.slug)) != lead.slug:
            by = math.expm1(result.behind(lead.slug, slug, size) or 0.0)
            yield f"  at {size} {slug} is faster by {by:.1%}; one row is for all lengths"
    for rows, slug in result.few():
        yield f"  up to {rows} query rows: {slug}"
    for group, most, slug in result.groups():
        upto = f", up to {most:.0f} query rows" if math.isfinite(most) else ""
        yield f"  {group} rows to a KV head{upto}: {slug}"


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
        "runs": lead and lead.regime,
        "over_anchor": result.over_anchor,
        f"over_{result.target.peer.name}": result.over_peer,
        "yardstick": result.target.peer.title,
        "ranges": [
            [least, most if math.isfinite(most) else None, s] for least, most, s in result.ranges()
        ],
        "few": [list(row) for row in result.few()],
        "groups": [[g, most if math.isfinite(most) else None, s] for g, most, s in result.groups()],
    }


def surveyed(survey: dict[str, Any]) -> Iterator[str]:
    """Yield lines on a survey: what was refused and why, what remains, the predicted best."""
    name = target_of_survey(survey).name
    yield f"{name}: {survey['total']:,} points, {survey['fit']:,} fit"
    for reason, points, example in survey["refused"]:
        yield f"  {points:>7,} refused: {reason}"
        yield f"          such as {example}"
    yield f"  predicted best, mean over {len(survey['sizes'])} shapes:"
    for slug, time in survey["predicted"]:
        yield f"  {time * 1e6:>9.1f} µs  {slug}"
