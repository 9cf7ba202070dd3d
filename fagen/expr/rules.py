"""What a mask or a score may be: refusals that no single node can know of."""

import math

from fagen.errors import ExpressionError
from fagen.expr import make
from fagen.expr.bounds import interval, never_above
from fagen.expr.canonical import Expression
from fagen.expr.declare import Scope
from fagen.expr.tree import (
    BOOL,
    FLOAT,
    INT,
    LANGUAGE,
    MOST_INT,
    MOST_LENGTH,
    Q_POS,
    Constant,
    Lookup,
    Name,
    Node,
    Number,
    Operation,
    Sum,
)

MOST_PARTS = 200  # of a text, and of a tree
MOST_NESTED = 40
LEAST_SCORE = -1e29  # where row maxima begin is below

# what counts along a dimension of a table, and is never outside
_COUNTS = {
    "batch": "batch",
    "head": "head",
    "kv_head": "kv_head",
    "len_q": "q_idx",
    "len_k": "k_idx",
}


def checked(kind: str, tree: Node, scope: Scope | None = None, called: str = "") -> Expression:
    """Return a mask or a score of a tree that may be one.  Raises ExpressionError for others."""
    check_size(tree)
    if kind == "score":
        if tree.type == BOOL:
            raise ExpressionError("a score is a number; write where(…, score, -inf)")
        tree = make.as_float(tree)
    else:
        _check_mask(tree)
    check_numbers(tree)
    expression = Expression(tree, called)
    used = set(expression.arguments) | tree.names
    for name, given in (scope or {}).items():
        if name not in used and not isinstance(given, Constant):
            raise ExpressionError(f"{name} is declared, and nothing uses it")
    return expression


def check_numbers(tree: Node) -> None:
    """Refuse what may overflow, divide by 0, or lie outside of a table."""
    for node in tree.walk():
        _check_int(node)
        _check_divisor(node)
        if isinstance(node, Lookup):
            for dim, index in zip(node.table.over, node.at, strict=True):
                _check_inside(node, dim, index)
        for value in _floats(node):
            if -math.inf < value < LEAST_SCORE:
                raise ExpressionError(f"{value!r} would be a score like any other; write -inf")


def _floats(node: Node) -> tuple[Number, ...]:
    if isinstance(node, Sum):
        return (node.plus,)
    return (node.value,) if isinstance(node, Constant) else ()


def check_size(tree: Node) -> None:
    """Refuse trees beyond what a user may give."""
    if tree.size > 2 * MOST_PARTS or tree.depth > MOST_NESTED:
        raise ExpressionError(f"is too large: more than {MOST_PARTS} parts, or nested deeper")


def _check_mask(tree: Node) -> None:
    if "score" in tree.names:
        put = "put where(…, score, -inf) into attention.score"
        raise ExpressionError(f"a mask cannot depend on score: {put}")
    floats = [node for node in tree.walk() if node.type == FLOAT]
    if floats:  # of which most are whole numbers beside one
        odd = next((node for node in floats if not make.is_float_of_int(node)), floats[0])
        text = make.shortened(odd.text)
        raise ExpressionError(f"a mask counts in whole numbers: {text} is a float{_halved(odd)}")
    if tree.type != BOOL:
        raise ExpressionError(f"a mask is true or false: compare {make.shortened(tree.text)}")


def _halved(node: Node) -> str:
    """Return what to write instead of a fraction of an index."""
    if isinstance(node, Sum) and len(node.terms) == 1 and not node.plus:
        (factor, term), *_ = node.terms
        parts = round(1 / factor) if abs(factor) > 1 / MOST_LENGTH else 0
        if parts > 0 and 1 / parts == factor and term.args and term.args[0].type == INT:
            return f"; write {make.floor_divide(term.args[0], make.number(parts)).text}"
    return ""


def _check_int(node: Node) -> None:
    """Refuse whole numbers that may not fit, their parts in any order included."""
    if node.type != INT:
        return
    least, most = interval(node)
    if isinstance(node, Sum):
        ends = [_ends(factor, _partly(term)) for factor, term in node.terms]
        least = sum(min(0, end[0]) for end in ends) + min(0, node.plus)
        most = sum(max(0, end[1]) for end in ends) + max(0, node.plus)
    if least < -MOST_INT or most > MOST_INT:
        raise ExpressionError(f"{make.shortened(node.text)} may pass 2**31{_unbounded(node)}")


def _partly(term: Node) -> tuple[Number, Number]:
    """Return between which numbers a term lies while it is added up: q_pos is three."""
    return (-MOST_LENGTH, 2 * MOST_LENGTH) if term == Q_POS else interval(term)


def _ends(factor: Number, of: tuple[Number, Number]) -> tuple[Number, Number]:
    least, most = sorted((factor * of[0], factor * of[1]))
    return least, most


def _unbounded(node: Node) -> str:
    """Return which declarations could say more."""
    names = [n.name for n in node.walk() if isinstance(n, Name) and n.name not in LANGUAGE]
    return f": declare min and max of {', '.join(dict.fromkeys(names))}" if names else ""


def _check_divisor(node: Node) -> None:
    if isinstance(node, Operation) and node.op in ("//", "%"):
        divisor = node.operands[1]
        if interval(divisor)[0] < 1:
            text = make.shortened(divisor.text)
            raise ExpressionError(f"{node.op} takes a divisor above 0, and {text} may be less")


def _check_inside(node: Lookup, dim: str | int | Name, index: Node) -> None:
    """Refuse an index that may be outside of a table."""
    if isinstance(dim, str):
        if isinstance(index, Name) and index.name == _COUNTS[dim]:
            return
        extent: Node = LANGUAGE.get(dim) or make.number(1)
    else:
        extent = dim if isinstance(dim, Name) else make.number(dim)
    if never_above(make.ZERO, index) and never_above(index, make.subtract(extent, make.ONE)):
        return
    columns = f"{dim} columns" if not isinstance(dim, str) else f"as many columns as {dim} says"
    text = make.shortened(index.text)
    raise ExpressionError(f"{node.table.name} has {columns}; {text} may be outside: clamp it")
