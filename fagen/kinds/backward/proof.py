"""How the kernels of the backward pass are proved: errors against fp64, and speed beside cuDNN's.

The rule for each of dq, dk and dv, of the same 16-bit inputs: max |g - fp64| may be twice that of
the same formula computed in 16 bits, and twice what rounding makes of fp64 + 0.3 (the criterion of
FlashAttention's own tests). The workspace and the outputs are filled with NaN beforehand.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fagen.build import Binary
from fagen.kinds.backward import operands, varlen_proof
from fagen.kinds.backward.plan import Plan
from fagen.kinds.backward.reference import gradients
from fagen.measure.card import hopper
from fagen.measure.cells import compare, speeds
from fagen.measure.gradients import output_gradient
from fagen.measure.inputs import softmax_scale
from fagen.measure.numerics import largest
from fagen.measure.proof import Proof, Trial, judged
from fagen.measure.sequences import quick_sizes, trial_case
from fagen.measure.timing import BURST, SUSTAINED
from fagen.problem import Cell, Sizes, standard_sizes
from fagen.records import GradientError, Speed

Say = Callable[[str], None]
Case = tuple[tuple[Any, ...], tuple[Tensor, ...], tuple[Tensor, ...]]
_REGIMES = (replace(SUSTAINED, rounds=2), BURST)  # two sustained rounds, as the forward pass has
_SHIFT = 0.3  # whose rounding near a gradient counts as much as its own
# where dP - delta should be 0, as of a row that sees one key, sums in fp32 leave so much at most
_FLOOR = 2.0**-14


def verification_sizes(plan: Plan) -> tuple[Sizes, ...]:
    """Sizes around the tile of `plan`, as those that have caught attention kernels out.

    A single row and key, a tile and one more or less of it, no row, no key, more rows than keys
    and fewer, every grouping of heads, in one thread block and in several, and one that is long.
    """
    m, n = plan.block_m, plan.block_n
    return (
        Sizes(1, 1, 1, 1, 1),
        Sizes(1, 2, 2, m, n),
        Sizes(2, 3, 3, m - 1, n - 1),
        Sizes(1, 2, 1, m + 1, n + 1),
        Sizes(1, 4, 2, 2 * m + 1, 3 * n - 1),
        Sizes(2, 2, 2, 1, 2 * n + 1),
        Sizes(2, 2, 2, m, 1),
        Sizes(2, 2, 2, 0, n),
        Sizes(2, 4, 2, m + 1, 0),
        Sizes(1, 2, 2, 3 * n - 5, n // 2 + 3),
        Sizes(2, 6, 1, m // 2 + 7, 4 * n + 3),
        Sizes(2, 8, 1, 239, 799),
        Sizes(34, 4, 2, m + 3, 2 * n),
        Sizes(4, 16, 4, 1_023, 1_024),
        Sizes(1, 4, 4, 2_048, 2_048),
        Sizes(5, 64, 64, 300, 390),  # of several sections of heads
    )


def inputs(plan: Plan, sizes: Sizes, *, seed: int = 0, device: str = "cuda") -> tuple[Tensor, ...]:
    """dout, q, k and v, N(0, 1), contiguous, repeatable."""
    dtype = getattr(torch, plan.dtype.torch)
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(seqlen: int, heads: int, columns: int) -> Tensor:
        shape = (sizes.batch, seqlen, heads, columns)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    return (
        normal(sizes.seqlen_q, sizes.heads, plan.head_dim_v),
        normal(sizes.seqlen_q, sizes.heads, plan.head_dim),
        normal(sizes.seqlen_k, sizes.kv_heads, plan.head_dim),
        normal(sizes.seqlen_k, sizes.kv_heads, plan.head_dim_v),
    )


def launch(plan: Plan, library: Path, *given: Any) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    """The kernels through their C interface, and the outputs dq, dk and dv, full of NaN.

    So is the workspace. Arguments are those of the op, in its order.
    """
    into = operands.outputs(plan, given)
    return operands.launch(plan, library, given, into), into


def case(plan: Plan, sizes: Sizes, *, seed: int = 0, device: str = "cuda") -> Case:
    """What the op is given, and dq, dk and dv in fp64 and by the same formula in the Plan's dtype.

    With an odd seed the LSE has a gradient too.
    """
    dout, q, k, v = inputs(plan, sizes, seed=seed, device=device)
    rows = (sizes.batch, sizes.heads, sizes.seqlen_q)
    generator = torch.Generator(device=device).manual_seed(seed)
    dlse = torch.randn(rows, generator=generator, device=device) if seed % 2 else None
    return judged_by(plan, dout, q, k, v, dlse)


def judged_by(
    plan: Plan, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, dlse: Tensor | None = None
) -> Case:
    """The `case` of these tensors."""
    scale = softmax_scale(plan.head_dim)
    formula = partial(gradients, dout, q, k, v, mask=plan.mask, scale=scale, dlse=dlse)
    out, lse, *exact = formula()
    *_, dq, dk, dv = formula(dtype=q.dtype)
    given = (dout, q, k, v, out.to(q.dtype).contiguous(), lse.float(), scale, dlse)
    return given, tuple(exact), (dq, dk, dv)


def errors_of(
    sizes: Sizes, found: Sequence[Tensor], exact: Sequence[Tensor], rough: Sequence[Tensor]
) -> GradientError:
    """How dq, dk and dv differ from those in fp64, and by how much they may; see `case`."""
    errors = [largest(x.double() - y) for x, y in zip(found, exact, strict=True)]
    allowed = [
        2 * largest(x.double() - y) + 2 * largest(_rounded(y, x.dtype) - y) + _FLOOR
        for x, y in zip(rough, exact, strict=True)
    ]
    return GradientError(
        **vars(sizes),
        dq_error=errors[0],
        dq_allowed=allowed[0],
        dk_error=errors[1],
        dk_allowed=allowed[1],
        dv_error=errors[2],
        dv_allowed=allowed[2],
    )


def gradient_error(plan: Plan, library: Path, sizes: Sizes, seed: int = 0) -> GradientError:
    """Run a built kernel on a `case`."""
    return _run(plan, library, sizes, case(plan, sizes, seed=seed))


def _run(plan: Plan, library: Path, sizes: Sizes, of: Case) -> GradientError:
    given, exact, rough = of
    enqueue, found = launch(plan, library, *given)
    enqueue()
    return errors_of(sizes, found, exact, rough)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x after 0.3 was added and taken off again in 16 bits."""
    return (x.to(dtype) + _SHIFT - _SHIFT).double()


