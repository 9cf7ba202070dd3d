"""Take a Schedule through several arrows of the flow at once, to Source, Binary or Evidence."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from fagen import evidence, outputs
from fagen.build import Binary, build, build_together, is_known
from fagen.errors import FagenError, VerificationError
from fagen.evidence import Evidence
from fagen.kind import Plan
from fagen.paths import make_folder
from fagen.registry import ENTRIES, committed_file, plan, read, schedules
from fagen.render import HEADER, Source, hashes_of, kernel_file, kernel_text, render
from fagen.sass import machine_code
from fagen.schedule import Schedule
from fagen.toolchain import compile_jobs, find_toolchain


def committed(kind: str) -> tuple[Schedule, ...]:
    """Every schedule of a kind in schedules/, by name."""
    return tuple(map(read, schedules(kind)))


def all_committed() -> tuple[Schedule, ...]:
    """Every schedule in schedules/, kind by kind."""
    return tuple(schedule for kind in ENTRIES for schedule in committed(kind))


def rendered(schedule: Schedule) -> Source:
    """The kernel of a schedule as C++.  Raises OverBudget where it does not fit."""
    return render(plan(schedule))


def to_commit(schedule: Schedule) -> evidence.Rendering:
    """What generated/ has of a schedule: hashes, which need no layout, and of some its text."""
    slug, text = schedule.slug, kernel_text(plan(schedule))
    file = kernel_file(text) if slug in evidence.forms() else ""
    return evidence.Rendering(slug, hashes_of(text, slug), file)


def built(
    schedule: Schedule,
    *,
    binding: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[Plan, Binary]:
    """The kernel of a schedule, compiled; see `build` for `binding` and `progress`."""
    planned = plan(schedule)
    return planned, build(render(planned), planned, binding=binding, progress=progress)


def builder(
    schedules: Sequence[Schedule], *, binding: bool | None = None
) -> Callable[[Schedule], tuple[Plan, Binary]]:
    """Build kernels on all processors, with progress on standard error, as far as need be.

    The function that is returned gives each with its Plan, or raises what is wrong with it. Raises
    ToolchainError where nothing can be built.
    """
    tools = find_toolchain()
    fitting = {}
    for schedule in schedules:
        with suppress(FagenError):  # it is raised again when its turn comes
            fitting[schedule.slug] = plan(schedule)

    def is_new(source: Source) -> bool:
        try:
            return not is_known(source, binding=binding, toolchain=tools)
        except FagenError:  # so is this
            return False

    with ThreadPoolExecutor(compile_jobs()) as pool:  # clang-format takes most of the time
        sources = dict(zip(fitting, pool.map(render, fitting.values()), strict=True))
        news = dict(zip(sources, pool.map(is_new, sources.values()), strict=True))
    fresh = [slug for slug, new in news.items() if new]
    failed = build_together(fresh, binding=binding) if fresh else {}

    def give(schedule: Schedule) -> tuple[Plan, Binary]:
        planned = plan(schedule)
        if error := failed.get(schedule.slug):
            raise error
        source = sources[schedule.slug]
        binary = build(source, planned, binding=binding, toolchain=tools)
        return planned, replace(binary, cached=binary.cached and schedule.slug not in fresh)

    return give


def maker(
    schedules: Sequence[Schedule],
    *,
    binding: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> Callable[[Schedule], tuple[Plan, Binary]]:
    """Return what gives each kernel with its Plan: of several all are built first, by `builder`."""
    if len(schedules) > 1:
        return builder(schedules, binding=binding)
    return partial(built, binding=binding, progress=progress)


def has_place(schedule: Schedule, folder: Path | None) -> bool:
    """Whether there is a place for evidence: a folder, or that of a committed schedule."""
    return folder is not None or committed_file(schedule.slug).exists()


def need_place(schedule: Schedule, folder: Path | None) -> None:
    """Raise FagenError where there is no place for evidence: no folder, and none in generated/.

    generated/ holds nothing that schedules/ does not make.
    """
    if not has_place(schedule, folder):
        raise FagenError(
            f"{schedule.slug} is not in schedules/, so generated/ is no place for its evidence: "
            "name a folder by -o"
        )


def renewed(
    planned: Plan,
    binary: Binary,
    folder: Path | None = None,
    *,
    progress: Callable[[str], None] | None = None,
) -> Evidence:
    """Carry evidence over to a source whose rebuild gave the same code, in `folder` or generated/.

    Where there is none of this slug, that of a kernel with the same machine code is taken whose own
    slug has lost its schedule: the kernel was renamed, and so is its evidence. Raises
    VerificationError where there is none to renew, where the machine code is another, or where the
    launcher is one that no kernel ran with.
    """
    kernels = len(planned.launches.kernels)
    code = (binary.report.machine or machine_code(binary.library, kernels=kernels)).hash
    old = evidence.read(planned.slug, folder)
    if old is None:
        renames = (e for e in evidence.outlived(folder, planned.slug) if e.machine_code == code)
        # several were the same code: the launcher decides, then the day
        mine = binary.hashes.launcher
        old = max(renames, key=lambda e: (e.launcher == mine, e.date), default=None)
    if old is None:
        raise VerificationError(
            f"{planned.slug}: there is no evidence that could be renewed, nor any of the same "
            "machine code under a name that has no schedule any more"
        )
    fresh = evidence.renew(
        old,
        slug=planned.slug,
        hashes=binary.hashes,
        cutlass=binary.made_with["cutlass"],
        machine_code=code,
        compiler=binary.made_with["nvcc"],
        launchers=evidence.launchers(planned.slug, folder),
    )
    evidence.write(fresh, folder)
    if old.slug != planned.slug:
        evidence.drop(old.slug, folder)
        if progress:
            progress(f"{planned.slug}: took over the evidence of {old.slug}, which is gone")
    return fresh


def need_gpu() -> None:
    """Raise DeviceError where there is no Hopper GPU, before anything is built for it."""
    from fagen import measure  # needs torch

    measure.hopper()


def verified(
    plan: Plan,
    binary: Binary,
    folder: Path | None = None,
    *,
    progress: Callable[[str], None] | None = None,
) -> Evidence:
    """Run a kernel on a Hopper GPU, and write what was found; see `measure.verify`."""
    from fagen import measure  # needs torch

    evidence.need_room(plan.slug, folder)  # known before the GPU works in vain
    return measure.verify(plan, binary, folder=folder, progress=progress)


def written(source: Source, folder: Path, *, binding: bool = False) -> list[Path]:
    """Write a kernel's source with its header, and its binding's if wanted; return the paths.

    Raises FagenError where something is there under such a name that is not as it was rendered, or
    leads out of it.
    """
    texts = {f"{source.slug}.cu": source.kernel}
    if binding:
        texts[f"{source.slug}_torch.cpp"] = source.binding
    texts[HEADER] = source.header
    make_folder(folder)
    for name in texts:
        outputs.refuse_loss(folder / name, outputs.is_stamped, f"the kernel {source.slug}")
    for name, text in texts.items():
        outputs.write(folder / name, text, outputs.is_stamped, f"the kernel {source.slug}")
    return [folder / name for name in texts]
