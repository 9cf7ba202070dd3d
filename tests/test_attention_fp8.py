"""fagen.attention of e4m3 tensors, and fagen.attention_fp8: the kernel, the words, how exact."""

import re
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from fagen import dispatch, dispatch_table
from fagen.dispatch.tables import Row
from fagen.emulator import emulate_fp8, reference
from fagen.errors import FagenError, ScheduleError
from fagen.kinds.forward.plan import plan
from fagen.problem import problem_of
from fagen.e4m3 import by_columns, rounded
from fagen.schedule import Schedule
from fagen.dispatch.defaults import usual_schedule
from fagen.vocab import USUAL_SCALE_ROWS

E4M3 = torch.float8_e4m3fn


pytestmark = pytest.mark.usefixtures("nothing_is_ready")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A schedules folder with nothing in it."""
    monkeypatch.setattr(dispatch, "locate", lambda name: tmp_path)
    return tmp_path


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def qkv(
    dtype: torch.dtype = torch.float16,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    queries: int = 70,
    keys: int = 200,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        normal(2, queries, 4, head_dim).to(dtype),
        normal(2, keys, 2, head_dim, seed=1).to(dtype),
        normal(2, keys, 2, head_dim_v or head_dim, seed=2).to(dtype),
    )


def quantised(
    scale_rows: int = 0, layout: str = "rows", **sizes: int
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Q, K and V in e4m3, and what else a call of fagen.attention wants of them."""
    made = [rounded(x, "block" if scale_rows else "head", scale_rows) for x in qkv(**sizes)]  # type: ignore[arg-type]
    q, k, v = (one.values for one in made)
    how: dict[str, Any] = dict(zip(("q_descale", "k_descale", "v_descale"), made, strict=True))
    how = {name: one.descale for name, one in how.items()} | {"v_layout": layout}
    return (q, k, by_columns(v) if layout == "columns" else v), how


def expected(slug: str, tensors: tuple[Tensor, ...], how: dict[str, Any]) -> Tensor:
    q, k, v = tensors
    descales = how["q_descale"], how["k_descale"], how["v_descale"]
    return emulate_fp8(plan(Schedule.from_slug(slug)), q, k, v, q.shape[3] ** -0.5, *descales)[0]


# ---- e4m3 tensors -------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("scale_rows", [0, 32, 128])
def test_e4m3_tensors_are_attended_to_by_the_kernel_of_their_layout_and_scales(
    folder: Path, causal: bool, layout: str, scale_rows: int
) -> None:
    tensors, how = quantised(scale_rows, layout)
    slug = dispatch.picked(
        dtype="e4m3",
        head_dim=64,
        causal=causal,
        seqlen=200,
        v_layout=layout,
        scale_rows=scale_rows,
    ).slug
    assert slug == "fwd_e4m3_d64_{}_m128n128{}{}".format(
        "causal" if causal else "full",
        "_vrows" if layout == "rows" else "",
        {0: "", 32: "_sblock_sr32", 128: "_sblock"}[scale_rows],
    )
    out, lse = fagen.attention(*tensors, causal=causal, return_lse=True, **how)
    assert torch.equal(out, expected(slug, tensors, how))
    assert out.dtype == torch.bfloat16 and lse.shape == (2, 4, 70)
    exact = reference(*qkv(), causal=causal, scale=1 / 8)[0]
    assert (out - exact).square().mean().sqrt() < 0.06 * exact.square().mean().sqrt()


def test_descales_may_be_a_number_or_of_heads_with_or_without_blocks() -> None:
    (q, k, v), how = quantised()
    out = fagen.attention(q, k, v, **how)
    names = ("q_descale", "k_descale", "v_descale")
    assert torch.equal(out, fagen.attention(q, k, v, **{n: how[n][..., 0] for n in names}))
    number = torch.tensor(0.01)
    spread = fagen.attention(q, k, v, **{n: torch.full_like(how[n], 0.01) for n in names})
    assert not torch.equal(spread, out)
    for one in (number, number[None, None], number[None, None, None]):
        assert torch.equal(spread, fagen.attention(q, k, v, **dict.fromkeys(names, one)))


