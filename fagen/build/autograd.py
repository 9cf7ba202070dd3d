"""Build the node of autograd's graph that calls kernels: a torch in, a library out, made once.

It is of no kernel, and needs more of torch than bindings do: headers beyond its stable ABI.
"""

import sysconfig
from collections.abc import Callable
from pathlib import Path

from fagen.build.digests import digests
from fagen.build.gxx import key_of, torch_library, versions
from fagen.build.records import Record
from fagen.build.store import Slot, kernels_folder
from fagen.render import environment
from fagen.toolchain import TORCH_LIBRARIES, Torch, find_toolchain, find_torch

_NAME = "fagen_autograd"
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-DNDEBUG", "-D_GLIBCXX_USE_CXX11_ABI=1")
_LINK_FLAGS = ("-shared", *TORCH_LIBRARIES, "-ltorch_cpu", "-lc10")


def build_autograd(progress: Callable[[str], None] | None = None) -> Path | None:
    """Return the library, built if need be for the torch that is installed; None without one.

    Raises ToolchainError for what is missing, BuildError where the compiler fails, CacheError where
    the cache cannot be written or is not this user's alone.
    """
    tools, torch = find_toolchain(), find_torch()
    if torch is None:
        return None
    python, python_link = _python(torch)
    source = environment().get_template("binding/autograd.cpp.j2").render()
    flags = *_FLAGS, *python
    link_flags = *_LINK_FLAGS, *python_link
    key = key_of(source, flags, link_flags, torch.version, versions(tools), digests(tools))
    slot = Slot(kernels_folder() / f"autograd-{key}", f"{_NAME}.so")
    headers = torch.include, torch.include / "torch" / "csrc" / "api" / "include"
    compiled = torch_library(
        _NAME,
        source,
        tools,
        torch,
        compile_flags=(*flags, "-isystem", headers[0], "-isystem", headers[1]),
        link_flags=(f"-L{torch.library_dir}", *link_flags),
    )

    def make(making: Path, kept: Path) -> Record:
        if progress:
            progress(f"compiling the node of gradients for torch {torch.version}, once")
        return compiled(making, kept)

    slot.filled(make)
    return slot.path


def _python(torch: Torch) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what compiler and linker take for Python to call the node itself; of some nothing."""
    include = sysconfig.get_path("include")
    needed = Path(include) / "Python.h", torch.library_dir / "libtorch_python.so"
    if not all(path.exists() for path in needed) or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return (), ()  # what it reads of a dictionary it does not hold
    return ("-DFAGEN_PYTHON", "-isystem", include), ("-ltorch_python",)
