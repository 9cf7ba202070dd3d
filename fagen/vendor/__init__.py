"""Write kernels as a folder that builds in anybody's tree, without fagen.

    Manifest → Folder → {path: text} → files

A Manifest says what is wanted, a Folder is that worked out, a format turns it into texts, and these
are written over what was written last time. Needs neither torch nor CUDA.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fagen.vendor import jax_package, source, torch_package
from fagen.vendor.contents import Folder, folder_of
from fagen.vendor.manifest import Manifest, asked, read
from fagen.vendor.place import Written, bring

__all__ = ["FORMATS", "Folder", "Manifest", "Written", "asked", "folder_of", "read", "vendor"]

FORMATS: Mapping[str, Callable[[Folder], dict[str, str]]] = {
    "source": source.texts,
    "torch": torch_package.texts,
    "hf-kernel": torch_package.hub_texts,
    "jax": jax_package.texts,
}


def vendor(manifest: Manifest, place: Path, *, force: bool = False) -> Written:
    """Write what a manifest asks for into a folder; what was written there before is updated.

    Files that a person edited stay as they are, unless `force`d. Raises FagenError where a schedule
    does not fit, where something in the folder leads out of it, and what rendering raises.
    """
    folder = folder_of(manifest)
    written = bring(FORMATS[manifest.format](folder), place, force=force)
    return replace(written, unverified=tuple(kernel.slug for kernel in folder.unverified))
