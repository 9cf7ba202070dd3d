"""Dispatch tables: which kernel for which problem, key length and card."""

import math
from dataclasses import replace

import pytest

from fagen.dispatch import tables as dispatch_table
from fagen.dispatch.choice import OPEN_KEYS, for_narrow, pick, serving, slugs_for
from fagen.dispatch.tables import Row, table_at, update
from fagen.errors import FagenError, ScheduleError
from fagen.kinds.forward.keys import Schedule
from fagen.paths import cache_folder, locate
from fagen.problem import Problem, Sizes
from fagen.registry import committed_file, plan
from fagen.vocab import MASKS, SIXTEEN_BITS

SHORT, LONG = "fwd_fp16_d128_full_m128n64", "fwd_fp16_d128_full_m128n128"
PROBLEM = Problem("fp16", 128, 128, "full", "fp16", "", 0)


def rows(card="NVIDIA H200", short=SHORT, long=LONG):
    asked = replace(PROBLEM, out_dtype=None)
    return [Row(card, asked, 0, 1_023, short), Row(card, asked, 1_024, math.inf, long)]


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """fagen's own table and a user's, both empty so far."""
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    table_at.cache_clear()
    yield tmp_path / "own" / "dispatch.toml", tmp_path / "fagen" / "dispatch.toml"
    table_at.cache_clear()


def test_what_is_written_is_read(tmp_path):
    more = Row.of("NVIDIA H100", "fwd_bf16_d192v128_causal_m128n128_vspace")
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
    update(path, [Row.of("NVIDIA H200", LONG)])
    kept = table_at(path)
    assert [row.slug for row in kept if row.card == "NVIDIA H200"] == [LONG]
    assert len([row for row in kept if row.card == "NVIDIA H100"]) == 2


def few(n=16_384, card="NVIDIA H200", slug="fwd_fp16_d128_full_m128n96"):
    return Row.of(card, slug, rows=n)


def test_rows_for_few_queries_go_first_the_fewest_before_all(folders):
    own, _ = folders
    update(own, [*rows(), few(), few(8_192), *rows("NVIDIA H100")])
    found = dispatch_table.rows_for(PROBLEM, "NVIDIA H200", own=own.parent)
    assert found == (few(8_192), few(), *rows())
    assert table_at(own) == (*rows("NVIDIA H100"), *found)
    assert [row.few for row in found] == [True, True, False, False]
    assert own.read_text().count("\nrows_to = 8192\nslug = ") == 1
    alike = FP8[0].card, FP8[0].slug
    update(own, [*FP8, Row.of(*alike, rows=1)])
    found = dispatch_table.rows_for(e4m3("columns"), "NVIDIA H200", own=own.parent)
    assert found == (Row.of(*alike, rows=1), *FP8[:2])


