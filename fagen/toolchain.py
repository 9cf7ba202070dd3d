"""Find what a build needs: nothing goes in but the machine, out come paths, versions and flags.

The only place that knows compiler flags. What is missing or too old is said in words, all of it at
once, with the command that installs it.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from fagen.arch import SM90
from fagen.errors import FagenError, ToolchainError
from fagen.paths import cache_folder, environment, find_packaged, find_program, foreign
from fagen.process import run
from fagen.toml_lines import printable

# One set for every kernel. No --use_fast_math: a kernel that wants an approximation names it.
# CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED stays unset: it quadruples the time to compile.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-gencode=arch=compute_90a,code=sm_90a",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-DNDEBUG",
    "-lineinfo",
    *("-Xptxas", "-v"),
    *("-Xcompiler", "-fPIC"),
)
# g++ links what nvcc compiled: without relocatable device code there is nothing for nvlink to do.
RUNTIME_LIBRARIES = ("-lcudart_static", "-ldl", "-lrt", "-lpthread")
LINK_FLAGS = ("-shared", "-Wl,--no-undefined", *RUNTIME_LIBRARIES)
# The first torch whose stable ABI has all that the binding calls; later ones load it too.
TORCH_SINCE = (2, 10)
BINDING_FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-DNDEBUG", "-DUSE_CUDA"),
    f"-DTORCH_TARGET_VERSION=0x{TORCH_SINCE[0]:02x}{TORCH_SINCE[1]:02x}000000000000",
)
TORCH_LIBRARIES = ("-Wl,--no-as-needed", "-ltorch")  # which is in the process already
# The binding finds its kernel one folder up.
BINDING_LINK_FLAGS = ("-shared", *TORCH_LIBRARIES, "-Wl,-rpath,$ORIGIN/..")

SYSTEM_CUDA = Path("/usr/local/cuda")  # where NVIDIA's installers put it

NVCC_SINCE = (12, 4)
GXX_SINCE = (9,)
CUTLASS_SINCE = (4, 0)
# The oldest driver that runs a program with a static runtime of that CUDA release (its notes).
DRIVER_SINCE = {12: (525,), 13: (580,)}

INSTALL_NVCC = 'python -m pip install "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.*"'
INSTALL_GXX = "apt install g++"
INSTALL_CUTLASS = "python -m pip install --no-deps nvidia-cutlass==4.2.0.0"
INSTALL_DISASSEMBLER = (
    "python -m pip install nvidia-cuda-nvdisasm==13.2.51 nvidia-cuda-cuobjdump==13.2.51"
)
INSTALL_TORCH = 'python -m pip install "torch>=2.10"'
INSTALL_NINJA = "python -m pip install ninja"
INSTALL_CLANG_FORMAT = "python -m pip install clang-format==23.1.5"
EMULATION = "none is needed to build; on CPU tensors a kernel is emulated"


class MissingError(ToolchainError):
    """Something is missing or will not do, and there is a way to fix it."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}: {remedy}")
        self.what, self.remedy = what, remedy


@dataclass(frozen=True)
class Compiler:
    """nvcc and the toolkit around it."""

    nvcc: Path
    version: str
    include: Path
    library_dirs: tuple[Path, ...]


@dataclass(frozen=True)
class Disassembler:
    """The two programs that read machine code."""

    nvdisasm: Path
    cuobjdump: Path


@dataclass(frozen=True)
class Toolchain:
    """All that a kernel's build needs; the disassembler is None where none is installed."""

    nvcc: Path
    nvcc_version: str
    gxx: Path
    gxx_version: str
    ninja: Path
    cutlass: Path  # the include folder
    cutlass_version: str
    cuda_include: Path
    library_dirs: tuple[Path, ...]
    disassembler: Disassembler | None


@dataclass(frozen=True)
class Torch:
    """An installed torch, found without importing it."""

    version: str
    folder: Path

    @property
    def include(self) -> Path:
        """The folder with its headers."""
        return self.folder / "include"

    @property
    def library_dir(self) -> Path:
        """The folder with libtorch.so."""
        return self.folder / "lib"

    @property
    def usable(self) -> bool:
        """Whether a binding can be built against it."""
        return (
            _numbers(self.version) >= TORCH_SINCE
            and (self.include / "torch/csrc/stable/library.h").is_file()
        )


