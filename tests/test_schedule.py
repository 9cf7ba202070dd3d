"""A schedule's keys, defaults and slug, and the schedules that are shipped."""

import json
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fagen.errors import ScheduleError
from fagen.paths import locate
from fagen.schedule import Schedule, json_schema, parse_schedule, read_schedule
from fagen.schedule.keys import DERIVED, REQUIRED, SECTIONS
from fagen.vocab import CODES
from tests.schedule_helpers import PLAIN, TEXT
from tests.strategies import schedules

ROWS_BY_BLOCK = {"dtype": "e4m3", "v_layout": "rows", "scales": "block", "scale_rows": 64}
FILES = sorted(locate("schedules").glob("fwd_*.toml"))


# ---- defaults -----------------------------------------------------------------------------------


def test_attention_and_tile_are_enough_and_the_rest_follows():
    schedule = parse_schedule(TEXT)
    assert schedule.attention.head_dim_v == 128
    assert schedule.warps.consumers == 2
    assert (schedule.warps.producer_registers, schedule.warps.consumer_registers) == (40, 232)
    assert schedule.overlap.inter_warpgroup and schedule.overlap.intra_warpgroup
    assert schedule.grid.order == "lpt"
    assert (schedule.pipeline.stages, schedule.pipeline.q_stages) == (2, 1)
    assert (schedule.softmax.sum, schedule.softmax.maximum) == ("threads", "late")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"block_m": 64}, {"consumers": 1, "consumer_registers": 232, "inter_warpgroup": False}),
        ({"block_m": 192}, {"consumers": 3, "producer_registers": 32, "consumer_registers": 160}),
        ({"block_m": 256}, {"consumers": 4, "producer_registers": 32, "consumer_registers": 112}),
        (ROWS_BY_BLOCK, {"producer_registers": 56, "consumer_registers": 224}),
        (ROWS_BY_BLOCK | {"block_m": 64}, {"producer_registers": 56, "consumer_registers": 224}),
        (ROWS_BY_BLOCK | {"block_m": 192}, {"producer_registers": 56, "consumer_registers": 152}),
        (ROWS_BY_BLOCK | {"block_m": 256}, {"producer_registers": 64, "consumer_registers": 104}),
        ({"mask": "full"}, {"order": "persistent"}),
        (
            {"producer": "none"},
            {"producer_registers": 0, "consumer_registers": 0, "inter_warpgroup": False},
        ),
        ({"head_dim": 192, "head_dim_v": 128}, {"head_dim": 192, "head_dim_v": 128}),
        ({"rescale_threshold": 0.125}, {"maximum": "each"}),
        ({"head_dim": 64, "sum": "tensor"}, {"maximum": "each"}),
    ],
)
def test_what_is_left_out_follows_from_what_is_said(changes, expected):
    values = Schedule.make(**PLAIN).but(**changes).values()
    assert {key: values[key] for key in expected} == expected


def test_saying_a_default_is_the_same_as_leaving_it_out():
    said = Schedule.make(**PLAIN, stages=2, order="lpt", consumers=2, consumer_registers=232)
    assert said == Schedule.make(**PLAIN)
    assert hash(said) == hash(Schedule.make(**PLAIN))
    assert said == parse_schedule(TEXT, "elsewhere.toml")


def test_a_schedule_cannot_be_changed():
    with pytest.raises(ValidationError):
        Schedule.make(**PLAIN).tile.block_n = 64


# ---- slugs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "slug"),
    [
        ({}, "fwd_fp16_d128_causal_m128n128"),
        ({"dtype": "bf16", "mask": "full"}, "fwd_bf16_d128_full_m128n128"),
        ({"head_dim": 192, "head_dim_v": 128}, "fwd_fp16_d192v128_causal_m128n128"),
        ({"block_m": 192}, "fwd_fp16_d128_causal_m192n128"),
        ({"order": "persistent"}, "fwd_fp16_d128_causal_m128n128_persistent"),
        ({"producer": "none"}, "fwd_fp16_d128_causal_m128n128_noprod"),
        ({"stages": 3, "rescale_threshold": 8}, "fwd_fp16_d128_causal_m128n128_s3_t8"),
        (
            {"head_dim": 64, "stages": 3, "q_stages": 2, "sum": "tensor", "rescale_threshold": 8},
            "fwd_fp16_d64_causal_m128n128_s3_q2_tensorsum_t8",
        ),
        ({"maximum": "late", "block_m": 256}, "fwd_fp16_d128_causal_m256n128"),
        ({"maximum": "each"}, "fwd_fp16_d128_causal_m128n128_eachmax"),
        ({"maximum": "each", "rescale_threshold": 8}, "fwd_fp16_d128_causal_m128n128_t8"),
        (
            {"maximum": "each", "head_dim": 64, "sum": "tensor"},
            "fwd_fp16_d64_causal_m128n128_tensorsum",
        ),
        (
            {"rescale_threshold": 0.125, "p": "shared"},
            "fwd_fp16_d128_causal_m128n128_pshared_t0p125",
        ),
        (
            {"inter_warpgroup": False, "output": "v_space"},
            "fwd_fp16_d128_causal_m128n128_vspace_nointer",
        ),
        (
            {"head_dim": 256, "block_n": 64, "output": "halves"},
            "fwd_fp16_d256_causal_m128n64_halves",
        ),
    ],
)
def test_a_slug_says_what_is_no_default(changes, slug):
    schedule = Schedule.make(**PLAIN).but(**changes)
    assert schedule.slug == slug
    assert Schedule.from_slug(slug) == schedule


