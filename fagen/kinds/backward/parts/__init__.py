"""The parts of a backward kernel: what keys of a schedule mean for its text and its memory.

Slots: keys (which rows see them), tiles (who deals them), loads (how Q, K, V and dO come), scores
(P and dS), steps (which GEMMs there are, and, last of all, in which order consumers run them),
outputs (how dK and dV leave), sums (how dQ is added up and rounded).
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from fagen.kinds.backward.parts.launcher import launcher
from fagen.kinds.backward.parts.loads import loads
from fagen.kinds.backward.parts.steps import consumers, runs, scores, steps
from fagen.kinds.backward.parts.sums import outputs, sums
from fagen.kinds.backward.parts.tiles import keys, tiles
from fagen.kinds.backward.rules import (
    both_make_dq,
    counts_steps,
    defers_dq,
    dq_transposed,
    last_makes_more,
    leaves_rest,
    ones_in_shared_memory,
    passes,
    rounds_fit,
    shares_rows,
    slices_dq,
    slopes_fit,
)
from fagen.kinds.scores import factor_log2, slope_factor
from fagen.part import (
    DESCRIPTOR,
    FLOAT,
    HEADERS,
    INT,
    REGISTERS_HEADER,
    TMA_HEADERS,
    Constant,
    Field,
    Part,
    Parts,
    Ratio,
    choices,
)
from fagen.schedule import Values
from fagen.vocab import DTYPES, MASKS, SCORES

# the keys that choose no parts, but by RULES
SIZES = frozenset(
    (
        *("head_dim", "head_dim_v", "block_m", "block_n"),
        *("stages", "do_stages", "ds_stages", "dq_slices"),
        *("producer_registers", "consumer_registers", "dq_registers", "max_spill_bytes"),
    )
)
RULES: tuple[Callable[[Values], Any], ...] = (
    *(ones_in_shared_memory, dq_transposed, shares_rows, leaves_rest, both_make_dq),
    *(counts_steps, slices_dq, defers_dq, passes, last_makes_more, rounds_fit, slopes_fit),
)

# The order of members of SharedStorage, of Params behind the tensor maps, and in which barriers are
# initialised, by name: machine code holds their offsets.
_SHARED = (
    *("k", "v", "q", "dout", "ds", "p", "k_peer", "ds_peer", "dq", "pieces", "statistics", "ones"),
    *("k_full", "v_full", "q_full", "dout_full", "q_empty", "dout_empty"),
    *("p_full", "p_empty", "ds_peer_full", "ds_full", "ds_empty", "dq_full", "dq_empty"),
    *("sequence", "tile", "dk_full", "dv_full", "dv_empty", "piece_full", "no_more_tiles"),
    *("tile_full", "tile_empty", "tiles"),
)
# operands that have a row more than once are shorter than memcheck takes them to be, and must not
# end with the memory
_SHARED_WITH_ONES = (*(name for name in _SHARED if name != "dq"), "dq")
_PARAMS = (
    *("out_rows", "dout_rows", "dq_rows", "dk_rows", "dv_rows", "lse", "dlse"),
    *("row_blocks", "key_blocks", "cu_seqlens_q", "cu_seqlens_k", "seqused_k"),
    *("offsets", "total_q", "total_k", "heads", "kv_heads", "group", "shares", "share_heads"),
    *("seqlen_q", "seqlen_k", "m_blocks", "n_blocks", "m_slots", "tiles"),
    *("row_blocks_count", "early_blocks", "m_blocks_divisor", "heads_divisor", "section_blocks"),
    *("sections", "section_tiles", "section_heads", "last_section_heads"),
    *("batch_shares", "shares_divisor", "scale", "scale_log2", "first_head", "first_batch"),
    *("list", "listed", "most_tiles", "most_kept"),
    *("cut", "cut_keys", "kept_keys", "flat_shares", "first_mixed", "first_paired", "paired_heads"),
)
_INITIALISED = (
    *("k_full", "v_full", "q_full", "q_empty", "dout_full", "dout_empty"),
    *("p_full", "p_empty", "ds_full", "ds_empty", "ds_peer_full", "dq_full", "dq_empty"),
    *("dk_full", "dv_full", "dv_empty", "tile_full", "tile_empty", "piece_full"),
)


def parts(values: Values) -> Parts:
    """Return the parts of a kernel with these values of a schedule's keys."""
    return parts_of(choices_of(values))


