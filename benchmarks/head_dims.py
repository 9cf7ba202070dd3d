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

Written to benchmarks/results/ as benchmarks/run.py does, after every cell:
<card>-<date>-head-dims.json, .run.json and .md, of gradients <card>-<date>-backward-head-dims. The
exit code is 6 where an output is wrong.
"""

import argparse
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from record import RESULTS, Kernels, Record, build, heading, parser, say, script, serving
from tables import picks
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
from fagen.problem import Cell, Problem, standard_sizes
from fagen.schedule import Schedule
from fagen.search.files import read_spaces
from fagen.search.space import survey
from fagen.vocab import FORWARD, MASKS, PASSES

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
SPACES = RESULTS.parent.parent / "spaces"
ROUND = Regime("burst", idle=0.020, warm=0.0, timed=0.004, rounds=3)
GRADIENTS_ROUND = Regime("burst", idle=0.020, warm=0.0005, timed=0.008, rounds=5)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; the exit code is that of the `fagen` command."""
    return script(_arguments(argv), run, report, Record.read)


def run(asked: argparse.Namespace) -> int:
    """Build the kernels, time every cell, write everything."""
    gradients = PASSES[asked.kind].gradients
    regime = GRADIENTS_ROUND if gradients else ROUND
    kind = f"{asked.kind}-head-dims" if gradients else "head-dims"
    record = Record.begun(asked.out, kind, [regime])
    lines, rivals = {}, {}
    for cell in cells(asked):
        if found := in_line(cell, record.about["card"]):
            lines[cell] = found
            rivals[cell] = list(of_spaces(cell.problem, asked.most)) if asked.spaces else []
        else:
            record.note("no kernel", cell)
    kernels, work = built(record, lines, rivals)
    record.note_compiler(kernels)

    def step(cell: Cell) -> None:
        if (problem := cell.problem.opened()) not in (row.cell.problem for row in record.rows):
            say(f"{problem}")
        mine = [kernels[slug] for slug in work[cell]]
        time_cell(record, cell, mine, asked.peer or usual_peers(cell.problem), regime)

    record.each(work, step)
    report(record)
    return record.finish()


def cells(asked: argparse.Namespace) -> Iterator[Cell]:
    """The cells that are asked for."""
    gradients = PASSES[asked.kind].gradients
    for dims in asked.dims or (GRADIENT_DIMS if gradients else DIMS):
        d, _, d_v = dims.partition("/")
        for dtype in asked.dtype or (DTYPES[:1] if gradients else DTYPES):
            for mask in asked.mask or MASKS:
                for seqlen in asked.seqlen or (GRADIENT_SEQLENS if gradients else SEQLENS):
                    problem = Problem(dtype, int(d), int(d_v or d), mask, kind=asked.kind)
                    yield Cell(problem, standard_sizes(int(d), seqlen))


def in_line(cell: Cell, card: str) -> Sequence[Schedule]:
    """What fagen.attention takes for a cell: the first that compiles; none if nothing is tuned.

    Of gradients what is derived counts too, of which there may be several.
    """
    gradients = PASSES[cell.problem.kind].gradients
    found = serving(cell, card, derived=gradients)
    derived = buildable(cell.problem) if gradients else None
    # a row of a table stands alone, as does what is committed
    return derived.schedules if derived and found[0] == derived.schedules[0] else found


def of_spaces(problem: Problem, most: int) -> Iterator[Schedule]:
    """What the spaces of a problem have, the fastest predicted first: of each so many at most."""
    for path in sorted(SPACES.glob("*.toml")):
        for declared in read_spaces(path):
            if declared.kind == problem.kind and problem in declared.targets():
                found = survey(declared, problem)
                yield from map(found.schedule, found.best[:most])


def built(
    record: Record,
    lines: Mapping[Cell, Sequence[Schedule]],
    rivals: Mapping[Cell, Sequence[Schedule]],
) -> tuple[Kernels, dict[Cell, list[str]]]:
    """Kernels, and for each cell the slugs of what is timed: first that which serves, then rivals.

    All compile at a time, then what is next in line where the first was refused.
    """

    def refused(error: RefusedBuild, slug: str) -> None:
        record.note("left out, since it spills or its products do not overlap", slug)

    kernels: dict[str, tuple[Plan, Binary]] = {}
    waiting, also = dict(lines), [one for found in rivals.values() for one in found]
    while waiting:
        first = [line[0] for line in waiting.values()]
        kernels |= build([*first, *also], binding=False, refused=refused)
        waiting = {cell: line[1:] for cell, line in waiting.items() if line[0].slug not in kernels}
        waiting, also = {cell: line for cell, line in waiting.items() if line}, []
    work = {}
    for cell, line in lines.items():
        serves = [one.slug for one in line if one.slug in kernels][:1]
        beside = [one.slug for one in rivals[cell] if one.slug in kernels]
        if serves:
            work[cell] = list(dict.fromkeys([*serves, *beside]))
        else:
            record.note("no kernel", cell)
    return kernels, work


