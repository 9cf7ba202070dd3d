"""Committed results in, the README's speeds out: a picture in TFLOP/s, and a table of ratios.

The picture has both regimes of the grid (benchmarks/run.py) beside FlashAttention-3, as an SVG that
reads well on light and dark and 400 pixels wide. The table has random calls beside the best peer of
each, and the grid's ratios in both regimes. `make docs` makes both from the newest results.
"""

import csv
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from fagen.measure.rows import Row, fastest, geomean, ratios, read_rows
from fagen.render import environment

OURS, FA3, CUDNN = "fagen", "FlashAttention-3", "cuDNN"
WHO = {"fagen": OURS, "fa3": FA3, "cudnn": CUDNN, "fa2": "FlashAttention-2"}  # as files name them
PEERS = tuple(WHO)[1:]
REGIMES = ("burst", "sustained")
DTYPE = "fp16"  # of the picture
PICTURE = "speeds.svg"
TITLE = "Forward pass in fp16, TFLOP/s: fagen, FlashAttention-3 and cuDNN, by head dim and regime"

# colours by class; the picture brings its own ground, since a page's may differ from the system's
LIGHT = {"ground": "#ffffff", "ink": "#1f2328", "quiet": "#59636e"}
LIGHT |= {OURS: "#1a7f37", FA3: "#1f5fa8", CUDNN: "#9a5200"}
DARK = {"ground": "#0d1117", "ink": "#f0f6fc", "quiet": "#9aa4af"}
DARK |= {OURS: "#3fb950", FA3: "#6cb0ff", CUDNN: "#e0a045"}

# pixels: bars begin at LEFT and are PITCH apart, head dims GAP more; other places the template has
WIDTH, TOP, PITCH, GAP, BAR = 440, 78, 18, 6, 12
LEFT, RIGHT = 164, 328
TEMPLATE = Path(__file__).with_name("speeds.svg.j2")


@dataclass(frozen=True)
class Speed:
    """The speed of one implementation at each shape of one head dim in one regime, TFLOP/s."""

    regime: str
    head_dim: int
    who: str
    tflops: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return geomean(self.tflops)


def newest(results: Path, end: str = "", suffix: str = ".json", card: str = "") -> Path | None:
    """The file of the last run in a folder: of the grid, or of what ends file names in `end`.

    Those begin with the card's name: `card` is its beginning.
    """
    runs = results.glob(f"{card}*-????-??-??{end}{suffix}")
    return max(runs, key=lambda path: (path.stem.removesuffix(end)[-10:], path), default=None)


