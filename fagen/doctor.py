"""Look at a machine: what is there comes out by lines, and how to get the rest."""

import importlib.metadata
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from fagen import toolchain
from fagen.arch import SM90
from fagen.build.locks import has_locks
from fagen.build.store import all_inside
from fagen.errors import FagenError, ToolchainError
from fagen.paths import (
    cache_folder,
    config_folder,
    environment,
    find_program,
    foreign,
    resolved,
    withheld,
)
from fagen.process import run
from fagen.programs import MissingError, numbers, refuse_to_compile_in
from fagen.toml_lines import printable

INSTALL_CLANG_FORMAT = "python -m pip install clang-format==23.1.5"
# The oldest driver that runs a program with a static runtime of that CUDA release (its notes).
DRIVER_SINCE = {12: (525,), 13: (580,)}
_EMULATION = "none is needed to build; on CPU tensors a kernel is emulated"
_ANOTHER_CACHE = "set FAGEN_CACHE to a folder with room that you may write to"
_ROOM = 20_000_000  # bytes that a kernel takes while it is built


@dataclass(frozen=True)
class Finding:
    """One line of `fagen doctor`: what was looked for, what there is, how to fix it, for what."""

    name: str
    ok: bool
    found: str
    remedy: str
    needed_for: str


def doctor() -> tuple[Finding, ...]:
    """Look at everything fagen can use, in the order in which it is needed."""
    return (
        _finding("clang-format", _clang_format, "rendering"),
        _finding("nvcc", _nvcc, "building"),
        _finding("g++", _gxx, "building"),
        _finding("ninja", lambda: _at(*toolchain.find_ninja()), "building"),
        _finding("CUTLASS", lambda: _at(*toolchain.find_cutlass()), "building"),
        _finding("cache folder", _cache, "building"),
        _finding("compilers", _compilers, "building several kernels"),
        _finding("schedules", _config, "schedules that a search of yours found"),
        _finding("disassembler", _disassembler, "checking machine code against the Plan"),
        _finding("torch", lambda: _at(_torch().folder, _torch().version), "calling from torch"),
        _finding("driver", _driver, "running on a GPU"),
        _finding("GPU", _gpu, "running on a GPU"),
    )


def _finding(name: str, look: Callable[[], str], needed_for: str) -> Finding:
    try:
        return Finding(name, True, look(), "", needed_for)
    except MissingError as missing:
        return Finding(name, False, missing.what, missing.remedy, needed_for)
    except ToolchainError as error:  # it is there and does not answer
        return Finding(name, False, str(error), "install it anew", needed_for)
    except FagenError as error:  # a variable names what is not there
        what, _, remedy = str(error).partition(": ")
        return Finding(name, False, what, remedy, needed_for)
    except OSError as error:
        what = ": ".join(filter(None, [printable(str(error.filename or "")), error.strerror]))
        return Finding(name, False, what, "see that you may look there", needed_for)


def _at(path: Path, version: str) -> str:
    return f"{version} at {printable(path)}"


def _clang_format() -> str:
    try:
        return importlib.metadata.version("clang-format")
    except importlib.metadata.PackageNotFoundError:
        raise MissingError("clang-format is missing", INSTALL_CLANG_FORMAT) from None


def _nvcc() -> str:
    compiler = toolchain.find_nvcc()
    return _at(compiler.nvcc, compiler.nvcc_version)


def _gxx() -> str:
    try:
        compiler = toolchain.find_nvcc()
    except FagenError:  # which has a line of its own
        compiler = None
    return _at(*toolchain.find_gxx(compiler))


