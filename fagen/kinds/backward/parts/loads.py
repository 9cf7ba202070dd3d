"""Loads: how Q, K, V and dO come into shared memory."""

from collections.abc import Iterator

from fagen.kinds.backward.parts.tiles import rounds
from fagen.part import (
    ELEMENT,
    Array,
    Barrier,
    Part,
    TensorMap,
    amount,
)
from fagen.schedule import Values

_QK_SLAB, _V_SLAB = amount("qk_slab"), amount("v_slab")
_STAGES, _DO_STAGES, _ONE = amount("stages"), amount("do_stages"), amount(1)
_Q, _DOUT = amount("block_m", "head_dim_padded"), amount("block_m", "head_dim_v_padded")
_K, _V = amount("block_n", "head_dim_padded"), amount("block_n", "head_dim_v_padded")


def loads(values: Values) -> Iterator[Part]:
    """Yield how Q, K, V and dO come into shared memory."""
    persistent, ones = values["persistent"], values["ones_in_shared_memory"]
    if not persistent:
        yield Part(
            shared=(
                Barrier("k_full", (), _ONE, transactions=True, aligned=not ones),
                Barrier("v_full", (), _ONE, transactions=True),
            )
        )
    readers = amount("cluster", "consumers", "warpgroup", per=32)
    yield Part(
        loader=tuple(f"backward/loads/{text}.cuh" for text in _loader(values)),
        role=(f"backward/roles/load{'_persistent' if persistent else ''}.cuh",),
        shared=(
            Array("k", ELEMENT, (_K,)),
            Array("v", ELEMENT, (_V,)),
            Array("q", ELEMENT, (_STAGES, _Q)),
            Array("dout", ELEMENT, (_DO_STAGES, _DOUT), row="do"),
            Barrier(
                "q_full",
                (_STAGES,),
                _ONE,
                transactions=True,
                note="with K where a tile begins" if persistent else "",
                aligned=persistent and not ones,
            ),
            Barrier("q_empty", (_STAGES,), readers),
            Barrier(
                "dout_full",
                (_DO_STAGES,),
                _ONE,
                transactions=True,
                note="and with V" if persistent else "",
            ),
            Barrier("dout_empty", (_DO_STAGES,), readers),
        ),
        maps=(
            TensorMap("q", (_QK_SLAB, amount("block_m")), "qk_swizzle", stand_in="k"),
            TensorMap("k", (_QK_SLAB, amount("block_n")), "qk_swizzle", stand_in="q"),
            TensorMap(
                "v", (_V_SLAB, amount("block_n")), "v_swizzle", "head_dim_v", stand_in="dout"
            ),
            TensorMap(
                "dout", (_V_SLAB, amount("block_m")), "v_swizzle", "head_dim_v", stand_in="v"
            ),
        ),
    )
    if values["cluster"] > 1:
        yield Part(
            shared=(
                Array(
                    "k_peer",
                    ELEMENT,
                    (amount("block_n", "head_dim_padded", per="cluster"),),
                    note="K of the other block's keys, in the columns of which this block "
                    "computes dQ",
                ),
            )
        )
    if persistent:
        texts = "persistent.cuh.j2", f"{rounds(values)}_persistent.cuh"
        yield Part(loader=tuple(f"backward/loads/{text}" for text in texts))


def _loader(values: Values) -> Iterator[str]:
    multicast, varlen = values["cluster"] > 1, values["lengths"] == "varlen"
    yield "varlen" if varlen else "dense"
    yield f"{'multicast' if multicast else 'rows'}{'_varlen' * varlen}"
    if not (multicast or values["persistent"]):
        yield "k"
    yield "steps"
    if not values["persistent"]:
        yield rounds(values)