@dataclass(frozen=True)
class Finding:
    """One line of `fagen doctor`: what was looked for, what there is, how to fix it, for what."""

    name: str
    ok: bool
    found: str
    remedy: str
    needed_for: str


def find_toolchain() -> Toolchain:
    """Find all that a build needs. Raises ToolchainError that names everything missing."""
    found: list[Any] = []
    missing: list[str] = []
    for find in (find_nvcc, find_gxx, find_ninja, find_cutlass):
        try:
            found.append(find())
        except ToolchainError as error:
            missing.append(str(error))
    if missing:
        raise ToolchainError("\n".join(missing))
    compiler, (gxx, gxx_version), (ninja, _), (cutlass, cutlass_version) = found
    return Toolchain(
        nvcc=compiler.nvcc,
        nvcc_version=compiler.version,
        gxx=gxx,
        gxx_version=gxx_version,
        ninja=ninja,
        cutlass=cutlass,
        cutlass_version=cutlass_version,
        cuda_include=compiler.include,
        library_dirs=compiler.library_dirs,
        disassembler=find_disassembler(),
    )


def find_nvcc() -> Compiler:
    """Find the first nvcc that is complete: CUDA_HOME alone if set, else PATH, system, PyPI.

    Raises ToolchainError that says what is wrong with each one there is.
    """
    home = environment("CUDA_HOME")
    faults = []
    for nvcc in [Path(home) / "bin/nvcc"] if home else _nvccs():
        if nvcc.is_file():
            try:
                return _inspect(nvcc, nvcc.stat().st_mtime_ns)
            except ToolchainError as error:
                faults.append(str(error))
        elif home:
            faults.append(f"CUDA_HOME is {home}, where there is no bin/nvcc")
    remedy = _instead_of(Path(home)) if home else INSTALL_NVCC
    raise MissingError("; ".join(faults) or "nvcc, the CUDA compiler, is missing", remedy)


def _nvccs() -> list[Path]:
    """Where nvcc may be if CUDA_HOME does not say."""
    on_path = find_program("nvcc")
    return [*([on_path] if on_path else []), SYSTEM_CUDA / "bin/nvcc", *_in_wheels("nvcc")]


def _instead_of(home: Path) -> str:
    """What helps where CUDA_HOME is wrong: to install would not, since nothing else is looked at.

    The folder around it is tried too, in case it names the one in which nvcc lies.
    """
    ways_out = {home.parent / "bin/nvcc": f"set it to {home.parent}"}
    ways_out |= dict.fromkeys(_nvccs(), "unset it")
    for nvcc, way_out in ways_out.items():
        if nvcc.is_file():
            with suppress(ToolchainError):
                version = _inspect(nvcc, nvcc.stat().st_mtime_ns).version
                return f"{way_out}, nvcc {_at(nvcc, version)} will do"
    return f"unset it, and {INSTALL_NVCC}"


def find_gxx() -> tuple[Path, str]:
    """Find g++ and its version. Raises ToolchainError where it is missing or too old."""
    return _program("g++", "-dumpfullversion", GXX_SINCE, INSTALL_GXX)


def find_ninja() -> tuple[Path, str]:
    """Find ninja and its version. Raises ToolchainError where it is missing."""
    return _program("ninja", "--version", (1, 8), INSTALL_NINJA)


def find_cutlass() -> tuple[Path, str]:
    """Find the CUTLASS headers: FAGEN_CUTLASS alone if set, else the installed package.

    Returns the include folder and the version. Raises ToolchainError where there are none.
    """
    if own := environment("FAGEN_CUTLASS"):
        places = [Path(own), Path(own) / "include"]  # a checkout has them one folder down
        where, remedy = f"in FAGEN_CUTLASS ({own})", "set it to CUTLASS's include folder"
    else:
        where, remedy = "installed", INSTALL_CUTLASS
        try:
            places = [find_packaged("cutlass_library", "source/include")]
        except ToolchainError:
            places = []
    for include in places:
        header = include / "cutlass/version.h"
        if header.is_file() and (include / "cute/tensor.hpp").is_file():
            numbers = dict(
                re.findall(r"#define CUTLASS_(MAJOR|MINOR|PATCH) (\d+)", header.read_text())
            )
            version = ".".join(numbers.get(part, "0") for part in ("MAJOR", "MINOR", "PATCH"))
            if _numbers(version) < CUTLASS_SINCE:
                raise MissingError(_too_old("CUTLASS", version, include, CUTLASS_SINCE), remedy)
            return include, version
    raise MissingError(f"the CUTLASS headers are not {where}", remedy)


