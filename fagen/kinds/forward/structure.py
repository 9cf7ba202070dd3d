"""What keys of a schedule mean for the structure of its kernel: rules over raw values.

A Plan, its parts and its ledgers read them here; none is a measurement, or changes a slug.
"""

import math
from collections.abc import Callable
from typing import Any

from fagen.arch import SM90
from fagen.combining import Filling
from fagen.kinds.forward.rules import consumers
from fagen.schedule import Values
from fagen.vocab import DTYPES, MASKS, ORDERS, SCORES, Mask

TRANSPOSERS = 3  # all warps of the producer but the one that loads
TILE_STAGES = 2  # of a ring that passes tiles on: the one in work and the next
VARLEN_TILE_STAGES = 6  # of short sequences each warpgroup may have one in work
_UNROLLING_REGISTERS = 40  # of a producer; with fewer, unrolled copies spill


def threads(values: Values) -> int:
    """Return threads per block; a producer is a whole warpgroup, since setmaxnreg acts on one."""
    groups = consumers(values) + int(values["producer"] == "warp")
    return groups * SM90.warpgroup_threads


def keys_of_a_scale(block_n: int, scale_rows: int) -> int:
    """Return how many keys of a step share a scale; all of them where scale_rows is 0.

    A step need not hold whole blocks of scales, nor a block whole steps: it is what divides both.
    """
    return math.gcd(block_n, scale_rows)


def numbers_sequences(values: Values) -> bool:
    """Whether a tile of varlen sequences knows its one's number: by which it has descales, or S."""
    return DTYPES[values["dtype"]].fp8 or "batch" in SCORES[values["score"]].reads


def scores_by_block(values: Values) -> bool:
    """Whether blocks of S have factors of their own where P is made of it.

    Where elements become other numbers before, these scale what they are made of, and then all of
    S has one.
    """
    return bool(values["scales"] == "block" and not SCORES[values["score"]].acts)


def begins_with_sink(values: Values) -> bool:
    """Whether a row's maximum and sum begin with its sink, which costs nothing where the row ends.

    Elsewhere it joins a row's sum at its end: in e4m3, whose means count as much as keys without
    sinks do, and beside sums of tensor cores. Or a kernel that combines splits adds it.
    """
    plain = values["num_splits"] == 1 and values["sum"] == "threads"
    return bool(values["sink"]) and plain and not DTYPES[values["dtype"]].fp8


def parts_sums(values: Values) -> bool:
    """Whether a block's row sums of P are added up by several groups of its keys, each by itself.

    Where each has a descale of V of its own, which is not part of the sums.
    """
    several = keys_of_a_scale(values["block_n"], values["scale_rows"]) < values["block_n"]
    return bool(values["v_scales"] == "block" and several)


def finds_spread(values: Values) -> bool:
    """Whether a tile whose scores are widely spread goes on in a way of its own.

    Where P has so few powers of two that such scores often outgrow it under a lazy maximum.
    """
    lazy, overlaps = values["maximum"] == "lazy", bool(values["intra_warpgroup"])
    return bool(lazy and overlaps and DTYPES[values["dtype"]].narrow)


def fuses_rescaling(values: Values) -> bool:
    """Whether O is rescaled where parts of PV are added to it, with no vote whether it needs that.

    Not where a row max is kept as a rule: then it seldom does.
    """
    raises = values["maximum"] == "online" and not values["rescale_threshold"]
    return bool(values["promote_columns"] and raises)


def one_part(values: Values) -> bool:
    """Whether all columns of PV are promoted in one part."""
    columns = DTYPES[values["dtype"]].filled_up(values["head_dim_v"])
    return bool(values["promote_columns"] == columns)


def single_v_rows(values: Values) -> bool:
    """Whether row-major V has one buffer, whatever V has once it is transposed."""
    return bool(values["v_row_stages"] == 1)


def v_in_shared(values: Values) -> str:
    """How V in e4m3 comes into shared memory: as a kernel before has laid it, if any."""
    return "columns" if values["transposes"] == "kernel" else str(values["v_layout"])


def scheduler_warp(values: Values) -> bool:
    """Whether a warp of its own draws tiles, whose number the GPU alone knows.

    Where all warps beside the producer's transpose V, that one draws them.
    """
    return bool(values["lengths"] == "varlen" and values["transposes"] != "producer")


def head_major(values: Values) -> bool:
    """Whether first heads come one by one, whatever their tiles see: other producers lack time."""
    return scheduler_warp(values) and MASKS[values["mask"]].last_by_row


def tile_stages(values: Values) -> int:
    """Return how many tiles that were drawn a ring holds; none where nobody draws them."""
    if not ORDERS[values["order"]].dynamic:
        return 0
    return VARLEN_TILE_STAGES if values["lengths"] == "varlen" else TILE_STAGES


def skips_idle_warpgroups(values: Values) -> bool:
    """Whether consumers without rows of a tile go on to the next one.

    Not where all must have read V before O is stored through its space.
    """
    several = values["lengths"] == "varlen" and consumers(values) > 1
    return several and bool(values["intra_warpgroup"]) and values["output"] != "reuse_v"


