"""The benchmark scripts without a GPU: what they would time, and their pages of made-up times."""

import importlib.util
import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fagen import dispatch, dispatch_table, flow
from fagen.errors import DeviceError
from fagen.measure import cells, peers
from fagen.measure.card import Card
from fagen.measure.launch import LaunchCost
from fagen.measure.peers import Implementation
from fagen.measure.rows import (
    PREARRANGED,
    QUANTISE,
    Row,
    geomean,
    ratios,
    read_rows,
    write_rows,
)
from fagen.measure.timing import Call, Timing
from fagen.paths import locate
from fagen.kinds.forward.plan import plan
from fagen.schedule import Schedule

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
SECONDS = {"cudnn": 1.1e-3, "fa2": 2.0e-3}


@pytest.fixture
def script(monkeypatch):
    """Load a script of benchmarks/ as a module."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name):
        spec = importlib.util.spec_from_file_location(
            f"benchmarks_{name}", BENCHMARKS / f"{name}.py"
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in ("plots", "record"):
        sys.modules.pop(name, None)


@pytest.fixture
def run(script):
    """benchmarks/run.py."""
    return script("run")


@pytest.fixture
def gpu(script, monkeypatch):
    """A GPU, a compiler and clocks that are made up; what a test may still change of them."""
    script("run")  # brings in what is patched
    record = sys.modules["record"]
    fake = SimpleNamespace(wrong=set(), built=[], rounds=set())

    def hopper():
        return Card("NVIDIA H200", "580.1", 132)

    def built(schedule, *, binding):
        fake.built.append(schedule.slug)
        return plan(schedule), SimpleNamespace(slug=schedule.slug)

    def bind(name, off=0.0):
        def call(case, q, k, v):
            if name == "cudnn" and case.ragged_causal:
                raise DeviceError("aligned to the top left")
            return Call(lambda: torch.full((1, case.shape.seqlen_q, 1, 1), off))

        return call

    def time_calls(calls, regime, *, clock, seed):
        fake.rounds.add((regime.name, regime.rounds))
        return {
            label: Timing(SECONDS.get(label, 1.01e-3 if "_no" in label else 1e-3), 0.01, 1500)
            for label in calls
        }

    def ours(binary):
        return Implementation("fagen", bind("fagen", float(binary.slug in fake.wrong)), binary.slug)

    monkeypatch.setattr(record, "hopper", hopper)
    monkeypatch.setattr(flow, "built", built)
    monkeypatch.setattr(record, "ours", ours)
    for name in ("cudnn", "fa2"):
        monkeypatch.setitem(peers.PEERS, name, bind(name))
    monkeypatch.setattr(cells, "inputs", lambda case, seed: (None, None, None))
    monkeypatch.setattr(cells, "time_calls", time_calls)
    monkeypatch.setattr(dispatch, "_served", {})
    return fake


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
    folder.mkdir()
    for slug in (few, many):
        keys = Schedule.from_slug(slug)
        (folder / f"{slug}.toml").write_text(
            f'[attention]\nhead_dim = 64\ndtype = "fp16"\nmask = "full"\n'
            f"[tile]\nblock_m = 128\nblock_n = {keys.tile.block_n}\n"
        )
    problem = ("fp16", 64, 64, "full")
    rows = [(0, 2048, few), (2049, inf, many)]
    dispatch_table.update(
        folder / dispatch_table.NAME,
        [dispatch_table.Row("NVIDIA H200", *problem, *row) for row in rows],
    )
    for module in (dispatch, flow):
        monkeypatch.setattr(module, "locate", lambda name: folder)
    dispatch._schedules.cache_clear()
    yield few, many
    dispatch._schedules.cache_clear()


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
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert run.main(["--out", str(tmp_path)]) == 5
    assert "Hopper" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_cudnn_counts_its_version_in_one_number(run):
    assert sys.modules["record"]._dotted(91900) == "9.19.0"
    assert sys.modules["record"]._dotted(None) == "none"


def test_the_grid_times_what_attention_would_take_and_all_schedules_only_if_asked(
    run, gpu, schedules, tmp_path, monkeypatch
):
    pretend(run, monkeypatch)
    corner = ["--head-dim", "64", "--mask", "full", "--out", str(tmp_path)]
    few, many = schedules
    assert run.main(corner) == 0
    (path,) = tmp_path.glob("nvidia-h200-????-??-??.json")
    timed = {(row.schedule, row.seqlen_k) for row in read_rows(path) if row.schedule}
    assert timed == {(few, 512), (few, 2048), (many, 4096), (many, 16_384)}
    assert set(gpu.built) == {few, many}
    page = path.with_suffix(".md").read_text()
    assert f"`{few}`: 512, 2048 keys" in page
    assert run.main([*corner, "--all-schedules"]) == 0
    assert sum(row.schedule is not None for row in read_rows(path)) == 2 * 2 * 4


def test_a_grid_page_holds_shares_launch_costs_and_both_dtypes(run, gpu, tmp_path, monkeypatch):
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


def test_a_missing_profiler_costs_only_the_launch_costs(run, gpu, tmp_path, monkeypatch):
    def blind(plan, binary):
        raise DeviceError("the profiler sees nothing")

    pretend(run, monkeypatch)
    monkeypatch.setattr(run, "launch_costs", blind)
    assert run.main(["--head-dim", "128", "--seqlen", "512", "--out", str(tmp_path)]) == 0
    (page,) = tmp_path.glob("*.md")
    assert "no launch costs: the profiler sees nothing" in page.read_text()


def test_a_wrong_kernel_is_noted_the_others_are_timed_and_the_exit_code_is_6(
    run, gpu, schedules, tmp_path, monkeypatch
):
    pretend(run, monkeypatch)
    gpu.wrong.add(schedules[0])
    assert run.main(["--head-dim", "64", "--mask", "full", "--out", str(tmp_path)]) == 6
    (path,) = tmp_path.glob("nvidia-h200-????-??-??.json")
    assert {row.seqlen_k for row in read_rows(path)} == {4096, 16_384}
    assert f"wrong, and not timed: {schedules[0]} differs" in path.with_suffix(".md").read_text()


def test_where_nothing_can_be_timed_nothing_is_written(run, gpu, tmp_path, monkeypatch, capsys):
    pretend(run, monkeypatch)
    assert run.main(["--head-dim", "24", "--out", str(tmp_path)]) == 1
    assert "no committed schedule: fp16 hd24 full" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---- e4m3


@pytest.fixture
def fp8(gpu, monkeypatch):
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
    run, gpu, fp8, tmp_path, monkeypatch
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
    kinds = {("_vrows" in slug, "_sblock" in slug) for slug in gpu.built}
    assert len(kinds) == 4, "both ways of V, both kinds of scales"
    page = path.with_suffix(".md").read_text()
    for said in (
        "In e4m3 cuDNN is in fp16",
        "quantising Q, K, V sustained, µs",
        "fagen ÷ cuDNN",
        "fagen, V prearranged ÷ cuDNN",
        "What quantising Q, K and V adds",
        "scales by block of rows ÷ with one per head",
    ):
        assert said in page
    plot = (tmp_path / f"{path.stem}-e4m3-sustained.svg").read_text()
    assert "V prearranged" in plot and "quantising" not in plot
    assert run.main(["--redraw", str(path)]) == 0
    assert path.with_suffix(".md").read_text() == page


def test_the_usual_peers_of_e4m3_are_others(run, monkeypatch):
    record = sys.modules["record"]
    monkeypatch.setattr(record, "installed", lambda name: name == "cudnn-e4m3")
    assert record.usual_peers("e4m3") == ["cudnn", "cudnn-e4m3", QUANTISE]
    assert record.usual_peers("bf16") == record.usual_peers() == ["cudnn", "fa2"]


# ---- beyond the grid, and the ablation


def test_beyond_the_grid_every_cell_is_another_and_as_issued(script):
    found = script("beyond").groups("fp16")
    every = [case for group in found.values() for case in group.cells]
    assert len(every) == len(set(every)) == 34
    heads = {case.head_dim: case.shape.heads for case in found["head-dims"].cells}
    assert heads == {96: 21, 192: 11}
    assert {case.shape.seqlen_k for case in found["odd"].cells} == {1000, 3001}
    assert {case.shape.batch * case.shape.heads for case in found["few-tiles"].cells} == {4}
    assert {(c.shape.heads, c.shape.kv_heads) for c in found["grouped"].cells} == {(32, 8), (64, 8)}
    assert all(case.ragged_causal for case in found["uneven-causal"].cells)
    assert not any(case.causal for case in found["uneven"].cells)


def test_beyond_the_grid_each_group_has_its_table_and_what_was_left_out_its_reason(
    script, gpu, tmp_path, monkeypatch
):
    beyond = script("beyond")
    there = [one for one in flow.committed() if one.attention.head_dim in (64, 128, 256)]
    monkeypatch.setattr(flow, "committed", lambda: tuple(there))
    assert beyond.main(["--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("nvidia-h200-*-beyond.json")
    rows = read_rows(path)
    assert list(json.loads(path.read_text())[0]) == FIELDS
    assert len({row.problem for row in rows}) == 34 - 8
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


def test_some_groups_alone(script, gpu, tmp_path):
    beyond = script("beyond")
    assert beyond.main(["--group", "few-tiles", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-beyond.json")
    assert {row.batch * row.heads for row in read_rows(path)} == {4}


def test_the_ablation_says_what_each_feature_is_worth(script, gpu, tmp_path):
    ablation = script("ablation")
    assert ablation.main(["--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("nvidia-h200-*-ablation.json")
    assert gpu.rounds == {("sustained", 9), ("burst", 15)}
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


def test_the_schedules_of_the_ablation_are_committed_and_never_the_usual_choice(script):
    ablation = script("ablation")
    assert ablation.WHOLE.slug == "fwd_fp16_d128_full_m128n128"
    for schedule in ablation.WITHOUT.values():
        assert (locate("schedules") / f"{schedule.slug}.toml").exists()
        assert dispatch._rank(schedule) > dispatch._rank(ablation.WHOLE)


def test_committed_results_are_rows_of_the_promised_fields_beside_what_they_were_made_on():
    for path in RESULTS.glob("*.run.json"):
        assert not {"host", "user", "path"} & set(json.loads(path.read_text()))
        results = path.with_name(path.name.replace(".run.json", ".json"))
        if results.stem.endswith("accuracy"):
            continue  # errors; the next test has them
        assert all(list(row) == FIELDS for row in json.loads(results.read_text()))
        rows = read_rows(results)
        assert all(row.tflops > 0 for row in rows)
        for regime in ("sustained", "burst"):
            assert geomean(ratios(rows, regime).values()) > 0


def test_committed_errors_are_lines_of_the_experiment_and_emulated_to_a_tenth(script):
    module = script("fp8_accuracy")
    for path in RESULTS.glob("*accuracy.json"):
        lines = [module.Line(**line) for line in json.loads(path.read_text())]
        measured = [line for line in lines if line.kernel]
        assert measured and {line.long for line in measured} == {False, True}
        assert all(abs(line.kernel / line.emulated - 1) <= 0.1 for line in measured)


# ---- the accuracy of e4m3


@pytest.fixture
def accuracy(script, gpu, monkeypatch):
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
    accuracy, gpu, tmp_path, monkeypatch
):
    monkeypatch.setattr(accuracy, "LENGTHS", (128, 256))
    assert accuracy.main(["--device", "cuda", *SMALL, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("nvidia-h200-*-fp8-accuracy.json")
    lines = json.loads(path.read_text())
    assert len(lines) == 7 + 2 * 5
    assert len(set(gpu.built)) == len(gpu.built) == 4 + 4, "fp16, scales, maxima, promotions"
    with_kernels = [line for line in lines if line["kernel"]]
    assert len(with_kernels) == 6 + 2 * 4
    short = [line for line in with_kernels if not line["long"]]
    for line in short:
        assert line["kernel"] == pytest.approx(1.01 * line["emulated"])
    page = path.with_suffix(".md").read_text()
    for said in ("kernel ÷ emulated", "1.010", "the goal, below", "promoted every 64 keys, kernel"):
        assert said in page
    about = json.loads(path.with_suffix(".run.json").read_text())
    assert about["card"] == "NVIDIA H200" and "256 keys" in about["asked"]["parts"]
    path.with_suffix(".md").unlink()
    assert accuracy.main(["--redraw", str(path)]) == 0
    assert path.with_suffix(".md").read_text() == page


def test_emulated_alone_it_is_a_table_on_a_cpu(accuracy, tmp_path, capsys):
    out = tmp_path / "found.json"
    assert accuracy.main([*SMALL, "--out", str(out)]) == 0
    found = json.loads(out.read_text())["rmse"]
    assert len(found) == 7
    printed = capsys.readouterr().out
    assert "kernel" not in printed.splitlines()[0]
    assert f"| {accuracy.COMPLETE} | {found[f'256 keys, {accuracy.COMPLETE}']:.2e} |" in printed


def test_what_quantisers_give_is_spread_to_batch_heads_and_blocks(accuracy):
    x = torch.randn(2, 70, 4, 32).half()
    common = dict(dtype="e4m3", head_dim=32, mask="full", block_m=128, block_n=128)
    for scales, rows in (("tensor", "columns"), ("head", "rows"), ("block", "columns")):
        of = plan(Schedule.make(**common, scales=scales, v_layout=rows))
        given = accuracy.quantised(of, x, x, x, True)
        expected = accuracy.operands(of, x, x, x, rotated=True)
        for one, other in zip(given, expected, strict=True):
            assert one.shape == other.shape or (one.dim(), one.numel()) == (3, 1)
            torch.testing.assert_close(
                one.float().expand(other.shape), other.float(), rtol=0.13, atol=1e-3
            )