def test_a_search_leaves_rows_for_few_queries_as_they_are(tmp_path):
    path = tmp_path / "dispatch.toml"
    update(path, [*rows(), few(), few(8_192)])
    update(path, [Row.of("NVIDIA H200", LONG)])  # by keys alone, as a search writes them
    assert set(table_at(path)) == {Row.of("NVIDIA H200", LONG), few(), few(8_192)}
    update(path, [few(1_024, slug=SHORT)])
    assert set(table_at(path)) == {Row.of("NVIDIA H200", LONG), few(1_024, slug=SHORT)}
    update(path, [*rows("NVIDIA H100"), few(card="NVIDIA H100")])
    update(path, [*rows(), few()])
    assert set(table_at(path)) == {
        *rows(), few(), *rows("NVIDIA H100"), few(card="NVIDIA H100")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ([few(), few(slug=SHORT)], "are both for at most 16384 query rows"),
        ([Row.of("NVIDIA H200", LONG, 0, 99)] * 2, "are both for 0 keys to 99"),
        ([Row.of("NVIDIA \ud83d", LONG)], "this is not TOML"),
        ([few(2**63)], "rows_to is 9223372036854775808; it must be 9223372036854775807 or less"),
        ([Row.of("NVIDIA H200" * 6_000, slug) for slug in (LONG, SHORT)], "more than 131,072 byte"),
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

    def rows_for(*asked):
        return dispatch_table.rows_for(*asked, own=own.parent)

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
    return dispatch_table.rows_for(PROBLEM, card, own=own.parent)


def row(slug, least=0, most=math.inf, card="NVIDIA H200"):
    return Row.of(card, slug, least, most)


MINE = "fwd_fp16_d128_full_m128n160"


@pytest.mark.parametrize(
    ("users", "left"),
    [
        ([(8_192, math.inf)], [(SHORT, 0, 1_023), (LONG, 1_024, 8_191), (MINE, 8_192, math.inf)]),
        ([(0, 1_000)], [(MINE, 0, 1_000), (SHORT, 1_001, 1_023), (LONG, 1_024, math.inf)]),
        ([(1_000, 1_100)], [(SHORT, 0, 999), (MINE, 1_000, 1_100), (LONG, 1_101, math.inf)]),
        ([(0, 1_023)], [(MINE, 0, 1_023), (LONG, 1_024, math.inf)]),
        ([(5, 5), (7, 9)], [(SHORT, 0, 4), (MINE, 5, 5), (SHORT, 6, 6), (MINE, 7, 9),
                            (SHORT, 10, 1_023), (LONG, 1_024, math.inf)]),
        ([(0, 2**63 - 1)], [(MINE, 0, 2**63 - 1), (LONG, 2**63, math.inf)]),
        ([(0, math.inf)], [(MINE, 0, math.inf)]),
    ],
)  # fmt: skip
def test_bounded_rows_of_a_user_leave_the_rest_to_fagens(folders, users, left):
    found = overlaid(folders, [row(MINE, *keys) for keys in users], rows())
    assert found == tuple(row(*part) for part in left)


def test_rows_of_a_user_for_few_queries_leave_those_for_more_to_fagens(folders):
    found = overlaid(folders, [few(64, slug=MINE)], [*rows(), few(8_192), few(32)])
    assert found == (few(64, slug=MINE), few(8_192), *rows())


def test_what_no_row_is_for_is_served_as_without_a_table(folders, monkeypatch):
    own, of_user = folders
    monkeypatch.setattr("fagen.dispatch.choice.locate", lambda name: own.parent)
    usual = pick(PROBLEM, Sizes(1, 1, 1, 1, 1), "NVIDIA H200")
    assert usual.slug != MINE
    update(of_user, [row(MINE, 100, 200), few(64, slug=SHORT)])

    def picked(keys, queries=1_000):
        return pick(PROBLEM, Sizes(1, 1, 1, queries, keys), "NVIDIA H200").slug

    expected = {1: usual.slug, 99: usual.slug, 100: MINE, 200: MINE, 201: usual.slug}
    expected |= {OPEN_KEYS + 1: usual.slug}
    assert {keys: picked(keys) for keys in expected} == expected
    assert picked(1, 64) == picked(150, 64) == SHORT
    assert serving(PROBLEM, "NVIDIA H200").by_keys == ((99, None), (200, MINE), (math.inf, None))


def test_another_cards_rows_of_a_user_go_before_no_rows_of_this_card(folders):
    assert overlaid(folders, [row(MINE, card="NVIDIA H100")], rows()) == tuple(rows())
    (one,) = overlaid(folders, [row(MINE, card="NVIDIA H100")], rows(), card="NVIDIA GH200")
    assert one.slug == MINE  # of two that are not of this card a user's


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("keys", [(0, 1_000), (8_192, 10_000), (8_192, math.inf), (0, 200_000)])
def test_no_other_call_is_served_otherwise_for_a_users_row(folders, mask, keys):
    """Over fagen's own table: rows for few queries and for accuracy stay what they were."""
    _, of_user = folders
    slug = f"fwd_fp16_d128_{mask}_m64n48"
    asked = replace(PROBLEM, mask=mask)
    sizes = [
        Sizes(1, 16, 16, queries, length)
        for queries in (1, 1_000, 200_000)
        for length in (1, 1_000, 1_001, 8_191, 8_192, 10_000, 10_001, OPEN_KEYS, 200_000, 300_000)
    ]
    before = {size: pick(asked, size, "NVIDIA H200") for size in sizes}
    update(of_user, [row(slug, *keys)])
    found = serving(asked, "NVIDIA H200")
    few_rows = {served for _, served in found.few}
    narrow = [size for size in sizes if for_narrow(found.narrow, 16, size.seqlen_q, size.seqlen_k)]
    assert narrow and len(narrow) < len(sizes)
    for size, served in before.items():
        found = pick(asked, size, "NVIDIA H200")
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
        dict(most=2**63 - 1),
        dict(least=2**63 - 1),
        dict(rows=2**63 - 1),
        dict(rows=2**53 + 1),
    ],
)
def test_what_is_hard_to_write_is_read_back(folders, told):
    one = Row.of(**{"card": "NVIDIA H200", "slug": LONG} | told)
    update(folders[1], [one])
    table_at.cache_clear()
    assert table_at(folders[1]) == (one,)
    lines = folders[1].read_text(encoding="utf-8").split("\n")
    assert all(line.isprintable() for line in lines)
    assert dispatch_table.rows_for(PROBLEM, one.card, own=folders[0].parent) == (one,)
    assert slugs_for(serving(PROBLEM, one.card), 2**63 - 1, 2**63 - 1)


