"""What every command that writes files goes by: nothing is lost that fagen did not write.

Files of one command differ, whatever they are called; no file is written over that is read, or that
somebody else wrote; no symbolic link is followed to where nobody said.
"""

import hashlib
import stat
import unicodedata
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import combinations
from pathlib import Path, PurePosixPath

from fagen.errors import FagenError, ScheduleError
from fagen.paths import naming, write_whole
from fagen.toml_lines import comments, printable, shown

MAX_BYTES = 64 << 20  # of a file that may be one that fagen wrote; pages have a few megabytes

_STAMP = "sha256 of what is above: "
Own = Callable[[bytes], bool]  # whether fagen wrote this content, and nobody has edited it


def refuse_alike(files: Mapping[str, Path]) -> None:
    """Refuse two files of one command that are one; the keys say what each is for.

    They are where one leads to the other by links of any kind, and where a file system that does
    not tell upper case from lower would take them for one. Raises FagenError.
    """
    for (name, path), (other, beside) in combinations(files.items(), 2):
        if _alike(path, beside):
            also = "" if str(path) == str(beside) else f", which is {printable(beside)},"
            raise FagenError(
                f"{printable(path)}{also} is named twice, as {name} and as {other}; nothing "
                "was written: name two files"
            )


def refuse_loss(path: Path, own: Own, what: str) -> None:
    """Refuse to write where something is that fagen did not write; `what` would be written there.

    An empty file, a terminal or a pipe loses nothing. Raises FagenError, and OSError where what is
    there cannot be looked at.
    """
    named = printable(path)
    try:
        status = path.lstat()
        mode = path.stat().st_mode if stat.S_ISLNK(status.st_mode) else status.st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise _linked(path) from None
        return
    if stat.S_ISDIR(mode):
        raise FagenError(f"{named} is a folder; nothing was written: name a file")
    if not stat.S_ISREG(mode):
        return
    if stat.S_ISLNK(status.st_mode):
        raise _linked(path)
    if status.st_size and not (status.st_size <= MAX_BYTES and own(path.read_bytes())):
        raise FagenError(
            f"{named} is not {what} as fagen wrote it; nothing was written: remove it, or name "
            "another file"
        )


def refuse_way(folder: Path, path: str) -> None:
    """Refuse a path in a folder on which something is that leads elsewhere, or is in the way.

    The folder itself may be a link: somebody named it. Raises FagenError.
    """
    parts = PurePosixPath(path).parts
    for length in range(1, len(parts) + 1):
        place = folder.joinpath(*parts[:length])
        try:
            mode = place.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return
        if stat.S_ISLNK(mode):
            raise _linked(place)
        if not (stat.S_ISREG(mode) if length == len(parts) else stat.S_ISDIR(mode)):
            named = printable(place)
            raise FagenError(
                f"{named} is no file or folder of ours; nothing was written: remove it"
            )


def refuse_comments(path: Path, text: str, own: Collection[str], way_out: str) -> None:
    """Raise ScheduleError where a TOML file that is to be written anew has others' comments."""
    for comment in map(str.strip, comments(text)):
        if comment not in own:
            lost = f"its comments would be lost, such as {shown(comment)}"
            raise ScheduleError(f"{printable(path)}: {lost}; {way_out}")


def write(path: Path, text: str, own: Own, what: str) -> None:
    """Write a file in one step, unless something is there that is not fagen's.

    Raises as refuse_loss does, and OSError where the folder is missing or cannot be written.
    """
    with naming(path):
        refuse_loss(path, own, what)
    write_whole(path, text)


def stamped(text: str, comment: str = "// {}") -> str:
    """Return text with a last line, a comment, by which it is known again as it was written."""
    return f"{text}{comment.format(_STAMP + _digest(text.encode()))}\n"


def is_stamped(content: bytes) -> bool:
    """Whether this is a text that fagen stamped, and nobody has edited."""
    text, _, digest = content.replace(b"\r\n", b"\n").rpartition(_STAMP.encode())
    above = text[: text.rfind(b"\n") + 1]
    return digest[:64] == _digest(above).encode() and digest[64:].strip() in (b"", b"-->")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def anything(content: bytes) -> bool:
    """Return True: where fagen owns the folder, or has kept what was there, nothing is lost."""
    return True


def nothing(content: bytes) -> bool:
    """Return False: of files that are written once, fagen writes over none."""
    return False


def _linked(path: Path) -> FagenError:
    named = printable(path)
    return FagenError(f"{named} is a symbolic link; nothing was written: remove it")


def _alike(path: Path, other: Path) -> bool:
    if _folded(path) == _folded(other):
        return True
    for a, b in ((path, other), (path.parent, other.parent)):
        with suppress(OSError):
            if a.samefile(b) and (a is path or _folded_name(path) == _folded_name(other)):
                return True
    return False


def _folded(path: Path) -> str:
    with suppress(OSError, RuntimeError):  # a loop of links
        path = path.resolve()
    return unicodedata.normalize("NFC", str(path.absolute())).casefold()


def _folded_name(path: Path) -> str:
    return unicodedata.normalize("NFC", path.name).casefold()
