"""Offsets of sequences of which a part is used, in; offsets as kernels have them, out.

Nothing is read on the host, so that a captured call can be replayed with other lengths.
"""

import torch
from torch import Tensor

Offsets = tuple[Tensor, Tensor, Tensor | None]  # cu_seqlens_q, cu_seqlens_k, seqused_k


def used_queries(
    seqused_q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_k: Tensor | None
) -> Offsets:
    """Return offsets of twice as many sequences, of which those between are nobody's.

    A sequence's first seqused_q (B) rows keep its keys, so that the causal mask ends with the last
    of them; the rows behind them become a sequence without keys: kernels write zeros there, and
    minus infinity as the log-sum-exp, and they have no part in any gradient.
    """
    queries = cu_seqlens_q.repeat_interleave(2)[:-1]
    queries[1::2] += torch.minimum(seqused_q, cu_seqlens_q.diff()).clamp_(min=0)
    keys = cu_seqlens_k.repeat_interleave(2)[1:]
    used = seqused_k
    if used is not None:
        used = torch.nn.functional.pad(used[:, None], (0, 1)).flatten()
    return queries, keys, used


def twice(numbers: Tensor | None) -> Tensor | None:
    """Return what sequences have, (B, …), for those of `used_queries`; of one for all, as it is."""
    if numbers is None or numbers.shape[0] == 1:
        return numbers
    if numbers.stride(0) == 0:
        return numbers[:1]
    return numbers.repeat_interleave(2, 0)


def evenly(batch: int, length: int, device: torch.device) -> Tensor:
    """Return the offsets of so many sequences of one length, (B + 1) in int32."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length
