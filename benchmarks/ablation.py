"""Time one schedule with each of its features taken away, as the FlashAttention-3 paper does.

    python benchmarks/ablation.py                     5 kernels and cuDNN, both regimes: ~20 seconds
    python benchmarks/ablation.py --redraw benchmarks/results/nvidia-h200-2026-11-21-ablation.json

fp16, head dim 128, full mask, S = 16,384, 16 heads. All run in one cell, in a new order each round,
for more rounds than in the grid, since one cell has to decide.
"""

import dataclasses
import sys
from collections.abc import Sequence

from record import Options, Run, Script, time_all

from fagen.kinds.forward.keys import Schedule
from fagen.measure.rows import TITLES, Row, markdown, regimes_of
from fagen.measure.timing import BURST, SUSTAINED
from fagen.problem import Cell, Problem, standard_sizes

WHOLE = Schedule.make(dtype="fp16", head_dim=128, mask="full", block_m=128, block_n=128)
WITHOUT = {
    "intra-warpgroup overlap": WHOLE.but(intra_warpgroup=False),
    "warp specialisation (and ping-pong)": WHOLE.but(producer="none"),
    "ping-pong": WHOLE.but(inter_warpgroup=False),
    "lazy row max": WHOLE.but(maximum="online"),
}
# TFLOP/s on an H100, FlashAttention-3's paper, the ablation of its forward pass
PAPER = {
    WHOLE.slug: 661,
    WITHOUT["intra-warpgroup overlap"].slug: 582,
    WITHOUT["warp specialisation (and ping-pong)"].slug: 570,
}
CELL = Cell(Problem("fp16", 128, 128, "full"), standard_sizes(128, 16_384))
REGIMES = (dataclasses.replace(SUSTAINED, rounds=9), dataclasses.replace(BURST, rounds=15))


def work(run: Run, options: Options) -> None:
    """Build the kernels, time them beside cuDNN."""
    schedules = [WHOLE, *WITHOUT.values()]
    peers = options.peer or ["cudnn"]
    time_all(run, {CELL: schedules}, run.build(schedules), peers, regimes=REGIMES)


def page(run: Run) -> None:
    """Write <stem>.md, and print it."""
    rounds = ", ".join(
        f"{regime['rounds']} rounds {name}" for name, regime in run.about["regimes"].items()
    )
    text = run.write_page(
        "What each feature is worth",
        f"{run.made_on}; {CELL}; {rounds}. TFLOP/s, @ the SM clock in MHz, ± half the spread.",
        table(run.rows),
        verdicts(run.rows),
        "The paper's figures were measured on an H100, and are here for orientation.",
        run.remarks,
    )
    print(text)


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line per schedule and peer, each also divided by the whole schedule."""
    regimes = regimes_of(rows)
    timed = {(row.schedule or row.implementation, row.regime): row for row in rows}
    names = {WHOLE.slug: "everything"}
    names |= {schedule.slug: f"without {feature}" for feature, schedule in WITHOUT.items()}
    names |= {row.implementation: TITLES[row.implementation] for row in rows if not row.schedule}
    names = {key: name for key, name in names.items() if (key, regimes[0]) in timed}
    body = []
    for key, name in names.items():
        line = [name, f"`{key}`" if key.startswith(WHOLE.slug) else ""]
        for regime in regimes:
            row, whole = timed[key, regime], timed[WHOLE.slug, regime]
            clock = f" @{row.sm_clock_mhz}" if row.sm_clock_mhz else ""
            line.append(f"{row.tflops:.0f}{clock} ± {row.spread / 2:.1%}")
            line.append(f"{row.tflops / whole.tflops:.3f}")
        body.append([*line, f"{PAPER[key]}" if key in PAPER else "–"])
    figures = [f"{regime}{over}" for regime in regimes for over in ("", " ÷ everything")]
    return markdown(["", "schedule", *figures, "FA3's paper"], body)


def verdicts(rows: Sequence[Row]) -> str:
    """Markdown: what each feature is worth, and whether that earns its place."""
    regimes = regimes_of(rows)
    tflops = {(row.schedule, row.regime): row.tflops for row in rows}
    lines = ""
    for feature, schedule in WITHOUT.items():
        if (schedule.slug, regimes[0]) not in tflops:
            continue
        worth = {
            regime: tflops[WHOLE.slug, regime] / tflops[schedule.slug, regime] - 1
            for regime in regimes
        }
        figures = ", ".join(f"{gain:+.1%} {regime}" for regime, gain in worth.items())
        gained = [regime for regime, gain in worth.items() if gain > 0]
        verdict = "earns its place"
        if len(gained) < len(regimes):
            verdict += f" in {' and '.join(gained)} runs only" if gained else " nowhere"
        lines += f"- {feature}: {figures}; {verdict}\n"
    return lines


main = Script(__doc__, "ablation", work, page, row=Row, regimes=REGIMES, peers=True)

if __name__ == "__main__":
    sys.exit(main())
