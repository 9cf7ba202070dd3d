"""What a call says of the keys that are seen, in; a mask's name and what its kernel is given, out.

`causal`, `window` and `mask` are and-ed, and so is what belongs to each: a word's own arguments, a
text's or a function's, by name. Values have no say in which kernel that is: one of windows serves
all of them. Needs no torch, for `pick` asks too.
"""

import re
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, NamedTuple, NoReturn

from fagen.argument_names import refuse_unknown_names
from fagen.errors import ExpressionError
from fagen.expr import words
from fagen.expr.canonical import Expression, all_of
from fagen.expr.declare import Given, check_name, parameter
from fagen.expr.parse import read
from fagen.expr.ranges import ranges
from fagen.expr.tree import FLOAT, INT, Name, Table
from fagen.expr.words import OPEN
from fagen.toml_lines import near_word, shown

WINDOW, BY_SEQUENCE = "window", "causal_by_sequence"
# words of `mask`: what the others are, calls say by arguments of their own
CALLED = tuple(word for word in words.MASKS if word not in (WINDOW, BY_SEQUENCE))
_SAID = {WINDOW: "window", BY_SEQUENCE: "causal as an int32 tensor"}

Window = int | tuple[int | None, int | None] | None


class Seen(NamedTuple):
    """A mask by its name, as problems and schedules have it, and what a kernel of it is given.

    The values are in the order of `Expression.given`, as an op takes them behind the scale.
    """

    mask: str
    values: tuple[Any, ...]
    by_sequence: tuple[str, ...]  # of each a name, where it has a number of each sequence


class _Known(NamedTuple):
    """What is worked out once of a mask, whatever its values: its name, and its arguments."""

    mask: str
    own: Mapping[str, Given]  # what `mask` is given by name
    order: tuple[str, ...]
    by_sequence: tuple[str, ...]


_known: dict[tuple[Any, ...], _Known] = {}  # by what is and-ed


def seen(
    function: Callable[..., Any],
    causal: Any,
    window: Any,
    mask: Any,
    given: Mapping[str, Any],
) -> Seen:
    """Return what a call says; `causal` is a truth, or a tensor of one for each sequence.

    Raises TypeError for a name that neither the call nor its mask has, ValueError for an argument
    that is missing or wrong, and for a mask that no kernel computes. Of tensors the op will say.
    """
    left, right = _ends(function, window, causal is True)
    known = _known_of(function, causal, (left, right), _own(function, mask, given), given)
    values = {name: _value(function, mask, name, known.own[name], given) for name in known.own}
    values |= {"window_left": left, "window_right": right, "causal_of": causal}
    return Seen(known.mask, tuple(values[name] for name in known.order), known.by_sequence)


def named(
    function: Callable[..., Any], causal: bool, window: Any, mask: Any, given: Mapping[str, Any]
) -> str:
    """Return the name of the mask that calls of some kind have, which give more than is known here.

    `mask` may be any word.  Raises as `seen` does, but not for what is missing.
    """
    ends = _ends(function, window, causal)
    own = str(mask) if isinstance(mask, str) and mask in _SAID else _own(function, mask, given)
    if own == WINDOW:  # causal is one end of it
        ends = OPEN, OPEN
    return _known_of(function, causal, ends, own, given).mask


def _known_of(
    function: Callable[..., Any],
    causal: Any,
    ends: tuple[int, int],
    own: str | Expression,
    given: Mapping[str, Any],
) -> _Known:
    parts = [] if isinstance(causal, bool) else [BY_SEQUENCE]
    if ends == (OPEN, 0):
        parts.append("causal")
    elif ends != (OPEN, OPEN):
        parts.append(WINDOW)
    key = *parts, own if isinstance(own, str) else own.key
    known = _known.get(key) or _known.setdefault(key, _resolved(function, parts, own))
    if unknown := [name for name in given if name not in known.own]:
        refuse_unknown_names(function, unknown)
    return known


def _ends(function: Callable[..., Any], window: Any, causal: bool) -> tuple[int, int]:
    """How far a window goes to the left and to the right; OPEN without one."""
    if window is None:
        return OPEN, 0 if causal else OPEN
    try:
        pair = isinstance(window, tuple | list)
        whole = tuple(map(_whole, window)) if pair else _whole(window)
        left, right = words.window(whole if pair else min(whole, OPEN), causal)
    except (ExpressionError, TypeError):
        _refuse(
            function,
            f"window is {shown(window)}; it must be a number of keys from 1 on, its own among "
            "them, or (left, right) from 0 on, both included, where None or -1 is open",
        )
    return left, right


