"""Search spaces that nobody meant: each is refused in words, or can be searched.

The same cases in every run; what fails is shrunk to the shortest text that still does.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from fagen.errors import ScheduleError
from fagen.kinds.forward.keys import Schedule
from fagen.search import rows
from fagen.search.choice import Chooser
from fagen.search.declared import MAX_POINTS, parse_space
from fagen.search.files import parse_spaces, read_spaces
from fagen.search.run import anchors, summary
from fagen.search.space import survey
from tests.fuzz import cases, hold, in_words

SURVEYED = 64  # points at most: of larger spaces the file alone is judged

KEYS = Schedule.keys
SECTIONS = [*KEYS.tables, "shapes", "search", "tail", "serach", '"\\u001b[2J"']
NAMES = [*KEYS.sections, "stepp", "blok_n", "seqlen", "weight", "kv_heads", "anchor", "seqlens"]
NAMES += ["tokens", "longest_k", '"a\\nb"']
NUMBERS = [0, 1, -1, 2, 3, 16, 24, 64, 96, 128, 256, 257, 512, 4096, 10**6, 10**9, 2**63, -(2**70)]
WORDS = ["fp16", "bf16", "e4m3", "full", "causal", "warp", "none", "registers", "own", "", "é\x1b["]
FLOATS = ["nan", "inf", "-inf", "1e999", "5e-324", "1e308", "0.0", "-1.5", "150.0", "1979-05-27"]

scalars = (
    st.sampled_from(NUMBERS).map(str)
    | st.sampled_from(WORDS).map(json.dumps)
    | st.sampled_from(FLOATS)
    | st.sampled_from(["true", "false", "0x" + "f" * 400, "[]", "{}", "[[1]]", "{a = 1}"])
)
ranges = st.dictionaries(
    st.sampled_from(["from", "to", "step", "from", "to", "too", "by"]), scalars, max_size=4
).map(lambda parts: "{" + ", ".join(f"{name} = {value}" for name, value in parts.items()) + "}")
values = scalars | ranges | st.lists(scalars, max_size=6).map(lambda all_: f"[{', '.join(all_)}]")


@st.composite
def sensible(draw: Callable) -> str:
    """Draw a small space that is one, but for what `hostile` may put beside it."""
    head_dim = draw(st.sampled_from(["64", "[64, 128]", "{ from = 64, to = 128, step = 64 }"]))
    mask = draw(st.sampled_from(['"full"', '["full", "causal"]']))
    lines = ["[attention]", 'dtype = "fp16"', f"head_dim = {head_dim}", f"mask = {mask}"]
    lines += ["[tile]", "block_m = 128", "block_n = [64, 128]", "[pipeline]", 'output = "own"']
    lines += ["q_stages = 1", "[warps]", 'producer = "warp"', "[softmax]", 'p = "registers"']
    lines += ["[overlap]", "intra_warpgroup = true", "inter_warpgroup = true", "[grid]"]
    lines += ["cluster = 1"]
    for _ in range(draw(st.integers(0, 3))):
        lines += ["[[shapes]]", f"seqlen = {draw(st.sampled_from([1, 77, 512, 4096]))}"]
        keys = ("seqlen_k", "batch", "heads", "kv_heads", "weight")
        for key in draw(st.lists(st.sampled_from(keys), max_size=3, unique=True)):
            said = ["1", "2", "8", "3"] if key != "weight" else ["1", "1e300", "0.1", "5e-324"]
            lines.append(f"{key} = {draw(st.sampled_from(said))}")
    for key in draw(st.lists(st.sampled_from(["anchor", "prune", "compile"]), max_size=1)):
        slugs = ['"fwd_fp16_d64_full_m128n128"', '"fwd_fp16_d64_full_m1n1"', '"\\n"', "3"]
        said = draw(st.sampled_from(slugs if key == "anchor" else ["2", "1.5", "nan", "1e9"]))
        lines += ["[search]", f"{key} = {said}"]
    return "\n".join(lines) + "\n"


LENGTHS = ["[1]", "[77, 512, 3]", "{ from = 1, to = 64 }", "{ from = 16, to = 4096 }", "[4096, 1]"]


@st.composite
def packed(draw: Callable) -> str:
    """Draw a small space of varlen sequences, whose shapes are lists of lengths."""
    text = draw(sensible()).partition("[[shapes]]")[0].partition("[search]")[0]
    lines = text.replace("[tile]", 'lengths = "varlen"\n[tile]').splitlines()
    for _ in range(draw(st.integers(0, 3))):
        lines += ["[[shapes]]"]
        of = draw(st.sampled_from(["seqlens", "seqlen", "tokens"]))
        if of == "seqlens":
            lines += [f"seqlens = {draw(st.sampled_from(LENGTHS))}"]
        elif of == "seqlen":
            lines += [f"seqlen = {draw(st.sampled_from([1, 77, 4096]))}"]
        else:
            lines += [f"tokens = {draw(st.sampled_from([2, 600, 4096]))}"]
            lines += [f"batch = {draw(st.sampled_from([1, 2, 77]))}"]
            unlike = ("tokens_k", "longest", "longest_k", "seqlen")
            for key in draw(st.lists(st.sampled_from(unlike), max_size=2, unique=True)):
                lines.append(f"{key} = {draw(st.sampled_from([2, 40, 500]))}")
        keys = ("seqlen_k", "seqlens_k", "heads", "kv_heads", "weight")
        keys += () if of == "tokens" else ("batch", "tokens")
        for key in draw(st.lists(st.sampled_from(keys), max_size=2, unique=True)):
            said = ["[3]", "[9, 9, 9]"] if key == "seqlens_k" else ["1", "2", "500", "8"]
            lines.append(f"{key} = {draw(st.sampled_from(said))}")
    return "\n".join(lines) + "\n"


@st.composite
def altered(draw: Callable) -> str:
    """Draw a sensible space of which some lines are changed or gone, or to which some are added."""
    lines = draw(sensible() | packed()).splitlines()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.sampled_from([n for n, line in enumerate(lines) if " = " in line]))
        change = draw(
            st.sampled_from(["value", "value", "value", "key", "gone", "section", "more"])
        )
        key, _, value = lines[at].partition(" = ")
        if change == "value":
            lines[at] = f"{key} = {draw(values)}"
        elif change == "key":
            lines[at] = f"{draw(st.sampled_from(NAMES))} = {value}"
        elif change == "gone":
            lines[at] = ""
        elif change == "section":
            name = draw(st.sampled_from(SECTIONS))
            lines.append(draw(st.sampled_from([f"[{name}]", f"[[{name}]]", f"{name} = 3"])))
        else:
            lines.insert(at, f"{draw(st.sampled_from(NAMES))} = {draw(values)}")
    return "\n".join(lines) + "\n"


TOKENS = ["[attention]", "[tile]", "[[shapes]]", "[search]", "head_dim", "block_n", "weight"]
TOKENS += ["from", " = ", "64", '"fp16"', "\n", "nan", "1e999", "{", "}", "[", "]", ",", '"""', "'"]
TOKENS += ["#", "\\", "é", ".", "\x00", "\x85", "\u2028", "kind"]
soup = st.lists(st.sampled_from(TOKENS), max_size=40).map("".join) | st.text(max_size=120)
texts = st.one_of(sensible(), packed(), altered(), altered(), soup)


