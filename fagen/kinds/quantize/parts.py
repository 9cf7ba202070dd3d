"""The parts of a quantiser: what keys of a schedule mean for its text and its parameters.

Slots: rows (how they come), rotary (RoPE), rotation (how they become values), columns (what is
known of a head's columns), scales (what a maximum is over), output (how values leave).

Functions stand in the seat `device`. A warp's rows pass through the seats `loader`, as they came,
and `consumer`, as values; `kernels` find what a call does not give, and `kernel` is of the last.
"""

from functools import cache
from typing import Any

from fagen.kinds.quantize.rules import has_ragged_chunk, passes
from fagen.part import (
    DIVISOR,
    ELEMENT,
    FLOAT,
    HEADERS,
    INT,
    INT64,
    UINT8,
    UINT32,
    Argument,
    Blocks,
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
from fagen.vocab import DTYPES

# the keys that choose parts; of head_dim it matters how many chunks it has, and what of the last
CHOSEN = ("dtype", "head_dim", "rotary", "rotate", "center", "scales", "scale_rows", "layout")

# the order of members of Params, by name: machine code holds their offsets
_PARAMS = (
    *("x", "values", "descale", "maxima", "maxima_of_one", "numbers", "column_tiles"),
    *("mean", "mean_stride_batch", "mean_stride_head"),
    *("x_stride_batch", "x_stride_seq", "x_stride_head"),
    *("values_stride_batch", "values_stride_head", "values_stride_row"),
    *("descale_stride_batch", "descale_stride_head"),
    *("cos", "sin", "cos_stride_batch", "cos_stride_seq", "sin_stride_batch", "sin_stride_seq"),
    *("signs", "heads", "tiles", "seqlen"),
)

_IN, _FLOATS = pointer_to(ELEMENT, const=True), pointer_to(FLOAT)
_HEAD_DIM, _WARPS = Constant("head_dim"), Constant("warps")
_HADAMARD = Constant("hadamard", "columns that are rotated together")
_REDUCERS = Constant("reduce_threads", "of a block that puts together what many found")
_NORM = Constant("norm", "makes the rotation orthonormal")


def parts(values: Values) -> Parts:
    """Return the parts of a kernel with these values of a schedule's keys."""
    return _parts(choices(values, CHOSEN))


@cache
def _parts(chosen: tuple[tuple[str, Any], ...]) -> Parts:
    values = dict(chosen)
    slots = rows, rotary, rotation, columns, scales, output
    return Parts(tuple(slot(values) for slot in slots), _SECTIONS, params_order=_PARAMS)


_SECTIONS = (
    *("quantize/head.j2", "parts/device.j2", "quantize/get.j2", "parts/kernels.j2"),
    "quantize/kernel.j2",
)


def _argument(name: str, type_: Type, argument: str = "", note: str = "") -> Field:
    return Field(name, type_, Argument(argument or name), note)


def _strides(tensor: str, *dims: str) -> tuple[Field, ...]:
    return tuple(_argument(f"{tensor}_stride_{dim}", INT64) for dim in dims)


def _of_columns(values: Values) -> bool:
    """Whether a kernel of its own finds means or scales of columns."""
    return bool(values["center"]) or values["scales"] == "column"


def rows(values: Values) -> Part:
    """How rows come: past the end of the sequence there are zeros, or its last row again."""
    by_keys = values["layout"] == "columns"
    return Part(
        about=("quantize/about.cuh.j2",),
        headers=(*HEADERS, DTYPES[values["dtype"]].header),
        device=(
            "quantize/rows/lane.cuh",
            "quantize/rows/in_key_order.cuh" if by_keys else "quantize/rows/in_order.cuh",
            "quantize/rows/put.cuh",
            "quantize/rows/load_clamped.cuh.j2"
            if values["center"]
            else "quantize/rows/load.cuh.j2",
        ),
        constants=(
            Constant("rows", "per thread block"),
            Constant("warp_rows"),
            Constant("threads"),
            Constant("shared_bytes"),
            Constant("launch_registers"),
            Constant("blocks", "that an SM should hold at least"),
            Constant("chunks", "of 32 columns: four lanes share a row, with 8 each, 16 bytes"),
            Constant("passes", "in which a warp goes through its rows"),
            Constant("height", "rows that a lane holds at a time"),
            *((_HEAD_DIM,) if has_ragged_chunk(values) else ()),
        ),
        params=(
            _argument("x", _IN),
            *_strides("x", "batch", "seq", "head"),
            Field("heads", DIVISOR, Divisor(Argument("heads"))),
            Field("tiles", DIVISOR, Divisor(Blocks("seqlen", "rows")), "of kRows rows of a head"),
            _argument("seqlen", INT),
        ),
    )


def rotary(values: Values) -> Part:
    """Whether rows are embedded first, in pairs of which columns."""
    ways = {
        "halves": ("quantize/rotary/about_halves.cuh", "quantize/rotary/halves.cuh"),
        "pairs": ("quantize/rotary/about_pairs.cuh", "quantize/rotary/pairs.cuh.j2"),
    }
    if values["rotary"] not in ways:
        return Part()
    about, embed = ways[values["rotary"]]
    return Part(
        about=(about,),
        device=("quantize/rotary/pair.cuh.j2", embed, "quantize/rotary/apply.cuh"),
        loader=("quantize/rotary/applied.cuh",),
        params=(
            _argument("cos", _IN),
            _argument("sin", _IN),
            *_strides("cos", "batch", "seq"),
            *_strides("sin", "batch", "seq"),
        ),
    )


def rotation(values: Values) -> Part:
    """Whether rows are rotated as they become values."""
    if not values["rotate"]:
        return Part(
            about=("quantize/rotation/about_none.cuh",),
            device=("quantize/rotation/widen.cuh",),
            consumer=("quantize/rotation/widened.cuh",),
        )
    together = values["head_dim"] & -values["head_dim"]
    matrix = (
        "quantize/rotation/two_matrices.cuh" if together == 16 else "quantize/rotation/matrix.cuh"
    )
    return Part(
        about=("quantize/rotation/about.cuh.j2",),
        device=(
            matrix,
            "quantize/rotation/rotate.cuh.j2",
        ),
        consumer=("quantize/rotation/rotated.cuh",),
        constants=(*((_HADAMARD,) if together > 32 or values["center"] else ()), _NORM),
        params=(Field("signs", UINT32, dims=(amount("chunks"),)),),
        host=("quantize/rotation/launch.cuh",),
    )


def columns(values: Values) -> Part:
    """What is known of a head's columns: means, scales."""
    center, by_column = values["center"], values["scales"] == "column"
    if not _of_columns(values):
        return Part()
    reads_twice = values["scales"] == "block" and passes(values) > 1
    return Part(
        device=(
            "quantize/columns/columns.cuh.j2",
            "quantize/columns/share.cuh.j2",
            "quantize/columns/read.cuh",
            *(("quantize/columns/center.cuh",) if center else ()),
            *(("quantize/columns/divide.cuh",) if by_column else ()),
        ),
        producer=(
            *(("quantize/columns/share_mean.cuh.j2",) if center else ()),
            *(("quantize/columns/share_scale.cuh.j2",) if by_column else ()),
        ),
        loader=(
            "quantize/columns/shared_at_first.cuh"
            if reads_twice
            else "quantize/columns/shared.cuh",
        ),
        consumer=(
            *(("quantize/columns/centered.cuh",) if center else ()),
            *(("quantize/columns/divided.cuh",) if by_column else ()),
        ),
        kernel=("quantize/columns/declared.cuh",),
        kernels=(
            "quantize/columns/extremes.cuh" if by_column else "quantize/columns/sums.cuh",
            "quantize/columns/find.cuh.j2",
            "quantize/columns/reduce.cuh.j2",
        ),
        constants=(
            _HEAD_DIM,
            *((_NORM,) if center else ()),
            _REDUCERS,
            Constant("column_threads", "of a block that reads columns"),
            Constant("column_blocks", "of these, that an SM should hold at least"),
            Constant("column_rows", "that such a block reads"),
            Constant("column_lanes", "threads that share a row, 8 columns each"),
            Constant("column_numbers", "of a column: its sum; for scales its extremes too"),
        ),
        params=(
            Field("numbers", _FLOATS, Argument("workspace"), _NUMBERS),
            Field("column_tiles", DIVISOR, Divisor(Blocks("seqlen", "column_rows"))),
            *((_argument("mean", _FLOATS), *_strides("mean", "batch", "head")) if center else ()),
        ),
    )


_ABOUT_SCALES = {
    "block": "quantize/scales/about_block.cuh.j2",
    "column": "quantize/scales/about_column.cuh",
    "head": "quantize/scales/about_head.cuh",
    "tensor": "quantize/scales/about_tensor.cuh",
}
_NUMBERS = "(batch, heads, column_tiles, kColumnNumbers, kHeadDim) of find_columns"


def scales(values: Values) -> Part:
    """What shares a scale, and how its maximum is found."""
    way, center = values["scales"], values["center"]
    first = (
        "quantize/scales/in_order.cuh"
        if way == "block" and not center
        else "quantize/scales/last_first.cuh"
    )
    limits = (
        Constant("largest", "of e4m3"),
        Constant("least", "what a maximum is at least: rows of zeros have a scale too"),
    )
    if way == "column":
        return Part(
            about=(_ABOUT_SCALES[way],),
            device=(first,),
            kernel=("quantize/scales/of_columns.cuh",),
            constants=limits,
        )
    largest = "quantize/scales/largest_by_column.cuh" if center else "quantize/scales/largest.cuh"
    device = (
        largest,
        "quantize/scales/warp_maximum.cuh",
        first,
    )
    if way == "block":
        maximum = (
            "quantize/scales/held.cuh.j2"
            if passes(values) == 1
            else "quantize/scales/read_twice.cuh.j2"
        )
        return Part(
            about=(_ABOUT_SCALES[way],),
            device=device,
            kernel=(
                maximum,
                "quantize/scales/block.cuh.j2",
            ),
            constants=(*limits, _WARPS, Constant("scale_rows", "that share a scale")),
        )
    return Part(
        about=(_ABOUT_SCALES[way],),
        device=device,
        kernels=(
            "quantize/scales/block_maximum.cuh",
            "quantize/scales/find.cuh.j2",
            "quantize/scales/reduce.cuh.j2",
        ),
        kernel=("quantize/scales/found.cuh.j2",),
        constants=(*limits, _WARPS, _REDUCERS),
        params=(
            Field("maxima", _FLOATS, Argument("workspace"), "(batch, heads, tiles) of find_maxima"),
            Field("maxima_of_one", INT64, note="that a descale is made of"),
        ),
        host=(f"quantize/scales/launch_by_{way}.cuh",),
    )


def output(values: Values) -> Part:
    """How values leave, and descales: by rows, or transposed."""
    by_columns = values["layout"] == "columns"
    params = (
        _argument("values", pointer_to(UINT8)),
        _argument("descale", _FLOATS),
        *_strides("values", "batch", "head"),
        _argument("values_stride_row", INT64, "values_stride_seq"),
        *_strides("descale", "batch"),
        _argument("descale_stride_head", INT64, note="blocks are contiguous"),
    )
    if not by_columns:
        return Part(
            device=(
                "quantize/output/pack.cuh",
                "quantize/output/rows.cuh.j2",
            ),
            kernel=(
                "quantize/output/place.cuh",
                "quantize/output/store_rows.cuh.j2",
            ),
            params=params,
        )
    return Part(
        about=("quantize/output/about_transposed.cuh",),
        device=(
            "quantize/output/pack.cuh",
            "quantize/output/transposed.cuh",
        ),
        kernel=(
            "quantize/output/place.cuh",
            "quantize/output/store_transposed.cuh.j2",
        ),
        constants=(_HEAD_DIM, _WARPS),
        params=params,
    )
