"""The gradients of attention on a CPU: their formulae, what a schedule computes of them, the op."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fagen import flow, registry
from fagen.errors import DeviceError, VerificationError
from fagen.kinds.backward import operands
from fagen.kinds.backward import verify as verification
from fagen.kinds.backward.emulate import compute
from fagen.kinds.backward.oracle import gradients
from fagen.kinds.backward.plan import Plan
from fagen.kinds.backward.verify.textbook import attention_and_gradients
from fagen.measure import cells, peers
from fagen.measure.timing import Call, Regime, Timing
from fagen.measure.verification import check
from fagen.problem import Cell, Problem, Sizes, flops
from fagen.records import GradientError
from fagen.runtime import op
from fagen.vocab import MASKS, Mask
from tests.backward_helpers import NARROW, SPREAD, extreme_sizes, masked, planned
from tests.tensors import normal
from tests.test_masks import FUTURE, WINDOW, seen

# ---- the reference ------------------------------------------------------------------------------

SIZES = (
    Sizes(1, 1, 1, 1, 1),
    Sizes(2, 4, 2, 7, 5),
    Sizes(1, 3, 1, 5, 11),
    Sizes(1, 2, 2, 9, 3),  # causal: rows that see no key
    Sizes(1, 2, 1, 0, 4),
    Sizes(1, 2, 1, 4, 0),
)


def leaves(sizes: Sizes, d: int, d_v: int) -> list[Tensor]:
    """q, k and v in fp64, which need gradients."""
    shapes = (
        (sizes.seqlen_q, sizes.heads, d),
        (sizes.seqlen_k, sizes.kv_heads, d),
        (sizes.seqlen_k, sizes.kv_heads, d_v),
    )
    tensors = [
        normal(sizes.batch, *shape, seed=seed, dtype=torch.float64)
        for seed, shape in enumerate(shapes)
    ]
    return [tensor.requires_grad_() for tensor in tensors]


def textbook(mask: Mask, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse as autograd can follow them; an lse of 0 where a row sees no key."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    keys = seen(mask, q.shape[1], k.shape[1])
    some = keys.any(1)
    weights = torch.exp(scores).masked_fill(~keys, 0)
    sums = weights.sum(-1).masked_fill(~some, 1)
    out = torch.einsum("bhqk,bkhd->bqhd", weights / sums[..., None], v)
    return out, sums.log()


@pytest.mark.parametrize("mask", [*MASKS.values(), WINDOW, FUTURE], ids=lambda mask: mask.name)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_reference_is_what_autograd_finds(sizes, mask):
    q, k, v = leaves(sizes, 8, 6)
    out, lse = textbook(mask, q, k, v, 0.3)
    dout, dlse = normal(*out.shape, seed=5).double(), normal(*lse.shape, seed=6).double()
    expected = torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), (q, k, v))
    found_out, found_lse, *results = gradients(dout, q, k, v, mask=mask, scale=0.3, dlse=dlse)
    torch.testing.assert_close(found_out, out)
    empty = ~seen(mask, sizes.seqlen_q, sizes.seqlen_k).any(1)
    assert torch.all(found_lse[..., empty] == -math.inf)
    torch.testing.assert_close(found_lse[..., ~empty], lse[..., ~empty])
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other)


class ByReference(torch.autograd.Function):
    """Attention whose backward pass is the reference."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v)
        out, lse, *_ = gradients(
            torch.zeros(*q.shape[:3], v.shape[3]).double(),
            *(q, k, v),
            mask=MASKS["causal"],
            scale=0.5,
        )
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
        q, k, v = ctx.saved_tensors
        return gradients(dout, q, k, v, mask=MASKS["causal"], scale=0.5, dlse=dlse)[2:]


def test_the_reference_is_what_differences_of_the_outputs_show():
    assert torch.autograd.gradcheck(ByReference.apply, leaves(Sizes(1, 4, 2, 3, 5), 4, 3))


# ---- the emulation ------------------------------------------------------------------------------


def emulated(plan: Plan, sizes: Sizes, seed: int = 0) -> GradientError:
    arguments, exact, rough = verification.case(plan, sizes, seed=seed, device="cpu")
    return verification.errors_of(sizes, compute(plan, *arguments), exact, rough)


def short(plan: Plan) -> Iterator[tuple[int, Sizes]]:
    """The verification sizes that a CPU is through with quickly."""
    for seed, sizes in enumerate(verification.verification_sizes(plan)):
        if sizes.batch * sizes.heads * sizes.seqlen_q * sizes.seqlen_k <= 1 << 21:
            yield seed, sizes