def commented(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file whose first lines may be comments: # what it is of."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


# ---- the picture ---------------------------------------------------------------------------------


def speeds(results: Path) -> tuple[Speed, ...]:
    """What the picture shows, bar by bar; none where no grid is committed."""
    path = newest(results)
    if path is None:
        return ()
    by_bar: dict[tuple[str, int, str], list[float]] = {}
    rows = [row for row in read_rows(path) if row.dtype == DTYPE]
    for regime in REGIMES:
        for cell, by_name in fastest(rows, regime).items():
            for name in ("fagen", "cudnn"):
                if name in by_name:
                    key = regime, cell.problem.head_dim, WHO[name]
                    by_bar.setdefault(key, []).append(by_name[name].tflops)
    for row in _fa3(results):
        for regime in REGIMES:
            key = regime, int(row["head_dim"]), FA3
            by_bar.setdefault(key, []).append(float(row[regime]))
    dims = sorted({head_dim for _, head_dim, _ in by_bar})
    keys = product(REGIMES, dims, (OURS, FA3, CUDNN))
    return tuple(Speed(*key, tuple(by_bar[key])) for key in keys if key in by_bar)


def _fa3(results: Path) -> list[dict[str, str]]:
    path = newest(results, "-fa3", ".csv")
    return commented(path) if path else []


def picture(results: Path) -> str:
    """The newest grid of a folder as SVG; '' where there is none."""
    bars = speeds(results)
    path = newest(results)
    if not bars or path is None:
        return ""
    card = path.name.partition("-20")[0].upper().replace("-", " ")
    shapes = max(len(bar.tflops) for bar in bars)
    subtitle = f"{card}, by head dim; mean of {shapes} shapes, least … most"
    return drawn(bars, f"Forward pass in {DTYPE}, TFLOP/s", subtitle)


def drawn(bars: Sequence[Speed], title: str, subtitle: str) -> str:
    """Draw a block per regime, and in it a group of bars per head dim."""
    most = max(max(bar.tflops) for bar in bars) * 1.02

    def at(tflops: float) -> float:
        """Where a speed stands, in pixels from the left."""
        return LEFT + (RIGHT - LEFT) * tflops / most

    places, top, regime, head_dim = [], TOP - GAP - 2 * PITCH, "", 0
    for bar in bars:
        first = bar.regime != regime
        top += 2 * PITCH if first else 0
        top += GAP if first or bar.head_dim != head_dim else 0
        least, largest = min(bar.tflops), max(bar.tflops)
        numbers = {"top": top, "above": top - 8, "base": top + BAR - 1, "middle": top + BAR / 2}
        numbers |= {"upper": top + BAR / 2 - 4, "lower": top + BAR / 2 + 4}
        numbers |= {"width": at(bar.mean) - LEFT, "left": at(least), "right": at(largest)}
        places.append(
            {
                "regime": bar.regime if first else "",
                "head_dim": bar.head_dim if first or bar.head_dim != head_dim else "",
                "who": bar.who,
                "mean": f"{bar.mean:.0f}",
                "range": f"{least:.0f} … {largest:.0f}",
                **{name: f"{round(number, 1):g}" for name, number in numbers.items()},
            }
        )
        top, regime, head_dim = top + PITCH, bar.regime, bar.head_dim
    template = environment().overlay(autoescape=True).from_string(TEMPLATE.read_text("utf-8"))
    themes = {"light": LIGHT, "dark": DARK, "width": WIDTH, "height": top + GAP}
    return template.render(bars=places, title=title, subtitle=subtitle, **themes)


# ---- the table -----------------------------------------------------------------------------------

# kinds of benchmarks/peers.py, as the table names them
WORKS = {
    "forward": "forward, fp16 and bf16",
    "backward": "gradients, fp16 and bf16",
    "varlen forward": "varlen forward",
    "varlen backward": "varlen gradients",
    "decode, equal lengths": "decoding, equal lengths",
    "decode, mixed lengths": "decoding, mixed lengths",
    "e4m3": "e4m3 forward",
}


@dataclass(frozen=True)
class Calls:
    """Random calls of one work: fagen's speed ÷ that of the fastest peer, and who the peers are."""

    work: str
    ratios: tuple[float, ...]
    peers: tuple[str, ...]


def random_calls(path: Path) -> tuple[Calls, ...]:
    """From a run of benchmarks/peers.py, medians of its repeats; a call of no peer is left out."""
    quotients: dict[str, list[float]] = {}
    peers: dict[str, dict[str, None]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        if row["values"]:
            quotients.setdefault(row["kind"], []).append(statistics.median(row["values"]))
            own = row["us"] | row["csv_us"]
            peers.setdefault(row["kind"], {}).update(dict.fromkeys(own))
    return tuple(
        Calls(title, tuple(quotients[kind]), tuple(WHO[x] for x in PEERS if x in peers[kind]))
        for kind, title in WORKS.items()
        if kind in quotients
    )


def random_table(path: Path) -> Iterator[str]:
    """Tell random calls as Markdown, a line a work."""
    yield "| speed ÷ fastest peer: random calls, burst | calls | geomean | min | slower | peers |"
    yield "|---|--:|--:|--:|--:|---|"
    for calls in random_calls(path):
        mean, least = geomean(calls.ratios), min(calls.ratios)
        behind = sum(ratio < 1 for ratio in calls.ratios)
        figures = f"**{mean:.2f}** | {least:.2f} | {behind}"
        yield f"| {calls.work} | {len(calls.ratios)} | {figures} | {', '.join(calls.peers)} |"


def grid_table(results: Path) -> Iterator[str]:
    """Tell the ratios of the committed grids as Markdown: a line a pass, dtype and peer."""
    lines = [*_grid_ratios(results)]
    if not lines:
        return
    yield "| speed ÷ a peer: the grid | shapes | burst: geomean | min | sustained: geomean | min |"
    yield "|---|--:|--:|--:|--:|--:|"
    for title, by_regime in lines:
        shapes = max(map(len, by_regime.values()))
        cells = []
        for regime in REGIMES:
            values = by_regime.get(regime)
            cells += [f"**{geomean(values):.2f}**", f"{min(values):.2f}"] if values else ["–", "–"]
        yield f"| {title} | {shapes} | {' | '.join(cells)} |"


def _grid_ratios(results: Path) -> Iterator[tuple[str, Mapping[str, Sequence[float]]]]:
    forward = newest(results)
    rows = read_rows(forward) if forward else ()
    for dtype in ("fp16", "bf16"):
        own = [row for row in rows if row.dtype == dtype]
        if own:
            yield f"forward {dtype} ÷ {CUDNN}", _over_cudnn(own)
    over_fa3 = _over_fa3([row for row in rows if row.dtype == DTYPE], _fa3(results))
    if any(over_fa3.values()):
        yield f"forward {DTYPE} ÷ {FA3}", over_fa3
    gradients = newest(results, "-backward")
    if gradients:
        yield f"gradients fp16 ÷ {CUDNN}", _over_cudnn(read_rows(gradients))


def _over_cudnn(rows: Sequence[Row]) -> dict[str, list[float]]:
    return {regime: list(ratios(rows, regime).values()) for regime in REGIMES}


def _over_fa3(rows: Sequence[Row], fa3: list[dict[str, str]]) -> dict[str, list[float]]:
    quotients: dict[str, list[float]] = {regime: [] for regime in REGIMES}
    for regime in REGIMES:
        ours = {
            (cell.problem.head_dim, cell.problem.mask, cell.sizes.seqlen_q): by_name["fagen"].tflops
            for cell, by_name in fastest(rows, regime).items()
            if "fagen" in by_name
        }
        for row in fa3:
            key = int(row["head_dim"]), row["mask"], int(row["seqlen"])
            if key in ours:
                quotients[regime].append(ours[key] / float(row[regime]))
    return quotients


def versions(path: Path) -> str:
    """What a run was made with, of its file or the one beside: card, driver, versions, day."""
    beside = path.with_suffix(".run.json")
    run = json.loads((beside if beside.exists() else path).read_text(encoding="utf-8"))
    run = run.get("about", run)
    return (
        f"{run['card']}, driver {run['driver']}, CUDA {run['cuda']}, torch {run['torch']}, "
        f"cuDNN {run['cudnn']}, {run['date']}"
    )
