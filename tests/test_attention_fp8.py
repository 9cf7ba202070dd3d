"""fagen.attention_fp8: it quantises Q, K and V, and attends to what comes out."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fagen
from fagen.errors import ScheduleError
from fagen.kinds.forward.reference import reference
from tests.attention_helpers import qkv, quantised
from tests.tensors import normal

E4M3 = torch.float8_e4m3fn

pytestmark = pytest.mark.usefixtures("nothing_is_ready")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
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
def test_quantised_attention_is_attention(dtype: torch.dtype, how: dict[str, Any]) -> None:
    q, k, v = qkv(dtype, 64, 32)
    exact, exact_lse = reference(q, k, v, mask="causal", scale=0.2)
    out, lse = fagen.attention_fp8(q, k, v, causal=True, scale=0.2, return_lse=True, **how)
    assert out.dtype == dtype and out.shape == (2, 70, 4, 32) and lse.shape == (2, 4, 70)
    # three bits of mantissa each of Q, K, V and P
    assert (out - exact).square().mean().sqrt() < 0.07 * exact.square().mean().sqrt()
    assert (lse - exact_lse).square().mean().sqrt() < 0.04


def test_it_is_quantize_thrice_and_attention() -> None:
    q, k, v = qkv()
    how: dict[str, Any] = dict(scales="block", scale_rows=64)
    q8, q_descale = fagen.quantize(q, rotate=True, seed=3, **how)
    k8, k_descale, k_mean = fagen.quantize(k, rotate=True, center=True, seed=3, **how)
    v8, v_descale, v_mean = fagen.quantize(v, layout="columns", scales="column", center=True)
    named = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    named |= dict(k_mean=k_mean, v_mean=v_mean)
    by_hand = fagen.attention(
        q8,
        k8,
        v8,
        **named,
        v_layout="columns",
        out_dtype=torch.float16,  # type: ignore[arg-type]
    )
    assert torch.equal(by_hand, fagen.attention_fp8(q, k, v, scale_rows=64, seed=3))
    assert not torch.equal(by_hand, fagen.attention_fp8(q, k, v, scale_rows=64, seed=4))


def test_what_quantize_says_of_tensors_and_heads_attention_takes() -> None:
    q, k, v = qkv()
    for scales in ("tensor", "head"):
        kinds = zip((q, k, v), (scales, scales, "column"), strict=True)
        made = [fagen.quantize(x, scales=shared) for x, shared in kinds]
        (q8, q_descale), (k8, k_descale), (v8, v_descale) = made
        named = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
        by_hand = fagen.attention(q8, k8, v8, **named, out_dtype=torch.float16)  # type: ignore[arg-type]
        keys = dict(rotate=False, center_k=False, center_v=False, scales=scales)
        own = fagen.attention_fp8(q, k, v, v_layout="rows", **keys)  # type: ignore[arg-type]
        assert torch.equal(by_hand, own)


def test_rotation_spreads_outliers() -> None:
    q, k, v = (x.float() for x in qkv(queries=128))
    for x, seed in ((q, 5), (k, 6)):
        x += 10 * normal(*x.shape, seed=seed) * (normal(*x.shape, seed=seed + 9) > 2.6)
    q, k, v = (x.half() for x in (q, k, v))
    exact = reference(q, k, v, mask="full", scale=0.125)[0]

    def error(rotate: bool) -> float:
        out = fagen.attention_fp8(q, k, v, rotate=rotate)
        return float((out - exact).square().mean().sqrt())  # type: ignore[operator]

    assert error(rotate=True) < 0.85 * error(rotate=False)


def test_no_queries_and_no_keys_are_no_trouble() -> None:
    q, k, v = qkv()
    for scales in ("block", "head", "tensor"):
        assert fagen.attention_fp8(q[:, :0], k, v, scales=scales).shape == (2, 0, 4, 64)  # type: ignore[union-attr]
        out = fagen.attention_fp8(q, k[:, :0], v[:, :0], scales=scales)
        assert torch.equal(out, torch.zeros(2, 70, 4, 64).half())  # type: ignore[arg-type]


@pytest.mark.parametrize("head_dim", [16, 128, 256])
def test_a_block_has_64_rows_where_nobody_says(head_dim: int) -> None:
    q, k, v = qkv(head_dim=head_dim, queries=10)
    own = fagen.attention_fp8(q, k, v)
    assert torch.equal(own, fagen.attention_fp8(q, k, v, scale_rows=64))  # type: ignore[arg-type]
    assert not torch.equal(own, fagen.attention_fp8(q, k, v, scale_rows=32))  # type: ignore[arg-type]


@pytest.mark.parametrize("scale_rows", [32, 64, 128])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_step_need_not_hold_whole_blocks(layout: str, scale_rows: int) -> None:
    tensors, how = quantised(scale_rows, layout, head_dim=256, queries=10, keys=300)
    for tile in ("m64n32", "m64n64", "m64n96_halves"):  # a scale of several steps, or half of one
        slug = f"fwd_e4m3_d256_full_{tile}{'_vrows' if layout == 'rows' else ''}_sblock"
        slug += "" if scale_rows == 64 else f"_sr{scale_rows}"
        out = fagen.attention(*tensors, **how, scale_rows=scale_rows, schedule=slug)
        exact = fagen.attention(*tensors, **how, scale_rows=scale_rows)
        torch.testing.assert_close(out, exact, rtol=0.03, atol=0.03)


def test_a_schedule_may_be_chosen() -> None:
    tensors = qkv(torch.bfloat16)
    chosen = "fwd_e4m3_d64_full_m64n64_sblock_sr32"
    out = fagen.attention_fp8(*tensors, scale_rows=32, schedule=chosen)
    assert not torch.equal(out, fagen.attention_fp8(*tensors, scale_rows=32))  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"scales by block of 32 rows.* the call asks for "):
        fagen.attention_fp8(*tensors, schedule=chosen)


WRONG_FP8: list[tuple[str, Callable[..., object], str]] = [
    (
        "e4m3",
        lambda q, k, v: fagen.attention_fp8(q, k.to(E4M3), v),
        "k is in e4m3 already: fagen.attention takes it with its descale; attention_fp8 takes flo",
    ),
    (
        "float32",
        lambda q, k, v: fagen.attention_fp8(q.float(), k, v),
        "q is float32; attention_fp8 takes float16 or bfloat16: q.bfloat16() converts it",
    ),
    (
        "mixed",
        lambda q, k, v: fagen.attention_fp8(q, k, v.bfloat16()),
        "v is bfloat16, but q is float16; v.to(q.dtype) converts it",
    ),
    (
        "device",
        lambda q, k, v: fagen.attention_fp8(q, k, v.to("meta")),
        "v is not on the device of q; v.to(q.device) moves it there",
    ),
    ("rank", lambda q, k, v: fagen.attention_fp8(q, k[0], v), "k has 3 dimensions; it must have 4"),
    (
        "head_dim",
        lambda q, k, v: fagen.attention_fp8(q[..., :56], k[..., :56], v),
        "q and k have head_dim 56; in e4m3 it must be a multiple of 16 up to 256: before quantisi"
        "ng fill it up with zeros to 64, and pass scale = 56 ** -0.5",
    ),
    (
        "k_head_dim",
        lambda q, k, v: fagen.attention_fp8(q, k[..., :32], v),
        "k has shape (2, 200, 2, 32); it must be (batch = 2, seqlen_k, kv_heads, 64)",
    ),
    (
        "v_keys",
        lambda q, k, v: fagen.attention_fp8(q, k, v[:, :100]),
        "v has shape (2, 2, 64, 112); it must be (batch = 2, kv_heads = 2, 64, ceil(seqlen_k / 16)",
    ),
    (
        "scales",
        lambda q, k, v: fagen.attention_fp8(q, k, v, scales="row"),
        "scales is 'row'; it must be one of 'head', 'tensor', 'block'",
    ),
    (
        "rows_of_heads",
        lambda q, k, v: fagen.attention_fp8(q, k, v, scales="head", scale_rows=64),
        "scale_rows goes with scales = \"block\"; scales is 'head'",
    ),
    (
        "rows",
        lambda q, k, v: fagen.attention_fp8(q, k, v, scale_rows=100),
        "scale_rows = 100 must be 32 or 64 or 128",
    ),
    (
        "layout",
        lambda q, k, v: fagen.attention_fp8(q, k, v, v_layout="column"),
        "v_layout is 'column'; it must be one of 'columns', 'rows'",
    ),
]


@pytest.mark.parametrize(("_", "call", "said"), WRONG_FP8, ids=[name for name, *_ in WRONG_FP8])
def test_a_wrong_argument_of_attention_fp8_is_named(
    _: str, call: Callable[..., object], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        call(*qkv())


@pytest.mark.parametrize("which", range(3))
def test_quantising_what_needs_a_gradient_is_refused(which: int) -> None:
    tensors = [*qkv()]
    tensors[which].requires_grad_()
    with pytest.raises(ValueError, match="q, k or v requires a gradient, and there is no backward"):
        fagen.attention_fp8(*tensors)
    with torch.no_grad():
        assert not fagen.attention_fp8(*tensors).requires_grad  # type: ignore[union-attr]
