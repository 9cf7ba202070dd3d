"""Time windows beside compiled FlexAttention and FlashAttention-2, in TFLOP/s of visible pairs.

    python benchmarks/windows.py                            all calls: ~1 GPU minute, half of which
                                                            compiles FlexAttention
    python benchmarks/windows.py --call hd128-w1024 --seqlen 16384 --peer fa2       a part
    python benchmarks/windows.py --schedule my.toml         and further kernels: files, or slugs
    python benchmarks/windows.py --all                      and all committed ones
    python benchmarks/windows.py --redraw RESULTS.json      no GPU

A call is of 64 query heads over 8 KV heads, batch 1, causal with a window: a query sees itself and
W - 1 keys before. What it computes is counted pair by pair, 4 D operations each; a block that is
masked in part earns what is seen of it. fagen's kernel is the one that fagen.attention takes; its
causal kernel at the same sizes, with no window, is there as a scale. All of them run in turn in one
process on the same tensors, in bursts, and 64 rows of two heads are compared with fp64.
FlexAttention is compiled for each call, and its block mask made beforehand; a call's sinks come to
it in the same graph, as the sigmoid of its log-sum-exp less a sink. torch hands no window to cuDNN,
and FlashAttention-2 knows no sinks.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from record import Options, Run, Script, flag, said_of, say, serving
from torch import Tensor

from fagen import registry
from fagen.errors import FagenError
from fagen.measure.inputs import inputs, softmax_scale
from fagen.measure.numerics import unit_in_last_place
from fagen.measure.timing import Call, Regime, time_calls
from fagen.problem import Cell, Problem, Sizes, solves
from fagen.runtime import op
from fagen.schedule import Schedule
from fagen.vocab import DTYPES

ROUND = Regime("burst", idle=0.010, warm=0.0, timed=0.006, rounds=5)
HEADS, KV_HEADS = 64, 8
ROWS, SAMPLED_HEADS = 64, (0, 37)  # that are compared with fp64
SCALE = "causal"  # fagen, with no window


@dataclass(frozen=True)
class Window:
    """Calls of one window."""

    dtype: str
    head_dim: int
    window: int  # a query sees itself and window - 1 keys before
    seqlens: tuple[int, ...]
    sink: str = ""  # their dtype, where it has sinks

    def cells(self) -> list[Cell]:
        """What is timed."""
        problem = Problem(self.dtype, self.head_dim, self.head_dim, "window", sink=self.sink)
        return [Cell(problem, Sizes(1, HEADS, KV_HEADS, s, s)) for s in self.seqlens]


CALLS: Mapping[str, Window] = {
    "hd128-w1024": Window("bf16", 128, 1024, (8192, 16384, 32768)),
    "hd128-w4096": Window("bf16", 128, 4096, (16384,)),
    "hd128-w512": Window("bf16", 128, 512, (16384,)),
    "hd128-w128": Window("bf16", 128, 128, (16384,)),
    "hd64-w128": Window("bf16", 64, 128, (16384,)),
    "hd64-w128-sinks": Window("bf16", 64, 128, (16384,), "bf16"),
    "hd64-w1024": Window("bf16", 64, 1024, (16384,)),
    "hd256-w1024": Window("bf16", 256, 1024, (16384,)),
}


def visible(seqlen: int, window: int) -> int:
    """Count the pairs of a query and a key that it sees, of one head."""
    full = max(0, seqlen - window)
    grown = seqlen - full
    return full * window + grown * (grown + 1) // 2


def exact(
    q: Tensor, k: Tensor, v: Tensor, window: int, rows: Tensor, sinks: Tensor | None
) -> Tensor:
    """What some rows of some heads are, in fp64: (rows, heads, D)."""
    heads = torch.tensor(SAMPLED_HEADS, device=q.device)
    kv_heads = heads // (q.shape[2] // k.shape[2])
    scores = torch.einsum("rhd,khd->hrk", q[0, rows][:, heads].double(), k[0][:, kv_heads].double())
    key = torch.arange(k.shape[1], device=q.device)
    seen = (key <= rows[:, None]) & (key > rows[:, None] - window)
    scores = (scores * softmax_scale(q.shape[-1])).masked_fill(~seen, -torch.inf)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        column = sinks[heads].double()[:, None, None].expand(*scores.shape[:2], 1)
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return torch.einsum("hrk,khd->rhd", weights, v[0][:, kv_heads].double())


def sinks_of(cell: Cell) -> Tensor | None:
    """Sinks of its heads, N(0, 1), where it has some."""
    if not cell.problem.sink:
        return None
    generator = torch.Generator(device="cuda").manual_seed(1)
    dtype = getattr(torch, DTYPES[cell.problem.sink].torch)
    return torch.randn(cell.sizes.heads, generator=generator, device="cuda", dtype=dtype)


# ---- who is timed --------------------------------------------------------------------------------

Bind = Callable[[Tensor, Tensor, Tensor, int, Tensor | None], Call]


def ours(kernel: Callable[..., Any]) -> Bind:
    """A kernel of fagen, by its op."""

    def bind(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None) -> Call:
        scale = softmax_scale(q.shape[-1])
        given = () if sinks is None else (sinks,)
        return Call(lambda: kernel(q, k, v, scale, window - 1, 0, *given)[0])

    return bind


def without_window(kernel: Callable[..., Any]) -> Bind:
    """A causal kernel of fagen."""

    def bind(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None) -> Call:
        scale = softmax_scale(q.shape[-1])
        return Call(lambda: kernel(q, k, v, scale)[0])

    return bind


def flex(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None) -> Call:
    """FlexAttention, compiled for this call alone."""
    attention = importlib.import_module("torch.nn.attention.flex_attention")

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < window)

    mask = attention.create_block_mask(seen, None, None, q.shape[1], k.shape[1], device=q.device)
    torch._dynamo.reset()  # one graph a call: else the eighth one falls back to eager
    added = None if sinks is None else sinks.float()[:, None]

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        given = dict(block_mask=mask, enable_gqa=True)
        if added is None:
            return attention.flex_attention(q, k, v, **given)
        out, lse = attention.flex_attention(q, k, v, **given, return_lse=True)
        return out * torch.sigmoid(lse - added)[..., None].to(out.dtype)

    compiled = torch.compile(attend, dynamic=False)
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))

    def run() -> Tensor:
        return compiled(query, key, value, mask).transpose(1, 2)

    return Call(run)


def fa2(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None) -> Call:
    """FlashAttention-2, which comes with torch."""
    if sinks is not None:
        raise FagenError("it knows no sinks")
    forward = torch.ops.aten._flash_attention_forward
    scale = softmax_scale(q.shape[-1])
    ends = dict(scale=scale, window_size_left=window - 1, window_size_right=0)
    lengths = None, None, q.shape[1], k.shape[1]

    def run() -> Tensor:
        return forward(q, k, v, *lengths, 0.0, False, False, **ends)[0]

    return Call(run)


PEERS: Mapping[str, Bind] = {"flex": flex, "fa2": fa2}


# ---- the run -------------------------------------------------------------------------------------


def kernels_of(cell: Cell, options: Options, card: str) -> list[Schedule]:
    """The kernel that serves a call's cell, then those that are asked for beside it."""
    served = serving(cell, card, everything=False, derived=True)
    beside = [
        registry.from_slug(each) if "." not in each else registry.read(each)
        for each in options.schedule or []
    ]
    if options.all:
        beside += serving(cell, card, everything=True)
    return list(
        {
            schedule.slug: schedule
            for schedule in (*served, *beside)
            if solves(schedule, cell.problem)
        }.values()
    )