def test_a_byte_order_mark_and_another_systems_lines_are_read(folders):
    text = dispatch_table.written(rows()).replace("\n", "\r\n")
    folders[0].write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert table_at(folders[0]) == tuple(rows())
    assert [row.where for row in table_at(folders[0])] == [f"{folders[0]}:{n}" for n in (4, 12)]


PACKED = "fwd_fp16_d128_full_m128n128_varlen"


def test_a_row_of_packed_sequences_is_for_all_sizes_and_no_others_are_for_these(
    folders, monkeypatch
):
    own, users = folders
    monkeypatch.setattr("fagen.dispatch.choice.locate", lambda name: own.parent)
    update(own, [*rows(), Row.of("NVIDIA H200", PACKED)])
    packed = replace(PROBLEM, lengths="varlen")
    assert serving(packed, "NVIDIA H200").always == PACKED
    assert dispatch_table.rows_for(PROBLEM, "NVIDIA H200", own=own.parent) == tuple(rows())
    update(users, [Row.of("NVIDIA H200", PACKED.replace("m128n128", "m128n64"))])
    assert serving(packed, "NVIDIA H200").always == PACKED.replace("m128n128", "m128n64")
    assert serving(replace(packed, mask="causal"), "NVIDIA H200").always is None


def e4m3(v_layout="", scale_rows=0):
    """What a call asks for, O in either type."""
    return Problem("e4m3", 64, 64, "full", "bf16", v_layout, scale_rows)


def of_e4m3(slug, least=0, most=math.inf, **told):
    return Row("NVIDIA H200", replace(e4m3(**told), out_dtype=None), least, most, slug)


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
        found = dispatch_table.rows_for(e4m3(**more), "NVIDIA H200", own=own.parent)
        assert found == dispatch_table.rows_for(
            replace(e4m3(**more), out_dtype="fp16"), "NVIDIA H200", own=own.parent
        )
        return [row.slug for row in found]

    assert slugs(v_layout="columns") == [FP8[0].slug, FP8[1].slug]
    assert slugs(v_layout="rows") == [FP8[2].slug]
    assert slugs(v_layout="columns", scale_rows=32) == [FP8[3].slug]
    assert slugs(v_layout="columns", scale_rows=64) == slugs() == []
    update(own, [Row.of("NVIDIA H200", FP8[1].slug, 0, math.inf)])  # in place of both for columns
    assert set(table_at(own)) == {*FP8[2:], Row.of("NVIDIA H200", FP8[1].slug, 0, math.inf)}


