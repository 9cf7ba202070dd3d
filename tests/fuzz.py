"""Files that nobody meant, for every door by which files come in: one fuzzer.

A door says how a file is read, and gives a few files that it takes. What is drawn are those with
some of their values and lines changed, in several encodings, and words and bytes without sense: the
same cases in every run. What fails is shrunk to the smallest file that still does.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fagen.errors import FagenError, ScheduleError

FEW, MANY = 300, 10_000  # cases: of the ordinary tests, and of those that are long
LONGEST = 1_000  # characters of a line that refuses

VALUES = ["0", "1", "-1", "64", "127", "1023", "1024", "16.0", "1_000", "true", "nan", "-inf"]
VALUES += ["1e999", "9" * 5000, "0x" + "f" * 400, "1979-05-27", "07:32:00", "[]", "{}", "[[1]]"]
VALUES += [str(2**53 + 1), str(2**63 - 1), str(2**63), str(10**400), str(-(10**400))]
VALUES += ['""', "'x'", '"""a\nb"""', '"full"', '"causal"', '"fp16"', '"e4m3"', '"é"', '"\\""']
VALUES += ['"\\u001b]0;x\\u0007"', '"\\u009b2J"', '"\\n"', '"\\U0001f600"', '"\U0001f600\u2028"']
VALUES += ['"' + "long " * 50 + '"', "{a = 1}", "{ from = 1, to = 2 }", "["]
SNIPPETS = ["\x00", "\x1b[2J", "\x85", "\r", "\r\n", "\n", "\ufeff", "\u202e", "é", "\U0001f600"]
SNIPPETS += [" = ", "=", ".", ",", "[", "]", "[[", "]]", "{", "}", "#", "\\", "'", '"', "'''"]
SNIPPETS += ['"""', "a." * 300, "[" * 300, "kind = 1\n", '"\\u001b" = 1\n', "x = [\n" * 200]
ENCODINGS = ["utf-8"] * 5 + ["utf-8-sig", "latin-1", "utf-16", "crlf"]


@dataclass(frozen=True)
class Door:
    """How a file comes in: `open` reads it, and raises a FagenError where it refuses.

    `files` are some that it takes; small ones, since most changes should matter.
    """

    open: Callable[[Path], Any]
    files: tuple[str, ...]


@st.composite
def altered(draw: st.DrawFn, files: tuple[str, ...]) -> str:
    """Draw one of these files with up to four changes, of its lines and within them."""
    others = sorted({line for text in files for line in text.splitlines()})
    given_values = sorted({line.partition(" = ")[2] for line in others if " = " in line})
    lines = draw(st.sampled_from(files)).splitlines()
    for _ in range(draw(st.integers(0, 4))):
        if not lines:
            break
        at = draw(st.integers(0, len(lines) - 1))
        key, equals, value = lines[at].partition(" = ")
        change = draw(st.sampled_from(["value", "value", "known", "key", "gone", "line", "text"]))
        if change == "gone":
            del lines[at]
        elif change == "line":
            lines.insert(at, draw(st.sampled_from(others)))
        elif change == "text":
            within = draw(st.integers(0, len(lines[at])))
            put = draw(st.sampled_from(SNIPPETS) | st.text(max_size=4))
            lines[at] = lines[at][:within] + put + lines[at][within:]
        elif change == "key":
            lines[at] = draw(st.sampled_from(others)).partition(" = ")[0] + equals + value
        elif equals:
            new = st.sampled_from(VALUES if change == "value" else given_values)
            lines[at] = f"{key} = {draw(new | st.integers(-(2**70), 2**70).map(str))}"
    return "\n".join(lines) + "\n"


def soup(files: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Words of these files, and others, in any order."""
    words = sorted({word for text in files for word in text.replace("=", " = ").split()})
    return st.lists(st.sampled_from([*words, *SNIPPETS, "\n", " "]), max_size=30).map("".join)


def contents(files: tuple[str, ...]) -> st.SearchStrategy[bytes]:
    """What a file may hold: most of it is near to what a door takes."""
    texts = st.one_of(altered(files), altered(files), altered(files), soup(files))
    near = st.builds(encoded, texts, st.sampled_from(ENCODINGS))
    return near | near | near | st.binary(max_size=100)


def encoded(text: str, encoding: str) -> bytes:
    """A text as bytes; "crlf" is UTF-8 with other ends of lines."""
    if encoding == "crlf":
        return text.replace("\n", "\r\n").encode(errors="replace")
    return text.encode(encoding, errors="replace")


def stands(door: Door, path: Path, content: bytes) -> None:
    """A door takes a file, or refuses it in lines that can be printed and begin with its name."""
    path.write_bytes(content)
    try:
        door.open(path)
    except ScheduleError as error:
        in_words(error, str(path))


def in_words(error: FagenError, where: str) -> None:
    """Judge a refusal: it says where, obeys no one, and no line of it fills a screen."""
    for line in str(error).split("\n"):
        assert line.startswith(where), line
        assert line.isprintable(), line
        assert len(line) <= LONGEST + len(where), line


def settings(cases: int) -> hypothesis_settings:
    """So many cases, the same in every run."""
    return hypothesis_settings(
        max_examples=cases,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def cases(few: int = FEW, many: int = MANY) -> pytest.MarkDecorator:
    """Parametrize a test by `cases`: few in every run, and very many in the long ones."""
    long = pytest.param(many, marks=pytest.mark.long)
    return pytest.mark.parametrize("cases", [few, long])


def hold(cases: int, drawn: st.SearchStrategy[Any], judge: Callable[[Any], None]) -> None:
    """Judge so many cases of what is drawn."""

    @settings(cases)
    @given(drawn)
    def judged(example: Any) -> None:
        judge(example)

    judged()


def fuzzed(doors: dict[str, Door]) -> Callable[..., None]:
    """The test of these doors."""

    @cases()
    @pytest.mark.parametrize("door", doors)
    def test(door: str, cases: int, tmp_path: Path) -> None:
        path = tmp_path / "x.toml"
        hold(cases, contents(doors[door].files), lambda content: stands(doors[door], path, content))

    return test


def altered_json(text: str, change: str, steps: list[int], value: Any) -> str:
    """Change the value that these steps lead to: set, "gone", "more" or "twice" what it was.

    Text that is no JSON stays as it is.
    """
    try:
        whole = node = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for number, step in enumerate(steps):
        if not isinstance(node, dict | list) or not node:
            break
        keys = [*node] if isinstance(node, dict) else [*range(len(node))]
        key = keys[step % len(keys)]
        if number < len(steps) - 1 and isinstance(node[key], dict | list) and node[key]:
            node = node[key]
            continue
        if change == "gone":
            del node[key]
        elif change == "more" and isinstance(node, dict):
            node[str(value)[:5000]] = value
        elif change == "twice" and isinstance(node, list):
            node *= 30
        else:
            node[key] = value
        break
    return json.dumps(whole)
