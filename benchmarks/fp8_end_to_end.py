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
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from record import RESULTS, Findings, build, exit_code
from torch._subclasses.fake_tensor import FakeTensorMode

import fagen
from fagen.measure.inputs import inputs
from fagen.measure.numerics import FP8_AGREEMENT, rms
from fagen.measure.rows import geomean, markdown
from fagen.measure.timing import Call, Regime, time_calls
from fagen.problem import Cell, Problem, standard_sizes
from fagen.registry import from_slug
from fagen.runtime import attention, quantize, ready
from fagen.vocab import MASKS

HEAD_DIMS = (64, 128, 256)
SEQLENS = tuple(512 << i for i in range(8))
ROUND = Regime("burst", idle=0.020, warm=0.0, timed=0.006, rounds=3)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; the exit code is that of the `fagen` command."""
    asked = _arguments(argv)
    return exit_code(lambda: redraw(asked) if asked.redraw else run(asked))


def redraw(asked: argparse.Namespace) -> int:
    """Write the page of a committed run again; needs no GPU."""
    report(Findings.read(asked.redraw))
    return 0


def run(asked: argparse.Namespace) -> int:
    """Build all kernels that calls will take, time every cell, write and say what was found."""
    findings = Findings.begun(asked.out, "fp8-end-to-end", [ROUND])
    work = list(cells(asked))
    findings.note_compiler(build(map(from_slug, slugs_called(work))))
    began = time.monotonic()
    for cell in work:
        findings.rows.append(time_cell(findings, cell))
        findings.about["seconds"] = round(time.monotonic() - began)
        findings.save()
    report(findings)
    return findings.finish()


def cells(asked: argparse.Namespace) -> Iterator[Cell]:
    """The cells that are asked for."""
    for head_dim in asked.head_dim or HEAD_DIMS:
        for mask in asked.mask or MASKS:
            for seqlen in asked.seqlen or SEQLENS:
                problem = Problem("fp16", head_dim, head_dim, mask)
                yield Cell(problem, standard_sizes(head_dim, seqlen))


def calls_of(cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Call]:
    """Both calls, as users write them."""
    causal = cell.problem.mask == "causal"
    return {
        "fp16": Call(lambda: fagen.attention(q, k, v, causal=causal)),
        "e4m3": Call(lambda: fagen.attention_fp8(q, k, v, causal=causal)),
    }


def slugs_called(cells: Sequence[Cell]) -> tuple[str, ...]:
    """The kernels that the calls of cells will take, found without numbers and without a GPU.

    So all can be compiled at a time, whatever attention_fp8 does: on its own it builds one by one.
    """
    slugs: dict[str, None] = {}
    emulation = ready.emulation

    def noting(slug: str) -> Any:
        slugs[slug] = None
        return emulation(slug)

    with ExitStack() as within:
        within.enter_context(mock.patch.object(ready, "emulation", noting))
        for known in (attention._ready, attention._served, quantize._ready):
            within.enter_context(mock.patch.dict(known, clear=True))  # what was called before
        within.enter_context(FakeTensorMode())
        within.enter_context(torch.no_grad())
        for cell in cells:
            sizes, dim = cell.sizes, cell.problem.head_dim
            q = torch.empty(sizes.batch, sizes.seqlen_q, sizes.heads, dim, dtype=torch.float16)
            for call in calls_of(cell, q, q, q).values():
                call.once()
    return tuple(slugs)


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
    wanted = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    wanted.add_argument("--head-dim", action="append", type=int)
    wanted.add_argument("--mask", action="append", choices=list(MASKS))
    wanted.add_argument("--seqlen", action="append", type=int)
    wanted.add_argument("--out", type=Path, default=RESULTS, help="folder to write to")
    wanted.add_argument("--redraw", type=Path, metavar="….json", help="no GPU: write anew")
    return wanted.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
