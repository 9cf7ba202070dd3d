"""Time the committed kernels beside those of another revision, in turn in one process.

    python benchmarks/against.py dd8a2d3                  the grid in all dtypes, three repeats
    python benchmarks/against.py main~1 --dtype fp16 --repeats 1
    python benchmarks/against.py dd8a2d3 --export old     its kernels into a folder, for a machine
    python benchmarks/against.py old                      without the history; needs no GPU

A cell's kernels are those that fagen.attention takes for it now; beside each runs the same
schedule's kernel as the revision renders it (git's detection of renames finds it). Both
are called through their C functions on the same tensors, in short rounds, new and old in random
order; a repeat goes through all cells. Said is the speed of the new one over the old one: of each
cell the median of a repeat's rounds, and the median and the worst of the repeats; geomeans for each
dtype and head dim. Written to benchmarks/results/<card>-<date>-against.json. The exit code is 6
where two outputs differ by more than two units in the last place.
"""

import argparse
import ctypes
import dataclasses
import datetime
import hashlib
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from record import BUILDERS, build, exit_code, grid, parsed, parser, say, serving
from revision import git, rendered_at

from fagen import flow, process
from fagen.errors import BuildError, FagenError, VerificationError
from fagen.kinds.forward.operands import arguments, launch, outputs
from fagen.measure.card import Clock, hopper
from fagen.measure.inputs import SEQLENS, inputs
from fagen.measure.numerics import unit_in_last_place
from fagen.measure.rows import geomean
from fagen.measure.timing import Call, Regime, estimate, time_round
from fagen.paths import cache_folder, compiler_environment, write_whole
from fagen.problem import Cell, Problem
from fagen.toolchain import FLAGS, LINK_FLAGS, find_toolchain
from fagen.vocab import DTYPES, MASKS

ROOT = Path(__file__).resolve().parent.parent
HEAD_DIMS = (64, 128, 256)
ROUND = Regime("round", idle=0.0, warm=0.002, timed=0.006, rounds=7)


# ---- the kernels of the other revision ----------------------------------------------------------


def kernels_before(where: str) -> dict[str, str]:
    """The kernel of each committed schedule as C++, by the slug of today.

    At a revision, or in a folder that --export wrote.
    """
    if Path(where).is_dir():
        return {path.stem: path.read_text() for path in sorted(Path(where).glob("*.cu"))}
    kernels = rendered_at(where)
    found = dict(kernels)
    changed = git("diff", "--find-renames=30%", "-l0", "--name-status", where, "--", "schedules")
    for line in changed.splitlines():
        kind, *paths = line.split("\t")
        if kind.startswith("R"):
            before, now = (Path(path).stem for path in paths)
            if before in kernels:
                found[now] = kernels[before]
    slugs = {schedule.slug for schedule in flow.committed("forward")}
    return {slug: text for slug, text in found.items() if slug in slugs}


def compile_before(text: str) -> Path:
    """Build a kernel of before with the adapter that calls it; return the library."""
    function = re.search(r"int (fagen_\w+)\(\s*const struct FagenForwardArgs", text)
    if function is None:
        raise FagenError("this is no kernel of attention's forward pass")
    folder = cache_folder() / "against" / hashlib.sha256(text.encode()).hexdigest()[:16]
    library = folder / "kernel.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "before.cu", text)
    tools = find_toolchain()
    defined = [f"-DFAGEN_FUNCTION={function[1]}", "-include", "before.cu"]
    adapter = Path(__file__).with_name("adapter.cu")
    for command in (
        [
            *(tools.nvcc, "-ccbin", tools.gxx, *FLAGS, "-I", tools.cutlass, *defined),
            *("-c", adapter, "-o", "kernel.o"),
        ],
        [
            *(tools.gxx, "kernel.o", *(f"-L{where}" for where in tools.library_dirs)),
            *(*LINK_FLAGS, "-o", "kernel.so"),
        ],
    ):
        result = process.run(command, cwd=folder, only=compiler_environment())
        if result.returncode:
            raise BuildError(f"{function[1]} of before: {result.stderr.strip()[-2000:]}")
    return library


def call_before(
    library: Path,
    cell: Cell,
    given: tuple[Any, ...],
    into: tuple[torch.Tensor, torch.Tensor],
    stream: int,
) -> Callable[[], None]:
    """The kernel behind the adapter, on these tensors; V (B, Hk, Dv, Sk to 16) where transposed."""
    q, k, v, scale, *descales = given[:7]  # older kernels know no means
    out, lse = into
    rows = (0, 1, 2)  # batch, seq, head
    order = (0, 2, 1) if cell.problem.v_layout == "columns" else rows
    strides = [tensor.stride(i) for tensor in (q, k) for i in rows]
    strides += [v.stride(i) for i in order] + [out.stride(i) for i in rows]
    strides += [lse.stride(0), lse.stride(1)]
    for one in descales:
        strides += [one.stride(i) if one.shape[i] > 1 else 0 for i in (0, 1)]
    sizes = cell.sizes
    pointers = [tensor.data_ptr() for tensor in (q, k, v, out, lse, *descales)]
    held = (
        (ctypes.c_void_p * 8)(*pointers),
        (ctypes.c_int64 * 20)(*strides),
        (ctypes.c_int32 * 5)(
            sizes.batch, sizes.heads, sizes.kv_heads, sizes.seqlen_q, sizes.seqlen_k
        ),
        ctypes.c_float(scale),
        ctypes.c_void_p(stream),
    )
    function = ctypes.CDLL(str(library)).call

    def run() -> None:
        if status := function(*held):
            raise FagenError(f"{library.parent.name}: status {status}")

    return run


