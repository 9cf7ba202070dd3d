"""A Plan and varlen sequences in, what its kernel computes out: each sequence by itself."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fagen.kinds.forward.emulate.fp8 import emulate_fp8
from fagen.kinds.forward.emulate.tiles import emulate, without_keys
from fagen.kinds.forward.plan import Plan
from fagen.problem import sequences


def emulate_varlen(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    seqused_k: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    v_mean: Tensor | None = None,
    k_mean: Tensor | None = None,
    sinks: Tensor | None = None,
    given: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Tensor, Tensor]:
    """Compute attention of varlen sequences as the Plan's kernel does.

    q (total_q, H, D), k (total_k, Hk, D), v (total_k, Hk, Dv) in the Plan's dtype; where sequences
    begin, and the last one ends, (B + 1), and how many keys of each count, (B), in int32. Lengths
    that lead out of the tensors are cut off. In e4m3 descales, (B, H or Hk, 1), of V (B, Hk, Dv),
    and means are as of `emulate_fp8`; a descale that is None is 1. Returns out (total_q, H, Dv) in
    the Plan's out_dtype and the log-sum-exp (H, total_q) in fp32; a row of no sequence is one that
    sees no key. `given` is what the mask is: numbers, of each sequence, or of each row of q.
    """
    dtype = getattr(torch, plan.out_dtype.torch)
    out = q.new_zeros(*q.shape[:2], v.shape[-1], dtype=dtype)
    lse = without_keys(q, sinks)
    unit = torch.ones(1, 1, 1, dtype=torch.float32, device=q.device)
    descales = [unit if x is None else x for x in (q_descale, k_descale, v_descale)]
    mask = plan.mask
    slices = sequences(cu_seqlens_q, cu_seqlens_k, seqused_k, len(q), len(k))
    for number, (of_q, of_k) in enumerate(slices):
        sequence = q[None, of_q], k[None, of_k], v[None, of_k]
        by_row = {name: {number: given[name][of_q]} for name in mask.row_tables}
        own_mask = mask.bound({**given, **by_row}, number)
        plan = replace(plan, mask=own_mask, score=plan.score.of_sequence(number))
        if plan.descales:
            numbers = (own(x, number) for x in (*descales, v_mean, k_mean))
            output, log_sum = emulate_fp8(plan, *sequence, scale, *numbers, sinks=sinks)
        else:
            output, log_sum = emulate(plan, *sequence, scale, sinks=sinks)
        out[of_q], lse[:, of_q] = output[0], log_sum[0]
    return out, lse


def own(numbers: Tensor | None, sequence: int) -> Tensor | None:
    """Those of a sequence, (1, …); one for all is that of each."""
    if numbers is None or numbers.shape[0] == 1:
        return numbers
    return numbers[sequence : sequence + 1]
