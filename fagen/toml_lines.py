"""Turn TOML text into its tables and the line on which each of their keys is said.

And the way back for what comes from outside: one escape, for messages and for files.
"""

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from fagen.errors import ScheduleError

KeyPath = tuple[str, ...]

MAX_BYTES = 16_384  # of a schedule file; the longest sensible one is an eighth of that
MAX_LINE = 4_096  # characters: the reader takes minutes for keys with very many dots

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
_LOCATION = re.compile(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$")
_BARE = re.compile(r"[A-Za-z_][\w.+-]*")

# what others call words of a schedule: in small letters, without - and _
ALSO_CALLED = {
    **dict.fromkeys(("half", "float16", "f16"), "fp16"),
    **dict.fromkeys(("bfloat16", "bfloat", "brainfloat16"), "bf16"),
    **dict.fromkeys(("fp8", "float8", "f8", "fp8e4m3", "fp8e4m3fn", "float8e4m3"), "e4m3"),
    **dict.fromkeys(("float8e4m3fn", "e4m3fn", "f8e4m3", "f8e4m3fn"), "e4m3"),
    **dict.fromkeys(("none", "noncausal", "bidirectional", "nomask"), "full"),
}


@dataclass(frozen=True)
class Origin:
    """Where a schedule was written: a name for messages, and the line of each key path.

    In a path the tables of an array are told apart by their number, from "0" on.  All origins are
    equal: two schedules are the same when they say the same.
    """

    where: str = field(compare=False)
    text: str = field(default="", compare=False, repr=False)
    within: KeyPath = field(default=(), compare=False)  # the table that its paths begin at

    @cached_property
    def lines(self) -> Mapping[KeyPath, int]:
        """The line of each key path: looked for when a message first needs one."""
        around = len(self.within)
        lines = {p[around:]: n for p, n in _key_lines(self.text) if p[:around] == self.within}
        return {path: line for path, line in lines.items() if path or not around}

    def line(self, path: KeyPath) -> int:
        """Return the line of a key, or of the first key in it, or of the nearest table around it.

        0 where none is known.
        """
        if path in self.lines:
            return self.lines[path]
        within = (line_path for line_path in self.lines if line_path[: len(path)] == path)
        around = (path[:length] for length in range(len(path) - 1, 0, -1))
        near = chain(within, around)
        return next((self.lines[line_path] for line_path in near if line_path in self.lines), 0)

    def at(self, *path: str) -> str:
        """Return `file:line` of a key; a key that is nowhere near any line has the file alone."""
        line, where = self.line(path), printable(self.where)
        return f"{where}:{line}" if line else where


def read_text(path: Path | str, what: str = "schedule", most: int = MAX_BYTES) -> str:
    """Return the text of a file that is `what`, of `most` bytes.  Raises ScheduleError."""
    try:
        with Path(path).open("rb") as file:
            return text_of(file, str(path), what, most)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ScheduleError(f"{printable(path)}: cannot be read: {reason}") from None


def text_of(file: BinaryIO, where: str, what: str = "schedule", most: int = MAX_BYTES) -> str:
    """Return the text of an open file.  Raises ScheduleError where it can be none of `what`."""
    content = file.read(most + 1)
    if len(content) > most:
        raise _too_long(where, what, most)
    where = printable(where)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ScheduleError(f"{where}:{line}: this is not UTF-8 text") from None


def refuse_long(text: str, where: str, what: str = "schedule", most: int = MAX_BYTES) -> None:
    """Raise ScheduleError for text that is longer than a file of `what` may be."""
    if len(text) > most or len(text.encode(errors="replace")) > most:
        raise _too_long(where, what, most)


def _too_long(where: str, what: str, most: int) -> ScheduleError:
    return ScheduleError(f"{printable(where)}: longer than {most:,} bytes; this is no {what}")


def read_toml(text: str, where: str) -> tuple[dict[str, Any], Origin]:
    """Read TOML and note its lines.  Raises ScheduleError, with the line, where it is no TOML."""
    text = text.replace("\r\n", "\n")
    named = printable(where)
    for line, content in enumerate(text.split("\n"), 1):
        if len(content) > MAX_LINE:
            many = f"{len(content):,} characters; the longest that is read has {MAX_LINE:,}"
            raise ScheduleError(f"{named}:{line}: a line of {many}")
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        place = _LOCATION.search(message)
        line = int(place[1]) if place and place[1] else text.count("\n") + 1
        why = printable(_LOCATION.sub("", message)) + _unquoted(text, place)
        raise ScheduleError(f"{named}:{line}: this is not TOML: {why}") from None
    except (ValueError, RecursionError) as error:  # a nesting beyond what Python reads
        at = f"{named}:{line}" if (line := _unreadable_line(text)) else named
        raise ScheduleError(f"{at}: this cannot be read as TOML: {error}") from None
    return tables, Origin(where, text)


def _unquoted(text: str, place: re.Match[str] | None) -> str:
    """Say of a bare word, where a value should be, how it is written."""
    if not place or not place[1]:
        return ""
    line = text.split("\n")[int(place[1]) - 1]
    word = _BARE.match(line, int(place[2]) - 1)
    if not word or not line[: word.start()].rstrip().endswith(("=", "[", ",")):
        return ""
    if word[0].lower() in ("true", "false"):
        return f"; {word[0].lower()} is written so, in small letters"
    return f"; text stands in quotes: {shown(word[0])}"


# ---- what comes from outside, in messages and in files -------------------------------------------


def printable(outside: str | Path) -> str:
    """Return text or a path from outside, with TOML's escapes for all a terminal might obey."""
    text = str(outside)
    return text if text.isprintable() else "".join(map(_escaped, text))


def quoted(text: str) -> str:
    """Return text as a string of TOML, in which nothing is that a terminal might obey."""
    return '"' + printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def shown(value: Any) -> str:
    """Return a value as TOML would say it, escaped, and cut where it is long."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        string = quoted(value)
        return string if len(string) <= 60 else string[:56] + '…"'
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    return str(value)


def nearest_or_all(name: str, names: Collection[str], otherwise: str = ": ") -> str:
    """Return how a message on an unknown name ends: with the nearest, or all that are known."""
    close = get_close_matches(name, names, 1)
    return f"; did you mean {close[0]}?" if close else otherwise + ", ".join(names)


def one_of(words: Collection[str], value: Any) -> str:
    """Return what a value must be that is none of some words, and which of them is near."""
    near = near_word(value, words)
    hint = "" if near is None else f"; did you mean {shown(near)}?"
    return f"must be {' or '.join(map(shown, words))}{hint}"


def near_word(value: Any, words: Collection[Any]) -> Any:
    """Return the word that one of no use is near to, or is called elsewhere; None where none is."""
    if not isinstance(value, str):
        return None
    small = value.lower().removeprefix("torch.")
    if (own := ALSO_CALLED.get(re.sub("[-_ ]", "", small))) in words:
        return own
    texts = {str(word): word for word in words}
    close = get_close_matches(small, texts, 1)
    return texts[close[0]] if close else None


def dotted(path: KeyPath) -> str:
    """Return a key path for a message, escaped, and cut where it is long."""
    name = ".".join(map(printable, path))
    return name if len(name) <= 60 else name[:57] + "…"


def _escaped(char: str) -> str:
    if char.isprintable():
        return char
    return f"\\u{ord(char):04x}" if ord(char) <= 0xFFFF else f"\\U{ord(char):08x}"


# ---- lines ---------------------------------------------------------------------------------------


def _unreadable_line(text: str) -> int:
    """Return the line of the first key that is TOML and yet more than Python reads, or 0."""
    for line, statement in _statements(text):
        try:
            tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            pass
        except (ValueError, RecursionError):
            return line
    return 0


def _key_lines(text: str) -> Iterator[tuple[KeyPath, int]]:
    """Yield each key path of valid TOML with its line."""
    table: KeyPath = ()
    arrays: dict[KeyPath, int] = {}  # the number of each one's table of the moment
    for line, statement in _statements(text):
        if statement.startswith("["):
            *around, name = _names(statement)
            table = ()
            for part in around:
                table += (part,)
                table += (str(arrays[table]),) if table in arrays else ()
            table += (name,)
            if statement.startswith("[["):
                arrays[table] = arrays.get(table, -1) + 1
                if not arrays[table]:
                    yield table, line
                table += (str(arrays[table]),)
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
    if statement := "".join(words).strip():  # with a bracket that is never closed
        yield begun, statement


def comments(text: str) -> list[str]:
    """Return the comments of TOML text, each as it is written."""
    return [token["comment"] for token in _TOKEN.finditer(text) if token["comment"]]


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
