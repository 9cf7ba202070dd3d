"""Build a Source: C++ goes in, a library and what the compiler said of it come out, judged.

A kernel is a folder of the cache: its source, build.ninja, the compiler's log, `<slug>.so` with
nothing in it but the C ABI, and record.json with the report. The binding to torch is a folder
inside it, one for each torch, so that it can be added later and all else is built without torch.
What broke a promise of its Plan is remembered with its report, and not compiled a second time.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fagen.build.digests import digests
from fagen.build.gxx import key_of, torch_library, versions
from fagen.build.records import Record, stated_environment, write_record
from fagen.build.report import (
    NO_DISASSEMBLER,
    CompilerReport,
    broken_promises,
    read_log,
    with_machine_code,
)
from fagen.build.steps import LOG, Command, refusal, run_steps
from fagen.build.store import (
    CacheEntry,
    cache_entries,
    failed_folder,
    kernels_folder,
    lock_of,
    locked,
    place,
    prune,
    read_finished,
)
from fagen.build.together import build_together
from fagen.errors import RefusedBuild
from fagen.kind import Plan
from fagen.programs import MissingError, refuse_to_compile_in
from fagen.render import Hashes, Source
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

    folder, file = _kernel_folder(source, tools), f"{source.slug}.so"
    command, _ = _kernel_commands(source.slug, tools)
    if refused := read_finished(failed_folder(folder), file, reported=True):
        _refuse_broken(_reported(refused), plan, failed_folder(folder), command)
    record, cached = place(
        folder,
        file,
        lambda making: _make_kernel(making, folder, source, plan, tools, say),
        lock=lock_of(folder),
        reported=True,
        waiting=lambda: say(f"{source.slug}: waiting for another build of it"),
    )
    report = _read_machine_code_later(
        folder, record, source.slug, len(plan.launches.kernels), tools
    )
    _refuse_broken(report, plan, folder, command)
    cost = record.cpu_seconds

    library = None
    if torch:
        inside = folder / f"torch-{_binding_key(source, tools, torch)}"
        bound, was_bound = place(
            inside,
            f"{source.slug}_torch.so",
            lambda making: _make_binding(making, inside, source, tools, torch, say),
            lock=lock_of(folder),
        )
        cached = cached and was_bound
        cost += bound.cpu_seconds
        library = inside / f"{source.slug}_torch.so"
    return Binary(
        slug=source.slug,
        folder=folder,
        library=folder / f"{source.slug}.so",
        binding=library,
        report=report,
        cached=cached,
        cpu_seconds=cost,
        source_hash=source.hash,
        hashes=source.hashes,
        made_with={**record.made_with, **({"torch": torch.version} if torch else {})},
        plan=plan,
    )


def is_known(
    source: Source, *, binding: bool | None = None, toolchain: Toolchain | None = None
) -> bool:
    """Whether `build` needs no compiler: the kernel is in the cache, or remembered as refused."""
    tools = toolchain or find_toolchain()
    torch = _torch_for(binding)
    folder, file = _kernel_folder(source, tools), f"{source.slug}.so"
    if read_finished(failed_folder(folder), file, reported=True):
        return True
    if not read_finished(folder, file, reported=True):
        return False
    inside = folder / f"torch-{_binding_key(source, tools, torch)}" if torch else None
    return not inside or bool(read_finished(inside, f"{source.slug}_torch.so"))


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


def _make_kernel(
    making: Path,
    folder: Path,
    source: Source,
    plan: Plan,
    tools: Toolchain,
    say: Callable[[str], None],
) -> Record:
    refuse_to_compile_in(making)
    say(f"{source.slug}: compiling the kernel with nvcc {tools.nvcc_version}")
    began = time.monotonic()
    (making / f"{source.slug}.cu").write_text(source.kernel, encoding="utf-8")
    commands = _kernel_commands(source.slug, tools)
    seconds = run_steps(
        making,
        failed_folder(folder),
        tools.ninja,
        [(f"{source.slug}.o", commands[0]), (f"{source.slug}.so", commands[1])],
    )
    report = with_machine_code(
        read_log((making / LOG).read_text(encoding="utf-8"), len(plan.launches.kernels)),
        making / f"{source.slug}.so",
        tools.disassembler,
        len(plan.launches.kernels),
    )
    record = Record(
        library=f"{source.slug}.so",
        made_with=versions(tools),
        digests=digests(tools),
        environment=stated_environment(),
        cpu_seconds=seconds,
        report=report,
    )
    if broken_promises(report, plan):
        write_record(making, record)  # of a failed build: that of a compiler that failed has none
    _refuse_broken(report, plan, failed_folder(folder), commands[0])
    say(f"{source.slug}: compiled the kernel in {time.monotonic() - began:.1f} s")
    return record


def _refuse_broken(report: CompilerReport, plan: Plan, folder: Path, command: Command) -> None:
    """Raise RefusedBuild where a kernel breaks a promise of its Plan."""
    if faults := broken_promises(report, plan):
        raise RefusedBuild(refusal(faults, folder, command))


def _make_binding(
    making: Path,
    folder: Path,
    source: Source,
    tools: Toolchain,
    torch: Torch,
    say: Callable[[str], None],
) -> Record:
    say(f"{source.slug}: compiling the torch binding with g++ {tools.gxx_version}")
    began = time.monotonic()
    name = f"{source.slug}_torch"
    kernel = f"-L{folder.parent}", f"-l:{source.slug}.so"
    record = torch_library(
        making,
        failed_folder(folder),
        name,
        source.binding,
        tools,
        torch,
        compile_flags=(*BINDING_FLAGS, "-isystem", torch.include, "-isystem", tools.cuda_include),
        link_flags=(*kernel, f"-L{torch.library_dir}", *BINDING_LINK_FLAGS),
    )
    say(f"{source.slug}: compiled the torch binding in {time.monotonic() - began:.1f} s")
    return record


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
    folder: Path, record: Record, slug: str, kernels: int, tools: Toolchain
) -> CompilerReport:
    """A kernel built before a disassembler was installed: read its machine code now."""
    report = _reported(record)
    if report.machine_note != NO_DISASSEMBLER or tools.disassembler is None:
        return report
    report = with_machine_code(report, folder / f"{slug}.so", tools.disassembler, kernels)
    with suppress(OSError), locked(lock_of(folder), lambda: None):  # others' caches are read-only
        write_record(folder, replace(record, report=report))
    return report


# ---- What decides a build ------------------------------------------------------------------------


def _kernel_folder(source: Source, tools: Toolchain) -> Path:
    key = key_of(source.kernel, FLAGS, LINK_FLAGS, versions(tools), digests(tools))
    return kernels_folder() / f"{source.slug}-{key}"


def _binding_key(source: Source, tools: Toolchain, torch: Torch) -> str:
    flags = (*BINDING_FLAGS, *BINDING_LINK_FLAGS)
    return key_of(source.binding, flags, torch.version, versions(tools), digests(tools))
