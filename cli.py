"""The command line: words come in, fagen is called, an answer goes out.

Every FagenError becomes its message on stderr and its exit code, in one place; with --json it is an
object on stdout as well.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from fagen import __version__
from fagen.errors import DeviceError, FagenError, ToolchainError, VerificationError
from fagen.paths import cache_folder, locate

if TYPE_CHECKING:  # a command imports what it runs and no more: torch alone takes seconds
    from fagen.measure import Shape
    from fagen.schedule import Schedule

    Schedules = tuple[Schedule, ...]

Done = TypeVar("Done")

INTERRUPTED = 130  # what a shell says of a program ended by Ctrl-C
INTERNAL = 70  # a fault of fagen's own, as sysexits.h has it
AS_JSON = "fagen.as_json"  # in click's context: whether --json was given
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


# ---- the frame -----------------------------------------------------------------------------------


class Failure(click.ClickException):
    """An error on its way out."""

    def __init__(self, context: click.Context, error: Exception, told: str, code: int) -> None:
        super().__init__(told)
        self.exit_code = code  # type: ignore[misc]
        self._record = {"error": type(error).__name__, "exit_code": code, "message": told}
        self._as_json = context.meta.get(AS_JSON, False)

    def show(self, file: Any = None) -> None:
        """Print the message as it is: its lines begin with file:line where they can."""
        if self._as_json:
            click.echo(_json(self._record))
        click.echo(self.message, err=True)


class Commands(click.Group):
    """The group in which an exception becomes a message and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands as they are written here: in the order of the flow."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what it raises leaves as Failure, except what click knows itself."""
        try:
            return super().invoke(ctx)
        except FagenError as error:
            raise Failure(ctx, error, str(error), error.exit_code) from error
        except KeyboardInterrupt:
            click.echo(err=True)  # ends the line with the terminal's ^C
            ctx.exit(INTERRUPTED)
        except (BrokenPipeError, click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except OSError as error:
            raise Failure(ctx, error, str(error), 1) from error
        except ModuleNotFoundError as error:
            told = f"{error.name} is not installed: python -m pip install {error.name}"
            raise Failure(ctx, error, told, ToolchainError.exit_code) from error
        except Exception as error:
            if ctx.params["debug"]:
                raise
            told = (
                f"fagen itself is at fault: {type(error).__name__}: {error}\n"
                "  `fagen --debug` before the command shows where; please report it, with what "
                "`fagen doctor` says"
            )
            raise Failure(ctx, error, told, INTERNAL) from error


class ScheduleArgument(click.ParamType):  # type: ignore[type-arg]
    """A schedule: the path of a TOML file, the slug of any schedule, or - for standard input."""

    name = "schedule"

    def convert(self, value: Any, param: Any, ctx: Any) -> "Schedule":
        """Read it; ScheduleError says what is wrong with it."""
        from fagen.schedule import Schedule, parse_schedule, read_schedule

        if value == "-":
            return parse_schedule(sys.stdin.read(), "stdin")
        if value.endswith(".toml") or "/" in value or Path(value).exists():
            return read_schedule(value)
        own = locate("schedules") / f"{value}.toml"
        return read_schedule(own) if own.exists() else Schedule.from_slug(value)

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        """Offer the committed slugs, and files."""
        slugs = [path.stem for path in sorted(locate("schedules").glob("*.toml"))]
        offered = [CompletionItem(slug) for slug in slugs if slug.startswith(incomplete)]
        return offered or [CompletionItem(incomplete, type="file")]


class ShapeOption(click.ParamType):  # type: ignore[type-arg]
    """The sizes of a problem, as five numbers."""

    name = "B,H,Hk,Sq,Sk"

    def convert(self, value: Any, param: Any, ctx: Any) -> "Shape":
        """Read them; a usage error where they are not five positive numbers that go together."""
        from fagen.measure import Shape

        try:
            batch, heads, kv_heads, seqlen_q, seqlen_k = map(int, value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not five numbers, as 4,16,16,4096,4096 is", param, ctx)
        if min(batch, heads, kv_heads, seqlen_q, seqlen_k) < 1 or heads % kv_heads:
            self.fail(f"{value!r}: all must be positive, and H a multiple of Hk", param, ctx)
        return Shape(batch, seqlen_q, seqlen_k, heads, kv_heads)


def _note_json(context: click.Context, _: click.Parameter, value: bool) -> bool:
    context.meta[AS_JSON] = value
    return value


SCHEDULE = click.argument("schedule", type=ScheduleArgument())
SCHEDULES = click.argument("schedules", type=ScheduleArgument(), nargs=-1)
ALL = click.option("--all", "every", is_flag=True, help="Every schedule in schedules/.")
JSON = click.option(
    "--json", "as_json", is_flag=True, is_eager=True, callback=_note_json, help="Print JSON."
)


@click.group(cls=Commands, context_settings=SETTINGS)
@click.version_option(__version__, prog_name="fagen")
@click.option("--debug", is_flag=True, help="Show a traceback where fagen itself is at fault.")
def main(debug: bool) -> None:
    """Generate fused attention kernels for Hopper GPUs from small schedules.

    A SCHEDULE is the path of a TOML file, the slug of any schedule, or - for standard input.

    \b
    Exit codes: 0 well; 1 the schedule is wrong or over budget; 2 usage; 3 toolchain missing;
    4 build failed; 5 no Hopper GPU; 6 a verification failed.

    \b
    Examples:
      fagen check schedules/fwd_fp16_d128_causal_m128n128.toml
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
    from fagen import plan, report

    made = plan.plan(schedule)
    told = plan.explain(made) if explain else made.ledger
    _answer(as_json, report.plan_record(made), [f"{made.slug} fits", "", told])


@main.command()
@SCHEDULES
@ALL
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write files, in this folder."
)
@click.option("--binding", is_flag=True, help="The torch binding as well.")
@click.option("--check", "compare", is_flag=True, help="Write nothing; find fault with generated/.")
@JSON
def generate(
    schedules: "Schedules",
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

    sources = _each("rendering", _chosen(schedules, every or compare), flow.rendered)
    folder = output or (locate("generated") if every else None)
    if compare:
        faults = evidence.faults(sources)
        told = [str(fault) for fault in faults] or ["generated/ is as schedules/ want it"]
        _answer(as_json, [asdict(fault) for fault in faults], told)
        if faults:
            raise VerificationError(f"faults in generated/: {len(faults)}")
    elif folder:
        paths = [path for s in sources for path in flow.written(s, folder, binding=binding)]
        _answer(as_json, paths, map(str, paths))
    else:
        texts = [s.kernel + s.binding if binding else s.kernel for s in sources]
        _answer(as_json, [asdict(s) for s in sources], map(str.rstrip, texts))


@main.command()
@SCHEDULES
@ALL
@click.option(
    "--binding/--no-binding", default=None, help="For torch too; else if it is installed."
)
@JSON
def build(schedules: "Schedules", every: bool, binding: bool | None, as_json: bool) -> None:
    """Compile kernels, and hold them against their Plans.

    A kernel that uses more registers than planned, spills, or makes its wgmmas wait for each other
    is refused. What was built is kept, and found again in the cache: see `fagen cache`.

    \b
    Examples:
      fagen build my.toml
      fagen build --all --no-binding
    """
    from fagen import flow, report

    def make(schedule: "Schedule") -> Any:
        return flow.built(schedule, binding=binding, progress=_say)

    made = _each("building", _chosen(schedules, every), make)
    _answer(as_json, [asdict(binary) for _, binary in made], (report.built(*one) for one in made))


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
    """Hold kernels against fp64 on a Hopper GPU.

    Each kernel runs over shapes that have caught attention kernels out. Its largest error may be
    twice that of torch's own attention, plus one unit in the last place. Its speed is measured
    beside cuDNN's, and the evidence is written to generated/, or with -o to another folder.

    \b
    Examples:
      fagen verify fwd_fp16_d128_causal_m128n128
      fagen verify my.toml -o evidence/
      fagen verify --all --same-code
    """
    from fagen import flow, report

    if not same_code:
        flow.need_gpu()  # before minutes of building

    def prove(schedule: "Schedule") -> Any:
        folder = flow.evidence_folder(schedule, output)
        made = flow.built(schedule, progress=_say)
        if same_code:
            return flow.renewed(*made, folder)
        return flow.verified(*made, folder, progress=_say)

    found = _each("verifying", _chosen(schedules, every), prove)
    _answer(as_json, [asdict(evidence) for evidence in found], map(report.proved, found))


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
    shapes: tuple["Shape", ...],
    seqlens: tuple[int, ...],
    flex: bool,
    fa3: bool | None,
    regime: str | None,
    as_json: bool,
) -> None:
    """Time kernels on a Hopper GPU, beside their peers.

    The peers are cuDNN and FlashAttention-2, as torch calls them, and what the options name.
    Sustained is the speed of a long run, at the clock that the power limit leaves; burst is that of
    a short run after a pause. --shape and --seqlen may be repeated; without them, --seqlen is 4096.

    \b
    Examples:
      fagen bench fwd_fp16_d128_full_m128n128 --seqlen 512 --seqlen 4096
      fagen bench my.toml other.toml --shape 4,16,2,4096,4096 --flex
    """
    from fagen import flow, measure

    flow.need_gpu()
    chosen = _chosen(schedules, every)
    made = _each("building", chosen, lambda schedule: flow.built(schedule, progress=_say))
    head_dim = chosen[0].attention.head_dim
    standard = [measure.standard_shape(head_dim, seqlen) for seqlen in seqlens]
    beside_fa3 = measure.installed("fa3") if fa3 is None else fa3
    rows = measure.bench(
        made,
        [*shapes, *standard] or [measure.standard_shape(head_dim)],
        peers=["cudnn", "fa2", *["fa3"] * beside_fa3, *["flex"] * flex],
        regimes=[measure.REGIMES[regime]] if regime else list(measure.REGIMES.values()),
        progress=_say,
    )
    _answer(as_json, [asdict(row) for row in rows], [measure.table(rows).rstrip()])


@main.command("list")
@JSON
def list_(as_json: bool) -> None:
    """List the committed schedules, and their evidence.

    \b
    Examples:
      fagen list
    """
    from fagen import report

    listed = _each("looking at", _chosen((), every=True), report.listed)
    _answer(as_json, listed, report.columns(listed))


@main.command()
def schema() -> None:
    """Print the JSON Schema of a schedule.

    With it an editor completes and checks what is typed.

    \b
    Examples:
      fagen schema > schedule.schema.json
      echo '#:schema schedule.schema.json' > my.toml
    """
    from fagen.schedule import json_schema

    click.echo(_json(json_schema()))


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
    _answer(as_json, entries, [str(cache_folder()), *report.columns(entries)])


@cache.command("prune")
@click.option("--older-than", type=float, metavar="DAYS", help="What was not used for so long.")
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
    _answer(as_json, entries, [*report.columns(entries), f"removed: {len(entries)}"])


@main.command()
@JSON
def doctor(as_json: bool) -> None:
    """Say what is installed, and what mends the rest.

    Exits with 3 where no kernel can be built. A disassembler, torch and a GPU may be missing.

    \b
    Examples:
      fagen doctor
    """
    from fagen import report, toolchain

    findings = toolchain.doctor()
    _answer(as_json, [asdict(finding) for finding in findings], map(report.found, findings))
    missing = [f.name for f in findings if not f.ok and f.needed_for in ("rendering", "building")]
    if missing:
        raise ToolchainError(f"no kernel can be built without {', '.join(missing)}")


# ---- what the commands share ---------------------------------------------------------------------


def _say(line: str) -> None:
    """Show progress: on stderr, and only to a person."""
    if sys.stderr.isatty():
        click.secho(line, err=True, dim=True)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, default=str, ensure_ascii=False)


def _answer(as_json: bool, value: Any, lines: Iterable[str]) -> None:
    """Print the answer: `value` as JSON, or else the lines."""
    click.echo(_json(value) if as_json else "\n".join(lines))


def _chosen(schedules: "Schedules", every: bool) -> "Schedules":
    """Return the schedules that were named, and with `every` the committed ones."""
    from fagen import flow

    if not schedules and not every:
        raise click.UsageError("name a SCHEDULE, or all of schedules/ by --all")
    return (*schedules, *(flow.committed() if every else ()))


def _each(
    doing: str, schedules: Sequence["Schedule"], work: Callable[["Schedule"], Done]
) -> list[Done]:
    """Do the work for all schedules, and only then raise what went wrong with some of them."""
    done: list[Done] = []
    failed: list[FagenError] = []
    for number, schedule in enumerate(schedules, 1):
        _say(f"{doing} {schedule.slug} ({number} of {len(schedules)})")
        try:
            done.append(work(schedule))
        except (ToolchainError, DeviceError):
            raise  # the next schedule would find the same
        except FagenError as error:
            failed.append(error)
    if failed:
        raise type(failed[0])("\n\n".join(map(str, failed)))
    return done


if __name__ == "__main__":
    main(prog_name="fagen")
