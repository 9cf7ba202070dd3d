"""Nodes to numbers: functions of ints, floats and torch tensors, with Python's rounding down.

What the emulators compute by. It is no oracle: what reads a text wrongly reads it so for both.
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from operator import add, mul
from typing import Any

from fagen.expr.tree import Constant, Lookup, Name, Node, Operation, Sum

Given = Mapping[str, Any]  # numbers and tensors by name; tables may be lists too
Function = Callable[[Given], Any]


def evaluate(node: Node, given: Given) -> Any:
    """Return the value of a node; tensors spread to each other, and q_pos follows from lengths."""
    return function_of(node)(given)


@lru_cache(1 << 12)
def function_of(node: Node) -> Function:
    """Return the function of what is given that a node is."""
    if isinstance(node, Constant):
        value = node.value
        return lambda given: value
    if isinstance(node, Name):
        return _named(node.name)
    parts = [function_of(arg) for arg in node.args]
    if isinstance(node, Lookup):
        return _looked_up(node.table.name, parts)
    if isinstance(node, Sum):
        return _summed(node, parts)
    assert isinstance(node, Operation)
    apply = _APPLIED[node.op]
    if len(parts) == 1:
        (only,) = parts
        return lambda given: apply(only(given))
    if node.op in _FOLDED:
        return lambda given: reduce(apply, [part(given) for part in parts])
    return lambda given: apply(*[part(given) for part in parts])


def _named(name: str) -> Function:
    def number(given: Given) -> Any:
        try:
            return given[name]
        except KeyError:
            raise TypeError(f"{name} is missing") from None

    return _position if name == "q_pos" else number


def _position(given: Given) -> Any:
    """Return q_pos, which follows from others."""
    return given["q_idx"] + given["len_k"] - given["len_q"]


def _looked_up(name: str, parts: list[Function]) -> Function:
    def number(given: Given) -> Any:
        try:
            values = given[name]
        except KeyError:
            raise TypeError(f"{name} is missing") from None
        at = tuple(part(given) for part in parts)
        return values[at] if _is_tensor(values) else reduce(lambda rows, i: rows[i], at, values)

    return number


def _summed(node: Sum, parts: list[Function]) -> Function:
    plus, terms = node.plus, [(f, part) for (f, _), part in zip(node.terms, parts, strict=True)]
    if len(parts) == 1 and terms[0][0] == 1:
        (only,) = parts
        return lambda given: only(given) + plus
    if all(factor == 1 for factor, _ in terms):
        return lambda given: reduce(add, [part(given) for _, part in terms]) + plus
    return lambda given: reduce(add, [factor * part(given) for factor, part in terms]) + plus


# ---- numbers and tensors -------------------------------------------------------------------------


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "new_empty")


def _either(of_numbers: Callable[..., Any], of_tensors: str) -> Callable[..., Any]:
    """Return a function that is torch's where any argument is a tensor."""

    def function(*values: Any) -> Any:
        tensor = next((value for value in values if _is_tensor(value)), None)
        if tensor is None:
            return of_numbers(*values)
        import torch

        return getattr(torch, of_tensors)(
            *(v if _is_tensor(v) else torch.as_tensor(v, device=tensor.device) for v in values)
        )

    return function


def _of_float(function: Callable[[float], float]) -> Callable[[float], float]:
    """Return a function of math's with IEEE 754's answers in place of exceptions."""

    def answer(value: float) -> float:
        try:
            return function(value)
        except OverflowError:
            return math.inf
        except ValueError:
            return -math.inf if value == 0 else math.nan

    return answer


def _divided(left: float, right: float) -> float:
    try:
        return left / right
    except ZeroDivisionError:
        return math.nan if left == 0 or left != left else math.copysign(math.inf, left)


def _to_float(value: Any) -> Any:
    return value.float() if _is_tensor(value) else float(value)


_FOLDED = {"*", "min", "max", "and", "or"}
_APPLIED: Mapping[str, Callable[..., Any]] = {
    "*": mul,
    "/": _either(_divided, "true_divide"),
    "//": lambda left, right: left // right,
    "%": lambda left, right: left % right,
    "min": _either(min, "minimum"),
    "max": _either(max, "maximum"),
    "abs": abs,
    "where": _either(lambda condition, yes, no: yes if condition else no, "where"),
    "float": _to_float,
    "tanh": _either(math.tanh, "tanh"),
    "exp": _either(_of_float(math.exp), "exp"),
    "log": _either(_of_float(math.log), "log"),
    "sqrt": _either(_of_float(math.sqrt), "sqrt"),
    "<=": lambda left, right: left <= right,
    "<": lambda left, right: left < right,
    "==": lambda left, right: left == right,
    "and": lambda left, right: left & right,
    "or": lambda left, right: left | right,
    "not": _either(lambda value: not value, "logical_not"),
}
