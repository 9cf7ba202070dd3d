"""Which kernel fagen.attention picks for e4m3 tensors: by table, by folder, or the usual tile."""

from pathlib import Path

import pytest
import torch

import fagen
from fagen.dispatch import select
from fagen.dispatch import tables as dispatch_table
from fagen.dispatch.rows import MOST, Row
from fagen.e4m3 import rounded
from fagen.kinds.forward.defaults import derived_schedules
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.operands import Operands
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.plan import plan
from fagen.kinds.forward.verify.textbook import textbook
from fagen.measure.numerics import rms
from fagen.problem import Problem, Sizes
from fagen.vocab import SCALE_ROWS_DEFAULT
from tests.attention_helpers import computed_fp8, quantised
from tests.tensors import normal

pytestmark = pytest.mark.usefixtures("nothing_is_ready")


def row(
    slug: str, least: int, most: int = MOST, layout: str = "columns", scale_rows: int = 0
) -> Row:
    entry = Row("NVIDIA H200", slug, least, most)
    assert entry.problem == Problem("e4m3", 64, 64, "full", None, layout, scale_rows)
    return entry


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
        row(many, 200, MOST),
        row(rows, 0, MOST, "rows"),
        row(blocks, 0, MOST, "columns", 32),
    ]
    dispatch_table.update(schedules_folder / dispatch_table.NAME, table)
    for slug, layout, scale_rows, keys in (
        (few, "columns", 0, 199),
        (many, "columns", 0, 200),
        (rows, "rows", 0, 200),
        (blocks, "columns", 32, 200),
        (usual(64, 64, "full", "rows", 32).slug, "rows", 32, 200),  # of which it is silent
    ):
        tensors, how = quantised(scale_rows, layout, keys=keys)
        out = fagen.attention(*tensors, **how)
        assert torch.equal(out, computed_fp8(slug, tensors, how)), slug
    assert fagen.prepare(dtype="e4m3", head_dim=64, v_layout="columns", device="cpu") == many
    other = dict(v_layout="columns", out_dtype="fp16", device="cpu")
    assert fagen.prepare(dtype="e4m3", head_dim=64, **other) == f"{many}_ofp16"  # type: ignore[arg-type]
    path = schedules_folder / dispatch_table.NAME
    dispatch_table.update(path, [row(many, 0)])  # in place of both for columns
    assert {*dispatch_table.table_at(path)} == {row(many, 0), *table[2:]}


def test_e4m3_calls_of_few_query_rows_have_their_own_kernel(schedules_folder: Path) -> None:
    few, many = "fwd_e4m3_d64_full_m64n32", "fwd_e4m3_d64_full_m64n64"
    rows = 2 * 4 * 70
    table = [Row("NVIDIA H200", few, rows_to=rows), row(many, 0, MOST)]
    dispatch_table.update(schedules_folder / dispatch_table.NAME, table)
    for slug, queries in ((few, 70), (many, 71)):
        tensors, how = quantised(0, "columns", queries=queries)
        assert torch.equal(fagen.attention(*tensors, **how), computed_fp8(slug, tensors, how)), slug
        call = dict(dtype="e4m3", head_dim=64, v_layout="columns", out_dtype="fp16", device="cpu")
        assert fagen.prepare(**call, rows=2 * 4 * queries) == f"{slug}_ofp16"  # type: ignore[arg-type]


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


# Sums of e4m3 over so many keys are within twice a textbook's error, whatever V's mean is.
KEYS_OF_A_SUM = 160


@pytest.mark.parametrize(
    "schedule",
    [schedule for schedule in select.committed("forward") if schedule.attention.dtype == "e4m3"],
    ids=lambda schedule: schedule.slug,
)
def test_no_committed_e4m3_kernel_adds_up_more_keys_than_13_bits_hold(schedule: Schedule) -> None:
    softmax = schedule.softmax
    assert 0 < softmax.promote * schedule.tile.block_n <= KEYS_OF_A_SUM


@pytest.mark.parametrize("lengths", ["equal", "varlen"])
@pytest.mark.parametrize("widths", [(16, 16), (64, 64), (96, 48), (192, 128), (256, 256)], ids=str)
def test_no_derived_e4m3_kernel_does_either(widths: tuple[int, int], lengths: str) -> None:
    problem = Problem("e4m3", *widths, "causal", None, "rows", 0, lengths=lengths)
    for schedule in derived_schedules(problem):
        assert 0 < schedule.softmax.promote * schedule.tile.block_n <= KEYS_OF_A_SUM, schedule.slug


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_v_with_a_mean_is_as_exact_as_a_textbooks(head_dim: int, mask: str) -> None:
    """By the kernel that a call gets, emulated to the bit; 640 keys of V about 10."""
    causal = mask == "causal"
    q, k, v = (normal(1, n, 1, head_dim, seed=i) for i, n in enumerate((16, 640, 640)))
    v += 10
    quantized = [rounded(x, "head") for x in (q, k, v)]
    q, k, v = (x.real(0) for x in quantized)
    scale = head_dim**-0.5
    exact, _ = reference(q, k, v, mask=mask, scale=scale)
    names = ("q_descale", "k_descale", "v_descale")
    how = {name: x.descale for name, x in zip(names, quantized, strict=True)}
    out = fagen.attention(*(x.values for x in quantized), **how, causal=causal, v_layout="rows")
    # a textbook's: P times 2^8 of the row's maximum, rounded to e4m3, and O rounded to bf16
    operands = Operands(*(x.values for x in quantized), *(x.descale for x in quantized))
    planned = plan(usual(head_dim, head_dim, mask, "rows", 0))
    beside = textbook(planned, operands, scale).bfloat16()
    assert rms(out.double() - exact) <= 2 * rms(beside.double() - exact)


