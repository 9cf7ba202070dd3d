"""Time gradients under windows, with softcap and with sinks, beside compiled FlexAttention.

    python benchmarks/gradients.py                          all calls: ~2 GPU minutes, most of which
                                                            compile FlexAttention
    python benchmarks/gradients.py --call window --seqlen 16384 --peer fagen         a part
    python benchmarks/gradients.py --redraw RESULTS.json    no GPU

A call is causal, of 64 query heads over 8 KV heads and 16,384 tokens, or one longer sequence. It is
given to fagen.attention as a user gives it, and differentiated by torch's autograd; "deterministic"
asks for one order of additions, and "plain" is the causal call without a softcap. A row is the time
of the backward pass alone, of a kept graph, or of both passes. TFLOP/s count pairs that are seen:
6 D + 4 Dv operations each in the backward pass, 2 D + 2 Dv more in both. All run in turn in one
process on the same tensors, in bursts. FlexAttention is compiled for each call, its block mask made
beforehand, and gradients are held to its: two roundings of the largest apart.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from record import Options, Run, Script, said_of, say, serving
from torch import Tensor
from windows import HEADS, KV_HEADS, ROUND, visible

import fagen
from fagen.build.autograd import build_autograd
from fagen.errors import FagenError
from fagen.expr.words import PLAIN
from fagen.measure.numerics import unit_in_last_place
from fagen.measure.timing import Call, time_calls
from fagen.problem import Cell, Problem, Sizes
from fagen.schedule import Schedule
from fagen.vocab import BACKWARD, FORWARD

TOKENS = 16384
PASSES = "backward", "both"


@dataclass(frozen=True)
class Case:
    """Calls of one kind; `options` are those of fagen.attention."""

    dims: tuple[int, int]
    seqlens: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    sinks: bool = False

    def pairs(self, seqlen: int) -> int:
        """Pairs of a query and a key that it sees, of all heads and sequences."""
        window = self.options.get("window", seqlen)
        return visible(seqlen, min(window, seqlen)) * HEADS * batch(seqlen)


CASES: Mapping[str, Case] = {
    "window": Case((128, 128), (8192, 16384, 32768), dict(window=1024)),
    "gpt-oss": Case((64, 64), (16384,), dict(window=128), sinks=True),
    "mimo": Case((192, 128), (16384,), dict(window=128), sinks=True),
    "softcap": Case((128, 128), (4096, 16384), dict(softcap=50.0)),
}
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def batch(seqlen: int) -> int:
    """How many sequences there are."""
    return max(1, TOKENS // seqlen)


def tensors(case: Case, seqlen: int) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Q, K and V, sinks, and dO: N(0, 1) in bf16."""
    dice = torch.Generator(device="cuda").manual_seed(seqlen)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=dice).bfloat16()

    size, (dim, v_dim) = (batch(seqlen), seqlen), case.dims
    q, k, v = (
        normal(*size, heads, each).requires_grad_()
        for heads, each in ((HEADS, dim), (KV_HEADS, dim), (KV_HEADS, v_dim))
    )
    sinks = normal(HEADS).requires_grad_() if case.sinks else None
    return [q, k, v], sinks, normal(*size, HEADS, v_dim)


# ---- who is timed --------------------------------------------------------------------------------


