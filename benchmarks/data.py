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
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from record import Kernels, Options, Run, Script, grid, say, serving
from tables import grouped
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
from fagen.vocab import PLAIN_MASKS

HEAD_DIMS, SEQLENS, DTYPES = (64, 128, 256), (4_096, 16_384), ("fp16", "bf16")
NORMAL = "sigma=1"
LEAST = {"fp16": 0.95, "bf16": 0.97}  # of the speed at NORMAL, that any family is to reach
SINK, SLOPE, LOCAL = 12.0, 16.0, 12.0  # scores, in natural units
ROTARY_BASE = 10_000.0

COMPARED = (NORMAL, "sigma=4", "sigma=8")
# TFLOP/s in fp16, burst, NVIDIA H200, driver 580.159, CUDA 13.0: FlashAttention-3 (hopper/ at
# 0251105a, default tiles) on scores of the deviations compared, and cuDNN 9.19 at NORMAL beside it
FIGURES: Mapping[tuple[int, str, int], tuple[float, float, float, float]] = {
    (64, "full", 4_096): (523, 529, 537, 486),
    (64, "causal", 4_096): (488, 491, 493, 437),
    (128, "full", 4_096): (711, 717, 744, 661),
    (128, "causal", 4_096): (666, 674, 694, 563),
    (128, "full", 16_384): (736, 745, 776, 674),
    (128, "causal", 16_384): (734, 744, 767, 619),
    (256, "full", 4_096): (766, 775, 803, 714),
    (256, "causal", 4_096): (699, 707, 728, 590),
}


# ---- families of scores --------------------------------------------------------------------------

Given = tuple[Tensor, Tensor, Tensor, float]  # q, k, v and the scale
Change = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


def scored(name: str, q: Tensor, k: Tensor, v: Tensor) -> Given:
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


def work(run: Run, options: Options) -> None:
    """Build the kernels, time every family of every cell."""
    others = [from_slug(slug) for slug in options.schedule or ()]
    schedules: dict[Cell, list[Schedule]] = {}
    for cell in grid(options):
        some = serving(cell, run.card)
        some += [other for other in others if solves(other, cell.problem) and other not in some]
        if some:
            schedules[cell] = some
        else:
            run.note("no kernel", cell)
    kernels = run.build(schedule for some in schedules.values() for schedule in some)

    def step(cell: Cell) -> None:
        slugs = [schedule.slug for schedule in schedules[cell]]
        rows = time_cell(run, cell, slugs, kernels, options.family)
        run.rows += rows
        worst = min(row["of_normal"] for row in rows)
        say(f"  {cell!s:48} least {worst:.3f} of {NORMAL}")

    run.each(schedules, step)


