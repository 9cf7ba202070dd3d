"""16-bit tensors of a cell in, what a kernel of attention takes of them out, and its launch.

A kernel with descales takes what these tensors are quantised to, any other the tensors themselves.
"""

import math
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fagen.e4m3 import by_columns, mean_of, random_signs, rotate, rounded, rows_of
from fagen.kinds.forward.plan import Plan
from fagen.measure.inputs import offsets, softmax_scale, usual, usual_packed
from fagen.measure.sinks import usual_sinks
from fagen.problem import Problem, Sizes
from fagen.runtime.c_interface import bind


class Operands(NamedTuple):
    """What an e4m3 kernel takes: bytes, V as its Plan has it, descales, and means taken off."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor
    v_mean: Tensor | None = None
    k_mean: Tensor | None = None


def has_descales(plan: Plan) -> bool:
    """Whether the Plan's kernel takes Q, K and V with a scale for their numbers."""
    return plan.descales


def operands(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotated: bool = False,
    centered: str = "",
    scales: str = "",
    v_scales: str = "",
) -> Operands:
    """Quantise q (B, Sq, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv) as the Plan's kernel wants.

    In torch, on any device. With `rotated` Q and K are, which leaves their products as they were;
    of the tensors named in `centered`, "v", "k" or both, the means of columns are taken off first,
    of K only where the softmax does not notice.
    Scales of Q and K are the Plan's, or one for a "head" or the "tensor" if `scales` says so; of V
    `v_scales`.
    """
    scales, scale_rows = scales or plan.schedule.fp8.scales, plan.scales.rows
    if rotated:
        signs = random_signs(q.shape[-1]).to(q.device)
        q, k = rotate(q, signs), rotate(k, signs)
    k_mean = mean_of(k) if "k" in centered and not plan.score.acts else None
    v_mean = mean_of(v) if "v" in centered else None
    k = k if k_mean is None else k.float() - k_mean[:, None]
    v = v if v_mean is None else v.float() - v_mean[:, None]
    q8, k8 = rounded(q, scales, scale_rows), rounded(k, scales, scale_rows)
    v8 = rounded(v, v_scales or plan.schedule.fp8.v_scales, scale_rows)
    values = v8.values if plan.v_rows else by_columns(v8.values)
    descales = q8.descale, k8.descale, v8.descale
    return Operands(q8.values, k8.values, values, *descales, v_mean, k_mean)


def real(plan: Plan, operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """What bytes, descales and means stand for, in fp32; V's bytes row-major."""
    q = operands.q.float() * _by_row(plan, operands.q_descale, operands.q)
    k = operands.k.float() * _by_row(plan, operands.k_descale, operands.k)
    v = operands.v.float() * of_v(plan, operands)
    k = k if operands.k_mean is None else k + operands.k_mean[:, None]
    v = v if operands.v_mean is None else v + operands.v_mean[:, None]
    return q, k, v


def of_v(plan: Plan, operands: Operands) -> Tensor:
    """V's descales, as they spread to its rows (B, Sk, Hk, Dv)."""
    if plan.scales.v_by_block:
        return _by_row(plan, operands.v_descale, operands.v)
    return operands.v_descale[:, None]


def _by_row(plan: Plan, descale: Tensor, x: Tensor) -> Tensor:
    """A descale for each row of x (B, S, H, D), as it spreads to them."""
    return rows_of(descale, plan.scales.rows, x.shape[1]).transpose(1, 2)


# ---- a call -------------------------------------------------------------------------------------


def arguments(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, sizes: Sizes | None = None
) -> tuple[Any, ...]:
    """What the Plan's op takes of 16-bit tensors, in its order: q, k, v, the scale, descales.

    Where it takes varlen sequences these are of the lengths that `sizes` says, or of equal ones.
    """
    scale = softmax_scale(plan.head_dim)
    call: tuple[Any, ...] = operands(plan, q, k, v) if has_descales(plan) else (q, k, v)
    tensors, numbers = call[:3], call[3:]
    sinks = usual_sinks(plan.sink, q.shape[2], q.device).values()
    if plan.varlen:
        varlen = (x.flatten(0, 1) for x in tensors)
        batch, queries, heads, _ = q.shape
        sizes = sizes or Sizes(batch, heads, k.shape[2], queries, k.shape[1])
        given = usual_packed(plan.mask, sizes.sequences, q.device)
        values = *(given[name] for name in plan.mask.given), *plan.score.usual.values()
        return *varlen, *offsets(sizes, q.device), scale, *values, *sinks, None, *numbers
    given = usual(plan.mask, len(q), q.shape[1], k.shape[1], q.device)
    values = *(given[name] for name in plan.mask.given), *plan.score.usual.values()
    return *tensors, scale, *values, *sinks, *numbers


def outputs(plan: Plan, q: Tensor) -> tuple[Tensor, Tensor]:
    """Where the Plan's kernel may write what it computes of q: out and lse, full of NaN."""
    *rows, heads, _ = q.shape  # (batch, seqlen), or the total of packed ones
    dtype = getattr(torch, plan.out_dtype.torch)
    out = q.new_full((*rows, heads, plan.head_dim_v), math.nan, dtype=dtype)
    return out, q.new_full((*rows[:-1], heads, rows[-1]), math.nan, dtype=torch.float32)


def launch(
    plan: Plan, library: Path, arguments: tuple[Any, ...], into: tuple[Tensor, Tensor]
) -> Callable[[], None]:
    """The kernel through its C interface, on the current stream: arguments as of `arguments`."""
    named = dict(zip((x.name for x in plan.signature.arguments), arguments, strict=True))
    out, lse = into
    return bind(plan, library, **named, out=out, lse=lse)


def alike(plan: Plan) -> Hashable:
    """Kernels with the same take the same arguments, and write to the same outputs."""
    return (
        Problem.of(plan.schedule),
        plan.schedule.fp8.scales,
        plan.schedule.fp8.v_scales,
    )
