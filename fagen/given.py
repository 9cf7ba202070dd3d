"""What calls give to a mask or a score by name: the types that a text's have, and values, checked.

Needs no torch, for `pick` asks too; torch.compile traces it.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any

from fagen.errors import ExpressionError
from fagen.expr.canonical import Expression
from fagen.expr.declare import check_name, parameter
from fagen.expr.parse import read
from fagen.expr.tree import FLOAT, INT, Name, Table
from fagen.expr.words import Word
from fagen.toml_lines import shown

# an argument: its name, its type, least and most of a number, or of a tensor over what
Argument = tuple[str, str, Any, Any, str]
Types = tuple[tuple[str, str], ...]

_NAME = re.compile(r"[A-Za-z_]\w*")

# what users have said by texts or functions, by the names that schedules have for it
SAID: dict[str, Expression] = {}


def arguments(expression: Expression) -> tuple[Argument, ...]:
    """Return what a mask or a score is given."""
    return tuple(map(_argument, expression.given))


def _argument(given: Name | Table) -> Argument:
    if isinstance(given, Table):
        return given.name, given.type, None, None, given.extents
    return given.name, given.type, given.least, given.most, ""


# ---- texts ---------------------------------------------------------------------------------------


def refuse_other_types(function: Callable[..., Any], kind: str, said: Any) -> None:
    """Raise what refuses an argument that says no mask, or no score."""
    if said is None or isinstance(said, str | Expression):
        return
    if callable(said):
        raise refused(function, f"{kind} is a function; write @fagen.{kind} above {said.__name__}")
    raise TypeError(
        f"{function.__name__}: {kind} is of type {type(said).__name__}; it must be a word, a text, "
        f"or what @fagen.{kind} makes of a function"
    )


def types_of(function: Callable[..., Any], kind: str, text: str, given: Mapping[str, Any]) -> Types:
    """Return what values show of the types of a text's arguments."""
    names = {*_NAME.findall(text)}
    return tuple(
        [
            (name, _type_of(function, kind, name, value))
            for name, value in given.items()
            if name in names
        ]
    )


def _type_of(function: Callable[..., Any], kind: str, name: str, value: Any) -> str:
    if hasattr(value, "shape"):
        raise refused(
            function,
            f"{name} is a tensor, and a text does not say over what; a function under "
            f'@fagen.{kind} does: {name}: fagen.Table("int32", "batch")',
        )
    if isinstance(value, bool) or not isinstance(value, float | Integral):
        raise refused(function, f"{name} is {shown(value)}; it must be a number")
    return FLOAT if isinstance(value, float) else INT


def read_text(kind: str, text: str, types: Types) -> Expression:
    """Return what a text says, of arguments of these types.  Raises ExpressionError."""
    return read(kind, text, {name: parameter(check_name(name), type_) for name, type_ in types})


def declared(
    expression: Expression, name: str, own: Collection[Any], usual: Callable[..., Any]
) -> tuple[Word, tuple[str, ...]]:
    """Return a text as kernels know it, and the names of what it is given in the order of an op.

    What a user has named goes by other names in kernels, which C++ has for nothing else, but for
    what is among `own`; `usual` is told these, and two lengths.
    """
    kind = expression.kind
    SAID.setdefault(name, expression)
    called = {x.name: x.name if x in own else f"{kind}_{x.name}" for x in expression.given}
    text = _NAME.sub(lambda found: called.get(found[0], found[0]), expression.text)
    given = tuple(replace(x, name=called[x.name]) for x in expression.given)
    word = Word(name, kind, text, "a text of a call", given, usual=partial(usual, called))
    back = {called[x.name]: x.name for x in expression.given}
    return word, tuple(back[x.name] for x in word.expression.given)


# ---- values --------------------------------------------------------------------------------------


def value(
    function: Callable[..., Any], kind: str, argument: Argument, given: Mapping[str, Any]
) -> Any:
    """Return what is given for an argument of a mask or a score, as a kernel takes it."""
    name, type_, _, _, extents = argument
    if name not in given:
        what = f"{type_}, a tensor over ({extents})" if extents else f"one number, {type_}"
        raise refused(function, f"{name} is missing, which the {kind} takes: {what}")
    one = given[name]
    if not extents:
        return number(function, one, argument)
    if not hasattr(one, "is_cuda"):
        raise refused(
            function,
            f"{name} is of type {type(one).__name__}; it must be a torch.Tensor over "
            f"({extents}): torch.tensor({name}, dtype=torch.{type_}, device=q.device) makes one",
        )
    return one


def number(function: Callable[..., Any], said: Any, argument: Argument) -> Any:
    """Return a parameter's value, between its ends."""
    name, type_, least, most, _ = argument
    one = whole(said)
    is_right = is_whole(one) or (type_ == FLOAT and isinstance(one, float))
    if not (is_right and least <= one <= most):
        kind = "a whole number" if type_ == INT else "a number"
        raise refused(
            function, f"{name} is {shown(said)}; it must be {kind} from {least:g} to {most:g}"
        )
    return float(one) if type_ == FLOAT else one


def is_whole(said: Any) -> bool:
    """Whether it is one of Python's whole numbers, and no truth."""
    return isinstance(said, int) and not isinstance(said, bool)


def whole(said: Any) -> Any:
    """Return a whole number of NumPy's as Python's; all else stays."""
    if isinstance(said, int) or not isinstance(said, Integral):
        return said
    return int(said)


def refused(function: Callable[..., Any], why: str) -> ValueError:
    """Return what to raise of what a call says of its mask or score."""
    return ValueError(f"{function.__name__}: {why}")


def outcome(
    kind: str, work: Callable[[], tuple[Any, ...]], nothing: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return "" and what is worked out of a mask or a score; or what refuses it, and `nothing`."""
    try:
        return "", *work()
    except ExpressionError as error:
        return sentence(kind, error), *nothing
    except ValueError as error:
        return str(error), *nothing


def sentence(kind: str, error: ExpressionError) -> str:
    """Return in words what is wrong with a text or a function."""
    return f"{kind}: {error}" if error.sentence else str(error)
