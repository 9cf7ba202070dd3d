"""Nodes of expressions: frozen, typed, and each with the one text that it reads back from.

Built by make.py alone, which checks types, folds constants and sorts: equal nodes are equal
expressions as far as that goes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from fagen.errors import ExpressionError

BOOL, INT, FLOAT = "bool", "int32", "float32"

Number = int | float

MOST_NODES = 4_096  # of any tree; of one that a user gives far fewer, see rules.py
MOST_DEPTH = 96
MOST_INT = 2**31 - 1
MOST_LENGTH = 1 << 24  # keys and queries of a sequence, and the largest index that fp32 holds
MOST_GIVEN = 1 << 30  # of whole numbers that a call gives, where a declaration says no less

# how closely the parts of a text bind
OR, AND, NOT, COMPARE, SUM, PRODUCT, SIGN, ATOM = range(8)


@dataclass(frozen=True)
class Node:
    """An expression of one type."""

    type: str
    size: int = field(init=False, compare=False, repr=False)
    depth: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        args = self.args
        object.__setattr__(self, "size", 1 + sum(arg.size for arg in args))
        object.__setattr__(self, "depth", 1 + max((arg.depth for arg in args), default=0))
        if self.size > MOST_NODES or self.depth > MOST_DEPTH:
            raise ExpressionError(f"is too large: more than {MOST_NODES:,} parts, or nested deeper")

    @property
    def args(self) -> tuple["Node", ...]:
        """What it is made of."""
        return ()

    @property
    def level(self) -> int:
        """How closely its text binds."""
        return ATOM

    @cached_property
    def text(self) -> str:
        """What reads back as this node."""
        raise NotImplementedError

    def within(self, level: int) -> str:
        """Return its text where parts must bind so closely."""
        return self.text if self.level >= level else f"({self.text})"

    def walk(self) -> Iterator["Node"]:
        """Yield this node and all below it."""
        yield self
        for arg in self.args:
            yield from arg.walk()

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of numbers that it depends on."""
        own = {self.name} if isinstance(self, Name) else set()
        return frozenset(own.union(*(arg.names for arg in self.args)))

    def __hash__(self) -> int:
        return hash(self.text)  # which is there once

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Constant(Node):
    """A number, or a truth."""

    value: Number
    __hash__ = Node.__hash__

    @property
    def level(self) -> int:
        """A sign binds less than a digit."""
        return ATOM if self.type == BOOL or self.value >= 0 else SIGN

    @cached_property
    def text(self) -> str:
        """As Python writes it."""
        return repr(self.value)


@dataclass(frozen=True)
class Name(Node):
    """A number that has a name: of the language, or one that a call gives."""

    name: str
    least: Number
    most: Number
    __hash__ = Node.__hash__

    @cached_property
    def text(self) -> str:
        """The name."""
        return self.name


@dataclass(frozen=True)
class Table:
    """Numbers that a call gives as a tensor: `over` are its dimensions, by what counts along them.

    Each is "batch", "head", "kv_head", "len_q", "len_k", a number, or an int32 parameter. Whole
    numbers of a table that is `rising` do not fall along its last dimension.
    """

    name: str
    type: str
    over: tuple["str | int | Name", ...]
    rising: bool = False
    gradient: bool = False

    @property
    def extents(self) -> str:
        """Its dimensions, in words."""
        return ", ".join(map(str, self.over))


@dataclass(frozen=True)
class Lookup(Node):
    """A number of a table."""

    table: Table
    at: tuple[Node, ...]
    __hash__ = Node.__hash__

    @property
    def args(self) -> tuple[Node, ...]:
        """Where it is in the table."""
        return self.at

    @cached_property
    def text(self) -> str:
        """As Python subscripts."""
        return f"{self.table.name}[{', '.join(index.text for index in self.at)}]"


