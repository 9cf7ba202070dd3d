"""Predict how long a schedule takes at some sizes, from what one SM does per clock.

A step, block_m query rows beside the thread block's keys, keeps tensor cores, shared memory and L2
busy for so many clocks each, and a ring of Q or dO brings no more than its buffers hold. These are
added as a norm, since none hides wholly behind the busiest. All consumers meet in each step, so
that what threads work out between the products hides behind nothing. Before and after come two
kernels that move bytes.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

from fagen.arch import SM90
from fagen.expr.ranges import rows_of
from fagen.kinds.backward.rules import dq_columns, ones_in_shared_memory
from fagen.kinds.cost import norm, varlen_tiles
from fagen.problem import Sizes
from fagen.vocab import DTYPES, MASKS

# Clocks where nothing else is said. By microbenchmarks on an NVIDIA H200; those of L2, of what
# hides behind nothing, and of a tile fit 30 timings of head dims 64, 128 and 256 within 3.1 % (root
# mean square): benchmarks/results/nvidia-h200-2026-11-25-backward-fitted.md. Another card's, in
# nvidia-h200-2026-11-25-backward-launched.md, are met within 3.9 %.
SHARPNESS = 8.0
# of an SM, per clock, where all of them load and add to L2 at once
L2_BYTES = 40.0
FETCH = 790.0  # from a buffer of Q or dO that is free to one that is full again
POINTWISE = 6.5  # of a step, for each query row beside 64 keys: exponentials, dS, waiting for all
# of a step, for a second meeting: of all before dS is overwritten, or where dQ goes on in parts
AGAIN = 120.0
# What is left of that where only the warpgroup that computes dQ waits, which was measured to make
# no difference, or where S is issued a step ahead.
ONE, AHEAD = 1.0, 0.8
UNDER = 0.65  # of that, where exponentials run under dP, or statistics wait for no product
UNHIDDEN = 1 / 3  # of a fetch, by gradients: dO is given back as soon as dV has been made of it
IN_ORDER = 1.06  # times all, where dQ's parts are added up in the order of the keys
TILE = 9_000.0  # of a tile: K and V come, dK and dV leave
PAIRED = 9_000.0  # more of one, where two thread blocks begin and end together
STAYS = 1_500.0  # less of one, where its loads run under the stores of the one before
ROW_BYTES = 4.2e12  # a second: kernels that only move bytes
LAUNCH = 1.5  # launches of empty kernels that those two take beyond their bytes
LEFT = 1 / 3  # of dQ's sums, that are rounded after all tiles where a warp rounds them meanwhile


@dataclass(frozen=True)
class Step:
    """Clocks of one step, by what is busy; under `exposed` nothing else runs."""

    tensor: float
    shared: float
    l2: float
    ring: float
    exposed: float

    @property
    def clocks(self) -> float:
        """Clocks from one step to the next."""
        beside = (self.tensor, self.shared, self.l2, self.ring)
        return norm(beside, SHARPNESS) + self.exposed

    @property
    def bound(self) -> str:
        """What is busiest."""
        return max(vars(self), key=vars(self).__getitem__)


def step(values: Mapping[str, Any]) -> Step:
    """Return what one step of a schedule costs; `values` are those of all its keys."""
    m, n, rows = values["block_m"], values["block_n"], SM90.wgmma_m
    dtype = DTYPES[values["dtype"]]
    e, d, d_v = dtype.bytes, *map(dtype.filled_up, (values["head_dim"], values["head_dim_v"]))
    stages = min(values["stages"], values["do_stages"])

    # of each 64 keys the operands of S, dP, dV and dK are read that are not in registers
    keys = d * (values["kept"] != "k") + d_v
    scores = n // rows * (rows * keys + m * (d + d_v))
    gradients = n // rows * m * (d_v + d)
    of_dq = sum(n * (rows + own) for own in dq_columns(values))
    written = m * n * e + 4 * m * d  # dS; dQ in fp32
    passed = 2 * m * n * e if values["partition"] == "gradients" else 0  # P, from one to the other
    # of LSEs as of deltas: a step of K
    statistics = 2 * (n // rows) * (m + rows * ones_in_shared_memory(values)) * SM90.wgmma_k_bytes
    columns = 3 * d + 2 * d_v + 2 * dtype.wgmma_k
    exposed = POINTWISE * m * (ONE if values["dq_by"] == "one" and n > rows else 1.0)
    exposed *= AHEAD if values["intra_warpgroup"] else 1.0
    by_keys = values["partition"] == "keys"
    if by_keys and (values["under_dp"] or ones_in_shared_memory(values)):
        exposed *= UNDER
    exposed += AGAIN * ((values["ds_stages"] == 1 and by_keys) + (values["dq_slices"] > 1))
    return Step(
        tensor=2 * m * n * columns / (SM90.tensor_flops * 2 / e),
        shared=((scores + gradients + of_dq) * e + written + passed + statistics) / SM90.smem_bytes,
        l2=(4 * m * d + m * (d + d_v) * e) / values["cluster"] / L2_BYTES,
        ring=FETCH / (stages - 1) if stages > 1 else 0.0,
        exposed=exposed + (FETCH * (1.0 if by_keys else UNHIDDEN) if stages == 1 else 0.0),
    )


def tile(values: Mapping[str, Any]) -> float:
    """Return the clocks of a tile beyond those of its steps."""
    return TILE + (PAIRED if values["cluster"] > 1 else -STAYS if values["persistent"] else 0.0)


def predictor(sizes: Sequence[Sizes]) -> Callable[[Mapping[str, Any]], tuple[float, ...]]:
    """Return a function from a schedule's values to its predicted seconds at each of the sizes."""
    steps: dict[tuple[Any, ...], float] = {}

    @cache
    def grids(m: int, n: int, mask: str) -> tuple[tuple[float, float], ...]:
        return tuple(grid(m, n, mask, size) for size in sizes)

    @cache
    def around(m: int, dtype: str, d: int, d_v: int, meanwhile: bool) -> tuple[float, ...]:
        return tuple(rows_seconds(m, dtype, d, d_v, size, meanwhile) for size in sizes)

    def times(values: Mapping[str, Any]) -> tuple[float, ...]:
        counts = tuple(values[key] for key in _KEYS)
        if counts not in steps:
            steps[counts] = step(values).clocks * (IN_ORDER if values["deterministic"] else 1.0)
        m, n, mask, *of_rows = (values[key] for key in _GRID_KEYS)
        more = tile(values)
        return tuple(
            (count * steps[counts] + tiles * more) / SM90.clock_hz + rows + SM90.launch_seconds
            for (count, tiles), rows in zip(grids(m, n, mask), around(m, *of_rows), strict=True)
        )

    return times


