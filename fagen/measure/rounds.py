"""Built kernels and a cell in, their times side by side out: short rounds with an anchor.

The card's clock and power wander, for all kernels alike within a fraction of a second. So every
round runs the anchor again and again among the others, and a time means something beside its own.
"""

import random
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fagen.errors import DeviceError, VerificationError
from fagen.kind import Plan
from fagen.measure.card import Card, Clock, hopper
from fagen.measure.cells import compared
from fagen.measure.inputs import inputs
from fagen.measure.numerics import disagreement
from fagen.measure.peers import peer
from fagen.measure.rotating import in_turns, turns
from fagen.measure.timing import Call, Regime, captured, estimate, time_round
from fagen.measure.verification import contender_of
from fagen.problem import Cell, Sizes
from fagen.registry import plan_of

# A few calls after one to warm up, without a pause: enough to tell good kernels from bad ones.
BRIEF = Regime("brief", idle=0.0, warm=0.0, timed=0.002, rounds=1)
# Long enough for the power limit to take its toll, as in a sustained run.
LONG = Regime("long", idle=0.0, warm=0.100, timed=0.100, rounds=1)
ROUND_REGIMES = {regime.name: regime for regime in (BRIEF, LONG)}
ANCHOR_EVERY = 4
# Below so many seconds a call measures the host, which then launches so many of them at a time.
SHORT = 50e-6
RUNS = 16
CUDNN = "cudnn"
QUICK = (  # sizes that go wrong soonest: ragged, grouped heads, several tiles for each block
    Sizes(2, 4, 2, 321, 449),
    Sizes(1, 3, 3, 130, 67),
    Sizes(4, 48, 48, 384, 320),
)


@dataclass(frozen=True)
class Kernel:
    """A built kernel, as much of it as can be sent to another process."""

    slug: str
    library: Path


@dataclass(frozen=True)
class Lap:
    """Seconds of one call in one round, and of the anchor beside it; MHz of the SMs, if known."""

    slug: str  # or a peer's name
    repeat: int
    seconds: float
    anchor_seconds: float
    sm_clock_mhz: int | None


def cards() -> tuple[Card | None, ...]:
    """Every CUDA device, in order; None for one that is no Hopper GPU."""
    hoppers: list[Card | None] = []
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            try:
                hoppers.append(hopper())
            except DeviceError:
                hoppers.append(None)
    return tuple(hoppers)


def use_card(index: int) -> Card:
    """Measure on this CUDA device from now on.  Raises DeviceError where it is no Hopper GPU."""
    torch.cuda.set_device(index)
    return hopper()


def card_id(index: int) -> str:
    """A name for one GPU that all processes of the machine agree on."""
    return str(torch.cuda.get_device_properties(index).uuid)


def quick_check(cell: Cell, kernel: Kernel) -> None:
    """Check a kernel against fp64 at small sizes, and in `cell` against torch where that can do it.

    Where keys come from memory in turns sizes like the cell's are among the small ones, and no
    others are checked.

    Raises VerificationError where it is wrong, DeviceError where it cannot be launched.
    """
    plan = plan_of(kernel.slug)
    contender = contender_of(plan)
    for number, sizes in enumerate(contender.quick(plan, cell.sizes) if contender.quick else QUICK):
        small = Cell(cell.problem, sizes)
        error = contender.error(plan, kernel.library, small, *inputs(small, seed=number))
        if not error.ok:
            raise VerificationError(f"{error} at {sizes}")
    if contender.rotates:
        return
    arguments = _taken(cell, plan, *_inputs(cell))
    outputs = contender.outputs(plan, arguments)
    contender.launch(plan, kernel.library, arguments, outputs)()
    if (expected := _expected(cell)) is None:
        return
    every = slice(None)
    output = compared(contender.compared(outputs), every)
    for ours, theirs in zip(output, compared(expected, every), strict=True):
        worst, allowed = disagreement(cell, ours, theirs)
        if not worst <= allowed:
            raise VerificationError(f"differs from torch by {worst:.2e} at {cell.sizes}")


