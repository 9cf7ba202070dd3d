"""Hold a lock, and tell who is still at work: for processes of one machine, and of several.

A lock keeps two processes from making the same thing twice; that nothing is lost does not depend on
it. Not every file system has locks, and of some each machine sees its own alone. So a folder that
is being made has its maker in its name, and nobody else removes it while that one may be alive.
"""

import fcntl
import hashlib
import math
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from fagen.paths import foreign, make_folder

MAKING = ".making-"  # between the name of what is made and its maker
_MAKER = re.compile(r"([0-9a-f]+)-(\d{1,9})-(\d{1,19})-")  # machine, process, when it was started
_GIVEN_UP = 86_400  # seconds without a change after which a maker elsewhere is taken for dead
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def locked(lock: Path, waiting: Callable[[], None] | None = None) -> Iterator[bool]:
    """Hold the lock file; without `waiting`, yield False at once where another holds it.

    The system lets go of the lock of a process that ends, however it ends. Where the file system
    has no locks, one in this machine's folder of temporary files stands for it, and where that has
    none either the lock is held by everybody. Raises OSError where the file cannot be written or is
    none.
    """
    make_folder(lock.parent)
    while True:
        with os.fdopen(_opened(lock), "a") as file:
            held = _hold(file.fileno(), waiting)
            if held is None:
                with _held_here(lock, waiting) as lock_here:
                    yield lock_here
                return
            if not held or _same(file.fileno(), lock):  # the one before may have removed the file
                yield held
                return


def has_locks(folder: Path) -> bool:
    """Whether the file system of a folder has locks. Raises OSError where no file can be made."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return _hold(file.fileno(), None) is not None


def _opened(lock: Path) -> int:
    descriptor = os.open(lock, _FLAGS, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "is no file", str(lock))
    return descriptor


def _hold(descriptor: int, waiting: Callable[[], None] | None) -> bool | None:
    """Lock an open file; False where another holds it, None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if waiting is None:
            return False
        waiting()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # ENOLCK, ENOTSUP, EINVAL, …: each kind of file system has its own word for it
        return None
    return True


@contextmanager
def _held_here(lock: Path, waiting: Callable[[], None] | None) -> Iterator[bool]:
    """Hold a lock of this machine alone, in a folder that is nobody else's."""
    name = hashlib.sha256(os.fsencode(lock)).hexdigest()[:32]
    try:
        folder = Path(tempfile.gettempdir(), f"fagen-{os.geteuid()}")
        folder.mkdir(stat.S_IRWXU, exist_ok=True)
        descriptor = None if foreign(folder) else _opened(folder / f"{name}.lock")
    except OSError:
        descriptor = None
    if descriptor is None:
        yield True
        return
    with os.fdopen(descriptor, "a") as file:
        yield _hold(file.fileno(), waiting) is not False


def _same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


# ---- who is at work ------------------------------------------------------------------------------


def new_making(folder: Path) -> Path:
    """Make an empty folder beside `folder`, with the name of this process in its own."""
    maker = f"{_machine()}-{os.getpid()}-{_started(os.getpid()) or 0}"
    prefix = f"{folder.name}{MAKING}{maker}-"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))


def is_abandoned(making: Path) -> bool:
    """Whether nobody works in a folder of `new_making` any more.

    Of this machine its process is asked for. Of another one, or of a container with processes of
    its own, only time tells: nothing changed in the folder for a day.
    """
    maker = _MAKER.match(making.name.rpartition(MAKING)[2])
    if maker and maker[1] == _machine() and _started(os.getpid()):
        return _started(int(maker[2])) != int(maker[3])
    times = [math.inf]  # of what is not there, or was finished meanwhile
    with suppress(OSError):
        times = [making.lstat().st_mtime]
        times += [file.lstat().st_mtime for file in making.iterdir()]
    return time.time() - max(times) > _GIVEN_UP


@cache
def _machine() -> str:
    """Tell this machine, since it was started, and its space of processes from all others."""
    names = [os.uname().nodename]
    with suppress(OSError):
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        names.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115 - it is no path
    return hashlib.sha256("\0".join(names).encode(errors="surrogateescape")).hexdigest()[:12]


def _started(process: int) -> int | None:
    """When a process was started, in the system's ticks; None where there is none, or one dead."""
    try:
        fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
