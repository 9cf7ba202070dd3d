"""Libraries that g++ makes for a torch: a text and flags in, a library and its record out."""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fagen.build.digests import digests
from fagen.build.records import Record
from fagen.build.steps import Command, compiled
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
    name: str,
    text: str,
    tools: Toolchain,
    torch: Torch,
    *,
    compile_flags: Sequence[str | Path],
    link_flags: Sequence[str | Path],
) -> Callable[[Path, Path], Record]:
    """Return what compiles and links <name>.so in a folder, and says how: see Slot.filled."""
    compile_it: Command = [tools.gxx, *compile_flags, "-c", f"{name}.cpp", "-o", f"{name}.o"]
    link_it: Command = [tools.gxx, f"{name}.o", *link_flags, "-o", f"{name}.so"]
    return partial(
        compiled,
        ninja=tools.ninja,
        sources={f"{name}.cpp": text},
        steps=[(f"{name}.o", compile_it), (f"{name}.so", link_it)],
        made_with={"torch": torch.version, **versions(tools)},
        digests=digests(tools),
    )
