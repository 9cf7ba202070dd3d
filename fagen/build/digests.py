"""Tell by content what a version does not: a Toolchain goes in, a digest for each part comes out.

A wrapper of a compiler, what g++ finds on PATH, nvcc's profile with more of its flags, and headers
that a user named may change while all versions stay. They decide what is built as flags do.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from fagen.paths import compiler_environment, environment
from fagen.toolchain import Toolchain

_TOLD_BY = 1 << 16  # bytes at the beginning of a program, and its length, tell it from another


def digests(tools: Toolchain) -> dict[str, str]:
    """Return the sha256 of what tells programs and headers apart that have the same version."""
    programs = {"nvcc": tools.nvcc, "nvcc.profile": tools.profile}
    sums = {name: _digest(file) for name, file in programs.items() if file}
    if environment("FAGEN_CUTLASS"):  # of an installed package the version is enough
        sums["CUTLASS"] = _digest_of(tuple(_headers(tools.cutlass)), str(tools.cutlass))
    return {**sums, **host_digests(tools.gxx)}


def host_digests(gxx: Path) -> dict[str, str]:
    """Return those of g++, and of the assembler and linker that it may take from PATH."""
    path = compiler_environment()["PATH"]
    beside = {name: shutil.which(name, path=path) for name in ("as", "ld")}
    sums = {name: _digest(Path(file)) for name, file in beside.items() if file}
    return {"g++": _digest(gxx), **sums}


def _digest(program: Path) -> str:
    """Tell a program from another: a wrapper by its whole text, machine code by how it begins."""
    try:
        with program.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return hashlib.sha256(file.read(_TOLD_BY) + b"%d" % size).hexdigest()
    except OSError:
        return "not to be read"


def _headers(include: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the files of CUTLASS in a folder: of each its size and when it was changed."""
    for folder in (include / "cute", include / "cutlass"):
        for around, folders, files in os.walk(folder):
            folders.sort()  # in the same order everywhere
            for name in sorted(files):
                with suppress(OSError):  # a compiler that needs it says so
                    status = os.stat(path := f"{around}/{name}")  # noqa: PTH116 - Paths take 20 ms
                    if stat.S_ISREG(status.st_mode):
                        yield path, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=1)  # what a stat cannot tell is read once
def _digest_of(headers: tuple[tuple[str, int, int], ...], include: str) -> str:
    digest = hashlib.sha256()
    for name, size, _ in headers:
        digest.update(os.fsencode(f"{name.removeprefix(include)}\0{size}\0"))
        with suppress(OSError):
            digest.update(Path(name).read_bytes())
    return digest.hexdigest()
