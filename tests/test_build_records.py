"""Records of finished folders that were cut, made up or meant to harm: read as none, quickly."""

import inspect
import json
import os
import random
import resource
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fagen.build import cache_entries, prune, records, store
from fagen.build.records import RECORD, Record, read_record, write_record
from fagen.build.report import CompilerReport
from fagen.decoding import decoded
from fagen.sass import MachineCode
from tests.cli_helpers import fagen

LIBRARY = "fwd_x.so"
MACHINE = MachineCode("k", 2, {"HGMMA": 1}, 168, 160, None, 0, (160,), (24,), "0" * 64)
REPORT = CompilerReport(168, 2, 0, 0, 0, ("a remark",), MACHINE)
WHOLE = Record(LIBRARY, {"g++": "12.2.0"}, {"g++": "0" * 64}, {"PATH": "/bin"}, 1.5, REPORT)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/kernels"


def fill(folder: Path) -> Record:
    """Fill a folder as a build does; the record has all that one may have."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LIBRARY).write_text("machine code")
    return WHOLE


def finished(folder: Path) -> dict[str, Any]:
    write_record(folder, fill(folder))
    said: dict[str, Any] = json.loads((folder / RECORD).read_text())
    return said


def test_what_was_written_is_read(cache):
    finished(cache)
    found = read_record(cache)
    assert found and replace(found, files=None) == WHOLE
    assert found.files and list(found.files) == [LIBRARY]
    write_record(cache, replace(WHOLE, report=None))
    assert read_record(cache)


def set_at(record: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    record[path[0]] = set_at(record[path[0]], path[1:], value)
    return record


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else ()
    return [path, *(found for key, inner in items for found in paths_in(inner, (*path, key)))]


ODD = [None, True, -1, 1 << 70, 1e999, "\x1b[2J", [], {"a": 1}, ["/dev/zero"]]
MAY_BE_NONE = {("report",), ("report", "machine")}


def test_no_field_may_be_of_another_type_or_missing_or_odd(cache):
    text = json.dumps(finished(cache))
    for path in paths_in(json.loads(text)):
        for odd in [*ODD, "gone"]:
            said = json.loads(text)
            if odd == "gone" and path:
                inner = said
                for key in path[:-1]:
                    inner = inner[key]
                del inner[path[-1]]
            else:
                said = set_at(said, path, odd)
            (cache / RECORD).write_text(json.dumps(said))
            found = read_record(cache)  # and raises nothing
            if found:  # it is one, with other contents
                assert decoded(Record, json.loads(json.dumps(asdict(found)))) == found
                assert found.files and found.library in found.files


NAMES = ("/dev/zero", "../fwd_x.so", ".", "..", "a/b", "fifo", "link", "a\0b", "\ud800", "", "sub")


@pytest.mark.parametrize("name", NAMES)
def test_a_record_names_regular_files_of_its_folder_and_nothing_else(cache, name):
    said = finished(cache)
    os.mkfifo(cache / "fifo")
    (cache / "link").symlink_to(LIBRARY)
    (cache / "sub").mkdir()
    said["files"][name] = said["files"][LIBRARY]
    (cache / RECORD).write_text(json.dumps(said))
    assert read_record(cache) is None


def deep(folder: Path) -> None:
    (folder / RECORD).write_text('{"files":' + "[" * 100_000 + "]" * 100_000 + "}")


def huge(folder: Path) -> None:
    with (folder / RECORD).open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk


def huge_file(folder: Path) -> None:
    with (folder / LIBRARY).open("wb") as file:
        file.truncate(1 << 40)


def fifo(folder: Path) -> None:
    (folder / RECORD).unlink()
    os.mkfifo(folder / RECORD)


def directory(folder: Path) -> None:
    (folder / RECORD).unlink()
    (folder / RECORD).mkdir()


def no_files(folder: Path) -> None:
    said = json.loads((folder / RECORD).read_text())
    (folder / RECORD).write_text(json.dumps({**said, "files": {}}))


def no_report(folder: Path) -> None:
    write_record(folder, replace(WHOLE, report=None))


def another_library(folder: Path) -> None:
    (folder / "other.so").write_text("not what was asked for")
    write_record(folder, replace(WHOLE, library="other.so"))


def long_number(folder: Path) -> None:
    (folder / RECORD).write_text('{"cpu_seconds": ' + "9" * 100_000 + "}")


def not_text(folder: Path) -> None:
    (folder / RECORD).write_bytes(b'\xff\xfe{"files": {}}')


HARMS = (deep, huge, huge_file, fifo, directory, no_files, no_report)
HARMS += (another_library, long_number, not_text)


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_a_bad_entry_is_one_line_and_is_built_again_or_removed(cache, harm):
    folder = cache / "fwd_x-0123456789abcdef"

    def make() -> bool:
        lock = store.lock_of(folder)
        return store.place(folder, LIBRARY, fill, lock=lock, reported=True)[1]

    assert make() is False and make() is True
    harm(folder)
    began = time.process_time()
    listed = fagen("cache", "list")
    assert listed.exit_code == 0 and len(listed.output.splitlines()) == 3
    assert make() is False and make() is True
    harm(folder)
    pruned = fagen("cache", "prune", "--all")
    assert pruned.exit_code == 0 and not folder.exists()
    assert cache_entries() == () and time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # KiB


def test_folders_nested_deeper_than_python_follows_are_removed_too(cache):
    inner = cache / "fwd_x"
    for _ in range(300):
        inner.mkdir(parents=True)
        inner /= "d"
    limit, frames = sys.getrecursionlimit(), len(inspect.stack(0))
    sys.setrecursionlimit(frames + 200)  # as the usual one is for a thousand folders
    try:
        assert [entry.state for entry in prune()] == ["broken"]
    finally:
        sys.setrecursionlimit(limit)
    assert not (cache / "fwd_x").exists()


def test_a_record_that_is_a_link_is_not_read_and_goes_with_its_folder(cache):
    finished(cache / "fwd_x")
    (cache / "fwd_x" / RECORD).unlink()
    (cache / "fwd_x" / RECORD).symlink_to("/dev/zero")
    assert read_record(cache / "fwd_x") is None
    assert [entry.state for entry in prune()] == ["foreign"]


def test_what_is_no_folder_is_removed_and_no_lock_is_waited_for(cache):
    cache.mkdir(parents=True)
    for name in ("fwd_a", "fwd_b.lock"):
        os.mkfifo(cache / name)
    folder = cache / "fwd_b"
    with pytest.raises(store.CacheError, match=r"fwd_b\.lock"):
        store.place(folder, LIBRARY, fill, lock=store.lock_of(folder))
    assert {entry.name for entry in prune()} == {"fwd_a", "fwd_b.lock"}
    assert store.place(folder, LIBRARY, fill, lock=store.lock_of(folder))[1] is False


def test_hundreds_of_records_with_bytes_changed_are_read_without_an_error(cache):
    finished(cache)
    text = (cache / RECORD).read_bytes()
    draw = random.Random(1)
    for _ in range(150):
        changed = bytearray(text)
        for _ in range(draw.randint(1, 8)):
            at = draw.randrange(len(changed))
            how = draw.randrange(3)
            if how == 0:
                changed[at] = draw.randrange(256)
            elif how == 1:
                del changed[at : at + draw.randrange(40)]
            else:
                changed[at:at] = draw.choice([b"[", b"{", b'"', b"null", b"1e999", b"\\ud800"])
        (cache / RECORD).write_bytes(changed)
        found = read_record(cache)
        assert found is None or isinstance(found, Record)


def test_one_entry_that_cannot_be_removed_keeps_no_other(cache, monkeypatch):
    for name in ("fwd_a", "fwd_b", "fwd_c"):
        folder = cache / name
        store.place(folder, LIBRARY, fill, lock=store.lock_of(folder))
    delete = store._delete

    def fail(folder: Path) -> None:
        if "fwd_b" in folder.name:
            raise PermissionError(13, "Permission denied", str(folder))
        delete(folder)

    monkeypatch.setattr(store, "_delete", fail)
    with pytest.raises(store.CacheError, match=r"fwd_b.*Permission denied"):
        prune(everything=True)
    assert {entry.name.partition(".")[0] for entry in cache_entries()} == {"fwd_b"}
    assert records.RECORD == RECORD
