"""Measure what a decoding kernel is made of, each by itself, beside what a model says of it.

    python benchmarks/decode_micro.py                               everything: ~1 minute
    python benchmarks/decode_micro.py --only read --only combine    some programs
    python benchmarks/decode_micro.py --compile                     no GPU: compile them, no more
    python benchmarks/decode_micro.py --redraw benchmarks/results/<card>-<date>-decode-micro.json

The programs are CUDA of their own, benchmarks/decode_micro/*.cu: launches and clusters, reads of a
KV cache by TMA, four ways to combine splits, narrow wgmma, votes of a warpgroup, e4m3 to fp16,
ragged tensor maps, the scan of lengths. Each appends its rows to a file while it runs. Where one
hangs or loses its GPU context, that row says so, and a new process goes on behind it, for twice the
limit in all.

The exit code is 6 where a row could not be measured; elements that came out wrong are a result.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import BUILDERS, Options, Run, Script, flag, say

from fagen import process
from fagen.arch import SM90
from fagen.errors import BuildError, ToolchainError
from fagen.measure.rows import markdown
from fagen.paths import cache_folder, compiler_environment, write_whole
from fagen.toolchain import FLAGS, RUNTIME_LIBRARIES, find_toolchain

SOURCES = Path(__file__).with_name("decode_micro")
LIMIT = 20.0  # seconds of a process: the longest program takes a few
SERIALISED = "wgmma.mma_async instructions are serialized"

Row = dict[str, Any]


# ---- what a model says ---------------------------------------------------------------------------

READ_CEILING = 4_600.0  # GB/s: the slope of long caches, cuDNN's and FlashAttention-3's
LATENCY_US = 1.0  # of a read from DRAM under load: 0.8 to 1.2
LAUNCH_US = (
    3.5  # of a step inside a graph: what a launch, its first read and its end add to reading
)
SMEM_PER_SM_KB = SM90.smem_per_sm // 1024


def _told(figures: Mapping[str, str]) -> Callable[[Row], str]:
    """A prediction by what a row's name begins with, the longest that fits."""

    def predicted(row: Row) -> str:
        fitting = [start for start in figures if row["what"].startswith(start)]
        return figures[max(fitting, key=len)] if fitting else ""

    return predicted


def _read(row: Row) -> str:
    """Little's law up to the ceiling, and what a launch adds."""
    in_flight = row["in_flight_kb"] * 1_024 * SM90.sm_count
    rate = min(READ_CEILING, in_flight / LATENCY_US / 1e3)
    megabytes = row["mb"]
    return f"{megabytes / (LAUNCH_US + megabytes * 1e3 / rate) * 1e3:.0f}"


def _clusters(row: Row) -> str:
    """As many as there would be if clusters fitted anywhere."""
    blocks = SMEM_PER_SM_KB // (row["kb"] + 1)  # 1 KB of each block is the system's
    return f"≤ {SM90.sm_count * blocks // row['size']:.0f}"


def _wgmma(row: Row) -> str:
    """A and B read from shared memory, or the tensor cores, whichever takes longer."""
    n = int(row["what"].removeprefix("m64n").split("k16")[0])
    from_smem = 0 if "from registers" in row["what"] else 64
    read = (from_smem + n) * 16 * 2 / SM90.smem_bytes
    clocks = max(read, 64 * n * 16 * 2 / SM90.tensor_flops)
    return f"> {8 * clocks:.0f}" if "wait" in row["what"] else f"{clocks:.0f}"


