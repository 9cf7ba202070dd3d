"""Whose row max lazy rescaling raises: the emulators' tensors beside a warp's lanes, one by one.

In 16 bits by what a lane adds up, in e4m3 by each element: P saturates at 448.
"""

import math

import pytest
import torch
from torch import Tensor

from fagen.kinds.forward.emulate.tiles import emulate, outgrown, spread
from fagen.kinds.forward.plan import Plan
from fagen.registry import plan_of

PLAN = plan_of("fwd_fp16_d64_full_m64n48")


def lanes_of(plan: Plan, columns: int) -> list[list[int]]:
    """The columns that are added up together: in each 8 a lane's two."""
    return [[c for c in range(columns) if c % 8 // 2 == lane] for lane in range(4)]


def by_hand(p: Tensor, plan: Plan, rows_of_a_head: int) -> list[bool]:
    """p is (rows, columns) of a tile, head by head."""
    lanes = lanes_of(plan, p.shape[1])
    raised = []
    for top in range(0, len(p), rows_of_a_head):
        head = p[top : top + rows_of_a_head].tolist()
        for first in range(0, rows_of_a_head, 16):
            warp = head[first : first + 16]
            fit = all(
                sum(row[c] for c in lane) <= plan.softmax.max_partial_sum
                for row in warp
                for lane in lanes
            )
            raised += [not fit] * len(warp)
    return raised


@pytest.mark.parametrize("columns", [48, 41, 5])
@pytest.mark.parametrize("rows", [64, 37, 16, 3], ids="{} rows of a head".format)
def test_a_warp_is_raised_as_its_lanes_find_it(rows: int, columns: int) -> None:
    """Two batches, two heads of K and V, three of Q to each; a block may end before its columns."""
    dice = torch.Generator().manual_seed(columns)
    longest = max(len(lane) for lane in lanes_of(PLAN, columns))
    # whole numbers, whose sums are exact; those of the fullest lanes are around the limit
    p = torch.randint(0, 9, (2, 2, 3 * rows, columns), generator=dice).float()
    p *= PLAN.softmax.max_partial_sum // (4 * longest)
    p[torch.rand(2, 2, 3 * rows, generator=dice) < 0.9] /= 2  # most rows stay well below it
    raised = outgrown(p, PLAN, rows)
    assert raised.shape == (2, 2, 3 * rows, 1)
    expected = [by_hand(tile, PLAN, rows) for tile in p.flatten(0, 1)]
    assert raised.view(4, -1).tolist() == expected
    assert {True, False} == {flag for tile in expected for flag in tile}


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_row_that_has_seen_no_key_raises_its_warp_and_no_other(wrong: float) -> None:
    """Its maximum is minus infinity: then p is infinite, or NaN where the key is hidden as well."""
    for row in (0, 15, 16, 35, 36, 39):
        p = torch.zeros(1, 1, 2 * 20, 30)  # two heads of a warp and a quarter
        p[0, 0, row, 29] = wrong
        warp = next(rows for rows in ((0, 16), (16, 20), (20, 36), (36, 40)) if row < rows[1])
        expected = [warp[0] <= other < warp[1] for other in range(40)]
        assert outgrown(p, PLAN, 20).flatten().tolist() == expected
        assert by_hand(p[0, 0], PLAN, 20) == expected


def test_a_sum_may_be_the_limit_and_no_more() -> None:
    for lane in lanes_of(PLAN, PLAN.block_n):
        p = torch.zeros(1, 1, 16, PLAN.block_n)
        p[..., 3, lane[0]] = PLAN.softmax.max_partial_sum - 1
        p[..., 3, lane[-1]] += 1
        assert not outgrown(p, PLAN, 16).any()
        p[..., 3, lane[-1]] += 1
        assert outgrown(p, PLAN, 16).all()
    # a row may be as many times the limit as it has lanes, which are not added up
    p = torch.zeros(1, 1, 16, PLAN.block_n)
    p[..., [lane[0] for lane in lanes_of(PLAN, PLAN.block_n)]] = PLAN.softmax.max_partial_sum
    assert not outgrown(p, PLAN, 16).any()


@pytest.mark.parametrize("column", [0, 5, 40])
def test_in_e4m3_an_element_that_is_cut_off_raises_its_warp(column: int) -> None:
    """From 432 on it rounds to 448, or is larger; what others add up to is no matter."""
    plan = plan_of("fwd_e4m3_d64_full_m64n64_lazymax")
    for largest, raised in ((431.9, False), (432.0, True), (math.inf, True), (math.nan, True)):
        p = torch.full((1, 1, 37, 41), 400.0)
        p[..., 20, column] = largest
        expected = [raised and 16 <= row < 32 for row in range(37)]
        assert outgrown(p, plan, 37).flatten().tolist() == expected


# ---- scores that are widely spread --------------------------------------------------------------


def spread_by_hand(p: Tensor, counts: Tensor, plan: Plan, rows_of_a_head: int) -> list[bool]:
    """p is (rows, columns) of a tile's first block, head by head; a thread has rows 8 apart.

    It tells nothing where the first rows of three warps or all see fewer than 16 keys.
    """
    wide = []
    for top in range(0, len(p), rows_of_a_head):
        head = p[top : top + rows_of_a_head].tolist()
        keys = counts[top : top + rows_of_a_head].flatten().tolist()
        for warpgroup in range(0, rows_of_a_head, 64):
            warps = seeing = 0
            for warp in range(warpgroup, warpgroup + 64, 16):
                light = 0
                for row in range(warp, warp + 8):
                    for lane in lanes_of(plan, p.shape[1]):
                        # beyond, scores of 0 weigh enough
                        below = row + 8 < rows_of_a_head
                        light += (
                            below and sum(head[r][c] for r in (row, row + 8) for c in lane) < 1.25
                        )
                warps += light > 20
                seeing += keys[min(warp, rows_of_a_head - 1)] >= 16
            wide += [warps >= 3 and seeing >= 2] * min(64, rows_of_a_head - warpgroup)
    return wide


@pytest.mark.parametrize("columns", [48, 41, 9])
@pytest.mark.parametrize("rows", [128, 64, 56, 37], ids="{} rows of a head".format)
def test_a_warpgroup_finds_scores_widely_spread_where_most_warps_do(
    rows: int, columns: int
) -> None:
    dice = torch.Generator().manual_seed(columns)
    # whole 64ths, whose sums are exact; of a thread's two rows they are around 1.25
    lighter, heavier = (
        torch.randint(0, 1 + most // columns, (1, 2, 3 * rows, columns), generator=dice) / 64
        for most in (240, 400)
    )
    p = torch.cat([lighter, heavier])
    # all keys, and as many as the row's number, as under a causal mask
    every = torch.full((3 * rows, 1), 64)
    counts = torch.stack([every, torch.arange(3 * rows)[:, None] % rows + 1]).expand(2, 2, -1, 1)
    wide = spread(p, counts, PLAN, rows)
    expected = [
        spread_by_hand(tile, keys, PLAN, rows)
        for tile, keys in zip(p.flatten(0, 1), counts.flatten(0, 1), strict=True)
    ]
    assert wide.view(4, -1).tolist() == expected
    if rows > 40:
        assert {True, False} == {flag for tile in expected for flag in tile}


@pytest.mark.parametrize(("sigma", "most", "least"), [(1, 0.0, 0.0), (8, 1.0, 0.9)])
def test_scores_of_a_large_deviation_are_widely_spread(
    sigma: float, most: float, least: float
) -> None:
    dice = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 1, 64 * 16, PLAN.block_n, generator=dice) * sigma
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    counts = torch.full((1, 1, 64 * 16, 1), PLAN.block_n)
    assert least <= spread(p, counts, PLAN, 64 * 16).float().mean() <= most
    # of a few keys at the end of a sequence one is the largest, whatever the deviation is
    p[..., 3:] = 0.0
    assert not spread(p, torch.full_like(counts, 3), PLAN, 64 * 16).any()


def test_blocks_of_widely_spread_scores_find_their_maxima_first() -> None:
    """A rise that P would hold is followed in the next blocks, and not beyond."""
    keys = PLAN.block_n * (PLAN.softmax.spread_blocks + 3)
    block = torch.arange(keys).flip(0) // PLAN.block_n
    last = PLAN.softmax.spread_blocks
    for rises_in, followed in ((1, True), (last, True), (last + 1, False)):
        scores = torch.full((keys,), -30.0)
        scores[block == 0] = -40.0
        scores[keys - 1] = 0.0  # the first block's maximum; all others weigh nothing
        scores[(block == rises_in) & (torch.arange(keys) % PLAN.block_n == 0)] = 5.0
        q, k = torch.zeros(1, 64, 1, 64).half(), torch.zeros(1, keys, 1, 64).half()
        q[..., 0], k[0, :, 0, 0] = 1.0, scores.half()
        v = torch.ones(1, keys, 1, 64).half()
        v[0, :, 0] *= (scores == 5.0)[:, None]
        out, _ = emulate(PLAN, q, k, v, 1.0)
        weight = 1 / (1 + math.exp(-5.0))
        # P is 1 where the maximum was found first, else exp(5), and rounded
        p = 1.0 if followed else float(torch.tensor(math.exp(5.0)).half())
        expected = p * weight / (1.0 if followed else math.exp(5.0))
        assert out.float().sub(torch.tensor(expected).half().float()).abs().max() < 1e-6


def test_hidden_keys_add_nothing_in_rows_that_have_seen_others() -> None:
    guess = torch.exp2(torch.full((1, 1, 16, 32), -math.inf) - 5.0)
    assert not outgrown(guess, PLAN, 16).any()
