"""What builds truths: comparisons, what joins them, and a choice by one.

Whole numbers compare as `a <= b` or `a == b`, with as little as possible on either side; `not`
stands at floats alone, and what commutes is sorted by text.
"""

from collections.abc import Callable
from itertools import combinations
from math import gcd

from fagen.expr import make
from fagen.expr.make import add, linear, number, subtract, weighted
from fagen.expr.tree import BOOL, FLOAT, INT, Constant, Node, Operation

TRUE, FALSE = number(True), number(False)


def at_most(left: Node, right: Node) -> Node:
    """Return whether left <= right."""
    left, right = make.alike("<=", left, right)
    if left.type == FLOAT:
        return _compared("<=", left, right)
    terms, plus = linear(subtract(left, right))
    if not terms:
        return number(plus <= 0)
    divisor = gcd(*(factor for factor, _ in terms))
    return _sides("<=", terms, divisor, -plus // divisor)


def _sides(op: str, terms: list[tuple[int, Node]], divisor: int, most: int) -> Node:
    """Return how a sum compares with a number: what is added left, what is taken right."""
    over = [(factor // divisor, term) for factor, term in terms if factor > 0]
    under = [(-factor // divisor, term) for factor, term in terms if factor < 0]
    sides = (weighted(over), weighted(under, most)) if over else (number(-most), weighted(under))
    return Operation(BOOL, op, sides)


def _compared(op: str, left: Node, right: Node) -> Node:
    """Return a comparison of floats, with both sides as they are."""
    if (wholes := make.whole_numbers([left, right])) and len(wholes) == 2:
        return at_most(wholes[0] if op == "<=" else add(wholes[0], make.ONE), wholes[1])
    if isinstance(left, Constant) and isinstance(right, Constant):
        return number(left.value <= right.value if op == "<=" else left.value < right.value)
    return Operation(BOOL, op, (left, right))


def below(left: Node, right: Node) -> Node:
    """Return whether left < right."""
    left, right = make.alike("<", left, right)
    if left.type == FLOAT:
        return _compared("<", left, right)
    return at_most(add(left, make.ONE), right)


def equal(left: Node, right: Node) -> Node:
    """Return whether two numbers are the same."""
    left, right = make.alike("==", left, right)
    if left.type == FLOAT:
        return both(at_most(left, right), at_most(right, left))
    terms, plus = linear(subtract(left, right))
    if not terms:
        return number(plus == 0)
    divisor = gcd(*(factor for factor, _ in terms))
    if plus % divisor:
        return FALSE
    if terms[0][0] < 0:  # of two ways to write it the one that begins with the first by text
        divisor = -divisor
    terms = [(factor // divisor, term) for factor, term in terms]
    return _sides("==", terms, 1, -plus // divisor)


def unequal(left: Node, right: Node) -> Node:
    """Return whether two numbers differ."""
    return negated(equal(left, right))


def negated(node: Node) -> Node:
    """Return whether it is false: `not` goes inward as far as whole numbers are compared."""
    make.check_truths("not", node)
    if isinstance(node, Constant):
        return number(not node.value)
    assert isinstance(node, Operation)
    if node.op in ("and", "or"):
        other = both if node.op == "or" else either
        return other(*map(negated, node.operands))
    if node.op == "not":
        return node.operands[0]
    left, right = node.operands
    if node.op == "==":
        return either(below(left, right), below(right, left))
    if left.type == INT:
        return below(right, left)
    return Operation(BOOL, "not", (node,))  # of a NaN too


def _joined(op: str, neutral: Constant, nodes: tuple[Node, ...]) -> Node:
    make.check_truths(op, *nodes)
    flat: dict[str, Node] = {}
    for node in nodes:
        nested = isinstance(node, Operation) and node.op == op
        for part in node.args if nested else (node,):
            if isinstance(part, Constant):
                if part != neutral:
                    return part
            else:
                flat[part.text] = part
    ordered = tuple(flat[text] for text in sorted(flat))
    if len(ordered) <= 1:
        return ordered[0] if ordered else neutral
    return Operation(BOOL, op, ordered)


def both(*nodes: Node) -> Node:
    """Return whether all are true; a <= b and b <= a are one."""
    joined = _joined("and", TRUE, nodes)
    if not isinstance(joined, Operation) or joined.op != "and":
        return joined
    for one, other in combinations(joined.operands, 2):
        if _are_mirrored(one, other):
            rest = (node for node in joined.operands if node not in (one, other))
            return both(equal(*one.args), *rest)
    return joined


def _are_mirrored(one: Node, other: Node) -> bool:
    """Whether two comparisons of whole numbers are a <= b and b <= a."""
    for node in (one, other):
        if not (isinstance(node, Operation) and node.op == "<=" and node.args[0].type == INT):
            return False
    return add(*one.args[:1], *other.args[:1]) == add(*one.args[1:], *other.args[1:])


def either(*nodes: Node) -> Node:
    """Return whether any is true."""
    return _joined("or", FALSE, nodes)


def where(condition: Node, yes: Node, no: Node) -> Node:
    """Return one of two, numbers or truths, by a condition."""
    make.check_truths("where's condition", condition)
    if BOOL in (yes.type, no.type):
        make.check_truths("where of a truth", yes, no)
        return either(both(condition, yes), both(negated(condition), no))
    yes, no = make.alike("where", yes, no)
    if isinstance(condition, Constant):
        return yes if condition.value else no
    if yes == no:
        return yes
    if (wholes := make.whole_numbers([yes, no])) and len(wholes) == 2:
        return make.as_float(where(condition, *wholes))
    opposite = negated(condition)
    if _order(opposite) < _order(condition):
        condition, yes, no = opposite, no, yes
    return Operation(yes.type, "where", (condition, yes, no))


def _order(condition: Node) -> tuple[bool, bool, str]:
    """Return what says which of a condition and its opposite is written: the plainer."""
    assert isinstance(condition, Operation)
    numbers_first = isinstance(condition.operands[0], Constant)
    return condition.op in ("or", "not"), numbers_first, condition.text


# by name: how many arguments, and what builds it
FUNCTIONS: dict[str, tuple[int, Callable[..., Node]]] = {
    "tanh": (1, make.tanh),
    "exp": (1, make.exp),
    "log": (1, make.log),
    "sqrt": (1, make.sqrt),
    "sigmoid": (1, make.sigmoid),
    "abs": (1, make.absolute),
    "min": (2, make.minimum),  # or more
    "max": (2, make.maximum),
    "clamp": (3, make.clamp),
    "where": (3, where),
}
