"""Committed results in, the README's picture out: speedups over FlashAttention-3 and cuDNN.

A bar per head dim, peer and dtype, as an SVG that reads well on light and dark. `make docs` draws
it from the newest results of benchmarks/run.py and benchmarks/shapes.py.
"""

import json
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fagen.measure.rows import geomean, ratios, read_rows

FA3, CUDNN = "FlashAttention-3", "cuDNN"
DTYPES = ("fp16", "bf16")
PICTURE = "speedups.svg"
TITLE = f"Speed of fagen ÷ that of {FA3} and of {CUDNN}"

# colours by class; the picture brings its own ground, since a page's may differ from the system's
LIGHT = {"ground": "#ffffff", "ink": "#1f2328", "quiet": "#59636e"}
LIGHT |= {FA3: "#1f5fa8", CUDNN: "#9a5200"}
DARK = {"ground": "#0d1117", "ink": "#f0f6fc", "quiet": "#9aa4af"}
DARK |= {FA3: "#6cb0ff", CUDNN: "#e0a045"}

# pixels: bars are `PITCH` apart, groups `GAP` more; columns are named by what begins there
WIDTH, TOP, PITCH, GAP, BAR = 740, 66, 18, 10, 12
GROUP, PEER, LEFT, RIGHT, MEAN, RANGE = 16, 128, 304, 592, 606, 644


@dataclass(frozen=True)
class Speedup:
    """The speed of fagen ÷ that of a peer, at each shape of one dtype and head dim."""

    head_dim: int
    peer: str
    dtype: str
    ratios: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return geomean(self.ratios)


def newest(results: Path, end: str = "") -> Path | None:
    """The rows of the last run in a folder: of the grid, or of what ends file names in `end`."""
    runs = results.glob(f"*-????-??-??{end}.json")
    return max(runs, key=lambda path: (path.stem.removesuffix(end)[-10:], path), default=None)


def over_fa3(path: Path) -> Iterator[Speedup]:
    """From what benchmarks/shapes.py wrote: of each shape the median over the repeats."""
    found: dict[tuple[str, int], list[float]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        if row.get("values"):  # those of --random have none
            key = row["dtype"], row["head_dim"]
            found.setdefault(key, []).append(statistics.median(row["values"]))
    for (dtype, head_dim), values in sorted(found.items()):
        yield Speedup(head_dim, FA3, dtype, tuple(values))


def over_cudnn(path: Path) -> Iterator[Speedup]:
    """From what benchmarks/run.py wrote: its bursts in 16 bits, a ratio per cell."""
    found: dict[tuple[str, int], list[float]] = {}
    for cell, ratio in ratios(read_rows(path), "burst").items():
        found.setdefault((cell.problem.dtype, cell.problem.head_dim), []).append(ratio)
    for dtype in DTYPES:
        for head_dim in sorted(dim for of, dim in found if of == dtype):
            yield Speedup(head_dim, CUDNN, dtype, tuple(found[dtype, head_dim]))


def committed(results: Path) -> Iterator[tuple[Path, tuple[Speedup, ...]]]:
    """The newest files of a folder that the picture is of, with what they say, peer by peer."""
    for end, read in (("-shapes", over_fa3), ("", over_cudnn)):
        path = newest(results, end)
        found = tuple(read(path)) if path else ()
        if path and found:
            yield path, found


def picture(results: Path) -> str:
    """The newest results of a folder as SVG; '' where there are none."""
    files = tuple(committed(results))
    cards = {path.name.partition("-20")[0].upper().replace("-", " ") for path, _ in files}
    on = " and ".join(sorted(cards))
    told = f"Forward pass, {on}, short runs; geometric mean of all shapes, least … most"
    return drawn([one for _, found in files for one in found], TITLE, told) if files else ""


def drawn(speedups: Sequence[Speedup], title: str, subtitle: str) -> str:
    """A group of bars per head dim, and within it in the order that is given."""
    dims = sorted({one.head_dim for one in speedups})
    bottom = TOP + len(speedups) * PITCH + (len(dims) - 1) * GAP
    most = max(1.5, *(max(one.ratios) * 1.02 for one in speedups))
    canvas = Picture(WIDTH, bottom + 30, title)
    canvas.text(GROUP, 27, title, "ink title")
    canvas.text(GROUP, 47, subtitle, "quiet")
    for half in range(int(most * 2) + 1):
        at, one = _at(half / 2, most), half == 2
        canvas.line(at, TOP - 6, at, bottom, "ink" if one else "quiet", 1.2 if one else 0.4)
        canvas.text(at, bottom + 17, "1: as fast" if one else f"{half / 2:g}", "quiet middle")
    top = TOP
    for head_dim in dims:
        canvas.text(GROUP, top + BAR - 1, f"head dim {head_dim}", "ink strong")
        for speedup in speedups:
            if speedup.head_dim == head_dim:
                _row(canvas, speedup, top, most)
                top += PITCH
        top += GAP
    return str(canvas)


def _row(canvas: "Picture", speedup: Speedup, top: int, most: float) -> None:
    """Draw whom it is over, the mean as a bar, the range as a line, and both as figures."""
    base, middle = top + BAR - 1, top + BAR / 2
    ends = min(speedup.ratios), max(speedup.ratios)
    left, right = (_at(end, most) for end in ends)
    canvas.text(PEER, base, f"÷ {speedup.peer}, {speedup.dtype}", "ink")
    canvas.bar(LEFT, top, _at(speedup.mean, most) - LEFT, BAR, speedup.peer)
    for colour, width in (("ground", 4), ("ink", 1.2)):  # a rim parts the line from the bar
        canvas.line(left, middle, right, middle, colour, width)
        for end in (left, right):
            canvas.line(end, middle - 4, end, middle + 4, colour, width)
    canvas.text(MEAN, base, f"{speedup.mean:.2f}", "ink strong")
    canvas.text(RANGE, base, f"{ends[0]:.2f} … {ends[1]:.2f}", "quiet")


def _at(ratio: float, most: float) -> float:
    """Where a ratio stands, in pixels from the left."""
    return LEFT + (RIGHT - LEFT) * ratio / most


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
