"""Build a Source: C++ goes in, a library and what the compiler said of it come out, judged.

A kernel is a folder of the cache: its source, build.ninja, the compiler's log, `<slug>.so` with
nothing in it but the C ABI, and record.json with the report. The binding to torch is a folder
inside it, one for each torch, so that it can be added later and all else is built without torch.
What broke a promise of its Plan is remembered with its report, and not compiled a second time.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fagen.build.report import (
    NO_DISASSEMBLER,
    CompilerReport,
    broken_promises,
    read_log,
    report_from_json,
    report_to_json,
    with_machine_code,
)
from fagen.build.store import (
    CacheEntry,
    Record,
    cache_entries,
    failed_folder,
    kernels_folder,
    lock_of,
    locked,
    place,
    prune,
    read_finished,
    write_record,
    writing,
)
from fagen.build.together import build_together
from fagen.errors import BuildError, RefusedBuild
from fagen.kind import Plan
from fagen.process import run
from fagen.render import Source
from fagen.toolchain import (
    BINDING_FLAGS,
    BINDING_LINK_FLAGS,
    FLAGS,
    INSTALL_TORCH,
    LINK_FLAGS,
    MissingError,
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

_LAYOUT = 2  # of a folder in the cache; part of every key
_LOG = "compiler.log"
_SHOWN_LINES = 60  # of a compiler that failed; the log has them all

Command = Sequence[str | Path]


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
    host_hash: str  # as in Source
    made_with: Mapping[str, str]


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
    `progress` is called with a line at each step that takes long.
    Raises ToolchainError for what is missing, BuildError where the compiler fails, CacheError where
    the cache cannot be written or is not this user's alone, RefusedBuild where the kernel breaks a
    promise of its Plan.
    """
    tools = toolchain or find_toolchain()
    torch = _torch_for(binding)
    say = progress or (lambda line: None)

    folder = kernels_folder() / f"{source.slug}-{_kernel_key(source, tools)}"
    command, _ = _kernel_commands(source.slug, tools)
    if refused := read_finished(failed_folder(folder)):
        _refuse_broken(report_from_json(refused["report"]), plan, failed_folder(folder), command)
    record, cached = place(
        folder,
        lambda making: _make_kernel(making, folder, source, plan, tools, say),
        lock=lock_of(folder),
        waiting=lambda: say(f"{source.slug}: waiting for another build of it"),
    )
    report = _read_machine_code_later(
        folder, record, source.slug, len(plan.launches.kernels), tools
    )
    _refuse_broken(report, plan, folder, command)
    cost = record["cpu_seconds"]

    library = None
    if torch:
        inside = folder / f"torch-{_binding_key(source, tools, torch)}"
        bound, found = place(
            inside,
            lambda making: _make_binding(making, inside, source, tools, torch, say),
            lock=lock_of(folder),
        )
        cached = cached and found
        cost += bound["cpu_seconds"]
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
        host_hash=source.host_hash,
        made_with={**record["made_with"], **({"torch": torch.version} if torch else {})},
    )


def is_known(
    source: Source, *, binding: bool | None = None, toolchain: Toolchain | None = None
) -> bool:
    """Whether `build` needs no compiler: the kernel is in the cache, or remembered as refused."""
    tools = toolchain or find_toolchain()
    torch = _torch_for(binding)
    folder = kernels_folder() / f"{source.slug}-{_kernel_key(source, tools)}"
    if read_finished(failed_folder(folder)):
        return True
    inside = [folder / f"torch-{_binding_key(source, tools, torch)}"] if torch else []
    return all(map(read_finished, [folder, *inside]))


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
    say(f"{source.slug}: compiling the kernel with nvcc {tools.nvcc_version}")
    (making / f"{source.slug}.cu").write_text(source.kernel)
    commands = _kernel_commands(source.slug, tools)
    seconds = _run_ninja(
        making,
        folder,
        tools,
        [(f"{source.slug}.o", commands[0]), (f"{source.slug}.so", commands[1])],
    )
    report = with_machine_code(
        read_log((making / _LOG).read_text(), len(plan.launches.kernels)),
        making / f"{source.slug}.so",
        tools.disassembler,
        len(plan.launches.kernels),
    )
    record = {
        "slug": source.slug,
        "source_hash": source.hash,
        "made_with": _versions(tools),
        "cpu_seconds": seconds,
        "report": report_to_json(report),
    }
    if broken_promises(report, plan):
        write_record(making, record)  # of a failed build: that of a compiler that failed has none
    _refuse_broken(report, plan, failed_folder(folder), commands[0])
    return record


def _refuse_broken(report: CompilerReport, plan: Plan, folder: Path, command: Command) -> None:
    """Raise RefusedBuild where a kernel breaks a promise of its Plan."""
    if faults := broken_promises(report, plan):
        raise RefusedBuild(_refusal(faults, folder, command))