def skips_masked_blocks(values: Values) -> bool:
    """Whether some rows of a tile, or of a pair of tiles, see less than a block_n of its end.

    Only where they can wait for the others: these need buffers, and V's space, before they go on.
    """
    mask = MASKS[values["mask"]]
    by_row = mask.last_by_row and mask.steady  # else rows may see more than block_m keys less
    if not (by_row and values["producer"] == "warp" and values["intra_warpgroup"]):
        return False
    if values["cluster"] > 1:
        return True  # the rules of a schedule see to it
    block_m, block_n = values["block_m"], values["block_n"]
    skipped = -(-(block_m - SM90.wgmma_m) // block_n)
    most = values["stages"]
    if values["inter_warpgroup"] and values["output"] == "reuse_v":
        most = 1
    elif values["inter_warpgroup"] and skips_idle_warpgroups(values):
        # whose turn it is first may be who skips none: at the next turn after those that others
        # skip it needs a V beside the last tile's last one, which these still hold
        most -= 1
    ends_elsewhere = block_m % block_n > 0 or block_m - SM90.wgmma_m >= block_n
    if not ends_elsewhere or not 0 < skipped <= most:
        return False
    # K is loaded that far ahead of the first V, which waits for the last tile's O; but the first K
    # alone frees a buffer before there is a V
    ahead = -(-block_m // block_n)
    return bool(values["output"] != "reuse_v" or ahead <= values["stages"])


def skips_first_blocks(values: Values) -> bool:
    """Whether a warpgroup leaves out a tile's first blocks too, which only rows above its own see.

    They come last, and it skips them with those of the next tile before its first S there. Until
    then it holds the last V that it read: all those between must find buffers beside that one. In
    turns it waits for the next Q with turns of this tile before it: who has yet to skip two of this
    tile's blocks would then hold a V of the one before for ever.
    """
    mask = MASKS[values["mask"]]
    moves_on = mask.first_by_row and mask.first_steady and skips_masked_blocks(values)
    alone = values["lengths"] == "equal" and values["num_splits"] == values["cluster"] == 1
    if not (moves_on and alone) or values["pack_gqa"] or values["output"] == "reuse_v":
        return False
    above = range(0, values["block_m"], SM90.wgmma_m)
    skipped = [-(-rows // values["block_n"]) for rows in above]
    if values["inter_warpgroup"] and max(skipped) > 1:
        return False
    ends = zip(skipped, reversed(skipped), strict=True)
    return bool(max(first + max(0, last - 1) for first, last in ends) < values["stages"])


def loads_q_ahead(values: Values) -> bool:
    """Whether Q comes before a tile's first K: where it has two buffers, one of which is empty.

    K's are not, where warpgroups that begin a tile apart still hold those of the tile before.
    """
    return skips_first_blocks(values) and bool(values["q_stages"] > 1)


def loads_q_in_steps(values: Values) -> bool:
    """Whether a single Q comes a warpgroup at a time, each one's beside blocks that it sees first.

    Who waits for it holds the last V of the tile before, and as many blocks come before Q. In turns
    who has skipped some would keep the others from theirs.
    """
    by_step = values["block_n"] == SM90.wgmma_m and consumers(values) <= values["stages"]
    single = values["q_stages"] == 1
    return skips_first_blocks(values) and by_step and single and not values["inter_warpgroup"]


def skips_steps(values: Values) -> bool:
    """Whether a consumer without rows skips all blocks but the first.

    192 rows divide no power of 2.
    """
    skips = skips_masked_blocks(values) and not skips_idle_warpgroups(values)
    return skips and consumers(values) == 3


def unrolls_copies(values: Values) -> bool:
    """Whether the producer has registers enough to issue copies without a loop."""
    return not 0 < values["producer_registers"] < _UNROLLING_REGISTERS


def filling(values: Values) -> Filling:
    """Return what splits cost that fill the SMs."""
    return Filling.of(values["head_dim_v"])


def seen_ends(mask: Mask, block_m: int, block_n: int, queries: int, keys: int) -> list[int]:
    """Return up to which block of keys each tile of a head sees."""
    last_rows = range(block_m - 1, queries + block_m - 1, block_m)
    ends = (mask.keys(row, queries, keys)[1] for row in last_rows)
    return [-(-min(keys, max(0, end)) // block_n) for end in ends]


def scales_before_qk(values: Values) -> bool:
    """Whether consumers read scales before S = QKᵀ, a long GEMM there, and not after it."""
    return bool(values["scales"] == "block" and values["head_dim"] > 128)


def lays_q_anew(values: Values) -> bool:
    """Whether the descriptors of a single buffer of Q are worked out in each step.

    Beside what a consumer keeps of its tiles there are no registers for them.
    """
    wide = DTYPES[values["dtype"]].filled_up(values["head_dim"]) > 128
    keeps_more = skips_idle_warpgroups(values) or values["pack_gqa"]
    return bool(keeps_more and values["q_stages"] == 1 and wide)


# what parts depend on beside keys themselves
RULES: tuple[Callable[[Values], Any], ...] = (
    *(
        fuses_rescaling,
        one_part,
        single_v_rows,
        v_in_shared,
        scheduler_warp,
        head_major,
        tile_stages,
        skips_idle_warpgroups,
        skips_masked_blocks,
        scores_by_block,
        numbers_sequences,
        skips_first_blocks,
        loads_q_ahead,
        loads_q_in_steps,
        begins_with_sink,
    ),
    *(skips_steps, unrolls_copies, parts_sums, finds_spread, scales_before_qk, lays_q_anew),
)
