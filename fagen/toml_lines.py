"""Turn TOML text into its tables and the line on which each of their keys is said."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from fagen.errors import ScheduleError

KeyPath = tuple[str, ...]

MAX_BYTES = 16_384  # of a schedule file; the longest sensible one is an eighth of that

_TOKEN = re.compile(
    r"""
      (?P<string> \"{3} (?: \\. | [^\\] )*? \"{3,5}  |  '{3} .*? '{3,5}
                | \" (?: \\. | [^\\"\n] )* \"        |  ' [^'\n]* ' )
    | (?P<comment> \# [^\n]* )
    | (?P<newline> \n )
    | (?P<open> [\[{] )
    | (?P<close> [\]}] )
    | (?P<other> [^\#\n\[\]{}"']+ | . )
    """,
    re.VERBOSE | re.DOTALL,
)
_KEY = re.compile(r"""(?: "(?:\\.|[^"\\])*" | '[^']*' | [^="'] )+""", re.VERBOSE)
_LOCATION = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)$")


@dataclass(frozen=True)
class Origin:
    """Where a schedule was written: a name for messages, and the line of each key path.

    All origins are equal: two schedules are the same when they say the same.
    """

    where: str = field(compare=False)
    lines: Mapping[KeyPath, int] = field(default_factory=dict, compare=False)

    def line(self, path: KeyPath) -> int:
        """Return the line of a key, or of the first key in it, or of the nearest table around it.

        0 where none is known.
        """
        within = [known for known in self.lines if known[: len(path)] == path]
        around = (path[:length] for length in range(len(path), 0, -1))
        near = (path, *within, *around)
        return next((self.lines[known] for known in near if known in self.lines), 0)

    def at(self, *path: str) -> str:
        """Return `file:line` of a key; a key that is nowhere near any line has the file alone."""
        line, where = self.line(path), printable(self.where)
        return f"{where}:{line}" if line else where


def read_text(path: Path | str) -> str:
    """Return the text of a schedule's file.  Raises ScheduleError where it can be none."""
    try:
        with Path(path).open("rb") as file:
            return text_of(file, str(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ScheduleError(f"{printable(str(path))}: cannot be read: {reason}") from None


def text_of(file: BinaryIO, where: str) -> str:
    """Return the text of an open file.  Raises ScheduleError where it can be no schedule's."""
    content = file.read(MAX_BYTES + 1)
    where = printable(where)
    if len(content) > MAX_BYTES:
        raise ScheduleError(f"{where}: longer than {MAX_BYTES:,} bytes; this is no schedule")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ScheduleError(f"{where}:{line}: this is not UTF-8 text") from None


def read_toml(text: str, where: str) -> tuple[dict[str, Any], Origin]:
    """Read TOML and note its lines.  Raises ScheduleError, with the line, where it is no TOML."""
    text = text.replace("\r\n", "\n")
    named = printable(where)
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        found = _LOCATION.search(message)
        line = int(found[1]) if found and found[1] else text.count("\n") + 1
        said = _LOCATION.sub("", message)
        raise ScheduleError(f"{named}:{line}: this is not TOML: {said}") from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond what Python reads
        raise ScheduleError(f"{named}: this cannot be read as TOML: {error}") from None
    return tables, Origin(where, dict(_key_lines(text)))


def printable(text: str) -> str:
    """Return text from outside as it is, or escaped where a terminal might obey it."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def shown(value: Any) -> str:
    """Return a value as TOML would say it, escaped, and cut where it is long."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        quoted = '"' + value.encode("unicode_escape").decode() + '"'
        return quoted if len(quoted) <= 60 else quoted[:56] + '…"'
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    return str(value)


def _key_lines(text: str) -> Iterator[tuple[KeyPath, int]]:
    """Yield each key path of valid TOML with its line."""
    table: KeyPath = ()
    for line, statement in _statements(text):
        if statement.startswith("["):
            table = _names(statement)
            yield table, line
        else:
            if key := _KEY.match(statement):
                yield table + _names(key[0] + "= 0"), line


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Split TOML into (line, text) of its headers and key/value pairs, comments left out."""
    line = begun = 1
    depth = 0
    words: list[str] = []
    for token in _TOKEN.finditer(text + "\n"):
        if token["newline"] and depth == 0:
            if statement := "".join(words).strip():
                yield begun, statement
            words = []
            begun = line + 1
        elif not token["comment"]:
            depth += bool(token["open"]) - bool(token["close"])
            words.append(token[0])
        line += token[0].count("\n")


def _names(statement: str) -> KeyPath:
    """Return the dotted names of a header or a key, as the TOML reader understands them."""
    node: Any = tomllib.loads(statement)
    path = []
    while node and isinstance(node, dict | list):
        if isinstance(node, list):
            node = node[0]
        else:
            name, node = next(iter(node.items()))
            path.append(name)
    return tuple(path)
