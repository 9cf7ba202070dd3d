"""What values a node can have, how it changes from row to row, and which of two is the larger.

Rules over the structure, as nobody runs anything: what they say holds, what holds they may not say.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import lru_cache, reduce
from itertools import product as combinations

from fagen.errors import ExpressionError
from fagen.expr import make
from fagen.expr.tree import (
    BOOL,
    INT,
    MOST_GIVEN,
    Constant,
    Lookup,
    Name,
    Node,
    Number,
    Operation,
    Sum,
)

Interval = tuple[Number, Number]
MOST_KEPT = 1 << 13  # answers
MOST_LOOKS = 32  # at cases, before two numbers count as of no order
EVERY: Interval = (-math.inf, math.inf)


class Change(Enum):
    """How a number changes from a row to the next: where it rises it may also stay."""

    CONSTANT = "constant"
    RISES = "rises"
    FALLS = "falls"
    BY_ROW = "by row"

    def mirrored(self) -> "Change":
        """Return how the number with the other sign changes."""
        return _MIRRORED.get(self, self)

    def __and__(self, other: "Change") -> "Change":
        """Return how what grows with two numbers changes."""
        if Change.CONSTANT in (self, other):
            return other if self is Change.CONSTANT else self
        return self if self is other else Change.BY_ROW


_MIRRORED = {Change.RISES: Change.FALLS, Change.FALLS: Change.RISES}


# ---- values --------------------------------------------------------------------------------------


@lru_cache(MOST_KEPT)
def interval(node: Node) -> Interval:
    """Return two numbers between which a node's value lies, both included."""
    if isinstance(node, Constant):
        return node.value, node.value
    if isinstance(node, Name):
        return node.least, node.most
    if isinstance(node, Lookup):
        return (-MOST_GIVEN, MOST_GIVEN) if node.type == INT else EVERY
    if isinstance(node, Sum):
        ends = [_scaled(factor, interval(term)) for factor, term in node.terms]
        return _ordered([sum(e[0] for e in ends) + node.plus, sum(e[1] for e in ends) + node.plus])
    assert isinstance(node, Operation)
    if node.type == BOOL:
        return 0, 1
    return _RULES[node.op](*(interval(arg) for arg in node.args if arg.type != BOOL), node=node)


def _ordered(ends: Iterable[Number]) -> Interval:
    """Return the least and the largest; anything where one is no number."""
    listed = list(ends)
    return EVERY if any(end != end for end in listed) else (min(listed), max(listed))


def _scaled(factor: Number, ends: Interval) -> Interval:
    return _ordered(0 if not end or not factor else factor * end for end in ends)


def _product(*factors: Interval, node: Node) -> Interval:
    """Even powers are not negative; b·(x // b) is x rounded down."""
    if (rounded := _quotient_times_divisor(1, node)) is not None:
        dividend, divisor, _ = rounded
        return interval(dividend)[0] - max(0, interval(divisor)[1] - 1), interval(dividend)[1]
    counts: dict[str, tuple[int, Interval]] = {}
    for factor, ends in zip(node.args, factors, strict=True):
        counts[factor.text] = counts.get(factor.text, (0, ends))[0] + 1, ends
    powers = []
    for count, (least, most) in counts.values():
        ends = _ordered(_to(end, count) for end in (least, most))
        powers.append((0, ends[1]) if count % 2 == 0 and least < 0 < most else ends)
    return reduce(
        lambda a, b: _ordered(0 if not x or not y else x * y for x, y in combinations(a, b)), powers
    )


def _to(base: Number, exponent: int) -> Number:
    try:
        return base**exponent
    except OverflowError:
        return math.inf if base > 0 or exponent % 2 == 0 else -math.inf


def _quotient(left: Interval, right: Interval, node: Node) -> Interval:
    if right[0] <= 0 <= right[1]:
        return EVERY
    return _ordered(x / y for x, y in combinations(left, right))


