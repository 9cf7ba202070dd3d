"""Implementations and a problem in, benchmark rows out: the two regimes on the same inputs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fagen.build import Binary
from fagen.errors import DeviceError, VerificationError
from fagen.kinds.forward.plan import Plan
from fagen.measure.accuracy import unit_in_last_place
from fagen.measure.card import Clock, hopper
from fagen.measure.fp8 import rms
from fagen.measure.peers import Implementation, ours, peer, tried
from fagen.measure.rows import Row
from fagen.measure.shapes import (
    Problem,
    Shape,
    inputs,
    problem,
    rows_with_keys,
    standard_shape,
)
from fagen.measure.timing import BURST, REGIMES, SUSTAINED, Call, Regime, Timing, time_calls
from fagen.vocab import DTYPES

Say = Callable[[str], None]
CHARGED, CREDITED = "charged", "credited"
AGREEMENT = 8  # units in the last place that two right kernels may differ by, at the largest output
FP8_AGREEMENT = 0.1  # of the output's size, root mean squares: e4m3 of N(0, 1) is off by 0.05


def compare(
    plan: Plan,
    binary: Binary,
    shape: Shape | None = None,
    *,
    peers: Sequence[str] = ("cudnn",),
    regimes: Sequence[Regime] = (SUSTAINED, BURST),
    progress: Say | None = print,
) -> tuple[Row, ...]:
    """Time one kernel beside `peers` at `shape` (default: the standard shape, 16,384 tokens).

    Returns rows of fagen and of every peer that can do the problem; why another cannot is said
    through `progress`. Raises DeviceError without a Hopper GPU.
    """
    return bench(
        [(plan, binary)],
        [shape or standard_shape(plan.head_dim)],
        peers=peers,
        regimes=regimes,
        progress=progress,
    )


def bench(
    kernels: Sequence[tuple[Plan, Binary]],
    shapes: Iterable[Shape],
    *,
    peers: Sequence[str] = ("cudnn", "fa2"),
    regimes: Sequence[Regime] = (SUSTAINED, BURST),
    progress: Say | None = print,
) -> tuple[Row, ...]:
    """Time `kernels` and `peers` at every shape; kernels of one problem run in one cell.

    Kernels that differ in dtype, head dims or mask are different problems. Returns the rows, cell
    by cell, and passes a line for each to `progress`. Raises DeviceError for an unknown peer or
    without a Hopper GPU, VerificationError where a kernel's output disagrees with a peer's.
    """
    hopper()
    others = [peer(name) for name in peers]
    rows: list[Row] = []
    for shape in shapes:
        cells: dict[Problem, list[Implementation]] = {}
        for plan, binary in kernels:
            cells.setdefault(problem(plan, shape), []).append(ours(binary))
        for case, mine in cells.items():
            rows += race(case, [*mine, *others], regimes=regimes, progress=progress)
    return tuple(rows)


def race(
    case: Problem,
    implementations: Sequence[Implementation],
    *,
    regimes: Sequence[Regime] = (SUSTAINED, BURST),
    progress: Say | None = print,
    left_out: Callable[[str, str], None] | None = None,
    seed: int = 0,
) -> tuple[Row, ...]:
    """One cell: every implementation that can, on the same inputs, in this process.

    Implementations that refuse are left out, fagen's excepted; `left_out` and `progress` are told
    of each, with its reason.
    """
    say = progress or (lambda line: None)
    say(str(case))
    q, k, v = inputs(case, seed=seed)
    calls: dict[str, Call] = {}
    who: dict[str, Implementation] = {}
    for implementation in implementations:
        label = implementation.label
        try:
            beside = _charges(implementation, case, q, k, v)
        except DeviceError as refusal:
            why = f"what it is charged with cannot be timed: {refusal}"
        else:
            try:
                calls[label] = implementation.bind(case, q, k, v)
            except DeviceError as refusal:
                if implementation.schedule:
                    raise
                why = str(refusal)
            else:
                who[label] = implementation
                calls |= beside
                continue
        say(f"  {label:12} left out: {why}")
        if left_out:
            left_out(label, why)
    _agree(case, calls, who)
    rows = []
    clock = Clock()
    for regime in regimes:
        timings = time_calls(calls, regime, clock=clock, seed=seed)
        for label, implementation in who.items():
            rows.append(_row(case, implementation, regime, _with_charges(label, timings)))
            say(_line(rows[-1]))
    return tuple(rows)


def _charges(
    implementation: Implementation, case: Problem, q: Tensor, k: Tensor, v: Tensor
) -> dict[str, Call]:
    """The calls that are charged and credited to an implementation, each tried once."""
    binds = {CHARGED: implementation.charged, CREDITED: implementation.credited}
    return {
        f"{implementation.label} {sign}": tried(bind(case, q, k, v), "fagen.quantize")
        for sign, bind in binds.items()
        if bind
    }


def _with_charges(label: str, timings: Mapping[str, Timing]) -> Timing:
    """An implementation's time, and what it is charged with beyond what it is credited."""
    timing, charged = timings[label], timings.get(f"{label} {CHARGED}")
    if charged is None:
        return timing
    credited = timings.get(f"{label} {CREDITED}")
    more = charged.seconds - (credited.seconds if credited else 0.0)
    return replace(timing, seconds=timing.seconds + max(0.0, more))


