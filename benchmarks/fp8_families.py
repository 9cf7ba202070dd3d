"""Hold e4m3 against fp64 and a textbook on inputs that models have and randn has not.

    python benchmarks/fp8_families.py                     emulated on a CPU, 1,024 keys: a minute
    python benchmarks/fp8_families.py --device cuda       kernels built and run: a minute
    python benchmarks/fp8_families.py --device cuda --head-dims 128 --keys 1024 16384       a part
    python benchmarks/fp8_families.py --redraw benchmarks/results/<card>-<date>-fp8-families.json

Families: a needle, one key so many nats above a diffuse tail, beside a V about 1; a sink, which
every query sees and whose V is small; one outlier in V; V with a mean; K with some channels far
from zero; heads whose scores are spread by very different amounts. Each is quantised, in torch, in
two ways: as fagen.attention_fp8 does it, and with a scale for each head and nothing else.

What is measured is out - fp64 over what the bytes stand for, beside the same of a textbook's
attention in e4m3 over the same bytes (fagen.kinds.forward.textbook): root mean squares and largest
errors. The goal is at most twice the textbook's of both, everywhere where inputs are quantised as
attention_fp8 does it, O's own rounding left out of account. The other way shows what is left to the
kernel: a V with a mean makes sums that grow, of which the tensor cores keep 14 bits.

With --device cuda the table is written to benchmarks/results/ (or the folder --out) as
<card>-<date>-fp8-families.json, a list of lines, .run.json, what holds for all, and .md; the former
two after every kernel and number of keys, so that a run cut short keeps what it has.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from record import RESULTS, Record, build, exit_code, say
from torch import Tensor

from fagen.e4m3 import by_columns
from fagen.kinds.forward import emulate as emulator
from fagen.kinds.forward.fp8_accuracy import poisoned8
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.operands import Operands, operands, real
from fagen.kinds.forward.plan import Plan, plan
from fagen.kinds.forward.reference import reference
from fagen.kinds.forward.textbook import textbook
from fagen.measure.numerics import largest, rms
from fagen.paths import write_whole

GOAL = 2.0  # times the textbook's error
MASKS = ("full", "causal")
HEADS = 2
QUERIES = 1024  # at most, the last ones
LENGTHS = {"cpu": (1024,), "cuda": (1024, 4096, 16_384, 65_536)}
HEAD_DIMS = {"cpu": (64,), "cuda": (64, 128, 256)}
DEFAULT = "as attention_fp8"
WAYS = {  # keys of a schedule; what is done before rounding
    DEFAULT: (dict(scales="block"), dict(rotated=True, centered="kv")),
    "a scale for each head": (dict(scales="head"), dict(v_scales="head")),
}

Tensors = tuple[Tensor, Tensor, Tensor]
Kernel = Callable[[Operands, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Line:
    """The errors of one case, and a textbook's."""

    family: str
    way: str
    mask: str
    head_dim: int
    keys: int
    schedule: str
    rmse: float
    textbook_rmse: float
    largest: float
    textbook_largest: float
    size: float  # the root mean square of fp64
    top: float  # max |fp64|

    @property
    def ratios(self) -> tuple[float, float]:
        """RMSE and largest error over a textbook's."""
        return (
            self.rmse / self.textbook_rmse,
            self.largest / self.textbook_largest,
        )


# ---- inputs --------------------------------------------------------------------------------------


class Draw:
    """Q, K and V of N(0, 1), (1, length, heads, head_dim), to be changed."""

    def __init__(self, queries: int, keys: int, head_dim: int, device: str) -> None:
        self.generator = torch.Generator(device=device).manual_seed(keys + head_dim)
        self.keys, self.head_dim, self.device = keys, head_dim, device
        self.q = self._normal(queries)
        self.k, self.v = self._normal(keys), self._normal(keys)

    def _normal(self, length: int) -> Tensor:
        shape = (1, length, HEADS, self.head_dim)
        return torch.randn(shape, generator=self.generator, device=self.device)

    def tail(self, nats: float, at: int) -> None:
        """Scores that differ by little, but of one key, `nats` above them."""
        self.q *= 0.1
        self.q[..., 0] = 1.0
        self.k[..., 0] = 0.0
        self.k[:, at, :, 0] = nats * self.head_dim**0.5

    @property
    def tensors(self) -> Tensors:
        """Them in fp16."""
        return self.q.half(), self.k.half(), self.v.half()


