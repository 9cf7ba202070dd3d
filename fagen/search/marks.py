"""Rank the kernels of one target: times go in, ratios to the anchor come out, with their noise."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from fagen.problem import Sizes
from fagen.search.tasks import Time
from fagen.vocab import PEERS

BRIEF, LONG = "brief", "long"
PEER_NAMES = frozenset(peer.name for peer in PEERS.values())
SURE = 2.0  # standard errors by which a lead is believed
_MEDIAN_ERROR = 1.25  # a median's standard error, where a mean's is 1


@dataclass(frozen=True)
class Lead:
    """The fastest kernel, the one after it, by how much it is ahead, and how well that is known.

    `lead` and `error` are relative: 0.01 is one per cent.  They are of one regime's runs.
    """

    slug: str
    second: str | None
    lead: float
    error: float
    regime: str = BRIEF

    @property
    def sure(self) -> bool:
        """Whether the lead exceeds the noise."""
        return self.lead > SURE * self.error


class Marks:
    """Times of one target's kernels on one card, as logarithms of ratios to the anchor."""

    def __init__(self, sizes: Sequence[Sizes], weights: Sequence[float]) -> None:
        self.sizes = tuple(sizes)
        self.weights = tuple(weights)
        self._known = frozenset(sizes)
        self._logs: dict[tuple[str, str, Sizes], dict[int, float]] = {}
        self._seconds: dict[tuple[str, Sizes], list[float]] = {}
        self._anchor: dict[tuple[str, Sizes], list[float]] = {}
        self._clocks: list[int] = []

    def add(self, time: Time) -> None:
        """Take a time; one at another size is no concern of this target's ranking."""
        size = time.size
        if size not in self._known:
            return
        repeats = self._logs.setdefault((time.slug, time.regime, size), {})
        repeats[time.repeat] = math.log(time.seconds / time.anchor_seconds)
        self._seconds.setdefault((time.slug, size), []).append(time.seconds)
        self._anchor.setdefault((time.regime, size), []).append(time.anchor_seconds)
        if time.sm_clock_mhz:
            self._clocks.append(time.sm_clock_mhz)

    def has(self, slug: str, size: Sizes, regime: str, repeats: Iterable[int]) -> bool:
        """Whether all these rounds were timed."""
        return set(repeats) <= self._logs.get((slug, regime, size), {}).keys()

    def repeats(self, slug: str, size: Sizes, regime: str) -> int:
        """How many rounds were timed."""
        return len(self._logs.get((slug, regime, size), {}))

    def slugs(self, regime: str = BRIEF) -> list[str]:
        """The kernels that were timed at every size, peers left out."""
        names = {slug for slug, how, _ in self._logs if how == regime and slug not in PEER_NAMES}
        return sorted(slug for slug in names if self.mark(slug, regime) is not None)

    def at(self, slug: str, size: Sizes, regime: str | None = None) -> float | None:
        """A kernel's log ratio to the anchor at one size; long runs count where there are any."""
        for how in [regime] if regime else [LONG, BRIEF]:
            if repeats := self._logs.get((slug, how, size)):
                # what disturbs a brief run makes it slower: of two, the faster one is meant
                middle = median_low if how == BRIEF else median
                return float(middle(repeats.values()))
        return None

    def mark(self, slug: str, regime: str | None = None) -> float | None:
        """The weighted mean of a kernel's log ratios; None until it was timed at every size."""
        logs = [self.at(slug, size, regime) for size in self.sizes]
        weighted = [log * w for log, w in zip(logs, self.weights, strict=True) if log is not None]
        return sum(weighted) / sum(self.weights) if len(weighted) == len(self.sizes) else None

    def ranked(self, regime: str = BRIEF) -> list[str]:
        """The kernels that were timed at every size, the fastest first."""
        return sorted(self.slugs(regime), key=lambda slug: self.mark(slug, regime) or 0.0)

    def ranked_at(self, size: Sizes, regime: str = BRIEF) -> list[str]:
        """The kernels that were timed at one size, the fastest first."""
        slugs = [slug for slug, how, at in self._logs if (how, at) == (regime, size)]
        logs = {
            slug: self.at(slug, size, regime) or 0.0 for slug in slugs if slug not in PEER_NAMES
        }
        return sorted(logs, key=logs.__getitem__)

    def leader(self) -> Lead | None:
        """The fastest: of those with long runs, if there are any, else of all."""
        return self._leads(
            self.ranked,
            lambda slug, regime: self.mark(slug, regime) or 0.0,
            lambda slug, regime: sum(self.repeats(slug, size, regime) for size in self.sizes),
        )

    def lead_at(self, size: Sizes) -> Lead | None:
        """The fastest at one size."""
        return self._leads(
            lambda regime: self.ranked_at(size, regime),
            lambda slug, regime: self.at(slug, size, regime) or 0.0,
            lambda slug, regime: self.repeats(slug, size, regime),
        )

    def _leads(
        self,
        ranked: Callable[[str], list[str]],
        log: Callable[[str, str], float],
        repeats: Callable[[str, str], int],
    ) -> Lead | None:
        """The first of those that are ranked: by how much, and how well that is known."""
        regime = LONG if ranked(LONG) else BRIEF
        if not (order := ranked(regime)):
            return None
        first, second, *_ = [*order, None]
        ahead = log(second, regime) - log(first, regime) if second else math.inf
        return Lead(first, second, ahead, self._error(regime, repeats(first, regime)), regime)

    def noise(self, regime: str) -> float:
        """Standard deviation of one round's log ratio, over all that have several rounds."""
        squares, freedom = 0.0, 0
        for (_, how, _), repeats in self._logs.items():
            if how == regime and len(repeats) > 1:
                mean = sum(repeats.values()) / len(repeats)
                squares += sum((log - mean) ** 2 for log in repeats.values())
                freedom += len(repeats) - 1
        return max(0.001, math.sqrt(squares / freedom)) if freedom else 0.01

    def _error(self, regime: str, repeats: int) -> float:
        """The standard error of the difference of two kernels that have so many rounds each."""
        return _MEDIAN_ERROR * self.noise(regime) * math.sqrt(2 / max(1, repeats))

    def spread(self, slug: str, size: Sizes, regime: str) -> float | None:
        """By how much the slowest round is slower than the fastest, None of fewer than two."""
        logs = sorted(self._logs.get((slug, regime, size), {}).values())
        return math.expm1(logs[-1] - logs[0]) if len(logs) > 1 else None

    def seconds(self, slug: str, size: Sizes, regime: str | None = None) -> float | None:
        """Seconds of one call, the drift of the clock taken out by the anchor."""
        log, beside = self.at(slug, size, regime), self.anchor_seconds(size, regime)
        return None if log is None or beside is None else math.exp(log) * beside

    def anchor_seconds(self, size: Sizes, regime: str | None = None) -> float | None:
        """Seconds of one call of the anchor, in one regime's runs or in all."""
        regimes = (regime,) if regime else (BRIEF, LONG)
        seconds = [mark for how in regimes for mark in self._anchor.get((how, size), ())]
        return median(seconds) if seconds else None

    def over_peer(self, slug: str, regime: str | None = None) -> float | None:
        """How many times faster than the peer, by weighted mean; None where that cannot do it."""
        ours = self.mark(slug, regime)
        for name in PEER_NAMES:  # a target has one of them
            theirs = self.mark(name, regime)
            if ours is not None and theirs is not None:
                return math.exp(theirs - ours)
        return None

    @property
    def clocks(self) -> tuple[int, int] | None:
        """The lowest and the highest SM clock seen, in MHz."""
        return (min(self._clocks), max(self._clocks)) if self._clocks else None
