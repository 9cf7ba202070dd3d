"""The command line: words come in, fagen is called, an answer goes out."""

if __name__ == "__main__":  # first, since what follows takes a moment
    from fagen.interrupts import leave_at_once

    leave_at_once()

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fagen import __version__, registry
from fagen.commands import list_, pick, schema, simulate, vendor
from fagen.console import (
    ALL,
    ANY_SCHEDULES,
    JSON,
    SCHEDULE,
    SCHEDULES,
    Amount,
    Commands,
    DefaultCommand,
    ShapeOption,
    Unread,
    answer,
    chosen,
    each,
    keep_saying,
    raced,
    say,
)
from fagen.errors import ToolchainError, VerificationError
from fagen.interrupts import INTERRUPTED
from fagen.paths import cache_folder
from fagen.toml_lines import printable

if TYPE_CHECKING:  # a command imports what it runs and no more: torch alone takes seconds
    from fagen.problem import Sizes
    from fagen.schedule import Schedule

    Schedules = tuple[Schedule, ...]
    AnySchedules = tuple[Schedule | Unread, ...]

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=Commands, context_settings=SETTINGS)
@click.version_option(__version__, prog_name="fagen")
@click.option("--debug", is_flag=True, help="Show a traceback where fagen itself is at fault.")
def main(debug: bool) -> None:
    """Generate fused attention kernels for Hopper GPUs from small schedules.

    Kernels of attention, of its gradients and of decoding, and those that quantise tensors for
    attention or combine partial outputs, come out of the same commands.

    A SCHEDULE is the path of a TOML file, the slug of any schedule, or - for standard input.

    \b
    Exit codes: 0 well; 1 a file is wrong or not there, or a schedule over budget; 2 usage;
    3 toolchain missing; 4 build failed; 5 no Hopper GPU; 6 a verification failed.

    \b
    Examples:
      fagen check schedules/forward/fwd_fp16_d128_causal_m128n128.toml
    """


# ---- the commands, in the order of the flow ------------------------------------------------------


@main.command()
@SCHEDULE
@click.option("--explain", is_flag=True, help="Print the formulae and the limits they lead to.")
@JSON
def check(schedule: "Schedule", explain: bool, as_json: bool) -> None:
    """Say whether SCHEDULE fits, and print its ledgers.

    \b
    Examples:
      fagen check my.toml
      fagen check --explain fwd_fp16_d128_full_m128n128_vspace
    """
    plan = registry.plan(schedule)
    told = plan.explained() if explain else plan.ledger
    record = {**plan.record(), **({"explanation": told} if explain else {})}
    answer(as_json, record, [f"{plan.slug} fits", "", told])


@main.command()
@ANY_SCHEDULES
@ALL
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write files, in this folder."
)
@click.option("--binding", is_flag=True, help="The torch binding as well.")
@click.option("--check", "compare", is_flag=True, help="Write nothing; find fault with generated/.")
@JSON
def generate(
    schedules: "AnySchedules",
    every: bool,
    output: Path | None,
    binding: bool,
    compare: bool,
    as_json: bool,
) -> None:
    """Render kernels: CUDA C++ on standard output, or in files.

    With --all the files go to generated/, unless -o names another folder. --check exits with 6
    where a kernel in generated/ is not what its schedule renders to, where it lacks evidence that
    it ran, and where a file belongs to no schedule.

    \b
    Examples:
      fagen generate fwd_fp16_d128_causal_m128n128 | less
      fagen generate my.toml --binding -o kernels/
      fagen generate --all
      fagen generate --check
    """
    from fagen import evidence, flow

    named = chosen(schedules, every or compare, by="--all" if every else "--check")
    sources, wrong = each("rendering", named, flow.rendered)
    if compare:
        if wrong:  # what is not rendered would be taken for nobody's
            raise wrong
        faults = evidence.faults(sources)
        told = [str(fault) for fault in faults] or ["generated/ is as schedules/ want it"]
        found = VerificationError(f"faults in generated/: {len(faults)}") if faults else None
        answer(as_json, [asdict(fault) for fault in faults], told, found)
    elif output or every:
        paths = [path for s in sources for path in flow.written(s, output, binding=binding)]
        answer(as_json, paths, (printable(str(path)) for path in paths), wrong)
    else:
        texts = [s.kernel + s.binding if binding else s.kernel for s in sources]
        answer(as_json, [asdict(s) for s in sources], map(str.rstrip, texts), wrong)


