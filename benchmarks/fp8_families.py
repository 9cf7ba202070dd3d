"""Hold e4m3 against fp64 and a textbook, through the calls that take it; and what promotion costs.

    python benchmarks/fp8_families.py                emulated on a CPU, 1,024 keys: some minutes
    python benchmarks/fp8_families.py --device cuda  kernels built and run, 1,024 … 262,144 keys
    python benchmarks/fp8_families.py --device cuda --head-dims 128 --keys 1024 16384       a part
    python benchmarks/fp8_families.py --device cuda --speed            and speed, without promotion
    python benchmarks/fp8_families.py --redraw benchmarks/results/<card>-<date>-fp8-families.json

Families: V with a mean, outliers in V, one column of V that is much larger, a needle, one key so
many nats above a diffuse tail, beside a V about 1; a sink, which every query sees and whose V is
small; K with some channels far from zero; heads whose scores are spread by very different amounts.
Doors: what fagen.attention_fp8 calls, with block scales, rotation and means taken off; and, without
any of these, fagen.attention with V by column, and FlashAttention-3's two functions, whose scales
are of a head. Each takes the kernel that its dispatch has for so many keys.

What is measured is out - fp64 over what the bytes stand for, beside the same of a textbook's
attention in e4m3 over the same bytes (fagen.kinds.forward.verify.textbook), rounded to O's type as
out is: root mean squares and largest errors. The goal is at most twice the textbook's root mean
square.
Needles beside a V about 1 are measured and have no goal where no mean is taken off: beside the
needle's product the 13 bits of the tensor cores have no room for the tail's, within one block.

With --device cuda the table is written as <card>-<date>-fp8-families.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from record import Options, Run, Script, flag, say
from tables import grouped, pivoted, plain_table
from torch import Tensor

import fagen
from fagen import flash_attn_interface
from fagen.dispatch.select import serve
from fagen.e4m3 import by_columns
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.operands import Operands, launch, operands, outputs, real
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.plan import Plan, plan
from fagen.kinds.forward.verify.textbook import textbook
from fagen.measure.numerics import largest, rms
from fagen.measure.timing import BURST, Call, time_calls
from fagen.problem import Problem, Sizes, flops

GOAL = 2.0  # times the textbook's error
MASKS = ("full", "causal")
HEADS = 2
QUERIES = 256  # at most, the last ones
SCALE_ROWS = 64
LENGTHS = {"cpu": (1024,), "cuda": (1024, 4096, 16_384, 65_536, 262_144)}
HEAD_DIMS = {"cpu": (64,), "cuda": (64, 128, 256)}
TIMED = (1024, 4096, 16_384, 65_536)  # keys, with as many queries, of 16,384 tokens or one sequence
HIDDEN = 2048

Tensors = tuple[Tensor, Tensor, Tensor]
Answer = Callable[[Operands, float, bool], Tensor]


@dataclass(frozen=True)
class Door:
    """A call: how what it takes was quantised, which kernel it has, and out (B, Sq, H, Dv) of it.

    V's bytes are given as rows.
    """

    how: Mapping[str, Any]  # of operands()
    kernel: Mapping[str, Any]  # of Problem
    call: Answer


def _as_attention_fp8(inputs: Operands, scale: float, causal: bool) -> Tensor:
    named = inputs._replace(v=by_columns(inputs.v))._asdict()
    how = dict(v_layout="columns", scale_rows=SCALE_ROWS)
    return fagen.attention(**named, **how, scale=scale, causal=causal)


def _attention(inputs: Operands, scale: float, causal: bool) -> Tensor:
    return fagen.attention(**inputs._asdict(), scale_rows=0, scale=scale, causal=causal)


def _flash(inputs: Operands, scale: float, causal: bool) -> Tensor:
    named = dict(softmax_scale=scale, causal=causal, **_of_heads(inputs))
    return flash_attn_interface.flash_attn_func(*inputs[:3], **named)


def _flash_varlen(inputs: Operands, scale: float, causal: bool) -> Tensor:
    device, lengths = inputs.q.device, (inputs.q.shape[1], inputs.k.shape[1])
    at = [torch.tensor([0, length], dtype=torch.int32, device=device) for length in lengths]
    named = dict(softmax_scale=scale, causal=causal, **_of_heads(inputs))
    tensors = (x[0] for x in inputs[:3])
    return flash_attn_interface.flash_attn_varlen_func(*tensors, *at, *lengths, **named)[None]


def _of_heads(inputs: Operands) -> dict[str, Tensor]:
    """Descales (B, Hk), as FlashAttention-3 takes them; there is a query head for each here."""
    return {f"{name}_descale": getattr(inputs, f"{name}_descale")[..., 0] for name in "qkv"}


DEFAULT = "attention_fp8"
DOORS = {
    DEFAULT: Door(
        dict(rotated=True, centered="kv"),
        dict(v_layout="columns", scale_rows=SCALE_ROWS),
        _as_attention_fp8,
    ),
    "attention": Door({}, dict(v_layout="rows", scale_rows=0), _attention),
    "flash_attn_func": Door(dict(v_scales="head"), dict(v_layout="rows", scale_rows=0), _flash),
    "flash_attn_varlen_func": Door(
        dict(v_scales="head"), dict(v_layout="rows", scale_rows=0, lengths="varlen"), _flash_varlen
    ),
}


@dataclass(frozen=True)
class Line:
    """The errors of one case, and a textbook's."""

    family: str
    door: str
    mask: str
    head_dim: int
    keys: int
    schedule: str
    rmse: float
    textbook_rmse: float
    largest: float
    textbook_largest: float
    size: float  # the root mean square of fp64
    top: float  # max |fp64|

    @property
    def ratios(self) -> tuple[float, float]:
        """RMSE and largest error over a textbook's."""
        return self.rmse / self.textbook_rmse, self.largest / self.textbook_largest

    @property
    def has_goal(self) -> bool:
        """Whether it is to be at most GOAL times as far off as a textbook's."""
        return self.door == DEFAULT or "needle" not in self.family


