"""A vendored folder of plain source: its texts, as a C and a C++ compiler take them."""

import ast
import json
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from fagen import registry, simulator, vendor
from fagen.process import run
from fagen.render import HOST_MARK, INTERFACE_MARK, formatted, render
from fagen.simulator.translate import translated
from fagen.toolchain import find_cutlass, find_gxx
from fagen.vendor import closure, source
from tests.test_vendor_jax import KERNELS as OF_JAX
from tests.vendor_helpers import KERNELS as OF_TORCH
from tests.vendor_helpers import vendored

WARNINGS = ["-Wall", "-Wextra", "-pedantic", "-Werror"]
C = ["gcc", "-std=c99", *WARNINGS]
CPP = ["g++", "-std=c++17", *WARNINGS, "-x", "c++"]
KERNELS = [
    "fwd_fp16_d128_causal_m128n128",
    "fwd_e4m3_d64_full_m256n64_s3",
    "quant_fp16_d128_rot_shead",
    "comb_fp32_d128_obf16_varlen",
    "bwd_fp16_d128_causal_m64n128",
    "dec_fp16_d128_causal_r8n64",
]


@cache
def texts(*slugs: str, with_cutlass: bool = False) -> dict[str, str]:
    """The files of a folder called demo."""
    schedules = [registry.from_slug(slug) for slug in slugs]
    request = vendor.asked("demo", schedules, with_cutlass=with_cutlass)
    return source.texts(vendor.folder_of(request))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path, text in texts(*KERNELS).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def compiled(words: list[str], *more: object) -> None:
    answer = run([*words, *map(str, more)])
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("compiler", [C, CPP], ids=["C", "C++"])
def test_header_and_dispatcher_are_c_and_cpp(folder, compiler):
    compiled(compiler, "-fsyntax-only", "-I", folder / "include", folder / "src/demo.c")


def interface(kernel: str) -> str:
    """What a kernel's source says of itself: the part that any C++ compiler takes."""
    return kernel[kernel.index(INTERFACE_MARK) : kernel.index(HOST_MARK)].partition("\n")[2]


def test_header_and_kernels_say_the_same_in_one_translation_unit(folder):
    parts = [interface(texts(*KERNELS)[f"src/{slug}.cu"]) for slug in KERNELS]
    header = '#include "demo.h"\n'
    for name, order in {"first": [header, *parts], "last": [*parts, header]}.items():
        (folder / f"{name}.cpp").write_text("#include <cstdint>\n" + "\n".join(order))
        compiled(CPP, "-fsyntax-only", "-I", folder / "include", folder / f"{name}.cpp")
    # each struct is the header's, size and all, whoever declares it first
    sizes = {}
    for name, text in {"header": header, "kernels": "\n".join(parts)}.items():
        structs = sorted(
            set(re.findall(r"struct (Fagen\w+) \{", text + texts(*KERNELS)["include/demo.h"]))
        )
        statements = "".join(
            f'  std::printf("%zu %zu\\n", sizeof({s}), alignof({s}));\n' for s in structs
        )
        (folder / f"{name}.cpp").write_text(
            f"#include <cstdint>\n#include <cstdio>\n{text}\nint main() {{\n{statements}}}\n"
        )
        compiled(CPP, "-I", folder / "include", folder / f"{name}.cpp", "-o", folder / name)
        sizes[name] = run([folder / name]).stdout
    assert sizes["header"] == sizes["kernels"] and sizes["header"].count("\n") == 6


def test_kernels_of_several_kinds_and_their_header_are_one_translation_unit(tmp_path):
    """As the simulator reads them, which stands in for CUDA."""
    slugs = ("fwd_fp16_d64_full_m64n64", "dec_fp16_d128_causal_r16n64", "comb_fp16_d64")
    kernels = [translated(render(registry.plan_of(slug)).kernel) for slug in slugs]
    words = [*CPP[:1], "-std=c++20", "-w", "-fsyntax-only", "-I", simulator.__path__[0]]

    def said(*texts: str) -> str:
        (tmp_path / "all.cpp").write_text("\n".join(texts))
        return run([*words, tmp_path / "all.cpp"]).stderr

    assert said(*kernels) == ""
    older = re.sub("define FAGEN_HOST_H 0x", "define FAGEN_HOST_H 1 + 0x", kernels[0])
    assert "fagen_host.h beside this kernel is that of another version" in said(older)


def test_kernels_of_another_version_are_refused_by_the_compiler(folder):
    (folder / "old.cpp").write_text('#define FAGEN_FORWARD_ARGS 1\n#include "demo.h"\n')
    answer = run([*CPP, "-fsyntax-only", "-I", folder / "include", folder / "old.cpp"])
    assert "kernels of kind forward of two versions of fagen" in answer.stderr


def test_the_headers_statuses_are_the_kernels():
    files = texts(*KERNELS)
    header = re.search(
        r"enum \{\s*(DEMO_OK = 0.*?),\s*DEMO_NO_KERNEL", files["include/demo.h"], re.S
    )
    statuses = [word.split(" = ") for word in re.split(r",\s*", header[1])]
    assert [int(number) for _, number in statuses] == [*range(len(statuses))]
    named = [name for name, _ in statuses]
    for slug in KERNELS:
        assert '#include "fagen_host.h"' in files[f"src/{slug}.cu"]
        own = re.search(r"enum Status \{(.*?)\}", files["src/fagen_host.h"], re.S)
        words = [word.strip() for word in own[1].split(",") if word.strip()]
        assert named == ["DEMO" + re.sub(r"([A-Z])", r"_\1", w[1:]).upper() for w in words]


