"""What builds numbers: each checks types, folds constants and gives the one form of an expression.

Whole numbers become linear forms, and what commutes is sorted by text. Truths are logic.py's.
"""

import math
from collections.abc import Callable, Iterable
from functools import reduce

from fagen.errors import ExpressionError
from fagen.expr.tree import (
    BOOL,
    FLOAT,
    INT,
    MOST_INT,
    Constant,
    Lookup,
    Node,
    Number,
    Operation,
    Sum,
    Table,
)

MOST_POWER = 8
MOST_TERMS = 64
_MOST_FLOAT = 3.4028234663852886e38


def number(value: object) -> Constant:
    """Return a constant: a truth, a whole number below 2**31, or one of fp32's range."""
    if isinstance(value, bool):
        return Constant(BOOL, value)
    if not isinstance(value, int | float):
        raise ExpressionError(f"{type(value).__name__} is no number")
    _check_size(value)
    if isinstance(value, int):
        return Constant(INT, value)
    return Constant(FLOAT, value + 0.0)  # there is no -0.0


def _check_size(value: Number) -> None:
    """Refuse numbers that no constant is."""
    if isinstance(value, int):
        if abs(value) > MOST_INT:
            raise ExpressionError("whole numbers are below 2**31")
    elif math.isnan(value):
        raise ExpressionError("this has no value")
    elif _MOST_FLOAT < abs(value) < math.inf:
        raise ExpressionError(f"{value!r} is beyond what fp32 holds")


INF = math.inf
ZERO, ONE = number(0), number(1)
_FLOATS = {"tanh": math.tanh, "exp": math.exp, "log": math.log, "sqrt": math.sqrt}


def alike(what: str, *nodes: Node) -> list[Node]:
    """Return numbers of one type: whole ones become floats beside floats."""
    if any(node.type == BOOL for node in nodes):
        raise ExpressionError(f"{what} takes numbers, and {_truth(nodes)} is true or false")
    if all(node.type == INT for node in nodes):
        return list(nodes)
    return [as_float(node) for node in nodes]


def _truth(nodes: Iterable[Node]) -> str:
    return shortened(next(node for node in nodes if node.type == BOOL).text)


def shortened(text: str) -> str:
    """Return text for a message, cut where it is long."""
    return text if len(text) <= 60 else text[:57] + "…"


def check_truths(what: str, *nodes: Node) -> None:
    """Refuse numbers where truths belong."""
    for node in nodes:
        if node.type != BOOL:
            text = shortened(node.text)
            raise ExpressionError(f"{what} takes truths, and {text} is a number; compare it")


def as_float(node: Node) -> Node:
    """Return a number as a float."""
    if node.type == BOOL:
        raise ExpressionError(f"{shortened(node.text)} is true or false; write where(…, 1.0, 0.0)")
    if isinstance(node, Constant):
        return number(float(node.value))
    return node if node.type == FLOAT else Operation(FLOAT, "float", (node,))


def is_float_of_int(node: Node) -> bool:
    """Whether a float is a whole number."""
    return isinstance(node, Operation) and node.op == "float"


def whole_numbers(nodes: Iterable[Node]) -> list[Node] | None:
    """Return the whole numbers that floats are made of, None where one is of another kind."""
    listed = list(nodes)
    if not all(is_float_of_int(node) for node in listed):
        return None
    return [node.args[0] for node in listed]


# ---- sums and products ---------------------------------------------------------------------------


def _sum(type_: str, parts: Iterable[tuple[Number, Node]]) -> Node:
    """Return the sum of nodes of one type, each times a number."""
    terms: dict[str, tuple[Number, Node]] = {}
    zero: Number = 0 if type_ == INT else 0.0
    plus = zero

    def put(factor: Number, node: Node) -> None:
        nonlocal plus
        if isinstance(node, Constant):
            plus += factor * node.value
        elif isinstance(node, Sum) and (type_ == INT or abs(factor) == 1):
            plus += factor * node.plus
            for own, term in node.terms:
                put(factor * own, term)
        elif isinstance(node, Sum) and len(node.terms) == 1 and not node.plus:
            put(factor * node.terms[0][0], node.terms[0][1])
        else:
            if is_float_of_int(node) and _begins_with_minus(node.args[0]):
                factor, node = -factor, as_float(negate(node.args[0]))
            before = terms[node.text][0] if node.text in terms else zero
            terms[node.text] = before + factor, node

    for factor, node in parts:
        put(factor, node)
    kept = tuple(terms[text] for text in sorted(terms) if terms[text][0])
    for factor in (plus, *(factor for factor, _ in kept)):
        _check_size(factor)
    if not kept:
        return number(plus)
    (factor, only), *others = kept
    if not others and not plus:
        if factor == 1:
            return only
        if factor == -1 and is_float_of_int(only):
            return as_float(negate(only.args[0]))
    return Sum(type_, kept, plus + zero)


