"""Time calls that nobody picked beside every peer, and hold fagen to the best of them.

    python benchmarks/peers.py                            the 254 calls of peers-h100.csv
    python benchmarks/peers.py --before TREE              and fagen of another tree, in turn
    python benchmarks/peers.py --random 250 --seed 7      as many calls of the same kinds, drawn
    python benchmarks/peers.py --kind decode --behind 1.05      those of the csv that were below
    python benchmarks/peers.py --gpus 4                   calls are dealt to so many GPUs
    python benchmarks/peers.py --ready                    have kernels built, and time nothing
    python benchmarks/peers.py --redraw benchmarks/results/<card>-<date>-peers.json     no GPU

peers-h100.csv has the times of one H100 on one day: of fagen at 886a461, FlashAttention-3 0251105a,
cuDNN 9.19 and FlashAttention-2. FlashAttention-3 does not come with torch, so a call of the csv has

    yardstick = (µs of TREE ÷ µs now) × (least µs of a peer ÷ µs of fagen, both of the csv)

where TREE is 886a461. Without it, or above --before-below, FlashAttention-3's time is that of the
csv times how much slower cuDNN and FlashAttention-2 are now than there; the yardstick is the least
time of a peer over fagen's. A call that is drawn has only what torch brings. Times are of CUDA
graphs in bursts, medians of rounds in random order; one is behind where it is below 0.99 in every
repeat. Outputs that lie further from a peer's than rounding explains are wrong, and not timed.
"""

import csv
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any

from against import middle
from draws import length, log_uniform
from peer_calls import (
    ALLOWED,
    BACKWARD,
    DECODE,
    DECODE_MIXED,
    DECODING,
    E4M3,
    FORWARD,
    KINDS,
    OF_LENGTHS,
    VARLEN,
    VARLEN_BACKWARD,
    PeerCall,
)
from record import Options, Run, Script, flag, say
from tables import grouped

from fagen.errors import FagenError
from fagen.measure.rows import geomean, markdown
from fagen.measure.timing import Regime
from fagen.paths import cache_folder

