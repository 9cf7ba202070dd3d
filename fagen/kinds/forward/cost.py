"""Predict how long a schedule takes at some sizes, from what one SM does per clock.

A step, block_n keys for the block's rows, keeps tensor cores, MUFU, shared memory, issue slots and
TMA busy for so many clocks each; one warpgroup alone has a chain of its own, multiply, softmax,
multiply, which others fill; and K and V come no faster than their buffers come free.  Nothing
hides wholly behind the busiest, so they are added as a norm: SHARPNESS = 1 would be their sum,
infinity their maximum.  Whether Q has a second buffer hardly mattered in what was measured, and is
left out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, gcd
from operator import itemgetter
from typing import Any

from fagen.arch import SM90
from fagen.combining import split_blocks
from fagen.kinds.attention import padded_head_dims
from fagen.kinds.cost import norm, varlen_tiles
from fagen.kinds.forward.structure import filling, seen_ends
from fagen.kinds.scores import CURVE
from fagen.problem import Sizes
from fagen.vocab import DTYPES, FP32, MASKS, ORDERS, SCORES, swizzle_of

# Fitted by benchmarks/search/refit.py (NVIDIA H200); clocks where nothing else is keys.
SHARPNESS = 4.25
INSTRUCTIONS_PER_SCORE = 5.45  # scaling, exponential, sum, conversion, and what goes with them
INSTRUCTIONS = 72.0  # of a warp in each step, beside those of its scores
MAXIMUM = 5.33  # more instructions of a score, with a row max in each block
FETCH = 791.0  # from a buffer of K or V that is free to one that is full again
WAIT = 1_080.0  # for one more wgmma, where the softmax does not run under it
CLASH = 2.90e-4  # of the chain, for each clock on tensor cores and each on MUFU, without ping-pong
NO_PRODUCER = 181.0  # of a step, for all: consumers that copy for themselves wait for each other
REQUEST = 0.998  # of TMA, for each row of a box, however narrow the box is
SECTOR = 0.539  # the same, for each sector of L2 that such a row has
UNALIGNED = 1.6  # times these, where the rows of half of the heads begin inside a sector
EPILOGUE = 3_030.0  # of a tile: its first loads, its first step alone, its output
TURNS = 216.0  # of a causal tile: the scheduler barriers of skipped blocks too
SHARED_OUTPUT = 1_270.0  # of a tile: V's copies wait until O is stored
HEAD_START = 1.05  # of a causal grid's mean tile, by which its slowest block ends late
DRAWN = 0.086  # the same in a dynamic order, whose tiles are drawn from a counter

# Of splits, as combining of decoding was measured, and not fitted yet.
COMBINE = 1.5e-6  # seconds, of a launch that waits for the one before it
PARTIAL_BYTES = 3e12  # a second, of partial outputs that are written, and of those that are read


@dataclass(frozen=True)
class Step:
    """Clocks of one step, by what is busy.

    `ring` is how soon its buffers are full again, `chain` one warpgroup's own way through it; under
    `exposed` nothing else runs, and `between` is from one tile to the next.
    """

    tensor: float
    exponentials: float
    shared: float
    issue: float
    loads: float
    ring: float
    chain: float
    exposed: float
    between: float

    @property
    def clocks(self) -> float:
        """Clocks from one step to the next."""
        beside = [clocks for name, clocks in self.parts().items() if name != "exposed"]
        return norm(beside, SHARPNESS) + self.exposed

    @property
    def bound(self) -> str:
        """What is busiest."""
        return max(self.parts(), key=self.parts().__getitem__)

    def parts(self) -> dict[str, float]:
        """The clocks of a step by name."""
        return {name: clocks for name, clocks in self.__dict__.items() if name != "between"}


def step(values: Mapping[str, Any]) -> Step:
    """Return what one step of a schedule costs; `values` are those of all its keys."""
    return _step(*(values[key] for key in _STEP_KEYS))


_STEP_KEYS = (  # the first four also say how tiles follow each other
    *("block_m", "block_n", "cluster", "inter_warpgroup", "stages", "dtype", "head_dim"),
    *("head_dim_v", "producer", "intra_warpgroup", "sum", "maximum"),
    *("rescale_threshold", "score", "tanh"),
)
_HEAD_DIM_V = _STEP_KEYS.index("head_dim_v")
_KEYS = ("mask", "order", "output", "num_splits", "fill", *_STEP_KEYS)  # all that counts


def _step(*key: Any) -> Step:
    keys = dict(zip(_STEP_KEYS, key, strict=True))
    m, n, e = keys["block_m"], keys["block_n"], DTYPES[keys["dtype"]].bytes
    padded = padded_head_dims(keys)
    d, d_v = padded
    rows = SM90.wgmma_m
    consumers = m // rows

    ones = SM90.wgmma_n_step if keys["sum"] == "tensor" else 0

    # QKᵀ reads its rows of Q from shared memory, as long as 64 keys take on tensor cores
    tensor = (
        2 * m * (max(n, SM90.wgmma_n_full) * d + n * (d_v + ones)) / (SM90.tensor_flops * 2 / e)
    )
    read = consumers * (rows * d + n * d + n * d_v) * e  # Q's rows again, all of K and V
    copied = n * (d + d_v) * e
    shared = (read + copied) / SM90.smem_bytes

    online = keys["maximum"] == "online"
    # of O's registers, in every step
    rescaling = 1.0 if online and not keys["rescale_threshold"] else 0.0
    # by a curve a score has no instruction of the MUFU, and a multiplication and addition a term
    mufu, more = (0, CURVE.terms) if keys["tanh"] == "curve" else SCORES[keys["score"]].cost
    per_warp = (
        n / 2 * (INSTRUCTIONS_PER_SCORE + more + online * MAXIMUM)  # a thread's of two rows
        + d_v / 2 * rescaling
        + INSTRUCTIONS
    )
    warps = consumers * SM90.warpgroup_threads / SM90.warp_threads

    exponentials = m * n * (1 + mufu) / SM90.exponentials
    # the next tile begins under this one's end
    overlapped = keys["producer"] == "warp" and keys["intra_warpgroup"]

    head_dims = keys["head_dim"], keys["head_dim_v"]
    row_loads = sum(_row_loads(*dims, e) for dims in zip(head_dims, padded, strict=True))

    chain = tensor / consumers + per_warp
    chain += 0 if keys["intra_warpgroup"] else WAIT
    chain += 0 if keys["inter_warpgroup"] or consumers == 1 else CLASH * tensor * exponentials
    return Step(
        tensor=tensor,
        exponentials=exponentials,
        shared=shared,
        issue=warps * per_warp / SM90.issued_warps,
        loads=n * row_loads / keys["cluster"],
        ring=FETCH / (keys["stages"] - 1),
        chain=chain,
        exposed=0.0 if keys["producer"] == "warp" else NO_PRODUCER,
        between=0.0 if overlapped else chain,
    )


def _row_loads(columns: int, padded: int, e: int) -> float:
    """Return the clocks in which TMA brings one row of K or V.

    A box is as wide as a slab of shared memory. Heads follow each other without gaps: where a
    head's row is no whole number of sectors, that of every other head begins inside one.
    """
    sector, row = SM90.l2_sector_bytes, columns * e
    boxes = ceil(row / swizzle_of(padded * e).bytes)
    clocks = REQUEST * boxes + SECTOR * ceil(row / sector)
    return clocks * UNALIGNED if row % sector else clocks


def predictor(sizes: Sequence[Sizes]) -> Callable[[Mapping[str, Any]], tuple[float, ...]]:
    """Return a function from a schedule's values to its predicted seconds at each of the sizes."""
    cached_step = cache(_step)

    @cache
    def splits_of(
        m: int, n: int, mask: str, num_splits: int, fill: bool, head_dim_v: int
    ) -> tuple[int, ...]:
        if not fill:
            return (num_splits,) * len(sizes)
        of_call = filling({"head_dim_v": head_dim_v}).splits
        calls = ((size.batch * size.heads, size.seqlen_q, size.seqlen_k) for size in sizes)
        return tuple(
            of_call(keys, n, seen_ends(MASKS[mask], m, n, queries, keys), heads, num_splits)
            for heads, queries, keys in calls
        )

    @cache
    def grids(
        m: int, n: int, mask: str, order: str, cluster: int, splits: tuple[int, ...]
    ) -> tuple[tuple[float, float], ...]:
        of_calls = zip(sizes, splits, strict=True)
        return tuple(grid(m, n, mask, order, size, cluster, most) for size, most in of_calls)

    @cache
    def combining(n: int, splits: tuple[int, ...], head_dim_v: int) -> tuple[float, ...]:
        of_calls = zip(sizes, splits, strict=True)
        return tuple(_combining(size, n, most, head_dim_v) for size, most in of_calls)

    @cache
    def times(
        mask: str, order: str, output: str, num_splits: int, fill: bool, *of_step: Any
    ) -> tuple[float, ...]:
        step, (m, n, cluster, inter_warpgroup) = cached_step(*of_step), of_step[:4]
        head_dim_v = of_step[_HEAD_DIM_V]
        splits = splits_of(m, n, mask, num_splits, fill, head_dim_v)
        tile = step.between + EPILOGUE + (0 if output == "own" else SHARED_OUTPUT)
        tile += TURNS if inter_warpgroup and MASKS[mask].by_row else 0
        clocks, clock, launch = step.clocks, SM90.clock_hz, SM90.launch_seconds
        of_grids = grids(m, n, mask, order, cluster, splits)
        return tuple(
            (a * clocks + b * tile) / clock + launch + combine
            for (a, b), combine in zip(of_grids, combining(n, splits, head_dim_v), strict=True)
        )

    pick = itemgetter(*_KEYS)
    return lambda values: times(*pick(values))


