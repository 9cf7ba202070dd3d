"""What a vendored folder says of its calls: conventions, and a call of each struct that works."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from fagen import registry, render, vendor
from fagen.process import run
from fagen.toolchain import find_gxx
from fagen.vendor import source
from fagen.vendor.contents import Folder, folder_of
from fagen.vendor.manifest import Manifest
from tests.c_calls import launchers_of
from tests.stubs import WARNINGS

# one of each struct, and of e4m3 with strides of rounded sizes; causal ones need zeros
KERNELS = (
    "fwd_e4m3_d128_full_m128n128_sblock",
    "fwd_fp16_d128_causal_m128n128",
    "bwd_fp16_d128_causal_m64n128",
    "fwd_fp16_d128_causal_m128n128_varlen_packgqa",
    "bwd_fp16_d128_causal_m64n128_varlen",
    "fwd_e4m3_d128_causal_m192n96_varlen_s3_nointer",
    "dec_fp16_d128_causal_r8n64",
    "quant_fp16_d128_center_scol_vcols",
    "comb_fp32_d128_obf16_varlen",
)

# What the calls ask of CUDA: memory whose bytes are 0xff until they are cleared.
CUDA = """
#include <stdlib.h>
#include <string.h>
typedef void* cudaStream_t;
enum { cudaSuccess };
static int cleared;
static int cudaMallocAsync(void** at, size_t bytes, cudaStream_t stream) {
  (void)stream;
  return bytes > 1 << 20 || !(*at = aligned_alloc(16, (bytes + 15) / 16 * 16));
}
static int cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  (void)stream;
  ++cleared;
  memset(at, value, bytes);
  return 0;
}
static int cudaFreeAsync(void* at, cudaStream_t stream) {
  (void)stream;
  free(at);
  return 0;
}
"""


@dataclass(frozen=True)
class Made:
    """A folder, and the texts of its files by path."""

    folder: Folder
    texts: Mapping[str, str]


def made_of(name: str, *slugs: str) -> Made:
    """A folder of kernels whose C++ is not laid out, which takes most of the time."""
    manifest = Manifest(name, tuple(("", registry.from_slug(slug)) for slug in slugs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "formatted", lambda text: text)
        patch.setattr(source, "formatted", lambda text: text)
        folder = folder_of(manifest)
        return Made(folder, vendor.FORMATS["source"](folder))


@pytest.fixture(scope="module")
def demo() -> Made:
    return made_of("demo", *KERNELS)


def test_the_readme_shows_a_call_of_each_struct_that_compiles_and_passes_all_checks(
    demo: Made, tmp_path: Path
) -> None:
    (text,) = re.findall(r"```cpp\n(.*?)```", demo.texts["README.md"], re.S)
    names = re.findall(r"^int (call_\w+)\(", text, re.M)
    assert names == [f"call_{group.name.replace(' ', '_')}" for group in demo.folder.groups]
    assert len(names) == len(KERNELS) - 1
    for path in ("include/demo.h", "src/demo.c"):
        (tmp_path / Path(path).name).write_text(demo.texts[path])
    (tmp_path / "cuda_runtime_api.h").write_text(CUDA)
    (tmp_path / "launchers.cpp").write_text(launchers_of(x.plan for x in demo.folder.kernels))
    lines = ["int main(void) {", "  int wrong = 0;"]
    for example in demo.folder.examples:
        args = ["&memory" for _ in example.tensors] + ["2" for _ in example.signature.sizes]
        args += ["1" for _ in example.numbers]
        lines += ["  cleared = 0;", f"  wrong += call_{example.name}({', '.join(args)}, NULL);"]
        needed = example.zeroed and "forward_" in example.name  # the others' kernel needs none
        lines += [f"  wrong += cleared != {int(needed)};"]
    main = "\n".join([*lines, "  return wrong;", "}", ""])
    where = "static struct { _Alignas(16) char bytes[16]; } memory;\n"
    (tmp_path / "calls.c").write_text(f"#include <stddef.h>\n{text}{where}{main}")
    (tmp_path / "calls.cpp").write_text(text)  # C++ too
    gxx = find_gxx()[0]
    for command in (
        [gxx, "-std=c++17", "-fsyntax-only", *WARNINGS, "-Wno-missing-field-initializers"],
        ["gcc", "-std=c11", "-c", "-Wall", "-Wextra", "-Werror"],
    ):
        source = "calls.cpp" if command[0] == gxx else "calls.c"
        answer = run([*command, "-I.", source], cwd=tmp_path)
        assert answer.returncode == 0, answer.stderr
    link = run([gxx, "-std=c++17", "-I.", "launchers.cpp", "-c"], cwd=tmp_path)
    assert link.returncode == 0, link.stderr
    answer = run(["gcc", "-I.", "-c", "demo.c"], cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    answer = run([gxx, "calls.o", "demo.o", "launchers.o", "-o", "calls"], cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    answer = run([tmp_path / "calls"])
    assert answer.returncode == 0 and not answer.stderr, answer.stderr


def test_readme_and_header_say_what_all_calls_have_in_common(demo: Made) -> None:
    for text in (demo.texts["README.md"], demo.texts["include/demo.h"]):
        prose = " ".join(text.replace("\n//", "\n").split())
        for words in (
            "begin at a multiple of 16 bytes",
            "Those of inputs may be 0, those of outputs keep elements apart",
            "Query head h reads KV head h / (heads / kv_heads)",
            "query i of a sequence sees its keys 0 … i + seqlen_k - seqlen_q",
            "The workspace is the caller's",
        ):
            assert words in prose, words
    for kernel in demo.folder.kernels:
        section = demo.texts["README.md"].partition(f"### `fagen_{kernel.slug}`")[2]
        prose = section.partition("\n### ")[0]
        launches = kernel.plan.launches
        expected = "zeros before the first call" if launches.zeroed else "may hold anything"
        assert expected in prose if launches.needs_workspace else "needs no workspace" in prose
    header = made_of("few", "quant_fp16_d64").texts["include/few.h"]
    assert "16 bytes" in header and "KV head" not in header
