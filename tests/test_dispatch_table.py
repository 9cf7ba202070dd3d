"""Dispatch tables: which kernel for which problem, key length and card."""

import random
from dataclasses import replace
from itertools import product

import pytest

from fagen.dispatch import tables as dispatch_table
from fagen.dispatch.rows import COMBINING, MOST, OPEN_KEYS, Row, clocks, first_fit, measures_of
from fagen.dispatch.select import first_slug, flattened, select, serve
from fagen.dispatch.tables import table_at, update
from fagen.errors import FagenError, ScheduleError
from fagen.kinds.forward.keys import Schedule
from fagen.paths import cache_folder, locate
from fagen.problem import Problem, Sizes
from fagen.registry import committed_file, from_slug, plan
from fagen.vocab import DTYPES, PLAIN_MASKS, SIXTEEN_BITS

CARD, OTHER_CARD = "NVIDIA H200", "NVIDIA H100"
SHORT, LONG, MINE, FEW = (f"fwd_fp16_d128_full_m128n{n}" for n in (64, 128, 160, 96))
PACKED = f"{LONG}_varlen"
PROBLEM = Problem("fp16", 128, 128, "full", "fp16", "", 0)


def rows(card=CARD, short=SHORT, long=LONG):
    return [Row(card, short, 0, 1_023), Row(card, long, 1_024)]


def few(most=16_384, slug=FEW, card=CARD):
    return Row(card, slug, rows_to=most)


def rows_for(problem, card=CARD):
    """The rows that name a kernel, in the order in which they are tried."""
    return [row for row in flattened(problem, card) if row.slug]


def served(problem, sizes):
    return serve(problem, sizes, CARD).schedule


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """fagen's own table and a user's, both empty so far."""
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("fagen.dispatch.select.locate", lambda name: tmp_path / "own")
    table_at.cache_clear()
    yield tmp_path / "own" / "dispatch.toml", tmp_path / "fagen" / "dispatch.toml"
    table_at.cache_clear()


# ---- writing ------------------------------------------------------------------------------------


def test_a_row_says_by_what_it_was_measured_and_keeps_that(tmp_path):
    path, by = tmp_path / "dispatch.toml", 'benchmarks/shapes.py, "by hand"'
    update(path, [replace(rows()[0], by=by), rows()[1]])
    update(path, rows(OTHER_CARD))
    assert [row.by for row in table_at(path)] == ["", "", by, ""]
    path.write_text(path.read_text().replace("by = ", "by = 1 #"))
    table_at.cache_clear()
    with pytest.raises(ScheduleError, match=r"number 3: by is not text: 1"):
        table_at(path)


def test_an_update_replaces_rows_of_its_sort_for_a_problem_on_a_card_and_nothing_else(tmp_path):
    path, other = tmp_path / "dispatch.toml", Row(OTHER_CARD, "fwd_bf16_d192v128_full_m128n128")
    update(path, [*rows(), *rows(OTHER_CARD), few(), few(8_192), other])
    assert set(table_at(path)) == {*rows(), *rows(OTHER_CARD), few(), few(8_192), other}
    update(path, [Row(CARD, LONG)])  # by keys alone, as a search writes them
    assert set(table_at(path)) == {
        Row(CARD, LONG), few(), few(8_192), *rows(OTHER_CARD), other
    }  # fmt: skip
    update(path, [few(1_024, slug=SHORT), few(card=OTHER_CARD)])
    assert set(table_at(path)) == {
        Row(CARD, LONG), few(1_024, slug=SHORT), *rows(OTHER_CARD), few(card=OTHER_CARD), other
    }  # fmt: skip


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ([few(), few(slug=SHORT)], "are both for at most 16384 query rows"),
        ([Row(CARD, LONG, 0, 99)] * 2, "are both for 0 keys to 99"),
        ([Row("NVIDIA \ud83d", LONG)], "this is not TOML"),
        ([few(2**63)], "rows_to is 9223372036854775808; it must be 9223372036854775807 or less"),
        ([Row(CARD * 6_000, slug) for slug in (LONG, SHORT)], "more than 131,072 byte"),
    ],
)
def test_an_update_that_would_spoil_a_table_leaves_it_as_it_is(tmp_path, new, message):
    path = tmp_path / "dispatch.toml"
    update(path, rows())
    before = path.read_text()
    with pytest.raises(ScheduleError, match=message):
        update(path, new)
    assert path.read_text() == before


