"""Attention in e4m3: of tensors that are so already, and attention_fp8, which quantises them."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from fagen.e4m3 import by_columns
from fagen.errors import ScheduleError
from fagen.kinds.forward.defaults import derived_schedules
from fagen.kinds.forward.oracle import reference
from fagen.problem import Problem
from fagen.runtime import op
from fagen.runtime.attention import ATTENTION, key_of
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
    of = dict(causal=causal, v_layout=layout, scale_rows=scale_rows)
    slug = picked(dtype="e4m3", head_dim=64, seqlen=200, **of).slug
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
    for one in (number, number[None, None], number[None, None, None]):
        assert torch.equal(spread, fagen.attention(*tensors, **dict.fromkeys(DESCALES, one)))


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

    def derived(*of):
        return derived_schedules(Problem("e4m3", 128, *of))[0]

    assert slug() == derived(128, "full", None, "rows", 0).slug
    assert slug(v_layout="columns", causal=True) == derived(128, "causal", None, "columns", 0).slug
    blocks = derived(64, "full", None, "columns", 64).but(out_dtype="fp16")
    assert slug(v_layout="columns", scale_rows=64, out_dtype="fp16", head_dim_v=64) == blocks.slug
    chosen = "fwd_e4m3_d128_full_m64n64_vrows_sblock_sr32"
    assert slug(schedule=chosen) == chosen
    with pytest.raises(ValueError, match=r"go with e4m3 tensors.*; dtype is float16"):
        fagen.prepare(dtype="fp16", head_dim=128, v_layout="rows")
    with pytest.raises(ValueError, match="v_layout is 'cols'; it must be one of 'columns', 'rows'"):
        slug(v_layout="cols")


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
            kernel.plan, key.device, lambda call=emulated, **given: outs.append(call(**given))
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


def by_hand(*made: Any, **how: Any) -> Any:
    """Attention of what quantize made of q, k and v."""
    descales = {name: one.descale for name, one in zip(DESCALES, made, strict=True)}
    return fagen.attention(*(one.values for one in made), **descales, **how, out_dtype=HALF)


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
HALVES = dict(q=Q, k=K, v=V) | dict.fromkeys((*DESCALES, "v_layout"))
WITH_E4M3 = (
    "descales, means, v_layout, scale_rows and out_dtype go with e4m3 tensors, which fagen.q"
)
OF_16 = "in e4m3 it must be a multiple of 16 up to 256"
FILL = f"{OF_16}: before quantising fill it up with zeros to"

WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"k_descale": None},
        "k_descale is missing: a number of an e4m3 tensor is its value times its descale. fagen.q",
    ),
    (
        {"v_descale": torch.ones(2)},
        "v_descale has shape (2,); it must be one number (), (batch, heads) or (batch, heads, he",
    ),
    (
        {"k_descale": torch.ones(2, 2, 7)},
        "q_descale and k_descale have 1 and 7 blocks for 70 queries and 200 keys; both must have "
        "one, or one for each block of 32, 64, 128 rows, as many in both",
    ),
    ({"scale_rows": 48}, "scale_rows is 48; it must be one of 0, 32, 64, 128"),
    (
        {"scale_rows": 64},
        "q_descale has shape (2, 4, 1); it must be (batch = 2 or 1, heads = 4 or 1, ceil(seqlen_q",
    ),
    (
        {"k": K8.half()},
        "k is not float8_e4m3fn, which this kernel takes; fagen.quantize(k) makes it so, with its ",
    ),
    ({"q": Q8.half()}, "(and fagen.attention_fp8 for one call); q is float16"),
    (HALVES | {"q_descale": Q8}, WITH_E4M3),
    (HALVES | {"out_dtype": HALF}, WITH_E4M3),
    (
        {"out_dtype": torch.float32},
        "out_dtype is torch.float32; it must be one of torch.float16, torch.bfloat16",
    ),
    (
        {"v": by_columns(V8)},
        'v has shape (2, 2, 64, 208), which is transposed V of 2 heads: pass v_layout="columns"',
    ),
    (
        {"v_layout": "columns"},
        'v has shape (2, 200, 2, 64), which is row-major V of 200 keys: pass v_layout="rows", or ',
    ),
    ({"v_layout": "cols"}, "v_layout is 'cols'; it must be one of 'columns', 'rows'"),
    ({"k": K8[0]}, "k has 3 dimensions; it must have 4"),
    (
        {"q": Q8[..., :40], "k": K8[..., :40]},
        f"q and k have head_dim 40; {FILL} 48, and pass scale = 40 ** -0.5",
    ),
    ({"v": V8[..., :24]}, f"v has head_dim 24; {FILL} 32, and drop as many columns of out"),
    (
        {name: torch.cat([x] * 5, 3) for name, x in (("q", Q8), ("k", K8), ("v", V8))},
        f"q and k have head_dim 320; {OF_16}",
    ),
    ({"scale": -1}, "scale is -1; it must be finite and above 0"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_wrong_argument_is_named(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        fagen.attention(**dict(q=Q8, k=K8, v=V8) | HOW | change)


WRONG_FP8: list[tuple[dict[str, Any], str]] = [
    (
        {"k": K.to(E4M3)},
        "k is in e4m3 already: fagen.attention takes it with its descale; attention_fp8 takes flo",
    ),
    (
        {"q": Q.float()},
        "q is float32; attention_fp8 takes float16 or bfloat16: q.bfloat16() converts it",
    ),
    ({"v": V.bfloat16()}, "v is bfloat16, but q is float16; v.to(q.dtype) converts it"),
    ({"v": V.to("meta")}, "v is not on the device of q; v.to(q.device) moves it there"),
    ({"k": K[0]}, "k has 3 dimensions; it must have 4"),
    (
        {"q": Q[..., :56], "k": K[..., :56]},
        f"q and k have head_dim 56; {FILL} 64, and pass scale = 56 ** -0.5",
    ),
    (
        {"k": K[..., :32]},
        "k has shape (2, 200, 2, 32); it must be (batch = 2, seqlen_k, kv_heads, 64)",
    ),
    (
        {"v": V[:, :100]},
        "v has shape (2, 2, 64, 112); it must be (batch = 2, kv_heads = 2, 64, ceil(seqlen_k / 16)",
    ),
    ({"scales": "row"}, "scales is 'row'; it must be one of 'head', 'tensor', 'block'"),
    (
        {"scales": "head", "scale_rows": 64},
        "scale_rows goes with scales = \"block\"; scales is 'head'",
    ),
    ({"scale_rows": 100}, "scale_rows = 100 must be 32 or 64 or 128"),
    ({"v_layout": "column"}, "v_layout is 'column'; it must be one of 'columns', 'rows'"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_FP8)
def test_a_wrong_argument_of_attention_fp8_is_named(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        fagen.attention_fp8(**dict(q=Q, k=K, v=V) | change)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            "fwd_e4m3_d64_full_m64n64",
            "fwd_e4m3_d64_full_m64n64 computes float8_e4m3fn, head_dim 64, full, V transposed, "
            "scales by head or tensor, out in bfloat16; the call asks for float8_e4m3fn, head_dim "
            "64, full, V row-major",
        ),
        ("fwd_fp16_d64_full_m64n64", "computes float16, head_dim 64, full; the call asks for "),
        ("fwd_e4m3_d64_full_m64n64_ofp16_vrows", "out in float16; the call asks for "),
    ],
)
def test_a_schedule_for_something_else_is_refused(choice, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        fagen.attention(Q8, K8, V8, **HOW, schedule=choice, out_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "names", "message"),
    [
        (
            lambda given: fagen.attention(**HOW | given),
            ("q", "v", "k_descale"),
            "v_mean or k_mean requires a gradient, and this op has",
        ),
        (
            lambda given: fagen.attention_fp8(**given),
            ("q", "k", "v"),
            "q, k or v requires a gradient, and there is no backward",
        ),
    ],
)
def test_a_call_that_needs_a_gradient_is_refused(call, names, message):
    tensors = dict(q=Q8, k=K8, v=V8) if "k_descale" in names else dict(q=Q, k=K, v=V)
    for name in names:
        leaf = (HOW | tensors)[name].detach().clone().requires_grad_()
        given = tensors | {name: leaf}
        with pytest.raises(ValueError, match=message):
            call(given)
        with torch.no_grad():
            assert not call(given).requires_grad
