"""The scripts of benchmarks/ without a GPU: what they would time, and what they wrote."""

import ctypes
import json
import math
import re
import shutil

import pytest
import torch

from fagen import registry
from fagen.dispatch.tables import NAME, table_at
from fagen.errors import FagenError, VerificationError
from fagen.measure.rows import Row, geomean, ratios, read_rows, regimes_of
from fagen.paths import locate
from fagen.problem import Cell, Problem, Sizes
from fagen.process import run
from fagen.render import environment
from fagen.toolchain import find_gxx
from tests.attention_helpers import picked
from tests.benchmark_helpers import BENCHMARKS, FIELDS, RESULTS, refused_without_a_gpu
from tests.colours import contrast
from tests.tensors import normal

MEASURING = {  # scripts, and what each needs beside --out to begin at once
    **dict.fromkeys(("ablation", "backward_shapes", "choice", "data", "decode"), ()),
    **dict.fromkeys(("decode_ablation", "decode_micro", "fp8_end_to_end", "head_dims"), ()),
    **dict.fromkeys(("gradients", "peers", "run", "varlen", "windows"), ()),
    **dict.fromkeys(("fp8_accuracy", "fp8_families"), ("--device", "cuda")),
    "shapes": ("--before", "."),
}
OTHERS = {"against": "REVISION", "pages": "--check"}
FOR_ALL = {
    "draws",
    "headline",
    "launch",
    "peer_calls",
    "plots",
    "record",
    "revision",
    "tables",
}  # modules, no scripts


def test_every_script_is_listed_here():
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")}
    assert scripts == {*MEASURING, *OTHERS, *FOR_ALL}


@pytest.mark.parametrize("name", [*MEASURING, *OTHERS])
def test_a_script_says_what_it_takes(name, script, capsys):
    with pytest.raises(SystemExit) as end:
        script(name).main(["--help"])
    printed = capsys.readouterr().out
    assert end.value.code == 0 and f"python benchmarks/{name}.py" in printed
    assert name == "pages" or "--out" in printed


@pytest.mark.parametrize("name", MEASURING)
def test_without_a_hopper_gpu_a_script_says_so_exits_with_5_and_writes_nothing(
    name, script, tmp_path, capsys
):
    assert refused_without_a_gpu(script(name), tmp_path / "out", capsys, *MEASURING[name])


# ---- what is committed ---------------------------------------------------------------------------


def test_committed_results_are_rows_of_the_promised_fields_beside_what_they_were_made_on():
    for path in RESULTS.glob("*.run.json"):
        assert not {"host", "user", "path"} & set(json.loads(path.read_text()))
        results = path.with_name(path.name.replace(".run.json", ".json"))
        if results.stem.endswith(("accuracy", "families")):
            continue  # errors: below, and in test_fp8_families.py
        rows = json.loads(results.read_text())
        assert all(list({**row, "pass": "forward"}) == FIELDS for row in rows)
        rows = read_rows(results)
        assert all(row.tflops > 0 for row in rows)
        assert "burst" in (regimes := regimes_of(rows))
        assert all(geomean(ratios(rows, regime).values()) > 0 for regime in regimes)


def test_committed_errors_are_lines_of_the_experiment_and_emulated_to_a_tenth(script):
    module = script("fp8_accuracy")
    for path in RESULTS.glob("*accuracy.json"):
        lines = [module.Line(**line) for line in json.loads(path.read_text())]
        measured = [line for line in lines if line.kernel]
        assert measured and {line.long for line in measured} == {False, True}
        both = [line for line in measured if line.emulated]
        assert {line.long for line in both} == {False, True}
        assert all(abs(line.kernel / line.emulated - 1) <= 0.1 for line in both)


def test_a_page_of_results_is_what_its_data_says_and_shows_its_own_plots(
    script, monkeypatch, tmp_path, capsys
):
    pages = script("pages")
    import plots  # of benchmarks/, as its scripts find it

    def undrawn(rows, folder, stem, **_):  # plots take their time: they are compared below
        return tuple(plots.places(rows, folder, stem).values())

    monkeypatch.setattr(plots, "plot", undrawn)
    shown = set()
    for page in sorted(RESULTS.glob("*.md")):
        text = page.read_text("utf-8")
        assert text.startswith("# ") and text.count("\n# ") == 0
        drawings = re.findall(r"\]\(([^)]*\.svg)\)", text)
        assert all(name.startswith(page.stem) and (RESULTS / name).exists() for name in drawings)
        shown.update(drawings)
        if page not in pages.pages():
            continue
        drawn = dict(pages.drawn(page, tmp_path))
        assert {place.name for place in drawn.values()} == {page.name}
        for path, place in drawn.items():
            assert pages.alike(path, place), f"{page.name}: run make pages"
    others = {path.name for path in RESULTS.glob("*.svg")} - shown
    assert {name for name in others if "train" not in name} == {"speeds.svg"}  # the README's