def causal_kernel(cell: Cell, card: str) -> Schedule:
    """The kernel that serves the same sizes with no window, nor sinks."""
    causal = replace(cell.problem, mask="causal", sink="")
    return serving(replace(cell, problem=causal), card)[0]


def time_cell(
    run: Run, call: str, cell: Cell, window: int, binds: Mapping[str, Bind], served: str
) -> None:
    """Time one cell's implementations, those that can be called and are right."""
    q, k, v = inputs(cell)
    seqlen, dim = cell.sizes.seqlen_q, cell.problem.head_dim
    generator = torch.Generator().manual_seed(seqlen)
    rows = torch.randperm(seqlen, generator=generator)[:ROWS].to(q.device)
    sinks = sinks_of(cell)
    wanted = exact(q, k, v, window, rows, sinks)
    most = 2 * unit_in_last_place(float(wanted.abs().max()), q.dtype)
    calls: dict[str, Call] = {}
    errors: dict[str, float] = {}
    for name, bind in binds.items():
        try:
            one = bind(q, k, v, window, sinks)
            out = one.once()
            torch.cuda.synchronize()
        except torch.AcceleratorError as error:  # nothing can be timed after it
            raise FagenError(f"{call} {seqlen} {name}: {error}") from error
        except Exception as error:  # peers refuse in classes of their own
            run.note(f"{name} left out ({str(error).splitlines()[0][:200]})", f"{call} {seqlen}")
            continue
        if name != SCALE:
            got = out[0, rows][:, list(SAMPLED_HEADS)].double()
            errors[name] = float((got - wanted).abs().max())
            if not errors[name] <= most:
                run.note_wrong(f"{call} {seqlen} {name}: off by {errors[name]:.2e}")
                continue
        calls[name] = one
    timings = time_calls(calls, ROUND)
    for name, timing in timings.items():
        seconds = timing.seconds
        pairs = visible(seqlen, seqlen if name == SCALE else window)
        run.rows.append(
            {
                "call": call,
                "dtype": cell.problem.dtype,
                "head_dim": dim,
                "window": window,
                "seqlen": seqlen,
                "implementation": name,
                "serves": name == served,
                "us": round(seconds * 1e6, 2),
                "tflops": round(4 * dim * pairs * HEADS / seconds / 1e12, 1),
                "error": errors.get(name),
                "spread": round(timing.spread, 4),
                "sm_clock_mhz": timing.sm_clock_mhz,
            }
        )
        row = run.rows[-1]
        say(f"  {call} {seqlen} {name}: {row['us']} us, {row['tflops']} TFLOP/s")


