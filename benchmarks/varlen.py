"""Time varlen sequences beside FlashAttention-2's, and beside the kernel for equal lengths.

    python benchmarks/varlen.py             fp16, bf16 and e4m3, head dims 64, 128 and 256: minutes
    python benchmarks/varlen.py --dtype fp16                      a third of it, in files of its own
    python benchmarks/varlen.py --dtype fp16 --head-dim 128 --mask causal --list tiny
    python benchmarks/varlen.py --redraw benchmarks/results/<card>-<date>-varlen.json        no GPU

Three lists of lengths: "equal", 16,384 tokens in sequences of 4,096, where fagen's dense kernel and
cuDNN's stand beside it; "mixed", 65,536 tokens in sequences of 16 … 16,384, log-uniform; "tiny",
1,024 sequences of 1 … 64 tokens. As many keys as queries, hidden size 2048. TFLOP/s count what each
sequence computes by itself, a causal triangle as half its square. FlashAttention-2 is torch's. In
e4m3 others compute in fp16, and quantising is not in the time: Q and K have a scale for each head,
V for each column.

Files are <card>-<date>-varlen, or -varlen-fp16, say, where some dtypes are asked for.
"""

import dataclasses
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

import torch
from record import Options, Run, Script, say, serving
from tables import grouped
from torch import Tensor

from fagen.dispatch.select import buildable, select
from fagen.e4m3 import rounded
from fagen.errors import DeviceError, VerificationError
from fagen.measure.card import Clock
from fagen.measure.inputs import inputs, softmax_scale
from fagen.measure.numerics import FP8_AGREEMENT, rms
from fagen.measure.peers import ours, peer
from fagen.measure.rows import geomean, markdown, title
from fagen.measure.timing import REGIMES, Call, captured, time_calls
from fagen.problem import Cell, Problem, Sizes, flops, solves, standard_sizes
from fagen.runtime import op
from fagen.schedule import Schedule
from fagen.vocab import DTYPES, LENGTHS, PLAIN_MASKS, yardstick

EQUAL, MIXED, TINY = LISTS = ("equal", "mixed", "tiny")
MIXED_TOKENS = 65_536
RUNS = 20  # in a graph, of calls that a host would be too slow for


def lengths_of(name: str, head_dim: int) -> list[int]:
    """The sequences of a list, the same ones each time."""
    if name == EQUAL:
        sizes = standard_sizes(head_dim)
        return [sizes.seqlen_q] * sizes.batch
    dice = random.Random(0)
    if name == TINY:
        return [dice.randint(1, 64) for _ in range(1_024)]
    lengths: list[int] = []
    while (left := MIXED_TOKENS - sum(lengths)) > 0:
        length = round(math.exp(dice.uniform(math.log(16), math.log(16_384))))
        lengths.append(min(left, length))
    return lengths


def useful_flops(problem: Problem, lengths: Sequence[int], heads: int) -> float:
    """What the sequences take, each by itself."""
    return sum(flops(problem, Sizes(1, heads, heads, length, length)) for length in lengths)


def work(run: Run, options: Options) -> None:
    """Build the kernels, time every list."""
    problems = [
        problem_of(dtype, head_dim, mask)
        for dtype in options.dtype
        for head_dim in options.head_dim
        for mask in options.mask
    ]
    rows = {problem: select(problem, run.card).only for problem in problems}
    chosen = {problem: buildable(problem, slug).schedules[0] for problem, slug in rows.items()}
    dense = {problem: dense_of(problem, run.card) for problem in problems}
    kernels = run.build([*chosen.values(), *chain(*dense.values())])
    lists = [(problem, name) for problem in problems for name in options.list]
    run.about["not timed"] = [f"{problem.name} {name}" for problem, name in lists]

    def step(item: tuple[Problem, str]) -> None:
        problem, name = item
        run.about["not timed"].pop(0)
        beside = [ours(kernels[schedule.slug][1]).bind for schedule in dense[problem]]
        kernel = op.load(kernels[chosen[problem].slug][1])
        time_list(run, problem, name, chosen[problem].slug, kernel, beside)
        page(run)  # a run cut short has a page too

    run.each(lists, step)


def problem_of(dtype: str, head_dim: int, mask: str) -> Problem:
    """What varlen sequences of a dtype compute."""
    layout = "rows" if DTYPES[dtype].fp8 else ""
    out = DTYPES[dtype].out
    return Problem(dtype, head_dim, head_dim, mask, out, layout, 0, lengths="varlen")


def dense_of(problem: Problem, card: str) -> list[Schedule]:
    """The schedules for equal lengths that take Q, K and V as those of a problem do."""
    alike = dataclasses.replace(problem, lengths=LENGTHS[0])
    return [schedule for schedule in serving(cell_of(problem), card) if solves(schedule, alike)]


