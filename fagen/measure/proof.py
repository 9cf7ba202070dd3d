"""A Plan and its Binary in, the Evidence that it ran right on a Hopper GPU out, and on disk.

What is right and how fast, the Plan's kind says: its Proof.
"""

import datetime
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, TypeVar

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
from fagen.vocab import yardstick

Say = Callable[[str], None]


class Judged(Protocol):
    """A record of errors."""

    @property
    def ok(self) -> bool:
        """Whether they are within what is allowed."""


Record = TypeVar("Record", bound=Judged)


@dataclass(frozen=True)
class Trial:
    """How a kind's kernels are called on the 16-bit inputs of a cell, beside others.

    `arguments(plan, q, k, v)` is what its op takes, in the op's order, and of packed sequences
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


@dataclass(frozen=True)
class Proof:
    """How a kind's kernels are proved.

    `errors` runs a kernel over the shapes that have caught such kernels out, and returns a record
    for each; it raises VerificationError if any is wrong. `speeds` times it. Both pass a line for
    each shape to their last argument. `trial` is None where nothing is timed beside peers; of
    kernels of packed sequences it is `packed`. `simulated` does what `errors` does at small sizes,
    on a CPU: it runs a kernel by a function of all tensors and scalars by the names of its
    signature.
    """

    errors: Callable[[Any, Binary, Say | None], tuple[Any, ...]]
    speeds: Callable[[Any, Binary, Say | None], tuple[Any, ...]]
    trial: Trial | None = None
    simulated: Callable[[Any, Callable[..., None], Say | None], tuple[Any, ...]] | None = None
    packed: Trial | None = None


def judged(
    plan: Plan,
    errors: Iterable[Record],
    line: Callable[[Record], str],
    progress: Say | None,
    *,
    of: str = "shapes",
) -> tuple[Record, ...]:
    """Return records of errors as they come, each said in a line.

    Raises VerificationError after the last of them if any broke the rule: is not `ok`.
    """
    records = []
    for error in errors:
        records.append(error)
        if progress:
            progress(line(error))
    if wrong := [line(error) for error in records if not error.ok]:
        raise VerificationError(
            "\n".join([f"{plan.slug}: {len(wrong)} of {len(records)} {of} are wrong", *wrong])
        )
    return tuple(records)


def trial_of(plan: Plan) -> Trial:
    """How the kernels of a Plan's kind are called beside others."""
    proof: Proof = load_named(kind(plan.kind).proof)
    packed = proof.packed and Problem.of(plan.schedule).varlen
    trial = proof.packed if packed else proof.trial
    assert trial, f"nothing is timed beside kernels of the kind {plan.kind}"
    return trial


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
    proof: Proof = load_named(kind(plan.kind).proof)
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
        errors=proof.errors(plan, binary, progress),
        speeds=proof.speeds(plan, binary, progress),
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
