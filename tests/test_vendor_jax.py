"""A vendored package for JAX: its texts, and what a Python with JAX makes of it, without fagen.

JAX is 0.6 GB with what it needs, too much for CI: `make test-long` installs it into an environment
of its own, .venv/jax. JAX_PYTHON names another Python that has it, with scikit-build-core.
"""

import ast
import json
import os
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import fagen
from fagen import registry, vendor
from fagen.process import run
from fagen.vendor import jax_package
from tests.cli_helpers import ROOT, SLUG
from tests.test_vendor_program import kernel
from tests.vendor_helpers import of_page

KERNELS = (
    "fwd_fp16_d128_causal_m128n128",
    "fwd_bf16_d64_full_m128n128",
    "fwd_e4m3_d64_full_m256n64_s3",
    "fwd_e4m3_d128_full_m128n128_vrows_sblock",
    "quant_fp16_d128_rot_shead",
    "quant_fp16_d128_center_scol_vcols",
    "quant_bf16_d64_halves_shead",
    "comb_fp32_d128_obf16_varlen",
    "comb_fp16_d64",
    "bwd_fp16_d128_causal_m64n128",  # of the first; the others have no gradients
    "dec_fp16_d64_causal_r8n128",
    "dec_fp16_d64_causal_r16n128_c64",
    "fwd_fp16_d64_causal_m64n64_varlen",
    "fwd_bf16_d64_full_m64n64_varlen",
    "fwd_e4m3_d64_causal_m64n64_varlen",
    "bwd_fp16_d64_causal_m64n64_varlen",  # of the first of these
    "fwd_fp16_d64_window_m64n64",
    "fwd_fp16_d64_prefix_m64n64",
    "fwd_fp16_d64_window_m64n64_softcap_sinkbf16",
    "dec_fp16_d64_window_r8n64_softcap_sinkfp32",
    "fwd_fp16_d64_window_m64n64_varlen",
)
CUDA = Path("/usr/local/cuda/include")


def demo(*slugs: str, **options: bool) -> vendor.Manifest:
    return vendor.asked("demo", [registry.from_slug(slug) for slug in slugs], "jax", **options)


@cache
def texts() -> dict[str, str]:
    return jax_package.texts(vendor.folder_of(demo(*KERNELS)))


def function(slug: str) -> ast.FunctionDef:
    """A kernel's function."""
    body = ast.parse(texts()["jax/demo/kernels.py"]).body
    (definition,) = (n for n in body if isinstance(n, ast.FunctionDef) and n.name == slug)
    return definition


# ---- its texts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("slug", KERNELS)
def test_a_kernels_function_takes_what_its_signature_says(slug):
    signature, args = registry.plan_of(slug).signature, function(slug).args
    names = [argument.arg for argument in (*args.args, *args.kwonlyargs)]
    returns = [f"return_{tensor.name}" for tensor in signature.omittable]
    assert names == [argument.name for argument in signature.arguments] + returns


@pytest.mark.parametrize("slug", KERNELS)
def test_the_workspace_is_what_the_library_says_of_these_sizes(slug):
    calls = [ast.unparse(n) for n in ast.walk(function(slug)) if isinstance(n, ast.Call)]
    plan = registry.plan_of(slug)
    sizes = [repr(size.name) for size in plan.signature.sizes]
    if plan.launches.unless:
        sizes.append(f"unless={plan.launches.unless!r}")
    expected = [f"call.workspace({', '.join(sizes)})"] * plan.launches.needs_workspace
    assert [call for call in calls if call.startswith("call.workspace")] == expected


def test_a_kernel_is_differentiated_by_the_one_of_its_problem():
    text = {slug: ast.unparse(function(slug)) for slug in KERNELS}
    backward, packed = (slug for slug in KERNELS if slug.startswith("bwd"))
    for slug in KERNELS:
        by = [name for name in (backward, packed) if f"call.differentiated({name}, " in text[slug]]
        own = {"fwd_fp16_d128_causal_m128n128": backward, KERNELS[12]: packed}
        assert by == [own[slug]] if slug in own else "call.differentiated" not in text[slug]
    assert "fagen vendor adds bwd_bf16_d64_full_m128n128, in a manifest" in text[KERNELS[1]]
    assert "second derivatives are not supported" in text[backward]


def test_what_is_pinned_is_in_the_package_by_its_name(tmp_path):
    path = tmp_path / "vendor.toml"
    path.write_text(f'name = "mine"\nformat = "jax"\n[kernels]\nfast = "{SLUG}"\n')
    files = jax_package.texts(vendor.folder_of(vendor.read(path)))
    assert f"from mine.kernels import {SLUG} as fast" in files["jax/mine/__init__.py"]
    assert f"mine.fast(…)  # mine.kernels.{SLUG}" in files["README.md"]


