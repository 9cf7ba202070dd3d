"""Schedules whose masks and scores are texts: what calls give stands beside them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fagen
from fagen import registry
from fagen.errors import ScheduleError
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
