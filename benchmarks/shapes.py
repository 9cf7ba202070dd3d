"""Time fagen's choice of kernels at shapes that nobody tuned for, by FlashAttention-3's figures.

    python benchmarks/shapes.py                           the rows of fa3_burst.csv: ~2 GPU minutes
    python benchmarks/shapes.py --export old              kernels of before into a folder, for a
    python benchmarks/shapes.py --before old              machine without the history; no GPU needed
    python benchmarks/shapes.py --random 60 --seed 7      and 60 further shapes, drawn at random
    python benchmarks/shapes.py --head-dim 128 --mask causal --repeats 1    a part, for a first look
    python benchmarks/shapes.py --redraw benchmarks/results/<card>-<date>-shapes.json

The figures in fa3_burst.csv are of one card and one day. So a row's kernel, that which
fagen.dispatch takes for it now, is timed beside the one which fagen took at the revision of those
figures, in turn in one process on the same tensors, and

    yardstick = (speed now ÷ speed at the revision) × (fagen ÷ FlashAttention-3 of the csv)

A row is behind where that is below 1 in every repeat. Random shapes have no such figure: of them
there is the first factor alone, in fp16 and bf16, at the head dims that the revision has.

Written to benchmarks/results/<card>-<date>-shapes.json and .md, after every repeat. The exit code
is 6 where outputs differ by more units in the last place than two right kernels may.
"""

import argparse
import csv
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from against import Pair, compile_before, time_pair
from record import BUILDERS, Findings, build, parser, say, script, serving
from revision import git, rendered_at

from fagen.errors import FagenError, VerificationError
from fagen.measure.numerics import AGREEMENT
from fagen.measure.rows import geomean, markdown
from fagen.measure.timing import Regime
from fagen.paths import write_whole
from fagen.problem import Cell, Problem, Sizes
from fagen.toml_lines import read_toml
from fagen.vocab import MASKS

REVISION = "dd8a2d3"  # of fagen's figures in the csv
FIGURES = Path(__file__).with_name("fa3_burst.csv")
TABLE = "dispatch.toml"
ROUND = Regime("burst", idle=0.010, warm=0.0005, timed=0.006, rounds=5)
SLUG = re.compile(r"fwd_(?P<dtype>fp16|bf16)_d(?P<d>\d+)(?:v(?P<v>\d+))?_(?P<mask>[a-z]+)_m\d+n\d+")
FLOPS = (5e9, 1e12)  # of a random shape: longer than its launch, and no longer than needed


# ---- the figures ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """What the csv has of a shape: TFLOP/s of FlashAttention-3 and of fagen at the revision."""

    cell: Cell
    fa3: float
    fagen: float

    @property
    def ahead(self) -> float:
        """The speed of fagen over that of FlashAttention-3."""
        return self.fagen / self.fa3


def figures(path: Path = FIGURES) -> tuple[Figure, ...]:
    """The rows of the csv.  Raises FagenError, with the line, where one is none."""
    numbered = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    lines = [(number, line) for number, line in numbered if line and not line.startswith("#")]
    found = []
    for (number, _), row in zip(lines[1:], csv.DictReader(line for _, line in lines), strict=True):
        try:
            head_dim, length = int(row["head_dim"]), int(row["seqlen"])
            sizes = Sizes(
                int(row["batch"]), int(row["heads"]), int(row["kv_heads"]), length, length
            )
            problem = Problem("fp16", head_dim, head_dim, row["mask"])
            figure = Figure(Cell(problem, sizes), float(row["fa3"]), float(row["fagen"]))
        except (KeyError, TypeError, ValueError) as error:
            raise FagenError(f"{path.name}:{number}: no row of figures: {error}") from None
        if row["mask"] not in MASKS or sizes.heads % sizes.kv_heads or None in row:
            raise FagenError(f"{path.name}:{number}: no row of figures")
        found.append(figure)
    return tuple(found)


# ---- what the revision took ----------------------------------------------------------------------


