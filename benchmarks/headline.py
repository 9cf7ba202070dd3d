"""Committed results in, the README's speeds out: a picture in TFLOP/s, and a table of ratios.

The picture has both regimes of the grid (benchmarks/run.py) beside FlashAttention-3, as an SVG that
reads well on light and dark and 400 pixels wide. The table has random calls beside the best peer of
each, and the grid's ratios in both regimes. `make docs` makes both from the newest results.
"""

import csv
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from fagen.measure.rows import Row, fastest, geomean, ratios, read_rows

OURS, FA3, CUDNN = "fagen", "FlashAttention-3", "cuDNN"
WHO = {"fagen": OURS, "fa3": FA3, "cudnn": CUDNN, "fa2": "FlashAttention-2"}  # as files name them
REGIMES = ("burst", "sustained")
DTYPE = "fp16"  # of the picture
PICTURE = "speeds.svg"
TITLE = "Forward pass in fp16, TFLOP/s: fagen, FlashAttention-3 and cuDNN, by head dim and regime"

# colours by class; the picture brings its own ground, since a page's may differ from the system's
LIGHT = {"ground": "#ffffff", "ink": "#1f2328", "quiet": "#59636e"}
LIGHT |= {OURS: "#1a7f37", FA3: "#1f5fa8", CUDNN: "#9a5200"}
DARK = {"ground": "#0d1117", "ink": "#f0f6fc", "quiet": "#9aa4af"}
DARK |= {OURS: "#3fb950", FA3: "#6cb0ff", CUDNN: "#e0a045"}

# pixels: bars are `PITCH` apart, head dims `GAP` more; columns are named by what begins there
WIDTH, TOP, PITCH, GAP, BAR = 440, 78, 18, 6, 12
EDGE, NAME, LEFT, RIGHT, MEAN, RANGE = 12, 52, 164, 328, 336, 366


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


def newest(results: Path, end: str = "", suffix: str = ".json") -> Path | None:
    """The file of the last run in a folder: of the grid, or of what ends file names in `end`."""
    runs = results.glob(f"*-????-??-??{end}{suffix}")
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
        for cell, of in fastest(rows, regime).items():
            for name in ("fagen", "cudnn"):
                if name in of:
                    key = regime, cell.problem.head_dim, WHO[name]
                    by_bar.setdefault(key, []).append(of[name].tflops)
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
    shapes = max(len(one.tflops) for one in bars)
    told = f"{card}, by head dim; mean of {shapes} shapes, least … most"
    return drawn(bars, f"Forward pass in {DTYPE}, TFLOP/s", told)


def drawn(bars: Sequence[Speed], title: str, subtitle: str) -> str:
    """Draw a block per regime, and in it a group of bars per head dim."""
    most = max(max(one.tflops) for one in bars) * 1.02
    regimes = list(dict.fromkeys(one.regime for one in bars))
    groups = len({(one.regime, one.head_dim) for one in bars})
    height = TOP + len(bars) * PITCH + groups * GAP + (len(regimes) - 1) * 2 * PITCH
    canvas = Picture(WIDTH, height, title)
    canvas.text(EDGE, 25, title, "ink title")
    canvas.text(EDGE, 45, subtitle, "quiet")
    top, before = TOP, bars[0]
    for one in bars:
        first = one is bars[0] or one.regime != before.regime
        if one is not bars[0]:
            top += 2 * PITCH if first else 0
            top += GAP if one.head_dim != before.head_dim or first else 0
        if first:
            canvas.text(EDGE, top - 8, one.regime, "ink strong")
        if first or one.head_dim != before.head_dim:
            canvas.text(EDGE, top + BAR - 1, f"{one.head_dim}", "ink strong")
        _row(canvas, one, top, most)
        top, before = top + PITCH, one
    return str(canvas)


