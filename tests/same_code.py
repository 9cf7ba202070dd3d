"""Show what a change does to machine code: kernels of another revision are compiled beside this.

    python tests/same_code.py REVISION [SCHEDULE ...]

Of the kernels whose device code has other tokens, or of those named, both sides are compiled to
cubins, which are kept in $FAGEN_CACHE/cubins, and compared:

    same        every byte of code and constants
    offsets     the same instructions, but for immediates: members of a struct have moved
    registers   but for the numbers of registers and predicates too
    code        other instructions

REVISION may be a JSON file of kernels' texts by slug, for machines without git: --save writes one.
The exit code is 1 where machine code moved, else 0.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from fagen.paths import cache_folder, compiler_environment
from fagen.process import run
from fagen.render import hashes_of
from fagen.render.tokens import parts_of_text
from fagen.sass import functions_of, hash_code
from fagen.toolchain import FLAGS, Toolchain, find_disassembler, find_toolchain

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from revision import rendered, rendered_at  # noqa: E402 - which is no package

_LABELS = re.compile(r"`\([^)]*\)")
_IMMEDIATES = re.compile(r"\b0x[0-9a-f]+")
_REGISTERS = re.compile(r"\b(U?[RP])\d+\b")


def compiled(toolchain: Toolchain, text: str, slug: str, folder: Path) -> Path:
    """Return the cubin of a kernel's device code, compiled unless it is there."""
    cubin = folder / f"{hashes_of(text, slug).device}.cubin"
    if not cubin.exists():
        with TemporaryDirectory() as place:
            source, made = Path(place, "kernel.cu"), Path(place, "kernel.cubin")
            source.write_text("\n".join(parts_of_text(text, slug)[:2]), encoding="utf-8")
            flags = [flag for flag in FLAGS if flag != "-lineinfo"]
            command = [toolchain.nvcc, *flags, "-cubin", "-o", made, source]
            command += ["-I", toolchain.cutlass, "-I", toolchain.cuda_include]
            result = run([*command, "-ccbin", toolchain.gxx], only=compiler_environment())
            if result.returncode:
                raise SystemExit(f"{slug} does not compile:\n{result.stderr[-3000:]}")
            folder.mkdir(parents=True, exist_ok=True)
            made.replace(cubin)
    return cubin


def instructions(nvdisasm: Path, cubin: Path) -> list[str]:
    """Return the instructions of a cubin, labels left out."""
    listing = run([nvdisasm, "-c", cubin], only=compiler_environment()).stdout
    return [
        _LABELS.sub("L", f"{one.guard} {one.opcode} {one.operands}")
        for _, (code, _) in functions_of(listing, drawn=False)
        for one in code
    ]


def difference(nvdisasm: Path, before: Path, after: Path) -> str:
    """Say in a word how the machine code of one cubin differs from that of another."""
    if hash_code(before.read_bytes()) == hash_code(after.read_bytes()):
        return "same"
    old, new = (instructions(nvdisasm, cubin) for cubin in (before, after))
    for word, pattern, mark in (("offsets", _IMMEDIATES, "#"), ("registers", _REGISTERS, r"\1")):
        old, new = ([pattern.sub(mark, line) for line in lines] for lines in (old, new))
        if old == new:
            return word
    return f"code ({len(old)} -> {len(new)} instructions)"


def compared(
    before: Mapping[str, str], after: Mapping[str, str], slugs: Iterable[str]
) -> dict[str, str]:
    """Return for each kernel how its machine code differs, one word each."""
    toolchain, tools = find_toolchain(), find_disassembler()
    assert tools, "nvdisasm is missing"
    nvdisasm = tools.nvdisasm
    folder = cache_folder() / "cubins"

    def difference_of(slug: str) -> str:
        old, new = (compiled(toolchain, text[slug], slug, folder) for text in (before, after))
        return difference(nvdisasm, old, new)

    slugs = sorted(slugs)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip(slugs, pool.map(difference_of, slugs), strict=True))


def main(revision: str, *names: str) -> int:
    """Compare with a revision, and say what differs; the exit code."""
    after = rendered(ROOT)
    if revision == "--save":
        Path(names[0]).write_text(json.dumps(after), encoding="utf-8")
        return 0
    kept = Path(revision)
    before = json.loads(kept.read_text()) if kept.suffix == ".json" else rendered_at(revision)
    both = before.keys() & after.keys()
    moved = names or [
        slug
        for slug in both
        if hashes_of(before[slug], slug).device != hashes_of(after[slug], slug).device
    ]
    words = compared(before, after, moved)
    for slug, word in words.items():
        print(f"{slug}: {word}")
    print(f"of {len(both)} kernels, {len(words)} compared: ", end="")
    kinds = sorted({word.split()[0] for word in words.values()})
    print(", ".join(f"{sum(w.startswith(kind) for w in words.values())} {kind}" for kind in kinds))
    return int(any(word != "same" for word in words.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
