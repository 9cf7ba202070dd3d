"""A built kernel in, its errors against fp64 out, shape by shape, beside torch's own.

The rule: max |out - fp64| may be twice that of torch's MATH backend in the same dtype plus one unit
in the last place at the largest output; the log-sum-exp is within 1e-3; a row that sees no key
gives exactly 0 and minus infinity. Every output is filled with NaN beforehand, so that a value
that the kernel forgot to write shows up. A kernel of e4m3 is held to the rule of `fp8`.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fagen.build import Binary
from fagen.errors import VerificationError
from fagen.evidence import ShapeError
from fagen.kinds.forward import emulate as emulator
from fagen.kinds.forward.plan import Plan
from fagen.measure.card import hopper
from fagen.measure.fp8 import fp8_error, outputs, poisoned8
from fagen.measure.shapes import (
    Problem,
    Shape,
    inputs,
    problem,
    rows_with_keys,
    softmax_scale,
    verification_shapes,
)
from fagen.runtime import op

LSE_TOLERANCE = 1e-3
Kernel = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def check(
    plan: Plan,
    binary: Binary,
    shapes: Iterable[Shape] | None = None,
    *,
    progress: Callable[[str], None] | None = print,
) -> tuple[ShapeError, ...]:
    """Run the kernel over `shapes` (default: the verification shapes); a line for each.

    Raises VerificationError after the last shape if any broke the rule, DeviceError without a
    Hopper GPU.
    """
    hopper()
    errors = []
    for number, shape in enumerate(verification_shapes(plan) if shapes is None else shapes):
        case = problem(plan, shape)
        errors.append(kernel_error(plan, binary.library, case, *inputs(case, seed=number)))
        if progress:
            progress(_line(errors[-1]))
    wrong = [error for error in errors if not error.ok]
    if wrong:
        raise VerificationError(
            f"{plan.slug}: {len(wrong)} of {len(errors)} shapes are wrong\n"
            + "\n".join(_line(error) for error in wrong)
        )
    return tuple(errors)


def kernel_error(
    plan: Plan, library: Path, case: Problem, q: Tensor, k: Tensor, v: Tensor
) -> ShapeError:
    """The errors of a built kernel on 16-bit tensors, by the rule for its dtype."""
    if plan.fp8:
        return fp8_error(plan, case, poisoned8(plan.slug, library), q, k, v)
    return shape_error(case, _poisoned(plan, library), q, k, v)


def poisoned(binary: Binary) -> Kernel:
    """The 16-bit kernel through its C interface, into outputs full of NaN."""
    return _poisoned(op.plan_of(binary.slug), binary.library)


def _poisoned(plan: Plan, library: Path) -> Kernel:
    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = outputs(plan, q)
        op.bind_kernel(plan.slug, library, q, k, v, out, lse, scale)()
        return out, lse

    return kernel


def shape_error(
    case: Problem, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None
) -> ShapeError:
    """The largest errors of `kernel` on these inputs, against fp64 and beside torch's.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) on a GPU, of any strides that the kernel
    takes; `scale` is 1 / sqrt(D) if left out. An error that is NaN means that an output was not a
    number, or that a masked row was not exactly 0 and minus infinity.
    """
    size = case.shape
    scale = softmax_scale(case.head_dim) if scale is None else scale
    out, lse = kernel(q, k, v, scale)
    seen = rows_with_keys(size, case.causal)  # rows [seen:] of the queries see a key
    exact, exact_lse = emulator.reference(q, k, v, causal=case.causal, scale=scale)
    beside = torch_math(q, k, v, causal=case.causal, scale=scale)
    masked_right = bool((out[:, :seen] == 0).all() and (lse[..., :seen] == -math.inf).all())
    ours = _worst(out[:, seen:].double() - exact[:, seen:]) if masked_right else math.nan
    torchs = _worst(beside[:, seen:].double() - exact[:, seen:])
    return ShapeError(
        batch=size.batch,
        seqlen_q=size.seqlen_q,
        seqlen_k=size.seqlen_k,
        heads=size.heads,
        kv_heads=size.kv_heads,
        error=ours,
        torch_error=torchs,
        allowed=2 * torchs + unit_in_last_place(_worst(exact), q.dtype),
        lse_error=_worst(lse[..., seen:].double() - exact_lse[..., seen:]),
        lse_allowed=LSE_TOLERANCE,
    )


def torch_math(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """torch's SDPA under MATH in the inputs' dtype, (B, Sq, H, Dv), aligned to the bottom right.

    Rows that see no key hold whatever torch puts there. K and V heads are repeated for grouped
    queries; without queries or keys the result is zeros.
    """
    if q.shape[1] == 0 or k.shape[1] == 0:
        return q.new_zeros((*q.shape[:3], v.shape[-1]))
    ratio = q.shape[2] // k.shape[2]
    query = q.transpose(1, 2)
    key, value = (tensor.transpose(1, 2).repeat_interleave(ratio, dim=1) for tensor in (k, v))
    mask = None
    if causal:
        rows = torch.arange(q.shape[1], device=q.device)[:, None]
        columns = torch.arange(k.shape[1], device=q.device)[None, :]
        mask = columns <= rows + (k.shape[1] - q.shape[1])
    with sdpa_kernel(SDPBackend.MATH):
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale
        )
    return out.transpose(1, 2)


def unit_in_last_place(value: float, dtype: torch.dtype) -> float:
    """The distance of neighbouring numbers of `dtype` at |value|; the smallest one at 0."""
    info = torch.finfo(dtype)
    exponent = math.floor(math.log2(max(abs(value), info.smallest_normal)))
    return math.ldexp(info.eps, exponent)


def _worst(difference: Tensor) -> float:
    """max |difference|, 0 of nothing; torch's maximum is NaN where any number is."""
    return float(difference.abs().max()) if difference.numel() else 0.0


def _line(error: ShapeError) -> str:
    shape = Shape(error.batch, error.seqlen_q, error.seqlen_k, error.heads, error.kv_heads)
    verdict = "ok" if error.ok else "WRONG"
    return (
        f"  {shape!s:40} error {error.error:.2e} (allowed {error.allowed:.2e}, torch "
        f"{error.torch_error:.2e})  lse {error.lse_error:.1e}  {verdict}"
    )
