"""Time fagen.attention_fp8, quantising included, beside fagen.attention on the same fp16 tensors.

    python benchmarks/fp8_end_to_end.py                      48 cells in burst: ~1 GPU minute
    python benchmarks/fp8_end_to_end.py --head-dim 128 --mask causal --seqlen 4096    a part
    python benchmarks/fp8_end_to_end.py --redraw <…>-fp8-end-to-end.json      no GPU

Both are called as users call them, with all at their defaults: each call allocates what it needs,
and in e4m3 it reads Q, K and V, quantises them and computes. 16,384 tokens in all, or one sequence
that is longer; hidden size 2048. Said is the speed of e4m3 over fp16, and for each head dim and
mask the length from which it pays: the least from which on it is faster at every length.

Outputs may be as far apart as e4m3 is from fp16.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from record import Options, Run, Script, grid, serving
from tables import grouped, pivoted

import fagen
from fagen.measure.inputs import inputs
from fagen.measure.numerics import FP8_AGREEMENT, rms
from fagen.measure.rows import geomean, markdown
from fagen.measure.timing import Call, Regime, time_calls
from fagen.problem import Cell
from fagen.vocab import PLAIN_MASKS

HEAD_DIMS = (64, 128, 256)
SEQLENS = tuple(512 << i for i in range(8))
ROUND = Regime("burst", idle=0.020, warm=0.0, timed=0.006, rounds=3)


def work(run: Run, options: Options) -> None:
    """Build the kernels of attention, time every cell."""
    cells = grid(options)
    both = [own for cell in cells for own in (cell, in_e4m3(cell))]
    # several at a time; what a call lacks it builds itself
    run.build(schedule for cell in both for schedule in serving(cell, run.card))
    run.each(cells, lambda cell: run.rows.append(time_cell(run, cell)))


def in_e4m3(cell: Cell) -> Cell:
    """The same cell of quantised tensors."""
    return dataclasses.replace(cell, problem=dataclasses.replace(cell.problem, dtype="e4m3"))


def calls_of(cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Call]:
    """Both calls, as users write them."""
    causal = cell.problem.mask == "causal"
    return {
        "fp16": Call(lambda: fagen.attention(q, k, v, causal=causal)),
        "e4m3": Call(lambda: fagen.attention_fp8(q, k, v, causal=causal)),
    }


def time_cell(run: Run, cell: Cell) -> dict[str, Any]:
    """The row of a cell: microseconds of both calls."""
    calls = calls_of(cell, *inputs(cell))
    judge = calls["fp16"].once().float()
    off = rms(calls["e4m3"].once().float() - judge) / rms(judge)
    if not off <= FP8_AGREEMENT:
        off_by = f"off by {off:.3g} of the output, {FP8_AGREEMENT} may be"
        run.note_wrong(f"{cell}: {off_by}", "wrong")
    timed = time_calls(calls, ROUND)
    problem = cell.problem
    return {
        "head_dim": problem.head_dim,
        "mask": problem.mask,
        **vars(cell.sizes),
        "fp16_us": round(timed["fp16"].seconds * 1e6, 2),
        "e4m3_us": round(timed["e4m3"].seconds * 1e6, 2),
        "spread": round(max(timing.spread for timing in timed.values()), 4),
        "off": round(off, 4),
    }


# ---- what is said --------------------------------------------------------------------------------


def gain(row: Mapping[str, Any]) -> float:
    """The speed of e4m3 over that of fp16."""
    return float(row["fp16_us"] / row["e4m3_us"])


def pays_from(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The least length from which on e4m3 is faster at every one; None where at none."""
    least = None
    for row in sorted(rows, key=lambda row: row["seqlen_k"], reverse=True):
        if gain(row) <= 1:
            break
        least = int(row["seqlen_k"])
    return least


def page(run: Run) -> None:
    """Write <stem>.md, and print it."""
    lengths = sorted({row["seqlen_k"] for row in run.rows})

    def table(figure: Callable[[Mapping[str, Any]], str]) -> list[list[str]]:
        return pivoted(run.rows, _kind, itemgetter("seqlen_k"), lengths, lambda x: figure(x[0]))

    gains = table(lambda row: f"{gain(row):.2f}")
    for line, rows in zip(gains, grouped(run.rows, _kind).values(), strict=True):
        line += [f"{geomean(map(gain, rows)):.3f}", str(pays_from(rows) or "at none")]
    head = ["hd", "mask", *map(str, lengths)]
    text = run.write_page(
        "e4m3 with quantising, beside fp16",
        f"{run.made_on}; burst, 16,384 tokens or one longer sequence, hidden size 2048. "
        "fagen.attention_fp8 with all at its defaults, quantising included, ÷ fagen.attention in "
        "fp16:",
        markdown([*head, "geomean", "it pays from"], gains),
        "Microseconds of a call in e4m3 and in fp16:",
        markdown(head, table(lambda row: f"{row['e4m3_us']:.0f} / {row['fp16_us']:.0f}")),
        run.remarks,
    )
    print(text)


_kind = itemgetter("head_dim", "mask")

main = Script(
    __doc__,
    "fp8-end-to-end",
    work,
    page,
    regimes=[ROUND],
    lists={
        "dtype": (["fp16"], ["fp16"]),
        "head_dim": (int, HEAD_DIMS),
        "mask": (PLAIN_MASKS, PLAIN_MASKS),
        "seqlen": (int, SEQLENS),
    },
)

if __name__ == "__main__":
    sys.exit(main())
