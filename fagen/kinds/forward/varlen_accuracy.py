"""A kernel whose sequences have lengths of their own in, its errors against fp64 out.

The rule for an output is that of `accuracy`, or of `fp8_accuracy`, over all sequences. None sees
anything of another: of many cases every second sequence is NaN, and always what lies before and
behind them all, and the keys that are not used. No row may be written there: outputs keep what they
were filled with.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fagen.build import Binary
from fagen.kinds.forward.accuracy import LSE_TOLERANCE, torch_math
from fagen.kinds.forward.plan import Plan
from fagen.kinds.forward.reference import reference
from fagen.kinds.forward.varlen_fp8_accuracy import Errors, Rows, errors_of, quantised
from fagen.measure.card import hopper
from fagen.measure.inputs import softmax_scale
from fagen.measure.numerics import largest, unit_in_last_place
from fagen.measure.proof import judged
from fagen.records import ShapeError
from fagen.runtime.c_interface import call

_UNTOUCHED = 7.0  # of outputs beforehand: no NaN, whose bits may change unseen
_MANY = 1_030  # sequences: a warp that looks at 32 at a time goes around more than 32 times

Kernel = Callable[[dict[str, Any]], None]  # takes inputs and outputs by name


@dataclass(frozen=True)
class Case:
    """Sequences of (queries, keys), one after another, with `gap` rows before and behind them all.

    With `used` each has 3 keys more, which it does not see. With `poisoned` all but every second
    sequence is NaN.
    """

    lengths: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    gap: int = 0
    used: bool = False
    poisoned: bool = False

    @property
    def judged(self) -> range:
        """The sequences that are no NaN."""
        return range(0, len(self.lengths), 2 if self.poisoned else 1)

    def __str__(self) -> str:
        queries, keys = (sum(one) for one in zip(*self.lengths, strict=True))
        said = f"{len(self.lengths)} sequences of {queries} queries and {keys} keys"
        heads = f"{self.heads}/{self.kv_heads}"
        return f"{said} H={heads}{' used' * self.used}{' beside NaN' * self.poisoned}"


def verification_cases(plan: Plan) -> tuple[Case, ...]:
    """Lengths around the tile of `plan`, none, very many, mixed ones, each grouping of heads."""
    m, n = plan.block_m, plan.block_n
    around = tuple((q, k) for q in (0, 1, m - 1, m, m + 1) for k in (0, 1, n - 1, n, n + 1))
    mixed = tuple((length, length) for length in (17, 1_500, 3, 64, 700, 1, 0, 4_097, 129))
    return (
        Case(((1, 1),), 1, 1),
        Case(((0, 0), (0, 5), (5, 0), (0, 0)), 2, 1),
        Case(around, 2, 1, gap=3),
        Case(around[::-1], 3, 3, gap=3, used=True),
        Case(tuple((length, length) for length in (m, n, 2 * m + 1, m - 1, 1, n + 7)), 4, 2, gap=9),
        Case(mixed, 8, 2, gap=5, poisoned=True),
        Case(mixed, 4, 4, used=True, poisoned=True),
        Case(tuple((i % 5, i * 7 % 11) for i in range(_MANY)), 2, 1, gap=1, poisoned=True),
        Case(tuple((1 + i * 37 % 64,) * 2 for i in range(_MANY)), 4, 1),
        Case(tuple((1, i * 97 % 1_500) for i in range(40)), 8, 1, used=True),
        Case(tuple((i * 97 % 1_500, 1 + i) for i in range(40)), 5, 1, gap=2),
        Case(((2_048, 2_048),) * 4, 16, 16),
        Case(((1_023, 4_097), (4_097, 1_023)), 4, 1),
    )


def small_cases(plan: Plan) -> tuple[Case, ...]:
    """A few of them, small enough for the simulator."""
    m, n = plan.block_m, plan.block_n
    return (
        Case(((1, 1),), 1, 1),
        Case(((0, 0), (0, 5), (5, 0), (0, 0)), 2, 1),
        Case(((m + 1, n + 1), (0, 3), (1, 1), (m - 1, 3 * n - 5)), 2, 1, gap=3, poisoned=True),
        Case(((7, 9), (2 * m + 9, n // 2), (m, n), (3, 0), (5, 2 * n + 3)), 2, 2, 2, True, True),
        Case(tuple((i % 3, i * 5 % 7) for i in range(35)), 2, 1, gap=1, poisoned=True),
        Case(tuple((1 + i % 2, i % 4) for i in range(70)), 1, 1),
    )


def inputs(plan: Plan, case: Case, seed: int, device: str) -> dict[str, Any]:
    """q, k, v, N(0, 1) where a sequence is, NaN elsewhere; offsets, and the scale.

    For e4m3 in fp32: what is quantised.
    """
    dtype = torch.float32 if plan.descales else getattr(torch, plan.dtype.torch)
    generator = torch.Generator(device=device).manual_seed(seed)
    queries, keys = zip(*case.lengths, strict=True)
    held = [count + 3 * case.used for count in keys]
    at_q, at_k = offsets(queries, case.gap), offsets(held, case.gap)

    def normal(at: list[int], counts: Sequence[int], heads: int, columns: int) -> Tensor:
        shape = (at[-1] + case.gap, heads, columns)
        made = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        mine = torch.zeros(shape[0], dtype=torch.bool)
        for one in case.judged:
            mine[at[one] : at[one] + counts[one]] = True
        return made.masked_fill_(~mine.to(device)[:, None, None], math.nan)

    def int32(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    return {
        "q": normal(at_q, queries, case.heads, plan.head_dim),
        "k": normal(at_k, keys, case.kv_heads, plan.head_dim),
        "v": normal(at_k, keys, case.kv_heads, plan.head_dim_v),
        "cu_seqlens_q": int32(at_q),
        "cu_seqlens_k": int32(at_k),
        "seqused_k": int32(keys) if case.used else None,
        "scale": softmax_scale(plan.head_dim),
    }


def offsets(lengths: Sequence[int], begin: int = 0) -> list[int]:
    """Where sequences of these lengths begin, and where the last one ends."""
    return list(accumulate(lengths, initial=begin))


def outputs(plan: Plan, q: Tensor) -> dict[str, Tensor]:
    """out and lse of q (total_q, H, D), filled with what tells whether a row was written."""
    dtype = getattr(torch, plan.out_dtype.torch)
    return {
        "out": q.new_full((*q.shape[:2], plan.head_dim_v), _UNTOUCHED, dtype=dtype),
        "lse": q.new_full((q.shape[1], q.shape[0]), _UNTOUCHED, dtype=torch.float32),
    }


def case_error(
    plan: Plan, case: Case, kernel: Kernel, *, seed: int = 0, device: str = "cuda"
) -> ShapeError:
    """Run the kernel on one case.

    An error that is NaN means that an output was no number, that a row without keys was not exactly
    0 and minus infinity, or that a row of no sequence was written.
    """
    given = inputs(plan, case, seed, device)
    at_q, at_k = given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist()
    rows = {
        one: (slice(at_q[one], at_q[one] + queries), slice(at_k[one], at_k[one] + keys))
        for one, (queries, keys) in ((one, case.lengths[one]) for one in case.judged)
    }
    into = outputs(plan, given["q"])
    if plan.descales:
        packed = quantised(plan, given, rows, turn=seed)
        kernel({**packed.given, **into})
        found = errors_of(plan, packed, rows, **into)
    else:
        kernel({**given, **into})
        found = _errors_in_16_bits(plan, given, rows, **into)
    out, lse = into["out"], into["lse"]
    right = bool((out[: at_q[0]] == _UNTOUCHED).all() and (out[at_q[-1] :] == _UNTOUCHED).all())
    right &= bool((lse[:, : at_q[0]] == _UNTOUCHED).all())
    right &= bool((lse[:, at_q[-1] :] == _UNTOUCHED).all())
    right &= found.right
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


def check_cases(
    plan: Plan,
    cases: Sequence[Case],
    kernel: Kernel,
    *,
    device: str,
    progress: Callable[[str], None] | None,
) -> tuple[ShapeError, ...]:
    """Run the kernel over `cases`; a line for each.

    Raises VerificationError after the last of them if any broke the rule.
    """
    said = {}

    def errors() -> Any:
        for seed, case in enumerate(cases):
            error = case_error(plan, case, kernel, seed=seed, device=device)
            said[id(error)] = str(case)
            yield error

    def line(error: ShapeError) -> str:
        verdict = "ok" if error.ok else "WRONG"
        return (
            f"  {said[id(error)]:66} error {error.error:.2e} (allowed {error.allowed:.2e}, torch "
            f"{error.torch_error:.2e})  lse {error.lse_error:.1e}  {verdict}"
        )

    return judged(plan, errors(), line, progress, of="cases")


def check(
    plan: Plan, binary: Binary, progress: Callable[[str], None] | None
) -> tuple[ShapeError, ...]:
    """Run a built kernel over the verification cases; a line for each.

    Raises VerificationError after the last of them if any broke the rule, DeviceError without a
    Hopper GPU.
    """
    hopper()
    cases, kernel = verification_cases(plan), kernel_of(plan, binary.library)
    return check_cases(plan, cases, kernel, device="cuda", progress=progress)


def simulated(
    plan: Plan, run: Callable[..., None], progress: Callable[[str], None] | None
) -> tuple[ShapeError, ...]:
    """Check a kernel on a CPU, where `run` takes tensors by name; a line for each case.

    Raises VerificationError after the last of them if any broke the rule.
    """

    def kernel(given: dict[str, Any]) -> None:
        run(**given)

    return check_cases(plan, small_cases(plan), kernel, device="cpu", progress=progress)


def kernel_of(plan: Plan, library: Path) -> Kernel:
    """The built kernel through its C interface, on the current stream."""
    return lambda given: call(plan, library, **given)
