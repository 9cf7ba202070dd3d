"""benchmarks/varlen.py without a GPU: its lists, and what it writes of times that are made up."""

import json
from types import SimpleNamespace

import pytest

from fagen.errors import VerificationError
from fagen.problem import Problem, flops
from tests.benchmark_helpers import RESULTS, refused_without_a_gpu


@pytest.fixture
def varlen(script, made_up_gpu, monkeypatch):
    """The script, on a GPU where a call takes a microsecond for each sequence, FA2's twice that."""
    module = script("varlen")
    monkeypatch.setattr(module, "ours", lambda binary: SimpleNamespace(bind=None))
    monkeypatch.setattr(module, "op", SimpleNamespace(load=lambda binary: binary))

    def time_list(findings, problem, name, slug, kernel, beside):
        lengths = module.lengths_of(name, problem.head_dim)
        for who in ("fagen", "fa2"):
            same = {"dtype": problem.dtype, "head_dim": problem.head_dim, "mask": problem.mask}
            same |= {"list": name, "implementation": who, "regime": "burst", "tflops": 1.0}
            findings.rows.append(same | {"us": len(lengths) * (1.0 + (who == "fa2"))})

    monkeypatch.setattr(module, "time_list", time_list)
    return module


def test_lists_are_of_equal_of_mixed_and_of_tiny_sequences(script):
    module = script("varlen")
    for head_dim in (64, 128, 256):
        assert set(module.lengths_of("equal", head_dim)) == {4_096}
    mixed, tiny = (module.lengths_of(name, 128) for name in ("mixed", "tiny"))
    assert sum(mixed) == 65_536 and max(mixed) <= 16_384 < 16 * max(mixed)
    assert len(tiny) == 1_024 and (min(tiny), max(tiny)) == (1, 64)
    problem = Problem("fp16", 128, 128, "causal")
    assert module.useful_flops(problem, tiny, 16) < flops(problem, module.cell_of(problem).sizes)


def test_a_dtype_has_files_of_its_own_with_every_list_and_a_page(varlen, tmp_path, capsys):
    assert varlen.main(["--out", str(tmp_path), "--dtype", "fp16"]) == 0
    (path,) = tmp_path.glob("nvidia-h200-*-varlen-fp16.json")
    found = json.loads(path.read_text())
    assert len(found["rows"]) == 3 * 2 * 3 * 2 and found["about"]["not timed"] == []
    page = path.with_suffix(".md").read_text()
    assert page in capsys.readouterr().out and "Not timed" not in page
    assert page.count(" 2.000 |") == 18 and page.count(" tiny |") == 6
    assert varlen.main(["--redraw", str(path)]) == 0 and path.with_suffix(".md").read_text() == page
    assert varlen.main(["--out", str(tmp_path)]) == 0
    assert [*tmp_path.glob("nvidia-h200-????-??-??-varlen.json")]


def test_a_run_cut_short_has_a_page_that_says_so(varlen, tmp_path, monkeypatch):
    time_list = varlen.time_list

    def cut(findings, problem, name, *more):
        if (problem.mask, name) == ("causal", "tiny"):
            raise KeyboardInterrupt
        time_list(findings, problem, name, *more)

    monkeypatch.setattr(varlen, "time_list", cut)
    given = ["--out", str(tmp_path), "--dtype", "fp16", "--head-dim", "128"]
    with pytest.raises(KeyboardInterrupt):
        varlen.main(given)
    (page,) = tmp_path.glob("*-varlen-fp16.md")
    assert "Not timed: fp16_d128_causal_varlen tiny." in page.read_text()
    assert varlen.main([*given, "--mask", "full", "--list", "equal"]) == 0


def test_a_list_whose_output_is_wrong_is_noted_and_the_exit_code_is_6(
    varlen, tmp_path, monkeypatch
):
    time_list = varlen.time_list

    def wrong(findings, problem, name, slug, *more):
        if name == "tiny":
            raise VerificationError(f"{slug} differs")
        time_list(findings, problem, name, slug, *more)

    monkeypatch.setattr(varlen, "time_list", wrong)
    given = ["--out", str(tmp_path), "--dtype", "bf16", "--head-dim", "64", "--mask", "full"]
    assert varlen.main(given) == 6
    (page,) = tmp_path.glob("*-varlen-bf16.md")
    assert "wrong, and not timed: fwd_bf16_d64_full" in page.read_text()


def test_pages_of_committed_runs_are_drawn_from_their_rows(script, tmp_path):
    paths = sorted(RESULTS.glob("*-varlen*.json"))
    assert paths
    for path in paths:
        copy = tmp_path / path.name
        copy.write_text(path.read_text())
        assert script("varlen").main(["--redraw", str(copy)]) == 0
        assert path.with_suffix(".md").read_text() == copy.with_suffix(".md").read_text()


def test_it_needs_a_gpu(script, tmp_path, capsys):
    assert refused_without_a_gpu(script("varlen"), tmp_path / "out", capsys)