LAUNCHES = {
    "plain, alone, eager": f"{SM90.launch_seconds * 1e6:.0f}",
    "plain, each further of a chain, eager": "< 3–5",
    "plain, each further of a chain, graph": "1–2",
    "PDL, each further of a chain, eager": "< 2–3",
}
COMBINES = {
    "second launch": "1–2",
    "second launch with PDL": "< 1–2",
    "the last to arrive": "2",
    "in clusters, through": "0.7–1",
}
CONVERSIONS = {
    "values that bits": "0",
    "cvt": "32–128",  # 16 or 64 instructions a clock
    "ld.shared.v4": f"{SM90.smem_bytes}",
    "ld.shared.v4, PRMT": "20 wanted",  # K and V of hd128 as fast as DRAM supplies them
}
RAGGED = {"ragged": "0", "page": "0", "a page": "0", "loads by a ragged": "as plain",
          "stores by a ragged": "as plain"}  # fmt: skip
SCANS = {"32 lengths scanned, first copy issued": "0.7"}


@dataclass(frozen=True)
class Program:
    """One of benchmarks/decode_micro/, what it is about, and what a model says of its rows."""

    about: str
    predicted: Callable[[Row], str]


PROGRAMS = {
    "launch": Program(
        "Launches, 128 thread blocks of 160 threads; two are from an event before to one after",
        _told(LAUNCHES),
    ),
    "read": Program("Reading a KV cache of 8 heads by TMA, clean buffers in a graph", _read),
    "clusters": Program("Clusters of 160 threads resident at once", _clusters),
    "combine": Program(
        "Combining 128 partial outputs of 2 KB: beyond the same kernel without, in a graph",
        _told(COMBINES),
    ),
    "wgmma": Program("wgmma, fp16 into fp32, of all warpgroups of an SM", _wgmma),
    "vote": Program("A warpgroup agrees on a bit", _told({})),
    "convert": Program("e4m3 to fp16, of an SM", _told(CONVERSIONS)),
    "ragged": Program("Ragged maps and pages; wrong are elements", _told(RAGGED)),
    "scan": Program("A thread block that finds its own work, from its start on", _told(SCANS)),
}


# ---- a run ---------------------------------------------------------------------------------------


def compile_only(options: Options) -> int | None:
    """Compile the programs, and say what the compiler says of them; where it refuses, code 4."""
    if not options.compile:
        return None
    programs = compiled(options.only)
    for name, (_, remark) in programs.items():
        say(f"{name}: {remark or 'compiled'}")
    return 0 if all(binary for binary, _ in programs.values()) else BuildError.exit_code


def work(run: Run, options: Options) -> None:
    """Compile the programs, run them one after the other."""
    del run.about["regimes"]  # programs time themselves
    run.about["nvcc"] = find_toolchain().nvcc_version
    binaries = compiled(options.only)

    def step(name: str) -> None:
        binary, remark = binaries[name]
        if remark:
            run.note(remark, name)
        rows = measured(binary, options.limit) if binary else [_left_out(0, "not compiled")]
        run.rows += [{"program": name, **row} for row in rows]
        failed = sum("error" in row for row in rows)
        run.about["wrong"] = run.about.get("wrong", False) or failed > 0
        page(run)
        say(f"{name}: {len(rows)} rows{f', {failed} of them failed' if failed else ''}")

    run.each(binaries, step)


def compiled(names: Sequence[str]) -> dict[str, tuple[Path | None, str]]:
    """The programs as binaries, None for one that the compiler refuses, and what it said."""
    with ThreadPoolExecutor(BUILDERS) as pool:
        return dict(zip(names, pool.map(_compiled, names), strict=True))


def _compiled(name: str) -> tuple[Path | None, str]:
    tools = find_toolchain()
    source, header = SOURCES / f"{name}.cu", SOURCES / "micro.cuh"
    versions = [tools.nvcc_version, tools.cutlass_version, *FLAGS]
    content = "\n".join(versions).encode() + source.read_bytes() + header.read_bytes()
    folder = cache_folder() / "decode_micro" / hashlib.sha256(content).hexdigest()[:16]
    binary, remark = folder / name, folder / "remark"
    if not binary.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{name}.part"
        libraries = [*(f"-L{where}" for where in tools.library_dirs), *RUNTIME_LIBRARIES]
        command: list[str | Path] = [tools.nvcc, "-ccbin", tools.gxx, *FLAGS, "-I", tools.cutlass]
        command += [source, "-o", part, *libraries]
        result = process.run(command, timeout=600, only=compiler_environment())
        if result.returncode:
            return None, "; ".join((result.stderr or result.stdout).strip()[-2000:].splitlines())
        serialised = SERIALISED in result.stdout + result.stderr
        write_whole(remark, "the compiler serialised a wgmma" if serialised else "")
        part.replace(binary)
    return binary, remark.read_text(encoding="utf-8")


