"""Steps: in which order GEMMs and softmax run; output: how O leaves."""

from collections.abc import Iterator

from fagen.part import (
    ELEMENT,
    FLOAT,
    INT64,
    OUT_ELEMENT,
    Alias,
    Argument,
    Array,
    Barrier,
    Constant,
    Field,
    Part,
    TensorMap,
    Union,
    amount,
    pointer_to,
)
from fagen.schedule import Values
from fagen.vocab import DTYPES


def steps(values: Values) -> Iterator[Part]:
    """In which order GEMMs and softmax run."""
    if values["producer"] == "warp":
        names = "producer_registers", "consumer_registers"
        yield Part(constants=tuple(map(Constant, names)))


_OUTPUTS = {
    "own": ("forward/output/buffer.cuh", "forward/output/own.cuh"),
    "half": ("forward/output/buffer.cuh", "forward/output/half.cuh"),
    "reuse_v": ("forward/output/reuse_v.cuh.j2",),
}


def output(values: Values) -> Iterator[Part]:
    """How O leaves."""
    way = "split" if values["num_splits"] > 1 else values["output"]
    varlen, dtype = values["lengths"] == "varlen", DTYPES[values["dtype"]]
    lse_strides = ("head",) if varlen else ("batch", "head")
    yield Part(
        consumer=("forward/tiles/varlen_lengths.cuh" if varlen else "forward/tiles/lengths.cuh",),
        params=(
            Field("lse", pointer_to(FLOAT), Argument("lse"), "may be null"),
            *(Field(f"lse_stride_{s}", INT64, Argument(f"lse_stride_{s}")) for s in lse_strides),
        ),
    )
    v_array = Array("v", ELEMENT, (amount("stages"), amount("block_n", "head_dim_v_padded")))
    if values["out_dtype"] == values["dtype"] and dtype.largest:
        yield Part(constants=(Constant("largest_output", "that is finite"),))
    if way == "split":
        names = "out_stride_batch", "out_stride_seq", "out_stride_head"
        yield Part(
            consumer=("forward/output/split.cuh.j2",),
            shared=(v_array,),
            params=(
                Field("out", pointer_to(ELEMENT), Argument("out")),
                *(Field(name, INT64, Argument(name)) for name in names),
            ),
        )
        return
    yield Part(
        consumer=(
            "forward/output/varlen.cuh" if varlen else "forward/output/dense.cuh",
            *(("forward/output/column_scales.cuh",) if values["v_scales"] == "column" else ()),
            "forward/output/descaled.cuh.j2" if dtype.fp8 else "forward/output/averages.cuh.j2",
            *_OUTPUTS[way],
            "forward/output/store.cuh.j2",
        )
    )
    o_dims = amount("block_m", "head_dim_v_padded", per=2 if way == "half" else None)
    o_array = Array("o", OUT_ELEMENT, (o_dims,))
    readers = amount("cluster", "consumers") if values["cluster"] > 1 else amount("consumers")
    yield Part(
        constants=(
            Alias("OutElement", "out_dtype.cpp"),
            Constant("o_slab"),
            Constant("o_swizzle.xor_bits", name="o_swizzle_bits"),
        ),
        shared=(
            (
                Union(
                    (v_array, o_array),
                    row="v_or_o",
                    note="O is stored through V's space, once the last V of a tile has been read",
                ),
                Barrier("o_empty", (), readers),
            )
            if way == "reuse_v"
            else (v_array, o_array)
        ),
        maps=(TensorMap("out", (amount("o_slab"), amount("warpgroup_rows")), "o_swizzle"),),
    )
