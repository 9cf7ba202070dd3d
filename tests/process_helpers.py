"""Programs that a test started, and those that these started: which run, and waiting for them."""

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(500):
        if holds():
            return
        time.sleep(0.02)
    raise AssertionError("ten seconds have passed")


def pid_said(path: Path) -> int:
    """The number that a process writes to a file, once it does."""
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"  # it ended, and nobody waited for it
