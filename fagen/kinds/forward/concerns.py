"""What a Plan of attention is nested by, but for softmax: tiles, the pipeline, scales, the order.

Each is worked out of a schedule's keys by the function of its name.
"""

from dataclasses import dataclass
from typing import ClassVar

from fagen.arch import SM90
from fagen.kinds.attention import padded_head_dims
from fagen.kinds.forward import structure
from fagen.kinds.forward.rules import consumers
from fagen.kinds.forward.structure import TRANSPOSERS
from fagen.launch import Grid, Launch, Product
from fagen.schedule import Values
from fagen.signature import Extent
from fagen.vocab import DTYPES, MASKS, MOST_PARTS, ORDERS, OUT_DTYPES, Swizzle, swizzle_of

# Of a warpgroup, which has whole queries of a group, so many of the 64 rows may stay empty: five
# heads fill 60, and where sequences are long as much of the GEMMs is for nothing.
_MOST_UNUSED = 4


@dataclass(frozen=True)
class Tile:
    """How tiles lie in shared memory, in slabs of so many columns, and in accumulators."""

    head_dim_padded: int
    head_dim_v_padded: int
    qk_swizzle: Swizzle
    v_swizzle: Swizzle  # as wgmma reads it
    v_rows_swizzle: Swizzle  # row-major, where the producer transposes it
    o_swizzle: Swizzle
    qk_slab: int
    v_slab: int
    v_rows_slab: int
    o_slab: int
    o_columns: int  # that all PV GEMMs of a block give
    pack_gqa: bool  # a tile's rows are of several heads
    most_unused: ClassVar[int] = _MOST_UNUSED


def tile(values: Values) -> Tile:
    """Work it out."""
    dtype, out_dtype = DTYPES[values["dtype"]], OUT_DTYPES[values["out_dtype"]]
    d, d_v = padded_head_dims(values)
    columns = d, values["block_n"] if dtype.fp8 else d_v, d_v
    qk, v, v_rows = (swizzle_of(width * dtype.bytes) for width in columns)
    o = swizzle_of(d_v * out_dtype.bytes)
    return Tile(
        head_dim_padded=d,
        head_dim_v_padded=d_v,
        qk_swizzle=qk,
        v_swizzle=v,
        v_rows_swizzle=v_rows,
        o_swizzle=o,
        qk_slab=qk.bytes // dtype.bytes,
        v_slab=v.bytes // dtype.bytes,
        v_rows_slab=v_rows.bytes // dtype.bytes,
        o_slab=o.bytes // out_dtype.bytes,
        o_columns=d_v + (SM90.wgmma_n_step if values["sum"] == "tensor" else 0),
        pack_gqa=values["pack_gqa"],
    )


@dataclass(frozen=True)
class Pipeline:
    """What overlaps with what: buffers, turns, and steps that consumers skip."""

    transposers: ClassVar[int] = TRANSPOSERS  # warps that transpose V where it comes row-major

    stages: int
    q_stages: int
    inter_warpgroup: bool
    intra_warpgroup: bool
    masked_steps: bool  # blocks after a tile's last one may be seen in part
    skips_masked_blocks: bool  # consumers skip blocks whose keys their rows do not see
    skips_first_blocks: bool  # not only those that only rows below theirs see, but above too
    skips_steps: bool  # a consumer without rows skips all but the first
    skips_idle_warpgroups: bool  # or goes on to the next tile, whose rows it then has
    skips_several_times: bool  # so often that lanes left behind might miss a buffer's phase
    lays_q_anew: bool  # the descriptors of a single buffer of Q are worked out in each step
    k_ahead: int  # blocks that K is loaded ahead of V: as many as are skipped before O is stored
    unrolled_copies: int  # that a thread issues without a loop: of all of a tile, or one
    transposes: bool  # warps of the producer transpose V
    transposes_before: bool  # or a kernel before
    transposed_loads: int  # units that a transposer has in flight
    # K of the next block is loaded behind V: where rows of V have one buffer, they are wanted first
    v_first: bool


