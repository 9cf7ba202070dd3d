"""What a call says of its scores, in; a score's name and what its kernel is given, out.

Values have no say in which kernel that is: one of caps serves all of them. Needs no torch, for
`pick` asks too; torch.compile traces it.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fagen.errors import ExpressionError
from fagen.expr import words
from fagen.expr.canonical import Expression
from fagen.expr.parse import parse
from fagen.expr.tree import FLOAT, Name
from fagen.expr.words import PLAIN, Word
from fagen.given import (
    Argument,
    Types,
    arguments,
    declared,
    outcome,
    read_text,
    refuse_other_types,
    refused,
    types_of,
    value,
)
from fagen.scores import SCORES
from fagen.toml_lines import near_word, shown
from fagen.vocab import declare

CAP = "softcap"  # a word, and the argument of calls that says it
# words of `score`, but for those whose tables no kernel is given
CALLED = tuple(word for word in words.SCORES if word in SCORES)


class Scored(NamedTuple):
    """A score by its name, as problems and schedules have it, and what it is given.

    `order` names what its kernel is given, in the order of an op, of what `own` says more.
    """

    name: str
    own: tuple[Argument, ...]
    order: tuple[str, ...]


_PLAIN = Scored(PLAIN, (), ())


def scored(
    function: Callable[..., Any], softcap: Any, score: Any, given: Mapping[str, Any]
) -> Scored:
    """Return the score of a call; no softcap is None or 0.

    Raises ValueError for what says no score, or one that no kernel computes.
    """
    if score is None:
        if softcap is None or (softcap == 0 and not isinstance(softcap, bool)):
            return _PLAIN
        score = CAP
    refuse_other_types(function, "score", score)
    types: Types = ()
    if given and isinstance(score, str) and score not in words.SCORES:
        types = types_of(function, "score", score, given)
    refusal, *found = _known(score, types)
    if refusal:
        raise refused(function, refusal)
    said = Scored(*found)
    if said.name != CAP and softcap is not None and softcap != 0:
        raise refused(
            function,
            "softcap and score are given; write the cap into the score's text: cap * tanh(… / cap)",
        )
    return said


def values_of(
    function: Callable[..., Any], said: Scored, softcap: Any, given: Mapping[str, Any]
) -> list[Any]:
    """Return what a kernel of a score is given, in the order of an op."""
    more = given if said.name != CAP or softcap is None else {**given, CAP: softcap}
    values = {argument[0]: value(function, "score", argument, more) for argument in said.own}
    return [values[name] for name in said.order]


def _known(score: str | Expression, types: Types) -> tuple[Any, ...]:
    """What is worked out once of a score, whatever its values, or a refusal before all else.

    The others are as Scored has them. `types` are of a text's arguments.
    """
    key = score, types
    found = _found.get(key)
    if found is None:
        found = _found[key] = outcome(
            "score", lambda: _described(_read(score, types)), ("", (), ())
        )
    return found


_found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
# torch.compile calls it as it is, and keeps what it returns
_known._dynamo_marked_constant = True  # type: ignore[attr-defined]


def named(score: Expression) -> str:
    """Return what schedules call a score, which is known from then on.

    Raises ExpressionError for one that no kernel computes.
    """
    return str(_described(score)[0])


def _described(score: Expression) -> tuple[Any, ...]:
    for word in (words.SCORES[name] for name in CALLED):
        if (same := _by_names_of(word, score)) is not None:
            return word.name, same, tuple(argument[0] for argument in same)
    own = arguments(score)
    name = f"score{score.key}"
    if score.tables:
        raise ExpressionError(f"{score.tables[0].name} is a table; so far scores read none")
    word, order = declared(score, name, (), lambda called, *lengths: _usual(score, called))
    declare(word)
    return name, own, order


def _by_names_of(word: Word, score: Expression) -> tuple[Argument, ...] | None:
    """What a score is given that says what a word says, where its one number may have any name."""
    if score.key == word.expression.key:
        return arguments(score)
    if not len(score.parameters) == len(score.given) == len(word.given) == 1:
        return None
    (own,), (of_word,) = score.parameters, word.expression.parameters
    if own.type != of_word.type or parse(score.text, {own.name: of_word}) != word.expression.tree:
        return None
    return ((own.name, *arguments(word.expression)[0][1:]),)


def _usual(score: Expression, called: Mapping[str, str]) -> dict[str, Any]:
    """What a score is taken to be given, where nobody says."""
    ends = {x.name: min(max(x.least, 1), x.most) for x in score.given if isinstance(x, Name)}
    return {called[name]: number for name, number in ends.items()}


def _read(score: str | Expression, types: Types) -> Expression:
    """What `score` itself says.  Raises ExpressionError, or ValueError in words."""
    if isinstance(score, Expression):
        if score.kind != "score":
            raise ValueError(f"score is the mask {score.text}; @fagen.score makes scores")
        return score
    if score in CALLED:
        return words.SCORES[score].expression
    if score in words.SCORES:
        table = words.SCORES[score].expression.tables[0].name
        raise ValueError(f'score is "{score}", whose {table} are a table; so far scores read none')
    if re.fullmatch(r"\w*", score):
        near = near_word(score, CALLED)
        mean = f"; did you mean {near}?" if near else ""
        raise ValueError(
            f"score is {shown(score)}; it must be one of {', '.join(CALLED)}, a text of score, or "
            f"what @fagen.score makes of a function{mean}"
        )
    # a number may be written without its point
    floats = tuple([(name, FLOAT) for name, _ in types])
    try:
        return read_text("score", score, floats)
    except ExpressionError:
        if floats == types:
            raise
        return read_text("score", score, types)
