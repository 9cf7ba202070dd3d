"""Dispatch tables: which kernel for which problem, key length and card."""

from dataclasses import replace

import pytest

from fagen.dispatch import tables as dispatch_table
from fagen.dispatch.rows import MOST, OPEN_KEYS, Row, first_fit, measures_of
from fagen.dispatch.select import flattened, select, serve
from fagen.dispatch.tables import table_at, update
from fagen.errors import FagenError, ScheduleError
from fagen.kinds.forward.keys import Schedule
from fagen.paths import cache_folder, locate
from fagen.problem import Problem, Sizes
from fagen.registry import committed_file, plan
from fagen.vocab import MASKS, SIXTEEN_BITS

SHORT, LONG = "fwd_fp16_d128_full_m128n64", "fwd_fp16_d128_full_m128n128"
PROBLEM = Problem("fp16", 128, 128, "full", "fp16", "", 0)


def rows(card="NVIDIA H200", short=SHORT, long=LONG):
    return [Row(card, short, 0, 1_023), Row(card, long, 1_024)]


def rows_for(problem, card="NVIDIA H200"):
    """The rows that name a kernel, in the order in which they are tried."""
    return tuple(row for row in flattened(problem, card) if row.slug)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """fagen's own table and a user's, both empty so far."""
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("fagen.dispatch.select.locate", lambda name: tmp_path / "own")
    table_at.cache_clear()
    yield tmp_path / "own" / "dispatch.toml", tmp_path / "fagen" / "dispatch.toml"
    table_at.cache_clear()


def test_what_is_written_is_read(tmp_path):
    more = Row("NVIDIA H100", "fwd_bf16_d192v128_causal_m128n128_vspace")
    update(tmp_path / "dispatch.toml", [*rows(), more])
    assert set(table_at(tmp_path / "dispatch.toml")) == {*rows(), more}


def test_a_row_says_by_what_it_was_measured_and_keeps_that(tmp_path):
    path = tmp_path / "dispatch.toml"
    said = 'benchmarks/shapes.py, "by hand"'
    update(path, [replace(rows()[0], by=said), rows()[1]])
    update(path, rows("NVIDIA H100"))
    assert [row.by for row in table_at(path)] == ["", "", said, ""]
    path.write_text(path.read_text().replace("by = ", "by = 1 #"))
    table_at.cache_clear()
    with pytest.raises(ScheduleError, match=r"number 3: by is not text: 1"):
        table_at(path)


def test_an_update_replaces_a_problem_on_a_card_and_nothing_else(tmp_path):
    path = tmp_path / "dispatch.toml"
    update(path, [*rows(), *rows("NVIDIA H100")])
    update(path, [Row("NVIDIA H200", LONG)])
    kept = table_at(path)
    assert [row.slug for row in kept if row.card == "NVIDIA H200"] == [LONG]
    assert len([row for row in kept if row.card == "NVIDIA H100"]) == 2


def few(n=16_384, card="NVIDIA H200", slug="fwd_fp16_d128_full_m128n96"):
    return Row(card, slug, rows_to=n)


def test_rows_for_few_queries_go_first_the_fewest_before_all(folders):
    own, _ = folders
    update(own, [*rows(), few(), few(8_192), *rows("NVIDIA H100")])
    found = rows_for(PROBLEM, "NVIDIA H200")
    assert found == (few(8_192), few(), *rows())
    assert table_at(own) == (*rows("NVIDIA H100"), *found)
    assert [row.for_few_rows for row in found] == [True, True, False, False]
    assert own.read_text().count("\nrows_to = 8192\nslug = ") == 1
    alike = FP8[0].card, FP8[0].slug
    update(own, [*FP8, Row(*alike, rows_to=1)])
    found = rows_for(e4m3("columns"), "NVIDIA H200")
    assert found == (Row(*alike, rows_to=1), *FP8[:2])


