"""16-bit tensors of a cell in, what a kernel of attention takes of them out, and its launch.

A kernel with descales takes what these tensors are quantised to, any other the tensors themselves.
"""

import math
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fagen.e4m3 import by_columns, random_signs, rotate, rounded, rows_of
from fagen.kinds.forward.plan import Plan
from fagen.measure.inputs import softmax_scale
from fagen.problem import Problem
from fagen.runtime.c_interface import bind


class Operands(NamedTuple):
    """What an e4m3 kernel takes: bytes, V as its Plan has it, and descales (B, H, blocks)."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor


def has_descales(of: Plan) -> bool:
    """Whether the Plan's kernel takes Q, K and V with a scale for their numbers."""
    return of.signature.tensor("q_descale").present


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


def real(of: Plan, given: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """What bytes and descales stand for, in fp32; V's bytes row-major."""
    pairs = zip(given[:3], given[3:], strict=True)
    q, k, v = (
        x.float() * rows_of(descale, of.scale_rows, x.shape[1]).transpose(1, 2)
        for x, descale in pairs
    )
    return q, k, v


# ---- a call -------------------------------------------------------------------------------------


def arguments(of: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """What the Plan's op takes of 16-bit tensors, in its order: q, k, v, the scale, descales."""
    scale = softmax_scale(of.head_dim)
    if not has_descales(of):
        return q, k, v, scale
    given = operands(of, q, k, v)
    return *given[:3], scale, *given[3:]


def outputs(of: Plan, q: Tensor) -> tuple[Tensor, Tensor]:
    """Where the Plan's kernel may write what it computes of q: out and lse, full of NaN."""
    batch, seqlen_q, heads, _ = q.shape
    dtype = getattr(torch, of.out_dtype.torch)
    out = q.new_full((batch, seqlen_q, heads, of.head_dim_v), math.nan, dtype=dtype)
    return out, q.new_full((batch, heads, seqlen_q), math.nan, dtype=torch.float32)


def launch(
    of: Plan, library: Path, given: tuple[Any, ...], into: tuple[Tensor, Tensor]
) -> Callable[[], None]:
    """The kernel through its C interface, on the current stream: arguments as of `arguments`."""
    named = dict(zip((one.name for one in of.signature.arguments), given, strict=True))
    out, lse = into
    return bind(of, library, **named, out=out, lse=lse)


def alike(of: Plan) -> Hashable:
    """Kernels with the same take the same arguments, and write to the same outputs."""
    return Problem.of(of.schedule), of.schedule.fp8.scales
