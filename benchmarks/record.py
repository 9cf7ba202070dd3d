"""A script declared; its arguments, kernels, times and the files of its runs: for all scripts."""

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from fagen import flow
from fagen.build import Binary
from fagen.dispatch.select import serve
from fagen.errors import FagenError, RefusedBuild, VerificationError
from fagen.kind import Plan
from fagen.measure.card import hopper
from fagen.measure.cells import race
from fagen.measure.peers import GRADIENTS, installed, ours, peer
from fagen.measure.rows import QUANTISE, YARDSTICK, Row, read_rows, rounded, title
from fagen.measure.timing import REGIMES, Regime
from fagen.paths import write_whole
from fagen.problem import Cell, Problem, Sizes, solves, standard_sizes
from fagen.schedule import Schedule
from fagen.vocab import CALLED, DTYPES, FORWARD, PASSES, SCALE_ROWS_DEFAULT, V_LAYOUTS

Item = TypeVar("Item")
Options = argparse.Namespace
Kernels = Mapping[str, tuple[Plan, Binary]]
Refused = Callable[[RefusedBuild, str], None]
RESULTS = Path(__file__).resolve().parent / "results"
BUILDERS = os.cpu_count() or 1  # kernels that are compiled at a time
EPILOG = """
Results go to benchmarks/results/ (or the folder --out) as <card>-<date>-<what>.json and .md, and a
.run.json where rows are a plain list, after every step: a run cut short keeps what it has. The exit
code is 6 where an output is wrong.
"""
PEER = (
    "default: cudnn, fa2, and fa3 if installed; for e4m3 cudnn in fp16, cudnn-e4m3 if installed, "
    "and quantise"
)
PASS: Mapping[str, Any] = {
    "dest": "kind",
    "choices": CALLED,
    "default": FORWARD,
    "help": "default: %(default)s",
}


# ---- a run ---------------------------------------------------------------------------------------


