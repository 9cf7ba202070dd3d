"""Time fagen beside its peers over the whole grid, and write rows, a table and plots.

    python benchmarks/run.py                             24 fp16 cells, both regimes: ~2 GPU minutes
    python benchmarks/run.py --dtype fp16 --dtype bf16   both dtypes
    python benchmarks/run.py --peer cudnn --peer flex    other peers
    python benchmarks/run.py --head-dim 128 --seqlen 4096 --out /tmp/x    a corner of the grid
    python benchmarks/run.py --redraw benchmarks/results/nvidia-h200-2026-11-21.json   no GPU

A cell is a dtype, head dim, mask and sequence length, with 16,384 tokens and hidden size 2048;
all implementations of a cell run in this process on the same inputs, in a new order each round.
Where several committed schedules do a cell, all of them run, and table and plots show the fastest.

Written to benchmarks/results/, after every cell, so that a run cut short keeps what it has:
  <card>-<date>.json       a list of rows, whose fields are those of fagen.measure.rows.Row
  <card>-<date>.run.json   what holds for all of them: card, driver, versions, date (UTC), how long
                           each regime runs, and the matrix product's TFLOP/s in the same run
  <card>-<date>.md         the table, and the geomeans of fagen over cuDNN per head dim
  <card>-<date>-<dtype>-<regime>.svg
"""

import argparse
import dataclasses
import datetime
import json
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import plots
import torch

from fagen import flow
from fagen.errors import FagenError
from fagen.measure.card import Card, hopper
from fagen.measure.cells import bench, matmul_ceiling
from fagen.measure.peers import installed
from fagen.measure.rows import Row, read_rows, table, write_rows
from fagen.measure.shapes import SEQLENS, standard_shape
from fagen.measure.timing import REGIMES
from fagen.vocab import DTYPES, MASKS

