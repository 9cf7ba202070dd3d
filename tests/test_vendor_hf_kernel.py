"""A vendored kernel of Hugging Face's `kernels`: its files, its build, and how it is loaded."""

import tomllib

import pytest

from fagen import vendor
from tests.vendor_helpers import (
    COMBINE,
    DIFFERENTIABLE,
    GRADIENTS,
    KERNELS,
    USED,
    asked,
    differentiated,
    hugging_face,
    python,
    seen,
    vendored,
    walled,
)


def test_build_toml_names_every_source():
    found = vendor.FORMATS["hf-kernel"](vendor.folder_of(asked("my_demo", "hf-kernel", *KERNELS)))
    build = tomllib.loads(found["build.toml"])
    assert build["general"]["name"] == "my-demo" and build["torch"]["stable-abi"]["cuda"] == "2.10"
    kernel = build["kernel"]["my_demo"]
    assert kernel["depends"] == ["torch", "cutlass_4_0"]
    assert kernel["src"] == [f"src/{slug}.cu" for slug in KERNELS]
    assert "--expt-relaxed-constexpr" in kernel["cuda-flags"]
    bindings = [f"src/{slug}_torch.cpp" for slug in KERNELS]
    assert build["torch"]["src"] == ["torch-ext/torch_binding.cpp", *bindings]
    assert {*kernel["src"], *build["torch"]["src"]} <= set(found)
    with_headers = asked("my_demo", "hf-kernel", *KERNELS, with_cutlass=True)
    found = vendor.FORMATS["hf-kernel"](vendor.folder_of(with_headers))
    kernel = tomllib.loads(found["build.toml"])["kernel"]["my_demo"]
    assert kernel["depends"] == ["torch"] and kernel["include"] == ["third_party/cutlass/include"]
    assert "third_party/cutlass/LICENSE.txt" in found


LOADED = """
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


@pytest.mark.long
def test_get_local_kernel_loads_what_the_command_builds(tmp_path, pytestconfig):
    path = walled(tmp_path / "wall", hugging_face(pytestconfig))
    first, second = tmp_path / "first", tmp_path / "second"  # versions of one kernel
    vendored("my_demo", "hf-kernel", first, COMBINE)
    vendored("my_demo", "hf-kernel", second, COMBINE, "comb_fp16_d64")
    for folder in (first, second, second):
        said = python("build_variant.py", cwd=folder, PYTHONPATH=path)
        assert said.startswith("build/torch-stable-abi210-") and said.endswith("-linux\n")
    script = LOADED + USED.replace("sys.argv[1]", '"demo"').replace(
        "import sys, torch", "import torch"
    )
    told = python("-c", script, first, second, cwd=tmp_path, PYTHONPATH=path).splitlines()
    assert told[:3] == [
        f"True my-demo ['{COMBINE}']",
        f"True my-demo ['{COMBINE}', 'comb_fp16_d64']",
        "True",
    ]
    (variant,) = (first / "build").iterdir()
    (library,) = variant.glob("*.so")
    assert told[3:] == seen(library.name.partition(".")[0])
    # what was built is no file of the folder's: the same command again leaves it alone
    again = vendored("my_demo", "hf-kernel", first, COMBINE)
    assert not (again.new or again.updated or again.removed or again.kept) and library.exists()


@pytest.mark.long
def test_a_kernel_with_one_of_its_gradients_loads_and_has_them(tmp_path, pytestconfig):
    path = walled(tmp_path / "wall", hugging_face(pytestconfig))
    vendored("my_demo", "hf-kernel", tmp_path / "demo", *DIFFERENTIABLE)
    python("build_variant.py", cwd=tmp_path / "demo", PYTHONPATH=path)
    (library,) = (tmp_path / "demo/build").glob("*/*.so")
    load = "import sys, pathlib, kernels\n"
    load += 'sys.modules["demo"] = kernels.get_local_kernel(pathlib.Path("demo"))\n'
    told = python("-c", load + GRADIENTS, "demo", *DIFFERENTIABLE, cwd=tmp_path, PYTHONPATH=path)
    assert told.splitlines() == differentiated(library.name.partition(".")[0])
