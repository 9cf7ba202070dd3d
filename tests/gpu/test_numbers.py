"""What every committed kernel computes, against fp64, whatever the sizes, strides and scores.

Those of e4m3 are held to more in test_fp8_numbers.
"""

import math
from functools import partial

import pytest
import torch

from fagen.kinds.forward.verify.dense import RULE, shape_error
from fagen.measure.inputs import inputs, softmax_scale
from fagen.measure.verification import check
from fagen.runtime.c_interface import call
from tests.gpu.helpers import same
from tests.gpu.layouts import LAYOUTS
from tests.gpu.steep import levels, slopes

pytestmark = pytest.mark.gpu


def test_every_verification_shape_is_within_bounds(any_kernel):
    of = any_kernel.plan
    check(of, RULE, partial(call, of, any_kernel.binary.library))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_any_layout_is_read_right(kernel, layout):
    case = kernel.cell(2, 193, 193, 6, 2)
    q, k, v = layout(case)
    error = shape_error(case, kernel.poisoned, q, k, v)
    assert error.ok, error


@pytest.mark.parametrize("direction", [1, -1], ids=["rising", "falling"])
def test_scores_that_grow_along_the_keys_keep_the_running_maximum_right(kernel, direction):
    case = kernel.cell(1, 400, 700, 2, 2)
    q, k, v = inputs(case)
    ramp = torch.linspace(*(0.1, 3.0)[::direction], 700, device="cuda")
    k = (k.float() * ramp[:, None, None]).to(k.dtype)
    error = shape_error(case, kernel.poisoned, q, k, v)
    assert error.ok, error


@pytest.mark.parametrize("sizes", [(300, 700), (700, 300)], ids=["fewer rows", "more rows"])
@pytest.mark.parametrize("factor", [1, 8, 64])
def test_maxima_that_grow_beyond_what_exp2_holds_are_raised_in_time(kernel, factor, sizes):
    """Twice by up to 2.5, 20 and 160 log2 units, not in all rows of a warp; some see a key late."""
    case = kernel.cell(1, *sizes, 4, 2)
    q, k, v = inputs(case)
    q[..., 0] = factor * slopes(sizes[0])[:, None]
    k[..., 0] = levels(sizes[1])[:, None] / softmax_scale(case.problem.head_dim)
    error = shape_error(case, kernel.poisoned, q, k, v)
    assert error.ok, error


@pytest.mark.parametrize("scale", [1e-3, 1.0], ids=["flat", "sharp"])
def test_any_scale_is_applied(kernel, scale):
    case = kernel.cell(1, 257, 300, 2, 2)
    error = shape_error(case, kernel.poisoned, *inputs(case), scale=scale)
    assert error.ok, error


def test_equal_keys_average_the_values_that_a_row_sees(kernel):
    case = kernel.cell(1, 200, 200, 1, 1)
    q, k, v = inputs(case)
    out, lse = kernel.poisoned(q, torch.zeros_like(k), torch.ones_like(v), 1.0)
    assert bool((out == 1).all())
    row = torch.arange(200, device="cuda")
    seen = kernel.plan.mask.sees(row[:, None], row, 200, 200).expand(200, 200).sum(-1)
    assert torch.allclose(lse[0, 0], torch.log(seen.float()), atol=1e-5)


def test_scores_beyond_what_exp_can_hold_stay_finite(kernel):
    case = kernel.cell(1, 130, 260, 2, 2)
    q, k, v = inputs(case)
    out, lse = kernel.poisoned(q * 30, k * 30, v, 1.0)
    assert bool(torch.isfinite(out).all())
    assert bool(torch.isfinite(lse).all())
    assert float(lse.abs().max()) > 1_000


# ---- in 16 bits and in e4m3


def test_twenty_runs_are_bit_identical(every_kind):
    given, scale = every_kind.given(4, 500, 700, 40, 8)
    first = every_kind.run(given, scale)
    assert all(same(every_kind.run(given, scale), first) for _ in range(19))


def test_a_batch_gives_what_its_sequences_give_alone(every_kind):
    given, scale = every_kind.given(3, 300, 300, 4, 2)
    found = every_kind.run(given, scale)
    for i in range(3):
        own = [x[i : i + 1] for x in given]
        own = type(given)(*own) if every_kind.plan.descales else own
        alone, together = every_kind.run(own, scale), [x[i : i + 1] for x in found]
        if (
            every_kind.plan.schedule.split.fill
        ):  # how many splits there are depends on the number of tiles
            for x, y in zip(alone, together, strict=True):
                torch.testing.assert_close(x, y, rtol=2.0**-7, atol=2.0**-9)
        else:
            assert same(alone, together)


def test_the_output_is_written_to_any_strides_and_nowhere_else(every_kind):
    given, scale = every_kind.given(2, every_kind.plan.block_m + 3, 77, 3, 3)
    plain = every_kind.run(given, scale)
    batch, seqlen, heads, columns = plain[0].shape
    # stored (H, B, S, Dv) with a guard on every side
    around = plain[0].new_full((heads + 2, batch + 2, seqlen + 2, columns + 16), 12_345.0)
    guard = float(around[0, 0, 0, 0])
    out = around[1:-1, 1:-1, 1:-1, 8:-8].permute(1, 2, 0, 3)
    lse_around = torch.full((batch, heads + 2, seqlen + 8), guard, device="cuda")
    lse = lse_around[:, 1:-1, 4:-4]
    every_kind.run_into(given, scale, out, lse)
    assert same((out, lse), plain)
    out.fill_(guard)
    lse.fill_(guard)
    assert bool((around == guard).all()), "the kernel wrote beside the output"
    assert bool((lse_around == guard).all()), "the kernel wrote beside the log-sum-exp"


def test_without_a_log_sum_exp_the_output_is_the_same(every_kind):
    given, scale = every_kind.given(1, 150, 150, 2, 2)
    plain, _ = every_kind.run(given, scale)
    out = torch.full_like(plain, math.nan)
    every_kind.run_into(given, scale, out, None)
    assert torch.equal(out, plain)
