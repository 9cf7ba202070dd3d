"""The kernel of a quantiser: its own text, run on a CPU, and what its compilers make of it."""

import ctypes
import re

import pytest
import torch
from torch import Tensor

from fagen import flow, registry, simulator
from fagen.arch import SM90
from fagen.e4m3 import Centered, by_columns
from fagen.kinds.quantize.oracle import quantize
from fagen.kinds.quantize.plan import Plan
from fagen.render import HASH_WORD, formatted, render, token_hash
from fagen.runtime.checks import allocated, checked
from tests.c_calls import changed
from tests.often import some
from tests.quantize_helpers import SEED, SPREAD, normal, planned, rotary, uneven

# ---- the kernel's text, on a CPU ----------------------------------------------------------------


def run_on_cpu(plan: Plan, x: Tensor, **given: Tensor) -> Centered:
    """What the kernels' text, on the simulated GPU, makes of x and of results that are given."""
    arguments = {"x": x, **given}
    if angles := rotary(plan, *x.shape[:2]):
        arguments |= {"cos": angles[0], "sin": angles[1]}
    expected = plan.signature.outputs
    results = dict(zip(expected, allocated(plan, arguments, checked(plan, arguments)), strict=True))
    named = {tensor.result: x for tensor, x in results.items() if tensor.name not in given}
    library = simulator.build(render(plan).kernel)
    simulator.call(plan, library, **arguments, named={**named, "seed": SEED})
    values, descale, mean = (*results.values(), x)[:3]
    return Centered(values.view(torch.uint8), descale, mean)


@pytest.mark.parametrize("slug", some(SPREAD, SPREAD[::3]))
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


@pytest.mark.parametrize(
    "slug",
    [
        "quant_bf16_d48_center_shead",
        "quant_bf16_d80_rot_center_sr128",
        "quant_fp16_d240_rot_center",
    ],
)
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
    given = dict(mean=normal(1, 2, plan.head_dim).float())
    given |= dict(descale=torch.full((1, 2, plan.head_dim), 0.01)) if plan.by_column else {}
    got = run_on_cpu(plan, x, **given)
    expected = quantize(plan, x, SEED, **given).values.view(torch.uint8)
    assert (got.values != expected).float().mean() < 1e-3


# ---- its text and its compiler ------------------------------------------------------------------


@pytest.mark.parametrize("slug", SPREAD)
def test_its_text_is_laid_out_complete_and_says_its_hash_once(slug):
    source = render(planned(slug))
    assert formatted(source.kernel) == source.kernel
    assert source.kernel.count(f'"{source.hash}"') == 1 and HASH_WORD not in source.kernel
    assert token_hash(source.kernel.replace(source.hash, HASH_WORD)) == source.hash
    assert not re.search(r"\b(None|True|False)\b|{%|{{ ", source.kernel)
    assert f"int fagen_{slug}(" in source.kernel


@pytest.fixture(scope="module", params=["quant_fp16_d64_shead", "quant_fp16_d64_vcols"])
def library(request) -> tuple[Plan, ctypes.CDLL]:
    plan, binary = flow.built(registry.from_slug(request.param), binding=False)
    return plan, ctypes.CDLL(str(binary.library))


def test_its_launcher_refuses_what_it_cannot_do(library):
    plan, kernel = library
    launch, message = kernel[f"fagen_{plan.slug}"], kernel[f"fagen_{plan.slug}_message"]
    message.restype = ctypes.c_char_p

    def said(**changes: int) -> str:
        args = changed(plan, dict(batch=1, heads=2, seqlen=48), changes)
        return message(launch(ctypes.byref(args), None)).decode()

    for key in ("struct_bytes", "version"):
        assert said(**{key: 8}) == "struct_bytes or version is that of another FagenQuantizeArgs"
    for key in ("x", "values", "descale"):
        assert said(**{key: 0}) == "a tensor that is needed is null"
    for key in ("x", "values"):
        assert said(**{key: 4104}) == (
            "a tensor does not begin at a multiple of 16 bytes (descale: 4)"
        )
    bad_stride = "a stride is negative, too large, or no multiple of 16 bytes"
    for key in ("x_stride_seq", "x_stride_head"):
        assert said(**{key: 4}) == bad_stride
    assert said(values_stride_seq=40) == bad_stride
    overlap = "elements of an output (values, descale) overlap: a stride is 0 or too small"
    for key in ("values_stride_seq", "values_stride_head"):
        assert said(**{key: 0}) == overlap
    assert said(x_stride_head=-64) == bad_stride
    assert said(descale_stride_head=(1 << 30) + 1) == bad_stride
    for key in ("batch", "heads", "seqlen"):
        assert said(**{key: -1}) == "a size is negative or too large"
        assert said(**{key: 0}) == "launched"  # nothing to do
    for key in ("seqlen", "batch", "heads"):
        assert said(**{key: (1 << 30) + 1}) == "a size is negative or too large"
    for most in (dict(batch=1 << 16), dict(seqlen=(1 << 21) + 1)):
        assert said(**most, workspace_bytes=1 << 40) == said()  # as many as there may be
    assert said(batch=1 << 29, workspace_bytes=1 << 40) == "there are 2^30 tiles or more"
    if plan.by_block:
        assert said(descale_given=1) == "descales of blocks are found, they cannot be given"
    else:
        for change in (dict(workspace=0), dict(workspace_bytes=7)):
            assert said(**change).startswith("the workspace is null, too small, or does not begin")
            assert "workspace" not in said(**change, descale_given=1)
    assert "Hopper" in said() or torch.cuda.is_available()
    assert "null" in message(launch(None, None)).decode()
    assert message(99) == b"unknown status"


WIDE = (  # of these registers are scarcest
    "quant_bf16_d256_rot_sr32_vcols",
    "quant_bf16_d192_halves_rot",
    "quant_bf16_d256_pairs_rot_shead",
    "quant_fp16_d128_center_scol_vcols",
    "quant_bf16_d256_center_scol_vcols",
    "quant_bf16_d256_rot_center",
    "quant_fp16_d128_rot_center",
    "quant_fp16_d112_rot_center",
    "quant_bf16_d224_rot_center_shead_vcols",
)


@pytest.mark.parametrize("slug", some((*SPREAD[:8], *WIDE), (*SPREAD[:2], *WIDE[::3])))
def test_it_compiles_without_a_spill_or_a_warning(slug):
    plan, binary = flow.built(registry.from_slug(slug), binding=False)
    assert "warning" not in (binary.folder / "compiler.log").read_text()
    assert binary.report.stack_bytes == binary.report.spill_store_bytes == 0
    assert 0 < binary.report.registers <= plan.launch_registers
    assert plan.launch_registers * plan.threads * plan.blocks <= SM90.registers_per_sm