def _row(canvas: "Picture", one: Speed, top: int, most: float) -> None:
    """Draw whose speed it is, the mean as a bar, the range as a line, and both as figures."""
    base, middle = top + BAR - 1, top + BAR / 2
    ends = min(one.tflops), max(one.tflops)
    left, right = (_at(end, most) for end in ends)
    canvas.text(NAME, base, one.who, "ink")
    canvas.bar(LEFT, top, _at(one.mean, most) - LEFT, BAR, one.who)
    for colour, width in (("ground", 4), ("ink", 1.2)):  # a rim parts the line from the bar
        canvas.line(left, middle, right, middle, colour, width)
        for end in (left, right):
            canvas.line(end, middle - 4, end, middle + 4, colour, width)
    canvas.text(MEAN, base, f"{one.mean:.0f}", "ink strong")
    canvas.text(RANGE, base, f"{ends[0]:.0f} … {ends[1]:.0f}", "quiet")


def _at(tflops: float, most: float) -> float:
    """Where a speed stands, in pixels from the left."""
    return LEFT + (RIGHT - LEFT) * tflops / most


# ---- the table -----------------------------------------------------------------------------------

# works of the file of random calls, as the table names them
WORKS = {
    "fwd": "forward, fp16 and bf16",
    "bwd": "gradients, fp16 and bf16",
    "varlen fwd": "varlen forward",
    "varlen bwd": "varlen gradients",
    "decode equal": "decoding, equal lengths",
    "decode mixed": "decoding, mixed lengths",
    "e4m3": "e4m3 forward",
}


@dataclass(frozen=True)
class Calls:
    """Random calls of one work: fagen's speed ÷ that of the fastest peer, and who the peers are."""

    work: str
    ratios: tuple[float, ...]
    peers: tuple[str, ...]


def random_calls(path: Path) -> tuple[Calls, ...]:
    """From a file of microseconds, a row a call; one that no peer takes is left out."""
    found: dict[str, list[float]] = {}
    peers: dict[str, dict[str, None]] = {}
    for row in commented(path):
        work = row["call"].removesuffix(" fp16").removesuffix(" bf16")
        times = {name: float(row[f"{name}_us"]) for name in WHO if row[f"{name}_us"]}
        ours = times.pop("fagen")
        if times:
            found.setdefault(work, []).append(min(times.values()) / ours)
            peers.setdefault(work, {}).update(dict.fromkeys(times))
    return tuple(
        Calls(told, tuple(found[work]), tuple(WHO[name] for name in WHO if name in peers[work]))
        for work, told in WORKS.items()
        if work in found
    )


def random_table(path: Path) -> Iterator[str]:
    """Tell random calls as Markdown, a line a work."""
    yield "| speed ÷ fastest peer: random calls, burst | calls | geomean | min | slower | peers |"
    yield "|---|--:|--:|--:|--:|---|"
    for one in random_calls(path):
        mean, least = geomean(one.ratios), min(one.ratios)
        behind = sum(ratio < 1 for ratio in one.ratios)
        told = f"**{mean:.2f}** | {least:.2f} | {behind} | {', '.join(one.peers)}"
        yield f"| {one.work} | {len(one.ratios)} | {told} |"


def grid_table(results: Path) -> Iterator[str]:
    """Tell the ratios of the committed grids as Markdown: a line a pass, dtype and peer."""
    lines = [*_grid_ratios(results)]
    if not lines:
        return
    yield "| speed ÷ a peer: the grid | shapes | burst: geomean | min | sustained: geomean | min |"
    yield "|---|--:|--:|--:|--:|--:|"
    for told, by_regime in lines:
        shapes = max(map(len, by_regime.values()))
        cells = []
        for regime in REGIMES:
            values = by_regime.get(regime)
            cells += [f"**{geomean(values):.2f}**", f"{min(values):.2f}"] if values else ["–", "–"]
        yield f"| {told} | {shapes} | {' | '.join(cells)} |"


