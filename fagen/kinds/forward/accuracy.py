"""A built kernel in, its errors against fp64 out, size by size, beside torch's own.

The rule: max |out - fp64| may be twice that of torch's MATH backend in the same dtype plus one unit
in the last place at the largest output; the log-sum-exp is within 1e-3; a row that sees no key
gives exactly 0 and minus infinity. Every output is filled with NaN beforehand, so that a value
that the kernel forgot to write shows up. The rule for e4m3 is that of `fp8_accuracy`.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fagen.build import Binary
from fagen.kinds.forward import fp8_accuracy
from fagen.kinds.forward.fp8_accuracy import fp8_error, poisoned8
from fagen.kinds.forward.operands import Operands, has_descales, launch, outputs
from fagen.kinds.forward.plan import Plan
from fagen.kinds.forward.reference import reference, visible
from fagen.kinds.forward.shapes import verification_sizes
from fagen.measure import families
from fagen.measure.card import hopper
from fagen.measure.inputs import cell_of, inputs, rows_with_keys, softmax_scale
from fagen.measure.numerics import largest, unit_in_last_place
from fagen.measure.proof import judged
from fagen.problem import Cell, Sizes
from fagen.records import ShapeError
from fagen.registry import plan_of

LSE_TOLERANCE = 1e-3
Kernel = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def check(
    plan: Plan,
    binary: Binary,
    sizes: Iterable[Sizes] | None = None,
    *,
    progress: Callable[[str], None] | None = print,
) -> tuple[ShapeError, ...]:
    """Run the kernel over `sizes` (default: the verification sizes); a line for each.

    Raises VerificationError after the last of them if any broke the rule, DeviceError without a
    Hopper GPU.
    """
    hopper()
    cells = [cell_of(plan, one) for one in (verification_sizes(plan) if sizes is None else sizes)]
    errors = (
        kernel_error(plan, binary.library, cell, *inputs(cell, seed=number))
        for number, cell in enumerate(cells)
    )
    hard = () if sizes is not None else families.SIZES
    library = binary.library
    hard_ones = (
        fp8_accuracy.hard_errors(plan, poisoned8(plan, library), hard, "cuda")
        if has_descales(plan)
        else hard_errors(plan, _poisoned(plan, library), hard)
    )
    return judged(plan, chain(errors, hard_ones), _line, progress)


def simulated(
    plan: Plan, run: Callable[..., None], progress: Callable[[str], None] | None
) -> tuple[ShapeError, ...]:
    """Check a kernel on a CPU, where `run` takes tensors by name; a line for each size.

    Raises VerificationError after the last of them if any broke the rule.
    """
    m, n = plan.block_m, plan.block_n
    sizes = [
        Sizes(1, 1, 1, 1, 1),
        Sizes(1, 2, 1, m + 1, n + 1),
        Sizes(1, 2, 2, m - 1, 3 * n - 5),
        Sizes(2, 2, 1, 2 * m + 9, 2 * n + 3),
        Sizes(1, 2, 2, m + 3, 0),
        Sizes(1, 3, 1, 2 * m + 3, n // 2),
    ]
    if plan.splits:
        # chunks of one block and of two, some of which the first rows or whole tiles do not see
        most = min(plan.chunks, 6)
        sizes += [
            Sizes(1, 4, 2, 5, most * n - 3),
            Sizes(2, 2, 1, m + 9, (plan.chunks + 1) * n + 5 if most < 6 else 5 * n + 1),
            Sizes(1, 1, 1, 3 * m + 1, 3 * m + 2),
        ]

    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = outputs(plan, q)
        run(q=q, k=k, v=v, scale=scale, out=out, lse=lse)
        return out, lse

    def kernel8(given: Operands, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = outputs(plan, given.q)
        run(**given._asdict(), scale=scale, out=out, lse=lse)
        return out, lse

    def error(cell: Cell, *given: Tensor) -> ShapeError:
        if has_descales(plan):
            return fp8_error(plan, cell, kernel8, *given)
        return shape_error(cell, kernel, *given)

    cells = [cell_of(plan, one) for one in sizes]
    errors = (
        error(cell, *inputs(cell, seed=number, device="cpu")) for number, cell in enumerate(cells)
    )
    hard = (
        fp8_accuracy.hard_errors(plan, kernel8, families.SMALL_SIZES, "cpu")
        if has_descales(plan)
        else hard_errors(plan, kernel, families.SMALL_SIZES, "cpu")
    )
    return judged(plan, chain(errors, hard), _line, progress)


def hard_errors(
    plan: Plan, kernel: Kernel, sizes: Iterable[Sizes], device: str = "cuda"
) -> Iterator[ShapeError]:
    """Yield a 16-bit kernel's worst errors of the families of hard scores, at each size."""

    def exact(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return reference(q, k, v, mask=plan.mask.name, scale=scale)

    hard = (*families.PROVED, families.ALONE)
    for one in families.worst(families.errors(plan, kernel, exact, sizes, hard, device)):
        yield ShapeError(
            **vars(one.sizes),
            error=one.error,
            torch_error=0.0,  # torch's scores overflow
            allowed=one.allowed,
            lse_error=one.lse_error,
            lse_allowed=one.lse_allowed,
        )


def kernel_error(
    plan: Plan, library: Path, cell: Cell, q: Tensor, k: Tensor, v: Tensor
) -> ShapeError:
    """The errors of a built kernel on 16-bit tensors, by the rule for its dtype."""
    if has_descales(plan):
        return fp8_error(plan, cell, poisoned8(plan, library), q, k, v)
    return shape_error(cell, _poisoned(plan, library), q, k, v)


def poisoned(binary: Binary) -> Kernel:
    """The 16-bit kernel through its C interface, into outputs full of NaN."""
    return _poisoned(plan_of(binary.slug), binary.library)  # type: ignore[arg-type]


def _poisoned(plan: Plan, library: Path) -> Kernel:
    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        into = outputs(plan, q)
        launch(plan, library, (q, k, v, scale), into)()
        return into

    return kernel


def shape_error(
    cell: Cell, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None
) -> ShapeError:
    """The largest errors of `kernel` on these inputs, against fp64 and beside torch's.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) on a GPU, of any strides that the kernel
    takes; `scale` is 1 / sqrt(D) if left out. An error that is NaN means that an output was not a
    number, or that a masked row was not exactly 0 and minus infinity.
    """
    mask = cell.problem.mask
    scale = softmax_scale(cell.problem.head_dim) if scale is None else scale
    out, lse = kernel(q, k, v, scale)
    seen = rows_with_keys(cell).to(q.device)
    exact, exact_lse = reference(q, k, v, mask=mask, scale=scale)
    beside = torch_math(q, k, v, mask=mask, scale=scale)
    masked_right = bool((out[:, ~seen] == 0).all() and (lse[..., ~seen] == -math.inf).all())
    ours = largest(out[:, seen].double() - exact[:, seen]) if masked_right else math.nan
    torchs = largest(beside[:, seen].double() - exact[:, seen])
    return ShapeError(
        **vars(cell.sizes),
        error=ours,
        torch_error=torchs,
        allowed=2 * torchs + unit_in_last_place(largest(exact), q.dtype),
        lse_error=largest(lse[..., seen].double() - exact_lse[..., seen]),
        lse_allowed=LSE_TOLERANCE,
    )


def torch_math(q: Tensor, k: Tensor, v: Tensor, *, mask: str, scale: float) -> Tensor:
    """torch's SDPA under MATH in the inputs' dtype, (B, Sq, H, Dv), with a mask of vocab's.

    Rows that see no key hold whatever torch puts there. K and V heads are repeated for grouped
    queries; without queries or keys the result is zeros.
    """
    if q.shape[1] == 0 or k.shape[1] == 0:
        return q.new_zeros((*q.shape[:3], v.shape[-1]))
    ratio = q.shape[2] // k.shape[2]
    query = q.transpose(1, 2)
    key, value = (tensor.transpose(1, 2).repeat_interleave(ratio, dim=1) for tensor in (k, v))
    rows = torch.arange(q.shape[1], device=q.device)
    seen = visible(mask, rows, q.shape[1], k.shape[1])
    with sdpa_kernel(SDPBackend.MATH):
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scale
        )
    return out.transpose(1, 2)


def _line(error: ShapeError) -> str:
    sizes = Sizes(error.batch, error.heads, error.kv_heads, error.seqlen_q, error.seqlen_k)
    verdict = "ok" if error.ok else "WRONG"
    return (
        f"  {sizes!s:40} error {error.error:.2e} (allowed {error.allowed:.2e}, torch "
        f"{error.torch_error:.2e})  lse {error.lse_error:.1e}  {verdict}"
    )