def _floor(left: Interval, right: Interval, node: Node) -> Interval:
    if right[0] <= 0:
        return min(left[0], 0), max(left[1], 0)  # divisors below 1 are refused
    return _ordered(int(x) // int(y) for x, y in combinations(left, right))


def _remainder(left: Interval, right: Interval, node: Node) -> Interval:
    if left[0] >= 0 and left[1] < right[0]:
        return left
    return 0, max(0, min(left[1], right[1] - 1) if left[0] >= 0 else right[1] - 1)


def _where(yes: Interval, no: Interval, node: Node) -> Interval:
    return min(yes[0], no[0]), max(yes[1], no[1])


def _absolute(of: Interval, node: Node) -> Interval:
    least, most = of
    return (0 if least <= 0 <= most else min(abs(least), abs(most))), max(abs(least), abs(most))


def _rising(function: Callable[[Number], float], least: float) -> Callable[..., Interval]:
    """Return the rule of a function that rises, and has no values below `least` of its argument."""

    def at(end: Number) -> float:
        try:
            return -math.inf if end <= least == 0 and function is math.log else function(end)
        except OverflowError:
            return math.inf

    return lambda of, node: (at(max(of[0], least)), at(max(of[1], least)))


_RULES: Mapping[str, Callable[..., Interval]] = {
    "*": _product,
    "/": _quotient,
    "//": _floor,
    "%": _remainder,
    "min": lambda *of, node: (min(a for a, _ in of), min(b for _, b in of)),
    "max": lambda *of, node: (max(a for a, _ in of), max(b for _, b in of)),
    "abs": _absolute,
    "where": _where,
    "float": lambda of, node: (float(of[0]), float(of[1])),
    "tanh": _rising(math.tanh, -math.inf),
    "exp": _rising(math.exp, -math.inf),
    "log": _rising(math.log, 0),
    "sqrt": _rising(math.sqrt, 0),
}


# ---- from row to row -----------------------------------------------------------------------------


@lru_cache(MOST_KEPT)
def change(node: Node) -> Change:
    """Return how a node changes with q_idx, all else but q_pos being as it is."""
    if isinstance(node, Name):
        return Change.RISES if node.name in ("q_idx", "q_pos") else Change.CONSTANT
    changes = [change(arg) for arg in node.args]
    if all(own is Change.CONSTANT for own in changes):
        return Change.CONSTANT
    if isinstance(node, Sum):
        signed = zip(node.terms, changes, strict=True)
        return _all(own if factor > 0 else own.mirrored() for (factor, _), own in signed)
    if isinstance(node, Lookup):
        still = all(own is Change.CONSTANT for own in changes[:-1])
        return changes[-1] if node.table.rising and still else Change.BY_ROW
    assert isinstance(node, Operation)
    if node.op in ("min", "max", "float", "tanh", "exp", "log", "sqrt"):
        return _all(changes)
    if node.op == "where" and changes[0] is Change.CONSTANT:
        return _all(changes[1:])
    if node.op in ("//", "/", "%") and changes[1] is Change.CONSTANT:
        return _of_quotient(node, changes[0])
    if node.op == "abs":
        return _by_sign(node.args[0], changes[0])
    return _of_product(node.args, changes) if node.op == "*" else Change.BY_ROW


def _all(changes: Iterable[Change]) -> Change:
    return reduce(Change.__and__, changes)


def _by_sign(of: Node, own: Change) -> Change:
    """Return how a number changes that is multiplied by one of this sign."""
    least, most = interval(of)
    return own if least >= 0 else own.mirrored() if most <= 0 else Change.BY_ROW


def _of_quotient(node: Operation, own: Change) -> Change:
    left, right = node.args
    if node.op == "%":
        (least, most), (divisor, _) = interval(left), interval(right)
        return own if least >= 0 and most < divisor else Change.BY_ROW
    return own if node.op == "//" else _by_sign(right, own)


def _of_product(factors: tuple[Node, ...], changes: list[Change]) -> Change:
    """One factor changes, times others of one sign; or several do alike, none below 0."""
    moving = [place for place, own in enumerate(changes) if own is not Change.CONSTANT]
    if len(moving) > 1:
        positive = all(interval(factor)[0] >= 0 for factor in factors)
        return _all(changes[place] for place in moving) if positive else Change.BY_ROW
    own = changes[moving[0]]
    for place, factor in enumerate(factors):
        if place != moving[0]:
            own = _by_sign(factor, own)
    return own


@lru_cache(MOST_KEPT)
def steady(node: Node) -> bool:
    """Whether a node rises by 1 at most from a row to the next, or stays, as far as one sees."""
    if change(node) is Change.CONSTANT or isinstance(node, Name):
        return True
    if isinstance(node, Sum):
        moving = [(f, term) for f, term in node.terms if change(term) is not Change.CONSTANT]
        return len(moving) == 1 and moving[0][0] == 1 and steady(moving[0][1])
    if isinstance(node, Operation) and node.op in ("min", "max"):
        return all(map(steady, node.args))
    if isinstance(node, Operation) and node.op == "where":
        return change(node.args[0]) is Change.CONSTANT and all(map(steady, node.args[1:]))
    return False


# ---- which is larger -----------------------------------------------------------------------------


@lru_cache(MOST_KEPT)
def never_above(left: Node, right: Node) -> bool:
    """Whether left <= right for whatever is given, as far as these rules see."""
    try:
        return left == right or _not_negative(make.subtract(right, left), [MOST_LOOKS])
    except ExpressionError:  # numbers beyond what a node holds
        return False


def _not_negative(difference: Node, looks: list[int]) -> bool:
    """Whether a number is 0 at least: of one of several, all may be it, or one bounds it."""
    if interval(_at_least(difference))[0] >= 0:
        return True
    for factor, term in make.linear(difference)[0]:
        if isinstance(term, Operation) and term.op in ("min", "max", "where"):
            rest = make.subtract(difference, make.weighted([(factor, term)]))
            picked = term.operands[1:] if term.op == "where" else term.operands
            looks[0] -= len(picked)
            if looks[0] < 0:
                return False
            cases = (make.add(rest, make.weighted([(factor, one)])) for one in picked)
            every = term.op == "where" or (term.op == "min") == (factor > 0)
            return (all if every else any)(_not_negative(case, looks) for case in cases)
    return False


def _at_least(difference: Node) -> Node:
    """Return what a difference does not fall below: b·(x // b) is from x - b + 1 to x.

    And x % b up to b - 1, len_k - q_pos from 1 on.
    """
    for factor, term in make.linear(difference)[0]:
        quotient = _quotient_times_divisor(factor, term)
        if quotient is not None:
            dividend, divisor, times = quotient
            least = make.add(make.subtract(dividend, divisor), make.ONE) if times > 0 else dividend
            without = make.subtract(difference, make.weighted([(factor, term)]))
            return _at_least(make.add(without, make.weighted([(times, least)])))
    terms, plus = make.linear(difference)
    factors = {term.text: factor for factor, term in terms}
    ahead = min(factors.get("len_k", 0), -factors.get("q_pos", 0))
    if ahead > 0:  # len_k - q_pos = len_q - q_idx
        kept = {"len_k": factors["len_k"] - ahead, "q_pos": factors["q_pos"] + ahead}
        own = [(kept.get(term.text, factor), term) for factor, term in terms]
        return make.weighted([pair for pair in own if pair[0]], plus + ahead)
    for factor, term in terms:
        if isinstance(term, Operation) and term.op == "%" and factor < 0:
            most = make.subtract(term.operands[1], make.ONE)
            rest = make.subtract(difference, make.weighted([(factor, term)]))
            return _at_least(make.add(rest, make.weighted([(factor, most)])))
    return difference


def _quotient_times_divisor(factor: int, term: Node) -> tuple[Node, Node, int] | None:
    """Return x, b and n where a term is n·b·(x // b), None for any other."""
    if not isinstance(term, Operation):
        return None
    if term.op == "//":
        dividend, divisor = term.operands
        if isinstance(divisor, Constant) and factor % divisor.value == 0:
            return dividend, divisor, factor // int(divisor.value)
    if term.op == "*" and len(term.operands) == 2:
        for own, other in (term.operands, term.operands[::-1]):
            if isinstance(own, Operation) and own.op == "//" and own.operands[1] == other:
                return own.operands[0], other, factor
    return None
