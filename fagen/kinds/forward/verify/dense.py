"""A built kernel in, its errors against fp64 out, size by size, beside torch's own.

The rule: max |out - fp64| may be twice that of torch's MATH backend in the same dtype plus one unit
in the last place at the largest output; the log-sum-exp is within 1e-3; a row that sees no key
gives exactly 0 and minus infinity. Every output is filled with NaN beforehand, so that a value
that the kernel forgot to write shows up. The rule for e4m3 is that of `fp8`.
"""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fagen.expr.words import PLAIN
from fagen.kinds.forward.operands import has_descales, outputs
from fagen.kinds.forward.oracle import reference, visible
from fagen.kinds.forward.plan import Plan
from fagen.kinds.forward.shapes import verification_sizes
from fagen.kinds.forward.verify import fp8
from fagen.kinds.forward.verify.fp8 import by_operands, fp8_error
from fagen.kinds.verification import LSE_TOLERANCE, Kernel, hard_scores
from fagen.measure import families
from fagen.measure.inputs import (
    cell_of,
    heavy_keys,
    inputs,
    rows_with_keys,
    softmax_scale,
    usual,
)
from fagen.measure.numerics import largest, unit_in_last_place
from fagen.measure.sinks import beside_sinks, usual_sinks, without_key
from fagen.measure.verification import Rule, Run
from fagen.problem import Cell, Sizes
from fagen.records import ShapeError
from fagen.runtime.c_interface import call
from fagen.scores import SCORES, Score
from fagen.vocab import Mask