def test_scale_rows_are_told_or_given_and_give_the_same() -> None:
    for rows in (32, 64, 128):
        tensors, how = quantised(rows)
        told = fagen.attention(*tensors, **how)
        assert torch.equal(told, fagen.attention(*tensors, **how, scale_rows=rows))
        tile = "m256n64_s3" if rows == 64 else "m128n128"  # measured, or usual
        chosen = f"fwd_e4m3_d64_full_{tile}_vrows_sblock{'' if rows == 128 else f'_sr{rows}'}"
        assert torch.equal(told, fagen.attention(*tensors, **how, schedule=chosen))


def test_a_single_block_is_a_heads_scale_unless_scale_rows_says_otherwise() -> None:
    tensors, how = quantised(128, queries=50, keys=100)
    by_head = fagen.attention(*tensors, **how)
    by_block = fagen.attention(*tensors, **how, scale_rows=128)
    assert torch.equal(by_head, expected("fwd_e4m3_d64_full_m256n64_s3_vrows", tensors, how))
    assert torch.equal(by_block, expected("fwd_e4m3_d64_full_m128n128_vrows_sblock", tensors, how))
    torch.testing.assert_close(by_head, by_block, rtol=0.03, atol=0.03)


def test_out_may_be_fp16(folder: Path) -> None:
    tensors, how = quantised()
    out = fagen.attention(*tensors, **how, out_dtype=torch.float16)
    assert torch.equal(out, expected("fwd_e4m3_d64_full_m128n128_ofp16_vrows", tensors, how))
    assert out.dtype == torch.float16
    chosen = "fwd_e4m3_d64_full_m64n64_ofp16_vrows"
    out = fagen.attention(*tensors, **how, schedule=chosen)  # says so itself
    assert torch.equal(out, expected(chosen, tensors, how))


def test_prepare_says_which_kernel_it_will_be(folder: Path) -> None:
    def slug(**more: Any) -> str:
        return fagen.prepare(dtype="e4m3", head_dim=128, device="cpu", **more)

    assert slug() == "fwd_e4m3_d128_full_m128n128_vrows"
    assert slug(v_layout="columns", causal=True) == "fwd_e4m3_d128_causal_m128n128"
    assert slug(v_layout="columns", scale_rows=64, out_dtype="fp16", head_dim_v=64) == (
        "fwd_e4m3_d128v64_full_m128n128_ofp16_sblock_sr64"
    )
    assert slug(schedule="fwd_e4m3_d128_full_m64n64_vrows_sblock_sr32") == (
        "fwd_e4m3_d128_full_m64n64_vrows_sblock_sr32"
    )
    with pytest.raises(ValueError, match=r"go with e4m3 tensors.*; dtype is float16"):
        fagen.prepare(dtype="fp16", head_dim=128, v_layout="rows")
    with pytest.raises(ValueError, match="v_layout is 'cols'; it must be one of 'columns', 'rows'"):
        slug(v_layout="cols")


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("scale_rows", [0, 64])
def test_the_single_key_that_prepare_runs_is_one_that_the_kernel_takes(
    layout: str, scale_rows: int
) -> None:
    fp8 = None, layout, scale_rows
    kind = dispatch._kind("e4m3", 64, 32, True, "cpu", fp8)
    seen = []
    kernel = dispatch._make_ready((kind, None))
    dispatch._run_once(lambda *given: seen.append(kernel(*given)), kind)  # type: ignore[arg-type, return-value]
    assert seen[0][0].shape == (1, 1, 1, 32)
    kind = dispatch._kind("fp16", 64, 32, True, "cpu", (None, None, None))
    kernel = dispatch._make_ready((kind, "fwd_fp16_d64v32_causal_m64n64"))
    dispatch._run_once(kernel, kind)


# ---- which schedule -----------------------------------------------------------------------------


def row(slug: str, least: int, most: float, layout: str = "columns", scale_rows: int = 0) -> Row:
    return Row("NVIDIA H200", "e4m3", 64, 64, "full", least, most, slug, layout, scale_rows)


