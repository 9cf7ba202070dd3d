"""Steps: in which order GEMMs and softmax run; output: how O leaves."""

from collections.abc import Iterator

from fagen.kinds.combining import EVERY_SPLIT, SEEN_SPLITS, combining
from fagen.kinds.forward.parts.loads import map_of_rows
from fagen.kinds.sinks import sinks_of_call
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
    Union,
    amount,
    pointer_to,
)
from fagen.schedule import Values
from fagen.vocab import DTYPES, MASKS, ORDERS, OUT_DTYPES, SCORES


def consumer(values: Values) -> Iterator[Part]:
    """What each consumer has: rows of a tile, and its places in the rings of Q, K and V."""
    alone, clustered = values["producer"] == "none", values["cluster"] > 1
    in_turns = values["skips_idle_warpgroups"]
    registers = () if alone else ("producer_registers", "consumer_registers")
    yield Part(
        constants=tuple(map(Constant, registers)),
        device=_barriers(values),
        consumer=(
            *(("forward/steps/loader.cuh",) if alone else ()),
            _RINGS[values["intra_warpgroup"], DTYPES[values["dtype"]].fp8],
            "forward/steps/release_in_cluster.cuh" if clustered else "forward/steps/release.cuh",
            _ROWS[in_turns, values["pack_gqa"]],
        ),
    )


# by whether steps overlap, and whether it is e4m3. A try_wait ahead hides the latency of a wait and
# costs instructions, which show where tensor cores need few clocks and nothing runs beside them.
_RINGS = {
    (True, False): "forward/steps/rings.cuh",
    (True, True): "forward/steps/rings.cuh",
    (False, False): "forward/steps/rings.cuh",
    (False, True): "forward/steps/rings_without_peeks.cuh",
}
# by whether warpgroups take rows in turns, and whether these are of several heads
_ROWS = {
    (False, False): "forward/steps/rows.cuh",
    (True, False): "forward/steps/rows_in_turns.cuh",
    (False, True): "forward/steps/packed_rows.cuh",
    (True, True): "forward/steps/packed_rows_in_turns.cuh",
}


def steps(values: Values) -> Iterator[Part]:
    """In which order GEMMs and softmax run."""
    in_turns, alone = values["skips_idle_warpgroups"], values["producer"] == "none"
    clustered = values["cluster"] > 1
    if values["inter_warpgroup"]:
        yield _ping_pong(in_turns)
    if alone:
        yield Part(consumer=("forward/steps/prefetch.cuh.j2",))
    yield Part(consumer=tuple(_overlapped(values) if values["intra_warpgroup"] else _PLAIN))
    yield Part(
        consumer=("forward/steps/reset.cuh", _RUN[in_turns, values["num_splits"] > 1]),
        kernel=("sm90/sync_cluster.cuh" if clustered else "sm90/sync.cuh",),
    )


def roles(values: Values) -> Iterator[Part]:
    """Which warps produce, and which consume."""
    if values["producer"] == "none":
        yield Part(kernel=("forward/steps/roles/consumers_alone.cuh",))
        return
    text = "forward/steps/roles/producer_and_consumers.cuh.j2"
    yield Part(kernel=(text,), role=tuple(_roles(values)))


_PLAIN = "forward/steps/plain/step.cuh.j2", "forward/steps/plain/tiles.cuh.j2"

# by whether warpgroups take rows in turns, and whether tiles are of splits
_RUN = {
    (False, False): "forward/steps/run.cuh.j2",
    (False, True): "forward/steps/run_splits.cuh.j2",
    (True, False): "forward/steps/run_in_turns.cuh.j2",
}


# by whether K and V are loaded for pairs of tiles, whether tiles are of splits, or varlen, and
# whether rows are of several heads
_OWN_BLOCKS = {
    (False, False, False, False): "forward/steps/skip/own_blocks.cuh",
    (False, False, True, False): "forward/steps/skip/varlen_own_blocks.cuh",
    (False, True, False, False): "forward/steps/skip/own_blocks_of_split.cuh",
    (True, False, False, False): "forward/steps/skip/own_blocks_in_cluster.cuh",
    (True, False, True, False): "forward/steps/skip/own_blocks_in_cluster_of_sequence.cuh",
    (False, False, False, True): "forward/steps/skip/packed_own_blocks.cuh",
    (False, False, True, True): "forward/steps/skip/varlen_packed_own_blocks.cuh",
}


# by whether a tile's first blocks are skipped as its last ones are
_SKIPPED = {
    False: "forward/steps/skip/last_blocks.cuh",
    True: "forward/steps/skip/outer_blocks.cuh",
}


