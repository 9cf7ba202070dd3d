"""Time every head dim that fagen is tuned for beside cuDNN, and the gradients of others too.

    python benchmarks/head_dims.py                           256 cells in burst: ~3 GPU minutes
    python benchmarks/head_dims.py --dims 96 --dims 192/128 --seqlen 2048    a part
    python benchmarks/head_dims.py --pass backward --spaces  the gradients, 30 cells: ~4 minutes
    python benchmarks/head_dims.py --redraw benchmarks/results/<card>-<date>-head-dims.json

A cell is 16,384 tokens and a hidden size of Q next to 2048. fagen's kernel is the one that
fagen.attention takes, called through its C function into outputs that are there. Where cuDNN
refuses a cell FA2 takes its place, and where that refuses too torch's EFFICIENT backend; who it
was, and why not cuDNN, is said. A dtype and head dim below 1.05 in its geometric mean is marked.

With --pass backward all of this is of the gradients, in fp16 at 4,096 keys if nothing else is said,
and of head dims without a schedule too, whose kernel is derived; one that does not compile is noted
and the next in line serves, as it would a call. cuDNN's and FA2's backward passes are called
without autograd; where both refuse, kernels are checked against fp64 at small sizes instead.

With --spaces the kernels that spaces/ has for a cell's problem are timed in it as well, as
`candidate`: of each space the --most that are predicted fastest. A kernel that serves at less than
0.90 of the best in its cell is marked.
"""

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from record import PASS, Kernels, Options, Run, Script, flag, heading, said_of, say, serving
from tables import grouped, picks
from torch import Tensor

from fagen.build import Binary
from fagen.dispatch.select import buildable
from fagen.errors import DeviceError, RefusedBuild, VerificationError
from fagen.kind import Plan
from fagen.measure.cells import race
from fagen.measure.inputs import SEQLENS, inputs
from fagen.measure.peers import GRADIENTS, Implementation, peer
from fagen.measure.rounds import Kernel, quick_check
from fagen.measure.rows import Row, geomean, markdown, problems, rounded, title
from fagen.measure.timing import Call, Regime
from fagen.measure.verification import contender_of
from fagen.paths import locate
from fagen.problem import Cell, Problem, standard_sizes
from fagen.schedule import Schedule
from fagen.search.files import read_spaces
from fagen.search.space import survey
from fagen.vocab import PASSES, PLAIN_MASKS

DIMS = (
    *("32", "40", "48", "64", "72", "80", "96", "112", "120", "128", "160", "192", "192/128"),
    *("224", "256", "64/256"),
)
GRADIENT_DIMS = (
    *("32", "48", "64", "72", "80", "96", "104", "112", "128", "144", "160", "192", "192/128"),
    *("224", "256"),
)
GRADIENT_SEQLENS = (4_096,)
DTYPES = ("fp16", "bf16")
PEERS = ("cudnn", "fa2", "efficient")
GOAL = 1.05
NEAR_BEST = 0.90  # of the fastest that was timed: a kernel that serves should not be slower
CANDIDATE = "candidate"
SPACES = locate("cli.py").parent / "spaces"
ROUND = Regime("burst", idle=0.020, warm=0.0, timed=0.004, rounds=3)
GRADIENTS_ROUND = Regime("burst", idle=0.020, warm=0.0005, timed=0.008, rounds=5)


def work(run: Run, options: Options) -> None:
    """Build the kernels, time every cell."""
    (regime,) = regimes_for(options)
    lines, rivals = {}, {}
    for cell in cells(options):
        if line := in_line(cell, run.card):
            lines[cell] = line
            rivals[cell] = list(of_spaces(cell.problem, options.most)) if options.spaces else []
        else:
            run.note("no kernel", cell)
    kernels, slugs = built(run, lines, rivals)

    def step(cell: Cell) -> None:
        if (problem := cell.problem.opened()) not in (row.cell.problem for row in run.rows):
            say(f"{problem}")
        mine = [kernels[slug] for slug in slugs[cell]]
        time_cell(run, cell, mine, options.peer or usual_peers(cell.problem), regime)

    run.each(slugs, step)


def regimes_for(options: Options) -> list[Regime]:
    """The one that cells are timed in."""
    return [GRADIENTS_ROUND if PASSES[options.kind].gradients else ROUND]


