"""A search on a real dask.distributed cluster of several processes, one of which is killed."""

import importlib
import os
import signal
import threading
import time
from functools import partial

import pytest

from fagen import search
from fagen.errors import DeviceError, FagenError
from fagen.paths import locate
from fagen.search import replay
from fagen.search.cluster import ClusterExecutor
from fagen.search.run import Search
from fagen.search.store import Store
from tests.recordings import CARD, SPACE, AtOnce, Traffic, record, space

SEARCH = SPACE.replace('["full", "causal"]', '"full"') + "\n[search]\ncompile = 40\n"
_work = replay.work  # what stands in for compiler and GPU, at any pace


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A recording of one mask."""
    return record(tmp_path_factory.mktemp("recorded") / "recorded.sqlite", kernels=60, text=SEARCH)


@pytest.fixture(scope="module")
def address():
    """The scheduler's address of a cluster with two threads that compile, and two GPUs."""
    distributed = pytest.importorskip(
        "distributed", reason="dask.distributed is an extra: python -m pip install 'fagen[search]'"
    )
    scheduler = importlib.import_module("distributed.scheduler").Scheduler
    where = {"host": "127.0.0.1", "dashboard": False}

    def worker(name, count):
        options = {"nthreads": count, "resources": {name: count}, "silence_logs": 50, **where}
        return {"cls": distributed.Nanny, "options": options}

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(locate("cli.py").parent))
        with distributed.SpecCluster(
            workers={"cpu": worker("CPU", 2)} | {f"gpu{i}": worker("GPU", 1) for i in range(2)},
            scheduler={"cls": scheduler, "options": {"dashboard_address": ":0", **where}},
            silence_logs=50,
        ) as cluster:
            yield cluster.scheduler_address


def test_two_gpus_are_both_used_and_share_the_work(address, recorded, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:  # what one GPU would have to do
        patch.setattr(search, "LocalExecutor", AtOnce)
        single = Traffic().watch(patch, AtOnce)
        search.search([space(SEARCH)], tmp_path / "1.sqlite", recorded=recorded)
    both = Traffic().watch(monkeypatch, ClusterExecutor)
    monkeypatch.setattr(replay, "work", lambda path: _work(path, 0.03))
    store = tmp_path / "2.sqlite"
    outcome = search.search([space(SEARCH)], store, scheduler=address, recorded=recorded)
    assert outcome.card == CARD and all(tournament.done for tournament in outcome.tournaments)
    assert both.at_once == 2 and both.longest < 0.75 * single.longest
    names = [{x.target.name for x in search.found(tmp_path / f"{n}.sqlite")} for n in (1, 2)]
    assert names[0] == names[1]


def test_a_worker_that_is_killed_in_the_middle_costs_nothing_but_time(address, recorded, tmp_path):
    executor = ClusterExecutor(address, _work(recorded, 0.03))
    assert executor.compile_slots == 2 and executor.gpus == (0, 1)
    killed = []

    def kill_one():
        time.sleep(1.0)
        pids = executor._client.run(os.getpid, workers=executor._having("GPU")[:1])
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    began = time.monotonic()
    helper = threading.Thread(target=kill_one)
    helper.start()
    try:
        with Store(tmp_path / "found.sqlite") as store:
            only = partial(replay.only_recorded, recorded)
            Search([space(SEARCH)], executor, store, only=only).run()
        helper.join()
    finally:
        executor.close()
    assert killed and time.monotonic() - began > 1.0
    for result in search.found(tmp_path / "found.sqlite"):
        assert result.card == CARD[0]
        assert not result.wrong
        assert result.marks.slugs("long")


@pytest.mark.parametrize(
    ("resource", "error", "words"),
    [("GPU", DeviceError, 'no worker has --resources "GPU=1"'),
     ("CPU", FagenError, 'no worker has --resources "CPU=')],
)  # fmt: skip
def test_a_cluster_without_a_kind_of_worker_is_refused(
    address, recorded, monkeypatch, resource, error, words
):
    monkeypatch.setattr(ClusterExecutor, "_count", lambda self, name: int(name != resource))
    with pytest.raises(error, match=words):
        ClusterExecutor(address, _work(recorded))


def test_where_no_scheduler_answers_that_is_said(recorded, monkeypatch):
    pytest.importorskip("distributed", reason="dask.distributed is an extra")
    monkeypatch.setattr("fagen.search.cluster.CONNECT", 0.5)
    with pytest.raises(FagenError, match="no dask scheduler answers"):
        ClusterExecutor("tcp://127.0.0.1:9", _work(recorded))
