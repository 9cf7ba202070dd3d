"""The benchmark script without a GPU: a small sample of rows becomes a table and plots."""

import importlib.util
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from fagen.measure.rows import Row, geomean, ratios, read_rows, write_rows

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
RESULTS = BENCHMARKS / "results"
FIELDS = [
    "dtype", "head_dim", "head_dim_v", "mask", "batch", "seqlen_q", "seqlen_k", "heads", "kv_heads",
    "implementation", "schedule", "regime", "tflops", "spread", "sm_clock_mhz",
]  # fmt: skip
ABOUT = {
    "card": "Sample card", "driver": "1", "torch": "2", "cuda": "3", "cudnn": "4",
    "date": "2026-01-01", "matmul_tflops": {"fp16": {"sustained": 700.0, "burst": 800.0}},
}  # fmt: skip


@pytest.fixture
def run(monkeypatch):
    """benchmarks/run.py as a module."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("benchmarks_run", BENCHMARKS / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("plots", None)


def sample() -> list[Row]:
    """Invented figures: fagen is 1.1 of cuDNN at head dim 64 and 0.9 at 128."""
    rows = []
    for head_dim, ratio in [(64, 1.1), (128, 0.9)]:
        for mask, base in [("full", 400.0), ("causal", 300.0)]:
            for seqlen in (512, 2048, 16_384):
                for regime, faster in [("sustained", 1.0), ("burst", 1.15)]:
                    cudnn = (base + head_dim + seqlen / 200) * faster
                    given = [("fagen", f"slug_{head_dim}", cudnn * ratio), ("cudnn", None, cudnn)]
                    given.append(("fa2", None, cudnn / 2))
                    for name, schedule, tflops in given:
                        rows.append(
                            Row(
                                "fp16", head_dim, head_dim, mask, 16_384 // seqlen, seqlen, seqlen,
                                2048 // head_dim, 2048 // head_dim, name, schedule, regime,
                                tflops, 0.01, 1500,
                            )
                        )  # fmt: skip
    return rows


@pytest.fixture
def folder(tmp_path):
    write_rows(tmp_path / "card.json", sample())
    (tmp_path / "card.run.json").write_text(json.dumps(ABOUT))
    return tmp_path


def test_a_redraw_writes_the_table_and_a_plot_per_regime(run, folder, capsys):
    assert run.main(["--redraw", str(folder / "card.json")]) == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "card-fp16-burst.svg",
        "card-fp16-sustained.svg",
        "card.json",
        "card.md",
        "card.run.json",
    ]
    page = (folder / "card.md").read_text()
    assert "1.100" in page and "0.900" in page and "Sample card" in page
    assert "700 TFLOP/s sustained" in page
    assert page.count("\n|  fp16") == 12 + 3  # the problems, and two head dims and all of them
    assert "geomean" in capsys.readouterr().out


def test_a_plot_names_every_implementation_and_the_ceiling(run, folder):
    run.main(["--redraw", str(folder / "card.json")])
    text = (folder / "card-fp16-sustained.svg").read_text()
    ElementTree.fromstring(text)
    for word in ("fagen", "cuDNN", "FA2", "matmul 8192", "head dim 64, full", "16k"):
        assert f"<!-- {word}" in text


def test_the_same_rows_give_the_same_files(run, folder):
    run.main(["--redraw", str(folder / "card.json")])
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    run.main(["--redraw", str(folder / "card.json")])
    assert first == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_default_grid_is_the_24_fp16_cells_of_both_masks(run):
    asked = run._arguments([])
    cells = len(asked.dtype) * len(asked.head_dim) * len(asked.mask) * len(asked.seqlen)
    assert (asked.dtype, cells) == (["fp16"], 24)


def test_without_a_hopper_gpu_it_says_so_and_exits_with_5(run, tmp_path, capsys):
    if run.torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert run.main(["--out", str(tmp_path)]) == 5
    assert "Hopper" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_cudnn_counts_its_version_in_one_number(run):
    assert run._dotted(91900) == "9.19.0"
    assert run._dotted(None) == "none"


def test_committed_results_are_rows_of_the_promised_fields_beside_what_they_were_made_on():
    for path in RESULTS.glob("*.run.json"):
        assert not {"host", "user", "path"} & set(json.loads(path.read_text()))
        results = path.with_name(path.name.replace(".run.json", ".json"))
        assert all(list(row) == FIELDS for row in json.loads(results.read_text()))
        rows = read_rows(results)
        assert all(row.tflops > 0 for row in rows)
        for regime in ("sustained", "burst"):
            assert geomean(ratios(rows, regime).values()) > 0