def cells(options: Options) -> Iterator[Cell]:
    """The cells that are asked for."""
    gradients = PASSES[options.kind].gradients
    for dims in options.dims or (GRADIENT_DIMS if gradients else DIMS):
        d, _, d_v = dims.partition("/")
        for dtype in options.dtype or (DTYPES[:1] if gradients else DTYPES):
            for mask in options.mask or PLAIN_MASKS:
                for seqlen in options.seqlen or (GRADIENT_SEQLENS if gradients else SEQLENS):
                    problem = Problem(dtype, int(d), int(d_v or d), mask, kind=options.kind)
                    yield Cell(problem, standard_sizes(int(d), seqlen))


def in_line(cell: Cell, card: str) -> Sequence[Schedule]:
    """What fagen.attention takes for a cell: the first that compiles; none if nothing is tuned.

    Of gradients what is derived counts too, of which there may be several.
    """
    gradients = PASSES[cell.problem.kind].gradients
    serves = serving(cell, card, derived=gradients)
    derived = buildable(cell.problem) if gradients else None
    # a row of a table stands alone, as does what is committed
    return derived.schedules if derived and serves[0] == derived.schedules[0] else serves


def of_spaces(problem: Problem, most: int) -> Iterator[Schedule]:
    """What the spaces of a problem have, the fastest predicted first: of each so many at most."""
    for path in sorted(SPACES.glob("*.toml")):
        for declared in read_spaces(path):
            if declared.kind == problem.kind and problem in declared.targets():
                surveyed = survey(declared, problem)
                yield from map(surveyed.schedule, surveyed.best[:most])


def built(
    run: Run,
    lines: Mapping[Cell, Sequence[Schedule]],
    rivals: Mapping[Cell, Sequence[Schedule]],
) -> tuple[Kernels, dict[Cell, list[str]]]:
    """Kernels, and for each cell the slugs of what is timed: first that which serves, then rivals.

    All compile at a time, then what is next in line where the first was refused.
    """

    def refused(error: RefusedBuild, slug: str) -> None:
        run.note("left out, since it spills or its products do not overlap", slug)

    kernels: dict[str, tuple[Plan, Binary]] = {}
    waiting, also = dict(lines), [rival for beside in rivals.values() for rival in beside]
    while waiting:
        first = [line[0] for line in waiting.values()]
        kernels |= run.build([*first, *also], binding=False, refused=refused)
        waiting = {cell: line[1:] for cell, line in waiting.items() if line[0].slug not in kernels}
        waiting, also = {cell: line for cell, line in waiting.items() if line}, []
    work = {}
    for cell, line in lines.items():
        serves = [schedule.slug for schedule in line if schedule.slug in kernels][:1]
        beside = [schedule.slug for schedule in rivals[cell] if schedule.slug in kernels]
        if serves:
            work[cell] = list(dict.fromkeys([*serves, *beside]))
        else:
            run.note("no kernel", cell)
    return kernels, work


def usual_peers(problem: Problem) -> Sequence[str]:
    """Who may stand beside fagen, in this order."""
    return tuple(GRADIENTS) if PASSES[problem.kind].gradients else PEERS


def time_cell(
    run: Run,
    cell: Cell,
    kernels: Sequence[tuple[Plan, Binary]],
    peers: Sequence[str],
    regime: Regime,
) -> None:
    """Add the rows of a cell: fagen's, its rivals', and those of the first peer that computes it.

    Where one of them is wrong, the kernel that serves is tried by itself.
    """
    others = []
    tensors = inputs(cell)
    for name in peers:
        try:
            peer(name).bind(cell, *tensors)
        except DeviceError as refusal:
            run.note(f"{title(name)} left out ({refusal})", cell)
        else:
            others.append(peer(name))
            break
    del tensors
    shared: dict[Hashable, tuple[Any, ...]] = {}
    mine = [
        called(*kernel, CANDIDATE if number else "fagen", shared)
        for number, kernel in enumerate(kernels)
    ]
    try:
        if not others:  # who would judge them
            for kernel in kernels:
                check(cell, *kernel)
        rows = race(cell, [*mine, *others], regimes=[regime], progress=None)
    except VerificationError:
        if len(kernels) > 1:
            del shared, mine
            time_cell(run, cell, kernels[:1], peers, regime)
        raise
    run.rows += map(rounded, rows)


def check(cell: Cell, plan: Plan, binary: Binary) -> None:
    """Check a kernel against fp64 at small sizes.  Raises VerificationError where it is wrong."""
    try:
        quick_check(cell, Kernel(plan.slug, binary.library))
    except VerificationError as error:
        raise VerificationError(f"{plan.slug}: {error}") from error


