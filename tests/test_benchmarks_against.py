"""Kernels of another revision beside today's: found, and called whatever their struct is."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fagen import registry
from fagen.problem import Cell, Problem, Sizes
from fagen.process import run
from fagen.render import environment
from fagen.toolchain import find_gxx
from tests.benchmark_helpers import BENCHMARKS

SLUG = "fwd_e4m3_d64_full_m64n64_vrows"
# as kernels were before their kind shared one struct: fewer fields, in another order
OLD = """
struct FagenForwardArgs {
  unsigned struct_bytes, reserved;
  const void *q, *k, *v;
  void* out;
  float* lse;
  long q_stride_batch, q_stride_seq, q_stride_head, k_stride_batch, k_stride_seq, k_stride_head;
  long v_stride_batch, v_stride_seq, v_stride_head, out_stride_batch, out_stride_seq;
  long out_stride_head, lse_stride_batch, lse_stride_head;
  int batch, heads, kv_heads, seqlen_q, seqlen_k;
  float scale;
};
"""
NOTING = """
static FagenForwardArgs noted;
extern "C" int fagen_stub(const FagenForwardArgs* args, void*) { noted = *args; return 7; }
extern "C" long told(int what) {
  const long known[] = {(long)noted.q, noted.k_stride_head, noted.v_stride_seq, noted.seqlen_k,
                        long(noted.scale * 8), noted.lse_stride_head, %s};
  return known[what];
}
"""


@pytest.fixture
def against(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("against")


@pytest.mark.parametrize("old", [True, False])
def test_a_kernel_is_called_by_the_names_of_its_structs_fields(
    against: ModuleType, old: bool, tmp_path: Path
) -> None:
    header = OLD
    if not old:
        header = environment().get_template("abi.h.j2").render(plan=registry.plan_of(SLUG))
    noting = NOTING % ("0, 0" if old else "(long)noted.k_descale, noted.version")
    (tmp_path / "before.cu").write_text(f"#include <cstdint>\n{header}\n{noting}")
    gxx, _ = find_gxx()
    command = [gxx, "-std=c++17", "-shared", "-fPIC", "-x", "c++", "-include", "before.cu"]
    command += ["-DFAGEN_FUNCTION=fagen_stub", BENCHMARKS / "adapter.cu", "-o", "kernel.so"]
    made = run(command, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    q, k, v = (torch.zeros(2, s, h, 64) for s, h in ((5, 4), (7, 2), (7, 2)))
    scales = () if old else tuple(torch.ones(1, 1, 1) for _ in range(3))
    into = torch.zeros(2, 5, 4, 64), torch.zeros(2, 4, 5)
    cell = Cell(Problem("fp16", 64, 64, "full", v_layout="rows"), Sizes(2, 4, 2, 5, 7))
    call = against.call_before(tmp_path / "kernel.so", cell, (q, k, v, 0.25, *scales), into, 0)
    with pytest.raises(Exception, match="status 7"):
        call()
    told = ctypes.CDLL(str(tmp_path / "kernel.so")).told
    told.restype = ctypes.c_long
    found = [told(i) for i in range(8)]
    assert found[:6] == [q.data_ptr(), 64, 128, 7, 2, 5]
    assert found[6:] == ([0, 0] if old else [scales[1].data_ptr(), 3])


def test_kernels_are_taken_out_of_a_folder(against: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("one")
    (tmp_path / "b.json").write_text("{}")
    assert against.kernels_before(str(tmp_path)) == {"a": "one"}
