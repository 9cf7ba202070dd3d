"""Loads: how Q, K and V come into shared memory."""

from collections.abc import Iterator

from fagen.part import (
    ELEMENT,
    Array,
    Barrier,
    Part,
    TensorMap,
    amount,
)
from fagen.schedule import Values

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
