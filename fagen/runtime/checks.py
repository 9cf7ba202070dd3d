"""A Signature and the arguments of a call in, the call's named sizes out, or a ValueError in words.

The torch binding makes the same checks in C++, with the same words: templates/binding/checks.j2.
Without data, as in tracing, addresses are not looked at and sizes may be symbols.
"""

import ctypes
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fagen.kind import Plan
from fagen.signature import Multiple, Scalar, Signature
from fagen.signature import Tensor as Expected
from fagen.statuses import ALIGNMENT

Sizes = dict[str, Any]
Hold = Callable[[Any, Callable[[], str]], None]  # a condition; what is said where it is not met


def checked(plan: Plan, given: Mapping[str, Any], *, have_data: bool = True) -> Sizes:
    """Return the named sizes of a call of the Plan's kernel.

    `given` are the op's arguments by name, what may be left out None or missing. Raises ValueError
    that names the argument, in words that begin with the op.
    """
    signature = plan.signature
    hold = _holding(plan.slug)
    sizes: Sizes = {}
    leader = given.get(signature.leader.name)
    for expected in signature.inputs:
        tensor = given.get(expected.name)
        if tensor is None:
            needed = expected.missing or not expected.may_be_none
            why = f"; {expected.missing}" if expected.missing else ""
            hold(not needed, lambda e=expected, why=why: f"{e.name} is missing{why}")  # type: ignore[misc]
            continue
        hold(not expected.refused, lambda e=expected: f"{e.name}: {e.refused}")  # type: ignore[misc]
        _check(hold, signature, expected, tensor, leader, sizes, have_data=have_data)
    _check_groups(hold, signature, given)
    for rule in signature.rules:
        _check_rule(hold, rule, sizes)
    hold(all(limit.allows(sizes) for limit in signature.counts), lambda: signature.too_many)
    for scalar in signature.numbers:
        _check_scalar(hold, scalar, given.get(scalar.name, scalar.default))
    return sizes


def check_outputs(plan: Plan, given: Mapping[str, Any], sizes: Sizes) -> None:
    """Check tensors that a call is to write, as `checked` checks what it reads.

    One that is omittable may be missing, and one that is made where it is given.
    """
    hold, leader = _holding(plan.slug), given[plan.signature.leader.name]
    for expected in plan.signature.outputs:
        tensor = given.get(expected.result)
        if tensor is not None:
            _check(hold, plan.signature, expected, tensor, leader, sizes, have_data=True)
        elif not (expected.made and given.get(expected.name) is not None):
            hold(expected.omittable, lambda e=expected: f"{e.result} is missing")  # type: ignore[misc]


def refuse_unknown(plan: Plan, given: Mapping[str, Any]) -> None:
    """Raise ValueError where a name is none of an argument or a result."""
    signature = plan.signature
    names = [one.name for one in signature.arguments]
    names += [tensor.result for tensor in signature.outputs]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ValueError(
            f"fagen::{plan.slug}: it takes no {', '.join(unknown)}; it takes {', '.join(names)}"
        )


def allocated(plan: Plan, given: Mapping[str, Any], sizes: Sizes) -> tuple[Tensor, ...]:
    """Return the outputs of a call, without numbers; one that was given is empty instead."""
    leader: Tensor = given[plan.signature.leader.name]
    made = []
    for expected in plan.signature.outputs:
        shape = tuple(dim.extent.at(sizes) for dim in expected.dims)
        if expected.made and given.get(expected.name) is not None:
            shape = (0,)
        made.append(leader.new_empty(shape, dtype=getattr(torch, expected.dtype.torch)))
    return tuple(made)


def shape_of(tensor: Tensor) -> str:
    """Return a tensor's shape, to be printed."""
    return f"({', '.join(map(str, tensor.shape))})"


def _holding(slug: str) -> Hold:
    """Return what raises ValueError, in words that begin with the op, unless a condition holds."""

    def hold(condition: Any, said: Callable[[], str]) -> None:
        # torch._check_value: a symbolic condition becomes a guard or an assertion of the graph
        torch._check_value(condition, lambda: f"fagen::{slug}: {said()}")

    return hold


