"""The space of a search: its file, its points, and each refusal with its reason."""

import json
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fagen.errors import OverBudget, ScheduleError
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import plan
from fagen.kinds.forward.space import SPACE as FORWARD
from fagen.paths import locate
from fagen.problem import Problem
from fagen.search.declared import parse_space
from fagen.search.files import read_spaces
from fagen.search.space import survey
from tests.clock import least_seconds
from tests.recordings import SPACE, space

SPACES = sorted(locate("cli.py").parent.glob("spaces/*.toml"))


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_a_committed_space_is_one(path):
    declared = read_spaces(path)[0]
    for target in declared.targets():
        assert survey(declared, target).points


def test_a_hundred_thousand_points_take_less_than_two_seconds():
    declared = parse_space('[attention]\ndtype = "fp16"\nhead_dim = [64, 128]\nmask = "full"\n')
    survey(space(), space().targets()[0])  # sympy is imported once

    def a_hundred_thousand():
        began = time.process_time()
        total = sum(survey(declared, target).total for target in declared.targets())
        return (time.process_time() - began) / total * 100_000

    assert least_seconds(a_hundred_thousand, 2) <= 2


@given(keys=st.fixed_dictionaries({k: st.sampled_from(v) for k, v in FORWARD.defaults.items()}))
@settings(max_examples=150, deadline=None)
def test_a_point_is_refused_exactly_where_its_schedule_or_its_plan_is(keys):
    said = {key: value for key, value in keys.items() if value is not None}
    lines = ["[attention]", 'dtype = "fp16"', "head_dim = 96", 'mask = "full"']
    tables = {}
    for key, value in said.items():
        tables.setdefault(Schedule.keys.sections[key], []).append(f"{key} = {json.dumps(value)}")
    for table, rows in tables.items():
        lines += [f"[{table}]", *rows]
    declared = parse_space("\n".join(lines))
    found = survey(declared, declared.targets()[0])
    points = {found.schedule(point).slug for point in found.points}
    try:
        schedule = Schedule.make(dtype="fp16", head_dim=96, mask="full", **said)
        plan(schedule)
    except (ScheduleError, OverBudget):
        assert not any(Schedule.from_slug(slug).but() == said for slug in points)
        assert found.refusals
    else:
        assert schedule.slug in points


def test_every_point_is_counted_once_and_each_reason_has_an_example():
    found = survey(space(), space().targets()[0])
    assert found.total == math.prod(len(values) for values in FORWARD.defaults.values())
    assert found.total == len(found.points) + sum(r.points for r in found.refusals)
    reasons = {refusal.reason: refusal.example for refusal in found.refusals}
    assert "232,448" in reasons["shared memory of a thread block"]
    assert "block_m = 64" in reasons["rule of inter_warpgroup"]


def test_a_slug_is_the_space_of_all_that_might_beat_it():
    declared = read_spaces("fwd_bf16_d40v24_causal_m256n80_s4_q2")[0]
    assert declared.targets() == (Problem("bf16", 40, 24, "causal"),)
    assert declared.effort.anchor == "fwd_bf16_d40v24_causal_m256n80_s4_q2"
    plain = parse_space(
        '[attention]\ndtype = "bf16"\nhead_dim = 40\nhead_dim_v = 24\nmask = "causal"\n'
    )
    assert {**plain.values} == {**declared.values}
    # what a search does not try by itself stays
    kept = read_spaces("fwd_e4m3_d64_full_m128n96_ofp16_vrows_sblock_sr32")[0]
    assert kept.effort.anchor == "fwd_e4m3_d64_full_m128n96_vrows_sblock_sr32"
    said = {"v_layout": "rows", "scale_rows": 32}
    assert {key: kept.values[key] for key in said} == {key: (said[key],) for key in said}
    with pytest.raises(ScheduleError, match='"nothing" is no slug'):
        read_spaces("nothing")[0]
    with pytest.raises(ScheduleError, match=r"nowhere\.toml: cannot be read"):
        read_spaces("nowhere.toml")[0]
    with pytest.raises(ScheduleError, match="not searched"):
        read_spaces("comb_fp16_d64")[0]


def test_a_space_says_values_lists_and_ranges_and_defaults_do_for_the_rest():
    declared = parse_space(
        SPACE + "\n[tile]\nblock_m = 128\nblock_n = { from = 64, to = 128, step = 32 }\n"
        '[softmax]\nsum = ["threads"]\n'
    )
    assert declared.values["block_m"] == (128,)
    assert declared.values["block_n"] == (64, 96, 128)
    assert declared.values["sum"] == ("threads",)
    assert declared.values["stages"] == FORWARD.defaults["stages"]
    full, causal = declared.targets()
    assert (full.mask, causal.mask) == ("full", "causal")
    assert [size.seqlen_k for size in declared.sizes(full)] == [512, 2048, 16384]
    assert {(size.batch * size.seqlen_q, size.heads) for size in declared.sizes(full)} == {
        (16_384, 16)
    }


def test_all_faults_of_a_space_are_listed_at_once_with_their_lines():
    text = (
        '[attention]\ndtype = "fp61"\nhead_dim = [64, 12]\n[tile]\nblock_n = [16, 300]\n'
        "[tail]\n[search]\nshare = -1.0\n"
    )
    with pytest.raises(ScheduleError) as refusal:
        parse_space(text, "x.toml")
    lines = str(refusal.value).splitlines()
    assert [line.partition(" ")[0] for line in lines] == [
        f"x.toml:{number}:" for number in (1, 2, 3, 5, 6, 8)
    ]
    assert 'did you mean "fp16"?' in lines[1]


def test_a_space_of_a_kind_that_is_not_searched_is_refused():
    with pytest.raises(ScheduleError, match="schedules of the kind quantize are not searched"):
        parse_space('[quantize]\ndtype = "fp16"\nhead_dim = 64\n')
    for kind in ("forward", "quantize"):
        said = SPACE.replace("[attention]", f'kind = "{kind}"\n[attention]')
        if kind == "forward":
            assert parse_space(said).targets() == parse_space(SPACE).targets()
        else:
            with pytest.raises(ScheduleError, match="are not searched"):
                parse_space(said)


def test_a_kind_that_is_none_is_refused_in_words():
    for said in ("[1]", "3", '"sideways"'):
        with pytest.raises(ScheduleError, match='must be "forward" or "backward"'):
            parse_space(f"kind = {said}\n{SPACE}")


def test_a_target_leaves_to_a_search_what_is_not_asked_for():
    text = '[attention]\ndtype = "fp16"\nhead_dim = [64, 128]\nmask = "full"\n'
    widths = (64, 128)
    assert parse_space(text).targets() == tuple(Problem("fp16", d, d, "full") for d in widths)
    assert parse_space(f"{text}head_dim_v = [32, 64]\n").targets() == tuple(
        Problem("fp16", d, d_v, "full") for d in widths for d_v in (32, 64)
    )


def test_a_space_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ScheduleError, match=r"nowhere\.toml: cannot be read"):
        read_spaces(tmp_path / "nowhere.toml")[0]
