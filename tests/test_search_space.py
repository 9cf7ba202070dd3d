"""The space of a search: its file, its points, and each refusal with its reason."""

import json
import math
import time
from dataclasses import replace
from importlib import import_module
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fagen import registry
from fagen.dispatch.select import sized
from fagen.errors import OverBudget, ScheduleError
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import plan
from fagen.kinds.forward.space import SPACE as FORWARD
from fagen.paths import locate
from fagen.problem import Problem, solves
from fagen.registry import from_slug
from fagen.search.declared import parse_space, space_like
from fagen.search.files import read_spaces, refuse_twice
from fagen.search.kinds import space_of
from fagen.search.shapes import SEQLENS
from fagen.search.space import survey
from tests.clock import least_seconds
from tests.recordings import SPACE, space

# those of other passes are surveyed where their kinds' are tested
SPACES = sorted(locate("cli.py").parent.glob("spaces/[!bd]*.toml"))


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
    chosen = {key: value for key, value in keys.items() if value is not None}
    lines = ["[attention]", 'dtype = "fp16"', "head_dim = 96", 'mask = "full"']
    tables = {}
    for key, value in chosen.items():
        tables.setdefault(Schedule.keys.sections[key], []).append(f"{key} = {json.dumps(value)}")
    for table, rows in tables.items():
        lines += [f"[{table}]", *rows]
    declared = parse_space("\n".join(lines))
    surveyed = survey(declared, declared.targets()[0])
    points = {surveyed.schedule(point).slug for point in surveyed.points}
    try:
        schedule = Schedule.make(dtype="fp16", head_dim=96, mask="full", **chosen)
        plan(schedule)
    except (ScheduleError, OverBudget):
        assert not any(Schedule.from_slug(slug).but() == chosen for slug in points)
        assert surveyed.refusals
    else:
        assert schedule.slug in points


def test_every_point_is_counted_once_and_each_reason_has_an_example():
    surveyed = survey(space(), space().targets()[0])
    assert surveyed.total == math.prod(len(values) for values in FORWARD.defaults.values())
    assert surveyed.total == len(surveyed.points) + sum(r.points for r in surveyed.refusals)
    reasons = {refusal.reason: refusal.example for refusal in surveyed.refusals}
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
    stay = {"v_layout": "rows", "scale_rows": 32}
    assert {key: kept.values[key] for key in stay} == {key: (stay[key],) for key in stay}
    with pytest.raises(ScheduleError, match='"nothing" is no slug'):
        read_spaces("nothing")[0]
    with pytest.raises(ScheduleError, match=r"nowhere\.toml: cannot be read"):
        read_spaces("nowhere.toml")[0]
    with pytest.raises(ScheduleError, match="not searched"):
        read_spaces("comb_fp16_d64")[0]


@pytest.mark.parametrize(
    "slug",
    [
        "bwd_bf16_d72_causal_m64n64_s3",
        "dec_bf16_d72_causal_r8n64_c20",
        "fwd_bf16_d72_causal_m256n48_varlen_s4_q2",
        "bwd_bf16_d96_causal_m64n64_varlen",
        "bwd_fp16_d64_full_m64n64_varlen_det",
        "fwd_e4m3_d64_full_m128n64_varlen",
    ],
)
def test_so_is_that_of_any_kind(slug):
    declared, schedule = space_like(slug), from_slug(slug)
    (target,) = declared.targets()
    assert target.name == Problem.searched(schedule).name and target.kind == schedule.kind
    assert target.varlen == ("_varlen" in slug)
    assert declared.effort.anchor == slug
    tried = space_of(target.kind).defaults
    if not target.varlen:  # of which some values are not tried
        assert {key: declared.values[key] for key in tried} == tried
    if target.kind == "decode":
        sizes = declared.sizes(target)
        usual = {sized(slug, size).slug.removesuffix("_streamk") for size in sizes}
        # rows that begin within lines of L2: three buffers where there are several units each
        assert usual == {"dec_bf16_d72_causal_r8n64", "dec_bf16_d72_causal_r8n64_s3"}
    else:
        assert len(declared.shapes) == (3 if target.varlen else len(SEQLENS))
        assert survey(replace(declared, shapes=declared.shapes[:1]), target).points


@pytest.mark.parametrize(
    ("kind", "every", "mask"), [("backward", 11, "full"), ("decode", 37, "causal")]
)
def test_what_does_not_fit_is_what_the_ledgers_say(kind, every, mask):
    space, schedules = space_of(kind), registry.kind(kind).schedule
    budget = import_module(f"fagen.kinds.{kind}.formulae").BUDGET
    refused = 0
    for values in list(product(*space.defaults.values()))[::every]:
        keys = dict(zip(space.defaults, values, strict=True))
        for head_dim in (64, 96, 256):
            try:
                schedule = schedules.make(dtype="fp16", head_dim=head_dim, mask=mask, **keys)
            except ScheduleError:
                assert kind == "backward"
                continue
            over = [(row.name, row.total, row.limit) for row in budget.of(schedule).over()]
            assert list(space.sums(schedule.values())) == over
            assert {name for name, *_ in over} <= {*space.budgets}
            refused += bool(over)
    assert refused


def test_all_kinds_of_one_problem_may_be_searched_together():
    table = '[{}]\ndtype = "fp16"\nhead_dim = 64\nmask = "causal"\n'
    shape = "[[shapes]]\nbatch = 1\nheads = 4\nkv_heads = 2\nseqlen = 1\nseqlen_k = 128\n"
    texts = [table.format(name) for name in ("backward", "attention", "decode")]
    texts[2] += shape
    spaces = [parse_space(text, f"{number}.toml") for number, text in enumerate(texts)]
    refuse_twice(spaces)
    names = [target.name for space in spaces for target in space.targets()]
    assert names == ["bwd_fp16_d64_causal", "fp16_d64_causal", "dec_fp16_d64_causal"]
    decoding, plain = map(from_slug, ("dec_fp16_d64_causal_r8n128", "fwd_fp16_d64_causal_m128n128"))
    problem = Problem("fp16", 64, 64, "causal", "fp16", "", 0, "decode")
    assert solves(decoding, problem) and not solves(plain, problem)
    # a call of attention may be served by either
    assert all(solves(space, replace(problem, kind="forward")) for space in (decoding, plain))


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
        text = SPACE.replace("[attention]", f'kind = "{kind}"\n[attention]')
        if kind == "forward":
            assert parse_space(text).targets() == parse_space(SPACE).targets()
        else:
            with pytest.raises(ScheduleError, match="are not searched"):
                parse_space(text)


def test_a_kind_that_is_none_is_refused_in_words():
    for kind in ("[1]", "3", '"sideways"'):
        with pytest.raises(ScheduleError, match='must be "forward" or "backward"'):
            parse_space(f"kind = {kind}\n{SPACE}")


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
