"""Time decoding beside cuDNN and FlashAttention-2, on keys that come from memory.

    python benchmarks/decode.py                           nine shapes: about a GPU minute
    python benchmarks/decode.py --dtype bf16 --head-dim 64
    python benchmarks/decode.py --with c32 --with s4_b3   and variants of each shape's schedule

Each shape's kernels are those that fagen.attention_decode takes for so many rows, with chunks dealt
in turns and in runs; a variant is the first of them with these codes at the end of its slug. A CUDA
graph goes round through 480 MB of keys and values and more, so that none are left in the L2 cache;
all kernels run in turn on the same tensors in one process. Of several queries peers see all keys,
fagen's the mask of causal attention.

Written to benchmarks/results/<card>-<date>-decode.json, with microseconds of a call, and printed
with GB/s of keys and values.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from record import Findings, build, exit_code, parser, say

from fagen.kinds.decode import chunks_for, derived
from fagen.kinds.decode.keys import Schedule
from fagen.kinds.decode.rules import DEALT
from fagen.kinds.decode.speed import BRIEF, timed_together
from fagen.problem import Sizes

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; the exit code is that of the `fagen` command."""
    asked = _arguments(argv)
    return exit_code(lambda: run(asked))


def run(asked: argparse.Namespace) -> int:
    """Build the kernels, time every shape, write everything."""
    findings = Findings.begun(asked.out, "decode", [BRIEF])
    work = {
        Sizes(batch, HEADS, KV_HEADS, queries, keys): tuple(_schedules(asked, queries))
        for batch, queries, keys in SHAPES
    }
    kernels = build({s for schedules in work.values() for s in schedules}, binding=False)
    findings.note_compiler(kernels)
    began = time.monotonic()
    for sizes, schedules in work.items():
        mine = {s.slug: (kernels[s.slug][0], kernels[s.slug][1].library) for s in schedules}
        found = timed_together(mine, sizes)
        for slug, speed in found.items():
            say(f"{slug:40} {speed}")
            findings.rows.append({"slug": slug, **asdict(speed)})
        peers = {"cuDNN": speed.cudnn_microseconds, "FA2": speed.fa2_microseconds}
        for name, microseconds in peers.items():
            if microseconds:
                say(f"{name:40} {microseconds:.1f} us, {speed.megabytes * 1e3 / microseconds:.0f}")
        findings.about["seconds"] = round(time.monotonic() - began)
        findings.save()
    return findings.finish()


def _schedules(asked: argparse.Namespace, queries: int) -> Iterator[Schedule]:
    """The usual schedules for so many queries, and variants."""
    usual = {
        derived(
            dtype=asked.dtype,
            head_dim=asked.head_dim,
            head_dim_v=asked.head_dim,
            mask="causal",
            rows=queries * HEADS // KV_HEADS,
            chunks=chunks_for(KV_HEADS),
            by=by,
        )[0]: None
        for by in DEALT
    }
    yield from usual
    for codes in asked.variants:
        yield Schedule.from_slug(f"{next(iter(usual)).slug}_{codes}")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--dtype", default="fp16", choices=("fp16", "bf16"))
    made.add_argument("--head-dim", type=int, default=128)
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