def work(run: Run, options: Options) -> None:
    """Build the kernels, time every call."""
    run.note("cuDNN left out", "torch hands it no window")
    cells = [
        (name, cell)
        for name in options.call
        for cell in CALLS[name].cells()
        if not options.seqlen or cell.sizes.seqlen_q in options.seqlen
    ]
    schedules = {cell: kernels_of(cell, options, run.card) for _, cell in cells}
    scales = {cell: causal_kernel(cell, run.card) for _, cell in cells}
    if not any(schedules.values()):
        raise FagenError("no schedule has such a window")
    built = run.build([s for mine in schedules.values() for s in mine] + list(scales.values()))

    def step(item: tuple[str, Cell]) -> None:
        name, cell = item
        loaded = {s.slug: op.load(built[s.slug][1]) for s in schedules[cell]}
        binds: dict[str, Bind] = {slug: ours(kernel) for slug, kernel in loaded.items()}
        binds[SCALE] = without_window(op.load(built[scales[cell].slug][1]))
        binds |= {who: PEERS[who] for who in options.peer or PEERS}
        time_cell(run, name, cell, CALLS[name].window, binds, schedules[cell][0].slug)

    run.each(cells, step)


def page(run: Run) -> None:
    """Write <stem>.md, and print it."""
    lines = [
        "| call | S | implementation | µs | TFLOP/s | fagen ÷ it |",
        "|---|--:|---|--:|--:|--:|",
    ]
    served = {(row["call"], row["seqlen"]): row["us"] for row in run.rows if row["serves"]}
    for row in run.rows:
        ours_us = served.get((row["call"], row["seqlen"]))
        ratio = f"{row['us'] / ours_us:.3f}" if ours_us and row["implementation"] != SCALE else ""
        bold = "**" * row["serves"]
        lines.append(
            f"| {row['call']} | {row['seqlen']:,} | {bold}{row['implementation']}{bold} "
            f"| {row['us']:.1f} | {row['tflops']:.1f} | {ratio} |"
        )
    said = (
        f"{run.made_on}. {HEADS}/{KV_HEADS} heads, batch 1, causal with a window: "
        f"{said_of(ROUND)}, medians; TFLOP/s of visible pairs."
    )
    print(run.write_page("Windows", said, "\n".join(lines), run.remarks))


main = Script(
    __doc__,
    "windows",
    work,
    page,
    regimes=[ROUND],
    lists={"call": (CALLS, CALLS), "seqlen": (int, None), "peer": (PEERS, None)},
    options={
        "--schedule": dict(action="append", help="a file or slug, beside the one that serves"),
        "--all": flag("all committed kernels of windows too"),
    },
)

if __name__ == "__main__":
    sys.exit(main())
