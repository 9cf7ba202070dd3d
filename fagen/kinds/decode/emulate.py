"""A Plan and tensors in, what its kernels compute out: their splits and roundings, in torch.

Works on any device, and reads lengths there.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fagen.combining import combined_partials
from fagen.kinds.attention import scale_log2
from fagen.kinds.decode.oracle import spans
from fagen.kinds.decode.pages import gathered
from fagen.kinds.decode.plan import Plan
from fagen.kinds.scores import factors


def compute(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    reference: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, Tensor]:
    """Return out and lse as the Plan's kernels compute them; arguments as of their op.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) in the Plan's dtype, seqused_k and
    leftpad_k (B) in int32, of a unified maximum reference (H) in fp32; out (B, Sq, H, Dv), lse
    (B, H, Sq) in fp32. What is `given` more the mask takes, and sinks (H). Keys before those that
    the first query sees are left out before the others are parted. In pages k and v are those of
    a block_table (B, entries).
    """
    plan = replace(plan, score=plan.score.bound(plan.score.taken(given)))
    sink = given.pop("sinks")[:, None] if plan.sink else None
    if plan.paged:
        table, used = given.pop("block_table"), seqused_k
        assert used is not None
        k, v = (gathered(x, table, used) for x in (k, v))
    given, unbound = plan.mask.taken(given), plan.mask
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_empty(batch, seqlen_q, heads, v.shape[3])
    lse = q.new_empty(batch, heads, seqlen_q, dtype=torch.float32)
    group = heads // max(1, k.shape[2])
    product_scale, scale = factors(plan.score, scale)
    for number, (first, last) in enumerate(spans(k, seqused_k, leftpad_k)):
        mask, length = unbound.bound(given, number), last - first
        skipped = min(max(0, int(mask.keys(0, seqlen_q, length)[0])), length) if given else 0
        plan, first = replace(plan, mask=mask), first + skipped
        queries = q[number].transpose(0, 1).float()
        keys, values = (
            x[number, first:last].transpose(0, 1).float().repeat_interleave(group, 0)
            for x in (k, v)
        )
        like = queries.new_empty(heads, seqlen_q, v.shape[3])
        score = partial(_core, plan, product_scale, group, number, length, seqlen_q)
        splits = _splits(plan, group, queries, keys, values, scale, reference, skipped, score)
        output, own = combined_partials(splits, like, scale, sink)
        out[number], lse[number] = output.transpose(0, 1).to(q.dtype), own
    return out, lse


def _core(
    plan: Plan,
    product_scale: float,
    group: int,
    batch: int,
    length: int,
    seqlen_q: int,
    products: Tensor,
    key: Tensor,
) -> Tensor:
    """Return what products (H, Sq, keys) of a sequence become, but for a factor of all."""
    if not plan.score.acts:
        return products
    head = torch.arange(len(products), device=key.device)[:, None, None]
    row = torch.arange(seqlen_q, device=key.device)[:, None]
    where = {"q_idx": row, "k_idx": key, "len_q": seqlen_q, "len_k": length, "batch": batch}
    heads = {"head": head, "kv_head": head // group, "heads": len(products)}
    core: Tensor = plan.score.core(products * product_scale, **where, **heads)
    return core


def _splits(
    plan: Plan,
    group: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    unified_reference: Tensor | None,
    skipped: int,
    score: Callable[[Tensor, Tensor], Tensor],
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each split's sums of P V (H, Sq, Dv), its references and sums of P (H, Sq)."""
    length = keys.shape[1]
    step = plan.split_keys(length, group)
    log2 = scale_log2(scale)
    for first in range(0, length, step or 1):
        last = min(first + step, length)
        reference = queries.new_full(queries.shape[:2], -math.inf)
        of_split = plan, queries, keys, values, log2, first, last
        *split, _ = _split(*of_split, reference, skipped, score)
        if unified_reference is not None:
            inverse = 1 / torch.tensor(scale, dtype=torch.float32, device=unified_reference.device)
            reference = (unified_reference * inverse)[:, None].expand(queries.shape[:2])
            *unified, fails = _split(*of_split, reference, skipped, score)
            split = [
                torch.where(fails.view(*fails.shape, *(1,) * (own.ndim - 2)), own, other)
                for own, other in zip(split, unified, strict=True)
            ]
        yield split[0], split[1], split[2]


def _split(
    plan: Plan,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log2: float,
    first: int,
    last: int,
    reference: Tensor,
    skipped: int,
    score: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One of them, and which rows have less of P than a given reference may leave."""
    seqlen_q, length = queries.shape[1], keys.shape[1]
    row = torch.arange(seqlen_q, device=keys.device)[:, None]
    total = queries.new_zeros(*queries.shape[:2], values.shape[2])
    summed = torch.zeros_like(reference)
    key_counts = 0
    for left in range(first, last, plan.block_n):
        block = slice(left, min(left + plan.block_n, last))
        key = torch.arange(block.start, block.stop, device=keys.device)
        scores = (queries.double() @ keys[:, block].mT.double()).float()  # rounded once
        visible = plan.mask.sees(row, key + skipped, seqlen_q, length + skipped)
        key_counts = key_counts + visible.sum(-1)
        scores = score(scores, key + skipped).masked_fill(~visible, -math.inf)
        # subtracted before they are scaled: exact where it matters, however large scores are
        grown = scores.amax(-1)
        outgrown = (grown - reference) * log2 > plan.rescale_threshold
        factor = torch.where(outgrown, torch.exp2((reference - grown) * log2), 1)
        reference = torch.where(outgrown, grown, reference)
        offset = reference.masked_fill(reference == -math.inf, 0)
        p = torch.exp2((scores - offset[..., None]) * log2)
        summed = summed * factor + p.sum(-1)
        # what the tensor cores read next is rounded
        p = p.to(getattr(torch, plan.dtype.torch)).float()
        total = total * factor[..., None] + p @ values[:, block]
    fails = ~(summed >= plan.least_mean * key_counts)
    return total, reference, summed, fails
