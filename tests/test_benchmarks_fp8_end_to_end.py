"""benchmarks/fp8_end_to_end.py without a GPU: what calls take, and from which length it pays."""

import json

import pytest
import torch

from fagen.measure.timing import Call, Timing
from fagen.registry import from_slug
from tests.benchmark_helpers import refused_without_a_gpu


@pytest.fixture
def end_to_end(script):
    return script("fp8_end_to_end")


def test_all_kernels_of_both_calls_are_known_beforehand(end_to_end):
    asked = ["--head-dim", "128", "--mask", "causal", "--seqlen", "512", "--seqlen", "65536"]
    cells = list(end_to_end.cells(end_to_end._arguments(asked)))
    assert [(cell.sizes.batch, cell.sizes.seqlen_k) for cell in cells] == [(32, 512), (1, 65_536)]
    slugs = end_to_end.slugs_called(cells)
    kinds = [from_slug(slug).kind for slug in slugs]
    assert kinds.count("quantize") >= 2 and kinds.count("forward") >= 2
    dtypes = {from_slug(slug).values()["dtype"] for slug in slugs}
    assert dtypes == {"fp16", "e4m3"}


@pytest.mark.parametrize(
    "gains, least",
    [
        ({512: 0.9, 1024: 1.1, 2048: 1.2}, 1024),
        ({512: 1.1, 1024: 0.9, 2048: 1.2}, 2048),
        ({512: 1.1, 1024: 1.2, 2048: 1.0}, None),
        ({512: 1.1}, 512),
    ],
)
def test_it_pays_from_the_least_length_after_which_none_is_slower(end_to_end, gains, least):
    rows = [{"seqlen_k": s, "fp16_us": 10.0 * g, "e4m3_us": 10.0} for s, g in gains.items()]
    assert end_to_end.pays_from(rows) == least


@pytest.fixture
def timed(end_to_end, made_up_gpu, monkeypatch):
    """fp8_end_to_end.py, where e4m3 takes 100 µs longer, and half of the rest."""

    def time_calls(calls, regime):
        return {name: Timing(timed.seconds(name), 0.01, 1_900) for name in calls}

    def seconds(name):
        fp16 = timed.cell.sizes.seqlen_k * 1e-7
        return fp16 if name == "fp16" else 100e-6 + fp16 / 2

    def calls_of(cell, q, k, v):
        timed.cell = cell
        out = torch.ones(4, dtype=torch.float16)
        return {"fp16": Call(lambda: out), "e4m3": Call(lambda: out * timed.wrong)}

    timed = end_to_end
    timed.seconds, timed.wrong = seconds, 1.0
    monkeypatch.setattr(end_to_end, "time_calls", time_calls)
    monkeypatch.setattr(end_to_end, "calls_of", calls_of)
    monkeypatch.setattr(end_to_end, "slugs_called", lambda cells: ())
    monkeypatch.setattr(end_to_end, "inputs", lambda cell: (None, None, None))
    return timed


def test_a_run_says_from_where_it_pays(timed, tmp_path, capsys):
    assert timed.main(["--head-dim", "64", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("nvidia-h200-*-fp8-end-to-end.json")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 * 8 and rows[0]["fp16_us"] == 51.2
    page = path.with_suffix(".md").read_text()
    line = next(line for line in page.splitlines() if "full" in line)
    assert line.split()[-2] == "2048", "100 µs is what 2,000 keys save"
    timed.main(["--redraw", str(path)])
    assert path.with_suffix(".md").read_text() == page


def test_outputs_too_far_apart_are_said(timed, tmp_path):
    timed.wrong = 1.2
    asked = ["--head-dim", "64", "--seqlen", "512", "--mask", "full"]
    assert timed.main([*asked, "--out", str(tmp_path)]) == 6
    (path,) = tmp_path.glob("*.md")
    assert "off by 0.2 of the output" in path.read_text()


def test_without_a_hopper_gpu_it_says_so_and_writes_nothing(end_to_end, tmp_path, capsys):
    assert refused_without_a_gpu(end_to_end, tmp_path, capsys)
