"""Loads: how Q, K and V come into shared memory; values: how V lies there."""

from collections.abc import Iterator

from fagen.part import (
    DESCRIPTOR,
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
            TensorMap("k", (columns, rows), "qk_swizzle"),
        ),
    )


def v(values: Values) -> Iterator[Part]:
    """How V lies, and what it is multiplied by."""
    transposed, here = DTYPES[values["dtype"]].fp8, values["v_layout"] == "rows"
    note = "of keys: V lies transposed" if transposed else ""
    bits = Constant("v_swizzle.xor_bits", name="v_swizzle_bits")
    constants = (
        Constant("v_slab", note),
        Constant("v_swizzle.cute", name="v_descriptor", type=DESCRIPTOR),
    )
    rows = amount("block_n", per="cluster") if values["cluster"] > 1 else amount("block_n")
    if not here:
        box = amount("v_slab"), amount("head_dim_v_padded") if transposed else rows
        yield Part(
            constants=constants,
            maps=(TensorMap("v", box, "v_swizzle"),),
            shared=(Barrier("v_full", (_STAGES,), amount(1), transactions=True),),
        )
        return
    yield Part(
        constants=(
            *constants,
            bits,
            Constant("v_rows_slab", "of V as it arrives"),
            Constant("v_rows_swizzle.xor_bits", name="v_rows_swizzle_bits"),
            Constant("transposers", "warps of the producer's warpgroup"),
        ),
        maps=(TensorMap("v", (amount("v_rows_slab"), rows), "v_rows_swizzle"),),
        shared=(
            Array(
                "v_rows",
                ELEMENT,
                (amount("stages"), amount("block_n", "head_dim_v_padded")),
                row="vt",
                note="row-major, as they arrive",
            ),
            Barrier("v_full", (_STAGES,), amount("transposers"), transactions=True),
            Barrier("v_rows_full", (_STAGES,), amount(1), transactions=True),
            Barrier("v_rows_empty", (_STAGES,), amount("transposers")),
        ),
    )
