"""How an e4m3 kernel is judged and timed, without a GPU: the emulator stands in for the kernel."""

import math
from types import SimpleNamespace

import pytest
import torch

from fagen.errors import DeviceError, VerificationError
from fagen.kinds.forward import emulate as emulator
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.operands import alike, arguments, operands, outputs, real
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.plan import plan
from fagen.kinds.forward.verify.fp8 import by_the_rule, fp8_error
from fagen.measure import peers
from fagen.measure.cells import race
from fagen.measure.inputs import cell_of, inputs, softmax_scale
from fagen.measure.numerics import rms
from fagen.measure.peers import Implementation, ours
from fagen.measure.rows import (
    PREARRANGED,
    QUANTISE,
    Row,
    geomeans,
    problems,
)
from fagen.measure.timing import SUSTAINED, Call
from fagen.problem import Cell, Problem, Sizes, flops
from tests.gpu.steep import coarseness, levels, slopes
from tests.made_up_gpu import race_on_a_cpu

SIZES = Sizes(2, 4, 2, 70, 90)
SLUGS = (
    "fwd_e4m3_d64_full_m128n64",
    "fwd_e4m3_d64_causal_m128n64_vrows",
    "fwd_e4m3_d64_causal_m128n64_sblock_sr32",
    "fwd_e4m3_d64_full_m128n64_ofp16_vrows",
)


def worked(slug):
    return plan(Schedule.from_slug(slug))


def emulated(plan, spoil=lambda out, lse: None):
    def kernel(arguments, scale):
        qkv, descales = arguments[:3], arguments[3:]
        out, lse = emulator.emulate_fp8(plan, *qkv, scale, *descales)
        spoil(out, lse)
        return out, lse

    return kernel


def judged(slug, spoil=lambda out, lse: None, sizes=SIZES, **options):
    plan = worked(slug)
    case = cell_of(plan, sizes)
    return fp8_error(plan, case, emulated(plan, spoil), *inputs(case, device="cpu"), **options)


# ---- errors


@pytest.mark.parametrize("centered", ["", "v", "kv"])
@pytest.mark.parametrize("slug", SLUGS)
def test_what_a_kernel_takes_stands_for_what_it_was_made_of(slug, centered):
    plan = worked(slug)
    qkv = inputs(cell_of(plan, SIZES), device="cpu")
    assert all(x.dtype == torch.float16 for x in qkv)
    arguments = operands(plan, *qkv, centered=centered)
    assert all(x.dtype == torch.float8_e4m3fn for x in arguments[:3])
    blocks = 3 if plan.scales.by_block else 1
    assert arguments.q_descale.shape == (2, 4, blocks)
    assert arguments.v_descale.shape == (2, 2, 64)
    for mean, letter in ((arguments.v_mean, "v"), (arguments.k_mean, "k")):
        assert (mean is None) == (letter not in centered)
    if not plan.v_rows:
        assert arguments.v.shape == (2, 2, 64, 96)
        arguments = arguments._replace(v=emulator.fp8.by_rows(arguments.v, 90))
    for x, number in zip(qkv, real(plan, arguments), strict=True):
        assert rms(number - x.float()) < 0.03 * rms(x)


def test_rotated_q_and_k_have_the_products_that_they_had():
    plan = worked(SLUGS[1])
    q, k, v = inputs(cell_of(plan, SIZES), device="cpu")
    plain, rotated = (real(plan, operands(plan, q, k, v, rotated=r)) for r in (False, True))
    assert rms(plain[0] - rotated[0]) > 0.5
    products = [torch.einsum("bshd,btgd->bst", q[:, :, :2], k) for q, k, _ in (plain, rotated)]
    assert rms(products[0] - products[1]) < 0.08 * rms(products[0])
    assert torch.equal(plain[2], rotated[2])


@pytest.mark.parametrize("slug", SLUGS)
@pytest.mark.parametrize(
    "sizes",
    [
        SIZES,
        Sizes(1, 2, 1, 90, 33),
        Sizes(1, 1, 1, 1, 1),
        Sizes(1, 2, 2, 9, 0),
        Sizes(1, 2, 2, 0, 9),
    ],
    ids=str,
)
def test_the_emulated_schedule_is_as_exact_as_a_textbook(slug, sizes):
    error = judged(slug, sizes=sizes)
    assert error.ok, error
    assert error.error <= 1.1 * error.torch_error + 2e-3  # of O in bf16
    assert error.lse_error < 1e-3


def test_given_descales_make_other_numbers_of_the_same_bytes():
    plan = worked(SLUGS[2])
    case = cell_of(plan, SIZES)
    qkv = inputs(case, device="cpu")
    descales = operands(plan, *qkv)[3:6]
    other = tuple(x * 2.0 ** (torch.arange(x.shape[-1]) % 5) for x in descales)
    calls = []

    def kernel(arguments, scale):
        calls.append(arguments)
        return emulated(plan)(arguments, scale)

    assert fp8_error(plan, case, kernel, *qkv, descales=other).ok
    assert torch.equal(calls[0].v_descale, other[2])


