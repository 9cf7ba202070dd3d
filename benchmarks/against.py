"""Time the committed kernels beside those of another revision, in turn in one process.

    python benchmarks/against.py dd8a2d3                  the grid in all dtypes, three repeats
    python benchmarks/against.py main~1 --dtype fp16 --repeats 1
    python benchmarks/against.py dd8a2d3 --export old     its kernels into a folder, for a machine
    python benchmarks/against.py old                      without the history; needs no GPU

A cell's kernels are those that fagen.attention takes for it now; beside each runs the same
schedule's kernel as the revision renders it (git's detection of renames finds it). Both
are called through their C functions on the same tensors, in short rounds, new and old in random
order; a repeat goes through all cells. Said is the speed of the new one over the old one: of each
cell the median of a repeat's rounds, and the median of the repeats; geomeans for each dtype, head
dim and mask. Outputs may differ by two units in the last place.
"""

import ctypes
import dataclasses
import hashlib
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from record import BUILDERS, Options, Run, Script, grid, said_of, say, serving, sizes_of
from revision import git, rendered_at
from tables import grouped

from fagen import flow, process
from fagen.errors import BuildError, FagenError, VerificationError
from fagen.kinds.forward.operands import arguments, launch, outputs
from fagen.measure.card import Clock
from fagen.measure.inputs import SEQLENS, inputs
from fagen.measure.numerics import unit_in_last_place
from fagen.measure.rows import geomean, markdown
from fagen.measure.timing import Call, Regime, estimate, time_round
from fagen.paths import cache_folder, compiler_environment, write_whole
from fagen.problem import Cell, Problem
from fagen.schedule import Schedule
from fagen.toolchain import FLAGS, LINK_FLAGS, find_toolchain
from fagen.vocab import DTYPES, PLAIN_MASKS

HEAD_DIMS = (64, 128, 256)
ROUND = Regime("round", idle=0.0, warm=0.002, timed=0.006, rounds=7)
ULPS = 2


# ---- the kernels of the other revision ----------------------------------------------------------


def kernels_in(folder: Path) -> dict[str, str]:
    """The kernels that --export wrote, by slug."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.cu"))}


def export(kernels: Mapping[str, str], folder: Path) -> int:
    """Write what `kernels_in` reads; the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    for slug, text in kernels.items():
        write_whole(folder / f"{slug}.cu", text)
    say(f"{len(kernels)} kernels written to {folder}")
    return 0


def kernels_before(where: str) -> dict[str, str]:
    """The kernel of each committed schedule as C++, by the slug of today.

    At a revision, or in a folder that --export wrote.
    """
    if Path(where).is_dir():
        return kernels_in(Path(where))
    before = rendered_at(where)
    kernels = dict(before)
    changed = git("diff", "--find-renames=30%", "-l0", "--name-status", where, "--", "schedules")
    for line in changed.splitlines():
        status, *paths = line.split("\t")
        if status.startswith("R"):
            old, new = (Path(path).stem for path in paths)
            if old in before:
                kernels[new] = before[old]
    slugs = {schedule.slug for schedule in flow.committed("forward")}
    return {slug: text for slug, text in kernels.items() if slug in slugs}


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


@cache
def _workspace(device: torch.device) -> torch.Tensor:
    """As large as the adapter says it is."""
    return torch.zeros(1 << 26, dtype=torch.uint8, device=device)


