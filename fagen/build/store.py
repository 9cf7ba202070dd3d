"""Keep what was built: a name and a way to make it go in, a finished folder comes out, made once.

A folder is finished when its record.json lists every file with its hash and each one agrees. It is
made beside its place and renamed into it, so nothing half-made is ever found there. Names beside a
folder: `.lock` while it is made, `.making-…` for what is under way or was killed, `.failed` for
the sources and logs of a build that failed.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fagen.errors import BuildError
from fagen.paths import cache_folder

RECORD = "record.json"
_MAKING, _FAILED, _LOCK = ".making-", ".failed", ".lock"

Record = dict[str, Any]


@dataclass(frozen=True)
class CacheEntry:
    """One folder of the cache: `state` is "finished", "failed", "broken" or "unfinished".

    `age_seconds` counts from its last use.
    """

    name: str
    folder: Path
    state: str
    bytes: int
    age_seconds: float


def kernels_folder() -> Path:
    """Return the folder in which every kernel has one of its own."""
    return cache_folder() / "kernels"


def failed_folder(folder: Path) -> Path:
    """Return where the sources and logs of a failed build of `folder` are kept."""
    return folder.with_name(folder.name + _FAILED)


def read_finished(folder: Path) -> Record | None:
    """Return the record of a finished folder, None where it is not there or broken."""
    try:
        record = json.loads((folder / RECORD).read_bytes())
        whole = all(_hash(folder / name) == known for name, known in record["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if whole else None


def place(
    folder: Path,
    make: Callable[[Path], Record],
    *,
    lock: Path,
    waiting: Callable[[], None] = lambda: None,
) -> tuple[Record, bool]:
    """Return the record of `folder` and whether it was there already; else `make` fills it.

    `make` gets an empty folder, fills it and returns what to record. Two processes never make the
    same folder: the later one calls `waiting` and gets what the earlier one made.
    Raises BuildError where the cache cannot be written, and what `make` raises.
    """
    if record := read_finished(folder):
        with suppress(OSError):  # the folder's date is that of its last use
            os.utime(folder)
        return record, True
    with writing(folder), locked(lock, waiting):
        if record := read_finished(folder):
            return record, True
        for left in folder.parent.glob(folder.name + _MAKING + "*"):  # by one that was killed
            shutil.rmtree(left, ignore_errors=True)
        making = Path(tempfile.mkdtemp(prefix=folder.name + _MAKING, dir=folder.parent))
        making.chmod(0o755)
        try:
            record = make(making)
            write_record(making, record)
        except BuildError:
            _replace(making, failed_folder(folder))
            raise
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
        _replace(making, folder)
        shutil.rmtree(failed_folder(folder), ignore_errors=True)
        return record, False


def write_record(folder: Path, record: Record) -> None:
    """Write a folder's record, with the hashes of the files that lie in it now."""
    files = sorted(f for f in folder.iterdir() if f.is_file() and f.name != RECORD)
    whole = {**record, "files": {file.name: _hash(file) for file in files}}
    fresh = folder / (RECORD + ".new")
    fresh.write_text(json.dumps(whole, indent=1) + "\n")
    fresh.replace(folder / RECORD)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an error of the file system into a BuildError that names the way out."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise BuildError(
            f"the cache cannot be written ({what})\n"
            "  set FAGEN_CACHE to a folder with room that you may write to, or make room by "
            "`fagen cache prune`"
        ) from error


@contextmanager
def locked(lock: Path, waiting: Callable[[], None] | None = None) -> Iterator[bool]:
    """Hold the lock file; without `waiting`, yield False at once where another holds it.

    The system lets go of the lock of a process that ends, however it ends.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is None:
                    yield False
                    return
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            if _same(file.fileno(), lock):  # the one before may have removed the file
                yield True
                return


def _same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def cache_entries() -> tuple[CacheEntry, ...]:
    """List what the cache holds, last used first."""
    root = kernels_folder()
    folders = [folder for folder in root.glob("*") if folder.is_dir()] if root.is_dir() else []
    entries = []
    for folder in folders:
        with suppress(OSError):  # another process may be pruning
            entries.append(_entry(folder))
    return tuple(sorted(entries, key=lambda entry: entry.age_seconds))


def prune(
    *, older_than: float | None = None, keep: int | None = None, everything: bool = False
) -> tuple[CacheEntry, ...]:
    """Remove entries and return them.

    Broken and failed ones and what a killed build left go always; of the finished ones those not
    used for `older_than` seconds, all but the `keep` used last, or everything. What a build holds
    at this moment stays.
    """
    removed = []
    finished = 0
    for entry in cache_entries():
        goes = everything or entry.state != "finished"
        if entry.state == "finished":
            finished += 1
            goes |= keep is not None and finished > keep
            goes |= older_than is not None and entry.age_seconds > older_than
        if goes and _remove(entry.folder):
            removed.append(entry)
    return tuple(removed)


def lock_of(folder: Path) -> Path:
    """Return the lock that guards a kernel's folder and everything named after it."""
    return folder.with_name(_owner(folder) + _LOCK)


def _owner(folder: Path) -> str:
    return folder.name.removesuffix(_FAILED).partition(_MAKING)[0]


def _remove(folder: Path) -> bool:
    with writing(folder), locked(lock_of(folder)) as alone:
        if alone:
            # renamed first: a reader finds all of it or nothing
            gone = folder.with_name(_owner(folder) + _MAKING + "gone")
            if folder != gone:
                shutil.rmtree(gone, ignore_errors=True)
                folder.rename(gone)
            shutil.rmtree(gone)
            lock_of(folder).unlink(missing_ok=True)
        return alone


def _replace(source: Path, target: Path) -> None:
    """Put a folder in the place of another, which may not be there."""
    if target.exists():
        aside = Path(tempfile.mkdtemp(prefix=_owner(target) + _MAKING, dir=target.parent))
        target.rename(aside / "old")
        source.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        source.rename(target)


def _entry(folder: Path) -> CacheEntry:
    if _MAKING in folder.name:
        state = "unfinished"
    elif folder.name.endswith(_FAILED):
        state = "failed"
    else:
        state = "finished" if read_finished(folder) else "broken"
    size = sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
    return CacheEntry(folder.name, folder, state, size, time.time() - folder.stat().st_mtime)


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
