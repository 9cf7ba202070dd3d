"""benchmarks/fp8_families.py, emulated: e4m3 on inputs that models have and randn has not."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from fagen.kinds.forward.plan import plan
from tests.benchmark_helpers import RESULTS

KEYS = 224  # ends amid a block
PROMOTED = dict(promote=1, totals="shared")  # every block of 128 keys


@pytest.fixture(scope="module")
def families():
    """The script as a module."""
    from tests.benchmark_helpers import scripts

    with pytest.MonkeyPatch.context() as patch, scripts(patch) as load:
        yield load("fp8_families")


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("way", ["as attention_fp8", "a scale for each head"])
def test_errors_are_at_most_twice_a_textbooks_on_every_family(families, way, mask):
    of = families.planned(way, mask, 64, **PROMOTED)
    kernel = families.emulated(of)
    for family in families.FAMILIES:
        line = families.measure(family, way, of, KEYS, kernel, "cpu")
        assert line.textbook_rmse > 0, family
        # Beside the P of a needle 13 bits have no room for the tail, whose V is not small here.
        goal = 4 if "needle" in family and way != families.DEFAULT else families.GOAL
        assert max(line.ratios) <= goal, line


def test_a_small_offset_and_a_stale_maximum_are_found_out(families):
    """The tail below the needle, which has half of the weight, is rounded to nothing."""
    way, needle = "a scale for each head", "needle of 9 nats, middle"
    worst = []
    for keys in ({}, dict(maximum="lazy", p_offset=2.0)):
        of = families.planned(way, "causal", 64, **PROMOTED, **keys)
        line = families.measure(needle, way, of, 2048, families.emulated(of), "cpu")
        worst.append(max(line.ratios))
    assert worst[0] < 4 and worst[1] > 10


def test_a_run_is_redrawn_as_it_was_written(families, made_up_gpu, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(families, "FAMILIES", {"randn": families.FAMILIES["randn"]})
    asked = ["--keys", "64", "--head-dims", "16"]
    assert families.main(asked) == 0
    printed = capsys.readouterr().out
    assert "| randn |" in printed and "2 times a textbook's errors, is met" in printed
    of = families.planned(families.DEFAULT, "full", 16)
    line = families.measure("randn", families.DEFAULT, of, 64, families.emulated(of), "cpu")
    lines = [line, replace(line, mask="causal")]
    stem = tmp_path / "nvidia-h200-2026-11-30-fp8-families"
    stem.with_suffix(".json").write_text(json.dumps([asdict(one) for one in lines]))
    about = dict(card="NVIDIA H200", driver="1", cuda="13.0", torch="2.11", cudnn="9", date="d")
    about |= dict(asked=dict(head_dims="16", keys="64"))
    stem.with_suffix(".run.json").write_text(json.dumps(about))
    assert families.main(["--redraw", str(stem.with_suffix(".json"))]) == 0
    page = stem.with_suffix(".md").read_text()
    assert f"`{of.slug}`" in page and "NVIDIA H200" in page


def test_what_was_measured_is_saved_before_a_run_ends(script, made_up_gpu, tmp_path, monkeypatch):
    """A run that is stopped at its second number of keys keeps the first."""
    families = script("fp8_families")
    monkeypatch.setattr(families, "FAMILIES", {"randn": families.FAMILIES["randn"]})
    monkeypatch.setattr(families, "poisoned8", lambda of, library: families.emulated(of))
    monkeypatch.setattr(
        families,
        "build",
        lambda schedules: {
            of.slug: (of, SimpleNamespace(library=None)) for of in map(plan, schedules)
        },
    )
    measure = families.measure

    def on_cpu(family, way, of, keys, kernel, device):
        if keys > 64:
            raise KeyboardInterrupt
        return measure(family, way, of, keys, kernel, "cpu")

    monkeypatch.setattr(families, "measure", on_cpu)
    asked = ["--device", "cuda", "--head-dims", "16", "--keys", "64", "128"]
    with pytest.raises(KeyboardInterrupt):
        families.main([*asked, "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*-fp8-families.json")
    (line,) = json.loads(path.read_text())
    assert (line["keys"], line["mask"]) == (64, "full")
    assert families.main(["--redraw", str(path)]) == 0
    assert "| randn |" in path.with_suffix(".md").read_text()


def test_committed_errors_are_lines_of_every_family(families):
    for path in RESULTS.glob("*-fp8-families.json"):
        lines = [families.Line(**line) for line in json.loads(path.read_text())]
        assert {line.family for line in lines} == set(families.FAMILIES)
        assert {line.way for line in lines} == set(families.WAYS)
        assert all(line.textbook_rmse > 0 and line.rmse > 0 for line in lines)
