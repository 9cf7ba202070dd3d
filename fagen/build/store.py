"""Keep what was built: a name and a way to make it go in, a finished folder comes out, made once.

A folder is finished when its record.json lists every file with its hash and each one agrees. It is
made beside its place and renamed into it, so nothing half-made is ever found there. Names beside a
folder: `.lock` while it is made, `.making-…` for what is under way or was killed, `.failed` for
the sources and logs of a build that failed.

What lies here runs as whoever finds it. So nothing is taken that others own or may write to, nor
what a link leads to.
"""

import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fagen.errors import BuildError, CacheError
from fagen.paths import cache_folder, foreign, make_folder, write_whole
from fagen.toml_lines import printable

RECORD = "record.json"
_MAKING, _FAILED, _LOCK = ".making-", ".failed", ".lock"
_LOCK_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW

Record = dict[str, Any]


@dataclass(frozen=True)
class CacheEntry:
    """One folder of the cache.

    `state` is "finished", "failed", "broken", "unfinished", or "foreign": others own it or may
    write to it, or it is a link. `age_seconds` counts from its last use.
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
    """Return the record of a finished folder, None where it is not there or broken.

    Raises CacheError where it, or what it lies in, is not this user's alone.
    """
    check_own(folder)
    return _read(folder)


def check_own(path: Path) -> None:
    """Raise CacheError where a file or folder of the cache may not be what this user put there.

    What it lies in is looked at too, up to the cache's own folder, and the files in it. The cache's
    own folder may be reached through links: whoever names it answers for these.
    """
    root = cache_folder()
    inside = path.relative_to(root).parts
    _refuse_foreign(
        [root.resolve(), *(root.joinpath(*inside[: n + 1]) for n in range(len(inside)))]
    )
    with suppress(OSError):  # it is a file, or not there; another process may be pruning
        _refuse_foreign(path.iterdir())


def _refuse_foreign(places: Iterable[Path]) -> None:
    for place in places:
        if found := foreign(place):
            what, ways = map(printable, found)
            raise CacheError(
                f"the cache is not yours alone: {what}\n"
                f"  what others put there would run as you; {ways}"
            )


def _read(folder: Path) -> Record | None:
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
    Raises CacheError where the cache cannot be written or is not this user's alone, and what `make`
    raises.
    """
    if record := read_finished(folder):
        with suppress(OSError):  # the folder's date is that of its last use
            os.utime(folder)
        return record, True
    with writing(folder), locked(lock, waiting):
        if record := read_finished(folder):
            return record, True
        for left in folder.parent.glob(folder.name + _MAKING + "*"):  # by one that was killed
            _clear(left)
        making = Path(tempfile.mkdtemp(prefix=folder.name + _MAKING, dir=folder.parent))
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
    write_whole(folder / RECORD, json.dumps(whole, indent=1) + "\n")


def _close(folder: Path) -> None:
    """Let others read what was made, and nobody else write to it, whatever the umask allows."""
    for file in folder.iterdir():
        file.chmod(0o755 if file.stat().st_mode & 0o100 else 0o644)
    folder.chmod(0o755)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an error of the file system into a CacheError that names the way out."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or folder}: {error.strerror}"
        raise CacheError(
            f"the cache cannot be written ({what})\n"
            "  set FAGEN_CACHE to a folder with room that you may write to, or make room by "
            "`fagen cache prune`"
        ) from error