def _ping_pong(in_turns: bool) -> Part:
    """Turns of the warpgroups at the tensor cores."""
    return Part(
        device=("sm90/barrier_arrive.cuh", "forward/steps/ping_pong/barriers.cuh"),
        consumer=(
            "forward/steps/ping_pong/pass_on_turn.cuh",
            "forward/steps/ping_pong/turns_of_whole_tiles.cuh"
            if in_turns
            else "forward/steps/ping_pong/turns.cuh",
        ),
    )


def _overlapped(values: Values) -> Iterator[str]:
    """Yield the texts of steps with S of a block and PV of the block before in flight."""
    if values["skips_masked_blocks"]:
        splits = values["num_splits"] > 1
        varlen = values["lengths"] == "varlen" or bool(MASKS[values["mask"]].tables)
        yield _OWN_BLOCKS[values["cluster"] > 1, splits, varlen, values["pack_gqa"]]
        yield _SKIPPED[values["skips_first_blocks"]]
        yield "forward/steps/skip/blocks.cuh.j2"
    if values["skips_steps"]:
        yield "forward/steps/skip/step.cuh.j2"
    yield "forward/steps/overlapped/step.cuh.j2"
    yield "forward/steps/overlapped/first_block.cuh.j2"
    if values["skips_idle_warpgroups"]:
        yield "forward/steps/overlapped/tiles_in_turns.cuh.j2"
        return
    yield "forward/steps/overlapped/last_pv.cuh.j2"
    if values["producer"] == "none":
        yield "forward/steps/overlapped/alone.cuh.j2"
    else:
        yield "forward/steps/overlapped/tiles.cuh.j2"


def _barriers(values: Values) -> tuple[str, ...]:
    """The texts of named barriers of warpgroups, where there are some."""
    if values["num_splits"] > 1 and not (values["inter_warpgroup"] or values["finds_spread"]):
        return ()
    return "sm90/barrier_sync.cuh", "forward/steps/barriers.cuh"


_LOADS_AS_WARP = "forward/steps/roles/one_warp.cuh"
_LOADS_AS_THREAD = "forward/steps/roles/one_thread.cuh"


def _roles(values: Values) -> Iterator[str]:
    """Yield what warps of the producer's warpgroup do."""
    transposes, varlen = values["transposes"] == "producer", values["lengths"] == "varlen"
    makes_tiles = varlen and not values["scheduler_warp"]
    yield _LOADS_AS_WARP if makes_tiles else _LOADS_AS_THREAD
    if values["scheduler_warp"]:
        yield "forward/steps/roles/scheduler.cuh"
    if values["scales"] == "block" and not transposes:
        yield "forward/steps/roles/scales.cuh"
    if transposes:
        yield "forward/steps/roles/transposers.cuh"


_OUTPUTS = {
    "own": ("forward/output/buffer.cuh", "forward/output/own.cuh"),
    "half": ("forward/output/buffer.cuh", "forward/output/half.cuh"),
    "reuse_v": ("forward/output/reuse_v.cuh.j2",),
}


# where O and LSE go, by lengths, and whether a tile's rows are of several heads
_PLACES = {
    ("equal", False): "forward/output/dense.cuh",
    ("varlen", False): "forward/output/varlen.cuh",
    ("equal", True): "forward/output/packed.cuh",
    ("varlen", True): "forward/output/varlen_packed.cuh",
}


# what becomes of a row's sum, by whether a tile's rows are of several heads, and have sinks, with
# which sums have begun; and by whether K had a mean
_ROW_ENDS = {
    (False, False, False, False): "forward/output/row_end.cuh.j2",
    (False, False, False, True): "forward/output/row_end.cuh.j2",
    (True, False, False, False): "forward/output/packed_row_end.cuh",
    (True, False, False, True): "forward/output/packed_row_end_with_mean.cuh",
    (False, True, False, False): "forward/output/row_end_with_sink.cuh.j2",
    (False, True, False, True): "forward/output/row_end_with_sink.cuh.j2",
    (True, True, False, False): "forward/output/packed_row_end_with_sink.cuh",
    (True, True, False, True): "forward/output/packed_row_end_with_mean_and_sink.cuh",
    (False, True, True, False): "forward/output/row_end_begun_with_sink.cuh",
    (True, True, True, False): "forward/output/packed_row_end_begun_with_sink.cuh",
}
# by whether tiles of a last round are in parts of their keys
_OF_PARTS = {
    False: Part(),
    True: Part(
        softmax=("forward/scores/unrounded_with_offset.cuh",),
        consumer=("forward/output/parts.cuh",),
        tile_ends=("forward/output/part_ends.cuh",),
    ),
}
_ADDED_SINK: dict[bool, tuple[str, ...]] = {
    False: (),
    True: ("sm90/exp2.cuh", "forward/output/sink.cuh"),
}
# what an average of V is, by whether it has descales and means, and rows have sinks
_AVERAGES = {
    (False, False): ("forward/output/averages.cuh.j2",),
    (False, True): ("forward/output/averages.cuh.j2",),
    (True, False): ("forward/output/means.cuh", "forward/output/descaled.cuh.j2"),
    (True, True): (
        "forward/output/of_keys.cuh",
        "forward/output/means_beside_sink.cuh",
        "forward/output/descaled.cuh.j2",
    ),
}


