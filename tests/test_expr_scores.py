"""Scores: what folds into the exponential, what is left, and what that takes."""

import math
import random

import pytest
import torch

from fagen.expr import words
from fagen.expr.bounds import interval
from fagen.expr.declare import scope_of
from fagen.expr.evaluate import evaluate
from fagen.expr.parse import read
from fagen.expr.scores import folded
from tests.expr_helpers import used

SCOPE = scope_of(
    {"cap": {"dtype": "float32", "min": 1.0, "max": 100.0}, "w": {"dtype": "int32", "min": 0}},
    {
        "slopes": {"dtype": "float32", "over": ["head"]},
        "bias": {"dtype": "float32", "over": ["head", 257]},
    },
)
# text, then outer, core, inner, row, added, and instructions of the MUFU and in all
FOLDED = [
    ("score", "1.0", "score", "1.0", "0.0", "0.0", (0, 0)),
    ("0.5*score + 2", "0.5", "score", "1.0", "2.0", "0.0", (0, 0)),
    ("score / cap", "1.0 / cap", "score", "1.0", "0.0", "0.0", (0, 0)),
    ("50*tanh(score/50)", "50.0", "tanh(score)", "0.02", "0.0", "0.0", (1, 2)),
    ("cap*tanh(score/cap)", "cap", "tanh(score)", "1.0 / cap", "0.0", "0.0", (1, 2)),
    ("sigmoid(score)", "0.5", "tanh(score)", "0.5", "0.5", "0.0", (1, 2)),
    ("slopes[head]*score - 3*q_idx", "slopes[head]", "score", "1.0", "-3*q_idx", "0.0", (0, 0)),
    (
        "score + slopes[head]*(k_idx - q_pos)",
        *("1.0", "score", "1.0", "0.0", "slopes[head]*(k_idx - q_pos)", (0, 1)),
    ),
    ("2*(score + 3 + 0.1*k_idx)", "2.0", "score", "1.0", "6.0", "0.2*k_idx", (0, 1)),
    (
        "score + bias[head, clamp(k_idx - q_pos, -128, 128) + 128]",
        *("1.0", "score", "1.0", "0.0"),
        *("bias[head, min(128, max(-128, k_idx - q_pos)) + 128]", (0, 9)),
    ),
    ("score*score", "1.0", "score*score", "1.0", "0.0", "0.0", (0, 2)),
    ("tanh(score) + score", "1.0", "score + tanh(score)", "1.0", "0.0", "0.0", (1, 3)),
    ("exp(2*score)*tanh(2*score)", "1.0", "exp(score)*tanh(score)", "2.0", "0.0", "0.0", (2, 5)),
    ("where(k_idx <= w, score, -inf)", "1.0", None, "1.0", "0.0", "0.0", (0, 3)),
    ("max(score, 0.1*score)", "1.0", "max(0.1*score, score)", "1.0", "0.0", "0.0", (0, 3)),
]


@pytest.mark.parametrize(("text", "outer", "core", "inner", "row", "added", "cost"), FOLDED)
def test_a_score_is_folded_as_far_as_it_goes(text, outer, core, inner, row, added, cost) -> None:
    parts = folded(read("score", text, used(text, SCOPE)))
    assert (str(parts.outer), str(parts.inner)) == (outer, inner)
    assert core is None or str(parts.core) == core
    assert (str(parts.row), str(parts.added)) == (row, added)
    assert parts.cost == cost
    assert parts.is_affine == (parts.core.text == "score")


@pytest.mark.parametrize("text", [row[0] for row in FOLDED])
def test_what_is_folded_is_the_same_score(text: str) -> None:
    expression = read("score", text, used(text, SCOPE))
    whole, dice = folded(expression).whole, random.Random(text)
    for _ in range(20):
        given = {
            "score": dice.uniform(-9, 9),
            "q_idx": dice.randrange(9),
            "k_idx": dice.randrange(9),
            "len_q": 9,
            "len_k": 9,
            "head": 1,
            "w": 4,
            "cap": dice.uniform(1, 60),
            "slopes": [0.5, -0.25],
            "bias": [[math.sin(i + h) for i in range(257)] for h in range(2)],
        }
        one, other = evaluate(expression.tree, given), evaluate(whole, given)
        assert one == other or math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)


def test_named_scores_are_what_their_papers_have_by_hand() -> None:
    dense = {
        "plain": lambda s, i, j: s,
        "softcap": lambda s, i, j: 30 * torch.tanh(s / 30),
        "alibi": lambda s, i, j: s - 0.25 * (i + 3 - j),
    }
    assert dense.keys() == words.SCORES.keys()
    s = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 40
    i, j = torch.arange(5)[:, None], torch.arange(8)[None]
    given = {"softcap": 30.0, "slopes": torch.tensor([9.0, 0.25], dtype=torch.float64), "head": 1}
    sizes = {"q_idx": i, "k_idx": j, "len_q": 5, "len_k": 8}
    for name, word in words.SCORES.items():
        got = evaluate(word.expression.tree, {**sizes, **given, "score": s})
        torch.testing.assert_close(got, dense[name](s, i, j), rtol=1e-12, atol=1e-12)


def test_a_bound_of_scores_is_found_where_there_is_one() -> None:
    assert interval(words.SCORES["softcap"].with_constants(softcap=50).tree) == (-50, 50)
    assert interval(read("score", "clamp(score, -3, 4)").tree) == (-3, 4)
    assert interval(read("score", "2*sigmoid(score)").tree) == (0, 2)
    assert interval(read("score", "exp(-score*score)").tree) == (0, 1)
    assert interval(read("score", "score").tree) == (-math.inf, math.inf)


def test_numbers_that_have_no_answer_are_those_of_ieee() -> None:
    for text, value, answer in (
        ("log(score)", 0.0, -math.inf),
        ("log(score)", -1.0, math.nan),
        ("exp(score)", 1e9, math.inf),
        ("1 / score", 0.0, math.inf),
        ("-1 / score", 0.0, -math.inf),
        ("sqrt(score)", -1.0, math.nan),
    ):
        got = evaluate(read("score", text).tree, {"score": value})
        assert got == answer or (math.isnan(got) and math.isnan(answer))