RESULTS = Path(__file__).resolve().parent / "results"
HEAD_DIMS = (64, 128, 256)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; the exit code is that of the `fagen` command."""
    asked = _arguments(argv)
    try:
        if asked.redraw:
            return redraw(asked.redraw)
        return run(asked)
    except FagenError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def run(asked: argparse.Namespace) -> int:
    """Build the kernels, time every cell, write everything."""
    card = hopper()
    began = time.monotonic()
    cells = [
        (dtype, head_dim, mask, seqlen)
        for dtype in asked.dtype
        for head_dim in asked.head_dim
        for mask in asked.mask
        for seqlen in asked.seqlen
    ]
    kernels = build_kernels({cell[:3] for cell in cells})
    print(f"{len(kernels)} kernels built in {time.monotonic() - began:.0f} s", flush=True)

    peers = asked.peer or ["cudnn", "fa2", *(["fa3"] if installed("fa3") else [])]
    began = time.monotonic()
    about = metadata(card)
    about["matmul_tflops"] = {
        dtype: {name: round(tflops, 1) for name, tflops in matmul_ceiling(dtype).items()}
        for dtype in asked.dtype
    }
    print(f"matmul 8192^3, TFLOP/s: {about['matmul_tflops']}", flush=True)
    stem = f"{card.slug}-{about['date']}"
    asked.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for number, (dtype, head_dim, mask, seqlen) in enumerate(cells, 1):
        mine = [built for key, built in kernels if key == (dtype, head_dim, mask)]
        if not mine:
            print(f"no schedule for {dtype} hd{head_dim} {mask}: cell left out", flush=True)
            continue
        print(f"[{number}/{len(cells)}, {time.monotonic() - began:.0f} s]", end=" ", flush=True)
        rows += bench(mine, [standard_shape(head_dim, seqlen)], peers=peers, progress=_say)
        about["seconds"] = round(time.monotonic() - began)
        write_rows(asked.out / f"{stem}.json", rows)
        (asked.out / f"{stem}.run.json").write_text(json.dumps(about, indent=1) + "\n")
    if not rows:
        raise FagenError("no committed schedule does any cell that was asked for")
    report(rows, about, asked.out, stem)
    print(f"{about['seconds']} s on the GPU; written to {asked.out / stem}.*")
    return 0


def redraw(path: Path) -> int:
    """Write table and plots of a committed run again; needs no GPU."""
    about = json.loads(path.with_suffix(".run.json").read_text(encoding="utf-8"))
    report(read_rows(path), about, path.parent, path.stem)
    return 0


def report(rows: Sequence[Row], about: dict[str, Any], folder: Path, stem: str) -> None:
    """Write <stem>.md and the plots of `rows`, and print the table."""
    text = table(rows)
    subtitle = (
        f"{about['card']}, driver {about['driver']}, CUDA {about['cuda']}, torch {about['torch']}, "
        f"cuDNN {about['cudnn']}, {about['date']}; 16,384 tokens, hidden size 2048"
    )
    ceilings = about["matmul_tflops"]
    lines = [
        f"matmul 8192³ {dtype}: "
        + ", ".join(f"{tflops:.0f} TFLOP/s {name}" for name, tflops in found.items())
        for dtype, found in ceilings.items()
    ]
    heading = f"{subtitle}. TFLOP/s, @ the SM clock in MHz; every call allocates its outputs."
    page = "\n\n".join([heading, text.strip(), *lines]) + "\n"
    (folder / f"{stem}.md").write_text(page, encoding="utf-8")
    plots.plot(rows, folder, stem, subtitle=subtitle, ceilings=ceilings)
    print(text)


def build_kernels(wanted: Iterable[tuple[str, int, str]]) -> list[tuple[tuple, tuple]]:
    """Every committed schedule for `wanted` (dtype, head dim, mask), built, several at a time.

    Returns ((dtype, head_dim, mask), (plan, binary)) pairs; head_dim_v is head_dim throughout.
    """
    wanted = set(wanted)
    chosen = []
    for schedule in flow.committed():
        attention = schedule.attention
        key = (attention.dtype, attention.head_dim, attention.mask)
        if key in wanted and attention.head_dim_v == attention.head_dim:
            chosen.append((key, schedule))
    with ThreadPoolExecutor(max_workers=8) as pool:
        made = pool.map(lambda pair: flow.built(pair[1], binding=True), chosen)
        return [(key, kernel) for (key, _), kernel in zip(chosen, made, strict=True)]


def metadata(card: Card) -> dict[str, Any]:
    """What holds for every row of this run; no host, no user, no path."""
    return {
        "card": card.name,
        "driver": card.driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": _dotted(torch.backends.cudnn.version()),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "regimes": {name: dataclasses.asdict(regime) for name, regime in REGIMES.items()},
    }


def _dotted(cudnn: int | None) -> str:
    """'9.19.0' for 91900, as cuDNN 9 counts."""
    if cudnn is None:
        return "none"
    return f"{cudnn // 10_000}.{cudnn // 100 % 100}.{cudnn % 100}"


def _say(line: str) -> None:
    print(line, flush=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", action="append", choices=sorted(DTYPES))
    parser.add_argument("--head-dim", action="append", type=int)
    parser.add_argument("--mask", action="append", choices=list(MASKS))
    parser.add_argument("--seqlen", action="append", type=int)
    parser.add_argument("--peer", action="append", help="default: cudnn, fa2, and fa3 if installed")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder to write to")
    parser.add_argument("--redraw", type=Path, metavar="ROWS.json", help="no GPU: write anew")
    asked = parser.parse_args(argv)
    asked.dtype = asked.dtype or ["fp16"]
    asked.head_dim = asked.head_dim or list(HEAD_DIMS)
    asked.mask = asked.mask or list(MASKS)
    asked.seqlen = asked.seqlen or list(SEQLENS)
    return asked


if __name__ == "__main__":
    sys.exit(main())
