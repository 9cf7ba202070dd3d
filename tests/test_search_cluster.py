"""A search on a real dask.distributed cluster of several processes, one of which is killed."""

import importlib
import os
import signal
import threading
import time

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


@pytest.fixture
def cluster(monkeypatch):
    """Start a cluster: cluster(CPU threads, GPU workers) → scheduler's address."""
    distributed = pytest.importorskip(
        "distributed", reason="dask.distributed is an extra: python -m pip install 'fagen[search]'"
    )
    monkeypatch.setenv("PYTHONPATH", str(locate("cli.py").parent))
    started = []

    def start(cpus, gpus):
        scheduler = importlib.import_module("distributed.scheduler").Scheduler
        where = {"host": "127.0.0.1", "dashboard": False}

        def worker(name, count):
            options = {"nthreads": count, "resources": {name: count}, "silence_logs": 50, **where}
            return {"cls": distributed.Nanny, "options": options}

        workers = {"cpu": worker("CPU", cpus)} if cpus else {}
        workers |= {f"gpu{i}": worker("GPU", 1) for i in range(gpus)}
        made = distributed.SpecCluster(
            workers=workers,
            scheduler={"cls": scheduler, "options": {"dashboard_address": ":0", **where}},
            silence_logs=50,
        )
        started.append(made)
        return made.scheduler_address

    yield start
    for made in started:
        made.close()


def searched(address, recorded, store, pace, meanwhile=lambda executor: None):
    """Search on a cluster, and return what was found and how long it took."""
    executor = ClusterExecutor(address, _work(recorded, pace))
    began = time.monotonic()
    try:
        with Store(store) as kept:
            helper = threading.Thread(target=meanwhile, args=(executor,))
            helper.start()

            def only(survey):
                return replay.only_recorded(recorded, survey)

            Search([space(SEARCH)], executor, kept, only=only).run()
            helper.join()
    finally:
        executor.close()
    return search.found(store), time.monotonic() - began


def leaders(results):
    return {result.target.name: result.lead.slug for result in results}


def test_a_worker_that_is_killed_in_the_middle_costs_nothing_but_time(cluster, recorded, tmp_path):
    address = cluster(2, 2)
    killed = []

    def kill_one(executor):
        time.sleep(1.0)
        pids = executor._client.run(os.getpid, workers=executor._having("GPU")[:1])
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    found, took = searched(address, recorded, tmp_path / "found.sqlite", 0.03, kill_one)
    assert killed and took > 1.0
    for result in found:
        assert result.card == CARD[0]
        assert not result.wrong
        assert result.marks.slugs("long")


def test_two_gpus_are_both_used_and_share_the_work(cluster, recorded, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:  # what one GPU would have to do
        patch.setattr(search, "LocalExecutor", AtOnce)
        alone = Traffic().watch(patch, AtOnce)
        search.search([space(SEARCH)], tmp_path / "1.sqlite", recorded=recorded)
    both = Traffic().watch(monkeypatch, ClusterExecutor)
    found, _ = searched(cluster(4, 2), recorded, tmp_path / "2.sqlite", 0.03)
    assert both.at_once == 2 and both.longest < 0.75 * alone.longest
    assert leaders(found).keys() == leaders(search.found(tmp_path / "1.sqlite")).keys()


def test_the_command_works_on_a_cluster(cluster, recorded, tmp_path):
    address = cluster(2, 1)
    outcome = search.search(
        [space(SEARCH)], tmp_path / "found.sqlite", scheduler=address, recorded=recorded
    )
    assert outcome.card == CARD
    assert all(tournament.done for tournament in outcome.tournaments)


def test_a_cluster_without_a_kind_of_worker_is_refused(cluster, recorded):
    with pytest.raises(DeviceError, match='no worker has --resources "GPU=1"'):
        ClusterExecutor(cluster(1, 0), _work(recorded))
    with pytest.raises(FagenError, match='no worker has --resources "CPU='):
        ClusterExecutor(cluster(0, 1), _work(recorded))


def test_where_no_scheduler_answers_that_is_said(recorded, monkeypatch):
    pytest.importorskip("distributed", reason="dask.distributed is an extra")
    monkeypatch.setattr("fagen.search.cluster.CONNECT", 0.5)
    with pytest.raises(FagenError, match="no dask scheduler answers"):
        ClusterExecutor("tcp://127.0.0.1:9", _work(recorded))
