"""Time fagen beside its peers beyond the grid: other head dims, heads, lengths and masks.

    python benchmarks/beyond.py                              34 fp16 cells, both regimes: ~2 minutes
    python benchmarks/beyond.py --group few-tiles --out /tmp/x    some groups only
    python benchmarks/beyond.py --redraw benchmarks/results/nvidia-h200-2026-11-22-beyond.json

Written to benchmarks/results/ as benchmarks/run.py does: <card>-<date>-beyond.json, .run.json and
.md, a table and geomeans for each group. fagen's kernel is the one that fagen.attention takes. A
peer that refuses a cell, and a cell that no committed schedule computes, are listed with the
reason.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from record import Record, build, exit_code, parser, serving, time_all

from fagen.measure.rows import YARDSTICK, means, problems
from fagen.measure.summaries import picks
from fagen.problem import HIDDEN, TOKENS, Cell, Problem, Sizes
from fagen.vocab import DTYPES, MASKS


@dataclass(frozen=True)
class Group:
    """Cells that belong together, and the peer to compare them with."""

    said: str
    cells: tuple[Cell, ...]
    over: str = YARDSTICK


def groups(dtype: str) -> dict[str, Group]:
    """Everything beyond the grid, by name."""

    def cells(
        dims: Iterable[int], sizes: Iterable[Sizes | int], masks: Iterable[str] = MASKS
    ) -> tuple[Cell, ...]:
        return tuple(
            Cell(
                Problem(dtype, dim, dim, mask), usual(dim, size) if isinstance(size, int) else size
            )
            for dim in dims
            for mask in masks
            for size in sizes
        )

    usual_dims = (64, 128, 256)
    uneven = [Sizes(16, 16, 16, *lengths) for lengths in ((1_024, 8_192), (8_192, 1_024))]
    return {
        "head-dims": Group(
            "Head dims 96 and 192, 21 and 11 heads, next to a hidden size of 2048",
            cells((96, 192), [2_048, 16_384]),
        ),
        "grouped": Group(
            "Grouped heads: 32 of Q on 8 of K and V, and 64 on 8",
            cells((128,), [Sizes(4, heads, 8, 4_096, 4_096) for heads in (32, 64)]),
        ),
        "odd": Group("Lengths that no tile divides", cells(usual_dims, [1_000, 3_001])),
        "few-tiles": Group(
            "Few tiles: one batch of four heads", cells(usual_dims, [Sizes(1, 4, 4, 4_096, 4_096)])
        ),
        "uneven": Group(
            "Other lengths of Q than of K and V, full", cells((128,), uneven, ["full"])
        ),
        "uneven-causal": Group(
            "Other lengths of Q than of K and V, causal, aligned to the bottom right",
            cells((128,), uneven, ["causal"]),
            over="fa2",
        ),
    }


def usual(head_dim: int, seqlen: int) -> Sizes:
    """16,384 tokens and hidden size 2048, as near as whole batches and heads come."""
    heads = round(HIDDEN / head_dim)
    return Sizes(round(TOKENS / seqlen), heads, heads, seqlen, seqlen)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; the exit code is that of the `fagen` command."""
    asked = _arguments(argv)
    return exit_code(lambda: redraw(asked) if asked.redraw else run(asked))


def run(asked: argparse.Namespace) -> int:
    """Build the kernels, time every cell, write everything."""
    record = Record.begun(asked.out, "beyond" if asked.dtype == "fp16" else f"beyond-{asked.dtype}")
    named = groups(asked.dtype)
    cells = [cell for name in asked.group or list(named) for cell in named[name].cells]
    work = {cell: serving(cell, record.about["card"]) for cell in cells}
    kernels = build(schedule for found in work.values() for schedule in found)
    record.note_compiler(kernels)
    time_all(record, work, kernels, asked.peer)
    report(record)
    return record.finish()


def redraw(asked: argparse.Namespace) -> int:
    """Write the tables of a committed run again; needs no GPU."""
    report(Record.read(asked.redraw))
    return 0


def report(record: Record) -> None:
    """Write <stem>.md, and print it."""
    belongs = {
        cell: name
        for dtype in {row.dtype for row in record.rows}
        for name, group in groups(dtype).items()
        for cell in group.cells
    }
    sorted_in = {name: [] for name in belongs.values()}
    for row in record.rows:
        sorted_in[belongs[row.cell]].append(row)
    named = groups(record.rows[0].dtype)
    found = {(name,): rows for name, rows in sorted_in.items() if rows}
    every = {**found, ("all",): record.rows}
    page = record.write_page(
        "Attention beyond the grid",
        f"{record.made_on}. S is queries/keys where they differ, H is heads of Q/of K and V. "
        "TFLOP/s, @ the SM clock in MHz; every call allocates its outputs.",
        means(["group"], every),
        means(["group"], every, over="fa2"),
        *(
            f"{named[name].said}:\n\n{problems(rows, over=named[name].over)}"
            for (name,), rows in found.items()
        ),
        f"fagen's kernels:\n\n{picks(record.rows)}",
        record.remarks,
    )
    print(page)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    wanted = parser(__doc__)
    wanted.add_argument("--group", action="append", choices=list(groups("fp16")))
    wanted.add_argument("--dtype", default="fp16", choices=sorted(DTYPES))
    return wanted.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
