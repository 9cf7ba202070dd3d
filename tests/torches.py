"""Other releases of torch than the installed one, to load a library in.

PyPI's torch is imported only where NVIDIA's libraries are, several GB. On a CPU none of them is
called, so empty ones serve: each function returns 100, which is CUDA's "no device".
"""

import re
from pathlib import Path

from fagen.process import run
from tests.vendor_helpers import python

_OURS = re.compile(r"_*(cu|nccl|nvshmem|nvrtc)\w*")


def environment(requirement: str, folder: Path) -> dict[str, str]:
    """What Python finds a torch by, which lies in a folder; it is fetched where it does not.

    `asked` is as pip takes it, "torch==2.10.*". All else that torch imports is the installed one's.
    """
    place = folder / re.sub(r"\W+", "-", requirement)
    if not (place / "empty").is_dir():
        words = ["--quiet", "--no-deps", "--upgrade", "--target", place, requirement]
        python("-m", "pip", "install", *words, cwd=folder)
        _empty_libraries(place / "torch/lib", place / "empty")
    empty = place / "empty"
    return {
        "PYTHONPATH": str(place),
        "LD_LIBRARY_PATH": str(empty),
        "LD_PRELOAD": str(empty / "functions.so"),
    }


def _empty_libraries(libraries: Path, place: Path) -> None:
    needed, functions = set(), set()
    for library in libraries.glob("*.so*"):
        listing = run(["readelf", "--dynamic", "--wide", str(library)]).stdout
        needed |= set(re.findall(r"\(NEEDED\).*\[lib((?:cu|nccl|nv)[^\]]*)\]", listing))
        listing = run(["nm", "--dynamic", "--undefined-only", str(library)]).stdout
        functions |= {name for name in re.findall(r" [Uw] (\w+)", listing) if _OURS.fullmatch(name)}
    place.mkdir()
    source = place / "functions.c"
    source.write_text("".join(f"long {name}(void) {{ return 100; }}\n" for name in functions))
    _library(source, place / "functions.so")
    source.write_text("")
    for name in needed:
        _library(source, place / f"lib{name}", f"-Wl,-soname,lib{name}")


def _library(source: Path, library: Path, *words: str) -> None:
    command = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", *words, source, "-o", library]
    answer = run([str(word) for word in command])
    assert answer.returncode == 0, answer.stderr
