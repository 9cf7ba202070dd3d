"""A public call's arguments in; a TypeError in words out for one that is of another type.

What is taken, annotations say. Calls that have to be short ask only once they have failed, by an
exception that says nothing of a caller's arguments; those that take long anyway ask first. What
would be taken for something else without failing, `flag`, `number` and `whole` judge.
"""

import ctypes
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from inspect import get_annotations, signature
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from fagen.argument_names import refuse_unknown_names
from fagen.schedule import Schedule
from fagen.toml_lines import shown

# What a wrong argument may raise on its way before anyone names it, and what says too little.
_UNCLEAR = (AttributeError, IndexError, OverflowError, RuntimeError, TypeError)
FAILURES = (*_UNCLEAR, ValueError)

P = ParamSpec("P")
R = TypeVar("R")

# Above 0 and below this a float32 has fewer bits, and no finite reciprocal.
LEAST_NORMAL = 2.0**-126
_WIDEST = 63  # bits of a whole number, beside its sign


def _is_flag(value: Any) -> bool:
    return isinstance(value, Integral) or type(value).__name__ == "bool"  # NumPy's


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, Real | torch.SymInt | torch.SymFloat)


# What an annotation is in words, and what will do as one of it; as numbers symbols will too.
_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    Tensor: ("a torch.Tensor", lambda value: isinstance(value, Tensor)),
    bool: ("True or False", _is_flag),
    int: ("a whole number", lambda value: isinstance(value, Integral | torch.SymInt)),
    float: ("a number", _is_number),
    str: ("a word", lambda value: isinstance(value, str)),
    NoneType: ("None", lambda value: value is None),
    Sequence[int]: (
        "a sequence of whole numbers",
        lambda value: isinstance(value, Sequence) and all(_is(item, int) for item in value),
    ),
}


