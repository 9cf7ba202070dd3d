"""Turn a store into one HTML page: every number and place worked out here, the template shows it.

The page needs nothing but itself: no script, no font, no network.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fagen import outputs
from fagen.errors import FagenError
from fagen.registry import from_slug, plan
from fagen.render import environment, source_hash
from fagen.search.marks import LONG
from fagen.search.report.prediction import Plot, plot
from fagen.search.report.speeds import Scale, SizeView, Standing, fastest, scale, sizes
from fagen.search.report.table import Range, Served, ranges, served
from fagen.search.report.tiles import HeatMap, heat_map
from fagen.search.report.words import Line, Name, name, ratio
from fagen.search.results import Result, results
from fagen.search.rows import Session
from fagen.search.store import Store
from fagen.search.tasks import GOOD
from fagen.toml_lines import printable
from fagen.vocab import LENGTHS, PASSES, PEERS

TEMPLATE = "search_report.html.j2"
WHAT = "a page about a search"


@dataclass(frozen=True)
class Leader:
    """A target's fastest kernel: its speed over others' in the runs by which it leads."""

    name: Name
    runs: str  # brief | long
    over_anchor: str
    over_peer: str
    itself: bool  # it is the anchor, timed beside itself
    second: Name  # () where it is alone
    margin: str
    noise: str
    sure: bool
    brief: Name  # the first in brief runs, where long runs have another; else ()
    source: str  # the hash of what was timed, shortened; "" where none is known
    renewed: bool  # fagen renders another source for its slug today


@dataclass(frozen=True)
class TargetView:
    """A target's part of the page; `leader` is None where nothing was timed at every shape."""

    name: str
    title: str
    card: str
    peer: str  # beside whom its kernels are timed
    axis: str  # what shapes are told by
    anchor: Name
    leader: Leader | None
    facts: tuple[tuple[str, str], ...]
    untimed: str
    sizes: tuple[SizeView, ...]
    heat: HeatMap
    plot: Plot | None
    correlation: str
    fastest: tuple[Standing, ...]
    long: bool  # whether some kernels had long runs
    refused: tuple[Line, ...]
    outcomes: tuple[Line, ...]
    ranges: tuple[Range, ...]
    served: tuple[Served, ...]
    agrees: str  # whether the dispatch table says the same, in a word


@dataclass(frozen=True)
class Report:
    """The page."""

    title: str
    store: Name
    sessions: tuple[Session, ...]
    cards: tuple[str, ...]
    peer: str  # of all targets, in a word where they have several
    scale: Scale
    targets: tuple[TargetView, ...]

    @property
    def leaders(self) -> int:
        """How many targets have one."""
        return sum(target.leader is not None for target in self.targets)

    @property
    def renewed(self) -> int:
        """How many leaders ran as sources that fagen renders otherwise by now."""
        return sum(bool(target.leader and target.leader.renewed) for target in self.targets)


def write_report(store: Path, path: Path) -> None:
    """Write the page about `store` to `path`.

    Raises FagenError where it is no store, or where something is at `path` that is no such page.
    """
    outputs.write(path, page(store), outputs.is_stamped, WHAT)


def page(store: Path) -> str:
    """Return the page about a store as HTML."""
    with Store(store, read_only=True) as kept:
        targets, sessions = results(kept), kept.sessions()
    return rendered(view(targets, sessions, store.name))


def rendered(report: Report) -> str:
    """Return a page as HTML."""
    template = environment().overlay(autoescape=True).get_template(TEMPLATE)
    return outputs.stamped(template.render(report=report), "<!-- {} -->")


def view(targets: Sequence[Result], sessions: Sequence[Session] = (), store: str = "") -> Report:
    """Work out all that the page shows."""
    shared = scale(targets)
    peers = {PEERS[result.target.lengths].title for result in targets} or {PEERS[LENGTHS[0]].title}
    return Report(
        title="fagen search",
        store=name(printable(store)),
        sessions=tuple(sessions),
        cards=tuple(dict.fromkeys(f"{result.card}, driver {result.driver}" for result in targets)),
        peer=next(iter(peers)) if len(peers) == 1 else "the peer",
        scale=shared,
        targets=tuple(_target(result, shared) for result in targets),
    )