def side_by_side(
    cell: Cell,
    kernels: Sequence[Kernel],
    anchor: Kernel,
    *,
    regime: Regime,
    repeats: Sequence[int],
) -> tuple[Lap, ...]:
    """Time kernels, and the problem's peer where it can, in interleaved rounds with the anchor.

    `rounds` numbers the rounds, and decides their order. Raises what a kernel's call raises.
    """
    rotates = contender_of(plan_of(anchor.slug)).rotates
    turns = _turns(_unmasked(cell)) if rotates else (_inputs(cell),)
    # of kernels that are alike
    shared: dict[Hashable, tuple[list[tuple[Any, ...]], tuple[Tensor, ...]]] = {}

    def call(kernel: Kernel) -> Call:
        plan = plan_of(kernel.slug)
        contender = contender_of(plan)
        like = plan.kind, contender.alike(plan)
        if like not in shared:
            arguments = [_taken(cell, plan, *turn) for turn in turns]
            shared[like] = arguments, contender.outputs(plan, arguments[0])
        arguments, outputs = shared[like]
        launches = [contender.launch(plan, kernel.library, turn, outputs) for turn in arguments]

        def run() -> Tensor:
            for launch in launches:
                launch()
            return outputs[0]

        return Call(run)

    # graphs keep nothing of what their calls use, workspaces among it: these do, to the end
    bound, bound_anchor = {kernel.slug: call(kernel) for kernel in kernels}, call(anchor)
    if not rotates and (peers := _beside(cell)):
        bound[cell.problem.peer.name] = peers
    calls, beside = bound, bound_anchor
    if rotates:  # the host would be slower than so many short calls
        calls = {name: captured(bound_call, 1) for name, bound_call in bound.items()}
        beside = captured(bound_anchor, 1)
        if graph := _cudnn_in_turns(_unmasked(cell)):
            calls[CUDNN] = graph
    anchor_seconds = _anchor_seconds(cell, anchor, beside)
    runs = RUNS if anchor_seconds < SHORT and not rotates else 1
    if runs > 1:
        calls = {name: captured(bound_call, runs) for name, bound_call in bound.items()}
        beside = captured(bound_anchor, runs)
    clock = Clock()
    laps: list[Lap] = []
    for number in repeats:
        laps += _one_round(number, calls, beside, anchor_seconds * runs, regime, clock)
    of_one = runs * len(turns)
    return tuple(
        replace(lap, seconds=lap.seconds / of_one, anchor_seconds=lap.anchor_seconds / of_one)
        for lap in laps
    )


def _one_round(
    number: int, calls: Mapping[str, Call], anchor: Call, span: float, regime: Regime, clock: Clock
) -> list[Lap]:
    """Every call once, in random order, and the anchor between groups of them.

    Each has the faster of the anchor's times before and after its group: what disturbs a short run
    makes it slower.
    """
    order = random.Random(number).sample(list(calls), len(calls))
    groups = [order[i : i + ANCHOR_EVERY] for i in range(0, len(order), ANCHOR_EVERY)]
    laps = []
    before, _ = time_round(anchor, regime, span, clock)
    for group in groups:
        times = {name: time_round(calls[name], regime, span, clock) for name in group}
        after, _ = time_round(anchor, regime, span, clock)
        for name, (seconds, readings) in times.items():
            mhz = readings[len(readings) // 2] if readings else None
            laps.append(Lap(name, number, seconds, min(before, after), mhz))
        before = after
    return laps


def _taken(cell: Cell, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """What a kernel's op takes of a cell's tensors, in its order."""
    sizes = (cell.sizes,) if cell.sizes.varlen else ()
    return contender_of(plan).arguments(plan, q, k, v, *sizes)


@lru_cache(maxsize=12)
def _inputs(cell: Cell) -> tuple[Tensor, Tensor, Tensor]:
    return inputs(cell)


def _unmasked(cell: Cell) -> Cell:
    """The cell for peers where keys come from memory: none is aligned to the bottom right."""
    return replace(cell, problem=replace(cell.problem, mask="full"))


@lru_cache(maxsize=12)
def _turns(cell: Cell) -> tuple[tuple[Tensor, Tensor, Tensor], ...]:
    q, pairs = turns(cell)
    return tuple((q, k, v) for k, v in pairs)


@lru_cache(maxsize=12)
def _cudnn_in_turns(cell: Cell) -> Call | None:
    """CuDNN on each K and V, as one graph; None where it refuses."""
    try:
        peers = [peer(CUDNN).bind(cell, *turn) for turn in _turns(cell)]
        return in_turns((bound.run for bound in peers), within=peers[0].within)
    except (DeviceError, RuntimeError):
        return None


@lru_cache(maxsize=12)
def _beside(cell: Cell) -> Call | None:
    """The peer of a cell; None where it refuses."""
    try:
        return peer(cell.problem.peer.name).bind(cell, *_inputs(cell))
    except DeviceError:
        return None


@lru_cache(maxsize=4)
def _expected(cell: Cell) -> Any:
    """What the first of torch's backends gives that computes this; None where none does."""
    for name in (CUDNN, "fa2", "efficient"):
        with suppress(DeviceError):
            return peer(name).bind(cell, *_inputs(cell)).once()
    return None


_known: dict[tuple[Cell, Path], float] = {}


def _anchor_seconds(cell: Cell, anchor: Kernel, call: Call) -> float:
    key = (cell, anchor.library)
    if key not in _known:
        _known[key] = estimate(call)
    return _known[key]
