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

Written to benchmarks/results/<card>-<date>-decode.json, -decode-around, -decode-mixed or
-decode-host, with microseconds of a call, and printed with GB/s of keys and values.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import torch
from launch import SMALL_DECODING, launch_costs
from record import Findings, build, exit_code, parser, say
from tables import launch_lines

from fagen.kinds.decode import deal_for, derived, num_splits_for, rows_for
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; the exit code is that of the `fagen` command."""
    asked = _arguments(argv)
    return exit_code(lambda: run(asked))


def run(asked: argparse.Namespace) -> int:
    """Build the kernels, time every shape, write everything."""
    said = [way for way in ("mixed", "around", "host") if getattr(asked, way)]
    findings = Findings.begun(asked.out, "-".join(["decode", *said]), [BRIEF])
    if asked.host:
        return host(findings, asked)
    work = list(_work(asked))
    kernels = build({s for _, schedules in work for s in schedules}, binding=False)
    findings.note_compiler(kernels)

    def step(item: tuple[Sizes, tuple[Schedule, ...]]) -> None:
        sizes, schedules = item
        mine = {s.slug: (kernels[s.slug][0], kernels[s.slug][1].library) for s in schedules}
        findings.rows += _mixed(mine, sizes) if asked.mixed else _equal(mine, sizes)

    findings.each(work, step)
    return findings.finish()


def host(findings: Findings, asked: argparse.Namespace) -> int:
    """Note what one call takes beside its arithmetic, of the kernel for a token of few keys."""
    schedule = _usual(asked.dtype, asked.head_dim, SMALL_DECODING, "round_robin")
    kernels = build([schedule])
    findings.note_compiler(kernels)

    def step(schedule: Schedule) -> None:
        found = launch_costs(*kernels[schedule.slug]).items()
        costs = {name: asdict(cost) for name, cost in found}
        findings.rows += [
            {"slug": schedule.slug, **vars(SMALL_DECODING), "call": name, **cost}
            for name, cost in costs.items()
        ]
        say(f"{schedule.slug}, {SMALL_DECODING}:\n{launch_lines(costs)}")

    findings.each([schedule], step)
    return findings.finish()


def zipf(sequences: int = 64, longest: int = 65_536, shortest: int = 100) -> list[int]:
    """Lengths that fall by a power of their rank, from the longest to the shortest."""
    exponent = math.log(longest / shortest, sequences)
    return [round(longest * rank**-exponent) for rank in range(1, sequences + 1)]


def _equal(kernels: Kernels, sizes: Sizes) -> list[dict[str, Any]]:
    found = timed_together(kernels, sizes)
    for slug, speed in found.items():
        say(f"{slug:40} {speed.in_words(speed.beside)}")
    peers = {"cuDNN": speed.cudnn_microseconds, "FA2": speed.fa2_microseconds}
    for name, microseconds in peers.items():
        if microseconds:
            say(f"{name:40} {microseconds:.1f} us, {speed.megabytes * 1e3 / microseconds:.0f}")
    return [{"slug": slug, **asdict(speed)} for slug, speed in found.items()]


def _mixed(kernels: Kernels, sizes: Sizes) -> list[dict[str, Any]]:
    order = torch.randperm(sizes.batch, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor(zipf(sizes.batch), dtype=torch.int32)[order].cuda()
    more = {slug: {"seqused_k": lengths} for slug in kernels}
    found = rotated(kernels, sizes, peers={}, more=more)
    share = sum(zipf(sizes.batch)) / (sizes.batch * sizes.seqlen_k)
    rows = []
    for slug, microseconds in found.microseconds.items():
        megabytes = found.megabytes * share
        row = {"slug": slug, "batch": sizes.batch, "heads": sizes.heads, "lengths": "zipf"}
        row |= {"kv_heads": sizes.kv_heads, "seqlen_q": sizes.seqlen_q, "megabytes": megabytes}
        row |= {"longest": sizes.seqlen_k, "shortest": min(zipf(sizes.batch))}
        rows.append(row | {"microseconds": microseconds, "spread": found.spread[slug]})
        say(f"{slug:40} {microseconds:.1f} us, {megabytes * 1e3 / microseconds:.0f} GB/s")
    return rows


def _work(asked: argparse.Namespace) -> Iterator[tuple[Sizes, tuple[Schedule, ...]]]:
    """Sizes, and the schedules that are timed on them."""
    if asked.around:
        for head_dim, (heads, kv_heads, queries), (batch, keys) in product(*AROUND):
            sizes = Sizes(batch, heads, kv_heads, queries, keys)
            yield sizes, (_usual(asked.dtype, head_dim, sizes),)
        return
    shapes = [(len(zipf()), 1, max(zipf()))] if asked.mixed else SHAPES
    for batch, queries, keys in shapes:
        sizes = Sizes(batch, HEADS, KV_HEADS, queries, keys)
        usual = {_usual(asked.dtype, asked.head_dim, sizes, by): None for by in DEALT}
        first = next(iter(usual)).slug
        variants = (Schedule.from_slug(f"{first}_{codes}") for codes in asked.variants)
        yield sizes, (*usual, *variants)


def _usual(dtype: str, head_dim: int, sizes: Sizes, by: str | None = None) -> Schedule:
    """What fagen.attention_decode takes, or what it would take with chunks dealt so."""
    rows = sizes.seqlen_q * sizes.heads // sizes.kv_heads
    return derived(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim,
        mask="causal",
        rows=rows_for(rows),
        num_splits=num_splits_for(sizes.kv_heads),
        by=by or deal_for(head_dim, rows, sizes.kv_heads, sizes.batch, alike=True),
    )[0]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--dtype", default="fp16", choices=("fp16", "bf16"))
    made.add_argument("--head-dim", type=int, default=128)
    of = made.add_mutually_exclusive_group()
    of.add_argument("--around", action="store_true", help="other head dims, groups, queries")
    of.add_argument("--mixed", action="store_true", help="sequences of many lengths")
    of.add_argument("--host", action="store_true", help="what a call takes of the host")
    made.add_argument(
        "--with",
        dest="variants",
        action="append",
        default=[],
        metavar="CODES",
        help="a variant of each schedule, by the end of its slug: c32, s4_b3, nospec",
    )
    return made.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
