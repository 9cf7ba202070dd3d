"""The two kinds of work of a search, as functions that any process can run: compile, and time.

What goes in and out is small and plain, so that it may travel to another machine and back.
"""

import hashlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fagen.build import build
from fagen.build.store import check_own, locked
from fagen.errors import BuildError, CacheError, DeviceError, VerificationError
from fagen.paths import cache_folder, make_folder, write_whole
from fagen.problem import Cell, Problem, Sizes
from fagen.registry import from_slug, plan
from fagen.render import render
from fagen.render import source_hash as hash_of_source
from fagen.toolchain import find_toolchain

GOOD = "good"
FAILED = "failed"  # whatever was not foreseen
# what a refused build's message says, and what that is called
_OUTCOMES = {
    "spilled": "spills",
    "local memory": "spills",
    "Potential Performance Loss": "serialises wgmma",
    "injected in around line": "serialises wgmma",
    "stack frame": "uses a stack frame",
    "registers": "uses too many registers",
}


@dataclass(frozen=True)
class Compiled:
    """What became of a schedule at the compiler: `outcome` is GOOD, or why it is not measured.

    `library` is the kernel's path where it was compiled, `packed` the kernel itself where it has to
    travel.
    """

    slug: str
    source_hash: str
    compiler: str
    outcome: str
    note: str = ""
    registers: int | None = None  # in use by a consumer thread
    spill_bytes: int | None = None
    cpu_seconds: float = 0.0
    library: str = ""
    packed: bytes = b""


@dataclass(frozen=True)
class Round:
    """Kernels to be timed side by side on one GPU: which, at which sizes, in which rounds.

    With `check`, each is checked against the reference first and left out where it is wrong.
    """

    target: Problem
    sizes: tuple[Sizes, ...]
    anchor: Compiled
    kernels: tuple[Compiled, ...]
    regime: str
    repeats: tuple[int, ...]
    check: bool = False


@dataclass(frozen=True)
class Time:
    """One round of one kernel, or of a peer by its name; seconds of one call."""

    slug: str
    size: Sizes
    regime: str
    repeat: int
    seconds: float
    anchor_seconds: float
    sm_clock_mhz: int | None = None


@dataclass(frozen=True)
class Timed:
    """What a Round found: times, and why some kernels have none; on which card and driver."""

    card: str
    driver: str
    times: tuple[Time, ...]
    wrong: tuple[tuple[str, str], ...] = ()  # slug, what is wrong with it


# ---- compiling ----------------------------------------------------------------------------------


def compile_kernel(slug: str) -> Compiled:
    """Build a schedule's kernel, or find it in the cache.  Raises ToolchainError or CacheError."""
    planned = plan(from_slug(slug))
    source = render(planned)
    try:
        binary = build(source, planned, binding=False)
    except CacheError:
        raise  # that is no fault of the kernel's
    except BuildError as error:
        note = _without_places(str(error))
        outcomes = (name for sign, name in _OUTCOMES.items() if sign in note)
        return Compiled(slug, source.hash, compiler(), next(outcomes, FAILED), note)
    report = binary.report
    return Compiled(
        slug=slug,
        source_hash=source.hash,
        compiler=compiler(),
        outcome=GOOD,
        registers=(report.machine.consumer_registers or report.machine.registers)
        if report.machine
        else report.registers,
        spill_bytes=report.spill_store_bytes,
        cpu_seconds=binary.cpu_seconds,
        library=str(binary.library),
    )


def source_hash(slug: str) -> str:
    """The hash of a schedule's source as it is rendered today."""
    return hash_of_source(plan(from_slug(slug)))


def compiler() -> str:
    """The compiler and its version.  Raises ToolchainError where anything to build is missing."""
    return f"nvcc {find_toolchain().nvcc_version}"


def compile_to_send(slug: str) -> Compiled:
    """As compile_kernel, with the kernel itself in the answer."""
    compiled = compile_kernel(slug)
    if compiled.outcome != GOOD:
        return compiled
    return replace(
        compiled, packed=zlib.compress(Path(compiled.library).read_bytes(), 1), library=""
    )


def _without_places(message: str) -> str:
    """The compiler's own lines: no folder of this machine is kept."""
    lines = message.partition("\nto repeat it:")[0].splitlines()[1:]
    return "\n".join(line.strip() for line in lines)[:500]


# ---- timing -------------------------------------------------------------------------------------


def time_round(task: Round, device: int = 0) -> Timed:
    """Time the kernels of a round on one GPU, which nobody else measures on meanwhile.

    Raises DeviceError where there is no Hopper GPU, or where it no longer answers.
    """
    from fagen.measure import rounds

    card = rounds.use_card(device)

    def kernel(compiled: Compiled) -> rounds.Kernel:
        return rounds.Kernel(compiled.slug, _library(compiled))

    times: list[Time] = []
    wrong: dict[str, str] = {}
    with _gpu_to_oneself(rounds.card_id(device)):
        if task.check:
            for compiled in task.kernels:
                try:
                    rounds.quick_check(Cell(task.target, task.sizes[0]), kernel(compiled))
                except (VerificationError, DeviceError, ValueError) as error:
                    wrong[compiled.slug] = str(error)
        kernels = [kernel(compiled) for compiled in task.kernels if compiled.slug not in wrong]
        for size in task.sizes:
            laps = rounds.side_by_side(
                Cell(task.target, size),
                kernels,
                kernel(task.anchor),
                regime=rounds.ROUND_REGIMES[task.regime],
                repeats=task.repeats,
            )
            times += [Time(size=size, regime=task.regime, **vars(lap)) for lap in laps]
    return Timed(card.name, card.driver, tuple(times), tuple(wrong.items()))


def find_cards() -> tuple[int, ...]:
    """The numbers of the Hopper GPUs of this machine.  Raises DeviceError where there is none."""
    from fagen import measure
    from fagen.measure import rounds

    numbers = tuple(index for index, card in enumerate(rounds.cards()) if card)
    if not numbers:
        measure.hopper()  # says why
    return numbers


def card(device: int) -> tuple[str, str]:
    """The name and the driver of a GPU."""
    from fagen.measure import rounds

    hopper = rounds.use_card(device)
    return hopper.name, hopper.driver


def _library(compiled: Compiled) -> Path:
    """Where a kernel lies on this machine; one that travelled is put into the cache."""
    if not compiled.packed:
        if not Path(compiled.library).is_file():
            raise BuildError(f"{compiled.slug}: {compiled.library} is gone; was the cache pruned?")
        return Path(compiled.library)
    content = zlib.decompress(compiled.packed)
    name = hashlib.sha256(content).hexdigest()[:16]
    path = cache_folder() / "search" / name / f"{compiled.slug}.so"
    check_own(path)
    if not path.exists():
        make_folder(path.parent)
        write_whole(path, content)
    return path


@contextmanager
def _gpu_to_oneself(card_id: str) -> Iterator[None]:
    """Hold a GPU's lock: two searches on one machine take turns."""
    with locked(cache_folder() / f"gpu-{card_id}.lock", lambda: None):
        yield
