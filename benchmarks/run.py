"""Time fagen beside its peers over the whole grid, and write rows, a table and plots.

    python benchmarks/run.py                             24 fp16 cells, both regimes: ~2 GPU minutes
    python benchmarks/run.py --dtype fp16 --dtype bf16   both dtypes
    python benchmarks/run.py --dtype e4m3                all of e4m3 beside cuDNN in fp16
    python benchmarks/run.py --peer cudnn --peer flex    other peers
    python benchmarks/run.py --dtype fp16 --dtype e4m3 --burst e4m3 --without fa2    a shorter run
    python benchmarks/run.py --head-dim 128 --seqlen 4096 --out /tmp/x    a corner of the grid
    python benchmarks/run.py --redraw benchmarks/results/nvidia-h200-2026-11-21.json   no GPU
    python benchmarks/run.py --pass backward --dtype fp16 --dtype bf16    the gradients: 60 cells

A cell is a dtype, head dim, mask and sequence length, with 16,384 tokens and hidden size 2048;
all implementations of a cell run in this process on the same inputs, in a new order each round.
fagen's kernel is the one that fagen.attention takes for so many keys on this card; with
--all-schedules every committed one that does the cell is timed, and tables and plots show the
fastest.

Dtypes named by --burst are timed in that regime alone, which takes a quarter of the time.

With --pass backward all of this is of the gradients, at one length more: cuDNN's and FA2's backward
passes are called without autograd, on their own forward results, and a call is all of its kernels,
with the allocation of dq, dk and dv. A head dim without a committed schedule is noted. With
--deterministic there are the kernels that torch.use_deterministic_algorithms(True) asks for too, as
`fagen-deterministic`.

In 16 bits fagen's forward pass and cuDNN's are timed in burst a second time, on scores whose
standard deviation is 4 where it is 1 otherwise.

In e4m3 there are two of fagen's: `fagen` takes row-major V and transposes it in the kernel;
`fagen-prearranged` takes transposed V, and what that costs more than to quantise it row-major is in
its time. Each is timed with a scale per head and with one per block of rows, what
the latter costs is said, and tables show the faster. None holds the rest of quantisation: that of
Q, K and V is a column of its own. cuDNN, which all is divided by, computes in fp16.

Beside the rows, whose fields are those of fagen.measure.rows.Row, <card>-<date>.run.json has card,
driver, versions, date (UTC), how long each regime runs, the matrix product's TFLOP/s in the same
run, what a call costs the host, and notes on what was left out, with reasons. The page has the
geomeans of fagen over cuDNN per head dim, shares of the matrix product, bf16 beside fp16 where both
ran, and launch costs; a plot is <card>-<date>-<dtype>-<regime>.svg. Of gradients each begins
<card>-<date>-backward.
"""

import dataclasses
import sys
from itertools import chain

import plots
import torch
from launch import SMALL, launch_costs
from record import PASS, Options, Run, Script, flag, grid, heading, say, serving, time_all
from tables import (
    beside_fp16,
    by_scales,
    launch_lines,
    picks,
    share_of_matmul,
    with_quantising,
)

from fagen.build import Binary
from fagen.kind import Plan
from fagen.measure.inputs import SEQLENS
from fagen.measure.rows import (
    DETERMINISTIC,
    PREARRANGED,
    QUANTISE,
    WIDE,
    YARDSTICK,
    Row,
    geomeans,
    problems,
    table,
)
from fagen.measure.timing import BURST, REGIMES, Call, Regime, time_calls
from fagen.vocab import DTYPES, PASSES, PLAIN_MASKS

HEAD_DIMS = (64, 128, 256)
BURST_WIDE = dataclasses.replace(BURST, name=WIDE, sigma=4.0)
GRADIENT_SEQLENS = (512, 1_024, 2_048, 4_096, 16_384)
GRADIENTS_SAID = (
    " FLOPs are 2.5 times those of the forward pass; peers are called without autograd."
)
FURTHER = (
    *((PREARRANGED, YARDSTICK), ("fagen", "cudnn-e4m3"), (PREARRANGED, "cudnn-e4m3")),
    *((DETERMINISTIC, YARDSTICK), (DETERMINISTIC, "fagen")),
)
FP8_SAID = (
    " In e4m3 cuDNN is in fp16; the time of a transposed V includes what it costs beyond plain "
    "quantisation, and what all of that costs is a column of its own."
)


def regimes_for(options: Options) -> list[Regime]:
    """Both, and of the forward pass what widely spread scores are timed in."""
    wide = [] if PASSES[options.kind].gradients else [BURST_WIDE]
    return [*REGIMES.values(), *wide]