def test_a_dispatch_table_tells_e4m3_kernels_apart_by_layout_scales_and_keys(folder: Path) -> None:
    few, many = "fwd_e4m3_d64_full_m64n32", "fwd_e4m3_d64_full_m64n64"
    rows, blocks = "fwd_e4m3_d64_full_m64n96_vrows", "fwd_e4m3_d64_full_m64n96_sblock_sr32"
    # 199 keys are 208 places of V by columns: it is keys that count
    table = [
        row(few, 0, 199),
        row(many, 200, inf),
        row(rows, 0, inf, "rows"),
        row(blocks, 0, inf, "columns", 32),
    ]
    dispatch_table.update(folder / dispatch_table.NAME, table)
    for slug, layout, scale_rows, keys in (
        (few, "columns", 0, 199),
        (many, "columns", 0, 200),
        (rows, "rows", 0, 200),
        (blocks, "columns", 32, 200),
        ("fwd_e4m3_d64_full_m128n128_vrows_sblock_sr32", "rows", 32, 200),  # of which it is silent
    ):
        tensors, how = quantised(scale_rows, layout, keys=keys)
        out = fagen.attention(*tensors, **how)
        assert torch.equal(out, expected(slug, tensors, how)), slug
    assert fagen.prepare(dtype="e4m3", head_dim=64, v_layout="columns", device="cpu") == many
    other = dict(v_layout="columns", out_dtype="fp16", device="cpu")
    assert fagen.prepare(dtype="e4m3", head_dim=64, **other) == f"{many}_ofp16"  # type: ignore[arg-type]


def test_e4m3_calls_of_few_query_rows_have_their_own_kernel(folder: Path) -> None:
    few, many = "fwd_e4m3_d64_full_m64n32", "fwd_e4m3_d64_full_m64n64"
    rows = 2 * 4 * 70
    table = [Row.of("NVIDIA H200", few, rows=rows), row(many, 0, inf)]
    dispatch_table.update(folder / dispatch_table.NAME, table)
    for slug, queries in ((few, 70), (many, 71)):
        tensors, how = quantised(0, "columns", queries=queries)
        assert torch.equal(fagen.attention(*tensors, **how), expected(slug, tensors, how)), slug
        of = dict(dtype="e4m3", head_dim=64, v_layout="columns", out_dtype="fp16", device="cpu")
        assert fagen.prepare(**of, rows=2 * 4 * queries) == f"{slug}_ofp16"  # type: ignore[arg-type]


def test_a_schedule_of_the_folder_goes_before_the_usual_one(folder: Path) -> None:
    (folder / "fwd_mine.toml").write_text(
        '[attention]\nhead_dim = 64\ndtype = "e4m3"\nmask = "full"\n'
        "[tile]\nblock_m = 64\nblock_n = 96\n"
    )
    tensors, how = quantised(0, "columns")
    out = fagen.attention(*tensors, **how)
    assert torch.equal(out, expected("fwd_e4m3_d64_full_m64n96", tensors, how))
    out = fagen.attention(*tensors, **how, out_dtype=torch.float16)
    assert torch.equal(out, expected("fwd_e4m3_d64_full_m64n96_ofp16", tensors, how))


@pytest.mark.parametrize(
    "schedule",
    [one for one in dispatch._schedules() if one.attention.dtype == "e4m3"],
    ids=lambda schedule: schedule.slug,
)
def test_every_e4m3_schedule_of_the_folder_serves_its_problem(schedule: Schedule) -> None:
    keys, fp8 = schedule.attention, schedule.fp8
    sizes = {"head_dim": keys.head_dim, "head_dim_v": keys.head_dim_v}
    tensors, how = quantised(fp8.scale_rows, fp8.v_layout, **sizes)
    causal = keys.mask == "causal"
    slug = dispatch.picked(
        dtype="e4m3",
        **sizes,
        causal=causal,
        seqlen=200,
        rows=tensors[0].shape[:3].numel(),
        v_layout=fp8.v_layout,
        scale_rows=fp8.scale_rows,
        device="cpu",
    ).slug
    assert problem_of(Schedule.from_slug(slug)) == problem_of(schedule.but(out_dtype="bf16"))
    assert torch.equal(
        fagen.attention(*tensors, causal=causal, **how), expected(slug, tensors, how)
    )


WIDTHS = [*range(16, 257, 16)]


@pytest.mark.parametrize("scale_rows", [0, 32, 64, 128])
def test_there_is_a_usual_tile_for_every_head_dim(scale_rows: int) -> None:
    for width in WIDTHS:
        for layout in ("rows", "columns"):
            found = usual_schedule(width, width, "full", layout, scale_rows)
            assert (found.attention.head_dim, found.fp8.v_layout) == (width, layout)
            assert found.fp8.scale_rows == scale_rows
            assert found.tile.block_n >= 64


