"""Find the fastest schedule for given shapes and a card: a declared space in, schedules out.

`search` does it all; what it found is in a file, which `found` reads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from fagen import __version__, outputs
from fagen.dispatch import tables
from fagen.errors import FagenError
from fagen.kinds.space import Space
from fagen.search import replay
from fagen.search.declared import Declared
from fagen.search.executor import MAX_JOBS, REAL, Executor, LocalExecutor
from fagen.search.files import read_spaces, refuse_twice
from fagen.search.report import WHAT, write_report
from fagen.search.results import Result, record, results, surveyed, told, write
from fagen.search.rows import Session
from fagen.search.run import Outcome, Search, summary
from fagen.search.space import Survey, survey
from fagen.search.store import Store, check_place, side_files
from fagen.toml_lines import printable

__all__ = [
    "Declared",
    "Outcome",
    "Result",
    "Space",
    "found",
    "need_room",
    "read_spaces",
    "record",
    "search",
    "surveyed",
    "surveys",
    "told",
    "write",
    "write_report",
]


def search(
    spaces: Sequence[Declared],
    store: Path,
    *,
    minutes: float | None = None,
    jobs: int | None = None,
    scheduler: str | None = None,
    recorded: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Search spaces, and keep what is found in `store`; what is there already is not done again.

    It ends when every target's leader is known beyond the noise, after `minutes`, or at Ctrl-C.
    `jobs` kernels are compiled at once, by default one for each processor; `scheduler` is the
    address of a dask.distributed scheduler whose workers do the work instead; `recorded` is another
    store, to search over without compiler and GPU.

    Raises DeviceError without a Hopper GPU, ToolchainError without a compiler, FagenError where the
    store cannot be used, ScheduleError where two spaces are for the same problem.
    """
    refuse_twice(spaces)
    if jobs is not None and not 1 <= jobs <= MAX_JOBS:
        raise FagenError(f"jobs is {jobs}; it must be from 1 to {MAX_JOBS:,}")
    only: Callable[[Survey], Survey] = lambda survey: survey  # noqa: E731
    if recorded:
        only = partial(replay.only_recorded, recorded)
    check_place(store)  # an executor takes a while to start; without one nothing is written
    with _executor(jobs, scheduler, recorded) as executor, Store(store) as kept:
        if not recorded:  # what was timed before is not of today
            today = datetime.now(UTC).date().isoformat()
            kept.put_session(Session(date=today, version=__version__))
        return Search(spaces, executor, kept, minutes=minutes, say=say, only=only).run()


def need_room(
    store: Path,
    *,
    page: Path | None = None,
    folder: Path | None = None,
    read: Sequence[Path] = (),
    recorded: Path | None = None,
) -> None:
    """Raise FagenError where files of one search would be the same, or something would be lost.

    The page and the folder are those that are to be written about `store`; spaces are `read`, and
    perhaps another store that was `recorded`. Said before anything is searched.
    """
    if not store.name or store.is_dir():
        raise FagenError(f"{printable(str(store)) or '.'}: this is a folder, and no store")
    files = {"the store": store}
    files |= {f"the store's {end}": path for end, path in side_files(store).items()}
    if recorded and recorded.name:
        files["the recorded store"] = recorded
        files |= {f"the recorded {end}": path for end, path in side_files(recorded).items()}
    if page:
        files["the page"] = page
    if folder:
        files["the dispatch table"] = folder / tables.NAME
    for number, path in enumerate(read, 1):
        if path not in read[: number - 1] and path.is_file():  # else a slug
            files[f"space {number}"] = path
    outputs.refuse_alike(files)
    for what, file in (("page", page), ("store", store)):
        if file and not file.parent.is_dir():
            where = printable(str(file.parent))
            raise FagenError(f"{printable(str(file))}: there is no folder {where} for the {what}")
    if page:
        outputs.refuse_loss(page, outputs.is_stamped, WHAT)
    if folder:
        tables.need_room(folder / tables.NAME)


def surveys(spaces: Sequence[Declared]) -> Iterator[dict[str, object]]:
    """Yield what each target's space holds, without compiling or timing anything."""
    for space in spaces:
        for target in space.targets():
            yield summary(survey(space, target), space)


def found(store: Path) -> tuple[Result, ...]:
    """Read what a store knows.  Raises FagenError where it is none."""
    with Store(store, read_only=True) as kept:
        return results(kept)


@contextmanager
def _executor(jobs: int | None, scheduler: str | None, recorded: Path | None) -> Iterator[Executor]:
    work = replay.work(recorded) if recorded else REAL
    if scheduler:
        from fagen.search.cluster import ClusterExecutor

        executor: Executor = ClusterExecutor(scheduler, work)
    else:
        executor = LocalExecutor(work, jobs=jobs)
    try:
        yield executor
    finally:
        executor.close()