def test_a_kernel_says_what_its_row_is_of():
    for row in (*FP8, *rows()):
        assert Row.of(row.card, row.slug, row.least, row.most) == row
    slug, problem = "fwd_fp16_d128_full_m128n96", replace(PROBLEM, out_dtype=None)
    assert few() == Row("NVIDIA H200", problem, 0, math.inf, slug, rows=16_384)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[kernel]]\n", ":1: [[kernel]] number 1: without card, dtype, head_dim, mask, slug"),
        ("# one\nx = 1\n", ":2: x: a dispatch table has [[kernel]] tables, and nothing else"),
        ("[[kernel]\n", ":1: this is not TOML"),
        (dispatch_table.written(rows()).replace("m128n128", "m128n999"), "block_n"),
        (dispatch_table.written(rows()).replace("fp16_d128_full_m128n128", "fp16_d64_full_m64n64"),
         "computes something else"),
        (dispatch_table.written(rows()).replace("from = 1024", "from = 1000"),
         ":12: fwd_fp16_d128_full_m128n64 and fwd_fp16_d128_full_m128n128 are both for 1000 keys "
         "to 1023: a call belongs to one of them; leave one out, or give it another from or to"),
        (dispatch_table.written(rows()).replace("from = 1024", "from = 1000\nto = 1020"),
         "are both for 1000 keys to 1020"),
        (dispatch_table.written(rows()).replace("to = 1023\n", ""), "both for 1024 keys and more"),
        (dispatch_table.written(rows()).replace('mask = "full"', 'mask = "ful"'),
         ':8: [[kernel]] number 1: mask = "ful" must be "full" or "causal"; did you mean "full"?'),
        (dispatch_table.written(rows()) + "width = 3\n", ":19: [[kernel]] number 2: width is not "),
        (dispatch_table.written(rows()) + "rowsto = 3\n",
         "rowsto is not one; did you mean rows_to?"),
        (dispatch_table.written(rows()) + "scale_rows = 32.0\n", "scale_rows is not a whole"),
        (dispatch_table.written([few(slug=PACKED)]),
         f":9: [[kernel]] number 1: {PACKED} is for packed sequences, whose kernel is one for all "
         "sizes: leave out rows_to"),
        (dispatch_table.written([Row.of("NVIDIA H200", PACKED, 1, 9, queries=3)]),
         "whose kernel is one for all sizes: leave out from and to and queries_to"),
        (dispatch_table.written(FP8).replace('v_layout = "rows"\n', ""),
         'fwd_e4m3_d64_full_m64n64_vrows is for v_layout = "rows" and scale_rows = 0'),
        (dispatch_table.written(FP8).replace("scale_rows = 32", "scale_rows = 64"),
         'is for v_layout = "columns" and scale_rows = 32'),
        (dispatch_table.written([few(), *rows()]).replace("= 16384", "= 16384\nfrom = 5"),
         "[[kernel]] number 1: rows_to goes without from: such a row serves calls with few query "
         "rows whatever their number of keys; leave out from, or rows_to"),
        (dispatch_table.written(rows()).replace("from =", "rows_to = 1\nto = 2\nfrom ="),
         "number 2: rows_to goes without from and to: such a row"),
        (dispatch_table.written(rows()) + "rows_to = 0\n",
         "number 2: rows_to is 0; it must be 1 or more query rows in all"),
        (dispatch_table.written(rows()) + "rows_to = 16384.0\n", "rows_to is not a whole number"),
        (dispatch_table.written(rows()) + "rows_to = true\n", "rows_to is not a whole number"),
        (
            dispatch_table.written(rows()).replace("head_dim = 128", "head_dim = true"),
            ":7: [[kernel]] number 1: head_dim is not a whole number: true",
        ),
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
         r":2: [[kernel]] number 1: a\u001b[2J\u000a is not one of card, dtype, "),
        (b"kernel = {card = 1}\n", ":1: kernel: a dispatch table has [[kernel]] tables, and "),
        (b'[[kernel]]\nmask = "\\u009b"\n', r':2: [[kernel]] number 1: mask = "\u009b" must be'),
        (b'[[kernel]]\nslug = 1e999\n', ":2: [[kernel]] number 1: slug is not text: inf"),
        *(
            (dispatch_table.written(rows()).encode() + f"{key} = {HUGE}\n".encode(),
             f":19: [[kernel]] number 2: {key} is a number of 1329 bits; it must be "
             "9223372036854775807 or less")
            for key in ("to", "rows_to", "scale_rows", "head_dim_v")
        ),
        (dispatch_table.written(rows()).replace("to = 1023", "to = -1").encode(),
         ":9: [[kernel]] number 1: to is -1; it must be 0 or more"),
        (dispatch_table.written(rows()).replace("from = 1024", "from = 1024\nto = 1023").encode(),
         ":18: [[kernel]] number 2: from 1024 to 1023 is no range"),
        (dispatch_table.written(rows()).replace("m128n128", "\\u001b[2J").encode(),
         r':18: [[kernel]] number 2: slug = "fwd_fp16_d128_full_\u001b[2J": '),
        (dispatch_table.written(rows()).replace("m128n128", "m" + "9" * 3000).encode(),
         ":18: [[kernel]] number 2: slug"),
        (dispatch_table.written(rows()).replace("fwd_fp16", "quant_fp16").encode(),
         ":10: [[kernel]] number 1: slug"),
    ],
)  # fmt: skip
def test_a_hostile_table_is_refused_with_its_line_in_one_that_can_be_printed(
    folders, content, said
):
    folders[1].parent.mkdir()
    folders[1].write_bytes(content)
    with pytest.raises(ScheduleError) as refusal:
        pick(PROBLEM, Sizes(1, 1, 1, 1, 1), "NVIDIA H200")
    told = str(refusal.value)
    assert told.startswith(f"{folders[1]}") and said in told
    assert told.isprintable() and len(told) < 400 + len(str(folders[1]))


