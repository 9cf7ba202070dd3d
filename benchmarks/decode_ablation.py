"""Time what each part of Flash-Decoding and FlashDecoding++ brings, one taken away at a time.

    python benchmarks/decode_ablation.py                  six shapes, about a GPU minute
    python benchmarks/decode_ablation.py --dtype bf16
    python benchmarks/decode_ablation.py --redraw benchmarks/results/<…>-decode-ablation.json

The whole is the kernel that fagen.attention_decode takes; each other form is the same schedule but
for a key or two: the codes of FORMS. "a tile of 64 rows" is what products cost that are not
swapped, padded to the tensor cores' 64 rows; "another shape's kernel" is no heuristic dataflow: one
kernel for all shapes. Every form runs in a CUDA graph and in eager calls, on keys and values that
come from memory, beside cuDNN and FlashAttention-2.

The page has microseconds of a call, and what a run that was cut short lacks.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from operator import itemgetter
from typing import Any

from decode import HEADS, KEYS, KV_HEADS, usual
from record import Options, Run, Script, say
from tables import grouped

from fagen.kinds.decode.keys import Schedule
from fagen.kinds.decode.verify.speed import BRIEF, timed_together
from fagen.measure.rows import markdown, title
from fagen.problem import Sizes

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


def work(run: Run, options: Options) -> None:
    """Build every form, time every shape both ways."""
    shapes = {
        sizes: forms(options, sizes)
        for batch, queries, keys in SHAPES
        for sizes in [Sizes(batch, HEADS, KV_HEADS, queries, keys)]
    }
    schedules = {schedule for by_form in shapes.values() for schedule in by_form.values()}
    kernels = run.build(schedules, binding=False)

    def step(sizes: Sizes) -> None:
        of_form = shapes[sizes]
        mine = {s.slug: (kernels[s.slug][0], kernels[s.slug][1].library) for s in of_form.values()}
        for way in WAYS:
            speeds = timed_together(mine, sizes, eager=way == "eager")
            for form, schedule in of_form.items():
                speed = speeds[schedule.slug]
                say(f"{way:6}{form:24} {schedule.slug:44} {speed.in_words(speed.beside)}")
                run.rows.append({"way": way, "form": form, "slug": schedule.slug, **asdict(speed)})
        page(run)  # a run cut short has a page too

    run.each(shapes, step)


def page(run: Run) -> str:
    """Write <stem>.md: of each shape its forms, both ways, and what was not timed; return it."""
    shapes = grouped(run.rows, itemgetter("batch", "seqlen_q", "seqlen_k"))
    tables = "\n".join(f"{_in_words(*shape)}:\n\n{_table(own)}" for shape, own in shapes.items())
    lacking = [_in_words(*shape) for shape in SHAPES if shape not in shapes]
    return run.write_page(
        "What each part of decoding is worth",
        f"{run.made_on}; {HEADS} query and {KV_HEADS} KV heads. Microseconds of a call, and over "
        "those of the whole.",
        tables,
        f"Not timed: {'; '.join(lacking)}." if lacking else "",
        run.remarks,
    )


def _in_words(batch: int, queries: int, keys: int) -> str:
    return f"{batch} x {keys:,} keys, {queries} {'query' if queries == 1 else 'queries'}"


def _table(rows: list[dict[str, Any]]) -> str:
    of_form = grouped(rows, itemgetter("form"))
    slugs = {form: ways[0]["slug"] for form, ways in of_form.items()}
    times = {form: {x["way"]: x["microseconds"] for x in rows} for form, rows in of_form.items()}
    whole = times["the whole"]
    for peer in PEERS:  # where torch has it
        peer_times = {row["way"]: row[f"{peer}_microseconds"] for row in of_form["the whole"]}
        if all(peer_times.values()):
            times[title(peer)] = peer_times
    body = []
    for form, peer_times in times.items():
        cells = [f"{peer_times[way]:.1f} ({peer_times[way] / whole[way]:.2f})" for way in WAYS]
        body.append([form, slugs.get(form, ""), *cells])
    return markdown(["", "schedule", *WAYS], body)


def forms(options: Options, sizes: Sizes) -> dict[str, Schedule]:
    """The schedule of each form for a shape."""
    whole = usual(options.dtype, options.head_dim, sizes)
    other = "stream_k" if whole.values()["by"] == "round_robin" else "round_robin"
    changes = {**FORMS, "chunks dealt otherwise": {"by": other}}
    free = dict.fromkeys(_FREE)
    return {form: whole.but(**{**free, **change}) for form, change in changes.items()}


main = Script(
    __doc__, "decode-ablation", work, lambda run: print(page(run)), regimes=[BRIEF], options=KEYS
)

if __name__ == "__main__":
    sys.exit(main())
