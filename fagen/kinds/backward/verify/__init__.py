"""How the kernels of the backward pass are proved: errors against fp64, and speed beside cuDNN's.

The rule for each of dq, dk and dv, of the same 16-bit inputs: max |g - fp64| may be twice that of
the same formula computed in 16 bits, and twice what rounding makes of fp64 + 0.3 (the criterion of
FlashAttention's own tests). The workspace and the outputs are filled with NaN beforehand.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fagen.build import Binary
from fagen.kinds.backward import operands
from fagen.kinds.backward.oracle import gradients, sinks_hold
from fagen.kinds.backward.plan import Plan
from fagen.kinds.backward.verify import varlen
from fagen.kinds.backward.verify.textbook import attention_and_gradients
from fagen.kinds.verification import Say, beside_peers, share
from fagen.measure.gradients import output_gradient
from fagen.measure.inputs import softmax_scale
from fagen.measure.numerics import largest
from fagen.measure.sequences import contender_case, quick_sizes, small_cases, verification_cases
from fagen.measure.sinks import usual_sinks
from fagen.measure.verification import Contender, Rule, Run, Verification
from fagen.problem import Cell, Sizes, standard_sizes
from fagen.records import GradientError, Speed
from fagen.runtime.c_interface import call
from fagen.vocab import PLAIN_MASKS, Mask

Case = tuple[tuple[Any, ...], tuple[Tensor, ...], tuple[Tensor, ...]]
Kernel = Callable[[tuple[Any, ...]], tuple[Tensor, ...]]  # what the op is given, and dq, dk, dv
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
    sinks = usual_sinks(plan.sink, q.shape[2], q.device)
    how: dict[str, Any] = dict(mask=plan.mask, score=plan.score.as_usual, scale=scale, dlse=dlse)
    how |= sinks
    formula = partial(gradients, dout, q, k, v, **how)
    out, lse, *exact = formula()
    _, _, *rough = formula(dtype=q.dtype)
    given = operands.given(plan, q, k)
    tensors = (dout, q, k, v, out.to(q.dtype).contiguous(), lse.float(), scale, *given, dlse)
    return tensors, tuple(exact), tuple(rough)


def errors_of(
    sizes: Sizes, results: Sequence[Tensor], exact: Sequence[Tensor], rough: Sequence[Tensor]
) -> GradientError:
    """How dq, dk and dv differ from those in fp64, and by how much they may; see `case`.

    Where the gradient of sinks differs by more than it may, that of q counts as no number.
    """
    errors = [largest(x.double() - y) for x, y in zip(results[:3], exact[:3], strict=True)]
    allowed = [
        2 * largest(x.double() - y) + 2 * largest(_rounded(y, x.dtype) - y) + _FLOOR
        for x, y in zip(rough[:3], exact[:3], strict=True)
    ]
    if not all(map(sinks_hold, results[3:], exact[3:])):
        errors[0] = math.nan
    return _gradient_error(sizes, errors, allowed)


def _gradient_error(
    sizes: Sizes, errors: Sequence[float], allowed: Sequence[float]
) -> GradientError:
    of_each = zip(GradientError.bounds.items(), errors, allowed, strict=True)
    named: dict[str, Any] = {}
    for (error, most), own, may_be in of_each:
        named |= {error: own, most: may_be}
    return GradientError(**vars(sizes), **named)


def dense(plan: Plan, run: Run) -> Kernel:
    """Kernels that are run by names, by the op's arguments in order, into outputs full of NaN."""

    def kernel(tensors: tuple[Any, ...]) -> tuple[Tensor, ...]:
        names = (argument.name for argument in plan.signature.arguments)
        outputs = (output.name for output in plan.signature.outputs)
        into = dict(zip(outputs, operands.outputs(plan, tensors), strict=True))
        run(**dict(zip(names, tensors, strict=True)), **into)
        return tuple(into.values())

    return kernel


