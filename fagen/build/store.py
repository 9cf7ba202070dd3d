"""Keep what was built: a name and a way to make it go in, a finished folder comes out, made once.

A folder is finished when its record.json lists every file with its hash and each one agrees. It is
made beside its place and renamed into it, so nothing half-made is ever found there. Names beside a
folder: `.lock` while it is made, `.making-…` with its maker for what is under way or was killed,
`.failed` for the sources and logs of a build that failed.

What lies here runs as whoever finds it. So nothing is taken that others own or may write to, nor
what a link leads to.
"""

import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fagen.build import locks
from fagen.build.locks import MAKING, is_abandoned, new_making
from fagen.build.records import Record, read_record, write_record
from fagen.errors import BuildError, CacheError
from fagen.paths import cache_folder, foreign, resolved
from fagen.process import run
from fagen.toml_lines import printable

_FAILED, _LOCK = ".failed", ".lock"
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}  # where a folder is to be renamed to


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


@dataclass(frozen=True)
class Slot:
    """A folder of the cache, and the library that it is there for.

    With `reported` its record has to hold a compiler's report.
    """

    folder: Path
    library: str
    reported: bool = False

    @property
    def path(self) -> Path:
        """Where the library lies once it is made."""
        return self.folder / self.library

    @property
    def failed(self) -> "Slot":
        """Where the sources and logs of a build that failed are kept."""
        return replace(self, folder=self.folder.with_name(self.folder.name + _FAILED))

    def record(self) -> Record | None:
        """Return the record of the finished folder; None where there is none, or a broken one.

        Raises CacheError where it, or what it lies in, is not this user's alone.
        """
        check_own(self.folder)
        record = read_record(self.folder)
        whole = record and record.library == self.library and (record.report or not self.reported)
        return record if whole else None

    def filled(
        self, make: Callable[[Path, Path], Record], waiting: Callable[[], None] = lambda: None
    ) -> tuple[Record, bool]:
        """Return the record of the folder and whether it was there already; else `make` fills it.

        `make` gets an empty folder, fills it, the library among the rest, and returns what to
        record; where it will lie if that fails is told beside. Two processes of a machine never
        make the same folder: the later one calls `waiting` and gets what the earlier one made. Of
        two machines each may make it, and the first to finish is taken.
        Raises CacheError where the cache cannot be written or is not this user's alone, and what
        `make` raises.
        """
        folder = self.folder
        if record := self.record():
            with suppress(OSError):  # the folder's date is that of its last use
                os.utime(folder)
            return record, True
        with writing(folder), locked(lock_of(folder), waiting):
            if record := self.record():
                return record, True
            for left in folder.parent.glob(folder.name + MAKING + "*"):  # by one that was killed
                if is_abandoned(left):
                    _clear(left)
            making = new_making(folder)
            try:
                record = make(making, self.failed.folder)
                write_record(making, record)
            except BuildError:
                _replace(making, self.failed.folder)
                raise
            except BaseException:
                _clear(making)
                raise
            if theirs := self.record():
                _clear(making)
                return theirs, True
            _replace(making, folder)
            _clear(self.failed.folder)
            return record, False


def check_own(path: Path) -> None:
    """Raise CacheError where a file or folder of the cache may not be what this user put there.

    What it lies in is looked at too, up to the cache's own folder, and the files in it. The cache's
    own folder may be reached through links: whoever names it answers for these.
    """
    root = cache_folder()
    inside = path.relative_to(root).parts
    within = [root.joinpath(*inside[: n + 1]) for n in range(len(inside))]
    with writing(root):
        own = resolved(root)
    _refuse_foreign([own, *within])
    with suppress(OSError):  # it is a file, or not there; another process may be pruning
        _refuse_foreign(path.iterdir())


def _refuse_foreign(places: Iterable[Path]) -> None:
    for place in places:
        if fault := foreign(place):
            what, ways = map(printable, fault)
            raise CacheError(
                f"the cache is not yours alone: {what}\n"
                f"  what others put there would run as you; {ways}"
            )


