"""A Python package for JAX: the plain source, and its kernels as targets of XLA's FFI."""

from collections.abc import Iterator

from fagen.render import formatted, written
from fagen.vendor import source
from fagen.vendor.contents import Folder


def texts(folder: Folder) -> dict[str, str]:
    """Return the files of the folder by path.  Raises ToolchainError where CUTLASS is missing."""
    found = source.texts(folder)
    found["README.md"] += written("vendor/jax/README.md.j2", folder=folder)
    return found | dict(_texts(folder))


def _texts(folder: Folder) -> Iterator[tuple[str, str]]:
    name = folder.name
    yield "pyproject.toml", written("vendor/jax/pyproject.toml.j2", folder=folder)
    yield "jax/CMakeLists.txt", written("vendor/jax/CMakeLists.txt.j2", folder=folder)
    targets = written("vendor/jax/targets.cpp.j2", folder=folder)
    yield f"jax/{name}_jax.cpp", formatted(targets)
    yield f"jax/{name}_jax.map", written("vendor/jax/symbols.map.j2", folder=folder)
    yield f"jax/{name}/__init__.py", written("vendor/jax/init.py.j2", folder=folder)
    yield f"jax/{name}/_call.py", written("vendor/jax/call.py.j2", folder=folder)
    yield f"jax/{name}/kernels.py", written("vendor/jax/kernels.py.j2", folder=folder)
    if folder.table.rows:
        yield f"jax/{name}/_attention.py", written("vendor/jax/attention.py.j2", folder=folder)
    if folder.decoding:
        yield f"jax/{name}/_decode.py", written("vendor/jax/decode.py.j2", folder=folder)
    if folder.varlen:
        yield f"jax/{name}/_varlen.py", written("vendor/jax/varlen.py.j2", folder=folder)
    if folder.called:
        yield f"jax/{name}/_pick.py", written("vendor/jax/pick.py.j2", folder=folder)
