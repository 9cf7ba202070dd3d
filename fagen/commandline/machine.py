"""Commands about this machine: the cache of built kernels, and what is installed."""

from dataclasses import asdict

import click

from fagen.commandline import console
from fagen.errors import ToolchainError
from fagen.paths import cache_folder
from fagen.toml_lines import printable


@click.group()
def cache() -> None:
    """Look at, or empty, the folder of built kernels.

    It is FAGEN_CACHE, or else fagen under XDG_CACHE_HOME, or else ~/.cache/fagen.

    \b
    Examples:
      fagen cache list
      fagen cache prune --older-than 30
    """


@cache.command("list")
@console.JSON
def cache_list() -> None:
    """List what was built, last used first.

    \b
    Examples:
      fagen cache list
    """
    from fagen import build
    from fagen.commandline import report

    entries = [report.cached(entry) for entry in build.cache_entries()]
    console.answer(entries, [printable(cache_folder()), *report.columns(entries)])


@cache.command("prune")
@click.option(
    "--older-than", type=console.Amount(0), metavar="DAYS", help="What was not used for so long."
)
@click.option("--keep", type=click.IntRange(0), metavar="N", help="All but the N last used.")
@click.option("--all", "every", is_flag=True, help="Everything.")
@console.JSON
def cache_prune(older_than: float | None, keep: int | None, every: bool) -> None:
    """Remove what is broken or failed, and what the options name; what is in use stays.

    \b
    Examples:
      fagen cache prune
      fagen cache prune --keep 20
    """
    from fagen import build
    from fagen.commandline import report

    seconds = None if older_than is None else older_than * 86_400
    removed = build.prune(older_than=seconds, keep=keep, everything=every)
    entries = [report.cached(entry) for entry in removed]
    console.answer(entries, [*report.columns(entries), f"removed: {len(entries)}"])


@click.command()
@console.JSON
def doctor() -> None:
    """Say what is installed, and how to install the rest.

    Exits with 3 where no kernel can be built. A disassembler, torch and a GPU may be missing.

    \b
    Examples:
      fagen doctor
    """
    from fagen.commandline import report
    from fagen.doctor import doctor as looked_at

    findings = looked_at()
    missing = [f.name for f in findings if not f.ok and f.needed_for in ("rendering", "building")]
    wrong = ToolchainError(f"no kernel can be built without {', '.join(missing)}")
    records = [asdict(finding) for finding in findings]
    console.answer(records, map(report.found, findings), wrong if missing else None)