@pytest.mark.parametrize(
    "schedule",
    [
        schedule  # those of varlen sequences are in test_varlen.py
        for schedule in select.committed("forward")
        if schedule.attention.dtype == "e4m3" and not Problem.of(schedule).varlen
    ],
    ids=lambda schedule: schedule.slug,
)
def test_every_e4m3_schedule_of_the_folder_serves_its_problem(schedule: Schedule) -> None:
    keys, fp8 = schedule.attention, schedule.fp8
    sizes = {"head_dim": keys.head_dim, "head_dim_v": keys.head_dim_v}
    tensors, how = quantised(fp8.scale_rows, fp8.v_layout, **sizes)
    causal = keys.mask == "causal"
    slug = fagen.pick(
        dtype="e4m3",
        **sizes,
        causal=causal,
        batch=len(tensors[0]),
        heads=tensors[0].shape[2],
        kv_heads=tensors[1].shape[2],
        seqlen=tensors[0].shape[1],
        seqlen_k=tensors[1].shape[1],
        v_layout=fp8.v_layout,
        scale_rows=fp8.scale_rows,
    ).slug
    assert Problem.of(Schedule.from_slug(slug)) == Problem.of(schedule.but(out_dtype="bf16"))
    assert torch.equal(
        fagen.attention(*tensors, causal=causal, **how), computed_fp8(slug, tensors, how)
    )


# batch, heads, KV heads, queries, keys at head dim 256, with which V was transposed faster before
# all tiles than in each, by 2 % or more, and slower
BEFORE = {
    "full": ((15, 32, 8, 2_561, 1_650), (1, 8, 2, 9_485, 9_485), (1, 1, 1, 8_983, 8_983)),
    "causal": ((4, 8, 2, 5_187, 5_187), (9, 16, 2, 2_300, 2_300), (6, 8, 1, 3_300, 3_300)),
}
IN_TILES = {"full": ((8, 8, 8, 2_048, 2_048),), "causal": ((28, 4, 4, 859, 859),)}


@pytest.mark.parametrize("mask", BEFORE)
def test_v_is_transposed_before_all_tiles_where_that_is_worth_a_launch(mask: str) -> None:
    for calls, before in ((BEFORE[mask], True), (IN_TILES[mask], False)):
        for batch, heads, kv_heads, queries, keys in calls:
            sizes = Sizes(batch, heads, kv_heads, queries, keys)
            problem = Problem("e4m3", 256, 256, mask, "bf16", "rows", 0)
            schedule = select.serve(problem, sizes, "NVIDIA H200").schedule
            assert (schedule.values()["transposes"] == "kernel") == before, sizes


WIDTHS = [*range(16, 257, 16)]


@pytest.mark.parametrize("scale_rows", [0, 32, 64, 128])
def test_there_is_a_usual_tile_for_every_head_dim(scale_rows: int) -> None:
    for width in WIDTHS:
        for layout in ("rows", "columns"):
            schedule = usual(width, width, "full", layout, scale_rows)
            assert (schedule.attention.head_dim, schedule.fp8.v_layout) == (width, layout)
            assert schedule.fp8.scale_rows == scale_rows
            assert schedule.tile.block_n >= 64


@pytest.mark.parametrize(
    ("width", "tile", "output"),
    [
        (160, 128, "own"),
        (192, 128, "own"),
        (224, 96, "own"),
        (256, 96, "half"),
    ],
)
def test_where_o_has_no_room_it_is_stored_in_halves_if_it_can(
    width: int, tile: int, output: str
) -> None:
    schedule = usual(width, width, "full", "rows", 0)
    assert (schedule.tile.block_n, schedule.pipeline.output) == (tile, output)


def test_the_usual_scale_rows_have_a_tile_for_every_two_head_dims() -> None:
    rows = SCALE_ROWS_DEFAULT
    for width, width_v in ((w, v) for w in (*WIDTHS[::3], 224, 256) for v in (16, 128, 224, 256)):
        for layout in ("rows", "columns"):
            assert usual(width, width_v, "causal", layout, rows).fp8.scale_rows == rows