@dataclass(frozen=True)
class Before:
    """The 16-bit kernels of a revision as C++ by their slugs, and its own dispatch table.

    Slugs are only looked at, never read back: today's keys may have other words for them.
    """

    kernels: Mapping[str, str]
    table: tuple[Mapping[str, Any], ...]

    @classmethod
    def at(cls, where: str) -> "Before":
        """At a revision, or in a folder that --export wrote.  Raises FagenError."""
        folder = Path(where)
        if folder.is_dir():
            table = (folder / TABLE).read_text(encoding="utf-8")
            kernels = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.cu")}
        else:
            table = git("show", f"{where}:schedules/{TABLE}")
            there = rendered_at(where)
            kernels = {slug: text for slug, text in there.items() if SLUG.match(slug)}
        rows, _ = read_toml(table, TABLE)
        return cls(kernels, tuple(row for row in rows["kernel"] if SLUG.match(row["slug"])))

    def export(self, folder: Path) -> None:
        """Write what `at` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        for slug, text in self.kernels.items():
            write_whole(folder / f"{slug}.cu", text)
        write_whole(folder / TABLE, "".join(map(_row_of_table, self.table)))

    def problems(self) -> tuple[Problem, ...]:
        """What there are kernels for."""
        return tuple(sorted({problem_of(slug) for slug in self.kernels}))

    def pick(self, cell: Cell, card: str) -> str | None:
        """The slug that served a cell on a card; None where the revision had no kernel for it.

        Rows for few query rows go before those by keys, and rows of the card before another's; a
        problem without a row was served by its plainest kernel.
        """
        rows = [row for row in self.table if problem_of(row["slug"]) == cell.problem]
        here = [row for row in rows if row["card"] == card]
        rows = here or [row for row in rows if row["card"] == rows[0]["card"]]
        sizes = cell.sizes
        queries = sizes.batch * sizes.heads * sizes.seqlen_q
        few = sorted((row["rows_to"], row["slug"]) for row in rows if "rows_to" in row)
        keys = sorted(
            (row.get("keys_to", row.get("to", math.inf)), row["slug"])
            for row in rows
            if "rows_to" not in row
        )
        for size, by_size in ((queries, few), (sizes.seqlen_k, keys)):
            for most, slug in by_size:
                if size <= most:
                    return str(slug)
        fitting = [slug for slug in self.kernels if problem_of(slug) == cell.problem]
        return min(fitting, key=lambda slug: (slug.count("_"), slug), default=None)


def problem_of(slug: str) -> Problem:
    """What the kernel of a slug computes, as far as all slugs have said it alike."""
    said = SLUG.match(slug)
    if said is None:
        raise FagenError(f"{slug} is no slug of a 16-bit kernel")
    d = int(said["d"])
    return Problem(said["dtype"], d, int(said["v"] or d), said["mask"])


def _row_of_table(row: Mapping[str, Any]) -> str:
    lines = (f"{key} = {value!r}" if isinstance(value, int) else f'{key} = "{value}"'
             for key, value in row.items())  # fmt: skip
    return "[[kernel]]\n" + "\n".join(lines) + "\n\n"


# ---- shapes that nobody picked -------------------------------------------------------------------


def drawn(number: int, seed: int, problems: Sequence[Problem]) -> list[Cell]:
    """So many cells at random: lengths and batches log-uniform, a quarter with Sq ≠ Sk."""
    dice = random.Random(seed)

    def between(least: int, most: int) -> int:
        return round(math.exp(dice.uniform(math.log(least), math.log(most))))

    cells: list[Cell] = []
    while len(cells) < number:
        kv_heads = dice.choice((1, 2, 3, 4, 8, 16))
        heads = kv_heads * dice.choice((1, 1, 1, 2, 4, 7, 8))
        keys = between(64, 16_384)
        queries = between(64, 16_384) if dice.random() < 0.25 else keys
        sizes = Sizes(between(1, 64), heads, kv_heads, queries, keys)
        cell = Cell(dice.choice(list(problems)), sizes)
        if FLOPS[0] <= cell.flops <= FLOPS[1]:
            cells.append(cell)
    return cells


# ---- timing --------------------------------------------------------------------------------------


@dataclass
class Shape:
    """A cell with both its kernels, and what the csv says of it."""

    pair: Pair
    before: str  # the slug of the revision's kernel
    figure: Figure | None = None

    @property
    def values(self) -> list[float]:
        """The yardstick of each repeat; the speed over before's where there is no figure."""
        return [ratio * (self.figure.ahead if self.figure else 1.0) for ratio in self.pair.ratios]

    def row(self) -> dict[str, Any]:
        """What is written of it."""
        pair, sizes, problem = self.pair, self.pair.cell.sizes, self.pair.cell.problem
        return {
            "dtype": problem.dtype,
            "head_dim": problem.head_dim,
            "head_dim_v": problem.head_dim_v,
            "mask": problem.mask,
            **vars(sizes),
            "kernel": pair.slug,
            "kernel_before": self.before,
            "us": [round(value, 2) for value in pair.new],
            "us_before": [round(value, 2) for value in pair.old],
            "fagen_over_fa3_before": round(self.figure.ahead, 4) if self.figure else None,
            "values": [round(value, 4) for value in self.values],
            "same_bits": pair.same,
        }


