"""A schedule's keys, defaults and slug, and the schedules that are shipped."""

import json
import math
import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fagen import registry
from fagen.arch import SM90
from fagen.errors import ScheduleError
from fagen.kinds.forward.keys import Schedule
from fagen.paths import locate
from tests import backward_helpers as backward
from tests import combine_helpers as combine
from tests import decode_helpers as decode
from tests.schedule_helpers import E4M3, KINDS, ONLINE, PLAIN, PLAIN_FORWARD, QUANTIZER, TEXT, but
from tests.strategies import fp8_schedules, quantizers, schedules

ROWS_BY_BLOCK = {"dtype": "e4m3", "v_layout": "rows", "scales": "block", "scale_rows": 64}
FOUR, EIGHT = {"rescale_threshold": 4}, {"rescale_threshold": 8}
BY_DTYPE = (
    *("out_dtype", "v_layout", "scales", "scale_rows", "v_scales"),
    *("maximum", "p_offset", "promote", "totals"),
)
IN_E4M3 = dict(
    zip(BY_DTYPE, ("bf16", "columns", "head", 0, "column", "online", 8.0, 0, ""), strict=True)
)
EVERY = schedules() | fp8_schedules() | quantizers()


# ---- defaults -----------------------------------------------------------------------------------


def test_attention_and_tile_are_enough_and_the_rest_follows():
    schedule = registry.parse(TEXT)
    assert schedule.attention.head_dim_v == 128
    assert schedule.consumers == 2
    assert (schedule.warps.producer_registers, schedule.warps.consumer_registers) == (40, 232)
    assert schedule.overlap.inter_warpgroup and schedule.overlap.intra_warpgroup
    assert schedule.grid.order == "dynamic"
    assert (schedule.pipeline.stages, schedule.pipeline.q_stages) == (2, 1)
    assert (schedule.softmax.sum, schedule.softmax.maximum) == ("threads", "lazy")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"block_m": 64}, {"consumer_registers": 232, "inter_warpgroup": False}),
        ({"block_m": 192}, {"producer_registers": 32, "consumer_registers": 160}),
        ({"block_m": 256}, {"producer_registers": 32, "consumer_registers": 112}),
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
        ({}, dict(zip(BY_DTYPE, ("fp16", "", "", 0, "", "lazy", 0.0, 0, ""), strict=True))),
        ({"dtype": "e4m3"}, IN_E4M3),
        ({"dtype": "e4m3", "scales": "block"}, IN_E4M3 | {"scales": "block", "scale_rows": 64}),
        ({"dtype": "e4m3", "promote": 4}, IN_E4M3 | {"promote": 4, "totals": "registers"}),
        # of e4m3's range what a threshold leaves, in whole; a lazy row max as much as a true one
        *(
            ({"dtype": "e4m3", "mask": mask, **ONLINE, "rescale_threshold": t}, {"p_offset": p})
            for mask in ("full", "causal")
            for t, p in ((0, 8), (0.75, 8), (0.875, 7), (4, 4), (3.75, 5), (7.875, 0))
        ),
        *(
            ({"dtype": "e4m3", "mask": mask, "block_n": n, "maximum": "lazy"}, {"p_offset": 8})
            for mask in ("full", "causal")
            for n in (32, 256)
        ),
    ],
)
def test_what_is_left_out_follows_from_what_is_said(changes, expected):
    values = Schedule.make(**PLAIN).but(**changes).values()
    assert {key: values[key] for key in expected} == expected


def test_saying_a_default_is_the_same_as_leaving_it_out():
    explicit = Schedule.make(**PLAIN, stages=2, order="dynamic", consumer_registers=232)
    assert explicit == Schedule.make(**PLAIN)
    assert hash(explicit) == hash(Schedule.make(**PLAIN))
    assert explicit == registry.parse(TEXT, "elsewhere.toml")


def test_a_schedule_cannot_be_changed():
    with pytest.raises(ValidationError):
        Schedule.make(**PLAIN).tile.block_n = 64


