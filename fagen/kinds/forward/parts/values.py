"""Values: how V lies, how P reaches it, and what adds their products up."""

from collections.abc import Iterator

from fagen.kinds.forward.parts.loads import rows_of_box
from fagen.part import (
    DESCRIPTOR,
    ELEMENT,
    INT64,
    Amount,
    Argument,
    Array,
    Barrier,
    Constant,
    Field,
    Part,
    Place,
    TensorMap,
    amount,
    pointer_to,
)
from fagen.schedule import Values
from fagen.vocab import DTYPES, ORDERS

_STAGES = amount("stages")
_ROW_STAGES: dict[bool, tuple[Amount, ...]] = {False: (_STAGES,), True: ()}  # by whether it is one


def v(values: Values) -> Iterator[Part]:
    """How V lies, how P reaches it, and what adds their products up."""
    yield Part(device=_device(values), consumer=_consumer(values))
    transposed, here = DTYPES[values["dtype"]].fp8, values["transposes"] == "producer"
    note = "of keys: V lies transposed" if transposed else ""
    bits = Constant("tile.v_swizzle.xor_bits", name="v_swizzle_bits")
    constants = (
        Constant("tile.v_slab", note),
        Constant("tile.v_swizzle.cute", name="v_descriptor", type=DESCRIPTOR),
    )
    rows = rows_of_box(values)
    row_stages = _ROW_STAGES[values["single_v_rows"]]
    if not here:
        box = amount("v_slab"), amount("head_dim_v_padded") if transposed else rows
        yield from _BEFORE.get(values["transposes"], ())
        order = ORDERS[values["order"]]
        yield _COUNTERS.get((values["transposes"], order.dynamic, order.parts), Part())
        yield Part(
            constants=constants,
            maps=(
                TensorMap(
                    "v",
                    box,
                    "tile.v_swizzle",
                    "head_dim_v",
                    stand_in="q",
                    place=_PLACES.get(values["transposes"]),
                ),
            ),
            shared=(Barrier("v_full", (_STAGES,), amount(1), transactions=True),),
        )
        return
    yield Part(
        constants=(
            *constants,
            bits,
            Constant("tile.v_rows_slab", "of V as it arrives"),
            Constant("tile.v_rows_swizzle.xor_bits", name="v_rows_swizzle_bits"),
            Constant("pipeline.transposers", "warps of the producer's warpgroup"),
        ),
        maps=(
            TensorMap(
                "v",
                (amount("v_rows_slab"), rows),
                "tile.v_rows_swizzle",
                "head_dim_v",
                stand_in="q",
            ),
        ),
        shared=(
            Array(
                "v_rows",
                ELEMENT,
                (*row_stages, amount("block_n", "head_dim_v_padded")),
                row="vt",
                note="row-major, as they arrive",
            ),
            Barrier("v_full", (_STAGES,), amount("transposers"), transactions=True),
            Barrier("v_rows_full", row_stages, amount(1), transactions=True),
            Barrier("v_rows_empty", row_stages, amount("transposers")),
        ),
    )


_COLUMNS = Place(
    "a.seqlen_k > 0 ? params.v_columns : a.q",
    ("padded", "kHeadDimV", "a.kv_heads", "a.batch"),
    ("padded", "kHeadDimV * padded", "a.kv_heads * kHeadDimV * padded"),
)
_V_STRIDES = "v_stride_batch", "v_stride_head", "v_stride_seq"


# by what transposes V: a kernel before all tiles, and where it leaves V
_BEFORE = {
    "kernel": (
        Part(
            device=("sm90/dependent_launch.cuh",),
            kernels=("forward/loads/load_transposed.cuh", "forward/values/transpose_before.cuh.j2"),
            kernel=("sm90/wait_for_launch.cuh",),
            host=("forward/launcher/transposed.cuh",),
            params=(
                Field("v_rows", pointer_to(ELEMENT, const=True), Argument("v"), "as it is given"),
                *(Field(name, INT64, Argument(name)) for name in _V_STRIDES),
                Field("v_columns", pointer_to(ELEMENT), note="transposed"),
            ),
        ),
    ),
}
# counters behind V: of tiles that are drawn, or of parts that ended
_COUNTERS = {
    ("kernel", True, False): Part(
        host=("forward/launcher/transposed_drawn.cuh",),
        counters=("forward/values/zero_drawn.cuh",),
    ),
    ("kernel", False, True): Part(
        host=("forward/launcher/transposed_in_parts.cuh",),
        counters=("forward/values/zero_parts.cuh",),
    ),
}
_PLACES = {"kernel": _COLUMNS}


def _device(values: Values) -> tuple[str, ...]:
    """How P is packed where it is not as O is, and what adds products up beside O."""
    names = []
    if DTYPES[values["dtype"]].fp8:
        names.append("pack_quad.cuh")
    if values["num_splits"] > 1:
        names.append("pack.cuh.j2")
    if values["promote_columns"]:
        names.append("part.cuh")
    return tuple(f"forward/values/{name}" for name in names)


# how V lies and P is packed, by who sums P and by what shares a descale of V
_OPERANDS = {
    ("threads", ""): ("p_pairs.cuh", "rows.cuh"),
    ("tensor", ""): ("p_pairs.cuh", "rows_and_ones.cuh"),
    ("threads", "column"): ("p_quads.cuh", "columns.cuh", "prefetch_columns.cuh"),
    ("threads", "block"): ("p_quads.cuh", "columns.cuh", "prefetch_means.cuh"),
}
# whether PV is added up in parts of its columns, under the next block's softmax, all in one part
_PRODUCTS = {
    (False, False, False): ("whole.cuh", "whole_alone.cuh"),
    (False, True, False): ("whole.cuh",),
    (True, False, False): ("parts.cuh", "parts_alone.cuh"),
    (True, True, False): ("parts.cuh", "parts_under_softmax.cuh"),
    (True, False, True): ("parts.cuh", "parts_alone.cuh"),
    (True, True, True): ("parts.cuh", "one_part_under_softmax.cuh"),
}


def _consumer(values: Values) -> tuple[str, ...]:
    """What consumers do with P and V."""
    parts = values["promote_columns"] > 0
    names = [*_OPERANDS[values["sum"], values["v_scales"]]]
    if not parts and values["sum"] == "threads":
        names.append("issue.cuh")
    names += _PRODUCTS[parts, values["intra_warpgroup"], values["one_part"]]
    if values["promote"] and not parts:
        names += [f"promote/{values['totals']}.cuh", "promote/count.cuh"]
    if not parts:
        names.append("rescale.cuh.j2")
    elif not values["fuses_rescaling"]:
        names.append("keep_parts.cuh")
    return tuple(f"forward/values/{name}" for name in names)