def test_a_search_leaves_rows_for_few_queries_as_they_are(tmp_path):
    path = tmp_path / "dispatch.toml"
    update(path, [*rows(), few(), few(8_192)])
    update(path, [Row("NVIDIA H200", LONG)])  # by keys alone, as a search writes them
    assert set(table_at(path)) == {Row("NVIDIA H200", LONG), few(), few(8_192)}
    update(path, [few(1_024, slug=SHORT)])
    assert set(table_at(path)) == {Row("NVIDIA H200", LONG), few(1_024, slug=SHORT)}
    update(path, [*rows("NVIDIA H100"), few(card="NVIDIA H100")])
    update(path, [*rows(), few()])
    assert set(table_at(path)) == {
        *rows(), few(), *rows("NVIDIA H100"), few(card="NVIDIA H100")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ([few(), few(slug=SHORT)], "are both for at most 16384 query rows"),
        ([Row("NVIDIA H200", LONG, 0, 99)] * 2, "are both for 0 keys to 99"),
        ([Row("NVIDIA \ud83d", LONG)], "this is not TOML"),
        ([few(2**63)], "rows_to is 9223372036854775808; it must be 9223372036854775807 or less"),
        ([Row("NVIDIA H200" * 6_000, slug) for slug in (LONG, SHORT)], "more than 131,072 byte"),
    ],
)
def test_an_update_that_would_spoil_a_table_leaves_it_as_it_is(tmp_path, new, said):
    path = tmp_path / "dispatch.toml"
    update(path, rows())
    before = path.read_text()
    with pytest.raises(ScheduleError, match=said):
        update(path, new)
    assert path.read_text() == before


def test_a_users_table_goes_first_then_this_card_then_another(folders):
    own, users = folders

    assert rows_for(PROBLEM, "NVIDIA H200") == ()
    update(own, rows("NVIDIA H100", long="fwd_fp16_d128_full_m128n96"))
    assert [row.slug for row in rows_for(PROBLEM, "NVIDIA H200")][1].endswith("n96")
    update(own, rows())
    assert rows_for(PROBLEM, "NVIDIA H200") == tuple(rows())
    update(own, [few()])
    users_rows = rows(long="fwd_fp16_d128_full_m128n160")
    update(users, users_rows)  # who says nothing of few rows keeps what is known of them
    assert rows_for(PROBLEM, "NVIDIA H200") == (few(), *users_rows)
    update(users, [few(64)])
    assert rows_for(PROBLEM, "NVIDIA H200") == (few(64), few(), *users_rows)
    update(users, [few(20_000)])
    assert rows_for(PROBLEM, "NVIDIA H200") == (few(20_000), *users_rows)
    assert rows_for(replace(PROBLEM, head_dim=64, head_dim_v=64), "NVIDIA H200") == ()


# ---- a user's rows over fagen's ------------------------------------------------------------------


def overlaid(folders, users, owns, card="NVIDIA H200"):
    own, of_user = folders
    update(own, owns)
    update(of_user, users)
    return rows_for(PROBLEM, card)


def row(slug, least=0, most=MOST, card="NVIDIA H200"):
    return Row(card, slug, least, most)


MINE = "fwd_fp16_d128_full_m128n160"


@pytest.mark.parametrize(
    ("users", "left"),
    [
        ([(8_192, MOST)], [(SHORT, 0, 1_023), (LONG, 1_024, 8_191), (MINE, 8_192, MOST)]),
        ([(0, 1_000)], [(MINE, 0, 1_000), (SHORT, 1_001, 1_023), (LONG, 1_024, MOST)]),
        ([(1_000, 1_100)], [(SHORT, 0, 999), (MINE, 1_000, 1_100), (LONG, 1_101, MOST)]),
        ([(0, 1_023)], [(MINE, 0, 1_023), (LONG, 1_024, MOST)]),
        ([(5, 5), (7, 9)], [(SHORT, 0, 4), (MINE, 5, 5), (SHORT, 6, 6), (MINE, 7, 9),
                            (SHORT, 10, 1_023), (LONG, 1_024, MOST)]),
        ([(0, MOST)], [(MINE, 0, MOST)]),
    ],
)  # fmt: skip
def test_bounded_rows_of_a_user_leave_the_rest_to_fagens(folders, users, left):
    found = overlaid(folders, [row(MINE, *keys) for keys in users], rows())
    assert found == tuple(row(*part) for part in left)