def _begins_with_minus(node: Node) -> bool:
    return isinstance(node, Sum) and node.terms[0][0] < 0


def linear(node: Node) -> tuple[list[tuple[int, Node]], int]:
    """Return a whole number as terms, each with its factor, and what is added to them."""
    if isinstance(node, Constant):
        return [], int(node.value)
    if isinstance(node, Sum):
        return [(int(factor), term) for factor, term in node.terms], int(node.plus)
    return [(1, node)], 0


def weighted(terms: Iterable[tuple[int, Node]], plus: int = 0) -> Node:
    """Return the sum of whole numbers, each times another, and one more."""
    return _sum(INT, [*terms, (1, number(plus))])


def add(*nodes: Node) -> Node:
    """Return the sum."""
    same = alike("+", *nodes)
    return _sum(same[0].type, [(1, node) for node in same])


def subtract(left: Node, right: Node) -> Node:
    """Return the difference."""
    left, right = alike("-", left, right)
    return _sum(left.type, [(1, left), (-1, right)])


def negate(node: Node) -> Node:
    """Return it with the other sign."""
    (node,) = alike("-", node)
    if is_float_of_int(node):
        return as_float(negate(node.args[0]))
    return _sum(node.type, [(-1, node)])


def multiply(*nodes: Node) -> Node:
    """Return the product: constants go before it."""
    same = alike("*", *nodes)
    if same[0].type == INT:
        return reduce(_multiplied_out, same)
    factor = 1.0
    factors: list[Node] = []
    for node in same:
        own, node = _factored(node)
        factor *= own
        if isinstance(node, Constant):
            factor *= node.value
        else:
            factors.append(node)
    return _sum(FLOAT, [(factor, _product(FLOAT, factors))]) if factors else number(factor)


def _product(type_: str, factors: Iterable[Node]) -> Node:
    flat: list[Node] = []
    for node in factors:
        flat += node.args if isinstance(node, Operation) and node.op == "*" else (node,)
    ordered = tuple(sorted(flat, key=lambda node: node.text))
    return ordered[0] if len(ordered) == 1 else Operation(type_, "*", ordered)


def _multiplied_out(left: Node, right: Node) -> Node:
    """Return the product of whole numbers, each term of one times each of the other."""
    (terms, plus), (others, more) = linear(left), linear(right)
    if len(terms) * len(others) > MOST_TERMS:
        raise ExpressionError(f"is more than {MOST_TERMS} products when multiplied out")
    crossed = [(a * b, _product(INT, (x, y))) for a, x in terms for b, y in others]
    ours = [(a * more, x) for a, x in terms]
    return weighted([*crossed, *ours, *((b * plus, y) for b, y in others)], plus * more)


def power(base: Node, exponent: Node) -> Node:
    """Return a power of a float, by a small whole number."""
    if base.type != FLOAT:
        text = shortened(base.text)
        raise ExpressionError(f"powers are of floats; write {text} * {text}")
    if exponent.type != INT or not isinstance(exponent, Constant):
        raise ExpressionError("an exponent is a whole number that is written out")
    if not 0 <= exponent.value <= MOST_POWER:
        raise ExpressionError(f"exponents go from 0 to {MOST_POWER}")
    return multiply(number(1.0), *[base] * int(exponent.value))


def _factored(node: Node) -> tuple[Number, Node]:
    """Return the number that a float begins with, and what it multiplies."""
    alone = isinstance(node, Sum) and len(node.terms) == 1 and not node.plus
    return node.terms[0] if isinstance(node, Sum) and alone else (1.0, node)


def divide(left: Node, right: Node) -> Node:
    """Return the quotient, a float; a constant divides by its reciprocal."""
    alike("/", left, right)
    left, right = as_float(left), as_float(right)
    if not isinstance(right, Constant):
        (factor, left), (divisor, right) = _factored(left), _factored(right)
        return _sum(FLOAT, [(factor / divisor, Operation(FLOAT, "/", (left, right)))])
    if not right.value:
        raise ExpressionError("this divides by 0")
    if abs(right.value) == math.inf:
        return multiply(left, number(0.0))
    return multiply(left, number(1 / right.value))


