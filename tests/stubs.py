"""Real bindings over C functions that stand in for kernels and only note how they were called."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

from fagen import process
from fagen.runtime import op
from fagen.build import Binary, CompilerReport
from fagen.kinds.forward.plan import Plan, plan
from fagen.render import environment, render
from fagen.kinds.forward.keys import Schedule
from fagen.toolchain import BINDING_FLAGS, BINDING_LINK_FLAGS, find_torch

HASH = "0123456789abcdef"

# What stands in for a compiled kernel, and a way to its arguments that needs no GPU.
STUB = """
#include <cstddef>
#include <cstdint>
%(abi)s
static FagenForwardArgs noted;
extern "C" int fagen_%(slug)s(const FagenForwardArgs* args, void*) { noted = *args; return 0; }
extern "C" const char* fagen_%(slug)s_message(int) { return "a stub"; }
extern "C" const FagenKernelInfo* fagen_%(slug)s_info(void) {
  static const FagenKernelInfo info = {
      sizeof(FagenKernelInfo), 1, 2, 3, 4, 5, "%(slug)s", "%(hash)s"};
  return &info;
}
extern "C" const void* noted_call(void) { return &noted; }
extern "C" int args_bytes(void) { return sizeof(FagenForwardArgs); }
"""

# The binding's own `describe`, on whatever device the tensors are.
PROBE = """
#include "%(binding)s"
namespace {
void note(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
          double scale%(parameters)s) {
  const FagenForwardArgs args = describe(q, k, v, out, lse, scale%(arguments)s);
  fagen_%(slug)s(&args, nullptr);
}
}  // namespace
STABLE_TORCH_LIBRARY_FRAGMENT(fagen_test, m) {
  m.def("note_%(slug)s(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float scale"
        "%(schema)s) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fagen_test, CPU, m) { m.impl("note_%(slug)s", TORCH_BOX(&note)); }
"""

DESCALES = ("q_descale", "k_descale", "v_descale")


@dataclass(frozen=True)
class StubOp:
    """An op over a stub, with its Plan and its files."""

    plan: Plan
    binary: Binary
    attend: op.Op

    @property
    def alone(self) -> op.Alone:
        """The op without LSE."""
        return op.alone(self.attend)


def load_stub(slug: str, folder: Path) -> StubOp:
    planned = plan(Schedule.from_slug(slug))
    binary = stub_binary(planned, folder)
    return StubOp(planned, binary, op.load(binary))


def stub_binary(planned: Plan, folder: Path) -> Binary:
    """Compile the stub of a Plan and its real binding, probe and all."""
    torch_found = find_torch()
    assert torch_found is not None
    slug = planned.slug
    descales = DESCALES if planned.fp8 else ()
    names = {
        "slug": slug,
        "hash": HASH,
        "abi": environment().get_template("abi.h.j2").render(plan=planned),
        "binding": f"{slug}_torch.cpp",
        "parameters": "".join(f", const Descale& {name}" for name in descales),
        "arguments": "".join(f", {name}" for name in descales),
        "schema": "".join(f", Tensor? {name}" for name in descales),
    }
    (folder / "stub.cpp").write_text(STUB % names)
    (folder / f"{slug}_torch.cpp").write_text(render(planned).binding)
    (folder / "probe.cpp").write_text(PROBE % names)
    (folder / "binding").mkdir()
    include = ["-isystem", torch_found.include, torch_found.target]
    link = [f"-L{folder}", f"-l:{slug}.so", f"-L{torch_found.library_dir}", *BINDING_LINK_FLAGS]
    for command in (
        ["g++", "-std=c++17", "-fPIC", "-shared", "stub.cpp", "-o", f"{slug}.so"],
        [
            *("g++", *BINDING_FLAGS, "-Wall", "-Wextra", "-Werror", *include, "probe.cpp"),
            *(*link, "-o", f"binding/{slug}_torch.so"),
        ],
    ):
        result = process.run(command, cwd=folder)
        assert result.returncode == 0, result.stderr
    return Binary(
        slug=slug,
        folder=folder,
        library=folder / f"{slug}.so",
        binding=folder / "binding" / f"{slug}_torch.so",
        report=CompilerReport(168, 0, 0, 0, 0, ()),
        cached=False,
        cpu_seconds=0.0,
        source_hash=HASH,
        host_hash=HASH,
        made_with={},
    )


def stub_library(binary: Binary) -> ctypes.CDLL:
    """The stub itself, to be asked what it was called with."""
    stub = ctypes.CDLL(str(binary.library))
    stub.noted_call.restype = ctypes.c_void_p
    return stub
