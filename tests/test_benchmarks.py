"""The grid of benchmarks/run.py without a GPU: what it would time, and pages of made-up times."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from fagen import registry
from fagen.dispatch import choice
from fagen.dispatch import tables as dispatch_table
from fagen.errors import DeviceError
from fagen.kinds.forward.keys import Schedule
from fagen.measure import peers
from fagen.measure.launch import LaunchCost
from fagen.measure.rows import (
    PREARRANGED,
    QUANTISE,
    Row,
    geomean,
    ratios,
    read_rows,
    regimes_of,
    write_rows,
)
from fagen.measure.timing import Call
from fagen.problem import Problem
from tests.benchmark_helpers import FIELDS, RESULTS, refused_without_a_gpu

ABOUT = {
    "card": "Sample card", "driver": "1", "torch": "2", "cuda": "3", "cudnn": "4",
    "date": "2026-01-01", "matmul_tflops": {"fp16": {"sustained": 700.0, "burst": 800.0}},
}  # fmt: skip


@pytest.fixture
def run(script):
    """benchmarks/run.py."""
    return script("run")


def pretend(module, monkeypatch, costs=None):
    """Make up what run.py measures beside the cells."""
    costs = costs or {"torch op": LaunchCost(6.5, 1, 0, 0, 2)}
    monkeypatch.setattr(
        module, "matmul_ceiling", lambda dtype: {"sustained": 700.0, "burst": 800.0}
    )
    monkeypatch.setattr(module, "launch_costs", lambda plan, binary: costs)


@pytest.fixture
def schedules(tmp_path, monkeypatch):
    """A schedules folder with a dispatch table: a slug up to 2,048 keys, another above."""
    few, many = "fwd_fp16_d64_full_m128n112", "fwd_fp16_d64_full_m128n128"
    folder = tmp_path / "schedules"
    (folder / "forward").mkdir(parents=True)
    for slug in (few, many):
        keys = Schedule.from_slug(slug)
        (folder / "forward" / f"{slug}.toml").write_text(
            f'[attention]\nhead_dim = 64\ndtype = "fp16"\nmask = "full"\n'
            f"[tile]\nblock_m = 128\nblock_n = {keys.tile.block_n}\n"
        )
    rows = [(few, 0, 2048), (many, 2049)]
    dispatch_table.update(
        folder / dispatch_table.NAME, [dispatch_table.Row.of("NVIDIA H200", *row) for row in rows]
    )
    for module in (registry, choice):
        monkeypatch.setattr(module, "locate", lambda name: folder)
    choice.committed.cache_clear()
    yield few, many
    choice.committed.cache_clear()


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
    assert (
        page.count("\n|  fp16") == 12 + 3 + 2
    )  # the problems, both head dims and all, their shares
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
    assert refused_without_a_gpu(run, tmp_path, capsys)


def test_cudnn_counts_its_version_in_one_number(run):
    assert sys.modules["record"]._dotted(91900) == "9.19.0"
    assert sys.modules["record"]._dotted(None) == "none"


def test_the_grid_times_what_attention_would_take_and_all_schedules_only_if_asked(
    run, made_up_gpu, schedules, tmp_path, monkeypatch
):
    pretend(run, monkeypatch)
    corner = ["--head-dim", "64", "--mask", "full", "--out", str(tmp_path)]
    few, many = schedules
    assert run.main(corner) == 0
    (path,) = tmp_path.glob("nvidia-h200-????-??-??.json")
    timed = {(row.schedule, row.seqlen_k) for row in read_rows(path) if row.schedule}
    assert timed == {(few, 512), (few, 2048), (many, 4096), (many, 16_384)}
    assert set(made_up_gpu.built) == {few, many}
    page = path.with_suffix(".md").read_text()
    assert f"`{few}`: 512, 2048 keys" in page
    assert "fagen burst σ=4" in page and "fagen ÷ cuDNN burst σ=4" in page
    assert "FA2 burst |" in page and "FA2 burst σ=4" not in page
    wide = [row.implementation for row in read_rows(path) if row.regime == "burst-sigma4"]
    assert sorted(set(wide)) == ["cudnn", "fagen"] and len(wide) == 2 * 4
    assert not list(tmp_path.glob("*sigma4*"))
    assert run.main([*corner, "--all-schedules"]) == 0
    assert sum(row.schedule is not None for row in read_rows(path)) == 2 * 3 * 4


def test_a_grid_page_holds_shares_launch_costs_and_both_dtypes(
    run, made_up_gpu, tmp_path, monkeypatch
):
    pretend(run, monkeypatch)
    both = ["--dtype", "fp16", "--dtype", "bf16", "--head-dim", "128", "--out", str(tmp_path)]
    assert run.main(both) == 0
    (path,) = tmp_path.glob("*.run.json")
    about = json.loads(path.read_text())
    assert about["launch"]["torch op"]["host_microseconds"] == 6.5
    assert about["notes"] == {}
    page = path.with_name(path.name.replace(".run.json", ".md")).read_text()
    assert "6.5 µs of the host; kernels 1, memsets 0, copies 0, allocations 2" in page
    assert "share of the matrix product" in page
    assert "bf16 ÷ in fp16" in page
    rows = path.with_name(path.name.replace(".run.json", ".json"))
    assert run.main(["--redraw", str(rows)]) == 0
    assert rows.with_suffix(".md").read_text() == page


def test_a_dtype_may_be_timed_in_burst_alone_and_a_usual_peer_left_out(
    run, made_up_gpu, tmp_path, monkeypatch
):
    pretend(run, monkeypatch)
    corner = ["--dtype", "fp16", "--dtype", "bf16", "--head-dim", "128", "--out", str(tmp_path)]
    assert run.main([*corner, "--burst", "fp16", "--without", "fa2"]) == 0
    (path,) = tmp_path.glob("nvidia-h200-????-??-??.json")
    rows = list(read_rows(path))
    regimes = {dtype: {row.regime for row in rows if row.dtype == dtype} for dtype in corner[1:4:2]}
    assert regimes["fp16"] == {"burst", "burst-sigma4"}
    assert regimes["bf16"] == {"sustained", "burst", "burst-sigma4"}
    assert {row.implementation for row in rows} == {"fagen", "cudnn"}
    assert len({row.cell for row in rows}) == 2 * 8
    page = path.with_suffix(".md").read_text()
    assert "fagen ÷ cuDNN sustained" in page and "bf16 ÷ in fp16" in page
    plots = [plot.stem.removeprefix(path.stem) for plot in tmp_path.glob("*.svg")]
    assert sorted(plots) == ["-bf16-burst", "-bf16-sustained", "-fp16-burst"]


def test_a_missing_profiler_costs_only_the_launch_costs(run, made_up_gpu, tmp_path, monkeypatch):
    def blind(plan, binary):
        raise DeviceError("the profiler sees nothing")

    pretend(run, monkeypatch)
    monkeypatch.setattr(run, "launch_costs", blind)
    assert run.main(["--head-dim", "128", "--seqlen", "512", "--out", str(tmp_path)]) == 0
    (page,) = tmp_path.glob("*.md")
    assert "no launch costs: the profiler sees nothing" in page.read_text()


def test_a_wrong_kernel_is_noted_the_others_are_timed_and_the_exit_code_is_6(
    run, made_up_gpu, schedules, tmp_path, monkeypatch
):
    pretend(run, monkeypatch)
    made_up_gpu.wrong.add(schedules[0])
    assert run.main(["--head-dim", "64", "--mask", "full", "--out", str(tmp_path)]) == 6
    (path,) = tmp_path.glob("nvidia-h200-????-??-??.json")
    assert {row.seqlen_k for row in read_rows(path)} == {4096, 16_384}
    assert f"wrong, and not timed: {schedules[0]} differs" in path.with_suffix(".md").read_text()


def test_where_nothing_can_be_timed_nothing_is_written(
    run, made_up_gpu, tmp_path, monkeypatch, capsys
):
    pretend(run, monkeypatch)
    assert run.main(["--head-dim", "24", "--out", str(tmp_path)]) == 1
    assert "no committed schedule: fp16 hd24 full" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def fp8(made_up_gpu, monkeypatch):
    """Kernels of e4m3 under the name that goes with how V lies in memory."""
    record = sys.modules["record"]
    plain = record.ours

    def ours(binary):
        made = plain(binary)
        return made if "_vrows" in binary.slug else replace(made, name=PREARRANGED)

    def quantise(case, q, k, v):
        return Call(lambda: None)

    monkeypatch.setattr(record, "ours", ours)
    monkeypatch.setitem(peers.PEERS, QUANTISE, quantise)
    monkeypatch.setattr(record, "installed", lambda name: False)


def test_in_e4m3_both_ways_of_v_stand_beside_cudnn_in_fp16_and_quantising_is_a_column(
    run, made_up_gpu, fp8, tmp_path, monkeypatch
):
    pretend(run, monkeypatch)
    corner = ["--dtype", "e4m3", "--head-dim", "64", "--mask", "full", "--out", str(tmp_path)]
    assert run.main(corner) == 0
    (path,) = tmp_path.glob("nvidia-h200-????-??-??.json")
    rows = read_rows(path)
    assert list(json.loads(path.read_text())[0]) == FIELDS
    assert {row.dtype for row in rows} == {"e4m3"}
    found = {(row.implementation, row.schedule is not None) for row in rows}
    assert found == {("fagen", True), (PREARRANGED, True), ("cudnn", False), (QUANTISE, False)}
    kinds = {("_vrows" in slug, "_sblock" in slug) for slug in made_up_gpu.built}
    assert len(kinds) == 4, "both ways of V, both kinds of scales"
    page = path.with_suffix(".md").read_text()
    for said in (
        "In e4m3 cuDNN is in fp16",
        "quantising Q, K, V sustained, µs",
        "fagen ÷ cuDNN fp16",
        "fagen, V transposed ÷ cuDNN fp16:",
        "What quantising Q, K and V adds",
        "scales by block of rows ÷ with one per head",
    ):
        assert said in page
    plot = (tmp_path / f"{path.stem}-e4m3-sustained.svg").read_text()
    assert "V transposed" in plot and "quantising" not in plot
    assert run.main(["--redraw", str(path)]) == 0
    assert path.with_suffix(".md").read_text() == page


def test_the_usual_peers_of_e4m3_are_others(run, monkeypatch):
    record = sys.modules["record"]
    monkeypatch.setattr(record, "installed", lambda name: name == "cudnn-e4m3")
    assert record.usual_peers(Problem("e4m3", 64, 64, "full")) == ["cudnn", "cudnn-e4m3", QUANTISE]
    assert record.usual_peers(Problem("bf16", 64, 64, "full")) == ["cudnn", "fa2"]


def test_committed_results_are_rows_of_the_promised_fields_beside_what_they_were_made_on():
    for path in RESULTS.glob("*.run.json"):
        assert not {"host", "user", "path"} & set(json.loads(path.read_text()))
        results = path.with_name(path.name.replace(".run.json", ".json"))
        if results.stem.endswith(("accuracy", "families")):
            continue  # errors; their scripts' tests have them
        rows = json.loads(results.read_text())
        assert all(list({**row, "pass": "forward"}) == FIELDS for row in rows)
        rows = read_rows(results)
        assert all(row.tflops > 0 for row in rows)
        assert "burst" in (regimes := regimes_of(rows))
        assert all(geomean(ratios(rows, regime).values()) > 0 for regime in regimes)
