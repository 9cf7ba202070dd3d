"""Vendored folders on a Hopper GPU: built by CMake, their own test program and the example run."""

from pathlib import Path

import pytest

from fagen import registry, vendor
from fagen.process import run
from tests.cli_helpers import ROOT

pytestmark = pytest.mark.gpu

SLUGS = [
    "fwd_fp16_d128_causal_m128n128",
    "fwd_bf16_d64_full_m128n128",
    "fwd_bf16_d192v128_causal_m128n64_s3",
    "fwd_e4m3_d64_full_m256n64_s3",
    "fwd_e4m3_d128_full_m128n128_vrows_sblock",
    "fwd_e4m3_d256_causal_m128n96_s3_halves_nointer_sblock",
    *(path.stem for kind in ("quantize", "combine") for path in registry.schedules(kind)),
]


def test_the_slugs_here_are_those_of_schedules():
    for slug in SLUGS:
        assert registry.from_slug(slug).slug == slug


def built(folder: Path) -> Path:
    place = folder.with_name(f"{folder.name}-build")
    for words in (
        ["cmake", "-S", folder, "-B", place, "-DCMAKE_BUILD_TYPE=Release"],
        ["cmake", "--build", place, "-j16"],
    ):
        answer = run([str(word) for word in words], env={"PYTHONPATH": ""})
        assert answer.returncode == 0, answer.stdout + answer.stderr
    return place


def test_every_kernel_of_a_folder_is_right_by_its_own_test_program(hopper, tmp_path):
    asked = vendor.asked("every", [registry.from_slug(slug) for slug in SLUGS], with_cutlass=True)
    vendor.vendor(asked, tmp_path / "every")
    answer = run([built(tmp_path / "every") / "every_test"])
    print(answer.stdout)
    assert answer.returncode == 0, answer.stdout
    assert answer.stdout.count(": right") == len(SLUGS)


def test_the_example_runs(hopper, tmp_path):
    for path in (ROOT / "examples/cpp").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    vendor.vendor(vendor.read(tmp_path / "vendor.toml"), tmp_path / "attention")
    answer = run([built(tmp_path) / "two_kernels"])
    assert answer.returncode == 0, answer.stdout
    assert answer.stdout.count("  0 of ") == 2
