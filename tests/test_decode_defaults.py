"""Which schedules of decoding are derived for a call, and how its chunks are dealt."""

from functools import partial
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fagen import registry
from fagen.kinds.decode.cost import whole_tiles
from fagen.kinds.decode.defaults import (
    ROWS,
    counted_keys,
    deal_for,
    derived,
    num_splits_for,
    rows_for,
    tile_for,
)
from fagen.kinds.decode.keys import Schedule
from fagen.kinds.decode.rules import DEALT
from fagen.vocab import PLAIN_MASKS, SIXTEEN_BITS
from tests.decode_helpers import planned

VARIANTS = {"score", "sink", "cache"}  # what calls say beside, of the same tiles


@pytest.mark.parametrize("path", registry.schedules("decode"), ids=lambda path: path.stem)
def test_a_committed_schedule_is_called_by_its_slug_and_leaves_its_defaults(path):
    schedule = registry.read(path)
    plan = planned(path.stem)
    assert schedule.slug == path.stem
    more = {"by"} if plan.stream_k else set()
    if plan.stream_k and (plan.head_dim, plan.rows) == (256, 32):
        more |= {"max_spill_bytes"}
    if path.stem.endswith(("_s3", "_s5")):
        more |= {"stages"}
    if "_h2" in path.stem:
        more |= {"kv_heads"}
    if plan.head_dim_v != plan.head_dim:
        more |= {"head_dim_v"}
    more |= schedule.settings().keys() & VARIANTS
    assert set(schedule.settings()) == Schedule.keys.required | more
    assert plan.kind == "decode"


def derived_slugs(dims, rows, mask="causal", deals=DEALT, **more):
    """The slugs of the first schedule that is derived for each dtype and each of these."""
    return {
        derived(
            dtype=dtype,
            head_dim=d,
            head_dim_v=d_v,
            mask=mask,
            rows=count,
            num_splits=num_splits_for(8),
            by=by,
            **more,
        )[0].slug
        for dtype, (d, d_v), count, by in product(SIXTEEN_BITS, dims, rows, deals)
    }


def test_what_is_derived_is_what_is_committed():
    usual = ((64, 64), (128, 128), (256, 256))
    every = map(registry.read, registry.schedules("decode"))
    assert {schedule.slug for schedule in every if not schedule.settings().keys() & VARIANTS} == (
        derived_slugs(usual, ROWS)
        # without a mask the one that a table names stands for all
        | derived_slugs(usual, [8], "full", ["round_robin"])
        # of other head dims a token's, or a few
        | derived_slugs(((96, 96), (192, 192), (192, 128)), (8, 16))
        | derived_slugs([(96, 96)], [8], several=True)
        | derived_slugs([(96, 96)], [8], several=True, side_by_side=2)
    )


def test_what_is_committed_of_pages_is_derived_too():
    usual = ((64, 64), (128, 128), (256, 256))
    slugs = derived_slugs(usual, [8], cache="paged")
    assert {path.stem for path in registry.schedules("decode") if "_paged" in path.stem} <= slugs


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(2, 32),
    st.integers(2, 32),
    st.integers(1, 200),
    st.integers(1, 128),
    st.sampled_from(sorted(SIXTEEN_BITS)),
    st.sampled_from(sorted(PLAIN_MASKS)),
    st.sampled_from(sorted(DEALT)),
)
def test_any_problem_has_a_kernel_that_fits(d, d_v, rows, kv_heads, dtype, mask, by):
    schedules = derived(
        dtype=dtype,
        head_dim=8 * d,
        head_dim_v=8 * d_v,
        mask=mask,
        rows=rows,
        num_splits=num_splits_for(kv_heads),
        by=by,
    )
    assert schedules and schedules[-1].tile.rows == 8
    assert schedules[0].tile.rows <= rows_for(rows)


def test_rows_and_chunks_that_kernels_are_made_for():
    assert [rows_for(n) for n in (1, 8, 9, 16, 17, 33, 64, 65, 500)] == [
        *(8, 8, 16, 16, 32, 64, 64, 64, 64)
    ]
    assert [num_splits_for(n) for n in (1, 2, 3, 4, 7, 8, 32)] == [64, 64, 64, 32, 32, 16, 16]


TURNS, RUNS = "round_robin", "stream_k"


