"""Text in, an expression out: a walk over Python's syntax that knows a few of its nodes.

Nothing of the text is evaluated. All else is refused, with its column.
"""

import ast
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from fagen.errors import ExpressionError
from fagen.expr import logic, make, rules
from fagen.expr.canonical import Expression
from fagen.expr.declare import Scope
from fagen.expr.tree import INFINITY, LANGUAGE, Constant, Name, Node, Table

MOST_CHARACTERS = 1_000

_FOREIGN = re.compile(r"[^A-Za-z0-9_ \t\r\n.,()\[\]+\-*/%<>=!&|~]")
_SPACE = re.compile(r"\s")

_BINARY: Mapping[type[ast.operator], Callable[[Node, Node], Node]] = {
    ast.Add: make.add,
    ast.Sub: make.subtract,
    ast.Mult: make.multiply,
    ast.Div: make.divide,
    ast.FloorDiv: make.floor_divide,
    ast.Mod: make.modulo,
    ast.Pow: make.power,
}
_COMPARED: Mapping[type[ast.cmpop], Callable[[Node, Node], Node]] = {
    ast.LtE: logic.at_most,
    ast.Lt: logic.below,
    ast.GtE: lambda left, right: logic.at_most(right, left),
    ast.Gt: lambda left, right: logic.below(right, left),
    ast.Eq: logic.equal,
    ast.NotEq: logic.unequal,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Node], Node]] = {
    ast.USub: make.negate,
    ast.UAdd: lambda node: make.add(node),
    ast.Not: logic.negated,
}
_WORDS: Mapping[type[ast.AST], str] = {ast.BitAnd: "and", ast.BitOr: "or", ast.Invert: "not"}


def parse(text: str, scope: Scope | None = None) -> Node:
    """Return the tree of a text.  Raises ExpressionError, with the column of what is refused."""
    if len(text) > MOST_CHARACTERS:
        raise ExpressionError(f"is {len(text):,} characters; the most are {MOST_CHARACTERS:,}")
    if foreign := _FOREIGN.search(text):
        shown = foreign[0] if foreign[0].isprintable() else f"\\u{ord(foreign[0]):04x}"
        raise ExpressionError(f"{shown} is no sign of the language", foreign.start() + 1)
    line = _SPACE.sub(" ", text)
    before = len(line) - len(line.lstrip(" "))
    try:
        root = ast.parse(line[before:], mode="eval").body
    except SyntaxError as error:
        column = min(before + (error.offset or 1), len(text) + 1)
        raise ExpressionError("this is no expression", column) from None
    except (ValueError, MemoryError, RecursionError):
        raise ExpressionError("is nested too deeply, or has too long a number") from None
    parts = sum(isinstance(node, ast.expr) for node in ast.walk(root))
    if parts > rules.MOST_PARTS:
        raise ExpressionError(f"has {parts} parts; the most are {rules.MOST_PARTS}")
    return _Reader(scope or {}, before).read(root, 0)


def read(kind: str, text: str, scope: Scope | None = None) -> Expression:
    """Return the mask or the score that a text is; all that is declared must be of use."""
    return rules.checked(kind, parse(text, scope), scope)


