"""Varlen sequences, also in e4m3 with descales of their own, and what their attention is."""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fagen import registry, simulator
from fagen.e4m3 import to_e4m3
from fagen.kind import load_named
from fagen.kinds.backward.oracle import gradients
from fagen.kinds.forward import Schedule
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.plan import Plan, plan
from fagen.kinds.forward.verify.varlen import case_error
from fagen.measure.sequences import Case, Tiled
from fagen.vocab import MASKS
from tests.tensors import normal

# the smallest; O through V's space; two buffers of Q; no mask by rows; columns that are padded; in
# e4m3 also sums that are promoted
VARLEN = (
    "fwd_fp16_d64_causal_m64n64_varlen",
    "fwd_bf16_d64_causal_m128n48_varlen_q2_reusev",
    "fwd_fp16_d48v32_full_m64n80_varlen_s3_q2",
    "fwd_e4m3_d64_causal_m64n64_varlen",
    "fwd_e4m3_d64_causal_m128n32_varlen_q2_reusev",
    "fwd_e4m3_d80v48_full_m64n96_varlen_ofp16_s3_pm2",
)
# the smallest; two warpgroups of keys, of which one may see none; by gradients; additions in order;
# dQ by one
VARLEN_GRADIENTS = (
    "bwd_fp16_d16_causal_m64n64_varlen",
    "bwd_bf16_d64_causal_m64n128_varlen",
    "bwd_fp16_d72v136_full_m64n64_varlen_dss1",
    "bwd_fp16_d32_full_m64n64_varlen_det",
    "bwd_bf16_d48_causal_m64n128_varlen_s1",
)

LENGTHS = ((5, 5), (0, 7), (40, 40), (3, 0), (1, 130), (70, 33))  # of queries and of keys


@cache
def planned(slug: str) -> Plan:
    """The Plan of a forward kernel."""
    return plan(Schedule.from_slug(slug))


def emulated(plan: Any) -> Callable[..., None]:
    """A kernel that is right, of any kind: it is called with inputs and results by name."""
    compute = load_named(registry.kind(plan.kind).emulate)
    names = [tensor.name for tensor in plan.signature.outputs]

    def run(**call: Any) -> None:
        results = [call.pop(name) for name in names]
        for result, numbers in zip(results, compute(plan, **call), strict=True):
            result.copy_(numbers)

    return run


def is_right(slug: str, library: Path, case: Case, seed: int) -> bool:
    """Whether a kernel on the simulated GPU, whatever `seed` lets happen when, is near fp64."""
    run = partial(simulator.call, planned(slug), library, seed=seed)
    return case_error(planned(slug), run, case, seed=seed, device="cpu").ok


def offsets(lengths: Sequence[int], begin: int = 0) -> Tensor:
    """Where sequences begin, and where the last one ends."""
    return torch.tensor(list(accumulate(lengths, initial=begin)), dtype=torch.int32)