def measured(program: Path, limit: float = LIMIT) -> list[Row]:
    """All rows of a program; where a process ends in the midst of it another one goes on.

    What could not be measured is a row with an `error` in the place of a `value`.
    """
    rows: dict[int, Row] = {}
    first, deadline = 0, time.monotonic() + 2 * limit
    with tempfile.TemporaryDirectory() as folder:
        while True:
            written = Path(folder) / f"{first}.jsonl"
            written.touch()
            why, left = "", min(limit, deadline - time.monotonic())
            try:
                result = process.run([program, written, str(first)], timeout=left)
            except ToolchainError as error:
                why = str(error).removeprefix(f"{program}: ")
            else:
                if result.returncode:
                    why = result.stderr.strip() or f"ended with status {result.returncode}"
            new = _rows(written.read_text(encoding="utf-8", errors="replace"), why)
            rows |= new
            if not why:
                break
            if not new:  # not even begun: another process would end in the same way
                rows[first] = _left_out(first, why)
                break
            first = max(new) + 1
            if time.monotonic() >= deadline:
                rows[first] = _left_out(first, f"left out after {2 * limit:g} s")
                break
    return [rows[number] for number in sorted(rows)]


def _left_out(first: int, why: str) -> Row:
    return {"row": first, "what": "all that was to follow", "error": why}


def _rows(text: str, why: str) -> dict[int, Row]:
    """Rows by their number; one that has begun and not ended failed for this reason."""
    rows: dict[int, Row] = {}
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the process ended while it wrote
        if row.pop("begun", False):
            row["error"] = why or "ended without a word"
        rows[row["row"]] = row
    return rows


# ---- what is said --------------------------------------------------------------------------------


def page(run: Run) -> str:
    """Write <stem>.md: a table for each program, what was predicted beside what was measured."""
    tables = []
    for name, program in PROGRAMS.items():
        rows = [row for row in run.rows if row["program"] == name]
        if rows:
            body = [_line(program, row) for row in rows]
            table = markdown(["what", "unit", "predicted", "measured"], body)
            tables.append(f"{program.about} ({name}.cu):\n\n{table}")
    return run.write_page(
        "What decoding's pieces take",
        f"{run.made_on}. Predicted is what a model of the SM and of memory says, "
        "where it says something; measured are medians.",
        *tables,
        run.remarks,
    )


def _line(program: Program, row: Row) -> list[str]:
    unit = row.get("unit", "")
    if "error" in row:
        predicted, figure = "", row["error"].replace("|", "/").replace("\n", " ")
    else:
        predicted, figure = program.predicted(row), _rounded(row["value"], unit)
    return [row["what"], "µs" if unit == "us" else unit, predicted or "–", figure]


def _rounded(value: float, unit: str) -> str:
    digits = {"us": 2, "GB/s": 0, "wrong": 0, "clusters": 0}.get(unit, 1)
    return f"{value:.{digits}f}"


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return seconds


main = Script(
    __doc__,
    "decode-micro",
    work,
    lambda run: print(page(run)),
    lists={"only": (PROGRAMS, PROGRAMS)},
    options={
        "--limit": dict(type=_seconds, default=LIMIT, help="seconds of one process"),
        "--compile": flag("no GPU: compile, and no more"),
    },
    beside=compile_only,
)

if __name__ == "__main__":
    sys.exit(main())