def find_disassembler() -> Disassembler | None:
    """Find nvdisasm and cuobjdump: beside nvcc, on PATH or from PyPI; None where one is missing."""
    tools = []
    for name in ("nvdisasm", "cuobjdump"):
        places: list[Path | None] = [find_program(name), *_in_wheels(name)]
        if home := environment("CUDA_HOME"):
            places.insert(0, Path(home) / "bin" / name)
        places.append(SYSTEM_CUDA / "bin" / name)
        tools.append(next((place for place in places if place and place.is_file()), None))
    nvdisasm, cuobjdump = tools
    return Disassembler(nvdisasm, cuobjdump) if nvdisasm and cuobjdump else None


def find_torch() -> Torch | None:
    """Find an installed torch without importing it, which takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    try:
        text = (folder / "version.py").read_text()
    except OSError:
        return None
    version = re.search(r"__version__ = ['\"]([^'\"]+)", text)
    return Torch(version[1], folder) if version else None


def doctor() -> tuple[Finding, ...]:
    """Look at everything fagen can use, in the order in which it is needed."""
    return (
        _finding("clang-format", _clang_format, "rendering"),
        _finding("nvcc", lambda: _at(find_nvcc().nvcc, find_nvcc().version), "building"),
        _finding("g++", lambda: _at(*find_gxx()), "building"),
        _finding("ninja", lambda: _at(*find_ninja()), "building"),
        _finding("CUTLASS", lambda: _at(*find_cutlass()), "building"),
        _finding("cache folder", _cache, "building"),
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


def _at(path: Path, version: str) -> str:
    return f"{version} at {path}"


def _clang_format() -> str:
    try:
        return importlib.metadata.version("clang-format")
    except importlib.metadata.PackageNotFoundError:
        raise MissingError("clang-format is missing", INSTALL_CLANG_FORMAT) from None


def _cache() -> str:
    try:
        folder = cache_folder()
    except FagenError as error:
        raise MissingError("there is none", str(error)) from None
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise MissingError(f"{folder} cannot be written", "set FAGEN_CACHE to a folder with room")
    places = (folder.resolve(), *sorted(folder.rglob("*")))
    if not_own := [found for found in map(foreign, places) if found]:
        what, ways = map(printable, not_own[0])
        raise MissingError(
            f"{what}{f', and {more} more' if (more := len(not_own) - 1) else ''}", ways
        )
    return f"{folder}, {shutil.disk_usage(there).free / 1e9:.1f} GB free"


def _disassembler() -> str:
    tools = find_disassembler()
    if tools is None:
        raise MissingError("nvdisasm or cuobjdump is missing", INSTALL_DISASSEMBLER)
    return f"{tools.nvdisasm}, {tools.cuobjdump}"


def _torch() -> Torch:
    torch = find_torch()
    if torch is None:
        raise MissingError("torch is missing", INSTALL_TORCH)
    if not torch.usable:
        raise MissingError(f"torch {torch.version} is too old, or has no headers", INSTALL_TORCH)
    return torch


def _driver() -> str:
    try:
        cuda = find_nvcc().version
    except ToolchainError:
        cuda = "13.0"
    since = DRIVER_SINCE.get(_numbers(cuda)[0], max(DRIVER_SINCE.values()))
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
    if _numbers(version) < since:
        what = f"driver {version} is older than what a kernel built by nvcc {cuda} needs"
        raise MissingError(what, remedy)
    return version


def _gpu() -> str:
    names, capabilities = _query_gpu("name"), _query_gpu("compute_cap")
    hopper = ".".join(map(str, SM90.capability))
    if hopper not in capabilities:
        raise MissingError(f"there is no Hopper GPU, only {', '.join(names)}", EMULATION)
    return ", ".join(n for n, c in zip(names, capabilities, strict=True) if c == hopper)


def _query_gpu(field: str) -> list[str]:
    """Ask nvidia-smi for one field of every GPU. Raises ToolchainError where it cannot say."""
    program = find_program("nvidia-smi")
    if program is None:
        raise MissingError("there is no nvidia-smi", EMULATION)
    answer = run([program, f"--query-gpu={field}", "--format=csv,noheader"], timeout=30)
    if answer.returncode or not answer.stdout.strip():
        raise MissingError("nvidia-smi finds no GPU", EMULATION)
    return [line.strip() for line in answer.stdout.strip().splitlines()]


def _program(name: str, flag: str, since: tuple[int, ...], remedy: str) -> tuple[Path, str]:
    path = find_program(name)
    if path is None:
        raise MissingError(f"{name} is missing", remedy)
    version = _version_of(path, flag, path.stat().st_mtime_ns)
    if _numbers(version) < since:
        raise MissingError(_too_old(name, version, path, since), remedy)
    return path, version


@cache
def _version_of(path: Path, flag: str, _changed: int) -> str:
    answer = run([path, flag], timeout=30)
    if answer.returncode or not _numbers(answer.stdout):
        raise ToolchainError(f"{path} {flag} does not say its version: {answer.stderr.strip()}")
    return answer.stdout.split()[0]


def _in_wheels(program: str) -> Iterator[Path]:
    """Where NVIDIA's wheels put a program: site-packages/nvidia/cu13/bin, the newest first."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec and spec.submodule_search_locations) or ()
    yield from sorted(
        chain.from_iterable(Path(folder).glob(f"cu*/bin/{program}") for folder in folders),
        reverse=True,
    )


