"""Vendored folders on a Hopper GPU: built by CMake and pip, their own test programs run."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fagen import registry, vendor
from fagen.process import run
from tests.cli_helpers import ROOT
from tests.test_vendor_jax import KERNELS, demo, ran
from tests.vendor_helpers import installed, python, vendored, walled

pytestmark = pytest.mark.gpu

SLUGS = [
    "fwd_fp16_d128_causal_m128n128",
    "fwd_bf16_d64_full_m128n128",
    "fwd_bf16_d192v128_causal_m128n64_s3",
    "fwd_e4m3_d64_full_m256n64_s3",
    "fwd_e4m3_d128_full_m128n128_vrows_sblock",
    "fwd_e4m3_d256_causal_m128n96_s3_half_nointer_sblock",
    *(path.stem for kind in ("quantize", "combine") for path in registry.schedules(kind)),
    "quant_bf16_d64_halves_shead",
    "quant_bf16_d64_pairs_rot",
    "bwd_fp16_d128_causal_m64n128",
    "bwd_bf16_d64_full_m128n128",
    "bwd_fp16_d96_causal_m64n64",
    "bwd_bf16_d120v40_causal_m64n128",
    "bwd_fp16_d128_causal_m64n128_det",
    "dec_fp16_d128_causal_r8n64",
    "dec_bf16_d64_causal_r16n128",
    "dec_fp16_d96v40_full_r24n64_c3",
    "fwd_fp16_d64_causal_m64n64_varlen",
    "fwd_e4m3_d64_causal_m64n64_varlen",
    "bwd_bf16_d64_causal_m128n128_varlen_underdp",
]


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


def test_calls_from_jax_are_right(hopper, tmp_path):
    if missing := [name for name in ("jax", "scikit_build_core") if not find_spec(name)]:
        pytest.skip(f"without {' and '.join(missing)}")
    vendor.vendor(demo(*KERNELS, with_cutlass=True), tmp_path / "clean")
    site = tmp_path / "site"
    words = ["-m", "pip", "install", "--no-build-isolation", "--no-deps", "--target", site, "."]
    ran(sys.executable, *words, place=tmp_path / "clean")
    # torch holds memory of this card as well
    own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    for calls, rights in (("calls", 9), ("gradients", 8)):
        output = ran(sys.executable, ROOT / "tests/jax_calls.py", calls, place=site, **own)
        assert output.count(": right on gpu") == rights, output


# ---- as packages for torch ----------------------------------------------------------------------

CALLED = [
    "fwd_fp16_d128_causal_m128n128",
    "fwd_bf16_d64_full_m128n128",
    "fwd_e4m3_d128_full_m128n128_vrows_sblock",
    "quant_fp16_d128_rot",
    "quant_fp16_d128_scol",
    "comb_fp16_d128",
    "fwd_fp16_d128_causal_m128n128_split16",
    "dec_bf16_d64_causal_r8n128",
    "dec_bf16_d64_causal_r16n128",
]
# What programs have that are given a package of kernels as `package`, and print what was right.
SHARED = """
import torch

torch.manual_seed(0)


def inputs(dtype, head_dim, queries, keys):
    shapes = [(2, queries, 6, head_dim), *[(2, keys, 2, head_dim)] * 2]
    return [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]


