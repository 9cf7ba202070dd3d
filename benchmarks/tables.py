"""Benchmark rows in, the small tables that stand below the big one out; needs no GPU."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from fagen.measure.rows import (
    OURS,
    QUANTISE,
    REGIME_TITLES,
    Row,
    fastest,
    geomean,
    markdown,
    ratios,
    regimes_of,
    title,
)
from fagen.problem import in_order
from fagen.vocab import DTYPES

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by a key of each, both in the order in which they come."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def pivoted(
    items: Iterable[Item],
    line: Callable[[Item], Any],
    column: Callable[[Item], Any],
    columns: Sequence[Any],
    figure: Callable[[Sequence[Item]], str],
) -> list[list[str]]:
    """A line for each key of items, a tuple or one, and in it a figure for each of these columns.

    "–" where there is nothing in a column.
    """
    body = []
    for key, members in grouped(items, line).items():
        cells = grouped(members, column)
        heads = map(str, key) if isinstance(key, tuple) else [str(key)]
        body.append([*heads, *(figure(cells[c]) if c in cells else "–" for c in columns)])
    return body


def share_of_matmul(rows: Sequence[Row], matmul_tflops: Mapping[str, Mapping[str, float]]) -> str:
    """Markdown: sustained TFLOP/s at the longest full attention, in % of the matrix product's.

    `matmul_tflops[dtype][regime]` is of the same run; '' where there is nothing to compare.
    """
    best = fastest(rows, "sustained")
    square = [cell for cell in in_order(best) if cell.problem.mask == "full" and cell.sizes.square]
    longest = max((cell.sizes.seqlen_k for cell in square), default=0)
    names = [name for name in dict.fromkeys(row.implementation for row in rows) if name != QUANTISE]
    body = []
    for cell in square:
        dtype, keys = cell.problem.dtype, cell.sizes.seqlen_k
        ceiling = matmul_tflops.get(dtype, {}).get("sustained")
        if keys == longest and ceiling:
            timed = best[cell]
            shares = [f"{timed[n].tflops / ceiling:.0%}" if n in timed else "–" for n in names]
            body.append([dtype, cell.problem.head_dims, f"{keys}", f"{ceiling:.0f}", *shares])
    head = ["dtype", "hd", "S", "matmul TFLOP/s", *map(title, names)]
    about = "Sustained, full attention, as a share of the matrix product 8192³ of the same run:"
    return f"{about}\n\n{markdown(head, body)}" if body else ""


def beside_fp16(rows: Sequence[Row]) -> str:
    """Markdown: fagen's TFLOP/s in bf16 divided by those in fp16; '' where not both were run."""
    regimes = regimes_of(rows)
    renamed = [
        replace(row, dtype="", implementation=row.dtype)
        for row in rows
        if row.implementation == "fagen"
    ]
    quotients = {regime: ratios(renamed, regime, label="bf16", over="fp16") for regime in regimes}
    cells = in_order({cell for by_cell in quotients.values() for cell in by_cell})
    if not cells:
        return ""
    body = [
        [
            *(cell.problem.head_dims, cell.problem.mask, cell.sizes.lengths),
            *(f"{own[cell]:.3f}" if cell in own else "–" for own in quotients.values()),
        ]
        for cell in cells
    ]
    means = [f"{geomean(own.values()):.3f}" for own in quotients.values()]
    body.append(["all", "", "geomean", *means])
    head = ["hd", "mask", "S", *(REGIME_TITLES[regime] for regime in regimes)]
    return "fagen in bf16 ÷ in fp16:\n\n" + markdown(head, body)


def with_quantising(rows: Sequence[Row]) -> str:
    """Markdown: µs of fagen's e4m3 kernels and of quantising for them, and what both together are
    in TFLOP/s; '' where nothing was quantised.
    """
    body = []
    for regime in regimes_of(rows):
        best = fastest(rows, regime)
        for cell in in_order(best):
            timed, problem = best[cell], cell.problem
            for name in OURS if QUANTISE in timed else ():
                if name in timed:
                    own, cost = timed[name], timed[QUANTISE].microseconds
                    whole = own.tflops * own.microseconds / (own.microseconds + cost)
                    figures = (f"{own.microseconds:.1f}", f"{cost:.1f}", f"{whole:.0f}")
                    what = problem.dtype, problem.head_dims, problem.mask, f"{cell.sizes.seqlen_q}"
                    body.append([regime, *what, title(name), *figures])
    if not body:
        return ""
    head = ["regime", "dtype", "hd", "mask", "S", "kernel", "µs", "quantising, µs"]
    about = "What quantising Q, K and V adds, where it is done for this one call:\n\n"
    return about + markdown([*head, "both, TFLOP/s"], body)


def by_scales(rows: Sequence[Row]) -> str:
    """Markdown: what scales by block of rows cost beside one per head; '' where not both were run.

    Geomeans of TFLOP/s, over the problems that a kernel of each kind ran.
    """
    regimes = regimes_of(rows)
    body = []
    for name in OURS:
        renamed = [
            replace(row, implementation="block" if "_sblock" in row.schedule else "head")
            for row in rows
            if row.implementation == name and row.schedule and DTYPES[row.dtype].fp8
        ]
        quotients = [
            ratios(renamed, regime, label="block", over="head").values() for regime in regimes
        ]
        if any(quotients):
            means = [f"{geomean(values):.3f}" if values else "–" for values in quotients]
            body.append([title(name), str(max(map(len, quotients))), *means])
    if not body:
        return ""
    about = "TFLOP/s with scales by block of rows ÷ with one per head, geomeans:\n\n"
    return about + markdown(["kernel", "cells", *regimes], body)


def picks(rows: Iterable[Row]) -> str:
    """Markdown: which schedules were timed, and for which numbers of keys."""
    lengths = grouped((row for row in rows if row.schedule), lambda row: row.schedule)
    lines = (
        f"- `{slug}`: {', '.join(map(str, sorted({row.seqlen_k for row in timed})))} keys\n"
        for slug, timed in lengths.items()
    )
    return f"fagen's kernels:\n\n{''.join(lines)}"


def launch_lines(costs: Mapping[str, Mapping[str, float]]) -> str:
    """Markdown: what one call costs; `costs` holds the fields of a LaunchCost by who is called."""
    return "".join(
        f"- {name}: {cost['host_microseconds']:.1f} µs of the host; kernels {cost['kernels']:g}, "
        f"memsets {cost['memsets']:g}, copies {cost['copies']:g}, "
        f"allocations {cost['allocations']:g}\n"
        for name, cost in costs.items()
    )


def plain_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Rows as Markdown, without padding."""
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
