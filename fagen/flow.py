"""Take a Schedule through several arrows of the flow at once, to Source, Binary or Evidence."""

from collections.abc import Callable
from pathlib import Path

from fagen import evidence
from fagen.build import Binary, build
from fagen.errors import VerificationError
from fagen.evidence import Evidence
from fagen.machine import machine_code
from fagen.paths import locate
from fagen.plan import Plan, plan
from fagen.render import Source, render
from fagen.schedule import Schedule, read_schedule


def committed() -> tuple[Schedule, ...]:
    """Every schedule in schedules/, by name."""
    return tuple(map(read_schedule, sorted(locate("schedules").glob("*.toml"))))


def rendered(schedule: Schedule) -> Source:
    """The kernel of a schedule as C++."""
    return render(plan(schedule))


def built(
    schedule: Schedule,
    *,
    binding: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[Plan, Binary]:
    """The kernel of a schedule, compiled; see `build` for `binding` and `progress`."""
    made = plan(schedule)
    return made, build(render(made), made, binding=binding, progress=progress)


def renewed(of: Plan, binary: Binary) -> Evidence:
    """Carry evidence over to a source whose rebuild gave the same machine code, and write it.

    Raises VerificationError where there is none to renew, or the machine code is another.
    """
    old = evidence.read(of.slug)
    if old is None:
        raise VerificationError(f"{of.slug}: there is no evidence that could be renewed")
    fresh = evidence.renew(
        old,
        source_hash=binary.source_hash,
        host_hash=binary.host_hash,
        cutlass=binary.made_with["cutlass"],
        machine_code=machine_code(binary.library).hash,
        compiler=binary.made_with["nvcc"],
    )
    evidence.write(fresh)
    return fresh


def need_gpu() -> None:
    """Raise DeviceError where there is no Hopper GPU, before anything is built for it."""
    from fagen import measure  # needs torch

    measure.hopper()


def verified(
    of: Plan, binary: Binary, *, progress: Callable[[str], None] | None = None
) -> Evidence:
    """Run a kernel on a Hopper GPU, and write what was found; see `measure.verify`."""
    from fagen import measure  # needs torch

    return measure.verify(of, binary, progress=progress)


def written(source: Source, folder: Path, *, binding: bool = False) -> list[Path]:
    """Write a kernel's source, and its binding's if wanted, into a folder; return the paths."""
    texts = {f"{source.slug}.cu": source.kernel}
    if binding:
        texts[f"{source.slug}_torch.cpp"] = source.binding
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]
