"""The README and the guide: what they show is really printed, what they name is there."""

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
from fagen.paths import locate
from fagen.search.files import read_spaces

ROOT = locate("cli.py").parent
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text("utf-8")
TOUR = (ROOT / "docs" / "tour.md").read_text("utf-8")
SCHEDULE = (ROOT / "docs" / "schedule.md").read_text("utf-8")


def load(path: Path):
    """Import a script by its path."""
    spec = spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fill = load(ROOT / "docs" / "fill.py")
NOTES = sorted((ROOT / "benchmarks" / "notes").glob("*.md"))
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *NOTES]
each_page = pytest.mark.parametrize("page", fill.PAGES, ids=lambda page: page.name)


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)


def blocks(page: Path | str, language: str) -> list[str]:
    text = page if isinstance(page, str) else page.read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


@each_page
def test_a_page_shows_what_is_really_printed(page):
    text = page.read_text("utf-8")
    assert fill.filled(text) == text, "run `make docs`, and read what changed"


@each_page
def test_the_python_on_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it may write files
    for block in blocks(page, "python"):
        if "from transformers" in block:
            pytest.importorskip("transformers", reason="transformers is not installed")
        if "import jax" not in block:  # which tests/test_vendor_jax.py runs
            exec(compile(block, page.name, "exec"), {})
        if "fagen.recording" in block:  # the space that it writes is the one that the page shows
            recorded = (tmp_path / "mine.toml").read_text().partition("\n\n")[2]
            assert recorded in blocks(page, "toml")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ +(.+)$", prose(page), re.M)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {word.replace(" ", "-") for word in words}


def test_links_lead_somewhere():
    anchors_of: dict[Path, set[str]] = {}
    for page in (*fill.PAGES, *OTHERS, *sorted(RESULTS.glob("*.md"))):
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if target.startswith("https://"):
                continue
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), (page.name, target)
            if anchor and file.suffix == ".md":
                if file not in anchors_of:
                    anchors_of[file] = anchors(file)
                assert anchor in anchors_of[file], (page.name, target)


def test_files_and_names_that_pages_speak_of_are_there():
    scripts = (ROOT / "Makefile", ROOT / "cli.py", ROOT / "examples" / "demo.py")
    folders = "schedules|spaces|examples|templates|docs|benchmarks"
    for page in (*fill.PAGES, *OTHERS, *scripts):
        text = page.read_text("utf-8")
        for path in re.findall(rf"(?<![\w/.\-~])(?:{folders})/[\w/.-]*\w", text):
            assert "KIND" in path or (ROOT / path).exists(), (page.name, path)
        for name in re.findall(r"(?<![\w.])fagen\.([a-z]\w*(?:\.\w+)*)", text):
            if name.endswith(("toml", "git")):
                continue
            value = fagen
            for step in name.split("."):
                with suppress(ModuleNotFoundError):
                    import_module(f"{value.__name__}.{step}") if ismodule(value) else None
                value = getattr(value, step)


def test_the_map_in_the_readme_names_every_page_of_docs_once_and_the_index_every_note():
    (mapped,) = re.findall(r"^## Documentation\n(.*?)(?=^## |\Z)", README, re.M | re.S)
    named = re.findall(r"^\| \[.+?\]\((docs/[\w-]+\.md)\) \|", mapped, re.M)
    assert sorted(named) == [f"docs/{page.name}" for page in fill.PAGES[1:]]
    index = (ROOT / "benchmarks" / "notes" / "README.md").read_text("utf-8")
    assert all(f"]({page.name})" in index for page in NOTES if page.name != "README.md")


def test_the_guide_is_3000_lines_at_most():
    assert sum(len(page.read_text("utf-8").splitlines()) for page in fill.PAGES) <= 3000


def test_the_readme_begins_with_what_is_there_then_how_to_call_it_then_its_speed():
    beginning, *sections = README.split("\n## ")
    assert [section.partition("\n")[0] for section in sections[:2]] == ["Install and call", "Speed"]
    assert len(beginning.splitlines()) < 30
    rows = re.findall(r"^\| (.+?) \| (\S.*?) \| ", beginning, re.M)
    assert {state for _, state in rows} == {"**there**", "limited", "not there"}
    missing = " ".join(name for name, state in rows if state == "not there")
    for name in ("ALiBi", "bias", "masks as tensors", "dropout"):
        assert name in missing
    (call,) = blocks(sections[0], "python")
    assert call.startswith("import torch, fagen\n") and call.count("\n") == 5
    assert call.endswith("fagen.attention(q, k, v, causal=True)\n")
    assert re.search(r"^pip install '\.\[torch,cuda\]'", sections[0], re.M)
    assert re.search(r"^make demo .*\nmake test ", sections[0], re.M)
    assert re.findall(r"!\[.+\]\((.+)\)", README) == ["benchmarks/results/speeds.svg"]
    unfilled = re.sub(r"^<!-- results -->.*?^<!-- end -->", "", README, flags=re.M | re.S)
    assert not re.findall(r"\d[\d.,]* ?(?:TFLOP/s\b|×|(?:times )?(?:as fast|faster))", unfilled)


