"""A public call's arguments in; a TypeError in words out for one that is of another type.

What is taken, annotations say. Calls that have to be short ask only once they have failed, by an
exception that says nothing of a caller's arguments; those that take long anyway ask first.
"""

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

from fagen.schedule import Schedule

# What a wrong argument may raise on its way before anyone names it.
UNCLEAR = (AttributeError, IndexError, OverflowError, RuntimeError, TypeError)

P = ParamSpec("P")
R = TypeVar("R")

_SAID = {
    Tensor: "a torch.Tensor",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a word",
    NoneType: "None",
}


def names_types(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a call so that where it fails, an argument of another type is refused by its name.

    A call itself takes longer by a quarter of a microsecond: the shortest ask by themselves.
    """
    names = tuple(signature(function).parameters)

    @wraps(function)
    def call(*args: P.args, **more: P.kwargs) -> R:
        try:
            return function(*args, **more)
        except UNCLEAR:
            # more arguments than there are names say so themselves
            refuse_other_types(function, dict(zip(names, args, strict=False)) | more)
            raise

    return call


def refuse_other_types(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise TypeError for the first argument that is not of the type of its annotation.

    `given` are those of `function` by name, and there may be more. Raises ValueError for a tensor
    that no kernel can read: a sparse, nested, quantised or uninitialised one.
    """
    if is_compiling():  # torch says then what was raised
        return
    for name, wanted in _wanted(function).items():
        if name not in given:
            continue
        value = given[name]
        if not any(_is(value, kind) for kind in wanted):
            said = " or ".join(_SAID.get(kind, _name(kind)) for kind in wanted)
            made = Tensor in wanted and hasattr(value, "__len__") and not isinstance(value, str)
            remedy = f"; torch.as_tensor({name}) makes one" if made else ""
            raise TypeError(
                f"{function.__name__}: {name} is of type {type(value).__name__}; it must be {said}"
                f"{remedy}"
            ) from None
        if isinstance(value, int) and value.bit_length() > 63 and float not in wanted:
            raise ValueError(f"{function.__name__}: {name} is {value}, too large for 64 bits")
        if isinstance(value, Tensor):
            _refuse_unreadable(f"{function.__name__}: {name}", value)


@cache
def _wanted(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """What each argument may be: the members of a union, or the one type."""
    hints = get_annotations(function, eval_str=True)
    hints.pop("return", None)
    return {name: get_args(hint) if _is_union(hint) else (hint,) for name, hint in hints.items()}


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _is(value: Any, kind: Any) -> bool:
    """Whether a value will do as one of this type; as numbers also symbols, and Python's likes."""
    origin = get_origin(kind)
    if origin is Callable:
        return callable(value)
    if origin is Sequence:
        (of,) = get_args(kind)
        return isinstance(value, Sequence) and all(_is(each, of) for each in value)
    if origin is tuple:
        parts = get_args(kind)
        right = isinstance(value, tuple | list) and len(value) == len(parts)
        return right and all(map(_is, value, parts))
    if kind is bool:
        return isinstance(value, bool | int) or type(value).__name__ == "bool"  # NumPy's
    if kind is int:
        return isinstance(value, Integral | torch.SymInt)
    if kind is float:
        return isinstance(value, Real | torch.SymInt | torch.SymFloat) or _is_number(value)
    if issubclass(kind, Schedule):  # one of another kind is refused in words of its own
        kind = Schedule
    return isinstance(value, kind)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex()


def _name(kind: Any) -> str:
    if get_origin(kind) is Sequence:
        return "a sequence of whole numbers"
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


def refuse_no_bool(name: str, value: Any) -> None:
    """Raise TypeError where a word, say, would be taken for True."""
    if not _is(value, bool):
        raise TypeError(f"{name} is of type {type(value).__name__}; it must be True or False")


def flag(name: str, value: Any) -> bool:
    """Return what was given for True or False as Python's bool.  Raises TypeError for neither."""
    refuse_no_bool(name, value)
    return bool(value)


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
    if not _is(value, float):
        raise TypeError(f"{name} is of type {type(value).__name__}; it must be a number")
    if isinstance(value, Tensor):
        if torch.is_grad_enabled() and value.requires_grad:
            raise ValueError(f"{name} requires a gradient, and has none: pass {name}.item()")
        return value.item()
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is beyond all floating-point numbers") from None


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