def test_rows_of_a_user_for_few_queries_leave_those_for_more_to_fagens(folders):
    found = overlaid(folders, [few(64, slug=MINE)], [*rows(), few(8_192), few(32)])
    assert found == (few(64, slug=MINE), few(8_192), *rows())


def test_what_no_row_is_for_is_served_as_without_a_table(folders):
    _, of_user = folders
    usual = serve(PROBLEM, Sizes(1, 1, 1, 1, 1), "NVIDIA H200").schedule
    assert usual.slug != MINE
    update(of_user, [row(MINE, 100, 200), few(64, slug=SHORT)])

    def picked(keys, queries=1_000):
        return serve(PROBLEM, Sizes(1, 1, 1, queries, keys), "NVIDIA H200").schedule.slug

    expected = {1: usual.slug, 99: usual.slug, 100: MINE, 200: MINE, 201: usual.slug}
    expected |= {OPEN_KEYS + 1: usual.slug}
    assert {keys: picked(keys) for keys in expected} == expected
    assert picked(1, 64) == picked(150, 64) == SHORT
    assert select(PROBLEM, "NVIDIA H200").many == ((99, None), (200, MINE), (MOST, None))


def test_another_cards_rows_of_a_user_go_before_no_rows_of_this_card(folders):
    assert overlaid(folders, [row(MINE, card="NVIDIA H100")], rows()) == tuple(rows())
    (one,) = overlaid(folders, [row(MINE, card="NVIDIA H100")], rows(), card="NVIDIA GH200")
    assert one.slug == MINE  # of two that are not of this card a user's


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("keys", [(0, 1_000), (8_192, 10_000), (8_192, MOST), (0, 200_000)])
def test_no_other_call_is_served_otherwise_for_a_users_row(folders, monkeypatch, mask, keys):
    """Over fagen's own table: rows for few queries and for accuracy stay what they were."""
    _, of_user = folders
    monkeypatch.setattr("fagen.dispatch.select.locate", locate)
    slug = f"fwd_fp16_d128_{mask}_m64n48"
    asked = replace(PROBLEM, mask=mask)
    sizes = [
        Sizes(1, 16, 16, queries, length)
        for queries in (1, 1_000, 200_000)
        for length in (1, 1_000, 1_001, 8_191, 8_192, 10_000, 10_001, OPEN_KEYS, 200_000, 300_000)
    ]
    before = {size: serve(asked, size, "NVIDIA H200").schedule for size in sizes}
    update(of_user, [row(slug, *keys)])
    rows = flattened(asked, "NVIDIA H200")
    few_rows = {row.slug for row in rows if row.for_few_rows}
    few_tiles = [(row, row.limits) for row in rows if row.for_few_tiles]
    narrow = [size for size in sizes if first_fit(few_tiles, measures_of(size))]
    assert narrow and len(narrow) < len(sizes)
    for size, served in before.items():
        found = serve(asked, size, "NVIDIA H200").schedule
        if size in narrow or not keys[0] <= size.seqlen_k <= keys[1]:
            assert found == served, size
        else:
            assert found.slug == slug or found.slug in few_rows, size


# ---- what is hard to read and to write -----------------------------------------------------------


