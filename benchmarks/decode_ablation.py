"""Time what each part of Flash-Decoding and FlashDecoding++ brings, one taken away at a time.

    python benchmarks/decode_ablation.py                  five shapes, about a GPU minute
    python benchmarks/decode_ablation.py --dtype bf16

The whole is the kernel that fagen.attention_decode takes; each other form is the same schedule but
for a key or two: the codes of FORMS. "a tile of 64 rows" is what products cost that are not
swapped, padded to the tensor cores' 64 rows; "another shape's kernel" is no heuristic dataflow: one
kernel for all shapes. Every form runs in a CUDA graph and in eager calls, on keys and values that
come from memory, beside cuDNN and FlashAttention-2.

Written to benchmarks/results/<card>-<date>-decode-ablation.json, and printed as microseconds of a
call.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from record import Findings, build, exit_code, parser, say

from fagen.kinds.decode import chunks_for, deal_for, derived
from fagen.kinds.decode.keys import Schedule
from fagen.kinds.decode.speed import BRIEF, timed_together
from fagen.problem import Sizes

HEADS, KV_HEADS = 32, 8
SHAPES = (
    (1, 1, 1_024),
    (1, 1, 8_192),
    (8, 1, 8_192),
    (32, 1, 4_096),
    (128, 1, 2_048),
    (1, 4, 8_192),
)
# what is changed of a schedule's keys; None leaves a key to its default
FORMS: Mapping[str, Mapping[str, object]] = {
    "the whole": {},
    "a unified maximum": {"maximum": "unified", "speculate": True, "by": "turn"},
    "maxima asked for first": {"speculate": False},
    "a tile of 64 rows": {"rows": 64, "by": "turn", "speculate": None, "blocks": None},
    "no double buffering": {"stages": 3},
    "keys not split": {"chunks": 1},
    "chunks dealt otherwise": {},
    "another shape's kernel": {"rows": 32, "by": "turn", "chunks": 64, "speculate": None},
}
_FREE = ("stages", "q_stages", "blocks")  # follow from the others


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; the exit code is that of the `fagen` command."""
    asked = _arguments(argv)
    return exit_code(lambda: run(asked))


def run(asked: argparse.Namespace) -> int:
    """Build every form, time every shape both ways, write everything."""
    findings = Findings.begun(asked.out, "decode-ablation", [BRIEF])
    work = {
        Sizes(batch, HEADS, KV_HEADS, queries, keys): forms(asked, batch, queries)
        for batch, queries, keys in SHAPES
    }
    kernels = build({one for found in work.values() for one in found.values()}, binding=False)
    findings.note_compiler(kernels)
    began = time.monotonic()
    for sizes, found in work.items():
        mine = {s.slug: (kernels[s.slug][0], kernels[s.slug][1].library) for s in found.values()}
        for way in ("graph", "eager"):
            speeds = timed_together(mine, sizes, eager=way == "eager")
            for form, schedule in found.items():
                speed = speeds[schedule.slug]
                say(f"{way:6}{form:24} {schedule.slug:44} {speed}")
                row = {"way": way, "form": form, "slug": schedule.slug, **asdict(speed)}
                findings.rows.append(row)
        findings.about["seconds"] = round(time.monotonic() - began)
        findings.save()
    return findings.finish()


def forms(asked: argparse.Namespace, batch: int, queries: int) -> dict[str, Schedule]:
    """The schedule of each form for a shape."""
    rows = queries * HEADS // KV_HEADS
    by = deal_for(asked.head_dim, rows, KV_HEADS, batch, alike=True)
    whole = derived(
        dtype=asked.dtype,
        head_dim=asked.head_dim,
        head_dim_v=asked.head_dim,
        mask="causal",
        rows=rows,
        chunks=chunks_for(KV_HEADS),
        by=by,
    )[0]
    other = {"by": "run" if by == "turn" else "turn"}
    changes = {**FORMS, "chunks dealt otherwise": other}
    free = dict.fromkeys(_FREE)
    return {form: whole.but(**{**free, **change}) for form, change in changes.items()}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--dtype", default="fp16", choices=("fp16", "bf16"))
    made.add_argument("--head-dim", type=int, default=128)
    return made.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
