"""A Signature and the arguments of a call in, the call's named sizes out, or a ValueError in words.

The torch binding makes the same checks in C++, with the same words: templates/binding/checks.j2.
Without data, as in tracing, addresses are not looked at and sizes may be symbols.
"""

import ctypes
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fagen.kind import Plan
from fagen.signature import Signature
from fagen.signature import Tensor as Expected
from fagen.statuses import ALIGNMENT

Sizes = dict[str, Any]
Conditions = Iterator[tuple[Any, str]]  # what must hold, in order; what is said where it does not


def checked(plan: Plan, call: Mapping[str, Any], *, have_data: bool = True) -> Sizes:
    """Return the named sizes of a call of the Plan's kernel.

    `call` has the op's arguments by name, what may be left out None or missing. Raises ValueError
    that names the argument, in words that begin with the op.
    """
    sizes: Sizes = {}
    _hold(plan, _of_inputs(plan.signature, call, sizes, have_data=have_data))
    return sizes


def check_outputs(plan: Plan, call: Mapping[str, Any], sizes: Sizes) -> None:
    """Check tensors that a call is to write, as `checked` checks what it reads.

    One that is omittable may be missing, and one that is made where it is given.
    """
    _hold(plan, _of_outputs(plan.signature, call, sizes))


def refuse_unknown(plan: Plan, call: Mapping[str, Any]) -> None:
    """Raise ValueError where a name is none of an argument or a result."""
    signature = plan.signature
    names = [argument.name for argument in signature.arguments]
    names += [tensor.result for tensor in signature.outputs]
    unknown = [name for name in call if name not in names]
    if unknown:
        raise ValueError(
            f"fagen::{plan.slug}: it takes no {', '.join(unknown)}; it takes {', '.join(names)}"
        )


def allocated(plan: Plan, call: Mapping[str, Any], sizes: Sizes) -> tuple[Tensor, ...]:
    """Return the outputs of a call, without numbers; one that was given is empty instead."""
    leader: Tensor = call[plan.signature.leader.name]
    outputs = []
    for expected in plan.signature.outputs:
        shape = tuple(dim.extent.at(sizes) for dim in expected.dims)
        if expected.made and call.get(expected.name) is not None:
            shape = (0,)
        outputs.append(leader.new_empty(shape, dtype=getattr(torch, expected.dtype.torch)))
    return tuple(outputs)


def shape_of(tensor: Tensor) -> str:
    """Return a tensor's shape, to be printed."""
    return f"({', '.join(map(str, tensor.shape))})"


def _hold(plan: Plan, conditions: Conditions) -> None:
    """Raise ValueError, in words that begin with the op, unless all conditions hold."""
    for condition, message in conditions:
        # torch._check_value: a symbolic condition becomes a guard or an assertion of the graph
        torch._check_value(condition, lambda text=message: f"fagen::{plan.slug}: {text}")


def _of_inputs(
    signature: Signature, call: Mapping[str, Any], sizes: Sizes, *, have_data: bool
) -> Conditions:
    leader = call.get(signature.leader.name)
    for expected in signature.inputs:
        tensor = call.get(expected.name)
        if tensor is None:
            why = f"; {expected.missing}" if expected.missing else ""
            is_needed = expected.missing or not expected.may_be_none
            yield not is_needed, f"{expected.name} is missing{why}"
        else:
            yield not expected.refused, f"{expected.name}: {expected.refused}"
            yield from _of_tensor(signature, expected, tensor, leader, sizes, have_data=have_data)
    for tensors in signature.groups.values():
        names = [tensor.name for tensor in tensors]
        present = [name for name in names if call.get(name) is not None]
        message = f"{' and '.join(names)} go together; only {', '.join(present)} is given"
        yield len(present) in (0, len(names)), message
    for rule in signature.rules:
        dividend, divisor = sizes[rule.size], sizes[rule.by]
        message = f"{rule.size} = {dividend} must be a multiple of {rule.by} = {divisor}"
        yield (dividend == 0 if divisor == 0 else dividend % divisor == 0), message
    yield all(limit.allows(sizes) for limit in signature.counts), signature.too_many
    for scalar in signature.numbers:
        value = call.get(scalar.name, scalar.default)
        yield value is not None, f"{scalar.name} is missing"
        if scalar.least is not None and isinstance(value, float | int):
            is_right = isinstance(value, int) and scalar.least <= value <= (scalar.most or 0)
            yield is_right, f"{scalar.name} is {value}; it must be {scalar.demand}"
        # a symbol is checked when it has a value
        if scalar.positive and isinstance(value, float | int):
            as_float32 = ctypes.c_float(value).value
            is_right = math.isfinite(as_float32) and 0 < as_float32 <= (scalar.most or math.inf)
            shown = f"{value:g}" if scalar.type == "float" else f"{value}"
            yield is_right, f"{scalar.name} is {shown}; it must be {scalar.demand}"


