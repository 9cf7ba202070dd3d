"""An e4m3 kernel's error on 16-bit tensors that are quantised for it, beside a textbook's.

The rule: the root mean square of out - fp64 may be twice that of attention as a textbook has it
(`textbook`: the row's true maximum, P times 2^8) on the same bytes and descales, and so may that of
the worst row; the log-sum-exp is within 1e-2, since Hopper adds products of e4m3 up in some 14
bits; a row that sees no key gives exactly 0 and minus infinity. fp64 is of what the bytes stand
for, so that nothing which a kernel cannot help is counted.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fagen.e4m3 import by_columns
from fagen.kinds.forward.operands import Operands, operands, outputs, real
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.plan import Plan
from fagen.kinds.forward.verify.textbook import textbook
from fagen.kinds.verification import share
from fagen.measure import families
from fagen.measure.inputs import cell_of, rows_with_keys, softmax_scale, usual
from fagen.measure.numerics import largest, rms
from fagen.measure.sinks import beside_sinks, usual_sinks, without_key
from fagen.measure.verification import Run
from fagen.problem import Cell, Sizes
from fagen.records import ShapeError

BEYOND_TEXTBOOK = 2.0
# A score is head_dim / 32 sums of products, one upon the other, each cut off at 2^-13 of itself. Of
# scores of N(0, 1) up to 5.5 standard deviations, as the largest of millions are, that is 8 x 2^-13
# x 5.5 = 5.4e-3 at 256 columns, and products lose as much again within the sums; half of both on
# average. Where one key has most of a row's weight, its score's error is the log-sum-exp's.
LSE_TOLERANCE = 1e-2
# Of the output's size, below which no error is looked at: where a row sees a few keys, one P that
# is rounded to its other neighbour is much beside what little error there is.
FLOOR = 2.0**-7
# Of a large log-sum-exp: a large factor of scores is cut off to 10 bits (by_block.cuh.j2).
LSE_ROUNDING = 2.0**-8


Kernel8 = Callable[[Operands, float], tuple[Tensor, Tensor]]


def fp8_error(
    plan: Plan,
    cell: Cell,
    kernel: Kernel8,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    *,
    descales: tuple[Tensor, Tensor, Tensor] | None = None,
    coarse: float = 0.0,
    coarse_rows: float = 0.0,
    centered: str = "kv",
    lse_rounding: float = 0.0,
    sinks: Tensor | None = None,
) -> ShapeError:
    """The errors of `kernel` on 16-bit tensors that are quantised for it, less K's and V's means.

    `centered` names other means to take off. `descales` replaces those that were found, which
    makes other numbers of the same bytes. The log-sum-exp may be off by `lse_rounding` of it too.
    `coarse` is what the output may be off by besides, relative to its size, its worst row to the
    largest; `coarse_rows` is so much for the worst row alone. `error` is the root mean square over
    all, or, where one row breaks the rule for rows, over that one; it is NaN where an output was
    not a number, or a masked row not exactly 0 and minus infinity, or its one
    of `sinks`.
    """
    usual_scale = softmax_scale(cell.problem.head_dim)
    scale = usual_scale if scale is None else scale
    # rows of V whatever the kernel takes: what they stand for is read off them
    fp8 = operands(_by_rows(plan), q, k, v, centered=centered)
    fp8 = fp8._replace(**dict(zip(fp8._fields[3:], descales or fp8[3:], strict=False)))
    laid_out = fp8 if plan.v_rows else fp8._replace(v=by_columns(fp8.v))
    out, lse = kernel(laid_out, scale)
    expected = textbook(_by_rows(plan), fp8, scale)
    how: Any = {"mask": cell.problem.mask, "score": plan.score.as_usual}
    exact, exact_lse = reference(*real(plan, fp8), scale=scale, **how)
    expected, _ = beside_sinks(expected, exact_lse, sinks)
    exact, exact_lse = beside_sinks(exact, exact_lse, sinks)
    rows = rows_with_keys(cell).to(q.device)
    ours, theirs, true = (x[:, rows].double() for x in (out, expected, exact))
    nothing = lse[..., ~rows] == without_key(sinks)
    masked_right = bool((out[:, ~rows] == 0).all() and nothing.all())
    error, beside, allowed = by_the_rule(ours, theirs, true, coarse, coarse_rows)
    # sums of products are as inexact as they are large
    lse_allowed = LSE_TOLERANCE * max(1.0, scale / usual_scale)
    log_sum = exact_lse[..., rows]
    off = (lse[..., rows].double() - log_sum) / (1 + lse_rounding / lse_allowed * log_sum.abs())
    return ShapeError(
        **vars(cell.sizes),
        error=error if masked_right else math.nan,
        torch_error=beside,
        allowed=allowed,
        lse_error=largest(off),
        lse_allowed=lse_allowed,
    )


def hard_errors(
    plan: Plan, kernel: Kernel8, sizes: Iterable[Sizes], device: str
) -> Iterator[ShapeError]:
    """Yield the kernel's worst errors of those hard scores that bytes can have, at each size."""
    for size in sizes:
        records = []
        for family in families.COARSE:
            call = families.made(
                family, size, plan.head_dim, plan.head_dim_v, torch.float32, device
            )
            q, k, v, scale = call
            full = families.FULL_BYTES
            records.append(
                fp8_error(
                    *(plan, cell_of(plan, size), kernel, q * full, k * full, v, scale / full**2),
                    centered="v",
                    lse_rounding=LSE_ROUNDING,
                    **usual_sinks(plan.sink, q.shape[2], q.device),
                )
            )
        yield max(records, key=share)


def by_the_rule(
    ours: Tensor, theirs: Tensor, true: Tensor, coarse: float = 0.0, coarse_rows: float = 0.0
) -> tuple[float, float, float]:
    """The error of rows (..., Dv) in fp64, a textbook's, and what ours may be.

    It is that over all rows, or, where one breaks the rule for rows, over that one.
    """
    error, beside = rms(ours - true), rms(theirs - true)
    allowed = max(BEYOND_TEXTBOOK * beside, FLOOR * rms(true)) + coarse * rms(true)
    allowed = max(allowed, 2.0**-126)  # of nothing but sinks too
    worst, worst_beside = _worst_row(ours - true), _worst_row(theirs - true)
    of_size = max(coarse, coarse_rows) * _worst_row(true)
    if worst > max(BEYOND_TEXTBOOK * worst_beside + of_size, allowed):
        error = max(error, worst)  # NaN, where it is that, stays
    return error, beside, allowed


def by_operands(plan: Plan, run: Run) -> Kernel8:
    """An e4m3 kernel that is run by names, by its operands, into outputs full of NaN."""

    def kernel(operands: Operands, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = outputs(plan, operands.q)
        q, k = operands.q, operands.k
        given = usual(plan.mask, len(q), q.shape[1], k.shape[1], q.device)
        sinks = usual_sinks(plan.sink, q.shape[2], q.device)
        given |= plan.score.usual
        run(**operands._asdict(), scale=scale, **given, **sinks, out=out, lse=lse)
        return out, lse

    return kernel


def _worst_row(difference: Tensor) -> float:
    """The root mean square of the worst row of one head."""
    return largest(difference.square().mean(-1).sqrt())


def _by_rows(plan: Plan) -> Plan:
    """The same kernel with V as rows: it computes the same."""
    return plan if plan.v_rows else dataclasses.replace(plan, v_rows=True)
