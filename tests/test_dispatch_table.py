"""Dispatch tables: which kernel for which problem, key length and card."""

import math
from dataclasses import replace

import pytest

from fagen.dispatch import tables as dispatch_table
from fagen.dispatch.choice import OPEN_KEYS, pick
from fagen.dispatch.tables import Row, table_at, update
from fagen.errors import ScheduleError
from fagen.kinds.forward.keys import Schedule
from fagen.paths import locate
from fagen.problem import Problem, Sizes
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
        ([few(card="NVIDIA H100")], "no row is for more"),
        ([few(), few(slug=SHORT)], "are both for at most 16384 query rows"),
        ([Row.of("NVIDIA H200", LONG, 0, 99)] * 2, "every length belongs to one of them"),
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
    assert rows_for(PROBLEM, "NVIDIA H200") == (few(64), *users_rows)
    assert rows_for(replace(PROBLEM, head_dim=64, head_dim_v=64), "NVIDIA H200") == ()


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
        ("[[kernel]]\n", "card is missing"),
        ("x = 1\n", "nothing else"),
        ("[[kernel]\n", ":1: this is not TOML"),
        (dispatch_table.written(rows()).replace("m128n128", "m128n999"), "block_n"),
        (dispatch_table.written(rows()).replace("fp16_d128_full_m128n128", "fp16_d64_full_m64n64"),
         "computes something else"),
        (dispatch_table.written(rows()).replace("from = 1024", "from = 2000"),
         "every length belongs to one of them"),
        (dispatch_table.written(rows()).replace('mask = "full"', 'mask = "half"'), "there is no"),
        (dispatch_table.written(rows()) + "width = 3\n", "width is not one of"),
        (dispatch_table.written(rows()) + "scale_rows = 32.0\n", "scale_rows is not a whole"),
        (dispatch_table.written(FP8).replace('v_layout = "rows"\n', ""),
         'fwd_e4m3_d64_full_m64n64_vrows is for v_layout = "rows" and scale_rows = 0'),
        (dispatch_table.written(FP8).replace("scale_rows = 32", "scale_rows = 64"),
         'is for v_layout = "columns" and scale_rows = 32'),
        (dispatch_table.written(FP8).replace("to = 999", "to = 99"),
         "fwd_e4m3_d64_full_m64n32 ends at 99 keys and fwd_e4m3_d64_full_m64n64 begins at 1000"),
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
            "head_dim is missing, or not a whole number",
        ),
        (dispatch_table.written([few(), few(slug=SHORT), *rows()]),
         "fwd_fp16_d128_full_m128n96 and fwd_fp16_d128_full_m128n64 are both for at most 16384 "
         "query rows"),
        (dispatch_table.written([*rows(), few(8_192, "NVIDIA H100"), few(card="NVIDIA H100")]),
         "fwd_fp16_d128_full_m128n96 is for at most 16384 query rows, and no row is for more: "
         "every call belongs to one; add a row of NVIDIA H100 without rows_to"),
    ],
)  # fmt: skip
def test_a_wrong_table_is_refused_with_its_name(text, said, tmp_path):
    (tmp_path / "dispatch.toml").write_text(text)
    with pytest.raises(ScheduleError) as refusal:
        table_at(tmp_path / "dispatch.toml")
    assert said in str(refusal.value)


def test_the_committed_table_names_committed_schedules():
    table = table_at(locate("schedules") / dispatch_table.NAME)
    slugs = {path.stem for path in (locate("schedules") / "forward").glob("*.toml")}
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
            assert (schedules / "forward" / f"{row.slug}.toml").is_file(), row.slug


PROMOTED = [
    Schedule.from_slug(slug)
    for slug in sorted(path.stem for path in (locate("schedules") / "forward").glob("*_pm64_*"))
]


@pytest.mark.parametrize("promoted", PROMOTED, ids=lambda schedule: schedule.slug)
def test_sums_over_very_many_keys_move_to_fp32(promoted):
    problem = Problem.of(promoted)
    bound = 262_144 if problem.head_dim == 256 else 131_072
    assert problem.dtype in SIXTEEN_BITS

    def picked(keys):
        return {
            pick(problem, Sizes(1, 16, 16, queries, keys), "NVIDIA H200")
            for queries in (1, 200_000)
        }

    for keys in (bound + 1, 300_000, 2**20):
        assert picked(keys) == {promoted}
    for keys in (1, OPEN_KEYS, bound):
        assert not any(schedule.values()["promote"] for schedule in picked(keys))