def double_a_row(out, lse):
    out[1, 40, 2] *= 2


def miss_a_row(out, lse):
    out[0, 3, 1] = math.nan


def shift_the_sums(out, lse):
    lse += 0.05


def scale_all(out, lse):
    out *= 1.05


@pytest.mark.parametrize("spoil", [double_a_row, miss_a_row, shift_the_sums, scale_all])
def test_a_wrong_kernel_is_found_out(spoil):
    assert not judged(SLUGS[0], spoil).ok


def test_masked_rows_that_are_not_zero_are_found_out():
    def spoil(out, lse):
        out[0, 0] = 1e-3

    assert math.isnan(judged(SLUGS[1], spoil, sizes=Sizes(1, 2, 1, 90, 33)).error)


def test_outputs_are_poisoned_and_in_the_dtype_that_the_plan_says():
    for slug, dtype in ((SLUGS[0], torch.bfloat16), (SLUGS[3], torch.float16)):
        plan = worked(slug)
        q, k, v = inputs(cell_of(plan, SIZES), device="cpu")
        out, lse = outputs(plan, operands(plan, q, k, v).q)
        assert (out.dtype, out.shape) == (dtype, (2, 70, 4, 64))
        assert bool(out.isnan().all() and lse.isnan().all())
    fp16 = worked("fwd_fp16_d64_full_m128n64")
    assert arguments(fp16, q, k, v) == (q, k, v, 1 / 8)
    plan = worked(SLUGS[0])
    passed = arguments(plan, q, k, v)
    expected = operands(plan, q, k, v)
    assert passed[3] == 1 / 8 and passed[7:] == (None, None)
    for tensor, other in zip([*passed[:3], *passed[4:7]], expected[:6], strict=True):
        assert torch.equal(tensor.float(), other.float())


def test_kernels_share_arguments_only_where_they_take_the_same():
    like = [alike(worked(slug)) for slug in SLUGS]
    assert len(set(like)) == len(SLUGS)
    assert alike(worked("fwd_e4m3_d64_full_m64n32")) == like[0]
    assert alike(worked("fwd_e4m3_d64_full_m64n32_ofp16")) != like[0]


@pytest.mark.parametrize(
    ("kind", "is_coarse"),
    [
        ("full_m128n128", False),
        ("causal_m128n128_vrows_sblock_sr128", False),
        ("full_m128n128_lazymax_vrows_sblock_sr128", True),
        ("full_m128n128_t4", True),
    ],
)
@pytest.mark.parametrize("factor", [8, 64])
def test_a_p_of_nearly_equal_scores_that_is_no_power_of_two_is_allowed_for(kind, is_coarse, factor):
    """As tests/gpu/test_fp8_numbers.py judges maxima that grow, by what its plans compute."""
    plan = worked(f"fwd_e4m3_d128_{kind}")
    assert coarseness(plan) == is_coarse * 2.0**-4
    case = cell_of(plan, Sizes(1, 4, 2, 300, 700))
    scale = softmax_scale(128)
    q, k, v = inputs(case, device="cpu", seed=2)
    k[..., 0] = k[..., 0] / factor + levels(700, "cpu")[:, None] / scale
    q[..., 0], q[..., 1:] = slopes(300, "cpu")[:, None], 0

    answers = []  # of the one call that there is

    def error_of(scaled, coarse):
        def kernel(arguments, scale):
            if not answers:
                answers.extend(emulated(plan)(arguments, scale))
            return answers[0] * scaled, answers[1]

        return fp8_error(plan, case, kernel, q, k, v, factor * scale, coarse=coarse)

    assert error_of(1.0, coarseness(plan)).ok
    assert error_of(1.0, 0.0).ok == ("lazymax" not in kind)  # which has need of it
    assert not error_of(1.125, coarseness(plan)).ok


def test_a_row_of_one_heavy_key_may_be_off_by_what_its_p_is_rounded_by():
    true = torch.ones(1, 64, 1, 8, dtype=torch.float64)
    beside = true * (1 + 2.0**-10)

    def is_within(ours: torch.Tensor, coarse_rows: float) -> bool:
        error, _, allowed = by_the_rule(ours, beside, true, coarse_rows=coarse_rows)
        return error <= allowed

    one_row = beside.clone()
    one_row[:, 2] += 2.0**-6
    assert is_within(one_row, 2.0**-4) and not is_within(one_row, 0.0)
    one_row[:, 2] += 2.0**-3
    assert not is_within(one_row, 2.0**-4)
    assert not is_within(beside + 2.0**-6, 2.0**-4)  # nor may all rows


