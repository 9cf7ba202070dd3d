"""benchmarks/beyond.py and ablation.py without a GPU: other problems, and each feature left out."""

import json
import shutil

import pytest

from fagen import flow
from fagen.dispatch import choice
from fagen.measure.peers import is_causal, ragged_causal
from fagen.measure.rows import Row, read_rows
from fagen.paths import locate
from fagen.runtime import attention as dispatch
from tests.benchmark_helpers import FIELDS


def test_beyond_the_grid_every_cell_is_another_and_as_issued(script):
    found = script("beyond").groups("fp16")
    every = [case for group in found.values() for case in group.cells]
    assert len(every) == len(set(every)) == 34
    heads = {case.problem.head_dim: case.sizes.heads for case in found["head-dims"].cells}
    assert heads == {96: 21, 192: 11}
    assert {case.sizes.seqlen_k for case in found["odd"].cells} == {1000, 3001}
    assert {case.sizes.batch * case.sizes.heads for case in found["few-tiles"].cells} == {4}
    assert {(c.sizes.heads, c.sizes.kv_heads) for c in found["grouped"].cells} == {(32, 8), (64, 8)}
    assert all(ragged_causal(case) for case in found["uneven-causal"].cells)
    assert not any(is_causal(case) for case in found["uneven"].cells)


def test_beyond_the_grid_each_group_has_its_table_and_what_was_left_out_its_reason(
    script, made_up_gpu, tmp_path, monkeypatch
):
    beyond = script("beyond")
    there = [one for one in flow.committed("forward") if one.attention.head_dim in (64, 128, 256)]
    monkeypatch.setattr(flow, "committed", lambda kind: tuple(there))
    monkeypatch.setattr(choice, "committed", lambda kind: tuple(there))
    assert beyond.main(["--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("nvidia-h200-*-beyond.json")
    rows = read_rows(path)
    assert list(json.loads(path.read_text())[0]) == FIELDS
    assert len({row.cell for row in rows}) == 34 - 8
    page = path.with_suffix(".md").read_text()
    assert (
        page.count("no committed schedule: fp16 hd96 full B=8 H=21 Sq=2048 Sk=2048; fp16 hd96") == 1
    )
    assert "cuDNN left out (aligned to the top left): fp16 hd128 causal B=16 H=16" in page
    lines = page.splitlines()
    means = [line for line in lines if line.startswith("|") and "uneven-causal" in line]
    assert len(means) == 1 and "2.000" in means[0], "beside FA2 only"
    before = page
    assert beyond.main(["--redraw", str(path)]) == 0
    assert path.with_suffix(".md").read_text() == before


def test_some_groups_alone(script, made_up_gpu, tmp_path):
    beyond = script("beyond")
    assert beyond.main(["--group", "few-tiles", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-beyond.json")
    assert {row.batch * row.heads for row in read_rows(path)} == {4}


def test_the_ablation_says_what_each_feature_is_worth(script, made_up_gpu, tmp_path):
    ablation = script("ablation")
    assert ablation.main(["--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("nvidia-h200-*-ablation.json")
    assert made_up_gpu.rounds == {("sustained", 9), ("burst", 15)}
    page = path.with_suffix(".md").read_text()
    for said in ("661", "582", "570", "cuDNN", "without ping-pong", "9 rounds sustained"):
        assert said in page
    assert "- ping-pong: +1.0% sustained, +1.0% burst; earns its place" in page
    ablation.main(["--redraw", str(path)])
    assert path.with_suffix(".md").read_text() == page


def test_a_feature_that_costs_is_said_to_earn_nothing(script):
    ablation = script("ablation")
    speeds = {ablation.WHOLE.slug: (600, 700)}
    speeds |= {one.slug: (610, 690) for one in ablation.WITHOUT.values()}
    speeds[ablation.WITHOUT["ping-pong"].slug] = (601, 701)
    rows = [
        Row(
            "fp16", 128, 128, "full", 1, 16_384, 16_384, 16, 16, "fagen", slug, regime, tflops, 0, 1
        )
        for slug, pair in speeds.items()
        for regime, tflops in zip(("sustained", "burst"), pair, strict=True)
    ]
    said = ablation.verdicts(rows)
    assert "overlap: -1.6% sustained, +1.4% burst; earns its place in burst runs only" in said
    assert "ping-pong: -0.2% sustained, -0.1% burst; earns its place nowhere" in said


@pytest.mark.usefixtures("nothing_is_ready")
def test_the_schedules_of_the_ablation_are_committed_and_never_the_usual_choice(
    script, schedules_folder
):
    ablation = script("ablation")
    for schedule in (ablation.WHOLE, *ablation.WITHOUT.values()):
        path = locate("schedules") / "forward" / f"{schedule.slug}.toml"
        shutil.copy(path, schedules_folder / "forward")
    keys = ablation.WHOLE.attention
    picked = dispatch.picked(dtype=keys.dtype, head_dim=keys.head_dim, seqlen=16_384)
    assert picked.slug == ablation.WHOLE.slug
