"""Cells in; kernels built, everything timed, and the files of a run written: for all scripts."""

import argparse
import dataclasses
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from fagen import flow
from fagen.build import Binary
from fagen.dispatch.select import serve
from fagen.errors import FagenError, RefusedBuild, VerificationError
from fagen.kind import Plan
from fagen.measure.card import hopper
from fagen.measure.cells import race
from fagen.measure.peers import GRADIENTS, installed, ours, peer
from fagen.measure.rows import QUANTISE, YARDSTICK, Row, read_rows, rounded, title, write_rows
from fagen.measure.timing import REGIMES, Regime
from fagen.paths import write_whole
from fagen.problem import Cell, Problem, solves, standard_sizes
from fagen.schedule import Schedule
from fagen.vocab import DTYPES, FORWARD, PASSES, SCALE_ROWS_DEFAULT, V_LAYOUTS

Item = TypeVar("Item")
Kernels = Mapping[str, tuple[Plan, Binary]]
RESULTS = Path(__file__).resolve().parent / "results"
BUILDERS = os.cpu_count() or 1  # kernels that are compiled at a time


@dataclass
class Run:
    """The rows of a run on one card, what holds for all of them, and where its files go."""

    folder: Path
    stem: str
    about: dict[str, Any]
    rows: list[Any] = field(default_factory=list)

    @classmethod
    def begun(cls, folder: Path, kind: str = "", regimes: Iterable[Regime] = ()) -> Self:
        """Begin a run on this card, now; no host, no user, no path is noted.

        Raises DeviceError without a Hopper GPU.
        """
        card = hopper()
        about = {
            "card": card.name,
            "driver": card.driver,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": _dotted(torch.backends.cudnn.version()),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "regimes": {
                regime.name: dataclasses.asdict(regime) for regime in regimes or REGIMES.values()
            },
            "notes": {},
        }
        return cls(folder, "-".join(filter(None, (card.slug, about["date"], kind))), about)

    def note(self, said: str, of: object) -> None:
        """Remember something that holds for one cell."""
        self.about["notes"].setdefault(said, []).append(str(of))

    def note_compiler(self, kernels: Kernels) -> None:
        """Remember what compiled these kernels: the same for all of them."""
        for _, binary in kernels.values():
            self.about["nvcc"] = binary.made_with["nvcc"]

    @property
    def made_on(self) -> str:
        """Card, versions and date, for a heading."""
        about = self.about
        compiler = f"nvcc {about['nvcc']}, " if "nvcc" in about else ""
        return (
            f"{about['card']}, driver {about['driver']}, CUDA {about['cuda']}, {compiler}"
            f"torch {about['torch']}, cuDNN {about['cudnn']}, {about['date']}"
        )

    @property
    def remarks(self) -> str:
        """The notes as Markdown."""
        notes: Mapping[str, Sequence[str]] = self.about.get("notes", {})
        return "".join(f"- {said}: {'; '.join(of)}\n" for said, of in notes.items())

    def write_page(self, heading: str, *parts: str) -> str:
        """Write <stem>.md out of parts, the empty ones left out; return its text.

        What sums it up comes first: a page is read from its beginning.
        """
        title = f"# {heading}: {self.about['card']}, {self.about['date']}"
        page = "\n\n".join(part.strip() for part in (title, *parts) if part.strip()) + "\n"
        write_whole(self.folder / f"{self.stem}.md", page)
        return page

    def each(self, work: Iterable[Item], step: Callable[[Item], object]) -> None:
        """Take a step for each piece of work, and save after it: a run cut short keeps what it has.

        A step whose output is wrong is noted, and the exit code is 6 then. Raises FagenError where
        nothing could be timed.
        """
        began = time.monotonic() - self.about.get("seconds", 0)
        for item in work:
            try:
                step(item)
            except VerificationError as error:
                say(f"  {error}")
                self.note("wrong, and not timed", error)
                self.about["wrong"] = True
            self.about["seconds"] = round(time.monotonic() - began)
            self.save()
        if not self.rows:
            raise FagenError(f"nothing could be timed:\n{self.remarks}")

    def save(self) -> None:
        """Write the rows and what holds for them."""
        raise NotImplementedError

    def save_beside(self) -> None:
        """Write <stem>.run.json: what holds for all rows."""
        text = json.dumps(self.about, indent=1, ensure_ascii=False) + "\n"
        write_whole(self.folder / f"{self.stem}.run.json", text)

    def finish(self) -> int:
        """Say where everything is; the exit code."""
        say(f"{self.about['seconds']} s on the GPU; written to {self.folder / self.stem}.*")
        return VerificationError.exit_code if self.about.get("wrong") else 0