# what the tiles and the kernels around them depend on, and what a step does
_GRID_KEYS = ("block_m", "block_n", "mask", "dtype", "head_dim", "head_dim_v", "postprocess")
_KEYS = (
    *("block_m", "block_n", "dtype", "head_dim", "head_dim_v", "deterministic", "cluster"),
    *("stages", "do_stages", "ds_stages", "partition", "dq_by", "dq_slices", "intra_warpgroup"),
    *("under_dp", "kept"),
)


def seconds(values: Mapping[str, Any], sizes: Sizes) -> float:
    """Return the predicted time of one call."""
    return predictor([sizes])(values)[0]


def rows_seconds(
    block_m: int, dtype: str, head_dim: int, head_dim_v: int, sizes: Sizes, meanwhile: bool = False
) -> float:
    """Return the seconds of the kernels that prepare rows and round dQ: bytes, and launches.

    One reads O and dO; the other reads dQ's sums, in fp32, and writes dQ: of what is left where a
    warp of the kernel between them does so `meanwhile`.
    """
    e, d = DTYPES[dtype].bytes, DTYPES[dtype].filled_up(head_dim)
    rows = sizes.heads * sizes.total_q
    blocks = Counter(queries for queries, _ in sizes.sequences).items()
    filled = sizes.heads * sum(count * ceil(q / block_m) for q, count in blocks) * block_m
    rounded = (rows * head_dim * e + filled * 4 * d) * (LEFT if meanwhile else 1)
    moved = rows * 2 * head_dim_v * e + rounded
    return moved / ROW_BYTES + LAUNCH * SM90.launch_seconds


def grid(m: int, n: int, mask: str, sizes: Sizes) -> tuple[float, float]:
    """Return the steps and the tiles of the SM that ends last.

    A tile is n keys of a KV head, with the rows that see any of them, of all query heads of its
    group; an SM has one at a time. The longest come first, where they differ.
    """
    if sizes.varlen:
        return _grid_of_varlen(m, n, mask, sizes)
    n_blocks = ceil(sizes.seqlen_k / n)
    tiles = n_blocks * sizes.batch * sizes.kv_heads
    group = sizes.heads // sizes.kv_heads
    if not MASKS[mask].by_row:
        rounds = ceil(tiles / SM90.sm_count)
        return rounds * ceil(sizes.seqlen_q / m) * group, rounds
    lengths = [group * _steps(m, mask, left * n, n, sizes) for left in range(n_blocks)]
    mean = sum(lengths) / n_blocks
    even = tiles / SM90.sm_count
    # whoever is free takes the next, shorter one: at the end about half of a short one is lost
    return max(mean * even + min(lengths) / 2, *lengths, 1), max(even, 1)


def _grid_of_varlen(m: int, n: int, mask: str, sizes: Sizes) -> tuple[float, float]:
    """Return the same of varlen sequences, the longest first; what one tile has is not parted."""
    group = sizes.heads // sizes.kv_heads

    def steps_of(own: Sizes) -> list[int]:
        lefts = range(0, own.seqlen_k, n)
        if MASKS[mask].by_row:
            return [group * _steps(m, mask, left, n, own) for left in lefts]
        return [group * ceil(own.seqlen_q / m)] * len(lefts)

    tiles, steps, longest = varlen_tiles(sizes, steps_of, group)
    per_sm = tiles * sizes.kv_heads / SM90.sm_count
    return max(steps * sizes.kv_heads / SM90.sm_count, longest, 1), max(per_sm, 1)


def _steps(m: int, mask: str, left: int, n: int, sizes: Sizes) -> int:
    """Return in how many blocks of m rows those lie that see any of n keys from `left` on."""
    visible, lengths = MASKS[mask].keys, (sizes.seqlen_q, sizes.seqlen_k)
    keys = range(left, min(left + n, sizes.seqlen_k))
    blocks = rows_of(lambda row: visible(row, *lengths), sizes.seqlen_q, keys, m)
    return blocks.last - blocks.first