@main.command()
@ANY_SCHEDULES
@ALL
@click.option(
    "--binding/--no-binding", default=None, help="For torch too; else if it is installed."
)
@JSON
def build(schedules: "AnySchedules", every: bool, binding: bool | None, as_json: bool) -> None:
    """Compile kernels, and check them against their Plans.

    A kernel that uses more registers than planned, spills, or whose wgmmas the compiler serialised
    is refused. What was built is kept, and found again in the cache: see `fagen cache`. Several are
    built at once, on all processors, and one that fails does not keep the others from it.

    \b
    Examples:
      fagen build my.toml
      fagen build --all --no-binding
    """
    from fagen import flow, report

    named = chosen(schedules, every)
    readable = [schedule for schedule in named if not isinstance(schedule, Unread)]
    made, wrong = each(
        "building" if len(readable) < 2 else "",  # of several the builder tells its progress itself
        named,
        flow.maker(readable, binding=binding, progress=say),
    )
    records = [asdict(binary) for _, binary in made]
    answer(as_json, records, (report.built(*one) for one in made), wrong)


@main.command()
@SCHEDULES
@ALL
@click.option("--same-code", is_flag=True, help="No GPU: renew where the machine code is the same.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Evidence, in this folder.")
@JSON
def verify(
    schedules: "Schedules",
    every: bool,
    same_code: bool,
    output: Path | None,
    as_json: bool,
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
    from fagen import flow, report

    named = chosen(schedules, every)
    if not same_code:
        flow.need_gpu()  # before minutes of building

    with_place = [schedule for schedule in named if flow.has_place(schedule, output)]
    make = flow.maker(with_place, binding=False if same_code else None, progress=say)

    def prove(schedule: "Schedule") -> Any:
        flow.need_place(schedule, output)
        made = make(schedule)
        if same_code:
            return flow.renewed(*made, output, progress=keep_saying)
        return flow.verified(*made, output, progress=say)

    found, wrong = each("verifying", named, prove)
    answer(as_json, [asdict(evidence) for evidence in found], map(report.proved, found), wrong)


@main.command()
@SCHEDULES
@ALL
@click.option("--shape", "shapes", type=ShapeOption(), multiple=True, help="One problem.")
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
@JSON
def bench(
    schedules: "Schedules",
    every: bool,
    shapes: tuple["Sizes", ...],
    seqlens: tuple[int, ...],
    flex: bool,
    fa3: bool | None,
    regime: str | None,
    as_json: bool,
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

    raced_ones = raced(chosen(schedules, every), every)
    flow.need_gpu()
    made, wrong = each("building", raced_ones, lambda one: flow.built(one, progress=say))
    if wrong:  # a table would be of other kernels than were asked for
        raise wrong
    head_dim = raced_ones[0].values()["head_dim"]
    standard = [standard_sizes(head_dim, seqlen) for seqlen in seqlens]
    beside_fa3 = measure.installed("fa3") if fa3 is None else fa3
    rows = measure.bench(
        made,
        [*shapes, *standard] or [standard_sizes(head_dim)],
        peers=["cudnn", "fa2", *["fa3"] * beside_fa3, *["flex"] * flex],
        regimes=[measure.REGIMES[regime]] if regime else list(measure.REGIMES.values()),
        progress=say,
    )
    answer(as_json, [row.record() for row in rows], [measure.table(rows).rstrip()])


WRITE = click.option(
    "--write",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the best schedules and the dispatch table here.",
)


@main.group(cls=DefaultCommand)
def search() -> None:
    """Find the fastest schedules of a declared space, on this machine's GPUs.

    `fagen search SPACE…` means `fagen search run SPACE…`.

    \b
    Examples:
      fagen search spaces/fwd_fp16_d128.toml --dry-run
      fagen search spaces/fwd_fp16_d128.toml --minutes 20 --report search.html
      fagen search report search.sqlite
    """


@search.command("run")
@click.argument("spaces", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--dry-run", is_flag=True, help="Only say what fits, and what is predicted best.")
@click.option("--minutes", type=Amount(0, min_open=True), help="Stop after so long.")
@click.option(
    "--store",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("search.sqlite"),
    show_default=True,
    help="Where everything is kept; what is there is not done again.",
)
@click.option("--jobs", type=click.IntRange(1, 1_024), help="Compile so many at once.")
@click.option("--scheduler", metavar="ADDRESS", help="Work on a dask.distributed cluster.")
@click.option(
    "--replay",
    "recorded",
    type=click.Path(path_type=Path),
    help="Search over another store, without compiler and GPU.",
)
@WRITE
@click.option(
    "--report", "page", type=click.Path(dir_okay=False, path_type=Path), help="Write HTML here."
)
@JSON
def search_run(
    spaces: tuple[Path, ...],
    dry_run: bool,
    minutes: float | None,
    store: Path,
    jobs: int | None,
    scheduler: str | None,
    recorded: Path | None,
    folder: Path | None,
    page: Path | None,
    as_json: bool,
) -> None:
    """Search the SPACES: files, or slugs.

    A slug stands for all that might beat it. Kernels are compiled in parallel, checked, and timed
    beside an anchor and cuDNN; most are soon left behind. Ctrl-C shows the best so far, and the
    same command goes on from there. --write to schedules/ of a checkout, or to ~/.config/fagen.

    \b
    Examples:
      fagen search run my.toml --minutes 5 --store my.sqlite
      fagen search run fwd_bf16_d40_causal_m128n128 --write ~/.config/fagen
    """
    from fagen import search as searching

    if not dry_run:
        searching.need_room(store, page=page, folder=folder, read=spaces, recorded=recorded)
    declared = [space for path in spaces for space in searching.read_spaces(path)]
    if dry_run:
        found = list(searching.surveys(declared))
        answer(as_json, found, (line for one in found for line in searching.surveyed(one)))
        return
    outcome = searching.search(
        declared,
        store,
        minutes=minutes,
        jobs=jobs,
        scheduler=scheduler,
        recorded=recorded,
        say=keep_saying,
    )
    _show_found(store, folder, page, as_json)
    if outcome.interrupted:
        click.get_current_context().exit(INTERRUPTED)


@search.command("report")
@click.argument("store", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="The HTML file."
)
@WRITE
@JSON
def search_report(store: Path, output: Path | None, folder: Path | None, as_json: bool) -> None:
    """Say what STORE knows, and write it as one HTML page beside it.

    \b
    Examples:
      fagen search report search.sqlite
      fagen search report search.sqlite -o found.html --write schedules
    """
    from fagen import search as searching

    page = output or store.parent / f"{store.stem}.html"  # of a folder there is no store
    searching.need_room(store, page=page, folder=folder)
    _show_found(store, folder, page, as_json)


def _show_found(store: Path, folder: Path | None, page: Path | None, as_json: bool) -> None:
    """Say what a store knows, and write what was asked for."""
    from fagen import search as searching

    results = searching.found(store)
    records = [searching.record(result) for result in results]
    answer(as_json, records, (line for result in results for line in searching.told(result)))
    if page:
        searching.write_report(store, page)
    for path in [*([page] if page else []), *(searching.write(results, folder) if folder else [])]:
        keep_saying(f"wrote {path}")


main.add_command(pick)


main.add_command(list_)
main.add_command(simulate)
main.add_command(vendor)
main.add_command(schema)


@main.group()
def cache() -> None:
    """Look at, or empty, the folder of built kernels.

    It is FAGEN_CACHE, or else fagen under XDG_CACHE_HOME, or else ~/.cache/fagen.

    \b
    Examples:
      fagen cache list
      fagen cache prune --older-than 30
    """


@cache.command("list")
@JSON
def cache_list(as_json: bool) -> None:
    """List what was built, last used first.

    \b
    Examples:
      fagen cache list
    """
    from fagen import build, report

    entries = [report.cached(entry) for entry in build.cache_entries()]
    answer(as_json, entries, [printable(str(cache_folder())), *report.columns(entries)])


@cache.command("prune")
@click.option("--older-than", type=Amount(0), metavar="DAYS", help="What was not used for so long.")
@click.option("--keep", type=click.IntRange(0), metavar="N", help="All but the N last used.")
@click.option("--all", "every", is_flag=True, help="Everything.")
@JSON
def cache_prune(older_than: float | None, keep: int | None, every: bool, as_json: bool) -> None:
    """Remove what is broken or failed, and what the options name; what is in use stays.

    \b
    Examples:
      fagen cache prune
      fagen cache prune --keep 20
    """
    from fagen import build, report

    seconds = None if older_than is None else older_than * 86_400
    removed = build.prune(older_than=seconds, keep=keep, everything=every)
    entries = [report.cached(entry) for entry in removed]
    answer(as_json, entries, [*report.columns(entries), f"removed: {len(entries)}"])


@main.command()
@JSON
def doctor(as_json: bool) -> None:
    """Say what is installed, and how to install the rest.

    Exits with 3 where no kernel can be built. A disassembler, torch and a GPU may be missing.

    \b
    Examples:
      fagen doctor
    """
    from fagen import report
    from fagen.doctor import doctor as looked_at

    findings = looked_at()
    missing = [f.name for f in findings if not f.ok and f.needed_for in ("rendering", "building")]
    wrong = ToolchainError(f"no kernel can be built without {', '.join(missing)}")
    records = [asdict(finding) for finding in findings]
    answer(as_json, records, map(report.found, findings), wrong if missing else None)


if __name__ == "__main__":
    main(prog_name="fagen")