@pytest.mark.parametrize("slug", [*SPREAD, *NARROW])
def test_what_a_schedule_computes_keeps_the_rule_of_verification(slug):
    """At its sizes, and for one head, large groups and any rows to keys."""
    plan = planned(slug)
    usual = list(short(plan)) if slug in SPREAD else []
    assert slug in NARROW or (len(usual) >= 10 and {seed % 2 for seed, _ in usual} == {0, 1})
    for seed, sizes in (*usual, *enumerate(extreme_sizes(plan))):
        error = emulated(plan, sizes, seed)
        assert error.ok, error


@pytest.mark.parametrize("mask", [WINDOW, FUTURE], ids=lambda mask: mask.name)
@pytest.mark.parametrize("sizes", [(130, 300), (300, 130), (200, 200)], ids=str)
def test_a_mask_that_no_schedule_has_is_emulated(mask, sizes):
    assert emulated(masked("bwd_fp16_d64_causal_m128n128", mask), Sizes(1, 4, 2, *sizes), 1).ok


def test_the_rule_finds_a_gradient_that_is_off_not_there_or_without_that_of_the_lse():
    plan, sizes = planned(SPREAD[0]), Sizes(1, 2, 1, 70, 90)
    arguments, exact, rough = verification.case(plan, sizes, seed=1, device="cpu")

    def kept(gradients: Any) -> bool:
        return verification.errors_of(sizes, gradients, exact, rough).ok

    computed = compute(plan, *arguments)
    assert kept(computed)
    assert arguments[-1] is not None and not kept(compute(plan, *arguments[:-1], None))
    for place in range(3):
        wrong = [x.clone() for x in computed]
        wrong[place].view(-1)[-1] += 0.1
        assert not kept(wrong)
        wrong[place].view(-1)[-1] = math.nan
        assert not kept(wrong)


def test_what_is_wrong_is_said_line_by_line():
    plan = planned(SPREAD[0])
    wrong = replace(
        verification.RULE,
        error=lambda plan, run, sizes, seed, device: GradientError(**vars(sizes), **ERRORS),
        hard=lambda plan, run, small, device: [("hard", GradientError(1, 1, 1, 1, 1, **ERRORS))],
    )
    with pytest.raises(VerificationError, match=r"(\d+) of \1 shapes are wrong") as refused:
        check(plan, wrong, lambda: None)
    assert "dk 3.00e+00 of 2.00e+00  dv nan of 1.00e+00  WRONG" in str(refused.value)


ERRORS = dict(
    dq_error=0.5, dq_allowed=1.0, dk_error=3.0, dk_allowed=2.0, dv_error=math.nan, dv_allowed=1.0
)


def test_what_is_left_out_is_left_out_of_a_launch_too():
    plan = planned(SPREAD[0])
    arguments, *_ = verification.case(plan, Sizes(1, 2, 1, 9, 9), device="cpu")
    with pytest.raises(DeviceError, match="dout is on cpu"):
        operands.launch(plan, Path("no.so"), arguments, operands.outputs(plan, arguments))