def names_types(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a call so that where it fails, an argument of another type is refused by its name.

    So is a keyword that the call does not have.

    A call itself takes longer by a quarter of a microsecond: the shortest ask by themselves.
    """
    parameters = signature(function).parameters
    names = tuple(parameters)
    is_open = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

    @wraps(function)
    def call(*args: P.args, **more: P.kwargs) -> R:
        try:
            return function(*args, **more)
        except FAILURES as error:
            if not is_open and more.keys() - names and isinstance(error, _UNCLEAR):
                refuse_unknown_names(function, [name for name in more if name not in names])
            # more arguments than there are names say so themselves
            explain(error, function, dict(zip(names, args, strict=False)) | more)
            raise

    return call


def explain(error: Exception, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise what names the argument for which a call has failed so; nothing where that is said.

    `arguments` are those of `function` by name, and there may be more.
    """
    (_refuse_unreadable_ones if isinstance(error, ValueError) else refuse_other_types)(
        function, arguments
    )


def refuse_other_types(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise TypeError for the first argument that is not of the type of its annotation.

    `arguments` are those of `function` by name, and there may be more; under `unknown` those that
    it does not have, which are refused. Raises ValueError for a tensor that no kernel can read: a
    sparse, nested, quantised or uninitialised one.
    """
    if is_compiling():  # torch says then what was raised
        return
    if arguments.get("unknown"):
        refuse_unknown_names(function, arguments["unknown"])
    for name, kinds in _annotated(function).items():
        if name not in arguments:
            continue
        value = arguments[name]
        if not any(_is(value, kind) for kind in kinds):
            types = " or ".join(map(_name, kinds))
            is_like_one = (
                Tensor in kinds and hasattr(value, "__len__") and not isinstance(value, str)
            )
            remedy = f"; torch.as_tensor({name}) makes one" if is_like_one else ""
            raise TypeError(
                f"{function.__name__}: {name} is of type {type(value).__name__}; it must be {types}"
                f"{remedy}"
            ) from None
        is_flag = bool in kinds and float not in kinds and int not in kinds
        if is_flag and not (value is None or isinstance(value, Tensor)):
            flag(name, value)
        if isinstance(value, int) and value.bit_length() > _WIDEST and float not in kinds:
            raise ValueError(
                f"{function.__name__}: {name} is {shown(value)}, too large for 64 bits"
            )
        if isinstance(value, Tensor):
            _refuse_unreadable(f"{function.__name__}: {name}", value)


def _refuse_unreadable_ones(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for the first tensor that no call could have judged, by its name.

    torch refuses to tell the shape of a parameter that is not initialised, and a nested tensor's is
    none that a message should name.
    """
    for name, value in () if is_compiling() else arguments.items():
        if isinstance(value, Tensor) and (torch.nn.parameter.is_lazy(value) or value.is_nested):
            _refuse_unreadable(f"{function.__name__}: {name}", value)


@cache
def _annotated(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """What each argument may be: the members of a union, or the one type."""
    hints = get_annotations(function, eval_str=True)
    for name in ("return", "unknown", "given"):
        hints.pop(name, None)
    return {name: _members(hint) for name, hint in hints.items()}


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is(value: Any, kind: Any) -> bool:
    """Whether a value will do as one of this type."""
    if kind in _KINDS:
        return _KINDS[kind][1](value)
    if get_origin(kind) in (Union, UnionType):
        return any(_is(value, member) for member in get_args(kind))
    parts = get_args(kind)
    if get_origin(kind) is Callable:
        return callable(value)
    if get_origin(kind) is tuple:
        is_like = isinstance(value, tuple | list) and len(value) == len(parts)
        return is_like and all(map(_is, value, parts))
    # a schedule of another kind is refused in words of its own
    return isinstance(value, Schedule if issubclass(kind, Schedule) else kind)


def _name(kind: Any) -> str:
    """A type in words."""
    if kind in _KINDS:
        return _KINDS[kind][0]
    if get_origin(kind) is Callable:
        return "a function"
    if get_origin(kind) is tuple:
        return f"a tuple of {len(get_args(kind))}"
    return f"a {kind.__module__.partition('.')[0]}.{kind.__qualname__}".replace("a pathlib.", "a ")


def _refuse_unreadable(named: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor that has no numbers at strides."""
    if torch.nn.parameter.is_lazy(tensor):
        raise ValueError(f"{named} is a parameter that is not initialised yet")
    if tensor.is_nested:
        raise ValueError(
            f"{named} is a nested tensor; attention_varlen takes sequences of several lengths, "
            "packed, with their offsets"
        )
    if tensor.layout != torch.strided:
        raise ValueError(f"{named} is {tensor.layout}; kernels read dense tensors: .to_dense()")
    if tensor.is_quantized:
        raise ValueError(f"{named} is {tensor.dtype}, which kernels do not read: .dequantize()")


def flag(name: str, value: Any) -> bool:
    """Return what was given for True or False as Python's bool: NumPy's, and 0 and 1, are such too.

    Raises TypeError for what is neither, ValueError for another number.
    """
    if not _is_flag(value):
        raise TypeError(f"{name} is of type {type(value).__name__}; it must be True or False")
    if value not in (0, 1):
        raise ValueError(f"{name} is {shown(value)}; it must be True or False")
    return bool(value)


def whole(name: str, value: Any, *, least: int = -(1 << _WIDEST), most: int | None = None) -> int:
    """Return what was given as a whole number as Python's int; a symbol stays one.

    Raises TypeError for what is none, ValueError beyond 64 bits or the bounds that are given.
    """
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[no-any-return]
    try:
        integer = operator.index(value)
    except (RuntimeError, TypeError):
        raise TypeError(
            f"{name} is of type {type(value).__name__}; it must be a whole number"
        ) from None
    if integer.bit_length() > _WIDEST:
        raise ValueError(f"{name} is {shown(integer)}, too large for 64 bits")
    if not least <= integer <= (integer if most is None else most):
        bounds = f"{least} or more" if most is None else f"{least} … {most}"
        raise ValueError(f"{name} is {integer}; it must be {bounds}")
    return integer


def refuse_order_alone(deterministic: bool, gradient: bool) -> None:
    """Raise ValueError where an order is asked for that only gradients lack."""
    if deterministic and not gradient:
        raise ValueError(
            "deterministic goes with gradient=True: the forward pass gives the same bits anyway"
        )


def refuse_negative(**sizes: int | None) -> None:
    """Raise ValueError for a size that is below 0."""
    for name, size in sizes.items():
        if size is not None and size < 0:
            raise ValueError(f"{name} is {size}; it must be 0 or more")


def number(name: str, value: Any) -> Any:
    """Return what was given as a number as Python's float; a symbol stays one.

    Raises TypeError for what is no number, ValueError for one that requires a gradient or is too
    large.
    """
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return value
    if not _is_number(value):
        raise TypeError(f"{name} is of type {type(value).__name__}; it must be a number")
    if isinstance(value, Tensor):
        if torch.is_grad_enabled() and value.requires_grad:
            raise ValueError(f"{name} requires a gradient, and has none: pass {name}.item()")
        return value.item()
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is beyond all floating-point numbers") from None


def positive(name: str, value: Any) -> float:
    """Return what was given as a number that is to be multiplied and divided by in fp32.

    Raises TypeError for no number, ValueError for one that as a float32 is not finite, not above 0,
    or too small to have a reciprocal.
    """
    factor = number(name, value)
    if isinstance(factor, float | int):
        as_float32 = ctypes.c_float(factor).value
        if not LEAST_NORMAL <= as_float32 < math.inf:
            raise ValueError(
                f"{name} is {factor:g}; it must be finite and above 0 as a float32, and at least "
                f"{LEAST_NORMAL:.3g}"
            )
    return factor  # type: ignore[no-any-return]


def refuse_tangents(*tensors: Tensor) -> None:
    """Raise ValueError where one carries a tangent: no op has forward-mode gradients.

    torch would take the tangent of what it does not know for zero.
    """
    for tensor in tensors:
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise ValueError(
                "a tensor has a tangent (torch.func.jvp, torch.autograd.forward_ad), and there "
                "are no forward-mode gradients; take torch.autograd.grad or backward()"
            )