def test_the_tour_shows_a_schedule_its_kernel_two_refusals_all_commands_and_exit_codes():
    (path,) = re.findall(r"^<!-- file: (schedules/\S+) -->\n+```toml$", TOUR, re.M)
    (kernel,) = re.findall(r"^<!-- kernel: (\S+) -->\n+```cpp$", TOUR, re.M)
    assert registry.read(ROOT / path).slug == kernel
    assert 'did you mean "causal"?' in TOUR and "  fits with block_n = " in TOUR
    for name, command in cli.main.commands.items():
        for word in command.commands if isinstance(command, click.Group) else ("",):
            assert f"`fagen {name} {word}".rstrip() in TOUR
    errors = [value for value in vars(fagen.errors).values() if isinstance(value, type)]
    codes = {error.exit_code for error in errors if issubclass(error, fagen.errors.FagenError)}
    table = {int(code) for code in re.findall(r"^\| (\d) \|", TOUR, re.M)}
    assert table == codes | {click.UsageError.exit_code}


def test_the_page_on_calls_names_all_that_is_public():
    page = (ROOT / "docs" / "call.md").read_text("utf-8").partition("## Public names\n")[2]
    assert {*fagen.__all__} - {"__version__"} <= set(re.findall(r"`(\w+)(?:\(\w+\))?`", page))


def test_the_page_on_schedules_shows_a_space_with_shapes_that_a_search_takes():
    shown = re.findall(r"^<!-- file: (\S+) -->$", SCHEDULE, re.M)
    (name,) = [name for name in shown if "[[shapes]]" in (ROOT / name).read_text("utf-8")]
    (space,) = read_spaces(ROOT / name)
    assert [(shape.weight, shape.seqlen_k) for shape in space.shapes] == [(3, None), (1, 8192)]


def test_a_stale_picture_is_named_and_drawn_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fill, "ROOT", tmp_path)
    monkeypatch.setattr(fill, "PAGES", ())
    assert list(fill._results()) == ["No run is committed yet."]
    shutil.copytree(RESULTS, tmp_path / "benchmarks" / "results")
    picture = tmp_path / "benchmarks" / "results" / "speeds.svg"
    picture.write_text("old")
    assert fill.main(check=True) == 1
    assert "speeds.svg: stale" in capsys.readouterr().out
    assert fill.main(check=False) == 0
    assert picture.read_bytes() == (RESULTS / "speeds.svg").read_bytes()


def test_the_demo_runs(monkeypatch, capsys):
    path = registry.committed_file("fwd_fp16_d128_causal_m128n128")
    monkeypatch.setattr(sys, "argv", ["demo.py", str(path)])
    load(ROOT / "examples" / "demo.py")
    errors = re.search(r"against fp64: (\S+), torch's own (\S+)\n", capsys.readouterr().out)
    assert errors and float(errors[1]) <= 2 * float(errors[2]) + 1e-3


def test_the_examples_with_every_key_have_every_key_and_name_a_schema_that_is_there():
    """What is of fp8 alone has an example of its own."""
    plain, fp8 = (
        (ROOT / "examples" / name).read_text("utf-8") for name in ("every_key.toml", "fp8.toml")
    )
    keys, more = (re.findall(r"^(\w+) = ", text, re.M) for text in (plain, fp8))
    # have a meaning only where sums are promoted, and where row-major V is transposed
    elsewhere = ["totals", "v_row_stages", "transposes"]
    own = [key for key in registry.parse(fp8).fp8.model_dump() if key not in elsewhere]
    assert more[-len(own) :] == own
    assert keys == [key for key in registry.parse(plain).values() if key not in (*own, *elsewhere)]
    for text in (plain, fp8):
        (schema,) = re.findall(r"^#:schema (\S+)$", text, re.M)
        assert (ROOT / "examples" / schema).exists()


def test_the_makefile_and_the_tour_name_the_versions_that_fagen_asks_for():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    names = (toolchain.INSTALL_NVCC, toolchain.INSTALL_CUTLASS, toolchain.INSTALL_DISASSEMBLER)
    pins = re.findall(r"[^\s\"]+==[^\s\"]+", " ".join(names))
    assert len(pins) == 4
    assert all(pin in makefile and pin in TOUR for pin in pins)


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
@pytest.mark.parametrize("named", [{}, {"FAGEN_CACHE": "/of/my/own"}], ids=["", "named"])
def test_what_make_builds_lies_in_its_environment_unless_the_cache_is_named(named, tmp_path):
    """A user's home may be one that nobody can write to, or none."""
    rule = "asked: ; @printenv FAGEN_CACHE"
    command = ["make", "-s", "-f", ROOT / "Makefile", "--eval", rule, "asked"]
    environment = {"PATH": os.environ["PATH"], "HOME": "/dev/null", **named}
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert answer.stdout.strip() == named.get("FAGEN_CACHE", str(tmp_path / ".venv" / "cache"))