def called(
    plan: Plan, binary: Binary, name: str, shared: dict[Hashable, tuple[Any, ...]]
) -> Implementation:
    """A kernel through its C function, so that nothing of torch has to be compiled for it.

    What it takes is made once for all that share it, of one cell; outputs are its own.
    """
    contender = contender_of(plan)

    def bind(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
        like = contender.alike(plan)
        if like not in shared:
            shared[like] = contender.arguments(plan, q, k, v)
        into = contender.outputs(plan, shared[like])
        enqueue = contender.launch(plan, binary.library, shared[like], into)

        def run() -> Any:
            enqueue()
            return contender.compared(into)

        return Call(run)

    return Implementation(name, bind, plan.slug)


# ---- what is said --------------------------------------------------------------------------------


def beside_peers(rows: Sequence[Row]) -> str:
    """Markdown: for each head dim and dtype the geomean over each peer that stood beside it."""
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for cell, timed in grouped((r for r in rows if r.implementation != CANDIDATE), _cell).items():
        by_name = {row.implementation == "fagen": row for row in timed}
        if len(by_name) == 2:
            row, other = by_name[True], by_name[False]
            key = cell.problem.head_dims, row.dtype, title(other.implementation)
            ratios.setdefault(key, []).append(row.tflops / other.tflops)
    body = [
        [*key, str(len(some)), _marked(geomean(some), GOAL, 3), f"{min(some):.2f}"]
        for key, some in ratios.items()
    ]
    return markdown(["hd", "dtype", "beside", "cells", "geomean", "worst"], body)


def beside_best(rows: Sequence[Row]) -> str:
    """Markdown: in each cell that has candidates what serves, the fastest, and their quotient."""
    body = []
    for cell, timed in grouped((row for row in rows if row.schedule), _cell).items():
        serves = next((row for row in timed if row.implementation == "fagen"), None)
        if serves is None or len(timed) == 1:
            continue
        best = max(timed, key=lambda row: row.tflops)
        line = [cell.problem.head_dims, serves.dtype, serves.mask, cell.sizes.lengths]
        for row in (serves, best):
            line += [f"{row.schedule}", f"{row.tflops:.0f}"]
        share = _marked(serves.tflops / best.tflops, NEAR_BEST, 2)
        body.append([*line, str(len(timed)), share])
    if not body:
        return ""
    head = ["hd", "dtype", "mask", "S", "serves", "TFLOP/s", "fastest", "TFLOP/s", "of", "share"]
    about = f"What serves ÷ the fastest that was timed; ! below {NEAR_BEST}:"
    return f"{about}\n\n{markdown(head, body)}"


def _cell(row: Row) -> Cell:
    return row.cell


def _marked(value: float, least: float, digits: int) -> str:
    return f"{value:.{digits}f}{' !' if value < least else ''}"


def page(run: Run) -> None:
    """Write <stem>.md, and print its means."""
    lines, shares = beside_peers(run.rows), beside_best(run.rows)
    (regime,) = (Regime(**how) for how in run.about["regimes"].values())
    run.write_page(
        f"{heading(run.rows)} by head dim",
        f"{run.made_on}; 16,384 tokens, hidden size of Q next to 2048, burst: {said_of(regime)}. "
        f"fagen ÷ the peer; ! below {GOAL}.",
        lines,
        shares,
        problems(run.rows),
        picks(run.rows),
        run.remarks,
    )
    print("\n".join(filter(None, (lines, shares))))


main = Script(
    __doc__,
    lambda options: f"{options.kind}-head-dims" if PASSES[options.kind].gradients else "head-dims",
    work,
    page,
    row=Row,
    regimes=regimes_for,
    lists={
        "dims": (str, None),
        "dtype": (DTYPES, None),
        "mask": (PLAIN_MASKS, None),
        "seqlen": (int, None),
    },
    options={
        "--pass": PASS | {"choices": list(PASSES)},
        "--spaces": flag("of gradients: time what spaces/ has for them too"),
        "--most": dict(type=int, default=6, help="kernels of a space; default: %(default)s"),
    },
    peers=True,
    settle=lambda options: (
        "--spaces goes with --pass backward"
        if options.spaces and not PASSES[options.kind].gradients
        else None
    ),
)

if __name__ == "__main__":
    sys.exit(main())
