"""Gradients of varlen sequences in, their errors against fp64 out.

The rule for each of dq, dk and dv is that of kernels of one length, over all sequences. Of many
cases every second sequence is NaN, and always what lies before and behind them all, and keys that
are not used. Rows of no sequence have to be exactly 0. The workspace is full of NaN.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fagen.kinds.backward.oracle import gradients, sinks_hold
from fagen.kinds.backward.plan import Plan
from fagen.kinds.verification import judged_rows, one_sequence
from fagen.measure.inputs import mask_of, usual_packed
from fagen.measure.sequences import UNTOUCHED, Case, empty_around, inputs, noise
from fagen.measure.sinks import usual_sinks, without_key
from fagen.measure.verification import Run
from fagen.problem import Sizes
from fagen.records import GradientError

Beside = Callable[[Sizes, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], GradientError]


def case_error(
    plan: Plan, run: Run, case: Case, seed: int = 0, device: str = "cuda", *, rule: Beside
) -> GradientError:
    """Run the kernels on one case; with an odd seed the log-sum-exp has a gradient too.

    `rule` sets what was found beside fp64, and beside the same formula in 16 bits. An error that is
    NaN means that an output was no number, or that a row that nobody sees, or is of no sequence,
    was not exactly 0.
    """
    call = inputs(plan, case, seed, device)
    given = usual_packed(plan.mask, case.lengths, device, case.gap)
    at_q, at_k = call["cu_seqlens_q"].tolist(), call["cu_seqlens_k"].tolist()
    queries = [rows for rows, _ in case.lengths]
    dice = torch.Generator(device=device).manual_seed(~seed & 0xFFFF)
    heads = case.heads
    call["dout"] = noise(plan, case, at_q, queries, (heads, plan.head_dim_v), dice)
    of_rows = noise(plan, case, at_q, queries, (heads,), dice).T.float().contiguous()
    call["dlse"] = of_rows if seed % 2 else None
    call["out"] = torch.full_like(call["dout"], math.nan)
    call["lse"] = torch.full_like(of_rows, math.nan)
    sinks, of_sinks = usual_sinks(plan.sink, heads, device), list[Tensor]()
    exacts, rough, places, blind = [], [], [], []
    for sequence, (of_q, of_k) in judged_rows(case, call).items():
        dout, q = call["dout"][None, of_q], call["q"][None, of_q]
        k, v = call["k"][None, of_k], call["v"][None, of_k]
        dlse = None if call["dlse"] is None else of_rows[None, :, of_q]
        mask, score = mask_of(plan.mask, given, sequence, of_q), plan.score.as_usual
        how: dict[str, Any] = dict(mask=mask, score=score, scale=call["scale"], dlse=dlse)
        how |= sinks
        out, lse, *exact = gradients(dout, q, k, v, **how)
        call["out"][of_q], call["lse"][:, of_q] = out[0].to(q.dtype), lse[0].float()
        blind.append((lse[0] == without_key(**sinks)).all(0))
        exacts.append([x[0] for x in exact[:3]])
        rough.append([x[0] for x in gradients(dout, q, k, v, **how, dtype=q.dtype)[2:5]])
        of_sinks += exact[3:]
        places.append((of_q, of_k, of_k))
    call |= plan.score.usual
    into = {f"d{name}": torch.full_like(call[name], UNTOUCHED) for name in ("q", "k", "v")}
    dsinks = {f"d{name}": torch.full_like(x, math.nan) for name, x in sinks.items()}
    run(**call, **given, **sinks, **into, **dsinks)
    results = [[x[place] for x, place in zip(into.values(), own, strict=True)] for own in places]
    ends = (at_q, at_k, at_k)
    intact = all(empty_around(x, at) for x, at in zip(into.values(), ends, strict=True))
    for (dq, dk, dv), of_none in zip(results, blind, strict=True):
        intact &= not dq[of_none].any() and (len(dq) > 0 or not (dk.any() or dv.any()))
    if len(exacts) == len(case.lengths):  # else others are no numbers
        found = zip(dsinks.values(), map(sum, [of_sinks]), strict=False)
        intact &= all(sinks_hold(own, exact) for own, exact in found)
    intact &= _unused_are_zeros(case, at_k, into["dk"], into["dv"])
    sizes = Sizes(len(case.lengths), heads, case.kv_heads, len(into["dq"]), len(into["dk"]))
    together = (
        [torch.cat(x) for x in zip(*rows, strict=True)] for rows in (results, exacts, rough)
    )
    error = rule(sizes, *together)
    return error if intact else replace(error, dq_error=math.nan)


def _unused_are_zeros(case: Case, at_k: list[int], dk: Tensor, dv: Tensor) -> bool:
    """Whether keys that a sequence holds and does not see have gradients of 0."""
    for sequence in case.judged:
        unused = slice(at_k[sequence] + case.lengths[sequence][1], at_k[sequence + 1])
        if bool(dk[unused].any() or dv[unused].any()):
            return False
    return True


def as_dense(plan: Plan, run: Run) -> Callable[[tuple[Any, ...]], tuple[Tensor, ...]]:
    """Kernels of one sequence, (1, S, H, D), which they get packed."""

    def dense(tensors: tuple[Any, ...]) -> tuple[Tensor, ...]:
        *first, scale, dlse = (*tensors[:7], tensors[-1])
        dout, q, k, v, out, lse = (tensor[0] for tensor in first)
        sinks = ("sinks",) * (plan.sink is not None)
        names = *plan.mask.given, *plan.score.given, *sinks
        given = dict(zip(names, tensors[7:-1], strict=True))
        given |= {name: given[name][0] for name in plan.mask.row_tables}
        dlse = None if dlse is None else dlse[0]
        into = {name: torch.full_like(x, math.nan) for name, x in (("dq", q), ("dk", k), ("dv", v))}
        named = dict(dout=dout, q=q, k=k, v=v, out=out, lse=lse, scale=scale, dlse=dlse)
        dsinks = {f"d{name}": torch.full_like(given[name], math.nan) for name in sinks}
        run(**named, **given, **one_sequence(q=q, k=k), seqused_k=None, **into, **dsinks)
        return tuple(x[None] for x in into.values())

    return dense
