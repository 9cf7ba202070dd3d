"""The parts of a forward kernel: what keys of a schedule mean for its text and its memory.

Slots: keys (which a tile sees), tiles (who deals them), loads (how Q, K and V come), values (how V
lies), scores (softmax), steps (in which order GEMMs and softmax run), output (how O leaves).
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from fagen.kinds.forward.parts.launcher import launcher
from fagen.kinds.forward.parts.loads import loads
from fagen.kinds.forward.parts.scores import scores
from fagen.kinds.forward.parts.steps import consumer, output, roles, steps
from fagen.kinds.forward.parts.tiles import keys, tiles
from fagen.kinds.forward.parts.values import v
from fagen.kinds.forward.structure import RULES
from fagen.part import (
    DESCRIPTOR,
    HEADERS,
    REGISTERS_HEADER,
    TMA_HEADERS,
    Constant,
    Part,
    Parts,
    choices,
)
from fagen.schedule import Values
from fagen.vocab import DTYPES, OUT_DTYPES

# the keys that choose no parts, but by RULES
SIZES = frozenset(
    (
        *("head_dim", "head_dim_v", "block_m", "block_n", "stages", "v_row_stages", "q_stages"),
        *("producer_registers", "consumer_registers", "max_spill_bytes"),
    )
)

# The order of members of SharedStorage and of initialised barriers, by name: machine code
# holds their offsets.
_SHARED = (
    *("q", "k", "v_rows", "v", "o", "totals", "scales", "ones", "q_full", "votes"),
    *("k_full", "v_full", "v_rows_full", "v_rows_empty", "q_empty", "k_empty", "v_empty"),
    *("o_empty", "tile_full", "tile_empty", "tiles", "tile_wanted"),
    "curved",
)
_INITIALISED = (
    *("q_full", "q_empty", "k_full", "v_full", "k_empty", "v_empty"),
    *("v_rows_full", "v_rows_empty", "o_empty", "tile_full", "tile_empty", "tile_wanted"),
)

# That of Params behind the tensor maps: of varlen sequences, of splits of keys, and else.
_LSE = "lse", "lse_stride_batch", "lse_stride_head"
_DESCALES = (
    *("q_scale", "k_scale", "v_scale", "v_mean", "k_mean", "q_rows"),
    *("q_stride_batch", "q_stride_head", "q_stride_seq"),
)
_VARLEN = (
    *(*_LSE, "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "batch", "total_q", "total_k"),
    *("heads", "exceeds_l2", "heads_per_kv_head", "tiles_drawn", *_DESCALES, "scale_log2"),
)
_SPLIT = (
    *("partials", "shares", "out", "lse"),
    *("out_stride_batch", "out_stride_seq", "out_stride_head", *_LSE[1:]),
    *("batch", "heads", "seqlen_q", "seqlen_k", "split_blocks", "slots", "kv_heads"),
    *("heads_per_kv_head", "split_tiles", "kv_head_tiles", "heads_divisor", "seqlen_q_divisor"),
    *_DESCALES,
    *("scale", "scale_log2", "m_blocks", "flat_heads", "first_seeing"),
)
_EQUAL = (
    *(*_LSE, *_DESCALES, "heads", "heads_per_kv_head", "seqlen_q", "seqlen_k"),
    *("m_pairs", "m_blocks", "slots", "has_empty_tiles"),
    *("sections", "section_slots", "section_heads", "last_section_heads"),
    *("m_end", "tiles", "tiles_drawn", "scale_log2"),
)


def parts(values: Values) -> Parts:
    """Return the parts of a kernel with these values of a schedule's keys."""
    return _parts(choices(values, (key for key in values if key not in SIZES), RULES))


@cache
def _parts(chosen: tuple[tuple[str, Any], ...]) -> Parts:
    values = dict(chosen)
    slots = about, sizes, consumer, keys, tiles, loads, v, scores, steps, output, roles, launcher
    varlen, splits = values["lengths"] == "varlen", values["num_splits"] > 1
    params = _VARLEN if varlen else _SPLIT if splits else _EQUAL
    every = tuple(part for slot in slots for part in slot(values))
    return Parts(
        every,
        _SECTIONS,
        shared_order=_SHARED,
        params_order=params,
        initialised=_INITIALISED,
    )


_SECTIONS = (
    *("forward/head.j2", "forward/tiles.j2", "forward/producer.j2", "forward/consumer.j2"),
    *("forward/kernel.j2", "parts/kernels.j2"),
)


def about(values: Values) -> Iterator[Part]:
    """What a kernel says of itself, and what it includes."""
    texts = (text for (key, value), text in _ABOUT.items() if values[key] == value)
    dtypes = DTYPES[values["dtype"]], OUT_DTYPES[values["out_dtype"]]
    yield Part(
        about=("forward/about.cuh.j2", *texts),
        headers=(*HEADERS, *TMA_HEADERS, REGISTERS_HEADER, *(dtype.header for dtype in dtypes)),
    )


# what a kernel says where a key has this value
_ABOUT = {
    ("producer", "none"): "forward/steps/about_alone.cuh.j2",
    ("producer", "warp"): "forward/steps/about_producer.cuh.j2",
    ("inter_warpgroup", True): "forward/steps/ping_pong/about.cuh",
    ("pack_gqa", True): "forward/tiles/about_packed.cuh",
    ("lengths", "varlen"): "forward/tiles/varlen/about.cuh",
    ("v_layout", "columns"): "forward/values/about_columns.cuh.j2",
    ("transposes", "producer"): "forward/values/about_rows.cuh.j2",
    ("transposes", "kernel"): "forward/values/about_transposed.cuh.j2",
    ("scales", "block"): "forward/scores/about_blocks.cuh",
}


def sizes(values: Values) -> Iterator[Part]:
    """What every kernel has."""
    yield Part(
        constants=(
            Constant("head_dim"),
            Constant("head_dim_v"),
            Constant("tile.head_dim_padded", "in shared memory, padded with zeros"),
            Constant("tile.head_dim_v_padded"),
            Constant("block_m"),
            Constant("block_n"),
            Constant("pipeline.stages", "K and V buffers"),
            Constant("pipeline.q_stages"),
            Constant("consumers", "warpgroups of 64 query rows"),
            Constant("threads"),
            Constant("launch_registers"),
            Constant("dtype.wgmma_k", "the K of every wgmma", name="step_k"),
            Constant(
                "tile.qk_slab", "columns of a slab: one swizzle span, all rows of a slab together"
            ),
            Constant("tile.qk_swizzle.cute", name="qk_descriptor", type=DESCRIPTOR),
        )
    )
