"""Find what a build needs: nothing goes in but the machine, out come paths, versions and flags.

The only place that knows compiler flags. What is missing, too old or too new is said in words, all
of it at once, with the command that installs it.
"""

import importlib.util
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from fagen.errors import ToolchainError
from fagen.paths import compiler_environment, environment, find_packaged, find_program, named_folder
from fagen.process import run
from fagen.programs import (
    MissingError,
    answer,
    beginning,
    is_file,
    numbers,
    refuse_for_a_shell,
    too_old,
    version_of,
)
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
HOSTS_SINCE = {"g++": (9,), "clang++": (9,)}
# The newest host compilers that an nvcc takes, of that release on (CUDA Installation Guide for
# Linux, host compilers). Its own crt/host_config.h, which refuses others, is asked first.
HOSTS_UNTIL = {
    "g++": {(12, 4): 13, (12, 8): 14, (13, 0): 15},
    "clang++": {(12, 4): 17, (12, 6): 18, (12, 8): 19, (13, 0): 20},
}
CUTLASS_SINCE = (4, 0)
INSTALL_NVCC = 'python -m pip install "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.*"'
INSTALL_GXX = "apt install g++"
INSTALL_CUTLASS = "python -m pip install --no-deps nvidia-cutlass==4.2.0.0"
INSTALL_DISASSEMBLER = (
    "python -m pip install nvidia-cuda-nvdisasm==13.2.51 nvidia-cuda-cuobjdump==13.2.51"
)
INSTALL_TORCH = 'python -m pip install "torch>=2.10"'
INSTALL_NINJA = "python -m pip install ninja"

_OF_C = {"gcc": "g++", "clang": "clang++"}  # compilers, and those of C++ beside them
# may stand before a compiler; fagen keeps what it builds itself, and runs it here
_LAUNCHERS = {"ccache", "sccache", "distcc", "icecc"}


@dataclass(frozen=True)
class Disassembler:
    """The two programs that read machine code."""

    nvdisasm: Path
    cuobjdump: Path


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """nvcc and the toolkit around it; `newest` are the host compilers that it takes, by name."""

    nvcc: Path
    nvcc_version: str
    cuda_include: Path
    library_dirs: tuple[Path, ...]
    profile: Path | None = None  # in which nvcc finds more of its flags
    newest: Mapping[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Toolchain(Compiler):
    """All that a kernel's build needs; the disassembler is None where none is installed."""

    gxx: Path
    gxx_version: str
    ninja: Path
    cutlass: Path  # the include folder
    cutlass_version: str
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
            numbers(self.version) >= TORCH_SINCE
            and (self.include / "torch/csrc/stable/library.h").is_file()
        )


def find_toolchain() -> Toolchain:
    """Find all that a build needs. Raises ToolchainError that names everything missing."""
    parts: dict[str, Any] = {}
    missing: list[str] = []
    for name, find in {
        "compiler": find_nvcc,
        "gxx": lambda: find_gxx(parts.get("compiler")),  # nvcc has a say in what g++ will do
        "ninja": find_ninja,
        "cutlass": find_cutlass,
    }.items():
        try:
            parts[name] = find()
        except ToolchainError as error:
            missing.append(str(error))
    if missing:
        raise ToolchainError("\n".join(missing))
    return Toolchain(
        **vars(parts["compiler"]),
        gxx=parts["gxx"][0],
        gxx_version=parts["gxx"][1],
        ninja=parts["ninja"][0],
        cutlass=parts["cutlass"][0],
        cutlass_version=parts["cutlass"][1],
        disassembler=find_disassembler(),
    )


def compile_jobs() -> int:
    """Return how many compilers run at once: MAX_JOBS, else as many as there are processors.

    Raises ToolchainError where MAX_JOBS is no such number.
    """
    jobs = environment("MAX_JOBS")
    if jobs is None:
        return len(os.sched_getaffinity(0))
    if not re.fullmatch(r" *[1-9]\d{0,3} *", jobs):
        raise MissingError(
            f"MAX_JOBS is {jobs!r}", "set it to a number from 1 to 9999, or unset it"
        )
    return int(jobs)


def find_nvcc() -> Compiler:
    """Find the first nvcc that is complete: CUDA_HOME alone if set, else PATH, system, PyPI.

    Raises ToolchainError that says what is wrong with each one there is.
    """
    home = named_folder("CUDA_HOME")
    faults = []
    for nvcc in [home / "bin/nvcc"] if home else _nvccs():
        if is_file(nvcc):
            try:
                return _inspect(nvcc, nvcc.stat().st_mtime_ns)
            except ToolchainError as error:
                faults.append(str(error))
        elif home:
            faults.append(f"CUDA_HOME is {printable(home)}, where there is no bin/nvcc")
    remedy = _instead_of(home) if home else INSTALL_NVCC
    raise MissingError("; ".join(faults) or "nvcc, the CUDA compiler, is missing", remedy)


