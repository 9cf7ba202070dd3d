"""Nodes to C++: the one printer of expressions.

What a call gives goes by fagen's own names, p0 … and t0 …, never by a user's. Division and modulo
of whole numbers round down, as Python's do; where nothing is below 0, C++'s own do so.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce

from fagen.expr.bounds import interval
from fagen.expr.canonical import Expression
from fagen.expr.tree import (
    BOOL,
    FLOAT,
    LANGUAGE,
    Constant,
    Lookup,
    Name,
    Node,
    Number,
    Operation,
    Sum,
    Table,
)

# how closely the parts of C++ bind
CHOICE, OR, AND, EQUAL, COMPARE, SUM, PRODUCT, SIGN, ATOM = range(9)

# What kernels call the names of the language; q_pos is a sum of others.
KERNEL = {
    "q_idx": "row",
    "k_idx": "key",
    "len_q": "seqlen_q",
    "len_k": "seqlen_k",
    **{name: name for name in ("head", "kv_head", "batch", "heads", "score")},
}
_POSITION = (("+", "q_idx"), ("+", "len_k"), ("-", "len_q"))
_EXTENTS = {"head": "heads", "kv_head": "kv_heads", "batch": "batches"}

# of whole numbers by one above 0, rounded down
HELPERS = {
    "floor_div": """\
__host__ __device__ __forceinline__ int floor_div(int a, int b) {
  return (a >= 0 ? a : a - b + 1) / b;
}
""",
    "floor_mod": """\
