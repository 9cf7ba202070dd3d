"""Vendored packages for torch as pip builds them, beside each other, fagen and other torches."""

import re
from pathlib import Path

import pytest

from fagen.process import run
from tests import torches
from tests.cli_helpers import ROOT, fagen
from tests.test_vendor_place import there
from tests.vendor_helpers import (
    COMBINE,
    DIFFERENTIABLE,
    GRADIENTS,
    KERNELS,
    USED,
    differentiated,
    hugging_face,
    installed,
    python,
    seen,
    vendored,
    walled,
)

pytestmark = pytest.mark.long

ALONE = """
import sys, torch, one, two
from torch.export import Dim, export

try:
    import fagen
except ImportError as error:
    print(error)
print(sorted(one.__all__) == sorted(["attention", *sys.argv[1:]]), sorted(two.__all__))

class Model(torch.nn.Module):
    def forward(self, q, k):
        return one.attention(q, k, k, causal=True), two.attention(q, k, k, causal=True)

q, k = (torch.randn(2, length, 4, 128).half() for length in (300, 200))
open_sizes = {name: {0: Dim.AUTO, 1: Dim.AUTO} for name in ("q", "k")}
for strict in (True, False):
    graph = export(Model(), (q, k), dynamic_shapes=open_sizes, strict=strict).graph
    print([str(node.target) for node in graph.nodes if node.op == "call_function"])
compiled = torch.compile(one.attention, fullgraph=True, dynamic=True, backend="eager")
q8, k8 = q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn)
scales = {"q_descale": torch.ones(2, 4, 5), "k_descale": torch.ones(2, 4, 4)}
for given, more in (((q, k, k), {"causal": True}), ((q8, k8, k8), scales)):
    try:
        compiled(*given, **more)
    except (ValueError, RuntimeError) as refusal:
        print(refusal)
"""
BESIDE = """
import sys, torch, one, two
from torch._subclasses import FakeTensorMode
from fagen import registry, vendor
from fagen.runtime.checks import allocated
from fagen.runtime.op import emulated

asked = vendor.asked("one", [registry.from_slug(slug) for slug in sys.argv[1:]])
for kernel in vendor.folder_of(asked).kernels:
    signature = kernel.signature
    for case in kernel.cases:
        sizes = dict(zip(signature.most, case, strict=True))
        with FakeTensorMode():
            given = {
                tensor.name: torch.empty(
                    [dim.extent.at(sizes) for dim in tensor.dims],
                    dtype=getattr(torch, tensor.dtype.torch),
                    device="cuda",
                )
                for tensor in signature.inputs
                if not tensor.optional and not tensor.made
            }
            more = {scalar.name: 1 for scalar in signature.numbers}
            found = getattr(one, kernel.slug)(**given, **more)
            for made, right in zip(found, allocated(kernel.plan, given, sizes), strict=True):
                same = made.shape, made.dtype, made.device
                assert same == (right.shape, right.dtype, right.device), (kernel.slug, case)
                assert made.is_contiguous()
    print(kernel.slug)

slug = two.__all__[1]
q = torch.randn(1, 9, 2, 128).half()
out, lse = emulated(slug)(q, q, q, 1.0)
print(out.shape == q.shape, lse.dtype)
print({getattr(torch.ops, name).__getattr__(slug).default._schema.name for name in ("one", "two")})
"""


