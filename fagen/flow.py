"""Take a Schedule through several arrows of the flow at once, to Source, Binary or Evidence."""

from collections.abc import Callable
from pathlib import Path
from typing import overload

from fagen import evidence
from fagen.build import Binary, build
from fagen.errors import FagenError, VerificationError
from fagen.evidence import Evidence
from fagen.machine import machine_code
from fagen.paths import locate, write_whole
from fagen.plan import Plan, plan
from fagen.quantizer import (
    AnySchedule,
    QuantizePlan,
    QuantizeSchedule,
    plan_quantizer,
    read_quantizer,
)
from fagen.render import Source, render
from fagen.schedule import Schedule, read_schedule


def committed() -> tuple[Schedule, ...]:
    """Every schedule of attention in schedules/, by name."""
    return tuple(map(read_schedule, sorted(locate("schedules").glob("fwd_*.toml"))))


def all_committed() -> tuple[AnySchedule, ...]:
    """Every schedule in schedules/: attention's, then quantisers'."""
    quantizers = sorted(locate("schedules").glob("quant_*.toml"))
    return (*committed(), *map(read_quantizer, quantizers))


@overload
def planned(schedule: Schedule) -> Plan: ...
@overload
def planned(schedule: AnySchedule) -> Plan | QuantizePlan: ...
def planned(schedule: AnySchedule) -> Plan | QuantizePlan:
    """A schedule of either kind, worked out.  Raises OverBudget where it does not fit."""
    if isinstance(schedule, QuantizeSchedule):
        return plan_quantizer(schedule)
    return plan(schedule)


def rendered(schedule: AnySchedule) -> Source:
    """The kernel of a schedule as C++."""
    return render(planned(schedule))


@overload
def built(
    schedule: Schedule,
    *,
    binding: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[Plan, Binary]: ...
@overload
def built(
    schedule: AnySchedule,
    *,
    binding: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[Plan | QuantizePlan, Binary]: ...
def built(
    schedule: AnySchedule,
    *,
    binding: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[Plan | QuantizePlan, Binary]:
    """The kernel of a schedule, compiled; see `build` for `binding` and `progress`."""
    made = planned(schedule)
    return made, build(render(made), made, binding=binding, progress=progress)


def evidence_folder(schedule: AnySchedule, asked: Path | None = None) -> Path:
    """Where the evidence of a schedule goes: `asked`, or generated/ for a committed one.

    Raises FagenError for any other, since generated/ holds nothing that schedules/ does not make.
    """
    if asked is None and not (locate("schedules") / f"{schedule.slug}.toml").exists():
        raise FagenError(
            f"{schedule.slug} is not in schedules/, so generated/ is no place for its evidence: "
            "name a folder by -o"
        )
    return asked or locate("generated")


def renewed(of: Plan | QuantizePlan, binary: Binary, folder: Path) -> Evidence:
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
        machine_code=machine_code(binary.library, kernels=of.kernels).hash,
        compiler=binary.made_with["nvcc"],
    )
    evidence.write(fresh, folder)
    return fresh


def need_gpu() -> None:
    """Raise DeviceError where there is no Hopper GPU, before anything is built for it."""
    from fagen import measure  # needs torch

    measure.hopper()


def verified(
    of: Plan | QuantizePlan,
    binary: Binary,
    folder: Path,
    *,
    progress: Callable[[str], None] | None = None,
) -> Evidence:
    """Run a kernel on a Hopper GPU, and write what was found; see `measure.verify`."""
    from fagen import measure  # needs torch

    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(of, QuantizePlan):
        return measure.verify_quantizer(of, binary, folder=folder, progress=progress)
    return measure.verify(of, binary, folder=folder, progress=progress)


def written(source: Source, folder: Path, *, binding: bool = False) -> list[Path]:
    """Write a kernel's source, and its binding's if wanted, into a folder; return the paths."""
    texts = {f"{source.slug}.cu": source.kernel}
    if binding:
        texts[f"{source.slug}_torch.cpp"] = source.binding
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]