def _nvccs() -> list[Path]:
    """Where nvcc may be if CUDA_HOME does not say."""
    on_path = find_program("nvcc")
    return [*([on_path] if on_path else []), SYSTEM_CUDA / "bin/nvcc", *_in_wheels("nvcc")]


def _instead_of(home: Path) -> str:
    """What helps where CUDA_HOME is wrong: to install would not, since nothing else is looked at.

    The folder around it is tried too, in case it names the one in which nvcc lies.
    """
    ways_out = {home.parent / "bin/nvcc": f"set it to {printable(home.parent)}"}
    ways_out |= dict.fromkeys(_nvccs(), "unset it")
    for nvcc, way_out in ways_out.items():
        if is_file(nvcc):
            with suppress(ToolchainError):
                version = _inspect(nvcc, nvcc.stat().st_mtime_ns).nvcc_version
                return f"{way_out}, nvcc {version} at {printable(nvcc)} will do"
    return f"unset it, and {INSTALL_NVCC}"


def find_gxx(compiler: Compiler | None = None) -> tuple[Path, str]:
    """Find g++ and its version: what NVCC_CCBIN names, else what CXX names, else g++ on PATH.

    Where one of the two is set no other is looked for; it may name a clang++. With an nvcc it has
    to be one that this nvcc takes; where g++ on PATH is too new, an older one beside it is taken,
    as g++-15. Raises ToolchainError where it is missing, none of the two, too old or too new.
    """
    for variable in ("NVCC_CCBIN", "CXX"):
        if named := environment(variable):
            remedy = f"set {variable} to the path of a g++ or clang++, or unset it"
            return _judged(_named_gxx(variable, named, remedy), remedy, compiler)
    path = find_program("g++")
    if path is None:
        raise MissingError("g++ is missing", INSTALL_GXX)
    newest = compiler and compiler.newest.get("g++")
    try:
        return _judged(path, f"apt install g++-{newest}" if newest else INSTALL_GXX, compiler)
    except MissingError:
        for number in range(newest or 0, HOSTS_SINCE["g++"][0] - 1, -1):
            if older := find_program(f"g++-{number}"):
                with suppress(ToolchainError):
                    return _judged(older, INSTALL_GXX, compiler)
        raise


def _named_gxx(variable: str, named: str, remedy: str) -> Path:
    """Where the compiler is that a variable names: by its path, its name, or a g++'s folder.

    NVCC_CCBIN may name gcc, as for nvcc, and CXX may have ccache before it, as for a shell.
    """
    words = [named]
    if variable == "CXX":
        with suppress(ValueError):  # an odd number of quotes
            words = shlex.split(named)
        words = [word for word in words if Path(word).name not in _LAUNCHERS]
        if len(words) != 1:
            raise MissingError(f"{variable} is {named!r}, which is not one program alone", remedy)
    path = Path(words[0]) if "/" in words[0] else find_program(words[0])
    if path and path.is_dir():
        path = path / "g++"
    if path and (c := re.fullmatch(r"(.*-)?(gcc|clang)(-[\d.]+)?", path.name)):  # links no C++
        path = path.with_name(f"{c[1] or ''}{_OF_C[c[2]]}{c[3] or ''}")
    if path is None or not is_file(path):
        raise MissingError(f"{variable} is {named!r}, and there is no such compiler", remedy)
    return path.absolute()


def _judged(path: Path, remedy: str, compiler: Compiler | None) -> tuple[Path, str]:
    """A host compiler and its version.  Raises ToolchainError where a build cannot use it."""
    refuse_for_a_shell(path)
    name = "g++"
    try:
        version = version_of(path, "-dumpfullversion")
    except ToolchainError as error:
        text = ""
        with suppress(ToolchainError):
            text = answer(path, "--version").stdout
        clang = re.search(r"clang version (\d[\d.]*)", text)
        if clang is None:
            what = f"{printable(path)} is no g++, nor clang++ ({error})"
            raise MissingError(what, remedy) from None
        name, version = "clang++", clang[1]
    if numbers(version) < HOSTS_SINCE[name]:
        raise MissingError(too_old(name, version, path, HOSTS_SINCE[name]), remedy)
    newest = compiler and compiler.newest.get(name)
    if compiler and newest and numbers(version)[0] > newest:
        takes = f"nvcc {compiler.nvcc_version}, which takes {name} {newest} at most"
        raise MissingError(f"{name} {version} at {printable(path)} is too new for {takes}", remedy)
    return path, version if name == "g++" else f"clang {version}"


def find_ninja() -> tuple[Path, str]:
    """Find ninja and its version. Raises ToolchainError where it is missing."""
    path, since = find_program("ninja"), (1, 8)
    if path is None:
        raise MissingError("ninja is missing", INSTALL_NINJA)
    version = version_of(path, "--version")
    if numbers(version) < since:
        raise MissingError(too_old("ninja", version, path, since), INSTALL_NINJA)
    return path, version