@pytest.mark.parametrize(
    ("head_dim", "rows", "turns", "runs"),
    [  # and of how many sequences of 8 KV heads are dealt so
        (128, 4, (1, 16, 32, 49), (50,)),
        (128, 16, (31,), (32, 50)),  # a tile each
        (128, 17, (49,), (50,)),
        (128, 64, (50,), ()),
        (64, 16, (49,), (50,)),
        (64, 32, (1_000,), ()),
        (256, 1, (16, 32, 1_000), ()),
        (256, 8, (1_000,), ()),
        (256, 32, (24,), (25,)),
        (256, 65, (), (13,)),  # two tiles of rows each
        # what was not timed in runs
        *((dim, 4, (1, 16, 32, 1_000), ()) for dim in (80, 112, 160, 224)),
        (192, 32, (1, 16, 32, 1_000), ()),
    ],
)
def test_many_tiles_are_dealt_in_runs_where_that_was_faster(head_dim, rows, turns, runs):
    assert {deal_for(head_dim, rows, 8, batch) for batch in turns} <= {TURNS}
    assert {deal_for(head_dim, rows, 8, batch) for batch in runs} <= {RUNS}


@pytest.mark.parametrize(
    ("head_dim", "rows", "turns", "runs"),
    [
        (128, 1, (1, 13, 30), (31, 33, 34, 100)),
        (128, 4, (1, 11, 17, 30), (12, 13, 16, 31, 33, 34, 100)),
        (256, 32, (12, 15, 17), (16, 30)),
        (256, 4, (13,), (16,)),
        # second tiles of narrow heads, for some or in turns behind the first
        (64, 4, (34, 35, 45), (32, 33, 60)),
        # fewer of more rows, whose partial outputs are larger
        (128, 8, (11, 17, 24), (12, 16, 25, 34)),
        (128, 32, (12, 15), (16, 17, 34)),
        # by evidence: 243.6 µs in runs and 255.9 in turns at 32 sequences of 4k keys
        (256, 1, (1, 15), (16, 17, 32)),
        (256, 8, (), (32,)),
        (96, 4, (12, 24), (25, 103)),
        # a tile for most SMs, if partial outputs are not few
        (192, 4, (11, 17), (12, 16)),
        (192, 2, (12, 16), ()),
        *((dim, 4, (1, 16, 32, 1_000), ()) for dim in (80, 112, 160, 224)),
        (192, 32, (1, 16, 32, 1_000), ()),
    ],
)
def test_tiles_that_are_alike_are_dealt_in_runs_where_they_stay_whole(head_dim, rows, turns, runs):
    """One for nearly each of 264 thread blocks, or 132; not one for most, two for some."""
    deal = partial(deal_for, head_dim, rows, 8, alike=True)
    assert {deal(batch) for batch in turns} <= {TURNS}
    assert {deal(batch) for batch in runs} <= {RUNS}
    assert deal_for(128, 0, 0, 32, alike=True) == TURNS


@pytest.mark.parametrize(
    ("rows", "batch", "keys", "tile"),
    [
        (64, 35, 278, (32, 16, TURNS, False)),  # a split each: two thread blocks to an SM
        (64, 16, 4_096, (32, 16, RUNS, True)),  # two tiles of 32 rows are combined where they are
        (40, 85, 4_096, (64, 16, TURNS, True)),  # which would be 30 rows and 10
        (64, 12, 4_096, (64, 16, TURNS, True)),
        (4, 2, 700, (8, 16, TURNS, False)),  # 256 units of work
        (4, 3, 700, (8, 16, TURNS, True)),
        (8, 14, 2_048, (8, 16, TURNS, True)),
        (8, 14, 2_049, (8, 16, RUNS, True)),  # 112 tiles
        (4, 16, 2_048, (8, 16, TURNS, True)),
    ],
)
def test_tiles_of_calls_that_are_alike(rows, batch, keys, tile):
    assert tile_for(128, rows, 8, batch, alike=True, keys=counted_keys(keys))[:5] == (*tile, 1)


@pytest.mark.parametrize(
    ("rows", "kv_heads", "batch", "keys", "tile"),
    [
        (4, 8, 3, 25_341, (8, 16, TURNS, True, 2)),
        (2, 4, 50, 1_458, (8, 32, TURNS, True, 2)),
        (2, 8, 103, 3_196, (8, 16, RUNS, True, 2)),  # 412 tiles of pairs
        (8, 16, 110, 709, (8, 16, RUNS, True, 2)),
        (4, 8, 2, 8_192, (8, 16, TURNS, False, 1)),  # a unit of work each: nobody drifts apart
        (1, 4, 146, 274, (8, 32, TURNS, False, 1)),  # one split
        (1, 3, 60, 974, (8, 64, TURNS, True, 1)),  # the third head's line is the next key's
        (9, 4, 20, 1_458, (16, 32, TURNS, True, 1)),
    ],
)
def test_thread_blocks_of_several_units_read_heads_that_share_lines_by_twos(
    rows, kv_heads, batch, keys, tile
):
    for alike in (True, False):
        found = tile_for(96, rows, kv_heads, batch, alike=alike, keys=counted_keys(keys))
        assert found == (*tile, False)


