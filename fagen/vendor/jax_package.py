"""A Python package for JAX: the plain source, and its kernels as targets of XLA's FFI."""

from fagen.render import formatted, written
from fagen.vendor import source
from fagen.vendor.contents import Folder


def texts(folder: Folder) -> dict[str, str]:
    """Return the files of the folder by path.  Raises ToolchainError where CUTLASS is missing."""
    name, files = folder.name, source.texts(folder)
    modules = {
        "__init__": ("vendor/jax/init.py.j2", True),
        "_call": ("vendor/jax/call.py.j2", True),
        "kernels": ("vendor/jax/kernels.py.j2", True),
        "_attention": ("vendor/jax/attention.py.j2", folder.attending),
        "_decode": ("vendor/jax/decode.py.j2", folder.decoders),
        "_varlen": ("vendor/jax/varlen.py.j2", folder.varlen),
        "_pick": ("vendor/jax/pick.py.j2", folder.called),
        "_variants": ("vendor/variants.py.j2", folder.variants),
    }
    templates = {
        "pyproject.toml": "vendor/jax/pyproject.toml.j2",
        "jax/CMakeLists.txt": "vendor/jax/CMakeLists.txt.j2",
        f"jax/{name}_jax.cpp": "vendor/jax/targets.cpp.j2",
        f"jax/{name}_jax.map": "vendor/jax/symbols.map.j2",
        **{f"jax/{name}/{own}.py": text for own, (text, is_there) in modules.items() if is_there},
    }
    files["README.md"] += written("vendor/jax/README.md.j2", folder=folder)
    for path, template in templates.items():
        text = written(template, folder=folder)
        files[path] = formatted(text) if path.endswith(".cpp") else text
    return files