# ---- timing


@pytest.fixture
def clocks(monkeypatch):
    """Made-up seconds by label; kernels and quantisers are emulated."""
    seconds = {}

    def kernel(plan, q, k, v, scale, *descales):
        return emulator.emulate_fp8(plan, q, k, v, scale, *descales, hopper_sums=False)

    race_on_a_cpu(monkeypatch, kernel, seconds)
    return seconds


def exact(case, q, k, v):
    out, _ = reference(q, k, v, mask=case.problem.mask, scale=softmax_scale(64))
    return Call(lambda: out.half())


JUDGE = Implementation("cudnn", exact)
CASE = Cell(Problem("e4m3", 64, 64, "full"), Sizes(1, 2, 2, 64, 64))


def kernel_of(slug):
    return ours(SimpleNamespace(slug=slug, plan=worked(slug)))


def test_transposed_v_is_charged_with_what_it_costs_beyond_plain_quantisation(clocks):
    rows, columns = "fwd_e4m3_d64_full_m128n64_vrows", "fwd_e4m3_d64_full_m128n64"
    clocks |= {
        rows: 1.2e-3,
        columns: 1e-3,
        f"{columns} charged": 5e-4,
        f"{columns} credited": 3e-4,
    }
    timed = race(CASE, [kernel_of(rows), kernel_of(columns), JUDGE], regimes=[SUSTAINED])
    times = {row.implementation: row.microseconds for row in timed}
    assert times == pytest.approx({"fagen": 1200, PREARRANGED: 1200, "cudnn": 1000})
    clocks[f"{columns} charged"] = 1e-4  # noise is no credit
    timed = race(CASE, [kernel_of(columns), JUDGE], regimes=[SUSTAINED])
    assert timed[0].microseconds == pytest.approx(1000)


def test_what_cannot_be_charged_is_left_out_and_said(clocks, monkeypatch):
    def refuse(x, **keys):
        raise DeviceError("no quantiser")

    monkeypatch.setattr(peers, "quantize", refuse)
    reasons = []
    race(
        CASE,
        [kernel_of("fwd_e4m3_d64_full_m128n64"), JUDGE],
        regimes=[SUSTAINED],
        left_out=lambda who, why: reasons.append((who, why)),
    )
    ((who, why),) = reasons
    assert who == "fwd_e4m3_d64_full_m128n64"
    assert "charged with cannot be timed" in why and "no quantiser" in why


def test_a_wrong_kernel_is_not_timed(clocks, monkeypatch):
    implementation = kernel_of("fwd_e4m3_d64_full_m128n64_vrows")

    def bind(case, q, k, v):
        call = implementation.bind(case, q, k, v)
        return Call(lambda: call.run() * 1.2)

    wrong = Implementation("fagen", bind, implementation.schedule)
    with pytest.raises(VerificationError, match="differs from cudnn"):
        race(CASE, [wrong, JUDGE], regimes=[SUSTAINED])


def test_quantising_is_timed_and_judges_nobody(clocks):
    quantise = peers.peer(QUANTISE)
    case = Cell(Problem("e4m3", 64, 64, "full"), Sizes(1, 2, 2, 64, 64))
    timed = race(
        case, [quantise, kernel_of("fwd_e4m3_d64_full_m128n64_vrows")], regimes=[SUSTAINED]
    )
    assert [row.implementation for row in timed] == [QUANTISE, "fagen"]


def test_cudnns_own_e4m3_is_an_optional_peer(clocks):
    if peers.installed("cudnn-e4m3"):
        pytest.skip("it is installed")
    with pytest.raises(DeviceError, match="not installed"):
        peers.peer("cudnn-e4m3").bind(CASE, None, None, None)


def test_quantising_is_a_column_of_microseconds_and_transposed_v_has_its_means():
    common = ("e4m3", 128, 128, "causal", 4, 4096, 4096, 16, 16)
    figures = {"fagen": 800.0, PREARRANGED: 900.0, "cudnn": 500.0, QUANTISE: 10_000.0}
    rows = [
        Row(*common, name, None, regime, tflops, 0.01, 1500)
        for name, tflops in figures.items()
        for regime in ("sustained", "burst")
    ]
    counted = flops(Problem("e4m3", 128, 128, "causal"), Sizes(4, 16, 16, 4096, 4096))
    assert rows[-1].microseconds == pytest.approx(counted / 1e10)
    head, _, line = problems(rows).splitlines()
    assert "quantising Q, K, V sustained, µs" in head
    assert "TFLOP/s" not in line and f"{counted / 1e10:.1f}" in line
    assert "10000" not in line and " 1.60 " in line
    means = geomeans(rows, label=PREARRANGED)
    assert means.startswith("fagen, V transposed ÷ cuDNN fp16:") and "1.800" in means
