"""A kernel as Hugging Face's `kernels` loads it and kernel-builder builds it."""

import json
from collections.abc import Iterator

from fagen.paths import locate
from fagen.render import written
from fagen.vendor import source
from fagen.vendor.contents import Folder
from fagen.vendor.place import MANIFEST
from fagen.vendor.torch_package import Package, python_texts

_OWN = {
    "build.toml": "vendor/hf_kernel/build.toml.j2",
    "flake.nix": "vendor/hf_kernel/flake.nix.j2",
    "build_variant.py": "vendor/hf_kernel/build_variant.py.j2",
    "README.md": "vendor/hf_kernel/README.md.j2",
    "torch-ext/torch_binding.cpp": "vendor/hf_kernel/torch_binding.cpp.j2",
}


def texts(folder: Folder) -> dict[str, str]:
    """Return the files of the folder by path.  Raises ToolchainError where CUTLASS is missing."""
    return dict(_texts(folder))


def _texts(folder: Folder) -> Iterator[tuple[str, str]]:
    package = Package(folder)
    for kernel in folder.kernels:
        yield f"src/{kernel.slug}.cu", kernel.source.kernel
    yield from python_texts(package, f"torch-ext/{folder.name}", ops="_ops.py")
    for path, template in _OWN.items():
        yield path, written(template, package=package)
    yield "LICENSE", locate("LICENSE").read_text(encoding="utf-8")
    yield from source.cutlass(folder)
    yield MANIFEST, json.dumps(folder.record())