@pytest.mark.long
def test_every_plot_is_what_its_data_says(script, capsys):
    assert script("pages").main(["--check"]) == 0, capsys.readouterr().out


def test_what_sums_a_run_up_comes_before_its_table():
    page = (RESULTS / "nvidia-h200-2026-11-26-backward.md").read_text("utf-8")
    assert page.index("fagen ÷ cuDNN:") < page.index(".svg)") < page.index("mask |     S |")


def test_a_plot_is_drawn_for_light_and_for_dark_screens(script, tmp_path):
    plots = script("plots")
    stem = "nvidia-h200-2026-11-26-backward"
    rows = [row for row in read_rows(RESULTS / f"{stem}.json") if row.head_dim == 64][:8]
    (path, *_) = plots.plot(rows, tmp_path, "x", subtitle="of few rows", ceilings={})
    text = path.read_text("utf-8")
    assert "@media (prefers-color-scheme: dark)" in text
    used = set(re.findall(r"#[0-9a-f]{6}", text.partition("</defs>")[2]))
    assert {plots.GROUND, plots.INK, plots.ACCENT} <= used
    light, dark = plots.GROUND, plots.DARK[plots.GROUND]
    for colour, other in plots.DARK.items():
        assert f'[style*="fill: {colour}"] {{ fill: {other} !important }}' in text
        if colour not in (plots.GROUND, plots.FAINT):
            assert contrast(colour, light) > 3 and contrast(other, dark) > 3
    for colour in used - plots.DARK.keys():  # what has one colour stands out from either ground
        assert min(contrast(colour, light), contrast(colour, dark)) > 1.8
    for committed in RESULTS.glob("*.svg"):
        text = committed.read_text("utf-8")
        transparent = "#ffffff" not in text
        assert transparent or "prefers-color-scheme: dark" in text, committed.name


# ---- what is timed -------------------------------------------------------------------------------


def test_the_default_grid_is_the_24_fp16_cells_of_both_masks(script):
    run = script("run")
    cells = run.grid(run.main.arguments([]))
    assert len(cells) == 24 and {cell.problem.dtype for cell in cells} == {"fp16"}


@pytest.mark.usefixtures("nothing_is_ready")
def test_the_schedules_of_the_ablation_are_committed_and_never_the_usual_choice(
    script, schedules_folder
):
    ablation = script("ablation")
    for schedule in (ablation.WHOLE, *ablation.WITHOUT.values()):
        path = locate("schedules") / "forward" / f"{schedule.slug}.toml"
        shutil.copy(path, schedules_folder / "forward")
    keys = ablation.WHOLE.attention
    chosen = picked(dtype=keys.dtype, head_dim=keys.head_dim, seqlen=16_384)
    assert chosen.slug == ablation.WHOLE.slug


def test_the_figures_are_of_90_shapes_and_as_far_from_flashattention_3_as_was_found(script):
    shapes = script("shapes")
    figures = shapes.figures()
    assert len(figures) == len({figure.cell for figure in figures}) == 90
    assert math.isclose(geomean(f.ahead for f in figures), 1.116, abs_tol=1e-3)
    worst = min(figures, key=lambda figure: figure.ahead)
    assert worst.cell.problem.mask == "causal" and worst.ahead == 399 / 519


@pytest.mark.parametrize("dims", ["80", "96", "112", "160", "192", "192/128"])
def test_a_space_of_each_head_dim_has_what_serves_its_gradients_and_few_others(script, dims):
    head_dims = script("head_dims")
    options = head_dims.main.arguments(["--pass", "backward", "--spaces", "--dims", dims])
    for cell in head_dims.cells(options):
        slugs = [schedule.slug for schedule in head_dims.of_spaces(cell.problem, options.most)]
        assert head_dims.in_line(cell, "")[0].slug in slugs
        assert 3 <= len(set(slugs)) == len(slugs) <= 6
        assert len(list(head_dims.of_spaces(cell.problem, 2))) == 2


