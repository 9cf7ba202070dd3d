"""Schedules whose masks and scores are texts: what calls give stands beside them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fagen
from fagen import registry
from fagen.errors import ScheduleError
from tests.cli_helpers import fagen as cli
from tests.tensors import normal

TEXTS = """\
[attention]
head_dim = 64
dtype = "fp16"
mask = "k_idx <= q_pos and q_pos - k_idx < width"
score = "slope * cap * tanh(score / cap)"

[attention.parameters]
width = { dtype = "int32", min = 1 }
slope = { dtype = "float32", min = 0.5, max = 2 }
cap = 30.0

[tile]
block_m = 64
block_n = 64
"""


@fagen.mask
def near(q_pos: Any, k_idx: Any, *, width: fagen.int32(min=1)) -> Any:  # type: ignore[valid-type]
    return (k_idx <= q_pos) & (q_pos - k_idx < width)


Ends = fagen.Table("int32", "batch")
First = fagen.Table("int32", "batch", "len_q", rising=True)


@fagen.score
def sloped(score: Any, *, slope: fagen.float32(min=0.5, max=2)) -> Any:  # type: ignore[valid-type]
    return slope * 30 * fagen.tanh(score / 30)


def test_a_file_says_the_kernel_that_functions_do_and_serves_their_calls(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXTS)
    schedule = registry.read(path)
    picked = fagen.pick(dtype="fp16", head_dim=64, mask=near, score=sloped)
    values, same = schedule.values(), picked.schedule.values()
    assert (values["mask"], values["score"]) == (same["mask"], same["score"])
    assert registry.from_slug(schedule.slug) == schedule
    q, k = normal(1, 40, 2, 64, dtype=torch.float16), normal(1, 60, 1, 64, dtype=torch.float16)
    how: dict[str, Any] = dict(mask=near, width=9, score=sloped, slope=1.5)
    out = fagen.attention(q, k, k, **how, schedule=path)
    with pytest.warns(fagen.UntunedWarning):
        other = fagen.attention(q, k, k, **how)
    torch.testing.assert_close(out, other, atol=2e-3, rtol=0)
    with pytest.raises(ScheduleError, match="the call asks for float16, head_dim 64, causal"):
        fagen.attention(q, k, k, causal=True, schedule=path)


def test_a_text_that_says_a_words_keys_is_that_word() -> None:
    text = TEXTS.replace("q_pos and q_pos - k_idx < width", "q_pos").replace("slope * cap", "cap")
    for line in ("width = ", "slope = "):
        text = "".join(row for row in text.splitlines(True) if not row.startswith(line))
    text = text.replace("cap = 30.0", 'cap = { dtype = "float32" }')
    assert registry.parse(text).slug == "fwd_fp16_d64_causal_m64n64_softcap"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("< width", "< widt", "mine.toml:4: attention.mask column 36: widt is not known"),
        (
            "width = {",
            "wide = {",
            "mine.toml:7: attention.parameters says wide, which no text",
        ),
        ("cap = 30.0", "cap = true", "mine.toml:5: attention.score column 1: * takes numbers"),
        (
            "min = 1 }",
            "least = 1 }",
            "attention.parameters width: least is none of dtype, max",
        ),
        ("slope * cap", "q_posi", "mine.toml:5: attention.score column 1: q_posi is not known"),
        ("q_pos - k_idx < width", "k_idx % 3 == 0", "mine.toml:4: attention.mask k_idx % 3 <= 0"),
    ],
)
def test_what_is_wrong_with_a_text_is_said_with_its_line(old: str, new: str, words: str) -> None:
    text = TEXTS.replace(old, new)
    assert text != TEXTS
    with pytest.raises(ScheduleError) as refusal:
        registry.parse(text, "mine.toml")
    assert words in str(refusal.value)


@fagen.mask
def between(q_idx: Any, k_idx: Any, batch: Any, *, ends: Ends, first: First) -> Any:  # type: ignore[valid-type]
    return (k_idx < ends[batch]) & (k_idx >= first[batch, q_idx])


@pytest.mark.parametrize(
    "how",
    [
        dict(mask=between, score=sloped),
        dict(mask=near, causal=True, window=(3, 4)),  # of which a text has the call's own numbers
        dict(mask=near, score=sloped, kind="decode"),
        dict(mask="chunked", softcap=30.0),
    ],
)
def test_a_picked_schedule_is_written_as_a_file_that_reads_back(how: dict[str, Any]) -> None:
    picked = fagen.pick(dtype="fp16", head_dim=64, **how)
    assert registry.parse(picked.toml) == picked.schedule
    assert registry.parse(picked.toml).slug == picked.slug


def test_a_number_of_calls_is_declared_as_calls_have_it_or_refused() -> None:
    own = fagen.pick(dtype="fp16", head_dim=64, mask=near, window=9).toml
    with pytest.raises(ScheduleError, match="window_left is an argument of fagen's calls"):
        registry.parse(
            own.replace(
                'window_left = { dtype = "int32", min = 0', 'window_left = { dtype = "int32"'
            )
        )


def test_a_slug_with_the_hash_of_a_text_says_how_its_kernel_is_named(
    tmp_path: Path,
) -> None:
    how = ["--dtype=fp16", "--head-dim=64", "--mask=3 * k_idx <= q_pos", "--score=score - 0.3"]
    slug = cli("pick", *how).stdout.split()[0]
    path = tmp_path / "mine.toml"
    path.write_text(cli("pick", *how, "--toml").stdout)
    others = re.sub(r"(?<=_mask)\w{10}", "0" * 10, slug)  # which nobody has said
    refusal = cli("check", others).output
    assert "is a mask by its text, of which slugs have a hash alone" in refusal
    assert "`fagen pick --mask TEXT … --toml`" in refusal
    assert cli("check", path).stdout.startswith(f"{slug} fits")