def behind(values: Sequence[float]) -> bool:
    """Whether a row is slower than its yardstick in every repeat."""
    return bool(values) and max(values) < 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; the exit code is that of the `fagen` command."""
    asked = _arguments(argv)
    return script(asked, export if asked.export else run, report)


def export(asked: argparse.Namespace) -> int:
    """Write the kernels of before to a folder; needs no GPU."""
    before = Before.at(asked.before)
    before.export(asked.export)
    say(f"{len(before.kernels)} kernels and their {TABLE} written to {asked.export}")
    return 0


def run(asked: argparse.Namespace) -> int:
    """Build both kernels of every shape, time them, write and say what was found."""
    findings = Findings.begun(asked.out, "shapes", [ROUND])
    about = findings.about
    before = Before.at(asked.before)
    about |= {"before": REVISION if Path(asked.before).is_dir() else asked.before}
    about |= {"random": asked.random, "seed": asked.seed}
    known = {figure.cell: figure for figure in figures()}
    cells = [*known, *drawn(asked.random, asked.seed, before.problems())]
    shapes, schedules = [], {}
    for cell in cells:
        problem = cell.problem
        if asked.head_dim and problem.head_dim not in asked.head_dim:
            continue
        if asked.mask and problem.mask not in asked.mask:
            continue
        old = before.pick(cell, about["card"])
        found = serving(cell, about["card"])
        if old is None or not found:
            findings.note(f"no kernel {'now' if old else 'before'}", cell)
            continue
        schedules[found[0].slug] = found[0]
        shapes.append(Shape(Pair(cell, found[0].slug), old, known.get(cell)))
    if not shapes:
        raise FagenError(f"no shape has kernels now and before\n{findings.remarks}")
    began = time.monotonic()
    with ThreadPoolExecutor(BUILDERS) as pool:
        olds = {slug: before.kernels[slug] for slug in {shape.before for shape in shapes}}
        compiled = {slug: pool.submit(compile_before, text) for slug, text in olds.items()}
        kernels = build(schedules.values(), binding=False)
        libraries = {slug: one.result() for slug, one in compiled.items()}
    findings.note_compiler(kernels)
    say(f"{len(kernels)} + {len(libraries)} kernels built in {time.monotonic() - began:.0f} s")
    began = time.monotonic()
    for repeat in range(asked.repeats):
        for shape in list(shapes):
            plan, binary = kernels[shape.pair.slug]
            old = libraries[shape.before]
            try:
                time_pair(
                    shape.pair, plan, binary.library, old, repeat, regime=ROUND, ulps=AGREEMENT
                )
            except VerificationError as error:
                findings.note("wrong, and not timed", error)
                about["wrong"] = True
                shapes.remove(shape)
        findings.rows = [shape.row() for shape in shapes]
        about["seconds"] = round(time.monotonic() - began)
        findings.save()
        say(f"repeat {repeat + 1}: {', '.join(summary(findings.rows))}")
    report(findings)
    return findings.finish()


# ---- what is said --------------------------------------------------------------------------------


def summary(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Geomean, minimum and rows behind: by FlashAttention-3's figures, and of random shapes."""
    listed = list(rows)
    groups = {
        "÷ FA3 by the yardstick": [row for row in listed if row["fagen_over_fa3_before"]],
        "random shapes, ÷ before": [row for row in listed if not row["fagen_over_fa3_before"]],
    }
    for said, members in groups.items():
        if members:
            medians = [statistics.median(row["values"]) for row in members]
            slower = sum(behind(row["values"]) for row in members)
            yield (
                f"{said}: geomean {geomean(medians):.4f}, minimum {min(medians):.3f}, behind in "
                f"{slower} of {len(members)}"
            )


