"""What is released: sdist and wheel, and the wheel used from / where there is no torch."""

import os
import re
import shutil
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

import fagen
from fagen import registry
from fagen.process import run
from fagen.vocab import VENDOR_FORMATS
from tests.cli_helpers import ROOT, SLUG

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
        install("install", "--quiet", "--target", place, "hatchling>=1.24")

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
    (found,) = dist.glob("*.whl")
    return found


def contents(wheel: Path) -> dict[str, int]:
    """The files of a wheel, with their checksums."""
    with ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist()}


def test_the_wheel_has_all_that_fagen_reads_and_no_tests(wheel):
    assert wheel.name == f"fagen-{fagen.__version__}-py3-none-any.whl"
    found = contents(wheel)
    wanted = {f"fagen/{path.relative_to(ROOT / 'fagen').as_posix()}" for path in modules()}
    for folder in ("templates", "schedules"):
        files = (path for path in (ROOT / folder).rglob("*") if path.is_file())
        wanted |= {f"fagen/{path.relative_to(ROOT).as_posix()}" for path in files}
    wanted |= {"fagen/cli.py", "fagen/LICENSE"}
    about = f"fagen-{fagen.__version__}.dist-info/"
    assert {name for name in found if not name.startswith(about)} == wanted
    assert {"fagen/schedules/dispatch.toml", "fagen/templates/vendor/dispatch.c.j2"} <= wanted
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
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    assert tree.name == f"fagen-{fagen.__version__}"
    builder.build(tree, tmp_path / "dist", "wheel")
    assert contents(tmp_path / "dist" / wheel.name) == contents(wheel)


def test_the_wheel_works_from_the_root_in_an_environment_without_torch(wheel, tmp_path):
    place = tmp_path / "venv"
    assert run([sys.executable, "-m", "venv", "--without-pip", str(place)]).returncode == 0
    install("--python", place / "bin/python", "install", "--quiet", wheel)

    def told(*words: object) -> str:
        env = {"PYTHONPATH": "", "XDG_CONFIG_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        answer = run([str(place / "bin/fagen"), *map(str, words)], cwd=Path("/"), env=env)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    assert run([str(place / "bin/python"), "-c", "import torch"], cwd=Path("/")).returncode == 1
    assert told("--version").split()[-1] == fagen.__version__
    assert f"{SLUG} fits" in told("check", SLUG)
    (kernel,) = (ROOT / "generated").rglob(f"{SLUG}.cu")
    assert told("generate", SLUG) == kernel.read_text()
    for form in VENDOR_FORMATS:
        told("vendor", SLUG, QUANTIZER, "-o", tmp_path / form, "--format", form)
        (vendored,) = (tmp_path / form).rglob(kernel.name)
        assert vendored.read_text() == kernel.read_text()
    assert told("pick", "--dtype", "bf16", "--head-dim", 128)


def test_the_changelog_begins_with_the_version_which_is_a_semantic_one():
    assert re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}(-[\w.]+)?", fagen.__version__)
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert headings[0].rstrip(",") == fagen.__version__
    assert len(headings) == len(set(headings))
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text("utf-8")
