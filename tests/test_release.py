"""What is released: sdist and wheel, and the wheel used from / where there is no torch."""

import json
import os
import re
import shutil
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

import fagen
from fagen import evidence, registry
from fagen.errors import FagenError
from fagen.evidence import store
from fagen.process import run
from fagen.render import Hashes, hashes
from fagen.vocab import VENDOR_FORMATS
from tests import cli_helpers
from tests.cli_helpers import ROOT, SLUG

SHIPPED = "fagen/shipped"  # in a wheel

QUANTIZER = registry.schedules("quantize")[0].stem
# of a checkout, what git leaves out
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis")


def install(*words: object) -> None:
    """Run pip install; in CI it has to succeed."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    answer = run(pip)
    if answer.returncode and not os.environ.get("CI"):
        pytest.skip(f"pip could not install: {answer.stderr.strip().splitlines()[-1]}")
    assert answer.returncode == 0, answer.stderr


class Builder:
    """hatchling, in a folder of its own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        install("install", "--quiet", "--no-compile", "--target", place, "hatchling>=1.24")

    def build(self, tree: Path, into: Path, *targets: str) -> None:
        words = [sys.executable, "-m", "hatchling", "build", "-d", str(into)]
        words += [word for target in targets for word in ("-t", target)]
        answer = run(words, cwd=tree, env={"PYTHONPATH": str(self.place)})
        assert answer.returncode == 0, answer.stderr


@pytest.fixture(scope="module")
def builder(tmp_path_factory) -> Builder:
    return Builder(tmp_path_factory.mktemp("hatchling"))


@pytest.fixture(scope="module")
def dist(builder, tmp_path_factory) -> Path:
    """A folder with the sdist and the wheel of this tree."""
    place = tmp_path_factory.mktemp("release")
    shutil.copytree(ROOT, place / "tree", ignore=NOT_COPIED)
    builder.build(place / "tree", place / "dist", "sdist", "wheel")
    return place / "dist"


@pytest.fixture(scope="module")
def wheel(dist) -> Path:
    (built,) = dist.glob("*.whl")
    return built


def contents(wheel: Path) -> dict[str, int]:
    """The files of a wheel, with their checksums."""
    with ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist()}


def test_the_wheel_has_all_that_fagen_reads_and_no_tests(wheel):
    assert wheel.name == f"fagen-{fagen.__version__}-py3-none-any.whl"
    shipped = contents(wheel)
    expected = {f"fagen/{path.relative_to(ROOT / 'fagen').as_posix()}" for path in modules()}
    for folder in ("templates", "schedules"):
        files = (path for path in (ROOT / folder).rglob("*") if path.is_file())
        expected |= {f"fagen/{path.relative_to(ROOT).as_posix()}" for path in files}
    expected |= {"fagen/cli.py", "fagen/LICENSE", f"{SHIPPED}/unverified.toml"}
    ledgers = (ROOT / "generated" / "ledger").glob("*.jsonl")
    expected |= {f"{SHIPPED}/ledger/{path.name}" for path in ledgers}
    about = f"fagen-{fagen.__version__}.dist-info/"
    assert {name for name in shipped if not name.startswith(about)} == expected
    assert {"fagen/schedules/dispatch.toml", "fagen/templates/vendor/dispatch.c.j2"} <= expected
    with ZipFile(wheel) as archive:
        metadata = archive.read(about + "METADATA").decode()
    needed = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==).*$", metadata, re.M)
    assert sorted(needed) == ["clang-format", "click", "jinja2", "ninja", "pydantic", "sympy"]


def modules() -> list[Path]:
    files = (path for path in (ROOT / "fagen").rglob("*") if path.is_file())
    return [path for path in files if "__pycache__" not in path.parts]


def test_the_sdist_builds_the_same_wheel(dist, wheel, builder, tmp_path):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        # Python 3.11.2, which is Debian's, knows no filter
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        archive.extractall(tmp_path)
    (tree,) = tmp_path.iterdir()
    assert tree.name == f"fagen-{fagen.__version__}"
    builder.build(tree, tmp_path / "dist", "wheel")
    assert contents(tmp_path / "dist" / wheel.name) == contents(wheel)