def test_committed_rows_of_few_queries_are_those_that_are_predicted(
    script, tmp_path, monkeypatch, capsys
):
    """As long as they say that they are; measured ones are by a committed result."""
    choice = script("choice")
    committed = [row for row in table_at(locate("schedules") / NAME) if row.for_few_tiles]
    assert committed
    predicted = [row for row in committed if "predicted" in row.by]
    for row in committed:
        source, _, _ = row.by.partition("#")
        assert row in predicted or (locate("schedules").parent / source).is_file()
    if predicted:
        monkeypatch.setattr(choice, "locate", lambda name: tmp_path)
        assert choice.main(["--predicted", "--write"]) == 0
        assert set(predicted) <= set(table_at(tmp_path / NAME))
        assert "tiles" in capsys.readouterr().out


# scores of a family, (queries, keys), have what is said of it
@pytest.mark.parametrize("family", ["sigma=1", "sigma=8", "sink", "rising", "falling", "local"])
def test_scores_are_as_their_family_is_told(script, family):
    data, length = script("data"), 512
    q, k, v = (normal(1, length, 2, 64, seed=seed) for seed in range(3))
    query, key, value, scale = data.scored(family, q, k, v)
    assert value is v and query.shape == q.shape
    scores = scale * query[0, :, 0].double() @ key[0, :, 0].double().T
    by_key, place = scores.mean(0), torch.arange(length) / (length - 1)
    if family.startswith("sigma"):
        sigma = float(family.removeprefix("sigma="))
        assert math.isclose(float(scores.std()), sigma, rel_tol=0.05)
    elif family == "sink":
        assert math.isclose(float(by_key[0]), 12, abs_tol=0.5)
        assert abs(float(by_key[1:].mean())) < 0.1
    elif family == "local":
        near, *far = (float(scores.diagonal(offset).mean()) for offset in (0, 200, -200))
        assert math.isclose(near, 12, abs_tol=0.5) and max(far) < near - 3
        assert math.isclose(*far, abs_tol=0.7)
    else:
        slope = place if family == "rising" else 1 - place
        assert float((by_key - 16 * slope).abs().max()) < 0.5


# ---- a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [dict, Row])
def test_a_run_is_read_back_as_it_was_saved_and_says_by_its_code_what_was_wrong(
    script, row, tmp_path
):
    record = script("record")
    about = {"card": "NVIDIA H200", "date": "2026-11-27", "notes": {}}
    run = record.Run(tmp_path / "out", "a-run", about, row)
    timed = {"µs": 1.5} if row is dict else read_rows(RESULTS / "nvidia-h200-2026-11-22.json")[0]

    def step(number: int) -> None:
        if number == 1:
            raise VerificationError("one is off")
        run.rows.append(timed)

    run.each(range(3), step)
    again = record.Run.read(run.folder / "a-run.json", row)
    assert (again.rows, again.about, again.stem) == ([timed] * 2, run.about, "a-run")
    assert again.about["notes"] == {"wrong, and not timed": ["one is off"]}
    assert again.finish() == VerificationError.exit_code == 6
    assert again.write_page("Times", "", "all").endswith("H200, 2026-11-27\n\nall\n")
    with pytest.raises(FagenError, match="nothing could be timed"):
        record.Run(tmp_path, "b-run", about, row).each([], step)


# ---- programs of their own -----------------------------------------------------------------------


def test_every_source_of_decode_micro_is_a_program_and_one_compiles(script, monkeypatch, tmp_path):
    micro = script("decode_micro")
    assert {path.stem for path in micro.SOURCES.glob("*.cu")} == set(micro.PROGRAMS)
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine may have a GPU")
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path))
    binary, remark = micro._compiled("clusters")
    assert binary and not remark
    (row,) = micro.measured(binary)
    assert row["what"] == "all that was to follow" and row["error"].startswith("the first kernel")


# as kernels were before their kind shared one struct: fewer fields, in another order
OLD = """
struct FagenForwardArgs {
  unsigned struct_bytes, reserved;
  const void *q, *k, *v;
  void* out;
  float* lse;
  long q_stride_batch, q_stride_seq, q_stride_head, k_stride_batch, k_stride_seq, k_stride_head;
  long v_stride_batch, v_stride_seq, v_stride_head, out_stride_batch, out_stride_seq;
  long out_stride_head, lse_stride_batch, lse_stride_head;
  int batch, heads, kv_heads, seqlen_q, seqlen_k;
  float scale;
};
"""
NOTING = """
static FagenForwardArgs noted;
extern "C" int fagen_stub(const FagenForwardArgs* args, void*) { noted = *args; return 7; }
extern "C" long told(int what) {
  const long known[] = {(long)noted.q, noted.k_stride_head, noted.v_stride_seq, noted.seqlen_k,
                        long(noted.scale * 8), noted.lse_stride_head, %s};
  return known[what];
}
"""


