"""Lists of lengths in, varlen sequences out: some are NaN, as is what lies around them all.

None sees anything of another, and a kernel that does is found out. Rows around them are to be zeros
afterwards: outputs are filled with UNTOUCHED beforehand.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from fagen.measure.inputs import Attends, softmax_scale
from fagen.problem import Lengths, Sizes, VarlenSizes

UNTOUCHED = 7.0  # of outputs beforehand: no NaN, whose bits may change unseen
_MANY = 1_030  # sequences: a warp that looks at 32 at a time goes around more than 32 times


class Tiled(Attends, Protocol):
    """What is asked of a Plan whose kernel takes varlen sequences."""

    @property
    def block_m(self) -> int:
        """Rows of a tile."""

    @property
    def block_n(self) -> int:
        """Keys of a tile."""


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
        queries, keys = (sum(lengths) for lengths in zip(*self.lengths, strict=True))
        text = f"{len(self.lengths)} sequences of {queries} queries and {keys} keys"
        heads = f"{self.heads}/{self.kv_heads}"
        return f"{text} H={heads}{' used' * self.used}{' beside NaN' * self.poisoned}"


def _around(plan: Tiled) -> Lengths:
    """Lengths around the tile of a Plan, and none."""
    m, n = plan.block_m, plan.block_n
    return tuple((q, k) for q in (0, 1, m - 1, m, m + 1) for k in (0, 1, n - 1, n, n + 1))


def verification_cases(plan: Tiled) -> tuple[Case, ...]:
    """Lengths around the tile of `plan`, none, very many, mixed ones, each grouping of heads.

    K and V of a few are larger than the L2 cache, by which kernels number their tiles.
    """
    m, n = plan.block_m, plan.block_n
    around = _around(plan)
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
        Case(mixed * 2, 16, 16, poisoned=True),
        Case(((1_023, 4_097), (4_097, 1_023)), 4, 1),
    )


def small_cases(plan: Tiled) -> tuple[Case, ...]:
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


def quick_sizes(plan: Tiled, sizes: Sizes) -> tuple[Sizes, ...]:
    """What goes wrong soonest, and what is like these sizes, which a kernel is to be timed at."""
    mixed = ((17, 17), (1_500, 1_500), (3, 9), (64, 64), (700, 700), (1, 1), (0, 0), (129, 333))
    tiny = [(1 + i % 5, i % 7) for i in range(70)]  # more than a warp has lanes
    like = [(min(q, 1_024), min(k, 1_024)) for q, k in sizes.sequences[:8]]
    return (
        VarlenSizes.of(_around(plan), 2, 1),
        VarlenSizes.of(mixed, 4, 2),
        VarlenSizes.of(tiny, 3, 3),
        VarlenSizes.of(like, sizes.heads, sizes.kv_heads),
    )


def contender_case(sizes: Sizes) -> Case:
    """Sequences of these sizes, of which every second one is NaN where there are several."""
    several = sizes.batch > 1
    return Case(sizes.sequences, sizes.heads, sizes.kv_heads, gap=3, poisoned=several)


def inputs(plan: Tiled, case: Case, seed: int, device: str) -> dict[str, Any]:
    """q, k, v, N(0, 1) where a sequence is, NaN elsewhere; offsets, and the scale.

    For e4m3 in fp32: what is quantised.
    """
    queries, keys = zip(*case.lengths, strict=True)
    held = [count + 3 * case.used for count in keys]
    at_q, at_k = offsets(queries, case.gap), offsets(held, case.gap)
    dice = torch.Generator(device=device).manual_seed(seed)

    def normal(at: list[int], counts: Sequence[int], heads: int, columns: int) -> Tensor:
        return noise(plan, case, at, counts, (heads, columns), dice)

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


def noise(
    plan: Tiled,
    case: Case,
    at: Sequence[int],
    counts: Sequence[int],
    shape: tuple[int, ...],
    dice: torch.Generator,
) -> Tensor:
    """Rows of this shape, of all sequences and of what lies around them.

    They are in the Plan's dtype, or in fp32 what is quantised to e4m3.

    Those of a sequence that is judged, `counts` of them from `at` on, are N(0, 1), others NaN.
    """
    rows = at[-1] + case.gap
    dtype = torch.float32 if plan.dtype.fp8 else getattr(torch, plan.dtype.torch)
    numbers = torch.randn((rows, *shape), generator=dice, device=dice.device, dtype=dtype)
    mine = torch.zeros(rows, dtype=torch.bool)
    for sequence in case.judged:
        mine[at[sequence] : at[sequence] + counts[sequence]] = True
    return numbers.masked_fill_(~mine.to(dice.device).view(-1, *[1] * len(shape)), torch.nan)


def empty_around(x: Tensor, at: Sequence[int], value: float = 0.0) -> bool:
    """Whether the rows of x, its first dimension, before and behind all sequences are `value`."""
    return bool((x[: at[0]] == value).all() and (x[at[-1] :] == value).all())


def offsets(lengths: Sequence[int], begin: int = 0) -> list[int]:
    """Where sequences of these lengths begin, and where the last one ends."""
    return list(accumulate(lengths, initial=begin))