@pytest.mark.parametrize(
    ("kv_heads", "batch", "by"), [(1, 200, RUNS), (1, 160, TURNS), (2, 66, RUNS), (8, 25, TURNS)]
)
def test_four_rows_of_few_kv_heads_stay_whole_from_three_tiles_of_four_on(kv_heads, batch, by):
    assert deal_for(128, 4, kv_heads, batch, alike=True) == by


@pytest.mark.parametrize(
    ("head_dim", "rows", "kv_heads", "batch", "by"),
    [  # by an H200, whose memory waits for the steps of short splits
        (128, 4, 1, 120, TURNS),
        (128, 4, 1, 129, RUNS),
        (128, 8, 1, 100, TURNS),
        (128, 8, 1, 128, RUNS),
        (128, 16, 1, 132, RUNS),
        (128, 4, 4, 25, TURNS),
        (128, 4, 8, 13, RUNS),
        (128, 8, 2, 100, TURNS),
        (128, 8, 1, 220, RUNS),
        (192, 4, 1, 100, TURNS),
        (192, 4, 1, 110, RUNS),
        (64, 8, 2, 64, TURNS),
        (256, 8, 1, 132, RUNS),
    ],
)
def test_whole_tiles_of_short_splits_are_more_where_memory_is_quick(
    head_dim, rows, kv_heads, batch, by
):
    deal = partial(tile_for, head_dim, rows, kv_heads, batch, alike=True)
    assert deal(card="NVIDIA H200").by == by
    for card in ("NVIDIA H100 80GB HBM3", "NVIDIA GH200 120GB", ""):
        assert deal(card=card).by == RUNS


def test_an_sm_of_quick_memory_has_two_thread_blocks_where_one_would_have_two_tiles():
    usual = dict(dtype="bf16", head_dim=128, head_dim_v=128, mask="causal")
    for batch, card, blocks in ((230, "NVIDIA H200", 2), (129, "NVIDIA H200", 1), (230, "", 1)):
        tile = tile_for(128, 4, 1, batch, alike=True, card=card)
        assert derived(**usual, **tile._asdict())[0].values()["blocks"] == blocks


@pytest.mark.parametrize(("batch", "slots", "most"), [(105, 132, 7), (71, 132, 0), (42, 264, 0)])
def test_some_have_a_tile_more_if_they_are_enough_to_read_memory(batch, slots, most):
    """72 of 128 thread blocks that have an SM each, or 56; 72 of 264."""
    assert whole_tiles(8, batch, slots, even=False) == most


def test_keys_are_counted_as_far_as_they_choose():
    assert [counted_keys(n) for n in (0, 1, 64, 65, 640, 641, 2_048, 2_049, 10**6)] == [
        *(0, 64, 64, 128, 640, 2_048, 2_048, 2_049, 2_049)
    ]


def test_sixteen_rows_of_few_kv_heads_that_share_lines_have_three_thread_blocks_to_an_sm():
    usual = dict(dtype="bf16", head_dim=96, mask="causal", rows=16, num_splits=64, several=True)
    assert derived(**usual, head_dim_v=96)[0].slug == "dec_bf16_d96_causal_r16n64_c64_b3"
    for changes in ({"several": False}, {"num_splits": 32}, {"head_dim_v": 256}, {"by": RUNS}):
        assert derived(**{"head_dim_v": 96} | usual | changes)[0].values()["blocks"] <= 2


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_eight_rows_of_wide_heads_have_a_kernel_in_runs(dtype):
    wide = dict(dtype=dtype, head_dim=256, head_dim_v=256, mask="causal", rows=8, num_splits=16)
    assert derived(**wide, by=RUNS)[0].slug == f"dec_{dtype}_d256_causal_r8n64_streamk_s5"


@pytest.mark.parametrize(
    ("dims", "rows", "num_splits", "by", "ring"),
    [  # buffers of so many thread blocks
        ((256, 256), 16, 16, RUNS, (3, 1)),
        ((256, 256), 16, 16, TURNS, (6, 1)),
        ((256, 256), 8, 32, RUNS, (5, 1)),
        ((256, 256), 8, 16, TURNS, (6, 1)),
        ((192, 128), 8, 32, RUNS, (8, 1)),
        ((192, 128), 8, 32, TURNS, (4, 2)),
        ((192, 192), 8, 32, RUNS, (4, 2)),
        ((128, 128), 8, 64, RUNS, (7, 1)),
        ((128, 128), 8, 16, RUNS, (5, 2)),
        ((128, 128), 8, 64, TURNS, (5, 2)),
    ],
)
def test_runs_have_the_buffers_that_were_faster(dims, rows, num_splits, by, ring):
    keys = dict(zip(("head_dim", "head_dim_v"), dims, strict=True), rows=rows, mask="causal")
    values = derived(dtype="fp16", num_splits=num_splits, by=by, **keys)[0].values()
    assert (values["stages"], values["blocks"]) == ring
