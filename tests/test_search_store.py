"""A search's memory: what is kept, who has claimed what, and what a sudden end leaves behind."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

import fagen
from fagen import search
from fagen.errors import FagenError
from fagen.paths import environment_with, locate
from fagen.problem import Problem, Sizes
from fagen.process import run
from fagen.search.rows import Session
from fagen.search.run import summary
from fagen.search.space import survey
from fagen.search.store import Store
from fagen.search.tasks import GOOD, Compiled, Time
from fagen.search.workers import ChildDied, Workers
from tests.process_helpers import is_running, pid_said, wait_until
from tests.recordings import SPACE, record, space, toml

TARGET = Problem("fp16", 128, 128, "full")
CARD = ("NVIDIA H200", "580.1")
SIZE = Sizes(1, 8, 8, 512, 512)
ROOT = locate("cli.py").parent


def compiled_as(slug="fwd_fp16_d128_full_m128n128", source="a"):
    return Compiled(slug, source, "nvcc 13.0", GOOD, "", 168, 0, 7.25)


def timed(slug="fwd_fp16_d128_full_m128n128", number=0, seconds=1e-3):
    return Time(slug, SIZE, "brief", number, seconds, 1e-3, 1_700)


# ---- what is kept --------------------------------------------------------------------------------


def test_what_is_put_in_comes_out(tmp_path):
    with Store(tmp_path / "s.sqlite") as store:
        store.put_compiled(TARGET, compiled_as(), "")
        store.put_timed(TARGET, CARD, {compiled_as().slug: "a"}, [timed()], [], [])
        store.put_timed(TARGET, CARD, {}, [timed("cudnn")], [], [])
        (compiled,) = store.compiled()
        assert (compiled.target, compiled.compiled) == (TARGET.name, compiled_as())
        ours, peer = store.timed()
        assert (ours.time, ours.source_hash, ours.card, ours.driver) == (timed(), "a", *CARD)
        assert (peer.time, peer.source_hash, peer.target) == (timed("cudnn"), "", TARGET.name)


def test_a_time_is_kept_once_for_each_source_card_driver_shape_and_round(tmp_path):
    slug = compiled_as().slug
    with Store(tmp_path / "s.sqlite") as store:
        for source, card, number in [
            ("a", CARD, 0),
            ("a", CARD, 0),
            ("b", CARD, 0),
            ("a", ("NVIDIA H100", "580.1"), 0),
            ("a", ("NVIDIA H200", "590.2"), 0),
            ("a", CARD, 1),
        ]:
            again = timed(number=number, seconds=2e-3 if source == "b" else 1e-3)
            store.put_timed(TARGET, card, {slug: source}, [again], [], [])
        assert len(store.timed()) == 5


def test_news_are_what_came_since(tmp_path):
    with Store(tmp_path / "s.sqlite") as store, Store(tmp_path / "s.sqlite") as other:
        store.put_compiled(TARGET, compiled_as(source="a"), "")
        last = max(row.number for row in other.compiled())
        store.put_compiled(TARGET, compiled_as(source="b"), "")
        assert [row.compiled.source_hash for row in other.compiled(last)] == ["b"]


def test_the_first_anchor_stays(tmp_path):
    with Store(tmp_path / "s.sqlite") as store:
        first, second = compiled_as().slug, f"{compiled_as().slug}_s3"
        assert store.put_anchor(TARGET, CARD, first) == first
        assert store.put_anchor(TARGET, CARD, second) == first


def test_a_store_in_which_nothing_is_yet_says_so(tmp_path):
    path = tmp_path / "new.sqlite"
    path.touch()
    with pytest.raises(FagenError, match="nothing is in this file yet"):
        Store(path, read_only=True)
    with Store(path) as store:
        assert not store.timed()


def test_a_store_of_another_layout_and_a_file_that_is_none_are_refused(tmp_path):
    with pytest.raises(FagenError, match="there is no such file"):
        Store(tmp_path / "none.sqlite", read_only=True)
    with pytest.raises(FagenError, match="there is no folder"):
        Store(tmp_path / "none" / "s.sqlite")
    (tmp_path / "text.sqlite").write_text("this is no database, whatever it is called")
    with pytest.raises(FagenError, match="this is no file of search results"):
        Store(tmp_path / "text.sqlite")
    Store(tmp_path / "old.sqlite").close()
    base = sqlite3.connect(tmp_path / "old.sqlite")
    base.execute("PRAGMA user_version = 99")
    base.close()
    with pytest.raises(FagenError, match="layout 99"):
        Store(tmp_path / "old.sqlite")


def test_the_days_of_searches_are_kept_in_order_and_the_first_note_of_a_day(tmp_path):
    with Store(tmp_path / "s.sqlite") as store:
        store.put_session(Session(date="2026-11-21", version="0.1.0"))
        store.put_session(Session(date="2026-11-20", version="0.1.0", note="the first"))
        store.put_session(Session(date="2026-11-21", version="0.1.0", note="what is known stays"))
        assert store.sessions() == (
            Session(date="2026-11-20", version="0.1.0", note="the first"),
            Session(date="2026-11-21", version="0.1.0"),
        )


def test_a_search_keeps_its_day_and_a_replay_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "_executor", lambda *args: nullcontext())
    searched = SimpleNamespace(run=lambda: "searched")
    monkeypatch.setattr(search, "Search", lambda *args, **how: searched)
    for name, recorded in (("real", None), ("replayed", tmp_path / "recorded.sqlite")):
        assert search.search([], tmp_path / name, recorded=recorded) == "searched"
    with Store(tmp_path / "replayed", read_only=True) as store:
        assert store.sessions() == ()
    with Store(tmp_path / "real", read_only=True) as store:
        (session,) = store.sessions()
    assert session.version == fagen.__version__ and session.note == ""
    now = datetime.now(UTC)  # it may have become another day by now
    assert session.date in {str(day.date()) for day in (now, now - timedelta(minutes=1))}


def test_a_closed_store_is_one_file_and_can_be_read_where_nothing_can_be_written(tmp_path):
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.put_compiled(TARGET, compiled_as(), "")
        assert (tmp_path / "s.sqlite-wal").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["s.sqlite"]
    with Store(path, read_only=True) as store:
        assert len(store.compiled()) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["s.sqlite"]


def test_weights_are_kept_beside_the_sizes(tmp_path):
    declared = space(SPACE.replace("seqlen = 2048", "seqlen = 2048\nweight = 3.0"))
    target = declared.targets()[0]
    with Store(tmp_path / "s.sqlite") as store:
        store.put_survey(target, summary(survey(declared, target), declared))
    (result,) = search.found(tmp_path / "s.sqlite")
    assert (result.target, result.kind, result.sizes) == (target, "forward", declared.sizes(target))
    assert result.marks.weights == pytest.approx((0.2, 0.6, 0.2))


# ---- claims --------------------------------------------------------------------------------------


def test_a_job_is_claimed_by_one_at_a_time(tmp_path):
    with Store(tmp_path / "s.sqlite") as store, Store(tmp_path / "s.sqlite") as other:
        assert store.claim("compile x")
        assert store.claim("compile x")  # it is still ours
        assert not other.claim("compile x")
        store.put_compiled(TARGET, compiled_as(), "compile x")  # a result gives its claim up
        assert other.claim("compile x")
        store.claim("time x")
        store.put_timed(TARGET, CARD, {compiled_as().slug: "a"}, [timed()], [], ["time x"])
        assert other.claim("time x")


def test_claims_end_with_the_process_however_it_ends(tmp_path):
    path = tmp_path / "s.sqlite"
    code = (
        "import os, signal, sys; from pathlib import Path; from fagen.search.store import Store\n"
        "store = Store(Path(sys.argv[1])); store.claim('compile x')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = run([sys.executable, "-c", code, path], cwd=ROOT)
    assert result.returncode == -signal.SIGKILL, result.stderr
    with Store(path) as store:
        assert store.claim("compile x")
    assert [file.name for file in tmp_path.iterdir()] == ["s.sqlite"]


# ---- child processes -----------------------------------------------------------------------------


@pytest.fixture
def workers():
    workers = Workers(1)
    yield workers
    workers.close()


def test_a_child_that_dies_fails_its_own_task_alone(workers):
    with pytest.raises(ChildDied, match="status -9"):
        workers.submit(_die).result(30)
    assert workers.submit(os.path.basename, "a/b").result(30) == "b"
    with pytest.raises(ZeroDivisionError):  # what a task raises is raised here
        workers.submit(divmod, 1, 0).result(30)


def test_a_child_that_takes_too_long_is_ended(workers):
    began = time.monotonic()
    with pytest.raises(ChildDied, match="took longer"):
        workers.submit(time.sleep, 60, timeout=0.2).result(30)
    assert time.monotonic() - began < 20


def test_a_child_ends_with_its_parent_and_so_does_the_program_that_it_runs(tmp_path):
    code = (
        "from fagen.process import run; from fagen.search.workers import Workers\n"
        "Workers(1).submit(run, ['sh', '-c', 'echo $$ > pid; sleep 20; true']).result()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment_with({"PYTHONPATH": str(ROOT)})
    )
    pid = pid_said(tmp_path / "pid")
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_running(pid))


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


# ---- a sudden end, and two at once ---------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A recording of one mask."""
    text = SPACE.replace('["full", "causal"]', '"full"')
    return record(tmp_path_factory.mktemp("recorded") / "recorded.sqlite", kernels=70, text=text)