def taken(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """What a kernel takes of q, k and v (total, heads, D) in 16 bits: them, and their descales."""
    if not DTYPES[problem.dtype].fp8:
        return q, k, v
    bytes_ = [rounded(x[None], scales) for x, scales in ((q, "head"), (k, "head"), (v, "column"))]
    return *(x.values[0] for x in bytes_), *(x.descale for x in bytes_), None, None


def cell_of(problem: Problem) -> Cell:
    """The cell of kernels for equal lengths that stands beside the list of these."""
    dense = Problem(problem.dtype, problem.head_dim, problem.head_dim, problem.mask)
    return Cell(dense, standard_sizes(problem.head_dim))


def time_list(
    run: Run,
    problem: Problem,
    name: str,
    slug: str,
    kernel: op.Op,
    dense: Sequence[Callable[..., Call]],
) -> None:
    """Add the rows of one list of lengths; VerificationError where fagen's output is another's."""
    lengths, cell = lengths_of(name, problem.head_dim), cell_of(problem)
    heads = cell.sizes.heads
    sequence = Cell(cell.problem, Sizes(1, heads, heads, sum(lengths), sum(lengths)))
    q, k, v = (x[0] for x in inputs(sequence))
    at = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    scale, causal = softmax_scale(problem.head_dim), PLAIN_MASKS[problem.mask].causal
    longest = max(lengths)

    def fa2() -> Tensor:
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, at, at, longest, longest, 0.0, causal, False, scale=scale
        )[0]
        return out

    operands = taken(problem, q, k, v)
    calls = {
        "fagen": Call(
            lambda: op.out_only(kernel)(*operands[:3], at, at, scale, None, *operands[3:])
        ),
        "fa2": Call(fa2),
    }
    judge = calls["fa2"].once().float()
    difference = calls["fagen"].once().float() - judge
    if DTYPES[problem.dtype].fp8:
        worst, allowed = rms(difference), FP8_AGREEMENT * rms(judge)
    else:  # both round P and out to 16 bits, each in its own order
        worst = difference.abs().max().item()
        allowed = {"fp16": 1e-2, "bf16": 8e-2}[problem.dtype]
    if not worst <= allowed:
        raise VerificationError(
            f"{slug} differs from FlashAttention-2 by {worst:.3g} at {name}, where {allowed:.3g} "
            f"may be: not timed; `fagen verify {slug}` shows which lengths are wrong"
        )
    if name == EQUAL:
        stored = [x.unflatten(0, (len(lengths), lengths[0])) for x in (q, k, v)]
        for bind in dense:
            calls["dense"] = bind(cell, *stored)
        try:
            calls["cudnn"] = peer("cudnn").bind(cell, *stored)
        except DeviceError as refusal:
            run.note(f"{title('cudnn')} left out ({refusal})", cell)
    if name == TINY:
        calls = {who: captured(call, RUNS) for who, call in calls.items()}
    runs = RUNS if name == TINY else 1
    clock = Clock()
    for regime in REGIMES.values():
        timings = time_calls(calls, regime, clock=clock)
        for who, timing in timings.items():
            seconds = timing.seconds / runs
            run.rows.append(
                {
                    "dtype": problem.dtype,
                    "head_dim": problem.head_dim,
                    "mask": problem.mask,
                    "heads": heads,
                    "list": name,
                    "sequences": len(lengths),
                    "tokens": sum(lengths),
                    "implementation": who,
                    "schedule": slug if who == "fagen" else None,
                    "regime": regime.name,
                    "us": round(seconds * 1e6, 2),
                    "spread": round(timing.spread, 4),
                    "sm_clock_mhz": timing.sm_clock_mhz,
                    "tflops": round(useful_flops(problem, lengths, heads) / seconds / 1e12, 1),
                }
            )
            tflops = run.rows[-1]["tflops"]
            say(f"  {problem} {name:6} {who:6} {regime.name:10} {tflops:7.1f} TFLOP/s")


def page(run: Run) -> str:
    """Write <stem>.md, with what is to come, or never came; return it."""
    same = itemgetter("dtype", "head_dim", "mask", "list", "regime")
    times = {
        key: {row["implementation"]: row for row in rows}
        for key, rows in grouped(run.rows, same).items()
    }
    ratios = {key: over_others(by_name) for key, by_name in times.items()}
    body = [
        [
            *map(str, key),
            *(f"{by_name['fagen']['us']:.1f}", f"{by_name['fagen']['tflops']:.0f}"),
            *(f"{ratio:.3f}" if ratio else "–" for ratio in ratios[key]),
        ]
        for key, by_name in times.items()
    ]
    sums = [
        [*key, *(_mean_and_least([ratio for ratio in of_one if ratio]) for of_one in columns)]
        for key, keys in grouped(ratios, itemgetter(0, -1)).items()
        for columns in [zip(*(ratios[key] for key in keys), strict=True)]
    ]
    dtypes = {row["dtype"] for row in run.rows}
    beside = [
        f"× {yardstick('FlashAttention-2', *dtypes)}",
        "× fagen, dense",
        f"× {yardstick('cuDNN', *dtypes)}, dense",
    ]
    head = ["dtype", "hd", "mask", "lengths", "regime", "µs", "TFLOP/s", *beside]
    lacking = run.about.get("not timed", ())
    return run.write_page(
        "Varlen sequences",
        f"{run.made_on}; hidden size 2048. Varlen sequences; medians, and how many times as "
        "fast as others.",
        "Geometric means, and the least:\n\n" + markdown(["dtype", "regime", *beside], sums),
        markdown(head, body),
        f"Not timed: {'; '.join(lacking)}." if lacking else "",
        run.remarks,
    )


def over_others(by_name: Mapping[str, Mapping[str, Any]]) -> list[float | None]:
    """How many times as fast as each other fagen is; None where that was not timed."""
    times = (by_name[who]["us"] if who in by_name else None for who in ("fa2", "dense", "cudnn"))
    return [us and us / by_name["fagen"]["us"] for us in times]


def _mean_and_least(ratios: Sequence[float]) -> str:
    return f"{geomean(ratios):.3f} ({min(ratios):.3f})" if ratios else "–"


main = Script(
    __doc__,
    lambda options: "-".join(["varlen", *([] if options.dtype == list(DTYPES) else options.dtype)]),
    work,
    lambda run: print(page(run)),
    lists={
        "dtype": (DTYPES, DTYPES),
        "mask": (PLAIN_MASKS, PLAIN_MASKS),
        "list": (LISTS, LISTS),
        "head_dim": (int, (64, 128, 256)),
    },
)

if __name__ == "__main__":
    sys.exit(main())
