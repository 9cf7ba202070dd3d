"""Speeds: bars by shape, all of a page on one scale, and a target's fastest kernels."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fagen.problem import Sizes, flops
from fagen.search.marks import BRIEF, LONG
from fagen.search.report.words import Name, name, ratio
from fagen.search.results import Result

TOP = 12  # kernels in a table of the fastest
TICKS = 5  # at most, above zero
ROOM = 1.04  # of an axis beyond its longest bar


@dataclass(frozen=True)
class Tick:
    """A mark on an axis."""

    at: float
    text: str


@dataclass(frozen=True)
class Scale:
    """The axis of all bars: TFLOP/s at its end, and marks in per cent of it."""

    end: float
    ticks: tuple[Tick, ...]


@dataclass(frozen=True)
class Bar:
    """A speed as a bar: per cent of the axis; `low` and `width` bound its spread."""

    kind: str  # leader | anchor | peer
    name: str
    text: str
    spread: str
    width: float
    low: float | None


@dataclass(frozen=True)
class SizeView:
    """One shape: the leader's, the anchor's and the peer's bars, and who is surely faster there."""

    name: str
    title: str
    bars: tuple[Bar, ...]
    best: Name  # () where that is the leader
    by: str


@dataclass(frozen=True)
class Standing:
    """A kernel's speed over the anchor's and the peer's, in long runs and in brief ones."""

    name: Name
    long_over_anchor: str
    long_over_peer: str
    over_anchor: str
    over_peer: str
    registers: str


def _speeds(result: Result, size: Sizes) -> Iterator[tuple[str, str, float]]:
    """(kind, slug, FLOP/s) at one shape, all of the runs by which the leader leads."""
    marks, lead = result.marks, result.lead
    if lead is None:
        return
    peer = result.target.peer.name
    seconds = {
        ("leader", lead.slug): marks.seconds(lead.slug, size, lead.regime),
        ("anchor", result.anchor or ""): marks.anchor_seconds(size, lead.regime),
        ("peer", peer): marks.seconds(peer, size, lead.regime),
    }
    for (kind, slug), time in seconds.items():
        if time is not None:
            yield kind, slug, flops(result.target, size) / time


def scale(targets: Sequence[Result]) -> Scale:
    """The axis on which the bars of all targets fit."""
    speeds = [
        speed for target in targets for size in target.sizes for *_, speed in _speeds(target, size)
    ]
    end = max(speeds, default=1e12) * ROOM / 1e12
    steps = [step * 10.0**power for power in range(-3, 6) for step in (1, 2, 2.5, 5)]
    step = next(step for step in steps if end / step < TICKS + 1)
    marks = [step * n for n in range(int(end / step) + 1)]
    return Scale(end, tuple(Tick(_percent(mark, end), f"{mark:,g}") for mark in marks))


def sizes(result: Result, axis: Scale) -> Iterator[SizeView]:
    """The bars of each shape."""
    marks, lead = result.marks, result.lead
    for size in result.sizes if lead else ():
        assert lead
        bars = []
        for kind, slug, speed in _speeds(result, size):
            spread = None if kind == "anchor" else marks.spread(slug, size, lead.regime)
            bars.append(
                Bar(
                    kind=kind,
                    name=result.target.peer.title if kind == "peer" else kind,
                    text=f"{speed / 1e12:,.0f}",
                    spread="" if spread is None else f"{spread:.1%}",
                    width=_percent(speed / 1e12, axis.end),
                    low=None if spread is None else _percent(speed / 1e12 / (1 + spread), axis.end),
                )
            )
        best = result.best_at(size, lead.slug)
        behind = result.behind(lead.slug, best, size)
        yield SizeView(
            name=size.lengths if size.varlen else f"{size.seqlen_k:,}",
            title=str(size),
            bars=tuple(bars),
            best=name(best) if best != lead.slug else (),
            by=f"{math.expm1(behind or 0.0):.1%}",
        )


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 2)


def fastest(result: Result) -> Iterator[Standing]:
    """The fastest kernels: by long runs those that had them, by brief ones the others."""
    marks = result.marks
    compiled = {kernel.slug: kernel for kernel in result.compiled}
    for slug in [*dict.fromkeys([*marks.ranked(LONG), *marks.ranked(BRIEF)])][:TOP]:
        registers = compiled[slug].registers if slug in compiled else None
        logs = {regime: marks.mark(slug, regime) for regime in (LONG, BRIEF)}
        over = {how: None if log is None else math.exp(-log) for how, log in logs.items()}
        yield Standing(
            name=name(slug),
            long_over_anchor=ratio(over[LONG]),
            long_over_peer=ratio(marks.over_peer(slug, LONG)),
            over_anchor=ratio(over[BRIEF]),
            over_peer=ratio(marks.over_peer(slug, BRIEF)),
            registers="–" if registers is None else str(registers),
        )