def test_a_table_that_is_no_file_is_refused(folders):
    folders[1].mkdir(parents=True)
    with pytest.raises(ScheduleError, match="is no file, and so no dispatch table"):
        pick(PROBLEM, Sizes(1, 1, 1, 1, 1), "NVIDIA H200")
    folders[1].rmdir()
    folders[1].symlink_to(folders[1])
    with pytest.raises(ScheduleError, match="cannot be read: Too many levels of symbolic links"):
        pick(PROBLEM, Sizes(1, 1, 1, 1, 1), "NVIDIA H200")


def test_a_folder_of_a_home_that_nobody_has_is_refused_with_its_variable(monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "~nosuch-user\x1b/x")
    with pytest.raises(
        FagenError, match=r"XDG_CONFIG_HOME = '~nosuch-user.* is not known: set XDG_CO"
    ):
        pick(PROBLEM, Sizes(1, 1, 1, 1, 1), "NVIDIA H200")
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
            assert row.narrow or Schedule.from_slug(row.slug).values()["chunks"] == 1


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
        return pick(problem, Sizes(1, 16, 16, queries, keys), "NVIDIA H200")

    for keys in (bound + 1, 300_000, 2**20):
        assert picked(200_000, keys) == promoted
        for queries in (1, 16, 17, 128, 640):  # their kernels share the keys
            found = picked(queries, keys)
            assert found == promoted or plan(found).chunk_keys(keys) <= bound
    for keys in (1, OPEN_KEYS, bound):
        assert not any(
            picked(queries, keys).values().get("promote") for queries in (1, 128, 200_000)
        )
