"""Build many kernels at once: slugs go in, their kernels into the cache, what went wrong comes out.

One ninja has a rule for each kernel, which is `fagen build` of that kernel alone. So a kernel is
kept as soon as it is done, whatever becomes of the others.
"""

import json
import logging
import os
import shlex
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fagen.errors import BuildError, FagenError, RefusedBuild, ToolchainError
from fagen.paths import own_program
from fagen.process import run
from fagen.toolchain import compile_jobs, find_ninja

_NINJA = """\
ninja_required_version = 1.8
rule kernel
  command = sh build.sh $out $slug
  description = $slug
"""
# Run where we are, since the environment may name folders by relative paths. None fails for ninja,
# which would print the command: the answer says what is wrong.
_SHELL = """\
(cd {here} && exec {words} "$2") >"$1" 2>"$1.said" || head -n 1 "$1.said"
"""
_STATUS = "[%f/%t] "  # how many are done, of how many
_ERRORS = {error.__name__: error for error in (ToolchainError, BuildError, RefusedBuild)}


def build_together(slugs: Sequence[str], *, binding: bool | None = None) -> dict[str, FagenError]:
    """Build the kernels of these slugs, several at once; return what went wrong, by slug.

    How many at once `compile_jobs` says; `binding` is as in `build`. Progress goes to standard
    error, with the first line of what fails. Raises ToolchainError where ninja is missing, or
    MAX_JOBS is no number.
    """
    (ninja, _), jobs = find_ninja(), compile_jobs()
    logger, began = logging.getLogger("fagen"), time.monotonic()
    logger.info("building %d kernels, %d at once", len(slugs), jobs)
    program, variables = own_program()
    options = {None: (), True: ("--binding",), False: ("--no-binding",)}[binding]
    with tempfile.TemporaryDirectory(prefix="fagen-") as name:
        folder = Path(name)
        words = shlex.join([*program, "build", "--json", *options])
        shell = _SHELL.format(here=shlex.quote(str(Path.cwd())), words=words)
        (folder / "build.sh").write_bytes(os.fsencode(shell))
        rules = [f"build {n}.json: kernel\n  slug = {slug}\n" for n, slug in enumerate(slugs)]
        (folder / "build.ninja").write_text("".join([_NINJA, *rules]))
        run(
            [ninja, "-k", "0", "-j", str(jobs)],
            cwd=folder,
            env={**variables, "NINJA_STATUS": _STATUS},
            shown=True,
        )
        outcomes = {slug: _failure(slug, folder / f"{n}.json") for n, slug in enumerate(slugs)}
    failed = {slug: error for slug, error in outcomes.items() if error}
    built, seconds = len(slugs) - len(failed), time.monotonic() - began
    logger.info("built %d of %d kernels in %.1f s", built, len(slugs), seconds)
    return failed


def _failure(slug: str, answer: Path) -> FagenError | None:
    """What went wrong with a kernel, as its own process tells it; None where it was built."""
    try:
        record = json.loads(answer.read_text())
    except (OSError, ValueError):
        why = f"was it killed, or is {answer.parent.parent} full?"
        return BuildError(f"{slug}: the process that was to build it gave no answer: {why}")
    if isinstance(record, list):
        return None
    error = _ERRORS.get(record["error"], FagenError)(record["message"])
    error.exit_code = record["exit_code"]
    return error