__host__ __device__ __forceinline__ int floor_mod(int a, int b) {
  const int rest = a % b;
  return rest < 0 ? rest + b : rest;
}
""",
}
# what other names have: fast functions of floats, of CUDA or of the kernel; and a launcher's
DEVICE = {"tanh": "tanh_approx", "exp": "__expf", "log": "__logf", "sqrt": "sqrt_approx"}
DEVICE |= {"/": "__fdividef"}
HOST = {name: f"std::{name}" for name in ("tanh", "exp", "log", "sqrt")}
_FLOATS = {"abs": "fabsf", "min": "fminf", "max": "fmaxf"}


@dataclass(frozen=True)
class Names:
    """What stands in C++ for names, and for a number of a table at indices that are C++ already."""

    names: Mapping[str, str] = field(default_factory=lambda: KERNEL)
    look_up: Callable[[Table, list[str]], str] | None = None
    functions: Mapping[str, str] = field(default_factory=lambda: DEVICE)  # those not there: as here

    @classmethod
    def of(cls, expression: Expression, **others: str) -> "Names":
        """Return the names of an expression: its parameters are p0 …, its tables t0 …, by name."""
        given = {p.name: f"p{i}" for i, p in enumerate(expression.parameters)}
        given |= {t.name: f"t{i}" for i, t in enumerate(expression.tables)}
        return cls(KERNEL | given | others)

    def at(self, table: Table, indices: list[str]) -> str:
        """Return a number of a table, whose rows lie one after another if nothing else is said."""
        if self.look_up is not None:
            return self.look_up(table, indices)
        (place, *others), extents = indices, [self._extent(dim) for dim in table.over[1:]]
        for index, extent in zip(others, extents, strict=True):
            place = f"int64_t({place}) * {extent} + {index}"
        return f"{self.names[table.name]}[{place}]"

    def _extent(self, dim: str | int | Name) -> str:
        if isinstance(dim, int):
            return str(dim)
        name = dim.name if isinstance(dim, Name) else _EXTENTS.get(dim, dim)
        return self.names.get(name, name)


def printed(node: Node, names: Names | None = None) -> str:
    """Return a node as C++."""
    return _Printer(names or Names()).within(node, CHOICE)


def helpers(*nodes: Node) -> str:
    """Return the functions that the C++ of nodes calls, and nothing else defines."""
    used = {_rounded(part)[0] for node in nodes for part in node.walk() if _rounds(part)}
    return "\n".join(text for name, text in HELPERS.items() if name in used)


def _rounds(node: Node) -> bool:
    return isinstance(node, Operation) and node.op in ("//", "%")


def _rounded(node: Node) -> tuple[str, str]:
    """Return the function and the operator that divide so: by the one that is not ""."""
    assert isinstance(node, Operation)
    word, sign = ("floor_div", "/") if node.op == "//" else ("floor_mod", "%")
    return ("", sign) if interval(node.operands[0])[0] >= 0 else (word, "")


def constant(value: Number, type_: str) -> str:
    """Return a number as C++: floats by what Python reads back."""
    if type_ == BOOL:
        return "true" if value else "false"
    if type_ != FLOAT:
        return str(value)
    if abs(value) == float("inf"):
        return "INFINITY" if value > 0 else "-INFINITY"
    return f"{value!r}f"


class _Printer:
    def __init__(self, names: Names) -> None:
        self.names = names

    def within(self, node: Node, level: int) -> str:
        """Return the C++ of a node where parts must bind so closely."""
        text, own = self.print(node)
        return text if own >= level else f"({text})"

    def print(self, node: Node) -> tuple[str, int]:
        """Return the C++ of a node, and how closely it binds."""
        if isinstance(node, Constant):
            return constant(node.value, node.type), SIGN if node.value < 0 else ATOM
        if isinstance(node, Sum) or (isinstance(node, Name) and self._is_position(node)):
            return self.sum(node)
        if isinstance(node, Name):
            return self.names.names[node.name], ATOM
        if isinstance(node, Lookup):
            return self.names.at(node.table, [self.within(i, PRODUCT) for i in node.at]), ATOM
        assert isinstance(node, Operation)
        return self.operation(node)

    def _is_position(self, node: Name) -> bool:
        return node == LANGUAGE["q_pos"] and node.name not in self.names.names

    def sum(self, node: Sum | Name) -> tuple[str, int]:
        """Return terms with their signs, those that are taken behind those that are added."""
        terms = node.ordered if isinstance(node, Sum) else ((1, node),)
        written = [piece for factor, term in terms for piece in self.term(factor, term, node.type)]
        plus: Number = node.plus if isinstance(node, Sum) else 0
        if plus:
            written.append(("-" if plus < 0 else "+", constant(abs(plus), node.type)))
        (sign, first), *others = written
        text = sign.strip("+") + first + "".join(f" {sign} {text}" for sign, text in others)
        return text, SUM if others else SIGN if sign == "-" else PRODUCT

    def term(self, factor: Number, term: Node, type_: str) -> Iterator[tuple[str, str]]:
        """Yield a term of a sum with its sign; of q_pos what it is the sum of."""
        if factor == 1 and isinstance(term, Name) and self._is_position(term):
            yield from ((sign, self.names.names[name]) for sign, name in _POSITION)
            return
        sign = "-" if factor < 0 else "+"
        text = self.within(term, PRODUCT)
        if abs(factor) != 1:
            text = f"{constant(abs(factor), type_)} * {self.within(term, SIGN)}"
        yield sign, text

    def operation(self, node: Operation) -> tuple[str, int]:
        """Return an operator between operands, or a call."""
        op = node.op
        if op in ("and", "or"):
            sign = " && " if op == "and" else " || "
            texts = [self.within(operand, EQUAL) for operand in node.operands]
            return sign.join(texts), AND if op == "and" else OR
        if op in ("<=", "<", "=="):
            left, right = (self.within(operand, SUM) for operand in node.operands)
            return f"{left} {op} {right}", EQUAL if op == "==" else COMPARE
        if op == "*":
            return " * ".join(self.within(operand, SIGN) for operand in node.operands), PRODUCT
        sign = _rounded(node)[1] if _rounds(node) else op if op == "/" else ""
        if sign and op not in self.names.functions:
            left, right = (self.within(operand, SIGN) for operand in node.operands)
            return f"{left} {sign} {right}", PRODUCT
        if op == "where":
            condition, yes, no = node.operands
            choice = f"{self.within(yes, CHOICE + 1)} : {self.within(no, CHOICE + 1)}"
            return f"{self.within(condition, CHOICE + 1)} ? {choice}", CHOICE
        if op == "not":
            return f"!{self.within(node.operands[0], ATOM)}", SIGN
        return self.call(node), ATOM

    def call(self, node: Operation) -> str:
        texts = [self.within(operand, CHOICE) for operand in node.operands]
        if node.op == "float":
            return f"float({texts[0]})"
        name = _rounded(node)[0] if _rounds(node) else node.op
        function = self.names.functions.get(name, name)
        if node.type == FLOAT:
            function = _FLOATS.get(name, function)
        if node.op in ("min", "max"):  # of two each
            return reduce(lambda one, other: f"{function}({one}, {other})", texts)
        return f"{function}({', '.join(texts)})"