@pytest.mark.parametrize("refused", [False, True])
def test_speeds_are_flops_by_time_beside_cudnns_where_it_does_not_refuse(monkeypatch, refused):
    plan, sizes = planned(SPREAD[0]), Sizes(1, 2, 2, 64, 64)
    work = flops(Problem.of(plan.schedule), sizes)

    def timed(calls: dict[str, Call], regime: Regime, **_: Any) -> dict[str, Timing]:
        assert [x.shape for x in calls[plan.slug].once()] == [(1, 64, 2, 128)] * 3
        seconds = {plan.slug: work / 2e12, "cudnn": work / 1e12}
        return {name: Timing(seconds[name], 0.1, 1_500) for name in calls}

    def cudnn(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
        if refused:
            raise DeviceError("cuDNN refuses")
        return Call(lambda: compute(plan, *verification.CONTENDER.arguments(plan, q, k, v)))

    monkeypatch.setattr(verification, "standard_sizes", lambda head_dim: sizes)
    monkeypatch.setattr(cells, "hopper", lambda: None)
    monkeypatch.setattr(cells, "inputs", partial(cells.inputs, device="cpu"))
    monkeypatch.setattr(cells, "time_calls", timed)
    monkeypatch.setattr(peers.op, "load", lambda binary: partial(compute, plan))
    monkeypatch.setitem(peers.GRADIENTS, "cudnn", cudnn)
    lines: list[str] = []
    binary = SimpleNamespace(slug=plan.slug, plan=plan)
    speeds = verification.VERIFICATION.speeds(plan, binary, lines.append)  # type: ignore[arg-type]
    assert [speed.regime for speed in speeds] == ["sustained", "burst"]
    for speed in speeds:
        assert speed.tflops == pytest.approx(2)
        assert speed.cudnn_tflops == (None if refused else pytest.approx(1))
    assert any("left out: cuDNN refuses" in line for line in lines) == refused


# ---- the op -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernel() -> tuple[Plan, Any]:
    plan, binary = flow.built(registry.from_slug("bwd_fp16_d128_causal_m64n128"))
    return plan, op.load(binary)


def test_torch_finds_nothing_wrong_with_the_op(kernel):
    plan, call = kernel
    arguments, *_ = verification.case(plan, Sizes(2, 4, 2, 70, 90), seed=1, device="cpu")
    torch.library.opcheck(call, arguments)
    torch.library.opcheck(call, arguments[:-1])


def test_the_op_computes_on_a_cpu_what_the_emulation_does(kernel):
    plan, call = kernel
    arguments, *_ = verification.case(plan, Sizes(1, 6, 2, 65, 130), seed=1, device="cpu")
    for result, expected in zip(call(*arguments), compute(plan, *arguments), strict=True):
        assert torch.equal(result, expected) and result.is_contiguous()


def test_slices_and_strides_of_0_are_taken_and_gradients_are_contiguous(kernel):
    plan, call = kernel
    row = normal(128, seed=9, dtype=torch.float16)
    dout = row.expand(1, 33, 2, 128)
    qkv = normal(1, 33, 6, 128, seed=8, dtype=torch.float16)
    q, k, v = qkv.split(2, dim=2)
    out, lse, *_ = gradients(dout, q, k, v, mask=plan.mask, scale=0.1)
    arguments = (dout, q, k, v, out.half().contiguous(), lse.float(), 0.1)
    results = call(*arguments)
    assert [x.stride() for x in results] == [(33 * 256, 256, 128, 1)] * 3
    copies = [x.contiguous() if isinstance(x, Tensor) else x for x in arguments]
    for result, other in zip(results, call(*copies), strict=True):
        assert torch.equal(result, other)


def test_wrong_arguments_are_named(kernel):
    plan, call = kernel
    arguments, *_ = verification.case(plan, Sizes(1, 4, 2, 9, 9), device="cpu")
    dout, q, k, v, out, lse, scale, _ = arguments
    for wrong, message in (
        ((dout[:, :-1], q, k, v, out, lse, scale), r"q has shape \(1, 9, .* seqlen_q = 8"),
        ((dout, q, k, v, out, lse[..., :-1].contiguous(), scale), "lse has shape"),
        ((dout, q, k, v.float(), out, lse, scale), "v .*float16"),
        ((dout[..., :1].expand_as(dout), q, k, v, out, lse, scale), "dout"),
        ((dout, q, k, v, out, lse, -1.0), "scale"),
        ((dout, q[:, :, :3], k, v, out[:, :, :3], lse, scale), "heads|dout"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            call(*wrong)


def test_a_second_derivative_is_refused(kernel):
    plan, call = kernel
    arguments, *_ = verification.case(plan, Sizes(1, 2, 1, 9, 9), device="cpu")
    dout, q, *others = arguments
    with pytest.raises(Exception, match=r"second derivatives are not supported; .*no_grad"):
        call(dout, q.requires_grad_(), *others)


# what multiplies dO of each head, and of row 20, and V
SIZES_OF_DOUT = {
    "tiny": (1e-6, 1e-6),
    "small": (1e-4, 1e-3),
    "large": (1e3, 1e3),
    "larger": (1e4, 1e4),
    "of heads of any size": (1e-6, 1e3),
}


@pytest.mark.parametrize("seqlen_k", [128, 4_096])
@pytest.mark.parametrize("sizes", SIZES_OF_DOUT.values(), ids=SIZES_OF_DOUT)
@pytest.mark.parametrize("row, v_size, q_size", [(1, 1, 1), (100, 1, 1), (1, 50, 1), (1, 1, 6)])
def test_gradients_in_fp16_are_as_exact_as_flash_attention_2_s(
    sizes, seqlen_k, row, v_size, q_size
):
    plan = planned("bwd_fp16_d64_full_m128n128")
    dout, q, k, v = verification.inputs(plan, Sizes(1, 2, 1, 48, seqlen_k), device="cpu")
    dout = (dout.float() * torch.tensor(sizes)[:, None]).half()
    dout[:, 20] *= row
    q, v = q * q_size, v * v_size
    arguments, exact, _ = verification.judged_by(plan, dout, q, k, v)
    out, *textbook = attention_and_gradients(dout, q, k, v, plan.mask, arguments[6])
    grads = compute(plan, dout, q, k, v, out.contiguous(), *arguments[5:])
    for head in range(2):
        for name, grad, other, true in zip("qkv", grads, textbook, exact, strict=True):
            some = slice(head, head + 1) if name == "q" else slice(None)
            error, allowed = ((x.double() - true)[:, :, some].abs().max() for x in (grad, other))
            assert not error > 2 * allowed, (name, head, error, allowed)
            assert torch.isfinite(grad).all() or not torch.isfinite(other).all()