def needle(nats: float, where: float) -> Callable[[Draw], None]:
    """One key above a diffuse tail, at this share of the keys; V about 1."""

    def change(draw: Draw) -> None:
        draw.tail(nats, round(where * (draw.keys - 1)))
        draw.v.mul_(0.1).add_(1.0)

    return change


def sink(draw: Draw) -> None:
    """The first key has most of every row's weight, and a small V."""
    draw.tail(10.0, 0)
    draw.v[:, 0] *= 0.01


def outlier(size: float) -> Callable[[Draw], None]:
    """One number of V."""

    def change(draw: Draw) -> None:
        draw.v[:, draw.keys // 3, :, 5] = size

    return change


def mean(size: float) -> Callable[[Draw], None]:
    """V about this."""

    def change(draw: Draw) -> None:
        draw.v += size

    return change


def channels(draw: Draw) -> None:
    """Some columns of K far from zero."""
    draw.k[..., ::16] += 20.0


def mixed(draw: Draw) -> None:
    """One head hardly tells keys apart, one sees a key or two; sizes of V differ too."""
    draw.q *= torch.tensor([0.1, 6.0], device=draw.device)[:, None]
    draw.v *= torch.tensor([0.01, 100.0], device=draw.device)[:, None]


PLACES = {"first": 0.0, "middle": 0.5, "last": 1.0}
FAMILIES: Mapping[str, Callable[[Draw], None]] = {
    **{
        f"needle of {nats} nats, {place}": needle(nats, where)
        for nats in (6, 9, 12)
        for place, where in PLACES.items()
    },
    "sink": sink,
    **{f"outlier of {size:,} in V": outlier(size) for size in (64, 4096, 20_000)},
    **{f"V about {size:g}": mean(size) for size in (0.5, 1, 4)},
    "K with channels about 20": channels,
    "mixed heads": mixed,
    "randn": lambda draw: None,
}


# ---- measuring -----------------------------------------------------------------------------------


def planned(way: str, mask: str, head_dim: int, **keys: object) -> Plan:
    """The Plan of a usual tile that takes what this way of quantising gives; V row-major."""
    wide = head_dim > 128
    tile = dict(block_m=128, block_n=64 if wide else 128, output="v_space" if wide else "own")
    fixed = dict(dtype="e4m3", v_layout="rows", head_dim=head_dim, mask=mask)
    return plan(Schedule.make(**fixed | tile | WAYS[way][0] | keys))


def emulated(of: Plan) -> Kernel:
    """The Plan's schedule in torch."""
    return lambda given, scale: emulator.emulate_fp8(of, *given[:3], scale, *given[3:])


def measure(family: str, way: str, of: Plan, keys: int, kernel: Kernel, device: str) -> Line:
    """The errors of one case."""
    draw = Draw(min(keys, QUERIES), keys, of.head_dim, device)
    FAMILIES[family](draw)
    given = operands(of, *draw.tensors, **WAYS[way][1])
    scale = of.head_dim**-0.5
    truth, _ = reference(*real(of, given), mask=of.mask.name, scale=scale)
    taken = given if of.v_rows else given._replace(v=by_columns(given.v))
    ours = kernel(taken, scale)[0].double() - truth
    theirs = textbook(of, given, scale).to(getattr(torch, of.out_dtype.torch)).double() - truth
    return Line(
        family,
        way,
        of.mask.name,
        of.head_dim,
        keys,
        of.slug,
        rms(ours),
        rms(theirs),
        largest(ours),
        largest(theirs),
        rms(truth),
        largest(truth),
    )


# ---- tables --------------------------------------------------------------------------------------


def compared(lines: Sequence[Line]) -> str:
    """The worst ratios of each family over lengths and head dims, as Markdown."""
    ways, families = (list(dict.fromkeys(getattr(x, n) for x in lines)) for n in ("way", "family"))
    head = ["RMSE and largest error ÷ a textbook's, worst"]
    head += [f"{way}, {mask}" for way in ways for mask in MASKS]
    body = []
    for family in families:
        cells = [family]
        for way in ways:
            for mask in MASKS:
                these = [
                    x.ratios for x in lines if (x.family, x.way, x.mask) == (family, way, mask)
                ]
                cells.append(" / ".join(f"{max(of):.2f}" for of in zip(*these, strict=True)) or "–")
        body.append(cells)
    rows = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def verdict(lines: Sequence[Line]) -> str:
    """Whether attention_fp8 is as exact as it should be, and the worst of each way."""
    said = []
    for way in dict.fromkeys(line.way for line in lines):
        these = [line for line in lines if line.way == way]
        worst = max(these, key=lambda line: max(line.ratios))
        met = "met" if max(worst.ratios) <= GOAL else "missed"
        goal = f"; the goal, at most {GOAL:g} times a textbook's errors, is {met}"
        said.append(
            f"{way}: {len(these)} cases{goal if way == DEFAULT else ''}: the worst is "
            f"{max(worst.ratios):.2f} ({worst.family}, {worst.mask}, head dim {worst.head_dim}, "
            f"{worst.keys:,} keys)."
        )
    return "\n\n".join(said)


def redraw(record: Record, lines: Sequence[Line]) -> None:
    """Write <stem>.md, and print it."""
    asked = record.about["asked"]
    say(
        record.write_page(
            "Errors of e4m3 on inputs that are not randn",
            f"{record.made_on}. Errors of e4m3 against fp64 on inputs that are not randn.",
            f"Head dims {asked['head_dims']}, {asked['keys']} keys.\n\n{compared(lines)}",
            verdict(lines),
            "Kernels:\n\n"
            + "".join(f"- `{x}`\n" for x in dict.fromkeys(y.schedule for y in lines)),
            record.remarks,
        )
    )


# ---- running -------------------------------------------------------------------------------------


def run(
    asked: argparse.Namespace,
    kernels: Mapping[str, Kernel] | None = None,
    save: Callable[[list[Line]], None] = lambda lines: None,
) -> list[Line]:
    """Measure every case, and save what there is; without kernels they are emulated."""
    lines: list[Line] = []
    for head_dim in asked.head_dims:
        for way in WAYS:
            for mask in MASKS:
                of = planned(way, mask, head_dim)
                kernel = kernels[of.slug] if kernels else emulated(of)
                for keys in asked.keys:
                    for family in FAMILIES:
                        lines.append(measure(family, way, of, keys, kernel, asked.device))
                    save(lines)
    return lines


def on_gpu(asked: argparse.Namespace) -> int:
    """Build kernels, run them on every case and write what was found; the exit code."""
    record = Record.begun(asked.out or RESULTS, "fp8-families")
    record.about.pop("regimes")
    record.about["asked"] = {
        "head_dims": ", ".join(map(str, asked.head_dims)),
        "keys": ", ".join(f"{keys:,}" for keys in asked.keys),
    }
    plans = [planned(way, mask, d) for d in asked.head_dims for way in WAYS for mask in MASKS]
    built = build(of.schedule for of in plans)
    began = time.monotonic()
    kernels = {slug: poisoned8(of, binary.library) for slug, (of, binary) in built.items()}  # type: ignore[arg-type]

    def save(lines: Sequence[Line]) -> None:
        record.about["seconds"] = round(time.monotonic() - began)
        record.folder.mkdir(parents=True, exist_ok=True)
        rows = ",\n".join(json.dumps(dataclasses.asdict(line)) for line in lines)
        write_whole(record.folder / f"{record.stem}.json", f"[\n{rows}\n]\n")
        about = json.dumps(record.about, indent=1, ensure_ascii=False) + "\n"
        write_whole(record.folder / f"{record.stem}.run.json", about)

    lines = run(asked, kernels, save)
    redraw(record, lines)
    return 0


def main(words: list[str] | None = None) -> int:
    """Run what was asked for; the exit code is that of the `fagen` command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--keys", type=int, nargs="+")
    parser.add_argument("--head-dims", type=int, nargs="+")
    parser.add_argument("--out", type=Path, help="a folder, with --device cuda")
    parser.add_argument("--redraw", type=Path, metavar="LINES.json", help="no GPU: write .md anew")
    asked = parser.parse_args(words)
    if asked.redraw:
        about = json.loads(asked.redraw.with_suffix(".run.json").read_text(encoding="utf-8"))
        lines = [Line(**line) for line in json.loads(asked.redraw.read_text(encoding="utf-8"))]
        redraw(Record(asked.redraw.parent, asked.redraw.stem, about), lines)
        return 0
    asked.keys = asked.keys or LENGTHS[asked.device]
    asked.head_dims = asked.head_dims or HEAD_DIMS[asked.device]
    if asked.device == "cuda":
        return exit_code(lambda: on_gpu(asked))
    lines = run(asked)
    say(f"{compared(lines)}\n{verdict(lines)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
