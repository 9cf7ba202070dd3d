"""Turn a store into one HTML page: every number and place worked out here, the template shows it.

The page needs nothing but itself: no script, no font, no network.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fagen.paths import write_whole
from fagen.problem import Sizes, flops
from fagen.registry import from_slug
from fagen.render import environment
from fagen.search.marks import PEER
from fagen.search.results import Result, results
from fagen.search.space import space_of
from fagen.search.store import Store
from fagen.search.tasks import GOOD

TEMPLATE = "search_report.html.j2"
PLOT = 420.0  # width and height of a plot's inside, in its own units
TOP = 12  # kernels in a table of the fastest
SLOWEST = 0.6  # of the leader's speed: as cold as a heat map shows


@dataclass(frozen=True)
class Cell:
    """A tile in the heat map: `heat` from 0 to 1 is its colour, None where there is no time."""

    text: str
    title: str
    kind: str  # timed | best | refused | unfit | untried
    heat: float | None = None
    strong: bool = False  # dark enough that its text must be the other colour


@dataclass(frozen=True)
class HeatRow:
    """The tiles of one block_m, by block_n."""

    block_m: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Dot:
    """A kernel in the plot of prediction and measurement."""

    x: float
    y: float
    title: str
    kind: str  # leader | kernel


@dataclass(frozen=True)
class Tick:
    """A mark on an axis."""

    at: float
    text: str


@dataclass(frozen=True)
class Plot:
    """Prediction across, measurement up, both logarithmic and of the same extent."""

    dots: tuple[Dot, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    size: float


@dataclass(frozen=True)
class Bar:
    """A speed as a bar: percentages of the widest; `low` and `high` bound its spread."""

    name: str
    kind: str  # leader | anchor | cudnn
    text: str
    width: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class SizeView:
    """One shape: the leader's, the anchor's and cuDNN's bars, and who is surely faster there."""

    name: str
    title: str
    bars: tuple[Bar, ...]
    best: str
    by: str


@dataclass(frozen=True)
class Line:
    """A line of a table."""

    cells: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class TargetView:
    """A target's part of the page."""

    name: str
    title: str
    anchor: str
    leader: str
    claim: str
    facts: tuple[tuple[str, str], ...]
    sizes: tuple[SizeView, ...]
    block_ns: tuple[int, ...]
    heat: tuple[HeatRow, ...]
    plot: Plot | None
    correlation: str
    fastest: tuple[Line, ...]
    refused: tuple[Line, ...]
    outcomes: tuple[Line, ...]
    ranges: tuple[Line, ...]


@dataclass(frozen=True)
class Report:
    """The page."""

    title: str
    cards: tuple[str, ...]
    targets: tuple[TargetView, ...]


def write_report(store: Path, path: Path) -> None:
    """Write the page about `store` to `path`.  Raises FagenError where it is no store."""
    write_whole(path, page(store))


def page(store: Path) -> str:
    """Return the page about a store as HTML."""
    with Store(store, read_only=True) as kept:
        found = results(kept)
    template = environment().overlay(autoescape=True).get_template(TEMPLATE)
    return template.render(report=view(found))


def view(found: Sequence[Result]) -> Report:
    """Work out all that the page shows."""
    return Report(
        title="fagen search",
        cards=tuple(dict.fromkeys(f"{one.card}, driver {one.driver}" for one in found)),
        targets=tuple(_target(one) for one in found),
    )


