"""Write texts into a folder over what was written there before, and nothing outside it.

The folder's manifest.json keeps the hash of each file as it was written. A file that is different
now was edited by a person: it stays, and is reported.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fagen import outputs
from fagen.errors import FagenError
from fagen.paths import make_folder, write_whole
from fagen.toml_lines import printable

MANIFEST = "manifest.json"
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*", re.ASCII)
FATES = ("new", "updated", "unchanged", "removed", "kept", "edited", "foreign")
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class Written:
    """What became of a folder's files, as paths in it.

    `kept` were edited and would have been changed or removed; `edited` were edited too, and what
    would be written is what was. `foreign` are somebody else's, in the place of one of fagen's.
    """

    folder: Path
    new: tuple[str, ...]
    updated: tuple[str, ...]
    unchanged: tuple[str, ...]
    removed: tuple[str, ...]
    kept: tuple[str, ...]
    edited: tuple[str, ...]
    foreign: tuple[str, ...]
    unverified: tuple[str, ...] = ()  # slugs of whose source it is not on record that it ran

    @property
    def fault(self) -> str:
        """What is wrong with the folder now, or ""."""
        faults = (
            (self.kept, "edited since they were written", "--force overwrites"),
            (self.foreign, "not written by fagen", "move them away"),
        )
        return "\n".join(
            f"{why}, and left as they are: {', '.join(map(printable, paths))}; {way_out}"
            for paths, why, way_out in faults
            if paths
        )


def bring(texts: Mapping[str, str], folder: Path, *, force: bool = False) -> Written:
    """Bring a folder to these texts, by path; what was written before and is no more goes.

    texts has a manifest.json, to which the hashes of the others are added. Files that a person
    edited are written over only by `force`, those that fagen did not write never. Raises FagenError
    where a path leads out of the folder or over a symbolic link, and where the manifest.json that
    is there is not fagen's, before anything is written.
    """
    before = _recorded(folder)
    paths = sorted({*texts, *before} - {MANIFEST})
    for path in (*paths, MANIFEST):
        _refuse_way(folder, path)
    hashes = {path: _hash(text.encode()) for path, text in texts.items()}
    fates = {
        path: _fate(_hash_of(folder / path), before.get(path), hashes.get(path), force)
        for path in paths
    }
    for path, fate in fates.items():
        if fate in ("new", "updated"):
            make_folder((folder / path).parent)
            write_whole(folder / path, texts[path])
        elif fate == "removed":
            _remove(folder, path)
    edited = ("kept", "edited", "foreign")  # what stays one of these
    kept = {path: (before if fate in edited else hashes).get(path) for path, fate in fates.items()}
    record = {path: hash_ for path, hash_ in kept.items() if hash_}
    text = json.dumps({**json.loads(texts[MANIFEST]), "files": record}, indent=1) + "\n"
    make_folder(folder)
    if _hash_of(folder / MANIFEST) != _hash(text.encode()):
        write_whole(folder / MANIFEST, text)
    became = {name: tuple(path for path in paths if fates[path] == name) for name in FATES}
    return Written(folder, **became)


def _fate(current: str, before: str | None, new: str | None, force: bool) -> str:
    """What becomes of a file: hashes of what is there ("" for nothing), was written, will be."""
    if current == new:
        return "unchanged"
    if not current:
        return "new" if new else ""
    if not before:
        return "foreign" if new else ""
    if current != before and not force:
        return "edited" if new == before else "kept"
    return "updated" if new else "removed"


def _recorded(folder: Path) -> dict[str, str]:
    """The hashes of the files that were written; none where nothing was.

    What is no path below the folder is none of those that fagen wrote, and left out. Raises
    FagenError where manifest.json is somebody else's.
    """
    _refuse_way(folder, MANIFEST)
    path = folder / MANIFEST
    if not path.exists():
        return {}
    with suppress(ValueError, RecursionError, AttributeError, TypeError, KeyError):
        files = json.loads(path.read_bytes())["files"]
        return {
            path: digest
            for path, digest in files.items()
            if is_inside(path) and path != MANIFEST and _HASH.fullmatch(digest)
        }
    raise FagenError(
        f"{printable(str(path))} is not one that fagen wrote; nothing was written: name another "
        "folder, or move it away"
    )


def is_inside(path: str) -> bool:
    """Whether it is a path of plain names that leads nowhere but down."""
    return len(path) <= 400 and bool(_PATH.fullmatch(path))


def _refuse_way(folder: Path, path: str) -> None:
    """Refuse a path on which something is that leads elsewhere, or is neither file nor folder."""
    if not is_inside(path):
        raise FagenError(f"{printable(path)} is no path inside {printable(str(folder))}")
    outputs.refuse_way(folder, path)


def _hash_of(path: Path) -> str:
    """The hash of what is there, "" where nothing is."""
    try:
        return _hash(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _remove(folder: Path, path: str) -> None:
    """Remove a file, and the folders that are empty without it."""
    (folder / path).unlink()
    with suppress(OSError):  # something else lies there
        for part in PurePosixPath(path).parents[:-1]:
            (folder / part).rmdir()
