"""A kernel whose sequences have lengths of their own in, its errors against fp64 out.

The rule for an output is that of `dense`, or of `fp8`, over all sequences. None sees
anything of another: of many cases every second sequence is NaN, and always what lies before and
behind them all, and the keys that are not used. Rows there have to be zeros, and minus infinity.
"""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.plan import Plan
from fagen.kinds.forward.verify.dense import (
    LSE_TOLERANCE,
    Kernel,
    hard_errors,
    said,
    torch_math,
)
from fagen.kinds.forward.verify.varlen_fp8 import Errors, Rows, errors_of, quantised
from fagen.measure import families
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
from fagen.measure.verification import Rule, Run
from fagen.problem import Cell
from fagen.records import ShapeError
from fagen.runtime.c_interface import call


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
    given = inputs(plan, case, seed, device)
    at_q, at_k = given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist()
    rows = {
        one: (slice(at_q[one], at_q[one] + queries), slice(at_k[one], at_k[one] + keys))
        for one, (queries, keys) in ((one, case.lengths[one]) for one in case.judged)
    }
    into = outputs(plan, given["q"])
    if plan.descales:
        varlen = quantised(plan, given, rows, turn=seed)
        run(**varlen.given, **into)
        found = errors_of(plan, varlen, rows, **into)
    else:
        run(**given, **into)
        found = _errors_in_16_bits(plan, given, rows, **into)
    out, lse = into["out"], into["lse"]
    right = found.right and empty_around(out, at_q) and empty_around(lse.T, at_q, -math.inf)
    return ShapeError(
        batch=len(case.lengths),
        seqlen_q=out.shape[0],
        seqlen_k=given["k"].shape[0],
        heads=case.heads,
        kv_heads=case.kv_heads,
        error=found.error if right else math.nan,
        torch_error=found.beside,
        allowed=found.allowed,
        lse_error=found.lse_error,
        lse_allowed=found.lse_allowed,
    )


def _errors_in_16_bits(
    plan: Plan, given: dict[str, Any], rows: Rows, out: Tensor, lse: Tensor
) -> Errors:
    mask, scale = plan.mask.name, given["scale"]
    right = True
    ours = torchs = lses = most = 0.0
    for of_q, of_k in rows.values():
        q, k, v = given["q"][None, of_q], given["k"][None, of_k], given["v"][None, of_k]
        exact, exact_lse = (x[0] for x in reference(q, k, v, mask=mask, scale=scale))
        beside = torch_math(q, k, v, mask=mask, scale=scale)[0]
        found, found_lse = out[of_q], lse[:, of_q]
        seen = ~(exact_lse == -math.inf).all(0)
        right &= bool((found[~seen] == 0).all() and (found_lse[:, ~seen] == -math.inf).all())
        # not max(…), which loses a NaN
        errors = (found[seen].double() - exact[seen], found_lse[:, seen] - exact_lse[:, seen])
        ours, lses = (
            math.nan if math.isnan(one) or math.isnan(before) else max(before, one)
            for before, one in zip((ours, lses), map(largest, errors), strict=True)
        )
        torchs = max(torchs, largest(beside[seen].double() - exact[seen]))
        most = max(most, largest(exact))
    allowed = 2 * torchs + unit_in_last_place(most, out.dtype)
    return Errors(ours, torchs, allowed, lses, LSE_TOLERANCE, right)


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
        ends = {
            f"cu_seqlens_{name}": torch.tensor([0, x.shape[1]], dtype=torch.int32, device=x.device)
            for name, x in (("q", q), ("k", k))
        }
        run(q=q[0], k=k[0], v=v[0], **ends, scale=scale, **into)
        return into["out"][None], into["lse"][None]

    return dense


def _hard_errors(
    plan: Plan, run: Run, small: bool, device: str
) -> Iterator[tuple[str, ShapeError]]:
    if not plan.descales:
        sizes = families.SMALL_SIZES if small else families.SIZES
        for error in hard_errors(plan, as_dense(plan, run), sizes, device):
            yield "hard scores", error


RULE = Rule(verification_cases, case_error, said, small_cases, _hard_errors, columns=66)
