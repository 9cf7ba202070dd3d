"""Other programs: what they said, what they cost, when they do not end; and files written whole."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fagen.errors import ToolchainError
from fagen.paths import environment_with, write_whole
from fagen.process import run
from tests.process_helpers import is_running, pid_said, wait_until

ROOT = Path(__file__).parents[1]

BURN = "import time\nwhile time.process_time() < 0.3: pass"


def test_a_program_says_two_things_and_a_status():
    code = "import sys; print(sys.stdin.read()); print('no', file=sys.stderr); sys.exit(7)"
    result = run([sys.executable, "-c", code], input="ü" * 100_000)
    assert result.returncode == 7
    assert result.stdout == "ü" * 100_000 + "\n"
    assert result.stderr == "no\n"


def test_nothing_to_read_is_an_end_and_not_a_wait():
    assert run([sys.executable, "-c", "print(input())"], timeout=30).returncode == 1


def test_cpu_seconds_are_those_of_the_program_and_of_what_it_started():
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])"
    assert run([sys.executable, "-c", nested]).cpu_seconds >= 0.3


def test_cpu_seconds_are_not_those_of_a_neighbour():
    costs = {}

    def measure(name, code):
        costs[name] = run([sys.executable, "-c", code]).cpu_seconds

    busy = threading.Thread(target=measure, args=("busy", BURN))
    idle = threading.Thread(target=measure, args=("idle", "import time; time.sleep(0.8)"))
    for thread in (idle, busy):
        thread.start()
    for thread in (idle, busy):
        thread.join()
    assert costs["busy"] >= 0.3 > costs["idle"]


SLEEP = "echo $$ > {}; exec sleep 20"


def test_a_program_that_does_not_end_is_ended_with_all_that_it_started(tmp_path):
    """In its group of processes or not."""
    code = f"setsid sh -c '{SLEEP.format('apart')}' & sh -c '{SLEEP.format('beside')}'"
    with pytest.raises(ToolchainError, match=r"did not finish in 0\.8 s"):
        run(["sh", "-c", code], cwd=tmp_path, timeout=0.8)
    assert not any(is_running(pid_said(tmp_path / name)) for name in ("apart", "beside"))


def test_a_program_ends_with_whoever_ran_the_one_that_ran_it(tmp_path):
    code = f"from fagen.process import run; run(['sh', '-c', {SLEEP.format('pid')!r}])"
    outer = f"import sys; from fagen.process import run; run([sys.executable, '-c', {code!r}])"
    child = subprocess.Popen(
        [sys.executable, "-c", outer], cwd=tmp_path, env=environment_with({"PYTHONPATH": str(ROOT)})
    )
    pid = pid_said(tmp_path / "pid")
    child.kill()
    child.wait()
    wait_until(lambda: not is_running(pid))


def test_what_a_program_leaves_behind_on_purpose_stays(tmp_path):
    assert run(["sh", "-c", f"sh -c '{SLEEP.format('pid')}' &"], cwd=tmp_path).returncode == 0
    pid = pid_said(tmp_path / "pid")
    assert is_running(pid)
    os.kill(pid, signal.SIGKILL)


def test_what_cannot_be_started_is_named(tmp_path):
    with pytest.raises(ToolchainError, match="no-such-program: no such program"):
        run(["no-such-program"])
    with pytest.raises(ToolchainError, match="no folder"):
        run([sys.executable], cwd=tmp_path / "missing")
    with pytest.raises(ToolchainError, match="cannot be started"):
        run([tmp_path])


def test_variables_are_added_to_those_that_are_there():
    code = "import os; print(os.environ['FAGEN_ONE'], len(os.environ) > 1)"
    assert run([sys.executable, "-c", code], env={"FAGEN_ONE": "1"}).stdout == "1 True\n"


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def no_room(*_):
        raise OSError("no room")

    path = tmp_path / "kept.json"
    write_whole(path, "old")
    with monkeypatch.context() as full:
        full.setattr(Path, "replace", no_room)
        with pytest.raises(OSError, match="no room"):
            write_whole(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["kept.json"]
    link = tmp_path / "link.json"
    link.symlink_to(path)
    write_whole(link, b"new")
    assert link.is_symlink() and path.read_text() == "new"
