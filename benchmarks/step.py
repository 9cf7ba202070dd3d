"""Time attention's part of a training step, forward and backward, beside cuDNN's.

    python benchmarks/step.py                     bf16, head dim 128, causal, 8,192 tokens: seconds
    python benchmarks/step.py --seqlen 2048 --seqlen 8192 --head-dim 64 --peer cudnn --peer fa2
    python benchmarks/step.py --redraw benchmarks/results/<card>-<date>-step.json        no GPU

16,384 tokens and hidden size 2048. The forward pass gives the log-sum-exp too, and the backward
pass takes its results. Each is timed alone, and both in turn as one call; the sum of the former is
what a model of many layers sees, whose passes lie apart. All are kernels called without autograd,
which is the host's matter, and allocate what they return.

Written to benchmarks/results/<card>-<date>-step.json and .md, after every length. The exit code is
6 where gradients disagree.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from record import Findings, Kernels, build, exit_code, parser, say, serving

from fagen.errors import DeviceError, FagenError, VerificationError
from fagen.measure.cells import compared
from fagen.measure.gradients import attended, output_gradient
from fagen.measure.inputs import inputs, softmax_scale
from fagen.measure.numerics import disagreement
from fagen.measure.peers import peer
from fagen.measure.rows import markdown, title
from fagen.measure.timing import REGIMES, Call, Timing, time_calls
from fagen.problem import Cell, Problem, standard_sizes
from fagen.runtime import op
from fagen.vocab import BACKWARD, FORWARD, MASKS, SIXTEEN_BITS

PARTS = ("forward", "backward", "in turn")
BACKENDS = {"cudnn": "cudnn", "fa2": "flash"}  # torch's names for them
Passes = tuple[Callable[[], Any], Callable[[Any], Any]]  # of the latter's argument: the results


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; the exit code is that of the `fagen` command."""
    asked = _arguments(argv)
    return exit_code(lambda: redraw(asked) if asked.redraw else run(asked))


def redraw(asked: argparse.Namespace) -> int:
    """Write the page of a committed run again; needs no GPU."""
    report(Findings.read(asked.redraw))
    return 0


def run(asked: argparse.Namespace) -> int:
    """Build the kernels, time every length, write everything."""
    findings = Findings.begun(asked.out, "step")
    card = findings.about["card"]
    sizes = [standard_sizes(asked.head_dim, seqlen) for seqlen in asked.seqlen]
    cells = {
        kind: [
            Cell(Problem(asked.dtype, asked.head_dim, asked.head_dim, asked.mask, kind=kind), one)
            for one in sizes
        ]
        for kind in (FORWARD, BACKWARD)
    }
    work = {cell: serving(cell, card) for of in cells.values() for cell in of}
    if missing := [cell for cell in work if not work[cell]]:
        raise FagenError(f"no committed schedule computes {missing[0]}")
    kernels = build(schedule for found in work.values() for schedule in found)
    findings.note_compiler(kernels)
    began = time.monotonic()
    for forward, backward in zip(*cells.values(), strict=True):
        try:
            time_cell(
                findings,
                (forward, backward),
                (work[forward][0].slug, work[backward][0].slug),
                kernels,
                asked.peer or ["cudnn"],
            )
        except VerificationError as error:
            say(f"  {error}")
            findings.note("wrong, and not timed", error)
            findings.about["wrong"] = True
        findings.about["seconds"] = round(time.monotonic() - began)
        findings.save()
    if not findings.rows:
        raise FagenError(f"nothing could be timed:\n{findings.remarks}")
    report(findings)
    return findings.finish()


def time_cell(
    findings: Findings,
    cells: tuple[Cell, Cell],
    slugs: tuple[str, str],
    kernels: Kernels,
    peers: Sequence[str],
) -> None:
    """Add the rows of one length: fagen's, and those of the peers that can."""
    forward, backward = cells
    q, k, v = inputs(forward)
    dout = output_gradient(q, v)
    causal = MASKS[forward.problem.mask].causal

    def ours() -> Passes:
        attend, differentiate = (op.load(kernels[slug][1]) for slug in slugs)
        scale = softmax_scale(forward.problem.head_dim)
        return (
            lambda: attend(q, k, v, scale),
            lambda saved: differentiate(dout, q, k, v, *saved, scale),
        )

    def theirs(backend: str) -> Passes:
        return (
            lambda: attended(backend, q, k, v, causal=causal),
            lambda saved: saved.backward(dout),
        )

    who: dict[str, Passes] = {"fagen": ours()}
    for name in peers:
        try:
            peer(name).bind(backward, q, k, v)
            who[name] = theirs(BACKENDS[name])
        except DeviceError as refusal:
            findings.note(f"{title(name)} left out ({refusal})", backward)
    calls: dict[str, Call] = {}
    gradients = {}
    for name, (attend, differentiate) in who.items():
        saved = attend()
        gradients[name] = differentiate(saved)
        calls |= {f"{name} {part}": call for part, call in parts(attend, differentiate, saved)}
    agree(backward, slugs[1], gradients)
    for regime in REGIMES.values():
        timings = time_calls(calls, regime)
        for name in who:
            findings.rows.append(row(cells, slugs, name, regime.name, timings))
            say(f"  {forward.sizes} {name:8} {regime.name:10} {line_of(findings.rows[-1])}")