def _target(result: Result, shared: Scale) -> TargetView:
    t, r = result.target, result.correlation
    v = "" if t.head_dim == t.head_dim_v else f" and {t.head_dim_v} (V)"
    kind = f", {t.kind}" if PASSES[t.kind].prefix else ""
    kind += ", varlen sequences" if t.varlen else ""
    table = tuple(served(result))
    return TargetView(
        name=t.name,
        title=f"{t.dtype}, head dim {t.head_dim}{v}, {t.mask}{kind}",
        card=f"{result.card}, driver {result.driver}",
        peer=t.peer.title,
        axis="lengths" if t.varlen else "keys",
        anchor=name(result.anchor or ""),
        leader=_leader(result),
        facts=tuple(_facts(result)),
        untimed=_untimed(result),
        sizes=tuple(sizes(result, shared)),
        heat=heat_map(result),
        plot=plot(result),
        correlation="not known yet" if r is None else f"{r:.2f}",
        fastest=tuple(fastest(result)),
        long=bool(result.marks.slugs(LONG)),
        refused=tuple(
            Line(reason, f"{points:,}", example)
            for reason, points, example in result.survey["refused"]
        ),
        outcomes=tuple(_outcomes(result)),
        ranges=tuple(ranges(result)),
        served=table,
        agrees=_agrees(result, table),
    )


def _leader(result: Result) -> Leader | None:
    lead = result.lead
    if lead is None:
        return None
    first_in_brief = next(iter(result.marks.ranked()), lead.slug)
    hashes = {compiled.slug: compiled.source_hash for compiled in result.compiled}
    return Leader(
        name=name(lead.slug),
        runs=lead.regime,
        over_anchor=ratio(result.over_anchor),
        over_peer=ratio(result.over_peer),
        itself=lead.slug == result.anchor,
        second=name(lead.second or ""),
        margin=f"{lead.lead:.1%}" if lead.second else "–",
        noise=f"{lead.error:.1%}",
        sure=lead.sure,
        brief=() if first_in_brief == lead.slug else name(first_in_brief),
        source=hashes.get(lead.slug, "")[:12],
        renewed=_source(lead.slug) != hashes.get(lead.slug),
    )


def _source(slug: str) -> str | None:
    """The hash of what fagen renders for a slug today; None where it fits no more."""
    try:
        return source_hash(plan(from_slug(slug)))
    except FagenError:
        return None


def _facts(result: Result) -> Iterator[tuple[str, str]]:
    yield "points", f"{result.survey['total']:,}"
    yield "fit", f"{result.survey['fit']:,}"
    yield "compiled", f"{len(result.compiled):,}"
    yield "compiled well", f"{_good(result):,}"
    yield "timed, brief runs", f"{len(result.marks.slugs()):,}"
    yield "timed, long runs", f"{len(result.marks.slugs(LONG)):,}"
    yield "wrong", f"{len(result.wrong):,}"
    if clocks := result.marks.clocks:
        yield "SM clock", f"{clocks[0]}–{clocks[1]} MHz"


def _good(result: Result) -> int:
    return sum(compiled.outcome == GOOD for compiled in result.compiled)


def _untimed(result: Result) -> str:
    """Why a target has no leader."""
    if not result.compiled:
        return "nothing was compiled yet"
    return f"{len(result.compiled):,} kernels were compiled, none was timed at every shape"


def _agrees(result: Result, table: Sequence[Served]) -> str:
    if not table or result.lead is None:
        return "–"
    answers = {row.same for row in table if row.same is not None}
    return "the same" if answers == {True} else "another slug" if answers else "–"


def _outcomes(result: Result) -> Iterator[Line]:
    counts = Counter(compiled.outcome for compiled in result.compiled)
    for outcome, count in counts.most_common():
        example = next(compiled for compiled in result.compiled if compiled.outcome == outcome)
        note = next(iter(example.note.splitlines()), "")
        yield Line(outcome, f"{count:,}", note, name(example.slug) if note else ())
    for slug, why in result.wrong.items():
        yield Line("wrong results", "1", why, name(slug))
