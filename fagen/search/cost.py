"""Predict how long a schedule takes at a shape, from what one multiprocessor does per clock.

A step, block_n keys for the block's rows, keeps tensor cores, MUFU, shared memory, issue slots and
L2 busy for so many clocks each; and one warpgroup alone has a chain of its own, multiply, softmax,
multiply, which others fill up.  Nothing hides wholly behind the busiest, so they are added as a
norm: SHARPNESS = 1 would be their sum, infinity their maximum.  Whether warpgroups take turns and
whether Q has a second buffer hardly mattered in what was measured, and is left out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, gcd
from operator import itemgetter
from typing import Any

from fagen.arch import SM90
from fagen.budget import padded_head_dims
from fagen.vocab import DTYPES, MASKS, ORDERS

# Fitted to the kernels of benchmarks/search/ (NVIDIA H200); clocks where nothing else is said.
SHARPNESS = 3.7
CLOCKS_PER_INSTRUCTION = 0.3  # of one warp, beyond what hides under its wgmmas
INSTRUCTIONS_PER_SCORE = 3.5  # scaling, exponential, sum, half a conversion
MAXIMUM = 1.0  # one more of those, where a maximum is found in each block
SUMS_BY_TENSOR = 2.0  # fewer of those where the second GEMM adds the rows up
LATENCY = 430.0  # of a step: barriers, the first wgmma, shuffles, the exponentials' pace
SOUGHT = 160.0  # of a step, where it is: before the exponentials, and lanes compare
PAIR = 141.0  # of a step: waiting for the other block of a cluster
WAIT = 385.0  # for one more wgmma, where the softmax does not run under it
NO_PRODUCER = 276.0  # of a step, for all: consumers that copy for themselves wait for each other
CROSSING = 0.09  # of the chain, between tiles that overlap, beyond their steps
EPILOGUE = 1_310.0  # of a tile
SHARED_OUTPUT = 24.0  # of a tile: all wait until V is read, and V's copies until O is gone
NEW_BLOCK = 2_750.0  # of a tile in a thread block of its own: it begins with nothing loaded
FETCH = 700.0
CLASH = 0.1
TURNS = 300.0
OUTPUT = 2.0
MASKED = 5.0
SPARED = 0.5
CONVERSION = 0.0
HEAD_START = 0.85  # of a causal grid's mean tile, by which its slowest block ends late


@dataclass(frozen=True)
class Size:
    """One problem's sizes, and how much it counts in a search."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    weight: float = 1.0

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"B={self.batch} H={heads} Sq={self.seqlen_q} Sk={self.seqlen_k}"


@dataclass(frozen=True)
class Step:
    """Clocks of one step, by what is busy.

    `chain` is one warpgroup's own way through it; under `alone` nothing else runs, and `between`
    is from one tile to the next.
    """

    tensor: float
    exponentials: float
    shared: float
    issue: float
    l2: float
    ring: float
    chain: float
    alone: float
    between: float

    @property
    def clocks(self) -> float:
        """Clocks from one step to the next."""
        beside = [clocks for name, clocks in self.parts().items() if name != "alone"]
        return float(sum([part**SHARPNESS for part in beside]) ** (1 / SHARPNESS)) + self.alone

    @property
    def bound(self) -> str:
        """What is busiest."""
        return max(self.parts(), key=self.parts().__getitem__)

    def parts(self) -> dict[str, float]:
        """The clocks of a step by name."""
        return {name: clocks for name, clocks in self.__dict__.items() if name != "between"}


def step(values: Mapping[str, Any]) -> Step:
    """Return what one step of a schedule costs; `values` are those of all its keys."""
    return _step(*(values[key] for key in ("block_m", "block_n", *_STEP_KEYS)))


_STEP_KEYS = (
    *("dtype", "head_dim", "head_dim_v", "consumers", "producer"),
    *("intra_warpgroup", "p", "sum", "maximum", "rescale_threshold", "cluster", "stages", "inter_warpgroup"),
)
_KEYS = ("block_m", "block_n", "mask", "order", "output", *_STEP_KEYS)  # all that counts


