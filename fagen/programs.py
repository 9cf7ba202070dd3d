"""Ask programs and files on this machine what they are: a path in, a version or a refusal out."""

import re
from functools import cache
from pathlib import Path

from fagen.errors import ToolchainError
from fagen.paths import compiler_environment, resolved
from fagen.process import Result, run
from fagen.toml_lines import printable

# nvcc gives paths to a shell, between double quotes, and that of the folder in which it works too
_FOR_A_SHELL = re.compile(r'["$`\\]')
_FOLDER_FOR_A_SHELL = re.compile(r'["`]|\$[({]')


class MissingError(ToolchainError):
    """Something is missing or will not do, and there is a way to fix it."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}: {remedy}")
        self.what, self.remedy = what, remedy


def answer(program: Path, flag: str) -> Result:
    """Run a program with one flag, as compilers are run; once for as long as its file stays."""
    return _answer(program, flag, program.stat().st_mtime_ns)


@cache
def _answer(program: Path, flag: str, _changed: int) -> Result:
    return run([program, flag], timeout=30, only=compiler_environment())


def version_of(program: Path, flag: str) -> str:
    """Return the version that a program prints.  Raises ToolchainError where it prints none."""
    result = answer(program, flag)
    if result.returncode or not numbers(result.stdout):
        why = printable(" ".join(result.stderr.split()))
        raise ToolchainError(f"{printable(program)} {flag} does not say its version: {why}")
    return result.stdout.split()[0]


def is_file(path: Path) -> bool:
    """Return whether there is such a file, and one may look."""
    try:
        return path.is_file()
    except OSError:
        return False


def beginning(file: Path) -> str:
    """Return the first MiB of a file as text, whatever it holds."""
    with file.open("rb") as opened:
        return opened.read(1 << 20).decode(errors="replace")


def refuse_to_compile_in(folder: Path) -> None:
    """Raise MissingError where nvcc cannot work in a folder, for what its path has in it."""
    if odd := _FOLDER_FOR_A_SHELL.search(str(resolved(folder))):
        what = f"{printable(folder)} has a {odd[0]} in it, which nvcc gives to a shell"
        raise MissingError(what, "set FAGEN_CACHE to another folder")


def refuse_for_a_shell(path: Path) -> None:
    """Refuse a path that nvcc would have a shell work on."""
    if odd := _FOR_A_SHELL.search(str(path)):
        what = f"{printable(path)} has a {odd[0]} in it, which nvcc gives to a shell"
        raise MissingError(what, "name it by another path")


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) for 2.13.0+cpu."""
    match = re.match(r"\d{1,9}(\.\d{1,9})*", version.strip())
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def too_old(name: str, version: str, path: Path, since: tuple[int, ...]) -> str:
    """Return that something is older than fagen can use."""
    oldest = ".".join(map(str, since))
    return f"{name} {version} at {printable(path)} is too old, {oldest} is the oldest that will do"