def refused(read: Callable[..., object], text: str) -> str:
    """The refusal of a text, of which each line names the file and can be printed, or ""."""
    try:
        read(text, "x.toml")
    except ScheduleError as error:
        in_words(error, "x.toml")
        return str(error)
    return ""


def judge(text: str) -> None:
    """Refused, it is in printable lines that name the file; else all that is predicted is right."""
    if refused(parse_space, text):
        return
    declared = parse_space(text, "x.toml")
    points = math.prod(map(len, declared.values.values()))
    assert points <= MAX_POINTS
    if points > SURVEYED:
        return
    for target in declared.targets():
        found = survey(declared, target)
        assert math.fsum(found.weights) == pytest.approx(1) and min(found.weights) > 0
        kept = json.dumps(summary(found, declared), allow_nan=False)
        assert rows.read(rows.SurveyRow, (target.name, kept)).found.fit == len(found.points)
        for point in found.points:
            assert 0 < found.predicted(point) < math.inf
        Chooser(found, declared.effort.prune).next()
        if declared.effort.anchor:  # else the committed schedules are read, each time
            assert all(anchors(found, declared.effort))


@cases()
def test_a_space_is_refused_in_words_or_can_be_searched(cases):
    hold(cases, texts, judge)


# ---- several in one file ------------------------------------------------------------------------


def nested(text: str) -> str:
    """A space as one of several."""
    return "[[space]]\n" + re.sub(r"^(\[+)", r"\1space.", text, flags=re.MULTILINE)


def judge_several(texts: list[str]) -> None:
    """Several spaces are what each of them is alone; what is wrong with one is wrong with all."""
    if len(texts) == 2:
        texts[1] = texts[1].replace('"fp16"', '"bf16"').replace("fwd_fp16", "fwd_bf16")
    whole = "".join(map(nested, texts))
    said = refused(parse_spaces, whole)
    if any(refused(parse_space, text) for text in texts):
        assert said
    elif not said:
        for found, text in zip(parse_spaces(whole, "x.toml"), texts, strict=True):
            alone = parse_space(text, "x.toml")
            assert replace(found, text="") == replace(alone, text="")
    else:
        assert "is searched in another space too" in said or "make several files" in said


spaces = st.lists(sensible() | sensible() | altered(), min_size=1, max_size=3)


@cases(few=200)
def test_several_spaces_are_refused_in_words_or_each_is_what_it_is_alone(cases):
    hold(cases, spaces, judge_several)


# ---- files ---------------------------------------------------------------------------------------


def test_no_file_is_a_traceback(tmp_path):
    path = tmp_path / "space.toml"

    def judge(content):
        path.write_bytes(content)
        with pytest.raises(ScheduleError, match=r"space\.toml"):
            read_spaces(path)[0]

    hold(100, st.binary(max_size=200) | texts.map(lambda text: text.encode("utf-16")), judge)


def test_no_name_is_a_traceback():
    def judge(name):
        with pytest.raises(ScheduleError):
            read_spaces(name)[0]

    hold(100, st.text(max_size=40).filter(lambda name: not name.endswith(".toml")), judge)