def find_cutlass() -> tuple[Path, str]:
    """Find the CUTLASS headers: FAGEN_CUTLASS alone if set, else the installed package.

    Returns the include folder and the version. Raises ToolchainError where there are none.
    """
    if own := named_folder("FAGEN_CUTLASS"):
        places = [own, own / "include"]  # a checkout has them one folder down
        where, remedy = f"in FAGEN_CUTLASS ({printable(own)})", "set it to CUTLASS's include folder"
    else:
        where, remedy = "installed", INSTALL_CUTLASS
        try:
            places = [find_packaged("cutlass_library", "source/include")]
        except ToolchainError:
            places = []
    for include in places:
        header = include / "cutlass/version.h"
        if is_file(header) and is_file(include / "cute/tensor.hpp"):
            refuse_for_a_shell(include)
            parts = re.findall(
                r"#define CUTLASS_(MAJOR|MINOR|PATCH) (\d{1,6})\b", beginning(header)
            )
            version = ".".join(dict(parts).get(part, "0") for part in ("MAJOR", "MINOR", "PATCH"))
            if numbers(version) < CUTLASS_SINCE:
                raise MissingError(too_old("CUTLASS", version, include, CUTLASS_SINCE), remedy)
            return include, version
    raise MissingError(f"the CUTLASS headers are not {where}", remedy)


def find_disassembler() -> Disassembler | None:
    """Find nvdisasm and cuobjdump: beside nvcc, on PATH or from PyPI; None where one is missing."""
    tools = []
    for name in ("nvdisasm", "cuobjdump"):
        places: list[Path | None] = [find_program(name), *_in_wheels(name)]
        if home := named_folder("CUDA_HOME"):
            places.insert(0, home / "bin" / name)
        places.append(SYSTEM_CUDA / "bin" / name)
        tools.append(next((place for place in places if place and is_file(place)), None))
    nvdisasm, cuobjdump = tools
    return Disassembler(nvdisasm, cuobjdump) if nvdisasm and cuobjdump else None


def find_torch() -> Torch | None:
    """Find an installed torch without importing it, which takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    try:
        text = beginning(folder / "version.py")
    except OSError:
        return None
    version = re.search(r"__version__ = ['\"]([^'\"]+)", text)
    return Torch(version[1], folder) if version else None


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
    refuse_for_a_shell(nvcc)
    stated = compiler_environment()
    answer = run([nvcc, "--version"], timeout=60, only=stated)
    release = re.search(r"release [\d.]+, V([\d.]+)", answer.stdout)
    if answer.returncode or not release:
        why = printable(" ".join(answer.stderr.split()))
        raise ToolchainError(f"{printable(nvcc)} does not run: {why}")
    version = release[1]
    if numbers(version) < NVCC_SINCE:
        raise ToolchainError(too_old("nvcc", version, nvcc, NVCC_SINCE))
    # nvcc on PATH may be a wrapper or a link: a dry run tells where the toolkit really is.
    dry = run([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull], timeout=60, only=stated)
    top = re.search(r"^#\$ TOP=(.*)$", dry.stdout + dry.stderr, re.MULTILINE)
    top_folder = Path(top[1].strip()) if top else None
    root = (
        top_folder.resolve() if top_folder and top_folder.is_dir() else nvcc.resolve().parent.parent
    )
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
    if missing := [part for part, present in parts.items() if not present]:
        raise ToolchainError(f"{printable(nvcc)} ({version}) lacks {', '.join(missing)}")
    assert include is not None
    text = beginning(include / "cuda_runtime_api.h")
    if match := re.search(r"#define CUDART_VERSION\s+(\d{1,9})\b", text):
        headers = (int(match[1]) // 1000, int(match[1]) % 1000 // 10)
        if headers != numbers(version)[:2]:
            raise ToolchainError(
                f"{printable(nvcc)} is {version} but its headers are of {headers[0]}.{headers[1]}"
            )
    newest = {name: _newest(until, version) for name, until in HOSTS_UNTIL.items()}
    refused = beginning(include / "crt/host_config.h")
    if gxx := re.search(r"#if __GNUC__ > (\d{1,3})\b", refused):
        newest["g++"] = int(gxx[1])
    if clang := re.search(r"#if \(__clang_major__ >= (\d{1,3})\)", refused):
        newest["clang++"] = int(clang[1]) - 1
    return Compiler(
        nvcc=nvcc,
        nvcc_version=version,
        cuda_include=include,
        library_dirs=tuple(libraries),
        profile=root / "bin/nvcc.profile",
        newest=newest,
    )


def _newest(table: dict[tuple[int, int], int], version: str) -> int | None:
    return next((n for since, n in reversed(table.items()) if numbers(version) >= since), None)
