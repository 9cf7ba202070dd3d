"""A Plan and tensors in, what its kernels compute out: their tiles and roundings, in torch.

Works on any device. dQ is a sum over blocks of keys, which the kernel adds up in any order: here it
is that of the keys.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fagen.combining import LOG2_E
from fagen.kinds.attention import scale_log2
from fagen.kinds.backward.plan import Plan
from fagen.kinds.scores import factors
from fagen.problem import sequences


def compute(
    plan: Plan,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    dlse: Tensor | None = None,
    sinks: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, ...]:
    """Return dq, dk and dv as the Plan's kernels compute them; arguments as of their op.

    With sinks (H,) their gradient comes last.

    dout and out (B, Sq, H, Dv), q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) in the Plan's
    dtype, lse and dlse (B, H, Sq) in fp32; varlen sequences as of `compute_varlen`. What a mask or
    a score is given goes by name.
    """
    plan = replace(plan, score=plan.score.bound(plan.score.taken(more)))
    given, tensors = plan.mask.taken(more), (dout, q, k, v, out, lse)
    if plan.varlen:
        return compute_varlen(plan, *tensors, scale, dlse, sinks, given=given, **more)
    if not plan.mask.tables:
        return _dense(replace(plan, mask=plan.mask.bound(given)), *tensors, scale, dlse, sinks)
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    of_sinks = torch.zeros(q.shape[2], device=q.device)
    for number in range(len(q)):
        one, score = slice(number, number + 1), plan.score.of_sequence(number)
        own = replace(plan, mask=plan.mask.bound(given, number), score=score)
        own_dlse = None if dlse is None else dlse[one]
        rows = dout[one], q[one], k[one], v[one], out[one]
        parts = _dense(own, *rows, lse[one], scale, own_dlse, sinks)
        for whole, part in zip(found, parts[:3], strict=True):
            whole[one] = part
        of_sinks += sum(part.float() for part in parts[3:])
    return (*found,) if sinks is None else (*found, of_sinks.to(sinks.dtype))


def _dense(
    plan: Plan,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    dlse: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, ...]:
    """The same of sequences of one length, whose mask and score know what they are given."""
    score = plan.score
    before, after = factors(score, scale)
    seqlen_q, seqlen_k, kv_heads = q.shape[1], k.shape[1], k.shape[2]
    group = q.shape[2] // max(1, kv_heads)
    queries, grad, output = (x.transpose(1, 2).float() for x in (q, dout, out))
    keys, values = (x.transpose(1, 2).float().repeat_interleave(group, 1) for x in (k, v))
    delta = (grad * output).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    # infinity in a row that sees no key: its P is 0
    reference = torch.where(lse == -math.inf, math.inf, lse * LOG2_E)
    delta = delta.masked_fill(lse == -math.inf, 0)

    factor = before * after if score.acts else after
    dq = torch.zeros_like(queries)
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    row = torch.arange(seqlen_q, device=q.device)[:, None]
    for left in range(0, seqlen_k if seqlen_q else 0, plan.block_n):
        block = slice(left, min(left + plan.block_n, seqlen_k))
        key = torch.arange(block.start, block.stop, device=q.device)
        scores = queries @ keys[:, :, block].mT
        seen = plan.mask.sees(row, key, seqlen_q, seqlen_k)
        if score.acts:
            names = _names(row, key, seqlen_q, seqlen_k, q.shape[2], group)
            scores, slope = score.core_and_slope(scores * before, **names)
            p = torch.exp2(scores * scale_log2(after) - reference[..., None]).masked_fill(~seen, 0)
            change = torch.where(p == 0, 0, p * slope)
            change = change if plan.slopes_fit else change.to(q.dtype).float()
        else:
            p = torch.exp2(scores * scale_log2(after) - reference[..., None]).masked_fill(~seen, 0)
            # P reaches who makes dS in 16 bits
            change = p.to(q.dtype).float() if plan.partition == "gradients" else p
        ds = change * (grad @ values[:, :, block].mT - delta[..., None])
        # what the tensor cores read next is rounded
        p, ds = (x.to(q.dtype).float() for x in (p, ds))
        dv[:, :, block] = p.mT @ grad
        dk[:, :, block] = ds.mT @ queries * factor
        dq += ds @ keys[:, :, block]

    def grouped(x: Tensor) -> Tensor:
        return x.unflatten(1, (kv_heads, group)).sum(2).transpose(1, 2).to(q.dtype).contiguous()

    dq = (dq * factor).transpose(1, 2).to(q.dtype).contiguous()
    if sinks is None:
        return dq, grouped(dk), grouped(dv)
    return dq, grouped(dk), grouped(dv), _of_sinks(lse, delta, sinks)


def _of_sinks(lse: Tensor, delta: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of sinks: what each has of a row's weight, times the row's -delta, summed up."""
    own = sinks.float()[:, None]
    weight = torch.where(own == lse, 1, torch.exp2((own - lse) * LOG2_E))
    return -torch.where(lse == -math.inf, 0, weight * delta).sum((0, 2)).to(sinks.dtype)


def _names(
    row: Tensor, key: Tensor, seqlen_q: int, seqlen_k: int, heads: int, group: int
) -> dict[str, Any]:
    """What scores call a block's keys, and who has them."""
    kv_head = (torch.arange(heads, device=key.device) // group)[:, None, None]
    lengths = {"len_q": seqlen_q, "len_k": seqlen_k}
    return {"q_idx": row, "k_idx": key, "kv_head": kv_head, "heads": heads, **lengths}


def compute_varlen(
    plan: Plan,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    dlse: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None = None,
    given: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Tensor, ...]:
    """Return dq, dk and dv of varlen sequences, each computed by itself; zeros in rows of none.

    dout and out (total_q, H, Dv), q (total_q, H, D), k (total_k, Hk, D), v (total_k, Hk, Dv), lse
    and dlse (H, total_q); where sequences begin, and the last one ends, (B + 1), and how many keys
    of each count, (B), in int32. Lengths that lead out of the tensors are cut off.
    """
    mask = plan.mask
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dsinks = torch.zeros(q.shape[1], device=q.device)
    slices = sequences(cu_seqlens_q, cu_seqlens_k, seqused_k, len(q), len(k))
    for number, (of_q, of_k) in enumerate(slices):
        by_row = {name: {number: given[name][of_q]} for name in mask.row_tables}
        own_mask, score = mask.bound({**given, **by_row}, number), plan.score.of_sequence(number)
        dense = replace(plan, varlen=False, mask=own_mask, score=score)
        rows = dout[None, of_q], q[None, of_q], k[None, of_k], v[None, of_k], out[None, of_q]
        own = None if dlse is None else dlse[None, :, of_q]
        gradients = _dense(dense, *rows, lse[None, :, of_q], scale, own, sinks)
        dq[of_q], dk[of_k], dv[of_k] = (x[0] for x in gradients[:3])
        dsinks += sum(x.float() for x in gradients[3:])
    return (dq, dk, dv) if sinks is None else (dq, dk, dv, dsinks.to(sinks.dtype))
