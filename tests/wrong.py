"""Tables of wrong arguments in, cases out: what is changed of a good call, and what is said of it.

    attention:
      q=q[0] -> q has 3 dimensions
      k=None, v=k
        -> what is said where it does not fit beside,
        -> and goes on
    quantize raises TypeError:

A change is Python, of keyword arguments; the good ones stand there by their names.
"""

import builtins
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fagen import errors
from fagen.e4m3 import by_columns, by_rows
from tests.tensors import ints, normal


def cases(table: str) -> list[Any]:
    """The cases of a table, as parameters: a call's name, a change, an error's type, words."""
    return [pytest.param(*case, id=f"{case[0]}: {case[1]}") for case in _cases(table)]


def _cases(table: str) -> Iterator[tuple[str, str, type[Exception], str]]:
    name = kind = ""
    for line in re.sub(r"\n +->", " ->", table).strip().splitlines():
        if line.startswith(" "):
            change, _, words = line.strip().partition(" -> ")
            error = getattr(errors, kind, None) or getattr(builtins, kind or "ValueError")
            yield name, change.strip(), error, words.strip().replace(" -> ", " ")
        elif line:
            name, _, kind = line.rstrip(":").partition(" raises ")


def changed(change: str, good: Mapping[str, Any]) -> dict[str, Any]:
    """A good call's arguments, changed so."""
    return {**good, **eval(f"dict({change})", {**NAMES, **good})}


def shifted(x: Tensor) -> Tensor:
    """A tensor that begins an element behind a multiple of 16 bytes."""
    return torch.zeros(x.numel() + 8).to(x.dtype)[1 : 1 + x.numel()].view(x.shape)


def strided(x: Tensor, *strides: int) -> Tensor:
    """A tensor of the same shape with these strides."""
    room = x.new_zeros(sum(s * n for s, n in zip(strides, x.shape, strict=True)) + 1)
    return room.as_strided(x.shape, strides)


def stepped(x: Tensor, dimension: int, more: int = 4) -> Tensor:
    """A tensor with a stride that is some elements longer."""
    strides = list(x.stride())
    strides[dimension] += more
    return strided(x, *strides)


def turned(x: Tensor, dim: int, other: int) -> Tensor:
    """The same numbers, with two dimensions in memory the other way round."""
    return x.transpose(dim, other).contiguous().transpose(dim, other)


def long(x: Tensor) -> Tensor:
    """A tensor of more rows than there may be, all of them one in memory."""
    return x[:, :1].expand(-1, (1 << 30) + 1, *[-1] * (x.dim() - 2))


NAMES: dict[str, Any] = {
    **vars(torch),
    **dict(ints=ints, normal=normal, torch=torch, by_columns=by_columns, by_rows=by_rows),
    **dict(E4M3=torch.float8_e4m3fn, half=torch.float16, float32=torch.float32),
    **dict(shifted=shifted, strided=strided, stepped=stepped, turned=turned, long=long),
}