@pytest.mark.parametrize(
    ("width", "slug"),
    [
        (192, "m128n128_vrows"),
        (224, "m128n128_vspace_vrows"),  # 7 slabs of O are no two halves
        (256, "m128n96_halves_vrows"),
    ],
)
def test_where_o_has_no_room_it_leaves_in_halves_if_it_can(width: int, slug: str) -> None:
    found = usual_schedule(width, width, "full", "rows", 0)
    assert found.slug == f"fwd_e4m3_d{width}_full_{slug}"


def test_the_usual_scale_rows_have_a_tile_for_every_two_head_dims() -> None:
    rows = USUAL_SCALE_ROWS
    for width, width_v in ((w, v) for w in (*WIDTHS[::3], 224, 256) for v in (16, 128, 224, 256)):
        for layout in ("rows", "columns"):
            assert usual_schedule(width, width_v, "causal", layout, rows).fp8.scale_rows == rows


# ---- wrong calls --------------------------------------------------------------------------------


WRONG: list[tuple[str, Callable[..., object], str]] = [
    (
        "no_descale",
        lambda q, k, v, how: fagen.attention(q, k, v, **how | {"k_descale": None}),
        "k_descale is missing: a number of an e4m3 tensor is its value times its descale. fagen.q",
    ),
    (
        "descale_rank",
        lambda q, k, v, how: fagen.attention(q, k, v, **how | {"v_descale": torch.ones(2)}),
        "v_descale has shape (2,); it must be one number (), (batch, heads) or (batch, heads, bl",
    ),
    (
        "descale_heads",
        lambda q, k, v, how: fagen.attention(q, k, v, **how | {"v_descale": torch.ones(2, 4)}),
        "v_descale has shape (2, 4, 1); it must be (2 or 1, 2 or 1, 1): batch, heads, one block",
    ),
    (
        "descale_dtype",
        lambda q, k, v, how: fagen.attention(
            q, k, v, **how | {"v_descale": torch.ones(2, 2).half()}
        ),
        "v_descale is not float32; v_descale.float() converts it",
    ),
    (
        "unequal_blocks",
        lambda q, k, v, how: fagen.attention(q, k, v, **how | {"k_descale": torch.ones(2, 2, 7)}),
        "q_descale, k_descale and v_descale have 1, 7 and 1 blocks for 70 queries and 200 keys; "
        "all must have one, or one for each block of 32, 64, 128 rows, as many in all three",
    ),
    (
        "scale_rows_of_nothing",
        lambda q, k, v, how: fagen.attention(q, k, v, **how, scale_rows=48),
        "scale_rows is 48; it must be one of 0, 32, 64, 128",
    ),
    (
        "scale_rows_not_the_descales",
        lambda q, k, v, how: fagen.attention(q, k, v, **how, scale_rows=64),
        "q_descale has shape (2, 4, 1); it must be (2 or 1, 4 or 1, 2): batch, heads, blocks of 64",
    ),
    (
        "k_of_16_bits",
        lambda q, k, v, how: fagen.attention(q, k.half(), v, **how),
        "k is not float8_e4m3fn, which this kernel takes; fagen.quantize(k) makes it so, with its ",
    ),
    (
        "q_of_16_bits",
        lambda q, k, v, how: fagen.attention(q.half(), k, v, **how),
        "(and fagen.attention_fp8 for one call); q is float16",
    ),
    (
        "descales_of_16_bits",
        lambda q, k, v, how: fagen.attention(q.half(), k.half(), v.half(), q_descale=q),
        "descales, v_layout, scale_rows and out_dtype go with e4m3 tensors, which fagen.quantize m",
    ),
    (
        "out_dtype_of_16_bits",
        lambda q, k, v, how: fagen.attention(q.half(), k.half(), v.half(), out_dtype=torch.float16),
        "descales, v_layout, scale_rows and out_dtype go with e4m3 tensors, which fagen.quantize m",
    ),
    (
        "out_dtype",
        lambda q, k, v, how: fagen.attention(q, k, v, **how, out_dtype=torch.float32),
        "out_dtype is torch.float32; it must be one of torch.float16, torch.bfloat16",
    ),
    (
        "columns_not_said",
        lambda q, k, v, how: fagen.attention(q, k, by_columns(v), **how),
        'v has shape (2, 2, 64, 208), which is V by columns of 2 heads: pass v_layout="columns"',
    ),
    (
        "columns_said_of_rows",
        lambda q, k, v, how: fagen.attention(q, k, v, **how | {"v_layout": "columns"}),
        'v has shape (2, 200, 2, 64), which is V by rows of 200 keys: pass v_layout="rows", or ',
    ),
    (
        "layout",
        lambda q, k, v, how: fagen.attention(q, k, v, **how | {"v_layout": "cols"}),
        "v_layout is 'cols'; it must be one of 'columns', 'rows'",
    ),
    (
        "rank",
        lambda q, k, v, how: fagen.attention(q, k[0], v, **how),
        "k has 3 dimensions; it must have 4",
    ),
    (
        "head_dim",
        lambda q, k, v, how: fagen.attention(q[..., :40], k[..., :40], v, **how),
        "q and k have head_dim 40; in e4m3 it must be a multiple of 16 up to 256: before quantisi"
        "ng fill it up with zeros to 48, and pass scale = 40 ** -0.5",
    ),
    (
        "head_dim_v",
        lambda q, k, v, how: fagen.attention(q, k, v[..., :24], **how),
        "v has head_dim 24; in e4m3 it must be a multiple of 16 up to 256: before quantising fill "
        "it up with zeros to 32, and drop as many columns of out",
    ),
    (
        "too_wide",
        lambda q, k, v, how: fagen.attention(*(torch.cat([x] * 5, 3) for x in (q, k, v)), **how),
        "q and k have head_dim 320; in e4m3 it must be a multiple of 16 up to 256",
    ),
    (
        "scale",
        lambda q, k, v, how: fagen.attention(q, k, v, **how, scale=-1),
        "scale is -1; it must be finite and above 0",
    ),
]


