"""A kernel whose sequences have lengths of their own in, its errors against fp64 out.

The rule for an output is that of `dense`, or of `fp8`, over all sequences. None sees
anything of another: of many cases every second sequence is NaN, and always what lies before and
behind them all, and the keys that are not used. Rows there have to be zeros, and minus infinity.
Of a kernel with descales each sequence that is judged has some of its own, and means; those of
others are NaN, as their bytes are.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fagen.e4m3 import to_e4m3
from fagen.kinds.forward.operands import Operands, operands, real
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.plan import Plan
from fagen.kinds.forward.verify import fp8
from fagen.kinds.forward.verify.dense import hard_errors, torch_math
from fagen.kinds.forward.verify.textbook import textbook
from fagen.kinds.verification import LSE_TOLERANCE, Kernel, Rows, judged_rows, one_sequence
from fagen.measure import families
from fagen.measure.inputs import mask_of, usual_packed
from fagen.measure.numerics import largest, unit_in_last_place
from fagen.measure.sequences import (
    UNTOUCHED,
    Case,
    contender_case,
    empty_around,
    inputs,
    small_cases,
    verification_cases,
)
from fagen.measure.sinks import beside_sinks, usual_sinks, without_key
from fagen.measure.verification import Rule, Run
from fagen.problem import Cell
from fagen.records import ShapeError
from fagen.runtime.c_interface import call

_NAN_BYTES = (0x7F, 0xFF)  # all that there are

# By turns: V by column and both means, one number for each head, and None, which is 1.
_WAYS: tuple[dict[str, Any] | None, ...] = ({"centered": "kv"}, {"v_scales": "head"}, None)


def outputs(plan: Plan, q: Tensor) -> dict[str, Tensor]:
    """out and lse of q (total_q, H, D), filled with what tells whether a row was written."""
    dtype = getattr(torch, plan.out_dtype.torch)
    return {
        "out": q.new_full((*q.shape[:2], plan.head_dim_v), UNTOUCHED, dtype=dtype),
        "lse": q.new_full((q.shape[1], q.shape[0]), UNTOUCHED, dtype=torch.float32),
    }


def case_error(plan: Plan, run: Run, case: Case, seed: int = 0, device: str = "cuda") -> ShapeError:
    """Run the kernel on one case.

    An error that is NaN means that an output was no number, or that a row without keys, or of no
    sequence, was not exactly 0 and minus infinity.
    """
    call = inputs(plan, case, seed, device)
    given, score = usual_packed(plan.mask, case.lengths, device, case.gap), plan.score.as_usual
    rows, scale = judged_rows(case, call), call["scale"]
    into = outputs(plan, call["q"])
    sinks = usual_sinks(plan.sink, case.heads, device)
    quantised = _quantised(plan, call, rows, _WAYS[seed % len(_WAYS)]) if plan.descales else {}
    run(**call, **given, **plan.score.usual, **sinks, **into)
    out, lse = into["out"], into["lse"]
    at_q = call["cu_seqlens_q"].tolist()
    nothing = lse == without_key(**sinks)
    intact = empty_around(out, at_q) and empty_around(nothing.T, at_q, True)
    ours, theirs, true, off = [], [], [], []
    for sequence, (of_q, of_k) in rows.items():
        tensors = call["q"][None, of_q], call["k"][None, of_k], call["v"][None, of_k]
        mask = mask_of(plan.mask, given, sequence, of_q)
        if plan.descales:
            tensors = real(plan, quantised[sequence])
            beside = textbook(replace(plan, mask=mask), quantised[sequence], scale)
        else:
            beside = torch_math(*tensors, mask=mask, scale=scale, score=score)
        found = reference(*tensors, mask=mask, scale=scale, score=score)
        exact, exact_lse = (x[0] for x in found)
        valid = ~(exact_lse == -math.inf).all(0)
        own_out, own_lse = out[of_q], lse[:, of_q]
        intact &= bool((own_out[~valid] == 0).all() and nothing[:, of_q][:, ~valid].all())
        beside, _ = beside_sinks(beside[0], exact_lse, **sinks)
        exact, exact_lse = beside_sinks(exact, exact_lse, **sinks)
        ours.append(own_out[valid].double())
        theirs.append(beside[valid].double())
        true.append(exact[valid])
        off.append((own_lse[:, valid] - exact_lse[:, valid]).flatten())
    outs = (torch.cat(ours), torch.cat(theirs), torch.cat(true))
    error, beside_error, allowed = fp8.by_the_rule(*outs) if plan.descales else _beside(plan, *outs)
    return ShapeError(
        batch=len(case.lengths),
        seqlen_q=out.shape[0],
        seqlen_k=call["k"].shape[0],
        heads=case.heads,
        kv_heads=case.kv_heads,
        error=error if intact else math.nan,
        torch_error=beside_error,
        allowed=allowed,
        lse_error=largest(torch.cat(off)),
        lse_allowed=fp8.LSE_TOLERANCE if plan.descales else LSE_TOLERANCE,
    )


def _beside(plan: Plan, ours: Tensor, torchs: Tensor, true: Tensor) -> tuple[float, float, float]:
    """The rule of 16 bits: our error, torch's, and what ours may be."""
    beside = largest(torchs - true)
    unit = unit_in_last_place(largest(true), getattr(torch, plan.out_dtype.torch))
    return largest(ours - true), beside, 2 * beside + unit


