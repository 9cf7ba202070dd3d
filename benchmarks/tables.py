"""Benchmark rows in, the small tables that stand below the big one out; needs no GPU."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

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
    said = "Sustained, full attention, as a share of the matrix product 8192³ of the same run:\n\n"
    return said + markdown(head, body) if body else ""


def beside_fp16(rows: Sequence[Row]) -> str:
    """Markdown: fagen's TFLOP/s in bf16 divided by those in fp16; '' where not both were run."""
    regimes = regimes_of(rows)
    renamed = [
        replace(row, dtype="", implementation=row.dtype)
        for row in rows
        if row.implementation == "fagen"
    ]
    found = {regime: ratios(renamed, regime, of="bf16", over="fp16") for regime in regimes}
    cells = in_order({cell for regime in regimes for cell in found[regime]})
    if not cells:
        return ""
    body = []
    for cell in cells:
        figures = [
            f"{found[regime][cell]:.3f}" if cell in found[regime] else "–" for regime in regimes
        ]
        body.append([cell.problem.head_dims, cell.problem.mask, cell.sizes.lengths, *figures])
    means = [f"{geomean(found[regime].values()):.3f}" for regime in regimes]
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
            timed = best[cell]
            if QUANTISE not in timed:
                continue
            problem, seqlen = cell.problem, f"{cell.sizes.seqlen_q}"
            cost = timed[QUANTISE].microseconds
            for name in OURS:
                if name in timed:
                    alone = timed[name]
                    whole = alone.tflops * alone.microseconds / (alone.microseconds + cost)
                    figures = (f"{alone.microseconds:.1f}", f"{cost:.1f}", f"{whole:.0f}")
                    what = (problem.dtype, problem.head_dims, problem.mask, seqlen)
                    body.append([regime, *what, title(name), *figures])
    if not body:
        return ""
    head = ["regime", "dtype", "hd", "mask", "S", "kernel", "µs", "quantising, µs"]
    said = "What quantising Q, K and V adds, where it is done for this one call:\n\n"
    return said + markdown([*head, "both, TFLOP/s"], body)


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
        found = [ratios(renamed, regime, of="block", over="head").values() for regime in regimes]
        if any(found):
            means = [f"{geomean(values):.3f}" if values else "–" for values in found]
            body.append([title(name), str(max(map(len, found))), *means])
    if not body:
        return ""
    said = "TFLOP/s with scales by block of rows ÷ with one per head, geomeans:\n\n"
    return said + markdown(["kernel", "cells", *regimes], body)


def picks(rows: Iterable[Row]) -> str:
    """Markdown: which schedules were timed, and for which numbers of keys."""
    lengths: dict[str, set[int]] = {}
    for row in rows:
        if row.schedule:
            lengths.setdefault(row.schedule, set()).add(row.seqlen_k)
    return "".join(
        f"- `{slug}`: {', '.join(map(str, sorted(of)))} keys\n" for slug, of in lengths.items()
    )


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