@given(schedules())
def test_a_slug_reads_back_to_the_same_schedule(schedule):
    assert Schedule.from_slug(schedule.slug) == schedule
    assert f"fagen_{schedule.slug}".isidentifier()


@given(schedules(), schedules())
def test_two_schedules_share_a_slug_only_if_they_are_equal(one, other):
    assert (one.slug == other.slug) == (one == other)


@pytest.mark.parametrize(
    "slug",
    [
        "",
        "fwd",
        "fwd_fp16_d128_causal_m128n128_",
        "fwd_fp16_d128_causal_m128n128_s2",  # a default is not said
        "fwd_fp16_d128v128_causal_m128n128",  # nor a derived one
        "fwd_fp16_d128_causal_m128n128_t8_s3",  # another order
        "fwd_fp16_d128_causal_m128n128_s3_s4",
        "fwd_fp16_d128_causal_m128n128_q1",
        "fwd_fp16_d128_causal_m128n128_q3",
        "fwd_fp16_d64_causal_m128n128_threadsum",
        "fwd_fp16_d128_causal_m128n128_tensorsum",  # V is wider than one slab
        "fwd_fp16_d128_causal_m128n128_latemax",  # the default
        "fwd_fp16_d128_causal_m128n128_eachmax_t8",  # what follows from t8
        "fwd_fp16_d128_causal_m128n128_latemax_t8",  # and what does not go with it
        "fwd_fp16_d64_causal_m128n128_tensorsum_eachmax",
        "fwd_fp16_d0128_causal_m128n128",
        "fwd_fp16_d128_causal_m128n128_s9999999",
        "fwd_fp16_d128_causal_m128n128_wonder",
        "fwd_fp16_d127_causal_m128n128",
        "fwd_e5m2_d128_causal_m128n128",
        "fwd_e4m3_d128_causal_m128n128_vcols",  # a derived default
        "fwd_e4m3_d128_causal_m128n128_obf16",
        "fwd_e4m3_d128_causal_m128n128_po8",
        "fwd_e4m3_d128_causal_m128n128_sr64",  # only of blocks
        "fwd_fp16_d128_causal_m128n128_vrows",  # only of e4m3
        "fwd_fp16_d128_causal_m128n128_t1p5p5",
        "fwd_fp16_d128_causal_m128n128_t1p3",
        "fwd_fp16_d" + "1" * 5000 + "_causal_m128n128",
    ],
)
def test_what_no_schedule_is_called_is_refused(slug):
    with pytest.raises(ScheduleError):
        Schedule.from_slug(slug)


@given(st.from_regex(r"fwd_fp16_d64_full_m64n64(_[a-z]{1,3}[0-9p]{0,3}){0,3}", fullmatch=True))
def test_a_slug_is_read_or_refused_but_never_misread(slug):
    try:
        schedule = Schedule.from_slug(slug)
    except ScheduleError:
        return
    assert schedule.slug == slug


def test_every_optional_key_has_a_code():
    codes = {code.key for code in CODES}
    assert codes | REQUIRED | {"head_dim_v"} == set(SECTIONS)
    said = [word for code in CODES for word in (code.words or {None: code.letters}).values()]
    assert len(set(said)) == len(said)


def test_derived_defaults_are_of_keys_that_exist():
    assert DERIVED.keys() <= SECTIONS.keys() - REQUIRED


# ---- what is shipped ----------------------------------------------------------------------------


def test_every_problem_of_the_first_release_has_a_file():
    """Whichever tile is the fastest there: a search may have found another since."""
    computed = [read_schedule(path).attention for path in FILES]
    problems = {(a.dtype, a.head_dim, a.mask) for a in computed if a.head_dim == a.head_dim_v}
    assert set(product(("fp16", "bf16"), (64, 128, 256), ("full", "causal"))) <= problems
    head_dims = {(a.head_dim, a.head_dim_v) for a in computed}
    assert {(80, 80), (96, 96), (192, 192), (192, 128)} <= head_dims


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_called_what_its_fields_say(path):
    assert read_schedule(path).slug == path.stem


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_begins_with_its_schema_and_a_reason(path):
    schema, reason, *_ = path.read_text().splitlines()
    assert schema == "#:schema schedule.schema.json"
    assert reason.startswith("# ") and len(reason) > 40


def test_the_schema_file_is_what_the_code_says():
    written = json.loads(Path(locate("schedules") / "schedule.schema.json").read_text())
    assert written == json.loads(json.dumps(json_schema())), "run: fagen schema"


def test_the_schema_names_every_key_with_a_description():
    schema = json_schema()
    tables = {name: schema["$defs"][name.capitalize()] for name in schema["properties"]}
    keys = {key: rule for table in tables.values() for key, rule in table["properties"].items()}
    assert keys.keys() == SECTIONS.keys()
    assert all(rule["description"] for rule in keys.values())
    assert all("default" not in keys[key] for key in DERIVED)
    assert {key for table in tables.values() for key in table.get("required", ())} == REQUIRED