def _divisor(op: str, left: Node, right: Node) -> None:
    """Refuse what `//` and `%` do not take."""
    alike(op, left, right)
    if FLOAT in (left.type, right.type):
        of = "score's derivative would be nought or nowhere: "
        raise ExpressionError(f"{of}{op} takes whole numbers only")
    if isinstance(right, Constant) and right.value <= 0:
        raise ExpressionError(f"{op} takes a divisor above 0")


def floor_divide(left: Node, right: Node) -> Node:
    """Return the quotient rounded down, of whole numbers by one above 0."""
    _divisor("//", left, right)
    if right == ONE:
        return left
    if isinstance(left, Constant) and isinstance(right, Constant):
        return number(left.value // right.value)
    return ZERO if left == ZERO else Operation(INT, "//", (left, right))


def modulo(left: Node, right: Node) -> Node:
    """Return what rounding down leaves, from 0 up to the divisor."""
    _divisor("%", left, right)
    if right == ONE or left == ZERO:
        return ZERO
    if isinstance(left, Constant) and isinstance(right, Constant):
        return number(left.value % right.value)
    return Operation(INT, "%", (left, right))


# ---- functions -----------------------------------------------------------------------------------


def _extreme(op: str, pick: Callable[..., Number], nodes: tuple[Node, ...]) -> Node:
    """Return the least or the largest: flat, each once, with one constant at most."""
    same = alike(op, *nodes)
    if wholes := whole_numbers(same):
        return as_float(_extreme(op, pick, tuple(wholes)))
    flat: dict[str, Node] = {}
    constants: list[Number] = []
    for node in same:
        nested = isinstance(node, Operation) and node.op == op
        for part in node.args if nested else (node,):
            if isinstance(part, Constant):
                constants.append(part.value)
            else:
                flat[part.text] = part
    if constants:
        least = number(pick(constants))
        flat[least.text] = least
    ordered = tuple(flat[text] for text in sorted(flat))
    return ordered[0] if len(ordered) == 1 else Operation(same[0].type, op, ordered)


def minimum(*nodes: Node) -> Node:
    """Return the least of numbers."""
    return _extreme("min", min, nodes)


def maximum(*nodes: Node) -> Node:
    """Return the largest of numbers."""
    return _extreme("max", max, nodes)


def clamp(node: Node, least: Node, most: Node) -> Node:
    """Return what of two ends and a number lies in between."""
    return minimum(maximum(node, least), most)


def absolute(node: Node) -> Node:
    """Return a number without its sign."""
    (node,) = alike("abs", node)
    if isinstance(node, Constant):
        return number(abs(node.value))
    if isinstance(node, Operation) and node.op == "abs":
        return node
    if wholes := whole_numbers([node]):
        return as_float(absolute(wholes[0]))
    if _begins_with_minus(node):  # of ±x the other
        node = negate(node)
    return Operation(node.type, "abs", (node,))


def _of_float(name: str) -> Callable[[Node], Node]:
    def function(node: Node) -> Node:
        (node,) = alike(name, node)
        node = as_float(node)
        if not isinstance(node, Constant):
            return Operation(FLOAT, name, (node,))
        try:
            return number(_FLOATS[name](node.value))
        except (ValueError, OverflowError):
            raise ExpressionError(f"{name}({node.text}) has no value") from None

    function.__name__ = name
    function.__doc__ = f"Return {name} of a number."
    return function


tanh, exp, log, sqrt = map(_of_float, _FLOATS)


def sigmoid(node: Node) -> Node:
    """Return the logistic function, by tanh."""
    half = number(0.5)
    return add(multiply(half, tanh(multiply(half, node))), half)


# ---- tables --------------------------------------------------------------------------------------


def look_up(table: Table, *at: Node) -> Node:
    """Return a number of a table, by as many whole numbers as it has dimensions."""
    if len(at) != len(table.over):
        many = f"{len(table.over)} dimension{'s' * (len(table.over) > 1)}"
        raise ExpressionError(f"{table.name} has {many}: {table.extents}")
    for index in at:
        if index.type != INT:
            text = shortened(index.text)
            raise ExpressionError(f"{table.name} is read at whole numbers, and {text} is none")
    return Lookup(table.type, table, at)
