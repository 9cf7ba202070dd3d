"""Judge a build: the compiler's log and a Plan go in, figures and broken promises come out."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from fagen.arch import SM90
from fagen.errors import BuildError, ToolchainError
from fagen.kind import Plan
from fagen.sass import MachineCode, machine_code
from fagen.toml_lines import printable
from fagen.toolchain import INSTALL_DISASSEMBLER, Disassembler

NO_DISASSEMBLER = f"not read, no disassembler is installed: {INSTALL_DISASSEMBLER}"

# Remarks of ptxas that it made a kernel slower than written: wgmma one at a time, setmaxnreg
# ignored, waits and fences that the source should have had.
_SLOWER = re.compile(r"Potential Performance Loss|injected in around line")
_STACK_ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class CompilerReport:
    """What ptxas and the machine code say of a kernel; bytes and registers are per thread.

    Where a library has several kernels, each figure is the largest of any. `registers` is the
    number at launch. `machine` is None where the machine code was not read, and
    `machine_note` says with what it was read, or why it was not.
    """

    registers: int
    barriers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    remarks: tuple[str, ...]
    machine: MachineCode | None = None
    machine_note: str = NO_DISASSEMBLER

    def __str__(self) -> str:
        lines = [
            f"registers at launch {self.registers}, spills {self.spill_store_bytes} bytes stored"
            f" and {self.spill_load_bytes} loaded, stack {self.stack_bytes} bytes"
        ]
        if self.machine and self.machine.consumer_registers is not None:
            lines.append(
                f"registers in use: consumer {self.machine.consumer_registers}, "
                f"producer {self.machine.producer_registers}"
            )
        elif self.machine:
            lines.append(f"registers in use: {self.machine.registers}")
        lines.append(f"machine code: {self.machine_note}")
        return "\n".join((*lines, *self.remarks))


def read_log(log: str, kernels: int = 1) -> CompilerReport:
    """Read what `ptxas -v` printed. Raises BuildError where that is not about so many kernels."""
    compiled = re.findall(r"Compiling entry function '([^']+)'", log)
    used = re.findall(r"Used (\d+) registers", log)
    if len(compiled) != kernels or len(used) != kernels:
        raise BuildError(
            f"ptxas was to report on {'one kernel' if kernels == 1 else f'{kernels} kernels'}, "
            f"not on {compiled}:\n{log.strip()}"
        )

    def largest(pattern: str) -> int:
        return max(map(int, re.findall(pattern, log)), default=0)

    return CompilerReport(
        registers=max(map(int, used)),
        barriers=largest(r"used (\d+) barriers"),
        stack_bytes=largest(r"(\d+) bytes stack frame"),
        spill_store_bytes=largest(r"(\d+) bytes spill stores"),
        spill_load_bytes=largest(r"(\d+) bytes spill loads"),
        remarks=tuple(_line(line) for line in log.splitlines() if _SLOWER.search(line)),
    )


def _line(text: str) -> str:
    """Text of a program as one line, with nothing in it that a terminal might obey."""
    return printable(" ".join(text.split()))


def with_machine_code(
    report: CompilerReport, library: Path, tools: Disassembler | None, kernels: int = 1
) -> CompilerReport:
    """Add what the machine code says, or why it was not read."""
    if tools is None:
        return report
    try:
        machine = machine_code(library, tools, kernels=kernels)
    except ToolchainError as error:  # a disassembler older than the compiler, for one
        return replace(report, machine_note=_line(f"not read, {error}"))
    return replace(report, machine=machine, machine_note=f"read with {tools.nvdisasm.name}")


def broken_promises(report: CompilerReport, plan: Plan) -> list[str]:
    """Compare a report with its Plan: each limit that the compiler broke, in words."""
    allowed = plan.max_spill_bytes
    threads = plan.threads * plan.blocks  # that an SM is to hold
    file = report.registers * threads
    spilled = max(report.spill_store_bytes, report.spill_load_bytes)
    frame = -(-report.spill_store_bytes // _STACK_ALIGNMENT) * _STACK_ALIGNMENT
    faults = []
    if file > SM90.registers_per_sm:
        faults.append(
            f"{report.registers} registers x {threads} threads = {file:,} at launch, "
            f"an SM has {SM90.registers_per_sm:,}"
        )
    if spilled > allowed:
        faults.append(
            f"{report.spill_store_bytes} bytes of registers spilled, {report.spill_load_bytes} "
            f"loaded again; the schedule allows {allowed}{_remedy(plan, spilled)}"
        )
    if report.stack_bytes > frame:
        faults.append(f"a stack frame of {report.stack_bytes} bytes, {frame} of them for spills")
    faults += report.remarks
    if report.machine:
        faults += _machine_faults(report.machine, plan)
    return faults


def _remedy(plan: Plan, spilled: int) -> str:
    """What a schedule may do against spills, if any of its keys bears on them."""
    return f": {plan.spill_remedy.format(spilled=spilled)}" if plan.spill_remedy else ""


def _machine_faults(machine: MachineCode, plan: Plan) -> list[str]:
    faults = []
    local = machine.count("LDL", "STL")
    if local and not plan.max_spill_bytes:
        faults.append(f"{local} instructions load from or store to local memory")
    if not plan.roles:
        if machine.raised_to or machine.lowered_to:
            faults.append("setmaxnreg in a kernel without a producer warp")
        return faults
    for roles, set_to, used in (
        (plan.roles[:-1], machine.raised_to, machine.consumer_registers),
        (plan.roles[-1:], machine.lowered_to, machine.producer_registers),
    ):
        names = " and the ".join(role.name for role in roles)
        planned = tuple(sorted({role.registers for role in roles}))
        if set_to != planned:
            faults.append(f"the {names} set registers to {set_to}, planned are {planned}")
        if used is not None and used > planned[-1]:
            faults.append(f"the {names} uses {used} registers, it has {planned[-1]}")
    return faults
