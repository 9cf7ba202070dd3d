"""Derivatives of scores by what they are made of, rule by rule, and what they share with them.

What is chosen by a condition is differentiated branch by branch and chosen again by the same: a
branch that is not taken never shows, whatever its derivative is. Where branches meet, the slope is
that of the one which is taken there.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import reduce

from fagen.errors import ExpressionError
from fagen.expr import logic, make
from fagen.expr.scores import ONE, ZERO, rebuilt
from fagen.expr.tree import BOOL, FLOAT, SCORE, Constant, Name, Node, Operation, Sum

HALF = make.number(0.5)


def derivative(node: Node, of: Name = SCORE) -> Node:
    """Return the derivative of a float by a number that it names.

    Raises ExpressionError for what has none.
    """
    if of.name not in node.names:
        return ZERO
    if node == of:
        return ONE
    if node.type != FLOAT:
        raise ExpressionError(f"{make.shortened(node.text)} has no derivative: it has steps")
    if isinstance(node, Sum):
        return make.add(
            ZERO, *(_times(make.number(f), derivative(term, of)) for f, term in node.terms)
        )
    rule = _RULES.get(node.op) if isinstance(node, Operation) else None
    if rule is None:
        raise ExpressionError(f"{make.shortened(node.text)} has no derivative by {of.name}")
    slopes = [ZERO if arg.type == BOOL else derivative(arg, of) for arg in node.args]
    return rule(node, *node.args, *slopes)


def _times(*nodes: Node) -> Node:
    """Return the product, nothing of which is left where a factor is 0."""
    return ZERO if ZERO in nodes else make.multiply(ONE, *nodes)


def _product(node: Node, *both: Node) -> Node:
    factors, slopes = both[: len(both) // 2], both[len(both) // 2 :]
    terms = (
        _times(*factors[:place], slope, *factors[place + 1 :]) for place, slope in enumerate(slopes)
    )
    return make.add(ZERO, *terms)


def _quotient(node: Node, left: Node, right: Node, own: Node, below: Node) -> Node:
    rest = make.subtract(own, _times(node, below))
    return ZERO if rest == ZERO else make.divide(rest, right)


def _tanh(node: Node, arg: Node, slope: Node) -> Node:
    return _times(make.subtract(ONE, make.multiply(node, node)), slope)


def _log(node: Node, arg: Node, slope: Node) -> Node:
    return ZERO if slope == ZERO else make.divide(slope, arg)


def _sqrt(node: Node, arg: Node, slope: Node) -> Node:
    return ZERO if slope == ZERO else make.divide(_times(HALF, slope), node)


def _abs(node: Node, arg: Node, slope: Node) -> Node:
    return logic.where(logic.below(arg, ZERO), make.negate(slope), slope)


def _extreme(node: Node, *both: Node) -> Node:
    pairs = list(zip(both[: len(both) // 2], both[len(both) // 2 :], strict=True))
    is_min = isinstance(node, Operation) and node.op == "min"
    pick = make.minimum if is_min else make.maximum

    def chosen(one: tuple[Node, Node], other: tuple[Node, Node]) -> tuple[Node, Node]:
        (a, own), (b, others) = one, other
        takes = logic.at_most(a, b) if is_min else logic.at_most(b, a)
        return pick(a, b), logic.where(takes, own, others)

    return reduce(chosen, pairs)[1]


def _where(node: Node, condition: Node, yes: Node, no: Node, *slopes: Node) -> Node:
    return logic.where(condition, *slopes[1:])


_RULES: Mapping[str, Callable[..., Node]] = {
    "*": _product,
    "/": _quotient,
    "tanh": _tanh,
    "exp": lambda node, arg, slope: _times(node, slope),
    "log": _log,
    "sqrt": _sqrt,
    "abs": _abs,
    "min": _extreme,
    "max": _extreme,
    "where": _where,
}


# ---- what several share --------------------------------------------------------------------------


def shared(*nodes: Node) -> tuple[tuple[tuple[Name, Node], ...], tuple[Node, ...]]:
    """Return nodes that name what they have in common, and these names with what they stand for.

    Each may name those before it, by names that no user has.
    """
    named: list[tuple[Name, Node]] = []
    while (part := _in_common(nodes)) is not None:
        name = Name(part.type, f"_{len(named)}", -make.INF, make.INF)
        nodes = tuple(_with(node, part, name) for node in nodes)
        named.append((name, part))
    return tuple(named), nodes


def _in_common(nodes: tuple[Node, ...]) -> Node | None:
    """Return the least part that stands in nodes more than once, if there is one."""
    counted: Counter[Node] = Counter()
    for node in nodes:
        counted.update(part for part in node.walk() if _is_worth(part))
    twice = [part for part, count in counted.items() if count > 1]
    return min(twice, key=lambda part: (part.size, part.text), default=None)


def _is_worth(part: Node) -> bool:
    if part.type == BOOL or not part.args:
        return False
    return not isinstance(part, Sum) or len(part.terms) + bool(part.plus) > 1


def _with(node: Node, part: Node, name: Name) -> Node:
    if node == part:
        return name
    if not node.args or part.size >= node.size:
        return node
    return rebuilt(node, [_with(arg, part, name) for arg in node.args])


def is_tame(node: Node) -> bool:
    """Whether a float is finite wherever what it is made of is: a number for 0 above all."""
    if isinstance(node, Constant):
        return abs(node.value) < make.INF
    if isinstance(node, Operation) and node.op not in _TAME:
        return False
    return all(is_tame(arg) for arg in node.args)


_TAME = {"*", "tanh", "abs", "min", "max", "where", "float", "//", "%"}
_TAME |= {"<=", "<", "==", "and", "or", "not"}