def parts(
    attend: Callable[[], Any], differentiate: Callable[[Any], Any], saved: Any
) -> tuple[tuple[str, Call], ...]:
    """The calls that are timed of one implementation."""
    return tuple(
        zip(
            PARTS,
            (
                Call(attend),
                Call(lambda: differentiate(saved)),
                Call(lambda: differentiate(attend())),
            ),
            strict=True,
        )
    )


def agree(cell: Cell, slug: str, gradients: dict[str, Any]) -> None:
    """Raise VerificationError where fagen's gradients are not the others'."""
    ours, *others = (compared(tuple(of), slice(None)) for of in gradients.values())
    for other in others:
        for own, their in zip(ours, other, strict=True):
            worst, allowed = disagreement(cell, own, their)
            if not worst <= allowed:
                raise VerificationError(f"{slug} differs by {worst:.3g} of {allowed:.3g} at {cell}")


def row(
    cells: tuple[Cell, Cell],
    slugs: tuple[str, str],
    name: str,
    regime: str,
    timings: dict[str, Timing],
) -> dict[str, Any]:
    """What is written of one implementation in one regime."""
    problem, sizes = cells[0].problem, cells[0].sizes
    of = {part: timings[f"{name} {part}"] for part in PARTS}
    return {
        "dtype": problem.dtype,
        "head_dim": problem.head_dim,
        "mask": problem.mask,
        **vars(sizes),
        "implementation": name,
        "schedules": list(slugs) if name == "fagen" else None,
        "regime": regime,
        "us": {part: round(one.seconds * 1e6, 2) for part, one in of.items()},
        "spread": {part: round(one.spread, 4) for part, one in of.items()},
        "tflops": round(sum(cell.flops for cell in cells) / _sum(of) / 1e12, 1),
    }


def _sum(timings: dict[str, Timing]) -> float:
    """Seconds of both passes, each timed alone."""
    return timings["forward"].seconds + timings["backward"].seconds


# ---- what is said --------------------------------------------------------------------------------


def line_of(found: dict[str, Any]) -> str:
    """The times of a row in words."""
    us = found["us"]
    return f"{us['forward']:.0f} + {us['backward']:.0f} µs, in turn {us['in turn']:.0f} µs"


def report(findings: Findings) -> None:
    """Write <stem>.md, and print it."""
    body = []
    for found in findings.rows:
        us = found["us"]
        whole = us["forward"] + us["backward"]
        beside = [
            other["us"]
            for other in findings.rows
            if other["implementation"] == "cudnn"
            and all(other[key] == found[key] for key in ("regime", "seqlen_q", "head_dim", "mask"))
        ]
        ratios = ["–", "–"]
        if beside and found["implementation"] != "cudnn":
            (other,) = beside
            ratios = [
                f"{(other['forward'] + other['backward']) / whole:.3f}",
                f"{other['in turn'] / us['in turn']:.3f}",
            ]
        body.append(
            [found["dtype"], str(found["head_dim"]), found["mask"], str(found["seqlen_q"]),
             found["regime"], title(found["implementation"]), f"{us['forward']:.1f}",
             f"{us['backward']:.1f}", f"{whole:.1f}", f"{us['in turn']:.1f}",
             f"{found['tflops']:.0f}", *ratios]
        )  # fmt: skip
    head = ["dtype", "hd", "mask", "S", "regime", "", "forward, µs", "backward, µs", "sum",
            "in turn", "TFLOP/s of the sum", "÷ cuDNN, sum", "in turn"]  # fmt: skip
    page = findings.write_page(
        "Attention in a training step",
        f"{findings.made_on}; 16,384 tokens, hidden size 2048. Attention's part of a training "
        "step: forward with the log-sum-exp, and backward; medians.",
        markdown(head, body),
        findings.remarks,
    )
    print(page)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    wanted = parser(__doc__)
    wanted.add_argument("--dtype", choices=list(SIXTEEN_BITS), default="bf16")
    wanted.add_argument("--head-dim", type=int, default=128)
    wanted.add_argument("--mask", choices=list(MASKS), default="causal")
    wanted.add_argument("--seqlen", action="append", type=int)
    asked = wanted.parse_args(argv)
    asked.seqlen = asked.seqlen or [8_192]
    if unknown := [name for name in asked.peer or () if name not in BACKENDS]:
        wanted.error(f"--peer {unknown[0]}: there are {', '.join(BACKENDS)}")
    return asked


if __name__ == "__main__":
    sys.exit(main())
