"""Real bindings over C functions that stand in for kernels: they check and note their calls.

For a Plan of any kind: what a stub has in common with a kernel, the struct, the checks, the size of
the workspace and the message of each status, is rendered from the kernel's own templates.
"""

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fagen import process
from fagen.build import Binary, CompilerReport
from fagen.kind import Plan
from fagen.paths import locate
from fagen.registry import plan_of
from fagen.render import BINDING, HASH_WORD, Hashes, environment
from fagen.runtime import op
from fagen.runtime.c_interface import struct_of
from fagen.toolchain import BINDING_FLAGS, BINDING_LINK_FLAGS, find_gxx, find_torch

HASH = "0123456789abcdef"
WARNINGS = ("-Wall", "-Wextra", "-Werror")

# What stands in for a compiled kernel: all of its host's side but the launch.
STUB = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
{% include "abi.h.j2" %}
using cudaStream_t = void*;
#ifndef FAGEN_HOST_H
#define FAGEN_HOST_H
namespace fagen_host {
{% set calls = plan.signature %}
{% include "host/calls.cuh.j2" %}
{% include "host/tensor.cuh" %}
}
#endif
namespace fagen_{{ plan.slug }}_kernel {
constexpr int kSharedBytes = {{ plan.shared_bytes }}, kThreads = {{ plan.threads }};
constexpr int kLaunchRegisters = {{ plan.launch_registers }};
}
namespace fagen_{{ plan.slug }}_host {
using namespace fagen_host;
{% if plan.launches.shares %}
int64_t shares_bytes(const {{ plan.signature.struct }}&) { return 0; }
{% endif %}
{% include "host/sizes.cuh.j2" %}
{% include "host/checks.cuh.j2" %}
static {{ plan.signature.struct }} noted;
Status launch(const {{ plan.signature.struct }}& args, cudaStream_t) {
  noted = args;
  return kOk;
}
{% include "host/entry.cuh.j2" %}
extern "C" const void* noted_call(void) { return &fagen_{{ plan.slug }}_host::noted; }
extern "C" int args_bytes(void) { return sizeof({{ plan.signature.struct }}); }
"""

# The binding's own `check` and `describe`, on whatever device the tensors are. Outputs come first:
# among the op's arguments some have defaults.
PROBE = """
{% from "binding/names.j2" import names, parameters %}
{% set signature = plan.signature %}
#include "{{ plan.slug }}_torch.cpp"
#include <cstring>
#include <vector>
namespace {
{% if signature.is_viewed %}
View view(const Tensor& tensor) {
  return {{ "{{" }}const_cast<void*>(tensor.const_data_ptr()), tensor.sizes().data(), tensor.strides().data(), tensor.dim(), dtype(tensor), device_type(tensor), tensor.get_device_index(){{ "}}" }};
}
[[maybe_unused]] std::optional<View> view(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional(view(*tensor)) : std::nullopt;
}
double view(double scale) { return scale; }
{% endif %}
void note({% for tensor in signature.outputs %}const {{ "std::optional<Tensor>" if tensor.omittable or tensor.made else "Tensor" }}& {{ tensor.result }}, {% endfor %}{{ parameters(signature) }}) {
  {{ signature.struct }} args = describe(check({{ names(signature) }}), {{ names(signature) }}{% for tensor in signature.outputs %}, {{ tensor.result }}{% endfor %});
{% if signature.is_viewed %}
{% set viewed %}{% for argument in signature.arguments %}view({{ argument.name }}){{ ", " if not loop.last }}{% endfor %}{% endset %}
  const auto of_views = describe(check({{ viewed }}), {{ viewed }}{% for tensor in signature.outputs %}, view({{ tensor.result }}){% endfor %});
  if (std::memcmp(&args, &of_views, sizeof(args)) != 0) {
    fail<std::runtime_error>("views of tensors are taken for others");
  }
{% endif %}
  std::vector<std::max_align_t> workspace(fagen_{{ plan.slug }}_workspace(&args) / sizeof(std::max_align_t) + 1);
  args.workspace = workspace.data();
  args.workspace_bytes = fagen_{{ plan.slug }}_workspace(&args);
  if (const int status = fagen_{{ plan.slug }}(&args, nullptr)) {
    fail<std::runtime_error>(fagen_{{ plan.slug }}_message(status));
  }
}
}  // namespace
STABLE_TORCH_LIBRARY_FRAGMENT(fagen_test, m) {
  m.def("note_{{ plan.slug }}({% for tensor in signature.outputs %}Tensor{{ "?" if tensor.omittable or tensor.made }} {{ tensor.result }}, {% endfor %}{{ signature.asked }}) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fagen_test, CPU, m) { m.impl("note_{{ plan.slug }}", TORCH_BOX(&note)); }
"""  # noqa: E501


@dataclass(frozen=True)
class StubOp:
    """An op over a stub, with its Plan and its files."""

    plan: Any
    binary: Binary
    op: op.Op

    @property
    def slug(self) -> str:
        """The Plan's."""
        return self.binary.slug

    @property
    def out_only(self) -> op.Op:
        """The op that leaves an output out."""
        return op.out_only(self.op)

    @property
    def below(self) -> op.Op:
        """The op as it is called below Autograd."""
        return getattr(torch.ops.fagen, f"{self.slug}_no_grad").default  # type: ignore[no-any-return]

    def noted(self, **named: Any) -> Any:
        """What the C function is passed for inputs, scalars and outputs by their names: a copy."""
        getattr(torch.ops.fagen_test, f"note_{self.slug}").default(**named)
        library = stub_library(self.binary)
        struct = struct_of(self.plan.signature)
        assert library.args_bytes() == ctypes.sizeof(struct)
        return struct.from_buffer_copy(struct.from_address(library.noted_call()))


def load_stub(slug: str, folder: Path) -> StubOp:
    planned = plan_of(slug)
    binary = stub_binary(planned, folder)
    return StubOp(planned, binary, op.load(binary))


def stub_binary(planned: Plan, folder: Path) -> Binary:
    """Compile the stub of a Plan and its real binding, probe and all."""
    torch_found = find_torch()
    assert torch_found is not None
    slug = planned.slug
    (folder / "binding").mkdir()
    (folder / f"{slug}_torch.cpp").write_text(rendered(planned, template(BINDING)))
    (folder / "probe.cpp").write_text(rendered(planned, PROBE))
    flags = (*BINDING_FLAGS, "-O0", *WARNINGS, "-isystem", torch_found.include)
    headers = precompiled(flags)
    link = [f"-L{folder}", f"-l:{slug}.so", f"-L{torch_found.library_dir}", *BINDING_LINK_FLAGS]
    library = stub_of(planned, folder)
    compile_cpp(
        *(*flags, "-include", Path(headers.name) / "all.h", "probe.cpp"),
        *(*link, "-o", f"binding/{slug}_torch.so"),
        folder=folder,
    )
    return Binary(
        slug=slug,
        folder=folder,
        library=library,
        binding=folder / "binding" / f"{slug}_torch.so",
        report=CompilerReport(168, 0, 0, 0, 0, ()),
        cached=False,
        cpu_seconds=0.0,
        source_hash=HASH,
        hashes=Hashes(HASH, HASH, HASH),
        made_with={},
        plan=planned,
    )


@cache
def precompiled(flags: tuple[str | Path, ...]) -> TemporaryDirectory[str]:
    """A folder with bindings' headers, compiled once in a process: they take most of its time."""
    folder = TemporaryDirectory()
    text = (locate("templates") / BINDING).read_text()
    (Path(folder.name) / "all.h").write_text("\n".join(re.findall(r"^#include <.*>$", text, re.M)))
    compile_cpp(*flags, "-x", "c++-header", "all.h", "-o", "all.h.gch", folder=Path(folder.name))
    return folder


def stub_of(planned: Plan, folder: Path) -> Path:
    """Compile what stands in for a Plan's kernel; it needs no torch."""
    library = f"{planned.slug}.so"
    (folder / "stub.cpp").write_text(rendered(planned, STUB))
    flags = (*WARNINGS, "-std=c++17", "-fPIC", "-shared")
    compile_cpp(*flags, "stub.cpp", "-o", library, folder=folder)
    return folder / library


def stub_library(binary: Binary) -> ctypes.CDLL:
    """The stub itself, to be asked what it was called with."""
    stub = ctypes.CDLL(str(binary.library))
    stub.noted_call.restype = ctypes.c_void_p
    return stub


def fields_of(args: ctypes.Structure) -> dict[str, Any]:
    """A struct's fields by name, but for the workspace, which every call has its own of."""
    fields: Mapping[str, Any] = {name: getattr(args, name) for name, _ in args._fields_}  # type: ignore[misc]
    return {
        name: tuple(value) if isinstance(value, ctypes.Array) else value
        for name, value in fields.items()
        if not name.startswith("workspace")
    }


def rendered(planned: Plan, text: str) -> str:
    """A template's text, rendered for a Plan."""
    whole = environment().from_string(text).render(plan=planned)
    return whole.replace(HASH_WORD, HASH)


def template(name: str) -> str:
    """The text of a template that only includes another."""
    return f'{{% include "{name}" %}}'


def compile_cpp(*arguments: str | Path, folder: Path) -> None:
    """Run g++ in a folder; what it says is what fails."""
    gxx, _ = find_gxx()
    result = process.run([gxx, *arguments], cwd=folder)
    assert result.returncode == 0, result.stderr[:8000]
