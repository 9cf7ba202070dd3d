"""Time the gradients beside cuDNN's at shapes drawn at random, which nobody tuned for.

    python benchmarks/backward_shapes.py                  80 shapes in burst: about a GPU minute
    python benchmarks/backward_shapes.py --number 200 --seed 7
    python benchmarks/backward_shapes.py --mask causal --head-dim 128 --number 20   some of them
    python benchmarks/backward_shapes.py --redraw RESULTS.json                    no GPU

Lengths and batches are log-uniform, most lengths odd; heads are few, and grouped in half of the
shapes; a quarter of those without a mask have queries and keys of different numbers. Problems are
those that have a committed schedule. The kernel is the one that fagen.attention takes for the
gradients of such a call; it runs in turn with cuDNN's backward pass, on the same tensors in one
process, and both allocate their outputs. --peer fa2 adds FlashAttention-2's.

Written to benchmarks/results/ as benchmarks/run.py does, after every shape:
<card>-<date>-backward-shapes.json, .run.json and .md, with the minimum and the geometric mean of
fagen ÷ cuDNN. The exit code is 6 where gradients disagree.
"""

import argparse
import math
import random
import sys
from collections.abc import Iterable, Sequence

from record import Record, build, parsed, parser, script, serving, time_all
from tables import picks

from fagen import flow, vocab
from fagen.errors import FagenError
from fagen.measure.rows import YARDSTICK, Row, means, problems, ratios, title
from fagen.measure.timing import Regime
from fagen.problem import Cell, Problem, Sizes
from fagen.vocab import BACKWARD, MASKS, SIXTEEN_BITS

ROUND = Regime("burst", idle=0.010, warm=0.0005, timed=0.006, rounds=5)
FLOPS = (1e10, 2e12)  # of a shape: longer than its launches, and no longer than needed
LENGTHS, BATCHES = (64, 16_384), (1, 32)
SLOWEST = 20  # shapes that are printed


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; the exit code is that of the `fagen` command."""
    return script(_arguments(argv), run, report, Record.read)


def run(asked: argparse.Namespace) -> int:
    """Build the kernels, time every shape, write everything."""
    record = Record.begun(asked.out, "backward-shapes", [ROUND])
    record.about |= {"number": asked.number, "seed": asked.seed}
    known = {
        Problem.of(schedule).opened()
        for schedule in flow.committed(BACKWARD)
        if schedule.values()["head_dim"] in (asked.head_dim or [schedule.values()["head_dim"]])
    }
    wanted = [
        one
        for one in sorted(known)
        # a shape is of sequences of one length
        if one.mask in asked.mask and one.dtype in asked.dtype and one.lengths == vocab.LENGTHS[0]
    ]
    if not wanted:
        raise FagenError("no committed schedule computes such gradients")
    card = record.about["card"]
    work = {cell: serving(cell, card) for cell in drawn(asked.number, asked.seed, wanted)}
    kernels = build(schedule for found in work.values() for schedule in found)
    record.note_compiler(kernels)
    time_all(record, work, kernels, asked.peer or [YARDSTICK], regimes=[ROUND])
    report(record)
    return record.finish()


def drawn(number: int, seed: int, wanted: Sequence[Problem]) -> list[Cell]:
    """So many different cells of these problems at random, the same for the same seed."""
    dice = random.Random(seed)

    def between(least: int, most: int) -> int:
        return round(math.exp(dice.uniform(math.log(least), math.log(most))))

    def length() -> int:
        found = between(*LENGTHS)
        return found | 1 if dice.random() < 0.75 else found

    cells: dict[Cell, None] = {}
    while len(cells) < number:
        problem = dice.choice(list(wanted))
        kv_heads = dice.choice((1, 2, 3, 4, 8))
        heads = kv_heads * dice.choice((1, 1, 1, 2, 4, 8))
        keys = length()
        uneven = not MASKS[problem.mask].by_row and dice.random() < 0.25
        sizes = Sizes(between(*BATCHES), heads, kv_heads, length() if uneven else keys, keys)
        cell = Cell(problem, sizes)
        if FLOPS[0] <= cell.flops <= FLOPS[1]:
            cells[cell] = None
    return list(cells)


# ---- what is said --------------------------------------------------------------------------------


def report(record: Record) -> None:
    """Write <stem>.md; print its means and the slowest shapes."""
    rows = record.rows
    of = ratios(rows, ROUND.name)
    lines = means(["problem"], groups(rows))
    behind = sum(ratio < 1 for ratio in of.values())
    counted = f"{len(of)} shapes beside {title(YARDSTICK)}, behind in {behind}."
    record.write_page(
        "Gradients at random shapes",
        f"{record.made_on}. Gradients at shapes drawn at random (seed {record.about['seed']}): "
        f"{ROUND.idle * 1e3:g} ms of pause, {ROUND.timed * 1e3:g} ms timed, {ROUND.rounds} rounds, "
        f"medians; TFLOP/s of five products. {counted}",
        lines,
        problems(rows),
        f"fagen's kernels:\n\n{picks(rows)}",
        record.remarks,
    )
    slowest = sorted(of, key=of.__getitem__)[:SLOWEST]
    print(lines)
    print(problems([row for row in rows if row.cell in slowest]))
    print(counted)


def groups(rows: Iterable[Row]) -> dict[tuple[str, ...], list[Row]]:
    """The rows by mask, dtype and head dim, by what the heads are like, and all."""
    listed = list(rows)
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in sorted(listed):
        problem = row.cell.problem
        found.setdefault((f"{problem.dtype} hd{problem.head_dims} {problem.mask}",), []).append(row)
    found["grouped heads",] = [row for row in listed if row.heads != row.kv_heads]
    found["other queries than keys",] = [row for row in listed if row.seqlen_q != row.seqlen_k]
    found["all",] = listed
    return {name: of for name, of in found.items() if of}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    wanted = parser(__doc__, dtype=SIXTEEN_BITS, head_dim=int, mask=MASKS)
    wanted.add_argument("--number", type=int, default=80, help="of shapes; default: %(default)s")
    wanted.add_argument("--seed", type=int, default=0)
    return parsed(wanted, argv, dtype=SIXTEEN_BITS, mask=MASKS)


if __name__ == "__main__":
    sys.exit(main())
