"""Write what parts declare as C++: a filter of the templates, `{{ declared | cpp(plan) }}`."""

from functools import singledispatch
from typing import Any

from fagen.arch import SM90
from fagen.part import (
    Amount,
    Argument,
    Array,
    Barrier,
    Constant,
    Divisor,
    Field,
    Ratio,
    Strided,
    Times,
    Union,
)


@singledispatch
def cpp(declared: Any, plan: Any) -> str:
    """Return what is declared as C++."""
    raise TypeError(f"{declared!r} is nothing that a part declares")


def constant_name(size: str) -> str:
    """Return what a kernel calls a size: kBlockM of block_m."""
    return "k" + "".join(word.capitalize() for word in size.split("_"))


@cpp.register
def _(amount: Amount, plan: Any) -> str:
    words = [_factor(factor) for factor in amount.factors]
    text = " * ".join(words) + "".join(f" / {_factor(factor)}" for factor in amount.per)
    return f"{text} + {amount.plus}" if amount.plus else text


def _factor(factor: str | int) -> str:
    return str(factor) if isinstance(factor, int) else constant_name(factor)


@cpp.register
def _(constant: Constant, plan: Any) -> str:
    number = getattr(plan, constant.field)
    of_float = isinstance(number, float)
    name = constant.type.name if constant.type else "float" if of_float else "int"
    note = f"  // {constant.note}" if constant.note else ""
    suffix = "f" if of_float else ""
    return f"constexpr {name} {constant_name(constant.field)} = {number}{suffix};{note}"


@cpp.register
def _(array: Array, plan: Any) -> str:
    return _member(array, array.type.name, plan)


@cpp.register
def _(barrier: Barrier, plan: Any) -> str:
    return _member(barrier, "TransactionBarrier" if barrier.transactions else "Barrier", plan)


def _member(member: Array | Barrier, type_name: str, plan: Any) -> str:
    alignment = f"alignas({SM90.smem_tile_alignment}) " if member.aligned else ""
    dims = "".join(f"[{cpp(dim, plan)}]" for dim in member.dims)
    note = f"  // {member.note}" if member.note else ""
    return f"{alignment}{type_name} {member.name}{dims};{note}"


@cpp.register
def _(union: Union, plan: Any) -> str:
    lines = "\n".join(cpp(array, plan) for array in union.arrays)
    return f"union {{  // {union.note}\n{lines}\n}};"


@cpp.register
def _(field: Field, plan: Any) -> str:
    return f"{field.type.name} {field.name};" + (f"  // {field.note}" if field.note else "")


def filled(field: Field, plan: Any) -> str:
    """Return the value that the launcher fills a member of Params with."""
    text = cpp(field.value, plan)
    return f"static_cast<{field.type.name}>({text})" if field.type.pointer else text


@cpp.register
def _(argument: Argument, plan: Any) -> str:
    return f"a.{argument.name}"


@cpp.register
def _(ratio: Ratio, plan: Any) -> str:
    return f"a.{ratio.of} / a.{ratio.by}"


@cpp.register
def _(divisor: Divisor, plan: Any) -> str:
    return f"FastDivisor({cpp(divisor.value, plan)})"


@cpp.register
def _(times: Times, plan: Any) -> str:
    return f"a.{times.of} * {times.number}f"


@cpp.register
def _(strided: Strided, plan: Any) -> str:
    name, strides = strided.tensor, plan.signature.tensor(strided.tensor).strides
    fields = ", ".join(f"a.{name}_stride_{stride}" for stride in strides)
    return f"{{static_cast<const float*>(a.{name}), {fields}}}"
