"""A Plan and 16-bit tensors in, what its kernel computes out: its tiles, order and roundings."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fagen.arch import SM90
from fagen.e4m3 import to_e4m3
from fagen.kinds.forward.plan import Plan

LN2 = math.log(2)
_WARP_ROWS = 16  # of a warpgroup's 64


def emulate(plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention as the Plan's kernel does.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) in the Plan's dtype, with any strides, H a
    multiple of Hk; scale finite and positive. Returns out (B, Sq, H, Dv) in that dtype and the
    log-sum-exp of each row, (B, H, Sq) in fp32: zeros and minus infinity where a row sees no key.
    What is wrong with the arguments is fagen.runtime.checks's to say.
    """
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    out = q.new_zeros(batch, seqlen_q, heads, v.shape[-1])
    lse = q.new_full((batch, heads, seqlen_q), -math.inf, dtype=torch.float32)
    if out.numel() == 0 or seqlen_k == 0:
        return out, lse

    group = heads // kv_heads  # query heads that share one head of K and V
    keys = k.permute(0, 2, 3, 1).float()  # (B, Hk, D, Sk)
    values = v.permute(0, 2, 1, 3).float()  # (B, Hk, Sk, Dv)
    rows_of = torch.arange(seqlen_q, device=q.device)

    for top in range(0, seqlen_q, plan.block_m):
        bottom = min(top + plan.block_m, seqlen_q)
        queries = q[:, top:bottom].permute(0, 2, 1, 3).float()  # (B, H, rows, D)
        queries = queries.reshape(batch, kv_heads, group * (bottom - top), -1)
        row = rows_of[top:bottom].repeat(group)[:, None]

        softmax = _OnlineSoftmax(queries, scale, plan, bottom - top)
        accumulated = queries.new_zeros(*queries.shape[:-1], v.shape[-1])
        for block in blocks_of(plan, top, bottom, seqlen_q, seqlen_k):
            scores = queries @ keys[..., block]
            scores = scores.masked_fill(hidden(plan, row, block, seqlen_q, seqlen_k), -math.inf)
            p, rescale = softmax.step(scores)
            # what the tensor cores read is rounded; row sums that threads add up saw p before
            rounded = p.to(q.dtype).float()
            softmax.add(rounded if plan.sum_by_tensor else p, rescale)
            accumulated = accumulated * rescale + rounded @ values[:, :, block]

        inverse, log_sum = softmax.finish()
        tile = (accumulated * inverse).to(q.dtype).view(batch, heads, bottom - top, -1)
        out[:, top:bottom] = tile.permute(0, 2, 1, 3)
        lse[:, :, top:bottom] = log_sum.view(batch, heads, bottom - top)
    return out, lse


def blocks_of(plan: Plan, top: int, bottom: int, seqlen_q: int, seqlen_k: int) -> Iterator[slice]:
    """Yield the blocks of keys that the rows top … bottom - 1 see, the last one first."""
    first = max(0, plan.mask.keys(top, seqlen_q, seqlen_k)[0]) // plan.block_n * plan.block_n
    last = min(seqlen_k, plan.mask.keys(bottom - 1, seqlen_q, seqlen_k)[1])
    for left in reversed(range(first, last, plan.block_n)):
        yield slice(left, min(left + plan.block_n, seqlen_k))


def hidden(plan: Plan, row: Tensor, block: slice, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Tell which keys of a block (columns) the rows (rows, 1) do not see."""
    first, last = plan.mask.keys(row, seqlen_q, seqlen_k)
    key = torch.arange(block.start, block.stop, device=row.device)
    return (key < first) | (key >= last)


def outgrown(p: Tensor, plan: Plan, rows_of_a_head: int) -> Tensor:
    """Tell whose lazy row max is raised after a guess at p (…, rows, columns) of a block.

    p is relative to the maximum so far, so infinite or NaN in a row that has seen nothing. The rows
    of a tile come head by head; the result is (…, rows, 1). A lane adds up two columns of each 8;
    where P saturates it looks for e4m3's largest number instead. What one lane of a warp finds too
    large raises all of its 16 rows.
    """
    if plan.p_saturates:
        large = ~(to_e4m3(p).float() < SM90.e4m3_max).all(-1)  # NaN is too large as well
    else:
        filled = torch.nn.functional.pad(p, (0, plan.block_n - p.shape[-1]))
        sums = filled.unflatten(-1, (-1, 4, 2)).sum((-1, -3))
        large = ~(sums <= plan.max_partial_sum).all(-1)
    heads = large.unflatten(-1, (-1, rows_of_a_head))
    warps = torch.nn.functional.pad(heads, (0, -rows_of_a_head % _WARP_ROWS))
    raised = warps.unflatten(-1, (-1, _WARP_ROWS)).any(-1, keepdim=True)
    raised = raised.expand(*raised.shape[:-1], _WARP_ROWS).flatten(-2)[..., :rows_of_a_head]
    return raised.flatten(-2).unsqueeze(-1)


class _OnlineSoftmax:
    """The maximum and sum of rows of scores (..., rows, columns) that arrive block by block.

    Maxima are those of exponents of 2, to which scores are scaled.
    """

    def __init__(self, rows: Tensor, scale: float, plan: Plan, rows_of_a_head: int) -> None:
        self.scale_log2 = scale * math.log2(math.e)  # exp2 is the instruction that there is
        self.plan = plan
        self.rows_of_a_head = rows_of_a_head
        self.maximum = rows.new_full((*rows.shape[:-1], 1), -math.inf)
        self.sum = torch.zeros_like(self.maximum)

    def step(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Take one block: its probabilities, and the factor for all that was added up before."""
        exponents = scores * self.scale_log2
        highest = torch.maximum(self.maximum, exponents.amax(-1, keepdim=True))
        if self.plan.lazy_max:
            guess = torch.exp2(exponents - self.maximum)
            keep = ~outgrown(guess, self.plan, self.rows_of_a_head)
        else:
            keep = highest - self.maximum <= self.plan.rescale_threshold
        highest = torch.where(keep, self.maximum, highest)
        # a row that has seen nothing yet: any finite number does, and minus infinity gives NaN
        origin = highest.masked_fill(highest == -math.inf, 0.0)
        rescale = torch.exp2(self.maximum - origin)
        p = torch.exp2(exponents - origin)
        self.maximum = highest
        return p, rescale

    def add(self, p: Tensor, rescale: Tensor) -> None:
        """Add a block's probabilities to the rows' sums."""
        self.sum = self.sum * rescale + p.sum(-1, keepdim=True)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return what to multiply the rows of the output by, and their log-sum-exp."""
        inverse = torch.where(self.sum == 0, 0.0, 1 / self.sum)
        return inverse, self.maximum * LN2 + torch.log(self.sum)
