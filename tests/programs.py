"""Parts of a kernel's own text in programs that a CPU runs: sizes in, a line for each out."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fagen.process import run
from fagen.toolchain import find_gxx

HEAD = """\
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <set>
#include <tuple>
#include <utility>
#include <vector>
#define __host__
#define __device__
#define __forceinline__ inline
using std::max, std::min;
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; }
"""


def cut(text: str, begin: str, end: str) -> str:
    """From where one begins up to where the other does, after it."""
    return text[(at := text.index(begin)) : text.index(end, at)]


def compiled(code: str, folder: Path) -> Path:
    """The program of this code under HEAD."""
    (folder / "program.cpp").write_text(HEAD + code)
    flags = ("-std=c++17", "-O2", "-I", str(Path(__file__).parent))
    built = run([find_gxx()[0], *flags, "program.cpp", "-o", "program"], cwd=folder)
    assert built.returncode == 0, built.stderr
    return folder / "program"


def answers(program: Path, questions: Iterable[Iterable[Any]]) -> list[str]:
    """What a program says to each row of numbers."""
    rows = [" ".join(map(str, numbers)) for numbers in questions]
    lines = run([program], input="\n".join(rows)).stdout.splitlines()
    assert len(lines) == len(rows)
    return lines