@pytest.mark.parametrize("old", [True, False])
def test_a_kernel_of_another_revision_is_called_by_the_names_of_its_structs_fields(
    script, old, tmp_path
):
    header = OLD
    if not old:
        plan = registry.plan_of("fwd_e4m3_d64_full_m64n64_vrows")
        header = environment().get_template("abi.h.j2").render(plan=plan)
    noting = NOTING % ("0, 0" if old else "(long)noted.k_descale, noted.version")
    (tmp_path / "before.cu").write_text(f"#include <cstdint>\n{header}\n{noting}")
    gxx, _ = find_gxx()
    command = [gxx, "-std=c++17", "-shared", "-fPIC", "-x", "c++", "-include", "before.cu"]
    command += ["-DFAGEN_FUNCTION=fagen_stub", BENCHMARKS / "adapter.cu", "-o", "kernel.so"]
    compiled = run(command, cwd=tmp_path)
    assert compiled.returncode == 0, compiled.stderr
    q, k, v = (torch.zeros(2, s, h, 64) for s, h in ((5, 4), (7, 2), (7, 2)))
    scales = () if old else tuple(torch.ones(1, 1, 1) for _ in range(3))
    into = torch.zeros(2, 5, 4, 64), torch.zeros(2, 4, 5)
    cell = Cell(Problem("fp16", 64, 64, "full", v_layout="rows"), Sizes(2, 4, 2, 5, 7))
    library = tmp_path / "kernel.so"
    tensors = (q, k, v, 0.25, *scales)
    call = script("against").call_before(library, cell, tensors, into, 0)
    with pytest.raises(Exception, match="status 7"):
        call()
    field = ctypes.CDLL(str(library)).told
    field.restype = ctypes.c_long
    fields = [field(i) for i in range(8)]
    assert fields[:6] == [q.data_ptr(), 64, 128, 7, 2, 5]
    assert fields[6:] == ([0, 0] if old else [scales[1].data_ptr(), 3])


def test_a_table_below_a_page_compares_cell_by_cell(script):
    script("record")  # the folder of scripts is on the path from here on
    import tables

    def row(dtype: str, tflops: float, **changes: object) -> Row:
        usual = dict(head_dim=128, head_dim_v=128, mask="full", batch=1, seqlen_q=16_384)
        usual |= dict(seqlen_k=16_384, heads=16, kv_heads=16, implementation="fagen")
        usual |= dict(schedule=None, regime="sustained", spread=0.01, sm_clock_mhz=1_500)
        return Row(dtype=dtype, tflops=tflops, **{**usual, **changes})

    rows = [row("fp16", 500.0), row("bf16", 505.0), row("fp16", 400.0, mask="causal")]
    rows += [row("bf16", 380.0, mask="causal"), row("fp16", 300.0, head_dim=64, head_dim_v=64)]
    text = tables.beside_fp16(rows)
    assert [line.split()[-2] for line in text.splitlines() if "1." in line or "0.9" in line] == [
        *("1.010", "0.950", "0.980")
    ]
    shares = tables.share_of_matmul(rows, {"fp16": {"sustained": 625.0}})
    assert " 80% |" in shares and "bf16" not in shares
    assert tables.beside_fp16(rows[:1]) == tables.share_of_matmul(rows[2:4], {}) == ""


def test_errors_of_e4m3_are_emulated_on_a_cpu_and_written_where_asked(script, tmp_path, capsys):
    few = ["--queries", "16", "--heads", "1", "--seeds", "1", "--head-dim", "32"]
    for more in (["--keys", "128"], ["--long", "--longest", "1024"]):
        code = script("fp8_accuracy").main([*few, *more, "--out", str(tmp_path / "x.json")])
        errors = json.loads((tmp_path / "x.json").read_text())["rmse"]
        assert code == 0 and len(errors) > 4 and max(errors.values()) < 0.1
    assert "complete" in capsys.readouterr().out