# ---- timing --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    """A kernel of today and the one before it, at one cell; microseconds of each repeat."""

    cell: Cell
    slug: str
    same: bool = True  # the outputs, to the bit
    each: dict[str, float] = dataclasses.field(default_factory=dict)  # seconds, roughly
    new: list[float] = dataclasses.field(default_factory=list)
    old: list[float] = dataclasses.field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """The speed of the new one over the old one, of each repeat."""
        return [old / new for new, old in zip(self.new, self.old, strict=True)]


def time_pair(
    pair: Pair,
    plan: Any,
    library: Path,
    before: Path,
    repeat: int,
    *,
    regime: Regime = ROUND,
    ulps: int = 2,
) -> None:
    """Add one repeat.  Raises VerificationError where outputs differ by more `ulps` than may be."""
    given = arguments(plan, *inputs(pair.cell))
    mine, theirs = outputs(plan, given[0]), outputs(plan, given[0])
    laid_out = dataclasses.replace(pair.cell, problem=Problem.of(plan.schedule))
    stream = torch.cuda.current_stream().cuda_stream
    calls = {
        "new": launch(plan, library, given, mine),
        "old": call_before(before, laid_out, given, theirs, stream),
    }
    for run in calls.values():
        run()
    torch.cuda.synchronize()
    pair.same &= torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
    off = float((mine[0].float() - theirs[0].float()).abs().max())
    allowed = ulps * unit_in_last_place(float(theirs[0].abs().max()), theirs[0].dtype)
    if not off <= allowed:
        raise VerificationError(f"{pair.slug} at {pair.cell}: outputs differ by {off:.2e}")
    bound = {name: Call(_returning(run, mine[0])) for name, run in calls.items()}
    clock, dice = Clock(), random.Random(repeat)
    for name, call in bound.items():
        pair.each[name] = pair.each.get(name) or estimate(call)
    seconds: dict[str, list[float]] = {name: [] for name in bound}
    for _ in range(regime.rounds):
        for name in dice.sample(list(bound), len(bound)):
            time.sleep(regime.idle)
            seconds[name].append(time_round(bound[name], regime, pair.each[name], clock)[0])
    pair.new.append(statistics.median(seconds["new"]) * 1e6)
    pair.old.append(statistics.median(seconds["old"]) * 1e6)


def _returning(run: Callable[[], None], output: torch.Tensor) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        run()
        return output

    return call


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; the exit code is that of the `fagen` command."""
    asked = _arguments(argv)
    return exit_code(lambda: run(asked))


def run(asked: argparse.Namespace) -> int:
    """Build both revisions' kernels, time every pair, write and say what was found."""
    known = kernels_before(asked.before)
    if asked.export:
        asked.export.mkdir(parents=True, exist_ok=True)
        for slug, text in known.items():
            write_whole(asked.export / f"{slug}.cu", text)
        say(f"{len(known)} kernels written to {asked.export}")
        return 0
    card = hopper()
    served = [(cell, s) for cell in grid(asked) for s in serving(cell, card.name)]
    pairs = [Pair(cell, schedule.slug) for cell, schedule in served if schedule.slug in known]
    kernels = build(schedule for _, schedule in served)
    with ThreadPoolExecutor(BUILDERS) as pool:
        slugs = sorted({pair.slug for pair in pairs})
        compiled = pool.map(lambda slug: compile_before(known[slug]), slugs)
        before = dict(zip(slugs, compiled, strict=True))
    for repeat in range(asked.repeats):
        for pair in pairs:
            plan, binary = kernels[pair.slug]
            time_pair(pair, plan, binary.library, before[pair.slug], repeat)
            say(f"  [{repeat + 1}] {pair.slug:58} {pair.cell!s:50} {pair.ratios[-1]:.4f}")
    lines = list(_told(pairs))
    print("\n".join(lines))
    record = {
        "card": card.name,
        "driver": card.driver,
        "before": Path(asked.before).name,
        "pairs": [_recorded(pair) for pair in pairs],
        "told": lines,
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"{card.slug}-{asked.date}-against.json"
    write_whole(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return 0


def _recorded(pair: Pair) -> dict[str, Any]:
    return {
        "cell": str(pair.cell),
        "slug": pair.slug,
        "same_bits": pair.same,
        "new_us": [round(value, 2) for value in pair.new],
        "old_us": [round(value, 2) for value in pair.old],
    }


def _told(pairs: Sequence[Pair]) -> Iterator[str]:
    groups: dict[tuple[str, int], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.cell.problem.dtype, pair.cell.problem.head_dim), []).append(pair)
    for (dtype, head_dim), members in groups.items():
        medians = [statistics.median(pair.ratios) for pair in members]
        yield (
            f"{dtype} hd{head_dim}: geomean {geomean(medians):.4f} of {len(members)} pairs, worst "
            f"cell {min(medians):.3f}, worst repeat {min(min(p.ratios) for p in members):.3f}, "
            f"same bits in {sum(pair.same for pair in members)}"
        )
    for pair in pairs:
        if statistics.median(pair.ratios) < 0.97:
            yield f"  slower: {pair.slug} at {pair.cell}: {statistics.median(pair.ratios):.3f}"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    wanted = parser(__doc__, peers=False, dtype=sorted(DTYPES), head_dim=int, seqlen=int)
    wanted.add_argument("before", metavar="REVISION or FOLDER")
    wanted.add_argument("--export", type=Path, metavar="FOLDER")
    wanted.add_argument("--repeats", type=int, default=3)
    wanted.add_argument("--date", default=_today())
    asked = parsed(wanted, argv, dtype=DTYPES, head_dim=HEAD_DIMS, seqlen=SEQLENS)
    asked.mask = list(MASKS)
    return asked


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


if __name__ == "__main__":
    sys.exit(main())
