"""Records of finished folders that were cut, made up or meant to harm: read as none, quickly."""

import inspect
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fagen.build import cache_entries, prune, store
from fagen.build.records import RECORD, Record, read_record, write_record
from fagen.build.report import CompilerReport
from fagen.decoding import decoded
from fagen.sass import MachineCode
from tests import scripted_compilers
from tests.cli_helpers import fagen
from tests.scripted_compilers import made

LIBRARY = "x.so"
MACHINE = MachineCode("k", 2, {"HGMMA": 1}, 168, 160, None, 0, (160,), (24,), "0" * 64)
REPORT = CompilerReport(168, 2, 0, 0, 0, ("a remark",), MACHINE)
WHOLE = Record(LIBRARY, {"g++": "12.2.0"}, {"g++": "0" * 64}, {"PATH": "/bin"}, 1.5, REPORT)


def fill(folder: Path, kept: Path | None = None) -> Record:
    """Fill a folder as a build does; the record has all that one may have."""
    scripted_compilers.fill(folder)
    return WHOLE


def finished(folder: Path) -> dict[str, Any]:
    write_record(folder, fill(folder))
    fields: dict[str, Any] = json.loads((folder / RECORD).read_text())
    return fields


def test_what_was_written_is_read(cache):
    finished(cache)
    record = read_record(cache)
    assert record and replace(record, files=None) == WHOLE
    assert record.files and list(record.files) == [LIBRARY]
    write_record(cache, replace(WHOLE, report=None))
    assert read_record(cache)


def set_at(record: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The record with another value at a path, or without one where that is GONE."""
    if not path:
        return value
    if value == GONE and len(path) == 1:
        del record[path[0]]
    else:
        record[path[0]] = set_at(record[path[0]], path[1:], value)
    return record


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else ()
    return [path, *(inner for key, value in items for inner in paths_in(value, (*path, key)))]


GONE = "gone"
ODD = [None, True, -1, 1 << 70, 1e999, "\x1b[2J", [], {"a": 1}, ["/dev/zero"], GONE]


def test_no_field_may_be_of_another_type_or_missing_or_odd(cache):
    text = json.dumps(finished(cache))
    for path in paths_in(json.loads(text)):
        for odd in ODD:
            (cache / RECORD).write_text(json.dumps(set_at(json.loads(text), path, odd)))
            record = read_record(cache)  # and raises nothing
            if record:  # it is one, with other contents
                assert decoded(Record, json.loads(json.dumps(asdict(record)))) == record
                assert record.files and record.library in record.files


NAMES = ("/dev/zero", "../x.so", ".", "..", "a/b", "fifo", "link", "a\0b", "\ud800", "", "sub")


@pytest.mark.parametrize("name", NAMES)
def test_a_record_names_regular_files_of_its_folder_and_nothing_else(cache, name):
    fields = finished(cache)
    os.mkfifo(cache / "fifo")
    (cache / "link").symlink_to(LIBRARY)
    (cache / "sub").mkdir()
    fields["files"][name] = fields["files"][LIBRARY]
    (cache / RECORD).write_text(json.dumps(fields))
    assert read_record(cache) is None


Harm = Callable[[Path], object]


def says(text: str | bytes) -> Harm:
    """Have a folder's record say something else."""
    content = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / RECORD).write_bytes(content)


def cut(name: str) -> Harm:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def huge(name: str) -> Harm:
    """It takes no room on the disk."""
    return lambda folder: os.truncate(folder / name, 1 << 40)


def instead(make: Callable[[Path], None]) -> Harm:
    """Have something stand where a folder's record should."""

    def harm(folder: Path) -> None:
        (folder / RECORD).unlink()
        make(folder / RECORD)

    return harm


def no_files(folder: Path) -> None:
    fields = json.loads((folder / RECORD).read_text())
    (folder / RECORD).write_text(json.dumps({**fields, "files": {}}))


def another_library(folder: Path) -> None:
    (folder / "other.so").write_text("not what was asked for")
    write_record(folder, replace(WHOLE, library="other.so"))


HARMS: dict[str, Harm] = {
    "deep": says('{"files":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "another": says("[]"),
    "a long number": says('{"cpu_seconds": ' + "9" * 100_000 + "}"),
    "no text": says(b'\xff\xfe{"files": {}}'),
    "cut": cut(RECORD),
    "library cut": cut(LIBRARY),
    "library gone": lambda folder: (folder / LIBRARY).unlink(),
    "huge": huge(RECORD),
    "huge library": huge(LIBRARY),
    "fifo": instead(os.mkfifo),
    "folder": instead(Path.mkdir),
    "no files": no_files,
    "no report": lambda folder: write_record(folder, replace(WHOLE, report=None)),
    "another library": another_library,
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_bad_entry_is_one_line_and_is_built_again_or_removed(cache, harm):
    slot = store.Slot(cache / "fwd_x-0123456789abcdef", LIBRARY, reported=True)

    def make() -> bool:
        return slot.filled(fill)[1]

    assert make() is False and make() is True
    HARMS[harm](slot.folder)
    began = time.process_time()
    listed = fagen("cache", "list")
    assert listed.exit_code == 0 and len(listed.output.splitlines()) == 3
    assert make() is False and make() is True
    assert slot.path.read_text() == "machine code"
    assert [entry.state for entry in cache_entries()] == ["finished"]
    HARMS[harm](slot.folder)
    pruned = fagen("cache", "prune", "--all")
    assert pruned.exit_code == 0 and not slot.folder.exists()
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
    instead(lambda path: path.symlink_to("/dev/zero"))(cache / "fwd_x")
    assert read_record(cache / "fwd_x") is None
    assert [entry.state for entry in prune()] == ["foreign"]


def test_what_is_no_folder_is_removed_and_no_lock_is_waited_for(cache):
    cache.mkdir(parents=True)
    for name in ("fwd_a", "fwd_b.lock"):
        os.mkfifo(cache / name)
    with pytest.raises(store.CacheError, match=r"fwd_b\.lock"):
        made("fwd_b")
    assert {entry.name for entry in prune()} == {"fwd_a", "fwd_b.lock"}
    assert made("fwd_b") is False


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
        record = read_record(cache)
        assert record is None or isinstance(record, Record)


def test_one_entry_that_cannot_be_removed_keeps_no_other(cache, monkeypatch):
    for name in ("fwd_a", "fwd_b", "fwd_c"):
        made(name)
    delete = store._delete

    def fail(folder: Path) -> None:
        if "fwd_b" in folder.name:
            raise PermissionError(13, "Permission denied", str(folder))
        delete(folder)

    monkeypatch.setattr(store, "_delete", fail)
    with pytest.raises(store.CacheError, match=r"fwd_b.*Permission denied"):
        prune(everything=True)
    assert {entry.name.partition(".")[0] for entry in cache_entries()} == {"fwd_b"}