def check(plan: Plan, binary: Binary, progress: Say | None) -> tuple[GradientError, ...]:
    """Run the kernels over the verification sizes; a line for each.

    Raises VerificationError after the last of them if any broke the rule, DeviceError without a
    Hopper GPU.
    """
    if plan.varlen:
        return varlen_proof.check(plan, binary, errors_of, progress)
    hopper()
    errors = (
        gradient_error(plan, binary.library, sizes, seed)
        for seed, sizes in enumerate(verification_sizes(plan))
    )
    return judged(plan, errors, _line, progress)


def simulated(
    plan: Plan, run: Callable[..., None], progress: Say | None
) -> tuple[GradientError, ...]:
    """Check the kernels on a CPU, where `run` takes tensors by name; a line for each size.

    Raises VerificationError after the last of them if any broke the rule.
    """
    if plan.varlen:
        return varlen_proof.simulated(plan, run, errors_of, progress)
    m, n = plan.block_m, plan.block_n

    def error(sizes: Sizes, seed: int) -> GradientError:
        given, exact, rough = case(plan, sizes, seed=seed, device="cpu")
        names = (one.name for one in plan.signature.arguments)
        named = dict(zip(names, given, strict=True))
        into = {f"d{name}": torch.full_like(named[name], math.nan) for name in ("q", "k", "v")}
        run(**named, **into)
        return errors_of(sizes, tuple(into.values()), exact, rough)

    sizes = (
        Sizes(1, 1, 1, 1, 1),
        Sizes(1, 2, 1, m + 1, n + 1),
        Sizes(1, 2, 2, 3 * n - 5, n // 2 + 3),
        Sizes(2, 2, 1, m + 9, 2 * n - 1),
        Sizes(1, 1, 1, 0, n),
        Sizes(1, 2, 2, m, 0),
        Sizes(1, 3, 1, 3 * m + 3, n + 5),
        Sizes(1, 2, 1, m - 3, n + 5),
        Sizes(2, 3, 3, m + 3, n + 5),
    )
    return judged(plan, (error(one, seed) for seed, one in enumerate(sizes)), _line, progress)


def _line(error: GradientError) -> str:
    sizes = Sizes(error.batch, error.heads, error.kv_heads, error.seqlen_q, error.seqlen_k)
    return f"  {sizes!s:40} {error.said}  {'ok' if error.ok else 'WRONG'}"


# ---- speed --------------------------------------------------------------------------------------


def _speeds(plan: Plan, binary: Binary, progress: Say | None) -> tuple[Speed, ...]:
    """Time the op, with all three kernels and what it allocates, beside cuDNN's backward pass."""
    sizes = standard_sizes(plan.head_dim)
    return speeds(compare(plan, binary, sizes, regimes=_REGIMES, progress=progress))


def _error(plan: Plan, library: Path, cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> GradientError:
    """Run a built kernel on these inputs and a gradient of their output."""
    return _run(plan, library, cell.sizes, judged_by(plan, output_gradient(q, v), q, k, v))


TRIAL = Trial(
    arguments=operands.arguments,
    outputs=operands.outputs,
    launch=operands.launch,
    alike=operands.alike,
    error=_error,
    compared=tuple,
)


def _packed_error(
    plan: Plan, library: Path, cell: Cell, q: Tensor, k: Tensor, v: Tensor
) -> GradientError:
    """Run a built kernel over a cell's sequences, with numbers of its own."""
    return varlen_proof.case_error(
        plan,
        trial_case(cell.sizes),
        varlen_proof.kernel_of(plan, library),
        errors_of,
        seed=cell.sizes.batch,
        device=q.device.type,
    )


PACKED = replace(TRIAL, error=_packed_error, quick=quick_sizes)
PROOF = Proof(check, _speeds, TRIAL, simulated, PACKED)