def choices_of(values: Values) -> Values:
    """Return what parts depend on; a mask is one of MASKS, or another."""
    chosen = choices(values, (key for key in values if key not in SIZES), RULES)
    return dict(chosen) | {"mask": MASKS[values["mask"]]}


def parts_of(chosen: Values) -> Parts:
    """Return the parts that there are for these choices."""
    return _parts(tuple(chosen.items()))


@cache
def _parts(chosen: tuple[tuple[str, Any], ...]) -> Parts:
    values = dict(chosen)
    first = about, sizes, keys, tiles, loads, consumers
    slots = *first, scores, steps, outputs, sums, runs, launcher
    twice = values["ones_in_shared_memory"] or SCORES[values["score"]].acts
    shared = _SHARED_WITH_ONES if twice else _SHARED
    every = tuple(part for slot in slots for part in slot(values))
    return Parts(
        every,
        _SECTIONS,
        shared_order=shared,
        params_order=_PARAMS,
        initialised=_INITIALISED,
    )


_SECTIONS = (
    *("backward/head.j2", "backward/tiles.j2", "backward/producer.j2", "parts/producer.j2"),
    *("backward/consumer.j2", "backward/kernel.j2"),
)


def about(values: Values) -> Iterator[Part]:
    """What a kernel says of itself, and what it includes."""
    rounder = ("backward/sums/about_rounder.cuh",) if values["postprocess"] else ()
    consumers = f"backward/steps/about_{values['partition']}.cuh.j2"
    dtype = DTYPES[values["dtype"]]
    yield Part(
        about=("backward/about.cuh.j2", *rounder, consumers),
        headers=(*HEADERS, *TMA_HEADERS, REGISTERS_HEADER, dtype.header),
    )


def sizes(values: Values) -> Iterator[Part]:
    """Yield what every kernel has, above all its sizes."""
    by_keys, one = values["partition"] == "keys", values["dq_by"] == "one"
    yield Part(
        constants=(
            *map(Constant, ("head_dim", "head_dim_v")),
            Constant("head_dim_padded", "in shared memory, padded with zeros"),
            Constant("head_dim_v_padded"),
            Constant("block_m", "rows of a step"),
            Constant("block_n", "keys of a thread block"),
            Constant("cluster", "thread blocks of neighbouring keys, which have the same rows"),
            Constant("stages", "Q buffers"),
            Constant("do_stages", "dO buffers"),
            Constant("ds_stages", "dS buffers"),
            Constant("consumers", f"warpgroups{' of 64 keys' if by_keys else ''}"),
        )
    )
    of_dq = (Constant("dq_registers", "of the consumer that computes dQ"),) if one else ()
    yield Part(
        constants=(
            *map(Constant, ("threads", "launch_registers")),
            *map(Constant, ("producer_registers", "consumer_registers")),
            *of_dq,
            Constant("row_threads", "of the kernels before and after"),
            Constant("row_lanes", "of those, that share a row"),
        )
    )
    # of plain scores, and what is alike, a text of the launcher fills it in
    factor = factor_log2(values) if SCORES[values["score"]].acts else None
    swizzles = [(f"{tile}_slab", f"{tile}_swizzle") for tile in ("qk", "v", "ds")]
    yield Part(
        constants=(
            *(Constant(slab) for slab, _ in swizzles),
            *(Constant(f"{name}.xor_bits", name=f"{name}_bits") for _, name in swizzles),
            *(
                Constant(f"{name}.cute", name=f"{name[:-8]}_descriptor", type=DESCRIPTOR)
                for _, name in swizzles
            ),
            Constant("dtype.wgmma_k", "the K of every wgmma", name="step_k"),
        ),
        params=(
            Field("group", INT, Ratio("heads", "kv_heads"), "query heads of a KV head"),
            Field("scale", FLOAT, slope_factor(values), "of dQ and dK"),
            Field("scale_log2", FLOAT, factor, "of S, times log2(e)"),
        ),
    )
