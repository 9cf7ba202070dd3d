"""Scores of kernels: what a product of a query and a key becomes before the mask and the softmax.

Of score' = outer · core(inner · s), with s scaled, the launcher works outer and inner out, as far
as a call's numbers say them: outer goes into the factor of the exponents, inner into that of s.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

from fagen.errors import ExpressionError
from fagen.expr import make, words
from fagen.expr.bounds import interval
from fagen.expr.cpp import HOST, KERNEL, Names, helpers, printed
from fagen.expr.derivatives import derivative, is_tame, shared
from fagen.expr.evaluate import evaluate
from fagen.expr.scores import ONE, ZERO, Folded, folded, replaced
from fagen.expr.tree import FLOAT, LANGUAGE, SCORE, Name, Node, Operation
from fagen.expr.words import Word

# Of the factor of exponents, which is above 0: with it, and log2 e, the number at which row maxima
# start still makes a finite one.
MOST_FACTOR = 1e8


@dataclass(frozen=True)
class Score:
    """What a scaled product becomes, in parts; what a call gives goes by its name in all of them.

    `parts` have no row and nothing added: what is no factor is the core's.
    """

    name: str
    text: str
    tree: Node
    parts: Folded
    parameters: tuple[Name, ...] = ()  # numbers that a call gives
    usual: Mapping[str, float] = field(default_factory=dict)  # where nobody says
    numbers: Mapping[str, Any] = field(default_factory=dict)  # what a call has given

    @classmethod
    def of(cls, word: Word) -> "Score":
        """Return the score that a named text is.  Raises ExpressionError for one with tables."""
        expression = word.expression
        if expression.tables:
            table = expression.tables[0].name
            raise ExpressionError(f"{word.name}: so far scores have no tables, like {table}")
        usual = word.usual(0, 0) or {p.name: _usual(p) for p in expression.parameters}
        parts = _workable(expression.tree, folded(expression))
        return cls(word.name, expression.text, expression.tree, parts, expression.parameters, usual)

    @property
    def given(self) -> tuple[str, ...]:
        """The names of what a call gives."""
        return tuple(one.name for one in self.parameters)

    def taken(self, call: dict[str, Any]) -> dict[str, Any]:
        """Take what is given out of the arguments of a call."""
        return {name: call.pop(name) for name in self.given}

    def bound(self, given: Mapping[str, Any]) -> "Score":
        """Return it with what a call gives."""
        return replace(self, numbers={**self.numbers, **given}) if self.given else self

    def of_sequence(self, number: int) -> "Score":
        """Return it for one of a call's sequences, which is computed by itself."""
        return replace(self, numbers={**self.numbers, "batch": number})

    @property
    def as_usual(self) -> "Score":
        """It with what it is given where nobody says."""
        return self.bound(self.usual)

    @property
    def is_plain(self) -> bool:
        """Whether it is the product as it is."""
        return self.tree == SCORE

    @property
    def acts(self) -> bool:
        """Whether each element becomes another number, and not only the factor of all."""
        return self.parts.core != SCORE

    @property
    def is_tanh(self) -> bool:
        """Whether each element becomes its tanh, but for factors."""
        return self.parts.core == make.tanh(SCORE)

    @property
    def cost(self) -> tuple[int, int]:
        """Instructions of an element beside those of a plain softmax: on the MUFU, and all."""
        return self.parts.cost

    @cached_property
    def reads(self) -> frozenset[str]:
        """The names of the language that the core depends on, but for the product."""
        names = self.parts.core.names
        reads = {name for name in names if name in LANGUAGE and name != SCORE.name}
        return frozenset(reads | {"q_idx", "len_q", "len_k"} if "q_pos" in reads else reads)

    @property
    def params(self) -> tuple[Name, ...]:
        """The numbers of a call that the core depends on."""
        return tuple(one for one in self.parameters if one.name in self.parts.core.names)

    # ---- as C++ ----------------------------------------------------------------------------------

    @property
    def factor(self) -> str:
        """What elements are multiplied by to be scores, as the launcher works it out."""
        if not self.acts:
            return self._host(make.multiply(_SCALE, self.parts.inner, self.parts.outer))
        return self._host(self.parts.outer)

    @property
    def inner(self) -> str:
        """What products are multiplied by before the core is worked out of them."""
        return self._host(make.multiply(_SCALE, self.parts.inner))

    @property
    def slope_factor(self) -> str:
        """What the core's slope is multiplied by to be a product's, as the launcher says it."""
        return self._host(make.multiply(_SCALE, self.parts.inner, self.parts.outer))

    def _host(self, node: Node) -> str:
        names = {name: f"a.{name}" for name in ("scale", *self.given)}
        text = printed(node, Names(names, functions=HOST))
        return text if re.fullmatch(r"[\w.]+", text) else f"({text})"

    def element(self, names: Mapping[str, str]) -> str:
        """Return the core of one element; names of the language go by `names`."""
        own = {one.name: f"params.{one.name}" for one in self.parameters}
        return printed(self.parts.core, Names({**names, **own}))

    def sloped(self, names: Mapping[str, str]) -> "Sloped":
        """Return the core of one element with its slope; names of the language go by `names`."""
        own = {one.name: f"params.{one.name}" for one in self.parameters}
        parts, both = shared(self.parts.core, self.slope)
        of_parts = {name.name: f"t{number}" for number, (name, _) in enumerate(parts)}
        printer = Names({**names, **own, **of_parts})
        texts = [printed(node, printer) for node in (*(part for _, part in parts), *both)]
        *shares, core, slope = texts
        return Sloped(tuple(shares), core, slope, is_tame(self.parts.core) and is_tame(self.slope))

    @property
    def on_host(self) -> str:
        """The whole score as C++ of a host, where `a` has what a call gives."""
        own = {one.name: f"a.{one.name}" for one in self.parameters}
        return printed(self.tree, Names({**KERNEL, **own}, functions=HOST))

    @property
    def helpers(self) -> str:
        """Functions that this C++ calls."""
        return helpers(self.parts.core, self.parts.inner, self.parts.outer)

    @cached_property
    def slope(self) -> Node:
        """The derivative of the core by what stands for the product in it.

        Raises ExpressionError where there is none.
        """
        return derivative(self.parts.core)

    @property
    def functions(self) -> frozenset[str]:
        """The operations of the core by name, of which kernels have some as functions."""
        nodes = self.parts.core.walk()
        return frozenset(node.op for node in nodes if isinstance(node, Operation))

    # ---- in numbers ------------------------------------------------------------------------------

    def before(self, scale: float) -> float:
        """Return what products are multiplied by before the core is worked out of them."""
        return float(scale * evaluate(self.parts.inner, self.numbers))

    def after(self, scale: float) -> float:
        """Return what elements are multiplied by to be scores."""
        outer = float(evaluate(self.parts.outer, self.numbers))
        return outer if self.acts else self.before(scale) * outer

    def core(self, score: Any, **names: Any) -> Any:
        """Return the core of numbers: tensors that spread to each other."""
        return evaluate(self.parts.core, {**names, **self.numbers, "score": score})

    def core_and_slope(self, score: Any, **names: Any) -> tuple[Any, Any]:
        """Return the core of numbers, and its slope."""
        given = {**names, **self.numbers, "score": score}
        return evaluate(self.parts.core, given), evaluate(self.slope, given)

    def whole(self, score: Any, **names: Any) -> Any:
        """Return what a scaled product becomes."""
        return evaluate(self.tree, {**names, **self.numbers, "score": score})


