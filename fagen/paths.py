"""Say where things lie and whose they are, and write files whole.

Nothing else reads the environment; what is read of it is listed in VARIABLES, and nothing beside.
"""

import errno
import importlib.util
import os
import shlex
import shutil
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fagen.errors import FagenError, ScheduleError, ToolchainError

_PACKAGE = Path(__file__).resolve().parent

# Every variable of the environment that fagen reads, and for what; docs/tour.md shows this table.
VARIABLES = {
    "FAGEN_CACHE": "the folder of built kernels",
    "XDG_CACHE_HOME": "without `FAGEN_CACHE`: the folder in which `fagen` is that of built kernels",
    "XDG_CONFIG_HOME": "the folder in which `fagen` holds your own schedules and dispatch table",
    "HOME": "without the two above: `~/.cache/fagen` and `~/.config/fagen`",
    "FAGEN_CUTLASS": "the CUTLASS headers: a checkout, or its include folder",
    "CUDA_HOME": "the CUDA toolkit; no other is looked for where it is set",
    "NVCC_CCBIN": "the host compiler: a g++, its folder, or a clang++; no other is then looked for",
    "CXX": "the host compiler where `NVCC_CCBIN` is not set, else g++ on `PATH`",
    "MAX_JOBS": "how many compilers run at once, else one for each processor",
    "PATH": "where programs are looked for; compilers get it",
    "LD_LIBRARY_PATH": "not read: compilers get it, since their own libraries may need it",
    "TMPDIR": "where files lie that nobody keeps",
    "PYTHONPATH": "where Python's own packages are; compilers get it, since ninja may be one",
    "FAGEN_RUNS": "set by fagen for the programs that it starts, to find and end them",
}

# What a compiler gets of the environment as it is; no result depends on it. g++ may look for its
# assembler and linker on PATH: those are told apart by their content, see build/digests.py. ninja
# may be a Python script.
_COMPILERS_TAKE = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH")
# And what it gets in any case: messages that can be read back, temporary files where it works (a
# path from outside would go through nvcc's shell), and no cache but fagen's.
_COMPILERS_GET = {"LC_ALL": "C", "TMPDIR": ".", "CCACHE_DISABLE": "1"}
# Some of those that compilers would obey and do not get, for who wonders.
_COMPILERS_MAY_NOT = (
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"),
    *("LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX", "LD_RUN_PATH", "LD_PRELOAD"),
    *("INCLUDES", "SYSTEM_INCLUDES", "LIBRARIES", "CUDAFE_FLAGS", "PTXAS_FLAGS"),
)


def path_of(value: object, call: str) -> Path:
    """Return what a public call was given as the path of a file; `call` names it in messages.

    Raises TypeError where it is no path, ScheduleError where no file can be called so.
    """
    name = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if not isinstance(name, str):
        raise TypeError(f"{call}: path is of type {type(value).__name__}; it must be a path")
    if "\0" in name:
        raise ScheduleError(f"{call}: {name!r} cannot be read: no file is called so")
    return Path(name)


def locate(name: str) -> Path:
    """Find `templates`, `schedules`, `generated`, `cli.py` or `LICENSE`.

    In an installed wheel they are inside the package, in a checkout beside it; a wheel has no
    `generated`, but `shipped` in its place, which a checkout has not.
    Raises FagenError where there is neither.
    """
    for home in (_PACKAGE, _PACKAGE.parent):
        if (home / name).exists():
            return home / name
    way_out = "name a folder with -o" if name == "generated" else "reinstall fagen"
    raise FagenError(f"{name} is neither in {_PACKAGE} nor beside it: {way_out}")


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Give an OSError this file's name: a disk that is full does not know it."""
    try:
        yield
    except OSError as error:
        if error.errno:
            error.filename = str(path)
        raise


def resolved(path: Path) -> Path:
    """Return a path without links.  Raises OSError where these lead in a circle."""
    try:
        return path.resolve()
    except RuntimeError:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file in one step: whoever is killed, or has no room left, leaves the old one whole.

    Text is written as UTF-8. Raises OSError, with the file's name, where the folder is missing or
    cannot be written.
    """
    with naming(path):
        _write_whole(resolved(path), content.encode() if isinstance(content, str) else content)


def _write_whole(path: Path, data: bytes) -> None:
    if path.exists() and not path.is_file():  # a terminal or a pipe has no whole
        path.write_bytes(data)
        return
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).chmod(0o644)  # mkstemp makes files for their owner alone
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing; nobody but their owner may write there.

    Raises OSError where that cannot be.
    """
    for place in (*reversed(folder.parents), folder):
        if not place.is_dir():
            place.mkdir(0o755, exist_ok=True)


