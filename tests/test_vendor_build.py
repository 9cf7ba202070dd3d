"""Vendored folders as their users build them: by CMake and nvcc, with fagen out of reach."""

import json
import re
from pathlib import Path

import pytest

from fagen import registry, vendor
from fagen.process import run
from fagen.toolchain import find_cutlass
from tests.cli_helpers import ROOT

pytestmark = pytest.mark.long

KERNEL, OTHER = "fwd_fp16_d128_causal_m128n128", "fwd_bf16_d64_full_m128n128"
PROGRAM = """\
#include <one.h>
#include <two.h>

#include <cstdio>

int main() {
  FagenForwardArgs args = {};
  OneProblem causal = {ONE_DTYPE_FP16, 128, 128, ONE_MASK_CAUSAL};
  TwoProblem full = {TWO_DTYPE_BF16, 64, 64, TWO_MASK_FULL};
  std::puts(one_pick(&causal, &args)->info()->slug);
  std::puts(two_pick(&full, &args)->info()->slug);
  std::puts(two_message(two_forward(&full, &args, nullptr)));
  return one_pick(&causal, nullptr) != nullptr;
}
"""
PROJECT = """\
cmake_minimum_required(VERSION 3.24)
project(user LANGUAGES C CXX CUDA)
find_package(one REQUIRED)
set(CMAKE_CUDA_ARCHITECTURES 80)  # of other code
set(CMAKE_CUDA_SEPARABLE_COMPILATION ON)
add_subdirectory(two)
add_executable(program program.cpp)
target_link_libraries(program PRIVATE one::one two::two)
"""


def ran(*words: object, cwd: Path) -> str:
    # -I and an empty PYTHONPATH: should anything start Python, it would not find fagen
    answer = run([str(word) for word in words], cwd=cwd, env={"PYTHONPATH": ""})
    assert answer.returncode in (0, 77), answer.stdout + answer.stderr
    return answer.stdout + answer.stderr


def built(folder: Path, *options: str) -> Path:
    place = folder.with_name(f"{folder.name}-build")
    ran("cmake", "-S", folder, "-B", place, "-DCMAKE_BUILD_TYPE=Release", *options, cwd=folder)
    ran("cmake", "--build", place, "-j2", cwd=folder)
    return place


def folder(name: str, place: Path, *slugs: str, with_cutlass: bool = False) -> Path:
    schedules = [registry.from_slug(slug) for slug in slugs]
    request = vendor.asked(name, schedules, with_cutlass=with_cutlass)
    vendor.vendor(request, place / name)
    return place / name


def test_a_folder_builds_installs_and_is_found_beside_another(tmp_path):
    first = folder("one", tmp_path, KERNEL, with_cutlass=True)
    size = sum(path.stat().st_size for path in first.rglob("*") if path.is_file())
    assert size < 6e6
    place = built(first)
    library = place / "libone.so"
    assert library.stat().st_size < 1.2e6
    symbols = ran("nm", "-D", "--defined-only", library, cwd=place)
    shown = set(re.findall(r"\bT (\w+)$", symbols, re.M))
    declared = set(re.findall(r"^    (\w+);$", (first / "src/one.map").read_text(), re.M))
    assert shown == declared and symbols.count("\n") == len(declared)
    output = ran("ctest", "--output-on-failure", cwd=place)
    assert "100% tests passed" in output
    ran("cmake", "--install", place, "--prefix", tmp_path / "installed", cwd=place)

    user = tmp_path / "user"
    user.mkdir()
    (user / "CMakeLists.txt").write_text(PROJECT)
    (user / "program.cpp").write_text(PROGRAM)
    folder("two", user, OTHER)
    include, _ = find_cutlass()
    prefix = f"-DCMAKE_PREFIX_PATH={tmp_path / 'installed'}"
    program = built(user, prefix, f"-DCUTLASS_DIR={include}")
    lines = ran(program / "program", cwd=program).splitlines()
    assert lines[:2] == [KERNEL, OTHER] and "struct_bytes" in lines[2]
    assert not list(program.rglob("two_test*"))  # tests are the top-level project's


PACKAGE = """\
add_library(nvidia::cutlass::cutlass INTERFACE IMPORTED)
set_target_properties(nvidia::cutlass::cutlass PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "{}")
"""


def test_with_a_shared_runtime_a_library_is_small_and_cutlass_may_be_a_package(tmp_path):
    include, _ = find_cutlass()
    (tmp_path / "NvidiaCutlassConfig.cmake").write_text(PACKAGE.format(include))
    options = ["-DCMAKE_CUDA_RUNTIME_LIBRARY=Shared", f"-DNvidiaCutlass_DIR={tmp_path}"]
    place = built(folder("one", tmp_path, KERNEL), *options)
    assert (place / "libone.so").stat().st_size < 2e5


def test_the_readmes_command_without_cmake_builds_a_library(tmp_path):
    first = folder("one", tmp_path, KERNEL, with_cutlass=True)
    readme = (first / "README.md").read_text()
    command = re.search(r"^    (nvcc (?:.*\\\n)*.*)$", readme, re.M)[1]
    ran("sh", "-c", command, cwd=first)
    shown = ran("nm", "-D", "--defined-only", first / "libone.so", cwd=first)
    assert all(re.fullmatch(r"\w+ T (one|fagen)_\w+", line) for line in shown.splitlines())


def test_a_missing_cutlass_is_said_in_words(tmp_path):
    first = folder("one", tmp_path, KERNEL)
    for option in ("-DCUTLASS_DIR=/nowhere", "-DNvidiaCutlass_DIR=/nowhere"):
        words = ["cmake", "-S", str(first), "-B", str(tmp_path / "b" / option[-9:]), option]
        answer = run(words, cwd=tmp_path)
        assert answer.returncode and "CUTLASS_DIR" in answer.stderr


def test_every_kind_and_dtype_builds_as_one_library(tmp_path):
    slugs = [path.stem for kind in registry.ENTRIES for path in registry.schedules(kind)[:2]]
    slugs += ["fwd_e4m3_d64_full_m256n64_s3", "fwd_e4m3_d128_full_m128n128_vrows_sblock"]
    all_ = folder("every", tmp_path, *slugs, with_cutlass=True)
    place = built(all_)
    output = ran(place / "every_test", cwd=place)
    assert "skipped" in output or output.count(": right") == len(slugs)
    record = json.loads((all_ / "manifest.json").read_text())
    assert [kernel["slug"] for kernel in record["kernels"]] == slugs


def test_the_example_links_two_kernels_into_one_program(tmp_path):
    for path in (ROOT / "examples/cpp").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    vendor.vendor(vendor.read(tmp_path / "vendor.toml"), tmp_path / "attention")
    place = built(tmp_path)
    output = ran(place / "two_kernels", cwd=place)
    assert "there is no GPU" in output or output.count("  0 of ") == 2


def test_what_the_page_shows_builds_a_folder(tmp_path):
    page = (ROOT / "docs/vendor.md").read_text("utf-8")
    block = page.partition("```\nfagen vendor ")[2].partition("\n```")[0]
    vendored, *commands = block.splitlines()
    *slugs, _, place, _, name = vendored.split()
    request = vendor.asked(name, [registry.from_slug(slug) for slug in slugs])
    vendor.vendor(request, tmp_path / place)
    include, _ = find_cutlass()
    assert len(commands) == 2 and "/path/to/cutlass" in commands[0]
    output = ""
    for command in commands:
        output += ran("sh", "-c", command.replace("/path/to/cutlass", str(include)), cwd=tmp_path)
    assert "100% tests passed" in output
