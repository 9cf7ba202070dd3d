"""Ways to store q, k and v that the kernels must take without a copy; sizes in, tensors out."""

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from fagen.problem import Cell
from fagen.vocab import DTYPES

QKV = tuple[Tensor, Tensor, Tensor]
STEP = 8  # elements in 16 bytes of a 16-bit dtype


def _normal(case: Cell, *sizes: int) -> Tensor:
    return torch.randn(sizes, device="cuda", dtype=getattr(torch, DTYPES[case.problem.dtype].torch))


def _each(case: Cell, make: Callable[[int, int, int], Tensor]) -> QKV:
    """`make(seqlen, heads, columns)` for q, k and v."""
    size = case.sizes
    return (
        make(size.seqlen_q, size.heads, case.problem.head_dim),
        make(size.seqlen_k, size.kv_heads, case.problem.head_dim),
        make(size.seqlen_k, size.kv_heads, case.problem.head_dim_v),
    )


def heads_first(case: Cell) -> QKV:
    """Stored (B, H, S, D)."""
    return _each(case, lambda s, h, d: _normal(case, case.sizes.batch, h, s, d).transpose(1, 2))


def sequence_first(case: Cell) -> QKV:
    """Stored (S, B, H, D)."""
    return _each(case, lambda s, h, d: _normal(case, s, case.sizes.batch, h, d).transpose(0, 1))


def packed(case: Cell) -> QKV:
    """Slices of one projection, (B, S, H D + Hk D + Hk Dv); needs Sq == Sk."""
    size, d, dv = case.sizes, case.problem.head_dim, case.problem.head_dim_v
    widths = [size.heads * d, size.kv_heads * d, size.kv_heads * dv]
    whole = _normal(case, size.batch, size.seqlen_q, sum(widths))
    q, k, v = whole.split(widths, dim=-1)
    return q.unflatten(-1, (-1, d)), k.unflatten(-1, (-1, d)), v.unflatten(-1, (-1, dv))


def expanded_heads(case: Cell) -> QKV:
    """One head of K and V shown as many: stride 0 over heads."""
    size = case.sizes
    q, _, _ = _each(case, lambda s, h, d: _normal(case, size.batch, s, h, d))
    k = _normal(case, size.batch, size.seqlen_k, 1, case.problem.head_dim)
    v = _normal(case, size.batch, size.seqlen_k, 1, case.problem.head_dim_v)
    return q, k.expand(-1, -1, size.kv_heads, -1), v.expand(-1, -1, size.kv_heads, -1)


def expanded_batch(case: Cell) -> QKV:
    """One sequence of K and V under every query batch: stride 0 over the batch."""
    size = case.sizes
    q, _, _ = _each(case, lambda s, h, d: _normal(case, size.batch, s, h, d))
    k = _normal(case, 1, size.seqlen_k, size.kv_heads, case.problem.head_dim)
    v = _normal(case, 1, size.seqlen_k, size.kv_heads, case.problem.head_dim_v)
    return q, k.expand(size.batch, -1, -1, -1), v.expand(size.batch, -1, -1, -1)


def every_second(case: Cell) -> QKV:
    """Every second position of a longer sequence."""
    return _each(case, lambda s, h, d: _normal(case, case.sizes.batch, 2 * s, h, d)[:, ::2])


def wide_rows(case: Cell) -> QKV:
    """The first columns of wider rows, so that reading on past a row reads numbers."""
    return _each(case, lambda s, h, d: _normal(case, case.sizes.batch, s, h, d + STEP)[..., :d])


def anyhow(seed: int) -> Callable[[Cell], QKV]:
    """Stored in a random order of dimensions, with random gaps full of NaN, at a random offset."""

    def make(case: Cell) -> QKV:
        dice = random.Random(seed)
        return _each(case, lambda s, h, d: _scattered(case, dice, (case.sizes.batch, s, h, d)))

    make.__name__ = f"anyhow_{seed}"
    return make


def _scattered(case: Cell, dice: random.Random, sizes: tuple[int, ...]) -> Tensor:
    strides = [0, 0, 0, 1]
    reach = sizes[3] + STEP * dice.randrange(3)  # elements that one row takes up
    for dim in dice.sample(range(3), 3):
        strides[dim] = math.ceil(reach / STEP) * STEP
        reach = strides[dim] * max(sizes[dim], 1) + STEP * dice.randrange(3)
    offset = STEP * dice.randrange(4)
    values = _normal(case, *sizes)
    storage = torch.full((offset + reach,), math.nan, device="cuda", dtype=values.dtype)
    return storage.as_strided(sizes, strides, offset).copy_(values)


LAYOUTS = (
    heads_first,
    sequence_first,
    packed,
    expanded_heads,
    expanded_batch,
    every_second,
    wide_rows,
    *map(anyhow, range(6)),
)
