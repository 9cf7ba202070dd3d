"""Run a kernel's own text on a CPU, thread by thread, with everything asynchronous at random times.

For who has no Hopper GPU, or a kernel that hangs on one: a deadlock is told by who waits for what.
It takes seconds for what a GPU does in microseconds, so sizes are to be small.
"""

import ctypes
import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fagen.build.digests import host_digests
from fagen.build.records import Record
from fagen.build.steps import Command, compiled
from fagen.build.store import Slot, kernels_folder
from fagen.errors import DeviceError, VerificationError
from fagen.kind import Plan, load_named
from fagen.registry import kind
from fagen.simulator.translate import translated
from fagen.toolchain import find_gxx, find_ninja

Say = Callable[[str], None]

_HEADERS = Path(__file__).parent
_SOURCE, _LIBRARY = "simulated.cpp", "simulated.so"
# Threads are jumped between, which some compilers' checks, on by themselves, end as wrong.
_FLAGS = (
    *("-std=c++20", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", "-w"),
    "-U_FORTIFY_SOURCE",
)
_OF_GXX = ("-fno-gnu-unique",)  # which clang++ does not know, nor need


def build(kernel: str) -> Path:
    """Compile a kernel's text for the CPU, into fagen's cache; what is there already is taken.

    Raises BuildError where g++ refuses it, ToolchainError where there is none, CacheError.
    """
    text, (gxx, version) = translated(kernel), find_gxx()
    digests = host_digests(gxx)
    flags = _FLAGS if version.startswith("clang") else (*_FLAGS, *_OF_GXX)
    headers = (path.read_text() for path in sorted(_HEADERS.glob("*.hpp")))
    everything = "\0".join((text, *headers, *flags, version, *digests.values()))
    digest = hashlib.sha256(everything.encode()).hexdigest()
    slot = Slot(kernels_folder() / f"simulated-{digest[:16]}", _LIBRARY)
    command: Command = [gxx, *flags, f"-I{_HEADERS}", _SOURCE, "-o", _LIBRARY]

    def make(making: Path, kept: Path) -> Record:
        sources, steps, (ninja, _) = {_SOURCE: text}, [(_LIBRARY, command)], find_ninja()
        return compiled(making, kept, ninja, sources, steps, {"g++": version}, digests)

    slot.filled(make)
    return slot.path


def call(
    plan: Plan,
    library: Path,
    *,
    seed: int = 0,
    named: Mapping[str, Any] = MappingProxyType({}),
    **arguments: Any,
) -> None:
    """Run a kernel that `build` made on tensors of the CPU, by the names of its signature.

    `seed` draws when what is asynchronous happens; `named` holds more arguments, one of which may
    be called so too. Raises ValueError for a wrong argument, DeviceError, with who waits for what,
    where the kernel is stuck.
    """
    from fagen.runtime.c_interface import described, library_at  # torch

    loaded = library_at(library)
    launch = described(plan, library, {**arguments, **named})
    loaded["fagen_simulator_seed"](seed)
    try:
        launch(None)
    except DeviceError as error:
        reason = loaded["fagen_simulator_said"]
        reason.restype = ctypes.c_char_p
        if not (why := reason().decode()):
            raise
        raise DeviceError(f"{plan.slug} on the simulator, seed {seed}: {why}") from error


def check(plan: Plan, kernel: str, *, seeds: int = 2, progress: Say | None = None) -> int:
    """Run a kernel's text at the small sizes of its kind's Verification, with so many seeds.

    Returns how many runs there were; `progress` is told a line of each. Raises VerificationError
    where one was wrong, or its kind has no such verification, BuildError and DeviceError as above.
    """
    from fagen.measure.verification import Verification  # torch

    verification: Verification = load_named(kind(plan.kind).verification)
    if not verification.rule(plan).small:
        raise VerificationError(
            f"{plan.slug}: kernels of the kind {plan.kind} have no verification on the simulator; "
            f"`fagen verify {plan.slug}` runs them on a Hopper GPU"
        )
    library = build(kernel)
    runs = 0
    for seed in range(seeds):
        runs += len(verification.simulated(plan, partial(call, plan, library, seed=seed), progress))
    return runs