def time_cell(
    run: Run, cell: Cell, slugs: Sequence[str], kernels: Kernels, families: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows of a cell: each kernel at each family, in turn, and cuDNN where there are figures."""
    q, k, v = inputs(cell)
    tensors = {name: scored(name, q, k, v) for name in families}
    calls: dict[tuple[str, str], Call] = {}
    for slug in slugs:
        kernel = op.load(kernels[slug][1])
        for name in families:
            calls[slug, name] = _bound(kernel, tensors[name])
    for name in families:
        judge = _fa2(cell, *tensors[name])
        for slug in slugs:
            worst, allowed = disagreement(cell, calls[slug, name].once(), judge)
            if not worst <= allowed:
                off = f"off by {worst:.3g} where {allowed:.3g} may be"
                run.note_wrong(f"{slug} at {cell}, {name}: {off}", "wrong")
    problem, sizes = cell.problem, cell.sizes
    *fa3, cudnn_then = FIGURES.get((problem.head_dim, problem.mask, sizes.seqlen_k), (0.0,))
    if beside := problem.dtype == "fp16" and cudnn_then:
        calls["cudnn", NORMAL] = peer("cudnn").bind(cell, q, k, v)
    labels = {f"{who} {name}": (who, name) for who, name in calls}
    timings = time_calls({label: calls[pair] for label, pair in labels.items()}, BURST)
    timed = {pair: timings[label] for label, pair in labels.items()}
    tflops = {pair: cell.flops / timing.seconds / 1e12 for pair, timing in timed.items()}
    cudnn = tflops["cudnn", NORMAL] if beside else 0.0
    then = dict(zip(COMPARED, fa3, strict=True)) if beside else {}
    return [
        {
            "dtype": problem.dtype,
            "head_dim": problem.head_dim,
            "mask": problem.mask,
            **vars(sizes),
            "kernel": slug,
            "family": name,
            "tflops": round(speed, 1),
            "spread": round(timed[slug, name].spread, 4),
            "of_normal": round(speed / tflops[slug, NORMAL], 4),
            "cudnn_normal": round(cudnn, 1) if beside else None,
            "over_fa3": round(speed / cudnn * cudnn_then / then[name], 4) if name in then else None,
        }
        for slug in slugs
        for name in families
        for speed in [tflops[slug, name]]
    ]


def _bound(kernel: op.Op, tensors: Given) -> Call:
    return Call(lambda: kernel(*tensors)[0])


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
    for dtype, some in grouped(rows, itemgetter("dtype")).items():
        families = grouped(some, itemgetter("family"))
        parts = []
        for name in FAMILIES:
            if name in families and name != NORMAL:
                shares = [row["of_normal"] for row in families[name]]
                parts.append(f"{name} {geomean(shares):.3f} ({min(shares):.3f})")
        yield (
            f"{dtype}, of its {NORMAL}, geomean (least): {', '.join(parts)}; below {LEAST[dtype]} "
            f"in {sum(map(missed, some))}"
        )
    for name in FAMILIES:
        ratios = [row["over_fa3"] for row in rows if row["family"] == name and row["over_fa3"]]
        if ratios:
            slower = sum(value < 1 for value in ratios)
            yield (
                f"fp16 {name} ÷ FA3: geomean {geomean(ratios):.3f}, least {min(ratios):.3f}, "
                f"below 1 in {slower} of {len(ratios)}"
            )


def tables(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Markdown: speeds beside NORMAL, one line a kernel and cell; and beside FlashAttention-3."""
    of_cell = itemgetter("dtype", "head_dim", "mask", "seqlen_k", "kernel")
    families = {row["family"] for row in rows}
    names = [name for name in FAMILIES if name in families]
    shares, beside = [], []
    for (dtype, *cell, slug), some in grouped(rows, of_cell).items():
        line = {row["family"]: row for row in some}
        normal, (head_dim, mask, keys) = line[NORMAL], cell
        figures = [_share(line.get(name)) for name in names[1:]]
        shares.append(
            [
                *(dtype, *map(str, cell), slug.split(f"_{mask}_")[-1]),
                *(f"{normal['tflops']:.0f}", *figures),
            ]
        )
        if normal["over_fa3"]:
            then = zip(COMPARED, FIGURES[head_dim, mask, keys], strict=False)
            beside.append([*map(str, cell), *(_beside(line.get(name), fa3) for name, fa3 in then)])
    head = ["dtype", "hd", "mask", "S", "kernel", f"{NORMAL}, TFLOP/s", *names[1:]]
    over = markdown(["hd", "mask", "S", *COMPARED], beside) if beside else ""
    return markdown(head, shares), over


def _share(row: Mapping[str, Any] | None) -> str:
    return "–" if row is None else f"{row['of_normal']:.3f}{' !' if missed(row) else ''}"


def _beside(row: Mapping[str, Any] | None, fa3: float) -> str:
    return f"{row['tflops']:.0f} of {fa3:.0f}: {row['over_fa3']:.3f}" if row else "–"


def page(run: Run) -> None:
    """Write <stem>.md, and print it."""
    shares, over = tables(run.rows)
    text = run.write_page(
        "Speed by the data",
        f"{run.made_on}; burst, 16,384 tokens, hidden size 2048. Speeds of families of scores "
        f"beside {NORMAL}; ! where below {LEAST['fp16']} in fp16, {LEAST['bf16']} in bf16.",
        "\n".join(f"- {line}" for line in summary(run.rows)),
        shares,
        over
        and "fp16 beside FlashAttention-3 (hopper/ 0251105a, NVIDIA H200): TFLOP/s of both, and "
        "the quotient after both were divided by cuDNN's at sigma=1 in their own run:\n\n"
        + over,
        run.remarks,
    )
    print(text)


def settle(options: Options) -> None:
    """With what others are compared to."""
    options.family = list(dict.fromkeys([NORMAL, *options.family]))


main = Script(
    __doc__,
    "data",
    work,
    page,
    regimes=[BURST],
    lists={
        "dtype": (DTYPES, DTYPES),
        "head_dim": (int, HEAD_DIMS),
        "mask": (PLAIN_MASKS, PLAIN_MASKS),
        "seqlen": (int, SEQLENS),
        "family": (FAMILIES, FAMILIES),
        "schedule": (str, None),
    },
    settle=settle,
)

if __name__ == "__main__":
    sys.exit(main())