@dataclass(frozen=True)
class Speed:
    """How fast a kernel is, and the same tile without promotion."""

    schedule: str
    mask: str
    head_dim: int
    keys: int
    tflops: float
    plain_schedule: str
    plain_tflops: float


# ---- inputs --------------------------------------------------------------------------------------


class Draw:
    """Q, K and V of N(0, 1), (1, length, heads, head_dim), to be changed."""

    def __init__(self, queries: int, keys: int, head_dim: int, device: str) -> None:
        self.generator = torch.Generator(device=device).manual_seed(keys + head_dim)
        self.keys, self.head_dim, self.device = keys, head_dim, device
        self.q = self._normal(queries)
        self.k, self.v = self._normal(keys), self._normal(keys)

    def _normal(self, length: int) -> Tensor:
        shape = (1, length, HEADS, self.head_dim)
        return torch.randn(shape, generator=self.generator, device=self.device)

    def tail(self, nats: float, at: int) -> None:
        """Scores that differ by little, but of one key, `nats` above them."""
        self.q *= 0.1
        self.q[..., 0] = 1.0
        self.k[..., 0] = 0.0
        self.k[:, at, :, 0] = nats * self.head_dim**0.5

    @property
    def tensors(self) -> Tensors:
        """Them in fp16."""
        return self.q.half(), self.k.half(), self.v.half()


Change = Callable[[Draw], object]


def needle(nats: float, where: float) -> Change:
    """One key above a diffuse tail, at this share of the keys; V about 1."""

    def change(draw: Draw) -> None:
        draw.tail(nats, round(where * (draw.keys - 1)))
        draw.v.mul_(0.1).add_(1.0)

    return change


def sink(draw: Draw) -> None:
    """The first key has most of every row's weight, and a small V."""
    draw.tail(10.0, 0)
    draw.v[:, 0] *= 0.01


