"""Functions in, expressions out: `mask` and `score` run a function once, on what writes down.

No source is read. A function's arguments are recognised by their names, as those of the language;
those behind `*` are a call's, by their annotation, or constants, by their default.
"""

import ast
import inspect
import numbers
from collections.abc import Callable
from typing import Any, NoReturn

from fagen.errors import ExpressionError
from fagen.expr import logic, make, rules
from fagen.expr.canonical import Expression
from fagen.expr.declare import Given, check_name, parameter, table
from fagen.expr.parse import check_count
from fagen.expr.tree import FLOAT, INT, LANGUAGE, Constant, Node, Number
from fagen.expr.tree import Table as Declared

_NO_TRUTH = "a traced value has no truth yet: write &, |, ~ or fagen.where"


class Argument:
    """An annotation: a number that each call gives, between two ends where they are said."""

    def __init__(self, dtype: str, least: Number | None = None, most: Number | None = None) -> None:
        self.dtype, self.least, self.most = dtype, least, most

    def __call__(self, *, min: Number | None = None, max: Number | None = None) -> "Argument":
        """Return the same with ends."""
        return Argument(self.dtype, min, max)


int32, float32 = Argument(INT), Argument(FLOAT)


class Table:
    """An annotation: numbers that each call gives as a tensor, over dimensions that are named."""

    def __init__(
        self, dtype: str, *over: str | int, rising: bool = False, gradient: bool = False
    ) -> None:
        self.dtype, self.over, self.rising, self.gradient = dtype, over, rising, gradient


class Traced:
    """A value of an expression that is being written down."""

    __array_ufunc__ = None  # arrays leave operators to this class
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, node: Node) -> None:
        rules.check_size(node)
        self.node = node

    def __bool__(self) -> bool:
        raise TypeError(_NO_TRUTH)

    def _is_no_number(self, *_: Any) -> NoReturn:
        raise TypeError("a traced value is no number yet: it has operators, and fagen's functions")

    __index__ = __int__ = __float__ = __len__ = _is_no_number
    __iter__ = __getitem__ = __contains__ = _is_no_number

    def __neg__(self) -> "Traced":
        return Traced(make.negate(self.node))

    def __pos__(self) -> "Traced":
        return self

    def __abs__(self) -> "Traced":
        return Traced(make.absolute(self.node))

    def __invert__(self) -> "Traced":
        return Traced(logic.negated(self.node))


class TracedTable:
    """A table of an expression that is being written down."""

    def __init__(self, declared: Declared) -> None:
        self.declared = declared

    def __getitem__(self, index: Any) -> Traced:
        at = index if isinstance(index, tuple) else (index,)
        return Traced(make.look_up(self.declared, *map(_node, at)))

    def __bool__(self) -> bool:
        raise TypeError(_NO_TRUTH)


def _node(value: Any) -> Node:
    """Return what stands for a value: numbers of closures become constants."""
    if isinstance(value, Traced):
        return value.node
    if isinstance(value, TracedTable):
        raise ExpressionError(f"{value.declared.name} is a table: index it")
    if isinstance(value, bool):
        return make.number(value)
    if isinstance(value, numbers.Integral):
        return make.number(int(value))
    if isinstance(value, numbers.Real):
        return make.number(float(value))
    if hasattr(value, "shape"):
        raise ExpressionError("a tensor in a closure: pass it as a Table argument")
    raise ExpressionError(f"{type(value).__name__} is nothing of the language")


def _add_operators() -> None:
    """Give Traced its operators of two, either way round."""

    def forward(build: Callable[[Node, Node], Node]) -> Callable[[Traced, Any], Traced]:
        return lambda self, other: Traced(build(self.node, _node(other)))

    def backward(build: Callable[[Node, Node], Node]) -> Callable[[Traced, Any], Traced]:
        return lambda self, other: Traced(build(_node(other), self.node))

    both_ways: dict[str, Callable[..., Node]] = {
        "add": make.add,
        "sub": make.subtract,
        "mul": make.multiply,
        "truediv": make.divide,
        "floordiv": make.floor_divide,
        "mod": make.modulo,
        "pow": make.power,
        "and": logic.both,
        "or": logic.either,
    }
    for name, build in both_ways.items():
        setattr(Traced, f"__{name}__", forward(build))
        setattr(Traced, f"__r{name}__", backward(build))
    for name, build in (("le", logic.at_most), ("lt", logic.below)):
        setattr(Traced, f"__{name}__", forward(build))
        setattr(Traced, f"__g{name[1]}__", backward(build))  # python asks b >= a for a <= b too
    setattr(Traced, "__eq__", forward(logic.equal))  # noqa: B010
    setattr(Traced, "__ne__", forward(logic.unequal))  # noqa: B010


