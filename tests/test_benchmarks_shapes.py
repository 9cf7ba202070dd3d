"""benchmarks/shapes.py without a GPU: its figures, its arithmetic, and what a revision took."""

import json
import math
from types import SimpleNamespace

import pytest

from fagen import flow
from fagen.errors import FagenError, VerificationError
from fagen.problem import Cell, Problem, Sizes
from tests.benchmark_helpers import refused_without_a_gpu

TABLE = """
[[kernel]]
card = "NVIDIA H200"
dtype = "fp16"
head_dim = 64
mask = "full"
rows_to = 33792
slug = "fwd_fp16_d64_full_m256n64_s4_q2"
[[kernel]]
card = "NVIDIA H200"
dtype = "fp16"
head_dim = 64
mask = "full"
rows_to = 16896
slug = "fwd_fp16_d64_full_m128n128"
[[kernel]]
card = "NVIDIA H200"
dtype = "fp16"
head_dim = 64
mask = "full"
to = 5792
slug = "fwd_fp16_d64_full_m256n64_s4_q2"
[[kernel]]
card = "NVIDIA H200"
dtype = "fp16"
head_dim = 64
mask = "full"
from = 5793
slug = "fwd_fp16_d64_full_m192n128_q2"
[[kernel]]
card = "NVIDIA H200"
dtype = "e4m3"
head_dim = 64
mask = "full"
v_layout = "rows"
slug = "fwd_e4m3_d64_full_m256n64_s3_vrows"
"""
KERNELS = (
    "fwd_fp16_d64_full_m128n128",
    "fwd_fp16_d64_full_m192n128_q2",
    "fwd_fp16_d64_full_m256n64_s4_q2",
    "fwd_bf16_d192v128_causal_m128n112_vspace",
    "fwd_bf16_d192v128_causal_m128n96_vspace_t8",
)


@pytest.fixture
def shapes(script):
    return script("shapes")


@pytest.fixture
def old(tmp_path):
    """A folder as --export writes it."""
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "dispatch.toml").write_text(TABLE)
    for slug in KERNELS:
        (folder / f"{slug}.cu").write_text(f"// {slug}")
    return folder


def cell(problem, *sizes):
    return Cell(Problem(*problem), Sizes(*sizes))


def test_the_figures_are_of_90_shapes_and_as_far_from_flashattention_3_as_was_found(shapes):
    found = shapes.figures()
    assert len(found) == len({figure.cell for figure in found}) == 90
    assert math.isclose(shapes.geomean(f.ahead for f in found), 1.116, abs_tol=1e-3)
    slow = [figure for figure in found if figure.ahead < 1]
    assert len(slow) == 9 and {figure.cell.problem.mask for figure in slow} == {"causal"}
    worst = min(found, key=lambda figure: figure.ahead)
    assert worst.cell == cell(("fp16", 64, 64, "causal"), 1, 8, 1, 10_519, 10_519)
    assert worst.ahead == 399 / 519


@pytest.mark.parametrize("row", ["64,full,2,9,4,3,10,10", "64,full,2,9,4,2,fast,10", "64,full,2"])
def test_a_line_that_is_no_row_is_named(shapes, tmp_path, row):
    path = tmp_path / "figures.csv"
    head = "head_dim,mask,batch,seqlen,heads,kv_heads,fa3,fagen"
    path.write_text(f"# of a card\n{head}\n64,full,2,9,4,2,10,11\n{row}\n")
    with pytest.raises(FagenError, match=r"figures\.csv:4: no row of figures"):
        shapes.figures(path)


@pytest.mark.parametrize(
    "sizes, slug",
    [
        ((1, 1, 1, 16_896, 100), "fwd_fp16_d64_full_m128n128"),
        ((1, 1, 1, 16_897, 9_999), "fwd_fp16_d64_full_m256n64_s4_q2"),
        ((2, 8, 1, 4_096, 5_792), "fwd_fp16_d64_full_m256n64_s4_q2"),
        ((2, 8, 1, 4_096, 5_793), "fwd_fp16_d64_full_m192n128_q2"),
    ],
)
@pytest.mark.parametrize("card", ["NVIDIA H200", "NVIDIA H100 PCIe"])
def test_before_took_a_kernel_by_query_rows_and_then_by_keys(shapes, old, sizes, slug, card):
    before = shapes.Before.at(str(old))
    assert before.pick(cell(("fp16", 64, 64, "full"), *sizes), card) == slug


