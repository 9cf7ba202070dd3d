"""Which kernel fagen.attention picks for e4m3 tensors: by table, by folder, or the usual tile."""

from math import inf
from pathlib import Path

import pytest
import torch

import fagen
from fagen.dispatch import choice
from fagen.dispatch import tables as dispatch_table
from fagen.dispatch.tables import Row
from fagen.kinds.forward.defaults import derived_schedules
from fagen.kinds.forward.keys import Schedule
from fagen.problem import Problem
from fagen.runtime import attention as dispatch
from fagen.vocab import SCALE_ROWS_DEFAULT
from tests.attention_helpers import computed_fp8, quantised

pytestmark = pytest.mark.usefixtures("nothing_is_ready")


def row(slug: str, least: int, most: float, layout: str = "columns", scale_rows: int = 0) -> Row:
    problem = Problem("e4m3", 64, 64, "full", None, layout, scale_rows)
    return Row("NVIDIA H200", problem, least, most, slug)


def usual(width: int, width_v: int, mask: str, layout: str, scale_rows: int) -> Schedule:
    return derived_schedules(Problem("e4m3", width, width_v, mask, None, layout, scale_rows))[0]


def test_a_dispatch_table_tells_e4m3_kernels_apart_by_layout_scales_and_keys(
    schedules_folder: Path,
) -> None:
    few, many = "fwd_e4m3_d64_full_m64n32", "fwd_e4m3_d64_full_m64n64"
    rows, blocks = "fwd_e4m3_d64_full_m64n96_vrows", "fwd_e4m3_d64_full_m64n96_sblock_sr32"
    # 199 keys are 208 places of transposed V: it is keys that count
    table = [
        row(few, 0, 199),
        row(many, 200, inf),
        row(rows, 0, inf, "rows"),
        row(blocks, 0, inf, "columns", 32),
    ]
    dispatch_table.update(schedules_folder / dispatch_table.NAME, table)
    for slug, layout, scale_rows, keys in (
        (few, "columns", 0, 199),
        (many, "columns", 0, 200),
        (rows, "rows", 0, 200),
        (blocks, "columns", 32, 200),
        ("fwd_e4m3_d64_full_m128n128_vrows_sblock_sr32", "rows", 32, 200),  # of which it is silent
    ):
        tensors, how = quantised(scale_rows, layout, keys=keys)
        out = fagen.attention(*tensors, **how)
        assert torch.equal(out, computed_fp8(slug, tensors, how)), slug
    assert fagen.prepare(dtype="e4m3", head_dim=64, v_layout="columns", device="cpu") == many
    other = dict(v_layout="columns", out_dtype="fp16", device="cpu")
    assert fagen.prepare(dtype="e4m3", head_dim=64, **other) == f"{many}_ofp16"  # type: ignore[arg-type]


def test_e4m3_calls_of_few_query_rows_have_their_own_kernel(schedules_folder: Path) -> None:
    few, many = "fwd_e4m3_d64_full_m64n32", "fwd_e4m3_d64_full_m64n64"
    rows = 2 * 4 * 70
    table = [Row.of("NVIDIA H200", few, rows=rows), row(many, 0, inf)]
    dispatch_table.update(schedules_folder / dispatch_table.NAME, table)
    for slug, queries in ((few, 70), (many, 71)):
        tensors, how = quantised(0, "columns", queries=queries)
        assert torch.equal(fagen.attention(*tensors, **how), computed_fp8(slug, tensors, how)), slug
        of = dict(dtype="e4m3", head_dim=64, v_layout="columns", out_dtype="fp16", device="cpu")
        assert fagen.prepare(**of, rows=2 * 4 * queries) == f"{slug}_ofp16"  # type: ignore[arg-type]


def test_a_schedule_of_the_folder_goes_before_the_usual_one(schedules_folder: Path) -> None:
    (schedules_folder / "forward" / "mine.toml").write_text(
        '[attention]\nhead_dim = 64\ndtype = "e4m3"\nmask = "full"\n'
        "[tile]\nblock_m = 64\nblock_n = 96\n"
    )
    tensors, how = quantised(0, "columns")
    out = fagen.attention(*tensors, **how)
    assert torch.equal(out, computed_fp8("fwd_e4m3_d64_full_m64n96", tensors, how))
    out = fagen.attention(*tensors, **how, out_dtype=torch.float16)
    assert torch.equal(out, computed_fp8("fwd_e4m3_d64_full_m64n96_ofp16", tensors, how))


@pytest.mark.parametrize(
    "schedule",
    [
        schedule  # those of packed sequences are in test_varlen_fp8.py
        for schedule in choice.committed("forward")
        if schedule.attention.dtype == "e4m3" and not Problem.of(schedule).varlen
    ],
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
    assert Problem.of(Schedule.from_slug(slug)) == Problem.of(schedule.but(out_dtype="bf16"))
    assert torch.equal(
        fagen.attention(*tensors, causal=causal, **how), computed_fp8(slug, tensors, how)
    )


WIDTHS = [*range(16, 257, 16)]


@pytest.mark.parametrize("scale_rows", [0, 32, 64, 128])
def test_there_is_a_usual_tile_for_every_head_dim(scale_rows: int) -> None:
    for width in WIDTHS:
        for layout in ("rows", "columns"):
            found = usual(width, width, "full", layout, scale_rows)
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
def test_where_o_has_no_room_it_is_stored_in_halves_if_it_can(width: int, slug: str) -> None:
    found = usual(width, width, "full", "rows", 0)
    assert found.slug == f"fwd_e4m3_d{width}_full_{slug}"


def test_the_usual_scale_rows_have_a_tile_for_every_two_head_dims() -> None:
    rows = SCALE_ROWS_DEFAULT
    for width, width_v in ((w, v) for w in (*WIDTHS[::3], 224, 256) for v in (16, 128, 224, 256)):
        for layout in ("rows", "columns"):
            assert usual(width, width_v, "causal", layout, rows).fp8.scale_rows == rows