@contextmanager
def locked(lock: Path, waiting: Callable[[], None] | None = None) -> Iterator[bool]:
    """Hold the lock file; without `waiting`, yield False at once where another holds it.

    The system lets go of the lock of a process that ends, however it ends. Raises CacheError where
    the file is a link, OSError where it cannot be written.
    """
    make_folder(lock.parent)
    if lock.is_symlink():
        _refuse_foreign([lock])
    while True:
        with os.fdopen(os.open(lock, _LOCK_FLAGS, 0o644), "a") as file:
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
    """List what the cache holds, last used first.

    Raises CacheError where the cache itself is not this user's alone.
    """
    root = kernels_folder()
    _refuse_foreign([root.parent.resolve(), root])
    inside = list(root.iterdir()) if root.is_dir() else []
    folders = [folder for folder in inside if folder.is_symlink() or folder.is_dir()]
    entries = []
    for folder in folders:
        with suppress(OSError):  # another process may be pruning
            entries.append(_entry(folder))
    return tuple(sorted(entries, key=lambda entry: entry.age_seconds))


def prune(
    *, older_than: float | None = None, keep: int | None = None, everything: bool = False
) -> tuple[CacheEntry, ...]:
    """Remove entries and return them.

    Broken, failed and foreign ones and what a killed build left go always; of the finished ones
    those not used for `older_than` seconds, all but the `keep` used last, or everything. What a
    build holds at this moment stays, and what one has made or used since it was looked at.
    """
    removed = []
    finished = 0
    links_first = sorted(cache_entries(), key=lambda entry: not entry.folder.is_symlink())
    for entry in links_first:  # one may be another's lock
        goes = everything or entry.state != "finished"
        if entry.state == "finished":
            finished += 1
            goes |= keep is not None and finished > keep
            goes |= older_than is not None and entry.age_seconds > older_than
        if goes and _remove(entry):
            removed.append(entry)
    return tuple(removed)


def lock_of(folder: Path) -> Path:
    """Return the lock that guards a kernel's folder and everything named after it."""
    return folder.with_name(_owner(folder) + _LOCK)


def _owner(folder: Path) -> str:
    return folder.name.removesuffix(_FAILED).partition(_MAKING)[0]


def _remove(entry: CacheEntry) -> bool:
    """Remove an entry if it still is what was seen of it; return whether it was."""
    folder = entry.folder
    if folder.is_symlink():  # no build has made it, and none takes it
        with writing(folder):
            folder.unlink(missing_ok=True)
        return True
    with writing(folder), locked(lock_of(folder)) as alone:
        if not alone:
            return False
        if goes := _unchanged(entry):
            # renamed first: a reader finds all of it or nothing
            gone = folder.with_name(_owner(folder) + _MAKING + "gone")
            if folder != gone:
                _clear(gone)
                folder.rename(gone)
            shutil.rmtree(gone)
        lock_of(folder).unlink(missing_ok=True)
        return goes


def _unchanged(entry: CacheEntry) -> bool:
    """Whether nobody finished, replaced or used an entry between a look at it and its lock."""
    try:
        now = _entry(entry.folder)
    except FileNotFoundError:
        return False
    return now.state == entry.state and now.age_seconds >= entry.age_seconds


def _clear(folder: Path) -> None:
    """Remove a folder as far as it can be removed, or a link."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _replace(source: Path, target: Path) -> None:
    """Put a folder that was made in the place of another, which may not be there."""
    _close(source)
    if target.exists():
        aside = Path(tempfile.mkdtemp(prefix=_owner(target) + _MAKING, dir=target.parent))
        target.rename(aside / "old")
        source.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        source.rename(target)


def _entry(folder: Path) -> CacheEntry:
    found = folder.lstat()
    inside = [] if stat.S_ISLNK(found.st_mode) else list(folder.rglob("*"))
    size = sum(file.lstat().st_size for file in inside if file.is_file())
    return CacheEntry(
        folder.name, folder, _state(folder, inside), size, time.time() - found.st_mtime
    )


def _state(folder: Path, inside: Sequence[Path]) -> str:
    if foreign(folder):
        return "foreign"
    if _MAKING in folder.name:
        return "unfinished"
    if any(map(foreign, inside)):
        return "foreign"
    if folder.name.endswith(_FAILED):
        return "failed"
    return "finished" if _read(folder) else "broken"


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
