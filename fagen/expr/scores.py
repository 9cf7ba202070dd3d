"""A score in parts: what of it folds into the exponential, and what is left to each element.

score' = outer · core(inner · s) + row + added, with s the product of q and k, scaled: so outer and
log2 e are one factor, and inner and the scale another.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fagen.arch import SCORE_OPERATIONS
from fagen.expr import logic, make
from fagen.expr.canonical import Expression
from fagen.expr.tree import BOOL, K_IDX, SCORE, Constant, Node, Operation, Sum

_ELEMENT = {"score", "k_idx"}  # what is another number for each element of a row


@dataclass(frozen=True)
class Folded:
    """A score by where its parts are worked out; all but core and added are the same in a row."""

    outer: Node  # multiplies core
    core: Node  # of SCORE, which stands for inner · s; SCORE itself where nothing is left
    inner: Node  # multiplies s before core
    row: Node  # is added to a row: of no effect on the softmax, but on the LSE
    added: Node  # is added to an element, and knows no s: biases by distance

    @property
    def is_affine(self) -> bool:
        """Whether what depends on s is one multiplication."""
        return self.core == SCORE

    @property
    def whole(self) -> Node:
        """The score again."""
        inside = replaced(self.core, SCORE, make.multiply(self.inner, SCORE))
        return make.add(make.multiply(self.outer, inside), self.row, self.added)

    @property
    def cost(self) -> tuple[int, int]:
        """Instructions of an element beside those of a plain softmax: on the MUFU, and others."""
        terms = _terms(self.added)[0]
        columns = [term for term in terms if _is_column(term)]  # one multiplication and addition
        others = [term for term in terms if term not in columns]
        operations = [*_operations(self.core, *others), *["fma"] * len(others)]
        operations += ["fma"] * (bool(columns) + (not self.is_affine))
        counts = [SCORE_OPERATIONS[operation] for operation in operations]
        return sum(mufu for mufu, _ in counts), sum(issued for _, issued in counts)


ZERO, ONE = make.number(0.0), make.number(1.0)


def folded(score: Expression) -> Folded:
    """Return the parts of a score."""
    terms, plus = _terms(score.tree)
    of_score = [term for term in terms if SCORE.name in term.names]
    rest = [term for term in terms if SCORE.name not in term.names]
    row = make.add(make.number(plus), *(term for term in rest if not _is_of_element(term)))
    added = make.add(ZERO, *(term for term in rest if _is_of_element(term)))
    if len(of_score) != 1:
        return Folded(ONE, make.add(ZERO, *of_score), ONE, row, added)
    outer, core = _factored(of_score[0])
    if isinstance(core, Sum):  # outer · (x + c): what is added goes out, times outer
        inside = folded(Expression(core))
        row = make.add(row, make.multiply(outer, inside.row))
        added = make.add(added, make.multiply(outer, inside.added))
        return Folded(make.multiply(outer, inside.outer), inside.core, inside.inner, row, added)
    inner = _inner(core)
    core = core if inner == ONE else _without(core, inner)
    if core == SCORE:
        outer, inner = make.multiply(outer, inner), ONE
    return Folded(outer, core, inner, row, added)


def _terms(node: Node) -> tuple[list[Node], float]:
    """Return terms with their factors, and the constant."""
    if isinstance(node, Constant):
        return [], float(node.value)
    if not isinstance(node, Sum):
        return [node], 0.0
    return [make.multiply(make.number(float(f)), term) for f, term in node.terms], float(node.plus)


def _is_of_element(node: Node) -> bool:
    return bool(node.names & _ELEMENT)


def _is_column(term: Node) -> bool:
    """Whether a term grows evenly from key to key: a number of its row times so many keys."""
    core = _factored(term)[1]
    if not isinstance(core, Operation) or core.op != "float":
        return False
    terms, _ = make.linear(core.operands[0])
    return [part for _, part in terms if K_IDX.name in part.names] == [K_IDX]


def _factored(node: Node) -> tuple[Node, Node]:
    """Return the factors of a product that are the same in a row, and the others."""
    factors: list[Node] = []
    if isinstance(node, Sum) and len(node.terms) == 1 and not node.plus:
        (factor, node), *_ = node.terms
        factors.append(make.number(float(factor)))
    if isinstance(node, Operation) and node.op == "/" and not _is_of_element(node.operands[1]):
        factors.append(make.divide(ONE, node.operands[1]))
        node = node.operands[0]
    parts = node.args if isinstance(node, Operation) and node.op == "*" else (node,)
    factors += [part for part in parts if not _is_of_element(part)]
    core = make.multiply(ONE, *(part for part in parts if _is_of_element(part)))
    return make.multiply(ONE, *factors), core


def _uses(node: Node) -> Iterator[Node]:
    """Yield the largest parts that multiply s by what is the same in a row, and nothing else."""
    if SCORE.name not in node.names:
        return
    if node.type != BOOL:
        factor, rest = _factored(node)
        if rest == SCORE and not factor.names & _ELEMENT:
            yield node
            return
    for arg in node.args:
        yield from _uses(arg)


def _inner(core: Node) -> Node:
    """Return what multiplies s wherever it stands, 1 where that is not the same everywhere."""
    factors = {_factored(use)[0] for use in _uses(core)}
    return factors.pop() if len(factors) == 1 else ONE


def _without(core: Node, inner: Node) -> Node:
    """Return core of what is multiplied already."""
    for use in dict.fromkeys(_uses(core)):
        core = replaced(core, use, SCORE)
    return core


def replaced(node: Node, old: Node, new: Node) -> Node:
    """Return a node with another in place of a part."""
    if node == old:
        return new
    if not node.args or SCORE.name not in node.names:
        return node
    return rebuilt(node, [replaced(arg, old, new) for arg in node.args])


def rebuilt(node: Node, args: Sequence[Node]) -> Node:
    """Return a sum or an operation of other parts."""
    if isinstance(node, Sum):
        terms = zip(node.terms, args, strict=True)
        products = [make.multiply(make.number(f), arg) for (f, _), arg in terms]
        return make.add(*products, make.number(node.plus))
    assert isinstance(node, Operation)
    return _REBUILT[node.op](*args)


_REBUILT: Mapping[str, Callable[..., Node]] = {
    **{name: build for name, (_, build) in logic.FUNCTIONS.items()},
    "*": make.multiply,
    "/": make.divide,
    "//": make.floor_divide,
    "%": make.modulo,
    "<=": logic.at_most,
    "<": logic.below,
    "==": logic.equal,
    "and": logic.both,
    "or": logic.either,
    "not": logic.negated,
    "float": make.as_float,
}


def _operations(*nodes: Node) -> Iterator[str]:
    """Yield the operations of an element, those that several parts share once."""
    counted: dict[str, Node] = {}
    for node in nodes:
        counted |= {part.text: part for part in node.walk() if _is_of_element(part)}
    for part in counted.values():
        if isinstance(part, Sum):
            added = len(part.terms) - 1 + bool(part.plus)
            multiplied = sum(abs(factor) != 1 for factor, _ in part.terms)
            yield from ["fma"] * max(added, multiplied)
        elif isinstance(part, Operation):
            times = len(part.args) - 1 if part.op in ("*", "min", "max", "and", "or") else 1
            yield from [part.op] * times
        elif part.args:
            yield "table"