def size_error(plan: Plan, run: Run, sizes: Sizes, seed: int, device: str) -> GradientError:
    """Run kernels on a `case`."""
    tensors, exact, rough = case(plan, sizes, seed=seed, device=device)
    return errors_of(sizes, dense(plan, run)(tensors), exact, rough)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x after 0.3 was added and taken off again in 16 bits."""
    return (x.to(dtype) + _SHIFT - _SHIFT).double()


@dataclass(frozen=True)
class Hard:
    """What is hard on a difference of products: sizes of dO and V, and rows of one key.

    In such a row one key, any of the first, has a score `gap` natural units above the others.
    """

    dout: float
    v: float = 1.0
    gap: float = 0.0

    def case(self, plan: Plan, sizes: Sizes, device: str) -> Case:
        """Inputs, and gradients in fp64 and by FlashAttention-2's formulae, whose O is given."""
        dout, q, k, v = inputs(plan, sizes, device=device)
        dout, v = dout * self.dout, v * self.v
        if self.gap:
            q = (q.float() / 4 + self._towards(plan.mask, sizes, k.float())).to(q.dtype)
        scale = softmax_scale(plan.head_dim)
        score, sinks = plan.score.as_usual, usual_sinks(plan.sink, q.shape[2], q.device)
        how: dict[str, Any] = dict(mask=plan.mask, score=score, scale=scale, **sinks)
        out, *rough = attention_and_gradients(dout, q, k, v, **how)
        _, lse, *exact = gradients(dout, q, k, v, **how)
        given = operands.given(plan, q, k)
        tensors = dout, q, k, v, out, lse.float(), scale, *given, None
        return tensors, tuple(exact), tuple(rough)

    def _towards(self, mask: Mask, sizes: Sizes, k: Tensor) -> Tensor:
        """Rows that have a score of `gap` for a key that they see; of plain masks an early one."""
        row = torch.arange(sizes.seqlen_q, device=k.device)
        towards = row * 7 % (sizes.seqlen_k - sizes.seqlen_q + 1)
        if mask.name not in PLAIN_MASKS:
            first, last = mask.keys(row, sizes.seqlen_q, sizes.seqlen_k)
            first = torch.zeros_like(row) + torch.as_tensor(first).clamp(min=0)
            seen = torch.as_tensor(last).clamp(max=sizes.seqlen_k) - first
            towards = first + row * 7 % seen
        own = k[:, towards]
        own = own.repeat_interleave(sizes.heads // sizes.kv_heads, 2)
        length = own.square().sum(-1, keepdim=True)
        return own * (self.gap * math.sqrt(k.shape[-1])) / length


HARD = (Hard(2.0**-20), Hard(2.0**10), Hard(2.0**9, 2.0**3, 24.0), Hard(1.0, 2.0**6))


def hard_error(plan: Plan, kernel: Kernel, sizes: Sizes, device: str = "cuda") -> GradientError:
    """Run kernels on what is hard; return the error that comes nearest to what it may be.

    That is twice FlashAttention-2's, in units of dO's size, V's and fp16's smallest number.
    """
    records = []
    for hard in HARD:
        tensors, exact, rough = hard.case(plan, sizes, device)
        floor = _FLOOR * hard.dout * hard.v + 2.0**-24
        errors, most = (
            [largest(x.double() - y) for x, y in zip(results[:3], exact[:3], strict=True)]
            for results in (kernel(tensors), rough)
        )
        records.append(_gradient_error(sizes, errors, [2 * error + floor for error in most]))
    return max(records, key=share)


def _hard_errors(
    plan: Plan, run: Run, small: bool, device: str
) -> Iterator[tuple[str, GradientError]]:
    m, n = plan.block_m, plan.block_n
    sizes = Sizes(1, 2, 1, m // 2 + 3, n + 9) if small else Sizes(1, 4, 2, 2 * m + 9, 1_100)
    if not plan.varlen:
        yield str(sizes), hard_error(plan, dense(plan, run), sizes, device)
    elif not small:
        kernel = varlen.as_dense(plan, run)
        yield "sizes of dO and V, rows of one key", hard_error(plan, kernel, sizes)


def small_sizes(plan: Plan) -> tuple[Sizes, ...]:
    """A few of them, small enough for the simulator."""
    m, n = plan.block_m, plan.block_n
    return (
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


RULE = Rule(verification_sizes, size_error, small_sizes, _hard_errors, noun="shapes")
VARLEN_RULE = Rule(
    verification_cases,
    partial(varlen.case_error, rule=errors_of),
    small_cases,
    _hard_errors,
    columns=66,
)


def rule(plan: Plan) -> Rule:
    """The rule for kernels of one length, or of sequences of their own lengths."""
    return VARLEN_RULE if plan.varlen else RULE


# ---- speed --------------------------------------------------------------------------------------


def _speeds(plan: Plan, binary: Binary, progress: Say | None) -> tuple[Speed, ...]:
    """Time the op, with all three kernels and what it allocates, beside cuDNN's backward pass."""
    return beside_peers(plan, binary, standard_sizes(plan.head_dim), progress)


def _error(plan: Plan, library: Path, cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> GradientError:
    """Run a built kernel on these inputs and a gradient of their output."""
    tensors, exact, rough = judged_by(plan, output_gradient(q, v), q, k, v)
    results = dense(plan, partial(call, plan, library))(tensors)
    return errors_of(cell.sizes, results, exact, rough)


CONTENDER = Contender(
    arguments=operands.arguments,
    outputs=operands.outputs,
    launch=operands.launch,
    alike=operands.alike,
    error=_error,
    compared=tuple,
)


def _varlen_error(
    plan: Plan, library: Path, cell: Cell, q: Tensor, k: Tensor, v: Tensor
) -> GradientError:
    """Run a built kernel over a cell's sequences, with numbers of its own."""
    case, run = contender_case(cell.sizes), partial(call, plan, library)
    return VARLEN_RULE.error(plan, run, case, cell.sizes.batch, q.device.type)  # type: ignore[no-any-return]


VARLEN = replace(CONTENDER, error=_varlen_error, quick=quick_sizes)
VERIFICATION = Verification(rule, _speeds, CONTENDER, VARLEN)
