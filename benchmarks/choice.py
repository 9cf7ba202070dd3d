"""Find where few queries of long keys are served best: by plain tiles, by chunks, or by decoding.

    python benchmarks/choice.py                  three head dims: less than two GPU minutes
    python benchmarks/choice.py --write          and puts the rows into schedules/dispatch.toml
    python benchmarks/choice.py --long           128 queries of 100k keys alone: seconds
    python benchmarks/choice.py --predicted      the same borders by the cost models, without a GPU
    python benchmarks/choice.py --write --head-dim 64 --redraw benchmarks/results/<…>-choice.json

Plain and split kernels are timed by tiles of 128 queries and by keys, the former also against
decoding's kernels by queries of a sequence; CUDA graphs go round through 480 MB of keys and values,
so that none is left in the L2 cache. For each number of tiles the chunks are kept that lose least
over all keys from which they gain; decoding serves up to the most queries at which it wins on
average. Measured in fp16 with a causal mask; bf16, and the mask, make no difference to who wins.

With --long the plain kernel and the split ones of head dim 128 are timed on 128 queries of 32/8
heads over 100,000 keys, beside cuDNN and FlashAttention-2, which splits keys too; of these two
without a mask, since none of torch's is aligned to the bottom right.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from statistics import geometric_mean
from typing import Any

from record import Options, Run, Script, flag, say, sizes_of

from fagen.dispatch.rows import Row
from fagen.dispatch.select import sized
from fagen.dispatch.tables import NAME, update
from fagen.errors import FagenError
from fagen.evidence import read as evidence_of
from fagen.kinds.forward.cost import seconds
from fagen.kinds.forward.shapes import LONG_KEYS
from fagen.measure.rotating import rotated
from fagen.measure.timing import Regime
from fagen.paths import locate
from fagen.problem import Sizes
from fagen.registry import from_slug
from fagen.schedule import Schedule

SHORT = Regime("short", idle=0.0, warm=0.004, timed=0.012, rounds=3)

CHUNKS = (4, 16, 64)
# of a call, where one SM each leaves some idle
TILES = (2, 4, 8, 16, 24, 33, 48, 66, 99)
TILE_KEYS = (2_048, 8_192, 32_768, 131_072)
# for which predicted rows are; a model's figures for shorter ones are all launch
LEAST_KEYS = 4_096

QUERIES = (1, 4, 8, 16, 24, 32, 64)
GROUPS = (1, 4, 8)
QUERY_KEYS = (2_048, 16_384)
QUERY_KV_HEADS = 8
DECODING_KEYS = 1_024  # from which decoding is taken

GAIN = 1.05  # that chunks, and decoding, have at least to be taken
PREDICTED_GAIN = 1.25  # the same of chunks, of which nothing was measured

TILES_BY_HEAD_DIM = {64: "m128n128", 128: "m128n128", 256: "m128n64"}
PLAIN = {
    64: "fwd_{}_d64_{}_m128n128_q2",
    128: "fwd_{}_d128_{}_m128n128",
    256: "fwd_{}_d256_{}_m128n64_half",
}
DECODING = {64: "dec_{}_d64_{}_r8n128", 128: "dec_{}_d128_{}_r8n64", 256: "dec_{}_d256_{}_r8n64"}

Times = Callable[[Sequence[Schedule], Sizes], Mapping[str, float]]  # seconds by slug


def split_slug(head_dim: int, num_splits: int, dtype: str = "fp16", mask: str = "causal") -> str:
    """The split schedule of a head dim."""
    tile, end = TILES_BY_HEAD_DIM[head_dim], "_q2" if head_dim == 64 else ""
    if (dtype, head_dim, mask) == ("bf16", 256, "full"):
        tile = "m128n48"  # of 64 keys it spills
    return f"fwd_{dtype}_d{head_dim}_{mask}_{tile}_split{num_splits}{end}"


def work(run: Run, options: Options) -> None:
    """Time what the borders follow from; or, with --long, what splitting the keys is for."""
    if options.long:
        run.each([LONG_KEYS], lambda sizes: long(run, sizes))
        return
    slugs = {slug for head_dim in options.head_dim for slug in _slugs(head_dim)}
    kernels = run.build(map(from_slug, sorted(slugs)), binding=False)

    def measured(schedules: Sequence[Schedule], sizes: Sizes) -> Mapping[str, float]:
        mine = {s.slug: (kernels[s.slug][0], kernels[s.slug][1].library) for s in schedules}
        timed = rotated(mine, sizes, SHORT, peers={}).microseconds
        run.rows += [{"slug": s, **vars(sizes), "microseconds": us} for s, us in timed.items()]
        return {slug: us / 1e6 for slug, us in timed.items()}

    rows: list[Row] = []

    def step(head_dim: int) -> None:
        rows.extend(rows_for(head_dim, measured, GAIN, run.card, measured_by(run)))

    run.each(options.head_dim, step)
    write(rows, options)


def long(run: Run, sizes: Sizes) -> None:
    """Time the plain kernel and the split ones beside peers."""
    kernels = run.build(map(from_slug, _forward(128)), binding=False)
    mine = {slug: (plan, binary.library) for slug, (plan, binary) in kernels.items()}
    timed = rotated(mine, sizes, SHORT)
    for name, microseconds in timed.microseconds.items():
        row = {"slug" if name in mine else "peer": name, **vars(sizes)}
        run.rows.append(row | {"microseconds": microseconds, "spread": timed.spread[name]})
        say(f"{name:44} {sizes}: {microseconds:.0f} us")


def without_a_gpu(options: Options) -> int | None:
    """Find the borders by the cost models, or by times that were measured; the exit code."""
    if not (options.predicted or options.redraw):
        return None
    how: tuple[Any, ...] = predicted, PREDICTED_GAIN, options.card, PREDICTED_BY, LEAST_KEYS
    if options.redraw and not options.predicted:
        run = Run.read(options.redraw)
        how = before(run), GAIN, run.card, measured_by(run)
    write([row for head_dim in options.head_dim for row in rows_for(head_dim, *how)], options)
    return 0


def before(run: Run) -> Times:
    """The times of a run.  They raise FagenError where one was not measured."""
    timed = {(row["slug"], sizes_of(row)): row["microseconds"] for row in run.rows}

    def times(schedules: Sequence[Schedule], sizes: Sizes) -> Mapping[str, float]:
        if missing := [s.slug for s in schedules if (s.slug, sizes) not in timed]:
            raise FagenError(f"{run.stem}.json has no time of {missing[0]}, {sizes}")
        return {s.slug: timed[s.slug, sizes] / 1e6 for s in schedules}

    return times


def measured_by(run: Run) -> str:
    """What rows are said to be measured by."""
    return f"benchmarks/results/{run.stem}.json"


def write(rows: Sequence[Row], options: Options) -> None:
    """Put the rows into the table, if that is asked for."""
    if options.write:
        update(locate("schedules") / NAME, rows)


# ---- borders -------------------------------------------------------------------------------------


def rows_for(
    head_dim: int, times: Times, gain: float, card: str, by: str, least_keys: int = 0
) -> Iterator[Row]:
    """The rows of a dispatch table for a head dim, in both dtypes and with both masks."""
    queries = decoding_border(head_dim, times)
    borders = list(_joined(split_borders(head_dim, times, gain, least_keys)))
    for dtype in ("fp16", "bf16"):
        for mask in ("causal", "full"):
            if queries:
                slug = DECODING[head_dim].format(dtype, mask)
                yield Row(card, slug, DECODING_KEYS, queries_to=queries, by=by)
            for tiles, num_splits, keys in borders:
                slug = split_slug(head_dim, num_splits, dtype, mask)
                yield Row(card, slug, keys, most_keys(num_splits), tiles_to=tiles, by=by)


def most_keys(num_splits: int) -> int:
    """Up to how many keys no chunk has more than 2^17: sums over more need fp32 totals."""
    return num_splits << 17


def decoding_border(head_dim: int, times: Times) -> int:
    """Up to how many queries decoding's kernels win; 0: never."""
    border = 0
    for queries in QUERIES:
        ratios = []
        for group in GROUPS:
            for keys in QUERY_KEYS:
                sizes = Sizes(1, QUERY_KV_HEADS * group, QUERY_KV_HEADS, queries, keys)
                own = sized(DECODING[head_dim].format("fp16", "causal"), sizes)
                others = [from_slug(slug) for slug in _forward(head_dim)]
                seconds = times([own, *others], sizes)
                ratios.append(min(seconds[s.slug] for s in others) / seconds[own.slug])
        mean = geometric_mean(ratios)
        listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        say(f"d{head_dim}, {queries} queries: decoding is {mean:.2f} times as fast ({listed})")
        if mean < GAIN:
            break
        border = queries
    return border