PROGRAM = """
import os, sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from fagen import search
from fagen.search import replay

def logged(log, work, task, gpu):
    with open(log, "a") as file:
        for made in task.kernels:
            for size in task.sizes:
                for number in task.repeats:
                    print(made.source_hash, size, task.regime, number, sep=";", file=file)
    return work(task, gpu)

if __name__ == "__main__":
    space, store, recorded, pace, log = sys.argv[1:]
    Path(store + ".pid").write_text(str(os.getpid()))
    paced = replay.work(recorded, pace=float(pace))
    replay.work = lambda recorded: replace(paced, time=partial(logged, log, paced.time))
    search.search([search.read_spaces(space)[0]], Path(store), recorded=Path(recorded), jobs=1)
"""


@pytest.fixture
def program(tmp_path, recorded):
    """How to start a search of its own over the recording: (store, pace, log) → words."""
    (tmp_path / "program.py").write_text(PROGRAM)
    text = SPACE.replace('["full", "causal"]', '"full"') + toml(search={"compile": 30})
    (tmp_path / "space.toml").write_text(text)

    def start(store, pace, log):
        files = [tmp_path / "program.py", tmp_path / "space.toml", store, recorded]
        words = [sys.executable, *files, str(pace), log]
        return run(words, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})

    return start


