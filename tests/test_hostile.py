"""Keys and values that are hard on a kernel, through the emulation, against fp64.

Scores that are: tests/test_families.py.

The same on a Hopper GPU, with the kernels themselves: tests/gpu/test_hostile.py.
"""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from fagen.kinds.forward.emulate import emulate
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.plan import Plan, plan
from tests import tensors
from tests.hostile import needle

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
MAXIMA = {
    "lazy": {},
    "online": {"maximum": "online"},
    "threshold": {"maximum": "online", "rescale_threshold": 8.0},
}


def planned(**changes) -> Plan:
    keys = dict(head_dim=16, dtype="fp16", mask="full", block_m=64, block_n=32)
    return plan(Schedule.make(**keys | changes))


normal = partial(tensors.normal, dtype=torch.float16)


@pytest.fixture(params=MAXIMA.values(), ids=MAXIMA)
def maximum(request):
    return request.param


def held(plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float, units: float = 2) -> Tensor:
    """Hold the emulation to fp64 within some units in the last place of the largest V."""
    out, lse = emulate(plan, q, k, v, scale)
    exact, exact_lse = reference(q, k, v, mask=plan.mask.name, scale=scale)
    unit = torch.finfo(q.dtype).eps * float(v.abs().amax())
    assert (out.double() - exact).abs().amax() <= units * unit
    finite = exact_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    close = (lse.double() - exact_lse).abs() <= 1e-3 + 2.0**-22 * exact_lse.abs()
    assert close[finite].all()
    return out


# ---- keys that nobody can see -------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_of_minus_infinity_have_no_weight(maximum, dtype, mask):
    """All of the blocks that come first, so that row maxima are still what they began as."""
    plan = planned(dtype=dtype, mask=mask, **maximum)
    q, k = (normal(1, rows, 2, 16, dtype=DTYPES[dtype]) for rows in (96, 160))
    q, v = q.abs(), k.clone()
    k[:, 64:] = -math.inf
    out, lse = emulate(plan, q, k, v, 0.25)
    exact, exact_lse = reference(q, k[:, :64], v[:, :64], mask="full", scale=0.25)
    assert (out.double() - exact).abs().amax() <= 2 * torch.finfo(q.dtype).eps * v.abs().amax()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)


def test_rows_whose_keys_are_all_minus_infinity_see_none(maximum):
    plan = planned(**maximum)
    q, k, v = normal(1, 64, 1, 16).abs(), normal(1, 96, 1, 16), normal(1, 96, 1, 16)
    k[:] = -math.inf
    v[:, 5] = math.nan
    out, lse = emulate(plan, q, k, v, 0.25)
    assert not out.any() and (lse == -math.inf).all()


@pytest.mark.parametrize("scale", [1e-38, 1e-4, 1.0, 1e8])
def test_rows_that_see_no_key_are_zeros_whatever_the_scale_and_v(maximum, scale):
    """In a tile of which other rows see some: their P is 0, and 0 times infinity would be NaN."""
    plan = planned(mask="causal", **maximum)
    q, k, v = torch.zeros(1, 96, 1, 16).half(), normal(1, 64, 1, 16), normal(1, 64, 1, 16)
    v[:, 40] = math.inf
    v[:, 41] = math.nan
    out, lse = emulate(plan, q, k, v, scale)
    assert not out[:, :32].any() and (lse[..., :32] == -math.inf).all()
    # a key that is masked beside others that are seen has weight 0, times what its V is, as torch's
    assert out[:, -1].isnan().all() and lse[..., 32:].isfinite().all()


# ---- the ends of a range ------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1, -1])
def test_an_average_of_v_stays_within_v(maximum, sign):
    """P is rounded, up for many of these, and its sum is not."""
    plan = planned(**maximum)
    largest = torch.finfo(torch.float16).max
    q, k = normal(2, 64, 4, 16), normal(2, 500, 4, 16, seed=1)
    v = torch.full_like(k, sign * largest)
    for scale in (0.02, 0.25, 1.0):
        out, _ = emulate(plan, q, k, v, scale)
        assert out.isfinite().all() and (out * sign >= largest - 64).all()


def test_an_infinite_v_is_infinite_and_nan_is_nan():
    plan = planned()
    q, k, v = normal(1, 64, 1, 16), normal(1, 100, 1, 16), normal(1, 100, 1, 16)
    v[:, 7, :, 0], v[:, 8, :, 1], v[:, 9, :, 2] = math.inf, -math.inf, math.nan
    out, _ = emulate(plan, q, k, v, 0.25)
    assert (out[..., 0] == math.inf).all() and (out[..., 1] == -math.inf).all()
    assert out[..., 2].isnan().all() and out[..., 3:].isfinite().all()


def test_in_bf16_a_row_max_may_be_stale_by_two_to_the_sixty_for_a_large_v():
    """A lane's sum is below the bound in each block: O is finite as far as is promised."""
    plan = planned(dtype="bf16", block_n=128)
    q, k = needle(64, 4096, 16, 59 * math.log(2) - math.log(32), torch.bfloat16, first=128)
    v = torch.full_like(k, 1e15)
    held(plan, q, k, v, 1.0)


# ---- sums over many keys ------------------------------------------------------------------------


def test_promotion_keeps_sums_that_the_tensor_cores_cut_off_beside_a_large_one():
    """The first key's V is large, what follows is cut off beside it, and the last takes it away."""
    keys = 2048
    k = normal(1, keys, 1, 16)
    k[:, 0] = k[:, -1] = 1.0
    q, v = torch.full((1, 1, 1, 16), 0.25).half(), torch.ones(1, keys, 1, 16).half()
    v[:, 0], v[:, -1] = 6e4, -6e4
    exact, _ = reference(q, k, v, mask="full", scale=1.0)
    errors = {}
    for promote in (0, 1):
        plan = planned(block_n=128, promote=promote)
        out, _ = emulate(plan, q, k, v, 1.0, hopper_sums=True)
        errors[promote] = float((out.double() - exact).abs().amax())
    assert errors[0] > 2e-3 and errors[1] < errors[0] / 4


def test_promotion_changes_nothing_but_the_order_of_sums(maximum):
    plain = planned(dtype="fp16", block_n=16, **maximum)
    q, k, v = normal(1, 70, 2, 16), normal(1, 200, 2, 16, seed=1), normal(1, 200, 2, 16, seed=2)
    for promote in (1, 3, 64):
        plan = planned(dtype="fp16", block_n=16, promote=promote, **maximum)
        result, expected = (emulate(variant, q, k, v, 0.5) for variant in (plan, plain))
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
        held(plan, q, k, v, 0.5)