def _step(
    block_m: int,
    block_n: int,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    consumers: int,
    producer: str,
    intra_warpgroup: bool,
    p: str,
    row_sum: str,
    maximum: str,
    rescale_threshold: float,
    cluster: int,
    stages: int,
    inter_warpgroup: bool,
) -> Step:
    m, n = block_m, block_n
    e = DTYPES[dtype].bytes
    d, d_v = padded_head_dims(head_dim, head_dim_v, dtype)
    rows = SM90.wgmma_m

    by_tensor = row_sum == "tensor"
    ones = SM90.wgmma_n_step if by_tensor else 0

    tensor = 2 * m * n * (d + d_v + ones) / (SM90.tensor_flops * 2 / e)
    read = consumers * (rows * d + n * d + n * d_v) * e  # Q's rows again, all of K and V
    copied = n * (d + d_v) * e
    through = 2 * m * n * e if p == "shared" else 0  # P written, and read
    shared = (read + copied + through) / SM90.smem_bytes

    sought = maximum == "each"
    rescaling = 1.0 if sought and not rescale_threshold else 0.0  # of O's registers, in every step
    per_warp = (
        n
        / 2
        # a thread's scores of two rows
        * (INSTRUCTIONS_PER_SCORE + sought * MAXIMUM + (e == 1) * CONVERSION - by_tensor * SUMS_BY_TENSOR)
        + d_v / 2 * rescaling
        + (n / 8 + 20 if p == "shared" else 0)
        + 60
    )
    warps = consumers * SM90.warpgroup_threads / SM90.warp_threads

    chain = tensor / consumers + per_warp * CLOCKS_PER_INSTRUCTION + LATENCY
    chain += 0 if intra_warpgroup else WAIT
    chain += SOUGHT if sought and not rescale_threshold else 0
    chain += PAIR if cluster > 1 else 0
    exponentials = m * n / SM90.exponentials
    chain += 0 if inter_warpgroup or consumers < 2 else CLASH * min(tensor, exponentials)
    return Step(
        tensor=tensor,
        exponentials=exponentials,
        shared=shared,
        issue=warps * per_warp / SM90.issued_warps,
        l2=copied / cluster / SM90.l2_bytes_per_clock,
        ring=FETCH / (stages - 1),
        chain=chain,
        alone=0.0 if producer == "warp" else NO_PRODUCER,
        between=chain * (CROSSING if producer == "warp" and intra_warpgroup else 1.0),
    )


def predictor(sizes: Sequence[Size]) -> Callable[[Mapping[str, Any]], tuple[float, ...]]:
    """Return a function from a schedule's values to its predicted seconds at each size."""

    @cache
    def grids(
        m: int, n: int, mask: str, order: str, cluster: int, stages: int
    ) -> tuple[tuple[float, float], ...]:
        return tuple(grid(m, n, mask, order, size, cluster, stages) for size in sizes)

    @cache
    def times(
        m: int, n: int, mask: str, order: str, output: str, *of_step: Any
    ) -> tuple[float, ...]:
        one = _step(m, n, *of_step)
        d_v, cluster, stages, inter = of_step[2], of_step[-3], of_step[-2], of_step[-1]
        tile = one.between + EPILOGUE + OUTPUT * d_v + (0 if output == "own" else SHARED_OUTPUT)
        tile += 0 if ORDERS[order].persistent else NEW_BLOCK
        if MASKS[mask].causal:
            tile += (64 + n) * MASKED + (TURNS if inter else 0)
        clocks, clock, launch = one.clocks, SM90.clock_hz, SM90.launch_seconds
        return tuple(
            (a * clocks + b * tile) / clock + launch
            for a, b in grids(m, n, mask, order, cluster, stages)
        )

    pick = itemgetter(*_KEYS)
    return lambda values: times(*pick(values))


def seconds(values: Mapping[str, Any], size: Size) -> float:
    """Return the predicted time of one call."""
    return predictor([size])(values)[0]


def grid(
    m: int, n: int, mask: str, order: str, size: Size, cluster: int = 1, stages: int = 2
) -> tuple[float, float]:
    """Return the steps and the tiles of the multiprocessor that ends last."""
    m_blocks = ceil(ceil(size.seqlen_q / m) / cluster) * cluster
    heads = size.batch * size.heads
    rounds = ceil(m_blocks * heads / SM90.sm_count)
    if not MASKS[mask].causal:
        return rounds * ceil(size.seqlen_k / n), rounds
    shift = size.seqlen_k - size.seqlen_q
    together = m * cluster
    passed = min((together - SM90.wgmma_m) / n, stages - 1) * SPARED
    lengths = [
        max(0.0, ceil(max(0, min(size.seqlen_k, (i // cluster + 1) * together + shift)) / n) - passed)
        for i in range(m_blocks)
    ]
    mean = sum(lengths) / m_blocks
    if ORDERS[order].longest_first:
        even = mean * m_blocks * heads / SM90.sm_count
        return even + HEAD_START * mean, rounds
    if not ORDERS[order].persistent:  # whoever is free takes the next: the last one ends alone
        even = mean * m_blocks * heads / SM90.sm_count
        return even + 0.5 * lengths[-1], rounds
    # a block strides through the tiles, and may meet tiles of the same few lengths only
    stride = gcd(m_blocks, SM90.sm_count)
    met = lengths[::-1][::stride]
    return rounds * sum(met) / len(met), rounds


def flops(head_dim: int, head_dim_v: int, mask: str, size: Size) -> float:
    """Return what is multiplied and added, a causal triangle taken as exactly half its square."""
    sq, sk = size.seqlen_q, size.seqlen_k
    pairs = float(sq * sk)
    if MASKS[mask].causal:
        pairs = sq * sk - sq * sq / 2 if sq <= sk else sk * sk / 2
    return 2.0 * size.batch * size.heads * (head_dim + head_dim_v) * pairs