@dataclass
class Run:
    """The rows of a run on one card, what holds for all of them, and where its files go.

    Rows are dicts, in one file {"about": …, "rows": […]}; or dataclasses, a list in a file of its
    own, beside which <stem>.run.json has what holds for all.
    """

    folder: Path
    stem: str
    about: dict[str, Any]
    row: type = dict
    rows: list[Any] = field(default_factory=list)

    @classmethod
    def begun(cls, folder: Path, kind: str, regimes: Iterable[Regime], row: type = dict) -> "Run":
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
            "regimes": {regime.name: asdict(regime) for regime in regimes},
            "notes": {},
        }
        stem = "-".join(filter(None, (card.slug, about["date"], kind)))
        return cls(folder, stem, about, row)

    @classmethod
    def read(cls, path: Path, row: type = dict) -> "Run":
        """Read a run back from the path of its rows."""
        rows = json.loads(path.read_text(encoding="utf-8"))
        if row is dict:
            return cls(path.parent, path.stem, rows["about"], row, rows["rows"])
        about = json.loads(path.with_suffix(".run.json").read_text(encoding="utf-8"))
        rows = read_rows(path) if row is Row else [row(**fields) for fields in rows]
        return cls(path.parent, path.stem, about, row, [*rows])

    def save(self) -> None:
        """Write the rows, a line each so that a diff stays readable, and what holds for them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.stem}.json"
        lines = ",\n".join(json.dumps(_plain(row), ensure_ascii=False) for row in self.rows)
        about = json.dumps(self.about, indent=1, ensure_ascii=False)
        if self.row is dict:
            write_whole(path, f'{{"about": {about},\n"rows": [\n{lines}\n]}}\n')
        else:
            write_whole(path, f"[\n{lines}\n]\n")
            write_whole(path.with_suffix(".run.json"), f"{about}\n")

    def note(self, what: str, note: object) -> None:
        """Remember something that holds for one cell."""
        self.about["notes"].setdefault(what, []).append(str(note))

    def note_wrong(self, error: object, what: str = "wrong, and not timed") -> None:
        """Remember an output that is wrong."""
        say(f"  {error}")
        self.note(what, error)
        self.about["wrong"] = True

    @property
    def card(self) -> str:
        """Its name."""
        return str(self.about["card"])

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
        return "".join(f"- {what}: {'; '.join(cells)}\n" for what, cells in notes.items())

    def write_page(self, heading: str, *parts: str) -> str:
        """Write <stem>.md out of parts, the empty ones left out; return its text.

        What sums it up comes first: a page is read from its beginning.
        """
        title = f"# {heading}: {self.about['card']}, {self.about['date']}"
        page = "\n\n".join(part.strip() for part in (title, *parts) if part.strip()) + "\n"
        write_whole(self.folder / f"{self.stem}.md", page)
        return page

    def build(
        self, schedules: Iterable[Schedule], *, binding: bool = True, refused: Refused | None = None
    ) -> Kernels:
        """The kernels of schedules by slug, several compiled at a time; with torch ops or not.

        What compiled them is noted. Of one that breaks its Plan `refused` is told, and its slug,
        and it is left out; without that RefusedBuild is raised.
        """
        began = time.monotonic()
        kernels: dict[str, tuple[Plan, Binary]] = {}
        with ThreadPoolExecutor(BUILDERS) as pool:
            builds = {
                schedule.slug: pool.submit(flow.built, schedule, binding=binding)
                for schedule in {schedule.slug: schedule for schedule in schedules}.values()
            }
            for slug, build in builds.items():
                try:
                    kernels[slug] = build.result()
                except RefusedBuild as error:
                    if refused is None:
                        raise
                    refused(error, slug)
        for _, binary in kernels.values():  # the same for all of them
            self.about["nvcc"] = binary.made_with["nvcc"]
        say(f"{len(kernels)} kernel(s) built in {time.monotonic() - began:.0f} s")
        return kernels

    def each(self, work: Iterable[Item], step: Callable[[Item], object]) -> None:
        """Take a step for each piece of work, and save after it.

        A step whose output is wrong is noted. Raises FagenError where nothing could be timed.
        """
        began = time.monotonic() - self.about.get("seconds", 0)
        for item in work:
            try:
                step(item)
            except VerificationError as error:
                self.note_wrong(error)
            self.about["seconds"] = round(time.monotonic() - began)
            self.save()
        if not self.rows:
            raise FagenError(f"nothing could be timed:\n{self.remarks}")

    def finish(self) -> int:
        """Say where everything is; the exit code."""
        say(f"{self.about['seconds']} s on the GPU; written to {self.folder / self.stem}.*")
        return VerificationError.exit_code if self.about.get("wrong") else 0


def _plain(row: Any) -> dict[str, Any]:
    if isinstance(row, dict):
        return row
    return rounded(row).record() if isinstance(row, Row) else asdict(row)


# ---- a script ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Script:
    """What a script takes and does; called with arguments it is the script's `main`.

    `work(run, options)` adds rows to a run on a GPU; `page(run)` writes its page, with --redraw of
    what was read back. `kind` ends the files' names. `lists` are options that may be repeated, by a
    type or choices and a default; `options` are arguments of add_argument. `settle` may change what
    is asked for, or return a complaint. Where `beside` returns an exit code, that was all: it needs
    no GPU.
    """

    doc: str | None
    kind: str | Callable[[Options], str]
    work: Callable[[Run, Options], object]
    page: Callable[[Run], object] = lambda run: None
    row: type = dict
    regimes: Sequence[Regime] | Callable[[Options], Sequence[Regime]] = tuple(REGIMES.values())
    lists: Mapping[str, tuple[Any, Iterable[Any] | None]] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    peers: bool = False
    settle: Callable[[Options], str | None] = lambda options: None
    beside: Callable[[Options], int | None] = lambda options: None

    def arguments(self, argv: Sequence[str] | None = None) -> Options:
        """What is asked for."""
        raw = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(description=self.doc, epilog=EPILOG, formatter_class=raw)
        if self.peers:
            parser.add_argument("--peer", action="append", help=PEER)
        for name, (values, _) in self.lists.items():
            how = {"type": values} if isinstance(values, type) else {"choices": list(values)}
            parser.add_argument(f"--{name.replace('_', '-')}", action="append", **how)
        parser.add_argument("--out", type=Path, default=RESULTS, help="folder to write to")
        parser.add_argument("--redraw", type=Path, metavar="ROWS.json", help="no GPU: write anew")
        for option, how in self.options.items():
            parser.add_argument(option, **how)
        options = parser.parse_args(argv)
        for name, (_, usual) in self.lists.items():
            otherwise = None if usual is None else list(usual)
            setattr(options, name, getattr(options, name) or otherwise)
        if complaint := self.settle(options):
            parser.error(complaint)
        return options

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run, or with --redraw write a run's page anew; the exit code is the `fagen` command's."""
        options = self.arguments(argv)
        try:
            if (code := self.beside(options)) is not None:
                return code
            if options.redraw:
                self.page(Run.read(options.redraw, self.row))
                return 0
            kind = self.kind if isinstance(self.kind, str) else self.kind(options)
            regimes = self.regimes(options) if callable(self.regimes) else self.regimes
            run = Run.begun(options.out, kind, regimes, self.row)
            self.work(run, options)
            self.page(run)
            return run.finish()
        except FagenError as error:
            print(error, file=sys.stderr)
            return error.exit_code