def usual_peers(problem: Problem) -> Sequence[str]:
    """Who may stand beside fagen, in this order."""
    return tuple(GRADIENTS) if PASSES[problem.kind].gradients else PEERS


def time_cell(
    record: Record,
    cell: Cell,
    kernels: Sequence[tuple[Plan, Binary]],
    peers: Sequence[str],
    regime: Regime,
) -> None:
    """Add the rows of a cell: fagen's, its rivals', and those of the first peer that computes it.

    Where one of them is wrong, the kernel that serves is tried by itself.
    """
    others = []
    given = inputs(cell)
    for name in peers:
        try:
            peer(name).bind(cell, *given)
        except DeviceError as refusal:
            record.note(f"{title(name)} left out ({refusal})", cell)
        else:
            others.append(peer(name))
            break
    del given
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
            time_cell(record, cell, kernels[:1], peers, regime)
        raise
    record.rows += map(rounded, rows)


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


def pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Of each cell fagen's row and that of the peer, where there is one."""
    of_cell: dict[Cell, dict[bool, Row]] = {}
    for row in rows:
        if row.implementation != CANDIDATE:
            of_cell.setdefault(row.cell, {})[row.implementation == "fagen"] = row
    for found in of_cell.values():
        if len(found) == 2:
            yield found[True], found[False]


def means(rows: Sequence[Row]) -> str:
    """Markdown: for each head dim and dtype the geomean over each peer that stood beside it."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row, other in pairs(rows):
        key = row.cell.problem.head_dims, row.dtype, title(other.implementation)
        groups.setdefault(key, []).append(row.tflops / other.tflops)
    body = [
        [*key, str(len(found)), f"{geomean(found):.3f}{' !' if geomean(found) < GOAL else ''}",
         f"{min(found):.2f}"]
        for key, found in groups.items()
    ]  # fmt: skip
    return markdown(["hd", "dtype", "beside", "cells", "geomean", "worst"], body)


def beside_best(rows: Sequence[Row]) -> str:
    """Markdown: in each cell that has candidates what serves, the fastest, and their quotient."""
    of_cell: dict[Cell, list[Row]] = {}
    for row in rows:
        if row.schedule:
            of_cell.setdefault(row.cell, []).append(row)
    body = []
    for cell, found in of_cell.items():
        serves = next((row for row in found if row.implementation == "fagen"), None)
        if serves is None or len(found) == 1:
            continue
        best = max(found, key=lambda row: row.tflops)
        share = serves.tflops / best.tflops
        body.append(
            [cell.problem.head_dims, serves.dtype, serves.mask, cell.sizes.lengths,
             f"{serves.schedule}", f"{serves.tflops:.0f}", f"{best.schedule}", f"{best.tflops:.0f}",
             str(len(found)), f"{share:.2f}{' !' if share < NEAR_BEST else ''}"]
        )  # fmt: skip
    if not body:
        return ""
    head = ["hd", "dtype", "mask", "S", "serves", "TFLOP/s", "fastest", "TFLOP/s", "of", "share"]
    return f"What serves ÷ the fastest that was timed; ! below {NEAR_BEST}:\n\n" + markdown(
        head, body
    )


def report(record: Record) -> None:
    """Write <stem>.md, and print its means."""
    lines, shares = means(record.rows), beside_best(record.rows)
    (regime,) = (Regime(**said) for said in record.about["regimes"].values())
    record.write_page(
        f"{heading(record.rows)} by head dim",
        f"{record.made_on}; 16,384 tokens, hidden size of Q next to 2048, burst: "
        f"{regime.idle * 1e3:g} ms of pause, {regime.timed * 1e3:g} ms timed, "
        f"{regime.rounds} rounds. fagen ÷ the peer; ! below {GOAL}.",
        lines,
        shares,
        problems(record.rows),
        f"fagen's kernels:\n\n{picks(record.rows)}",
        record.remarks,
    )
    print(lines)
    if shares:
        print(shares)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    wanted = parser(__doc__, dims=str, dtype=DTYPES, mask=MASKS, seqlen=int)
    wanted.add_argument(
        "--pass", dest="kind", choices=list(PASSES), default=FORWARD, help="default: %(default)s"
    )
    wanted.add_argument(
        "--spaces", action="store_true", help="of gradients: time what spaces/ has for them too"
    )
    wanted.add_argument(
        "--most", type=int, default=6, help="kernels of a space; default: %(default)s"
    )
    asked = wanted.parse_args(argv)
    if asked.spaces and not PASSES[asked.kind].gradients:
        wanted.error("--spaces goes with --pass backward")
    return asked


if __name__ == "__main__":
    sys.exit(main())
