"""Measure what fp8 costs in accuracy: with emulated kernels on a CPU, or real ones beside them.

    python benchmarks/fp8_accuracy.py                   what each part of it is worth: ~2 minutes
    python benchmarks/fp8_accuracy.py --long            error against length, by accumulator: ~5
    python benchmarks/fp8_accuracy.py --out /tmp/x.json   figures as JSON beside the table
    python benchmarks/fp8_accuracy.py --device cuda     both, kernels and quantisers built and run
    python benchmarks/fp8_accuracy.py --device cuda --emulate-to 4096    minutes less
    python benchmarks/fp8_accuracy.py --redraw benchmarks/results/<card>-<date>-fp8-accuracy.json

The experiment is the FlashAttention-3 paper's: Q, K and V are N(0, 1), and to one entry of a
thousand N(0, 100), by variance, is added; what is measured is the root mean square error of the
output against fp64 attention over the same 16-bit tensors. The paper does not say at which length;
here every query sees 8,192 keys, where the baseline is as far off as theirs (2.3e-2; at 4,096 keys
1.9e-2, at 16,384 3.0e-2), and fewer queries than keys are computed, since they are alike.

--long has no outliers, and V's mean is 1: output and sums keep their size whatever the length, and
as errors of single elements average out, what the accumulator loses is seen. To emulate Hopper's
sums takes time with the length, on a GPU too: with --emulate-to longer ones have the kernels' error
alone.

With --device cuda the table is written as <card>-<date>-fp8-accuracy. Tensors that a kernel takes
were then quantised by fagen.quantize, those that are emulated by its reference.
"""

import copy
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from record import RESULTS, Options, Run, Script, flag, say
from tables import pivoted, plain_table
from torch import Tensor

from fagen.build import Binary
from fagen.kinds.forward import emulate as emulator
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.operands import Operands, has_descales, operands
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.plan import Plan, plan
from fagen.runtime import op
from fagen.runtime.quantize import quantize
from fagen.vocab import SCALE_ROWS_DEFAULT

OUTLIERS = 0.001  # of all entries
OUTLIER_DEVIATION = 10.0
LENGTHS = tuple(1024 << power for power in range(8))  # to 128k
PROMOTIONS = (1, 4, 16)  # blocks
LONG_BLOCK = 64  # keys: a second O takes its registers
BASELINE = "fp8, baseline: a scale per tensor"
COMPLETE = "fp8, complete: Q and K rotated, by block, V by column, less means"
# of the issue that this answers: complete, and by how much it is better than the baseline
GOALS = (9.1e-3, 2.6)

