"""benchmarks/fp8_accuracy.py without a GPU: kernels beside their emulation."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fagen import flow
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import plan
from tests.benchmark_helpers import RESULTS


def test_committed_errors_are_lines_of_the_experiment_and_emulated_to_a_tenth(script):
    module = script("fp8_accuracy")
    for path in RESULTS.glob("*accuracy.json"):
        lines = [module.Line(**line) for line in json.loads(path.read_text())]
        measured = [line for line in lines if line.kernel]
        assert measured and {line.long for line in measured} == {False, True}
        both = [line for line in measured if line.emulated]
        assert {line.long for line in both} == {False, True}
        assert all(abs(line.kernel / line.emulated - 1) <= 0.1 for line in both)


@pytest.fixture
def accuracy(script, made_up_gpu, monkeypatch):
    """benchmarks/fp8_accuracy.py, whose kernels are 1 % less exact than they are emulated."""
    module = script("fp8_accuracy")
    tensors, error = module.tensors, module.error

    def on_cpu(asked, seed, keys):
        return tensors(SimpleNamespace(**{**vars(asked), "device": "cpu"}), seed, keys)

    def run(part, binary):
        assert binary.slug == part.of.slug
        attend = module.emulated(replace(part, hopper_sums=False))
        attend.real = True
        return attend

    def built(schedules):
        made = [flow.built(schedule, binding=True) for schedule in schedules]
        return {of.slug: (of, binary) for of, binary in made}

    monkeypatch.setattr(module, "tensors", on_cpu)
    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(module, "build", built)
    monkeypatch.setattr(
        module,
        "error",
        lambda attend, *rest: error(attend, *rest) * (1.01 if hasattr(attend, "real") else 1),
    )
    return module


SMALL = ["--queries", "16", "--heads", "1", "--seeds", "1", "--keys", "256", "--longest", "1024"]


def test_real_kernels_stand_beside_their_emulation_in_every_line(
    accuracy, made_up_gpu, tmp_path, monkeypatch
):
    monkeypatch.setattr(accuracy, "LENGTHS", (128, 256))
    assert accuracy.main(["--device", "cuda", *SMALL, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("nvidia-h200-*-fp8-accuracy.json")
    lines = json.loads(path.read_text())
    assert len(lines) == 8 + 2 * 5
    assert len(set(made_up_gpu.built)) == len(made_up_gpu.built) == 5 + 4, (
        "fp16, scales, maxima, V by block, promotions"
    )
    with_kernels = [line for line in lines if line["kernel"]]
    assert len(with_kernels) == 7 + 2 * 4
    short = [line for line in with_kernels if not line["long"]]
    for line in short:
        assert line["kernel"] == pytest.approx(1.01 * line["emulated"])
    page = path.with_suffix(".md").read_text()
    for said in (
        "kernel ÷ emulated",
        "1.010",
        "the goal, at most",
        "promoted every 64 keys, kernel",
    ):
        assert said in page
    about = json.loads(path.with_suffix(".run.json").read_text())
    assert about["card"] == "NVIDIA H200" and "256 keys" in about["asked"]["parts"]
    path.with_suffix(".md").unlink()
    assert accuracy.main(["--redraw", str(path)]) == 0
    assert path.with_suffix(".md").read_text() == page


def test_long_sums_may_be_left_to_the_kernels(accuracy, made_up_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy, "LENGTHS", (128, 256))
    given = ["--device", "cuda", *SMALL, "--long", "--emulate-to", "128", "--out", str(tmp_path)]
    assert accuracy.main(given) == 0
    (path,) = tmp_path.glob("nvidia-h200-*-fp8-accuracy.json")
    lines = json.loads(path.read_text())
    emulated = {(line["part"], line["keys"]) for line in lines if line["emulated"]}
    assert len(lines) == 2 * 5 and len(emulated) == 5 + 1 and ("fp32", 256) in emulated
    assert sum(line["kernel"] is not None for line in lines) == 2 * 4
    (row,) = (row for row in path.with_suffix(".md").read_text().splitlines() if "| 256 |" in row)
    assert row.count("–") == 4


def test_emulated_alone_it_is_a_table_on_a_cpu(accuracy, tmp_path, capsys):
    out = tmp_path / "found.json"
    assert accuracy.main([*SMALL, "--out", str(out)]) == 0
    found = json.loads(out.read_text())["rmse"]
    assert len(found) == 8
    printed = capsys.readouterr().out
    assert "kernel" not in printed.splitlines()[0]
    assert f"| {accuracy.COMPLETE} | {found[f'256 keys, {accuracy.COMPLETE}']:.2e} |" in printed


def test_what_quantisers_give_is_spread_to_batch_heads_and_blocks(accuracy):
    x = torch.randn(2, 70, 4, 32).half()
    common = dict(dtype="e4m3", head_dim=32, mask="full", block_m=128, block_n=128)
    for scales, rows, centered, v_scales in (
        ("tensor", "columns", "", "tensor"),
        ("head", "rows", "kv", ""),
        ("block", "columns", "k", ""),
    ):
        of = plan(Schedule.make(**common, scales=scales, v_layout=rows))
        part = accuracy.Part("", of, True, centered, v_scales)
        given = accuracy.quantised(part, x, x, x)
        how = dict(rotated=True, centered=centered, v_scales=v_scales)
        expected = accuracy.operands(of, x, x, x, **how)
        for one, other in zip(given, expected, strict=True):
            assert (one is None) == (other is None)
            if one is None:
                continue
            assert one.shape == other.shape or (one.dim(), one.numel()) == (3, 1)
            torch.testing.assert_close(
                one.float().expand(other.shape), other.float(), rtol=0.13, atol=1e-3
            )