# ---- with JAX -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def python() -> str:
    """A Python that has JAX."""
    if find_spec("jax") and find_spec("scikit_build_core"):
        return sys.executable
    beside = Path(sys.prefix) / "jax/bin/python"
    named = os.environ.get("JAX_PYTHON", str(beside) if beside.exists() else "")
    if not named:
        pytest.skip("JAX is not installed: `make test-long` does so, or JAX_PYTHON names a Python")
    return named


def ran(python: str, *words: object, place: Path, **more: str) -> str:
    """Run a Python that sees the packages in a folder, and no fagen."""
    env = {"PYTHONPATH": str(place), "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    answer = run([python, *map(str, words)], cwd=place, env=env | more)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


# XLA has no stream on a CPU, and CUDA is not there.
PRELUDE = """\
#include <cuda_runtime.h>
#include <xla/ffi/api/ffi.h>
#include <cstring>

namespace xla::ffi {
template <>
struct CtxDecoding<PlatformStream<cudaStream_t>> {
  using Type = cudaStream_t;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*,
                                    DiagnosticEngine&) {
    return Type{};
  }
};
}  // namespace xla::ffi

extern "C" {
inline cudaError_t cudaMemsetAsync(void* data, int value, size_t count, cudaStream_t) {
  return std::memset(data, value, count), cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) { return "never"; }
}
"""


@pytest.fixture(scope="session")
def on_a_cpu(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package of all kernels, which are loops on the CPU."""
    if not CUDA.exists():
        pytest.skip("the CUDA headers are not there")
    place = tmp_path_factory.mktemp("cpu")
    for path, text in texts().items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    (place / "prelude.h").write_text(PRELUDE)
    include = ran(python, "-c", "import jax; print(jax.ffi.include_dir())", place=place).strip()
    sources = ["jax/demo_jax.cpp", "-xc++", "src/demo.c"]
    for slug in KERNELS:
        (place / f"{slug}.cpp").write_text(kernel(slug))
        sources.append(f"{slug}.cpp")
    words = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-I.", "-Iinclude", "-Wall", "-Werror"]
    words += ["-isystem", str(CUDA), "-isystem", include, "-include", "prelude.h", *sources]
    words += ["-Wno-unused-variable", "-Wl,--version-script=jax/demo_jax.map"]
    answer = run([*words, "-o", "jax/demo/libdemo_jax.so"], cwd=place)
    assert answer.returncode == 0, answer.stderr
    call = place / "jax/demo/_call.py"
    swapped = call.read_text().replace('"cpu"', '"other"').replace('"CUDA"', '"cpu"')
    call.write_text(swapped.replace('"other"', '"CUDA"'))
    return place / "jax"


@pytest.mark.parametrize(
    ("what", "rights"), [pytest.param("calls", 10, marks=pytest.mark.long), ("gradients", 8)]
)
def test_calls_and_gradients_are_right_through_the_ffi_on_a_cpu(what, rights, python, on_a_cpu):
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    output = ran(python, ROOT / "tests/jax_calls.py", what, place=on_a_cpu, **two)
    assert output.count(": right on cpu") == rights


PAGE = """\
import sys
import demo
import jax.numpy as jnp

sys.modules["my_attention"] = demo
q, k, v = (jnp.ones((1, 20, heads, 128), jnp.float16) for heads in (4, 2, 2))
{snippet}
print(dq.shape, dk.shape, dv.shape)
"""


def test_what_the_page_shows_differentiates(python, on_a_cpu):
    program = PAGE.format(snippet=of_page("Gradients", "python"))
    output = ran(python, "-c", program, place=on_a_cpu, JAX_PLATFORMS="cpu")
    assert output == "(1, 20, 4, 128) (1, 20, 2, 128) (1, 20, 2, 128)\n"


# ---- built for real -----------------------------------------------------------------------------

LOWERED = """\
import importlib.util, json, re
import jax, jax.numpy as jnp
from jax import export
import demo

assert importlib.util.find_spec("fagen") is None
q = jax.ShapeDtypeStruct((2, 100, 8, 128), jnp.float16)

def traced(call, *arrays):
    lowered = jax.jit(call).trace(*arrays).lower(lowering_platforms=("cuda",))
    (text,) = (line for line in lowered.as_text().splitlines() if "custom_call" in line)
    return re.search("@(xla_demo_\\\\w+)", text)[1], int(re.search("tensor<(\\\\d+)xui8>", text)[1])

def attention(q):
    return demo.attention(q, q, q, causal=True)

quantise = demo.kernels.quant_fp16_d128_rot_shead
target = traced(attention, q)[0]
check = export.DisabledSafetyCheck.custom_call(target)
told = {
    "all": demo.__all__,
    "targets": [traced(attention, q), traced(quantise, q)],
    "shapes": [x.shape for x in jax.eval_shape(quantise, q)],
}
exported = export.export(jax.jit(attention), platforms=["cuda"], disabled_checks=[check])(q)
told["exported"] = exported.mlir_module().count(target)
try:
    attention(jnp.zeros(q.shape, q.dtype))
except Exception as error:
    told["refused"] = str(error)
print(json.dumps(told))
"""


@pytest.mark.long
def test_pip_builds_a_package_from_a_clean_folder(python, tmp_path):
    slugs = [SLUG, "quant_fp16_d128_rot_shead"]
    vendor.vendor(demo(*slugs, with_cutlass=True), tmp_path / "clean")
    site = tmp_path / "site"
    words = ["-m", "pip", "install", "--no-build-isolation", "--no-deps", "--target", site, "."]
    ran(python, *words, place=tmp_path / "clean")
    library = site / "demo/libdemo_jax.so"
    shown = run(["nm", "-D", "--defined-only", str(library)]).stdout.split()[2::3]
    names = [*slugs, *(f"{slug}_workspace" for slug in slugs), "pick", "elsewhere"]
    assert sorted(shown) == sorted(f"xla_demo_{name}" for name in names)
    assert library.stat().st_size < 1.3e6
    (site / "lowered.py").write_text(LOWERED)
    record = json.loads(ran(python, "lowered.py", place=site, JAX_PLATFORMS="cpu"))
    assert record["all"] == ["attention", "kernels"] and record["exported"]
    assert record["shapes"] == [[2, 100, 8, 128], [2, 8]] and "on a Hopper GPU" in record["refused"]
    sizes = {"batch": 2, "heads": 8, "kv_heads": 8, "seqlen": 100, "seqlen_q": 100, "seqlen_k": 100}
    launches = {slug: registry.plan_of(slug).launches for slug in slugs}
    assert record["targets"] == [
        [f"xla_demo_{slug}", launches[slug].workspace.at(sizes)] for slug in slugs
    ]


@pytest.mark.long
def test_what_the_page_shows_installs_and_traces(python, tmp_path):
    page = (ROOT / "docs/vendor.md").read_text("utf-8")
    section = page.partition("## JAX")[2]
    vendored, install = section.partition("```\n")[2].partition("\n```")[0].splitlines()
    name, place = (re.search(f" {option} (\\w+)", vendored)[1] for option in ("--name", "-o"))
    vendor.vendor(
        vendor.asked(name, [registry.from_slug(SLUG)], "jax", with_cutlass=True), tmp_path / place
    )
    pip = install.rpartition(" && ")[2]
    assert SLUG in vendored and pip.startswith("pip install")
    words = [*pip.removeprefix("pip ").split(), "--no-deps", "--target", "site"]
    ran(python, "-m", "pip", *words, place=tmp_path)
    snippet = section.partition("```python\n")[2].partition("```")[0]
    lines = ["def page(q):", "k = v = q", *snippet.splitlines(), "return out, lse"]
    program = (
        "\n    ".join(lines)
        + """
import jax, jax.numpy as jnp
found = jax.eval_shape(page, jax.ShapeDtypeStruct((2, 100, 8, 128), jnp.float16))
print(*(array.shape for array in found))
"""
    )
    output = ran(python, "-c", program, place=tmp_path / "site", JAX_PLATFORMS="cpu")
    assert output == "(2, 100, 8, 128) (2, 8, 100)\n"


@pytest.mark.long
def test_cmake_installs_the_same_package_without_pip(python, tmp_path):
    vendor.vendor(demo("comb_fp16_d64"), tmp_path / "clean")
    place, site = tmp_path / "build", tmp_path / "site"
    for words in (
        ["-S", tmp_path / "clean/jax", "-B", place, f"-DPython_EXECUTABLE={python}"],
        ["--build", place],
        ["--install", place, "--prefix", site],
    ):
        answer = run(["cmake", *map(str, words)], env={"PYTHONPATH": ""})
        assert answer.returncode == 0, answer.stdout + answer.stderr
    names = [path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()]
    modules = ("__init__", "_call", "kernels")
    assert sorted(names) == sorted(
        ["demo/libdemo_jax.so", *(f"demo/{module}.py" for module in modules)]
    )
    output = ran(python, "-c", "import demo; print(demo.__all__, demo.__version__)", place=site)
    assert output.split() == ["['kernels']", fagen.__version__]
    missing = ["cmake", "-S", str(tmp_path / "clean/jax"), "-B", str(tmp_path / "other")]
    answer = run([*missing, "-DXLA_FFI_INCLUDE=/nowhere"])
    assert answer.returncode and "xla/ffi/api/ffi.h is missing" in answer.stderr
