"""Take a Schedule through several arrows of the flow at once, to Source, Binary or Evidence."""

from collections.abc import Callable
from pathlib import Path

from fagen import evidence
from fagen.build import Binary, build
from fagen.errors import FagenError, VerificationError
from fagen.evidence import Evidence
from fagen.kind import Plan
from fagen.machine import machine_code
from fagen.paths import write_whole
from fagen.registry import ENTRIES, committed_file, plan, read, schedules
from fagen.render import Source, render
from fagen.schedule import Schedule


def committed(kind: str) -> tuple[Schedule, ...]:
    """Every schedule of a kind in schedules/, by name."""
    return tuple(map(read, schedules(kind)))


def all_committed() -> tuple[Schedule, ...]:
    """Every schedule in schedules/, kind by kind."""
    return tuple(schedule for kind in ENTRIES for schedule in committed(kind))


def rendered(schedule: Schedule) -> Source:
    """The kernel of a schedule as C++.  Raises OverBudget where it does not fit."""
    return render(plan(schedule))


def built(
    schedule: Schedule,
    *,
    binding: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[Plan, Binary]:
    """The kernel of a schedule, compiled; see `build` for `binding` and `progress`."""
    planned = plan(schedule)
    return planned, build(render(planned), planned, binding=binding, progress=progress)


def evidence_folder(schedule: Schedule, asked: Path | None = None) -> Path:
    """Where the evidence of a schedule goes: `asked`, or its place in generated/ if committed.

    Raises FagenError for any other, since generated/ holds nothing that schedules/ does not make.
    """
    if asked is None and not committed_file(schedule.slug).exists():
        raise FagenError(
            f"{schedule.slug} is not in schedules/, so generated/ is no place for its evidence: "
            "name a folder by -o"
        )
    return evidence.home(schedule.slug, asked)


def renewed(of: Plan, binary: Binary, folder: Path) -> Evidence:
    """Carry evidence in `folder` over to a source whose rebuild gave the same code.

    Raises VerificationError where there is none to renew, or machine code or launcher are others.
    """
    old = evidence.read(of.slug, folder)
    if old is None:
        raise VerificationError(f"{of.slug}: there is no evidence that could be renewed")
    fresh = evidence.renew(
        old,
        source_hash=binary.source_hash,
        host_hash=binary.host_hash,
        cutlass=binary.made_with["cutlass"],
        machine_code=machine_code(binary.library, kernels=len(of.launches.kernels)).hash,
        compiler=binary.made_with["nvcc"],
    )
    evidence.write(fresh, folder)
    return fresh


def need_gpu() -> None:
    """Raise DeviceError where there is no Hopper GPU, before anything is built for it."""
    from fagen import measure  # needs torch

    measure.hopper()


def verified(
    of: Plan,
    binary: Binary,
    folder: Path,
    *,
    progress: Callable[[str], None] | None = None,
) -> Evidence:
    """Run a kernel on a Hopper GPU, and write what was found; see `measure.verify`."""
    from fagen import measure  # needs torch

    folder.mkdir(parents=True, exist_ok=True)
    return measure.verify(of, binary, folder=folder, progress=progress)


def written(source: Source, folder: Path | None, *, binding: bool = False) -> list[Path]:
    """Write a kernel's source, and its binding's if wanted; return the paths.

    Into `folder`, or to its place in generated/.
    """
    texts = {f"{source.slug}.cu": source.kernel}
    if binding:
        texts[f"{source.slug}_torch.cpp"] = source.binding
    folder = evidence.home(source.slug, folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]