def test_only_c_functions_are_to_be_seen():
    files = texts(*KERNELS)
    exported = re.findall(r"^    (\w+);$", files["src/demo.map"], re.M)
    declared = re.findall(r"^[a-z][\w ]*\*? ?\b(\w+)\(", files["include/demo.h"], re.M)
    assert sorted(exported) == sorted(declared) and len(exported) == 13 + 4 * len(KERNELS)
    assert "local:\n    *;" in files["src/demo.map"]


# ---- CUTLASS ------------------------------------------------------------------------------------


def test_the_closure_is_small_and_has_all_that_it_includes():
    files = texts(KERNELS[0], with_cutlass=True)
    headers = {p: t for p, t in files.items() if p.startswith("third_party/cutlass/include/")}
    assert 30 < len(headers) < 136
    assert sum(map(len, files.values())) < 6e6
    root = "third_party/cutlass/include"
    include, _ = find_cutlass()
    for path, text in headers.items():
        for name in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.M):
            if (include / name).exists():
                assert f"{root}/{name}" in headers, (path, name)
    licence = files["third_party/cutlass/LICENSE.txt"]
    assert "Redistribution and use" in licence and "NVIDIA" in licence
    assert not [p for p in texts(KERNELS[3], with_cutlass=True) if p.startswith("third_party")]


@pytest.mark.long
def test_the_closure_is_what_the_compiler_reads(tmp_path):
    include, _ = find_cutlass()
    kernel = texts(KERNELS[0])[f"src/{KERNELS[0]}.cu"]
    (tmp_path / "k.cu").write_text(kernel)
    (tmp_path / "fagen_host.h").write_text(texts(KERNELS[0])["src/fagen_host.h"])
    words = ["nvcc", "-std=c++17", "-arch=sm_90a", "-M", f"-I{include}", str(tmp_path / "k.cu")]
    answer = run(words)
    assert answer.returncode == 0, answer.stderr
    read = {
        w.removeprefix(f"{include}/") for w in answer.stdout.split() if w.startswith(f"{include}/")
    }
    headers = set(closure.headers([kernel]))
    assert read <= headers and len(headers - read) < 10


# ---- all of it ----------------------------------------------------------------------------------


def test_manifest_json_says_what_a_folder_is_made_of():
    record = json.loads(texts(*KERNELS)["manifest.json"])
    assert [kernel["slug"] for kernel in record["kernels"]] == KERNELS
    first = record["kernels"][0]
    assert first["evidence"]["card"] == "NVIDIA H200" and first["kind"] == "forward"
    schedule = registry.kind("forward").schedule.make(**first["schedule"])
    assert schedule.slug == KERNELS[0]
    assert first["source_hash"] in texts(*KERNELS)[f"src/{KERNELS[0]}.cu"]


def test_the_readme_has_every_argument_and_flag():
    readme = texts(*KERNELS)["README.md"]
    for slug in KERNELS:
        signature = registry.plan_of(slug).signature
        section = readme.partition(f"### `fagen_{slug}`")[2].partition("\n### ")[0]
        for name in [t.name for t in signature.tensors if t.present] + [*signature.most]:
            assert f"| `{name}` |" in section
    assert "--expt-relaxed-constexpr" in readme and "-lineinfo" not in readme
    assert "--expt-relaxed-constexpr" in texts(*KERNELS)["CMakeLists.txt"]


def test_the_test_program_is_cpp_for_every_kind(folder):
    find_gxx()
    cuda = Path("/usr/local/cuda/include")
    if not cuda.exists():
        pytest.skip("the CUDA headers are not there")
    words = [*CPP[:-2], "-fsyntax-only", "-I", folder / "include", "-isystem", cuda]
    compiled([str(word) for word in words], folder / "tests/demo_test.cpp")
    assert (
        formatted(texts(*KERNELS)["tests/demo_test.cpp"]) == texts(*KERNELS)["tests/demo_test.cpp"]
    )


# ---- packages of every format -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "slugs", "needs"),
    [
        ("torch", OF_TORCH, {"torch", "setuptools", "compile_kernels"}),
        ("hf-kernel", OF_TORCH, {"torch", "compile_kernels"}),
        ("jax", OF_JAX, {"jax", "numpy"}),
    ],
)
def test_its_python_is_tidy_and_needs_nothing_of_fagen(form, slugs, needs, tmp_path):
    vendored("demo", form, tmp_path, *slugs)
    imported = set()
    for path in tmp_path.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).partition(".")[0])
    assert needs <= imported - sys.stdlib_module_names <= needs | {"demo"}
    if not find_spec("ruff"):
        pytest.skip("ruff, of the extra dev, is not installed")
    usual = ["--isolated", "--no-cache", "--target-version=py39", "--line-length=100"]
    rules = ["check", "--select=E,F,I,UP,W,B", "--ignore=E501"]
    for words in (rules, ["format", "--diff"]) if form == "jax" else (rules,):
        answer = run([sys.executable, "-m", "ruff", *words, *usual, str(tmp_path)])
        assert answer.returncode == 0, answer.stdout