def foreign(path: Path) -> tuple[str, str] | None:
    """Say how a file or folder is not this user's alone, and what to do; None where it is.

    Others may neither own it nor write to it, root apart, and it is no link, which leads elsewhere.
    What is not there, or cannot be looked at, is nobody's.
    """
    try:
        status = path.lstat()
    except OSError:
        return None
    named = shlex.quote(str(path))
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link", f"remove it: rm {named}"
    if status.st_uid not in (os.geteuid(), 0):
        ways = f"remove it, or set FAGEN_CACHE to a folder of your own: rm -rf {named}"
        return f"{path} belongs to {_owner(path, status.st_uid)}", ways
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        ways = f"remove it, or if you trust what is there: chmod -R go-w {named}"
        return f"{path} may be written by others (mode {mode})", ways
    return None


def _owner(path: Path, number: int) -> str:
    try:
        return path.owner()
    except KeyError:  # nobody here is called so
        return f"user {number}"


def environment(name: str) -> str | None:
    """Return one of VARIABLES as the environment has it, or None where it is unset or empty."""
    assert name in VARIABLES, f"{name} is not in the table of variables that fagen reads"
    return os.environ.get(name) or None


def environment_with(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment with `extra` on top, for a program about to be started."""
    return {**os.environ, **extra}


def compiler_environment() -> dict[str, str]:
    """Return the whole environment of a compiler: what fagen states, and nothing else.

    A user's flags for nvcc and folders for headers (NVCC_APPEND_FLAGS, CPATH, …) are not in it:
    a kernel is what its source and fagen's own flags say, whoever finds it in the cache.
    """
    variables = {name: value for name in _COMPILERS_TAKE if (value := environment(name))}
    return {"PATH": os.defpath, **variables, **_COMPILERS_GET}


def withheld() -> list[str]:
    """Return the variables that are set for compilers and that they do not get."""
    return sorted(name for name in _COMPILERS_MAY_NOT if os.environ.get(name))


def cache_folder() -> Path:
    """Return the folder that holds built kernels; it may not exist yet.

    Raises FagenError where the environment names a home that nobody has, or none.
    """
    if environment("FAGEN_CACHE"):
        return _named("FAGEN_CACHE", "")
    return _named("XDG_CACHE_HOME", "~/.cache") / "fagen"


def config_folder() -> Path | None:
    """Return the folder of a user's own configuration; it may not exist.

    None where the user may not look into it, or has no home and names none.
    Raises FagenError where XDG_CONFIG_HOME begins with a home that nobody has.
    """
    try:
        folder = _named("XDG_CONFIG_HOME", "~/.config") / "fagen"
    except FagenError:
        if environment("XDG_CONFIG_HOME"):
            raise
        return None
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return folder
    except OSError:
        return None
    return folder


def named_folder(variable: str) -> Path | None:
    """Return the folder that a variable of the environment names, in full; None where it is unset.

    Raises ToolchainError where it begins with a home that nobody has.
    """
    try:
        return _named(variable, "") if environment(variable) else None
    except FagenError as error:
        raise ToolchainError(str(error)) from None


def _named(variable: str, usual: str) -> Path:
    """Return the folder that a variable of the environment names, or the usual one."""
    value = environment(variable)
    folder = Path(value or usual)
    try:
        if folder.parts[0] == "~" and os.environ.get("HOME") == "":
            raise RuntimeError  # an empty HOME would be taken for the root of the file system
        return folder.expanduser().absolute()
    except RuntimeError:
        where = f"{variable} = {value!r}" if value else f"{variable} is not set, and {usual}"
        way_out = f"set {variable} to a folder" if value else f"set HOME or {variable} to a folder"
        raise FagenError(f"{where} begins with a home that is not known: {way_out}") from None


def find_program(name: str) -> Path | None:
    """Find an executable: beside this Python first, so that a virtual environment is enough."""
    for folder in (sysconfig.get_path("scripts"), None):
        if program := shutil.which(name, path=folder):
            return Path(program).absolute()  # PATH may have folders without the way to them
    return None


def own_program() -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the words that run this very fagen's command line, and the variables they need."""
    places = [str(_PACKAGE.parent), *filter(None, [environment("PYTHONPATH")])]
    words = (sys.executable, "-P", "-m", "fagen")  # -P: no module of the folder that one is in
    return words, {"PYTHONPATH": os.pathsep.join(places)}


def find_packaged(package: str, relative: str) -> Path:
    """Find a file that a Python package ships, without importing the package.

    Raises ToolchainError, with the command that installs it, where it is not there.
    """
    spec = importlib.util.find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder) / relative).exists():
            return path
    wheel = package.replace("_", "-")
    raise ToolchainError(f"{wheel} is not installed: python -m pip install {wheel}")