Tensors = tuple[Tensor, Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Part:
    """One way to compute attention, and how; without a Plan it is torch's three steps in fp16."""

    name: str
    plan: Plan | None = None
    rotated: bool = False
    centered: str = ""  # of "kv", those less the means of their columns
    scales: str = ""  # of Q and K: the Plan's
    v_scales: str = ""  # the same of V
    hopper_sums: bool = False  # where it is emulated


@dataclass(frozen=True)
class Line:
    """Root mean square errors against fp64, of the emulation and of the kernel if there was one."""

    part: str
    keys: int
    long: bool  # sums of a V about 1, without outliers
    schedule: str | None
    emulated: float | None
    kernel: float | None = None


# ---- what is compared


def tensors(options: Options, seed: int, keys: int) -> Tensors:
    """Make Q, K and V in fp16: with outliers, or, for long sums, V about 1 instead of 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(length: int, mean: float = 0.0) -> Tensor:
        shape = (1, length, options.heads, options.head_dim)
        x = torch.randn(shape, generator=generator) + mean
        if not options.long:
            chosen = torch.rand(shape, generator=generator) < OUTLIERS
            x = x + torch.randn(shape, generator=generator) * OUTLIER_DEVIATION * chosen
        return x.half().to(options.device)

    return normal(options.queries), normal(keys), normal(keys, 1.0 if options.long else 0.0)


def planned(options: Options, **keys: object) -> Plan:
    """Plan the schedule that is measured, or one that differs from it in some keys."""
    tile = dict(head_dim=options.head_dim, mask="full", block_m=128, block_n=options.block_n)
    return plan(Schedule.make(**tile | keys))


def parts(options: Options) -> list[Part]:
    """What each part of fp8 is worth."""
    common = dict(dtype="e4m3", out_dtype="fp16")
    blocks = common | dict(scales="block", scale_rows=SCALE_ROWS_DEFAULT)
    by_block = planned(options, **blocks)
    by_head = planned(options, **common)
    tensor = dict(scales="tensor", v_scales="tensor")  # passed for each head
    lazy = planned(options, **blocks, maximum="lazy", p_offset=4.0)
    v_by_block = planned(options, **blocks, v_scales="block")
    in_e4m3 = [
        Part(BASELINE, by_head, **tensor),
        Part(COMPLETE, by_block, True, "kv"),
        Part("fp8, complete, with a lazy row max, P times 2^4", lazy, True, "kv"),
        Part("fp8, complete, V by block and with its mean", v_by_block, True, "k"),
        Part("fp8, without scales per block", by_head, True, **tensor),
        Part("fp8, without rotation", by_block, False, "kv"),
    ]
    return [
        Part("fp16, standard attention"),
        Part("fp16, fagen", planned(options, dtype="fp16", output="reuse_v")),
        *(dataclasses.replace(part, hopper_sums=options.hopper_sums) for part in in_e4m3),
    ]


def accumulators(options: Options) -> list[Part]:
    """The complete kernel, by how PV is added up; the first is fp32's, which no kernel has."""
    ways = []
    for promote in (None, *PROMOTIONS, 0):
        plan = planned(
            options,
            dtype="e4m3",
            out_dtype="fp16",
            scales="block",
            scale_rows=LONG_BLOCK,
            block_n=LONG_BLOCK,
            promote=promote or 0,
        )
        name = f"Hopper's, promoted every {LONG_BLOCK * promote} keys" if promote else "Hopper's"
        hopper = promote is not None
        ways.append(Part(name if hopper else "fp32", plan, True, hopper_sums=hopper))
    return ways


# ---- ways to compute


def standard_fp16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in three steps, with what lies between them in fp16."""
    queries, keys, values = (x.transpose(1, 2).float() for x in (q, k, v))
    scores = (queries @ keys.mT).half() * q.shape[-1] ** -0.5
    weights = scores.float().softmax(-1).half()
    return (weights.float() @ values).half().transpose(1, 2)


def emulated(part: Part) -> Attend:
    """Attention as the part's kernel computes it, of tensors that are quantised for it."""
    plan = part.plan
    if plan is None:
        return standard_fp16

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        if not has_descales(plan):
            return emulator.emulate(plan, q, k, v, scale)[0]
        how = dict(rotated=part.rotated, centered=part.centered)
        scales = dict(scales=part.scales, v_scales=part.v_scales)
        inputs = operands(plan, q, k, v, **how, **scales)
        sums = dict(hopper_sums=part.hopper_sums)
        return emulator.emulate_fp8(plan, *inputs[:3], scale, *inputs[3:], **sums)[0]

    return attend


def ran(part: Part, binary: Binary) -> Attend:
    """Attention by the part's kernel, of tensors that quantisers' kernels made for it."""
    plan, kernel = part.plan, op.load(binary)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        if not has_descales(plan):
            return kernel(q, k, v, scale)[0]
        inputs = quantised(part, q, k, v)
        return kernel(*inputs[:3], scale, *inputs[3:])[0]

    return attend


def quantised(part: Part, q: Tensor, k: Tensor, v: Tensor) -> Operands:
    """What the part's kernel takes, by fagen.quantize."""
    plan = part.plan
    by_block = dict(scale_rows=plan.scales.rows) if plan.scales.by_block else {}
    scales = part.scales or plan.schedule.fp8.scales
    keys = dict(scales=scales, rotate=part.rotated) | (by_block if scales == "block" else {})
    v_scales = part.v_scales or plan.schedule.fp8.v_scales
    of_v = dict(scales=v_scales, layout="rows" if plan.v_rows else "columns")
    of_v |= by_block if v_scales == "block" else {}
    q8, q_descale = quantize(q, **keys)
    k8, k_descale, *k_mean = quantize(k, center="k" in part.centered, **keys)
    v8, v_descale, *v_mean = quantize(v, center="v" in part.centered, **of_v)
    descales = map(spread, (q_descale, k_descale, v_descale))
    return Operands(q8, k8, v8, *descales, *(v_mean or [None]), *(k_mean or [None]))


def spread(descale: Tensor) -> Tensor:
    """A number, or one for each head (B, H), or for blocks or columns too, in three dimensions."""
    return descale.reshape(*(descale.shape[i] if i < descale.dim() else 1 for i in range(3)))


def error(attend: Attend, options: Options, keys: int) -> float:
    """Return the root mean square error of all seeds' outputs."""
    squares = []
    drawn = options.queries, options.heads, options.head_dim, options.long, options.device
    for seed in range(options.seeds):
        q, k, v, exact = _problem(seed, keys, *drawn)
        squares.append((attend(q, k, v).double() - exact).square().mean())
    return float(torch.stack(squares).mean().sqrt())


@lru_cache(maxsize=8)  # all parts are given the same: drawing numbers takes longer than a kernel
def _problem(
    seed: int, keys: int, queries: int, heads: int, head_dim: int, long: bool, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, K and V, and out in fp64."""
    sizes = dict(queries=queries, heads=heads, head_dim=head_dim)
    options = Options(**sizes, long=long, device=device)
    q, k, v = tensors(options, seed, keys)
    return q, k, v, reference(q, k, v, mask="full", scale=head_dim**-0.5)[0]


def measure(part: Part, options: Options, keys: int, kernels: Mapping[str, Binary]) -> Line:
    """Both errors of a part; of the emulation alone where there are no kernels.

    Of the kernel alone where the sums are longer than is to be emulated.
    """
    slug = part.plan.slug if part.plan else None
    beside = real = None
    if slug in kernels and part.name != "fp32":
        real = error(ran(part, kernels[slug]), options, keys)
    if real is None or not options.long or keys <= options.emulate_to:
        beside = error(emulated(part), options, keys)
    return Line(part.name, keys, options.long, slug, beside, real)


# ---- tables


def compared(lines: Sequence[Line]) -> str:
    """What each part is worth, as Markdown."""
    real = any(line.kernel for line in lines)
    base = next((line for line in lines if line.part == BASELINE), None)
    head = ["", "RMSE, emulated", *(["kernel", "kernel ÷ emulated"] if real else [])]
    body = []
    for line in lines:
        cells = [line.part, f"{line.emulated:.2e}"]
        if real:
            ratio = f"{line.kernel / line.emulated:.3f}" if line.kernel else "–"
            cells += [f"{line.kernel:.2e}" if line.kernel else "–", ratio]
        theirs, ours = (x.kernel or x.emulated if x else 0.0 for x in (base, line))
        after = base in lines[: lines.index(line) + 1]
        body.append([*cells, f"1 / {theirs / ours:.2f}" if after else ""])
    return plain_table([*head, "of the baseline"], body)


def verdict(lines: Sequence[Line]) -> str:
    """Whether the complete kernel is as exact as it should be, in a sentence."""
    by_name = {line.part: line.kernel or line.emulated for line in lines}
    if not {BASELINE, COMPLETE} <= by_name.keys():
        return ""
    off, times = by_name[COMPLETE], by_name[BASELINE] / by_name[COMPLETE]
    met = off <= GOALS[0] and times >= GOALS[1]
    return (
        f"{COMPLETE}: {off:.2e}, {times:.2f} times below the baseline; the goal, at most "
        f"{GOALS[0]:.1e} and {GOALS[1]} times, is {'met' if met else 'missed'}."
    )


def by_length(lines: Sequence[Line]) -> str:
    """Errors against the number of keys, as Markdown: a column for each way to add up."""
    real = any(line.kernel for line in lines)
    names = list(dict.fromkeys(line.part for line in lines))
    figures = [(line, how) for line in lines for how in ("emulated", "kernel")]
    columns = [(name, "emulated") for name in names]
    columns += [(name, "kernel") for name in names if real and name != "fp32"]
    body = pivoted(
        sorted(figures, key=lambda figure: figure[0].keys),
        lambda figure: f"{figure[0].keys:,}",
        lambda figure: (figure[0].part, figure[1]),
        columns,
        lambda some: f"{value:.3e}" if (value := getattr(*some[-1])) else "–",
    )
    head = [f"{name}, {how}" if real else name for name, how in columns]
    return plain_table(["keys", *head], body)


def page(run: Run) -> None:
    """Write <stem>.md, and print it."""
    lines: list[Line] = run.rows
    short, long = ([line for line in lines if line.long == way] for way in (False, True))
    about = run.about["asked"]
    outliers = f"Outliers, head dim {about['head_dim']}, {about['parts']}"
    sums = f"Long sums, V about 1, head dim {about['head_dim']}, {about['lengths']}"
    slugs = dict.fromkeys(line.schedule for line in lines if line.kernel)
    text = run.write_page(
        "Errors of e4m3",
        f"{run.made_on}. Root mean square errors against fp64.",
        f"{outliers}:\n\n{compared(short)}" if short else "",
        verdict(short),
        f"{sums}, by how P·V is added up:\n\n{by_length(long)}" if long else "",
        "Kernels:\n\n" + "".join(f"- `{slug}`\n" for slug in slugs),
        run.remarks,
    )
    say(text)


# ---- running


def experiment(options: Options, *, long: bool) -> Options:
    """What was asked for, with an experiment's own sizes where none were."""
    own = copy.copy(options)
    own.long = long
    own.queries = options.queries or (64 if long else 1024)
    own.heads = options.heads or (1 if long else 8)
    own.seeds = options.seeds or (1 if long else 4)
    return own


def cases(options: Options) -> list[tuple[Part, Options, int]]:
    """Each part of an experiment, the experiment, and numbers of keys."""
    if not options.long:
        return [(part, options, options.keys) for part in parts(options)]
    lengths = [keys for keys in LENGTHS if keys <= options.longest]
    return [(part, options, keys) for keys in lengths for part in accumulators(options)]


def on_a_cpu(options: Options) -> int | None:
    """Print a table of emulated errors, and write them where asked; the exit code."""
    if options.device != "cpu" or options.redraw:
        return None
    options = experiment(options, long=options.long)
    lines = [measure(*case, {}) for case in cases(options)]
    say(by_length(lines) if options.long else f"{compared(lines)}\n{verdict(lines)}")
    if options.out != RESULTS:  # no file is written unless one is named
        errors = {f"{line.keys} keys, {line.part}": line.emulated for line in lines}
        options.out.write_text(json.dumps({"rmse": errors, "of": str(options)}, indent=1) + "\n")
    return 0


def work(run: Run, options: Options) -> None:
    """Build kernels, run all of both experiments."""
    run.about.pop("regimes")
    short, long = (experiment(options, long=way) for way in (False, True))
    run.about["asked"] = {
        "head_dim": options.head_dim,
        "parts": f"{options.keys:,} keys, {short.queries:,} queries, {short.heads} heads, "
        f"{short.seeds} seeds",
        "lengths": f"{long.queries:,} queries, {long.heads} heads, {long.seeds} seeds",
    }
    both = [*([] if options.long else cases(short)), *cases(long)]
    built = run.build(part.plan.schedule for part, *_ in both if part.plan)
    kernels = {slug: binary for slug, (_, binary) in built.items()}

    def step(case: tuple[Part, Options, int]) -> None:
        run.rows.append(measure(*case, kernels))
        say(str(run.rows[-1]))

    run.each(both, step)


main = Script(
    __doc__,
    "fp8-accuracy",
    work,
    page,
    row=Line,
    options={
        "--device": dict(choices=("cpu", "cuda"), default="cpu"),
        "--long": flag("error against length instead"),
        "--longest": dict(type=int, default=LENGTHS[-1], help="where that ends"),
        "--emulate-to": dict(type=int, default=LENGTHS[-1], metavar="KEYS"),
        "--keys": dict(type=int, default=8192),
        "--queries": dict(type=int, help="1024, or 64 of long sums"),
        "--heads": dict(type=int, help="8, or 1 of long sums"),
        "--head-dim": dict(type=int, default=128),
        "--block-n": dict(type=int, default=128),
        "--seeds": dict(type=int, help="4, or 1 of long sums"),
        "--hopper-sums": flag("14-bit sums; very slow"),
    },
    beside=on_a_cpu,
)

if __name__ == "__main__":
    sys.exit(main())
