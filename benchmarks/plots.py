"""Benchmark rows in, one SVG per dtype and regime out: TFLOP/s against sequence length.

A panel per head dim and mask; fagen in front, its peers behind it, and the matrix product of the
same run as the ceiling.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from fagen.measure.rows import DETERMINISTIC, OURS, PREARRANGED, QUANTISE, TITLES, WIDE, Row
from fagen.vocab import MASKS

GROUND, INK, QUIET, FAINT = "#ffffff", "#1f2328", "#6e7781", "#e6e9ed"
ACCENT = "#d1495b"
PEERS = {
    "cudnn": "#3d7a5a",
    "fa3": "#30638e",
    "fa2": "#8aa9c4",
    "flex": "#c9a14a",
    "cudnn-e4m3": "#7fb069",
    PREARRANGED: "#e8963a",
    DETERMINISTIC: "#e8963a",
}
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": QUIET,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "svg.hashsalt": "fagen",  # the same rows give the same file
}


# colours where the reader's screen is dark; the others can be told from either ground
DARK = {
    GROUND: "#0d1117",
    INK: "#e6edf3",
    QUIET: "#9198a1",
    FAINT: "#30363d",
    ACCENT: "#ff7b8a",
    PEERS["cudnn"]: "#6cc08b",
    PEERS["fa3"]: "#6aa9dd",
}


def in_both_schemes(svg: str) -> str:
    """Return an SVG that is drawn in other colours where the reader prefers a dark scheme."""
    rules = "\n".join(
        f'[style*="{property_}: {light}"] {{ {property_}: {dark} !important }}'
        for light, dark in DARK.items()
        for property_ in ("fill", "stroke")
    )
    style = f'<style type="text/css">@media (prefers-color-scheme: dark) {{\n{rules}\n}}</style>'
    head, defs, rest = svg.partition("<defs>")
    assert defs, "an SVG of matplotlib begins with its definitions"
    return f"{head}{defs}\n  {style}{rest}"


def plot(
    rows: Sequence[Row], folder: Path, stem: str, *, subtitle: str, ceilings: Mapping[str, Mapping]
) -> tuple[Path, ...]:
    """Write `folder/<stem>-<dtype>-<regime>.svg` for each dtype and regime in `rows`, of one pass.

    `ceilings[dtype][regime]` is the matrix product's TFLOP/s; where it is missing none is drawn.
    """
    written = places(rows, folder, stem)
    with mpl.rc_context(STYLE):
        for (dtype, regime), path in written.items():
            some = [
                row
                for row in rows
                if (row.dtype, row.regime) == (dtype, regime) and row.implementation != QUANTISE
            ]
            figure = _figure(some, ceilings.get(dtype, {}).get(regime))
            title = f"Attention {some[0].pass_}, {dtype}, {regime}"
            width, height = figure.get_size_inches()
            left = 0.12 / width
            figure.text(left, 1 - 0.1 / height, title, size=13, weight="bold", va="top")
            figure.text(left, 1 - 0.4 / height, subtitle, size=8.5, color=QUIET, va="top")
            drawn = io.StringIO()
            figure.savefig(drawn, format="svg", metadata={"Date": None}, facecolor=GROUND)
            path.write_text(in_both_schemes(drawn.getvalue()), encoding="utf-8")
    return tuple(written.values())


def places(rows: Sequence[Row], folder: Path, stem: str) -> dict[tuple[str, str], Path]:
    """Where the plot of each dtype and regime goes."""
    drawn = sorted({(row.dtype, row.regime) for row in rows if row.regime != WIDE})
    return {(work, regime): folder / f"{stem}-{work}-{regime}.svg" for work, regime in drawn}


def _figure(rows: Sequence[Row], ceiling: float | None) -> Figure:
    dims = sorted({(row.head_dim, row.head_dim_v) for row in rows})
    masks = [mask for mask in MASKS if any(row.mask == mask for row in rows)]
    seqlens = sorted({row.seqlen_q for row in rows})
    highest = max([row.tflops for row in rows] + ([ceiling] if ceiling else []))
    # in inches, since the heading and the legend keep their size however many panels there are
    width, height = 1.2 + 2.9 * max(len(dims), 3), 1.35 + 2.35 * len(masks)
    figure = Figure(figsize=(width, height))
    panels = figure.subplots(len(masks), len(dims), sharex=True, sharey=True, squeeze=False)
    figure.subplots_adjust(
        left=0.62 / width,
        right=1 - 0.2 / width,
        top=1 - 0.85 / height,
        bottom=0.8 / height,
        wspace=0.08,
        hspace=0.2,
    )
    for i, mask in enumerate(masks):
        for j, pair in enumerate(dims):
            panel = panels[i][j]
            some = [r for r in rows if r.mask == mask and (r.head_dim, r.head_dim_v) == pair]
            _panel(panel, some, seqlens, ceiling)
            name = f"{pair[0]}" if pair[0] == pair[1] else f"{pair[0]}/{pair[1]}"
            panel.set_title(f"head dim {name}, {mask}", loc="left", size=9, color=INK)
            panel.set_ylim(0, highest * 1.08)
            if j == 0:
                panel.set_ylabel("TFLOP/s")
            if i == len(masks) - 1:
                panel.set_xlabel("sequence length")
    handles: dict = {}
    for panel in panels.flat:
        lines, names = panel.get_legend_handles_labels()
        handles.update(dict(zip(names, lines, strict=True)))
    names = sorted(handles, key=_legend_rank)
    figure.legend(
        [handles[name] for name in names], names,
        loc="lower center", ncols=len(names), frameon=False, handlelength=1.6,
    )  # fmt: skip
    return figure


def _panel(panel: Axes, rows: Sequence[Row], seqlens: Sequence[int], ceiling: float | None) -> None:
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_locator(FixedLocator(list(seqlens)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xticks(list(seqlens), [_short(seqlen) for seqlen in seqlens])
    panel.grid(axis="y", color=FAINT, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(length=0)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    if ceiling:
        panel.axhline(
            ceiling, color=QUIET, linewidth=1, linestyle=(0, (4, 3)), label="matmul 8192³"
        )
    # fagen is drawn last, above all; an order that left ties to a set would differ by process
    names = {row.implementation for row in rows}
    for name in sorted(names, key=lambda name: (name in OURS, name == "fagen", name)):
        best: dict[int, float] = {}
        for row in rows:
            if row.implementation == name:
                best[row.seqlen_q] = max(best.get(row.seqlen_q, 0.0), row.tflops)
        ours = name in OURS
        panel.plot(
            sorted(best),
            [best[seqlen] for seqlen in sorted(best)],
            label=TITLES.get(name, name),
            color=ACCENT if name == "fagen" else PEERS.get(name, QUIET),
            linewidth=2.4 if ours else 1.5,
            marker="o",
            markersize=5 if ours else 3.5,
            markeredgecolor=GROUND,
            markeredgewidth=0.8,
            clip_on=False,
        )


def _short(seqlen: int) -> str:
    """512, 2k, 16k."""
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else f"{seqlen}"


def _legend_rank(name: str) -> tuple[int, str]:
    order = [*TITLES.values(), "matmul 8192³"]
    return (order.index(name) if name in order else len(order), name)
