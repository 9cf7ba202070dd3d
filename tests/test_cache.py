"""The folder of built kernels: whose it must be, what prune does in it, many processes at once."""

import json
import multiprocessing
import os
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fagen.build import cache_entries, prune, store
from fagen.errors import BuildError, CacheError
from fagen.search import tasks
from fagen.search.tasks import GOOD, Compiled
from tests.cli_helpers import fagen, finding_of
from tests.scripted_compilers import fill, made

NOBODY = 65_534


# ---- what others could have put there -----------------------------------------------------------


def move_behind_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def let_write(who: int) -> Callable[[Path], None]:
    return lambda path: path.chmod(path.stat().st_mode | who)


def give_away(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(path, NOBODY, -1)


let_others_write = let_write(0o002)
HARMS = {
    "link": (move_behind_a_link, "is a symbolic link", "remove it: rm {}"),
    "others": (let_others_write, r"may be written by others \(mode 0(757|646)\)", "go-w {}"),
    "group": (let_write(0o020), r"may be written by others \(mode 0(775|664)\)", "go-w {}"),
    "owner": (give_away, "belongs to (nobody|user 65534)", "rm -rf {}"),
}
PLACES = (".", "kernels", "kernels/fwd_x", "kernels/fwd_x/x.so", "kernels/fwd_x/record.json")


@pytest.mark.parametrize(
    ("where", "harm"),
    [(where, harm) for where in PLACES for harm in HARMS if (where, harm) != (".", "link")],
)
def test_what_others_could_have_put_there_is_not_taken_but_named(
    cache: Path, where: str, harm: str
) -> None:
    assert (made(), made()) == (False, True)
    do, why, remedy = HARMS[harm]
    path = cache.parent / where
    do(path)
    with pytest.raises(CacheError) as refused:
        made()
    message = str(refused.value)
    assert re.search(rf"yours alone: {re.escape(str(path))} ({why})", message), message
    assert remedy.format(shlex.quote(str(path))) in message
    finding = finding_of("cache folder")
    assert not finding.ok and finding.found.startswith(f"{path} ")
    assert remedy.format(shlex.quote(str(path))) in finding.remedy


def test_what_to_do_is_what_helps(cache: Path) -> None:
    made()
    let_write(0o020)(cache / "fwd_x")
    let_others_write(cache / "fwd_x/x.so")
    with pytest.raises(CacheError) as refused:
        made()
    command = str(refused.value).rpartition(": ")[2]
    os.system(command)
    assert made() is True


def test_the_cache_itself_may_lie_behind_a_link(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    cache.parent.symlink_to(tmp_path / "large disk")
    assert made() is False and made() is True
    assert (tmp_path / "large disk/kernels/fwd_x/x.so").exists()
    assert [entry.state for entry in cache_entries()] == ["finished"]


def test_what_root_has_put_there_is_taken(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid():
        pytest.skip("only root leaves what root owns")
    made()
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    assert made() is True


def test_nobody_else_may_write_what_is_made_whatever_the_umask_allows(cache: Path) -> None:
    usual = os.umask(0o002)
    try:
        made()
        with pytest.raises(BuildError):
            made("fwd_y", fail)
    finally:
        os.umask(usual)
    assert (cache / "fwd_y.failed/log").exists()
    for path in (cache.parent, *cache.parent.rglob("*")):
        assert not path.stat().st_mode & 0o022, path
    assert made() is True


def fail(making: Path, kept: Path) -> store.Record:
    (making / "log").write_text("error")
    raise BuildError("no")


def test_a_lock_that_is_a_link_is_not_followed(cache: Path, tmp_path: Path) -> None:
    cache.mkdir(parents=True)
    store.lock_of(cache / "fwd_x").symlink_to(tmp_path / "made through it")
    with pytest.raises(BuildError, match=r"fwd_x\.lock is a symbolic link(.|\n)*rm .*fwd_x\.lock"):
        made()
    assert not (tmp_path / "made through it").exists()
    (cache / "fwd_x").mkdir()  # broken, and its lock is no lock
    assert {entry.name for entry in prune()} == {"fwd_x", "fwd_x.lock"}
    assert made() is False


def test_a_kernel_that_travelled_is_not_taken_from_others(cache: Path) -> None:
    sent = Compiled("fwd_x", "a", "nvcc", GOOD, "", 168, 0, 1.0, packed=b"x\x9cK\x04\x00\x00b\x00b")
    path = tasks._library(sent)
    assert tasks._library(sent) == path and path.read_bytes() == b"a"
    let_others_write(path.parent)
    with pytest.raises(CacheError, match="yours alone"):
        tasks._library(sent)


def test_a_search_does_not_hold_the_cache_against_a_kernel(cache: Path) -> None:
    cache.mkdir(parents=True)
    let_others_write(cache)
    with pytest.raises(CacheError, match="yours alone"):
        tasks.compile_kernel("fwd_fp16_d128_full_m128n128")


# ---- links, and prune ---------------------------------------------------------------------------


def test_prune_removes_links_and_never_what_they_lead_to(cache: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "inside").mkdir(parents=True)
    (mine / "file").write_text("kept")
    whole, linked = cache / "fwd_whole", cache / "fwd_linked"
    made("fwd_whole")
    made("fwd_linked")
    (linked / "to a file").symlink_to(mine / "file")
    (linked / "to a folder").symlink_to(mine)
    (linked / "to itself").symlink_to(linked)
    for name in ("fwd_a", "fwd_b.failed", "fwd_c.making-gone", "fwd_linked.making-gone"):
        (cache / name).symlink_to(mine)
    (cache / "fwd_d").symlink_to("nowhere")
    states = {entry.name: entry.state for entry in cache_entries()}
    assert states.pop("fwd_whole") == "finished"
    assert set(states.values()) == {"foreign"} and len(states) == 6
    rows = json.loads(fagen("cache", "prune", "--json").output)
    beside = {"fwd_linked.making-gone"}  # which may go with its folder
    assert {row["kernel"] for row in rows} | beside == set(states)
    assert [entry.folder for entry in cache_entries()] == [whole]
    assert (mine / "file").read_text() == "kept" and (mine / "inside").is_dir()
    assert [entry.folder for entry in prune(everything=True)] == [whole]
    assert not any(path.is_dir() or path.is_symlink() for path in cache.iterdir())


def test_prune_does_not_follow_the_folder_of_kernels_elsewhere(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "mine" / "inside").mkdir(parents=True)
    cache.parent.mkdir()
    cache.symlink_to(tmp_path / "mine")
    for command in (("cache", "prune", "--all"), ("cache", "list")):
        answer = fagen(*command)
        assert answer.exit_code == 4 and f"rm {shlex.quote(str(cache))}" in answer.stderr
    assert (tmp_path / "mine" / "inside").is_dir()


def test_names_that_others_gave_are_shown_escaped(cache: Path) -> None:
    (cache / "fwd_\x07").mkdir(parents=True)
    assert "\x07" not in fagen("cache", "list").output
    let_others_write(cache / "fwd_\x07")
    assert "\x07" not in fagen("doctor").output


# ---- many at once -------------------------------------------------------------------------------


def build_and_prune(number: int, log: Path, together: Any, faults: Any) -> None:
    """In one process of several: half of them make the same folders, all prune all the time."""

    def make_slowly(making: Path, kept: Path) -> store.Record:
        with log.open("a") as file:
            file.write(f"{making.name.partition('.')[0]}\n")
        time.sleep(0.002)
        return fill(making)

    together.wait()
    for turn in range(30):
        try:
            if number % 2:
                made(f"fwd_{turn}", make_slowly)
            prune()
        except Exception as error:
            faults.put(str(error))


def test_six_processes_that_build_and_prune_the_same_kernels_do_not_disturb_each_other(
    cache: Path, tmp_path: Path
) -> None:
    fork = multiprocessing.get_context("fork")  # six times the imports would take seconds
    together, faults, log = fork.Barrier(6), fork.SimpleQueue(), tmp_path / "made"
    processes = [
        fork.Process(target=build_and_prune, args=(number, log, together, faults))
        for number in range(6)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert faults.empty(), faults.get()
    assert sorted(log.read_text().split()) == sorted(f"fwd_{turn}" for turn in range(30))
    assert {entry.state for entry in cache_entries()} == {"finished"}
