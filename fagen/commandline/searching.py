"""Commands that search for faster schedules, and say what a search found."""

from pathlib import Path

import click

from fagen.commandline import console
from fagen.interrupts import INTERRUPTED

WRITE = click.option(
    "--write",
    "folder",
    type=console.FOLDER,
    help="Write the best schedules and the dispatch table here.",
)


@click.group(cls=console.DefaultCommand)
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
@click.argument("spaces", type=console.PATH, nargs=-1, required=True)
@click.option("--dry-run", is_flag=True, help="Only say what fits, and what is predicted best.")
@click.option("--minutes", type=console.Amount(0, min_open=True), help="Stop after so long.")
@click.option(
    "--store",
    type=console.FILE,
    default=Path("search.sqlite"),
    show_default=True,
    help="Where everything is kept; what is there is not done again.",
)
@click.option("--jobs", type=click.IntRange(1, 1_024), help="Compile so many at once.")
@click.option("--scheduler", metavar="ADDRESS", help="Work on a dask.distributed cluster.")
@click.option(
    "--replay",
    "recorded",
    type=console.PATH,
    help="Search over another store, without compiler and GPU.",
)
@WRITE
@click.option("--report", "page", type=console.FILE, help="Write HTML here.")
@console.JSON
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
        surveys = list(searching.surveys(declared))
        console.answer(surveys, (line for survey in surveys for line in searching.surveyed(survey)))
        return
    outcome = searching.search(
        declared,
        store,
        minutes=minutes,
        jobs=jobs,
        scheduler=scheduler,
        recorded=recorded,
        say=console.keep_saying,
    )
    _show_found(store, folder, page)
    if outcome.interrupted:
        click.get_current_context().exit(INTERRUPTED)


@search.command("report")
@click.argument("store", type=console.PATH)
@click.option("-o", "--output", type=console.FILE, help="The HTML file.")
@WRITE
@console.JSON
def search_report(store: Path, output: Path | None, folder: Path | None) -> None:
    """Say what STORE knows, and write it as one HTML page beside it.

    \b
    Examples:
      fagen search report search.sqlite
      fagen search report search.sqlite -o found.html --write schedules
    """
    from fagen import search as searching

    page = output or store.parent / f"{store.stem}.html"  # of a folder there is no store
    searching.need_room(store, page=page, folder=folder)
    _show_found(store, folder, page)


def _show_found(store: Path, folder: Path | None, page: Path | None) -> None:
    """Say what a store knows, and write what was asked for."""
    from fagen import search as searching

    results = searching.found(store)
    records = [searching.record(result) for result in results]
    console.answer(records, (line for result in results for line in searching.told(result)))
    if page:
        searching.write_report(store, page)
    for path in [*([page] if page else []), *(searching.write(results, folder) if folder else [])]:
        console.keep_saying(f"wrote {path}")