# ---- slugs --------------------------------------------------------------------------------------


SAID = {  # what keys are changed to, and the slug that says so, or how it ends
    PLAIN_FORWARD: [
        ({}, ""),
        ({"out_dtype": "fp16"}, ""),
        ({"dtype": "bf16", "mask": "full"}, "fwd_bf16_d128_full_m128n128"),
        ({"head_dim": 192, "head_dim_v": 128}, "fwd_fp16_d192v128_causal_m128n128"),
        ({"block_m": 192}, "fwd_fp16_d128_causal_m192n128"),
        ({"order": "persistent"}, "_persistent"),
        ({"producer": "none"}, "_noprod"),
        ({"stages": 3, "rescale_threshold": 8, **ONLINE}, "_s3_onlinemax_t8"),
        (
            {"head_dim": 64, "stages": 3, "q_stages": 2, "sum": "tensor", **ONLINE, **EIGHT},
            "fwd_fp16_d64_causal_m128n128_s3_q2_tensorsum_onlinemax_t8",
        ),
        ({"maximum": "lazy", "block_m": 256}, "fwd_fp16_d128_causal_m256n128"),
        (ONLINE, "_onlinemax"),
        (ONLINE | {"rescale_threshold": 0.125}, "_onlinemax_t0p125"),
        ({"inter_warpgroup": False, "output": "reuse_v"}, "_reusev_nointer"),
        (
            {"head_dim": 256, "block_n": 64, "output": "half"},
            "fwd_fp16_d256_causal_m128n64_half",
        ),
    ],
    E4M3: [
        ({}, ""),
        ({"out_dtype": "fp16", "v_layout": "rows"}, "_ofp16_vrows"),
        ({"scales": "block"}, "_sblock"),
        (
            {"scales": "block", "scale_rows": 64, "promote": 4, "block_n": 64},
            "fwd_e4m3_d128_full_m128n64_sblock_pm4",
        ),
        ({"scales": "block", "scale_rows": 128, "v_layout": "rows"}, "_vrows_sblock_sr128"),
        ({"promote": 16, "totals": "shared"}, "_pm16_smemtotals"),
        ({"promote": 16, "totals": "registers"}, "_pm16"),
        (ONLINE | {"scales": "block", **FOUR, "p_offset": 4.75}, "_t4_sblock_po4p75"),
        (ONLINE | FOUR | {"p_offset": 4}, "_t4"),
        ({"promote": 1, "promote_columns": 64}, "_pm1_pc64"),
        ({"maximum": "lazy", "p_offset": 4}, "_lazymax_po4"),
        ({"p_offset": 4.75}, "_po4p75"),
        (ONLINE | {"p_offset": 8}, ""),
        ({"scales": "block", "v_scales": "block"}, "_sblock_vsblock"),
        ({"v_scales": "column"}, ""),
    ],
    QUANTIZER: [
        ({}, ""),
        ({"dtype": "bf16", "head_dim": 48}, "quant_bf16_d48"),
        ({"rotate": True}, "_rot"),
        ({"scales": "block", "scale_rows": 64}, ""),
        ({"scale_rows": 128}, "_sr128"),
        ({"scales": "head"}, "_shead"),
        ({"scales": "tensor", "layout": "columns"}, "_stensor_vcols"),
        ({"scale_rows": 32}, "_sr32"),
        ({"rotary": "halves", "rotate": True}, "_halves_rot"),
        ({"rotary": "pairs", "head_dim": 80}, "quant_fp16_d80_pairs"),
    ],
    "comb_bf16_d64": [({"out_dtype": "bf16"}, "")],
    "bwd_fp16_d64_full_m128n128": [({"stages": 1, "do_stages": 1}, "_s1")],
    "fwd_fp16_d64_causal_m128n64": [({"num_splits": 1}, "")],
}


