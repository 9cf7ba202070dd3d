"""benchmarks/data.py without a GPU: scores as they are told, and a run whose times are made up."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from fagen.measure.timing import Call, Timing
from fagen.problem import Cell, Problem, Sizes
from tests.benchmark_helpers import refused_without_a_gpu
from tests.tensors import normal

D, S = 64, 512


@pytest.fixture
def data(script):
    return script("data")


@pytest.fixture
def scores(data):
    """The scores of a family, (queries, keys)."""
    q, k, v = (normal(1, S, 2, D, seed=seed) for seed in range(3))

    def of(name):
        query, key, value, scale = data.made(name, q, k, v)
        assert value is v and query.shape == q.shape
        return scale * query[0, :, 0].double() @ key[0, :, 0].double().T

    return of


@pytest.mark.parametrize("sigma", [1, 2, 4, 8])
def test_normal_scores_have_their_deviation(scores, sigma):
    assert math.isclose(float(scores(f"sigma={sigma}").std()), sigma, rel_tol=0.05)


def test_scores_sink_rise_and_fall_by_what_is_said(scores):
    sink, rising, falling = (scores(name).mean(0) for name in ("sink", "rising", "falling"))
    assert math.isclose(float(sink[0]), 12, abs_tol=0.5)
    assert abs(float(sink[1:].mean())) < 0.1
    place = torch.arange(S) / (S - 1)
    assert float((rising - 16 * place).abs().max()) < 0.5
    assert float((falling - 16 * (1 - place)).abs().max()) < 0.5


def test_local_scores_hang_on_the_distance_alone_and_are_largest_at_none(scores):
    local = scores("local")
    near, far = (float(local.diagonal(offset).mean()) for offset in (0, 200))
    assert math.isclose(near, 12, abs_tol=0.5) and far < near - 3
    assert math.isclose(float(local.diagonal(-200).mean()), far, abs_tol=0.7)


def test_every_shape_with_figures_of_flashattention_3_has_those_of_cudnn(data):
    assert data.FA3.keys() == data.CUDNN.keys()
    assert all(set(found) <= set(data.FAMILIES) for found in data.FA3.values())


@pytest.fixture
def timed(data, made_up_gpu, monkeypatch):
    """data.py on small inputs: 1 ms at sigma=1, 10 % more at sigma=8, cuDNN 1.2 ms."""

    def time_calls(calls, regime):
        assert regime.name == "burst"
        slow = {"cudnn sigma=1": 1.2e-3}
        return {
            label: Timing(slow.get(label, 1.1e-3 if "sigma=8" in label else 1e-3), 0.01, 1_900)
            for label in calls
        }

    def attend(q, k, v, scale):
        return (timed.out + timed.off,)

    def small(cell):
        return tuple(torch.zeros(1, 4, 1, cell.problem.head_dim) for _ in range(3))

    timed = SimpleNamespace(
        out=torch.ones(1, 4, 1, 1, dtype=torch.float16), off=0.0, main=data.main
    )
    monkeypatch.setattr(data, "time_calls", time_calls)
    monkeypatch.setattr(data, "inputs", small)
    monkeypatch.setattr(data.op, "load", lambda binary: attend)
    monkeypatch.setattr(data, "_fa2", lambda *given: timed.out)
    monkeypatch.setattr(
        data, "peer", lambda name: SimpleNamespace(bind=lambda *given: Call(lambda: timed.out))
    )
    return timed


ASKED = ["--head-dim", "128", "--seqlen", "4096", "--mask", "full"]


def test_a_run_compares_families_with_normal_scores_and_with_flashattention_3(
    timed, data, tmp_path, capsys
):
    assert timed.main([*ASKED, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("nvidia-h200-*-data.json")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 * len(data.FAMILIES)
    (wide,) = (row for row in rows if row["dtype"] == "fp16" and row["family"] == "sigma=8")
    cell = Cell(Problem("fp16", 128, 128, "full"), Sizes(4, 16, 16, 4_096, 4_096))
    assert wide["of_normal"] == round(1 / 1.1, 4)
    assert wide["tflops"] == round(cell.flops / 1.1e9, 1)
    assert wide["over_fa3"] == pytest.approx(1.2 / 1.1 * 661 / 744, abs=1e-3)
    page = path.with_suffix(".md").read_text()
    assert page.count("0.909 !") == 2, "fp16 and bf16 are below what they may be"
    assert "fp16 sigma=8 ÷ FA3: geomean 0.969, least 0.969, below 1 in 1 of 1" in page
    timed.main(["--redraw", str(path)])
    assert path.with_suffix(".md").read_text() == page


def test_another_schedule_is_timed_beside_the_usual_one(timed, tmp_path):
    beside = "fwd_fp16_d128_full_m128n128_eachmax"
    timed.main([*ASKED, "--family", "sigma=4", "--schedule", beside, "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*-data.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["dtype"] for row in rows if row["kernel"] == beside] == ["fp16", "fp16"]
    assert len(rows) == 6 and {row["family"] for row in rows} == {"sigma=1", "sigma=4"}


def test_a_wrong_output_is_said(timed, tmp_path):
    timed.off = 0.5
    assert timed.main([*ASKED, "--out", str(tmp_path)]) == 6
    (path,) = tmp_path.glob("*-data.json")
    assert "sigma=8: off by 0.5" in path.with_suffix(".md").read_text()


def test_without_a_hopper_gpu_it_says_so_and_writes_nothing(data, tmp_path, capsys):
    assert refused_without_a_gpu(data, tmp_path, capsys)
