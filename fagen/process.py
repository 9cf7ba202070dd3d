"""Run another program and return what it said, what it cost and how it ended.

A program never outlives the process that ran it, nor does anything that it started, however that
process ends: of one that is killed nobody else is left to see to it.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fagen.errors import ToolchainError
from fagen.paths import environment, environment_with, naming

# What a program starts need not stay in its process group (ninja gives each compiler one of its
# own), but it inherits the environment: this variable names the runs that a process belongs to.
_RUNS = "FAGEN_RUNS"

# Waits for the end of its input, then kills whoever belongs to the run $1, until none is left.
_WATCH = """
read -r _
cd /proc && while list=$(grep -lsF "$1" [0-9]*/environ); [ "$list" ]; do
  for process in $list; do kill -KILL "${process%/environ}"; done
  sleep 0.1
done
"""


@dataclass(frozen=True)
class Result:
    """How a program ended; times in seconds, cpu_seconds with all that it started and awaited."""

    returncode: int
    stdout: str
    stderr: str
    cpu_seconds: float
    seconds: float


def run(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    input: str | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    only: Mapping[str, str] | None = None,
    shown: bool = False,
) -> Result:
    """Run `argv` to its end; `env` is added to the environment, `timeout` is in seconds.

    With `only`, that is the program's whole environment.
    Where it is `shown`, what it says on standard output goes to our standard error at once.

    A status other than zero is the caller's to judge.  Raises ToolchainError where the program is
    missing or did not finish in time; it is then ended with everything that it started.
    """
    # Files and wait4, not pipes and communicate: only wait4 tells one child's CPU time from
    # another's when several run at once.
    with _scratch() as out, _scratch() as err, _scratch(input) as fed, _watched() as watch:
        began = time.monotonic()
        try:
            child = subprocess.Popen(
                [str(word) for word in argv],
                cwd=cwd,
                stdin=fed,
                stdout=2 if shown and sys.stderr else out,
                stderr=err,
                env={**(environment_with(env or {}) if only is None else only), _RUNS: watch.runs},
                process_group=0,
            )
        except FileNotFoundError as error:
            if cwd is not None and not cwd.is_dir():
                raise ToolchainError(f"{argv[0]}: no folder {cwd} to run in") from error
            raise ToolchainError(f"{argv[0]}: no such program") from error
        except OSError as error:
            raise ToolchainError(f"{argv[0]}: cannot be started: {error.strerror}") from error
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            _end(child, watch)

        alarm = threading.Timer(timeout or 0, expire)
        if timeout is not None:
            alarm.start()
        try:
            _, status, usage = os.wait4(child.pid, 0)
        except BaseException:  # Ctrl-C too: the child is in a group of its own and hears nothing
            _end(child, watch)
            child.wait()
            raise
        finally:
            alarm.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)
        if expired.is_set():
            raise ToolchainError(f"{argv[0]}: did not finish in {timeout:g} s")
        return Result(
            child.returncode,
            _text(out),
            _text(err),
            usage.ru_utime + usage.ru_stime,
            time.monotonic() - began,
        )


@dataclass(frozen=True)
class _Watch:
    """A process that ends a run where this one cannot; `runs` is what the run's programs get."""

    process: subprocess.Popen[bytes]
    runs: str


@contextmanager
def _watched() -> Iterator[_Watch]:
    """Have a run watched; it starts before the run does, so that there is no moment between."""
    run = secrets.token_hex(8)
    watcher = subprocess.Popen(
        ["/bin/sh", "-c", _WATCH, "sh", run],
        stdin=subprocess.PIPE,  # it ends when nobody holds the other side any more
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    with watcher:
        yield _Watch(watcher, f"{environment(_RUNS) or ''}:{run}")
        watcher.kill()


def _end(child: subprocess.Popen[bytes], watch: _Watch) -> None:
    """End a program and all that it has started, and wait for the latter."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    watch.process.communicate()


def _scratch(content: str | None = None) -> IO[bytes]:
    with naming(tempfile.gettempdir()):
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller's `with` closes it
        file.write((content or "").encode())
        file.seek(0)
    return file


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