def output(values: Values) -> Iterator[Part]:
    """How O leaves."""
    way = "split" if values["num_splits"] > 1 else values["output"]
    varlen, dtype = values["lengths"] == "varlen", DTYPES[values["dtype"]]
    begun = values["begins_with_sink"]
    has_mean = dtype.fp8 and not SCORES[values["score"]].acts
    limited = values["out_dtype"] == values["dtype"] and bool(dtype.largest)
    v_array = Array("v", ELEMENT, (amount("stages"), amount("block_n", "head_dim_v_padded")))
    if limited:
        yield Part(constants=(Constant("softmax.largest_output", "that is finite"),))
    yield from sinks_of_call(values["sink"], ahead=way != "split")
    if way == "split":
        start = SEEN_SPLITS if MASKS[values["mask"]].first_by_row else EVERY_SPLIT
        yield Part(
            consumer=("forward/tiles/lengths.cuh", "forward/output/split.cuh.j2"),
            kernel=("sm90/overlap_launches.cuh",),
            shared=(v_array,),
        )
        if dtype.fp8:
            yield Part(constants=(Alias("OutElement", "out_dtype.cpp"),))
        if values["transposes"] == "producer":
            yield Part(device=("sm90/store_matrices.cuh",))
        how = {"descaled": dtype.fp8, "sink": bool(values["sink"])}
        of_rows = ("descales.cuh.j2", "descales_of_v.cuh")[SCORES[values["score"]].acts]
        yield combining(start, "limited" if limited else "average", descales=of_rows, **how)
        return
    lse_strides = ("head",) if varlen else ("batch", "head")
    yield Part(
        consumer=("forward/tiles/varlen_lengths.cuh" if varlen else "forward/tiles/lengths.cuh",),
        params=(
            Field("lse", pointer_to(FLOAT), Argument("lse"), "may be null"),
            *(Field(f"lse_stride_{s}", INT64, Argument(f"lse_stride_{s}")) for s in lse_strides),
        ),
    )
    yield Part(
        device=(
            "sm90/accumulators.cuh",
            "forward/output/log2_reciprocal.cuh",
            *_ADDED_SINK[bool(values["sink"]) and not begun],
            f"forward/output/store_{OUT_DTYPES[values['out_dtype']].bytes}_bytes.cuh.j2",
        ),
        consumer=(
            _PLACES[values["lengths"], values["pack_gqa"]],
            *(("forward/output/column_scales.cuh",) if values["v_scales"] == "column" else ()),
            *_AVERAGES[dtype.fp8, bool(values["sink"])],
            *_OUTPUTS[way],
            "forward/output/store.cuh.j2",
        ),
        row_ends=(_ROW_ENDS[values["pack_gqa"], bool(values["sink"]), begun, has_mean],),
    )
    yield _OF_PARTS[ORDERS[values["order"]].parts]
    if way == "reuse_v":
        yield Part(device=("forward/output/barrier.cuh",))
    o_dims = amount("block_m", "head_dim_v_padded", per=2 if way == "half" else None)
    o_array = Array("o", OUT_ELEMENT, (o_dims,))
    readers = amount("cluster", "consumers") if values["cluster"] > 1 else amount("consumers")
    yield Part(
        constants=(
            Alias("OutElement", "out_dtype.cpp"),
            Constant("tile.o_slab"),
            Constant("tile.o_swizzle.xor_bits", name="o_swizzle_bits"),
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
        maps=(
            map_of_rows(
                values,
                "out",
                "o_slab",
                "tile.o_swizzle",
                columns="head_dim_v",
                elements=("OutElement", "out_dtype"),
            ),
        ),
    )