def _target(result: Result) -> TargetView:
    lead, t = result.lead, result.target
    block_ns, heat = _heat(result)
    v = "" if t.head_dim == t.head_dim_v else f" and {t.head_dim_v} (V)"
    r = result.correlation
    return TargetView(
        name=t.name,
        title=f"{t.dtype}, head dim {t.head_dim}{v}, {t.mask}",
        anchor=result.anchor or "none yet",
        leader=lead.slug if lead else "",
        claim=_claim(result),
        facts=tuple(_facts(result)),
        sizes=tuple(_size(result, size) for size in result.sizes) if lead else (),
        block_ns=block_ns,
        heat=heat,
        plot=_plot(result),
        correlation="not known yet" if r is None else f"{r:.2f}",
        fastest=tuple(_fastest(result)),
        refused=tuple(
            Line((reason, f"{points:,}"), example)
            for reason, points, example in result.survey["refused"]
        ),
        outcomes=tuple(_outcomes(result)),
        ranges=tuple(
            Line((f"{least:,} … {most:,.0f}" if math.isfinite(most) else f"{least:,} …", slug))
            for least, most, slug in result.ranges()
        ),
    )


def _claim(result: Result) -> str:
    """The result in a sentence."""
    lead, marks = result.lead, result.marks
    if lead is None:
        return "Nothing was timed at every shape yet."
    said = f"{math.exp(-(marks.mark(lead.slug) or 0.0)):.3f} × the anchor's speed"
    if over := marks.over_peer(lead.slug):
        said += f", {over:.3f} × cuDNN's"
    if lead.second:
        sure = "more than the noise" if lead.sure else "within the noise"
        said += f"; ahead of {lead.second} by {lead.lead:.1%} ± {lead.error:.1%}, {sure}"
    return f"{said}."


def _facts(result: Result) -> Iterator[tuple[str, str]]:
    good = sum(made.outcome == GOOD for made in result.compiled)
    yield "points", f"{result.survey['total']:,}"
    yield "fit", f"{result.survey['fit']:,}"
    yield "compiled", f"{len(result.compiled):,}"
    yield "compiled well", f"{good:,}"
    yield "timed", f"{len(result.marks.slugs()):,}"
    yield "wrong", f"{len(result.wrong):,}"
    if clocks := result.marks.clocks:
        yield "SM clock", f"{clocks[0]}–{clocks[1]} MHz"
    yield "card", f"{result.card}, driver {result.driver}"


# ---- speeds -------------------------------------------------------------------------------------


def _tflops(result: Result, slug: str, size: Sizes) -> float | None:
    seconds = result.marks.seconds(slug, size)
    return None if seconds is None else flops(result.target, size) / seconds / 1e12


def _size(result: Result, size: Sizes) -> SizeView:
    marks, lead = result.marks, result.lead
    assert lead
    best = result.best_at(size, lead.slug)
    names = {"leader": lead.slug, "anchor": result.anchor or "", "cudnn": PEER}
    speeds = {
        kind: (slug, speed)
        for kind, slug in names.items()
        if (speed := _tflops(result, slug, size)) is not None
    }
    widest = max((speed for _, speed in speeds.values()), default=1.0) * 1.06
    bars = []
    for kind, (slug, speed) in speeds.items():
        spread = marks.spread(slug, size)
        low, high = (None, None) if spread is None else (speed / (1 + spread), speed)
        bars.append(
            Bar(
                name={"cudnn": "cuDNN"}.get(kind, kind),
                kind=kind,
                text=f"{speed:.0f}" + ("" if spread is None else f" (spread {spread:.1%})"),
                width=_percent(speed, widest),
                low=None if low is None else _percent(low, widest),
                high=None if high is None else _percent(high, widest),
            )
        )
    ahead = (marks.at(lead.slug, size) or 0.0) - (marks.at(best, size) or 0.0)
    return SizeView(
        name=f"{size.seqlen_k:,}",
        title=str(size),
        bars=tuple(bars),
        best=best if best != lead.slug else "",
        by=f"{math.expm1(ahead):.1%}",
    )


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 2)


def _fastest(result: Result) -> Iterator[Line]:
    marks = result.marks
    first = None
    made = {one.slug: one for one in result.compiled}
    for slug in sorted(marks.slugs(), key=lambda slug: marks.mark(slug) or 0.0)[:TOP]:
        mark = marks.mark(slug) or 0.0
        first = mark if first is None else first
        over = marks.over_peer(slug)
        registers = made[slug].registers if slug in made else None
        yield Line(
            (
                slug,
                f"{math.exp(first - mark):.1%}",
                f"{math.exp(-mark):.3f}",
                "–" if over is None else f"{over:.3f}",
                "–" if registers is None else str(registers),
            )
        )