@dataclass(frozen=True)
class Sum(Node):
    """Terms, each with a number that it is multiplied by, and a number more; sorted by text."""

    terms: tuple[tuple[Number, Node], ...]
    plus: Number
    __hash__ = Node.__hash__

    @property
    def args(self) -> tuple[Node, ...]:
        """The terms, without their numbers."""
        return tuple(term for _, term in self.terms)

    @property
    def level(self) -> int:
        """A single term with a number is a product."""
        return SUM if len(self.terms) > 1 or self.plus or self.terms[0][0] < 0 else PRODUCT

    @cached_property
    def ordered(self) -> tuple[tuple[Number, Node], ...]:
        """The terms as they are written: whole numbers of a sum of floats last, what is taken last.

        A sum of floats that began with whole numbers would read as that of these.
        """
        return tuple(sorted(self.terms, key=lambda term: (_is_whole(*term), term[0] < 0)))

    @cached_property
    def text(self) -> str:
        """Its terms with their signs."""
        terms = self.ordered
        written = [("-" if c < 0 else "+", _times(abs(c), term)) for c, term in terms]
        if terms[0][0] == -1 and isinstance(terms[0][1], Operation):  # -a // b is (-a) // b
            written[0] = ("-", terms[0][1].within(SIGN))
        whole = _is_whole(*terms[0]) and (len(terms) > 1 or self.plus or terms[0][0] < 0)
        if whole or self.plus:
            sign = "-" if math.copysign(1, self.plus) < 0 else "+"
            written.insert(0 if whole else len(written), (sign, repr(abs(self.plus))))
        (sign, first), *others = written
        return sign.strip("+") + first + "".join(f" {sign} {text}" for sign, text in others)


def _is_whole(factor: Number, term: Node) -> bool:
    """Whether a term of a sum of floats is written as a whole number is."""
    return abs(factor) == 1 and isinstance(term, Operation) and term.op == "float"


def _times(factor: Number, term: Node) -> str:
    if factor == 1:
        return term.within(PRODUCT)
    product = isinstance(term, Operation) and term.op == "*"
    return f"{factor!r}*{term.within(PRODUCT if product else SIGN)}"


_LEVELS = {"or": OR, "and": AND, "not": NOT, "<=": COMPARE, "<": COMPARE, "==": COMPARE}
_LEVELS |= {"*": PRODUCT, "/": PRODUCT, "//": PRODUCT, "%": PRODUCT}
_SPACED = {op: f" {op} " for op in ("or", "and", "<=", "<", "==")}


@dataclass(frozen=True)
class Operation(Node):
    """Anything else: an operator or a function, of operands; "float" makes a whole number one."""

    op: str
    operands: tuple[Node, ...]
    __hash__ = Node.__hash__

    @property
    def args(self) -> tuple[Node, ...]:
        """The operands."""
        return self.operands

    @property
    def level(self) -> int:
        """That of the operator."""
        if self.op == "float":
            return self.operands[0].level
        return _LEVELS.get(self.op, ATOM)

    @cached_property
    def text(self) -> str:
        """An operator between its operands, or a function before them."""
        op, operands = self.op, self.operands
        if op == "float":
            return operands[0].text
        if op == "not":
            return f"not {operands[0].within(COMPARE)}"
        if op in ("/", "//", "%"):
            left, right = operands
            return f"{left.within(SIGN)} {op} {right.within(SIGN)}"
        if op == "*":
            # whole numbers first would read as a product of these
            ordered = sorted(operands, key=lambda factor: _is_whole(1, factor))
            one = "1.0*" * (_is_whole(1, ordered[0]) and len(ordered) > 1)
            return one + "*".join(factor.within(SIGN) for factor in ordered)
        if op in _SPACED:
            level = _LEVELS[op] + 1
            return _SPACED[op].join(operand.within(level) for operand in operands)
        return f"{op}({', '.join(operand.text for operand in operands)})"


def _index(name: str, least: int, most: int) -> Name:
    return Name(INT, name, least, most)


# The names of the language. Under tensor parallelism heads are those of one GPU.
LANGUAGE = {
    name.name: name
    for name in (
        _index("q_idx", 0, MOST_LENGTH - 1),  # a query within its sequence
        _index("k_idx", 0, MOST_LENGTH - 1),  # a key within its sequence
        _index("q_pos", -MOST_LENGTH, MOST_LENGTH - 1),  # q_idx + len_k - len_q
        _index("head", 0, (1 << 16) - 1),
        _index("kv_head", 0, (1 << 16) - 1),
        _index("batch", 0, (1 << 20) - 1),
        _index("heads", 1, 1 << 16),
        _index("len_q", 0, MOST_LENGTH),
        _index("len_k", 0, MOST_LENGTH),
        Name(FLOAT, "score", -math.inf, math.inf),  # scale · (q·k), before any mask
    )
}
INFINITY = "inf"
Q_IDX, K_IDX, Q_POS = LANGUAGE["q_idx"], LANGUAGE["k_idx"], LANGUAGE["q_pos"]
LEN_Q, LEN_K, SCORE = LANGUAGE["len_q"], LANGUAGE["len_k"], LANGUAGE["score"]
