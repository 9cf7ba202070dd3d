"""Run compilers one after the other: commands and a folder go in, files and CPU seconds come out.

Each command is a script beside what it makes, quoted for a shell, which has a way to say any path;
ninja's own language has not, so nothing from outside is in it.
"""

import errno
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from fagen.build.records import Record, stated_environment
from fagen.errors import BuildError
from fagen.paths import compiler_environment
from fagen.process import run
from fagen.toml_lines import printable

LOG = "compiler.log"
Command = Sequence[str | Path]

_NINJA = """\
ninja_required_version = 1.8
rule step
  command = . ./$out.sh
  description = $out
"""
_NOT_THE_COMPILERS = re.compile(r"\[\d+/\d+\]|ninja: |FAILED: |\. \./\S+\.sh$")
_SHOWN_LINES = 60  # of a compiler that failed; the log has them all
_FULL = ("No space left on device", "Disk quota exceeded")
_FULL_BYTES = 1 << 16  # where less is free, whatever failed did for want of room


def compiled(
    making: Path,
    kept: Path,
    ninja: Path,
    sources: Mapping[str, str],
    steps: Sequence[tuple[str, Command]],
    made_with: Mapping[str, str],
    digests: Mapping[str, str],
) -> Record:
    """Write sources by their names, run the steps and return what to record.

    `kept` and what is raised are as of run_steps.
    """
    for name, text in sources.items():
        (making / name).write_text(text, encoding="utf-8")
    return Record(
        library=steps[-1][0],
        made_with=made_with,
        digests=digests,
        environment=stated_environment(),
        cpu_seconds=run_steps(making, kept, ninja, steps),
    )


def run_steps(making: Path, kept: Path, ninja: Path, steps: Sequence[tuple[str, Command]]) -> float:
    """Run the steps, each of which makes a file from the one before; return their CPU seconds.

    `kept` is the folder where the logs of a build that failed will lie. Raises BuildError with the
    compiler's own lines and the command that repeats it, OSError where the disk is full.
    """
    rules, before = [_NINJA], ""
    for file, command in steps:
        (making / f"{file}.sh").write_bytes(os.fsencode(f"{quoted(command)}\n"))
        rules.append(f"build {file}: step {before}".rstrip() + "\n")
        before = file
    (making / "build.ninja").write_text("".join(rules), encoding="ascii")
    # What compilers say comes by ninja and not by a file: where a disk is full it would be lost.
    result = run([ninja], cwd=making, only=compiler_environment())
    lines = (result.stdout + result.stderr).splitlines()
    output = [line for line in lines if not _NOT_THE_COMPILERS.match(line)]
    (making / LOG).write_text("".join(f"{line}\n" for line in output), encoding="utf-8")
    if result.returncode:
        free = shutil.disk_usage(making).free
        if free < _FULL_BYTES or any(word in line for line in output for word in _FULL):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(making.parent))
        command = next((c for file, c in steps if not (making / file).exists()), steps[-1][1])
        raise BuildError(refusal(output or ["the compiler said nothing"], kept, command))
    for file, _ in steps[:-1]:
        (making / file).unlink()
    return result.cpu_seconds


def refusal(lines: Sequence[str], folder: Path, command: Command) -> str:
    """Return what went wrong in a folder, and the command that repeats it there."""
    cut = len(lines) - _SHOWN_LINES
    more = [f"… {cut} lines more in {folder / LOG}"] if cut > 0 else []
    stated = ["env", "-i", *(f"{name}={value}" for name, value in compiler_environment().items())]
    return "\n".join(
        (
            f"{command[-1]} was not built:",
            *(f"  {printable(line.expandtabs())}" for line in (*lines[:_SHOWN_LINES], *more)),
            "to repeat it:",
            printable(f"  cd {shlex.quote(str(folder))} && {quoted([*stated, *command])}"),
        )
    )


def quoted(command: Command) -> str:
    """Return a command as a shell reads it."""
    return shlex.join(str(word) for word in command)