def matmul_ceiling(dtype: str, size: int = 8_192) -> dict[str, float]:
    """TFLOP/s of torch's matrix product of two random size x size matrices, per regime."""
    hopper()
    given = DTYPES[dtype]
    kind = getattr(torch, given.torch)
    made = torch.float16 if given.fp8 else kind
    a, b = (torch.randn(size, size, device="cuda", dtype=made).to(kind) for _ in range(2))
    one = torch.ones((), device="cuda")

    def product() -> Tensor:
        if given.fp8:
            return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        return a @ b

    calls = {"matmul": Call(product)}
    return {
        name: 2.0 * size**3 / time_calls(calls, regime)["matmul"].seconds / 1e12
        for name, regime in REGIMES.items()
    }


def _agree(case: Problem, calls: dict[str, Call], who: dict[str, Implementation]) -> None:
    """A kernel that computes something else must not be timed: compare with the first peer.

    Not in rows that see no key, where each has its own custom.
    """
    judges = [
        label
        for label, implementation in who.items()
        if implementation.judges and not implementation.schedule
    ]
    if not judges:
        return
    seen = slice(rows_with_keys(case.shape, case.causal), None)
    judge = calls[judges[0]].once()[:, seen]
    for label, implementation in who.items():
        if not implementation.schedule:
            continue
        worst, allowed = disagreement(case, calls[label].once()[:, seen], judge)
        if not worst <= allowed:
            raise VerificationError(
                f"{label} differs from {judges[0]} by {worst:.3g} at {case}, where {allowed:.3g} "
                f"may be: not timed; `fagen verify {label}` shows which shapes are wrong"
            )


def disagreement(case: Problem, out: Tensor, judge: Tensor) -> tuple[float, float]:
    """By how much an output differs from another implementation's, and by how much it may."""
    difference = out.float() - judge.float()
    if DTYPES[case.dtype].fp8:
        return rms(difference), FP8_AGREEMENT * rms(judge)
    allowed = AGREEMENT * unit_in_last_place(float(judge.abs().max()), judge.dtype)
    return float(difference.abs().max()), allowed


def _row(case: Problem, who: Implementation, regime: Regime, timing: Timing) -> Row:
    size = case.shape
    return Row(
        dtype=case.dtype,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v,
        mask=case.mask,
        batch=size.batch,
        seqlen_q=size.seqlen_q,
        seqlen_k=size.seqlen_k,
        heads=size.heads,
        kv_heads=size.kv_heads,
        implementation=who.name,
        schedule=who.schedule,
        regime=regime.name,
        tflops=case.flops / timing.seconds / 1e12,
        spread=timing.spread,
        sm_clock_mhz=timing.sm_clock_mhz,
    )


def _line(row: Row) -> str:
    clock = f"{row.sm_clock_mhz} MHz" if row.sm_clock_mhz else "clock unknown"
    return (
        f"  {row.schedule or row.implementation:36} {row.regime:9} {row.tflops:7.1f} TFLOP/s"
        f"  spread {row.spread:5.1%}  {clock}"
    )
