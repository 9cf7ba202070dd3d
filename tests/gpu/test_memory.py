"""Every committed kernel under compute-sanitizer, called as a C program would."""

import shutil
import sys
from pathlib import Path

import pytest

from fagen import process

pytestmark = pytest.mark.gpu

CALLER = Path(__file__).with_name("c_caller.py")
MEMORY_ERROR = 9  # what compute-sanitizer exits with when it found one
# batch, seqlen_q, seqlen_k, heads, kv_heads: ragged tiles, several tiles, masked rows, no key
SHAPES = ("1,1,1,1,1", "2,130,97,2,1", "1,300,40,2,2", "1,5,333,2,2", "1,9,0,1,1")


# of e4m3 some that need not be committed: V transposed in the kernel, scales by block, both
FP8 = (
    "fwd_e4m3_d128_causal_m128n128_vrows",
    "fwd_e4m3_d64_full_m128n64_sblock_sr32",
    "fwd_e4m3_d80v48_causal_m64n32_vrows_sblock_sr32",
)


def arguments(kernel):
    plan = kernel.plan
    dtype = plan.dtype.name
    if plan.fp8:
        layout = "rows" if plan.v_rows else "columns"
        scale_rows = plan.scale_rows if plan.scales_by_block else 0
        dtype = f"{dtype}-{plan.out_dtype.name}-{layout}-{scale_rows}"
    dims = (dtype, str(plan.head_dim), str(plan.head_dim_v))
    return [sys.executable, CALLER, kernel.binary.library, plan.slug, *dims, *SHAPES]


@pytest.fixture(scope="module", params=FP8)
def fp8_kernel(request, hopper, built_together):
    return built_together(FP8)(request.param)


def test_a_c_program_without_torch_gets_sound_numbers(any_kernel):
    run_as_c(any_kernel)


def test_a_c_program_gets_sound_numbers_of_e4m3(fp8_kernel):
    run_as_c(fp8_kernel)


def run_as_c(kernel):
    result = process.run(arguments(kernel), timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("tool", ["memcheck"])
def test_compute_sanitizer_finds_nothing(any_kernel, tool):
    sanitize(any_kernel, tool)


@pytest.mark.parametrize("tool", ["memcheck"])
def test_compute_sanitizer_finds_nothing_in_e4m3(fp8_kernel, tool):
    sanitize(fp8_kernel, tool)


def sanitize(kernel, tool):
    name = "compute-sanitizer"
    sanitizer = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    result = process.run(
        [sanitizer, "--tool", tool, "--error-exitcode", str(MEMORY_ERROR), *arguments(kernel)],
        timeout=300,
    )
    said = result.stdout + result.stderr
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer does not support this device or this machine")
    assert result.returncode == 0, said
    assert "ERROR SUMMARY: 0 errors" in said, said