def call_before(
    library: Path,
    cell: Cell,
    operands: tuple[Any, ...],
    into: tuple[torch.Tensor, torch.Tensor],
    stream: int,
) -> Callable[[], None]:
    """The kernel behind the adapter, on these tensors; V (B, Hk, Dv, Sk to 16) where transposed."""
    q, k, v, scale, *descales = operands[:7]  # older kernels know no means
    out, lse = into
    rows = (0, 1, 2)  # batch, seq, head
    order = (0, 2, 1) if cell.problem.v_layout == "columns" else rows
    strides = [tensor.stride(i) for tensor in (q, k) for i in rows]
    strides += [v.stride(i) for i in order] + [out.stride(i) for i in rows]
    strides += [lse.stride(0), lse.stride(1)]
    for descale in descales:
        strides += [descale.stride(i) if descale.shape[i] > 1 else 0 for i in (0, 1)]
    sizes = cell.sizes
    pointers = [tensor.data_ptr() for tensor in (q, k, v, out, lse, *descales)]
    pointers += [0] * (8 - len(pointers)) + [_workspace(q.device).data_ptr()]
    held = (
        (ctypes.c_void_p * 9)(*pointers),
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
    """A kernel of today and one of before, at one cell; microseconds of each repeat."""

    cell: Cell
    slug: str
    before: str  # by which the kernel of before is known
    ahead: float | None = None  # the speed of before over FlashAttention-3's, where that is known
    same: bool = True  # the outputs, to the bit
    estimates: dict[str, float] = dataclasses.field(default_factory=dict)  # seconds, roughly
    new: list[float] = dataclasses.field(default_factory=list)
    old: list[float] = dataclasses.field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """What is written of it; values are speeds over before's, or over FlashAttention-3's."""
        problem, ahead = self.cell.problem, self.ahead or 1.0
        return {
            "dtype": problem.dtype,
            "head_dim": problem.head_dim,
            "head_dim_v": problem.head_dim_v,
            "mask": problem.mask,
            **vars(self.cell.sizes),
            "kernel": self.slug,
            "kernel_before": self.before,
            "us": [round(value, 2) for value in self.new],
            "us_before": [round(value, 2) for value in self.old],
            "fagen_over_fa3_before": round(self.ahead, 4) if self.ahead else None,
            "values": [
                round(old / new * ahead, 4) for new, old in zip(self.new, self.old, strict=True)
            ],
            "same_bits": self.same,
        }


def time_pairs(
    run: Run,
    pairs: list[Pair],
    schedules: Iterable[Schedule],
    before: Mapping[str, str],
    repeats: int,
    regime: Regime,
    ulps: int,
) -> None:
    """Build the kernels of now and of before, and time all pairs so many times.

    One whose outputs differ by more units in the last place is noted, and not timed.
    """
    began = time.monotonic()
    with ThreadPoolExecutor(BUILDERS) as pool:
        names = {pair.before for pair in pairs}
        compiled = {name: pool.submit(compile_before, before[name]) for name in names}
        kernels = run.build(schedules, binding=False)
        libraries = {name: future.result() for name, future in compiled.items()}
    say(f"{len(kernels)} + {len(libraries)} kernels built in {time.monotonic() - began:.0f} s")

    def repeat(number: int) -> None:
        for pair in list(pairs):
            plan, binary = kernels[pair.slug]
            old = libraries[pair.before]
            try:
                time_pair(pair, plan, binary.library, old, number, regime, ulps)
            except VerificationError as error:
                run.note_wrong(error)
                pairs.remove(pair)
        run.rows = [pair.row() for pair in pairs]
        say(f"repeat {number + 1}: {', '.join(summary(run.rows))}")

    run.each(range(repeats), repeat)


def time_pair(
    pair: Pair, plan: Any, library: Path, before: Path, repeat: int, regime: Regime, ulps: int
) -> None:
    """Add one repeat.  Raises VerificationError where outputs differ by more `ulps` than may be."""
    operands = arguments(plan, *inputs(pair.cell))
    mine, theirs = outputs(plan, operands[0]), outputs(plan, operands[0])
    laid_out = dataclasses.replace(pair.cell, problem=Problem.of(plan.schedule))
    stream = torch.cuda.current_stream().cuda_stream
    calls = {
        "new": Call(launch(plan, library, operands, mine)),
        "old": Call(call_before(before, laid_out, operands, theirs, stream)),
    }
    for call in calls.values():
        call.once()
    torch.cuda.synchronize()
    pair.same &= torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
    off = float((mine[0].float() - theirs[0].float()).abs().max())
    allowed = ulps * unit_in_last_place(float(theirs[0].abs().max()), theirs[0].dtype)
    if not off <= allowed:
        raise VerificationError(f"{pair.slug} at {pair.cell}: outputs differ by {off:.2e}")
    clock, dice = Clock(), random.Random(repeat)
    for name, call in calls.items():
        pair.estimates[name] = pair.estimates.get(name) or estimate(call)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(regime.rounds):
        for name in dice.sample(list(calls), len(calls)):
            time.sleep(regime.idle)
            seconds[name].append(time_round(calls[name], regime, pair.estimates[name], clock)[0])
    pair.new.append(statistics.median(seconds["new"]) * 1e6)
    pair.old.append(statistics.median(seconds["old"]) * 1e6)


# ---- what is said --------------------------------------------------------------------------------

YARDSTICK = "÷ FA3 by the yardstick"


def summary(rows: Iterable[Mapping[str, Any]], others: str = "÷ before") -> Iterator[str]:
    """Geomean, minimum and rows behind: by FlashAttention-3's figures, and of other shapes."""
    groups = grouped(rows, lambda row: YARDSTICK if row["fagen_over_fa3_before"] else others)
    for name in (YARDSTICK, others):
        if members := groups.get(name):
            medians, behind = [*map(middle, members)], sum(map(is_behind, members))
            yield (
                f"{name}: geomean {geomean(medians):.4f}, minimum {min(medians):.3f}, behind in "
                f"{behind} of {len(members)}"
            )


def by_problem(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown: the same by dtype, head dim and mask, of rows from the slowest on."""
    groups = grouped(rows, lambda row: f"{row['dtype']} hd{row['head_dim']} {row['mask']}")
    body = [
        [
            *(name, str(len(members)), f"{geomean(map(middle, members)):.3f}"),
            *(f"{middle(members[0]):.3f}", str(sum(map(is_behind, members)))),
        ]
        for name, members in sorted(groups.items())
    ]
    return markdown(["problem", "rows", "geomean", "minimum", "behind"], body)


def by_row(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a line for each cell."""
    head = ["problem", "B", "S", "H", "kernel now", "before", "µs", "now ÷ before", "was ÷ FA3"]
    return markdown([*head, "value", "of repeats", "behind"], [*map(_line, rows)])


def middle(row: Mapping[str, Any]) -> float:
    """The median of a row's values."""
    return float(statistics.median(row["values"]))


def is_behind(row: Mapping[str, Any]) -> bool:
    """Whether a row is slower in every repeat."""
    return bool(row["values"]) and max(row["values"]) < 1.0


def _line(row: Mapping[str, Any]) -> list[str]:
    sizes, was = sizes_of(row), row["fagen_over_fa3_before"]
    problem = Problem(row["dtype"], row["head_dim"], row["head_dim_v"], row["mask"])
    ratios = [old / new for new, old in zip(row["us"], row["us_before"], strict=True)]
    return [
        f"{problem.dtype} {problem.head_dims} {problem.mask}",
        str(sizes.batch),
        sizes.lengths,
        sizes.all_heads,
        _tile(row["kernel"]),
        _tile(row["kernel_before"]),
        f"{statistics.median(row['us']):.1f}",
        f"{statistics.median(ratios):.3f}",
        f"{was:.3f}" if was else "–",
        f"{middle(row):.3f}",
        " ".join(f"{value:.3f}" for value in row["values"]),
        "yes" if is_behind(row) else "",
    ]


def _tile(slug: str) -> str:
    """What a slug says beyond its problem: m128n128_q2."""
    return slug[re.search(r"_m\d+n\d+", slug).start() + 1 :]


def page(run: Run) -> None:
    """Write <stem>.md; print its summary and the slowest cells."""
    rows = sorted(run.rows, key=middle)
    lines = "\n".join(f"- {line}" for line in summary(rows))
    run.write_page(
        "Kernels before and after",
        f"{run.made_on}. Kernels of now beside those of {run.about['before']}, in turn: "
        f"{said_of(ROUND)}, medians; speed now ÷ before.",
        lines,
        by_problem(rows),
        by_row(rows),
        run.remarks,
    )
    print(f"{lines}\n\n{by_problem(rows)}\n{by_row([row for row in rows if middle(row) < 0.97])}")


# ---- a run ---------------------------------------------------------------------------------------


def work(run: Run, options: Options) -> None:
    """Time what serves each cell beside the same schedule's kernel of before."""
    before = kernels_before(options.before)
    run.about["before"] = Path(options.before).name
    options.mask = list(PLAIN_MASKS)
    served = [(cell, schedule) for cell in grid(options) for schedule in serving(cell, run.card)]
    comparable = [(cell, schedule) for cell, schedule in served if schedule.slug in before]
    pairs = [Pair(cell, schedule.slug, schedule.slug) for cell, schedule in comparable]
    schedules = [schedule for _, schedule in comparable]
    time_pairs(run, pairs, schedules, before, options.repeats, ROUND, ULPS)


main = Script(
    __doc__,
    "against",
    work,
    page,
    regimes=[ROUND],
    lists={
        "dtype": (sorted(DTYPES), DTYPES),
        "head_dim": (int, HEAD_DIMS),
        "seqlen": (int, SEQLENS),
    },
    options={
        "before": dict(metavar="REVISION or FOLDER", nargs="?"),
        "--export": dict(type=Path, metavar="FOLDER"),
        "--repeats": dict(type=int, default=3),
    },
    settle=lambda options: (
        None if options.before or options.redraw else "name a REVISION or FOLDER to time against"
    ),
    beside=lambda options: (
        export(kernels_before(options.before), options.export) if options.export else None
    ),
)

if __name__ == "__main__":
    sys.exit(main())