# ---- which rows serve ---------------------------------------------------------------------------


def test_a_users_rows_go_first_then_this_cards_then_anothers_those_for_few_before_all(folders):
    own, users = folders
    assert rows_for(PROBLEM) == []
    update(own, rows(OTHER_CARD, long=FEW))
    assert [row.slug for row in rows_for(PROBLEM)] == [SHORT, FEW]
    update(own, [*rows(), few(), few(8_192)])
    assert rows_for(PROBLEM) == [few(8_192), few(), *rows()]
    assert own.read_text().count("\nrows_to = 8192\nslug = ") == 1
    users_rows = rows(long=MINE)
    update(users, users_rows)  # who says nothing of few rows keeps what is known of them
    for mine, left in ((64, [few(8_192), few()]), (9_000, [few()]), (20_000, [])):
        update(users, [few(mine, slug=MINE)])
        assert rows_for(PROBLEM) == [few(mine, slug=MINE), *left, *users_rows]
    assert rows_for(replace(PROBLEM, head_dim=64, head_dim_v=64)) == []


@pytest.mark.parametrize(
    ("users", "left"),
    [
        ([(8_192,)], [(SHORT, 0, 1_023), (LONG, 1_024, 8_191), (MINE, 8_192)]),
        ([(0, 1_000)], [(MINE, 0, 1_000), (SHORT, 1_001, 1_023), (LONG, 1_024)]),
        ([(1_000, 1_100)], [(SHORT, 0, 999), (MINE, 1_000, 1_100), (LONG, 1_101)]),
        ([(0, 1_023)], [(MINE, 0, 1_023), (LONG, 1_024)]),
        ([(5, 5), (7, 9)], [(SHORT, 0, 4), (MINE, 5, 5), (SHORT, 6, 6), (MINE, 7, 9),
                            (SHORT, 10, 1_023), (LONG, 1_024)]),
        ([()], [(MINE,)]),
    ],
)  # fmt: skip
def test_bounded_rows_of_a_user_leave_the_rest_to_fagens(folders, users, left):
    update(folders[0], rows())
    update(folders[1], [Row(CARD, MINE, *keys) for keys in users])
    assert rows_for(PROBLEM) == [Row(CARD, *part) for part in left]


def test_what_no_row_is_for_is_served_as_without_a_table(folders):
    usual = served(PROBLEM, Sizes(1, 1, 1, 1, 1)).slug
    update(folders[1], [Row(CARD, MINE, 100, 200), few(64, slug=SHORT)])

    def slug(keys, queries=1_000):
        return served(PROBLEM, Sizes(1, 1, 1, queries, keys)).slug

    expected = {1: usual, 99: usual, 100: MINE, 200: MINE, 201: usual, OPEN_KEYS + 1: usual}
    assert {keys: slug(keys) for keys in expected} == expected and usual != MINE
    assert slug(1, 64) == slug(150, 64) == SHORT
    assert select(PROBLEM, CARD).many == ((99, None, ()), (200, MINE, ()), (MOST, None, ()))