class Record(Run):
    """A run of rows as they are in benchmark tables."""

    rows: list[Row]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a run back from the path of its rows."""
        return cls(path.parent, path.stem, _beside(path), list(read_rows(path)))

    def save(self) -> None:
        """Write the rows, and beside them what holds for them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_rows(self.folder / f"{self.stem}.json", self.rows)
        self.save_beside()


class Lines(Run):
    """A run whose rows are dataclasses of a script's own, in a file of their own."""

    @classmethod
    def read(cls, path: Path, line: Callable[..., Any]) -> Self:
        """Read a run back from the path of its lines."""
        lines = [line(**said) for said in json.loads(path.read_text(encoding="utf-8"))]
        return cls(path.parent, path.stem, _beside(path), lines)

    def save(self) -> None:
        """Write the lines, and beside them what holds for them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = ",\n".join(json.dumps(dataclasses.asdict(line)) for line in self.rows)
        write_whole(self.folder / f"{self.stem}.json", f"[\n{rows}\n]\n")
        self.save_beside()


def _beside(path: Path) -> dict[str, Any]:
    about: dict[str, Any] = json.loads(path.with_suffix(".run.json").read_text(encoding="utf-8"))
    return about


class Findings(Run):
    """A run whose rows are a script's own: one file, {"about": …, "rows": [{…}, …]}."""

    rows: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a run back."""
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(path.parent, path.stem, found["about"], found["rows"])

    def save(self) -> None:
        """Write all of it, a row to a line so that a diff stays readable."""
        self.folder.mkdir(parents=True, exist_ok=True)
        about = json.dumps(self.about, indent=1, ensure_ascii=False)
        rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in self.rows)
        text = f'{{"about": {about},\n"rows": [\n{rows}\n]}}\n'
        write_whole(self.folder / f"{self.stem}.json", text)


def heading(rows: Sequence[Row]) -> str:
    """What rows are of, for a page's heading: both passes never stand on one page."""
    return "Gradients" if any(PASSES[row.pass_].gradients for row in rows) else "Attention"


# ---- which kernels -------------------------------------------------------------------------------


def serving(
    cell: Cell, card: str, *, everything: bool = False, derived: bool = False
) -> list[Schedule]:
    """The schedule that fagen.attention takes for a cell on a card, or all committed that do it.

    Of a cell of gradients the one that it takes for these.

    In e4m3 it takes one for each way that the inputs may have been quantised: V row-major and
    transposed, a scale of a head and of a block of rows. None where there is none for a cell in 16
    bits, unless it may be `derived`.  Raises ScheduleError where a dispatch table is wrong.
    """
    problem, sizes = cell.problem, cell.sizes
    there = [schedule for schedule in flow.committed(problem.kind) if solves(schedule, problem)]
    fp8 = DTYPES[problem.dtype].fp8
    if everything:
        return there
    if not (there or fp8 or derived):
        return []  # a derived schedule would serve: nobody has tuned it
    ways: list[dict[str, Any]] = [dict(v_layout="", scale_rows=0)]
    if fp8:
        blocks = (0, SCALE_ROWS_DEFAULT)
        ways = [dict(v_layout=v, scale_rows=rows) for v in V_LAYOUTS for rows in blocks]
    asked = dataclasses.replace(problem, out_dtype=DTYPES[problem.dtype].out)
    return [serve(dataclasses.replace(asked, **way), sizes, card).schedule for way in ways]


def build(
    schedules: Iterable[Schedule],
    *,
    binding: bool = True,
    refused: Callable[[RefusedBuild, str], None] | None = None,
) -> Kernels:
    """The kernels of schedules by slug, several compiled at a time; with their torch ops or not.

    Of one that breaks its Plan `refused` is told, and its slug, and it is left out; without that
    RefusedBuild is raised.
    """
    wanted = list({schedule.slug: schedule for schedule in schedules}.values())
    began = time.monotonic()
    built: dict[str, tuple[Plan, Binary]] = {}
    with ThreadPoolExecutor(BUILDERS) as pool:
        begun = {one.slug: pool.submit(flow.built, one, binding=binding) for one in wanted}
        for slug, under_way in begun.items():
            try:
                built[slug] = under_way.result()
            except RefusedBuild as error:
                if refused is None:
                    raise
                refused(error, slug)
    say(f"{len(built)} kernel(s) built in {time.monotonic() - began:.0f} s")
    return built


# ---- timing --------------------------------------------------------------------------------------