def test_the_wheel_works_from_the_root_in_an_environment_without_torch(wheel, tmp_path):
    place = tmp_path / "venv"
    assert run([sys.executable, "-m", "venv", "--without-pip", str(place)]).returncode == 0
    install("--python", place / "bin/python", "install", "--quiet", "--no-compile", wheel)

    env = {"PYTHONPATH": "", "XDG_CONFIG_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}

    def told(program: str, *words: object) -> str:
        answer = run([place / "bin" / program, *map(str, words)], cwd=Path("/"), env=env)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    assert run([place / "bin/python", "-c", "import torch"], cwd=Path("/")).returncode == 1
    assert told("fagen", "--version").split()[-1] == fagen.__version__
    forms = [
        ("vendor", SLUG, QUANTIZER, "-o", f"{tmp_path / form}", "--format", form)
        for form in VENDOR_FORMATS
    ]
    pick = "pick", "--dtype", "fp16", "--head-dim", "128", "--json"
    commands = ("check", SLUG), ("generate", SLUG), *forms, pick, ("list", "--json")
    check, generate, *_, pick_said, list_said = json.loads(
        told("python", "-c", ONE_AFTER_ANOTHER, json.dumps(commands))
    )
    assert f"{SLUG} fits" in check
    (kernel,) = (ROOT / "generated").rglob(f"{SLUG}.cu")
    assert generate == kernel.read_text()
    for form in VENDOR_FORMATS:
        (vendored,) = (tmp_path / form).rglob(kernel.name)
        assert vendored.read_text() == kernel.read_text()
        manifest = json.loads((tmp_path / form / "manifest.json").read_text())
        assert manifest["kernels"][0]["evidence"] or not ran(SLUG)
    told_by_pick = json.loads(pick_said)
    assert told_by_pick["measured"] or not ran(told_by_pick["slug"])
    expected = {row["schedule"]: row["evidence"] for row in listed(fagen_here("list", "--json"))}
    assert {row["schedule"]: row["evidence"] for row in listed(list_said)} == expected


# commands by one process: each would import what the others do
ONE_AFTER_ANOTHER = """
import contextlib, io, json, sys
from fagen.commandline import main

def said(words):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(words, prog_name="fagen", standalone_mode=False)
    return out.getvalue()

print(json.dumps([said(words) for words in json.loads(sys.argv[1])]))
"""


def ran(slug: str) -> bool:
    """Whether a checkout has evidence of a kernel as it is rendered today."""
    return evidence.of_source(slug, lambda: hashes(registry.plan_of(slug))) is not None


def listed(text: str) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads(text)
    return [row for row in rows if row["from"] == "schedules/"]


def fagen_here(*words: str) -> str:
    return cli_helpers.fagen(*words).stdout


# ---- evidence, which a wheel has without the kernels --------------------------------------------


def test_what_is_shipped_says_of_every_kernel_what_generated_says(wheel, monkeypatch, tmp_path):
    with ZipFile(wheel) as archive:
        files = [file for file in archive.infolist() if file.filename.startswith(f"{SHIPPED}/")]
        archive.extractall(tmp_path, files)
    assert sum(file.compress_size for file in files) < 400_000
    slugs = [path.stem for kind in registry.ENTRIES for path in registry.schedules(kind)]
    expected = evidence.read_excuses(), [evidence.read_line(slug) for slug in slugs]

    def locate(name: str) -> Path:
        if name == "generated":
            raise FagenError("generated is neither here nor there")
        return tmp_path / SHIPPED if name == "shipped" else real(name)

    real = store.locate
    monkeypatch.setattr(store, "locate", locate)
    assert expected == (evidence.read_excuses(), [evidence.read_line(slug) for slug in slugs])
    assert evidence.read("fwd_fp16_d248_full_m64n16_s9") is None
    with pytest.raises(FagenError, match="generated is neither here nor there"):
        evidence.need_room(SLUG)
    assert evidence.of_source(SLUG, lambda: Hashes("", "", "")) is None


def test_the_changelog_begins_with_the_version_which_is_a_semantic_one():
    assert re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}(-[\w.]+)?", fagen.__version__)
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert headings[0].rstrip(",") == fagen.__version__
    assert len(headings) == len(set(headings))
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text("utf-8")
