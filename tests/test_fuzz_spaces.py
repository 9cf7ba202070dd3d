"""Search spaces that nobody meant: each is refused in words, or can be searched."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from fagen.errors import ScheduleError
from fagen.search import rows
from fagen.search.choice import Chooser
from fagen.search.declared import MAX_POINTS, parse_space
from fagen.search.files import parse_spaces, read_spaces
from fagen.search.run import anchors, summary
from fagen.search.space import survey
from tests.fuzz import altered, cases, contents, hold, in_words, soup
from tests.recordings import toml

SURVEYED = 64  # points at most: of larger spaces the file alone is judged
HEAD = toml(
    attention={"dtype": "fp16", "head_dim": 64, "mask": ["full", "causal"]},
    tile={"block_m": 128, "block_n": [64, 128]},
    pipeline={"output": "own", "q_stages": 1},
    warps={"producer": "warp"},
    softmax={"sum": "threads"},
    overlap={"intra_warpgroup": True, "inter_warpgroup": True},
    grid={"cluster": 1},
)
VARLEN = HEAD.replace("[tile]", 'lengths = "varlen"\n[tile]')
FILES = (
    HEAD + "[[shapes]]\nseqlen = 77\nseqlen_k = 512\nbatch = 2\nheads = 8\nkv_heads = 2\n",
    HEAD.replace("= 64\n", "= { from = 64, to = 128, step = 64 }\n", 1)
    + "[[shapes]]\nseqlen = 1\nweight = 5e-324\n[[shapes]]\nseqlen = 4096\nweight = 1e300\n",
    HEAD + '[search]\nanchor = "fwd_fp16_d64_full_m128n128"\nprune = 1.5\ncompile = 3\n',
    VARLEN + "[[shapes]]\nseqlens = [77, 512, 3]\nseqlens_k = [9, 9, 9]\nkv_heads = 8\n"
    "[[shapes]]\nseqlens = { from = 1, to = 64 }\ntokens = 500\n[[shapes]]\nseqlen = 77\n",
    VARLEN + "[[shapes]]\ntokens = 600\nbatch = 2\nlongest = 500\ntokens_k = 700\n"
    "[[shapes]]\nseqlens = { from = 16, to = 4096 }\nbatch = 8\nheads = 4\n",
)
texts = altered(FILES) | altered(FILES) | altered(FILES) | soup(FILES)


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
        surveyed = survey(declared, target)
        assert math.fsum(surveyed.weights) == pytest.approx(1) and min(surveyed.weights) > 0
        kept = json.dumps(summary(surveyed, declared), allow_nan=False)
        row = rows.read(rows.SurveyRow, (target.name, kept))
        assert row.found.fit == len(surveyed.points)
        for point in surveyed.points:
            assert 0 < surveyed.predicted(point) < math.inf
        Chooser(surveyed, declared.effort.prune).next()
        if declared.effort.anchor:  # else the committed schedules are read, each time
            assert all(anchors(surveyed, declared.effort))


@pytest.mark.parametrize("text", FILES)
def test_what_is_altered_below_can_be_searched(text):
    assert not refused(parse_space, text)
    judge(text)


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
    message = refused(parse_spaces, whole)
    if any(refused(parse_space, text) for text in texts):
        assert message
    elif not message:
        for space, text in zip(parse_spaces(whole, "x.toml"), texts, strict=True):
            assert replace(space, text="") == replace(parse_space(text, "x.toml"), text="")
    else:
        assert "is searched in another space too" in message or "make several files" in message


spaces = st.lists(st.sampled_from(FILES) | altered(FILES), min_size=1, max_size=3)


@cases(few=200)
def test_several_spaces_are_refused_in_words_or_each_is_what_it_is_alone(cases):
    hold(cases, spaces, judge_several)


# ---- files ---------------------------------------------------------------------------------------


def test_no_file_is_a_traceback(tmp_path):
    path = tmp_path / "space.toml"

    def judge(content):
        path.write_bytes(content)
        try:
            read_spaces(path)
        except ScheduleError as error:
            assert "space.toml" in str(error)

    hold(100, contents(FILES), judge)


def test_no_name_is_a_traceback():
    def judge(name):
        with pytest.raises(ScheduleError):
            read_spaces(name)[0]

    hold(100, st.text(max_size=40).filter(lambda name: not name.endswith(".toml")), judge)
