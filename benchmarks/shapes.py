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
there is the first factor alone, in fp16 and bf16, at the head dims that the revision has. Outputs
may differ by as many units in the last place as those of two right kernels.
"""

import csv
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from against import Pair, by_problem, by_row, export, kernels_in, middle, summary, time_pairs
from draws import drawn
from record import Options, Run, Script, said_of, serving
from revision import git, rendered_at

from fagen.errors import FagenError
from fagen.measure.numerics import AGREEMENT
from fagen.measure.timing import Regime
from fagen.paths import write_whole
from fagen.problem import Cell, Problem, Sizes
from fagen.toml_lines import read_toml
from fagen.vocab import PLAIN_MASKS

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
    read = []
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
        if row["mask"] not in PLAIN_MASKS or sizes.heads % sizes.kv_heads or None in row:
            raise FagenError(f"{path.name}:{number}: no row of figures")
        read.append(figure)
    return tuple(read)


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
            kernels = kernels_in(folder)
        else:
            table = git("show", f"{where}:schedules/{TABLE}")
            kernels = {s: text for s, text in rendered_at(where).items() if SLUG.match(s)}
        rows, _ = read_toml(table, TABLE)
        return cls(kernels, tuple(row for row in rows["kernel"] if SLUG.match(row["slug"])))

    def export(self, folder: Path) -> int:
        """Write what `at` reads; the exit code."""
        code = export(self.kernels, folder)
        write_whole(folder / TABLE, "".join(map(_row_of_table, self.table)))
        return code

    def problems(self) -> tuple[Problem, ...]:
        """What there are kernels for."""
        return tuple(sorted({problem_of(slug) for slug in self.kernels}))

    def pick(self, cell: Cell, card: str) -> str | None:
        """The slug that served a cell on a card; None where the revision had no kernel for it.

        Rows for few query rows go before those by keys, and rows of the card before another's; a
        problem without a row was served by its plainest kernel.
        """
        rows = [row for row in self.table if problem_of(row["slug"]) == cell.problem]
        own = [row for row in rows if row["card"] == card]
        rows = own or [row for row in rows if row["card"] == rows[0]["card"]]
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
    match = SLUG.match(slug)
    if match is None:
        raise FagenError(f"{slug} is no slug of a 16-bit kernel")
    d = int(match["d"])
    return Problem(match["dtype"], d, int(match["v"] or d), match["mask"])


def _row_of_table(row: Mapping[str, Any]) -> str:
    lines = (f"{key} = {value!r}" if isinstance(value, int) else f'{key} = "{value}"'
             for key, value in row.items())  # fmt: skip
    return "[[kernel]]\n" + "\n".join(lines) + "\n\n"


# ---- a run ---------------------------------------------------------------------------------------


def work(run: Run, options: Options) -> None:
    """Time both kernels of every shape."""
    before = Before.at(options.before)
    run.about |= {"before": REVISION if Path(options.before).is_dir() else options.before}
    run.about |= {"random": options.random, "seed": options.seed}
    ahead = {figure.cell: figure.ahead for figure in figures()}
    pairs, schedules = [], {}
    for cell in [*ahead, *drawn(options.random, options.seed, before.problems(), FLOPS)]:
        problem = cell.problem
        if options.head_dim and problem.head_dim not in options.head_dim:
            continue
        if options.mask and problem.mask not in options.mask:
            continue
        old, served = before.pick(cell, run.card), serving(cell, run.card)
        if old is None or not served:
            run.note(f"no kernel {'now' if old else 'before'}", cell)
            continue
        schedules[served[0].slug] = served[0]
        pairs.append(Pair(cell, served[0].slug, old, ahead.get(cell)))
    if not pairs:
        raise FagenError(f"no shape has kernels now and before\n{run.remarks}")
    time_pairs(
        run, pairs, schedules.values(), before.kernels, options.repeats, ROUND, ulps=AGREEMENT
    )


def page(run: Run) -> None:
    """Write <stem>.md; print its summary and the slowest rows."""
    rows = sorted(run.rows, key=middle)
    lines = "\n".join(f"- {line}" for line in summary(rows, "random shapes, ÷ before"))
    run.write_page(
        "Kernels before and after, at random shapes",
        f"{run.made_on}. Kernels of now beside those of {run.about['before']}, in turn: "
        f"{said_of(Regime(**run.about['regimes']['burst']))}, medians. The value is (speed now ÷ "
        "before) × (fagen before ÷ FlashAttention-3, of benchmarks/fa3_burst.csv), or the first "
        "factor alone; a row is behind where it is below 1 in every repeat.",
        lines,
        by_problem(rows),
        by_row(rows),
        run.remarks,
    )
    print(lines)
    print(by_row([row for row in rows if middle(row) < 1.03][:40]))
    print(run.remarks, end="")


main = Script(
    __doc__,
    "shapes",
    work,
    page,
    regimes=[ROUND],
    lists={"head_dim": (int, None), "mask": (PLAIN_MASKS, None)},
    options={
        "--before": dict(default=REVISION, metavar="REVISION or FOLDER"),
        "--export": dict(type=Path, metavar="FOLDER"),
        "--random": dict(type=int, default=0, metavar="N"),
        "--seed": dict(type=int, default=0),
        "--repeats": dict(type=int, default=3),
    },
    beside=lambda options: (
        Before.at(options.before).export(options.export) if options.export else None
    ),
)

if __name__ == "__main__":
    sys.exit(main())
