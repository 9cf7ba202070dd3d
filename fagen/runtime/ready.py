"""A schedule and a device in, a kernel that can be called out: built, loaded, remembered."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fagen.arch import SM90
from fagen.build import build
from fagen.errors import DeviceError, FagenError, RefusedBuild
from fagen.registry import given, plan, plan_of
from fagen.render import render
from fagen.runtime.once import Once, untraced
from fagen.runtime.op import Op, emulation, load
from fagen.schedule import Schedule

Say = Callable[[str], None]


def ready(
    schedule: Schedule, device: torch.device, *, not_ready: str, progress: Say | None = None
) -> Op:
    """Return the op of a schedule's kernel on this device: emulated on a CPU.

    On a GPU the kernel is built and loaded at its first use, after which it is remembered;
    `progress` is called with a line before what takes long. Raises FagenError, in words that begin
    with `not_ready`, where a CUDA graph is captured and it is not ready; DeviceError where the
    device is no Hopper GPU; ToolchainError and BuildError where it cannot be built.
    """
    if device.type == "cpu":
        return emulation(schedule.slug)
    if device.type != "cuda":
        raise DeviceError(
            f"tensors are on {device}; a kernel runs on a Hopper GPU, or on a CPU emulated"
        )
    refuse_other_than_hopper(device)
    of = schedule.slug, device  # on each device a first call has work to do
    return _ready.get(of) or _ready.made(of, schedule, not_ready, progress)


def _load(
    of: tuple[str, torch.device], schedule: Schedule, not_ready: str, progress: Say | None
) -> Op:
    if torch.cuda.is_current_stream_capturing():
        raise FagenError(f"{not_ready}{of[0]} cannot be built while a CUDA graph is captured")
    planned = plan(schedule)
    return load(build(render(planned), planned, binding=True, progress=progress))


_ready: Once[tuple[str, torch.device], Op] = Once(_load)


def first_ready(
    schedules: Sequence[Schedule],
    device: torch.device,
    *,
    not_ready: str,
    progress: Say | None = None,
) -> tuple[Schedule, Op]:
    """Return the first of these schedules that builds, and its op; see `ready`.

    One whose kernel spills is passed over for the next, and the cache remembers that it does.
    Raises RefusedBuild where none is left, else as `ready` does.
    """
    *others, last = schedules
    for schedule in others:
        try:
            return schedule, ready(schedule, device, not_ready=not_ready, progress=progress)
        except RefusedBuild:
            if progress:
                progress(f"{schedule.slug} spills; trying the next")
    return last, ready(last, device, not_ready=not_ready, progress=progress)


@untraced
def slug_of(schedule: str | Path | Schedule) -> str:
    """The slug of a schedule that a caller has chosen.  Raises ScheduleError where it is none."""
    return given(schedule).slug


def placed(device: torch.device | str | None) -> torch.device:
    """The device that a caller means: None is the current GPU, or the CPU where there is none.

    Raises ValueError where torch knows none of that name, DeviceError where torch sees no GPU and
    one is meant.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError, ValueError):  # lists what all torch's backends are called
        raise ValueError(f"device is {device!r}, which torch does not know here") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            f'device is "{place}", and torch sees no GPU; leave it out, and calls on CPU tensors '
            "are emulated"
        )
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return place


def run_once(op: Op, slug: str, device: torch.device) -> None:
    """Run a kernel with all sizes 1, so that whatever it has to do once is done."""
    signature = plan_of(slug).signature
    sizes = dict.fromkeys((size.name for size in signature.sizes), 1)
    given: dict[str, Any] = {scalar.name: 1 for scalar in signature.numbers}
    for tensor in signature.inputs:
        if not tensor.may_be_none or tensor.missing:
            shape = [dim.extent.at(sizes) for dim in tensor.dims]
            dtype = getattr(torch, tensor.dtype.torch)
            given[tensor.name] = torch.zeros(shape, device=device).to(dtype)
    with torch.no_grad():
        op(**given)


def refuse_other_than_hopper(device: torch.device) -> None:
    """Raise DeviceError for a GPU that no kernel runs on."""
    found = torch.cuda.get_device_capability(device)
    if found != SM90.capability:
        raise DeviceError(
            f"{device} is a {torch.cuda.get_device_name(device)} of compute capability "
            f"{found[0]}.{found[1]}, and kernels are machine code for Hopper (9.0); tensors on the "
            "CPU are computed by an emulation of the same schedule"
        )