@pytest.mark.parametrize(
    "told",
    [
        dict(card="NVIDIA \U0001f600 H200"),
        dict(card='a"b\\c'),
        dict(card="two\nlines\r\n\x1b[2J\x7f\u0085\u2028"),
        dict(card=""),
        dict(keys_to=2**63 - 2),
        dict(keys_from=2**63 - 1),
        dict(rows_to=2**63 - 2),
        dict(rows_to=2**53 + 1),
    ],
)
def test_what_is_hard_to_write_is_read_back(folders, told):
    one = Row(**{"card": "NVIDIA H200", "slug": LONG} | told)
    update(folders[1], [one])
    table_at.cache_clear()
    assert table_at(folders[1]) == (one,)
    lines = folders[1].read_text(encoding="utf-8").split("\n")
    assert all(line.isprintable() for line in lines)
    assert rows_for(PROBLEM, one.card) == (one,)
    assert select(PROBLEM, one.card).slugs(MOST, MOST)


def test_a_byte_order_mark_and_another_systems_lines_are_read(folders):
    text = dispatch_table.written(rows()).replace("\n", "\r\n")
    folders[0].write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert table_at(folders[0]) == tuple(rows())
    assert [row.where for row in table_at(folders[0])] == [f"{folders[0]}:{n}" for n in (4, 9)]


PACKED = "fwd_fp16_d128_full_m128n128_varlen"


def test_a_row_of_packed_sequences_is_for_all_sizes_and_no_others_are_for_these(
    folders, monkeypatch
):
    own, users = folders
    update(own, [*rows(), Row("NVIDIA H200", PACKED)])
    packed = replace(PROBLEM, lengths="varlen")
    assert select(packed, "NVIDIA H200").only == PACKED
    assert rows_for(PROBLEM, "NVIDIA H200") == tuple(rows())
    update(users, [Row("NVIDIA H200", PACKED.replace("m128n128", "m128n64"))])
    assert select(packed, "NVIDIA H200").only == PACKED.replace("m128n128", "m128n64")
    assert select(replace(packed, mask="causal"), "NVIDIA H200").only is None


def e4m3(v_layout="", scale_rows=0):
    """What a call asks for, O in either type."""
    return Problem("e4m3", 64, 64, "full", "bf16", v_layout, scale_rows)


def of_e4m3(slug, least=0, most=MOST, **told):
    made = Row("NVIDIA H200", slug, least, most)
    assert made.problem == replace(e4m3(**told), out_dtype=None)
    return made


FP8 = [
    of_e4m3("fwd_e4m3_d64_full_m64n32", 0, 999, v_layout="columns"),
    of_e4m3("fwd_e4m3_d64_full_m64n64", 1_000, v_layout="columns"),
    of_e4m3("fwd_e4m3_d64_full_m64n64_vrows", v_layout="rows"),
    of_e4m3("fwd_e4m3_d64_full_m64n64_sblock_sr32", v_layout="columns", scale_rows=32),
]


def test_e4m3_kernels_are_told_apart_by_the_layout_of_v_and_their_scales(folders):
    own, _ = folders
    update(own, FP8)
    assert set(table_at(own)) == set(FP8)

    def slugs(**more):
        asked = e4m3(**more)
        found = [row.slug for row in rows_for(asked)]
        other = [row.slug for row in rows_for(replace(asked, out_dtype="fp16"))]
        assert [slug.replace("_ofp16", "") for slug in other] == found
        return found

    assert slugs(v_layout="columns") == [FP8[0].slug, FP8[1].slug]
    assert slugs(v_layout="rows") == [FP8[2].slug]
    assert slugs(v_layout="columns", scale_rows=32) == [FP8[3].slug]
    assert slugs(v_layout="columns", scale_rows=64) == slugs() == []
    update(own, [Row("NVIDIA H200", FP8[1].slug, 0, MOST)])  # in place of both for columns
    assert set(table_at(own)) == {*FP8[2:], Row("NVIDIA H200", FP8[1].slug, 0, MOST)}


TEXT = dispatch_table.written(rows())


