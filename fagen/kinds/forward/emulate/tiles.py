"""A Plan and 16-bit tensors in, what its kernel computes out: its tiles, order and roundings."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fagen import tensor_cores
from fagen.arch import SM90
from fagen.combining import combined_partials, with_sink
from fagen.e4m3 import to_e4m3
from fagen.kinds.attention import scale_log2
from fagen.kinds.forward.emulate.rows import heads_of_a_tile, tiles_of
from fagen.kinds.forward.plan import Plan
from fagen.kinds.scores import factors

LN2 = math.log(2)
_WARP_ROWS = 16  # of a warpgroup's 64
_WARPGROUP_ROWS = 64


def emulate(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    sinks: Tensor | None = None,
    hopper_sums: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute attention as the Plan's kernel does.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) in the Plan's dtype, with any strides, H a
    multiple of Hk; scale positive, its product with log2 e finite in fp32. Returns out (B, Sq, H,
    Dv) in that dtype and the log-sum-exp of each row, (B, H, Sq) in fp32: zeros and minus infinity
    where a row sees no key. Of `sinks` (H,) each is one more logit of its head's rows, without a
    value: all that a row without a key has. With `hopper_sums` PV is summed up as Hopper does it
    (fagen.tensor_cores), which takes a thousand times as long. What is wrong with the arguments is
    fagen.runtime.checks's to say.
    """
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    out = q.new_zeros(batch, seqlen_q, heads, v.shape[-1])
    lse = without_keys(q, sinks)
    if out.numel() == 0 or seqlen_k == 0:
        return out, lse

    group = heads // kv_heads  # query heads that share one head of K and V
    keys = k.permute(0, 2, 3, 1).float()  # (B, Hk, D, Sk)
    values = v.permute(0, 2, 1, 3).float()  # (B, Hk, Sk, Dv)
    together = heads_of_a_tile(plan, group, seqlen_q)
    scores = Scores(plan, scale, seqlen_q, seqlen_k, heads)
    factor = scores.factor
    heads_by = kv_heads, group // together, together
    q_by, out_by = (x.unflatten(2, heads_by) for x in (q, out))
    lse_by = lse.unflatten(1, heads_by)

    for rows in tiles_of(plan, together, seqlen_q, q.device):
        top, bottom, count = rows.top, rows.bottom, len(rows.query)
        queries = rows.of(q_by).float().flatten(2, 3)  # (B, Hk, heads of a group and rows, D)
        row = rows.query.repeat(group // together)[:, None]
        scores.of_rows(row, rows.head.repeat(group // together)[:, None], kv_heads, together)

        sink = None
        if sinks is not None:
            sink = sinks.float().unflatten(0, heads_by)[..., rows.head].flatten(1)  # (Hk, rows)
        step = plan.split_keys(seqlen_k, seqlen_q, batch * heads)
        splits = []
        for first in range(0, seqlen_k, step):
            blocks = blocks_of(plan, top, bottom, seqlen_q, seqlen_k, first, first + step)
            hidden_keys = (
                (block, hidden(plan, row, block, seqlen_q, seqlen_k)) for block in blocks
            )
            softmax = _OnlineSoftmax(queries, factor, plan, count)
            if sink is not None and plan.softmax.begins_with_sink:
                softmax.begin_with(sink[..., None])
            total = _weighted(softmax, queries, keys, values, hidden_keys, scores, hopper_sums)
            splits.append((total, softmax))
        if plan.num_splits > 1:
            shares = ((total * softmax.unrounded(), *softmax.share()) for total, softmax in splits)
            output, log_sum = combined_partials(shares, total, factor, sink)
            empty = torch.stack([softmax.sum.squeeze(-1) == 0 for _, softmax in splits]).all(0)
        else:
            inverse, log_sum, empty = (x.squeeze(-1) for x in softmax.finish())
            if plan.softmax.begins_with_sink:
                log_sum, of_keys = torch.where(empty, sink, log_sum), None
            else:
                log_sum, of_keys = with_sink(log_sum, sink)
            inverse = inverse if of_keys is None else inverse * of_keys
            output = total * inverse[..., None]
        if plan.softmax.largest_output:  # P was rounded, its sum was not
            limited = output.clamp(-plan.softmax.largest_output, plan.softmax.largest_output)
            output = torch.where(output.isfinite(), limited, output)
        # a row that sees no key, even beside a V that is not finite
        output = output.masked_fill(empty[..., None] & ~output.isfinite(), 0.0)
        of_heads = group // together, count
        rows.put(out_by, output.to(q.dtype).unflatten(2, of_heads))
        log_sums = log_sum.unflatten(2, of_heads)[..., rows.real]
        lse_by[..., rows.head[rows.real], rows.query[rows.real]] = log_sums
    return out, lse


def without_keys(q: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the log-sum-exps of the rows of q (B, Sq, H, D), or (total, H, D), without keys."""
    *batch, seqlen_q, heads, _ = q.shape
    lse = q.new_full((*batch, heads, seqlen_q), -math.inf, dtype=torch.float32)
    if sinks is not None:
        lse[:] = sinks.float()[:, None]
    return lse


def _weighted(
    softmax: "_OnlineSoftmax",
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Iterator[tuple[slice, Tensor]],
    scores: "Scores",
    hopper_sums: bool,
) -> Tensor:
    """Return the sums of P V over blocks, each with the keys that are not seen.

    queries (B, Hk, rows, D), keys (B, Hk, D, Sk), values (B, Hk, Sk, Dv): (B, Hk, rows, Dv) in
    fp32. What P is relative to, and its sums, `softmax` knows.
    """
    plan, element = softmax.plan, getattr(torch, softmax.plan.dtype.torch)
    partial = queries.new_zeros(*queries.shape[:-1], values.shape[-1])
    total = torch.zeros_like(partial)
    for step, (block, unseen) in enumerate(blocks, 1):
        s = scores(queries @ keys[..., block], block)
        p, rescale = softmax.step(s.masked_fill(unseen, -math.inf), unseen)
        # what the tensor cores read is rounded; row sums that threads add up saw p before
        rounded = p.to(element).float()
        softmax.add(rounded if plan.softmax.sum_by_tensor else p, rescale)
        partial, total = partial * rescale, total * rescale
        if hopper_sums:
            partial = tensor_cores.product(rounded, values[:, :, block], element, partial)
        else:
            partial = partial + rounded @ values[:, :, block]
        if plan.softmax.promote and step % plan.softmax.promote == 0:
            total, partial = total + partial, torch.zeros_like(partial)
    return total + partial


class Scores:
    """What products of a call become, but for a factor of all; see fagen.scores.

    By torch's functions: a kernel's are faster, and a little off (arch.SCORE_OPERATIONS).
    """

    def __init__(self, plan: Plan, scale: float, seqlen_q: int, seqlen_k: int, heads: int) -> None:
        self.score = plan.score
        self.product_scale, self.factor = factors(plan.score, scale)
        self.names: dict[str, Any] = {"len_q": seqlen_q, "len_k": seqlen_k, "heads": heads}

    def of_rows(self, row: Tensor, own_head: Tensor, kv_heads: int, together: int) -> None:
        """Go on to a tile of these queries (rows, 1), each of one of the heads that share it."""
        group = self.names["heads"] // kv_heads
        kv_head = torch.arange(kv_heads, device=row.device)[:, None, None]
        of_group = torch.arange(group // together, device=row.device) * together
        shared = of_group.repeat_interleave(len(row) * together // group)[:, None] + own_head
        self.names |= {"q_idx": row, "kv_head": kv_head, "head": kv_head * group + shared}

    def __call__(self, products: Tensor, block: slice) -> Tensor:
        """Return it of (B, Hk, rows, keys of a block)."""
        if not self.score.acts:
            return products
        key = torch.arange(block.start, block.stop, device=products.device)
        batch = torch.arange(len(products), device=products.device).view(-1, 1, 1, 1)
        named = {"batch": batch} | self.names | {"k_idx": key}
        scores: Tensor = self.score.core(products * self.product_scale, **named)
        return scores


def blocks_of(
    plan: Plan,
    top: int,
    bottom: int,
    seqlen_q: int,
    seqlen_k: int,
    from_key: int = 0,
    to_key: float = math.inf,
) -> Iterator[slice]:
    """Yield the blocks of keys that the rows top … bottom - 1 see, the last one first.

    Of a split those from `from_key`, where a block begins, up to `to_key`, where another does.
    """
    first = max(0, plan.mask.keys(top, seqlen_q, seqlen_k)[0]) // plan.block_n * plan.block_n
    last = min(seqlen_k, plan.mask.keys(bottom - 1, seqlen_q, seqlen_k)[1])
    first, last = max(first, from_key), int(min(last, to_key))
    for left in reversed(range(first, last, plan.block_n)):
        yield slice(left, min(left + plan.block_n, seqlen_k))


def hidden(plan: Plan, row: Tensor, block: slice, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Tell which keys of a block (columns) the rows (rows, 1) do not see."""
    key = torch.arange(block.start, block.stop, device=row.device)
    unseen: Tensor = ~plan.mask.sees(row, key, seqlen_q, seqlen_k).expand(len(row), len(key))
    return unseen


def outgrown(p: Tensor, plan: Plan, rows_of_a_head: int) -> Tensor:
    """Tell whose lazy row max is raised after a guess at p (…, rows, columns) of a block.

    p is relative to the maximum so far, so infinite in a row that has seen nothing. The rows
    of a tile come head by head; the result is (…, rows, 1). A lane adds up two columns of each 8;
    where P saturates it looks for e4m3's largest number instead. What one lane of a warp finds too
    large raises all of its 16 rows.
    """
    if not plan.softmax.max_partial_sum:
        large = ~(to_e4m3(p).float() < SM90.e4m3_max).all(-1)  # NaN is too large as well
    else:
        large = ~(_by_lanes(p, plan) <= plan.softmax.max_partial_sum).all(-1)
    return _shared(large.unsqueeze(-1), rows_of_a_head, _any_row)


def spread(
    p: Tensor, key_counts: Tensor, plan: Plan, rows_of_a_head: int, begun: Tensor | None = None
) -> Tensor:
    """Tell of which rows the scores of their first block are widely spread: (…, rows, 1).

    p (…, rows, columns) is relative to that block's maximum, of whose keys a row sees `key_counts`
    (…, rows, 1). A warpgroup's rows are, if in enough of its warps, in enough threads, the shares
    of both rows add up to little, and not because most warps' first rows see few keys. Rows past
    the end of the sequence have scores of 0, and thus a lot; they see what the last row sees.
    Each thread's sums may have `begun` (…, rows, 1) with a share of the row's sink.
    """
    missing = -rows_of_a_head % _WARPGROUP_ROWS
    lanes = _by_lanes(p, plan) if begun is None else _by_lanes(p, plan) + begun
    lanes = lanes.unflatten(-2, (-1, rows_of_a_head))
    lanes = torch.nn.functional.pad(lanes, (0, 0, 0, missing), value=math.inf)
    warps = lanes.unflatten(-2, (-1, 4, 2, _WARP_ROWS // 2)).sum(-3)  # (…, warpgroups, 4, 8, 4)
    light = (warps < plan.softmax.spread_sum).sum((-1, -2)) > plan.softmax.spread_threads
    keys = key_counts.squeeze(-1).unflatten(-1, (-1, rows_of_a_head))
    keys = torch.cat([keys, keys[..., -1:].expand(*keys.shape[:-1], missing)], -1)
    many = keys[..., ::_WARP_ROWS].unflatten(-1, (-1, 4)) >= plan.softmax.spread_keys
    most = (light.sum(-1, keepdim=True) >= plan.softmax.spread_warps) & (
        many.sum(-1, keepdim=True) >= plan.softmax.spread_seeing
    )
    rows = most.expand(*most.shape[:-1], _WARPGROUP_ROWS).flatten(-2)
    return rows[..., :rows_of_a_head].flatten(-2).unsqueeze(-1)


def _by_lanes(p: Tensor, plan: Plan) -> Tensor:
    """Return what four lanes add up of each row of p (…, rows, columns): (…, rows, 4)."""
    filled = torch.nn.functional.pad(p, (0, plan.block_n - p.shape[-1]))
    return filled.unflatten(-1, (-1, 4, 2)).sum((-1, -3))


def _any_row(rows: Tensor) -> Tensor:
    return rows.any(-1, keepdim=True)


def _shared(
    row_flags: Tensor,
    rows_of_a_head: int,
    reduce: Callable[[Tensor], Tensor],
    together: int = _WARP_ROWS,
) -> Tensor:
    """Return what rows have (…, rows, 1) after `reduce` took so many `together`."""
    heads = row_flags.squeeze(-1).unflatten(-1, (-1, rows_of_a_head))
    groups = torch.nn.functional.pad(heads, (0, -rows_of_a_head % together))
    groups = groups.unflatten(-1, (-1, together))
    rows = reduce(groups).expand_as(groups).flatten(-2)[..., :rows_of_a_head]
    return rows.flatten(-2).unsqueeze(-1)


class _OnlineSoftmax:
    """The maximum and sum of rows of scores (..., rows, columns) that arrive block by block.

    Exponents of 2 are a row's scores times `scale_log2` less its reference, by fused
    multiplication and addition. The reference is the row max times `scale_log2`, rounded. Of the
    two rows of a thread that has met one that is `far`, the row max is subtracted first.
    """

    def __init__(self, rows: Tensor, scale: float, plan: Plan, rows_of_a_head: int) -> None:
        self.scale = scale
        self.scale_log2 = scale_log2(scale)  # exp2 is the instruction that there is
        self.plan = plan
        self.rows_of_a_head = rows_of_a_head
        self.maximum = rows.new_full((*rows.shape[:-1], 1), plan.softmax.no_score)
        self.far = torch.zeros_like(self.maximum, dtype=torch.bool)
        self.blocks = torch.zeros_like(self.maximum, dtype=torch.int32)  # visited
        self.spread = torch.zeros_like(self.far)
        self.sum = torch.zeros_like(self.maximum)
        self.begun = False  # with sinks

    def begin_with(self, sink: Tensor) -> None:
        """Take the sinks of rows (Hk, rows, 1), scores without a value, before their keys."""
        softmax = self.plan.softmax
        factor = 1 / torch.tensor(self.scale, dtype=torch.float32)
        elements = (sink - softmax.sink_lead) * factor
        elements = elements.clamp(softmax.no_score, softmax.largest_sink)
        self.maximum = torch.where(sink.isnan(), softmax.largest_sink, elements).expand_as(self.sum)
        self.sum = torch.where(sink.isnan(), sink, 4 * softmax.sink_share).expand_as(self.sum)
        self.begun = True

    def step(self, scores: Tensor, unseen: Tensor) -> tuple[Tensor, Tensor]:
        """Take one block: its probabilities, and the factor for all that was added up before."""
        before, was_far = self.maximum, self.far
        highest = torch.maximum(before, scores.amax(-1, keepdim=True))
        if self.plan.softmax.lazy_max:
            guess = torch.exp2(self._exponents(scores, before, torch.zeros_like(was_far)))
            raised = outgrown(guess, self.plan, self.rows_of_a_head)
            keep = ~(raised | self._of_warps(was_far) | self._finds_first())
        else:
            keep = (highest - before) * self.scale_log2 <= self.plan.softmax.rescale_threshold
        self.maximum = torch.where(keep, before, highest)
        large = (self._reference(self.maximum).abs() >= self.plan.softmax.far) & (
            self.maximum > self.plan.softmax.no_score
        )
        self.far = was_far | self._of_threads(large)
        rescale = torch.exp2(self._rise(before, was_far))
        p = torch.exp2(self._exponents(scores, self.maximum, self.far))
        self._visit(p, unseen, self.sum * rescale / 4)
        return p, rescale

    def _finds_first(self) -> Tensor:
        """Tell which rows find this block's maximum before P, whatever its scores are."""
        return self.spread & (self.blocks <= self.plan.softmax.spread_blocks)

    def _visit(self, p: Tensor, unseen: Tensor, begun: Tensor) -> None:
        """Count the blocks that warpgroups visit, and tell how the scores of their first spread."""
        if not self.plan.softmax.spread_blocks:
            return
        key_counts = (~unseen).sum(-1, keepdim=True).expand_as(self.far)
        together = (
            _WARPGROUP_ROWS
            if self.plan.pipeline.skips_masked_blocks and self.plan.order.cluster == 1
            else self.plan.block_m
        )
        visited = _shared(key_counts > 0, self.rows_of_a_head, _any_row, together)
        first = visited & (self.blocks == 0)
        self.spread = torch.where(
            first, spread(p, key_counts, self.plan, self.rows_of_a_head, begun), self.spread
        )
        self.blocks += visited

    def _of_warps(self, row_flags: Tensor) -> Tensor:
        return _shared(row_flags, self.rows_of_a_head, _any_row)

    def _of_threads(self, row_flags: Tensor) -> Tensor:
        half = _WARP_ROWS // 2  # a thread has a row, and that so many below
        return _shared(row_flags, self.rows_of_a_head, lambda warps: warps | warps.roll(half, -1))

    def _reference(self, maximum: Tensor) -> Tensor:
        reference, softmax = maximum * self.scale_log2, self.plan.softmax
        return reference.clamp(min=softmax.least_reference) if softmax.any_score else reference

    def _exponents(self, scores: Tensor, maximum: Tensor, far: Tensor) -> Tensor:
        product = scores.double() * self.scale_log2
        near = (product - self._reference(maximum).double()).float()
        return torch.where(far, (scores - maximum) * self.scale_log2, near)

    def _rise(self, before: Tensor, was_far: Tensor) -> Tensor:
        """Return the exponent of what has been added up relative to `before`, now."""
        old = self._reference(before)
        product = self.maximum.double() * self.scale_log2
        if self.begun:  # a row may begin far, with its sink
            was_far = was_far | (old.abs() >= self.plan.softmax.far)
        moved = torch.where(
            was_far,
            (before - self.maximum) * self.scale_log2,
            (old.double() - product).float(),
        )
        if not self.begun:
            moved = moved.masked_fill(before == self.plan.softmax.no_score, -math.inf)
        return torch.where(self.far, moved, old - self._reference(self.maximum))

    def add(self, p: Tensor, rescale: Tensor) -> None:
        """Add a block's probabilities to the rows' sums."""
        self.sum = self.sum * rescale + p.sum(-1, keepdim=True)

    def unrounded(self) -> Tensor:
        """Return what makes P relative to the row max itself, whose product was rounded."""
        product = self.maximum.double() * self.scale_log2
        residual = (self._reference(self.maximum).double() - product).float()
        exact = self.far | (self.maximum == self.plan.softmax.no_score)
        return torch.exp2(residual.masked_fill(exact, 0))

    def share(self) -> tuple[Tensor, Tensor]:
        """Return the row max, and the sum of P relative to it: (…, rows)."""
        return self.maximum.squeeze(-1), (self.sum * self.unrounded()).squeeze(-1)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what to multiply output rows by, their log-sum-exp, and whether no key counts."""
        log_sum = (self._reference(self.maximum) + torch.log2(self.sum)) * LN2
        empty = self.sum > 2 * self.plan.softmax.sink_share if self.begun else self.sum == 0
        return 1 / self.sum, log_sum.masked_fill(empty, -math.inf), empty
