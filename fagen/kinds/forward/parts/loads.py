"""Loads: how Q, K and V come into shared memory."""

from collections.abc import Iterator

from fagen.part import (
    ELEMENT,
    Amount,
    Array,
    Barrier,
    Constant,
    Part,
    TensorMap,
    amount,
)
from fagen.schedule import Values

# by cluster: warps that read what a stage holds
_READERS = {
    1: amount("consumers", "warpgroup", per=32),
    2: amount("cluster", "consumers", "warpgroup", per=32),
}
_STAGES, _Q_STAGES = amount("stages"), amount("q_stages")


def loads(values: Values) -> Iterator[Part]:
    """How Q, K and V come into shared memory."""
    readers = _READERS[values["cluster"]]
    columns = amount("qk_slab")
    by_block = values["scales"] == "block"
    consumers = (_Q_STAGES, amount("consumers"))
    yield Part(
        constants=(Constant("pipeline.unrolled_copies", "that a thread issues without a loop"),),
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
            TensorMap("q", (columns, amount("warpgroup_rows")), "tile.qk_swizzle"),
            TensorMap("k", (columns, rows_of_box(values)), "tile.qk_swizzle", stand_in="q"),
        ),
    )
    if values["output"] == "reuse_v":
        yield Part(loader=_waits(values))
    if by_block:
        yield Part(producer=(_DESCALES[values["v_scales"]], "forward/loads/scales.cuh"))
    if values["v_layout"] == "rows":
        yield _TRANSPOSED
        yield _TRANSPOSERS[values["scales"]]
    elif by_block:
        yield Part(producer=("forward/loads/scale_warp.cuh",))


def rows_of_box(values: Values) -> Amount:
    """Return how many rows of K, or of V, a thread block copies at a time."""
    return amount("block_n", per="cluster" if values["cluster"] > 1 else None)


def _copies(values: Values) -> tuple[str, ...]:
    """Return what Loader has."""
    copy = _COPY[values["lengths"]]
    q = _Q[values["skips_idle_warpgroups"]]
    if values["cluster"] > 1:
        return copy, q, "forward/loads/multicast.cuh"
    return copy, q, "forward/loads/k.cuh", _V[values["v_layout"]]


_DESCALES = {"column": "forward/loads/k_descales.cuh", "block": "forward/loads/kv_descales.cuh"}
_COPY = {"equal": "forward/loads/copy.cuh", "varlen": "forward/loads/varlen_copy.cuh"}
_Q = {False: "forward/loads/q.cuh", True: "forward/loads/q_in_turns.cuh"}
_V = {
    "": "forward/loads/v.cuh",
    "rows": "forward/loads/v_rows.cuh",
    "columns": "forward/loads/v_columns.cuh",
}


def _waits(values: Values) -> tuple[str, ...]:
    """Return what Loader has where O is stored through V's space."""
    ahead = values["producer"] == "warp" and values["skips_masked_blocks"]
    return (
        *(("forward/loads/k_ahead.cuh",) if ahead else ()),
        *(("forward/output/wait_for_output.cuh",) if values["v_layout"] != "rows" else ()),
    )


# V comes row-major, and warps beside the producer transpose it; one of them writes scales too
_TRANSPOSED = Part(
    constants=(
        Constant(
            "pipeline.transposed_loads",
            "units in flight while one is stored; each has four registers",
        ),
    ),
    producer=("forward/loads/transpose.cuh", "forward/loads/transpose_block.cuh"),
)
_TRANSPOSERS = {
    "head": Part(
        producer=(
            "forward/loads/transpose_tiles.cuh.j2",
            "forward/loads/transposers.cuh.j2",
        )
    ),
    "block": Part(
        constants=(Constant("pipeline.k_ahead", "blocks that K is loaded ahead of V"),),
        producer=(
            "forward/loads/transpose_tiles_with_scales.cuh.j2",
            "forward/loads/transposers.cuh.j2",
        ),
    ),
}
