"""16-bit tensors in, what an e4m3 kernel takes of them out; and its error beside its emulation's.

The rule: the root mean square of out - fp64 may be 1.15 times that of the emulated schedule on the
same bytes and descales, and no row's more than twice that of its worst row; the log-sum-exp is
within 5e-3, since Hopper adds products of e4m3 up in some 14 bits; a row that sees no key gives
exactly 0 and minus infinity. fp64 is of what the bytes stand for, so that nothing which a kernel
cannot help is counted.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fagen.e4m3 import by_columns, random_signs, rotate, rounded, rows_of
from fagen.evidence import ShapeError
from fagen.kinds.forward import emulate as emulator
from fagen.kinds.forward.plan import Plan
from fagen.measure.shapes import Problem, rows_with_keys, softmax_scale
from fagen.runtime import op

BEYOND_EMULATION = 1.15
ROW_BEYOND_EMULATION = 2.0
LSE_TOLERANCE = 5e-3
# Of the output's size, below which no error is looked at: where a row sees a few keys, one P that
# is rounded to its other neighbour is much beside what little error there is.
FLOOR = 2.0**-7


class Operands(NamedTuple):
    """What an e4m3 kernel takes: bytes, V as its Plan has it, and descales (B, H, blocks)."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor


Kernel8 = Callable[[Operands, float], tuple[Tensor, Tensor]]


def operands(of: Plan, q: Tensor, k: Tensor, v: Tensor, *, rotated: bool = False) -> Operands:
    """Quantise q (B, Sq, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv) as the Plan's kernel wants.

    In torch, on any device. With `rotated` Q and K are, which leaves their products as they were.
    """
    scales, scale_rows = of.schedule.fp8.scales, of.scale_rows
    if rotated:
        signs = random_signs(q.shape[-1]).to(q.device)
        q, k = rotate(q, signs), rotate(k, signs)
    made = [rounded(x, scales, scale_rows) for x in (q, k, v)]
    values = made[2].values if of.v_rows else by_columns(made[2].values)
    return Operands(made[0].values, made[1].values, values, *(x.descale for x in made))


def fp8_error(
    of: Plan,
    case: Problem,
    kernel: Kernel8,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    *,
    descales: tuple[Tensor, Tensor, Tensor] | None = None,
) -> ShapeError:
    """The errors of `kernel` on 16-bit tensors that are quantised for it.

    `descales` replaces those that were found, which makes other numbers of the same bytes. `error`
    is the root mean square over all, or, where one row breaks the rule for rows, over that one; it
    is NaN where an output was not a number, or a masked row not exactly 0 and minus infinity.
    """
    size = case.shape
    scale = softmax_scale(case.head_dim) if scale is None else scale
    # rows of V whatever the kernel takes: what they stand for is read off them
    given = operands(_by_rows(of), q, k, v)
    given = given._replace(**dict(zip(given._fields[3:], descales or given[3:], strict=True)))
    laid_out = given if of.v_rows else given._replace(v=by_columns(given.v))
    out, lse = kernel(laid_out, scale)
    emulated, _ = emulator.emulate_fp8(_by_rows(of), given.q, given.k, given.v, scale, *given[3:])
    exact, exact_lse = emulator.reference(*real(of, given), causal=case.causal, scale=scale)
    seen = rows_with_keys(size, case.causal)  # rows [seen:] of the queries see a key
    ours, theirs, true = (x[:, seen:].double() for x in (out, emulated, exact))
    masked_right = bool((out[:, :seen] == 0).all() and (lse[..., :seen] == -math.inf).all())
    error = rms(ours - true) if masked_right else math.nan
    beside, floor = rms(theirs - true), FLOOR * rms(true)
    allowed = BEYOND_EMULATION * max(beside, floor)
    worst = _worst_row(ours - true)
    if worst > max(ROW_BEYOND_EMULATION * max(_worst_row(theirs - true), floor), allowed):
        error = max(error, worst)  # NaN, where it is that, stays
    return ShapeError(
        batch=size.batch,
        seqlen_q=size.seqlen_q,
        seqlen_k=size.seqlen_k,
        heads=size.heads,
        kv_heads=size.kv_heads,
        error=error,
        torch_error=beside,
        allowed=allowed,
        lse_error=_largest(lse[..., seen:].double() - exact_lse[..., seen:]),
        # sums of products are as inexact as they are large
        lse_allowed=LSE_TOLERANCE * max(1.0, scale / softmax_scale(case.head_dim)),
    )


def real(of: Plan, given: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """What bytes and descales stand for, in fp32; V's bytes by rows."""
    pairs = zip(given[:3], given[3:], strict=True)
    q, k, v = (
        x.float() * rows_of(descale, of.scale_rows, x.shape[1]).transpose(1, 2)
        for x, descale in pairs
    )
    return q, k, v


def arguments(of: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """What the Plan's kernel takes of 16-bit tensors: themselves, or what they are quantised to."""
    return operands(of, q, k, v) if of.fp8 else (q, k, v)


def outputs(of: Plan, q: Tensor) -> tuple[Tensor, Tensor]:
    """Where the Plan's kernel may write what it computes of q: out and lse, full of NaN."""
    batch, seqlen_q, heads, _ = q.shape
    dtype = getattr(torch, of.out_dtype.torch)
    out = q.new_full((batch, seqlen_q, heads, of.head_dim_v), math.nan, dtype=dtype)
    return out, q.new_full((batch, heads, seqlen_q), math.nan, dtype=torch.float32)


def poisoned8(slug: str, library: Path) -> Kernel8:
    """The kernel through its C interface, on the current stream, into outputs full of NaN."""

    def kernel(given: Operands, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = outputs(op.plan_of(slug), given.q)
        op.bind_kernel(slug, library, *given[:3], out, lse, scale, *given[3:])()
        return out, lse

    return kernel


def rms(x: Tensor) -> float:
    """The root mean square, 0 of nothing."""
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def _worst_row(difference: Tensor) -> float:
    """The root mean square of the worst row of one head."""
    return _largest(difference.square().mean(-1).sqrt())


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _by_rows(of: Plan) -> Plan:
    """The same kernel with V as rows: it computes the same."""
    return of if of.v_rows else dataclasses.replace(of, v_rows=True)
