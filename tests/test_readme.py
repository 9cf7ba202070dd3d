"""The README and the guide pages: what they show is really printed, what they name is there."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import ismodule
from pathlib import Path

import click
import pytest

import cli
import fagen
from fagen import registry, toolchain
from fagen.measure.rows import Row, write_rows
from fagen.paths import locate
from fagen.search.files import read_spaces

ROOT = locate("cli.py").parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def load(path: Path):
    """Import a script by its path."""
    spec = spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fill = load(ROOT / "docs" / "fill.py")


@pytest.mark.parametrize("page", fill.PAGES, ids=lambda page: page.name)
def test_a_page_shows_what_is_really_printed(page):
    text = page.read_text(encoding="utf-8")
    assert fill.filled(text) == text, "run `make docs`, and read what changed"


RESULTS = ROOT / "benchmarks" / "results"
LINKED = [*fill.PAGES, ROOT / "CHANGELOG.md", *sorted(RESULTS.glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ +(.+)$", text, re.M)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {word.replace(" ", "-") for word in words}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_a_link_leads_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), target


def test_the_map_in_the_readme_names_every_page_of_docs_once():
    (mapped,) = re.findall(r"^## Documentation\n(.*?)(?=^## |\Z)", README, re.M | re.S)
    named = re.findall(r"^\| \[.+?\]\((docs/[\w-]+\.md)\) \|", mapped, re.M)
    there = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert sorted(named) == sorted(there)


def test_the_readme_begins_with_what_is_there_then_how_to_call_it_then_its_speed():
    beginning, *sections = README.split("\n## ")
    assert [section.partition("\n")[0] for section in sections[:2]] == ["Install and call", "Speed"]
    assert len(beginning.splitlines()) < 30
    rows = re.findall(r"^\| (.+?) \| (\S.*?) \| ", beginning, re.M)
    assert {state for _, state in rows} == {"**there**", "limited", "not there"}
    missing = " ".join(name for name, state in rows if state == "not there")
    for name in ("windows", "sinks", "softcap", "ALiBi", "bias", "paged KV"):
        assert name in missing
    (call,) = re.findall(r"^```python\n(import torch, fagen\n.*?)^```$", sections[0], re.M | re.S)
    assert call.endswith("fagen.attention(q, k, v, causal=True)\n") and call.count("\n") == 5
    assert re.search(r"^pip install '\.\[torch,cuda\]'", sections[0], re.M)
    assert re.search(r"^make demo .*\nmake test ", sections[0], re.M)
    assert re.findall(r"!\[.+\]\((.+)\)", README) == ["benchmarks/results/speeds.svg"]


def test_the_page_on_commands_names_every_command():
    page = (ROOT / "docs" / "commands.md").read_text("utf-8")
    for name, command in cli.main.commands.items():
        inner = command.commands if isinstance(command, click.Group) else {"": None}
        for word in inner:
            assert f"`fagen {name} {word}".rstrip() in page


def test_the_page_on_commands_tells_each_exit_code():
    page = (ROOT / "docs" / "commands.md").read_text("utf-8")
    errors = [found for found in vars(fagen.errors).values() if isinstance(found, type)]
    codes = {error.exit_code for error in errors if issubclass(error, fagen.errors.FagenError)}
    told = {int(code) for code in re.findall(r"^\| (\d) \|", page, re.M)}
    assert told == codes | {click.UsageError.exit_code}


def test_the_page_on_calls_names_all_that_is_public():
    page = (ROOT / "docs" / "op.md").read_text("utf-8").partition("## All public names\n")[2]
    named = set(re.findall(r"`(\w+)(?:\(\w+\))?`", page))
    assert {*fagen.__all__} - {"__version__"} <= named


def test_the_tour_shows_a_schedule_its_kernel_and_two_refusals():
    tour = (ROOT / "docs" / "tour.md").read_text("utf-8")
    (path,) = re.findall(r"^<!-- file: (schedules/\S+) -->\n+```toml$", tour, re.M)
    (kernel,) = re.findall(r"^<!-- kernel: (\S+) -->\n+```cpp$", tour, re.M)
    assert registry.read(ROOT / path).slug == kernel
    assert 'did you mean "causal"?' in tour
    assert "  fits with block_n = " in tour


def test_the_page_on_searching_shows_a_space_with_shapes_that_a_search_takes():
    page = (ROOT / "benchmarks" / "notes" / "search.md").read_text("utf-8")
    shown = re.findall(r"^<!-- file: (\S+) -->$", page, re.M)
    (name,) = [name for name in shown if "[[shapes]]" in (ROOT / name).read_text("utf-8")]
    (space,) = read_spaces(ROOT / name)
    assert [shape.weight for shape in space.shapes] == [3, 1]
    assert [shape.seqlen_k for shape in space.shapes] == [None, 8192]


def test_no_figure_of_speed_stands_outside_the_block_that_results_fill():
    told = re.sub(r"^<!-- results -->.*?^<!-- end -->", "", README, flags=re.M | re.S)
    assert not re.findall(r"\d[\d.,]* ?(?:TFLOP/s\b|×|(?:times )?(?:as fast|faster))", told)


def test_the_newest_committed_runs_give_figures_and_the_picture(tmp_path, monkeypatch):
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(fill, "ROOT", tmp_path)
    assert list(fill._results()) == ["No run is committed yet."]
    cell = ("fp16", 128, 128, "full", 4, 4096, 4096, 16, 16)
    for date, tflops in (("2026-01-31", 500.0), ("2026-02-01", 600.0)):
        rows = [
            Row(*cell, "fagen", "slug", "burst", tflops, 0.01, 1600),
            Row(*cell, "cudnn", None, "burst", 500.0, 0.01, 1600),
        ]
        write_rows(results / f"some-card-{date}.json", rows)
    backward = [
        Row(*cell, name, slug, regime, tflops, 0.01, 1600, pass_="backward")
        for regime, tflops in (("burst", 550.0), ("sustained", 480.0))
        for name, slug, tflops in (("fagen", "slug", tflops), ("cudnn", None, 500.0))
    ]
    write_rows(results / "some-card-2026-02-01-backward.json", backward)
    made_on = dict(card="Some Card", driver="1", cuda="2", torch="3", cudnn="4", date="5")
    for name in ("some-card-2026-02-01", "some-card-2026-02-01-backward"):
        (results / f"{name}.run.json").write_text(json.dumps(made_on))
    text = " ".join("\n".join(fill._results()).split())
    assert "some-card-2026-02-01.md" in text and "FlashAttention-3 ran" not in text
    assert "Some Card, driver 1, CUDA 2, torch 3, cuDNN 4, 5" in text
    assert "| forward fp16 ÷ cuDNN | 1 | **1.20** | 1.20 | – | – |" in text
    assert "| gradients fp16 ÷ cuDNN | 1 | **1.10** | 1.10 | **0.96** | 0.96 |" in text
    fa3 = "# what\n# Other Card\nhead_dim,mask,seqlen,sustained,sm_clock_mhz,burst\n"
    (results / "some-card-2026-02-02-fa3.csv").write_text(fa3 + "128,full,4096,500,1500,400\n")
    text = " ".join("\n".join(fill._results()).split())
    assert "FlashAttention-3 ran in a process of its own: Other Card (" in text
    assert "| forward fp16 ÷ FlashAttention-3 | 1 | **1.50** | 1.50 | – | – |" in text
    assert "](benchmarks/results/speeds.svg)" in text


def test_a_stale_picture_is_said_and_drawn_anew(tmp_path, monkeypatch, capsys):
    shutil.copytree(RESULTS, tmp_path / "benchmarks" / "results")
    monkeypatch.setattr(fill, "ROOT", tmp_path)
    monkeypatch.setattr(fill, "PAGES", ())
    drawn = tmp_path / "benchmarks" / "results" / "speeds.svg"
    drawn.write_text("old")
    assert fill.main(check=True) == 1
    assert "speeds.svg: stale" in capsys.readouterr().out
    assert fill.main(check=False) == 0
    assert drawn.read_bytes() == (RESULTS / "speeds.svg").read_bytes()


@pytest.mark.parametrize("page", fill.PAGES, ids=lambda page: page.name)
def test_the_python_on_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it may write files
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S):
        if "from transformers" in block:
            pytest.importorskip("transformers", reason="transformers is not installed")
        if "import jax" not in block:  # which tests/test_vendor_jax.py runs
            exec(compile(block, page.name, "exec"), {})


def test_what_the_page_on_searching_records_is_the_space_that_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "benchmarks" / "notes" / "search.md").read_text("utf-8")
    (block,) = re.findall(r"^```python\n(.*?fagen\.recording.*?)^```$", page, re.M | re.S)
    exec(compile(block, "search.md", "exec"), {})
    recorded = (tmp_path / "mine.toml").read_text().partition("\n\n")[2]
    assert f"```toml\n{recorded}```" in page


def test_the_demo_runs(monkeypatch, capsys):
    path = registry.committed_file("fwd_fp16_d128_causal_m128n128")
    monkeypatch.setattr(sys, "argv", ["demo.py", str(path)])
    load(ROOT / "examples" / "demo.py")
    told = re.search(r"against fp64: (\S+), torch's own (\S+)\n", capsys.readouterr().out)
    assert told
    assert float(told[1]) <= 2 * float(told[2]) + 1e-3


def test_the_examples_with_every_key_have_every_key():
    """What is of fp8 alone has an example of its own."""
    plain, fp8 = (
        (ROOT / "examples" / name).read_text(encoding="utf-8")
        for name in ("every_key.toml", "fp8.toml")
    )
    keys, more = (re.findall(r"^(\w+) = ", written, re.M) for written in (plain, fp8))
    own = list(registry.parse(fp8).fp8.model_dump())
    promoting = ["totals"]  # has a meaning only where sums are promoted
    assert more[-len(own) :] == own
    assert keys == [key for key in registry.parse(plain).values() if key not in (*own, *promoting)]


def test_an_example_names_a_schema_that_is_there():
    named = {
        path.parent / schema
        for path in (ROOT / "examples").glob("*.toml")
        for schema in re.findall(r"^#:schema (\S+)$", path.read_text(encoding="utf-8"), re.M)
    }
    assert named and all(path.exists() for path in named)


NAMED = [*fill.PAGES, ROOT / "Makefile", ROOT / "cli.py", ROOT / "examples" / "demo.py"]


@pytest.mark.parametrize("page", NAMED, ids=lambda page: page.name)
def test_files_and_names_that_a_page_speaks_of_are_there(page):
    text = page.read_text(encoding="utf-8")
    folders = "schedules|spaces|examples|templates|docs|benchmarks"
    for path in re.findall(rf"(?<![\w/.\-~])(?:{folders})/[\w/.-]*\w", text):
        assert "KIND" in path or (ROOT / path).exists(), path
    for name in re.findall(r"(?<![\w.])fagen\.([a-z]\w*(?:\.\w+)*)", text):
        if not name.endswith(("toml", "git")):
            found = fagen
            for step in name.split("."):
                with suppress(ModuleNotFoundError):
                    import_module(f"{found.__name__}.{step}") if ismodule(found) else None
                found = getattr(found, step)


def test_the_makefile_and_the_pages_name_the_versions_that_fagen_asks_for():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "build.md").read_text(encoding="utf-8")
    asked = (toolchain.INSTALL_NVCC, toolchain.INSTALL_CUTLASS, toolchain.INSTALL_DISASSEMBLER)
    pins = re.findall(r"[^\s\"]+==[^\s\"]+", " ".join(asked))
    assert len(pins) == 4
    for pin in pins:
        assert pin in makefile and pin in page


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
@pytest.mark.parametrize("named", [{}, {"FAGEN_CACHE": "/of/my/own"}], ids=["", "named"])
def test_what_make_builds_lies_in_its_environment_unless_the_cache_is_named(named, tmp_path):
    """A user's home may be one that nobody can write to, or none."""
    asked = "asked: ; @printenv FAGEN_CACHE"
    command = ["make", "-s", "-f", ROOT / "Makefile", "--eval", asked, "asked"]
    found = {"PATH": os.environ["PATH"], "HOME": "/dev/null", **named}
    said = subprocess.run(command, cwd=tmp_path, env=found, capture_output=True, text=True)
    assert said.stdout.strip() == named.get("FAGEN_CACHE", str(tmp_path / ".venv" / "cache"))
