"""Build a Source: C++ goes in, a library and what the compiler said of it come out, judged.

A kernel is a folder of the cache: its source, build.ninja, the compiler's log, `<slug>.so` with
nothing in it but the C ABI, and record.json with the report. The binding to torch is a folder
inside it, one for each torch, so that it can be added later and all else is built without torch.
What broke a promise of its Plan is remembered with its report, and not compiled a second time.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fagen.build.digests import digests
from fagen.build.gxx import key_of, torch_library, versions
from fagen.build.records import Record, write_record
from fagen.build.report import (
    NO_DISASSEMBLER,
    CompilerReport,
    broken_promises,
    read_log,
    with_machine_code,
)
from fagen.build.steps import LOG, Command, compiled, refusal
from fagen.build.store import (
    CacheEntry,
    Slot,
    cache_entries,
    kernels_folder,
    lock_of,
    locked,
    prune,
)
from fagen.build.together import build_together
from fagen.errors import RefusedBuild
from fagen.kind import Plan
from fagen.programs import MissingError, refuse_to_compile_in
from fagen.render import HEADER, Hashes, Source
from fagen.toolchain import (
    BINDING_FLAGS,
    BINDING_LINK_FLAGS,
    FLAGS,
    INSTALL_TORCH,
    LINK_FLAGS,
    Toolchain,
    Torch,
    find_toolchain,
    find_torch,
)

__all__ = [
    "Binary",
    "CacheEntry",
    "CompilerReport",
    "broken_promises",
    "build",
    "build_together",
    "cache_entries",
    "is_known",
    "prune",
]

# INFO says what is built, for how long; what becomes of it is the program's to decide.
_LOGGER = logging.getLogger("fagen")
_LOGGER.addHandler(logging.NullHandler())


@dataclass(frozen=True)
class Binary:
    """A kernel that was built and keeps its Plan's promises.

    `library` is `<slug>.so`; `binding` is `<slug>_torch.so`, or None. `cpu_seconds` is what the
    compilers took when it was built, user and system, both steps together; `made_with` names
    nvcc, g++, CUTLASS and torch by their versions.
    """

    slug: str
    folder: Path
    library: Path
    binding: Path | None
    report: CompilerReport
    cached: bool
    cpu_seconds: float
    source_hash: str
    hashes: Hashes  # as in Source
    made_with: Mapping[str, str]
    plan: Plan


def build(
    source: Source,
    plan: Plan,
    *,
    binding: bool | None = None,
    progress: Callable[[str], None] | None = None,
    toolchain: Toolchain | None = None,
) -> Binary:
    """Build a kernel, or find it in the cache, and check the compiler's report against its Plan.

    `binding` says whether to build the torch binding too; None means where torch is installed.
    `progress` is called with a line at each step that takes long, and the logger "fagen" has the
    same at INFO.
    Raises ToolchainError for what is missing, BuildError where the compiler fails, CacheError where
    the cache cannot be written or is not this user's alone, RefusedBuild where the kernel breaks a
    promise of its Plan.
    """
    tools = toolchain or find_toolchain()
    torch = _torch_for(binding)

    def say(line: str) -> None:
        _LOGGER.info("%s", line)
        if progress:
            progress(line)

    slot = _slot(source, tools)
    command, _ = _kernel_commands(source.slug, tools)
    if refused := slot.failed.record():
        _refuse_broken(_reported(refused), plan, slot.failed.folder, command)
    record, cached = slot.filled(
        lambda making, kept: _make_kernel(making, kept, source, plan, tools, say),
        waiting=lambda: say(f"{source.slug}: waiting for another build of it"),
    )
    report = _read_machine_code_later(slot, record, plan, tools)
    _refuse_broken(report, plan, slot.folder, command)
    made_with, cost = record.made_with, record.cpu_seconds

    bound = _bound(slot, source, tools, torch) if torch else None
    if bound and torch:
        record, was_bound = bound.filled(_binding_maker(bound, source, tools, torch, say))
        cached = cached and was_bound
        cost += record.cpu_seconds
        made_with = {**made_with, "torch": torch.version}
    return Binary(
        slug=source.slug,
        folder=slot.folder,
        library=slot.path,
        binding=bound.path if bound else None,
        report=report,
        cached=cached,
        cpu_seconds=cost,
        source_hash=source.hash,
        hashes=source.hashes,
        made_with=made_with,
        plan=plan,
    )


def is_known(
    source: Source, *, binding: bool | None = None, toolchain: Toolchain | None = None
) -> bool:
    """Whether `build` needs no compiler: the kernel is in the cache, or remembered as refused."""
    tools = toolchain or find_toolchain()
    torch = _torch_for(binding)
    slot = _slot(source, tools)
    if slot.failed.record():
        return True
    return bool(slot.record()) and not (torch and not _bound(slot, source, tools, torch).record())


def _torch_for(binding: bool | None) -> Torch | None:
    """The torch to bind to; None where none is wanted, or none that will do is there."""
    torch = find_torch() if binding is not False else None
    if torch and torch.usable:
        return torch
    if binding:
        what = f"torch {torch.version} is too old for a binding" if torch else "torch is missing"
        raise MissingError(what, INSTALL_TORCH)
    return None


# ---- The two steps -------------------------------------------------------------------------------


@contextmanager
def _timed(slug: str, what: str, compiler: str, say: Callable[[str], None]) -> Iterator[None]:
    """Say what is compiled with what, and for how long it was."""
    began = time.monotonic()
    say(f"{slug}: compiling {what} with {compiler}")
    yield
    say(f"{slug}: compiled {what} in {time.monotonic() - began:.1f} s")


def _make_kernel(
    making: Path,
    kept: Path,
    source: Source,
    plan: Plan,
    tools: Toolchain,
    say: Callable[[str], None],
) -> Record:
    refuse_to_compile_in(making)
    slug, kernels = source.slug, len(plan.launches.kernels)
    compile_it, link_it = _kernel_commands(slug, tools)
    with _timed(slug, "the kernel", f"nvcc {tools.nvcc_version}", say):
        record = compiled(
            making,
            kept,
            tools.ninja,
            {f"{slug}.cu": source.kernel, HEADER: source.header},
            [(f"{slug}.o", compile_it), (f"{slug}.so", link_it)],
            versions(tools),
            digests(tools),
        )
        report = read_log((making / LOG).read_text(encoding="utf-8"), kernels)
        report = with_machine_code(report, making / f"{slug}.so", tools.disassembler, kernels)
        record = replace(record, report=report)
        if broken_promises(report, plan):  # a compiler that failed leaves no record
            write_record(making, record)
        _refuse_broken(report, plan, kept, compile_it)
    return record


def _refuse_broken(report: CompilerReport, plan: Plan, folder: Path, command: Command) -> None:
    """Raise RefusedBuild where a kernel breaks a promise of its Plan."""
    if faults := broken_promises(report, plan):
        raise RefusedBuild(refusal(faults, folder, command))


def _kernel_commands(slug: str, tools: Toolchain) -> tuple[Command, Command]:
    """How to compile and link a kernel, in the folder where its source lies."""
    folders = [f"-L{folder}" for folder in tools.library_dirs]
    programs: Command = [tools.nvcc, "-ccbin", tools.gxx]
    return (
        [*programs, *FLAGS, "-I", tools.cutlass, "-c", f"{slug}.cu", "-o", f"{slug}.o"],
        [tools.gxx, f"{slug}.o", *folders, *LINK_FLAGS, "-o", f"{slug}.so"],
    )


def _reported(record: Record) -> CompilerReport:
    assert record.report  # it was asked for
    return record.report


def _read_machine_code_later(
    slot: Slot, record: Record, plan: Plan, tools: Toolchain
) -> CompilerReport:
    """A kernel built before a disassembler was installed: read its machine code now."""
    report = _reported(record)
    if report.machine_note != NO_DISASSEMBLER or tools.disassembler is None:
        return report
    kernels = len(plan.launches.kernels)
    report = with_machine_code(report, slot.path, tools.disassembler, kernels)
    with suppress(OSError), locked(lock_of(slot.folder), lambda: None):
        write_record(slot.folder, replace(record, report=report))  # others' caches are read-only
    return report


# ---- What decides a build ------------------------------------------------------------------------


def _slot(source: Source, tools: Toolchain) -> Slot:
    """Where a kernel lies in the cache."""
    key = key_of(source.kernel, source.header, FLAGS, LINK_FLAGS, versions(tools), digests(tools))
    folder = kernels_folder() / f"{source.slug}-{key}"
    return Slot(folder, f"{source.slug}.so", reported=True)


def _bound(slot: Slot, source: Source, tools: Toolchain, torch: Torch) -> Slot:
    """Where its binding to a torch does: in the kernel's folder."""
    flags = (*BINDING_FLAGS, *BINDING_LINK_FLAGS)
    key = key_of(source.binding, flags, torch.version, versions(tools), digests(tools))
    return Slot(slot.folder / f"torch-{key}", f"{source.slug}_torch.so")


def _binding_maker(
    bound: Slot, source: Source, tools: Toolchain, torch: Torch, say: Callable[[str], None]
) -> Callable[[Path, Path], Record]:
    kernel = f"-L{bound.folder.parent}", f"-l:{source.slug}.so"
    bind = torch_library(
        f"{source.slug}_torch",
        source.binding,
        tools,
        torch,
        compile_flags=(*BINDING_FLAGS, "-isystem", torch.include, "-isystem", tools.cuda_include),
        link_flags=(*kernel, f"-L{torch.library_dir}", *BINDING_LINK_FLAGS),
    )

    def make(making: Path, kept: Path) -> Record:
        with _timed(source.slug, "the torch binding", f"g++ {tools.gxx_version}", say):
            return bind(making, kept)

    return make