class _Reader:
    def __init__(self, scope: Scope, before: int) -> None:
        self.scope, self.before = scope, before
        self.known = [*scope, *LANGUAGE, *logic.FUNCTIONS, INFINITY]

    def read(self, node: ast.expr, depth: int) -> Node:
        """Return the tree of a node of syntax; what its making refuses gets its column."""
        if depth > rules.MOST_NESTED:
            raise self._fault(node, f"this is nested deeper than {rules.MOST_NESTED}")
        reader = _READERS.get(type(node))
        if reader is None:
            raise self._fault(node, f"{_called(node)} is nothing of the language")
        try:
            return reader(self, node, depth + 1)
        except ExpressionError as error:
            if error.column:
                raise
            raise self._fault(node, error.sentence) from None

    def _fault(self, node: ast.AST, sentence: str) -> ExpressionError:
        column = getattr(node, "col_offset", 0)
        return ExpressionError(sentence, self.before + column + 1)

    def _unknown(self, name: str) -> ExpressionError:
        near = get_close_matches(name, self.known, 1)
        hint = f"; did you mean {near[0]}?" if near else f": known are {', '.join(self.known)}"
        return ExpressionError(f"{name[:40]} is not known{hint}")

    def constant(self, node: ast.Constant, depth: int) -> Node:
        if type(node.value) not in (int, float, bool):
            raise ExpressionError(f"{_called(node)} is nothing of the language")
        if node.value == float("inf"):
            raise ExpressionError("this is beyond what fp32 holds; inf is written so")
        return make.number(node.value)

    def name(self, node: ast.Name, depth: int) -> Node:
        if node.id == INFINITY:
            return make.number(float("inf"))
        found = self.scope.get(node.id) or LANGUAGE.get(node.id)
        if isinstance(found, Table):
            raise ExpressionError(f"{node.id} is a table: {node.id}[{found.extents}]")
        if isinstance(found, Constant | Name):
            return found
        if node.id in logic.FUNCTIONS:
            raise ExpressionError(f"{node.id} is a function: {node.id}(…)")
        raise self._unknown(node.id)

    def unary(self, node: ast.UnaryOp, depth: int) -> Node:
        if word := _WORDS.get(type(node.op)):
            raise ExpressionError(f"write {word}")
        return _UNARY[type(node.op)](self.read(node.operand, depth))

    def binary(self, node: ast.BinOp, depth: int) -> Node:
        operator = type(node.op)
        if word := _WORDS.get(operator):
            raise ExpressionError(f"write {word}")
        if operator not in _BINARY:
            raise ExpressionError(f"{operator.__name__} is nothing of the language")
        return _BINARY[operator](self.read(node.left, depth), self.read(node.right, depth))

    def logic(self, node: ast.BoolOp, depth: int) -> Node:
        join = logic.both if isinstance(node.op, ast.And) else logic.either
        return join(*(self.read(value, depth) for value in node.values))

    def compare(self, node: ast.Compare, depth: int) -> Node:
        sides = [self.read(side, depth) for side in (node.left, *node.comparators)]
        links = []
        for sign, left, right in zip(node.ops, sides, sides[1:], strict=False):
            if type(sign) not in _COMPARED:
                raise ExpressionError(f"{type(sign).__name__} is nothing of the language")
            links.append(_COMPARED[type(sign)](left, right))
        return logic.both(*links)

    def call(self, node: ast.Call, depth: int) -> Node:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in logic.FUNCTIONS:
            if not name:
                raise ExpressionError("only functions of the language are called, by name")
            raise self._unknown(name)
        if node.keywords or any(isinstance(arg, ast.Starred) for arg in node.args):
            raise ExpressionError(f"{name} takes its arguments one by one, without names")
        count, function = logic.FUNCTIONS[name]
        check_count(name, count, len(node.args))
        return function(*(self.read(arg, depth) for arg in node.args))

    def subscript(self, node: ast.Subscript, depth: int) -> Node:
        name = node.value.id if isinstance(node.value, ast.Name) else ""
        found = self.scope.get(name)
        if not isinstance(found, Table):
            tables = [own for own, given in self.scope.items() if isinstance(given, Table)]
            known = f": those declared are {', '.join(tables)}" if tables else "; none is declared"
            raise ExpressionError(f"only tables are read by []{known}")
        inside = node.slice
        at = inside.elts if isinstance(inside, ast.Tuple) else [inside]
        return make.look_up(found, *(self.read(index, depth) for index in at))


_READERS: Mapping[type[ast.expr], Callable[[_Reader, Any, int], Node]] = {
    ast.Constant: _Reader.constant,
    ast.Name: _Reader.name,
    ast.UnaryOp: _Reader.unary,
    ast.BinOp: _Reader.binary,
    ast.BoolOp: _Reader.logic,
    ast.Compare: _Reader.compare,
    ast.Call: _Reader.call,
    ast.Subscript: _Reader.subscript,
}


def check_count(name: str, count: int, given: int) -> None:
    """Refuse another number of arguments than a function takes."""
    if given != count and not (name in ("min", "max") and given >= count):
        more = " or more" if name in ("min", "max") else ""
        raise ExpressionError(f"{name} takes {count}{more}, not {given}")


def _called(node: ast.AST) -> str:
    """Return what a node of syntax is called."""
    words = {
        ast.Attribute: "a dot behind a name",
        ast.Lambda: "lambda",
        ast.IfExp: "if … else: write where(condition, a, b);",
        ast.Constant: "this",
        ast.Tuple: "a comma by itself",
        ast.List: "a list",
        ast.Starred: "a star",
        ast.Slice: "a slice",
    }
    return words.get(type(node), type(node).__name__)