def _make_binding(
    making: Path,
    folder: Path,
    source: Source,
    tools: Toolchain,
    torch: Torch,
    say: Callable[[str], None],
) -> Record:
    say(f"{source.slug}: compiling the torch binding with g++ {tools.gxx_version}")
    name = f"{source.slug}_torch"
    (making / f"{name}.cpp").write_text(source.binding)
    compile_it: Command = [
        *(tools.gxx, *BINDING_FLAGS),
        *("-isystem", torch.include, "-isystem", tools.cuda_include),
        *("-c", f"{name}.cpp", "-o", f"{name}.o"),
    ]
    link_it: Command = [
        *(tools.gxx, f"{name}.o", f"-L{folder.parent}", f"-l:{source.slug}.so"),
        *(f"-L{torch.library_dir}", *BINDING_LINK_FLAGS, "-o", f"{name}.so"),
    ]
    seconds = _run_ninja(
        making, folder, tools, [(f"{name}.o", compile_it), (f"{name}.so", link_it)]
    )
    return {"made_with": {"torch": torch.version}, "cpu_seconds": seconds}


def _kernel_commands(slug: str, tools: Toolchain) -> tuple[Command, Command]:
    """How to compile and link a kernel, in the folder where its source lies."""
    folders = [f"-L{folder}" for folder in tools.library_dirs]
    return (
        [tools.nvcc, *FLAGS, "-I", tools.cutlass, "-c", f"{slug}.cu", "-o", f"{slug}.o"],
        [tools.gxx, f"{slug}.o", *folders, *LINK_FLAGS, "-o", f"{slug}.so"],
    )


def _read_machine_code_later(
    folder: Path, record: Record, slug: str, kernels: int, tools: Toolchain
) -> CompilerReport:
    """A kernel built before a disassembler was installed: read its machine code now."""
    report = report_from_json(record["report"])
    if report.machine_note != NO_DISASSEMBLER or tools.disassembler is None:
        return report
    report = with_machine_code(report, folder / f"{slug}.so", tools.disassembler, kernels)
    with writing(folder), locked(lock_of(folder), lambda: None):
        write_record(folder, {**record, "report": report_to_json(report)})
    return report


# ---- ninja ---------------------------------------------------------------------------------------


def _run_ninja(
    making: Path, folder: Path, tools: Toolchain, steps: Sequence[tuple[str, Command]]
) -> float:
    """Run the steps, each of which makes a file from the one before; return their CPU seconds.

    Raises BuildError with the compiler's own lines and the command that repeats it.
    """
    lines = [
        "ninja_required_version = 1.8",
        "rule step",
        "  command = $run",
        "  description = $out",
    ]
    before = ""
    for made, command in steps:
        # the log is kept with what it is about, and shown where the step fails
        shell = f"{_quoted(command)} >> {_LOG} 2>&1 || {{ cat {_LOG}; exit 1; }}"
        lines += [f"build {made}: step {before}".rstrip(), f"  run = {shell.replace('$', '$$')}"]
        before = made
    (making / "build.ninja").write_text("\n".join(lines) + "\n")
    result = run([tools.ninja], cwd=making)
    if result.returncode:
        command = next((c for made, c in steps if not (making / made).exists()), steps[-1][1])
        said = [
            line
            for line in (result.stdout + result.stderr).splitlines()
            if not re.match(r"\[\d+/\d+\]|ninja: |FAILED: ", line) and _quoted(command) not in line
        ]
        raise BuildError(_refusal(said, failed_folder(folder), command))
    for made, _ in steps[:-1]:
        (making / made).unlink()
    return result.cpu_seconds


def _refusal(lines: Sequence[str], folder: Path, command: Command) -> str:
    """What went wrong in a folder, and the command that repeats it there."""
    cut = len(lines) - _SHOWN_LINES
    more = [f"… {cut} lines more in {folder / _LOG}"] if cut > 0 else []
    return "\n".join(
        (
            f"{command[-1]} was not built:",
            *(f"  {line}" for line in (*lines[:_SHOWN_LINES], *more)),
            "to repeat it:",
            f"  cd {shlex.quote(str(folder))} && {_quoted(command)}",
        )
    )


def _quoted(command: Command) -> str:
    return shlex.join(str(word) for word in command)


# ---- What decides a build ------------------------------------------------------------------------


def _kernel_key(source: Source, tools: Toolchain) -> str:
    return _key(source.kernel, FLAGS, LINK_FLAGS, _versions(tools))


def _binding_key(source: Source, tools: Toolchain, torch: Torch) -> str:
    flags = (*BINDING_FLAGS, *BINDING_LINK_FLAGS)
    return _key(source.binding, flags, torch.version, _versions(tools))


def _versions(tools: Toolchain) -> dict[str, str]:
    return {
        "nvcc": tools.nvcc_version,
        "g++": tools.gxx_version,
        "cutlass": tools.cutlass_version,
    }


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps([_LAYOUT, *parts]).encode()).hexdigest()[:16]