def test_of_rows_with_clocks_the_cheapest_serves_by_ends_of_tiles_and_of_rounds(folders):
    """Counted by hand: 132 tiles at once, of 192 rows and 64 keys a step or of 128 and 128."""
    tall, square = "fwd_fp16_d128_full_m192n64_s3", LONG
    own = [Row(CARD, tall, keys_to=9_999, step_clocks=150, tile_clocks=300),
           Row(CARD, square, keys_to=9_999, step_clocks=200, tile_clocks=300),
           Row(CARD, FEW, 10_000)]  # fmt: skip
    update(folders[0], own)
    assert rows_for(PROBLEM) == own
    both = {  # heads, queries, keys: clocks of either
        (132, 192, 128): (600, 1_000),  # one round of one tile, and two of two
        (132, 128, 128): (600, 500),
        (44, 521, 521): (1_650, 2_600),  # 132 tiles of 3 a head, of 9 steps; 220 of 5, of 5 steps
        (66, 256, 4_096): (9_900, 6_700),
        (1, 1, 64): (450, 500),
        (1, 1, 0): (300, 300),  # then the first
    }
    for (heads, queries, keys), (first, second) in both.items():
        sizes = Sizes(1, heads, heads, queries, keys)
        best = tall if first <= second else square
        assert served(PROBLEM, sizes).slug == best, sizes
        chosen = select(PROBLEM, CARD)
        assert first_slug(chosen, *vars(sizes).values()) == best
        assert first_slug(chosen, *vars(sizes).values(), surely=bool) == best
    assert served(PROBLEM, Sizes(1, 132, 132, 128, 10_000)).slug == FEW
    assert chosen.slugs(1, 1) == (tall, square) and chosen.slugs() == (tall, square, FEW)
    update(folders[1], [Row(CARD, MINE, 500, 600), few(64, slug=SHORT)])
    chosen = select(PROBLEM, CARD)
    calls = (192, 499, tall), (128, 500, MINE), (128, 601, square), (1, 1, tall)
    for queries, keys, best in calls:
        sizes = 1, 132, 132, queries, keys
        assert first_slug(chosen, *sizes) == first_slug(chosen, *sizes, surely=bool) == best
    assert first_slug(chosen, 1, 64, 64, 1, 1) == SHORT