def _close(folder: Path) -> None:
    """Let others read what was made, and nobody else write to it, whatever the umask allows."""
    for file in folder.iterdir():
        with suppress(OSError):  # not every file system has modes; who reads looks at them
            file.chmod(0o755 if file.stat().st_mode & 0o100 else 0o644)
    with suppress(OSError):
        folder.chmod(0o755)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an error of the file system into a CacheError that names the way out."""
    try:
        yield
    except OSError as error:
        what = f"{printable(error.filename or folder)}: {error.strerror or error}"
        raise CacheError(
            f"the cache cannot be written ({what})\n"
            "  set FAGEN_CACHE to a folder with room that you may write to, or make room by "
            "`fagen cache prune`"
        ) from error


@contextmanager
def locked(lock: Path, waiting: Callable[[], None] | None = None) -> Iterator[bool]:
    """Hold a lock of the cache, as `locks.locked` does.  Raises CacheError where it is a link."""
    if lock.is_symlink():
        _refuse_foreign([lock])
    with locks.locked(lock, waiting) as held:
        yield held


def cache_entries() -> tuple[CacheEntry, ...]:
    """List what the cache holds, last used first.

    Raises CacheError where the cache itself is not this user's alone.
    """
    root = kernels_folder()
    with writing(root):
        _refuse_foreign([resolved(root.parent), root])
        inside = list(root.iterdir()) if root.is_dir() else []
    entries = []
    for folder in inside:
        with suppress(OSError):  # another process may be pruning
            if not stat.S_ISREG(folder.lstat().st_mode):  # as locks are
                entries.append(_entry(folder))
    return tuple(sorted(entries, key=lambda entry: entry.age_seconds))


def prune(
    *, older_than: float | None = None, keep: int | None = None, everything: bool = False
) -> tuple[CacheEntry, ...]:
    """Remove entries and return them.

    Broken, failed and foreign ones and what a killed build left go always; of the finished ones
    those not used for `older_than` seconds, all but the `keep` used last, or everything. What a
    build holds at this moment stays, here or on another machine, and what one has made or used
    since it was looked at. Raises CacheError in the end where some could not be removed.
    """
    removed, faults = [], []
    finished = 0
    links_first = sorted(cache_entries(), key=lambda entry: not entry.folder.is_symlink())
    for entry in links_first:  # one may be another's lock
        goes = everything or entry.state != "finished"
        if entry.state == "finished":
            finished += 1
            goes |= keep is not None and finished > keep
            goes |= older_than is not None and entry.age_seconds > older_than
        try:
            if goes and _remove(entry):
                removed.append(entry)
        except CacheError as error:
            faults.append(str(error))
    if faults:
        raise CacheError("\n".join(faults))
    return tuple(removed)


def lock_of(folder: Path) -> Path:
    """Return the lock that guards a kernel's folder, all in it and everything named after it."""
    root = kernels_folder()
    return root / (_owner(root / folder.relative_to(root).parts[0]) + _LOCK)


def _owner(folder: Path) -> str:
    return folder.name.removesuffix(_FAILED).partition(MAKING)[0]


def _remove(entry: CacheEntry) -> bool:
    """Remove an entry if it still is what was seen of it; return whether it was."""
    folder = entry.folder
    if entry.state == "unfinished" and not is_abandoned(folder):
        return False
    try:
        kind = folder.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(kind):  # no build has made it, and none takes it
        with writing(folder):
            folder.unlink(missing_ok=True)
        return True
    with writing(folder), locked(lock_of(folder)) as only_holder:
        if not only_holder:
            return False
        if goes := _unchanged(entry):
            # renamed first: a reader finds all of it or nothing
            aside = new_making(folder.with_name(_owner(folder)))
            folder.rename(aside / "old")
            _delete(aside)
        lock_of(folder).unlink(missing_ok=True)
        return goes


def _unchanged(entry: CacheEntry) -> bool:
    """Whether nobody finished, replaced or used an entry between a look at it and its lock."""
    try:
        now = _entry(entry.folder)
    except FileNotFoundError:
        return False
    return now.state == entry.state and now.age_seconds >= entry.age_seconds


def _clear(place: Path) -> None:
    """Remove a folder as far as it can be removed, or what lies in its place."""
    with suppress(OSError):
        if stat.S_ISDIR(place.lstat().st_mode):
            _delete(place)
        else:
            place.unlink()


def _delete(folder: Path) -> None:
    """Remove a folder with all that is in it.  Raises OSError where some of it stays."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):  # nested deeper than Python can follow, for one
        answer = run(["rm", "-rf", "--", folder])
        if answer.returncode:
            raise OSError(0, printable(answer.stderr.strip()), str(folder)) from None


def _replace(source: Path, target: Path) -> None:
    """Put a folder that was made in the place of another, which may not be there."""
    _close(source)
    while True:
        try:
            source.rename(target)
            return
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        aside = new_making(target.with_name(_owner(target)))
        with suppress(FileNotFoundError):  # another machine may be doing the same
            target.rename(aside / "old")
        _clear(aside)


def _entry(folder: Path) -> CacheEntry:
    status = folder.lstat()
    inside = list(all_inside(folder)) if stat.S_ISDIR(status.st_mode) else []
    size = 0
    for path in inside:
        with suppress(OSError):
            size += path.lstat().st_size if path.is_file() else 0
    return CacheEntry(
        folder.name, folder, _state(folder, inside), size, time.time() - status.st_mtime
    )


def all_inside(folder: Path) -> Iterator[Path]:
    """Yield what lies in a folder, however deep: no link is followed, what cannot be read left."""
    ahead = [folder]
    while ahead:
        with suppress(OSError), os.scandir(ahead.pop()) as entries:
            for entry in entries:
                yield Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    ahead.append(Path(entry.path))


def _state(folder: Path, inside: Sequence[Path]) -> str:
    if foreign(folder):
        return "foreign"
    if MAKING in folder.name:
        return "unfinished"
    if any(map(foreign, inside)):
        return "foreign"
    if folder.name.endswith(_FAILED):
        return "failed"
    return "finished" if read_record(folder) else "broken"
