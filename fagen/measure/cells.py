"""Implementations and a cell in, benchmark rows out: the two regimes on the same inputs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fagen.build import Binary
from fagen.errors import DeviceError, VerificationError
from fagen.kind import Plan
from fagen.measure.card import Clock, hopper
from fagen.measure.inputs import cell_of, inputs, rows_with_keys
from fagen.measure.numerics import disagreement
from fagen.measure.peers import Implementation, ours, peer, tried
from fagen.measure.rows import OURS, YARDSTICK, Row
from fagen.measure.timing import BURST, SUSTAINED, Call, Regime, Timing, time_calls
from fagen.problem import Cell, Problem, Sizes, standard_sizes
from fagen.records import Speed

Say = Callable[[str], None]
CHARGED, CREDITED = "charged", "credited"


def compare(
    plan: Plan,
    binary: Binary,
    sizes: Sizes | None = None,
    *,
    peers: Sequence[str] = ("cudnn",),
    regimes: Sequence[Regime] = (SUSTAINED, BURST),
    progress: Say | None = print,
) -> tuple[Row, ...]:
    """Time one kernel beside `peers` at `sizes` (default: the standard ones, 16,384 tokens).

    Returns rows of fagen and of every peer that can do the cell; why another cannot is said
    through `progress`. Raises DeviceError without a Hopper GPU.
    """
    return bench(
        [(plan, binary)],
        [sizes or standard_sizes(Problem.of(plan.schedule).head_dim)],
        peers=peers,
        regimes=regimes,
        progress=progress,
    )


def bench(
    kernels: Sequence[tuple[Plan, Binary]],
    sizes: Iterable[Sizes],
    *,
    peers: Sequence[str] = ("cudnn", "fa2"),
    regimes: Sequence[Regime] = (SUSTAINED, BURST),
    progress: Say | None = print,
) -> tuple[Row, ...]:
    """Time `kernels` and `peers` at all sizes; kernels of one problem run in one cell.

    Kernels that differ in dtype, head dims or mask are of different problems. Returns the rows,
    cell by cell, and passes a line for each to `progress`. Raises DeviceError for an unknown peer
    or without a Hopper GPU, VerificationError where a kernel's output disagrees with a peer's.
    """
    hopper()
    others = [peer(name) for name in peers]
    rows: list[Row] = []
    for size in sizes:
        cells: dict[Cell, list[Implementation]] = {}
        for plan, binary in kernels:
            cells.setdefault(cell_of(plan, size), []).append(ours(binary))
        for cell, mine in cells.items():
            rows += race(cell, [*mine, *others], regimes=regimes, progress=progress)
    return tuple(rows)


def race(
    cell: Cell,
    implementations: Sequence[Implementation],
    *,
    regimes: Sequence[Regime] = (SUSTAINED, BURST),
    progress: Say | None = print,
    left_out: Callable[[str, str], None] | None = None,
    seed: int = 0,
) -> tuple[Row, ...]:
    """One cell: every implementation that can, on the same inputs, in this process.

    Implementations that refuse are left out, fagen's excepted; `left_out` and `progress` are told
    of each, with its reason. All `regimes` are of one sigma.
    """
    (sigma,) = {regime.sigma for regime in regimes}
    say = progress or (lambda line: None)
    say(str(cell))
    q, k, v = inputs(cell, seed=seed, sigma=sigma)
    calls: dict[str, Call] = {}
    who: dict[str, Implementation] = {}
    for implementation in implementations:
        label, charged = implementation.label, False
        try:
            beside = _charges(implementation, cell, q, k, v)
            charged = True
            calls[label] = implementation.bind(cell, q, k, v)
        except DeviceError as refusal:
            if charged and implementation.schedule:
                raise
            why = f"{'' if charged else 'what it is charged with cannot be timed: '}{refusal}"
            say(f"  {label:12} left out: {why}")
            if left_out:
                left_out(label, why)
            continue
        who[label] = implementation
        calls |= beside
    _agree(cell, calls, who)
    rows = []
    clock = Clock()
    for regime in regimes:
        timings = time_calls(calls, regime, clock=clock, seed=seed)
        for label, implementation in who.items():
            rows.append(_row(cell, implementation, regime, _with_charges(label, timings)))
            say(_line(rows[-1]))
    return tuple(rows)


def _charges(
    implementation: Implementation, cell: Cell, q: Tensor, k: Tensor, v: Tensor
) -> dict[str, Call]:
    """The calls that are charged and credited to an implementation, each tried once."""
    binds = {CHARGED: implementation.charged, CREDITED: implementation.credited}
    return {
        f"{implementation.label} {sign}": tried(bind(cell, q, k, v), "fagen.quantize")
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


def _agree(cell: Cell, calls: dict[str, Call], who: dict[str, Implementation]) -> None:
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
    rows = rows_with_keys(cell)
    judge = compared(calls[judges[0]].once(), rows)
    for label, implementation in who.items():
        if not implementation.schedule:
            continue
        for own, theirs in zip(compared(calls[label].once(), rows), judge, strict=True):
            worst, allowed = disagreement(cell, own, theirs)
            if not worst <= allowed:
                raise VerificationError(
                    f"{label} differs from {judges[0]} by {worst:.3g} at {cell}, where "
                    f"{allowed:.3g} may be: not timed; `fagen verify {label}` shows which shapes "
                    "are wrong"
                )


def compared(outputs: Tensor | tuple[Tensor, ...], rows: Tensor | slice) -> tuple[Tensor, ...]:
    """What a call gave; of the first output the query `rows`."""
    first, *others = outputs if isinstance(outputs, tuple) else (outputs,)
    return first[:, rows], *others


def _row(cell: Cell, who: Implementation, regime: Regime, timing: Timing) -> Row:
    problem = cell.problem
    return Row(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        mask=problem.mask,
        **vars(cell.sizes),
        implementation=who.name,
        schedule=who.schedule,
        regime=regime.name,
        tflops=cell.flops / timing.seconds / 1e12,
        spread=timing.spread,
        sm_clock_mhz=timing.sm_clock_mhz,
        pass_=problem.kind,
    )


def speeds(rows: Sequence[Row]) -> tuple[Speed, ...]:
    """Per regime, fagen's TFLOP/s and cuDNN's beside it (None where cuDNN refused)."""
    figures = []
    for row in rows:
        if row.implementation not in OURS:
            continue
        beside = [
            other.tflops
            for other in rows
            if other.implementation == YARDSTICK and other.regime == row.regime
        ]
        figures.append(
            Speed(
                regime=row.regime,
                batch=row.batch,
                seqlen=row.seqlen_k,
                heads=row.heads,
                tflops=row.tflops,
                spread=row.spread,
                sm_clock_mhz=row.sm_clock_mhz,
                cudnn_tflops=beside[0] if beside else None,
            )
        )
    return tuple(figures)


def _line(row: Row) -> str:
    clock = f"{row.sm_clock_mhz} MHz" if row.sm_clock_mhz else "clock unknown"
    return (
        f"  {row.schedule or row.implementation:36} {row.regime:9} {row.tflops:7.1f} TFLOP/s"
        f"  spread {row.spread:5.1%}  {clock}"
    )