@pytest.mark.parametrize(("_", "call", "said"), WRONG, ids=[name for name, *_ in WRONG])
def test_a_wrong_argument_is_named(_: str, call: Callable[..., object], said: str) -> None:
    tensors, how = quantised()
    with pytest.raises(ValueError, match=re.escape(said)):
        call(*tensors, how)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (
            "fwd_e4m3_d64_full_m64n64",
            "fwd_e4m3_d64_full_m64n64 computes float8_e4m3fn, head_dim 64, full, V by columns, "
            "scales by head or tensor, out in bfloat16; the call asks for float8_e4m3fn, head_dim "
            "64, full, V by rows",
        ),
        ("fwd_fp16_d64_full_m64n64", "computes float16, head_dim 64, full; the call asks for "),
        ("fwd_e4m3_d64_full_m64n64_ofp16_vrows", "out in float16; the call asks for "),
    ],
)
def test_a_schedule_for_something_else_is_refused(choice: str, said: str) -> None:
    tensors, how = quantised()
    with pytest.raises(ScheduleError, match=re.escape(said)):
        fagen.attention(*tensors, **how, schedule=choice, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["q", "v", "k_descale"])
def test_a_call_that_needs_a_gradient_is_refused(name: str) -> None:
    (q, k, v), how = quantised()
    {"q": q, "v": v, **how}[name].requires_grad_()
    with pytest.raises(ValueError, match="q, k, v or a descale requires a gradient, and there is"):
        fagen.attention(q, k, v, **how)
    with torch.no_grad():
        assert not fagen.attention(q, k, v, **how).requires_grad  # type: ignore[union-attr]


# ---- attention_fp8 ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"scales": "head"},
        {"scales": "tensor", "rotate": False},
        {"v_layout": "rows", "scale_rows": 64},
        {"rotate": False, "scale_rows": 32},
    ],
    ids=str,
)
def test_quantised_attention_is_attention(dtype: torch.dtype, how: dict[str, Any]) -> None:
    q, k, v = qkv(dtype, 64, 32)
    exact, exact_lse = reference(q, k, v, causal=True, scale=0.2)
    out, lse = fagen.attention_fp8(q, k, v, causal=True, scale=0.2, return_lse=True, **how)
    assert out.dtype == dtype and out.shape == (2, 70, 4, 32) and lse.shape == (2, 4, 70)
    # three bits of mantissa each of Q, K, V and P
    assert (out - exact).square().mean().sqrt() < 0.07 * exact.square().mean().sqrt()
    assert (lse - exact_lse).square().mean().sqrt() < 0.04


