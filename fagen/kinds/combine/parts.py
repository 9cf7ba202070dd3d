"""The parts of a combining kernel: what keys of a schedule mean for its text and its memory.

Slots: row (what each thread block has), rows (where they are, and how many splits they have),
partials (how partial outputs come), output (how an output leaves).
"""

from functools import cache
from typing import Any

from fagen.kinds.combine.rules import is_ragged
from fagen.kinds.sinks import sinks_of_call
from fagen.part import (
    DIVISOR,
    FLOAT,
    HEADERS,
    INT,
    INT64,
    Alias,
    Argument,
    Array,
    Constant,
    Divisor,
    Field,
    Part,
    Parts,
    Type,
    amount,
    choices,
    pointer_to,
)
from fagen.schedule import Values
from fagen.vocab import PARTIALS

# the keys that choose parts, beside whether rows are ragged
CHOSEN = "dtype", "out_dtype", "layout", "sink"

# the order of members of Params, by name: machine code holds their offsets
_PARAMS = (
    *("outs", "lses", "num_splits", "cu_seqlens", "out", "lse"),
    *("outs_stride_split", "outs_stride_batch", "outs_stride_seq", "outs_stride_head"),
    *("lses_stride_split", "lses_stride_batch", "lses_stride_head"),
    *("out_stride_batch", "out_stride_seq", "out_stride_head"),
    *("lse_stride_batch", "lse_stride_head"),
    *("heads", "batch", "sequences_per_row", "seqlen", "splits", "rows"),
)

_TO_INT32 = pointer_to(Type("int32_t"), const=True)


def parts(values: Values) -> Parts:
    """Return the parts of a kernel with these values of a schedule's keys."""
    return _parts(choices(values, CHOSEN, (is_ragged,)))


@cache
def _parts(chosen: tuple[tuple[str, Any], ...]) -> Parts:
    values = dict(chosen)
    slots = row, rows, partials, output
    every = (*(slot(values) for slot in slots), *sinks_of_call(values["sink"]))
    sinks = (_SINKS,) if values["sink"] else ()
    return Parts((*every, *sinks), _SECTIONS, params_order=_PARAMS)


# a row's sink follows its splits
_SINKS = Part(device=("attention/sinks/combine.cuh",), sums=("combine/sinks/sink.cuh",))


_SECTIONS = (
    *("combine/head.j2", "attention/combine/weights.cuh.j2", "parts/device.j2"),
    "combine/kernel.j2",
)


def _given(name: str, type_: Type) -> Field:
    return Field(name, type_, Argument(name))


def row(values: Values) -> Part:
    """What each thread block has: whole rows, each of some lanes."""
    dtypes = PARTIALS[values["dtype"]], PARTIALS[values["out_dtype"]]
    return Part(
        about=("combine/about.cuh.j2",),
        headers=(*HEADERS, "cstring", *(dtype.header for dtype in dtypes)),
        constants=(
            *((Constant("head_dim"),) if values["is_ragged"] else ()),
            Constant("lanes", "that share a row"),
            Constant("rows", "per thread block"),
            Constant("threads", value=amount("rows", "lanes")),
            Constant("blocks", "that an SM's registers suffice for"),
            Constant("launch_registers"),
        ),
        params=(
            Field("heads", DIVISOR, Divisor(Argument("heads"))),
            _given("splits", INT),
            Field("rows", INT),
        ),
    )


def rows(values: Values) -> Part:
    """Where rows are, and how many splits they have."""
    varlen = values["layout"] == "varlen"
    batch = () if varlen else ("batch",)
    strides = {
        "outs": ("split", *batch, "seq", "head"),
        "lses": ("split", *batch, "head"),
        "out": (*batch, "seq", "head"),
        "lse": (*batch, "head"),
    }
    return Part(
        device=("combine/rows/varlen.cuh.j2" if varlen else "combine/rows/dense.cuh",),
        host=("combine/rows/launch_varlen.cuh" if varlen else "combine/rows/launch_dense.cuh",),
        params=(
            *(
                _given(f"{tensor}_stride_{dim}", INT64)
                for tensor, dims in strides.items()
                for dim in dims
            ),
            *(_SEQUENCES if varlen else (Field("seqlen", DIVISOR, Divisor(Argument("seqlen"))),)),
        ),
    )


_SEQUENCES = (
    _given("num_splits", _TO_INT32),
    _given("cu_seqlens", _TO_INT32),
    _given("batch", INT),
    Field("sequences_per_row", FLOAT, note="in the mean"),
)


def partials(values: Values) -> Part:
    """How partial outputs come: through a ring in shared memory, split by split."""
    way = "narrow.cuh.j2" if PARTIALS[values["dtype"]].bytes < _FP32 else "fp32.cuh"
    return Part(
        device=("combine/partials/load.cuh", f"combine/partials/{way}"),
        host=("combine/partials/launch.cuh",),
        constants=(
            Alias("Element", "dtype.cpp"),
            Constant("loads", "of 16 bytes, that each lane makes of a split's row"),
            Constant("vector", "elements in 16 bytes"),
            Constant("stages", "splits whose loads are under way"),
            Constant("weighing", "neighbouring lanes that work out the weights of so many splits"),
            Constant("held", "of them, each lane"),
            Constant("shared_bytes", "at most: fewer splits take less"),
        ),
        shared=(Array("ring", Type("uint4", 16), (_STAGES, amount("loads"), amount("threads"))),),
        params=(
            _given("outs", pointer_to(Type("Element"), const=True)),
            _given("lses", pointer_to(FLOAT, const=True)),
        ),
    )


_FP32 = PARTIALS["fp32"].bytes
_STAGES = amount("stages")


def output(values: Values) -> Part:
    """How an output leaves."""
    way = "narrow.cuh.j2" if PARTIALS[values["out_dtype"]].bytes < _FP32 else "fp32.cuh"
    return Part(
        device=(f"combine/output/{way}",),
        constants=(Alias("Output", "out_dtype.cpp"),),
        params=(_given("out", pointer_to(Type("Output"))), _given("lse", pointer_to(FLOAT))),
    )