def _cache() -> str:
    try:
        folder = cache_folder()
    except FagenError as error:
        raise MissingError("there is none", str(error)) from None
    named = printable(folder)
    try:
        refuse_to_compile_in(folder)
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    except OSError as error:
        raise MissingError(f"{named}: {error.strerror}", _ANOTHER_CACHE) from None
    if not writable:
        raise MissingError(f"{named} cannot be written", _ANOTHER_CACHE)
    kept = (folder / "kernels", folder / "search")
    places = (resolved(folder), *kept, *chain(*map(all_inside, kept)))
    if not_own := [fault for fault in map(foreign, places) if fault]:
        what, ways = map(printable, min(not_own))
        raise MissingError(
            f"{what}{f', and {more} more' if (more := len(not_own) - 1) else ''}", ways
        )
    free = shutil.disk_usage(existing).free
    if free < _ROOM:
        what = f"{named} has {free / 1e6:.1f} MB of room"
        raise MissingError(what, f"make room by `fagen cache prune`, or {_ANOTHER_CACHE}")
    try:
        locks = has_locks(existing)
    except OSError as error:
        raise MissingError(f"{named}: {error.strerror}", _ANOTHER_CACHE) from None
    without = "" if locks else "; its file system has no locks, so each machine has its own for it"
    return f"{named}, {free / 1e9:.1f} GB free{without}"


def _compilers() -> str:
    kept = ", ".join(withheld())
    return f"{toolchain.compile_jobs()} at once{f', which do not get {kept}' if kept else ''}"


def _config() -> str:
    folder = config_folder()
    if folder is None:
        name = next(filter(environment, ("XDG_CONFIG_HOME", "HOME")), "HOME")
        what = f"{name} ({environment(name)!r}) is none that you may look into"
        raise MissingError(what, "set XDG_CONFIG_HOME to a folder of yours, or do without")
    return f"yours in {printable(folder)}"


def _disassembler() -> str:
    tools = toolchain.find_disassembler()
    if tools is None:
        raise MissingError("nvdisasm or cuobjdump is missing", toolchain.INSTALL_DISASSEMBLER)
    return f"{printable(tools.nvdisasm)}, {printable(tools.cuobjdump)}"


def _torch() -> toolchain.Torch:
    torch = toolchain.find_torch()
    if torch is None:
        raise MissingError("torch is missing", toolchain.INSTALL_TORCH)
    if not torch.usable:
        raise MissingError(
            f"torch {torch.version} is too old, or has no headers", toolchain.INSTALL_TORCH
        )
    return torch


def _driver() -> str:
    try:
        cuda = toolchain.find_nvcc().nvcc_version
    except ToolchainError:
        cuda = "13.0"
    since = DRIVER_SINCE.get(numbers(cuda)[0], max(DRIVER_SINCE.values()))
    remedy = f"install NVIDIA driver R{since[0]} or later"
    try:
        version = _query_gpu("driver_version")[0]
    except ToolchainError:
        try:  # a container may have the driver and not the program that speaks of it
            text = Path("/proc/driver/nvidia/version").read_text()
        except OSError:
            raise MissingError("there is no NVIDIA driver", remedy) from None
        match = re.search(r"\b\d{3}\.\d[\d.]*", text)
        version = match[0] if match else ""
    if numbers(version) < since:
        what = f"driver {version} is older than what a kernel built by nvcc {cuda} needs"
        raise MissingError(what, remedy)
    return version


def _gpu() -> str:
    names, capabilities = _query_gpu("name"), _query_gpu("compute_cap")
    hopper = ".".join(map(str, SM90.capability))
    if hopper not in capabilities:
        raise MissingError(f"there is no Hopper GPU, only {', '.join(names)}", _EMULATION)
    return ", ".join(n for n, c in zip(names, capabilities, strict=True) if c == hopper)


def _query_gpu(field: str) -> list[str]:
    """Ask nvidia-smi for one field of every GPU. Raises ToolchainError where it cannot say."""
    program = find_program("nvidia-smi")
    if program is None:
        raise MissingError("there is no nvidia-smi", _EMULATION)
    answer = run([program, f"--query-gpu={field}", "--format=csv,noheader"], timeout=30)
    if answer.returncode or not answer.stdout.strip():
        raise MissingError("nvidia-smi finds no GPU", _EMULATION)
    return [line.strip() for line in answer.stdout.strip().splitlines()]
