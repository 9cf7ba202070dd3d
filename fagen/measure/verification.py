"""A Plan and its Binary in, the Evidence that it ran right on a Hopper GPU out, and on disk.

What is right and how fast, the Plan's kind says: its Proof.
"""

import datetime
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fagen import evidence
from fagen.build import Binary
from fagen.build.report import NO_DISASSEMBLER
from fagen.errors import BuildError, ToolchainError, VerificationError
from fagen.evidence import Evidence
from fagen.kind import Plan, load_named
from fagen.measure.card import hopper
from fagen.problem import Cell, Problem, Sizes
from fagen.registry import kind
from fagen.runtime.c_interface import call
from fagen.vocab import yardstick

Say = Callable[[str], None]


@dataclass(frozen=True)
class Contender:
    """How a kind's kernels are called on the 16-bit inputs of a cell, beside others.

    `arguments(plan, q, k, v)` is what its op takes, in the op's order, and of varlen sequences
    `arguments(plan, q, k, v, sizes)`; `outputs(plan, arguments)`
    is where it may write, full of NaN, the output that is compared first; `launch(plan, library,
    arguments, outputs)` binds both to the kernel's C function. Plans that are `alike` share all of
    these. `error(plan, library, cell, q, k, v)` runs a kernel, and returns a record of its errors.
    Of all outputs `compared` gives those that peers compute too. Where `rotates`, keys and values
    have to come from memory: a call goes through more of them than the L2 cache holds, and
    `quick(plan, sizes)` gives the sizes at which a kernel is checked before it is timed at those.
    """

    arguments: Callable[..., tuple[Any, ...]]
    outputs: Callable[[Any, tuple[Any, ...]], tuple[Tensor, ...]]
    launch: Callable[[Any, Path, tuple[Any, ...], Any], Callable[[], None]]
    alike: Callable[[Any], Hashable]
    error: Callable[[Any, Path, Cell, Tensor, Tensor, Tensor], Any]
    compared: Callable[[Any], Any] = itemgetter(0)
    rotates: bool = False
    quick: Callable[[Any, Sizes], Iterable[Sizes]] | None = None


Run = Callable[..., None]  # inputs and outputs by the names of a signature: enqueues the kernels


def _nothing_hard(plan: Any, run: Run, small: bool, device: str) -> tuple[()]:
    """A rule without inputs that are hard on it."""
    return ()


@dataclass(frozen=True)
class Rule:
    """What kernels of a kind are run on, and how their errors are found.

    `cases(plan)` are those that have caught such kernels out, and `small(plan)` those that the
    simulator has time for; None where it has none. `error(plan, run, case, seed, device)` makes
    what a case says, runs the kernels on it and returns a record of their errors against fp64.
    `hard(plan, run, small, device)` gives the errors on inputs that are hard on a kernel, each with
    its name. A line says what a record says, behind the name of its case in so many columns; a
    refusal counts its `noun`.
    """

    cases: Callable[[Any], Iterable[Any]]
    error: Callable[[Any, Run, Any, int, str], Any]
    small: Callable[[Any], Iterable[Any]] | None = None
    hard: Callable[[Any, Run, bool, str], Iterable[tuple[str, Any]]] = _nothing_hard
    noun: str = "cases"
    columns: int = 40


def check(
    plan: Plan,
    rule: Rule,
    run: Run,
    *,
    cases: Iterable[Any] | None = None,
    small: bool = False,
    device: str = "cuda",
    progress: Say | None = None,
) -> tuple[Any, ...]:
    """Run kernels over `cases`, or over all cases of their rule and what is hard; a line for each.

    Returns the records of errors. Raises VerificationError after the last of them if any broke the
    rule: is not `ok`.
    """

    def every() -> Iterator[tuple[str, Any]]:
        own = rule.small if small and rule.small else rule.cases
        for seed, case in enumerate(own(plan) if cases is None else cases):
            yield str(case), rule.error(plan, run, case, seed, device)
        if cases is None:
            yield from rule.hard(plan, run, small, device)

    records, wrong = [], []
    for name, error in every():
        line = f"  {name:{rule.columns}} {error}  {'ok' if error.ok else 'WRONG'}"
        records.append(error)
        wrong += [] if error.ok else [line]
        if progress:
            progress(line)
    if wrong:
        raise VerificationError(
            "\n".join(
                [f"{plan.slug}: {len(wrong)} of {len(records)} {rule.noun} are wrong", *wrong]
            )
        )
    return tuple(records)


@dataclass(frozen=True)
class Verification:
    """How a kind's kernels are proved.

    `rule(plan)` says on what and how. `speeds` times a built kernel, and passes a line for each
    shape to its last argument. `contender` is None where nothing is timed beside peers; `varlen` is
    that of varlen sequences.
    """

    rule: Callable[[Any], Rule]
    speeds: Callable[[Any, Binary, Say | None], tuple[Any, ...]]
    contender: Contender | None = None
    varlen: Contender | None = None

    def errors(self, plan: Plan, binary: Binary, progress: Say | None) -> tuple[Any, ...]:
        """Check a built kernel on a Hopper GPU.  Raises DeviceError without one, and as `check`."""
        hopper()
        run = partial(call, plan, binary.library)
        return check(plan, self.rule(plan), run, progress=progress)

    def simulated(self, plan: Plan, run: Run, progress: Say | None) -> tuple[Any, ...]:
        """Check a kernel on a CPU, by a function that runs it there.  Raises as `check`."""
        return check(plan, self.rule(plan), run, small=True, device="cpu", progress=progress)


def contender_of(plan: Plan) -> Contender:
    """How the kernels of a Plan's kind are called beside others."""
    verification: Verification = load_named(kind(plan.kind).verification)
    varlen = verification.varlen and Problem.of(plan.schedule).varlen
    contender = verification.varlen if varlen else verification.contender
    assert contender, f"nothing is timed beside kernels of the kind {plan.kind}"
    return contender


def verify(
    plan: Plan,
    binary: Binary,
    *,
    folder: Path | None = None,
    progress: Say | None = print,
) -> Evidence:
    """Run the kernel as its kind's Proof says, and write the evidence.

    It goes to <slug>.json in `folder`, or into the ledger in generated/. Raises VerificationError
    if a shape is wrong (then nothing is written), BuildError if the machine code cannot be read,
    DeviceError without a Hopper GPU.
    """
    card = hopper()
    code = machine_code(binary)  # before the GPU works in vain
    verification: Verification = load_named(kind(plan.kind).verification)
    speeds: Any = kind(plan.kind).speeds  # whichever record: it names its peer
    record = Evidence(
        slug=binary.slug,
        **vars(binary.hashes),
        machine_code=code,
        flags=evidence.FLAGS,
        cutlass=binary.made_with["cutlass"],
        compiler=binary.made_with["nvcc"],
        card=card.name,
        driver=card.driver,
        torch=torch.__version__,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        yardstick=yardstick(speeds.beside, plan.schedule.columns()["dtype"]),
        errors=verification.errors(plan, binary, progress),
        speeds=verification.speeds(plan, binary, progress),
    )
    evidence.write(record, folder)
    return record


def machine_code(binary: Binary) -> str:
    """The hash of a built kernel's machine code.

    Raises ToolchainError without a disassembler, BuildError where this kernel could not be read.
    """
    if binary.report.machine is None:
        missing = binary.report.machine_note == NO_DISASSEMBLER
        error = ToolchainError if missing else BuildError
        raise error(f"{binary.slug}: machine code {binary.report.machine_note}")
    return binary.report.machine.hash