@pytest.mark.parametrize(
    ("text", "said"),
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
         f":6: [[kernel]] number 1: {PACKED} is for packed sequences, whose kernel is one for all "
         "sizes: leave out rows_to"),
        (dispatch_table.written([Row("NVIDIA H200", PACKED, 1, 9, queries_to=3)]),
         "whose kernel is one for all sizes: leave out queries_to and keys_from and keys_to"),
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
    ],
)  # fmt: skip
def test_a_wrong_table_is_refused_with_its_name(text, said, tmp_path):
    (tmp_path / "dispatch.toml").write_text(text)
    with pytest.raises(ScheduleError) as refusal:
        table_at(tmp_path / "dispatch.toml")
    assert said in str(refusal.value)


HUGE = 10**400


@pytest.mark.parametrize(
    ("content", "said"),
    [
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
def test_a_hostile_table_is_refused_with_its_line_in_one_that_can_be_printed(
    folders, content, said
):
    folders[1].parent.mkdir()
    folders[1].write_bytes(content)
    with pytest.raises(ScheduleError) as refusal:
        serve(PROBLEM, Sizes(1, 1, 1, 1, 1), "NVIDIA H200")
    told = str(refusal.value)
    assert told.startswith(f"{folders[1]}") and said in told
    assert told.isprintable() and len(told) < 400 + len(str(folders[1]))


def test_a_table_that_is_no_file_is_refused(folders):
    folders[1].mkdir(parents=True)
    with pytest.raises(ScheduleError, match="is no file, and so no dispatch table"):
        serve(PROBLEM, Sizes(1, 1, 1, 1, 1), "NVIDIA H200")
    folders[1].rmdir()
    folders[1].symlink_to(folders[1])
    with pytest.raises(ScheduleError, match="cannot be read: Too many levels of symbolic links"):
        serve(PROBLEM, Sizes(1, 1, 1, 1, 1), "NVIDIA H200")


def test_a_folder_of_a_home_that_nobody_has_is_refused_with_its_variable(monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "~nosuch-user\x1b/x")
    with pytest.raises(
        FagenError, match=r"XDG_CONFIG_HOME = '~nosuch-user.* is not known: set XDG_CO"
    ):
        serve(PROBLEM, Sizes(1, 1, 1, 1, 1), "NVIDIA H200")
    monkeypatch.setenv("FAGEN_CACHE", "~nosuch-user")
    with pytest.raises(FagenError, match="FAGEN_CACHE = '~nosuch-user' begins with a home that"):
        cache_folder()


def test_the_committed_table_names_committed_schedules():
    table = table_at(locate("schedules") / dispatch_table.NAME)
    slugs = {path.stem for path in locate("schedules").glob("*/*.toml")}
    assert {row.slug for row in table} <= slugs


# ---- the committed one ---------------------------------------------------------------------------

TUNED = [*((d, d) for d in (32, 40, 48, 64, 72, 80, 96, 112, 120, 128, 160, 192, 224, 256))]
TUNED += [(192, 128), (64, 256)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_every_tuned_problem_has_rows_whose_schedules_are_committed(dtype, mask):
    schedules = locate("schedules")
    for head_dim, head_dim_v in TUNED:
        problem = Problem(dtype, head_dim, head_dim_v, mask, None, "", 0)
        found = [row for row in table_at(schedules / "dispatch.toml") if row.problem == problem]
        assert found, problem
        for row in found:
            assert committed_file(row.slug).is_file(), row.slug
            assert row.for_few_tiles or Schedule.from_slug(row.slug).values()["chunks"] == 1


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
        return serve(problem, Sizes(1, 16, 16, queries, keys), "NVIDIA H200").schedule

    for keys in (bound + 1, 300_000, 2**20):
        assert picked(200_000, keys) == promoted
        for queries in (1, 16, 17, 128, 640):  # their kernels share the keys
            found = picked(queries, keys)
            assert found == promoted or plan(found).chunk_keys(keys) <= bound
    for keys in (1, OPEN_KEYS, bound):
        assert not any(
            picked(queries, keys).values().get("promote") for queries in (1, 128, 200_000)
        )
