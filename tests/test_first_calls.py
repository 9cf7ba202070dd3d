"""Every door as the first call: under torch.compile, and from many threads at once."""

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier, Lock, RLock, get_ident
from time import sleep
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.exc import Unsupported
from torch.fx import GraphModule
from torch.torch_version import TorchVersion

import fagen
from fagen.dispatch import select
from fagen.errors import UntunedWarning
from fagen.process import run
from fagen.runtime.op import Once
from tests.attention_helpers import picked
from tests.doors import DOORS
from tests.fresh import forget

THREADS = 8
PACKAGED_LAYER = Path(__file__).with_name("packaged_layer.py")
# calls of fagen's ops in a door's graph, where they are more than one
OPS = dict.fromkeys(("attention_e4m3", "attention_fp8", "attention_varlen_e4m3"), 4)
OPS["flash_attn_forward_and_backward"] = 2
OPEN = (
    *("attention_gradients", "attention_varlen", "attention_varlen_gradients", "attention_decode"),
    *("attention_varlen_e4m3", "flash_attn_func_e4m3", "flash_attn_with_kvcache", "quantize"),
    "attention_fp8",
)


@pytest.fixture(autouse=True)
def nothing_is_ready(monkeypatch):
    """Every module as in a new process, where a warning is an error."""
    forget(monkeypatch)
    select.committed.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", UntunedWarning)
        yield


def same(results: list[Any], expected: list[Any]) -> bool:
    return len(results) == len(expected) and all(map(torch.equal, results, expected))


class Recording:
    """The backend aot_eager, which keeps the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []

    def __call__(self, graph: GraphModule, inputs: Any) -> Any:
        self.graphs.append(graph)
        return aot_eager(graph, inputs)

    def called(self) -> list[str]:
        """What the one graph there is calls of fagen."""
        (graph,) = self.graphs
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        return [target for target in targets if "fagen" in target]


# ---- traced -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOORS)
def test_a_first_call_compiles_into_one_graph_of_its_ops_alone(name, fresh_dynamo):
    door, backend = DOORS[name], Recording()
    compiled = torch.compile(door.call, fullgraph=True, backend=backend)
    tensors = door.made()
    results = door.results(tensors, compiled)
    assert same(results, door.results(tensors))
    called = backend.called()
    assert len(called) == OPS.get(name, 1), called
    assert all(name.startswith("fagen.") and name.endswith(".default") for name in called), called


@pytest.mark.parametrize("name", OPEN)
def test_a_first_call_with_open_sizes_serves_others_too(name, fresh_dynamo):
    door = DOORS[name]
    compiled = torch.compile(door.call, fullgraph=True, dynamic=True, backend="aot_eager")
    first = door.made()
    door.results(first, compiled)
    if "varlen" in name:
        others = (*(x[:25] for x in first[:3]), first[3].clamp(max=25))
    else:
        others = (
            first[0][:, :9].contiguous(),
            *(x[:, :33].contiguous() for x in first[1:3]),
            *first[3:],
        )
    with torch.compiler.set_stance("fail_on_recompile"):
        results = door.results(others, compiled)
    for out, other in zip(results, door.results(others), strict=True):  # by another tile, perhaps
        assert (out.float() - other.float()).abs().max() < 0.05


@pytest.mark.parametrize("strict", [False, True])
def test_a_first_call_exports(strict, fresh_dynamo):
    class Model(torch.nn.Module):
        def forward(self, *args):
            return door.call(*args)

    for name in ("attention", "attention_varlen", "attention_decode"):
        door = DOORS[name]
        tensors = door.made()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
            exported = torch.export.export(Model(), tensors, strict=strict)
        assert same(door.results(tensors, exported.module()), door.results(tensors))


def test_a_schedule_that_is_named_is_taken_while_it_is_traced(fresh_dynamo):
    schedule = "fwd_bf16_d64_full_m64n48"
    chosen = picked(dtype="bf16", head_dim=64, seqlen=40)
    tensors = DOORS["attention"].made()
    named = [(schedule, schedule), (chosen, chosen.slug)]
    # before 2.13 torch.compile has no constant of such a class
    for choice, slug in named[: 1 if TorchVersion(torch.__version__) < (2, 13) else 2]:
        call = partial(fagen.attention, schedule=choice)
        backend = Recording()
        torch.compile(call, fullgraph=True, backend=backend)(*tensors)
        assert backend.called() == [f"fagen.{slug}_emulated.default"]


def test_what_no_kernel_computes_is_refused_in_words_while_it_is_traced(fresh_dynamo):
    tensors = [x.double() for x in DOORS["attention"].made()]
    message = "q is float64; use fp16 or bf16"
    with pytest.raises(Unsupported, match="Observed exception") as refused:
        torch.compile(fagen.attention, fullgraph=True, backend="eager")(*tensors)
    assert message in str(refused.value)
    torch._dynamo.reset()
    with pytest.raises(ValueError, match=message):
        torch.compile(fagen.attention, backend="eager")(*tensors)


@pytest.mark.long  # torch compiles two C++ libraries
@pytest.mark.parametrize("which", ["without", "with"])
def test_a_layer_is_packaged_by_aotinductor(which, tmp_path):
    package = str(tmp_path / "layer.pt2")
    answer = run([sys.executable, str(PACKAGED_LAYER), which, "cpu", package])
    assert answer.returncode == 0, answer.stderr[-3_000:]


# ---- by many threads ----------------------------------------------------------------------------


def at_once(work: Callable[[int], Any]) -> list[Any]:
    """What `work` gives in each of several threads, which begin together."""
    barrier = Barrier(THREADS)

    def one(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(one, range(THREADS)))


def test_first_calls_of_all_doors_from_eight_threads():
    head_dim = 144  # that no other test calls, since torch is told of an op once in a process
    doors = [*DOORS.values()]
    tensors = {door.call: door.made(head_dim) for door in doors}

    def work(number):
        order = [(i + 3 * number) % len(doors) for i in range(len(doors))]
        if number % 2:  # half of them all one after the other, the others the same one at once
            order = [*range(len(doors))]
        return {i: doors[i].results(tensors[doors[i].call]) for i in order}

    for results in at_once(work):
        for i, door in enumerate(doors):
            assert same(results[i], door.results(tensors[door.call]))


def test_what_many_threads_want_is_made_once_and_other_things_meanwhile():
    counts = Counter()
    working = set()
    together = 0

    def make(key):
        nonlocal together
        with lock:
            counts[key] += 1
            working.add(get_ident())
            together = max(together, len(working))
        sleep(0.02)
        working.discard(get_ident())
        return f"{key}"

    lock, cache = Lock(), Once(make)
    assert at_once(lambda number: cache.made(number % 2)) == ["0", "1"] * (THREADS // 2)
    assert counts == {0: 1, 1: 1} and together == 2
    assert cache.get(0) == "0" and cache.get(2) is None


def test_what_could_not_be_made_is_tried_again():
    tries = iter((OSError("full"), None))

    def make(key):
        if error := next(tries):
            raise error
        return key

    cache = Once(make)
    with pytest.raises(OSError, match="full"):
        cache.made("a")
    assert cache.made("a") == "a" == cache["a"]


def test_a_value_may_ask_for_another_of_the_same_lock():
    cache = Once(lambda n: n and cache.made(n - 1) + 1, RLock())
    assert cache.made(5) == 5 and len(cache) == 6