def _outcomes(result: Result) -> Iterator[Line]:
    counts = Counter(made.outcome for made in result.compiled)
    for outcome, count in counts.most_common():
        example = next(made for made in result.compiled if made.outcome == outcome)
        note = f"{example.slug}: {example.note.splitlines()[0]}" if example.note else ""
        yield Line((outcome, f"{count:,}"), note)
    for slug, said in result.wrong.items():
        yield Line((f"{slug} gave wrong results", "1"), said)


# ---- the heat map -------------------------------------------------------------------------------


def _heat(result: Result) -> tuple[tuple[int, ...], tuple[HeatRow, ...]]:
    """Each tile's fastest kernel beside the fastest of all."""
    marks = result.marks
    height, width = space_of(result.kind).tile_keys
    refused = {(m, n): why for m, n, why in result.survey["tiles"]}
    best: dict[tuple[int, int], tuple[float, str]] = {}
    tried: dict[tuple[int, int], Counter[str]] = {}
    for made in result.compiled:
        values = from_slug(made.slug).values()
        at = (values[height], values[width])
        tried.setdefault(at, Counter())[made.outcome] += 1
        mark = marks.mark(made.slug)
        if mark is not None:
            best[at] = min(best.get(at, (math.inf, "")), (mark, made.slug))
    first = min(best.values(), default=(0.0, ""))
    known = {*refused, *tried, *((m, n) for m, n in result.survey["cells"])}
    block_ms = sorted({m for m, _ in known})
    block_ns = tuple(sorted({n for _, n in known}))
    rows = tuple(
        HeatRow(m, tuple(_cell((m, n), best, first, refused, tried) for n in block_ns))
        for m in block_ms
    )
    return block_ns, rows


def _cell(
    at: tuple[int, int],
    best: dict[tuple[int, int], tuple[float, str]],
    first: tuple[float, str],
    refused: dict[tuple[int, int], str],
    tried: dict[tuple[int, int], "Counter[str]"],
) -> Cell:
    place = f"{at[0]} × {at[1]}"
    if at in best:
        mark, slug = best[at]
        speed = math.exp(first[0] - mark)
        heat = max(0.0, (speed - SLOWEST) / (1 - SLOWEST))
        count = sum(tried[at].values())
        return Cell(
            text=f"{100 * speed:.0f}",
            title=f"{place}: {slug}, {speed:.1%} of the fastest; {count} compiled",
            kind="best" if slug == first[1] else "timed",
            heat=round(heat, 3),
            strong=heat > 0.5,
        )
    if at in refused:
        short = "smem" if "memory" in refused[at] else "regs" if "regist" in refused[at] else "rule"
        return Cell(short, f"{place} never fits: {refused[at]}", "refused")
    if at in tried:
        outcome, _ = tried[at].most_common(1)[0]
        return Cell("×", f"{place}: {sum(tried[at].values())} compiled, all {outcome}", "unfit")
    return Cell("·", f"{place}: fits, not tried", "untried")


# ---- prediction and measurement -----------------------------------------------------------------


def _plot(result: Result) -> Plot | None:
    pairs = result.pairs()
    if len(pairs) < 2:
        return None
    lead = result.lead
    sides = [[one for _, one, _ in pairs], [one for _, _, one in pairs]]
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
        [Tick(place(at / 1e6, axis), f"{at:g}") for at in _round_numbers(starts[axis], extent)]
        for axis in (0, 1)
    ]
    return Plot(
        dots=tuple(sorted(dots, key=lambda dot: dot.kind == "leader")),
        x_ticks=tuple(ticks[0]),
        y_ticks=tuple(Tick(round(PLOT - tick.at, 1), tick.text) for tick in ticks[1]),
        size=PLOT,
    )


def _round_numbers(start: float, extent: float) -> list[float]:
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
