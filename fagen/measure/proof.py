"""A Plan and its Binary in, the Evidence that it ran right on a Hopper GPU out, and on disk."""

import datetime
from collections.abc import Callable
from pathlib import Path

import torch

from fagen import evidence, toolchain
from fagen.build import Binary
from fagen.build.report import NO_DISASSEMBLER
from fagen.errors import BuildError, ToolchainError
from fagen.evidence import Bandwidth, Evidence, RoundingError, ShapeError, Speed
from fagen.measure.accuracy import check
from fagen.measure.card import Card, hopper
from fagen.measure.cells import compare
from fagen.measure.rows import OURS, Row
from fagen.measure.shapes import standard_shape
from fagen.plan import Plan


def verify(
    plan: Plan,
    binary: Binary,
    *,
    folder: Path | None = None,
    progress: Callable[[str], None] | None = print,
) -> Evidence:
    """Check the kernel over the verification shapes, time it beside cuDNN, write the evidence.

    The evidence goes to <slug>.json in `folder` (default: generated/). Raises VerificationError if
    a shape is wrong (then nothing is written), BuildError if the machine code cannot be read,
    DeviceError without a Hopper GPU.
    """
    card = hopper()
    code = machine_code(binary)  # before the GPU works in vain
    errors = check(plan, binary, progress=progress)
    rows = compare(plan, binary, standard_shape(plan.head_dim), progress=progress)
    return recorded(binary, card, code, errors, speeds(rows), folder)


def recorded(
    binary: Binary,
    card: Card,
    code: str,
    errors: tuple[ShapeError, ...] | tuple[RoundingError, ...],
    speeds: tuple[Speed, ...] | tuple[Bandwidth, ...],
    folder: Path | None,
) -> Evidence:
    """Write down what was measured today of a kernel with this machine code."""
    found = Evidence(
        slug=binary.slug,
        source_hash=binary.source_hash,
        host_hash=binary.host_hash,
        flags=tuple(toolchain.FLAGS),
        cutlass=binary.made_with["cutlass"],
        machine_code=code,
        compiler=binary.made_with["nvcc"],
        card=card.name,
        driver=card.driver,
        torch=torch.__version__,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        errors=errors,
        speeds=speeds,
    )
    evidence.write(found, folder)
    return found


def machine_code(binary: Binary) -> str:
    """The hash of a built kernel's machine code.

    Raises ToolchainError without a disassembler, BuildError where this kernel could not be read.
    """
    if binary.report.machine is None:
        missing = binary.report.machine_note == NO_DISASSEMBLER
        error = ToolchainError if missing else BuildError
        raise error(f"{binary.slug}: machine code {binary.report.machine_note}")
    return binary.report.machine.hash


def speeds(rows: tuple[Row, ...]) -> tuple[Speed, ...]:
    """Per regime, fagen's TFLOP/s and cuDNN's beside it (None where cuDNN refused)."""
    found = []
    for row in rows:
        if row.implementation not in OURS:
            continue
        beside = [
            other.tflops
            for other in rows
            if other.implementation == "cudnn" and other.regime == row.regime
        ]
        found.append(
            Speed(
                regime=row.regime,
                batch=row.batch,
                seqlen=row.seqlen_q,
                heads=row.heads,
                tflops=row.tflops,
                spread=row.spread,
                sm_clock_mhz=row.sm_clock_mhz,
                cudnn_tflops=beside[0] if beside else None,
            )
        )
    return tuple(found)
