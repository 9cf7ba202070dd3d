"""Time fagen's kernels by what the scores look like: a speed that hangs on the data is none.

    python benchmarks/data.py                                  24 cells, 8 families: ~1 GPU minute
    python benchmarks/data.py --dtype bf16 --head-dim 128 --family sigma=8    a part; sigma=1 always
    python benchmarks/data.py --schedule fwd_fp16_d128_full_m128n128_onlinemax  others beside it
    python benchmarks/data.py --redraw benchmarks/results/<card>-<date>-data.json      no GPU

Families, of scores in natural units: `sigma=s`, normal with standard deviation s; and on top of
normal ones with deviation 1, `sink`, a first key 12 above the others in every row; `rising` and
`falling`, by 16 from the first key to the last; `local`, by rotary embeddings of one vector, 12
where query and key stand at the same place.

A cell is 16,384 tokens and hidden size 2048. Its families are timed in turn in one process, in
burst, and compared with sigma=1. Every output is compared with FA2's. In fp16 there is also the
speed over FlashAttention-3's, whose figures are of another card: cuDNN at sigma=1, timed here and
in the run which those figures are of, stands between the two.

Written to benchmarks/results/<card>-<date>-data.json and .md, after every cell. The exit code is 6
where an output is wrong.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from record import Findings, Kernels, build, grid, parsed, parser, say, script, serving
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fagen.measure.inputs import inputs, softmax_scale
from fagen.measure.numerics import disagreement
from fagen.measure.peers import peer
from fagen.measure.rows import geomean, markdown
from fagen.measure.timing import BURST, Call, time_calls
from fagen.problem import Cell, solves
from fagen.registry import from_slug
from fagen.runtime import op
from fagen.schedule import Schedule
from fagen.vocab import MASKS

HEAD_DIMS, SEQLENS, DTYPES = (64, 128, 256), (4_096, 16_384), ("fp16", "bf16")
NORMAL = "sigma=1"
LEAST = {"fp16": 0.95, "bf16": 0.97}  # of the speed at NORMAL, that any family is to reach
SINK, SLOPE, LOCAL = 12.0, 16.0, 12.0  # scores, in natural units
ROTARY_BASE = 10_000.0

# TFLOP/s in fp16, burst, NVIDIA H200, driver 580.159, CUDA 13.0: FlashAttention-3 (hopper/ at
# 0251105a, default tiles) by the scores' deviation, and cuDNN 9.19 at deviation 1 beside it.
FA3: Mapping[tuple[int, str, int], Mapping[str, float]] = {
    (64, "full", 4_096): {"sigma=1": 523, "sigma=4": 529, "sigma=8": 537},
    (64, "causal", 4_096): {"sigma=1": 488, "sigma=4": 491, "sigma=8": 493},
    (128, "full", 4_096): {"sigma=1": 711, "sigma=4": 717, "sigma=8": 744},
    (128, "causal", 4_096): {"sigma=1": 666, "sigma=4": 674, "sigma=8": 694},
    (128, "full", 16_384): {"sigma=1": 736, "sigma=4": 745, "sigma=8": 776},
    (128, "causal", 16_384): {"sigma=1": 734, "sigma=4": 744, "sigma=8": 767},
    (256, "full", 4_096): {"sigma=1": 766, "sigma=4": 775, "sigma=8": 803},
    (256, "causal", 4_096): {"sigma=1": 699, "sigma=4": 707, "sigma=8": 728},
}
CUDNN: Mapping[tuple[int, str, int], float] = {
    (64, "full", 4_096): 486,
    (64, "causal", 4_096): 437,
    (128, "full", 4_096): 661,
    (128, "causal", 4_096): 563,
    (128, "full", 16_384): 674,
    (128, "causal", 16_384): 619,
    (256, "full", 4_096): 714,
    (256, "causal", 4_096): 590,
}


# ---- families of scores --------------------------------------------------------------------------

Given = tuple[Tensor, Tensor, Tensor, float]  # q, k, v and the scale
Change = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


def made(name: str, q: Tensor, k: Tensor, v: Tensor) -> Given:
    """Inputs of a family out of normal ones, (B, S, H, D); these stay as they are."""
    scale = softmax_scale(q.shape[-1])
    family = FAMILIES[name]
    if isinstance(family, float):
        return q, k, v, family * scale
    return *family(q.clone(), k.clone(), scale), v, scale


def _by_key(height: Callable[[Tensor], Tensor]) -> Change:
    """A change that adds to every score of a key, at place 0 … 1: by one column of Q and K."""

    def change(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        place = torch.arange(k.shape[1], device=k.device) / max(1, k.shape[1] - 1)
        of_key = height(place)
        share = float(of_key.max() / scale) ** 0.5  # of the product, for Q and K alike
        q[..., 0] = share
        k[..., 0] = (of_key / (scale * share))[:, None]
        return q, k

    return change


def _local(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Add to both the same vector, turned by the angles of rotary embeddings at their places."""
    dim = q.shape[-1]
    amplitude = math.sqrt(LOCAL / scale * 2 / dim)  # LOCAL is D/2 pairs of amplitude² · scale
    rates = ROTARY_BASE ** (-torch.arange(0, dim, 2, device=q.device) / dim)
    for x, ahead in ((q, k.shape[1] - q.shape[1]), (k, 0)):
        angles = (torch.arange(x.shape[1], device=x.device)[:, None] + ahead) * rates
        turned = torch.cat((angles.cos(), angles.sin()), -1) * amplitude
        x += turned[:, None, :].to(x.dtype)
    return q, k