HERE = Path(__file__).resolve().parent
FIGURES = HERE / "peers-h100.csv"
IN_CSV = {
    "fwd fp16": FORWARD,
    "fwd bf16": FORWARD,
    "bwd fp16": BACKWARD,
    "bwd bf16": BACKWARD,
    "varlen fwd": VARLEN,
    "varlen bwd": VARLEN_BACKWARD,
    "decode equal": DECODE,
    "decode mixed": DECODE_MIXED,
    "e4m3": E4M3,
}
SHARES = {
    FORWARD: 72,
    BACKWARD: 50,
    VARLEN: 26,
    VARLEN_BACKWARD: 26,
    DECODE: 33,
    DECODE_MIXED: 22,
    E4M3: 22,
}
BEHIND = 0.99
LENGTHS = (64, 20_000)  # of drawn calls
ROUND = Regime("burst", idle=0.010, warm=0.0, timed=0.006, rounds=3)
READYING = max(8, (os.cpu_count() or 1) // 2)  # processes that build kernels at a time


# ---- the calls -----------------------------------------------------------------------------------


@dataclass
class Figure:
    """A call, what the csv has of it, and what was timed: microseconds of each repeat by name."""

    call: PeerCall
    csv_us: dict[str, float] = field(default_factory=dict)
    us: dict[str, list[float]] = field(default_factory=dict)

    @property
    def ahead(self) -> float | None:
        """The least time of a peer over fagen's, of the csv."""
        peers = [us for who, us in self.csv_us.items() if who != "fagen"]
        return min(peers) / self.csv_us["fagen"] if peers else None

    @property
    def values(self) -> list[float]:
        """The yardstick of each repeat."""
        repeats = [
            dict(zip(self.us, each, strict=True)) for each in zip(*self.us.values(), strict=True)
        ]
        values = [self._value(us) for us in repeats if "fagen" in us]
        return [value for value in values if value is not None]

    def _value(self, us: Mapping[str, float]) -> float | None:
        if self.ahead and "before" in us:
            return us["before"] / us["fagen"] * self.ahead
        peers = {who: us[who] for who in us if who not in ("fagen", "before")}
        if alike := [peers[who] / self.csv_us[who] for who in peers if who in self.csv_us]:
            slower = statistics.median(alike)
            missing = self.csv_us.keys() - us.keys() - {"fagen"}
            peers |= {who: slower * self.csv_us[who] for who in missing}
        return min(peers.values()) / us["fagen"] if peers else None

    def row(self) -> dict[str, Any]:
        """What is written of it."""
        return {
            **vars(self.call),
            "lengths": list(self.call.lengths),
            "csv_us": self.csv_us,
            "us": {who: [round(us, 2) for us in several] for who, several in self.us.items()},
            "values": [round(value, 4) for value in self.values],
        }


def figures(path: Path = FIGURES) -> Iterator[Figure]:
    """The calls of the csv; none for which it has no peer."""
    with path.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            lengths = tuple(unpacked(row["lengths"]))
            kind = IN_CSV[row["call"]]
            longest = max(lengths, default=0)
            batch, seqlen_q, seqlen_k = (
                (len(lengths), longest, longest)
                if kind in OF_LENGTHS
                else (int(row[name]) for name in ("batch", "seqlen_q", "seqlen_k"))
            )
            call = PeerCall(
                kind=kind,
                dtype=row["dtype"],
                head_dim=int(row["head_dim"]),
                head_dim_v=int(row["head_dim_v"]),
                mask=row["mask"],
                batch=batch,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
                heads=int(row["heads"]),
                kv_heads=int(row["kv_heads"]),
                lengths=lengths,
            )
            who = ("fagen", "fa3", "cudnn", "fa2")
            us = {name: float(row[f"{name}_us"]) for name in who if row[f"{name}_us"]}
            yield Figure(call, us if len(us) > 1 else {})


def unpacked(lengths: str) -> Iterator[int]:
    """Numbers out of "3 5*2": 3, 5, 5."""
    for word in lengths.split():
        length, _, times = word.partition("*")
        yield from [int(length)] * int(times or 1)


# ---- calls at random -----------------------------------------------------------------------------


def drawn(number: int, seed: int) -> Iterator[Figure]:
    """So many calls of all kinds, as many of each as the csv has in proportion."""
    dice, whole = random.Random(seed), sum(SHARES.values())
    for kind, share in SHARES.items():
        for _ in range(round(number * share / whole)):
            yield Figure(_drawn(kind, dice))


def _drawn(kind: str, dice: random.Random) -> PeerCall:
    while True:
        dtype = dice.choice(("fp16", "fp16", "bf16")) if kind != E4M3 else "fp16"
        dims = ((64, 64), (128, 128), (128, 128), (256, 256), (96, 96), (192, 192), (192, 128))
        head_dim, head_dim_v = dice.choice(dims[:4] if kind == E4M3 else dims)
        mask = "causal" if kind in DECODING else dice.choice(("full", "causal"))
        kv_heads = dice.choice((1, 2, 3, 4, 8))
        heads = kv_heads * dice.choice(
            (1, 1, 2, 4, 8, 16) if kind in DECODING else (1, 1, 1, 2, 4, 8)
        )
        alike = (kind, dtype, head_dim, head_dim_v, mask)
        width = head_dim + head_dim_v
        if kind in DECODING:
            batch, keys = log_uniform(dice, 1, 256), log_uniform(dice, 64, 180_000)
            queries = dice.choice((1, 1, 1, 2, 4, 8))
            if not 2e5 < batch * keys * kv_heads * width * 2 < 3e9:
                continue
            lengths: tuple[int, ...] = ()
            if kind == DECODE_MIXED:
                lengths = tuple(min(keys, log_uniform(dice, 33, 8 * keys)) for _ in range(batch))
            return PeerCall(*alike, batch, queries, keys, heads, kv_heads, lengths)
        if kind in OF_LENGTHS:
            if head_dim != head_dim_v or head_dim == 192:
                continue
            least, most = dice.choice(((1, 65), (16, 512), (17, 12_000), (64, 4_096)))
            number = max(
                2,
                round(log_uniform(dice, 2_000, 40_000) / ((most - least) / math.log(most / least))),
            )
            lengths = tuple(log_uniform(dice, least, most) for _ in range(number))
            pairs = sum(n * n for n in lengths) * heads
            if (
                not 2e9
                < pairs * width * (1 if mask == "causal" else 2) * 2
                + sum(lengths) * heads * width * 300
                < 2e12
            ):
                continue
            return PeerCall(*alike, number, max(lengths), max(lengths), heads, kv_heads, lengths)
        keys = length(dice, *LENGTHS)
        queries = length(dice, *LENGTHS) if mask == "full" and dice.random() < 0.25 else keys
        batch = log_uniform(dice, 1, 64)
        flops = 2 * batch * heads * queries * keys * width / (2 if mask == "causal" else 1)
        if not 5e9 < flops < (1e12 if kind != BACKWARD else 4e11):
            continue
        if batch * (queries * heads + keys * kv_heads) * width * 2 > 4e9:
            continue
        return PeerCall(*alike, batch, queries, keys, heads, kv_heads)


# ---- who times -----------------------------------------------------------------------------------


class Teller:
    """A process of peer_calls.py on one GPU, with fagen of a tree; it is asked and it answers."""

    def __init__(self, tree: Path, gpu: int) -> None:
        self.tree = tree
        env = {**os.environ, "PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": _visible(gpu)}
        if tree != HERE.parent:  # its files are of another form
            env["FAGEN_CACHE"] = str(cache_folder() / "peers")
        command = [sys.executable, str(HERE / "peer_calls.py")]
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen(command, env=env, cwd=tree, **pipes)

    def ask(self, **question: Any) -> dict[str, Any]:
        """Raises FagenError where the process has ended."""
        assert self.process.stdin and self.process.stdout
        try:
            print(json.dumps(question), file=self.process.stdin, flush=True)
            return dict(json.loads(self.process.stdout.readline()))
        except (BrokenPipeError, json.JSONDecodeError):
            raise FagenError(
                f"the process that times fagen of {self.tree.name} has ended"
            ) from None

    def end(self) -> None:
        """Let it go."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.terminate()


def _visible(gpu: int) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[gpu] if visible else str(gpu)


def time_figure(figure: Figure, tellers: Sequence[Teller], repeats: int, run: Run) -> None:
    """Add the times of a call, of now and, if somebody tells, before; note refusals and errors."""
    now, *others = tellers
    asked = {"call": vars(figure.call)}
    answer = now.ask(**asked, who=["fagen", "cudnn", "fa2"])
    who = {name: (now, name) for name in answer["ready"]}
    for before in others:
        if before.ask(**asked, who=["fagen"])["ready"]:
            who["before"] = (before, "fagen")
    if reason := answer["refused"].get("fagen"):
        run.note("fagen refused", f"{figure.call.shape}: {reason}")
        return
    if answer["apart"] > ALLOWED[figure.call.dtype]:
        run.note_wrong(
            f"{figure.call.kind}, {figure.call.shape}: {answer['apart']:.2e} from a peer's output"
        )
        return
    dice = random.Random(0)
    for _ in range(repeats):
        rounds: dict[str, list[float]] = {name: [] for name in who}
        for _ in range(ROUND.rounds):
            for name in dice.sample(list(who), len(who)):
                teller, asks = who[name]
                rounds[name].append(teller.ask(time=asks)["us"])
        for name, several in rounds.items():
            figure.us.setdefault(name, []).append(statistics.median(several))


def make_ready(calls: Iterable[tuple[Path, PeerCall]], gpus: int) -> None:
    """Have the kernels of all calls built, many at a time."""
    waiting: SimpleQueue[tuple[Path, PeerCall]] = SimpleQueue()
    for item in calls:
        waiting.put(item)

    def work(number: int) -> None:
        tellers: dict[Path, Teller] = {}
        try:
            while True:
                tree, call = waiting.get_nowait()
                teller = tellers.setdefault(tree, None) or Teller(tree, number % gpus)  # type: ignore[arg-type]
                tellers[tree] = teller
                try:
                    teller.ask(call=vars(call), who=["fagen"])
                except FagenError:
                    del tellers[tree]
        except Empty:
            for teller in tellers.values():
                teller.end()

    with ThreadPoolExecutor(READYING) as pool:
        list(pool.map(work, range(READYING)))


def work(run: Run, options: Options) -> None:
    """Time all calls, dealt to GPUs."""
    every = list(drawn(options.random, options.seed) if options.random else figures())
    chosen = [figure for figure in every if _is_asked_for(figure, options)]
    chosen.sort(key=lambda figure: figure.ahead or math.inf)  # who may be behind is never cut off
    trees = [HERE.parent, *([options.before] if options.before else [])]
    run.about |= {
        "before": options.before and options.before.name,
        "random": options.random,
        "seed": options.seed,
    }
    below = math.inf if options.before_below is None else options.before_below

    def trees_of(figure: Figure) -> list[Path]:
        with_before = options.before and figure.ahead and figure.ahead < below
        return trees if with_before else trees[:1]

    began = time.monotonic()
    if not options.built:
        make_ready(((t, figure.call) for figure in chosen for t in trees_of(figure)), options.gpus)
    run.about["seconds"] = round(time.monotonic() - began)
    say(f"ready after {run.about['seconds']} s")
    if options.ready:
        return
    waiting: SimpleQueue[Figure] = SimpleQueue()
    for figure in chosen:
        waiting.put(figure)
    saving = Lock()

    def one_gpu(gpu: int) -> None:
        tellers = [Teller(tree, gpu) for tree in trees]
        try:
            while True:
                figure = waiting.get_nowait()
                if options.seconds and time.monotonic() - began > options.seconds:
                    run.note("not timed", figure.call.shape)
                    continue
                asked = tellers[: len(trees_of(figure))]
                try:
                    time_figure(figure, asked, options.repeats, run)
                except FagenError as error:
                    run.note_wrong(f"{figure.call.kind}, {figure.call.shape}: {error}")
                    tellers = [Teller(tree, gpu) for tree in trees]
                with saving:
                    run.about["seconds"] = round(time.monotonic() - began)
                    run.rows = [figure.row() for figure in chosen if figure.us]
                    run.save()
        except Empty:
            for teller in tellers:
                teller.end()

    with ThreadPoolExecutor(options.gpus) as pool:
        list(pool.map(one_gpu, range(options.gpus)))
    if not run.rows:
        raise FagenError(f"nothing could be timed:\n{run.remarks}")


def _is_asked_for(figure: Figure, options: Options) -> bool:
    if options.kind and not any(figure.call.kind.startswith(kind) for kind in options.kind):
        return False
    if options.head_dim and figure.call.head_dim not in options.head_dim:
        return False
    return options.behind is None or bool(figure.ahead and figure.ahead < options.behind)


# ---- what is said --------------------------------------------------------------------------------


def page(run: Run) -> None:
    """Write <stem>.md; print its summary and the slowest calls."""
    if not run.rows:
        return
    rows = sorted((row for row in run.rows if row["values"]), key=middle)
    lone = len(run.rows) - len(rows)
    by_kind = grouped(rows, lambda row: row["kind"])
    body = [
        [
            *(
                kind,
                str(len(members)),
                f"{geomean(map(middle, members)):.3f}",
                f"{middle(members[0]):.3f}",
            ),
            str(sum(map(is_behind, members))),
        ]
        for kind in KINDS
        if (members := by_kind.get(kind))
    ]
    head = ["work", "calls", "geomean", "least", "behind"]
    summary = markdown(head, body)
    what = (
        "the yardstick of benchmarks/peers.py"
        if run.about["before"]
        else "the least time of a peer ÷ fagen's"
    )
    run.write_page(
        "Calls that nobody picked",
        f"{run.made_on}. CUDA graphs in bursts, medians; the value is {what}; behind is below "
        f"{BEHIND} in every repeat. {lone} calls have no peer.",
        summary,
        table(rows),
        run.remarks,
    )
    print(summary)
    print(table([row for row in rows if middle(row) < 1.05]))
    print(run.remarks[:3000], end="")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a line for each call, from the slowest on."""
    names = ("fagen", "before", "cudnn", "fa2")
    head = ["work", "call", *(f"{name} µs" for name in names), "value", "of repeats", "behind"]
    lines = []
    for row in rows:
        times = [
            f"{statistics.median(row['us'][name]):.1f}" if name in row["us"] else "–"
            for name in names
        ]
        fields = {name: row[name] for name in PeerCall.__dataclass_fields__}
        several = " ".join(f"{value:.3f}" for value in row["values"])
        is_slower = "yes" if is_behind(row) else ""
        shape = PeerCall.read(fields).shape
        lines.append([row["kind"], shape, *times, f"{middle(row):.3f}", several, is_slower])
    return markdown(head, lines)


def is_behind(row: Mapping[str, Any]) -> bool:
    """Whether a call is slower in every repeat."""
    return bool(max(row["values"]) < BEHIND)


main = Script(
    __doc__,
    lambda options: f"peers-seed{options.seed}" if options.random else "peers",
    work,
    page,
    regimes=[ROUND],
    lists={"kind": (str, None), "head_dim": (int, None)},
    options={
        "--before": dict(type=lambda text: Path(text).resolve(), metavar="TREE"),
        "--before-below": dict(type=float, metavar="RATIO", help="of the csv; default: all"),
        "--random": dict(type=int, default=0, metavar="N"),
        "--seed": dict(type=int, default=0),
        "--repeats": dict(type=int, default=3),
        "--gpus": dict(type=int, default=1),
        "--ready": flag("have kernels built, and time nothing"),
        "--built": flag("kernels are built: time at once"),
        "--behind": dict(type=float, metavar="RATIO"),
        "--seconds": dict(type=float, metavar="S", help="begin no call after so long"),
    },
)

if __name__ == "__main__":
    sys.exit(main())
