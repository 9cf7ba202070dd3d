"""Search the head dims that models have beside 64, 128 and 256, a little of each: ~5 minutes.

    python benchmarks/search/many.py --out /tmp/x                   all of them, fp16, both masks
    python benchmarks/search/many.py --out /tmp/x --only 72 192/128
    python benchmarks/search/many.py --out /tmp/x --only 72 --mask causal --compile 6
    python benchmarks/search/many.py --dry-run                      what would be tried

Everything is kept in OUT/many.sqlite as it is found, which `fagen search report` reads and a second
run goes on from; OUT/many.json has what came of it. The anchor is the schedule that is derived for
the problem, so a leader's ratio to it says what a search is worth. A tile searched in fp16 serves
bf16, which has the same registers.
"""

import argparse
import json
import math
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fagen import search
from fagen.kinds.forward.defaults import derived_schedules
from fagen.problem import Problem
from fagen.search.declared import Declared, parse_space
from fagen.search.lab import LocalLab
from fagen.search.marks import BRIEF
from fagen.search.results import Result
from fagen.search.run import Search
from fagen.search.space import Point, Survey, survey
from fagen.search.store import Store
from fagen.vocab import MASKS

TUNED = ("32", "40", "48", "72", "80", "96", "112", "120", "160", "192", "192/128", "224", "64/256")
DERIVED = ("24", "56", "88", "104", "136", "144", "176", "208")  # served by derived schedules
COMPILED = {**dict.fromkeys(TUNED, 14), **dict.fromkeys(DERIVED, 10)}  # of each mask
WIDE = 160  # from here on the row max of each block is tried too, which takes fewer registers
LOADS = ("stages", "q_stages", "output")  # a tile is tried with the best of these alone

SPACE = """\
[attention]
dtype = "fp16"
head_dim = {head_dim}
head_dim_v = {head_dim_v}
mask = "{mask}"

[tile]
block_m = [128, 192, 256]
block_n = {{ from = 32, to = 256, step = 16 }}

[pipeline]
stages = [2, 3, 4]
q_stages = [2, 1]  # where the prediction knows no difference, the former

[warps]
producer = "warp"

[overlap]
intra_warpgroup = true

[softmax]
p = "registers"
{maxima}
[grid]
order = "{order}"
cluster = 1

[[shapes]]
seqlen = 1024

[[shapes]]
seqlen = 4096

[[shapes]]
seqlen = 16384

[search]
anchor = "{anchor}"
compile = {compiled}
long_runs = false
"""
EACH = 'maximum = ["lazy", "each"]\nrescale_threshold = [0.0, 8.0]\n'


def space(head_dims: str, mask: str, most: int = 14) -> Declared:
    """What is tried for '128', or '192/128' where V has its own; `most` kernels are compiled."""
    head_dim, _, own = head_dims.partition("/")
    d, d_v = int(head_dim), int(own or head_dim)
    text = SPACE.format(
        head_dim=d,
        head_dim_v=d_v,
        mask=mask,
        maxima=EACH if d_v >= WIDE else "",
        order=MASKS[mask].order,
        anchor=derived_schedules(Problem("fp16", d, d_v, mask))[0].slug,
        compiled=min(most, COMPILED[head_dims]),
    )
    return parse_space(text, f"many {head_dims} {mask}")


def best_loads(found: Survey) -> Survey:
    """Leave of points that differ in their loads alone the one that is predicted fastest.

    And none that finds each row max but rescales without need.
    """
    kept: dict[tuple[Any, ...], Point] = {}
    for point in found.best:
        keys = found.keys(point)
        if keys.get("maximum") != "each" or keys["rescale_threshold"]:
            kept.setdefault(tuple(keys[name] for name in keys if name not in LOADS), point)
    return replace(found, points=tuple(kept.values()))


def told(result: Result) -> dict[str, Any]:
    """A target's kernels, fastest first: ratios to the anchor and to cuDNN, and at each size."""
    marks, sizes = result.marks, result.sizes
    return {
        "target": result.target.name,
        "anchor": result.anchor,
        "sizes": [str(size) for size in sizes],
        "kernels": {
            slug: {
                "anchor": round(math.exp(-(marks.mark(slug) or 0.0)), 4),
                "cudnn": marks.over_peer(slug),
                "seconds": [marks.seconds(slug, size) for size in sizes],
            }
            for slug in marks.ranked(BRIEF)
        },
        "unfit": {made.slug: made.outcome for made in result.compiled if made.outcome != "good"},
        "wrong": result.wrong,
        "correlation": result.correlation,
    }


def main() -> int:
    """Search, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), help="the folder to write to")
    parser.add_argument("--only", nargs="+", choices=COMPILED, default=list(COMPILED))
    parser.add_argument("--mask", choices=MASKS, help="this one only")
    parser.add_argument("--compile", type=int, default=14, help="kernels of a problem at most")
    parser.add_argument("--seconds", type=int, default=0, help="stop after so long")
    parser.add_argument("--jobs", type=int, help="compile so many at once")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    masks = [given.mask] if given.mask else list(MASKS)
    spaces = [space(dims, mask, given.compile) for dims in given.only for mask in masks]
    if given.dry_run:
        for one in spaces:
            found = best_loads(survey(one, one.targets()[0]))
            print(len(found.points), *(found.schedule(point).slug for point in found.best[:3]))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    store = given.out / "many.sqlite"
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(given.seconds)
    began = time.monotonic()
    lab = LocalLab(jobs=given.jobs)
    try:
        with Store(store) as kept:
            outcome = Search(spaces, lab, kept, only=best_loads).run()
    finally:
        signal.alarm(0)
        lab.close()
    found = [told(result) for result in search.found(store)]
    (given.out / "many.json").write_text(json.dumps(found, indent=1) + "\n")
    for one in found:
        if not one["kernels"]:
            print(one["target"], "nothing timed", one["unfit"], one["wrong"])
            continue
        slug, best = next(iter(one["kernels"].items()))
        over = f"{best['cudnn']:.3f}" if best["cudnn"] else "-"
        tail = slug.partition(one["target"] + "_")[2]
        was = (one["anchor"] or "").partition(one["target"] + "_")[2]
        print(
            f"{one['target']:22} {tail:28} {best['anchor']:.3f} × {was:24} {over} × cuDNN, "
            f"{len(one['kernels'])} timed, {len(one['unfit'])} unfit, {len(one['wrong'])} wrong"
        )
    print(f"{time.monotonic() - began:.0f} s{', interrupted' if outcome.interrupted else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