def _check(
    hold: Hold,
    signature: Signature,
    expected: Expected,
    tensor: Tensor,
    leader: Any,
    sizes: Sizes,
    *,
    have_data: bool,
) -> None:
    """Check one tensor; the sizes that it is the first to have are added to `sizes`."""
    name, shape = expected.name, tensor.shape
    known = dict(sizes)

    def wrong_shape() -> str:
        return f"{name} has shape {shape_of(tensor)}; it must be {_wanted(expected, known)}"

    hold(len(shape) == len(expected.dims), wrong_shape)
    for size, dim in zip(shape, expected.dims, strict=True):
        if dim.extent.plain:
            sizes.setdefault(dim.extent.name, size)
    for size, dim in zip(shape, expected.dims, strict=True):
        right = size == dim.extent.at(sizes)
        hold((right | (size == 1)) if dim.broadcast else right, wrong_shape)
    hold(
        tensor.dtype == getattr(torch, expected.dtype.torch),
        lambda: f"{name} is not {expected.dtype.torch}, which this kernel takes; {expected.remedy}",
    )
    most = signature.most
    for size, dim in zip(shape, expected.dims, strict=True):
        if dim.extent.plain and dim.extent.name not in known:
            hold(
                # a bound on a symbol would be one more demand on whoever exports
                not isinstance(size, int) or size <= most[dim.extent.name],
                lambda d=dim, s=size: (  # type: ignore[misc]
                    f"{name} has {d.extent.name} = {s}; it may be {most[d.extent.name]} at most"
                ),
            )
    _check_strides(hold, expected, tensor)
    if have_data and expected.aligned:
        hold(
            tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT == 0,
            lambda: (
                f"{name} does not begin at a multiple of {ALIGNMENT} bytes; {name}.clone() does"
            ),
        )
    first = signature.leader.name
    hold(
        tensor.device == leader.device,
        lambda: f"{name} is not on the device of {first}; {name}.to({first}.device) moves it there",
    )


def _wanted(expected: Expected, known: Sizes) -> str:
    """Return a tensor's dimensions in words, with the sizes that earlier tensors have."""
    said = []
    for dim in expected.dims:
        extent = dim.extent
        value = f" = {extent.at(known)}" if extent.name and extent.name in known else ""
        said.append(f"{extent}{value}{' or 1' if dim.broadcast else ''}")
    return f"({', '.join(said)})"


def _check_strides(hold: Hold, expected: Expected, tensor: Tensor) -> None:
    name, strides = expected.name, tensor.stride()
    step = expected.step
    # the contiguous ones first: of a transposed tensor the others say less
    for i, dim in sorted(enumerate(expected.dims), key=lambda numbered: bool(numbered[1].stride)):
        # the stride of a dimension of one element is never stepped along, nor any of no elements
        unused = (tensor.shape[i] <= 1) | (tensor.numel() == 0)
        if not dim.stride:
            hold(
                unused | (strides[i] == 1),
                lambda i=i: (  # type: ignore[misc]
                    f"{name} has stride {strides[i]} in dimension {i}, which must be 1; "
                    f"{name}.contiguous() makes it so"
                ),
            )
        elif step > 1:
            hold(
                unused | (strides[i] % step == 0),
                lambda i=i: (  # type: ignore[misc]
                    f"{name} has stride {strides[i]} in dimension {i}, which must be a multiple of "
                    f"{step} elements ({ALIGNMENT} bytes); {name}.contiguous() makes it so"
                ),
            )
        if expected.max_stride and dim.stride:
            hold(
                unused | (strides[i] <= expected.max_stride),
                lambda i=i: (  # type: ignore[misc]
                    f"{name} has stride {strides[i]} in dimension {i}, which must not exceed "
                    f"{expected.max_stride}; {name}.contiguous() makes it so"
                ),
            )


def _check_groups(hold: Hold, signature: Signature, given: Mapping[str, Any]) -> None:
    """Tensors of one group are given together."""
    for tensors in signature.groups.values():
        names = [tensor.name for tensor in tensors]
        there = [name for name in names if given.get(name) is not None]
        hold(
            len(there) in (0, len(names)),
            lambda n=names, t=there: f"{' and '.join(n)} go together; only {', '.join(t)} is given",  # type: ignore[misc]
        )


def _check_rule(hold: Hold, rule: Multiple, sizes: Sizes) -> None:
    of, by = sizes[rule.of], sizes[rule.by]
    hold(
        of == 0 if by == 0 else of % by == 0,
        lambda: f"{rule.of} = {of} must be a multiple of {rule.by} = {by}",
    )


def _check_scalar(hold: Hold, scalar: Scalar, value: Any) -> None:
    hold(value is not None, lambda: f"{scalar.name} is missing")
    # a symbol is checked when it has a value
    if scalar.positive and isinstance(value, float | int):
        as_float32 = ctypes.c_float(value).value
        said = f"{value:g}" if scalar.type == "float" else f"{value}"
        hold(
            math.isfinite(as_float32) and 0 < as_float32 <= (scalar.most or math.inf),
            lambda: f"{scalar.name} is {said}; it must be {scalar.demand}",
        )