FAMILIES: Mapping[str, float | Change] = {
    NORMAL: 1.0,
    "sigma=2": 2.0,
    "sigma=4": 4.0,
    "sigma=8": 8.0,
    "sink": _by_key(lambda place: SINK * (place == 0)),
    "rising": _by_key(lambda place: SLOPE * place),
    "falling": _by_key(lambda place: SLOPE * (1 - place)),
    "local": _local,
}


# ---- timing --------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; the exit code is that of the `fagen` command."""
    return script(_arguments(argv), run, report)


def run(asked: argparse.Namespace) -> int:
    """Build the kernels, time every family of every cell, write and say what was found."""
    findings = Findings.begun(asked.out, "data", [BURST])
    about = findings.about
    others = [from_slug(slug) for slug in asked.schedule or ()]
    work: dict[Cell, list[Schedule]] = {}
    for cell in grid(asked):
        found = serving(cell, about["card"])
        found += [one for one in others if solves(one, cell.problem) and one not in found]
        if found:
            work[cell] = found
        else:
            findings.note("no kernel", cell)
    kernels = build(schedule for found in work.values() for schedule in found)
    findings.note_compiler(kernels)

    def step(cell: Cell) -> None:
        slugs = [schedule.slug for schedule in work[cell]]
        rows = time_cell(findings, cell, slugs, kernels, asked.family)
        findings.rows += rows
        worst = min(row["of_normal"] for row in rows)
        say(f"  {cell!s:48} least {worst:.3f} of {NORMAL}")

    findings.each(work, step)
    report(findings)
    return findings.finish()


def time_cell(
    findings: Findings,
    cell: Cell,
    slugs: Sequence[str],
    kernels: Kernels,
    families: Sequence[str],
) -> list[dict[str, Any]]:
    """Rows of a cell: each kernel at each family, in turn, and cuDNN where there are figures."""
    q, k, v = inputs(cell)
    given = {name: made(name, q, k, v) for name in families}
    calls: dict[tuple[str, str], Call] = {}
    for slug in slugs:
        kernel = op.load(kernels[slug][1])
        for name in families:
            calls[slug, name] = _bound(kernel, given[name])
    for name in families:
        judge = _fa2(cell, *given[name])
        for slug in slugs:
            worst, allowed = disagreement(cell, calls[slug, name].once(), judge)
            if not worst <= allowed:
                said = f"{slug} at {cell}, {name}: off by {worst:.3g} where {allowed:.3g} may be"
                findings.note("wrong", said)
                findings.about["wrong"] = True
    problem, sizes = cell.problem, cell.sizes
    key = problem.head_dim, problem.mask, sizes.seqlen_k
    beside = problem.dtype == "fp16" and key in FA3
    if beside:
        calls["cudnn", NORMAL] = peer("cudnn").bind(cell, q, k, v)
    labels = {f"{who} {name}": (who, name) for who, name in calls}
    timed = time_calls({label: calls[pair] for label, pair in labels.items()}, BURST)
    tflops = {pair: cell.flops / timed[label].seconds / 1e12 for label, pair in labels.items()}
    spreads = {pair: timed[label].spread for label, pair in labels.items()}
    rows = []
    for slug in slugs:
        for name in families:
            fa3 = FA3[key].get(name) if beside else None
            speed, cudnn = tflops[slug, name], tflops.get(("cudnn", NORMAL))
            row = {
                "dtype": problem.dtype,
                "head_dim": problem.head_dim,
                "mask": problem.mask,
                **vars(sizes),
                "kernel": slug,
                "family": name,
                "tflops": round(speed, 1),
                "spread": round(spreads[slug, name], 4),
                "of_normal": round(speed / tflops[slug, NORMAL], 4),
                "cudnn_normal": round(cudnn, 1) if cudnn else None,
                "over_fa3": round(speed / cudnn * CUDNN[key] / fa3, 4) if cudnn and fa3 else None,
            }
            rows.append(row)
    return rows