def _whole(value: Any) -> Any:
    """A whole number of NumPy's as Python's; what is none stays."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _own(function: Callable[..., Any], mask: Any, given: Mapping[str, Any]) -> str | Expression:
    """What `mask` itself says: a word, or an expression."""
    if mask is None:
        return "full"
    if isinstance(mask, Expression):
        if mask.kind != "mask":
            _refuse(function, f"mask is the score {shown(mask.text)}; @fagen.mask makes masks")
        return mask
    if not isinstance(mask, str):
        if callable(mask):
            name = getattr(mask, "__name__", "it")
            _refuse(function, f"mask is a function as it is; write @fagen.mask above {name}")
        raise TypeError(
            f"mask is of type {type(mask).__name__}; it must be a word, a text, or what "
            "@fagen.mask makes of a function"
        )
    if mask in CALLED:
        return mask
    if mask in _SAID:
        _refuse(function, f'mask is "{mask}", which {_SAID[mask]} says: leave mask out')
    if re.fullmatch(r"\w*", mask) and mask not in ("True", "False"):
        near = near_word(mask, CALLED)
        mean = f"; did you mean {near}?" if near else ""
        listed = ", ".join(CALLED)
        _refuse(
            function,
            f"mask is {shown(mask)}; it must be one of {listed}, a text of q_pos and k_idx, or "
            f"what @fagen.mask makes of a function{mean}",
        )
    return _text(function, mask, given)


_texts: dict[tuple[Any, ...], Expression] = {}


def _text(function: Callable[..., Any], text: str, given: Mapping[str, Any]) -> Expression:
    """A text, whose arguments are of the types of what is given for them."""
    used = {*re.findall(r"[A-Za-z_]\w*", text)} & given.keys()
    types = tuple((name, _type_of(function, name, given[name])) for name in sorted(used))
    if expression := _texts.get((text, *types)):
        return expression
    try:
        scope = {name: parameter(check_name(name), type_) for name, type_ in types}
        return _texts.setdefault((text, *types), read("mask", text, scope))
    except ExpressionError as error:
        _refuse(function, f"mask: {error}")


def _type_of(function: Callable[..., Any], name: str, value: Any) -> str:
    """What a value of a text's argument shows of its type."""
    if hasattr(value, "shape"):
        _refuse(
            function,
            f"{name} is a tensor, and a text does not say over what; a function under @fagen.mask "
            f'does: {name}: fagen.Table("int32", "batch")',
        )
    if isinstance(value, bool) or not isinstance(value, int | float | Integral):
        raise TypeError(f"{name} is of type {type(value).__name__}; it must be a number")
    return FLOAT if isinstance(value, float) else INT


def _resolved(function: Callable[..., Any], parts: list[str], own: str | Expression) -> _Known:
    """The mask that several together are."""
    mask = words.MASKS[own].expression if isinstance(own, str) else own
    try:
        both = all_of(*(words.MASKS[part].expression for part in parts), mask)
        name = _name(both)
    except ExpressionError as error:
        _refuse(function, f"mask: {error}")
    given = words.MASKS[name].expression.given if name in words.MASKS else both.given
    own_given = {each.name: each for each in mask.given}
    by_sequence = (isinstance(x, Table) and x.over == ("batch",) for x in given)
    order = tuple(x.name for x in given)
    marks = tuple(name * is_one for name, is_one in zip(order, by_sequence, strict=True))
    return _Known(name, own_given, order, marks)


def _name(mask: Expression) -> str:
    """The word that shows the same keys, else what a text is called by."""
    shown_keys = ranges(mask)
    for word in words.MASKS.values():
        same = word.ranges.first == shown_keys.first and word.ranges.last == shown_keys.last
        if word.expression.key == mask.key or (same and {*word.expression.given} <= {*mask.given}):
            return word.name
    return f"mask{mask.key}"


def _value(
    function: Callable[..., Any], mask: Any, name: str, declared: Given, given: Mapping[str, Any]
) -> Any:
    """What is given for an argument of a mask, as a kernel takes it."""
    called = f'"{mask}"' if isinstance(mask, str) else (mask.called or "it")
    if name not in given:
        what = "a number" if isinstance(declared, Name) else "a tensor"
        _refuse(function, f"{name} is missing: mask = {called} takes {name}, {what} of each call")
    value = given[name]
    if isinstance(declared, Table):
        if not (hasattr(value, "shape") and hasattr(value, "is_cuda")):
            remedy = f"torch.tensor({name}, dtype=torch.{declared.type}, device=q.device)"
            raise ValueError(
                f"{function.__name__}: {name} is of type {type(value).__name__}; it must be a "
                f"torch.Tensor over ({declared.extents}) in {declared.type}: {remedy} makes one"
            )
        return value
    return _number(function, name, value, declared)


def _number(function: Callable[..., Any], name: str, value: Any, declared: Any) -> Any:
    """A parameter's value, between its ends; a symbol stays one."""
    if type(value).__name__ in ("SymInt", "SymFloat"):
        return value
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if (declared.type == INT and not is_whole) or not (is_whole or isinstance(value, float)):
        kind = "whole number" if declared.type == INT else "number"
        _refuse(function, f"{name} is {shown(value)}; it must be a {kind}")
    number = int(value) if declared.type == INT else float(value)
    if not declared.least <= number <= declared.most:
        bounds = f"{declared.least:g} … {declared.most:g}"
        if declared.type == INT:
            bounds = f"{declared.least} … {declared.most}"
        _refuse(function, f"{name} is {shown(value)}; it must be {bounds}")
    return number


def _refuse(function: Callable[..., Any], why: str) -> NoReturn:
    """Raise ValueError for what a call says of its mask."""
    raise ValueError(f"{function.__name__}: {why}") from None