def ours(case: Case, **more: Any) -> Attend:
    """fagen.attention, as a user calls it."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        given = {} if sinks is None else dict(sinks=sinks)
        return fagen.attention(q, k, v, causal=True, **case.options, **given, **more)

    return attend


def plain(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """A causal call with nothing more."""
    return fagen.attention(q, k, v, causal=True)


def flex(case: Case, seqlen: int) -> Attend:
    """FlexAttention, compiled for these calls alone."""
    attention = importlib.import_module("torch.nn.attention.flex_attention")
    torch._dynamo.reset()  # one graph a call: else the eighth one falls back to eager
    torch._functorch.config.donated_buffer = False  # a kept graph is gone through again
    window, cap = case.options.get("window", seqlen), case.options.get("softcap")

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < window)

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    mask = attention.create_block_mask(seen, None, None, seqlen, seqlen, device="cuda")
    how = dict(block_mask=mask, enable_gqa=True, score_mod=capped if cap else None)

    def of_heads(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        if sinks is None:
            return attention.flex_attention(q, k, v, **how)
        out, lse = attention.flex_attention(q, k, v, **how, return_lse=True)
        return out * torch.sigmoid(lse - sinks.float()[:, None])[..., None].to(out.dtype)

    compiled = torch.compile(of_heads, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return compiled(query, key, value, sinks).transpose(1, 2)

    return attend


def peers(case: Case, seqlen: int) -> dict[str, Callable[[], Attend]]:
    """Who may be timed, by name."""
    all_of_them: dict[str, Callable[[], Attend]] = {
        "fagen": lambda: ours(case),
        "deterministic": lambda: ours(case, deterministic=True),
        "plain": lambda: plain,
        "flex": lambda: flex(case, seqlen),
    }
    if "softcap" not in case.options:
        del all_of_them["plain"]
    return all_of_them


# ---- the run -------------------------------------------------------------------------------------


def time_case(run: Run, name: str, seqlen: int, options: Options) -> None:
    """Time the passes of those who can be called and are right."""
    case = CASES[name]
    qkv, sinks, dout = tensors(case, seqlen)
    wrt = [*qkv, *([] if sinks is None else [sinks])]
    calls: dict[str, dict[str, Call]] = {each: {} for each in PASSES}
    grads: dict[str, Any] = {}
    for who, begin in peers(case, seqlen).items():
        if options.peer and who not in options.peer:
            continue
        asked = wrt if who != "plain" else qkv
        try:
            attend = begin()
            out = attend(*qkv, sinks)

            def backward(out: Tensor = out, asked: list[Tensor] = asked) -> tuple[Tensor, ...]:
                return torch.autograd.grad(out, asked, dout, retain_graph=True)

            def both(attend: Attend = attend, asked: list[Tensor] = asked) -> tuple[Tensor, ...]:
                return torch.autograd.grad(attend(*qkv, sinks), asked, dout)

            grads[who] = backward()
            both()
            torch.cuda.synchronize()
        except torch.AcceleratorError as error:  # nothing can be timed after it
            raise FagenError(f"{name} {seqlen} {who}: {error}") from error
        except Exception as error:  # peers refuse in classes of their own
            run.note(f"{who} left out ({str(error).splitlines()[0][:200]})", f"{name} {seqlen}")
            continue
        calls["backward"][who], calls["both"][who] = Call(backward), Call(both)
    for who in {"fagen", "deterministic"} & grads.keys() if "flex" in grads else ():
        for of, got, wanted in zip("qkvs", grads[who], grads["flex"], strict=False):
            most = float(wanted.abs().max())
            off = float((got - wanted).abs().max())
            if not off <= 2 * unit_in_last_place(most, torch.bfloat16) + (of == "s") * most / 64:
                run.note_wrong(f"{name} {seqlen} {who}: d{of} off by {off:.2e} of {most:.2e}")
    dim, v_dim = case.dims
    operations = {"backward": 6 * dim + 4 * v_dim, "both": 8 * dim + 6 * v_dim}
    for each in PASSES:
        for who, timing in time_calls(calls[each], ROUND).items():
            pairs = CASES["softcap" if who == "plain" else name].pairs(seqlen)
            run.rows.append(
                {
                    "call": name,
                    "head_dim": dim,
                    "v_head_dim": v_dim,
                    "batch": batch(seqlen),
                    "seqlen": seqlen,
                    "pass": each,
                    "implementation": who,
                    "us": round(timing.seconds * 1e6, 2),
                    "tflops": round(operations[each] * pairs / timing.seconds / 1e12, 1),
                    "spread": round(timing.spread, 4),
                    "sm_clock_mhz": timing.sm_clock_mhz,
                }
            )
            row = run.rows[-1]
            say(f"  {name} {seqlen} {each} {who}: {row['us']} us, {row['tflops']} TFLOP/s")


def kernels(case: Case, seqlen: int, card: str) -> list[Schedule]:
    """Kernels that serve a call's passes, and the plain call's."""
    softcap, mask = "softcap" in case.options, "window" if "window" in case.options else "causal"
    sink = "bf16" if case.sinks else ""
    own = Problem("bf16", *case.dims, mask, score="softcap" if softcap else PLAIN, sink=sink)
    sizes = Sizes(batch(seqlen), HEADS, KV_HEADS, seqlen, seqlen)
    passes = (FORWARD, False), (BACKWARD, False), (BACKWARD, True)
    cells = [
        Cell(replace(problem, kind=kind, deterministic=order), sizes)
        for problem in (own, Problem("bf16", *case.dims, "causal"))[: 1 + softcap]
        for kind, order in passes
    ]
    return [serving(cell, card, derived=True)[0] for cell in cells]


def work(run: Run, options: Options) -> None:
    """Time every call."""
    cases = [
        (name, seqlen)
        for name in options.call
        for seqlen in CASES[name].seqlens
        if not options.seqlen or seqlen in options.seqlen
    ]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(build_autograd)
        run.build(each for name, s in cases for each in kernels(CASES[name], s, run.card))
    run.each(cases, lambda each: time_case(run, *each, options))


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What rows have in common that are compared."""
    return row["call"], row["seqlen"], row["pass"]


def page(run: Run) -> None:
    """Write <stem>.md, and print it."""
    lines = [
        "| call | D, Dv | S | pass | implementation | µs | TFLOP/s | it ÷ fagen |",
        "|---|---|--:|---|---|--:|--:|--:|",
    ]
    served = {key(row): row["us"] for row in run.rows if row["implementation"] == "fagen"}
    for row in run.rows:
        ratio = f"{row['us'] / served[key(row)]:.3f}" if key(row) in served else ""
        lines.append(
            f"| {row['call']} | {row['head_dim']}, {row['v_head_dim']} | {row['seqlen']:,} "
            f"| {row['pass']} | {row['implementation']} | {row['us']:.1f} | {row['tflops']:.1f} "
            f"| {ratio} |"
        )
    said = (
        f"{run.made_on}. {HEADS}/{KV_HEADS} heads, bf16, causal: {said_of(ROUND)}, medians; "
        "TFLOP/s of visible pairs."
    )
    print(run.write_page("Gradients of masks and scores", said, "\n".join(lines), run.remarks))


main = Script(
    __doc__,
    "gradients",
    work,
    page,
    regimes=[ROUND],
    lists={
        "call": (CASES, CASES),
        "seqlen": (int, None),
        "peer": (("fagen", "deterministic", "plain", "flex"), None),
    },
)

if __name__ == "__main__":
    sys.exit(main())
