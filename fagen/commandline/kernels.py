"""Commands that take schedules through the flow: from a check to runs and speeds on a GPU."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fagen import registry
from fagen.commandline import console
from fagen.errors import VerificationError
from fagen.toml_lines import printable

if TYPE_CHECKING:  # a command imports what it runs and no more: torch alone takes seconds
    from fagen.problem import Sizes
    from fagen.schedule import Schedule

    Schedules = tuple[Schedule, ...]
    AnySchedules = tuple[Schedule | console.Unread, ...]


@click.command()
@console.SCHEDULE
@click.option("--explain", is_flag=True, help="Print the formulae and the limits they lead to.")
@console.JSON
def check(schedule: "Schedule", explain: bool) -> None:
    """Say whether SCHEDULE fits, and print its ledgers.

    \b
    Examples:
      fagen check my.toml
      fagen check --explain fwd_fp16_d128_full_m128n128_reusev
    """
    plan = registry.plan(schedule)
    ledger = plan.explained() if explain else plan.ledger
    record = {**plan.record(), **({"explanation": ledger} if explain else {})}
    console.answer(record, [f"{plan.slug} fits", "", ledger])


@click.command()
@console.ANY_SCHEDULES
@console.ALL
@click.option("-o", "--output", type=console.PATH, help="Write files, in this folder.")
@click.option("--binding", is_flag=True, help="The torch binding as well.")
@click.option("--check", "compare", is_flag=True, help="Write nothing; find fault with generated/.")
@console.JSON
def generate(
    schedules: "AnySchedules",
    every: bool,
    output: Path | None,
    binding: bool,
    compare: bool,
) -> None:
    """Render kernels: CUDA C++ on standard output, or in files with a header that they include.

    With --all generated/ is brought up to date: the kernels that are committed as text, and what
    its ledgers say that all render to; with -o the texts of all go to a folder instead. --check
    exits with 6 where something in generated/ is not what schedules render to, where a kernel lacks
    evidence that it ran, and where a file or a line belongs to no schedule.

    \b
    Examples:
      fagen generate fwd_fp16_d128_causal_m128n128 | less
      fagen generate my.toml --binding -o kernels/
      fagen generate --all -o kernels/
      fagen generate --all
      fagen generate --check
    """
    from fagen import evidence, flow

    named = console.chosen(schedules, every or compare, by="--all" if every else "--check")
    if compare or (every and not output):
        renderings, wrong = console.each("rendering", named, flow.to_commit)
        if compare:
            if wrong:  # what is not rendered would be taken for nobody's
                raise wrong
            faults = evidence.faults(renderings)
            lines = [str(fault) for fault in faults] or ["generated/ is as schedules/ want it"]
            error = VerificationError(f"faults in generated/: {len(faults)}") if faults else None
            console.answer([asdict(fault) for fault in faults], lines, error)
        else:
            paths = evidence.note(renderings)
            console.answer(paths, (printable(path) for path in paths), wrong)
        return
    sources, wrong = console.each("rendering", named, flow.rendered)
    if output:
        written = (path for s in sources for path in flow.written(s, output, binding=binding))
        paths = [*dict.fromkeys(written)]  # the header is all kernels'
        console.answer(paths, (printable(path) for path in paths), wrong)
    else:
        texts = [s.kernel + s.binding if binding else s.kernel for s in sources]
        console.answer([_record(s) for s in sources], map(str.rstrip, texts), wrong)


def _record(kernel: Any) -> dict[str, Any]:
    """All of a Source or a Binary but its Plan, for JSON: `fagen check --json` has that."""
    fields = asdict(replace(kernel, plan=None))
    del fields["plan"]
    return fields


@click.command()
@console.ANY_SCHEDULES
@console.ALL
@click.option(
    "--binding/--no-binding", default=None, help="For torch too; else if it is installed."
)
@console.JSON
def build(schedules: "AnySchedules", every: bool, binding: bool | None) -> None:
    """Compile kernels, and check them against their Plans.

    A kernel that uses more registers than planned, spills, or whose wgmmas the compiler serialised
    is refused. What was built is kept, and found again in the cache: see `fagen cache`. Several are
    built at once, on all processors, and one that fails does not keep the others from it.

    \b
    Examples:
      fagen build my.toml
      fagen build --all --no-binding
    """
    from fagen import flow
    from fagen.commandline import report

    named = console.chosen(schedules, every)
    readable = [schedule for schedule in named if not isinstance(schedule, console.Unread)]
    kernels, wrong = console.each(
        "building" if len(readable) < 2 else "",  # of several the builder tells its progress itself
        named,
        flow.maker(readable, binding=binding, progress=console.say),
    )
    records = [_record(binary) for _, binary in kernels]
    console.answer(records, (report.built(*kernel) for kernel in kernels), wrong)


@click.command()
@console.SCHEDULES
@console.ALL
@click.option("--same-code", is_flag=True, help="No GPU: renew where the machine code is the same.")
@click.option("-o", "--output", type=console.PATH, help="Evidence, in this folder.")
@console.JSON
def verify(
    schedules: "Schedules",
    every: bool,
    same_code: bool,
    output: Path | None,
) -> None:
    """Check kernels against fp64 on a Hopper GPU.

    Each kernel runs over shapes that have caught attention kernels out. Its largest error may be
    twice that of torch's own attention, plus one unit in the last place. Its speed is measured
    beside cuDNN's, and the evidence is written to generated/, or with -o to another folder. A
    quantiser is compared with its reference, and timed beside a copy of the same bytes.

    --same-code also takes over what ran under another name, if no schedule has that name any more.

    \b
    Examples:
      fagen verify fwd_fp16_d128_causal_m128n128
      fagen verify my.toml -o evidence/
      fagen verify --all --same-code
    """
    from fagen import flow
    from fagen.commandline import report

    named = console.chosen(schedules, every)
    if not same_code:
        flow.need_gpu()  # before minutes of building

    with_place = [schedule for schedule in named if flow.has_place(schedule, output)]
    make = flow.maker(with_place, binding=False if same_code else None, progress=console.say)

    def prove(schedule: "Schedule") -> Any:
        flow.need_place(schedule, output)
        kernel = make(schedule)
        if same_code:
            return flow.renewed(*kernel, output, progress=console.keep_saying)
        return flow.verified(*kernel, output, progress=console.say)

    every_evidence, wrong = console.each("verifying", named, prove)
    records = [asdict(evidence) for evidence in every_evidence]
    console.answer(records, map(report.proved, every_evidence), wrong)


@click.command()
@console.SCHEDULES
@console.ALL
@click.option("--shape", "shapes", type=console.ShapeOption(), multiple=True, help="One problem.")
@click.option(
    "--seqlen",
    "seqlens",
    type=click.IntRange(1, 16_384),
    multiple=True,
    help="One problem of 16,384 tokens and hidden size 2048, in sequences of this length.",
)
@click.option("--flex", is_flag=True, help="Beside FlexAttention, which compiles for a while.")
@click.option("--fa3/--no-fa3", default=None, help="Beside FlashAttention-3; else if installed.")
@click.option("--regime", type=click.Choice(["sustained", "burst"]), help="This one only.")
@console.JSON
def bench(
    schedules: "Schedules",
    every: bool,
    shapes: tuple["Sizes", ...],
    seqlens: tuple[int, ...],
    flex: bool,
    fa3: bool | None,
    regime: str | None,
) -> None:
    """Time kernels on a Hopper GPU, beside their peers.

    The peers are cuDNN and FlashAttention-2, as torch calls them, and what the options name; of
    gradients these two, without autograd.
    Sustained is the speed of a long run, at the clock that the power limit leaves; burst is that of
    a short run after a pause. --shape and --seqlen may be repeated; without them, --seqlen is 4096.

    \b
    Examples:
      fagen bench fwd_fp16_d128_full_m128n128 --seqlen 512 --seqlen 4096
      fagen bench my.toml other.toml --shape 4,16,2,4096,4096 --flex
    """
    from fagen import flow, measure
    from fagen.problem import standard_sizes

    raced_ones = console.raced(console.chosen(schedules, every), every)
    flow.need_gpu()
    kernels, wrong = console.each(
        "building", raced_ones, lambda raced: flow.built(raced, progress=console.say)
    )
    if wrong:  # a table would be of other kernels than were asked for
        raise wrong
    head_dim = raced_ones[0].values()["head_dim"]
    standard = [standard_sizes(head_dim, seqlen) for seqlen in seqlens]
    beside_fa3 = measure.installed("fa3") if fa3 is None else fa3
    rows = measure.bench(
        kernels,
        [*shapes, *standard] or [standard_sizes(head_dim)],
        peers=["cudnn", "fa2", *["fa3"] * beside_fa3, *["flex"] * flex],
        regimes=[measure.REGIMES[regime]] if regime else list(measure.REGIMES.values()),
        progress=console.say,
    )
    console.answer([row.record() for row in rows], [measure.table(rows).rstrip()])


@click.command()
@console.SCHEDULES
@console.ALL
@click.option(
    "--seeds", type=click.IntRange(1, 10_000), default=2, show_default=True, help="Runs of each."
)
@console.JSON
def simulate(schedules: "Schedules", every: bool, seeds: int) -> None:
    """Run kernels' own text on a CPU, and check it against fp64.

    Thread by thread, at a few small sizes, with copies and products happening at random times: a
    wait that is missing shows sooner or later, and a kernel that hangs is told with who waits for
    what. Needs g++ and torch, no GPU. Of kernels of attention, of its gradients and of decoding;
    what a GPU makes of them, and how fast, `fagen verify` says.

    \b
    Examples:
      fagen simulate fwd_fp16_d128_causal_m128n128
      fagen simulate my.toml --seeds 20
    """
    from fagen import flow, simulator

    def run(schedule: "Schedule") -> dict[str, Any]:
        plan = registry.plan(schedule)
        runs = simulator.check(
            plan, flow.rendered(schedule).kernel, seeds=seeds, progress=console.say
        )
        return {"schedule": plan.slug, "runs": runs}

    counts, wrong = console.each("simulating", console.chosen(schedules, every), run)
    lines = (f"{count['schedule']}: {count['runs']} runs, all right" for count in counts)
    console.answer(counts, lines, wrong)
