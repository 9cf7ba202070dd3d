"""Time decoding beside cuDNN and FlashAttention-2, on keys that come from memory.

    python benchmarks/decode.py                           nine shapes: about a GPU minute
    python benchmarks/decode.py --dtype bf16 --head-dim 64
    python benchmarks/decode.py --with c32 --with s4_b3   and variants of each shape's schedule
    python benchmarks/decode.py --around                  other head dims, groups and queries
    python benchmarks/decode.py --mixed                   64 sequences of 100 … 65,536 keys
    python benchmarks/decode.py --host                    what a call takes of the host: seconds

Each shape's kernels are those that fagen.attention_decode takes for so many rows, with chunks dealt
in turns and in runs; a variant is the first of them with these codes at the end of its slug. A CUDA
graph goes round through 480 MB of keys and values and more, so that none are left in the L2 cache;
all kernels run in turn on the same tensors in one process. Of several queries peers see all keys,
fagen's the mask of causal attention.

With --mixed lengths are a Zipf distribution's, the i-th longest of i^1.559 times fewer keys than
the first, so that 64 of them end at 100; there is no peer: GB/s are to be held against what reading
can reach (benchmarks/decode_micro.py).

With --host a call of one token after a few keys, with lengths, is timed until it returns, beside
torch's attention and cuDNN's; kernels, memsets, copies and allocations of each are counted.

Files end in -decode, -decode-around, -decode-mixed or -decode-host.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import product
from typing import Any

import torch
from launch import SMALL_DECODING, launch_costs
from record import Options, Run, Script, flag, say
from tables import launch_lines

from fagen.kinds.decode import counted_keys, derived, tile_for
from fagen.kinds.decode.keys import Schedule
from fagen.kinds.decode.rules import DEALT
from fagen.kinds.decode.verify.speed import BRIEF, timed_together
from fagen.measure.rotating import rotated
from fagen.problem import Sizes

Kernels = Mapping[str, tuple[Any, Any]]  # a Plan and a library by slug

HEADS, KV_HEADS = 32, 8
SHAPES = (  # batch, queries, keys
    (1, 1, 1_024),
    (1, 1, 8_192),
    (1, 1, 32_768),
    (1, 1, 131_072),
    (8, 1, 8_192),
    (32, 1, 4_096),
    (128, 1, 2_048),
    (1, 4, 8_192),
    (32, 4, 4_096),
)
AROUND = (
    (64, 256),
    ((8, 8, 1), (64, 8, 1), (32, 8, 2), (32, 8, 8)),  # heads, KV heads, queries
    ((1, 8_192), (32, 4_096)),
)


def work(run: Run, options: Options) -> None:
    """Build the kernels, time every shape."""
    if options.host:
        host(run, options)
        return
    shapes = list(_shapes(options))
    kernels = run.build({s for _, schedules in shapes for s in schedules}, binding=False)

    def step(item: tuple[Sizes, tuple[Schedule, ...]]) -> None:
        sizes, schedules = item
        mine = {s.slug: (kernels[s.slug][0], kernels[s.slug][1].library) for s in schedules}
        run.rows += _mixed(mine, sizes) if options.mixed else _equal(mine, sizes)

    run.each(shapes, step)


def host(run: Run, options: Options) -> None:
    """Note what one call takes beside its arithmetic, of the kernel for a token of few keys."""
    schedule = usual(options.dtype, options.head_dim, SMALL_DECODING, "round_robin")
    kernels = run.build([schedule])

    def step(slug: str) -> None:
        costs = {name: asdict(cost) for name, cost in launch_costs(*kernels[slug]).items()}
        sizes = vars(SMALL_DECODING)
        run.rows += [{"slug": slug, **sizes, "call": name, **costs[name]} for name in costs]
        say(f"{slug}, {SMALL_DECODING}:\n{launch_lines(costs)}")

    run.each([schedule.slug], step)


def zipf(sequences: int = 64, longest: int = 65_536, shortest: int = 100) -> list[int]:
    """Lengths that fall by a power of their rank, from the longest to the shortest."""
    exponent = math.log(longest / shortest, sequences)
    return [round(longest * rank**-exponent) for rank in range(1, sequences + 1)]


def _equal(kernels: Kernels, sizes: Sizes) -> list[dict[str, Any]]:
    speeds = timed_together(kernels, sizes)
    for slug, speed in speeds.items():
        say(f"{slug:40} {speed.in_words(speed.beside)}")
    peers = {"cuDNN": speed.cudnn_microseconds, "FA2": speed.fa2_microseconds}
    for name, microseconds in peers.items():
        if microseconds:
            say(f"{name:40} {microseconds:.1f} us, {speed.megabytes * 1e3 / microseconds:.0f}")
    return [{"slug": slug, **asdict(speed)} for slug, speed in speeds.items()]


def _mixed(kernels: Kernels, sizes: Sizes) -> list[dict[str, Any]]:
    order = torch.randperm(sizes.batch, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor(zipf(sizes.batch), dtype=torch.int32)[order].cuda()
    more = {slug: {"seqused_k": lengths} for slug in kernels}
    timed = rotated(kernels, sizes, peers={}, more=more)
    share = sum(zipf(sizes.batch)) / (sizes.batch * sizes.seqlen_k)
    rows = []
    for slug, microseconds in timed.microseconds.items():
        megabytes = timed.megabytes * share
        row = {"slug": slug, "batch": sizes.batch, "heads": sizes.heads, "lengths": "zipf"}
        row |= {"kv_heads": sizes.kv_heads, "seqlen_q": sizes.seqlen_q, "megabytes": megabytes}
        row |= {"longest": sizes.seqlen_k, "shortest": min(zipf(sizes.batch))}
        rows.append(row | {"microseconds": microseconds, "spread": timed.spread[slug]})
        say(f"{slug:40} {microseconds:.1f} us, {megabytes * 1e3 / microseconds:.0f} GB/s")
    return rows


def _shapes(options: Options) -> Iterator[tuple[Sizes, tuple[Schedule, ...]]]:
    """Sizes, and the schedules that are timed on them."""
    if options.around:
        for head_dim, (heads, kv_heads, queries), (batch, keys) in product(*AROUND):
            sizes = Sizes(batch, heads, kv_heads, queries, keys)
            yield sizes, (usual(options.dtype, head_dim, sizes),)
        return
    shapes = [(len(zipf()), 1, max(zipf()))] if options.mixed else SHAPES
    for batch, queries, keys in shapes:
        sizes = Sizes(batch, HEADS, KV_HEADS, queries, keys)
        dealt = {usual(options.dtype, options.head_dim, sizes, by): None for by in DEALT}
        first = next(iter(dealt)).slug
        variants = (Schedule.from_slug(f"{first}_{codes}") for codes in options.variants)
        yield sizes, (*dealt, *variants)


def usual(dtype: str, head_dim: int, sizes: Sizes, by: str | None = None) -> Schedule:
    """What fagen.attention_decode takes, or what it would take with chunks dealt so."""
    rows, keys = sizes.seqlen_q * sizes.heads // sizes.kv_heads, counted_keys(sizes.seqlen_k)
    tile = tile_for(head_dim, rows, sizes.kv_heads, sizes.batch, alike=True, keys=keys)
    named = tile._asdict() | ({"by": by} if by else {})
    return derived(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim, mask="causal", **named)[0]


KEYS: Mapping[str, Mapping[str, Any]] = {
    "--dtype": dict(default="fp16", choices=("fp16", "bf16")),
    "--head-dim": dict(type=int, default=128),
}
WAYS = ("mixed", "around", "host")


def settle(options: Options) -> str | None:
    """Complain of several ways at once."""
    several = sum(getattr(options, way) for way in WAYS) > 1
    return "--mixed, --around and --host go one at a time" if several else None


main = Script(
    __doc__,
    lambda options: "-".join(["decode", *(way for way in WAYS if getattr(options, way))]),
    work,
    regimes=[BRIEF],
    options={
        **KEYS,
        "--around": flag("other head dims, groups, queries"),
        "--mixed": flag("sequences of many lengths"),
        "--host": flag("what a call takes of the host"),
        "--with": dict(
            dest="variants",
            action="append",
            default=[],
            metavar="CODES",
            help="a variant of each schedule, by the end of its slug: c32, s4_b3, nospec",
        ),
    },
    settle=settle,
)

if __name__ == "__main__":
    sys.exit(main())