@dataclass(frozen=True)
class Sloped:
    """A core and its slope as C++: t0 … are `shares`, which both name.

    A `tame` one is a number wherever what it is made of is.
    """

    shares: tuple[str, ...]
    core: str
    slope: str
    tame: bool

    @property
    def times(self) -> str:
        """What a number that is multiplied by the slope has behind it."""
        return "" if self.slope == "1.0f" else f" * ({self.slope})"


_SCALE = Name(FLOAT, "scale", 0.0, MOST_FACTOR)


def _workable(tree: Node, parts: Folded) -> Folded:
    """Return a score in parts of which the host can work the factors out: outer is above 0."""
    if (parts.row, parts.added) != (ZERO, ZERO):
        parts = Folded(ONE, tree, ONE, ZERO, ZERO)
    outer, core, inner = parts.outer, parts.core, parts.inner
    least, most = interval(outer)
    if outer.names & LANGUAGE.keys() or not (least > 0 and most <= MOST_FACTOR):
        outer, core = ONE, make.multiply(outer, core)
    if inner.names & LANGUAGE.keys():
        core, inner = replaced(core, SCORE, make.multiply(inner, SCORE)), ONE
    return Folded(outer, core, inner, ZERO, ZERO)


def _usual(parameter: Name) -> float:
    """What a number of a text is taken to be."""
    number = min(max(parameter.least, 1), parameter.most)
    return float(number) if parameter.type == FLOAT else int(number)


SCORES: Mapping[str, Score] = {
    word.name: Score.of(word) for word in words.SCORES.values() if not word.expression.tables
}
NAMED = tuple(SCORES)  # no text of a call
WORDS = {name: name for name in SCORES}  # of slugs


def declare_score(word: Word) -> None:
    """Have SCORES know a score that a call says by its text.

    Raises ExpressionError for one that kernels do not have.
    """
    cast(dict[str, Score], SCORES).setdefault(word.name, Score.of(word))
    WORDS[word.name] = word.name
