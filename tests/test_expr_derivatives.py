"""Derivatives of scores, beside torch's autograd and sympy's."""

import math

import pytest
import sympy
import torch

from fagen.errors import ExpressionError
from fagen.expr.declare import scope_of
from fagen.expr.derivatives import derivative, is_tame, shared
from fagen.expr.evaluate import evaluate
from fagen.expr.parse import parse
from fagen.expr.tree import INT, SCORE, Name

SCOPE = scope_of({"cap": {"dtype": "float32", "min": 1.0, "max": 100.0}}, {})
# a text, its derivative's, and whether sympy knows both as they are written
DERIVED = [
    ("cap*tanh(score/cap)", None, True),
    ("tanh(score)", "-(tanh(score)*tanh(score)) + 1.0", True),
    ("sigmoid(2*score)*score", None, True),
    ("exp(-score*score)", "-2.0*exp(-(score*score))*score", True),
    ("log(1.0 + score*score) / (2.0 + exp(score))", None, True),
    ("sqrt(2.0 + tanh(score))", None, True),
    ("score**5 - 3*score**2 + k_idx", "5.0*score*score*score*score - 6.0*score", True),
    ("cap / (1.0 + abs(score))", None, False),
    ("abs(score - 0.3)", "where(score - 0.3 < 0.0, -1.0, 1.0)", False),
    ("clamp(2*score, -1.0, cap)", None, False),
    ("min(score, 0.5, -score)*max(k_idx, 3)", None, False),
    ("where(score > 0.1, log(score), score - 3)", None, False),
    ("where(k_idx < 3, exp(score), -inf)", "where(k_idx <= 2, exp(score), 0.0)", False),
    ("where(k_idx < 3, score, -inf)", "where(k_idx <= 2, 1.0, 0.0)", False),
    ("score + 0.5*(k_idx - q_idx)", "1.0", True),
    ("k_idx % 3 + cap", "0.0", False),
]
AT = torch.linspace(-3, 3, 1001).double()
GIVEN = {"cap": torch.tensor(1.7).double(), "k_idx": 2, "q_idx": 5, "score": AT}


@pytest.mark.parametrize(("text", "expected", "is_smooth"), DERIVED)
def test_a_derivative_is_autograds_and_sympys(text, expected, is_smooth):
    tree = parse(text, SCOPE)
    slope = derivative(tree)
    assert expected is None or slope.text == expected
    assert parse(slope.text, SCOPE) == slope
    at = AT.clone().requires_grad_()
    found = torch.as_tensor(evaluate(slope, GIVEN), dtype=torch.float64).expand_as(at)
    value = evaluate(tree, GIVEN | {"score": at})
    if "score" in tree.names:
        (wanted,) = torch.autograd.grad(value.sum(), at)
        assert torch.allclose(found, wanted, atol=1e-12, rtol=1e-9)
    if is_smooth:
        names = {name: sympy.Symbol(name) for name in tree.names}
        own = {"sigmoid": lambda x: sympy.tanh(x / 2) / 2 + sympy.Rational(1, 2)}
        exact = sympy.diff(sympy.sympify(text, locals={**names, **own}), names["score"])
        numbers = {names[name]: float(GIVEN[name]) for name in names if name != "score"}
        known = [exact.subs(numbers | {names["score"]: x}) for x in AT[::100].tolist()]
        assert found[::100].tolist() == pytest.approx([*map(float, known)], rel=1e-9, abs=1e-12)


def test_a_branch_that_is_not_taken_never_shows():
    at = torch.tensor([-2.0, -0.0, 0.0, 1.0, math.inf])
    for text, slopes in (
        ("where(score > 0.5, log(score), -inf)", [0, 0, 0, 1, 0]),
        ("where(score > 0.5, sqrt(score), 0.0)", [0, 0, 0, 0.5, 0]),
        ("tanh(where(score > 0.5, 3.0, score / (score - 1.0)))", None),
    ):
        found = evaluate(derivative(parse(text, {})), {"score": at})
        assert not found.isnan().any()
        assert slopes is None or found.tolist() == slopes


@pytest.mark.parametrize("text", [text for text, *_ in DERIVED])
def test_what_a_score_and_its_slope_share_is_named_once(text):
    tree = parse(text, SCOPE)
    both = tree, derivative(tree)
    names, short = shared(*both)
    given = dict(GIVEN)
    for name, part in names:
        given[name.name] = evaluate(part, given)
    for node, named in zip(both, short, strict=True):
        assert torch.equal(
            torch.as_tensor(evaluate(node, GIVEN)), torch.as_tensor(evaluate(named, given))
        )
    parts = [part.text for node in (*short, *(part for _, part in names)) for part in node.walk()]
    for function in ("tanh", "exp", "log", "sqrt"):
        own = [part for part in parts if part.startswith(function)]
        assert len(own) == len({*own})


def test_of_softcap_tanh_alone_is_shared():
    ((name, part),), (core, slope) = shared(
        *(tree := parse("tanh(score)", {}), derivative(tree)),
    )
    assert (part.text, core, slope.text) == ("tanh(score)", name, "-(_0*_0) + 1.0")


def test_scores_that_are_numbers_of_numbers_are_told_from_others():
    tame = "tanh(score)", "abs(score)*3", "where(k_idx < 3, score, 0.0)", "min(score, 2.0)"
    wild = "log(score)", "sqrt(score)", "1.0 / score", "exp(score)", "where(k_idx < 3, score, -inf)"
    assert [is_tame(parse(text, {})) for text in tame + wild] == [True] * 4 + [False] * 5


def test_what_has_steps_has_no_derivative():
    whole = Name(INT, "score", 0, 9)
    with pytest.raises(ExpressionError, match="has no derivative: it has steps"):
        derivative(parse("i // 2 + 0", {"i": whole}), SCORE)
