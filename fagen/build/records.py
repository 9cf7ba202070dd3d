"""What is written down of a finished folder: a Record goes in and comes out again, or nothing does.

A record is judged when it is read. It may have been cut, written by another fagen, or by somebody
who wants to see this one fall: whatever it is, reading it takes little time and memory, and answers
with a Record that is one to the last field, or with None.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from io import BufferedReader
from pathlib import Path

from fagen.build.report import CompilerReport
from fagen.decoding import decoded
from fagen.paths import compiler_environment, write_whole
from fagen.toml_lines import printable

RECORD = "record.json"
_MOST_BYTES = 1 << 20  # of a record; the longest seen is a hundredth of that
_MOST_FILE_BYTES = 1 << 28  # of a file that it names
_MOST_FILES = 64
_ONLY_REGULAR = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class Record:
    """How the files of a folder were made, and what they were when it was finished.

    `library` is the file that the others are there for; `made_with` names compilers, headers and
    torch by their versions, `digests` tells what a version does not; `environment` is the one that
    the compilers had. `report` is what the compiler said of a kernel; `files` has the sha256 of
    each.
    """

    library: str
    made_with: Mapping[str, str]
    digests: Mapping[str, str]
    environment: Mapping[str, str]
    cpu_seconds: float
    report: CompilerReport | None = None
    files: Mapping[str, str] | None = None


def read_record(folder: Path) -> Record | None:
    """Return the record of a folder whose files are all as it says; else None, and never raise."""
    try:
        with _opened(folder / RECORD) as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            return None
        record = decoded(Record, json.loads(text))
        files = record.files or {}
        if record.library not in files or len(files) > _MOST_FILES:
            return None
        named = all(name == os.path.basename(name) and name not in (".", "..") for name in files)  # noqa: PTH119
        return record if named and all(_hash(folder / n) == h for n, h in files.items()) else None
    except (OSError, ValueError, RecursionError):
        return None


def write_record(folder: Path, record: Record) -> None:
    """Write a folder's record, with the hashes of the files that lie in it now."""
    names = sorted(f.name for f in folder.iterdir() if f.is_file() and f.name != RECORD)
    whole = replace(record, files={name: _hash(folder / name) for name in names})
    write_whole(folder / RECORD, json.dumps(asdict(whole), indent=1) + "\n")


def stated_environment() -> dict[str, str]:
    """Return the environment of compilers, as a record has it."""
    return {name: printable(value) for name, value in compiler_environment().items()}


def _opened(path: Path) -> BufferedReader:
    """Open a regular file of bounded size: neither a link, nor what one would wait for.

    Raises OSError, ValueError.
    """
    file = os.fdopen(os.open(path, _ONLY_REGULAR), "rb")
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size <= _MOST_FILE_BYTES:
        return file
    file.close()
    raise ValueError(f"{path} is no file, or a huge one")


def _hash(path: Path) -> str:
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
