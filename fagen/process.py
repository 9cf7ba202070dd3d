"""Run another program and return what it said, what it cost and how it ended."""

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fagen.errors import ToolchainError
from fagen.paths import environment_with


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
) -> Result:
    """Run `argv` to its end; `env` is added to the environment, `timeout` is in seconds.

    A status other than zero is the caller's to judge.  Raises ToolchainError where the program is
    missing or did not finish in time; it is then ended with everything that it started.
    """
    # Files and wait4, not pipes and communicate: only wait4 tells one child's CPU time from
    # another's when several run at once.
    with _scratch() as out, _scratch() as err, _scratch(input) as fed:
        began = time.monotonic()
        try:
            child = subprocess.Popen(
                [str(word) for word in argv],
                cwd=cwd,
                stdin=fed,
                stdout=out,
                stderr=err,
                env=environment_with(env or {}),
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
            _end(child)

        alarm = threading.Timer(timeout or 0, expire)
        if timeout is not None:
            alarm.start()
        try:
            _, status, usage = os.wait4(child.pid, 0)
        except BaseException:  # Ctrl-C too: the child is in a group of its own and hears nothing
            _end(child)
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


def _scratch(content: str | None = None) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller's `with` closes it
    file.write((content or "").encode())
    file.seek(0)
    return file


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _end(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
