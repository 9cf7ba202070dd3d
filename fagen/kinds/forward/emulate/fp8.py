"""A Plan of e4m3, bytes and descales in, what its kernel computes out: docs/kernel.md in torch.

Sums of products are those of Hopper's tensor cores, to the bit, or, without `hopper_sums`, fp32's.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fagen import tensor_cores
from fagen.combining import combined_partials, with_sink
from fagen.e4m3 import E4M3, by_rows, rows_of, to_e4m3
from fagen.kinds.forward.emulate.rows import heads_of_a_tile, tiles_of
from fagen.kinds.forward.emulate.tiles import LN2, Scores, blocks_of, hidden, outgrown, without_keys
from fagen.kinds.forward.plan import Plan


def emulate_fp8(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    q_descale: Tensor,
    k_descale: Tensor,
    v_descale: Tensor,
    v_mean: Tensor | None = None,
    k_mean: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    hopper_sums: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute attention as the Plan's kernel does.

    q (B, Sq, H, D), k (B, Sk, Hk, D) and v in e4m3, v (B, Sk, Hk, Dv) or, where the Plan has V by
    columns, (B, Hk, Dv, Sk to 16) as `by_columns` makes it; H a multiple of Hk. Descales (B, H or
    Hk, blocks) in fp32, positive, V's (B, Hk, Dv) unless the Plan has them by block; v_mean
    (B, Hk, Dv) and k_mean (B, Hk, D) are what was taken off V and K before they were quantised; a
    size of 1 serves for all. Returns out (B, Sq, H, Dv) in the Plan's out_dtype and the log-sum-exp
    of each row, (B, H, Sq) in fp32: zeros and minus infinity where a row sees no key. Both GEMMs
    are summed up as Hopper does it (fagen.tensor_cores); without `hopper_sums` they are fp32's,
    some hundred times as fast.
    """
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads  # query heads that share one head of K and V
    values = (v if plan.v_rows else by_rows(v, seqlen_k)).permute(0, 2, 1, 3).float()
    out = q.new_zeros(
        batch, seqlen_q, heads, values.shape[-1], dtype=getattr(torch, plan.out_dtype.torch)
    )
    lse = without_keys(q, sinks)
    if out.numel() == 0 or seqlen_k == 0:
        return out, lse

    keys = k.permute(0, 2, 3, 1).float()  # (B, Hk, D, Sk)
    elements = Scores(plan, scale, seqlen_q, seqlen_k, heads)
    scale_log2 = elements.factor * math.log2(math.e)
    # what a key's scores are multiplied by, and what its probability is weighted with
    k_factor = _by_key(k_descale, plan, batch, kv_heads, seqlen_k)
    k_factor = k_factor if plan.score.acts else scale_log2 * k_factor
    weight = torch.ones_like(k_factor)
    if plan.scales.v_by_block:
        weight = _by_key(v_descale, plan, batch, kv_heads, seqlen_k)
    q_factor = rows_of(q_descale.expand(batch, heads, -1), plan.scales.rows, seqlen_q)
    together = heads_of_a_tile(plan, group, seqlen_q)
    heads_by = kv_heads, group // together, together
    q_by, out_by = (x.unflatten(2, heads_by) for x in (q, out))
    factor_by, lse_by = q_factor.transpose(1, 2).unflatten(2, heads_by), lse.unflatten(1, heads_by)

    promote = plan.schedule.softmax.promote  # of parts of columns too, each block's by itself

    def over(
        blocks: Iterator[slice], queries: Tensor, factor: Tensor, row: Tensor, rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of P V over blocks of keys, the row maxima that P is relative to, and sums of P."""
        maximum = factor.new_full(factor.shape, -math.inf)
        row_sum = torch.zeros_like(maximum)
        partial = queries.new_zeros(*queries.shape[:-1], values.shape[-1])
        total = torch.zeros_like(partial)
        for step, block in enumerate(blocks, 1):
            scores = _product(queries, keys[..., block], None, hopper_sums)
            of_block = _factor(plan, factor * k_factor[..., block])
            scores = elements(scores * of_block, block)
            exponents = scores * scale_log2 if plan.score.acts else scores
            exponents = exponents + weight[..., block].log2()
            unseen = hidden(plan, row, block, seqlen_q, seqlen_k)
            exponents = exponents.masked_fill(unseen, -math.inf)

            highest = torch.maximum(maximum, exponents.amax(-1, keepdim=True))
            if plan.softmax.lazy_max:
                guess = torch.exp2(exponents - (maximum - plan.softmax.p_offset))
                keep = ~outgrown(guess, plan, rows)
            else:
                keep = highest - maximum <= plan.softmax.rescale_threshold
            highest = torch.where(keep, maximum, highest)
            # a row that has seen nothing yet: any finite number does, minus infinity gives NaN
            origin = highest.masked_fill(highest == -math.inf, 0.0)
            rescale = torch.exp2(maximum - origin)
            maximum = highest

            p = torch.exp2(exponents - (origin - plan.softmax.p_offset))
            row_sum = row_sum * rescale + (p / weight[..., block]).sum(-1, keepdim=True)
            partial, total = partial * rescale, total * rescale
            rounded = to_e4m3(p).float()
            partial = _product(rounded, values[:, :, block], partial, hopper_sums)
            if promote and step % promote == 0:
                total, partial = total + partial, torch.zeros_like(partial)
        return total + partial, maximum, row_sum

    dim, of_split = values.shape[-1], plan.split_keys(seqlen_k, seqlen_q, batch * heads)
    for rows in tiles_of(plan, together, seqlen_q, q.device):
        top, bottom, count = rows.top, rows.bottom, len(rows.query)
        queries = rows.of(q_by.float()).flatten(2, 3)  # (B, Hk, heads of a group and rows, D)
        factor = rows.of(factor_by).flatten(2, 3)
        row = rows.query.repeat(group // together)[:, None]
        own_head = rows.head.repeat(group // together)[:, None]
        elements.of_rows(row, own_head, kv_heads, together)

        splits = (
            over(
                blocks_of(plan, top, bottom, seqlen_q, seqlen_k, first, first + of_split),
                *(queries, factor, row, count),
            )
            for first in range(0, seqlen_k, of_split)
        )
        if plan.num_splits > 1:
            tile, log_sum = _combined(plan, splits, queries.new_zeros(*queries.shape[:-1], dim))
            log_sum = log_sum[..., None]
        else:
            (total, maximum, row_sum) = next(splits)
            tile = total * torch.where(row_sum == 0, 0.0, 1 / row_sum)
            log_sum = (maximum - plan.softmax.p_offset) * LN2 + torch.log(row_sum)
        empty = log_sum == -math.inf
        if not plan.scales.v_by_block:
            tile = tile * v_descale[:, :, None]
        if v_mean is not None:
            tile = torch.where(empty, tile, tile + v_mean[:, :, None])
        if k_mean is not None:  # which the softmax does not notice
            expanded = k_mean.expand(-1, -1, queries.shape[-1])[..., None]
            log_sum = log_sum + scale * factor * (queries @ expanded)
        if sinks is not None:
            own = sinks.float().unflatten(0, heads_by)[..., rows.head].flatten(1)[..., None]
            log_sum, of_keys = with_sink(log_sum, own)
            tile = tile * of_keys
        of_heads = group // together, count
        rows.put(out_by, tile.to(out.dtype).unflatten(2, of_heads))
        log_sums = log_sum[..., 0].unflatten(2, of_heads)[..., rows.real]
        lse_by[..., rows.head[rows.real], rows.query[rows.real]] = log_sums
    return out, lse


def _combined(
    plan: Plan, splits: Iterator[tuple[Tensor, Tensor, Tensor]], like: Tensor
) -> tuple[Tensor, Tensor]:
    """Combine what splits of the keys give, each relative to its row maxima themselves."""
    factor = 2.0**-plan.softmax.p_offset
    shares = (
        (total * factor, maximum[..., 0], row_sum[..., 0] * factor)
        for total, maximum, row_sum in splits
    )
    return combined_partials(shares, like, LN2)


def _factor(plan: Plan, factor: Tensor) -> Tensor:
    """Return it in so few bits, where it is large, that its products with scores are exact."""
    if not plan.scores_by_block:
        return factor
    cut = (factor.view(torch.int32) & -(1 << plan.softmax.score_bits)).view(torch.float32)
    return torch.where(factor < plan.softmax.far_scale, factor, cut)


def _by_key(descale: Tensor, plan: Plan, batch: int, heads: int, length: int) -> Tensor:
    """Return a descale for each key: (B, Hk, 1, length)."""
    return rows_of(descale.expand(batch, heads, -1), plan.scales.rows, length).transpose(-1, -2)


def _product(a: Tensor, b: Tensor, onto: Tensor | None, hopper_sums: bool) -> Tensor:
    """Return a (…, m, k) times b (…, k, n), added onto what is there."""
    if hopper_sums:
        return tensor_cores.product(a, b, E4M3, onto)
    product = a @ b
    return product if onto is None else onto + product
