"""The zeros that a binding keeps from call to call, over a CUDA that is made up."""

import ctypes
from shutil import copy

import pytest

from fagen.render import environment
from tests.stubs import compile_cpp

# what the binding has before it: torch's tensors, of which each call that keeps none gets one
BEFORE = """
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <array>
namespace made_up {
unsigned long long id = 1;
int captured = 0, fails = 0, mallocs = 0, own = 0, mode = 0, cleared_errors = 0;
}
extern "C" {
int cudaStreamIsCapturing(void*, int* status) { *status = made_up::captured; return 0; }
int cudaStreamGetId(void*, unsigned long long* id) { *id = made_up::id; return 0; }
int cudaThreadExchangeStreamCaptureMode(int* mode) { std::swap(*mode, made_up::mode); return 0; }
int cudaGetLastError() { ++made_up::cleared_errors; return 0; }
int cudaMalloc(void** data, size_t bytes) {
  if (made_up::fails || made_up::mode != 2) return 2;  // a capture elsewhere is to go on
  ++made_up::mallocs;
  *data = std::malloc(bytes);
  std::memset(*data, 0xFF, bytes);
  return 0;
}
int cudaMemsetAsync(void* data, int value, size_t bytes, void*) {
  std::memset(data, value, bytes);
  return 0;
}
}
struct Tensor {
  char* data;
  char* get() const { return data; }
  void* mutable_data_ptr() const { return data; }
};
template <size_t kRank>
Tensor empty(const std::array<int64_t, kRank>& sizes, int, int) {
  ++made_up::own;
  return {static_cast<char*>(std::malloc(sizes[0]))};
}
int aoti_torch_dtype_uint8() { return 0; }
int aoti_torch_zero_(char* data) { *data = 0; return 0; }
void expect(int, const char*) {}
namespace {
"""
AFTER = """
}  // namespace
extern "C" void* zeros_of(unsigned long long id, int device, int captured, int fails) {
  made_up::id = id, made_up::captured = captured, made_up::fails = fails;
  return Workspace(4, device, reinterpret_cast<void*>(0x10)).data;
}
extern "C" int counted(int which) {
  return which == 0 ? made_up::mallocs : which == 1 ? made_up::own : which == 2 ? made_up::mode : made_up::cleared_errors;
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The binding's own lines in a library of their own."""
    folder = tmp_path_factory.mktemp("zeros")
    text = environment().get_template("binding/zeroed.j2").render()
    (folder / "zeros.cpp").write_text(f"{BEFORE}{text}{AFTER}")
    # by its own CUDA, also where torch has brought another one
    flags = "-std=c++17", "-Wall", "-Werror", "-Wno-address", "-fPIC", "-shared", "-Wl,-Bsymbolic"
    compile_cpp(*flags, "zeros.cpp", "-o", "zeros.so", folder=folder)
    return folder / "zeros.so"


@pytest.fixture
def zeros(built, tmp_path):
    """That library, which has kept nothing yet."""
    library = ctypes.CDLL(str(copy(built, tmp_path)))
    library.zeros_of.restype = ctypes.c_void_p
    return library


def test_a_stream_has_its_zeros_for_ever_and_shares_them_with_no_other(zeros):
    first, other, elsewhere = (zeros.zeros_of(*key, 0, 0) for key in ((1, 0), (2, 0), (1, 1)))
    assert len({first, other, elsewhere}) == 3
    assert all(ctypes.string_at(data, 4) == bytes(4) for data in (first, other, elsewhere))
    assert zeros.zeros_of(1, 0, 0, 0) == first  # by its number, whatever its handle
    assert (zeros.counted(0), zeros.counted(1)) == (3, 0)  # no tensor of torch's is kept
    assert zeros.counted(2) == 0  # how a thread captures is as it was


def test_a_captured_call_has_zeros_of_its_own(zeros):
    kept = zeros.zeros_of(1, 0, 0, 0)
    captured = {zeros.zeros_of(1, 0, 1, 0) for _ in range(3)}
    assert kept not in captured and len(captured) == 3 and zeros.counted(1) == 3


def test_where_no_memory_is_left_or_streams_are_very_many_each_call_has_its_own(zeros):
    for _ in range(2):
        zeros.zeros_of(1, 0, 0, 1)
    assert (zeros.counted(0), zeros.counted(1)) == (0, 2)
    assert zeros.counted(3) == 1  # or torch would report the failure as its own
    for number in range(2, 4_097):
        zeros.zeros_of(number, 0, 0, 0)
    assert zeros.counted(1) == 2
    zeros.zeros_of(5_000, 0, 0, 0)
    assert (zeros.counted(0), zeros.counted(1)) == (4_095, 3)