def _grid_ratios(results: Path) -> Iterator[tuple[str, Mapping[str, Sequence[float]]]]:
    forward = newest(results)
    rows = read_rows(forward) if forward else ()
    for dtype in ("fp16", "bf16"):
        of = [row for row in rows if row.dtype == dtype]
        if of:
            yield f"forward {dtype} ÷ {CUDNN}", _over_cudnn(of)
    over_fa3 = _over_fa3([row for row in rows if row.dtype == DTYPE], _fa3(results))
    if any(over_fa3.values()):
        yield f"forward {DTYPE} ÷ {FA3}", over_fa3
    gradients = newest(results, "-backward")
    if gradients:
        yield f"gradients fp16 ÷ {CUDNN}", _over_cudnn(read_rows(gradients))


def _over_cudnn(rows: Sequence[Row]) -> dict[str, list[float]]:
    return {regime: list(ratios(rows, regime).values()) for regime in REGIMES}


def _over_fa3(rows: Sequence[Row], fa3: list[dict[str, str]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {regime: [] for regime in REGIMES}
    for regime in REGIMES:
        ours = {
            (cell.problem.head_dim, cell.problem.mask, cell.sizes.seqlen_q): of["fagen"].tflops
            for cell, of in fastest(rows, regime).items()
            if "fagen" in of
        }
        for row in fa3:
            key = int(row["head_dim"]), row["mask"], int(row["seqlen"])
            if key in ours:
                found[regime].append(ours[key] / float(row[regime]))
    return found


def versions(path: Path) -> str:
    """What a run was made with, of the file beside its rows: card, driver, versions, day."""
    run = json.loads(path.with_suffix(".run.json").read_text(encoding="utf-8"))
    return (
        f"{run['card']}, driver {run['driver']}, CUDA {run['cuda']}, torch {run['torch']}, "
        f"cuDNN {run['cudnn']}, {run['date']}"
    )


# ---- the drawing ---------------------------------------------------------------------------------


class Picture:
    """An SVG of texts, bars and lines, whose colours are classes; `str` gives its source."""

    def __init__(self, width: int, height: int, title: str):
        size = {"width": f"{width}", "height": f"{height}", "viewBox": f"0 0 {width} {height}"}
        self._svg = ElementTree.Element(
            "svg", {"xmlns": "http://www.w3.org/2000/svg", **size, "role": "img"}
        )
        self._add("title", title)
        self._add("style", _style())
        self.bar(0, 0, width, height, "ground")

    def __str__(self) -> str:
        ElementTree.indent(self._svg, "")
        return ElementTree.tostring(self._svg, encoding="unicode") + "\n"

    def text(self, x: float, y: float, said: str, classes: str) -> None:
        """Write, from `x` on to the right, on a base line at `y`."""
        self._add("text", said, classes, x=x, y=y)

    def bar(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Fill a rectangle."""
        self._add("rect", None, colour, x=x, y=y, width=width, height=height)

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> None:
        """Draw a line so many pixels wide."""
        self._add("line", None, colour, x1=x1, y1=y1, x2=x2, y2=y2, **{"stroke-width": width})

    def _add(self, tag: str, said: str | None, classes: str = "", **numbers: float) -> None:
        given = {"class": classes} if classes else {}
        given |= {name: f"{round(number, 1):g}" for name, number in numbers.items()}
        ElementTree.SubElement(self._svg, tag, given).text = said


def _style() -> str:
    """Colours by class in both themes, and how texts are set."""
    return "\n".join(
        [
            "",
            'text { font: 13px system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif }',
            "text.title { font-size: 15px; font-weight: 600 }",
            "text.strong { font-weight: 600 }",
            "text.middle { text-anchor: middle }",
            *_colours(LIGHT),
            "@media (prefers-color-scheme: dark) {",
            *_colours(DARK),
            "}",
            "",
        ]
    )


def _colours(theme: dict[str, str]) -> Iterator[str]:
    for name, colour in theme.items():
        yield f".{name} {{ fill: {colour} }} line.{name} {{ stroke: {colour} }}"
