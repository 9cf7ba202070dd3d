"""fagen.attention of e4m3 tensors: the kernel, the descales, and what is said of wrong calls."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fagen
from fagen.e4m3 import by_columns
from fagen.errors import ScheduleError
from fagen.kinds.forward.defaults import derived_schedules
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.reference import reference
from fagen.problem import Problem
from fagen.runtime import op
from fagen.runtime.attention import ATTENTION, key_asked
from fagen.runtime.call import CallKey
from tests.attention_helpers import computed_fp8, picked, qkv, quantised

pytestmark = pytest.mark.usefixtures("nothing_is_ready")


# ---- e4m3 tensors -------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("scale_rows", [0, 32, 128])
def test_e4m3_tensors_run_the_kernel_of_their_layout_and_scales(
    schedules_folder: Path, causal: bool, layout: str, scale_rows: int
) -> None:
    tensors, how = quantised(scale_rows, layout)
    slug = picked(
        dtype="e4m3",
        head_dim=64,
        causal=causal,
        seqlen=200,
        v_layout=layout,
        scale_rows=scale_rows,
    ).slug
    mask = "causal" if causal else "full"
    assert (
        slug == derived_schedules(Problem("e4m3", 64, 64, mask, None, layout, scale_rows))[0].slug
    )
    out, lse = fagen.attention(*tensors, causal=causal, return_lse=True, **how)
    assert torch.equal(out, computed_fp8(slug, tensors, how))
    assert out.dtype == torch.bfloat16 and lse.shape == (2, 4, 70)
    exact = reference(*qkv(), mask=mask, scale=1 / 8)[0]
    assert (out - exact).square().mean().sqrt() < 0.06 * exact.square().mean().sqrt()


def test_descales_may_be_a_number_or_of_heads_with_or_without_blocks() -> None:
    (q, k, v), how = quantised()
    out = fagen.attention(q, k, v, **how)
    names = ("q_descale", "k_descale", "v_descale")
    of_heads = {n: how[n][..., 0] for n in names[:2]} | {"v_descale": how["v_descale"]}
    assert torch.equal(out, fagen.attention(q, k, v, **of_heads))
    assert not torch.equal(out, fagen.attention(q, k, v, **how | {"v_descale": torch.ones(2, 2)}))
    number = torch.tensor(0.01)
    spread = fagen.attention(q, k, v, **{n: torch.full_like(how[n], 0.01) for n in names})
    assert not torch.equal(spread, out)
    for one in (number, number[None, None], number[None, None, None]):
        assert torch.equal(spread, fagen.attention(q, k, v, **dict.fromkeys(names, one)))


def test_scale_rows_may_be_inferred_or_given_and_give_the_same(schedules_folder: Path) -> None:
    for rows in (32, 64, 128):
        tensors, how = quantised(rows)
        inferred = fagen.attention(*tensors, **how)
        assert torch.equal(inferred, fagen.attention(*tensors, **how, scale_rows=rows))
        usual = derived_schedules(Problem("e4m3", 64, 64, "full", None, "rows", rows))[0]
        assert torch.equal(inferred, fagen.attention(*tensors, **how, schedule=usual))


def test_a_single_block_is_a_heads_scale_unless_scale_rows_says_otherwise(
    schedules_folder: Path,
) -> None:
    tensors, how = quantised(128, queries=50, keys=100)
    by_head = fagen.attention(*tensors, **how)
    by_block = fagen.attention(*tensors, **how, scale_rows=128)
    for out, rows in ((by_head, 0), (by_block, 128)):
        usual = derived_schedules(Problem("e4m3", 64, 64, "full", None, "rows", rows))[0]
        assert torch.equal(out, computed_fp8(usual.slug, tensors, how))
    torch.testing.assert_close(by_head, by_block, rtol=0.03, atol=0.03)


def test_out_may_be_fp16(schedules_folder: Path) -> None:
    tensors, how = quantised()
    out = fagen.attention(*tensors, **how, out_dtype=torch.float16)
    usual = derived_schedules(Problem("e4m3", 64, 64, "full", None, "rows", 0))[0]
    slug = usual.but(out_dtype="fp16").slug
    assert torch.equal(out, computed_fp8(slug, tensors, how))
    assert out.dtype == torch.float16
    chosen = "fwd_e4m3_d64_full_m64n64_ofp16_vrows"
    out = fagen.attention(*tensors, **how, schedule=chosen)  # says so itself
    assert torch.equal(out, computed_fp8(chosen, tensors, how))


def test_prepare_says_which_kernel_it_will_be(schedules_folder: Path) -> None:
    def slug(**more: Any) -> str:
        return fagen.prepare(dtype="e4m3", head_dim=128, device="cpu", **more)

    def usual(*of: Any) -> Schedule:
        return derived_schedules(Problem("e4m3", 128, *of))[0]

    assert slug() == usual(128, "full", None, "rows", 0).slug
    assert slug(v_layout="columns", causal=True) == usual(128, "causal", None, "columns", 0).slug
    blocks = usual(64, "full", None, "columns", 64).but(out_dtype="fp16")
    assert slug(v_layout="columns", scale_rows=64, out_dtype="fp16", head_dim_v=64) == blocks.slug
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
    seen: list[Any] = []

    def run(key: CallKey) -> None:
        kernel = ATTENTION.find(key, slug=key.schedule)
        emulated = op.emulated(kernel.slug)
        op.run_once(kernel.slug, key.device, lambda **given: seen.append(emulated(**given)))

    run(key_asked("e4m3", 64, 32, True, "cpu", None, None, layout, scale_rows))
    run(key_asked("fp16", 64, 32, True, "cpu", "fwd_fp16_d64v32_causal_m64n64"))
    assert [out.shape for out, _ in seen] == [(1, 1, 1, 32)] * 2


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
        "v_descale has shape (2,); it must be one number (), (batch, heads) or (batch, heads, he",
    ),
    (
        "descale_heads",
        lambda q, k, v, how: fagen.attention(q, k, v, **how | {"v_descale": torch.ones(2, 4)}),
        "v_descale has shape (2, 4, 1); it must be (batch = 2 or 1, kv_heads = 2 or 1, 64 or 1)",
    ),
    (
        "descale_dtype",
        lambda q, k, v, how: fagen.attention(
            q, k, v, **how | {"v_descale": torch.ones(2, 2).half()}
        ),
        "v_descale is not float32, which this kernel takes; v_descale.to(torch.float32) converts",
    ),
    (
        "unequal_blocks",
        lambda q, k, v, how: fagen.attention(q, k, v, **how | {"k_descale": torch.ones(2, 2, 7)}),
        "q_descale and k_descale have 1 and 7 blocks for 70 queries and 200 keys; both must have "
        "one, or one for each block of 32, 64, 128 rows, as many in both",
    ),
    (
        "scale_rows_of_nothing",
        lambda q, k, v, how: fagen.attention(q, k, v, **how, scale_rows=48),
        "scale_rows is 48; it must be one of 0, 32, 64, 128",
    ),
    (
        "scale_rows_not_the_descales",
        lambda q, k, v, how: fagen.attention(q, k, v, **how, scale_rows=64),
        "q_descale has shape (2, 4, 1); it must be (batch = 2 or 1, heads = 4 or 1, ceil(seqlen_q",
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
        "descales, means, v_layout, scale_rows and out_dtype go with e4m3 tensors, which fagen.q",
    ),
    (
        "out_dtype_of_16_bits",
        lambda q, k, v, how: fagen.attention(q.half(), k.half(), v.half(), out_dtype=torch.float16),
        "descales, means, v_layout, scale_rows and out_dtype go with e4m3 tensors, which fagen.q",
    ),
    (
        "out_dtype",
        lambda q, k, v, how: fagen.attention(q, k, v, **how, out_dtype=torch.float32),
        "out_dtype is torch.float32; it must be one of torch.float16, torch.bfloat16",
    ),
    (
        "columns_not_said",
        lambda q, k, v, how: fagen.attention(q, k, by_columns(v), **how),
        'v has shape (2, 2, 64, 208), which is transposed V of 2 heads: pass v_layout="columns"',
    ),
    (
        "columns_said_of_rows",
        lambda q, k, v, how: fagen.attention(q, k, v, **how | {"v_layout": "columns"}),
        'v has shape (2, 200, 2, 64), which is row-major V of 200 keys: pass v_layout="rows", or ',
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
            "fwd_e4m3_d64_full_m64n64 computes float8_e4m3fn, head_dim 64, full, V transposed, "
            "scales by head or tensor, out in bfloat16; the call asks for float8_e4m3fn, head_dim "
            "64, full, V row-major",
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
    with pytest.raises(ValueError, match="v_mean or k_mean requires a gradient, and this op has"):
        fagen.attention(q, k, v, **how)
    with torch.no_grad():
        assert not fagen.attention(q, k, v, **how).requires_grad  # type: ignore[union-attr]