def test_before_took_the_plainest_kernel_of_a_problem_without_a_row_or_none(shapes, old):
    before = shapes.Before.at(str(old))
    sizes = 1, 1, 1, 64, 64
    plain = before.pick(cell(("bf16", 192, 128, "causal"), *sizes), "NVIDIA H200")
    assert plain == "fwd_bf16_d192v128_causal_m128n112_vspace"
    assert before.pick(cell(("bf16", 192, 192, "causal"), *sizes), "NVIDIA H200") is None
    assert {problem.dtype for problem in before.problems()} == {"fp16", "bf16"}


def test_what_is_exported_is_read_back(shapes, old, tmp_path):
    before = shapes.Before.at(str(old))
    before.export(tmp_path / "again")
    assert shapes.Before.at(str(tmp_path / "again")) == before
    assert len(before.table) == 4, "no kernel of e4m3"


def test_the_yardstick_is_of_both_factors_and_behind_is_so_in_every_repeat(shapes):
    figure = shapes.Figure(cell(("fp16", 64, 64, "full"), 1, 1, 1, 9, 9), fa3=500.0, fagen=450.0)
    pair = shapes.Pair(figure.cell, "now", new=[10.0, 8.0, 10.0], old=[11.0, 10.0, 10.5])
    shape = shapes.Shape(pair, "then", figure)
    assert shape.values == pytest.approx([0.99, 1.125, 0.945])
    assert not shapes.behind(shape.values)
    assert shapes.behind(shape.values[::2])
    assert not shapes.behind([])
    assert shapes.Shape(pair, "then").values == pytest.approx([1.1, 1.25, 1.05])


def test_random_shapes_are_the_same_for_the_same_seed_and_of_known_problems(shapes, old):
    problems = shapes.Before.at(str(old)).problems()
    drawn = shapes.drawn(50, 3, problems)
    assert drawn == shapes.drawn(50, 3, problems) != shapes.drawn(50, 4, problems)
    assert {one.problem for one in drawn} == set(problems)
    assert all(one.sizes.heads % one.sizes.kv_heads == 0 for one in drawn)
    assert all(shapes.FLOPS[0] <= one.flops <= shapes.FLOPS[1] for one in drawn)
    assert 0 < sum(not one.sizes.square for one in drawn) < 25


@pytest.fixture
def timed(shapes, made_up_gpu, monkeypatch):
    """shapes.py, whose kernels of now take 10 µs, and of before 9 µs in the second repeat."""

    def time_pair(pair, plan, library, before, repeat, *, regime, ulps):
        if pair.cell.sizes.batch == 25:
            raise VerificationError("outputs differ")
        assert plan.slug == pair.slug and before.startswith("// fwd")
        pair.new.append(10.0)
        pair.old.append([11.0, 9.0, 10.0][repeat])

    made = SimpleNamespace(library=None, made_with={"nvcc": "13.0"})
    monkeypatch.setattr(flow, "built", lambda one, binding: (SimpleNamespace(slug=one.slug), made))
    monkeypatch.setattr(shapes, "compile_before", lambda text: text)
    monkeypatch.setattr(shapes, "time_pair", time_pair)
    return shapes


def test_a_run_says_geomean_minimum_and_who_is_behind(timed, old, tmp_path, capsys):
    out = tmp_path / "out"
    asked = ["--before", str(old), "--head-dim", "64", "--mask", "full", "--random", "6"]
    assert timed.main([*asked, "--out", str(out)]) == 6, "one of them is wrong"
    (path,) = out.glob("nvidia-h200-*-shapes.json")
    found = json.loads(path.read_text())
    assert found["about"]["nvcc"] == "13.0" and found["about"]["before"] == "dd8a2d3"
    known = [row for row in found["rows"] if row["fagen_over_fa3_before"]]
    assert len(known) == 4, "five rows of the csv, one of them wrong"
    assert known[0]["values"] == pytest.approx([r * 307 / 255 for r in (1.1, 0.9, 1)], abs=1e-3)
    page = path.with_suffix(".md").read_text()
    assert "÷ FA3 by the yardstick: geomean 1.2" in page and "behind in 0 of 4" in page
    assert "wrong, and not timed: outputs differ" in page
    assert "no kernel before" not in page
    timed.main(["--redraw", str(path)])
    assert path.with_suffix(".md").read_text() == page


def test_without_a_hopper_gpu_it_says_so_and_writes_nothing(shapes, old, tmp_path, capsys):
    out = tmp_path / "out"
    assert refused_without_a_gpu(shapes, out, capsys, "--before", str(old))
    assert not out.exists()
