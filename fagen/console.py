"""What every command shares: errors on their way out, kinds of words, answers, progress.

Every FagenError becomes its message on stderr and its exit code, in one place; with --json it is an
object on stdout as well.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from fagen.errors import DeviceError, FagenError, ToolchainError
from fagen.paths import locate
from fagen.toml_lines import text_of

if TYPE_CHECKING:  # a command imports what it runs and no more: torch alone takes seconds
    from fagen.problem import Sizes
    from fagen.schedule import Schedule

Done = TypeVar("Done")
Chosen = TypeVar("Chosen", bound="Schedule")

INTERRUPTED = 130  # what a shell says of a program ended by Ctrl-C
INTERNAL = 70  # a fault of fagen's own, as sysexits.h has it
AS_JSON = "fagen.as_json"  # in click's context: whether --json was given


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
            click.echo(as_text(self._record))
        click.echo(self.message, err=True)


class Commands(click.Group):
    """The group in which an exception becomes a message and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands as they are written here: in the order of the flow."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words; with --json among them, a refusal of click is an object too."""
        ctx.meta[AS_JSON] = "--json" in args
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            raise _misused(ctx, error) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what it raises leaves as Failure, except what click knows itself."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise _misused(ctx, error) from error
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


def _misused(context: click.Context, error: click.UsageError) -> click.ClickException:
    """Return how an error of usage leaves: as click shows it, unless JSON is wanted."""
    if not context.meta.get(AS_JSON):
        return error
    return Failure(context, error, error.format_message(), error.exit_code)


class ScheduleArgument(click.ParamType):  # type: ignore[type-arg]
    """A schedule: the path of a TOML file, the slug of any schedule, or - for standard input."""

    name = "schedule"

    def convert(self, value: Any, param: Any, ctx: Any) -> "Schedule":
        """Read it; ScheduleError says what is wrong with it."""
        from fagen import registry

        if value == "-":
            return registry.parse(text_of(sys.stdin.buffer, "stdin"), "stdin")
        if value.endswith(".toml") or "/" in value or Path(value).exists():
            return registry.read(value)
        own = registry.committed_file(value)
        return registry.read(own) if own.exists() else registry.from_slug(value)

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        """Offer the committed slugs, and files."""
        slugs = [path.stem for path in sorted(locate("schedules").glob("*/*.toml"))]
        offered = [CompletionItem(slug) for slug in slugs if slug.startswith(incomplete)]
        return offered or [CompletionItem(incomplete, type="file")]


class ShapeOption(click.ParamType):  # type: ignore[type-arg]
    """The sizes of a problem, as five numbers."""

    name = "B,H,Hk,Sq,Sk"

    def convert(self, value: Any, param: Any, ctx: Any) -> "Sizes":
        """Read them; a usage error where they are not five positive numbers that go together."""
        from fagen.problem import Sizes

        try:
            batch, heads, kv_heads, seqlen_q, seqlen_k = map(int, value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not five numbers, as 4,16,16,4096,4096 is", param, ctx)
        if min(batch, heads, kv_heads, seqlen_q, seqlen_k) < 1 or heads % kv_heads:
            self.fail(f"{value!r}: all must be positive, and H a multiple of Hk", param, ctx)
        return Sizes(batch, heads, kv_heads, seqlen_q, seqlen_k)


def _note_json(context: click.Context, _: click.Parameter, value: bool) -> bool:
    context.meta[AS_JSON] = value
    return value


SCHEDULE = click.argument("schedule", type=ScheduleArgument())
SCHEDULES = click.argument("schedules", type=ScheduleArgument(), nargs=-1)
ALL = click.option("--all", "every", is_flag=True, help="Every schedule in schedules/.")
JSON = click.option(
    "--json", "as_json", is_flag=True, is_eager=True, callback=_note_json, help="Print JSON."
)


def say(line: str) -> None:
    """Show progress: on stderr, and only to a person."""
    if sys.stderr.isatty():
        click.secho(line, err=True, dim=True)


def as_text(value: Any) -> str:
    """Return a value as JSON."""
    return json.dumps(value, indent=2, default=str, ensure_ascii=False)


def answer(as_json: bool, value: Any, lines: Iterable[str]) -> None:
    """Print the answer: `value` as JSON, or else the lines."""
    click.echo(as_text(value) if as_json else "\n".join(lines))


def keep_saying(line: str) -> None:
    """Show progress that a log should have too: on stderr, whoever reads it."""
    click.secho(line, err=True, dim=True)


class DefaultCommand(click.Group):
    """A group whose first command is meant where the first word is no command's name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the first command's name before words that begin with none."""
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


def each(doing: str, schedules: Sequence[Chosen], work: Callable[[Chosen], Done]) -> list[Done]:
    """Do the work for all schedules, and only then raise what went wrong with some of them."""
    done: list[Done] = []
    failed: list[FagenError] = []
    for number, schedule in enumerate(schedules, 1):
        say(f"{doing} {schedule.slug} ({number} of {len(schedules)})")
        try:
            done.append(work(schedule))
        except (ToolchainError, DeviceError):
            raise  # the next schedule would find the same
        except FagenError as error:
            failed.append(error)
    if failed:
        raise type(failed[0])("\n\n".join(map(str, failed)))
    return done
