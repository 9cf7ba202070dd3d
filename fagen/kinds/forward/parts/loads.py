"""Loads: how Q, K and V come into shared memory."""

from collections.abc import Iterator

from fagen.part import (
    ELEMENT,
    Array,
    Barrier,
    Constant,
    Part,
    TensorMap,
    amount,
)
from fagen.schedule import Values
from fagen.vocab import DTYPES

_READERS = amount("consumers", "warpgroup", per=32)
_CLUSTER_READERS = amount("cluster", "consumers", "warpgroup", per=32)
_STAGES, _Q_STAGES = amount("stages"), amount("q_stages")


def loads(values: Values) -> Iterator[Part]:
    """How Q, K and V come into shared memory."""
    readers = _CLUSTER_READERS if values["cluster"] > 1 else _READERS
    columns = amount("qk_slab")
    rows = amount("block_n", per="cluster") if values["cluster"] > 1 else amount("block_n")
    by_block = values["scales"] == "block"
    consumers = (_Q_STAGES, amount("consumers"))
    yield Part(
        constants=(Constant("unrolled_copies", "that a thread issues without a loop"),),
        loader=_copies(values),
        shared=(
            Array("q", ELEMENT, (_Q_STAGES, amount("block_m", "head_dim_padded"))),
            Array("k", ELEMENT, (_STAGES, amount("block_n", "head_dim_padded"))),
            Barrier("q_full", consumers, amount(1), transactions=True, aligned=True),
            Barrier("q_empty", consumers, amount("warpgroup", per=32)),
            # with the lanes that write descales
            Barrier(
                "k_full",
                (_STAGES,),
                amount("groups", plus=1) if by_block else amount(1),
                transactions=True,
            ),
            Barrier("k_empty", (_STAGES,), readers),
            Barrier("v_empty", (_STAGES,), readers),
        ),
        maps=(
            TensorMap("q", (columns, amount("warpgroup_rows")), "qk_swizzle"),
            TensorMap("k", (columns, rows), "qk_swizzle", stand_in="q"),
        ),
    )
    if by_block:
        yield Part(producer=("forward/loads/scales.cuh.j2",))
    if values["v_layout"] == "rows":
        yield _transposed(values)
    elif by_block:
        yield Part(producer=("forward/loads/scale_warp.cuh",))


def _copies(values: Values) -> tuple[str, ...]:
    """Return what Loader has."""
    varlen, warp = values["lengths"] == "varlen", values["producer"] == "warp"
    reuse_v, turns = values["output"] == "reuse_v", values["skips_idle_warpgroups"]
    ahead = warp and values["skips_masked_blocks"] and reuse_v
    rows, columns = values["v_layout"] == "rows", DTYPES[values["dtype"]].fp8
    return (
        "forward/loads/varlen_copy.cuh" if varlen else "forward/loads/copy.cuh",
        *(("forward/loads/multicast.cuh",) if values["cluster"] > 1 else ()),
        "forward/loads/q_in_turns.cuh" if turns else "forward/loads/q.cuh",
        "forward/loads/k.cuh.j2",
        *(("forward/loads/k_ahead.cuh",) if ahead else ()),
        "forward/loads/v_rows.cuh"
        if rows
        else "forward/loads/v_columns.cuh"
        if columns
        else "forward/loads/v.cuh.j2",
        *(("forward/output/wait_for_output.cuh",) if reuse_v and not rows else ()),
    )


def _transposed(values: Values) -> Part:
    """V comes row-major, and warps beside the producer transpose it."""
    return Part(
        constants=(
            Constant(
                "transposed_loads",
                "units in flight while one is stored; each has four registers",
            ),
        ),
        producer=(
            "forward/loads/transpose.cuh",
            "forward/loads/transpose_block.cuh",
            "forward/loads/transpose_tiles_with_scales.cuh.j2"
            if values["scales"] == "block"
            else "forward/loads/transpose_tiles.cuh.j2",
            "forward/loads/transposers.cuh.j2",
        ),
    )
