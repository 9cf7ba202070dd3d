"""What tests on a GPU share: graphs, streams, threads, and whether bits are the same."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any, TypeVar

import torch
from torch import Tensor

from fagen.runtime.c_interface import call as enqueue
from fagen.runtime.checks import allocated, checked

T = TypeVar("T")

# of eight sequences in 4,096 rows: alike, tiny beside large, all in one
ENDS = (
    [0, 512, 1_024, 1_536, 2_048, 2_560, 3_072, 3_584, 4_096],
    [0, 1, 1, 3, 4_000, 4_001, 4_001, 4_095, 4_096],
    [0, 0, 0, 0, 0, 0, 0, 0, 4_096],
)


def ints(*numbers: int) -> Tensor:
    """Lengths or offsets on the GPU."""
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def same(found: Any, expected: Any) -> bool:
    """Whether two tensors, or all of several, have the same numbers."""
    if isinstance(found, Tensor):
        return torch.equal(found, expected)
    return all(same(one, other) for one, other in zip(found, expected, strict=True))


def spoil(*tensors: Tensor) -> None:
    """Fill with what nobody may take for a result: no number, or a length of nothing."""
    for x in tensors:
        x.fill_(math.nan) if x.is_floating_point() else x.zero_()


def poisoned(plan: Any, binary: Any, call: dict[str, Any]) -> tuple[Tensor, ...]:
    """What a built kernel makes of a call by name, in outputs and a workspace full of NaN."""
    results = allocated(plan, call, checked(plan, call))
    spoil(*results)
    named = {t.result: x for t, x in zip(plan.signature.outputs, results, strict=True)}
    enqueue(plan, binary.library, **call, **named)
    return results


def graph_of(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A CUDA graph of a call, which is made once before, and what it returns."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def graph_of_passes(call: Callable[[], Any], leaves: Iterable[Tensor]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of a call that leaves gradients at its leaves, where there are none before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    for leaf in leaves:
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@contextmanager
def waiting_for_nothing() -> Iterator[None]:
    """Raise where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def by_threads(work: Callable[[int], None], count: int) -> None:
    """Run work(0), work(1), … each in a thread."""
    threads = [Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def by_turns(calls: list[Callable[[], T]], turns: int) -> list[list[T]]:
    """What each call returns, each made on a stream of its own, one after the other by turns."""
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in calls], [[] for _ in calls]
    for _ in range(turns):
        for call, stream, found in zip(calls, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(call())
    torch.cuda.synchronize()
    return results
