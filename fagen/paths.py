"""Say where things lie, and write files whole; nothing else reads the environment.

Variables read: FAGEN_CACHE, XDG_CACHE_HOME, XDG_CONFIG_HOME, FAGEN_CUTLASS, CUDA_HOME, PATH.
"""

import importlib.util
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fagen.errors import FagenError, ToolchainError

_PACKAGE = Path(__file__).resolve().parent


def locate(name: str) -> Path:
    """Find `templates`, `schedules`, `generated` or `cli.py`.

    In an installed wheel they are inside the package, in a checkout beside it; a wheel has no
    `generated`.
    Raises FagenError where there is neither.
    """
    for home in (_PACKAGE, _PACKAGE.parent):
        if (home / name).exists():
            return home / name
    way_out = "name a folder with -o" if name == "generated" else "reinstall fagen"
    raise FagenError(f"{name} is neither in {_PACKAGE} nor beside it: {way_out}")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file in one step: whoever is killed, or has no room left, leaves the old one whole.

    Text is written as UTF-8. Raises OSError where the folder is missing or cannot be written.
    """
    path = path.resolve()  # a link stays one
    data = content.encode() if isinstance(content, str) else content
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


def environment(name: str) -> str | None:
    """Return an environment variable, or None where it is unset or empty."""
    return os.environ.get(name) or None


def environment_with(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment with `extra` on top, for a program about to be started."""
    return {**os.environ, **extra}


def cache_folder() -> Path:
    """Return the folder that holds built kernels; it may not exist yet.

    Raises FagenError where the environment names a home that nobody has, or none.
    """
    if environment("FAGEN_CACHE"):
        return _named("FAGEN_CACHE", "")
    return _named("XDG_CACHE_HOME", "~/.cache") / "fagen"


def config_folder() -> Path:
    """Return the folder of a user's own configuration; it may not exist.

    Raises FagenError where the environment names a home that nobody has, or none.
    """
    return _named("XDG_CONFIG_HOME", "~/.config") / "fagen"


def _named(variable: str, usual: str) -> Path:
    """Return the folder that a variable of the environment names, or the usual one."""
    said = environment(variable)
    try:
        return Path(said or usual).expanduser().absolute()
    except RuntimeError:
        where = f"{variable} = {said!r}" if said else f"{variable} is not set, and {usual}"
        raise FagenError(
            f"{where} begins with a home that is not known: set {variable} to a folder"
        ) from None


def find_program(name: str) -> Path | None:
    """Find an executable: beside this Python first, so that a virtual environment is enough."""
    for folder in (sysconfig.get_path("scripts"), None):
        if found := shutil.which(name, path=folder):
            return Path(found)
    return None


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
