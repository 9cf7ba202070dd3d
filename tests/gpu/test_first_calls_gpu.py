"""First calls on a GPU: graph trees, pools of memory, replays, streams, threads, AOTInductor."""

import gc
import os
import re
import subprocess
import sys
from pathlib import Path
from threading import Barrier, Thread

import pytest
import torch

import fagen
from tests.doors import DOORS
from tests.fresh import forget
from tests.gpu.helpers import by_threads, graph_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]

# that keep zeros from call to call, and others
UNDER_GRAPH_TREES = (
    "attention",
    "attention_gradients",
    "attention_e4m3",
    "attention_varlen",
    "attention_varlen_gradients",
    "attention_decode_lengths",
    "flash_attn_with_kvcache_of_a_number",
)


@pytest.fixture(autouse=True)
def nothing_is_ready(monkeypatch):
    forget(monkeypatch)


def assert_close(found, wanted):
    for one, other in zip(found, wanted, strict=True):  # dq is a sum in any order
        assert (one.float() - other.float()).abs().max() <= 0.02 * (1 + other.float().abs().max())


@pytest.mark.parametrize("name", UNDER_GRAPH_TREES)
def test_graph_trees_take_a_first_call(name):
    torch._dynamo.reset()
    door = DOORS[name]
    compiled = torch.compile(
        lambda *given: door.call(given[0] * 1, *given[1:]), fullgraph=True, mode="reduce-overhead"
    )
    beside = torch.cuda.Stream()
    for _ in range(5):  # warmed up, recorded, replayed
        given = door.made(device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        found = [x.clone() for x in door.results(given, compiled)]
        with torch.cuda.stream(beside):  # and without a graph meanwhile
            meanwhile = door.results(given)
        beside.synchronize()
        assert_close(found, meanwhile)


def live_in(pool):
    """How many bytes of a pool are in use."""
    segments = [x for x in torch.cuda.memory_snapshot() if tuple(x["segment_pool_id"]) == pool]
    return sum(segment["active_size"] for segment in segments)


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "attention_varlen_gradients"])
def test_a_callers_pool_of_memory_is_empty_after_the_call(name):
    door = DOORS[name]
    given = door.made(device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            found = door.results(given)
        expected = [x.cpu() for x in found]
        del found
        gc.collect()
        assert live_in(tuple(pool.id)) == 0
        del pool
        torch.cuda.empty_cache()
        scrap = [torch.full((1 << 18,), 7.0, device="cuda") for _ in range(32)]
        for _ in range(3):
            assert_close([x.cpu() for x in door.results(given)], expected)
    del scrap


def test_replays_and_calls_on_several_streams_share_nothing():
    q, k, v = (torch.randn(2, 1_000, 4, 128, device="cuda").bfloat16() for _ in range(3))
    expected = fagen.attention(q, k, v, causal=True)
    streams = [torch.cuda.Stream() for _ in range(4)]
    made = [
        graph_of(lambda: [fagen.attention(q, k, v, causal=True) for _ in range(3)])
        for _ in range(2)
    ]
    graphs, captured = zip(*made, strict=True)
    results = []
    for turn in range(60):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if (i + turn) % 4 < 2:
                    graphs[(i + turn) % 4].replay()
                else:
                    results.append(fagen.attention(q, k, v, causal=True))
        if turn % 20 == 19:
            torch.cuda.synchronize()
            assert all(torch.equal(x, expected) for x in results)
            assert all(torch.equal(x, expected) for outs in captured for x in outs)
            results.clear()


def test_a_first_call_on_a_stream_breaks_no_capture_of_another_thread():
    q, k, v = (torch.randn(1, 500, 4, 128, device="cuda").bfloat16() for _ in range(3))
    expected = fagen.attention(q, k, v, causal=True)
    found, stream = [], torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # torch's allocator keeps two MiB for it, of which the output is: it breaks captures itself
        room = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()

    def call():
        with torch.cuda.stream(stream):
            found.append(fagen.attention(q, k, v, causal=True))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        captured = fagen.attention(q, k, v, causal=True)
        thread = Thread(target=call)  # which keeps zeros for a stream that had none
        thread.start()
        thread.join()
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected) and torch.equal(found[0], expected)
    del room


def test_first_calls_of_all_doors_from_eight_threads():
    head_dim = 112  # which no table has
    doors = [*DOORS.values()]
    given = [door.made(head_dim, "cuda") for door in doors]
    torch.cuda.synchronize()
    barrier, found, failed = Barrier(8), {}, []

    def work(number):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait()
                for i in range(len(doors)):
                    which = (i + 3 * number) % len(doors) if number % 2 else i
                    found[number, which] = doors[which].results(given[which])
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failed.append(error)

    by_threads(work, 8)
    assert not failed, failed
    for (_, which), results in found.items():
        assert_close(results, found[0, which])
    for which, door in enumerate(doors):
        assert_close(found[0, which], door.results(given[which]))


# ---- AOTInductor --------------------------------------------------------------------------------


def shared_runtime_of_cpp(folder):
    """A folder in which g++ finds the libstdc++ of this process, or LIBRARY_PATH as it is.

    Where it finds none but the static one, torch's model library has a second libstdc++ in it, and
    dies in std::regex when it is loaded, whatever the model is.
    """
    mapped = Path("/proc/self/maps").read_text()
    found = re.search(r"/\S*libstdc\+\+\.so\S*", mapped)
    places = [os.environ.get("LIBRARY_PATH", "")]
    if found:
        (folder / "libstdc++.so").symlink_to(found[0])
        places.insert(0, str(folder))
    return os.pathsep.join(filter(None, places))


def test_a_layer_that_aotinductor_packaged_runs_where_one_without_fagen_does(tmp_path):
    program = Path(__file__).parents[1] / "packaged_layer.py"
    environment = os.environ | {"LIBRARY_PATH": shared_runtime_of_cpp(tmp_path)}
    environment |= {"HOME": str(tmp_path)}  # where Triton writes to
    # fagen need not be installed
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for which in ("without", "with"):
        package = tmp_path / f"{which}.pt2"
        command = [sys.executable, "-X", "faulthandler", program, which, "cuda", package]
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=400, env=environment
        )
        if which == "without" and result.returncode < 0:
            pytest.skip(f"torch {torch.__version__} dies of signal {-result.returncode} by itself")
        assert result.returncode == 0, result.stderr[-3_000:]
