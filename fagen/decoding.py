"""Read records out of JSON: a dataclass and a value go in, the record comes out or is refused.

What is read may have been cut, written by another fagen, or by somebody who wants to see this one
fall. So nothing is taken that is not of its type: text is a line that a terminal can show, numbers
are finite and not negative, and a record has exactly its fields.
"""

import json
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from fagen.toml_lines import dotted

Record = TypeVar("Record")
Reader = Callable[[Any, str, int], Any]  # a value, its name for messages, the longest text

COUNTS = 1 << 63  # all whole numbers are below
ABOVE_ZERO = "above 0"
Divisor = Annotated[float, ABOVE_ZERO]  # what others are set in relation to


def decoded(record: type[Record], value: Any, *, longest: int = 1 << 20, **types: Any) -> Record:
    """Return the record that a value out of JSON is; `types` stand for those of some fields.

    No text has more than `longest` characters. Raises ValueError, which names what is wrong.
    """
    kind: Any = record
    declared = _fields(kind)
    if not isinstance(value, dict) or value.keys() != declared.keys():
        odd = sorted(value.keys() ^ declared) if isinstance(value, dict) else [type(value).__name__]
        names = textwrap.shorten(", ".join(dotted((name,)) for name in odd), 300, placeholder=" …")
        raise ValueError(f"{record.__name__} has missing or unknown fields: {names}")
    return record(
        **{
            name: _reader(types.get(name, kind))(value[name], name, longest)
            for name, kind in declared.items()
        }
    )


def is_line(value: Any, longest: int = 500) -> bool:
    """Whether a value is a line of text that a terminal can show, quoted as it is."""
    return isinstance(value, str) and value.isprintable() and len(value) <= longest


@cache
def _fields(record: Any) -> dict[str, Any]:
    hints = get_type_hints(record, include_extras=True)
    return {field.name: hints[field.name] for field in fields(record)}


@cache  # thousands of records are read for a list of all kernels
def _reader(kind: Any) -> Reader:
    """Return what takes a value of this type, and raises ValueError for any other."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType and NoneType in parts:
        (other,) = (_reader(part) for part in parts if part is not NoneType)
        return lambda value, *how: None if value is None else other(value, *how)
    if origin is tuple:
        return _of_type(list, _items(_reader(parts[0])))
    if origin is Mapping:
        return _of_type(dict, _entries(_reader(str), _reader(parts[1])))
    if isinstance(kind, type) and is_dataclass(kind):
        return lambda value, name, longest: decoded(kind, value, longest=longest)
    return _scalar(kind)


def _of_type(kind: type, read: Reader) -> Reader:
    def reader(value: Any, name: str, longest: int) -> Any:
        return read(value, name, longest) if isinstance(value, kind) else _refuse(value, name)

    return reader


def _items(read: Reader) -> Reader:
    return lambda value, *how: tuple(read(item, *how) for item in value)


def _entries(read_key: Reader, read: Reader) -> Reader:
    return lambda value, *how: {read_key(key, *how): read(x, *how) for key, x in value.items()}


def _scalar(declared: Any) -> Reader:
    least_is_open = ABOVE_ZERO in get_args(declared)
    kind = float if least_is_open else declared

    def reader(value: Any, name: str, longest: int) -> Any:
        value_type = type(value)
        if kind is str or kind is bool:
            good = is_line(value, longest) if kind is str else value_type is bool
        else:
            good = value_type is kind or (kind is float and value_type is int)
            good = good and 0 <= value < (COUNTS if value_type is int else math.inf)
            good = good and not (least_is_open and value == 0)
        if not good:
            _refuse(value, name)
        return float(value) if kind is float else value

    return reader


def _refuse(value: Any, name: str) -> None:
    raise ValueError(f"{name} is {json.dumps(value)[:40]}")