def seconds(values: Mapping[str, Any], sizes: Sizes) -> float:
    """Return the predicted time of one call."""
    return predictor([sizes])(values)[0]


def _combining(sizes: Sizes, n: int, num_splits: int, head_dim_v: int) -> float:
    """Return the seconds that partial outputs take, with combining them; 0 where there are none."""
    if num_splits == 1 or sizes.seqlen_k == 0:
        return 0.0
    blocks = ceil(sizes.seqlen_k / n)
    splits = ceil(blocks / split_blocks(sizes.seqlen_k, n, num_splits))
    rows = sizes.batch * sizes.heads * sizes.seqlen_q
    return COMBINE + 2 * rows * splits * FP32.bytes * (head_dim_v + 1) / PARTIAL_BYTES


def grid(
    m: int, n: int, mask: str, order: str, sizes: Sizes, cluster: int = 1, num_splits: int = 1
) -> tuple[float, float]:
    """Return the steps and the tiles of the SM that ends last; of `num_splits`, theirs.

    The blocks of a cluster have neighbouring tiles, and as many steps as the longest of those.
    """
    if sizes.varlen:
        return _grid_of_varlen(m, n, mask, sizes)
    if num_splits > 1:
        return _grid_of_splits(m, n, mask, sizes, num_splits)
    rows = m * cluster
    groups = ceil(sizes.seqlen_q / rows)
    m_blocks = groups * cluster
    heads = sizes.batch * sizes.heads
    rounds = ceil(m_blocks * heads / SM90.sm_count)
    if not MASKS[mask].by_row:
        return rounds * ceil(sizes.seqlen_k / n), rounds
    of_groups = [_steps(n, mask, top * rows, (top + 1) * rows, sizes) for top in range(groups)]
    lengths = [length for length in of_groups for _ in range(cluster)]
    mean = sum(lengths) / m_blocks
    if ORDERS[order].dynamic:
        tiles = m_blocks * heads / SM90.sm_count
        return max(mean * tiles + DRAWN * mean, lengths[-1]), max(tiles, 1)
    if ORDERS[order].longest_first:
        even = mean * m_blocks * heads / SM90.sm_count
        return even + HEAD_START * mean, rounds
    # a block strides through the tiles, and may meet tiles of the same few lengths only
    stride = gcd(m_blocks, SM90.sm_count)
    met = lengths[::-1][::stride]
    return rounds * sum(met) / len(met), rounds