def pipeline(values: Values) -> Pipeline:
    """Work it out."""
    skips, unrolls = structure.skips_masked_blocks(values), structure.unrolls_copies(values)
    far = skips and values["output"] == "reuse_v"
    return Pipeline(
        stages=values["stages"],
        q_stages=values["q_stages"],
        inter_warpgroup=values["inter_warpgroup"],
        intra_warpgroup=values["intra_warpgroup"],
        masked_steps=MASKS[values["mask"]].last_by_row or not values["intra_warpgroup"],
        skips_masked_blocks=skips,
        skips_first_blocks=structure.skips_first_blocks(values),
        skips_steps=structure.skips_steps(values),
        skips_idle_warpgroups=structure.skips_idle_warpgroups(values),
        skips_several_times=structure.skips_first_blocks(values)
        or structure.skips_idle_warpgroups(values),
        lays_q_anew=structure.lays_q_anew(values),
        k_ahead=-(-values["block_m"] // values["block_n"]) if far else 1,
        unrolled_copies=SM90.wgmma_n_max // 32 if unrolls else 1,
        transposes=values["transposes"] == "producer",
        transposes_before=values["transposes"] == "kernel",
        transposed_loads=4 if unrolls else 2,
        v_first=structure.single_v_rows(values),
    )


@dataclass(frozen=True)
class Transposition:
    """The kernel that transposes V before all tiles, and where it leaves it in the workspace."""

    threads: ClassVar[int] = 128
    keys: ClassVar[int] = 128  # of a thread block
    columns: ClassVar[int] = 64

    head_dim_v: int
    draws: bool  # tiles are drawn from a counter behind V, which is zero when it ends
    behind: int  # bytes that parts of tiles have there

    @property
    def launch(self) -> Launch:
        """The kernel, which may begin under the end of the one before it."""
        patches = Extent(number=-(-self.head_dim_v // self.columns))
        keys = Extent("seqlen_k", per=self.keys)
        grid = Grid(Product((keys, patches, *_KV_HEADS)))
        named = "transposing_threads"
        return Launch("transpose_v", grid, self.threads, overlaps=True, threads_as=named)

    @property
    def workspace(self) -> Product:
        """The bytes of V by columns, each from a line of the cache on; the counter has one more."""
        keys = Extent("seqlen_k", per=self.keys, times=self.keys)
        columns = Extent(number=self.head_dim_v + self.draws)
        return Product((keys, columns, *_KV_HEADS), plus=self.behind)


_KV_HEADS = Extent("kv_heads"), Extent("batch")


@dataclass(frozen=True)
class Scales:
    """What shares a factor of Q, K and V, where they have factors; elsewhere false and zero."""

    rows: int  # of a block of scales; 0: each (batch, head) has one, or by strides of 0 all
    v_by_block: bool  # as K's, in the exponents; else V has one for each column
    group_keys: int  # of a step, that lie in one such block
    before_qk: bool  # consumers read them before S = QKᵀ, a long GEMM there, and not after it

    @property
    def by_block(self) -> bool:
        """Whether blocks of rows of Q and K have scales of their own."""
        return self.rows > 0


def scales(values: Values) -> Scales:
    """Work it out."""
    return Scales(
        rows=values["scale_rows"],
        v_by_block=values["v_scales"] == "block",
        group_keys=structure.keys_of_a_scale(values["block_n"], values["scale_rows"]),
        before_qk=structure.scales_before_qk(values),
    )


# A draw takes about a microsecond, as a block does. Drawn a whole tile ahead, tiles would go to
# blocks with the longest way to go as soon as to those that come free next.
_DRAW_AHEAD = 2

# With so many tiles for each SM the last section of heads ends, for 97 shapes of 100,
# within 3 % of the greedy order of all tiles (tests/test_order.py). Four times as many end within
# 2 % for 98, where their K and V fit the L2 cache. Few long heads want more: 6 of 11,000 tokens end
# 6 % late with two. Steps that take long for their bytes do not wait for memory either way.
_SECTION_ROUNDS, _OF_LONG_STEPS = 2, 4


@dataclass(frozen=True)
class Order:
    """Which tiles a thread block has, one after the other."""

    l2_bytes: ClassVar[int] = SM90.l2_bytes
    # of the L2 cache, for the K and V that blocks share: each half holds a copy of what both read
    l2_share_bytes: ClassVar[int] = SM90.l2_bytes // 2
    draw_ahead: ClassVar[int] = _DRAW_AHEAD  # blocks before a tile's end the next one is drawn
    most_units: ClassVar[int] = 2 * SM90.sm_count  # parts of all tiles of the last round
    tile_blocks: ClassVar[int] = 2  # what a tile takes beside its blocks of keys, in such
    part_blocks: ClassVar[int] = 1  # and a part of one that leaves, and again when it is added

    dynamic: bool  # the producer draws tiles from a counter
    section_rounds: int  # and the last section of heads has so many for each SM
    tile_stages: int  # and passes them on through a ring of so many; else 0
    most_parts: int  # of a tile of the last round; 0 where all are whole
    tile_readers: int  # warps that read it
    cluster: int  # thread blocks that share K and V


def order(values: Values) -> Order:
    """Work it out."""
    dynamic = ORDERS[values["order"]].dynamic
    long_steps = values["transposes"] == "kernel" or structure.single_v_rows(values)
    return Order(
        dynamic=dynamic,
        section_rounds=_OF_LONG_STEPS if long_steps else _SECTION_ROUNDS,
        tile_stages=structure.tile_stages(values),
        most_parts=MOST_PARTS if ORDERS[values["order"]].parts else 0,
        tile_readers=_tile_readers(values) if dynamic else 0,
        cluster=values["cluster"],
    )


def _tile_readers(values: Values) -> int:
    """Return how many warps follow the producer's tiles: consumers, transposers, that of scales."""
    warps = consumers(values) * SM90.warpgroup_threads // SM90.warp_threads
    transposers = TRANSPOSERS if values["transposes"] == "producer" else 0
    scales = values["scales"] == "block" and not transposers  # else a transposer writes them too
    # where a warp of its own draws tiles, the producer reads them too
    return warps + transposers + scales + structure.scheduler_warp(values)
