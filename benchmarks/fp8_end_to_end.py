"""Time fagen.attention_fp8, quantising included, beside fagen.attention on the same fp16 tensors.

    python benchmarks/fp8_end_to_end.py                      48 cells in burst: ~1 GPU minute
    python benchmarks/fp8_end_to_end.py --head-dim 128 --mask causal --seqlen 4096    a part
    python benchmarks/fp8_end_to_end.py --redraw <…>-fp8-end-to-end.json      no GPU

Both are called as users call them, with all at their defaults: each call allocates what it needs,
and in e4m3 it reads Q, K and V, quantises them and computes. 16,384 tokens in all, or one sequence
that is longer; hidden size 2048. Said is the speed of e4m3 over fp16, and for each head dim and
mask the length from which it pays: the least from which on it is faster at every length.

Written to benchmarks/results/<card>-<date>-fp8-end-to-end.json and .md, after every cell. The exit
code is 6 where outputs are further apart than e4m3 is from fp16.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from record import Findings, build, grid, parsed, parser, script, serving

import fagen
from fagen.measure.inputs import inputs
from fagen.measure.numerics import FP8_AGREEMENT, rms
from fagen.measure.rows import geomean, markdown
from fagen.measure.timing import Call, Regime, time_calls
from fagen.problem import Cell
from fagen.vocab import MASKS

HEAD_DIMS = (64, 128, 256)
SEQLENS = tuple(512 << i for i in range(8))
ROUND = Regime("burst", idle=0.020, warm=0.0, timed=0.006, rounds=3)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; the exit code is that of the `fagen` command."""
    return script(_arguments(argv), run, report)


def run(asked: argparse.Namespace) -> int:
    """Build the kernels of attention, time every cell, write and say what was found."""
    findings = Findings.begun(asked.out, "fp8-end-to-end", [ROUND])
    cells = grid(asked)
    card = findings.about["card"]
    wanted = [one for cell in cells for of in (cell, in_e4m3(cell)) for one in serving(of, card)]
    findings.note_compiler(build(wanted))  # several at a time; what a call lacks it builds itself
    findings.each(cells, lambda cell: findings.rows.append(time_cell(findings, cell)))
    report(findings)
    return findings.finish()


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


def time_cell(findings: Findings, cell: Cell) -> dict[str, Any]:
    """The row of a cell: microseconds of both calls."""
    calls = calls_of(cell, *inputs(cell))
    judge = calls["fp16"].once().float()
    off = rms(calls["e4m3"].once().float() - judge) / rms(judge)
    if not off <= FP8_AGREEMENT:
        findings.note("wrong", f"{cell}: off by {off:.3g} of the output, {FP8_AGREEMENT} may be")
        findings.about["wrong"] = True
    timed = time_calls(calls, ROUND)
    problem = cell.problem
    return {
        "head_dim": problem.head_dim,
        "mask": problem.mask,
        **vars(cell.sizes),
        "fp16_us": round(timed["fp16"].seconds * 1e6, 2),
        "e4m3_us": round(timed["e4m3"].seconds * 1e6, 2),
        "spread": round(max(one.spread for one in timed.values()), 4),
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


def report(findings: Findings) -> None:
    """Write <stem>.md, and print it."""
    groups: dict[tuple[int, str], dict[int, Mapping[str, Any]]] = {}
    for row in findings.rows:
        groups.setdefault((row["head_dim"], row["mask"]), {})[row["seqlen_k"]] = row
    lengths = sorted({row["seqlen_k"] for row in findings.rows})
    gains, times = [], []
    for (head_dim, mask), found in groups.items():
        least = pays_from(list(found.values()))
        cells = [found.get(length) for length in lengths]
        gains.append([str(head_dim), mask, *(f"{gain(row):.2f}" if row else "–" for row in cells),
                      f"{geomean(map(gain, found.values())):.3f}",
                      f"{least}" if least else "at none"])  # fmt: skip
        times.append([str(head_dim), mask, *(_times(row) for row in cells)])
    head = ["hd", "mask", *map(str, lengths)]
    page = findings.write_page(
        "e4m3 with quantising, beside fp16",
        f"{findings.made_on}; burst, 16,384 tokens or one longer sequence, hidden size 2048. "
        "fagen.attention_fp8 with all at its defaults, quantising included, ÷ fagen.attention in "
        "fp16:",
        markdown([*head, "geomean", "it pays from"], gains),
        "Microseconds of a call in e4m3 and in fp16:",
        markdown(head, times),
        findings.remarks,
    )
    print(page)


def _times(row: Mapping[str, Any] | None) -> str:
    return f"{row['e4m3_us']:.0f} / {row['fp16_us']:.0f}" if row else "–"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    wanted = parser(__doc__, peers=False, dtype=["fp16"], head_dim=int, mask=MASKS, seqlen=int)
    return parsed(wanted, argv, dtype=["fp16"], head_dim=HEAD_DIMS, mask=MASKS, seqlen=SEQLENS)


if __name__ == "__main__":
    sys.exit(main())
