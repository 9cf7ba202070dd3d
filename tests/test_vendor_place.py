"""What a manifest may say, and what vendoring does to a folder: never anything outside it."""

import json
import re
import string
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fagen import vendor
from fagen.errors import FagenError, ScheduleError
from fagen.process import run
from fagen.registry import from_slug
from fagen.render import written
from fagen.vendor import contents
from fagen.vendor.place import MANIFEST, bring, is_inside
from fagen.vendor.table import VARLEN
from tests.cli_helpers import QUANTIZER, ROOT, SLUG, fagen

OTHER, SCHEDULED = "fwd_bf16_d64_full_m128n128", from_slug(SLUG)
MANIFEST_TOML = f"""\
name = "demo"
format = "source"
with_cutlass = false

[kernels]
causal = "{SLUG}"
wide = "mine/wide.toml"
"""
SCHEDULE = """\
[attention]
head_dim = 64
dtype = "fp16"
mask = "full"

[tile]
block_m = 128
block_n = 128
"""


def some(**texts: str) -> dict[str, str]:
    """Files of a folder by name, "__" for a slash."""
    return {name.replace("__", "/"): text for name, text in texts.items()} | {MANIFEST: "{}"}


def tree(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


# ---- updating -----------------------------------------------------------------------------------


def test_a_second_run_changes_what_changed_and_nothing_else(tmp_path):
    first = bring(some(a="1", b="2", sub__c="3"), tmp_path)
    assert first.new == ("a", "b", "sub/c") and not first.fault
    before = (tmp_path / "a").stat().st_ino
    again = bring(some(a="1", b="4", d="5"), tmp_path)
    assert (again.unchanged, again.updated, again.new) == (("a",), ("b",), ("d",))
    assert again.removed == ("sub/c",) and not (tmp_path / "sub").exists()
    assert (tmp_path / "a").stat().st_ino == before
    assert tree(tmp_path) == {"a": "1", "b": "4", "d": "5"}
    same = (tmp_path / MANIFEST).stat().st_ino
    assert bring(some(a="1", b="4", d="5"), tmp_path).unchanged == ("a", "b", "d")
    assert (tmp_path / MANIFEST).stat().st_ino == same


def test_what_a_person_edited_stays_and_is_named(tmp_path):
    bring(some(a="1", b="2", c="3"), tmp_path)
    for name in "abc":
        (tmp_path / name).write_text("mine")
    same = bring(some(a="1", b="2", c="3"), tmp_path)
    assert same.edited == ("a", "b", "c") and not same.fault
    for _ in range(2):  # and it stays an edited one
        brought = bring(some(a="9", b="2"), tmp_path)
        assert brought.kept == ("a", "c") and brought.edited == ("b",)
        assert "a, c" in brought.fault and "--force" in brought.fault
    assert tree(tmp_path) == dict.fromkeys("abc", "mine")
    forced = bring(some(a="9", b="2"), tmp_path, force=True)
    assert forced.updated == ("a", "b") and forced.removed == ("c",)
    assert tree(tmp_path) == {"a": "9", "b": "2"}


def test_files_of_others_are_neither_overwritten_nor_removed(tmp_path):
    (tmp_path / "a").write_text("theirs")
    (tmp_path / "z").write_text("theirs")
    brought = bring(some(a="1", b="2"), tmp_path)
    assert brought.foreign == ("a",) and "not written by fagen" in brought.fault
    assert bring(some(a="1", b="2"), tmp_path, force=True).foreign == ("a",)
    assert bring(some(b="2"), tmp_path).unchanged == ("b",)
    assert tree(tmp_path) == {"a": "theirs", "b": "2", "z": "theirs"}


def test_a_run_that_was_cut_off_is_taken_up(tmp_path):
    bring(some(a="1", b="2"), tmp_path)
    (tmp_path / "a").write_text("3")  # the next run's, which did not come to the manifest
    brought = bring(some(a="3", b="4"), tmp_path)
    assert brought.unchanged == ("a",) and brought.updated == ("b",) and not brought.fault


@pytest.mark.parametrize(
    "path",
    ["../a", "/etc/a", "a/../../b", "a//b", "", ".", "..", "a\n", "a b", ".git/config", "-x"],
)
def test_no_path_leads_out_of_the_folder(path, tmp_path):
    assert not is_inside(path)
    with pytest.raises(FagenError, match="no path inside"):
        bring(some() | {path: "x"}, tmp_path / "in")
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("link", ["a", "sub", MANIFEST])
def test_no_link_is_followed(link, tmp_path):
    outside, inside = tmp_path / "out", tmp_path / "in"
    outside.mkdir()
    inside.mkdir()
    (outside / "c").write_text("theirs")
    (inside / link).symlink_to(outside if link == "sub" else outside / "c")
    with pytest.raises(FagenError, match="symbolic link"):
        bring(some(a="1", sub__c="2"), inside, force=True)
    assert tree(outside) == {"c": "theirs"}
    assert [path.name for path in inside.iterdir()] == [link]


def test_a_record_that_is_none_is_somebody_elses(tmp_path):
    for data in (b"", b"[", b"[]", b"{}", b"[" * 100_000, b'{"files": {"a": 1}}', b"\xff"):
        (tmp_path / MANIFEST).write_bytes(data)
        with pytest.raises(FagenError, match="not one that fagen wrote"):
            bring(some(a="2"), tmp_path)
        assert (tmp_path / MANIFEST).read_bytes() == data and not tree(tmp_path)
        with pytest.raises(FagenError, match="not one that fagen wrote"):
            bring(some(a="2"), tmp_path, force=True)
    (tmp_path / MANIFEST).unlink()
    assert bring(some(a="2"), tmp_path).new == ("a",)


def test_the_command_tells_what_became_of_each_file(tmp_path):
    words = ("vendor", QUANTIZER, "-o", tmp_path / "x")
    assert "new include/fagen_kernels.h" in fagen(*words).output
    path = tmp_path / "x/README.md"
    path.write_text("mine")
    answer = fagen(*words)
    assert answer.exit_code == 0 and "edited README.md, left as it is" in answer.output
    answer = fagen("vendor", QUANTIZER.replace("128", "64"), *words[2:], "--json")
    record = json.loads(answer.stdout)
    assert answer.exit_code == 1 and "README.md; --force overwrites" in record["message"]
    assert record["answer"]["kept"] == ["README.md"] and path.read_text() == "mine"
    answer = fagen("vendor", QUANTIZER.replace("128", "64"), *words[2:], "--force")
    assert answer.exit_code == 0 and "updated README.md" in answer.output
    (tmp_path / "y").write_text("a file")
    assert fagen("vendor", QUANTIZER, "-o", tmp_path / "y").exit_code == 2


# ---- manifests ----------------------------------------------------------------------------------


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/wide.toml").write_text(SCHEDULE)
    path = tmp_path / "vendor.toml"
    path.write_text(MANIFEST_TOML)
    return path


def test_a_manifest_pins_names_to_schedules(manifest, tmp_path):
    request = vendor.read(manifest)
    assert [(name, schedule.slug) for name, schedule in request.kernels] == [
        ("causal", SLUG),
        ("wide", "fwd_fp16_d64_full_m128n128"),
    ]
    answer = fagen("vendor", "--manifest", manifest, "-o", tmp_path / "out")
    assert answer.exit_code == 0, answer.output
    header = (tmp_path / "out/include/demo.h").read_text()
    assert "int demo_causal(const struct FagenForwardArgs* args, void* stream);" in header
    assert f"return fagen_{SLUG}(args, stream);" in (tmp_path / "out/src/demo.c").read_text()
    # another kernel under the same name: callers need not know
    manifest.write_text(MANIFEST_TOML.replace(f'"{SLUG}"', f'"{OTHER}"'))
    answer = fagen("vendor", "--manifest", manifest, "-o", tmp_path / "out", "--json")
    record = json.loads(answer.output)
    assert record["new"] == [f"src/{OTHER}.cu"] and record["removed"] == [f"src/{SLUG}.cu"]
    assert "cmake/demo-config.cmake.in" in record["unchanged"] and not record["kept"]


def test_what_the_page_shows_is_what_is_written(tmp_path, monkeypatch):
    page = (ROOT / "docs/vendor.md").read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    command, *others = re.findall(r"^fagen (vendor .*)$", page, re.M)
    assert others and fagen(*command.split()).exit_code == 0
    for number, other in enumerate(others):  # of other formats
        Path(f"{number}").mkdir()
        monkeypatch.chdir(f"{number}")
        assert fagen(*other.split()).exit_code == 0
        monkeypatch.chdir(tmp_path)
    page, gradients = page.split("\n## Gradients\n")  # which tests/test_vendor_gradient.py tries
    assert "```cpp" in gradients
    (snippet,) = re.findall(r"```cpp\n(.*?)```", page, re.S)
    head = "#include <my_attention.h>\n#include <stdio.h>\nvoid f(void* stream) {"
    Path("use.cpp").write_text(f"{head} struct FagenForwardArgs args = {{}};\n{snippet}}}\n")
    answer = run(["g++", "-Wall", "-Werror", "-fsyntax-only", "-Iattention/include", "use.cpp"])
    assert answer.returncode == 0, answer.stderr
    assert there("attention", page.partition("\n## ")[0])
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    Path("vendor.toml").write_text(text)
    Path("mine").mkdir()
    Path("mine/wide.toml").write_text(SCHEDULE)
    (again,) = re.findall(r"`fagen (vendor --manifest [^`]*)`", page)
    answer = fagen(*again.split())
    assert answer.exit_code == 0, answer.output
    assert "my_attention_causal_message" in Path("attention/include/my_attention.h").read_text()


def there(folder: str, section: str) -> list[str]:
    """The paths that tables of a page name, all of which are in the folder."""
    cells = re.findall(r"^\| (`.*?`) \|", section, re.M)
    paths = [path for cell in cells for path in re.findall("`([^`]*)`", cell)]
    for path in paths:
        path = path.replace("<name>", "my_attention").replace("<slug>", SLUG)
        assert Path(folder, path).exists(), path
    return paths


# What a manifest says instead of something right, and how it is refused.
NAME, FORMAT, CAUSAL = 'name = "demo"', '"source"', "causal ="
NAMES = {
    "../demo": ":1: name =",
    "Demo": "is no name",
    "de${mo}": "is no name",
    "a\\nb": "is no name",
    "a" * 41: "is no name",
    "démo": "is no name",
    "stdint": "CUDA, stdint.h: choose another",
    "aux": "a device of Windows",
    "com1": "a device of Windows",
    "cmakelists": "begins with cmake, as names of CMake do",
    "ex": "a macro of the system, EX_OK",
    "all": "a target or a word of CMake, all",
    "aten": "torch.ops.aten",
    "lambda": "a word of Python",
    **dict.fromkeys(("json", "torch", "jax", "class", "numpy", "typing"), "choose another"),
}
OTHERS = ("pick", "forward", *VARLEN, "pick_varlen", "pick_backward_varlen", "x_workspace")
CALLS = ("attention", "attention_varlen", "attention_decode", "pick_decode", "kernels")
KERNELS = {
    '"a;b"': "is no name",
    "import": "vendor.toml:6: kernels.import is a word of Python",
    "yield": "a word of Python",
    "print": "a built-in of Python, print",
    "fwd_fp16_d64_full_m128n128": "is the name of another kernel",
    **dict.fromkeys((*OTHERS, *CALLS), "another function of the folder"),
}
SLUGS = {
    '"/etc/passwd.toml"': "neither a slug nor",
    '"../wide.toml"': "neither a slug nor",
    '"a/./../../wide.toml"': "neither a slug nor",
    '"fwd_nonsense"': "vendor.toml:6: kernels.causal",
    '"gone.toml"': "cannot be read",
    '"fwd_fp16_d64_full_m128n128"': "are both",
    "[1]": "a list",
}
VERSIONS = {
    "1.2": "version = 1.2 is not text",
    '"1.2b"': 'version = "1.2b" is none that CMake',
    '"01"': "is none that CMake and pip both take",
    '"1.2.3.4.5"': "is none that CMake",
}
REFUSED = [
    *((NAME, f'name = "{name}"', message) for name, message in NAMES.items()),
    *((CAUSAL, f"{name} =", message) for name, message in KERNELS.items()),
    *((f'"{SLUG}"', value, message) for value, message in SLUGS.items()),
    *(("[kernels]", f"version = {v}\n[kernels]", message) for v, message in VERSIONS.items()),
    (NAME, "name = 3", "is not text"),
    (NAME, "wonder = 3", "wonder is not one"),
    (FORMAT, '"sauce"', 'did you mean "source"?'),
    ("false", '"no"', "is not true or false"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), REFUSED)
def test_a_hostile_manifest_is_refused_in_a_line(old, new, message, manifest, tmp_path):
    text = MANIFEST_TOML.replace(old, new)
    assert text != MANIFEST_TOML
    manifest.write_text(text)
    before = sorted(tmp_path.rglob("*"))
    answer = fagen("vendor", "--manifest", manifest, "-o", tmp_path / "out")
    assert answer.exit_code == 1 and message in answer.stderr, answer.stderr
    assert answer.stderr.count("\n") <= 2
    assert sorted(tmp_path.rglob("*")) == before


def test_all_faults_of_a_manifest_are_said_at_once(manifest):
    names = "".join(f'x{i} = "no slug"\n' for i in range(30))
    manifest.write_text(
        f'name = "json"\nversion = "x"\nformat = "zip"\nwith_cutlass = 1\nwonder = 2\n\n'
        f'[kernels]\nlambda = "{SLUG}"\nwide = "mine/gone.toml"\n"a b" = "fwd_x"\n'
    )
    with pytest.raises(ScheduleError) as refused:
        vendor.read(manifest)
    lines = str(refused.value).splitlines()
    keys = ("name", "version", "format", "with_cutlass", "wonder")
    words = (*keys, "lambda", "gone", "a b", "fwd_x")
    assert len(lines) == len(words) and all(w in line for w, line in zip(words, lines, strict=True))
    places = zip((1, 2, 3, 4, 5, 8), lines, strict=False)
    assert all(f"vendor.toml:{number}:" in line for number, line in places)
    manifest.write_text(f'name = "json"\n[kernels]\n{names}')
    with pytest.raises(ScheduleError) as refused:
        vendor.read(manifest)
    lines = str(refused.value).splitlines()
    assert len(lines) == 21 and lines[-1].endswith("vendor.toml: and 11 more")


def test_a_folder_has_the_version_that_its_manifest_says(manifest, tmp_path):
    manifest.write_text(f'version = "2.10.1"\n{MANIFEST_TOML}')
    for form, file, text in (
        ("source", "CMakeLists.txt", "project(demo VERSION 2.10.1 LANGUAGES"),
        ("source", "README.md", "# demo 2.10.1"),
        ("torch", "pyproject.toml", 'version = "2.10.1"'),
        ("torch", "python/demo/__init__.py", '__version__ = "2.10.1"'),
        ("jax", "pyproject.toml", 'version = "2.10.1"'),
    ):
        request = replace(vendor.read(manifest), format=form)
        texts = vendor.FORMATS[form](vendor.folder_of(request))
        assert text in texts[file], file
        assert json.loads(texts[MANIFEST])["version"] == "2.10.1"
    without = vendor.FORMATS["source"](vendor.folder_of(replace(request, version="")))
    assert "VERSION" not in without["CMakeLists.txt"].partition("project(")[2].partition(")")[0]


def test_what_was_never_verified_is_said_last_and_loudly(manifest, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(contents.evidence, "of_source", lambda slug, source_hash: None)
    answer = fagen("vendor", "--manifest", manifest, "-o", out)
    last = answer.output.splitlines()[-1]
    slugs = f"{SLUG}, fwd_fp16_d64_full_m128n128"
    assert last.startswith(f"NEVER VERIFIED: {slugs}: it is not on record that exactly this source")
    assert "**Never verified:**" in (out / "README.md").read_text().partition("## Build")[0]
    assert "NEVER VERIFIED" in (out / "include/demo.h").read_text()
    record = json.loads(fagen("vendor", "--manifest", manifest, "-o", out, "--json").output)
    assert record["unverified"] == slugs.split(", ")


def test_no_package_is_called_as_something_that_torch_or_python_has():
    pytest.importorskip("torch", reason="torch is not installed")
    ask = "import torch; print(*torch._C._dispatch_get_all_op_names(), *dir(torch.ops))"
    answer = run([sys.executable, "-c", ask])  # where no test has added any
    names = {name.partition("::")[0] for name in answer.stdout.split()}
    names |= {*sys.stdlib_module_names, "torch", "numpy"}
    valid = [name for name in names if vendor.names.NAME.fullmatch(name)]
    assert {"aten", "loaded_libraries", "json"} <= set(valid)
    for name in valid:
        with pytest.raises(ScheduleError, match="name = "):
            vendor.asked(name, [SCHEDULED])


def test_names_from_the_command_line_are_as_closed(tmp_path):
    # of macros, of libraries, of what CMake's commands read otherwise, of a kernel's own functions
    reserved = ("f", "ex", "m", "dl", "debug", "edit_cache", f"fagen_{SLUG}", "clean", "cuda_fp16")
    for name in (*reserved, "mma", "../x", "x;y", "", "a__b", "a_", "9", "x" * 41):
        with pytest.raises(ScheduleError, match="name = "):
            vendor.asked(name, [SCHEDULED])
    with pytest.raises(ScheduleError, match="0 schedules"):
        vendor.asked("demo", [])
    assert fagen("vendor", "-o", tmp_path).exit_code == 2
    words = ["--manifest", tmp_path / "x.toml", "--name", "demo"]
    assert fagen("vendor", *words, "-o", tmp_path).exit_code == 2


def test_a_letter_is_a_name_unless_something_has_it(tmp_path):
    sources = []
    for name in sorted({*string.ascii_lowercase} - {*"cfglmrwxyz"}):
        folder = vendor.folder_of(vendor.asked(name, [SCHEDULED]))
        for path in (f"{name}.h", f"{name}.c"):
            template = "header.h" if path.endswith("h") else "dispatch.c"
            (tmp_path / path).write_text(written(f"vendor/{template}.j2", folder=folder))
        sources.append(tmp_path / path)
    # with all headers whose macros end as ours do
    system = [word for header in _OKS for word in ("-include", header)]
    answer = run(map(str, ["gcc", "-fsyntax-only", "-Werror", *system, "-I", tmp_path, *sources]))
    assert answer.returncode == 0, answer.stderr


_OKS = ("unistd.h", "sysexits.h", "fmtmsg.h", "complex.h", "stdio.h")


def test_no_header_that_the_folder_includes_can_be_hidden_by_its_name(tmp_path):
    """Nor any that these include: all that a compiler reads for the texts of a folder."""
    request = vendor.asked("demo", [SCHEDULED])
    vendor.vendor(request, tmp_path)
    words = ["g++", "-M", "-I", tmp_path / "include"]
    if (cuda := Path("/usr/local/cuda/include")).exists():
        words += ["-isystem", cuda, tmp_path / "tests/demo_test.cpp"]
    answer = run([str(word) for word in (*words, tmp_path / "src/demo.c")])
    assert answer.returncode == 0, answer.stderr
    headers = (Path(word) for word in answer.stdout.split() if word.endswith(".h"))
    read = {path.stem for path in headers if path.parent.name == "include"} - {"demo"}
    assert len(read) >= 3  # what is in a folder there, such as bits/, cannot be hidden
    for name in read:
        with pytest.raises(ScheduleError, match="name = "):
            vendor.asked(name, [SCHEDULED])
