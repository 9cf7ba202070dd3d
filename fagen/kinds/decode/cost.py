"""Predict how long a schedule takes at some sizes: bytes that are read, and steps of thread blocks.

All keys and values come from memory once, as fast as it gives them; beside that a thread block goes
step by step through the splits that it was dealt, and a step, block_n keys, takes a warpgroup so
many clocks however fast memory is. Neither hides wholly behind the other, so they are added as a
norm. Before comes what launches take, behind it what combining does, which reads what was written
of splits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from fagen.arch import SM90
from fagen.kinds.cost import norm
from fagen.kinds.decode.rules import (
    all_rows,
    padded,
    reads_pairs,
    shares_lines,
    split_blocks,
    straddles,
)
from fagen.problem import Sizes
from fagen.vocab import DTYPES, FP32

# Fitted to 439 timings of head dims 64 to 256, 8 to 64 rows, 8 and 16 splits, 3 to 12 buffers on an
# NVIDIA H200, which are met within 3.1 % in turns (root mean square), 5.5 % in runs; those of head
# dim 96 within 8.6 and 7.2 %: benchmarks/notes/log.md.
LAUNCHES = 4.05e-6  # seconds, of both kernels in a graph, with the first load and the last combine
READ_BYTES = 4.61e12  # a second, of K and V out of memory
PARTIAL_BYTES = 2.40e12  # the same of partial outputs: written beside, and read to be combined
# What part of rows that begin within lines is read twice, with 12 buffers an SM. It
# falls with their square: of few, a line is likely in L2 yet when a neighbour wants its rest.
READ_TWICE = {"round_robin": 0.5, "stream_k": 0.32}
SHARPNESS = 3.92
SCORES = 18.0  # clocks of a step, for each row beside 64 keys
READ = 0.006  # the same, for each byte of K and V that tensor cores read
CROWD = 0.1  # by how much a step takes longer for each other thread block of the SM
OUTPUT = 0.283  # clocks of a split, for each number of its output
QUERIES = 3_000.0  # of a split that waits for its queries
RUNS = 2.1e-6  # seconds of a call in runs, before its first unit is found
COMBINE = 1.0  # clocks of a split in a run, for each number of its output
HAND = 2.4  # of a tile, for each number that is handed on when its splits are combined
FETCH = 1_350.0  # clocks from a buffer that is free to one that is full again, under load

# Not measured yet.
VOTE = 300.0  # of a step, where maxima are asked for first; of a split, to exchange them once
AGAIN_BYTES = 5.5e12  # a second, of K and V out of the L2 cache, for further tiles of rows


@dataclass(frozen=True)
class Dealt:
    """What splits make of a call: units of work, and the share of who has the most of them.

    `resident` are the thread blocks of an SM; `partials` the rows of partial outputs.
    """

    tiles: int  # of rows, of a KV head: each reads all keys
    resident: int
    units: float
    steps: float
    partials: float
    outputs: float = 0  # of tiles that are combined, where splits are dealt in runs


@dataclass(frozen=True)
class Parts:
    """Seconds of a call, by what they go to."""

    memory: float
    chain: float
    combining: float
    launches: float = LAUNCHES

    @property
    def seconds(self) -> float:
        """All in all."""
        return self.launches + norm((self.memory, self.chain), SHARPNESS) + self.combining


_DEAL_KEYS = ("rows", "kv_heads", "block_n", "num_splits", "by", "blocks")
_DEAL_BESIDE = "dtype", "head_dim", "head_dim_v"  # by which heads share lines


def dealt(values: Mapping[str, Any], sizes: Sizes) -> Dealt:
    """Return how the splits of a call are dealt to thread blocks."""
    rows, kv_heads, block_n, num_splits, by, blocks = (values[key] for key in _DEAL_KEYS)
    group = sizes.heads // sizes.kv_heads
    positions = max(1, min(rows // group, sizes.seqlen_q))
    tiles = ceil(group / min(group, rows)) * ceil(sizes.seqlen_q / positions)
    outputs = sizes.batch * ceil(sizes.kv_heads / kv_heads) * tiles
    n_blocks = ceil(sizes.seqlen_k / block_n)
    split = split_blocks(sizes.seqlen_k, block_n, num_splits, group)
    splits = ceil(n_blocks / split)
    most = SM90.sm_count * blocks
    slots = min(outputs * splits, most)
    resident = ceil(slots / SM90.sm_count)
    of_rows = sizes.batch * sizes.heads * sizes.seqlen_q
    if by == "stream_k":
        if whole := whole_tiles(
            outputs // sizes.batch, sizes.batch, most, even=shares_lines(values)
        ):
            return Dealt(tiles, resident, whole * splits, whole * n_blocks, 0, whole)
        if first := first_tiles(outputs // sizes.batch, sizes.batch, most):
            cut = 1 - first / outputs
            share = outputs / most
            return Dealt(
                *(tiles, resident, share * splits, share * n_blocks, of_rows * splits * cut, share)
            )
        even = outputs * n_blocks / slots
        if even + outputs * splits / slots >= 2 * (split + 1):  # a run has two splits, or more
            # who has a split's first step has all of it: about half of one too many
            steps = max(split, even + split / 2)
            # a thread block begins within a tile, whose splits it hands on: half in the mean
            partials = of_rows * splits * min(1.0, slots / outputs / 2)
            units = max(1, even * splits / n_blocks)
            return Dealt(tiles, resident, units, steps, partials, 1 + outputs / slots)
    rounds = ceil(outputs * splits / slots)
    steps = max(split, rounds * n_blocks / splits)
    combined = rounds if by == "stream_k" else 0
    partials = of_rows * splits if splits > 1 or by == "stream_k" else 0
    return Dealt(tiles, resident, rounds, steps, partials, combined)


def whole_tiles(of_sequence: int, batch: int, slots: int, *, even: bool) -> int:
    """Return how many tiles a thread block has at most where none is cut, or 0: as the launcher.

    Some have one more than others if these are enough to read memory; if `even`, as many are
    launched as have the same number of them.
    """
    abreast = _abreast(of_sequence, slots)
    groups, runs, of_sm = of_sequence // abreast * batch, slots // abreast, SM90.sm_count // abreast
    if even:
        most = ceil(groups / runs)
        return most if most and ceil(groups / most) * 10 >= runs * 7 else 0
    left = groups % runs
    least = 5 if slots == SM90.sm_count else 7  # tenths
    enough, shared = left == 0 or left * 10 > of_sm * least, left > of_sm and left * 4 <= of_sm * 5
    return ceil(groups / runs) if enough and not (groups < runs and shared) else 0


def first_tiles(of_sequence: int, batch: int, slots: int) -> int:
    """Return how many tiles stay whole where splits of the others are taken in turns behind them.

    There are none where SMs would not have one each.
    """
    abreast = _abreast(of_sequence, slots)
    of_groups = of_sequence // abreast
    groups, of_sm = of_groups * batch, SM90.sm_count // abreast
    if groups < of_sm:
        return 0
    runs = slots // abreast
    whole = of_sm if groups < runs else groups - groups % runs
    return (whole - whole % of_groups) * abreast


def _abreast(of_sequence: int, slots: int) -> int:
    """Return how many thread blocks go through a run together."""
    most = max(1, min(8, of_sequence, slots))
    return next(n for n in range(most, 0, -1) if of_sequence % n == 0)


def step_clocks(values: Mapping[str, Any], resident: int = 1) -> float:
    """Return the clocks of one step of a thread block, `resident` of them beside each other."""
    rows, block_n, dtype = all_rows(values), values["block_n"], values["dtype"]
    d, d_v = (padded(values[key], dtype) for key in ("head_dim", "head_dim_v"))
    read = block_n * (d + d_v) * DTYPES[dtype].bytes * values["kv_heads"]
    clocks = SCORES * rows * block_n / SM90.wgmma_m + READ * read
    clocks = clocks * (1 + CROWD * (resident - 1)) + (0 if values["speculate"] else VOTE)
    ring = 2 * FETCH / (values["stages"] - 1)  # K and V of a step
    return norm((clocks, ring), SHARPNESS)


def parts(values: Mapping[str, Any], sizes: Sizes) -> Parts:
    """Return what a call takes, by what it goes to; `values` are those of all keys."""
    if not sizes.seqlen_k * sizes.seqlen_q * sizes.batch:
        return Parts(0.0, 0.0, 0.0)
    return _parts(dealt(values, sizes), values, sizes)


def _parts(deal: Dealt, values: Mapping[str, Any], sizes: Sizes) -> Parts:
    dtype, head_dim_v = values["dtype"], values["head_dim_v"]
    longer = 1 + _read_twice(deal, values)
    columns = sum(
        longer * d if straddles(dtype, d) else d for d in (values["head_dim"], head_dim_v)
    )
    row_bytes = columns * DTYPES[dtype].bytes
    cache_bytes = sizes.batch * sizes.kv_heads * sizes.seqlen_k * row_bytes
    partial_bytes = deal.partials * (head_dim_v + 1) * FP32.bytes
    rows = all_rows(values)
    unit = OUTPUT * rows * head_dim_v
    unit += 0 if values["maximum"] == "fixed" else VOTE
    unit += QUERIES if values["q_stages"] == 1 else 0
    unit += COMBINE * rows * head_dim_v if values["by"] == "stream_k" else 0
    clocks = deal.steps * step_clocks(values, deal.resident) + deal.units * unit
    clocks += deal.outputs * HAND * rows * head_dim_v
    return Parts(
        memory=cache_bytes / READ_BYTES
        + (deal.tiles - 1) * cache_bytes / AGAIN_BYTES
        + partial_bytes / PARTIAL_BYTES,
        chain=clocks / SM90.clock_hz,
        combining=partial_bytes / PARTIAL_BYTES,
        launches=LAUNCHES + (RUNS if values["by"] == "stream_k" else 0),
    )


def _read_twice(deal: Dealt, values: Mapping[str, Any]) -> float:
    """What part of rows that begin within lines of L2 is read once more.

    With a unit or two for each thread block those of neighbouring heads are still abreast.
    """
    if reads_pairs(values):
        return 0.0
    buffers = values["stages"] * values["blocks"]
    return float(READ_TWICE[values["by"]] * (buffers / 12) ** 2 * min(1.0, deal.units / 2))


def predictor(sizes: Sequence[Sizes]) -> Callable[[Mapping[str, Any]], tuple[float, ...]]:
    """Return a function from a schedule's values to its predicted seconds at each of the sizes."""
    cache: dict[tuple[Any, ...], tuple[Dealt, ...]] = {}  # of all ways to deal, there are few

    def times(values: Mapping[str, Any]) -> tuple[float, ...]:
        keys = tuple(values[key] for key in (*_DEAL_KEYS, *_DEAL_BESIDE))
        if keys not in cache:
            cache[keys] = tuple(dealt(values, size) for size in sizes)
        return tuple(
            _parts(deal, values, size).seconds
            for deal, size in zip(cache[keys], sizes, strict=True)
        )

    return times


def seconds(values: Mapping[str, Any], sizes: Sizes) -> float:
    """Return the predicted time of one call."""
    return parts(values, sizes).seconds