def rows(path):
    """Return every time of a kernel that a store has, as the log tells them apart."""
    try:
        with Store(path, read_only=True) as store:
            return {
                f"{row.source_hash};{row.time.size};{row.time.regime};{row.time.repeat}"
                for row in store.timed()
                if row.source_hash
            }
    except FagenError:  # it is not there yet, or nothing is in it yet
        return set()


def test_killed_at_any_moment_a_search_goes_on_and_measures_nothing_again(program, tmp_path):
    store = tmp_path / "killed.sqlite"
    kept = set()
    with ThreadPoolExecutor(1) as pool:
        for more in (12, 90):
            log = tmp_path / f"{more}.log"
            ended = pool.submit(program, store, 0.02, log)
            while not ended.done() and len(rows(store)) < len(kept) + more:
                time.sleep(0.05)
            assert not ended.done(), ended.result()
            os.kill(int((tmp_path / "killed.sqlite.pid").read_text()), signal.SIGKILL)
            assert ended.result().returncode == -signal.SIGKILL
            assert kept < rows(store)
            assert not kept & set(log.read_text().splitlines())
            kept = rows(store)
    calm = program(store, 0, tmp_path / "calm.log")
    assert calm.returncode == 0, calm.stderr
    assert kept < rows(store)
    assert not kept & set((tmp_path / "calm.log").read_text().splitlines())
    for result in search.found(store):
        assert result.marks.slugs("long")
    assert no_claims(store)
    assert {file.name for file in tmp_path.glob("killed*")} == {
        "killed.sqlite",
        "killed.sqlite.pid",
    }


def no_claims(path):
    base = sqlite3.connect(path)
    left = base.execute("SELECT count(*) FROM claim").fetchone()
    base.close()
    return left == (0,)


def test_two_processes_share_a_store_and_neither_does_the_others_work(program, tmp_path):
    store, logs = tmp_path / "shared.sqlite", [tmp_path / "a.log", tmp_path / "b.log"]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda log: program(store, 0.02, log), logs))
    assert [answer.returncode for answer in answers] == [0, 0], answers
    measured = [line for log in logs for line in log.read_text().splitlines()]
    assert all(log.exists() for log in logs)
    assert len(measured) == len(set(measured))
    assert set(measured) == rows(store)
    for result in search.found(store):
        assert result.lead is not None
        assert result.marks.slugs("long")
    assert no_claims(store)