def exact(q, k, v, causal=False):  # out and its log-sum-exp, in fp64
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(3, 1) for tensor in (k, v))
    scores = q @ k.mT * q.shape[3] ** -0.5
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device="cuda")
        scores = scores.masked_fill(~seen.tril(k.shape[2] - q.shape[2]), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
"""
PROGRAM = """


def near(found, right, bound):
    off = (found.double() - right).abs().max().item()
    assert off < bound, off


kinds = (torch.float16, 128, True, 5e-3), (torch.bfloat16, 64, False, 3e-2)
for dtype, head_dim, causal, bound in kinds:
    for queries, keys in ((333, 333), (1, 260), (128, 1000), (16, 4096)):
        q, k, v = inputs(dtype, head_dim, queries, keys)
        out, lse = package.attention(q, k, v, causal=causal, return_lse=True)
        right, sums = exact(q, k, v, causal)
        near(out, right, bound)
        near(lse, sums, 1e-3)
        assert torch.equal(package.attention(q, k, v, causal=causal), out)
    print("attention", dtype)

    compiled = torch.compile(package.attention, fullgraph=True)
    for queries, keys in ((333, 333), (200, 500), (64, 900)):  # of open sizes from the second on
        q, k, v = inputs(dtype, head_dim, queries, keys)
        right = package.attention(q, k, v, causal=causal)
        assert torch.equal(compiled(q, k, v, causal=causal), right)
    print("compiled", dtype)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = package.attention(q, k, v, causal=causal)
    for _ in range(3):
        for tensor, new in zip((q, k, v), inputs(dtype, head_dim, queries, keys), strict=True):
            tensor.copy_(new)
        graph.replay()
        assert torch.equal(captured, package.attention(q, k, v, causal=causal))
    with torch.cuda.stream(torch.cuda.Stream()):
        other = package.attention(q, k, v, causal=causal)
    torch.cuda.synchronize()
    assert torch.equal(other, captured)
    print("captured", dtype)

q, k, v = inputs(torch.float16, 128, 333, 500)
try:
    package.attention(q.requires_grad_(), k, v, causal=True)
except (ValueError, RuntimeError) as refusal:
    assert "requires a gradient" in str(refusal)
    print("refused")

q = q.detach()
(q8, q_scale), (k8, k_scale) = (package.quant_fp16_d128_rot(tensor, 7) for tensor in (q, k))
v8, v_scale = package.quant_fp16_d128_scol(v)
scales = {"q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale}
out = package.attention(q8, k8, v8, **scales)
right, _ = exact(q, k, v)
off = ((out.double() - right).norm() / right.norm()).item()
assert off < 0.1, off
print("e4m3")

outs = torch.randn(3, 2, 50, 4, 128, device="cuda").half()
lses = torch.randn(3, 2, 4, 50, device="cuda")
out, lse = package.comb_fp16_d128(outs, lses)
weights = lses.double().softmax(0).transpose(2, 3)[..., None]
near(out, (outs.double() * weights).sum(0), 5e-3)
near(lse, lses.double().logsumexp(0), 1e-4)
print("combined")

decode = torch.compile(package.attention_decode, fullgraph=True)
for queries in (1, 5):
    q, k, v = inputs(torch.bfloat16, 64, queries, 5000)
    lengths = torch.tensor([5000, 1700], dtype=torch.int32, device="cuda")
    out = package.attention_decode(q, k, v, seqused_k=lengths)
    for place, length in enumerate((5000, 1700)):
        one = q[place : place + 1], *(x[place : place + 1, :length] for x in (k, v))
        near(out[place : place + 1], exact(*one, causal=True)[0], 3e-2)
    assert torch.equal(decode(q, k, v, seqused_k=lengths), out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = package.attention_decode(q, k, v, seqused_k=lengths)
    lengths.fill_(333)
    graph.replay()
    assert torch.equal(captured, package.attention_decode(q, k, v, seqused_k=lengths))
print("decoded")
"""
RIGHT = [
    *(
        f"{what} torch.{dtype}"
        for dtype in ("float16", "bfloat16")
        for what in ("attention", "compiled", "captured")
    ),
    *("refused", "e4m3", "combined", "decoded"),
]


# As get_local_kernel does it, where that is not installed.
LOAD = """
import json, pathlib, sys
from importlib.util import module_from_spec, spec_from_file_location

try:
    import kernels

    package = kernels.get_local_kernel(pathlib.Path.cwd())
except ImportError:
    variant = pathlib.Path(sys.argv[1])
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = spec_from_file_location(name, variant / "__init__.py")
    package = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(package)
"""


def printed_by(program, form, slugs, folder, names=("one",)):
    """The lines that a program prints which has a package of these kernels, of one of FORMS.

    Packages of all `names`, which live in one process, have it print the same.
    """
    if form == "hf-kernel":
        vendored("demo", form, folder / "demo", *slugs, with_cutlass=True)
        path = walled(folder / "wall")
        variant = python("build_variant.py", cwd=folder / "demo", PYTHONPATH=path).strip()
        assert re.fullmatch(r"build/torch-stable-abi210-cu\d+-\w+-linux", variant)
        words = [LOAD + SHARED + program, variant]
        return python("-c", *words, cwd=folder / "demo", PYTHONPATH=path).splitlines()
    for name in names:
        vendored(name, form, folder / name, *slugs, with_cutlass=True)
        installed(folder / name, folder / "site", "--no-build-isolation")
    path = walled(folder / "wall", folder / "site")
    printed = set()
    for name in names:
        text = f"import {', '.join(names)}\npackage = {name}{SHARED}{program}"
        printed.add(python("-c", text, cwd=folder, PYTHONPATH=path))
    (lines,) = printed
    return lines.splitlines()


FORMS = ("torch", "hf-kernel")


@pytest.mark.parametrize("form", FORMS)
def test_a_package_is_right_compiled_and_in_graphs(hopper, tmp_path, form):
    assert printed_by(PROGRAM, form, CALLED, tmp_path, names=("one", "two")) == RIGHT