def report(findings: Findings) -> None:
    """Write <stem>.md; print its summary and the slowest rows."""
    about, rows = findings.about, sorted(findings.rows, key=_middle)
    means = [f"- {line}" for line in summary(rows)]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(f"{row['dtype']} hd{row['head_dim']} {row['mask']}", []).append(row)
    by_problem = [
        [name, str(len(members)), f"{geomean(map(_middle, members)):.3f}",
         f"{_middle(members[0]):.3f}", str(sum(behind(row["values"]) for row in members))]
        for name, members in sorted(groups.items())
    ]  # fmt: skip
    regime = about["regimes"]["burst"]
    findings.write_page(
        "Kernels before and after, at random shapes",
        f"{findings.made_on}. Kernels of now beside those of {about['before']}, in turn: "
        f"{regime['idle'] * 1e3:g} ms of pause, {regime['timed'] * 1e3:g} ms timed, "
        f"{regime['rounds']} rounds, medians. The value is (speed now ÷ before) × (fagen before ÷ "
        "FlashAttention-3, of benchmarks/fa3_burst.csv), or the first factor alone; a row is "
        "behind where it is below 1 in every repeat.",
        "\n".join(means),
        markdown(["problem", "rows", "geomean", "minimum", "behind"], by_problem),
        markdown(_HEAD, [_line(row) for row in rows]),
        findings.remarks,
    )
    print("\n".join(means))
    print(markdown(_HEAD, [_line(row) for row in rows if _middle(row) < 1.03][:40]))
    print(findings.remarks, end="")


_HEAD = ["problem", "B", "S", "H", "kernel now", "before", "µs", "now ÷ before", "was ÷ FA3",
         "value", "of repeats", "behind"]  # fmt: skip


def _middle(row: Mapping[str, Any]) -> float:
    return float(statistics.median(row["values"]))


def _line(row: Mapping[str, Any]) -> list[str]:
    names = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k")
    sizes, was = Sizes(*(row[name] for name in names)), row["fagen_over_fa3_before"]
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
        f"{_middle(row):.3f}",
        " ".join(f"{value:.3f}" for value in row["values"]),
        "yes" if behind(row["values"]) else "",
    ]


def _tile(slug: str) -> str:
    """What a slug says beyond its problem: m128n128_q2."""
    return slug[re.search(r"_m\d+n\d+", slug).start() + 1 :]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    wanted = parser(__doc__, peers=False, head_dim=int, mask=MASKS)
    wanted.add_argument("--before", default=REVISION, metavar="REVISION or FOLDER")
    wanted.add_argument("--export", type=Path, metavar="FOLDER")
    wanted.add_argument("--random", type=int, default=0, metavar="N")
    wanted.add_argument("--seed", type=int, default=0)
    wanted.add_argument("--repeats", type=int, default=3)
    return wanted.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
