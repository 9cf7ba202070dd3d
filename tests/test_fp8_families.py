"""benchmarks/fp8_families.py, emulated: e4m3 on inputs that models have and randn has not."""

import json
from dataclasses import replace

import pytest

import fagen
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import plan
from tests.benchmark_helpers import RESULTS

KEYS = 224  # ends amid a block


@pytest.fixture(scope="module")
def families():
    """The script as a module."""
    from tests.benchmark_helpers import scripts

    with pytest.MonkeyPatch.context() as patch, scripts(patch) as load:
        module = load("fp8_families")
        patch.setattr(module, "QUERIES", 64)
        yield module


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(
    "door", ["attention_fp8", "attention", "flash_attn_func", "flash_attn_varlen_func"]
)
def test_errors_are_at_most_twice_a_textbooks_through_every_door(families, door, mask):
    plan = families.planned(door, mask, 64, KEYS, "")
    for family in families.FAMILIES:
        line = families.measure(family, door, plan, KEYS, "cpu")
        assert line.textbook_rmse > 0, family
        assert line.ratios[0] <= (families.GOAL if line.has_goal else 5), line


def test_sums_over_many_keys_and_a_small_offset_are_found_out(families, monkeypatch):
    """A V with a mean, without promotion; a needle beside a tail that is rounded to nothing."""
    worst = []
    for family, keys in (
        ("V about 10", dict(promote=0)),
        ("needle of 9 nats, middle", dict(maximum="lazy", p_offset=2.0)),
    ):
        usual = dict(dtype="e4m3", mask="full", head_dim=64, block_m=64, block_n=128, promote=1)
        kernel = plan(Schedule.make(**usual | dict(v_layout="rows") | keys))

        def call(operands, scale, causal, kernel=kernel):
            return fagen.attention(**operands._asdict(), scale=scale, schedule=kernel.schedule)

        door = replace(families.DOORS["attention"], call=call)
        monkeypatch.setitem(families.DOORS, "attention", door)
        worst.append(families.measure(family, "attention", kernel, 1024, "cpu").ratios[0])
    assert min(worst) > 2 * families.GOAL


def test_committed_errors_are_lines_of_every_family_and_keep_the_goal(families):
    for path in RESULTS.glob("*-fp8-families.json"):
        lines = [families.Line(**line) for line in json.loads(path.read_text())]
        assert {line.family for line in lines} == set(families.FAMILIES)
        assert {line.door for line in lines} == set(families.DOORS)
        assert all(line.textbook_rmse > 0 and line.rmse > 0 for line in lines)
        assert all(line.ratios[0] <= families.GOAL for line in lines if line.has_goal)
