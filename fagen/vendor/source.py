"""Plain source: a C header, kernels, a dispatcher in C, CMake files and a test program."""

import json
from collections.abc import Iterator

from fagen.paths import locate
from fagen.render import HEADER, formatted, header_file, written
from fagen.vendor.closure import headers, license_of
from fagen.vendor.contents import Folder
from fagen.vendor.place import MANIFEST

CUTLASS = "third_party/cutlass"


def texts(folder: Folder) -> dict[str, str]:
    """Return the files of the folder by path.  Raises ToolchainError where CUTLASS is missing."""
    return dict(_texts(folder))


def _texts(folder: Folder) -> Iterator[tuple[str, str]]:
    name = folder.name
    yield f"include/{name}.h", formatted(written("vendor/header.h.j2", folder=folder))
    yield f"src/{name}.c", formatted(written("vendor/dispatch.c.j2", folder=folder))
    yield f"src/{name}.map", written("vendor/symbols.map.j2", folder=folder)
    for kernel in folder.kernels:
        yield f"src/{kernel.slug}.cu", kernel.source.kernel
    yield f"src/{HEADER}", header_file()
    yield f"tests/{name}_test.cpp", formatted(written("vendor/test.cpp.j2", folder=folder))
    yield "CMakeLists.txt", written("vendor/CMakeLists.txt.j2", folder=folder)
    yield f"cmake/{name}-config.cmake.in", written("vendor/config.cmake.in.j2", folder=folder)
    yield "README.md", written("vendor/README.md.j2", folder=folder)
    yield "LICENSE", locate("LICENSE").read_text(encoding="utf-8")
    yield from cutlass(folder)
    yield MANIFEST, json.dumps(folder.record())


def cutlass(folder: Folder) -> Iterator[tuple[str, str]]:
    """Give the headers of CUTLASS that the folder is to have, with their licence."""
    if folder.with_cutlass:
        copied = headers(kernel.source.kernel for kernel in folder.kernels)
        for path, text in copied.items():
            yield f"{CUTLASS}/include/{path}", text
        if copied:
            yield f"{CUTLASS}/LICENSE.txt", license_of(copied)
