"""Time what each part of Flash-Decoding and FlashDecoding++ brings, one taken away at a time.

    python benchmarks/decode_ablation.py                  six shapes, about a GPU minute
    python benchmarks/decode_ablation.py --dtype bf16
    python benchmarks/decode_ablation.py --redraw benchmarks/results/<…>-decode-ablation.json

The whole is the kernel that fagen.attention_decode takes; each other form is the same schedule but
for a key or two: the codes of FORMS. "a tile of 64 rows" is what products cost that are not
swapped, padded to the tensor cores' 64 rows; "another shape's kernel" is no heuristic dataflow: one
kernel for all shapes. Every form runs in a CUDA graph and in eager calls, on keys and values that
come from memory, beside cuDNN and FlashAttention-2.

Written to benchmarks/results/<card>-<date>-decode-ablation.json and .md after every shape, so that
a run cut short keeps what it has, and says what it lacks; the page has microseconds of a call.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from record import Findings, build, parser, say, script

from fagen.kinds.decode import deal_for, derived, num_splits_for
from fagen.kinds.decode.keys import Schedule
from fagen.kinds.decode.verify.speed import BRIEF, timed_together
from fagen.measure.rows import markdown, title
from fagen.problem import Sizes

HEADS, KV_HEADS = 32, 8
SHAPES = (  # batch, queries, keys
    (1, 1, 1_024),
    (1, 1, 8_192),
    (1, 4, 8_192),
    (8, 1, 8_192),
    (32, 1, 4_096),
    (128, 1, 2_048),
)
WAYS = ("graph", "eager")
PEERS = ("cudnn", "fa2")
# what is changed of a schedule's keys; None leaves a key to its default
FORMS: Mapping[str, Mapping[str, object]] = {
    "the whole": {},
    "a unified maximum": {"maximum": "fixed", "speculate": True, "by": "round_robin"},
    "maxima asked for first": {"speculate": False},
    "a tile of 64 rows": {"rows": 64, "by": "round_robin", "speculate": None, "blocks": None},
    "no double buffering": {"stages": 3},
    "keys not split": {"num_splits": 1},
    "chunks dealt otherwise": {},
    "another shape's kernel": {
        "rows": 32,
        "by": "round_robin",
        "num_splits": 64,
        "speculate": None,
    },
}
_FREE = ("stages", "q_stages", "blocks")  # follow from the others


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; the exit code is that of the `fagen` command."""
    return script(_arguments(argv), run, lambda findings: print(report(findings)))


def run(asked: argparse.Namespace) -> int:
    """Build every form, time every shape both ways, write everything."""
    findings = Findings.begun(asked.out, "decode-ablation", [BRIEF])
    work = {
        Sizes(batch, HEADS, KV_HEADS, queries, keys): forms(asked, batch, queries)
        for batch, queries, keys in SHAPES
    }
    kernels = build({one for found in work.values() for one in found.values()}, binding=False)
    findings.note_compiler(kernels)

    def step(sizes: Sizes) -> None:
        found = work[sizes]
        mine = {s.slug: (kernels[s.slug][0], kernels[s.slug][1].library) for s in found.values()}
        for way in WAYS:
            speeds = timed_together(mine, sizes, eager=way == "eager")
            for form, schedule in found.items():
                speed = speeds[schedule.slug]
                say(f"{way:6}{form:24} {schedule.slug:44} {speed.in_words(speed.beside)}")
                row = {"way": way, "form": form, "slug": schedule.slug, **asdict(speed)}
                findings.rows.append(row)
        report(findings)  # a run cut short has a page too

    findings.each(work, step)
    return findings.finish()


def report(findings: Findings) -> str:
    """Write <stem>.md: of each shape its forms, both ways, and what was not timed; return it."""
    times: dict[tuple[int, ...], dict[str, list[dict[str, Any]]]] = {}
    for row in findings.rows:
        shape = row["batch"], row["seqlen_q"], row["seqlen_k"]
        times.setdefault(shape, {}).setdefault(row["form"], []).append(row)
    tables = "\n".join(f"{_said(*shape)}:\n\n{_table(of)}" for shape, of in times.items())
    lacking = [_said(*shape) for shape in SHAPES if shape not in times]
    return findings.write_page(
        "What each part of decoding is worth",
        f"{findings.made_on}; {HEADS} query and {KV_HEADS} KV heads. Microseconds of a call, and "
        "over those of the whole.",
        tables,
        f"Not timed: {'; '.join(lacking)}." if lacking else "",
        findings.remarks,
    )


def _said(batch: int, queries: int, keys: int) -> str:
    return f"{batch} x {keys:,} keys, {queries} {'query' if queries == 1 else 'queries'}"


def _table(of: Mapping[str, list[dict[str, Any]]]) -> str:
    found = {form: {row["way"]: row["microseconds"] for row in rows} for form, rows in of.items()}
    slugs = {form: rows[0]["slug"] for form, rows in of.items()}
    whole = found["the whole"]
    for peer in PEERS:  # where torch has it
        each = {row["way"]: row[f"{peer}_microseconds"] for row in of["the whole"]}
        if all(each.values()):
            found[title(peer)] = each
    body = []
    for form, each in found.items():
        cells = [f"{each[way]:.1f} ({each[way] / whole[way]:.2f})" for way in WAYS]
        body.append([form, slugs.get(form, ""), *cells])
    return markdown(["", "schedule", *WAYS], body)


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
        num_splits=num_splits_for(KV_HEADS),
        by=by,
    )[0]
    other = {"by": "stream_k" if by == "round_robin" else "round_robin"}
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