def flag(text: str) -> dict[str, Any]:
    """An option that is said or not."""
    return {"action": "store_true", "help": text}


# ---- which kernels -------------------------------------------------------------------------------


def grid(options: Options, kind: str = FORWARD) -> list[Cell]:
    """The cells that are asked for, each of 16,384 tokens and hidden size 2048."""
    return [
        Cell(Problem(dtype, head_dim, head_dim, mask, kind=kind), standard_sizes(head_dim, seqlen))
        for dtype in options.dtype
        for head_dim in options.head_dim
        for mask in options.mask
        for seqlen in options.seqlen
    ]


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
    schedules = [schedule for schedule in flow.committed(problem.kind) if solves(schedule, problem)]
    fp8 = DTYPES[problem.dtype].fp8
    if everything:
        return schedules
    if not (schedules or fp8 or derived):
        return []  # a derived schedule would serve: nobody has tuned it
    ways: list[dict[str, Any]] = [dict(v_layout="", scale_rows=0)]
    if fp8:
        blocks = (0, SCALE_ROWS_DEFAULT)
        ways = [dict(v_layout=v, scale_rows=rows) for v in V_LAYOUTS for rows in blocks]
    typed = replace(problem, out_dtype=DTYPES[problem.dtype].out)
    return [serve(replace(typed, **way), sizes, card).schedule for way in ways]


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


# ---- timing --------------------------------------------------------------------------------------


def time_all(
    run: Run,
    work: Mapping[Cell, Sequence[Schedule]],
    kernels: Kernels,
    peers: Sequence[str] | None = None,
    *,
    regimes: Sequence[Regime] = tuple(REGIMES.values()),
    wide: Regime | None = None,
    without: Sequence[str] = (),
) -> None:
    """Time each cell's schedules beside peers, if not these then the usual ones of its dtype.

    Peers named in `without` are left out. Under `wide`, if given, fagen and the yardstick alone are
    timed, in 16 bits.

    What cannot be timed is noted, and why: a cell without a schedule, a peer that refuses, a
    kernel whose output is wrong.  Raises FagenError where nothing can.
    """
    for cell in work:
        if not work[cell]:
            run.note("no committed schedule", cell)
    numbered = list(enumerate((cell for cell in work if work[cell]), 1))

    def step(item: tuple[int, Cell]) -> None:
        number, cell = item
        mine = [ours(kernels[schedule.slug][1]) for schedule in work[cell]]
        names = [n for n in peers or usual_peers(cell.problem) if n not in without]
        others = [peer(name) for name in names]
        print(f"[{number}/{len(numbered)}]", end=" ", flush=True)

        def left_out(who: str, why: str) -> None:
            run.note(f"{title(who)} left out ({why})", cell)

        rows = race(cell, [*mine, *others], regimes=regimes, progress=say, left_out=left_out)
        if wide and not DTYPES[cell.problem.dtype].fp8:
            both = [*mine, *(other for other in others if other.name == YARDSTICK)]
            rows += race(cell, both, regimes=[wide], progress=say)
        run.rows += map(rounded, rows)  # as they are read back: a page drawn anew is the same

    run.each(numbered, step)


def sizes_of(row: Mapping[str, Any]) -> Sizes:
    """The sizes that a row of a file has among its keys."""
    return Sizes(*(row[name] for name in Sizes.__dataclass_fields__))


def said_of(regime: Regime) -> str:
    """How a regime's rounds are run, in words."""
    return (
        f"{regime.idle * 1e3:g} ms of pause, {regime.timed * 1e3:g} ms timed, "
        f"{regime.rounds} rounds"
    )


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def heading(rows: Sequence[Row]) -> str:
    """What rows are of, for a page's heading: both passes never stand on one page."""
    return "Gradients" if any(PASSES[row.pass_].gradients for row in rows) else "Attention"


def _dotted(cudnn: int | None) -> str:
    """'9.19.0' for 91900, as cuDNN 9 counts."""
    if cudnn is None:
        return "none"
    return f"{cudnn // 10_000}.{cudnn // 100 % 100}.{cudnn % 100}"
