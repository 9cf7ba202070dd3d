"""What a call gives to a mask or a score: parameters and tables, checked as they are declared."""

import keyword
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from fagen.errors import ExpressionError
from fagen.expr.logic import FUNCTIONS
from fagen.expr.make import number
from fagen.expr.tree import (
    FLOAT,
    INFINITY,
    INT,
    LANGUAGE,
    MOST_GIVEN,
    MOST_INT,
    Constant,
    Name,
    Number,
    Table,
)
from fagen.toml_lines import printable

Given = Name | Constant | Table
Scope = Mapping[str, Given]

NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
MOST_DIMS = 4
_OVER = ("batch", "head", "kv_head", "len_q", "len_k")

# arguments of fagen's calls, of today and of what they are about to have
RESERVED = re.compile(
    "block_table|card|causal|center|center_k|center_v|cu_seqlens|cu_seqlens_k|cu_seqlens_q|descale|"
    "deterministic|device|dropout|dropout_p|dtype|given|gradient|head_dim|head_dim_v|k|k_descale|"
    "k_mean|kind|kv_heads|layout|leftpad_k|lengths|lse|lses|mask|max_seqlen_k|max_seqlen_q|mean|"
    "num_splits|out|out_dtype|outs|page_table|paged|progress|q|q_descale|queries|reference|return_lse|"
    "return_max_logit|rotary|rotary_pairs|rotate|rows|scale|scale_rows|scales|schedule|score|seed|"
    "seqlen|seqlen_k|seqlen_q|seqused_k|seqused_q|sinks|softcap|stream|unified|unknown|v|v_descale|"
    "v_layout|v_mean|window|window_left|window_right|causal_of|workspace|x"
)
_CPP = re.compile(
    "alignas|alignof|and_eq|asm|auto|bitand|bitor|bool|case|catch|char|class|compl|concept|const|"
    "consteval|constexpr|constinit|const_cast|decltype|default|delete|do|double|dynamic_cast|enum|"
    "explicit|export|extern|false|float|friend|goto|inline|int|long|mutable|namespace|new|noexcept|"
    "not_eq|nullptr|operator|or_eq|private|protected|public|register|reinterpret_cast|requires|"
    "short|signed|sizeof|static|static_assert|static_cast|struct|switch|template|this|"
    "thread_local|throw|true|typedef|typeid|typename|union|unsigned|using|virtual|void|volatile|"
    "wchar_t|xor|xor_eq"
)


def check_name(name: object) -> str:
    """Return a name that may be declared.  Raises ExpressionError for any other."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        shown = printable(str(name)[:40])
        raise ExpressionError(f"{shown} is no name: small letters, digits and _, a letter first")
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or _CPP.fullmatch(name):
        raise ExpressionError(f"{name} is a word of Python or of C++")
    if name in LANGUAGE or name in FUNCTIONS or name == INFINITY:
        raise ExpressionError(f"{name} is a word of the language")
    if RESERVED.fullmatch(name):
        raise ExpressionError(f"{name} is an argument of fagen's calls: call it otherwise")
    return name


def parameter(
    name: str, dtype: str, least: Number | None = None, most: Number | None = None
) -> Name:
    """Return a number that each call gives, between two ends where they are said."""
    if dtype not in (INT, FLOAT):
        raise ExpressionError(f'{name} is of dtype "int32" or "float32"')
    ends = (-MOST_GIVEN, MOST_GIVEN) if dtype == INT else (-math.inf, math.inf)
    first, last = ends[0] if least is None else least, ends[1] if most is None else most
    for end in (first, last):
        whole = isinstance(end, int) and abs(end) <= MOST_INT
        if isinstance(end, bool) or not (whole if dtype == INT else isinstance(end, int | float)):
            raise ExpressionError(f"{name}: its ends are numbers of {dtype}")
    if not first <= last:  # nor where one is no number
        raise ExpressionError(f"{name}: no number lies from {first} to {last}")
    return Name(dtype, name, first, last) if dtype == INT else Name(FLOAT, name, +first, +last)


def table(
    name: str,
    dtype: str,
    over: tuple[Any, ...],
    scope: Scope,
    rising: bool = False,
    gradient: bool = False,
) -> Table:
    """Return numbers that each call gives as a tensor; a name in `over` may be a parameter."""
    if dtype not in (INT, FLOAT):
        raise ExpressionError(f'{name} is of dtype "int32" or "float32"')
    if not 1 <= len(over) <= MOST_DIMS:
        raise ExpressionError(f"{name} is over 1 to {MOST_DIMS} dimensions")
    if rising and dtype != INT:
        raise ExpressionError(f"{name} is of floats: only whole numbers are known as rising")
    dims: list[str | int | Name] = []
    for dim in over:
        given = scope.get(dim) if isinstance(dim, str) else None
        if isinstance(dim, int) and not isinstance(dim, bool) and 1 <= dim <= MOST_GIVEN:
            dims.append(dim)
        elif isinstance(given, Name) and given.type == INT and given.least >= 1:
            dims.append(given)
        elif isinstance(dim, str) and dim in _OVER:
            dims.append(dim)
        else:
            known = f"{', '.join(_OVER)}, a number, or an int32 parameter with min = 1"
            shown = printable(str(dim)[:40])
            raise ExpressionError(f"{name} is over {shown}, which is none of {known}")
    return Table(name, dtype, tuple(dims), rising, gradient)


_PARAMETER = {"dtype", "min", "max"}
_TABLE = {"dtype", "over", "rising", "gradient"}


def scope_of(
    parameters: Mapping[str, Any], tables: Mapping[str, Any], of_calls: Collection[Given] = ()
) -> dict[str, Given]:
    """Return what two tables of a schedule declare: numbers, or tables of their keys.

    A parameter that is a number is a constant of the kernel; the others have a dtype. What calls
    have `of_calls` may be declared just so, under a name that is theirs.
    """
    scope: dict[str, Given] = {}
    own = {given.name: given for given in of_calls if not isinstance(given, Constant)}

    def check(name: str) -> None:
        if name not in own or scope.get(name, own[name]) != own[name]:
            check_name(name)

    for name, said in parameters.items():
        check(name)
        if isinstance(said, int | float):
            scope[name] = number(said)
            check(name)
            continue
        _check_keys(name, said, _PARAMETER)
        scope[name] = parameter(name, said.get("dtype", ""), said.get("min"), said.get("max"))
        check(name)
    for name, said in tables.items():
        check(name)
        if name in scope:
            raise ExpressionError(f"{name} is declared twice")
        _check_keys(name, said, _TABLE)
        over = said.get("over")
        over = tuple(over) if isinstance(over, list | tuple) else ()
        flags = (said.get("rising", False) is True, said.get("gradient", False) is True)
        scope[name] = table(name, said.get("dtype", ""), over, scope, *flags)
        check(name)
    return scope


def _check_keys(name: str, said: Any, keys: set[str]) -> None:
    if not isinstance(said, Mapping):
        raise ExpressionError(f"{name} is a number, or a table with {', '.join(sorted(keys))}")
    if unknown := sorted(str(key) for key in said if key not in keys):
        shown = printable(unknown[0][:40])
        raise ExpressionError(f"{name}: {shown} is none of {', '.join(sorted(keys))}")
