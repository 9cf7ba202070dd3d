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


def arguments(kernel):
    plan = kernel.plan
    dims = (plan.dtype.name, str(plan.head_dim), str(plan.head_dim_v))
    return [sys.executable, CALLER, kernel.binary.library, plan.slug, *dims, *SHAPES]


def test_a_c_program_without_torch_gets_sound_numbers(kernel):
    result = process.run(arguments(kernel), timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("tool", ["memcheck"])
def test_compute_sanitizer_finds_nothing(kernel, tool):
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