def dense(plan: Plan, run: Run) -> Kernel:
    """A 16-bit kernel that is run by names, by its tensors, into outputs full of NaN."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = outputs(plan, q)
        given = usual(plan.mask, len(q), q.shape[1], k.shape[1], q.device)
        sinks = usual_sinks(plan.sink, q.shape[2], q.device)
        run(q=q, k=k, v=v, scale=scale, **given, **plan.score.usual, **sinks, out=out, lse=lse)
        return out, lse

    return kernel


def small_sizes(plan: Plan) -> tuple[Sizes, ...]:
    """A few sizes, small enough for the simulator."""
    m, n = plan.block_m, plan.block_n
    sizes = (
        Sizes(1, 1, 1, 1, 1),
        Sizes(1, 2, 1, m + 1, n + 1),
        Sizes(1, 2, 2, m - 1, 3 * n - 5),
        Sizes(2, 2, 1, 2 * m + 9, 2 * n + 3),
        Sizes(1, 2, 2, m + 3, 0),
        Sizes(1, 3, 1, 2 * m + 3, n // 2),
    )
    if plan.num_splits == 1:
        return sizes
    # splits of one block and of two, some of which the first rows or whole tiles do not see
    most = min(plan.num_splits, 6)
    return (
        *sizes,
        Sizes(1, 4, 2, 5, most * n - 3),
        Sizes(2, 2, 1, m + 9, (plan.num_splits + 1) * n + 5 if most < 6 else 5 * n + 1),
        Sizes(1, 1, 1, 3 * m + 1, 3 * m + 2),
    )


def run_error(plan: Plan, run: Run, cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> ShapeError:
    """The errors of a kernel on 16-bit tensors, by the rule for its dtype."""
    if has_descales(plan):
        sinks = usual_sinks(plan.sink, q.shape[2], q.device)
        return fp8_error(plan, cell, by_operands(plan, run), q, k, v, **sinks)
    sinks = usual_sinks(plan.sink, q.shape[2], q.device)
    return shape_error(cell, dense(plan, run), q, k, v, **sinks)


def size_error(plan: Plan, run: Run, sizes: Sizes, seed: int, device: str) -> ShapeError:
    """Run a kernel on numbers of these sizes."""
    cell = cell_of(plan, sizes)
    return run_error(plan, run, cell, *inputs(cell, seed=seed, device=device))


def hard_errors(
    plan: Plan, kernel: Kernel, sizes: Iterable[Sizes], device: str = "cuda"
) -> Iterator[ShapeError]:
    """Yield a 16-bit kernel's worst errors of the families of hard scores, at each size."""

    def exact(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        score = plan.score.as_usual
        exact = reference(q, k, v, mask=plan.mask.name, scale=scale, score=score)
        return beside_sinks(*exact, **usual_sinks(plan.sink, q.shape[2], q.device))

    for size in sizes:
        alone = families.alone(heavy_keys(plan.mask, size.seqlen_q, size.seqlen_k))
        hard = (*families.PROVED, alone)
        for _, fields in hard_scores(plan, kernel, exact, (size,), device, hard):
            yield ShapeError(**fields)


def kernel_error(
    plan: Plan, library: Path, cell: Cell, q: Tensor, k: Tensor, v: Tensor
) -> ShapeError:
    """The errors of a built kernel on 16-bit tensors."""
    return run_error(plan, partial(call, plan, library), cell, q, k, v)


def shape_error(
    cell: Cell,
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> ShapeError:
    """The largest errors of `kernel` on these inputs, against fp64 and beside torch's.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) on a GPU, of any strides that the kernel
    takes; `scale` is 1 / sqrt(D) if left out; the kernel has these `sinks`. An error that is NaN
    means that an output was not a number, or that a masked row was not exactly 0 and minus infinity
    or its sink.
    """
    how: Any = {"mask": cell.problem.mask, "score": SCORES[cell.problem.score].as_usual}
    scale = softmax_scale(cell.problem.head_dim) if scale is None else scale
    out, lse = kernel(q, k, v, scale)
    rows = rows_with_keys(cell).to(q.device)
    exact, exact_lse = reference(q, k, v, scale=scale, **how)
    beside = torch_math(q, k, v, scale=scale, **how)
    beside, _ = beside_sinks(beside, exact_lse, sinks)
    exact, exact_lse = beside_sinks(exact, exact_lse, sinks)
    nothing = lse[..., ~rows] == without_key(sinks)
    masked_right = bool((out[:, ~rows] == 0).all() and nothing.all())
    ours = largest(out[:, rows].double() - exact[:, rows]) if masked_right else math.nan
    torchs = largest(beside[:, rows].double() - exact[:, rows])
    return ShapeError(
        **vars(cell.sizes),
        error=ours,
        torch_error=torchs,
        allowed=2 * torchs + unit_in_last_place(largest(exact), q.dtype),
        lse_error=largest(lse[..., rows].double() - exact_lse[..., rows]),
        lse_allowed=LSE_TOLERANCE,
    )


def torch_math(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: str | Mask,
    scale: float,
    score: Score = SCORES[PLAIN],
) -> Tensor:
    """torch's SDPA under MATH in the inputs' dtype, (B, Sq, H, Dv), with a mask of vocab's.

    Rows that see no key hold whatever torch puts there. K and V heads are repeated for grouped
    queries; without queries or keys the result is zeros. SDPA knows no scores: of others than plain
    ones it is the formula in fp32, rounded, which is what MATH is of plain ones.
    """
    if not score.is_plain:
        out, _ = reference(q, k, v, mask=mask, scale=scale, score=score, dtype=torch.float32)
        return out.to(q.dtype)
    if q.shape[1] == 0 or k.shape[1] == 0:
        return q.new_zeros((*q.shape[:3], v.shape[-1]))
    ratio = q.shape[2] // k.shape[2]
    query = q.transpose(1, 2)
    key, value = (tensor.transpose(1, 2).repeat_interleave(ratio, dim=1) for tensor in (k, v))
    rows = torch.arange(q.shape[1], device=q.device)
    attn_mask = visible(mask, rows, q.shape[1], k.shape[1])
    with sdpa_kernel(SDPBackend.MATH):
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, scale=scale
        )
    return out.transpose(1, 2)


def _hard_errors(
    plan: Plan, run: Run, small: bool, device: str
) -> Iterator[tuple[str, ShapeError]]:
    sizes = families.SMALL_SIZES if small else families.SIZES
    for label, error in zip(
        sizes,
        fp8.hard_errors(plan, by_operands(plan, run), sizes, device)
        if has_descales(plan)
        else hard_errors(plan, dense(plan, run), sizes, device),
        strict=True,
    ):
        yield str(label), error


RULE = Rule(verification_sizes, size_error, small_sizes, _hard_errors, noun="shapes")