def _grid_of_varlen(m: int, n: int, mask: str, sizes: Sizes) -> tuple[float, float]:
    """Return the steps and the tiles of varlen sequences, which are drawn, longest first.

    Where these are few the longest one is the last.
    """

    def steps_of(own: Sizes) -> list[int]:
        tops, queries = range(0, own.seqlen_q, m), own.seqlen_q
        if MASKS[mask].by_row:
            return [_steps(n, mask, top, min(top + m, queries), own) for top in tops]
        return [ceil(own.seqlen_k / n)] * len(tops)

    tiles, steps, longest = varlen_tiles(sizes, steps_of)
    if not tiles:
        return 0, 0
    per_sm = tiles * sizes.heads / SM90.sm_count
    return max(steps / tiles * (per_sm + DRAWN), longest), max(per_sm, 1)


def _grid_of_splits(
    m: int, n: int, mask: str, sizes: Sizes, num_splits: int
) -> tuple[float, float]:
    """Return the steps and the tiles of splits, dealt in turns, of who has the most."""
    split = max(1, split_blocks(sizes.seqlen_k, n, num_splits))
    heads = sizes.batch * sizes.heads
    of_tiles = [_steps(n, mask, top, top + m, sizes) for top in range(0, max(1, sizes.seqlen_q), m)]
    units = sum(ceil(steps / split) for steps in of_tiles)
    if units == 0:
        return 0, 0
    rounds = ceil(units * heads / SM90.sm_count)
    return max(min(split, max(of_tiles)), rounds * sum(of_tiles) / units), rounds


def _steps(n: int, mask: str, top: int, bottom: int, sizes: Sizes) -> int:
    """Return in how many blocks of n keys the keys lie that any row from top to bottom sees."""
    first, _ = MASKS[mask].keys(top, sizes.seqlen_q, sizes.seqlen_k)
    _, last = MASKS[mask].keys(bottom - 1, sizes.seqlen_q, sizes.seqlen_k)
    first, last = max(0, first), min(sizes.seqlen_k, last)
    return ceil(last / n) - first // n if first < last else 0