def test_it_is_quantize_thrice_and_attention() -> None:
    q, k, v = qkv()
    how: dict[str, Any] = dict(scales="block", scale_rows=64)
    q8, q_descale = fagen.quantize(q, rotate=True, seed=3, **how)
    k8, k_descale = fagen.quantize(k, rotate=True, seed=3, **how)
    v8, v_descale = fagen.quantize(v, layout="columns", **how)
    named = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
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
        made = [fagen.quantize(x, scales=scales) for x in (q, k, v)]
        (q8, q_descale), (k8, k_descale), (v8, v_descale) = made
        named = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
        by_hand = fagen.attention(q8, k8, v8, **named, out_dtype=torch.float16)  # type: ignore[arg-type]
        own = fagen.attention_fp8(q, k, v, rotate=False, scales=scales, v_layout="rows")
        assert torch.equal(by_hand, own)


def test_rotation_spreads_outliers() -> None:
    q, k, v = (x.float() for x in qkv(queries=128))
    for x, seed in ((q, 5), (k, 6)):
        x += 10 * normal(*x.shape, seed=seed) * (normal(*x.shape, seed=seed + 9) > 2.6)
    q, k, v = (x.half() for x in (q, k, v))
    exact = reference(q, k, v, causal=False, scale=0.125)[0]

    def error(rotate: bool) -> float:
        out = fagen.attention_fp8(q, k, v, rotate=rotate)
        return float((out - exact).square().mean().sqrt())  # type: ignore[operator]

    assert error(rotate=True) < 0.8 * error(rotate=False)


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
        slug += "" if scale_rows == 128 else f"_sr{scale_rows}"
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
        "k has shape (2, 200, 2, 32); this kernel takes (batch, seqlen_k, kv_heads, 64)",
    ),
    (
        "v_keys",
        lambda q, k, v: fagen.attention_fp8(q, k, v[:, :100]),
        "v has shape (2, 2, 64, 112), but k has (2, 200, 2, 64); by columns v must be ",
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


# ---- torch.compile ------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("scale_rows", [0, 64])
def test_prepared_it_compiles_into_one_graph(dynamic: bool, scale_rows: int) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, how: dict[str, Any]) -> Tensor:
        out, lse = fagen.attention(q, k, v, return_lse=True, **how)
        return out + lse.transpose(1, 2)[..., None]

    fagen.prepare(dtype="e4m3", head_dim=64, v_layout="columns", scale_rows=scale_rows)
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for queries, keys in ((90, 300), (150, 500)):
        tensors, how = quantised(scale_rows, "columns", queries=queries, keys=keys)
        assert torch.equal(compiled(*tensors, how), attend(*tensors, how))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dynamic", [False, True])
def test_called_once_attention_fp8_compiles_into_one_graph(dynamic: bool) -> None:
    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fagen.attention_fp8(q * 2, k, v, causal=True) + 1  # type: ignore[operator]

    fagen.attention_fp8(*qkv(), causal=True)
    compiled = torch.compile(twice, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for queries, keys in ((90, 300), (150, 500)):
        tensors = qkv(queries=queries, keys=keys)
        assert torch.equal(compiled(*tensors), twice(*tensors))


@pytest.mark.usefixtures("fresh_dynamo")
def test_unprepared_it_says_so_to_torch_compile() -> None:
    compiled = torch.compile(fagen.attention, fullgraph=True, backend="eager")
    tensors, how = quantised()
    with pytest.raises(Exception, match=r"call fagen\.prepare") as refusal:
        compiled(*tensors, **how)
    assert "cannot be built while torch.compile traces the call" in str(refusal.value)


# ---- on a GPU, pretended ------------------------------------------------------------------------


def test_on_a_gpu_the_same_schedule_is_built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(dispatch, "build", lambda source, *_, **__: built.append(source.slug))
    monkeypatch.setattr(dispatch.op, "load", lambda _: lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kind: dispatch.Kind
    kind = (torch.device("cuda", 0), E4M3, 64, 64, False, torch.float16, "columns", 64)
    dispatch._make_ready((kind, None))
    assert built == ["fwd_e4m3_d64_full_m128n128_ofp16_sblock_sr64"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(FagenError, match="cannot be built while a CUDA graph is captured"):
        dispatch._make_ready(((*kind[:-1], 32), None))  # type: ignore[arg-type]