@pytest.mark.parametrize(
    ("usual", "changes", "end"),
    [(usual, *case) for usual, cases in SAID.items() for case in cases],
    ids=str,
)
def test_a_slug_says_what_is_no_default(usual, changes, end):
    schedule = but(usual, changes)
    assert schedule.slug == (usual + end if end[:1] in ("", "_") else end)
    assert registry.from_slug(schedule.slug) == schedule


@pytest.mark.parametrize("slug", [*backward.SPREAD, *combine.SPREAD, *decode.SPREAD])
def test_a_slug_of_another_kind_reads_back(slug):
    assert registry.from_slug(slug).slug == slug


@given(EVERY)
def test_a_slug_reads_back_to_the_same_schedule(schedule):
    assert registry.from_slug(schedule.slug) == schedule
    assert f"fagen_{schedule.slug}".isidentifier()


@given(fp8_schedules())
def test_p_has_its_place_in_every_schedule(schedule):
    most = schedule.fp8.p_offset + schedule.softmax.rescale_threshold
    assert most <= math.log2(SM90.e4m3_max)


@given(EVERY, EVERY)
def test_two_schedules_share_a_slug_only_if_they_are_equal(schedule, other):
    assert (schedule.slug == other.slug) == (schedule == other)


@given(EVERY)
def test_a_default_follows_from_keys_that_the_slug_says_and_from_nothing_else(schedule):
    """Each is worked out of what has no derived default, and of defaults before it."""
    keys, values = schedule.keys, schedule.values()
    declared = {key: value for key, value in values.items() if key not in keys.derived}
    for key, derive in keys.derived.items():
        default = derive(declared)  # KeyError if it looked at anything else
        assert (key in schedule.settings()) == (default != values[key])
        declared[key] = values[key]
    coded = {code.key for code in keys.slug.codes}
    in_head = {key for key in values if f"{{{key}}}" in keys.slug.head}
    assert coded | in_head == values.keys()
    assert not coded & in_head


@pytest.mark.parametrize(
    "slug",
    [
        "",
        "fwd",
        "fwd_fp16_d128_causal_m128n128_",
        "fwd_fp16_d128_causal_m128n128_s2",  # a default is not said
        "fwd_fp16_d128v128_causal_m128n128",  # nor a derived one
        "fwd_fp16_d128_causal_m128n128_onlinemax_s3",  # another order
        "fwd_fp16_d128_causal_m128n128_s3_s4",
        "fwd_fp16_d128_causal_m128n128_q1",
        "fwd_fp16_d128_causal_m128n128_q3",
        "fwd_fp16_d64_causal_m128n128_threadsum",
        "fwd_fp16_d128_causal_m128n128_tensorsum",  # V is wider than one slab
        "fwd_fp16_d128_causal_m128n128_lazymax",  # the default
        "fwd_fp16_d128_causal_m128n128_latemax",  # as it was called
        "fwd_fp16_d128_causal_m128n128_t8",  # which does not go with the default
        "fwd_fp16_d128_causal_m128n128_lazymax_t8",
        "fwd_fp16_d64_causal_m128n128_tensorsum",
        "fwd_e4m3_d128_full_m128n128_sblock_sr64",  # a derived default
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
        "fwd_fp16_d128_causal_m128n128_onlinemax_t1p5p5",
        "fwd_fp16_d128_causal_m128n128_onlinemax_t1p3",
        "fwd_fp16_d" + "1" * 5000 + "_causal_m128n128",
        "quant_fp16",
        "quant_fp16_d128_sblock",
        "quant_fp16_d128_sr64",
        "quant_fp16_d128_shead_sr64",
        "quant_fp16_d8",
        "quant_e4m3_d128",
        "quant_fp16_d128_block64",
        "bwd_fp16_d96_causal_m64n128_dqall",
    ],
)
def test_what_no_schedule_is_called_is_refused(slug):
    with pytest.raises(ScheduleError):
        registry.from_slug(slug)


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"forward"}))
def test_a_slug_of_one_kind_is_none_of_another(kind):
    with pytest.raises(ScheduleError):
        registry.kind(kind).schedule.from_slug(PLAIN_FORWARD)


