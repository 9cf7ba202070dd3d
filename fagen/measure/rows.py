"""Benchmark rows in, geometric means and a Markdown table out. Needs neither torch nor a GPU."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fagen.decoding import decoded
from fagen.errors import FagenError
from fagen.paths import write_whole
from fagen.problem import Cell, Problem, Sizes, in_order
from fagen.vocab import FORWARD, PASSES, yardstick

YARDSTICK = "cudnn"  # in fp16 where the problem is e4m3
PREARRANGED = "fagen-prearranged"  # in e4m3, of transposed V; a key of committed results
DETERMINISTIC = "fagen-deterministic"  # of gradients whose sums have one order
OURS = ("fagen", PREARRANGED, DETERMINISTIC)
QUANTISE = "quantise"  # no attention: what an e4m3 kernel's inputs cost
WIDE = "burst-sigma4"  # the regime of scores with a standard deviation of 4
REGIME_TITLES = {"sustained": "sustained", "burst": "burst", WIDE: "burst σ=4"}
TITLES = {
    "fagen": "fagen",
    PREARRANGED: "fagen, V transposed",
    DETERMINISTIC: "fagen, deterministic",
    "cudnn": "cuDNN",
    "fa2": "FA2",
    "fa3": "FA3",
    "flex": "FlexAttention",
    "efficient": "torch's EFFICIENT",
    "cudnn-e4m3": "cuDNN e4m3",
    QUANTISE: "quantising Q, K, V",
}
_OTHERS = ("cudnn", "fa2", "fa3", "flex", "efficient")


_IN_FILES = {"pass_": "pass"}  # a word that Python keeps for itself


@dataclass(frozen=True, order=True)
class Row:
    """One implementation timed in one cell and regime.

    `tflops` is the median over the rounds, `spread` is (max - min) / median of the rounds' times,
    `sm_clock_mhz` the median SM clock while it ran (None where NVML could not say), and `schedule`
    the slug behind a fagen row (None for everybody else). `pass_`, "pass" in files, is a word of
    vocab's PASSES.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    implementation: str
    schedule: str | None
    regime: str
    tflops: float
    spread: float
    sm_clock_mhz: int | None
    pass_: str = FORWARD

    def record(self) -> dict[str, Any]:
        """The row for JSON; see `read_rows`."""
        return {_IN_FILES.get(name, name): value for name, value in asdict(self).items()}

    @property
    def cell(self) -> Cell:
        """What was computed: what two rows that are compared share."""
        return Cell(
            Problem(self.dtype, self.head_dim, self.head_dim_v, self.mask, kind=self.pass_),
            Sizes(self.batch, self.heads, self.kv_heads, self.seqlen_q, self.seqlen_k),
        )

    @property
    def microseconds(self) -> float:
        """Of one call."""
        return self.cell.flops / self.tflops / 1e6


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write `rows` as a JSON list, one row a line so that a diff stays readable."""
    lines = ",\n".join(json.dumps(rounded(row).record()) for row in rows)
    write_whole(path, f"[\n{lines}\n]\n")


def read_rows(path: Path) -> tuple[Row, ...]:
    """Read what `write_rows` wrote; FagenError where a row is none, or has other fields.

    A row that does not say its pass is of the forward pass: files of 2026-11-22 and before.
    """
    names = {name: field for field, name in _IN_FILES.items()}
    rows = []
    for number, data in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        fields = {names.get(name, name): value for name, value in data.items()}
        try:
            rows.append(decoded(Row, {"pass_": FORWARD, **fields}))
        except ValueError as error:
            raise FagenError(f"{path}: row {number}: {error}") from None
    return tuple(rows)


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers; NaN of none."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


def ratios(
    rows: Sequence[Row], regime: str, *, over: str = YARDSTICK, label: str = "fagen"
) -> dict[Cell, float]:
    """TFLOP/s of `label` divided by those of `over`, per cell that both ran in `regime`.

    Where one implementation ran a cell with several schedules, its fastest counts.
    """
    best = fastest(rows, regime)
    return {
        cell: times[label].tflops / times[over].tflops
        for cell, times in best.items()
        if label in times and over in times
    }


def table(rows: Sequence[Row], *, over: str = YARDSTICK) -> str:
    """The rows as Markdown: problem by problem, then the geomeans."""
    if not rows:
        return "nothing was measured\n"
    passes = [[row for row in rows if row.pass_ == name] for name in PASSES]
    parts = ((problems(some, over=over), geomeans(some, over=over)) for some in passes if some)
    return "\n".join(filter(None, (part for both in parts for part in both)))


def problems(rows: Sequence[Row], *, over: str = YARDSTICK) -> str:
    """Markdown: a line per cell, a column per implementation.

    Times are TFLOP/s, sustained with the SM clock in MHz behind `@`; the last columns divide
    fagen by `over`, and say what quantising takes. Regimes that were not run leave no column.
    """
    regimes = regimes_of(rows)
    best = {regime: fastest(rows, regime) for regime in regimes}
    names = {
        regime: sorted(
            {row.implementation for row in rows if row.regime == regime} - {QUANTISE}, key=_rank
        )
        for regime in regimes
    }
    quantised = [r for r in regimes if any(QUANTISE in timed for timed in best[r].values())]
    quotients = {regime: ratios(rows, regime, over=over) for regime in regimes}
    compared = [regime for regime in regimes if quotients[regime]]

    head = ["dtype", "hd", "mask", "S", "B", "H"]
    head += [
        f"{title_beside(name, rows)} {REGIME_TITLES[regime]}"
        for regime in regimes
        for name in names[regime]
    ]
    beside = title_beside(over, rows)
    head += [f"fagen ÷ {beside} {REGIME_TITLES[regime]}" for regime in compared]
    head += [f"{title(QUANTISE)} {REGIME_TITLES[regime]}, µs" for regime in quantised]
    body = []
    for cell in in_order({row.cell for row in rows}):
        problem, sizes = cell.problem, cell.sizes
        line = [
            problem.dtype,
            problem.head_dims,
            problem.mask + (f", {problem.kind}" if PASSES[problem.kind].gradients else ""),
            sizes.lengths,
            str(sizes.batch),
            sizes.all_heads,
        ]
        for regime in regimes:
            timed = best[regime].get(cell, {})
            line += [_figure(timed[name]) if name in timed else "–" for name in names[regime]]
        for regime in compared:
            ratio = quotients[regime].get(cell)
            line.append("–" if ratio is None else f"{ratio:.2f}")
        for regime in quantised:
            row = best[regime].get(cell, {}).get(QUANTISE)
            line.append(f"{row.microseconds:.1f}" if row else "–")
        body.append(line)
    return markdown(head, body)


def geomeans(rows: Sequence[Row], *, over: str = YARDSTICK, label: str = "fagen") -> str:
    """Markdown: geomean of `label` ÷ `over` per dtype and head dim, and over all of a dtype."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for dtype in sorted({row.dtype for row in rows}, reverse=True):
        of_dtype = [row for row in rows if row.dtype == dtype]
        dims = sorted({(row.head_dim, row.head_dim_v) for row in of_dtype})
        for pair in dims:
            of_pair = [row for row in of_dtype if (row.head_dim, row.head_dim_v) == pair]
            groups[dtype, of_pair[0].cell.problem.head_dims] = of_pair
        if len(dims) > 1:
            groups[dtype, "all"] = of_dtype
    return means(("dtype", "hd"), groups, over=over, label=label)


