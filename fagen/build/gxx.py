"""Libraries that g++ makes for a torch: a text and flags in, a library and its record out."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fagen.build.digests import digests
from fagen.build.records import Record, stated_environment
from fagen.build.steps import Command, run_steps
from fagen.toolchain import Toolchain, Torch

_LAYOUT = 3  # of a folder in the cache; part of every key


def key_of(*parts: Any) -> str:
    """Return what a folder of the cache is known by: a hash of all that decides what is in it."""
    return hashlib.sha256(json.dumps([_LAYOUT, *parts]).encode()).hexdigest()[:16]


def versions(tools: Toolchain) -> dict[str, str]:
    """Return the versions of compilers and headers, as records and keys have them."""
    return {
        "nvcc": tools.nvcc_version,
        "g++": tools.gxx_version,
        "cutlass": tools.cutlass_version,
    }


def torch_library(
    making: Path,
    kept: Path,
    name: str,
    text: str,
    tools: Toolchain,
    torch: Torch,
    *,
    compile_flags: Sequence[str | Path],
    link_flags: Sequence[str | Path],
) -> Record:
    """Compile and link <name>.so in the folder `making`; return how.  Raises as run_steps does."""
    (making / f"{name}.cpp").write_text(text, encoding="utf-8")
    compile_it: Command = [tools.gxx, *compile_flags, "-c", f"{name}.cpp", "-o", f"{name}.o"]
    link_it: Command = [tools.gxx, f"{name}.o", *link_flags, "-o", f"{name}.so"]
    steps = [(f"{name}.o", compile_it), (f"{name}.so", link_it)]
    seconds = run_steps(making, kept, tools.ninja, steps)
    return Record(
        library=f"{name}.so",
        made_with={"torch": torch.version, **versions(tools)},
        digests=digests(tools),
        environment=stated_environment(),
        cpu_seconds=seconds,
    )