def test_packages_live_beside_each_other_and_beside_fagen(tmp_path):
    site, first = tmp_path / "site", KERNELS[0]
    vendored("one", "torch", tmp_path / "one", *KERNELS)
    vendored("two", "torch", tmp_path / "two", first, with_cutlass=True)
    for name in ("one", "two"):
        installed(tmp_path / name, site)  # by a build apart, with what pip fetches for it
    path = walled(tmp_path / "wall", site)
    lines = python("-c", ALONE, *KERNELS, cwd=tmp_path, PYTHONPATH=path).splitlines()
    ops = [f"{name}.{first}_without_lse.default" for name in ("one", "two")]
    refusal = "q is on the CPU; the kernel runs on a Hopper GPU (compute capability 9.0)"
    assert lines == [
        "fagen is out of reach",
        f"True ['attention', '{first}']",
        *[str(ops)] * 2,
        *(f"one::{slug}: {refusal}" for slug in (first, KERNELS[2])),
    ]
    path = f"{site}:{ROOT}"
    lines = python("-c", BESIDE, *KERNELS, cwd=tmp_path, PYTHONPATH=path).splitlines()
    names = ["one", "two"]
    assert lines[:-1] == [*KERNELS, "True torch.float32"]
    assert all(f"'{name}::{first}'" in lines[-1] for name in names)
    for name in names:  # and no library shows a kernel's functions
        (library,) = (site / name).glob("*.so")
        shown = run(["nm", "-D", "--defined-only", str(library)]).stdout.split()[2::3]
        assert shown and all(symbol.endswith("_refused") for symbol in shown)
        assert library.stat().st_size < 1.2e6 * len(KERNELS)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package as it was built with the installed torch."""
    place = tmp_path_factory.mktemp("built")
    vendored("demo", "torch", place / "demo", COMBINE, *DIFFERENTIABLE)
    installed(place / "demo", place / "site")
    return place / "site"


LOADED = """
import sys, torch
torch.ops.load_library(sys.argv[1])
print(torch.__version__)
print(getattr(torch.ops.fagen, sys.argv[2]).default._schema)
"""


@pytest.mark.parametrize("requirement", ["torch==2.10.*", "torch==2.11.*", "torch"])
def test_what_one_torch_builds_loads_in_others(requirement, package, built, tmp_path, pytestconfig):
    folder = pytestconfig.rootpath / ".pytest_cache" / "torches"
    folder.mkdir(parents=True, exist_ok=True)
    named = torches.environment(requirement, folder)
    named["PYTHONPATH"] = walled(tmp_path / "wall", package, named["PYTHONPATH"])
    assert python("-c", USED, "demo", cwd=tmp_path, **named).splitlines() == seen("demo")
    words = ["-c", GRADIENTS, "demo", *DIFFERENTIABLE]
    assert python(*words, cwd=tmp_path, **named).splitlines() == differentiated("demo")
    binary = built(KERNELS[0]).binary
    output = python("-c", LOADED, binary.binding, binary.slug, cwd=tmp_path, **named)
    version, schema = output.splitlines()
    assert version.startswith(requirement.partition("==")[2].rstrip("*"))
    assert schema.startswith(f"fagen::{binary.slug}(Tensor q, Tensor k, Tensor v, float scale)")


def test_the_commands_of_the_page_build_what_its_programs_use(tmp_path, monkeypatch, pytestconfig):
    page = (ROOT / "docs/vendor.md").read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    site, packages = tmp_path / "site", hugging_face(pytestconfig)
    head = "import torch\nq, k, v = torch.empty(3, 1, 9, 2, 128, dtype=torch.half, device='meta')\n"
    for title, form in (
        ("A package for torch", "torch"),
        ("A kernel of Hugging Face", "hf-kernel"),
    ):
        (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## )", page, re.M | re.S)
        (commands,) = re.findall(r"^```\n(.*?)^```$", section, re.M | re.S)
        (program,) = re.findall(r"^```py\n(.*?)^```$", section, re.M | re.S)
        request, build = commands.splitlines()
        assert request.startswith("fagen vendor ") and f"--format {form}" in request
        answer = fagen(*request.split()[1:])
        assert answer.exit_code == 0, answer.output
        assert len(there(request.split("-o ")[1].split()[0], section)) > 5
        path = walled(tmp_path / "wall", site, packages)
        if build.startswith("pip install "):
            python("-m", "pip", *build.split()[1:], "--no-deps", "--target", site, cwd=tmp_path)
        else:
            python(*build.split()[1:], cwd=tmp_path, PYTHONPATH=path)
        python("-c", f"{head}{program}assert out.shape == q.shape", cwd=tmp_path, PYTHONPATH=path)


# ---- of Hugging Face's `kernels` ----------------------------------------------------------------

OF_KERNELS = """
import sys
from pathlib import Path
from types import ModuleType

import kernels
from kernels._rust import Backend, Build, Digest, DigestAlgorithm, Metadata

found = []
for name in sys.argv[1:]:
    folder = Path(name)
    build = Build.open(folder)
    (variant,) = (folder / "build").iterdir()
    metadata = Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    loaded = kernels.get_local_kernel(folder)
    print(build.general.backends == [Backend.CUDA], metadata.name, loaded.__all__)
    found.append(loaded)
print(len({module.__name__ for module in found}) == len(found))
sys.modules["demo"] = found[0]
sys.argv[1:] = ["demo"]
"""


def test_get_local_kernel_loads_what_the_command_builds(tmp_path, pytestconfig):
    path = walled(tmp_path / "wall", hugging_face(pytestconfig))
    first, second = tmp_path / "first", tmp_path / "second"  # versions of one kernel
    vendored("my_demo", "hf-kernel", first, COMBINE)
    vendored("my_demo", "hf-kernel", second, COMBINE, "comb_fp16_d64")
    for folder in (first, second, second):
        output = python("build_variant.py", cwd=folder, PYTHONPATH=path)
        assert output.startswith("build/torch-stable-abi210-") and output.endswith("-linux\n")
    script = OF_KERNELS + USED.replace("sys.argv[1]", '"demo"').replace(
        "import sys, torch", "import torch"
    )
    lines = python("-c", script, first, second, cwd=tmp_path, PYTHONPATH=path).splitlines()
    assert lines[:3] == [
        f"True my-demo ['{COMBINE}']",
        f"True my-demo ['{COMBINE}', 'comb_fp16_d64']",
        "True",
    ]
    (variant,) = (first / "build").iterdir()
    (library,) = variant.glob("*.so")
    assert lines[3:] == seen(library.name.partition(".")[0])
    # what was built is no file of the folder's: the same command again leaves it alone
    again = vendored("my_demo", "hf-kernel", first, COMBINE)
    assert not (again.new or again.updated or again.removed or again.kept) and library.exists()


def test_a_kernel_with_one_of_its_gradients_loads_and_has_them(tmp_path, pytestconfig):
    path = walled(tmp_path / "wall", hugging_face(pytestconfig))
    vendored("my_demo", "hf-kernel", tmp_path / "demo", *DIFFERENTIABLE)
    python("build_variant.py", cwd=tmp_path / "demo", PYTHONPATH=path)
    (library,) = (tmp_path / "demo/build").glob("*/*.so")
    load = "import sys, pathlib, kernels\n"
    load += 'sys.modules["demo"] = kernels.get_local_kernel(pathlib.Path("demo"))\n'
    output = python("-c", load + GRADIENTS, "demo", *DIFFERENTIABLE, cwd=tmp_path, PYTHONPATH=path)
    assert output.splitlines() == differentiated(library.name.partition(".")[0])
