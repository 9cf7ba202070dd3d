"""Attention in e4m3: of tensors that are so already, and attention_fp8, which quantises them."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from fagen.errors import ScheduleError
from fagen.kinds.forward.defaults import derived_schedules
from fagen.kinds.forward.oracle import reference
from fagen.problem import Problem
from fagen.runtime import op
from fagen.runtime.arguments import key_of
from fagen.runtime.attention import ATTENTION
from tests.attention_helpers import computed_fp8, picked, qkv, quantised
from tests.tensors import normal

pytestmark = pytest.mark.usefixtures("nothing_is_ready")

E4M3, HALF = torch.float8_e4m3fn, torch.float16
DESCALES = "q_descale", "k_descale", "v_descale"


def usual(scale_rows: int = 0, *, mask: str = "full", layout: str = "rows") -> Any:
    """The schedule that is derived for head_dim 64."""
    return derived_schedules(Problem("e4m3", 64, 64, mask, None, layout, scale_rows))[0]


def far(out: Tensor, exact: Tensor) -> float:
    """The root mean square of an error, relative to what is exact."""
    return float((out - exact).square().mean().sqrt() / exact.square().mean().sqrt())


# ---- e4m3 tensors -------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("scale_rows", [0, 32, 128])
def test_e4m3_tensors_run_the_kernel_of_their_layout_and_scales(
    schedules_folder, causal, layout, scale_rows
):
    tensors, how = quantised(scale_rows, layout)
    form = dict(causal=causal, v_layout=layout, scale_rows=scale_rows)
    slug = picked(dtype="e4m3", head_dim=64, seqlen=200, **form).slug
    mask = "causal" if causal else "full"
    assert slug == usual(scale_rows, mask=mask, layout=layout).slug
    out, lse = fagen.attention(*tensors, causal=causal, return_lse=True, **how)
    assert torch.equal(out, computed_fp8(slug, tensors, how))
    assert out.dtype == torch.bfloat16 and lse.shape == (2, 4, 70)
    assert far(out, reference(*qkv(), mask=mask, scale=1 / 8)[0]) < 0.06


def test_descales_may_be_a_number_or_of_heads_with_or_without_blocks():
    tensors, how = quantised()
    out = fagen.attention(*tensors, **how)
    of_heads = how | {name: how[name][..., 0] for name in DESCALES[:2]}
    assert torch.equal(out, fagen.attention(*tensors, **of_heads))
    assert not torch.equal(out, fagen.attention(*tensors, **how | {"v_descale": torch.ones(2, 2)}))
    number = torch.tensor(0.01)
    spread = fagen.attention(*tensors, **{n: torch.full_like(how[n], 0.01) for n in DESCALES})
    assert not torch.equal(spread, out)
    for descale in (number, number[None, None], number[None, None, None]):
        assert torch.equal(spread, fagen.attention(*tensors, **dict.fromkeys(DESCALES, descale)))


@pytest.mark.parametrize("rows", [32, 64, 128])
def test_scale_rows_may_be_inferred_or_given_and_give_the_same(schedules_folder, rows):
    tensors, how = quantised(rows)
    inferred = fagen.attention(*tensors, **how)
    assert torch.equal(inferred, fagen.attention(*tensors, **how, scale_rows=rows))
    assert torch.equal(inferred, fagen.attention(*tensors, **how, schedule=usual(rows)))


def test_a_single_block_is_a_heads_scale_unless_scale_rows_says_otherwise(schedules_folder):
    tensors, how = quantised(128, queries=50, keys=100)
    by_head = fagen.attention(*tensors, **how)
    by_block = fagen.attention(*tensors, **how, scale_rows=128)
    for out, rows in ((by_head, 0), (by_block, 128)):
        assert torch.equal(out, computed_fp8(usual(rows).slug, tensors, how))
    torch.testing.assert_close(by_head, by_block, rtol=0.03, atol=0.03)


def test_out_may_be_fp16(schedules_folder):
    tensors, how = quantised()
    chosen = "fwd_e4m3_d64_full_m64n64_ofp16_vrows"  # says so itself
    for more, slug in (
        (dict(out_dtype=HALF), usual().but(out_dtype="fp16").slug),
        (dict(schedule=chosen), chosen),
    ):
        out = fagen.attention(*tensors, **how, **more)
        assert out.dtype == HALF and torch.equal(out, computed_fp8(slug, tensors, how))


def test_prepare_says_which_kernel_it_will_be(schedules_folder):
    def slug(**more):
        return fagen.prepare(dtype="e4m3", head_dim=128, device="cpu", **more)

    def derived(*fields):
        return derived_schedules(Problem("e4m3", 128, *fields))[0]

    assert slug() == derived(128, "full", None, "rows", 0).slug
    assert slug(v_layout="columns", causal=True) == derived(128, "causal", None, "columns", 0).slug
    blocks = derived(64, "full", None, "columns", 64).but(out_dtype="fp16")
    assert slug(v_layout="columns", scale_rows=64, out_dtype="fp16", head_dim_v=64) == blocks.slug
    chosen = "fwd_e4m3_d128_full_m64n64_vrows_sblock_sr32"
    assert slug(schedule=chosen) == chosen


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("scale_rows", [0, 64])
def test_the_single_key_that_prepare_runs_is_one_that_the_kernel_takes(layout, scale_rows):
    outs, cpu = [], torch.device("cpu")
    for key in (
        key_of(cpu, E4M3, 64, 32, True, None, torch.bfloat16, layout, scale_rows),
        key_of(cpu, HALF, 64, 32, True, "fwd_fp16_d64v32_causal_m64n64"),
    ):
        kernel = ATTENTION.find(ATTENTION.ready(key), slug=key.schedule)
        emulated = op.emulated(kernel.slug)
        op.run_once(
            kernel.plan, key.device, lambda call=emulated, **named: outs.append(call(**named))
        )
    assert [out.shape for out, _ in outs] == [(1, 1, 1, 32)] * 2


@pytest.mark.parametrize("scale_rows", [32, 64, 128])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_step_need_not_hold_whole_blocks(layout, scale_rows):
    tensors, how = quantised(scale_rows, layout, head_dim=256, queries=10, keys=300)
    exact = fagen.attention(*tensors, **how, scale_rows=scale_rows)
    for tile in ("m64n32", "m64n64", "m64n96_half"):  # a scale of several steps, or half of one
        slug = f"fwd_e4m3_d256_full_{tile}{'_vrows' if layout == 'rows' else ''}_sblock"
        slug += "" if scale_rows == 64 else f"_sr{scale_rows}"
        out = fagen.attention(*tensors, **how, scale_rows=scale_rows, schedule=slug)
        torch.testing.assert_close(out, exact, rtol=0.03, atol=0.03)


# ---- quantised by attention_fp8 -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"scales": "head"},
        {"scales": "tensor", "rotate": False},
        {"v_layout": "rows", "scale_rows": 64},
        {"rotate": False, "scale_rows": 32},
        {"center_k": False, "center_v": False},
    ],
    ids=str,
)
def test_quantised_attention_is_attention(dtype, how):
    q, k, v = qkv(dtype, 64, 32)
    exact, exact_lse = reference(q, k, v, mask="causal", scale=0.2)
    out, lse = fagen.attention_fp8(q, k, v, causal=True, scale=0.2, return_lse=True, **how)
    assert out.dtype == dtype and out.shape == (2, 70, 4, 32) and lse.shape == (2, 4, 70)
    assert far(out, exact) < 0.07  # three bits of mantissa each of Q, K, V and P
    assert (lse - exact_lse).square().mean().sqrt() < 0.04


def by_hand(*quantized: Any, **how: Any) -> Any:
    """Attention of what quantize made of q, k and v."""
    descales = {name: x.descale for name, x in zip(DESCALES, quantized, strict=True)}
    return fagen.attention(*(x.values for x in quantized), **descales, **how, out_dtype=HALF)


def test_it_is_quantize_thrice_and_attention():
    q, k, v = qkv()
    how = dict(scales="block", scale_rows=64, rotate=True, seed=3)
    q8, k8 = fagen.quantize(q, **how), fagen.quantize(k, center=True, **how)
    v8 = fagen.quantize(v, layout="columns", scales="column", center=True)
    means = dict(k_mean=k8[2], v_mean=v8[2])
    out = by_hand(q8, k8, v8, **means, v_layout="columns")
    assert torch.equal(out, fagen.attention_fp8(q, k, v, scale_rows=64, seed=3))
    assert not torch.equal(out, fagen.attention_fp8(q, k, v, scale_rows=64, seed=4))


@pytest.mark.parametrize("scales", ["tensor", "head"])
def test_what_quantize_says_of_tensors_and_heads_attention_takes(scales):
    kinds = zip(qkv(), (scales, scales, "column"), strict=True)
    out = by_hand(*(fagen.quantize(x, scales=shared) for x, shared in kinds))
    keys = dict(rotate=False, center_k=False, center_v=False, scales=scales)
    assert torch.equal(out, fagen.attention_fp8(*qkv(), v_layout="rows", **keys))


def test_rotation_spreads_outliers():
    q, k, v = (x.float() for x in qkv(queries=128))
    for x, seed in ((q, 5), (k, 6)):
        x += 10 * normal(*x.shape, seed=seed) * (normal(*x.shape, seed=seed + 9) > 2.6)
    q, k, v = (x.half() for x in (q, k, v))
    exact = reference(q, k, v, mask="full", scale=0.125)[0]
    turned, plain = (far(fagen.attention_fp8(q, k, v, rotate=on), exact) for on in (True, False))
    assert turned < 0.85 * plain


@pytest.mark.parametrize("scales", ["block", "head", "tensor"])
def test_no_queries_and_no_keys_are_no_trouble(scales):
    q, k, v = qkv()
    assert fagen.attention_fp8(q[:, :0], k, v, scales=scales).shape == (2, 0, 4, 64)
    assert not fagen.attention_fp8(q, k[:, :0], v[:, :0], scales=scales).any()


@pytest.mark.parametrize("head_dim", [16, 128, 256])
def test_a_block_has_64_rows_where_nobody_says(head_dim):
    tensors = qkv(head_dim=head_dim, queries=10)
    own = fagen.attention_fp8(*tensors)
    assert torch.equal(own, fagen.attention_fp8(*tensors, scale_rows=64))
    assert not torch.equal(own, fagen.attention_fp8(*tensors, scale_rows=32))


def test_a_schedule_may_be_chosen():
    tensors = qkv(torch.bfloat16)
    chosen = "fwd_e4m3_d64_full_m64n64_sblock_sr32"
    out = fagen.attention_fp8(*tensors, scale_rows=32, schedule=chosen)
    assert not torch.equal(out, fagen.attention_fp8(*tensors, scale_rows=32))
    with pytest.raises(ScheduleError, match=r"scales by block of 32 rows.* the call asks for "):
        fagen.attention_fp8(*tensors, schedule=chosen)


# ---- refused ------------------------------------------------------------------------------------

(Q8, K8, V8), HOW = quantised()
Q, K, V = qkv()


@pytest.mark.parametrize(
    ("call", "names", "message"),
    [
        (
            lambda named: fagen.attention(**HOW | named),
            ("q", "v", "k_descale"),
            "v_mean or k_mean requires a gradient, and this op has",
        ),
        (
            lambda named: fagen.attention_fp8(**named),
            ("q", "k", "v"),
            "q, k or v requires a gradient, and there is no backward",
        ),
    ],
)
def test_a_call_that_needs_a_gradient_is_refused(call, names, message):
    tensors = dict(q=Q8, k=K8, v=V8) if "k_descale" in names else dict(q=Q, k=K, v=V)
    for name in names:
        leaf = (HOW | tensors)[name].detach().clone().requires_grad_()
        named = tensors | {name: leaf}
        with pytest.raises(ValueError, match=message):
            call(named)
        with torch.no_grad():
            assert not call(named).requires_grad