def packed(
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    dtype: torch.dtype = torch.float16,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    gap: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q of 4 heads, k and v of 2, and both offsets, with `gap` rows before and behind them all."""
    queries, keys = zip(*lengths, strict=True)
    rows, columns = sum(queries) + 2 * gap, sum(keys) + 2 * gap
    return (
        normal(rows, 4, head_dim, dtype=dtype),
        normal(columns, 2, head_dim, seed=1, dtype=dtype),
        normal(columns, 2, head_dim_v or head_dim, seed=2, dtype=dtype),
        offsets(queries, gap),
        offsets(keys, gap),
    )


def extreme_cases(plan: Tiled) -> tuple[Case, ...]:
    """1, 3, 6 and 8 heads a group, of sequences each of another ratio of rows and keys.

    Of three tiles and more, of more rows than keys, some of which see none, of far more keys.
    """
    m, n = plan.block_m, plan.block_n
    lengths = (
        *((3 * m + 5, 2 * n + 3), (5 * m, n // 2 - 1), (3, 3 * n + 1)),
        *((m + 1, n + 1), (m - 1, n + 9), (m + 9, n - 1)),
    )
    return tuple(Case(lengths, heads, 1, gap=2, poisoned=heads == 6) for heads in (1, 3, 6, 8))


def exact(
    q: Tensor, k: Tensor, v: Tensor, at_q: Tensor, at_k: Tensor, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Out and log-sum-exp in fp64, sequence by sequence; NaN in rows of none."""
    out = q.new_full((*q.shape[:2], v.shape[2]), math.nan, dtype=torch.float64)
    lse = q.new_full((q.shape[1], q.shape[0]), math.nan, dtype=torch.float64)
    mask = "causal" if causal else "full"
    for (top, bottom), (first, last) in zip(
        pairwise(at_q.tolist()), pairwise(at_k.tolist()), strict=True
    ):
        own = q[None, top:bottom], k[None, first:last], v[None, first:last]
        results = reference(*own, mask=mask, scale=q.shape[2] ** -0.5)
        out[top:bottom], lse[:, top:bottom] = results[0][0], results[1][0]
    return out, lse


def exact_passes(
    tensors: Sequence[Tensor],
    offsets: Sequence[Tensor],
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    causal: bool = False,
    used_q: Sequence[int] | None = None,
    used_k: Sequence[int] | None = None,
) -> tuple[Tensor, ...]:
    """Out, log-sum-exp and the gradients of q, k and v in fp64, sequence by sequence.

    Rows of no sequence, or behind the used ones, have zeros, and a log-sum-exp of minus infinity.
    """
    q, k, v = (x.detach() for x in tensors)
    out = q.new_zeros((*q.shape[:2], v.shape[2]), dtype=torch.float64)
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64)
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v))
    spans = []
    for at, used in zip(offsets, (used_q, used_k), strict=True):
        both = list(pairwise(at.tolist()))
        counts = used or [end - begin for begin, end in both]
        spans.append([slice(b, min(e, b + n)) for (b, e), n in zip(both, counts, strict=True)])
    mask, scale = MASKS["causal" if causal else "full"], q.shape[2] ** -0.5
    for rows, keys in zip(*spans, strict=True):
        own_tensors = dout[None, rows], q[None, rows], k[None, keys], v[None, keys]
        own = None if dlse is None else dlse[None, :, rows]
        results = gradients(*own_tensors, mask=mask, scale=scale, dlse=own)
        out[rows], lse[:, rows], dq[rows], dk[keys], dv[keys] = (x[0] for x in results)
    return out, lse, dq, dk, dv


# ---- in e4m3 ------------------------------------------------------------------------------------

E4M3 = torch.float8_e4m3fn


class Packed8(NamedTuple):
    """What the call takes, without and with names, and q, k and v that it means."""

    tensors: tuple[Tensor, ...]  # q, k, v and both offsets
    named: dict[str, Any]
    real: tuple[Tensor, Tensor, Tensor]

    def exact(self, *, causal: bool = False) -> tuple[Tensor, Tensor]:
        """Out and log-sum-exp in fp64."""
        return exact(*self.real, *self.tensors[3:], causal=causal)


def packed8(
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    *,
    by_column: bool = False,
    gap: int = 0,
) -> Packed8:
    """q of 4 heads, k and v of 2; descales differ fourfold from sequence to sequence.

    With `by_column` V has one for each column, and K and V a mean.
    """
    *qkv, at_q, at_k = packed(lengths, torch.float32, head_dim, head_dim_v, gap)
    batch, columns_v = len(lengths), head_dim_v or head_dim
    scale = 2.0 ** -(4 + torch.arange(batch) % 3 * 2.0)[:, None]  # each of them exact
    descales = [
        scale * (1 + torch.arange(heads) / 8)[None] if name != "v" else scale.expand(batch, heads)
        for name, heads in (("q", 4), ("k", 2), ("v", 2))
    ]
    means: dict[str, Tensor] = {}
    if by_column:
        descales[2] = descales[2][..., None] * (1 + torch.arange(columns_v) / columns_v)
        means["v_mean"] = torch.linspace(-1, 1, batch * 2 * columns_v).view(batch, 2, columns_v)
        means["k_mean"] = torch.linspace(1, -1, batch * 2 * head_dim).view(batch, 2, head_dim)
    bytes_, real = [], []
    for name, x, descale, at in zip("qkv", qkv, descales, (at_q, at_k, at_k), strict=True):
        values, meant = torch.zeros(x.shape).to(E4M3), torch.zeros(x.shape)
        for number, (begin, end) in enumerate(pairwise(at.tolist())):
            own = descale[number] if descale.dim() == 3 else descale[number][:, None]
            values[begin:end] = to_e4m3(x[begin:end] / own)
            meant[begin:end] = values[begin:end].float() * own
            if f"{name}_mean" in means:
                meant[begin:end] += means[f"{name}_mean"][number]
        bytes_.append(values)
        real.append(meant)
    names = ("q_descale", "k_descale", "v_descale")
    named = {**dict(zip(names, descales, strict=True)), **means}
    return Packed8((*bytes_, at_q, at_k), named, (real[0], real[1], real[2]))


def far(out: Tensor, exact: Tensor) -> float:
    """The root mean square of a difference, relative to what is right."""
    difference = out.double() - exact
    return float(difference.square().mean().sqrt() / exact.square().mean().sqrt())
