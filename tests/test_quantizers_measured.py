"""How a quantiser is compared with its reference: with the reference in its place, and faults."""

from collections.abc import Callable, Mapping
from itertools import product

import pytest
import torch
from torch import Tensor

from fagen import measure
from fagen.e4m3 import E4M3, by_columns, rounded
from fagen.errors import DeviceError, VerificationError
from fagen.kinds.quantize.oracle import quantize
from fagen.kinds.quantize.plan import Plan
from fagen.kinds.quantize.verify import (
    RULE,
    SEED,
    SIZES,
    Kernel,
    Size,
    angles,
    cases,
    numbers,
    places,
    rounding_error,
)
from fagen.measure.verification import Run, check
from tests.quantize_helpers import planned

SLUGS = (
    "quant_fp16_d64_rot_shead",
    "quant_bf16_d48_stensor_vcols",
    "quant_fp16_d80_rot",
    "quant_bf16_d32_pairs_rot",
    "quant_fp16_d48_center_scol_vcols",
    "quant_bf16_d64_rot_center",
    "quant_fp16_d64_rot_center_shead",
)


Fault = Callable[[tuple[Tensor, ...]], object]


@pytest.fixture(params=SLUGS)
def plan(request) -> Plan:
    return planned(request.param)


def right(plan: Plan) -> Kernel:
    """What writes the reference's values, as a kernel would."""

    def kernel(x: Tensor, into: tuple[Tensor, ...], options: Mapping[str, Tensor]) -> None:
        named = dict(options)
        if "descale" in named and not plan.by_column:
            named["descale"] = named["descale"].reshape(-1)[:1]
        values, descale, *mean = quantize(plan, x, SEED, rotary=angles(plan, x), **named)
        into[0].copy_(values)
        if "descale" not in options:
            into[1].copy_(descale[0, 0, 0] if plan.by_tensor else descale.view_as(into[1]))
        if mean and "mean" not in options:
            into[2].copy_(mean[0])

    return kernel


def run_of(plan: Plan, kernel: Kernel) -> Run:
    """What is run by the names of a signature."""
    outputs = [output.result for output in plan.signature.outputs]

    def run(*, x: Tensor, **named: Tensor) -> None:
        into = tuple(named[name] for name in outputs if name in named)
        kernel(x, into, {name: named[name] for name in ("descale", "mean") if name in named})

    return run


def spoiled(kernel: Kernel, fault: Fault) -> Kernel:
    """What writes as a kernel does, and then a fault into what it wrote."""

    def faulty(x: Tensor, into: tuple[Tensor, ...], options: Mapping[str, Tensor]) -> None:
        kernel(x, into, options)
        fault(into)

    return faulty


def test_what_is_the_reference_itself_has_no_error_at_any_size(plan):
    lines: list[str] = []
    small = [size for size in SIZES if size.batch * size.seqlen * size.heads < 5000]
    run, some = run_of(plan, right(plan)), cases(plan, small)
    errors = check(plan, RULE, run, cases=some, device="cpu", progress=lines.append)
    ways = 1 if plan.by_block and not plan.center else 2
    assert len(errors) == len(lines) == len(small) * ways
    for error in errors:
        assert error.ok and error.neighbours == error.wrong == error.descale_error == 0
    assert all(line.endswith("  ok") for line in lines)


def bytes_of(into: tuple[Tensor, ...]) -> Tensor:
    """The values that were written, as bytes."""
    return into[0].view(torch.uint8)


CENTERS = "quant_fp16_d48_center_scol_vcols"
FAULTS: dict[str, Fault] = {
    "a value that was not written": lambda into: bytes_of(into).flatten()[-1:].fill_(0x7F),
    "a wrong sign": lambda into: bytes_of(into).bitwise_xor_(0x80),
    "values two steps away": lambda into: bytes_of(into).add_(2),
    "too many neighbours": lambda into: bytes_of(into).bitwise_xor_(1),
    "a descale that was not written": lambda into: into[1].view(-1)[-1:].fill_(torch.nan),
    "a descale that is off": lambda into: into[1].mul_(1.0001),
    "a mean that is off": lambda into: into[2].add_(1e-3),
    "a mean that was not written": lambda into: into[2].view(-1)[-1:].fill_(torch.nan),
}


@pytest.mark.parametrize(
    ("slug", "fault"),
    [
        (slug, fault)
        for slug, fault in product(SLUGS, FAULTS)
        if slug == CENTERS or "mean" not in fault
    ],
)
def test_a_fault_is_found(slug, fault):
    plan = planned(slug)
    with pytest.raises(VerificationError, match="shapes are wrong"):
        spoilt = run_of(plan, spoiled(right(plan), FAULTS[fault]))
        check(plan, RULE, spoilt, cases=cases(plan, [Size(2, 70, 3)]), device="cpu")


# ---- single rows less themselves


