"""What nobody meant is vendored nowhere: manifests, schedules and records that are hostile, fuzzed.

All that a manifest or a schedule brings into a text is a name or a word of closed sets, so that no
format can be made to say anything else in C++, CMake, TOML or Python.
"""

import ast
import json
import math
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fagen import registry, vendor
from fagen.errors import FagenError
from fagen.process import run
from fagen.vendor import FORMATS
from fagen.vendor.place import MANIFEST, _hash, bring, is_inside
from fagen.vocab import VENDOR_FORMATS
from tests.cli_helpers import QUANTIZER, ROOT, SLUG
from tests.fuzz import FEW, MANY, Door, contents, settings, stands

CASES = pytest.mark.parametrize("cases", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}", re.ASCII)
SLUGS = re.compile(r"[a-z][a-z0-9_]{0,199}", re.ASCII)

GRADIENT = "bwd_fp16_d128_causal_m64n128"  # of SLUG
SCHEDULES = tuple(
    (ROOT / path).read_text("utf-8")
    for path in (
        "examples/every_key.toml",
        "examples/fp8.toml",
        f"schedules/quantize/{QUANTIZER}.toml",
        f"schedules/backward/{GRADIENT}.toml",
    )
)
MANIFESTS = tuple(
    f"""\
name = "demo"
format = "{form}"
with_cutlass = false

[kernels]
causal = "{SLUG}"
wide = "{QUANTIZER}"
gradient = "{GRADIENT}"
"""
    for form in VENDOR_FORMATS
)


def closed(manifest: vendor.Manifest) -> None:
    """Nothing that a format writes is anybody's own words."""
    assert NAME.fullmatch(manifest.name) and manifest.format in FORMATS
    assert manifest.with_cutlass in (True, False)
    for alias, schedule in manifest.kernels:
        assert alias == "" or NAME.fullmatch(alias)
        assert SLUGS.fullmatch(schedule.slug)
        for value in schedule.values().values():
            numbers = isinstance(value, bool | int | float) and math.isfinite(value)
            assert value in (None, "") or numbers or NAME.fullmatch(str(value)), value


def as_a_manifest(path: Path) -> None:
    closed(vendor.read(path))


def as_a_schedule(path: Path) -> None:
    manifest = path.with_name("vendor.toml")
    manifest.write_text(f'name = "demo"\n[kernels]\nmine = "{path.name}"\n')
    try:
        closed(vendor.read(manifest))
    except FagenError as error:  # in the schedule's name: the manifest is right
        assert path.name in str(error)
        raise


@CASES
@pytest.mark.parametrize(
    "door",
    [Door(as_a_manifest, MANIFESTS), Door(as_a_schedule, SCHEDULES)],
    ids=["manifest", "schedule"],
)
def test_what_is_taken_has_only_names_and_words_of_closed_sets(door, cases, tmp_path):
    @settings(cases)
    @given(contents(door.files))
    def judge(content: bytes) -> None:
        stands(door, tmp_path / "x.toml", content)

    judge()


# ---- what is written ----------------------------------------------------------------------------

# Names that are right, and mean something to a compiler, to CMake or to Python.
NAMES = ("int", "template", "private", "on", "e2", "x" * 40, "std", "xla", "self", "demo2")


@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_folder_is_called_its_texts_are_what_they_are(name, tmp_path):
    schedules = [registry.from_slug(slug) for slug in (SLUG, GRADIENT)]
    in_c = {}
    for form, texts_of in FORMATS.items():
        texts = texts_of(vendor.folder_of(vendor.asked(name, schedules, form)))
        assert all(is_inside(path) for path in texts)
        for path, text in texts.items():
            if path.endswith(".py"):
                ast.parse(text)
            elif path.endswith(".toml"):
                assert f'"{name}"' in text and tomllib.loads(text)
            elif path.endswith(".json"):
                assert json.loads(text)["name"] == name
            elif path.endswith((".c", ".h")):
                assert in_c.setdefault(path, text) == text, form  # so that it is compiled once
    for path, text in in_c.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    warnings = ["-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only"]
    words = [*warnings, "-include", "unistd.h", "-I", str(tmp_path / "include")]
    sources = [str(tmp_path / path) for path in in_c if path.endswith(".c")]
    for compiler in (["gcc", "-std=gnu99"], ["g++", "-std=c++17", "-x", "c++"]):
        answer = run([*compiler, *words, *sources])
        assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("form", ["torch", "hf-kernel", "jax"])
def test_a_kernel_has_no_name_that_its_package_reads(form, tmp_path):
    schedules = [registry.from_slug(slug) for slug in (SLUG, GRADIENT, QUANTIZER)]
    texts = FORMATS[form](vendor.folder_of(vendor.asked("demo", schedules, form)))
    (text,) = (text for path, text in texts.items() if path.endswith("/demo/__init__.py"))
    read = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    bound = {
        alias.asname or alias.name
        for node in ast.parse(text).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    path = tmp_path / "vendor.toml"
    names = {name for name in read & bound if NAME.fullmatch(name)} | {"attention", "kernels"}
    for name in names:
        path.write_text(f'name = "demo"\nformat = "{form}"\n[kernels]\n{name} = "{SLUG}"\n')
        with pytest.raises(FagenError, match="another function of the folder"):
            vendor.read(path)
    assert {"ops", "torch", "differentiated"} <= names or form == "jax"


# ---- where it is written ------------------------------------------------------------------------

PATHS = [
    "a",
    "sub/c",
    "b",
    "../victim",
    "/victim",
    "sub/../../victim",
    "..",
    "",
    ".",
    "link/victim",
]
PATHS += ["a/b", "sub", "a\n", "${HOME}", "~", "victim", MANIFEST, "sub/", "\0", "\u202e", "-rf"]
HASHES = [_hash(b"theirs"), _hash(b"1"), "", "0" * 64, "x" * 64, None, 1, [], {}]
RECORDS = st.dictionaries(st.sampled_from(PATHS) | st.text(max_size=5), st.sampled_from(HASHES))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@CASES
def test_a_record_that_nobody_meant_harms_nothing(cases, tmp_path):
    """It names files outside and links to them, with the right hashes: what would be removed."""
    inside, outside = tmp_path / "in", tmp_path / "out"
    for place in (inside, outside):
        place.mkdir()
    victims = [tmp_path / "victim", outside / "victim", inside / "victim"]
    texts = {"a": "1", "sub/c": "2", MANIFEST: "{}"}

    @settings(cases)
    @given(st.fixed_dictionaries({"files": RECORDS | JSON}) | JSON, st.booleans())
    def judge(record: object, force: bool) -> None:
        for victim in victims:
            victim.write_text("theirs")
        (inside / "link").unlink(missing_ok=True)
        (inside / "link").symlink_to(outside)
        (inside / MANIFEST).write_text(json.dumps(record))
        try:
            bring(texts, inside, force=force)
        except FagenError as error:
            assert str(error).isprintable()
        assert [victim.read_text() for victim in victims[:2]] == ["theirs", "theirs"]
        assert (inside / "link").is_symlink()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "victim"]

    judge()