def _bound(kernel: op.Op, given: Given) -> Call:
    return Call(lambda: kernel(*given)[0])


def _fa2(cell: Cell, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=cell.problem.mask == "causal", scale=scale
        )
    return out.transpose(1, 2)


# ---- what is said --------------------------------------------------------------------------------


def missed(row: Mapping[str, Any]) -> bool:
    """Whether a row is slower than its dtype may be beside NORMAL."""
    return bool(row["of_normal"] < LEAST[row["dtype"]])


def summary(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """For each dtype and family the least and the mean; and beside FlashAttention-3."""
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        parts = []
        for name in FAMILIES:
            found = [
                row["of_normal"] for row in rows if (row["dtype"], row["family"]) == (dtype, name)
            ]
            if found and name != NORMAL:
                parts.append(f"{name} {geomean(found):.3f} ({min(found):.3f})")
        below = sum(missed(row) for row in rows if row["dtype"] == dtype)
        yield (
            f"{dtype}, of its {NORMAL}, geomean (least): {', '.join(parts)}; below "
            f"{LEAST[dtype]} in {below}"
        )
    for name in FAMILIES:
        found = [row["over_fa3"] for row in rows if row["family"] == name and row["over_fa3"]]
        if found:
            slower = sum(value < 1 for value in found)
            yield (
                f"fp16 {name} ÷ FA3: geomean {geomean(found):.3f}, least {min(found):.3f}, below 1 "
                f"in {slower} of {len(found)}"
            )


def tables(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Markdown: speeds beside NORMAL, one line a kernel and cell; and beside FlashAttention-3."""
    lines: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        key = (row["dtype"], row["head_dim"], row["mask"], row["seqlen_k"], row["kernel"])
        lines.setdefault(key, {})[row["family"]] = row
    names = [name for name in FAMILIES if any(name in line for line in lines.values())]
    head = ["dtype", "hd", "mask", "S", "kernel", f"{NORMAL}, TFLOP/s", *names[1:]]
    body = [
        [
            *map(str, key[:4]),
            key[4].split(f"_{key[2]}_")[-1],
            f"{line[NORMAL]['tflops']:.0f}",
            *(_share(line.get(name)) for name in names[1:]),
        ]
        for key, line in lines.items()
    ]
    beside = [
        [*map(str, key[1:4]), *(_beside(line.get(name), key) for name in _COMPARED)]
        for key, line in lines.items()
        if line[NORMAL]["over_fa3"]
    ]
    over = markdown(["hd", "mask", "S", *_COMPARED], beside) if beside else ""
    return markdown(head, body), over


_COMPARED = ("sigma=1", "sigma=4", "sigma=8")


def _share(row: Mapping[str, Any] | None) -> str:
    return "–" if row is None else f"{row['of_normal']:.3f}{' !' if missed(row) else ''}"


def _beside(row: Mapping[str, Any] | None, key: tuple[Any, ...]) -> str:
    if row is None:
        return "–"
    return f"{row['tflops']:.0f} of {FA3[key[1:4]][row['family']]:.0f}: {row['over_fa3']:.3f}"


def report(findings: Findings) -> None:
    """Write <stem>.md, and print it."""
    shares, over = tables(findings.rows)
    lines = "\n".join(f"- {line}" for line in summary(findings.rows))
    page = findings.write_page(
        "Speed by the data",
        f"{findings.made_on}; burst, 16,384 tokens, hidden size 2048. Speeds of families of scores "
        f"beside {NORMAL}; ! where below {LEAST['fp16']} in fp16, {LEAST['bf16']} in bf16.",
        lines,
        shares,
        over
        and "fp16 beside FlashAttention-3 (hopper/ 0251105a, NVIDIA H200): TFLOP/s of both, and "
        "the quotient after both were divided by cuDNN's at sigma=1 in their own run:\n\n"
        + over,
        findings.remarks,
    )
    print(page)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    wanted = parser(
        __doc__,
        peers=False,
        dtype=DTYPES,
        head_dim=int,
        mask=MASKS,
        seqlen=int,
        family=FAMILIES,
        schedule=str,
    )
    usual = dict(dtype=DTYPES, head_dim=HEAD_DIMS, mask=MASKS, seqlen=SEQLENS)
    asked = parsed(wanted, argv, **usual, family=FAMILIES)
    asked.family = list(dict.fromkeys([NORMAL, *asked.family]))
    return asked


if __name__ == "__main__":
    sys.exit(main())
