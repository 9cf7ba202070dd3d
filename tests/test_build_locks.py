"""File systems without locks, and several machines on one cache."""

import errno
import fcntl
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fagen.build import cache_entries, locks, prune
from fagen.build.locks import has_locks, is_abandoned, new_making
from fagen.build.records import Record
from tests.cli_helpers import finding_of
from tests.scripted_compilers import fill, made

DAY = 86_400


def age(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (time.time() - 2 * DAY,) * 2)


# ---- locks ---------------------------------------------------------------------------------------


@pytest.fixture
def no_locks(cache, monkeypatch, request):
    """No file below the cache has locks; those elsewhere have."""
    monkeypatch.setattr(locks.tempfile, "tempdir", str(cache.parents[1]))
    locked = fcntl.flock

    def flock(descriptor: int, how: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(cache.parent):
            raise OSError(request.param, os.strerror(request.param))
        locked(descriptor, how)

    monkeypatch.setattr(locks.fcntl, "flock", flock)


WORDS = [errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS]


@pytest.mark.parametrize("no_locks", WORDS, indirect=True)
def test_without_locks_a_kernel_is_made_and_once_by_the_threads_of_a_machine(cache, no_locks):
    runs = []

    def slowly(making: Path, kept: Path) -> Record:
        runs.append(making)
        time.sleep(0.05)
        return fill(making)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: made(make=slowly), range(4)))
    assert len(runs) == 1 and made() is True
    assert not has_locks(cache)
    finding = finding_of("cache folder")
    assert finding.ok and "has no locks" in finding.found
    assert [entry.name for entry in prune(everything=True)] == ["fwd_x"]


@pytest.mark.parametrize("no_locks", [errno.ENOTSUP], indirect=True)
def test_without_any_locks_each_makes_its_own_and_the_first_to_finish_is_taken(
    cache, no_locks, monkeypatch, tmp_path
):
    monkeypatch.setattr(locks.tempfile, "gettempdir", lambda: str(tmp_path / "not there"))
    others = []

    def overtaken(making: Path, kept: Path) -> Record:
        others.append(made())  # as another machine may, meanwhile
        return fill(making)

    assert made(make=overtaken) is True and others == [False]
    assert [entry.state for entry in cache_entries()] == ["finished"]
    assert not list(cache.glob("*.making-*"))


# ---- several machines ----------------------------------------------------------------------------


def test_what_another_machine_is_making_stays_until_nothing_changed_for_a_day(cache, monkeypatch):
    cache.mkdir(parents=True)
    monkeypatch.setattr(locks, "_machine", lambda: "0123456789ab")
    theirs = new_making(cache / "fwd_x")
    fill(theirs)
    monkeypatch.undo()
    monkeypatch.setenv("FAGEN_CACHE", str(cache.parent))
    assert made() is False and prune(everything=True) and theirs.is_dir()  # fwd_x alone is gone
    age(theirs, theirs / "x.so")
    (theirs / "y.ptx").write_text("still at work")
    assert made() is False and prune(everything=True) and theirs.is_dir()
    age(*theirs.iterdir(), theirs)
    assert made() is False and not theirs.exists()


def test_of_this_machine_its_process_is_asked_for(cache):
    cache.mkdir(parents=True)
    code = (
        "from pathlib import Path; import sys; from fagen.build.locks import new_making\n"
        "print(new_making(Path(sys.argv[1])), flush=True); sys.stdin.read()"
    )
    root = Path(__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(cache / "fwd_x")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root,
    ) as child:  # fmt: skip
        assert child.stdout
        making = Path(child.stdout.readline().strip())
        assert not is_abandoned(making) and prune() == ()
        child.communicate()
    assert is_abandoned(making)
    reused = making.with_name(making.name.replace(f"-{child.pid}-", f"-{os.getpid()}-"))
    making.rename(reused)
    assert is_abandoned(reused)  # this process has begun at another time
    assert [entry.state for entry in prune()] == ["unfinished"] and not list(cache.iterdir())


@pytest.mark.parametrize("name", ["", "a", "0123456789ab-x-y-z", "-1-2-", "gone", "9" * 40])
def test_a_folder_of_any_other_name_is_left_for_a_day(cache, name):
    making = cache / f"fwd_x.making-{name}"
    making.mkdir(parents=True)
    assert not is_abandoned(making)
    age(making)
    assert is_abandoned(making)