def means(
    head: Sequence[str],
    groups: Mapping[tuple[str, ...], Sequence[Row]],
    *,
    over: str = YARDSTICK,
    label: str = "fagen",
) -> str:
    """Markdown: geomean of `label` ÷ `over` for each group of rows, its key below `head`.

    The worst single problem stands beside each mean, since a mean hides a bad cell. A group that
    `over` ran nothing of is left out; '' where that is all of them.
    """
    everything = [row for rows in groups.values() for row in rows]
    regimes = [
        name for name in regimes_of(everything) if ratios(everything, name, over=over, label=label)
    ]
    columns = [
        f"{REGIME_TITLES[regime]} {what}" for regime in regimes for what in ("geomean", "worst")
    ]
    body = []
    for names, rows in groups.items():
        quotients = [ratios(rows, regime, over=over, label=label).values() for regime in regimes]
        figures = []
        for values in quotients:
            figures += [f"{geomean(values):.3f}", f"{min(values):.2f}"] if values else ["–", "–"]
        if cells := max(map(len, quotients), default=0):
            body.append([*names, str(cells), *figures])
    if not body:
        return ""
    beside = title_beside(over, everything)
    return f"{title(label)} ÷ {beside}:\n\n" + markdown([*head, "cells", *columns], body)


def regimes_of(rows: Iterable[Row]) -> list[str]:
    """The regimes that rows were timed in, sustained first."""
    run = {row.regime for row in rows}
    return [regime for regime in REGIME_TITLES if regime in run]


def fastest(rows: Iterable[Row], regime: str) -> dict[Cell, dict[str, Row]]:
    """Per cell the row of each implementation, that of its fastest schedule."""
    best: dict[Cell, dict[str, Row]] = {}
    for row in rows:
        if row.regime == regime:
            timed = best.setdefault(row.cell, {})
            rival = timed.get(row.implementation)
            if rival is None or row.tflops > rival.tflops:
                timed[row.implementation] = row
    return best


def _rank(name: str) -> tuple[int, str]:
    order = list(TITLES)
    return (order.index(name) if name in order else len(order), name)


def title(name: str) -> str:
    """What an implementation is called in tables."""
    return TITLES.get(name, name)


def title_beside(name: str, rows: Iterable[Row]) -> str:
    """What an implementation is called beside rows: others compute problems of e4m3 in fp16."""
    if name not in _OTHERS:
        return title(name)
    return yardstick(title(name), *(row.dtype for row in rows))


def _figure(row: Row) -> str:
    """'563 @1560': the clock only where it explains the figure, which is in long runs."""
    clock = f" @{row.sm_clock_mhz}" if row.regime == "sustained" and row.sm_clock_mhz else ""
    return f"{row.tflops:.0f}{clock}" if row.tflops >= 10 else f"{row.tflops:.2g}{clock}"


def rounded(row: Row) -> Row:
    """Four digits: more than a timing is good for, and a diff stays short."""
    return replace(row, tflops=float(f"{row.tflops:.4g}"), spread=round(row.spread, 4))


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table padded so that it reads well in a terminal too."""
    widths = [max(2, *(len(line[i]) for line in (head, *body))) for i in range(len(head))]
    rule = ["-" * (width - 1) + ":" for width in widths]
    lines = [
        " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in (head, rule, *body)
    ]
    return "".join(f"| {line} |\n" for line in lines)