def test_under_a_mask_by_row_clocks_are_of_all_tiles_or_of_the_longest(folders):
    """Counted by hand, of tiles of 192 rows and steps of 64 keys, or 128 and 128."""
    tall, square = (f"fwd_fp16_d128_causal_{tile}" for tile in ("m192n64_s3", "m128n128"))
    step = dict(step_clocks=100, tile_clocks=50)
    update(folders[0], [Row(CARD, tall, **step), Row(CARD, square, **step)])
    problem = replace(PROBLEM, mask="causal")
    both = {  # heads, queries, keys: clocks of either
        # 3 tiles of 3, 6 and 9 steps are 1,950; 5 of 1 to 5 are 1,750
        (132, 521, 521): (1_950 + 1_950 // 36, 1_750 + 1_750 // 60),
        (1, 521, 521): (950, 550),  # the longest alone
        (132, 192, 192): (350 + 350 // 12, 400 + 400 // 24),
        (132, 192, 256): (450 + 450 // 12, 500 + 500 // 24),  # two steps each
        (132, 999, 192): (350 + 350 // 12, 400 + 400 // 24),  # most see nothing
        # someone has two of 61 steps, or three of 30: all tiles see about as many keys
        (100, 384, 4_096): (2 * 6_150, 3 * 3_050),
        (1, 1, 0): (50, 50),
    }
    for (heads, queries, keys), (first, second) in both.items():
        sizes, best = Sizes(1, heads, heads, queries, keys), tall if first <= second else square
        assert [
            clocks(row.tiles, heads, heads, queries, keys) for row in rows_for(problem)
        ] == [first, second], sizes  # fmt: skip
        assert served(problem, sizes).slug == best
        assert first_slug(select(problem, CARD), *vars(sizes).values()) == best


def test_of_heads_that_share_tiles_clocks_are_those_of_one_of_more_queries(folders):
    """Counted by hand, of 521 queries and keys, in tiles of 128 rows and steps of 128 keys."""
    both = {  # heads and KV heads: clocks of tiles of a head, and of tiles that heads share
        "full": {
            (544, 136): (21 * 1_100, 18 * 1_100),  # 2,720 tiles of 5 steps, and 2,312
            (128, 32): (5 * 1_100, 5 * 1_100),  # 640 and 544: as many rounds
            (264, 264): (10 * 1_100, 10 * 1_100),
        },
        "causal": {
            # tiles of 1 to 5 steps; four of each but for one of five
            (544, 136): (3_500 * 544 // 132 + 3_500 // 60, 10_700 * 136 // 132 + 10_700 // 204),
            (264, 264): (2 * 3_500 + 3_500 // 60,) * 2,
        },
    }
    for mask, cases in both.items():
        plain, shared = (f"fwd_fp16_d128_{mask}_m128n128{end}" for end in ("", "_packgqa"))
        step = dict(step_clocks=200, tile_clocks=100)
        update(folders[0], [Row(CARD, plain, **step), Row(CARD, shared, **step)])
        problem = replace(PROBLEM, mask=mask)
        for (heads, kv_heads), (first, second) in cases.items():
            assert [
                clocks(row.tiles, heads, kv_heads, 521, 521) for row in rows_for(problem)
            ] == [first, second]  # fmt: skip
            sizes, best = Sizes(1, heads, kv_heads, 521, 521), plain if first <= second else shared
            assert served(problem, sizes).slug == best
            assert first_slug(select(problem, CARD), *vars(sizes).values()) == best


def test_splits_that_fill_the_sms_serve_where_they_take_the_fewest_clocks_with_combining(folders):
    """Counted by hand, of steps of 128 keys and 16 splits at most."""
    both = {  # heads, queries, keys: clocks of splits, and of tiles by themselves
        "full": {
            # three splits of 8 blocks in a round, 108 tiles combined; one tile of 24
            (36, 128, 3_072): (850 + 8, 1_250),
            (132, 128, 3_072): (2_450 + 30, 1_250),
            (36, 128, 0): (8, 50),
        },
        "causal": {
            # of two blocks one tile of two sees both: 132 tiles of a block; one of two
            (44, 256, 256): (150 + 20, 150),
            (66, 256, 256): (250 + 30, 150),
            (36, 128, 3_072): (850 + 8, 1_250),
        },
    }
    for mask, cases in both.items():
        plain, fill = (f"fwd_fp16_d128_{mask}_m128n128{end}" for end in ("", "_split16_fill"))
        own = [
            Row(CARD, fill, step_clocks=100, tile_clocks=50, combine_clocks=30),
            Row(CARD, plain, step_clocks=50, tile_clocks=50),
        ]
        update(folders[0], own)
        problem = replace(PROBLEM, mask=mask)
        assert rows_for(problem) == own
        for (heads, queries, keys), (first, second) in cases.items():
            assert [
                clocks(row.tiles, heads, heads, queries, keys) for row in rows_for(problem)
            ] == [COMBINING + first, second], (mask, heads, queries, keys)
    for keys, best in ((3_072, plain), (300_000, fill)):
        sizes = Sizes(1, 36, 36, 128, keys)
        assert served(problem, sizes).slug == best
        assert first_slug(select(problem, CARD), *vars(sizes).values()) == best
    assert clocks(own[0].tiles, 132, 132, 129, 3_072) == MOST  # SMs are busy anyway
    # no split has more than 131,072 keys
    assert clocks(own[0].tiles, 132, 132, 1, 2**18) == COMBINING + 2 * (102_400 + 50)


def test_v_that_is_transposed_before_all_tiles_is_paid_for_by_those_of_its_kv_heads(folders):
    """Counted by hand, of 512 keys, 10 KV heads and 132 tiles a round, of 4 steps."""
    within, before = (f"fwd_e4m3_d128_full_m128n128_vrows{end}" for end in ("", "_pretrans"))
    update(
        folders[0],
        [
            Row(CARD, within, step_clocks=220, tile_clocks=100),
            Row(CARD, before, step_clocks=200, tile_clocks=100),
        ],
    )
    problem = Problem.of(from_slug(within))
    # a launch, and 4,096 clocks of an SM for each block of 128 keys of a KV head
    more = 2_000 + 4_096 * 10 * 4 // 132
    both = {128: (9_800, 9_000 + more), 1_280: (98_000, 90_000 + more)}  # 10 and 100 rounds
    for queries, (first, second) in both.items():
        assert [
            clocks(row.tiles, 1_320, 10, queries, 512) for row in rows_for(problem)
        ] == [first, second]  # fmt: skip
        sizes, best = Sizes(1, 1_320, 10, queries, 512), within if first <= second else before
        assert served(problem, sizes).slug == best
        assert first_slug(select(problem, CARD), *vars(sizes).values()) == best


def test_tiles_of_a_last_round_take_less_where_they_are_in_parts():
    """Counted by hand: 22 tiles of 16 steps behind a round, in four parts of four steps each."""
    whole, parts = (f"fwd_e4m3_d128_full_m128n128_vrows_pretrans{end}" for end in ("", "_parts"))
    before = 2_000 + 4_096 * 10 * 16 // 132
    for slug, last in ((whole, 3_300), (parts, 5 * 200 + 100 + 4 * 200)):
        row = Row(CARD, slug, step_clocks=200, tile_clocks=100)
        assert clocks(row.tiles, 154, 10, 128, 2_048) == before + 3_300 + last
        assert clocks(row.tiles, 132, 10, 128, 2_048) == before + 3_300


def test_another_cards_rows_of_a_user_go_before_no_rows_of_this_card(folders):
    update(folders[0], rows())
    update(folders[1], [Row(OTHER_CARD, MINE)])
    assert rows_for(PROBLEM) == rows()
    # of two that are not of this card a user's
    assert rows_for(PROBLEM, "NVIDIA GH200") == [Row(OTHER_CARD, MINE)]


@pytest.mark.parametrize("mask", PLAIN_MASKS)
@pytest.mark.parametrize("keys", [(0, 1_000), (8_192, 10_000), (8_192, MOST), (0, 200_000)])
def test_no_other_call_is_served_otherwise_for_a_users_row(folders, monkeypatch, mask, keys):
    """Over fagen's own table: rows for few queries and for accuracy stay what they were."""
    monkeypatch.setattr("fagen.dispatch.select.locate", locate)
    slug, problem = f"fwd_fp16_d128_{mask}_m64n48", replace(PROBLEM, mask=mask)
    lengths = (1, 1_000, 1_001, 8_191, 8_192, 10_000, 10_001, OPEN_KEYS, 200_000, 300_000)
    sizes = [Sizes(1, 16, 16, q, k) for q in (1, 1_000, 200_000) for k in lengths]
    before = {size: served(problem, size) for size in sizes}
    update(folders[1], [Row(CARD, slug, *keys)])
    few_rows = {row.slug for row in rows_for(problem) if row.for_few_rows}
    few_tiles = [(row, row.limits, row.tiles) for row in rows_for(problem) if row.for_few_tiles]
    narrow = [size for size in sizes if first_fit(few_tiles, measures_of(size))]
    assert narrow and len(narrow) < len(sizes)
    for size, earlier in before.items():
        choice = served(problem, size)
        if size in narrow or not keys[0] <= size.seqlen_k <= keys[1]:
            assert choice == earlier, size
        else:
            assert choice.slug == slug or choice.slug in few_rows, size


def test_a_row_of_packed_sequences_is_for_all_sizes_and_no_others_are_for_these(folders):
    own, users = folders
    update(own, [*rows(), Row(CARD, PACKED)])
    packed, narrower = replace(PROBLEM, lengths="varlen"), PACKED.replace("m128n128", "m128n64")
    assert select(packed, CARD).only == PACKED and rows_for(PROBLEM) == rows()
    update(users, [Row(CARD, narrower)])
    assert select(packed, CARD).only == narrower
    assert select(replace(packed, mask="causal"), CARD).only is None


# ---- what is hard to read and to write -----------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        dict(card="NVIDIA \U0001f600 H200"),
        dict(card='a"b\\c'),
        dict(card="two\nlines\r\n\x1b[2J\x7f\u0085\u2028"),
        dict(card=""),
        dict(keys_to=MOST - 1),
        dict(keys_from=MOST),
        dict(rows_to=MOST - 1),
        dict(rows_to=2**53 + 1),
    ],
)
def test_what_is_hard_to_write_is_read_back(folders, changes):
    row = Row(**{"card": CARD, "slug": LONG} | changes)
    update(folders[1], [row])
    table_at.cache_clear()
    assert table_at(folders[1]) == (row,)
    lines = folders[1].read_text(encoding="utf-8").split("\n")
    assert all(line.isprintable() for line in lines)
    assert rows_for(PROBLEM, row.card) == [row]
    assert select(PROBLEM, row.card).slugs(MOST, MOST)


def test_a_byte_order_mark_and_another_systems_lines_are_read(folders):
    text = dispatch_table.written(rows()).replace("\n", "\r\n")
    folders[0].write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert table_at(folders[0]) == tuple(rows())
    assert [row.where for row in table_at(folders[0])] == [f"{folders[0]}:{n}" for n in (4, 9)]


TEXT, HUGE = dispatch_table.written(rows()), 10**400


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[[kernel]]\n", ":1: [[kernel]] number 1: without card, slug"),
        ("# one\nx = 1\n", ":2: x: a dispatch table has [[kernel]] tables, and nothing else"),
        ("[[kernel]\n", ":1: this is not TOML"),
        (TEXT.replace("m128n128", "m128n999"), "block_n"),
        (TEXT.replace("from = 1024", "from = 1000"),
         ":9: fwd_fp16_d128_full_m128n64 and fwd_fp16_d128_full_m128n128 are both for 1000 keys to "
         "1023: a call belongs to one of them; leave one out, or give it another keys_from or "),
        (TEXT.replace("from = 1024", "from = 1000\nkeys_to = 1020"),
         "are both for 1000 keys to 1020"),
        (TEXT.replace("keys_to = 1023\n", ""), "both for 1024 keys and more"),
        (TEXT + "width = 3\n", ":13: [[kernel]] number 2: width is not "),
        (TEXT + "rowsto = 3\n", "rowsto is not one; did you mean rows_to?"),
        (TEXT + "mask = 3\n", ":13: [[kernel]] number 2: mask is told by the slug now: leave it o"),
        (TEXT.replace("keys_to", "to"), ":6: [[kernel]] number 1: to is called keys_to now"),
        (dispatch_table.written([few(slug=PACKED)]),
         f":6: [[kernel]] number 1: {PACKED} is for varlen sequences, whose kernel is one for all "
         "sizes: leave out rows_to"),
        (dispatch_table.written([Row(CARD, PACKED, 1, 9, queries_to=3)]),
         "whose kernel is one for all sizes: leave out queries_to and keys_from and keys_to"),
        (dispatch_table.written([few(slug="bwd_fp16_d64_causal_m64n64_varlen")]),
         "whose kernel is one for all sizes: leave out rows_to"),
        (dispatch_table.written([few(), *rows()]).replace("= 16384", "= 16384\nkeys_from = 5"),
         "[[kernel]] number 1: rows_to goes without keys_from: such a row serves calls with few "
         "query rows whatever their number of keys; leave out keys_from, or rows_to"),
        (TEXT.replace("keys_from", "rows_to = 1\nkeys_to = 2\nkeys_from"),
         "number 2: rows_to goes without keys_from and keys_to: such a row"),
        (TEXT + "rows_to = 0\n",
         "number 2: rows_to is 0; it must be 1 or more query rows in all"),
        (TEXT + "rows_to = 16384.0\n", "rows_to is not a whole number"),
        (TEXT + "rows_to = true\n", "rows_to is not a whole number: true"),
        (dispatch_table.written([few(), few(slug=SHORT), *rows()]),
         "fwd_fp16_d128_full_m128n96 and fwd_fp16_d128_full_m128n64 are both for at most 16384 "
         "query rows: a call belongs to one of them; leave one out, or give it another rows_to"),
        (TEXT + "step_clocks = 9\n",
         ":13: [[kernel]] number 2: step_clocks alone tells no time: step_clocks and tile_clocks "),
        (dispatch_table.written([Row(CARD, LONG, step_clocks=1, tile_clocks=1, combine_clocks=1)]),
         "combine_clocks is for kernels whose splits fill the SMs, which need it beside"),
        (dispatch_table.written([Row(CARD, f"{LONG}_split4", step_clocks=1, tile_clocks=1)]),
         "step_clocks is not for splits that do not fill"),
        (TEXT + "combine_clocks = 9\n", "combine_clocks alone tells no time"),
        (TEXT + "tile_clocks = 9\nstep_clocks = 16385\n",
         "step_clocks is 16385; it must be 16384 or less"),
        (dispatch_table.written([replace(few(), step_clocks=1, tile_clocks=1)]),
         "step_clocks goes with keys_from and keys_to alone"),
        (dispatch_table.written([Row(CARD, "bwd_fp16_d128_full_m64n128", 0, 9, step_clocks=1,
                                     tile_clocks=1)]),
         "step_clocks is for attention; bwd_fp16_d128_full_m64n128 is for other"),
        (dispatch_table.written([Row(CARD, LONG, 0, 9, step_clocks=1, tile_clocks=1),
                                 Row(CARD, SHORT, 0, 9)]), "are both for 0 keys to 9"),
        (dispatch_table.written([Row(CARD, LONG, 0, 9, step_clocks=1, tile_clocks=1),
                                 Row(CARD, SHORT, 0, 8, step_clocks=1, tile_clocks=1)]),
         "are both for 0 keys to 8"),
        (b"# one\ncard = 'caf\xe9'\n", ":2: this is not UTF-8 text"),
        (b"\xff\xfex\x00=\x001\x00", ":1: this is not UTF-8 text"),
        (b"x = 1\x1b[2J\n", ":1: this is not TOML"),
        (b"#" * 200_000, "longer than 131,072 bytes; this is no dispatch table"),
        (f"\nkernel = {'9' * 5000}".encode(), ":2: a line of 5,009 characters; the longest that i"),
        (b"a." * 60_000 + b"a = 1\n", ":1: a line of 120,005 characters"),
        (b'"\\u001b]0;x\\u0007\\n" = 1\n', r":1: \u001b]0;x\u0007\u000a: a dispatch table has"),
        (b"kernel = [1]\n", ":1: [[kernel]] number 1: 1 is no table"),
        (b'[[kernel]]\n"a\\u001b[2J\\n" = 1\n',
         r":2: [[kernel]] number 1: a\u001b[2J\u000a is not one of card, slug, "),
        (b"kernel = {card = 1}\n", ":1: kernel: a dispatch table has [[kernel]] tables, and "),
        (b'[[kernel]]\nslug = 1e999\n', ":2: [[kernel]] number 1: slug is not text: inf"),
        *(
            (f"{TEXT}{key} = {HUGE}\n".encode(),
             f":13: [[kernel]] number 2: {key} is a number of 1329 bits; it must be "
             "9223372036854775807 or less")
            for key in ("keys_to", "rows_to")
        ),
        (TEXT.replace("keys_to = 1023", "keys_to = -1").encode(),
         ":6: [[kernel]] number 1: keys_to is -1; it must be 0 or more"),
        (TEXT.replace("keys_from = 1024", "keys_from = 1024\nkeys_to = 1023").encode(),
         ":12: [[kernel]] number 2: keys_from 1024 to 1023 is no range"),
        (TEXT.replace("m128n128", "\\u001b[2J").encode(),
         r':12: [[kernel]] number 2: slug = "fwd_fp16_d128_full_\u001b[2J": '),
        (TEXT.replace("m128n128", "m" + "9" * 3000).encode(),
         ":12: [[kernel]] number 2: slug"),
        (TEXT.replace("fwd_fp16", "quant_fp16").encode(),
         ":7: [[kernel]] number 1: slug"),
    ],
)  # fmt: skip
def test_a_wrong_table_is_refused_with_its_line_in_one_that_can_be_printed(folders, content, words):
    folders[1].parent.mkdir()
    folders[1].write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ScheduleError) as refusal:
        served(PROBLEM, Sizes(1, 1, 1, 1, 1))
    message = str(refusal.value)
    assert message.startswith(f"{folders[1]}") and words in message
    assert message.isprintable() and len(message) < 400 + len(str(folders[1]))


def test_a_table_that_is_no_file_is_refused(folders):
    folders[1].mkdir(parents=True)
    with pytest.raises(ScheduleError, match="is no file, and so no dispatch table"):
        served(PROBLEM, Sizes(1, 1, 1, 1, 1))
    folders[1].rmdir()
    folders[1].symlink_to(folders[1])
    with pytest.raises(ScheduleError, match="cannot be read: Too many levels of symbolic links"):
        served(PROBLEM, Sizes(1, 1, 1, 1, 1))


def test_a_folder_of_a_home_that_nobody_has_is_refused_with_its_variable(monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "~nosuch-user\x1b/x")
    with pytest.raises(
        FagenError, match=r"XDG_CONFIG_HOME = '~nosuch-user.* is not known: set XDG_CO"
    ):
        served(PROBLEM, Sizes(1, 1, 1, 1, 1))
    monkeypatch.setenv("FAGEN_CACHE", "~nosuch-user")
    with pytest.raises(FagenError, match="FAGEN_CACHE = '~nosuch-user' begins with a home that"):
        cache_folder()


# ---- the committed one ---------------------------------------------------------------------------

TUNED = [*((d, d) for d in (32, 40, 48, 64, 72, 80, 96, 112, 120, 128, 160, 192, 224, 256))]
TUNED += [(192, 128), (64, 256)]


def test_every_tuned_problem_has_rows_and_every_rows_schedule_is_committed():
    table = table_at(locate("schedules") / dispatch_table.NAME)
    assert all(committed_file(row.slug).is_file() for row in table)
    problems = {row.problem for row in table}
    for dtype, mask, dims in product(SIXTEEN_BITS, PLAIN_MASKS, TUNED):
        assert Problem(dtype, *dims, mask, None, "", 0) in problems
    for row in (row for row in table if row.problem.kind == "forward" and not row.for_few_tiles):
        splits = Schedule.from_slug(row.slug).values()["num_splits"] > 1
        assert splits == bool(row.combine_clocks)


def test_a_call_gets_the_first_row_that_fits_soon_or_as_it_is_traced():
    """Of every problem of the committed table, at the ends of its rows and about them."""
    table, dice = table_at(locate("schedules") / dispatch_table.NAME), random.Random(5)
    for problem in dict.fromkeys(row.problem for row in table):
        problem = replace(problem, out_dtype=DTYPES[problem.dtype].out)
        rows, chosen = flattened(problem, CARD), select(problem, CARD)
        limits = [(row.slug or None, row.limits, row.tiles) for row in rows]
        ends = {limit for row in rows for *_, limit in row.limits if limit < 2**30} | {1}
        for _ in range(60):
            end = dice.choice([*ends]) + dice.randint(-1, 1)
            kv_heads, group = dice.choice((1, 2, 8)), dice.choice((1, 4))
            few = dice.random() < 0.5
            count = dice.randint(1, 40) if few else max(1, end // (kv_heads * group))
            keys = max(0, end) if dice.random() < 0.7 else int(2 ** dice.uniform(0, 20))
            sizes = Sizes(dice.choice((1, 1, 3)), kv_heads * group, kv_heads, count, keys)
            first = first_fit(limits, measures_of(sizes))
            if first in chosen.several:
                first = serve(problem, sizes, CARD).schedule.slug
            assert first_slug(chosen, *vars(sizes).values()) == first, (problem, sizes)
            assert first_slug(chosen, *vars(sizes).values(), surely=bool) == first, (problem, sizes)


PROMOTED = [
    Schedule.from_slug(slug)
    for slug in sorted(path.stem for path in (locate("schedules") / "forward").glob("*_pm64_*"))
]


@pytest.mark.parametrize("promoted", PROMOTED, ids=lambda schedule: schedule.slug)
def test_sums_over_very_many_keys_move_to_fp32(promoted):
    problem = Problem.of(promoted)
    bound = 262_144 if problem.head_dim == 256 else 131_072
    assert problem.dtype in SIXTEEN_BITS

    def picked(queries, keys):
        return served(problem, Sizes(1, 16, 16, queries, keys))

    for keys in (bound + 1, 300_000, 2**20):
        assert picked(200_000, keys) == promoted
        for queries in (1, 16, 17, 128, 640):  # their kernels share the keys
            slug = picked(queries, keys)
            group = (1,) * (slug.kind == "decode")
            assert slug == promoted or plan(slug).split_keys(keys, *group) <= bound
    for keys in (1, OPEN_KEYS, bound):
        assert not any(
            picked(queries, keys).values().get("promote") for queries in (1, 128, 200_000)
        )


def test_a_row_of_a_score_stands_beside_the_rows_of_plain_ones():
    """By what its tiles cost; where it has none, plain ones' kernels have its score."""

    def slug(queries, keys):
        problem = Problem("fp16", 64, 64, "causal", "fp16", "", 0, score="softcap")
        return served(problem, Sizes(1, 32, 32, queries, keys)).slug

    assert slug(4096, 4096) == "fwd_fp16_d64_causal_m192n128_softcap_q2_curve"
    assert slug(4096, 200_000) == "fwd_fp16_d64_causal_m192n128_softcap_q2_pm64_smemtotals"