CENTERED = (
    "quant_fp16_d128_rot_center",
    "quant_fp16_d128_rot_center_stensor_vcols",
    "quant_bf16_d64_center_shead",
    "quant_bf16_d80_center_sr128_vcols",
)


def with_noise(plan: Plan, units: float) -> Kernel:
    """The reference, with `units` in the last place of the largest |x| where nothing is left."""

    def kernel(x: Tensor, into: tuple[Tensor, ...], options: Mapping[str, Tensor]) -> None:
        right(plan)(x, into, options)
        if "mean" in options:
            return
        size = x.float().abs().amax() * 2.0**-23 * units
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
        out = rounded(noise * size, plan.schedule.quantize.scales, plan.scale_rows)
        into[0].copy_(by_columns(out.values) if plan.columns else out.values)
        into[1].copy_(out.descale[0, 0, 0] if plan.by_tensor else out.descale.view_as(into[1]))
        into[2].add_(size / 4)

    return kernel


@pytest.mark.parametrize("slug", CENTERED)
@pytest.mark.parametrize("size", [Size(1, 1, 1), Size(2, 1, 3)], ids=str)
def test_what_rounding_leaves_of_a_single_row_is_right_whatever_its_bytes(slug, size):
    plan = planned(slug)
    x = numbers(plan, size, seed=0)
    x = x.sign() * x.abs().clamp(1, 2)  # of one size in all heads
    error = rounding_error(plan, with_noise(plan, 1.0), x, with_scales=False)
    assert error.ok and error.neighbours == error.wrong == error.descale_error == 0
    assert rounding_error(plan, with_noise(plan, 1.0), x, with_scales=True).ok
    noisy = rounding_error(plan, with_noise(plan, 100.0), x, with_scales=False)
    assert not noisy.ok and noisy.wrong and noisy.descale_error > 1


FAULTS_OF_NOISE: dict[str, Fault] = {
    "a value that was not written": lambda into: bytes_of(into).flatten()[:1].fill_(127),
    "a descale that was not written": lambda into: into[1].view(-1)[:1].fill_(torch.nan),
    "a descale of no noise": lambda into: (
        bytes_of(into).zero_(),
        into[1].fill_(1 / 448),
    ),
    "a mean that is off": lambda into: into[2].view(-1)[:1].add_(1e-3),
    "a mean that was not written": lambda into: into[2].view(-1)[:1].fill_(torch.nan),
}


@pytest.mark.parametrize("fault", FAULTS_OF_NOISE)
@pytest.mark.parametrize("slug", CENTERED)
def test_a_fault_in_a_single_row_is_found(slug, fault):
    plan = planned(slug)
    kernel = spoiled(with_noise(plan, 1.0), FAULTS_OF_NOISE[fault])
    assert not rounding_error(
        plan, kernel, numbers(plan, Size(1, 1, 1), seed=0), with_scales=False
    ).ok


@pytest.mark.parametrize(
    ("x", "fault"),
    [  # numbers 2^-8 around their mean, hundreds of times what rounding may be
        ((1 + torch.randn(1, 70, 2, 128) * 2.0**-8).half(), lambda into: into[1].mul_(1.0001)),
        (torch.zeros(1, 3, 2, 128).half(), lambda into: bytes_of(into)[0, 0, 0, :1].fill_(2)),
    ],
    ids=["little", "zeros"],
)
def test_what_is_no_rounding_is_judged_by_its_bytes(x, fault):
    plan = planned("quant_fp16_d128_rot_center")
    assert rounding_error(plan, right(plan), x, with_scales=False).ok
    assert not rounding_error(plan, spoiled(right(plan), fault), x, with_scales=False).ok


def test_a_given_descale_is_no_output(plan):
    kernel = spoiled(right(plan), lambda into: into[1].fill_(torch.nan))
    x = numbers(plan, Size(2, 70, 3), seed=0)
    if not plan.by_block:
        assert rounding_error(plan, kernel, x, with_scales=True).ok
    assert not rounding_error(plan, kernel, x, with_scales=False).ok


def test_places_count_numbers_in_their_order():
    every = torch.arange(256).to(torch.uint8)
    finite = every[(every & 0x7F) != 0x7F].view(E4M3)
    by_value = finite[finite.float().argsort()]
    assert torch.equal(places(by_value).diff().clamp(0, 1), by_value.float().diff().sign().int())
    assert places(torch.tensor([448.0, -448.0, -0.0]).to(E4M3)).tolist() == [126, -126, 0]


def test_packed_numbers_are_a_slice_with_strides_of_its_own(plan):
    x = numbers(plan, Size(1, 129, 2, packed=True), seed=1)
    assert x.shape == (1, 129, 2, plan.head_dim) and not x.is_contiguous()
    assert x.stride(2) == 3 * plan.head_dim


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")
def test_without_a_hopper_gpu_nothing_is_verified(plan, tmp_path):
    with pytest.raises(DeviceError, match="Hopper"):
        measure.verify(plan, None, folder=tmp_path)
