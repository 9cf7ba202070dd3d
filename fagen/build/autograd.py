"""Build the node of autograd's graph that calls kernels: a torch in, a library out, made once.

It is of no kernel, and needs more of torch than bindings do: headers beyond its stable ABI.
"""

from collections.abc import Callable
from pathlib import Path

from fagen.build import _key, _versions
from fagen.build.digests import digests
from fagen.build.records import Record, stated_environment
from fagen.build.steps import Command, run_steps
from fagen.build.store import failed_folder, kernels_folder, lock_of, place
from fagen.paths import locate
from fagen.toolchain import TORCH_LIBRARIES, Toolchain, Torch, find_toolchain, find_torch

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
    source = (locate("templates") / "binding" / "autograd.cpp").read_text(encoding="utf-8")
    key = _key(source, _FLAGS, _LINK_FLAGS, torch.version, _versions(tools), digests(tools))
    folder = kernels_folder() / f"autograd-{key}"

    def make(making: Path) -> Record:
        if progress:
            progress(f"compiling the node of gradients for torch {torch.version}, once")
        return _make(making, folder, source, tools, torch)

    place(folder, f"{_NAME}.so", make, lock=lock_of(folder))
    return folder / f"{_NAME}.so"


def _make(making: Path, folder: Path, source: str, tools: Toolchain, torch: Torch) -> Record:
    (making / f"{_NAME}.cpp").write_text(source, encoding="utf-8")
    include = torch.include, torch.include / "torch" / "csrc" / "api" / "include"
    compile_it: Command = [
        *(tools.gxx, *_FLAGS, "-isystem", include[0], "-isystem", include[1]),
        *("-c", f"{_NAME}.cpp", "-o", f"{_NAME}.o"),
    ]
    link_it: Command = [
        *(tools.gxx, f"{_NAME}.o", f"-L{torch.library_dir}", *_LINK_FLAGS),
        *("-o", f"{_NAME}.so"),
    ]
    steps = [(f"{_NAME}.o", compile_it), (f"{_NAME}.so", link_it)]
    seconds = run_steps(making, failed_folder(folder), tools.ninja, steps)
    return Record(
        library=f"{_NAME}.so",
        made_with={"torch": torch.version, **_versions(tools)},
        digests=digests(tools),
        environment=stated_environment(),
        cpu_seconds=seconds,
    )
