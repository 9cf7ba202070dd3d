"""Compilers made of scripts: nvcc prints its source as if ptxas had, g++ copies a file.

And folders of the cache that no compiler filled.
"""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fagen.build import Binary, build
from fagen.build.records import Record
from fagen.build.store import Slot, kernels_folder
from fagen.kind import Plan
from fagen.render import Hashes, Source
from fagen.toolchain import Toolchain, find_ninja

LOG = """\
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
ptxas info    : Function properties for kernel
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 16 barriers
"""
GOOD = LOG.format(stack=0, stores=0, loads=0, registers=168)
SPILLS = LOG.format(stack=16, stores=12, loads=20, registers=168)

# It says what its environment is and what it was asked, and a test writes the log it wants.
NVCC = """#!/bin/sh
for last; do :; done
source="${{last%.o}}.cu"
env > {folder}/told; echo "$@" >> {folder}/told
echo "$source" >> {folder}/counter
cat "$source"
grep -q SLOW "$source" && sleep 60
grep -q "error:" "$source" && exit 2
cp "$source" "$last"
"""
GXX = """#!/bin/sh
for last; do :; done
cp {folder}/library "$last"
"""


def make_program(path: Path, text: str) -> Path:
    """Write a script that can be run, and the folders it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def make_cutlass(root: Path, version: tuple[int, int, int] = (4, 2, 0)) -> Path:
    """Headers in the shape of CUTLASS's, with its version in them."""
    names = ("MAJOR", "MINOR", "PATCH")
    (root / "cutlass").mkdir(parents=True)
    (root / "cute").mkdir()
    (root / "cute/tensor.hpp").touch()
    (root / "cutlass/version.h").write_text(
        "".join(f"#define CUTLASS_{n} {v}\n" for n, v in zip(names, version, strict=True))
    )
    return root


def scripted(folder: Path) -> Toolchain:
    """A toolchain in `folder`, which has what nvcc was `told`, and a `counter` of its runs."""
    (folder / "library").write_text("machine code")
    (folder / "nvcc.profile").write_text("INCLUDES +=\n")
    return Toolchain(
        nvcc=make_program(folder / "bin/nvcc", NVCC.format(folder=folder)),
        nvcc_version="13.0.88",
        gxx=make_program(folder / "bin/g++", GXX.format(folder=folder)),
        gxx_version="12.2.0",
        ninja=find_ninja()[0],
        cutlass=make_cutlass(folder / "cutlass"),
        cutlass_version="4.2.0",
        cuda_include=folder,
        library_dirs=(),
        disassembler=None,
        profile=folder / "nvcc.profile",
    )


def source(log: str = GOOD, slug: str = "fwd_x") -> Source:
    """What such an nvcc will print."""
    planned: Any = None  # builds are judged by one that is given beside it
    return Source(slug, log, "", "", hash="0" * 64, hashes=Hashes("", "", ""), plan=planned)


def make(log: str, planned: Plan, tools: Toolchain, slug: str = "fwd_x") -> Binary:
    """Build it, to be judged by a Plan."""
    return build(source(log, slug), planned, binding=False, toolchain=tools)


def slowed(tools: Toolchain) -> Path:
    """Have nvcc wait, for a source that says SLOW, until there is the file that is returned."""
    done = tools.nvcc.with_name("done")
    slow = f"until [ -e {shlex.quote(str(done))} ]; do sleep 0.01; done"
    make_program(tools.nvcc, tools.nvcc.read_text().replace("sleep 60", slow))
    return done


def compilations(counter: Path) -> int:
    """How often nvcc ran."""
    return len(counter.read_text().splitlines()) if counter.exists() else 0


# ---- folders of the cache ------------------------------------------------------------------------

RECORD = Record("x.so", {"g++": "12.2.0"}, {}, {}, 1.0)


def fill(making: Path, _: object = None) -> Record:
    """Fill a folder as a build does."""
    making.mkdir(parents=True, exist_ok=True)
    (making / "x.so").write_text("machine code")
    return RECORD


def made(name: str = "fwd_x", make: Callable[[Path, Path], Record] = fill) -> bool:
    """Have a folder of the cache made, as a build does; return whether it was there already."""
    return Slot(kernels_folder() / name, "x.so").filled(make)[1]