def _quantised(
    plan: Plan, call: dict[str, Any], rows: Rows, how: dict[str, Any] | None
) -> dict[int, Operands]:
    """Quantise tensors of a `call`, NaN but for `rows`, in place; return what each sequence has.

    q (total_q, H, D), k (total_k, Hk, D), v (total_k, Hk, Dv); `how` tells how descales are made.
    """
    by_sequence = {}
    for sequence, (queries, keys) in rows.items():
        numbers = call["q"][None, queries], call["k"][None, keys], call["v"][None, keys]
        own = _unscaled(*numbers) if how is None else operands(plan, *numbers, **how)
        by_sequence[sequence] = own
    call |= {name: _nan_bytes(call[name]) for name in ("q", "k", "v")}
    for sequence, (queries, keys) in rows.items():
        for name, place in (("q", queries), ("k", keys), ("v", keys)):
            call[name][place] = getattr(by_sequence[sequence], name)[0]
    batch = call["cu_seqlens_q"].shape[0] - 1
    call |= {
        name: None if how is None else _by_sequence(name, by_sequence, batch)
        for name in Operands._fields[3:]
    }
    return by_sequence


def _unscaled(*tensors: Tensor) -> Operands:
    ones = (torch.ones(1, 1, 1, dtype=torch.float32, device=x.device) for x in tensors)
    return Operands(*map(to_e4m3, tensors), *ones)


def _nan_bytes(x: Tensor) -> Tensor:
    """As many bytes of e4m3, each a NaN, by turns along the rows one and the other."""
    turns = torch.tensor(_NAN_BYTES, dtype=torch.uint8, device=x.device)
    by_row = turns[torch.arange(x.shape[0], device=x.device) % len(turns)]
    return by_row[:, None, None].expand(x.shape).contiguous().view(torch.float8_e4m3fn)


def _by_sequence(name: str, by_sequence: Mapping[int, Operands], batch: int) -> Tensor | None:
    """The numbers of all sequences, (batch, heads, …); NaN for those that have none."""
    numbers = {sequence: getattr(operands, name) for sequence, operands in by_sequence.items()}
    some: Tensor | None = next(iter(numbers.values()), None)
    if some is None:
        return None
    every = some.new_full((batch, *some.shape[1:]), math.nan)
    for sequence, own in numbers.items():
        every[sequence] = own[0]
    return every


def contender_error(
    plan: Plan, library: Path, cell: Cell, q: Tensor, k: Tensor, v: Tensor
) -> ShapeError:
    """Run a built kernel over a cell's sequences, with numbers of its own."""
    run = partial(call, plan, library)
    return case_error(plan, run, contender_case(cell.sizes), cell.sizes.batch, q.device.type)


def as_dense(plan: Plan, run: Run) -> Kernel:
    """A kernel of one sequence, (1, S, H, D), which it gets packed."""

    def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        into = outputs(plan, q[0])
        given = usual_packed(plan.mask, ((q.shape[1], k.shape[1]),), q.device)
        packed = dict(q=q[0], k=k[0], v=v[0], **one_sequence(q=q[0], k=k[0]))
        sinks = usual_sinks(plan.sink, q.shape[2], q.device)
        run(**packed, scale=scale, **given, **plan.score.usual, **sinks, **into)
        return into["out"][None], into["lse"][None]

    return dense


def _hard_errors(
    plan: Plan, run: Run, small: bool, device: str
) -> Iterator[tuple[str, ShapeError]]:
    if not plan.descales:
        sizes = families.SMALL_SIZES if small else families.SIZES
        for error in hard_errors(plan, as_dense(plan, run), sizes, device):
            yield "hard scores", error


RULE = Rule(verification_cases, case_error, small_cases, _hard_errors, columns=66)
