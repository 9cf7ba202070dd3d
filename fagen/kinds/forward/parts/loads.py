"""Loads: how Q, K and V come into shared memory."""

from collections.abc import Iterator
from typing import Any

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
        first_loads=(_FIRST[values["loads_q_ahead"]],),
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
            map_of_rows(values, "q", "qk_slab", "tile.qk_swizzle"),
            TensorMap("k", (columns, rows_of_box(values)), "tile.qk_swizzle", stand_in="q"),
        ),
    )
    if values["output"] == "reuse_v":
        yield Part(loader=_waits(values))
    if by_block:
        yield Part(producer=(_DESCALES[values["v_scales"]], "forward/loads/scales.cuh"))
    if values["transposes"] == "producer":
        yield _TRANSPOSED[values["single_v_rows"]]
        yield _TRANSPOSERS[values["scales"]]
    elif by_block:
        yield Part(producer=("forward/loads/scale_warp.cuh",))


# By whether they are of several heads, whole queries: a box of rows, perhaps by variables of the
# launcher, and the dimensions that it is of.
_BOXES: dict[bool, tuple[tuple[Amount | str, ...], tuple[str, ...]]] = {
    False: ((amount("warpgroup_rows"),), ("seq", "head", "batch")),
    True: (("pack", "queries"), ("head", "seq", "batch")),
}


def map_of_rows(values: Values, name: str, slab: str, swizzle: str, **more: Any) -> TensorMap:
    """Return the map of a tensor of queries: a box has a warpgroup's rows of a slab's columns."""
    box, dims = _BOXES[values["pack_gqa"]]
    return TensorMap(name, (amount(slab), *box), swizzle, dims=dims, **more)


def rows_of_box(values: Values) -> Amount:
    """Return how many rows of K, or of V, a thread block copies at a time."""
    return amount("block_n", per="cluster" if values["cluster"] > 1 else None)


def _copies(values: Values) -> tuple[str, ...]:
    """Return what Loader has."""
    copies = _COPIES[values["lengths"], values["pack_gqa"]]
    q = _Q[values["skips_idle_warpgroups"], values["pack_gqa"]]
    if values["cluster"] > 1:
        return *copies, q, "forward/loads/multicast.cuh"
    v = _V[values["v_in_shared"], values["single_v_rows"]]
    q, v = {False: (q, v), True: _IN_STEPS}[values["loads_q_in_steps"]]
    return *copies, q, "forward/loads/k.cuh", v


# by whether Q comes ahead of K
_FIRST = {
    False: "forward/loads/k_before_q.cuh",
    True: "forward/loads/q_before_k.cuh",
}
_IN_STEPS = "forward/loads/q_in_steps.cuh", "forward/loads/v_and_q.cuh"
_DESCALES = {"column": "forward/loads/k_descales.cuh", "block": "forward/loads/kv_descales.cuh"}
# by lengths, and whether a tile's rows are of several heads
_COPIES: dict[tuple[str, bool], tuple[str, ...]] = {
    ("equal", False): ("forward/loads/copy.cuh",),
    ("varlen", False): ("forward/loads/varlen_copy.cuh",),
    ("equal", True): (
        *("forward/loads/copy.cuh", "forward/loads/packed_copy.cuh"),
        "forward/loads/packed_unused.cuh",
    ),
    ("varlen", True): (
        *("forward/loads/varlen_copy.cuh", "forward/loads/varlen_packed_copy.cuh"),
        "forward/loads/packed_unused.cuh",
    ),
}
# by whether warpgroups take rows in turns, and whether these are of several heads
_Q = {
    (False, False): "forward/loads/q.cuh",
    (True, False): "forward/loads/q_in_turns.cuh",
    (False, True): "forward/loads/packed_q.cuh",
    (True, True): "forward/loads/packed_q_in_turns.cuh",
}
# by how V comes, and whether rows of it have one buffer
_V = {
    ("", False): "forward/loads/v.cuh",
    ("rows", False): "forward/loads/v_rows.cuh",
    ("rows", True): "forward/loads/v_rows_alone.cuh",
    ("columns", False): "forward/loads/v_columns.cuh",
}


def _waits(values: Values) -> tuple[str, ...]:
    """Return what Loader has where O is stored through V's space."""
    ahead = values["producer"] == "warp" and values["skips_masked_blocks"]
    return (
        *(("forward/loads/k_ahead.cuh",) if ahead else ()),
        *(("forward/output/wait_for_output.cuh",) if values["transposes"] != "producer" else ()),
    )


# V comes row-major, and warps beside the producer transpose it; one of them writes scales too
_LOADS = Constant(
    "pipeline.transposed_loads", "units in flight while one is stored; each has four registers"
)
_LOAD_TRANSPOSED = "forward/loads/load_transposed.cuh"
_TRANSPOSED = {  # by whether there is one buffer of rows
    alone: Part(
        constants=(_LOADS,), producer=(_LOAD_TRANSPOSED, "forward/loads/transpose.cuh", block)
    )
    for alone, block in (
        (False, "forward/loads/transpose_block.cuh"),
        (True, "forward/loads/transpose_block_alone.cuh"),
    )
}
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