def outlier(size: float) -> Change:
    """One number of V."""
    return lambda draw: draw.v[:, draw.keys // 3, :, 5].fill_(size)


def mean(size: float) -> Change:
    """V about this."""
    return lambda draw: draw.v.add_(size)


def column(size: float) -> Change:
    """One column of V, so many times as large as the others."""
    return lambda draw: draw.v[..., 5].mul_(size)


def channels(draw: Draw) -> None:
    """Some columns of K far from zero."""
    draw.k[..., ::16] += 20.0


def mixed(draw: Draw) -> None:
    """One head hardly tells keys apart, one sees a key or two; sizes of V differ too."""
    draw.q *= torch.tensor([0.1, 6.0], device=draw.device)[:, None]
    draw.v *= torch.tensor([0.01, 100.0], device=draw.device)[:, None]


FAMILIES: Mapping[str, Change] = {
    "randn": lambda draw: None,
    **{f"V about {size:g}": mean(size) for size in (0.5, 1, 4, 10)},
    **{f"outlier of {size:,} in V": outlier(size) for size in (64, 4096, 20_000)},
    "a column of V 4,096 times as large": column(4096),
    "needle of 6 nats, first": needle(6, 0.0),
    "needle of 9 nats, first": needle(9, 0.0),
    "needle of 9 nats, middle": needle(9, 0.5),
    "needle of 9 nats, last": needle(9, 1.0),
    "needle of 12 nats, last": needle(12, 1.0),
    "sink": sink,
    "K with channels about 20": channels,
    "mixed heads": mixed,
}


# ---- measuring -----------------------------------------------------------------------------------


def planned(door: str, mask: str, head_dim: int, keys: int, card: str) -> Plan:
    """The Plan of the kernel that a door has for so many keys."""
    problem = Problem("e4m3", head_dim, head_dim, mask, "bf16", **DOORS[door].kernel)
    queries = min(keys, QUERIES)
    return plan(serve(problem, Sizes(1, HEADS, HEADS, queries, keys), card).schedule)


def measure(family: str, door: str, plan: Plan, keys: int, device: str) -> Line:
    """The errors of one case, whose kernel is `of`."""
    draw = Draw(min(keys, QUERIES), keys, plan.head_dim, device)
    FAMILIES[family](draw)
    by_rows = dataclasses.replace(plan, v_rows=True)
    inputs = operands(by_rows, *draw.tensors, **DOORS[door].how)
    scale, causal = plan.head_dim**-0.5, plan.mask.causal
    truth, _ = reference(*real(by_rows, inputs), mask=plan.mask.name, scale=scale)
    out = DOORS[door].call(inputs, scale, causal)
    ours = out.double() - truth
    theirs = textbook(by_rows, inputs, scale).to(out.dtype).double() - truth
    figures = [measured(x) for x in (ours, theirs, truth) for measured in (rms, largest)]
    rmse, most, textbook_rmse, textbook_most, size, top = (float(f"{x:.4g}") for x in figures)
    about = plan.mask.name, plan.head_dim, keys, plan.slug
    return Line(family, door, *about, rmse, textbook_rmse, most, textbook_most, size, top)


def plain(plan: Plan) -> Schedule:
    """The same tile without promotion, with S of a block issued beside PV of the one before."""
    keys = plan.schedule.settings()
    for key in ("promote", "promote_columns", "totals", "intra_warpgroup"):
        keys.pop(key, None)
    return Schedule.make(**keys)


def timed(own: Plan, keys: int, libraries: Mapping[str, Path]) -> Speed:
    """How fast the kernel is at so many keys and queries, beside the same tile without promotion.

    Of 16,384 tokens, or one sequence, of a hidden size of 2048.
    """
    heads = HIDDEN // own.head_dim
    sizes = Sizes(max(1, 16_384 // keys), heads, heads, keys, keys)
    shape = sizes.batch, keys, heads, own.head_dim
    generator = torch.Generator(device="cuda").manual_seed(0)
    draws = [torch.randn(shape, generator=generator, device="cuda").half() for _ in range(3)]
    inputs = operands(own, *draws)
    into, scale = outputs(own, inputs.q), own.head_dim**-0.5
    calls = {
        x.slug: Call(launch(x, libraries[x.slug], (*inputs[:3], scale, *inputs[3:]), into))
        for x in (own, plan(plain(own)))
    }
    work = flops(Problem.of(own.schedule), sizes) / 1e12
    timings = time_calls(calls, BURST)
    tflops = {slug: round(work / timing.seconds, 1) for slug, timing in timings.items()}
    other = plain(own).slug
    speeds = tflops[own.slug], other, tflops[other]
    return Speed(own.slug, own.mask.name, own.head_dim, keys, *speeds)


# ---- tables --------------------------------------------------------------------------------------


def compared(lines: Sequence[Line]) -> str:
    """The worst ratios of each family over lengths, head dims and masks, as Markdown."""

    def worst(some: Sequence[Line]) -> str:
        return " / ".join(f"{max(r):.2f}" for r in zip(*(x.ratios for x in some), strict=True))

    doors = list(dict.fromkeys(line.door for line in lines))
    body = pivoted(lines, attrgetter("family"), attrgetter("door"), doors, worst)
    return plain_table(["RMSE and largest error ÷ a textbook's, worst", *doors], body)


def by_keys(lines: Sequence[Line]) -> str:
    """The worst ratio of root mean squares that have a goal, by door and number of keys."""

    def worst(some: Sequence[Line]) -> str:
        return f"{max(line.ratios[0] for line in some):.2f}"

    lengths = sorted({line.keys for line in lines})
    goals = [line for line in lines if line.has_goal]
    body = pivoted(goals, attrgetter("door"), attrgetter("keys"), lengths, worst)
    return plain_table(["RMSE ÷ a textbook's, worst", *(f"{n:,} keys" for n in lengths)], body)


def speeds(timings: Sequence[Speed]) -> str:
    """What promotion costs, by kernel and number of keys."""

    def figure(some: Sequence[Speed]) -> str:
        return f"{some[-1].tflops:.0f}, {some[-1].tflops / some[-1].plain_tflops:.3f}"

    lengths = sorted({timing.keys for timing in timings})
    body = pivoted(
        timings, lambda x: f"hd{x.head_dim} {x.mask}", attrgetter("keys"), lengths, figure
    )
    head = ["TFLOP/s, and ÷ the same tile without promotion"]
    return plain_table([*head, *(f"{keys:,}" for keys in lengths)], body)


def verdict(lines: Sequence[Line]) -> str:
    """Whether each door is as exact as it should be."""
    verdicts = []
    for door, some in grouped((x for x in lines if x.has_goal), attrgetter("door")).items():
        worst = max(some, key=lambda line: line.ratios[0])
        met = "met" if worst.ratios[0] <= GOAL else "missed"
        verdicts.append(
            f"{door}: {len(some)} cases; the goal, at most {GOAL:g} times a textbook's root mean "
            f"square, is {met}: the worst is {worst.ratios[0]:.2f} ({worst.family}, {worst.mask}, "
            f"head dim {worst.head_dim}, {worst.keys:,} keys)."
        )
    return "\n\n".join(verdicts)


def page(run: Run) -> None:
    """Write <stem>.md, and print it."""
    lines: list[Line] = run.rows
    about = run.about["asked"]
    timings = [Speed(**fields) for fields in run.about.get("speeds", ())]
    slugs = dict.fromkeys(line.schedule for line in lines)
    text = run.write_page(
        "Errors of e4m3 beside a textbook's",
        f"{run.made_on}. Errors against fp64 over what bytes stand for.",
        f"Head dims {about['head_dims']}, {about['keys']} keys; O in bf16.\n\n{by_keys(lines)}",
        compared(lines),
        verdict(lines),
        f"Burst, V row-major, a scale for each head:\n\n{speeds(timings)}" if timings else "",
        "Kernels:\n\n" + "".join(f"- `{slug}`\n" for slug in slugs),
        run.remarks,
    )
    say(text)


# ---- running -------------------------------------------------------------------------------------


def cases(options: Options, card: str = "") -> list[tuple[str, Plan, int]]:
    """The door, the kernel and the number of keys of every case."""
    return [
        (door, planned(door, mask, head_dim, keys, card), keys)
        for head_dim in options.head_dims
        for door in DOORS
        for mask in MASKS
        for keys in options.keys
    ]


def on_a_cpu(options: Options) -> int | None:
    """Print the errors of emulated kernels; the exit code."""
    if options.device != "cpu" or options.redraw:
        return None
    lines = [measure(x, *case, options.device) for case in cases(options) for x in FAMILIES]
    say(f"{compared(lines)}\n{verdict(lines)}")
    return 0


def work(run: Run, options: Options) -> None:
    """Build kernels, run them on every case."""
    run.about.pop("regimes")
    run.about["asked"] = {
        "head_dims": ", ".join(map(str, options.head_dims)),
        "keys": ", ".join(f"{keys:,}" for keys in options.keys),
    }
    all_cases = cases(options, run.card)
    run.build(plan.schedule for _, plan, _ in all_cases)

    def step(case: tuple[str, Plan, int]) -> None:
        run.rows += [measure(family, *case, options.device) for family in FAMILIES]

    run.each(all_cases, step)
    if options.speed:
        plans = [
            (planned("attention", mask, head_dim, keys, run.card), keys)
            for head_dim in options.head_dims
            for mask in MASKS
            for keys in TIMED
        ]
        schedules = [schedule for plan, _ in plans for schedule in (plan.schedule, plain(plan))]
        built = run.build(schedules, binding=False)
        libraries = {slug: binary.library for slug, (_, binary) in built.items()}
        run.about["speeds"] = [dataclasses.asdict(timed(*pair, libraries)) for pair in plans]
        run.save()


def settle(options: Options) -> None:
    """Lengths and head dims of the device."""
    options.keys = options.keys or LENGTHS[options.device]
    options.head_dims = options.head_dims or HEAD_DIMS[options.device]


main = Script(
    __doc__,
    "fp8-families",
    work,
    page,
    row=Line,
    options={
        "--device": dict(choices=("cpu", "cuda"), default="cpu"),
        "--keys": dict(type=int, nargs="+"),
        "--head-dims": dict(type=int, nargs="+"),
        "--speed": flag("with --device cuda: time kernels too"),
    },
    settle=settle,
    beside=on_a_cpu,
)

if __name__ == "__main__":
    sys.exit(main())
