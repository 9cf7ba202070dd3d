"""Scores and values that are hard on a kernel, through every committed one of 16 bits.

The same through the emulation: tests/test_hostile.py.
"""

import math

import pytest
import torch

from fagen.kinds.forward.oracle import reference
from fagen.measure import families
from fagen.measure.inputs import inputs, softmax_scale
from fagen.problem import Sizes
from tests.hostile import needle

pytestmark = pytest.mark.gpu

UNITS = 2  # in the last place of the largest V: P is rounded, and O


def held(kernel, q, k, v, scale):
    """Hold a kernel to fp64; return what it found."""
    out, lse = kernel.poisoned(q, k, v, scale)
    exact, exact_lse = reference(q, k, v, mask=kernel.plan.mask.name, scale=scale)
    unit = torch.finfo(q.dtype).eps * float(v.abs().amax())
    assert float((out.double() - exact).abs().amax()) <= UNITS * unit
    seen = exact_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    close = (lse.double() - exact_lse).abs() <= 1e-3 + 2.0**-22 * exact_lse.abs()
    assert bool(close[seen].all())
    return out, lse


def positive(kernel, *sizes):
    """Inputs of which q is above 0: times a key of minus infinity that makes no NaN."""
    q, k, v = inputs(kernel.cell(*sizes))
    return q.abs() + 0.125, k, v


def test_keys_of_minus_infinity_have_no_weight(kernel):
    """More of them than two blocks, which are the first that a row meets."""
    hidden = 2 * kernel.plan.block_n + 5
    q, k, v = positive(kernel, 1, 200, 300 + hidden, 2, 1)
    k[:, 300:] = -math.inf
    held(kernel, q, k, v, softmax_scale(kernel.plan.head_dim))


def test_rows_whose_keys_are_all_minus_infinity_see_none(kernel):
    q, k, v = positive(kernel, 1, 130, 300, 2, 1)
    k[:] = -math.inf
    v[:, 7] = math.nan
    out, lse = kernel.poisoned(q, k, v, softmax_scale(kernel.plan.head_dim))
    assert not out.any() and bool((lse == -math.inf).all())


@pytest.mark.parametrize("scale", [1e-38, 0.1, 1e8])
def test_rows_that_see_no_key_are_zeros_whatever_the_scale_and_v(kernel, scale):
    """Beside rows of their tile that see some, under a mask that has such rows."""
    q, k, v = inputs(kernel.cell(1, 200, 130, 2, 1))
    v[:, 3], v[:, 4] = math.inf, math.nan
    out, lse = kernel.poisoned(torch.zeros_like(q), k, v, scale)
    unseen = 70 if kernel.plan.mask.last_by_row else 0
    assert not out[:, :unseen].any() and bool((lse[..., :unseen] == -math.inf).all())
    # the first row that sees both
    assert bool(out[:, unseen + 4].isnan().all() and lse[..., unseen:].isfinite().all())


def test_hard_scores_are_as_exact_as_others(kernel):
    def exact(q, k, v, scale):
        return reference(q, k, v, mask=kernel.plan.mask.name, scale=scale)

    sizes = (*families.SIZES, Sizes(1, 2, 1, 7, 1_500), Sizes(1, 1, 1, 128, 8_192))
    found = families.errors(
        kernel.plan, kernel.poisoned, exact, sizes, families.FAMILIES, device="cuda"
    )
    wrong = [str(one) for one in found if not one.share <= 1]
    assert not wrong, "\n".join(wrong)


def test_an_average_of_v_stays_within_v(kernel):
    """In fp16 at the end of its range: P is rounded, and its sum is not."""
    q, k, v = inputs(kernel.cell(1, 300, 700, 4, 2))
    largest = 65504.0
    for scale in (0.01, 0.1, 0.5):
        out, _ = kernel.poisoned(q, k, torch.full_like(v, -largest), scale)
        assert bool(out.isfinite().all())
        assert float((out + largest).abs().amax()) <= UNITS * torch.finfo(v.dtype).eps * largest


def test_an_infinite_v_is_infinite_and_nan_is_nan(kernel):
    q, k, v = inputs(kernel.cell(1, 1, 200, 1, 1))
    # at keys that the last row sees under any mask
    v[:, 187, :, 0], v[:, 188, :, 1], v[:, 189, :, 2] = math.inf, -math.inf, math.nan
    out, _ = kernel.poisoned(q * 0.1, k, v, softmax_scale(kernel.plan.head_dim))
    assert bool((out[..., 0] == math.inf).all() and (out[..., 1] == -math.inf).all())
    assert bool(out[..., 2].isnan().all() and out[..., 3:].isfinite().all())


def test_a_row_max_may_be_stale_by_all_that_p_holds(kernel):
    """The keys that a row meets last are far above the others, just as far as may be."""
    most = math.log2(kernel.plan.softmax.max_partial_sum) if kernel.plan.softmax.lazy_max else 0
    v = inputs(kernel.cell(1, 130, 2048, 1, 1))[2]
    for rise in (most - 6, most, most + 1, 200):
        q, k = needle(130, 2048, kernel.plan.head_dim, rise * math.log(2), v.dtype, first=100)
        held(kernel, q.cuda(), k.cuda(), v, 1.0)
        if v.dtype == torch.bfloat16:
            held(kernel, q.cuda(), k.cuda(), v.sign() * 1e15, 1.0)


def test_sums_over_many_keys_keep_their_last_bits_where_they_are_promoted(kernel):
    if not kernel.plan.softmax.promote:
        pytest.skip("its sums are the tensor cores'")
    q, k, v = inputs(kernel.cell(1, 64, 1 << 19, 1, 1))
    out, _ = kernel.poisoned(q, k, torch.ones_like(v), softmax_scale(kernel.plan.head_dim))
    assert bool((out == 1).all())
