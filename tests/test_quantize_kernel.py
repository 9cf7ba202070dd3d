"""The kernel of a quantiser: its own text, run on a CPU."""

import pytest
import torch
from torch import Tensor

from fagen import simulator
from fagen.e4m3 import Centered, by_columns
from fagen.kinds.quantize.oracle import quantize
from fagen.kinds.quantize.plan import Plan
from fagen.render import render
from fagen.runtime.checks import allocated, checked
from tests.often import some
from tests.quantize_helpers import SEED, SPREAD, normal, planned, rotary, uneven


def run_on_cpu(plan: Plan, x: Tensor, **more: Tensor) -> Centered:
    """What the kernels' text, on the simulated GPU, makes of x and of results that are given."""
    arguments = {"x": x, **more}
    if angles := rotary(plan, *x.shape[:2]):
        arguments |= {"cos": angles[0], "sin": angles[1]}
    expected = plan.signature.outputs
    results = dict(zip(expected, allocated(plan, arguments, checked(plan, arguments)), strict=True))
    named = {tensor.result: x for tensor, x in results.items() if tensor.name not in more}
    library = simulator.build(render(plan).kernel)
    simulator.call(plan, library, **arguments, named={**named, "seed": SEED})
    values, descale, mean = (*results.values(), x)[:3]
    return Centered(values.view(torch.uint8), descale, mean)


@pytest.mark.parametrize("slug", some(SPREAD, SPREAD[::5]))
def test_the_kernels_own_text_computes_what_the_reference_does(slug):
    plan = planned(slug)
    x = uneven(plan, 2, 203, 2)
    got = run_on_cpu(plan, x)
    expected = quantize(plan, x, SEED, rotary=rotary(plan, 2, 203))
    descale = expected.descale[0, 0] if plan.by_tensor else expected.descale
    rounding = 1e-5 if plan.center else 1e-6
    assert torch.allclose(got.descale.view_as(descale), descale, rtol=rounding)
    if plan.center:
        assert torch.allclose(got.mean, expected.mean, rtol=1e-5, atol=1e-5)
    bits = expected.values.view(torch.uint8)
    if not (plan.rotate or plan.center):  # nothing is added up
        assert torch.equal(got.values, bits)
    if plan.columns:
        assert not got.values[by_columns(torch.ones_like(x)) == 0].any()
    # sums that were rounded in another order may fall on the other side of a tie
    different = got.values != bits
    assert different.float().mean() < 1e-3
    near = (got.values.int() - bits.int()).abs() <= 1
    assert torch.all(near | (bits.int() % 128 < 2))  # a zero may have either sign


PADDED = (
    "quant_bf16_d48_center_shead",
    "quant_bf16_d80_rot_center_sr128",
    "quant_fp16_d240_rot_center",
)


@pytest.mark.parametrize("slug", some(PADDED, PADDED[1:2]))
def test_columns_past_the_head_dim_have_no_part_in_maxima(slug):
    """Less their means all numbers are far below one."""
    plan = planned(slug)
    x = (uneven(plan, 1, 150, 2) * 2.0**-10).to(getattr(torch, plan.dtype.torch))
    got = run_on_cpu(plan, x)
    expected = quantize(plan, x, SEED)
    assert torch.allclose(got.descale.view_as(expected.descale), expected.descale, rtol=1e-5)
    assert (got.values != expected.values.view(torch.uint8)).float().mean() < 1e-3


@pytest.mark.parametrize("slug", ["quant_fp16_d64_shead_vcols", "quant_fp16_d64_stensor"])
def test_the_kernels_own_text_takes_a_given_descale(slug):
    plan = planned(slug)
    x = uneven(plan, 1, 50, 2)
    descale = torch.tensor(0.01)
    got = run_on_cpu(plan, x, descale=descale if plan.by_tensor else descale.repeat(1, 2))
    assert torch.equal(got.values, quantize(plan, x, descale=descale).values.view(torch.uint8))


@pytest.mark.parametrize("slug", ["quant_fp16_d64_center_scol_vcols", "quant_bf16_d128_rot_center"])
def test_the_kernels_own_text_takes_given_means(slug):
    plan = planned(slug)
    x = uneven(plan, 1, 50, 2)
    more = dict(mean=normal(1, 2, plan.head_dim).float())
    more |= dict(descale=torch.full((1, 2, plan.head_dim), 0.01)) if plan.by_column else {}
    got = run_on_cpu(plan, x, **more)
    expected = quantize(plan, x, SEED, **more).values.view(torch.uint8)
    assert (got.values != expected).float().mean() < 1e-3
