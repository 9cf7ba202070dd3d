"""Time the gradients beside cuDNN's at shapes drawn at random, which nobody tuned for.

    python benchmarks/backward_shapes.py                  80 shapes in burst: about a GPU minute
    python benchmarks/backward_shapes.py --number 200 --seed 7
    python benchmarks/backward_shapes.py --mask causal --head-dim 128 --number 20   some of them
    python benchmarks/backward_shapes.py --redraw RESULTS.json                    no GPU

Shapes are as benchmarks/draws.py draws them, of problems that have a committed schedule. The kernel
is the one that fagen.attention takes for the gradients of such a call; it runs in turn with cuDNN's
backward pass, on the same tensors in one process, and both allocate their outputs. --peer fa2 adds
FlashAttention-2's. Said are the minimum and the geometric mean of fagen ÷ cuDNN.
"""

import sys
from collections.abc import Sequence

from draws import drawn
from record import Options, Run, Script, said_of, serving, time_all
from tables import grouped, picks

from fagen import flow, vocab
from fagen.errors import FagenError
from fagen.measure.rows import YARDSTICK, Row, means, problems, ratios, title
from fagen.measure.timing import Regime
from fagen.problem import Problem
from fagen.vocab import BACKWARD, PLAIN_MASKS, SIXTEEN_BITS

ROUND = Regime("burst", idle=0.010, warm=0.0005, timed=0.006, rounds=5)
FLOPS = (1e10, 2e12)  # of a shape: longer than its launches, and no longer than needed
SLOWEST = 20  # shapes that are printed


def work(run: Run, options: Options) -> None:
    """Build the kernels, time every shape."""
    run.about |= {"number": options.number, "seed": options.seed}
    committed = {Problem.of(schedule).opened() for schedule in flow.committed(BACKWARD)}
    problems = [
        problem
        for problem in sorted(committed)
        # a shape is of sequences of one length
        if problem.mask in options.mask and problem.dtype in options.dtype
        if problem.lengths == vocab.LENGTHS[0]
        if problem.head_dim in (options.head_dim or [problem.head_dim])
    ]
    if not problems:
        raise FagenError("no committed schedule computes such gradients")
    cells = drawn(options.number, options.seed, problems, FLOPS)
    schedules = {cell: serving(cell, run.card) for cell in cells}
    kernels = run.build(schedule for served in schedules.values() for schedule in served)
    time_all(run, schedules, kernels, options.peer or [YARDSTICK], regimes=[ROUND])


def page(run: Run) -> None:
    """Write <stem>.md; print its means and the slowest shapes."""
    rows = run.rows
    quotients = ratios(rows, ROUND.name)
    lines = means(["problem"], groups(rows))
    behind = sum(ratio < 1 for ratio in quotients.values())
    counted = f"{len(quotients)} shapes beside {title(YARDSTICK)}, behind in {behind}."
    run.write_page(
        "Gradients at random shapes",
        f"{run.made_on}. Gradients at shapes drawn at random (seed {run.about['seed']}): "
        f"{said_of(ROUND)}, medians; TFLOP/s of five products. {counted}",
        lines,
        problems(rows),
        picks(rows),
        run.remarks,
    )
    slowest = sorted(quotients, key=quotients.__getitem__)[:SLOWEST]
    print(lines)
    print(problems([row for row in rows if row.cell in slowest]))
    print(counted)


def groups(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """The rows by mask, dtype and head dim, by what the heads are like, and all."""

    def problem(row: Row) -> tuple[str, ...]:
        return (f"{row.dtype} hd{row.cell.problem.head_dims} {row.mask}",)

    by_name = grouped(sorted(rows), problem)
    by_name["grouped heads",] = [row for row in rows if row.heads != row.kv_heads]
    by_name["other queries than keys",] = [row for row in rows if row.seqlen_q != row.seqlen_k]
    by_name["all",] = list(rows)
    return {name: members for name, members in by_name.items() if members}


main = Script(
    __doc__,
    "backward-shapes",
    work,
    page,
    row=Row,
    regimes=[ROUND],
    lists={
        "dtype": (SIXTEEN_BITS, SIXTEEN_BITS),
        "head_dim": (int, None),
        "mask": (PLAIN_MASKS, PLAIN_MASKS),
    },
    options={
        "--number": dict(type=int, default=80, help="of shapes; default: %(default)s"),
        "--seed": dict(type=int, default=0),
    },
    peers=True,
)

if __name__ == "__main__":
    sys.exit(main())