@cache
def _inspect(nvcc: Path, _changed: int) -> Compiler:
    """Look at one nvcc and the toolkit around it. Raises ToolchainError that says what is wrong."""
    answer = run([nvcc, "--version"], timeout=60)
    release = re.search(r"release [\d.]+, V([\d.]+)", answer.stdout)
    if answer.returncode or not release:
        raise ToolchainError(f"{nvcc} does not run: {answer.stderr.strip()}")
    version = release[1]
    if _numbers(version) < NVCC_SINCE:
        raise ToolchainError(_too_old("nvcc", version, nvcc, NVCC_SINCE))
    # nvcc on PATH may be a wrapper or a link: a dry run tells where the toolkit really is.
    dry = run([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull], timeout=60)
    top = re.search(r"^#\$ TOP=(.*)$", dry.stdout + dry.stderr, re.MULTILINE)
    root = Path(top[1].strip()).resolve() if top else nvcc.resolve().parent.parent
    roots = [*sorted(root.glob("targets/*-linux")), root]
    include = next((r / "include" for r in roots if (r / "include/cuda_runtime.h").is_file()), None)
    folders = [r / lib for r in roots for lib in ("lib", "lib64")]  # a wheel has lib alone
    libraries = {f.resolve(): None for f in folders if (f / "libcudart_static.a").is_file()}
    parts = {
        "the CUDA runtime's headers (cudart)": include is not None,
        "libcudart_static.a (cudart)": bool(libraries),
        "the compiler's own headers (crt)": include and (include / "crt/host_config.h").is_file(),
        "nvvm's cicc (nvvm)": (root / "nvvm/bin/cicc").is_file(),
        "ptxas (nvcc)": (root / "bin/ptxas").is_file(),
    }
    if missing := [part for part, there in parts.items() if not there]:
        raise ToolchainError(f"{nvcc} ({version}) lacks {', '.join(missing)}")
    assert include is not None
    text = (include / "cuda_runtime_api.h").read_text(errors="replace")
    if match := re.search(r"#define CUDART_VERSION\s+(\d+)", text):
        headers = (int(match[1]) // 1000, int(match[1]) % 1000 // 10)
        if headers != _numbers(version)[:2]:
            raise ToolchainError(
                f"{nvcc} is {version} but its headers are of {headers[0]}.{headers[1]}"
            )
    return Compiler(nvcc, version, include, tuple(libraries))


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) for 2.13.0+cpu."""
    match = re.match(r"\d+(\.\d+)*", version.strip())
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _too_old(name: str, version: str, path: Path, since: tuple[int, ...]) -> str:
    oldest = ".".join(map(str, since))
    return f"{name} {version} at {path} is too old, {oldest} is the oldest that will do"