@given(st.from_regex(r"fwd_fp16_d64_full_m64n64(_[a-z]{1,3}[0-9p]{0,3}){0,3}", fullmatch=True))
def test_a_slug_is_read_or_refused_but_never_misread(slug):
    try:
        schedule = Schedule.from_slug(slug)
    except ScheduleError:
        return
    assert schedule.slug == slug


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_of_a_key_has_a_word_of_its_own(kind):
    keys = registry.kind(kind).schedule.keys
    texts = [w for code in keys.slug.codes for w in (code.words or {None: code.letters}).values()]
    assert len(set(texts)) == len(texts)
    for code in keys.slug.codes:
        rule = keys.tables[keys.sections[code.key]].model_json_schema()["properties"][code.key]
        words = rule.get("enum", [False, True] if rule["type"] == "boolean" else None)
        if code.words:  # beside those of texts that other tests have declared
            own = {word for word in code.words if not re.fullmatch(r"score\w{10}", str(word))}
            assert own == set(words), code.key


@pytest.mark.parametrize("kind", KINDS)
def test_derived_defaults_are_of_keys_that_exist(kind):
    keys = registry.kind(kind).schedule.keys
    assert keys.derived.keys() <= keys.sections.keys() - keys.required


def test_a_constant_default_is_one_whatever_else_a_schedule_says():
    """What measurements may move stands in schedules, not in defaults."""
    for keys in (dict(head_dim=64), dict(mask="full", block_m=256), dict(dtype="bf16")):
        assert Schedule.make(**PLAIN | keys).softmax.maximum == "lazy"
        assert Schedule.make(**PLAIN | keys | dict(dtype="e4m3")).softmax.maximum == "online"
    for rows in (128, 192, 256):
        e4m3 = PLAIN | dict(dtype="e4m3", block_m=rows, block_n=64, scales="block", promote=4)
        schedule = Schedule.make(**e4m3)
        assert (schedule.fp8.scale_rows, schedule.softmax.totals) == (64, "registers")
    assert registry.from_slug("quant_bf16_d64").values()["scale_rows"] == 64


# ---- what is shipped ----------------------------------------------------------------------------


def test_every_problem_of_the_first_release_has_a_file():
    """Whichever tile is the fastest there: a search may have found another since."""
    computed = [registry.read(path).attention for path in registry.schedules("forward")]
    problems = {(a.dtype, a.head_dim, a.mask) for a in computed if a.head_dim == a.head_dim_v}
    assert set(product(("fp16", "bf16"), (64, 128, 256), ("full", "causal"))) <= problems
    head_dims = {(a.head_dim, a.head_dim_v) for a in computed}
    assert {(80, 80), (96, 96), (192, 192), (192, 128)} <= head_dims


@pytest.mark.parametrize("kind", KINDS)
def test_the_schema_file_is_what_the_code_says(kind):
    written = json.loads((locate("schedules") / kind / "schedule.schema.json").read_text())
    schema = json.loads(json.dumps(registry.kind(kind).schedule.json_schema()))
    assert written == schema, f"run: fagen schema --kind {kind}"


@pytest.mark.parametrize("kind", KINDS)
def test_the_schema_names_every_key_with_a_description(kind):
    schema, keys = registry.kind(kind).schedule.json_schema(), registry.kind(kind).schedule.keys
    assert schema["properties"].pop("kind")["const"] == kind
    tables = {name: schema["$defs"][name.capitalize()] for name in schema["properties"]}
    rules = {key: rule for table in tables.values() for key, rule in table["properties"].items()}
    assert rules.keys() == keys.sections.keys()
    assert all(rule["description"] for rule in rules.values())
    assert all("default" not in rules[key] for key in keys.derived)
    required = {key for table in tables.values() for key in table.get("required", ())}
    assert required == keys.required
