"""A GPU that is made up: kernels of every kind are emulated, clocks stand still, torch has its say.

What a search compiles, checks and times runs on it as it would on one that is there.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from fagen import registry
from fagen.kind import load_named
from fagen.measure import cells, peers, rotating, rounds
from fagen.measure import inputs as measure_inputs
from fagen.measure.card import Card
from fagen.measure.rounds import Kernel
from fagen.measure.timing import Call, Timing
from fagen.registry import plan_of
from fagen.runtime import c_interface
from fagen.search import tasks
from fagen.search.executor import REAL, Work
from fagen.search.tasks import GOOD, Compiled
from tests.aten import packed_passes_on_a_cpu, passes_on_a_cpu

NAME, DRIVER = CARD = ("NVIDIA H200", "580.1")
Spoil = Callable[[dict[str, Any]], None]  # what a wrong kernel does to its tensors


def kernel(slug: str) -> Kernel:
    """A built kernel, as a search has it."""
    return Kernel(slug, Path(f"{slug}.so"))


def race_on_a_cpu(
    patch: pytest.MonkeyPatch,
    kernel: Callable[..., Any] | None = None,
    seconds: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Have cells raced here: each call takes so many seconds by its label, else a millisecond.

    `kernel(plan, *arguments)` stands in for built kernels.
    """

    def time_calls(calls: Mapping[str, Call], *_: Any, **__: Any) -> dict[str, Timing]:
        return {label: Timing(seconds.get(label, 1e-3), 0.01, 1_500) for label in calls}

    patch.setattr(cells, "time_calls", time_calls)
    patch.setattr(cells, "inputs", partial(measure_inputs.inputs, device="cpu"))
    if kernel:
        patch.setattr(peers.op, "load", lambda binary: partial(kernel, binary.plan))


class MadeUpGpu:
    """What ran, on which keys, how often calls were captured, and which kernels are wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.ran: list[tuple[str, int]] = []
        self.wrong: dict[str, Spoil] = {}
        self.captured: list[int] = []  # runs of each graph
        self.called: list[str] = []  # torch's passes

    def bind(self, plan: Any, library: Path, **operands: Any) -> Callable[[], None]:
        """Stand in for a kernel's C function: compute into its outputs what it would."""
        assert library == Path(f"{plan.slug}.so")
        emulate = load_named(registry.kind(plan.kind).emulate)

        def launch() -> None:
            self.ran.append((plan.slug, operands["k"].data_ptr()))
            arguments = {x.name: operands.get(x.name) for x in plan.signature.arguments}
            for output, numbers in zip(
                plan.signature.outputs, emulate(plan, **arguments), strict=True
            ):
                if operands.get(output.name) is not None:
                    operands[output.name].copy_(numbers)
            self.wrong.get(plan.slug, lambda tensors: None)(operands)

        return launch

    def turns(self, slug: str) -> list[int]:
        """On which keys a kernel ran, one call after the other."""
        return [keys for name, keys in self.ran if name == slug]

    def checks(self, slug: str, *sizes: Any) -> None:
        """Have the quick check of kernels like this one look at these sizes alone."""
        contender = replace(rounds.contender_of(plan_of(slug)), quick=lambda plan, like: sizes)
        self._patch.setattr(rounds, "contender_of", lambda plan: contender)

    def work(self) -> Work:
        """A search's work on this GPU: all but the compiler and the clock is real."""
        for name, stand_in in (
            ("use_card", lambda index: Card(NAME, DRIVER, 132)),
            ("card_id", lambda index: "a-card"),
        ):
            self._patch.setattr(rounds, name, stand_in)
        self._patch.setattr(tasks, "_library", lambda binary: Path(binary.library))
        return replace(
            REAL,
            compile=lambda slug: Compiled(slug, slug, "nvcc 13.0", GOOD, library=f"{slug}.so"),
            source_hash=lambda slug: slug,
            compiler=lambda: "nvcc 13.0",
            card=lambda index: CARD,
        )


@contextmanager
def plugged_in(
    monkeypatch: pytest.MonkeyPatch, *, torch: bool = False, seconds: float = 1e-3
) -> Iterator[MadeUpGpu]:
    """Have one meanwhile; with `torch` on it too: its passes, called without autograd.

    A call takes `each` seconds as it is estimated, and a round six milliseconds.
    """
    gpu = MadeUpGpu(monkeypatch)
    for kind in registry.ENTRIES:
        load_named(registry.kind(kind).verification)
    for module in [x for name, x in sys.modules.items() if name.startswith("fagen.kinds.")]:
        if getattr(module, "bind", None) is c_interface.bind:
            monkeypatch.setattr(module, "bind", gpu.bind)
        if getattr(module, "call", None) is c_interface.call:
            monkeypatch.setattr(module, "call", lambda *args, **how: gpu.bind(*args, **how)())

    def time_round(call: Any, *_: Any) -> tuple[float, list[int]]:
        call.run()
        return 6e-3, [1_700]

    def captured(call: Any, runs: int) -> Any:
        gpu.captured.append(runs)
        return call

    monkeypatch.setattr(rounds, "time_round", time_round)
    for module in (rounds, rotating):
        monkeypatch.setattr(module, "captured", captured)
        monkeypatch.setattr(module, "inputs", partial(measure_inputs.inputs, device="cpu"))
    monkeypatch.setattr(rounds, "estimate", lambda call: seconds)
    monkeypatch.setattr(rotating, "buffers_for", lambda problem, sizes: 3)
    monkeypatch.setattr(rounds, "_known", {})
    monkeypatch.setattr(rounds, "Clock", lambda: None)
    kept = [cached for cached in vars(rounds).values() if hasattr(cached, "cache_clear")]
    with ExitStack() as passes:
        if torch:
            passes.enter_context(passes_on_a_cpu(gpu.called))
            passes.enter_context(packed_passes_on_a_cpu(gpu.called))
            # what SDPA itself would refuse: it knows of none on a CPU
            monkeypatch.setattr(peers, "_sdpa", lambda *call: Call(lambda: None))
        for cached in kept:
            cached.cache_clear()
        yield gpu
        for cached in kept:
            cached.cache_clear()
