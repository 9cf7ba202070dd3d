"""Time every head dim that fagen is tuned for beside cuDNN.

    python benchmarks/head_dims.py                           256 cells in burst: ~3 GPU minutes
    python benchmarks/head_dims.py --dims 96 --dims 192/128 --seqlen 2048    a part
    python benchmarks/head_dims.py --redraw benchmarks/results/<card>-<date>-head-dims.json

A cell is 16,384 tokens and a hidden size of Q next to 2048. fagen's kernel is the one that
fagen.attention takes, called through its C function into outputs that are there. Where cuDNN
refuses a cell FA2 takes its place, and where that refuses too torch's EFFICIENT backend; who it
was, and why not cuDNN, is said. A dtype and head dim below 1.05 in its geometric mean is marked.

Written to benchmarks/results/ as benchmarks/run.py does, after every cell:
<card>-<date>-head-dims.json, .run.json and .md. The exit code is 6 where an output is wrong.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

from record import Record, build, exit_code, parser, say, serving
from torch import Tensor

from fagen.build import Binary
from fagen.errors import DeviceError, FagenError, VerificationError
from fagen.kind import Plan
from fagen.kinds.forward.operands import arguments, launch, outputs
from fagen.measure.cells import race
from fagen.measure.inputs import SEQLENS, inputs
from fagen.measure.peers import Implementation, peer
from fagen.measure.rows import Row, geomean, markdown, problems, rounded, title
from fagen.measure.summaries import picks
from fagen.measure.timing import Call, Regime
from fagen.problem import Cell, Problem, standard_sizes
from fagen.vocab import MASKS

DIMS = (
    *("32", "40", "48", "64", "72", "80", "96", "112", "120", "128", "160", "192", "192/128"),
    *("224", "256", "64/256"),
)
DTYPES = ("fp16", "bf16")
PEERS = ("cudnn", "fa2", "efficient")
GOAL = 1.05
ROUND = Regime("burst", idle=0.020, warm=0.0, timed=0.004, rounds=3)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; the exit code is that of the `fagen` command."""
    asked = _arguments(argv)
    return exit_code(lambda: redraw(asked) if asked.redraw else run(asked))


def redraw(asked: argparse.Namespace) -> int:
    """Write the page of a committed run again; needs no GPU."""
    report(Record.read(asked.redraw))
    return 0


def run(asked: argparse.Namespace) -> int:
    """Build the kernels, time every cell, write everything."""
    record = Record.begun(asked.out, "head-dims", [ROUND])
    work = {}
    for cell in cells(asked):
        if found := serving(cell, record.about["card"]):
            work[cell] = found[0]
        else:
            record.note("no kernel", cell)
    kernels = build(work.values(), binding=False)
    record.note_compiler(kernels)
    began = time.monotonic()
    for cell, schedule in work.items():
        if (problem := cell.problem).opened() not in (row.cell.problem for row in record.rows):
            say(f"[{time.monotonic() - began:.0f} s] {problem}")
        time_cell(record, cell, kernels[schedule.slug], asked.peer or PEERS)
        record.about["seconds"] = round(time.monotonic() - began)
        record.save()
    if not record.rows:
        raise FagenError(f"nothing could be timed:\n{record.remarks}")
    report(record)
    return record.finish()


def cells(asked: argparse.Namespace) -> Iterator[Cell]:
    """The cells that are asked for."""
    for dims in asked.dims or DIMS:
        d, _, d_v = dims.partition("/")
        for dtype in asked.dtype or DTYPES:
            for mask in asked.mask or MASKS:
                for seqlen in asked.seqlen or SEQLENS:
                    problem = Problem(dtype, int(d), int(d_v or d), mask)
                    yield Cell(problem, standard_sizes(int(d), seqlen))


def time_cell(
    record: Record, cell: Cell, kernel: tuple[Plan, Binary], peers: Sequence[str]
) -> None:
    """Add the rows of a cell: fagen's, and those of the first peer that computes it."""
    beside = []
    given = inputs(cell)
    for name in peers:
        try:
            peer(name).bind(cell, *given)
        except DeviceError as refusal:
            record.note(f"{title(name)} left out ({refusal})", cell)
        else:
            beside.append(peer(name))
            break
    del given
    try:
        rows = race(cell, [called(*kernel), *beside], regimes=[ROUND], progress=None)
    except VerificationError as error:
        say(f"  {error}")
        record.note("wrong, and not timed", error)
        record.about["wrong"] = True
        return
    record.rows += map(rounded, rows)


def called(plan: Plan, binary: Binary) -> Implementation:
    """A kernel through its C function, so that nothing of torch has to be compiled for it."""

    def bind(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
        given = arguments(plan, q, k, v)
        into = outputs(plan, q)
        enqueue = launch(plan, binary.library, given, into)

        def run() -> Tensor:
            enqueue()
            return into[0]

        return Call(run)

    return Implementation("fagen", bind, plan.slug)


# ---- what is said --------------------------------------------------------------------------------


def pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Of each cell fagen's row and that of the peer, where there is one."""
    of_cell: dict[Cell, dict[bool, Row]] = {}
    for row in rows:
        of_cell.setdefault(row.cell, {})[row.implementation == "fagen"] = row
    for found in of_cell.values():
        if len(found) == 2:
            yield found[True], found[False]


def means(rows: Sequence[Row]) -> str:
    """Markdown: for each head dim and dtype the geomean over each peer that stood beside it."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row, other in pairs(rows):
        key = row.cell.problem.head_dims, row.dtype, title(other.implementation)
        groups.setdefault(key, []).append(row.tflops / other.tflops)
    body = [
        [*key, str(len(found)), f"{geomean(found):.3f}{' !' if geomean(found) < GOAL else ''}",
         f"{min(found):.2f}"]
        for key, found in groups.items()
    ]  # fmt: skip
    return markdown(["hd", "dtype", "beside", "cells", "geomean", "worst"], body)


def report(record: Record) -> None:
    """Write <stem>.md, and print its means."""
    lines = means(record.rows)
    record.write_page(
        f"{record.made_on}; 16,384 tokens, hidden size of Q next to 2048, burst: "
        f"{ROUND.idle * 1e3:g} ms of pause, {ROUND.timed * 1e3:g} ms timed, {ROUND.rounds} rounds. "
        f"fagen ÷ the peer; ! below {GOAL}.",
        lines,
        problems(record.rows),
        f"fagen's kernels:\n\n{picks(record.rows)}",
        record.remarks,
    )
    print(lines)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    wanted = parser(__doc__)
    wanted.add_argument("--dims", action="append", metavar="D or D/DV")
    wanted.add_argument("--dtype", action="append", choices=DTYPES)
    wanted.add_argument("--mask", action="append", choices=list(MASKS))
    wanted.add_argument("--seqlen", action="append", type=int)
    return wanted.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