def _of_outputs(signature: Signature, call: Mapping[str, Any], sizes: Sizes) -> Conditions:
    leader = call[signature.leader.name]
    for expected in signature.outputs:
        tensor = call.get(expected.result)
        if tensor is not None:
            yield from _of_tensor(signature, expected, tensor, leader, sizes, have_data=True)
        elif not (expected.made and call.get(expected.name) is not None):
            yield expected.omittable, f"{expected.result} is missing"


def _of_tensor(
    signature: Signature,
    expected: Expected,
    tensor: Tensor,
    leader: Any,
    sizes: Sizes,
    *,
    have_data: bool,
) -> Conditions:
    """What must hold of one tensor; the sizes that it is the first to have are added to `sizes`."""
    name, shape, known_sizes = expected.name, tensor.shape, dict(sizes)
    wrong_shape = f"{name} has shape {shape_of(tensor)}; it must be {_shape(expected, known_sizes)}"
    yield len(shape) == len(expected.dims), wrong_shape
    for size, dim in zip(shape, expected.dims, strict=True):
        if dim.extent.plain:
            sizes.setdefault(dim.extent.name, size)
    for size, dim in zip(shape, expected.dims, strict=True):
        is_right = size == dim.extent.at(sizes)
        yield (is_right | (size == 1)) if dim.broadcast else is_right, wrong_shape
    dtype = expected.dtype.torch
    message = f"{name} is not {dtype}, which this kernel takes; {expected.remedy}"
    yield tensor.dtype == getattr(torch, dtype), message
    for size, dim in zip(shape, expected.dims, strict=True):
        size_name = dim.extent.name
        # a bound on a symbol would be one more demand on whoever exports
        if dim.extent.plain and size_name not in known_sizes and isinstance(size, int):
            most = signature.most[size_name]
            yield size <= most, f"{name} has {size_name} = {size}; it may be {most} at most"
    yield from _of_strides(expected, tensor)
    if have_data and expected.aligned:
        yield (
            tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT == 0,
            f"{name} does not begin at a multiple of {ALIGNMENT} bytes; {name}.clone() does",
        )
    first = signature.leader.name
    message = f"{name} is not on the device of {first}; {name}.to({first}.device) moves it there"
    yield tensor.device == leader.device, message


def _shape(expected: Expected, known_sizes: Sizes) -> str:
    """A tensor's dimensions in words, with the sizes that earlier tensors have."""
    dims = []
    for dim in expected.dims:
        extent = dim.extent
        value = f" = {extent.at(known_sizes)}" if extent.name and extent.name in known_sizes else ""
        dims.append(f"{extent}{value}{' or 1' if dim.broadcast else ''}")
    return f"({', '.join(dims)})"


def _of_strides(expected: Expected, tensor: Tensor) -> Conditions:
    name, step, most = expected.name, expected.step, expected.max_stride
    # the contiguous ones first: of a transposed tensor the others say less
    for i, dim in sorted(enumerate(expected.dims), key=lambda numbered: bool(numbered[1].stride)):
        stride = tensor.stride(i)
        # the stride of a dimension of one element is never stepped along, nor any of no elements
        is_unused = (tensor.shape[i] <= 1) | (tensor.numel() == 0)
        demands: list[tuple[Any, str]] = []
        if not dim.stride:
            demands.append((stride == 1, "be 1"))
        elif step > 1:
            multiple = f"be a multiple of {step} elements ({ALIGNMENT} bytes)"
            demands.append((stride % step == 0, multiple))
        if most and dim.stride:
            demands.append((stride <= most, f"not exceed {most}"))
        for is_right, demand in demands:
            yield (
                is_unused | is_right,
                f"{name} has stride {stride} in dimension {i}, which must {demand}; "
                f"{name}.contiguous() makes it so",
            )