def split_borders(
    head_dim: int, times: Times, gain: float, least_keys: int = 0
) -> Iterator[tuple[int, int, int]]:
    """For so many tiles at most, the chunks that serve them best, and from how many keys on."""
    plain, *split = map(from_slug, _forward(head_dim))
    for tiles in TILES:
        kv_heads = tiles // 4 if tiles % 4 == 0 else tiles
        timed = {
            keys: times([plain, *split], Sizes(1, tiles, kv_heads, 128, keys)) for keys in TILE_KEYS
        }
        best = min(split, key=lambda s: geometric_mean(own[s.slug] for own in timed.values()))
        gains = {keys: own[plain.slug] / own[best.slug] for keys, own in timed.items()}
        num_splits = best.values()["num_splits"]
        listed = ", ".join(f"{keys:,} keys {ratio:.2f}" for keys, ratio in gains.items())
        say(f"d{head_dim}, {tiles} tiles: {num_splits} chunks, beside the plain kernel at {listed}")
        # from where on it is faster, and stays so
        last = max((i for i, ratio in enumerate(gains.values()) if ratio < gain), default=-1)
        if last + 1 < len(TILE_KEYS):
            yield tiles, num_splits, max(least_keys, TILE_KEYS[last + 1])


def _joined(borders: Iterator[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Neighbours that differ in their number of tiles alone, as one."""
    last: tuple[int, int, int] | None = None
    for border in borders:
        if last and last[1:] != border[1:]:
            yield last
        last = border
    if last:
        yield last


def _forward(head_dim: int) -> list[str]:
    """The plain kernel of few rows, and the split ones."""
    plain = PLAIN[head_dim].format("fp16", "causal")
    return [plain, *(split_slug(head_dim, num_splits) for num_splits in CHUNKS)]


def _slugs(head_dim: int) -> Iterator[str]:
    yield from _forward(head_dim)
    for queries in QUERIES:
        for group in GROUPS:
            sizes = Sizes(1, QUERY_KV_HEADS * group, QUERY_KV_HEADS, queries, 1)
            yield sized(DECODING[head_dim].format("fp16", "causal"), sizes).slug


# ---- prediction ----------------------------------------------------------------------------------

# Of decoding, from its kernels' own evidence: what a call of 32 · 4,096 keys takes for each key of
# a KV head, and what a launch of both kernels takes beside.
LAUNCHES = 5e-6
PREDICTED_BY = "benchmarks/notes/log.md#few-queries-of-many-keys-predicted"
MEASURED = (32, 4_096)  # batch, keys
WIDER = 1.65  # that 64 rows take of 32, where 64 were not measured: as at head dim 128


def predicted(schedules: Sequence[Schedule], sizes: Sizes) -> Mapping[str, float]:
    """Seconds by the cost model of forward kernels, and by what was measured of decoding."""
    return {schedule.slug: _predicted(schedule, sizes) for schedule in schedules}


def _predicted(schedule: Schedule, sizes: Sizes) -> float:
    values = schedule.values()
    if "rows" not in values:
        return seconds(values, sizes)
    rows = sizes.seqlen_q * sizes.heads // sizes.kv_heads
    tiles = -(-rows // values["rows"])
    keys = sizes.batch * sizes.kv_heads * sizes.seqlen_k
    return LAUNCHES + tiles * keys * _seconds_a_key(values["head_dim"], values["rows"])


@cache
def _seconds_a_key(head_dim: int, rows: int) -> float:
    block_n = 128 if head_dim == 64 else 64
    for other in (rows, 16, 32):
        evidence = evidence_of(f"dec_fp16_d{head_dim}_causal_r{other}n{block_n}")
        if evidence is None or other > rows > 8:
            continue
        for speed in evidence.speeds:
            if (speed.batch, speed.seqlen_k) == MEASURED:
                per_key = speed.microseconds / 1e6 / (speed.batch * speed.kv_heads * speed.seqlen_k)
                return per_key if other == rows else per_key * (1 if rows < other else WIDER)
    return WIDER * _seconds_a_key(head_dim, rows // 2)


def settle(options: Options) -> str | None:
    """Complain of another head dim."""
    odd = [dim for dim in options.head_dim if dim not in PLAIN]
    return f"--head-dim {odd[0]}: there are {', '.join(map(str, PLAIN))}" if odd else None


main = Script(
    __doc__,
    lambda options: "choice-long" if options.long else "choice",
    work,
    regimes=[SHORT],
    lists={"head_dim": (int, PLAIN)},
    options={
        "--write": flag("put the rows into the table"),
        "--long": flag("128 queries of 100k keys, beside peers"),
        "--predicted": flag("no GPU: by the cost models"),
        "--card": dict(default="NVIDIA H200", help="of predicted rows"),
    },
    settle=settle,
    beside=without_a_gpu,
)

if __name__ == "__main__":
    sys.exit(main())
