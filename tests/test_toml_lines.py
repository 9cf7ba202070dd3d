"""Text that is no TOML, or hostile, is refused in words, each with the line of its file."""

import os

import pytest

from fagen import registry
from fagen.errors import ScheduleError
from fagen.toml_lines import read_toml
from tests.schedule_helpers import TEXT, refusal


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[attention]\nhead_dim = 1\nhead_dim = 2\n", "x.toml:3: this is not TOML"),
        ("[attention]\nhead_dim = \n", "x.toml:2: this is not TOML"),
        ("[attention", "x.toml:1: this is not TOML"),
        ("a = 1\nx = " + "9" * 5000 + "\ny = 1\n", "x.toml:2: a line of 5,004 characters; the lo"),
        ("a." * 6000 + "a = 1", "x.toml:1: a line of 12,005 characters"),
        ("a = 1\nx = " + "[\n" * 4000 + "]\n" * 4000, "x.toml:2: this cannot be read"),
        ("x = " + "[\n" * 5000, "x.toml:1: this cannot be read"),
        ("attention = 3\ntile = []\n", "x.toml:1: attention is no table"),
        ("[[attention]]\n[[tile]]\n", "x.toml:1: attention is no table"),
        ("[attention]\nhead_dim = 0x" + "f" * 3000, "a number of 12000 bits"),
        ("[attention]\nhead_dim = {a = [1]}\n", "x.toml:2: attention.head_dim = a table"),
        ("[attention]\nhead_dim = 1979-05-27\n", "x.toml:2: attention.head_dim = 1979-05-27"),
        ("a.b.c.d = 1\n", "a is not a table of this kind of schedule"),
        ("[decoding]\n", '"decoding" is a table of no kind of schedule; did you mean decode?'),
        ('[attention]\ndtype = "\\u0000\\u001b"\n', r'"\u0000\u001b"'),
        ('"a\\u001b]0;x\\u0007" = 1\n', r"x.toml:1: a\u001b]0;x\u0007 is not a table"),
        ('"\\U000e0041\\u202e" = 1\n', r"x.toml:1: \U000e0041\u202e is not a table"),
        (f"{'k' * 3000} = 1\n", f"x.toml:1: {'k' * 57}… is not a table"),
        ('[attention]\ndtype = "é\\"\\\\"\n', r'attention.dtype = "é\"\\" must be'),
    ],
)
def test_hostile_text_is_refused_in_words(text, message):
    assert message in "\n".join(refusal(text))


@pytest.mark.parametrize("text", ["'''\n'''=1\n\"\"=2", "x = 1\r\n[a]\r\ny = 2\r\n"])
def test_odd_lines_are_those_of_the_file(text):
    """What tests/test_fuzz.py once found."""
    assert all(line.startswith("x.toml:") for line in refusal(text)[:2])


def test_what_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing.toml", "\0", "/dev/zero"):
        with pytest.raises(ScheduleError, match=r"cannot be read|no schedule"):
            registry.read(path)
    (tmp_path / "latin.toml").write_bytes(b"# one\n# caf\xe9\n")
    with pytest.raises(ScheduleError, match=r"latin\.toml:2: this is not UTF-8"):
        registry.read(tmp_path / "latin.toml")
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    assert registry.read(os.fspath(tmp_path / "marked.toml")) == registry.parse(TEXT)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dtype = bf16", '; text stands in quotes: "bf16"'),
        ("dtype = half  # or so", '; text stands in quotes: "half"'),
        ("mask = [full, causal]", '; text stands in quotes: "full"'),
        ("a = {b = c}", '; text stands in quotes: "c"'),
        ("dtype = \\x1b[2J", "Invalid value"),
        ("a = True", "; true is written so, in small letters"),
        ("a = FALSE", "; false is written so, in small letters"),
        ("a =", "Invalid value"),
        ("= a", "Invalid statement"),
    ],
)
def test_a_word_without_quotes_is_told_of_them(line, message):
    with pytest.raises(ScheduleError) as refusal:
        registry.parse(f"[attention]\n{line}\n", "x.toml")
    assert str(refusal.value).startswith("x.toml:2: this is not TOML: ")
    assert str(refusal.value).endswith(message)


def test_lines_are_those_of_the_keys_whatever_stands_between():
    _, origin = read_toml(
        '''\
# [no]
a = """
[no]
b = 1
"""          # line 5
[t] # [x]
"quoted.key" = '[no]'
list = [
  1, # ]
  { z = 2 },
]
d . e = 3
inline = { one = 1, two = { three = 3 } }
[t.u]
x = 'a = "b'
[["many"]]
y = "\\"#"
[["many"]]
z = 1
[[many.more]]
[many.more.x]
[[many]]
[[many.more]]
v.w = 1''',
        "x",
    )
    assert origin.lines == {
        ("a",): 2,
        ("t",): 6,
        ("t", "quoted.key"): 7,
        ("t", "list"): 8,
        ("t", "d", "e"): 12,
        ("t", "inline"): 13,
        ("t", "u"): 14,
        ("t", "u", "x"): 15,
        ("many",): 16,
        ("many", "0"): 16,
        ("many", "0", "y"): 17,
        ("many", "1"): 18,
        ("many", "1", "z"): 19,
        ("many", "1", "more"): 20,
        ("many", "1", "more", "0"): 20,
        ("many", "1", "more", "0", "x"): 21,
        ("many", "2"): 22,
        ("many", "2", "more"): 23,
        ("many", "2", "more", "0"): 23,
        ("many", "2", "more", "0", "v", "w"): 24,
    }
    assert origin.at("many", "1", "z") == "x:19"
    assert origin.at("many", "1", "nothing") == "x:18"
    assert origin.at("t", "inline", "two", "three") == "x:13"
    assert origin.at("t", "nothing") == "x:6"
    assert origin.at("nowhere") == "x"
    dotted = read_toml("# no\na.b.c = 1\n[x.y]\n[x]\nz.u = 1\n", "x")[1]
    places = [("a",), ("a", "b"), ("x",), ("x", "z"), ("x", "y", "v")]
    assert [dotted.line(path) for path in places] == [2, 2, 4, 5, 3]