_add_operators()


def _function(name: str, called: str = "") -> Callable[..., Traced]:
    count, build = logic.FUNCTIONS[name]

    def function(*values: Any) -> Traced:
        check_count(called or name, count, len(values))
        return Traced(build(*map(_node, values)))

    function.__name__ = function.__qualname__ = called or name
    function.__doc__ = f"Return {name} of traced values."
    return function


tanh, exp, log, sqrt = (_function(name) for name in ("tanh", "exp", "log", "sqrt"))
sigmoid, clamp, where = (_function(name) for name in ("sigmoid", "clamp", "where"))
minimum, maximum = _function("min", "minimum"), _function("max", "maximum")


# ---- decorators ----------------------------------------------------------------------------------


def mask(function: Callable[..., Any]) -> Expression:
    """Return the mask that a function of positions is: whether a query sees a key."""
    return _traced("mask", function)


def score(function: Callable[..., Any]) -> Expression:
    """Return the score that a function of a score and positions is."""
    return _traced("score", function)


def _traced(kind: str, function: Callable[..., Any]) -> Expression:
    called = getattr(function, "__name__", kind)
    try:
        scope: dict[str, Given] = {}
        given: dict[str, Any] = {}
        around = getattr(function, "__globals__", {})
        arguments = [
            (name, argument, _resolved(argument.annotation, around))
            for name, argument in inspect.signature(function).parameters.items()
        ]  # tables last: a parameter may be one of their dimensions
        for name, argument, note in sorted(arguments, key=lambda row: isinstance(row[2], Table)):
            given[name] = _argument(name, argument, note, scope)
        result = function(**given)
        if result is None:
            raise ExpressionError("returns nothing")
        return rules.checked(kind, _node(result), scope, called)
    except ExpressionError as error:
        raise ExpressionError(f"{called}: {error}") from None


def _argument(name: str, argument: inspect.Parameter, note: Any, scope: dict[str, Given]) -> Any:
    """Return what a function is given for one of its arguments, which the scope gets too."""
    if argument.kind not in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY):
        raise ExpressionError(f"{name} has no name that a call could give it by")
    if argument.default is not argument.empty:
        constant = _node(argument.default)
        if not isinstance(constant, Constant):
            raise ExpressionError(f"the default of {name} is no number")
        return argument.default
    if name in LANGUAGE:
        return Traced(LANGUAGE[name])
    if isinstance(note, Argument):
        declared = parameter(check_name(name), note.dtype, note.least, note.most)
        scope[name] = declared
        return Traced(declared)
    if isinstance(note, Table):
        own = table(check_name(name), note.dtype, note.over, scope, note.rising, note.gradient)
        scope[name] = own
        return TracedTable(own)
    known = "it is annotated with fagen.int32, fagen.float32 or fagen.Table(…), or has a default"
    raise ExpressionError(f"{name} is no name of the language, so {known}")


def _resolved(note: Any, around: dict[str, Any]) -> Any:
    """Return an annotation; of one that is text what it means: a name, or a call on constants."""
    if not isinstance(note, str):
        return note
    try:
        node = ast.parse(note, mode="eval").body
        if not isinstance(node, ast.Call):
            return _dotted(node, around)
        arguments = [ast.literal_eval(arg) for arg in node.args]
        named = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
        called = _dotted(node.func, around)
        known = called is Table or isinstance(called, Argument)
        return called(*arguments, **named) if known else None
    except (SyntaxError, ValueError, AttributeError, KeyError, TypeError):
        return None


def _dotted(node: ast.expr, around: dict[str, Any]) -> Any:
    if isinstance(node, ast.Attribute):
        return getattr(_dotted(node.value, around), node.attr)
    if isinstance(node, ast.Name):
        return around[node.id]
    raise ValueError(ast.dump(node))
