"""Packed sequences, and what their attention is."""

import math
from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from fagen import simulator
from fagen.kinds.forward import Schedule
from fagen.kinds.forward.plan import Plan, plan
from fagen.kinds.forward.reference import reference
from fagen.kinds.forward.verify.varlen import case_error
from fagen.measure.sequences import Case, Tiled
from tests.tensors import normal

LENGTHS = ((5, 5), (0, 7), (40, 40), (3, 0), (1, 130), (70, 33))  # of queries and of keys


@cache
def planned(slug: str) -> Plan:
    """The Plan of a forward kernel."""
    return plan(Schedule.from_slug(slug))


def is_right(slug: str, library: Path, case: Case, seed: int) -> bool:
    """Whether a kernel on the simulated GPU, whatever `seed` lets happen when, is near fp64."""
    run = partial(simulator.call, planned(slug), library, chance=seed)
    return case_error(planned(slug), run, case, seed=seed, device="cpu").ok


def offsets(lengths: Sequence[int], begin: int = 0) -> Tensor:
    """Where sequences begin, and where the last one ends."""
    return torch.tensor(list(accumulate(lengths, initial=begin)), dtype=torch.int32)


def packed(
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    dtype: torch.dtype = torch.float16,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    gap: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q of 4 heads, k and v of 2, and both offsets, with `gap` rows before and behind them all."""
    queries, keys = zip(*lengths, strict=True)
    rows, columns = sum(queries) + 2 * gap, sum(keys) + 2 * gap
    return (
        normal(rows, 4, head_dim, dtype=dtype),
        normal(columns, 2, head_dim, seed=1, dtype=dtype),
        normal(columns, 2, head_dim_v or head_dim, seed=2, dtype=dtype),
        offsets(queries, gap),
        offsets(keys, gap),
    )


def extreme_cases(plan: Tiled) -> tuple[Case, ...]:
    """1, 3, 6 and 8 heads a group, of sequences each of another ratio of rows and keys.

    Of three tiles and more, of more rows than keys, some of which see none, of far more keys.
    """
    m, n = plan.block_m, plan.block_n
    lengths = (
        *((3 * m + 5, 2 * n + 3), (5 * m, n // 2 - 1), (3, 3 * n + 1)),
        *((m + 1, n + 1), (m - 1, n + 9), (m + 9, n - 1)),
    )
    return tuple(Case(lengths, heads, 1, gap=2, poisoned=heads == 6) for heads in (1, 3, 6, 8))


def exact(
    q: Tensor, k: Tensor, v: Tensor, at_q: Tensor, at_k: Tensor, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Out and log-sum-exp in fp64, sequence by sequence; NaN in rows of none."""
    out = q.new_full((*q.shape[:2], v.shape[2]), math.nan, dtype=torch.float64)
    lse = q.new_full((q.shape[1], q.shape[0]), math.nan, dtype=torch.float64)
    mask = "causal" if causal else "full"
    for (top, bottom), (first, last) in zip(
        pairwise(at_q.tolist()), pairwise(at_k.tolist()), strict=True
    ):
        of = q[None, top:bottom], k[None, first:last], v[None, first:last]
        found = reference(*of, mask=mask, scale=q.shape[2] ** -0.5)
        out[top:bottom], lse[:, top:bottom] = found[0][0], found[1][0]
    return out, lse
