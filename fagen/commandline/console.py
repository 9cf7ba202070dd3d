"""What every command shares: errors on their way out, kinds of words, answers, progress.

Every FagenError becomes its message on stderr and its exit code, in one place; with --json it is an
object on stdout as well, and what was answered before it is in that object.
"""

import errno
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click
from click.shell_completion import CompletionItem

from fagen import interrupts
from fagen.errors import DeviceError, FagenError, ScheduleError, ToolchainError
from fagen.interrupts import INTERRUPTED
from fagen.paths import locate, naming
from fagen.toml_lines import near_word, printable, text_of

if TYPE_CHECKING:  # a command imports what it runs and no more: torch alone takes seconds
    from fagen.problem import Sizes
    from fagen.schedule import Schedule

Done = TypeVar("Done")
Named = TypeVar("Named")

LARGEST = 1 << 30  # of a size, as a kernel takes them
INTERNAL = 70  # a fault of fagen's own, as sysexits.h has it
AS_JSON = "fagen.as_json"  # in click's context: whether --json was given
ANSWER = "fagen.answer"  # and what is answered beside an error
OUTPUT = "standard output"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}  # what writing meets


class Failure(click.ClickException):
    """An error on its way out."""

    def __init__(self, context: click.Context, error: Exception, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code  # type: ignore[misc]
        self._record: dict[str, Any] = _recorded(error, code, message)
        if isinstance(error, FagenError) and error.failed:
            self._record["failed"] = [
                {"schedule": name, **_recorded(failure, failure.exit_code, str(failure))}
                for name, failure in error.failed
            ]
        if ANSWER in context.meta:
            self._record["answer"] = context.meta[ANSWER]
        self._as_json = context.meta.get(AS_JSON, False)

    def show(self, file: Any = None) -> None:
        """Print the message as it is: its lines begin with file:line where they can."""
        if self._as_json:
            _echo(as_text(self._record))
        _echo(self.message, err=True)


def _recorded(error: Exception, code: int, message: str) -> dict[str, Any]:
    return {"error": type(error).__name__, "exit_code": code, "message": message}


def _echo(text: str, *, err: bool = False, dim: bool = False) -> None:
    """Print what nobody need hear: there may be no room for it, or no reader."""
    try:
        click.secho(sayable(text), err=err, dim=dim or None)
    except OSError:
        _let_go(sys.stderr if err else sys.stdout)


def _let_go(stream: TextIO | None) -> None:
    """Throw away what a stream does not take: the interpreter would try again as it ends."""
    try:
        if stream:  # a shell's >&- leaves none
            stream.flush()
    except OSError:
        assert stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Commands(click.Group):
    """The group in which an exception becomes a message and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands as they are written here: in the order of the flow."""
        return list(self.commands)

    def main(self, *args: Any, **more: Any) -> Any:
        """Run as a program; all is imported by now."""
        interrupts.as_exceptions()
        return super().main(*args, **more)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words; with --json among them, a refusal of click is an object too."""
        ctx.meta[AS_JSON] = any(word.partition("=")[0] == "--json" for word in args)
        with _failing(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what it raises leaves as Failure, except what click knows itself."""
        with _failing(ctx):
            return super().invoke(ctx)


@contextmanager
def _failing(ctx: click.Context) -> Iterator[None]:
    """Turn what is raised into a Failure, except what click knows itself."""
    try:
        yield
    except click.UsageError as error:
        raise _misused(ctx, error) from error
    except FagenError as error:
        raise Failure(ctx, error, str(error), error.exit_code) from error
    except KeyboardInterrupt:
        _echo("", err=True)  # ends the line with the terminal's ^C
        ctx.exit(INTERRUPTED)
    except (BrokenPipeError, click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except OSError as error:
        _let_go(sys.stdout)
        where = error.filename or (OUTPUT if error.errno in _NO_ROOM else "")
        message = ": ".join(filter(None, [printable(where), error.strerror or str(error)]))
        raise Failure(ctx, error, message, 1) from error
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed: python -m pip install {error.name}"
        raise Failure(ctx, error, message, ToolchainError.exit_code) from error
    except Exception as error:
        if ctx.params.get("debug"):
            raise
        message = (
            f"fagen itself is at fault: {type(error).__name__}: {printable(str(error))}\n"
            "  `fagen --debug` before the command shows where; please report it, with what "
            "`fagen doctor` says"
        )
        raise Failure(ctx, error, message, INTERNAL) from error


def _misused(context: click.Context, error: click.UsageError) -> click.ClickException:
    """Return how an error of usage leaves: as click shows it, unless JSON is wanted."""
    usage = error.format_message()
    message = "\n".join(printable(line.expandtabs()) for line in usage.split("\n"))
    if context.meta.get(AS_JSON):
        return Failure(context, error, message, error.exit_code)
    return error if message == usage else click.UsageError(message, error.ctx)


class ScheduleArgument(click.ParamType):  # type: ignore[type-arg]
    """A schedule: the path of a TOML file, the slug of any schedule, or - for standard input."""

    name = "schedule"

    def convert(self, value: Any, param: Any, ctx: Any) -> "Schedule":
        """Read it; ScheduleError says what is wrong with it."""
        from fagen import registry

        if value == "-":
            if sys.stdin is None:  # a shell's <&-
                raise ScheduleError("stdin: it is closed")
            with naming("stdin"):
                return registry.parse(text_of(sys.stdin.buffer, "stdin"), "stdin")
        if value.endswith(".toml") or "/" in value or (value and Path(value).exists()):
            return registry.read(value)
        own = registry.committed_file(value)
        return registry.read(own) if own.exists() else registry.from_slug(value)

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        """Offer the committed slugs, and files."""
        slugs = [path.stem for path in sorted(locate("schedules").glob("*/*.toml"))]
        offered = [CompletionItem(slug) for slug in slugs if slug.startswith(incomplete)]
        return offered or [CompletionItem(incomplete, type="file")]


@dataclass(frozen=True)
class Unread:
    """A schedule among others that cannot be read, and why."""

    slug: str  # or the path
    error: FagenError


class AnySchedule(ScheduleArgument):
    """A schedule among others, which are worked on even if this one cannot be read."""

    def convert(self, value: Any, param: Any, ctx: Any) -> "Schedule | Unread":  # type: ignore[override]
        """Read it; what is wrong with it is kept for later."""
        try:
            return super().convert(value, param, ctx)
        except FagenError as error:
            return Unread(value, error)


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
        sizes = (batch, heads, kv_heads, seqlen_q, seqlen_k)
        if min(sizes) < 1 or max(sizes) > LARGEST or heads % kv_heads:
            rule = f"all must be from 1 to {LARGEST:,}, and H a multiple of Hk"
            self.fail(f"{value!r}: {rule}", param, ctx)
        return Sizes(batch, heads, kv_heads, seqlen_q, seqlen_k)


class Word(click.Choice):  # type: ignore[type-arg]
    """One of some words; a usage error says which of them another is near to."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Read it."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            if (near := near_word(value, [*map(str, self.choices)])) is None:
                raise
            self.fail(f"{error.message.rstrip('.')}; did you mean {near!r}?", param, ctx)


class Amount(click.FloatRange):
    """A number of this range; none that is infinite, or no number at all."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Read it; a usage error where it is out of range."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


class Given(click.ParamType):  # type: ignore[type-arg]
    """A number by its name: width=21."""

    name = "given"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, int | float]:
        """Read it; a usage error where it is none, or where a name is an option's."""
        name, _, said = str(value).partition("=")
        options = {option.name for option in ctx.command.params} if ctx else set()
        if name in options:
            self.fail(f"{name} is an option: --{name.replace('_', '-')}", param, ctx)
        try:
            return name, int(said) if re.fullmatch(r"[+-]?\d+", said) else float(said)
        except ValueError:
            self.fail(f"{value!r} is not NAME=NUMBER", param, ctx)


def _note_json(context: click.Context, _: click.Parameter, value: bool) -> None:
    context.meta[AS_JSON] = value


PATH = click.Path(path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
SCHEDULE = click.argument("schedule", type=ScheduleArgument())
SCHEDULES = click.argument("schedules", type=ScheduleArgument(), nargs=-1)
ANY_SCHEDULES = click.argument("schedules", type=AnySchedule(), nargs=-1)
ALL = click.option("--all", "every", is_flag=True, help="Every schedule in schedules/.")
JSON = click.option(
    "--json",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_note_json,
    help="Print JSON.",
)


def say(line: str) -> None:
    """Show progress: on stderr, and only to a person."""
    if sys.stderr and sys.stderr.isatty():
        keep_saying(line)


def sayable(text: str) -> str:
    """Return text as any stream takes it: bytes of a path that are no UTF-8 are escaped.

    The escape is one that JSON knows.
    """
    return text.encode(errors="backslashreplace").decode()


def as_text(value: Any) -> str:
    """Return a value as JSON."""
    return json.dumps(value, indent=2, default=str, ensure_ascii=False)


def answer(value: Any, lines: Iterable[str], wrong: FagenError | None = None) -> None:
    """Print the answer: `value` with --json, or else the lines; then raise what is `wrong`.

    JSON is one object then, that of the error, with the answer in it.
    """
    meta = click.get_current_context().meta
    as_json = meta.get(AS_JSON, False)
    if wrong and as_json:
        meta[ANSWER] = value
    else:
        text = as_text(value) if as_json else "\n".join(lines)
        if text or not wrong:
            with naming(OUTPUT):
                click.echo(sayable(text))
    if wrong:
        raise wrong


def keep_saying(line: str) -> None:
    """Show progress that a log should have too: on stderr, whoever reads it."""
    _echo(line, err=True, dim=True)


class DefaultCommand(click.Group):
    """A group whose first command is meant where the first word is no command's name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the first command's name before words that begin with none."""
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


def chosen(
    schedules: tuple[Named, ...], every: bool, by: str = "--all"
) -> "tuple[Named, ...] | tuple[Schedule, ...]":
    """Return the schedules that were named, or with `every`, the option `by`, the committed ones.

    Raises UsageError where neither are meant, or both.
    """
    from fagen import flow

    if not schedules and not every:
        raise click.UsageError("name a SCHEDULE, or all of schedules/ by --all")
    if schedules and every:
        raise click.UsageError(f"{by} means all of schedules/: name no SCHEDULE beside it")
    return flow.all_committed() if every else schedules


def raced(schedules: "tuple[Schedule, ...]", every: bool) -> "tuple[Schedule, ...]":
    """Return the schedules whose kernels have peers; others are there because of `every` alone."""
    from fagen.vocab import CALLED

    racing = tuple(s for s in schedules if s.kind in CALLED)
    if not every and len(racing) < len(schedules):
        raise click.UsageError(
            "only attention and its gradients are timed so; `fagen verify` times others, "
            "of decoding beside cuDNN, else beside a copy"
        )
    return racing


def each(
    doing: str, schedules: "Sequence[Schedule | Unread]", work: "Callable[[Schedule], Done]"
) -> tuple[list[Done], FagenError | None]:
    """Do the work for all schedules; return what was done, and what went wrong with the others."""
    done: list[Done] = []
    failed: list[tuple[str, FagenError]] = []
    for number, schedule in enumerate(schedules, 1):
        if doing:
            say(f"{doing} {printable(schedule.slug)} ({number} of {len(schedules)})")
        try:
            if isinstance(schedule, Unread):
                raise schedule.error
            done.append(work(schedule))
        except FagenError as error:
            failed.append((schedule.slug, error))
            if isinstance(error, ToolchainError | DeviceError):
                break  # the next schedule would find the same
    return done, in_one(failed)


def in_one(failed: Sequence[tuple[str, FagenError]]) -> FagenError | None:
    """Return what went wrong with some schedules as one error, of the first one's type."""
    if not failed:
        return None
    _, first = failed[0]
    message = "\n\n".join(dict.fromkeys(str(error) for _, error in failed))
    joined = first if len(failed) == 1 else type(first)(message)
    joined.exit_code, joined.failed = first.exit_code, tuple(failed)
    return joined