def work(run: Run, options: Options) -> None:
    """Build the kernels, and time every cell."""
    wide = None if PASSES[options.kind].gradients else BURST_WIDE
    cells, card = grid(options, options.kind), run.card
    schedules = {cell: serving(cell, card, everything=options.all_schedules) for cell in cells}
    if options.deterministic:
        for cell in (cell for cell in cells if schedules[cell]):
            problem = dataclasses.replace(cell.problem, deterministic=True)
            same = dataclasses.replace(cell, problem=problem)
            schedules[cell] += serving(same, card, derived=True)
    small = serving(dataclasses.replace(cells[0], sizes=SMALL), card)
    kernels = run.build([*small, *chain(*schedules.values())])
    run.about["matmul_tflops"] = {
        dtype: {name: round(tflops, 1) for name, tflops in matmul_ceiling(dtype).items()}
        for dtype in options.dtype
    }
    say(f"matmul 8192^3, TFLOP/s: {run.about['matmul_tflops']}")
    for brief in (False, True):
        some = [cell for cell in cells if (cell.problem.dtype in options.burst) == brief]
        how = dict(regimes=[BURST] if brief else list(REGIMES.values()), wide=wide)
        if some:
            part = {cell: schedules[cell] for cell in some}
            time_all(run, part, kernels, options.peer, without=options.without, **how)
    if small:
        time_launch(run, *kernels[small[0].slug])


def matmul_ceiling(dtype: str, size: int = 8_192) -> dict[str, float]:
    """TFLOP/s of torch's matrix product of two random size x size matrices, per regime."""
    fp8, kind = DTYPES[dtype].fp8, getattr(torch, DTYPES[dtype].torch)
    drawn_in = torch.float16 if fp8 else kind
    a, b = (torch.randn(size, size, device="cuda", dtype=drawn_in).to(kind) for _ in range(2))
    unit = torch.ones((), device="cuda")

    def product() -> torch.Tensor:
        if fp8:
            return torch._scaled_mm(a, b.t(), scale_a=unit, scale_b=unit, out_dtype=torch.bfloat16)
        return a @ b

    calls = {"matmul": Call(product)}
    return {
        name: 2.0 * size**3 / time_calls(calls, regime)["matmul"].seconds / 1e12
        for name, regime in REGIMES.items()
    }


def time_launch(run: Run, plan: Plan, binary: Binary) -> None:
    """Note what a call costs, of this kernel for a small problem."""
    try:
        costs = launch_costs(plan, binary)
    except Exception as error:  # a profiler that is missing fails in ways of its own
        run.note("no launch costs", error)
    else:
        run.about["launch"] = {name: dataclasses.asdict(costs[name]) for name in costs}
        say(launch_lines(run.about["launch"]))
    run.save()


def page(run: Run) -> None:
    """Write <stem>.md and the plots of a run, and print the table."""
    rows, about = run.rows, run.about
    gradients = any(PASSES[row.pass_].gradients for row in rows)
    subtitle = f"{run.made_on}; 16,384 tokens, hidden size 2048"
    ceilings = about["matmul_tflops"]
    products = "\n\n".join(
        f"matmul 8192³ {dtype}: "
        + ", ".join(f"{tflops:.0f} TFLOP/s {name}" for name, tflops in by_regime.items())
        for dtype, by_regime in ceilings.items()
    )
    drawn = plots.plot(rows, run.folder, run.stem, subtitle=subtitle, ceilings=ceilings)
    pictures = "\n\n".join(
        f"![TFLOP/s against sequence length, {dtype}, {regime}]({plot.name})"
        for plot in drawn
        for dtype, regime in [plot.stem.rsplit("-", 2)[1:]]
    )
    calls = f"One call, {SMALL}:\n\n{launch_lines(about['launch'])}" if "launch" in about else ""
    run.write_page(
        f"{heading(rows)}, fagen beside its peers",
        f"{subtitle}. TFLOP/s, @ the SM clock in MHz; every call allocates its outputs."
        + (GRADIENTS_SAID if gradients else " σ, of the scores, is 1 if not said.")
        + (FP8_SAID if any(row.implementation == QUANTISE for row in rows) else ""),
        geomeans(rows),
        *(geomeans(rows, over=over, label=label) for label, over in FURTHER),
        by_scales(rows),
        share_of_matmul(rows, ceilings),
        pictures,
        problems(rows),
        products,
        with_quantising(rows),
        beside_fp16(rows),
        calls,
        picks(rows),
        run.remarks,
    )
    print(table(rows))


def settle(options: Options) -> str | None:
    """The usual lengths, which are others of gradients."""
    gradients = PASSES[options.kind].gradients
    options.seqlen = options.seqlen or list(GRADIENT_SEQLENS if gradients else SEQLENS)
    wrong = options.deterministic and not gradients
    return "--deterministic goes with --pass backward" if wrong else None


main = Script(
    __doc__,
    lambda options: options.kind if PASSES[options.kind].gradients else "",
    work,
    page,
    row=Row,
    regimes=regimes_for,
    lists={
        "dtype": (sorted(DTYPES), ["fp16"]),
        "head_dim": (int, HEAD_DIMS),
        "mask": (PLAIN_MASKS, PLAIN_MASKS),
        "seqlen": (int, None),
    },
    options={
        "--pass": PASS,
        "--burst": dict(
            action="append", choices=sorted(DTYPES), default=[], help="in this regime alone"
        ),
        "--without": dict(action="append", metavar="PEER", default=[]),
        "--all-schedules": flag("time every committed schedule of a cell"),
        "--deterministic": flag("of gradients: these kernels as well"),
    },
    peers=True,
    settle=settle,
)

if __name__ == "__main__":
    sys.exit(main())