def time_all(
    record: Record,
    work: Mapping[Cell, Sequence[Schedule]],
    kernels: Kernels,
    peers: Sequence[str] | None = None,
    *,
    regimes: Sequence[Regime] = tuple(REGIMES.values()),
    wide: Regime | None = None,
    without: Sequence[str] = (),
) -> None:
    """Time each cell's schedules beside peers, if not these then the usual ones of its dtype.

    Peers named in `without` are left out.

    The record is saved after every cell. Under `wide`, if given, fagen and the yardstick alone are
    timed, in 16 bits.

    What cannot be timed is noted, and why: a cell without a schedule, a peer that refuses, a
    kernel whose output is wrong.  Raises FagenError where nothing can.
    """
    for cell in work:
        if not work[cell]:
            record.note("no committed schedule", cell)
    numbered = list(enumerate((cell for cell in work if work[cell]), 1))

    def step(item: tuple[int, Cell]) -> None:
        number, cell = item
        mine = [ours(kernels[schedule.slug][1]) for schedule in work[cell]]
        names = [n for n in peers or usual_peers(cell.problem) if n not in without]
        others = [peer(name) for name in names]
        print(f"[{number}/{len(numbered)}]", end=" ", flush=True)

        def left_out(who: str, why: str) -> None:
            record.note(f"{title(who)} left out ({why})", cell)

        rows = race(cell, [*mine, *others], regimes=regimes, progress=say, left_out=left_out)
        if wide and not DTYPES[cell.problem.dtype].fp8:
            both = [*mine, *(one for one in others if one.name == YARDSTICK)]
            rows += race(cell, both, regimes=[wide], progress=say)
        record.rows += map(rounded, rows)  # as they are read back: a page drawn anew is the same

    record.each(numbered, step)


# ---- the command line ----------------------------------------------------------------------------


def parser(
    said: str | None, *, peers: bool = True, **lists: "type | Iterable[Any]"
) -> argparse.ArgumentParser:
    """What scripts take; of `lists`, options that may be repeated, the type or the choices."""
    made = argparse.ArgumentParser(
        description=said, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if peers:
        made.add_argument(
            "--peer",
            action="append",
            help="default: cudnn, fa2, and fa3 if installed; for e4m3 cudnn in fp16, cudnn-e4m3 if "
            "installed, and quantise",
        )
    for name, values in lists.items():
        how: dict[str, Any] = (
            {"type": values} if isinstance(values, type) else {"choices": list(values)}
        )
        made.add_argument(f"--{name.replace('_', '-')}", action="append", **how)
    made.add_argument("--out", type=Path, default=RESULTS, help="folder to write to")
    made.add_argument("--redraw", type=Path, metavar="ROWS.json", help="no GPU: write anew")
    return made


def parsed(
    made: argparse.ArgumentParser, argv: Sequence[str] | None, **usual: Iterable[Any]
) -> argparse.Namespace:
    """The arguments; `usual` is what a list has where nothing is said."""
    asked = made.parse_args(argv)
    for name, values in usual.items():
        setattr(asked, name, getattr(asked, name) or list(values))
    return asked


def grid(asked: argparse.Namespace, kind: str = FORWARD) -> list[Cell]:
    """The cells that are asked for, each of 16,384 tokens and hidden size 2048."""
    return [
        Cell(Problem(dtype, head_dim, head_dim, mask, kind=kind), standard_sizes(head_dim, seqlen))
        for dtype in asked.dtype
        for head_dim in asked.head_dim
        for mask in asked.mask
        for seqlen in asked.seqlen
    ]


def script(
    asked: argparse.Namespace,
    run: Callable[[argparse.Namespace], int],
    report: Callable[[Any], object],
    read: Callable[[Path], Run] = Findings.read,
) -> int:
    """Do what a script is asked for: run, or with --redraw write a run's page anew without a GPU.

    The exit code is that of the `fagen` command.
    """

    def redraw() -> int:
        report(read(asked.redraw))
        return 0

    return exit_code(redraw if asked.redraw else lambda: run(asked))


def usual_peers(problem: Problem) -> list[str]:
    """Those that come with torch, and others where they are installed.

    Of e4m3 there is cuDNN in fp16, which ratios are to, and what quantising costs. Of gradients
    there are those that can be called without autograd.
    """
    if PASSES[problem.kind].gradients:
        return list(GRADIENTS)
    if DTYPES[problem.dtype].fp8:
        return ["cudnn", *(["cudnn-e4m3"] if installed("cudnn-e4m3") else []), QUANTISE]
    return ["cudnn", "fa2", *(["fa3"] if installed("fa3") else [])]


def exit_code(run: Callable[[], int]) -> int:
    """Run it; an error of fagen's is printed, and gives its exit code."""
    try:
        return run()
    except FagenError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def _dotted(cudnn: int | None) -> str:
    """'9.19.0' for 91900, as cuDNN 9 counts."""
    if cudnn is None:
        return "none"
    return f"{cudnn // 10_000}.{cudnn // 100 % 100}.{cudnn % 100}"
