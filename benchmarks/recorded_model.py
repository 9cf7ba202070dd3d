"""Tune fagen for a model: record a run of it, search for what it called, run it again.

    python benchmarks/recorded_model.py                     a Llama-style model: 2 minutes, an H200
    python benchmarks/recorded_model.py --heads 32 --kv-heads 4 --head-dim 128 --hidden 4096
    python benchmarks/recorded_model.py --mix 8x512:6,1x777:4 --new-tokens 4 --seconds 300

The model has random weights: RMSNorm, rotary embedding, grouped heads, SwiGLU. It reads prompts of
a mix, `batch x length : how many such batches`, and writes --new-tokens to each. `before` are the
kernels that fagen.attention takes without a table of one's own, `after` those that it takes with
the table that `fagen search run` has written; both run in turns in one process. Search and builds
get what is left of --seconds. With --keep FOLDER recording, store, table and results stay there.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fagen
from fagen.dispatch.tables import table_at
from fagen.errors import FagenError
from fagen.paths import locate
from fagen.problem import Problem, Sizes, flops
from fagen.process import run

MIX = "8x512:6,4x1024:4,1x777:6,1x333:6,2x2048:3,1x4096:2,1x8192:1"
REST = 40  # seconds of --seconds after the search: builds of what it found, and the measurement
LEAST = 20  # seconds for a search
ROUNDS = 7  # of each of the two, in turns
VOCABULARY = 8_192


@dataclass(frozen=True)
class Prompts:
    """So many batches of prompts of one length."""

    batch: int
    length: int
    count: int


def main(argv: Sequence[str] | None = None) -> int:
    """Record, search and measure; the exit code is that of the `fagen` command."""
    asked = _arguments(argv)
    try:
        if asked.phase:
            PHASES[asked.phase](asked)
        elif asked.keep:
            asked.keep.mkdir(parents=True, exist_ok=True)
            whole(asked, asked.keep.absolute())
        else:
            with tempfile.TemporaryDirectory() as folder:
                whole(asked, Path(folder))
    except FagenError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


# ---- one step after another ----------------------------------------------------------------------


def whole(asked: argparse.Namespace, folder: Path) -> None:
    """Take all steps, in `folder`: mine.toml, search.sqlite, fagen/dispatch.toml, results.json."""
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {line}", flush=True)

    os.environ["XDG_CONFIG_HOME"] = str(folder)  # the table of nobody else
    sizes = sizes_of(asked)
    slugs = _picked(asked, sizes, folder / "before.json")
    say(f"before: {', '.join(slugs)}")
    _build(asked, slugs)
    say("built")
    _step(asked, "record", folder)
    say("recorded")
    left = asked.seconds - (time.monotonic() - began) - REST
    words: list[Any] = ["search", "run", folder / "mine.toml", "--write", folder / "fagen"]
    words += ["--minutes", max(LEAST, left) / 60, "--store", folder / "search.sqlite"]
    words += ["--replay", asked.replay] if asked.replay else []
    print(_cli(words))
    say("searched")
    slugs = _picked(asked, sizes, folder / "after.json")
    _build(asked, slugs)
    say(f"after: {', '.join(slugs)}")
    print(_step(asked, "measure", folder))
    say("measured")


def sizes_of(asked: argparse.Namespace) -> list[Sizes]:
    """The sizes that the mix makes of attention: of prompts, and of each token after them."""
    found = {}
    for one in asked.mix:
        rows = [(one.length, one.length)]
        rows += [(1, one.length + 1 + new) for new in range(asked.new_tokens)]
        for queries, keys in rows:
            found[Sizes(one.batch, asked.heads, asked.kv_heads, queries, keys)] = None
    return list(found)


def _picked(asked: argparse.Namespace, sizes: Sequence[Sizes], file: Path) -> list[str]:
    """Note in a file which kernel each size has now; return the slugs."""
    table_at.cache_clear()  # a search has written one since
    picks = [
        fagen.pick(
            dtype=asked.dtype,
            head_dim=asked.head_dim,
            causal=True,
            batch=size.batch,
            heads=size.heads,
            kv_heads=size.kv_heads,
            seqlen=size.seqlen_q,
            seqlen_k=size.seqlen_k,
        ).slug
        for size in sizes
    ]
    told = [{**asdict(size), "slug": slug} for size, slug in zip(sizes, picks, strict=True)]
    file.write_text(json.dumps(told, indent=1))
    return list(dict.fromkeys(picks))


def _build(asked: argparse.Namespace, slugs: Sequence[str]) -> None:
    """Build kernels and their bindings side by side; on a CPU there is nothing to build."""
    if asked.device != "cpu":
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda slug: _cli(["build", "--binding", slug]), slugs))


def _cli(words: Sequence[Any]) -> str:
    return _printed([sys.executable, locate("cli.py"), *words])


def _step(asked: argparse.Namespace, phase: str, folder: Path) -> str:
    """Take a step that needs torch, in a process of its own: tables are read once in each."""
    said = [*asked.words, "--phase", phase, "--keep", folder]
    return _printed([sys.executable, Path(__file__).resolve(), *said])


def _printed(argv: Sequence[Any]) -> str:
    """Return what a program prints.  Raises FagenError where it fails."""
    root = locate("cli.py").parent  # of the fagen that this process has
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    ended = run(list(map(str, argv)), cwd=root, env={"PYTHONPATH": paths})
    if ended.returncode:
        raise FagenError(f"{' '.join(map(str, argv))}\n{ended.stderr[-4_000:]}")
    return ended.stdout.rstrip()


# ---- the model -----------------------------------------------------------------------------------

Attend = Callable[..., Any]  # q, k, v → out


def model(asked: argparse.Namespace) -> Any:
    """Return a model with random weights: tokens, caches, where they begin, attention → logits."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    d, heads, kv_heads = asked.head_dim, asked.heads, asked.kv_heads
    inner = -(-asked.hidden * 8 // 3 // 256) * 256

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(asked.hidden) for _ in range(2))
            self.qkv = nn.Linear(asked.hidden, (heads + 2 * kv_heads) * d, bias=False)
            self.out = nn.Linear(heads * d, asked.hidden, bias=False)
            self.up = nn.Linear(asked.hidden, 2 * inner, bias=False)
            self.down = nn.Linear(inner, asked.hidden, bias=False)

        def forward(
            self, x: Tensor, turn: Tensor, cache: Tensor, begin: int, attend: Attend
        ) -> Tensor:
            batch, length, _ = x.shape
            qkv = self.qkv(self.norms[0](x)).view(batch, length, heads + 2 * kv_heads, d)
            q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
            cache[0, :, begin : begin + length] = turned(k, turn)
            cache[1, :, begin : begin + length] = v
            k, v = cache[:, :, : begin + length]
            x = x + self.out(attend(turned(q, turn), k, v).flatten(2))
            gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
            down: Tensor = x + self.down(functional.silu(gate) * up)
            return down

    def turned(x: Tensor, turn: Tensor) -> Tensor:
        """Rotary embedding: pairs half a head apart are turned by their position's angles."""
        cosine, sine = turn
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, asked.hidden)
            self.layers = nn.ModuleList(Layer() for _ in range(asked.layers))
            self.norm = nn.RMSNorm(asked.hidden)
            self.head = nn.Linear(asked.hidden, VOCABULARY, bias=False)
            longest = max(one.length for one in asked.mix) + asked.new_tokens
            angles = torch.arange(longest)[:, None] * 10_000.0 ** -(torch.arange(d // 2) * 2 / d)
            turns = torch.stack((angles.cos(), angles.sin()))[:, :, None]
            self.register_buffer("turns", turns)

        def caches(self, batch: int, length: int) -> Tensor:
            """Room for the keys and values of each layer."""
            shape = len(self.layers), 2, batch, length, kv_heads, d
            return self.embedding.weight.new_empty(shape)

        def forward(self, tokens: Tensor, caches: Tensor, begin: int, attend: Attend) -> Tensor:
            x = self.embedding(tokens)
            turn = self.turns[:, begin : begin + tokens.shape[1]]
            for layer, cache in zip(self.layers, caches, strict=True):
                x = layer(x, turn, cache, begin, attend)
            logits: Tensor = self.head(self.norm(x[:, -1]))
            return logits

    torch.manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[asked.dtype]
    with torch.device(asked.device):
        return Model().to(dtype).eval()


def answers(asked: argparse.Namespace, net: Any, attend: Attend) -> Iterator[Any]:
    """Run the whole mix: yield the logits of each batch's last token."""
    import torch

    for number, one in enumerate(asked.mix):
        generator = torch.Generator().manual_seed(number)
        shape = one.batch, one.length + asked.new_tokens
        tokens = torch.randint(VOCABULARY, shape, generator=generator).to(asked.device)
        for _ in range(one.count):
            caches = net.caches(*shape)
            logits = net(tokens[:, : one.length], caches, 0, attend)
            for at in range(one.length, shape[1]):  # tokens that were drawn: a run is like another
                logits = net(tokens[:, at : at + 1], caches, at, attend)
            yield logits


# ---- steps that need torch -----------------------------------------------------------------------


def record(asked: argparse.Namespace) -> None:
    """Run the mix once, under a recording."""
    import torch

    net = model(asked)
    with torch.inference_mode(), fagen.recording(asked.keep / "mine.toml"):
        for _ in answers(asked, net, lambda q, k, v: fagen.attention(q, k, v, causal=True)):
            pass


def measure(asked: argparse.Namespace) -> None:
    """Time the model and each of its sizes, before and after; print both and keep them."""
    import torch

    before, after = (
        {Sizes(**one): slug for one in json.loads((asked.keep / file).read_text())
         for slug in [one.pop("slug")]}
        for file in ("before.json", "after.json")
    )  # fmt: skip

    def attend_before(q: Any, k: Any, v: Any) -> Any:
        batch, queries, heads, _ = q.shape
        size = Sizes(batch, heads, k.shape[2], queries, k.shape[1])
        return fagen.attention(q, k, v, causal=True, schedule=before[size])

    def attend_after(q: Any, k: Any, v: Any) -> Any:
        return fagen.attention(q, k, v, causal=True)

    ways = {"before": attend_before, "after": attend_after}
    with torch.inference_mode():
        net = model(asked)
        outputs = {name: list(answers(asked, net, attend)) for name, attend in ways.items()}
        runs: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(asked.rounds):
            for name in sorted(ways, reverse=bool(number % 2)):
                _wait(asked)
                began = time.perf_counter()
                for _ in answers(asked, net, ways[name]):
                    pass
                _wait(asked)
                runs[name].append(time.perf_counter() - began)
        del net
        shapes = [
            {
                "sizes": asdict(size),
                "before": before[size],
                "after": after[size],
                **_raced(asked, size, ways),
            }
            for size in before
        ]
    tokens = sum(one.count * one.batch * (one.length + asked.new_tokens) for one in asked.mix)
    found = {
        "card": torch.cuda.get_device_name() if asked.device == "cuda" else asked.device,
        "torch": torch.__version__,
        "model": {key: getattr(asked, key) for key in MODEL},
        "mix": [asdict(one) for one in asked.mix],
        "tokens_per_s": {name: tokens / statistics.median(runs[name]) for name in ways},
        "spread": {name: max(runs[name]) / min(runs[name]) - 1 for name in ways},
        "largest_difference": max(
            float((a.float() - b.float()).abs().max())
            for a, b in zip(outputs["before"], outputs["after"], strict=True)
        ),
        "shapes": shapes,
    }
    (asked.keep / "results.json").write_text(json.dumps(found, indent=1))
    print("\n".join(told(asked, found)))


def _raced(
    asked: argparse.Namespace, size: Sizes, ways: dict[str, Attend]
) -> dict[str, dict[str, float]]:
    """Microseconds of one call at a size, both ways in turns, and TFLOP/s."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[asked.dtype]
    rows = (size.seqlen_q, size.heads), *[(size.seqlen_k, size.kv_heads)] * 2
    tensors = [
        torch.randn(size.batch, *shape, asked.head_dim, device=asked.device, dtype=dtype)
        for shape in rows
    ]
    problem = Problem(asked.dtype, asked.head_dim, asked.head_dim, "causal")
    rough = flops(problem, size) / 400e12 + 5e-6
    calls = 1 if asked.device == "cpu" else max(4, round(0.004 / rough))
    timers = {
        name: _timer(asked, lambda attend=attend: attend(*tensors), calls)
        for name, attend in ways.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(asked.rounds):
        for name in sorted(ways, reverse=bool(number % 2)):
            seconds[name].append(timers[name]())
    return {
        f"{name}_run": {
            "microseconds": statistics.median(times) * 1e6,
            "tflops": flops(problem, size) / statistics.median(times) / 1e12,
        }
        for name, times in seconds.items()
    }


def _timer(
    asked: argparse.Namespace, call: Callable[[], object], calls: int
) -> Callable[[], float]:
    """Return what times one of so many calls, in seconds: on a GPU in a graph, without the host."""
    import torch

    call()  # whatever it has to do once is done
    if asked.device == "cpu":

        def on_a_cpu() -> float:
            began = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - began) / calls

        return on_a_cpu
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()

    def on_a_gpu() -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / calls

    return on_a_gpu


def _wait(asked: argparse.Namespace) -> None:
    import torch

    if asked.device != "cpu":
        torch.cuda.synchronize()


def told(asked: argparse.Namespace, found: dict[str, Any]) -> Iterator[str]:
    """Yield the results as lines: tokens/s, and each size."""
    rates, spread = found["tokens_per_s"], found["spread"]
    yield (
        f"{found['card']}: {asked.layers} layers, hidden {asked.hidden}, {asked.heads} heads on "
        f"{asked.kv_heads}, head dim {asked.head_dim}, {asked.dtype}"
    )
    for name in rates:
        yield f"  {name:<7}{rates[name]:>12,.0f} tokens/s (rounds within {spread[name]:.1%})"
    yield f"  after ÷ before: {rates['after'] / rates['before']:.3f}"
    yield f"  largest difference of a logit: {found['largest_difference']:.2g}"
    yield f"  {'batch x queries / keys':<24}{'before':>10}{'after':>10} µs{'÷':>8}  TFLOP/s after"
    for shape in found["shapes"]:
        size, runs = Sizes(**shape["sizes"]), (shape["before_run"], shape["after_run"])
        before, after = (one["microseconds"] for one in runs)
        same = "" if shape["before"] != shape["after"] else " (the same)"
        yield (
            f"  {f'{size.batch} x {size.lengths}':<24}{before:>10.1f}{after:>10.1f}   "
            f"{before / after:>8.3f}  {runs[1]['tflops']:.0f}  {shape['after']}{same}"
        )


PHASES = {"record": record, "measure": measure}
MODEL = ("layers", "hidden", "heads", "kv_heads", "head_dim", "dtype", "new_tokens")


def _mix(text: str) -> list[Prompts]:
    try:
        found = []
        for one in text.split(","):
            shape, _, count = one.partition(":")
            batch, length = map(int, shape.split("x"))
            found.append(Prompts(batch, length, int(count or 1)))
    except ValueError:
        found = []
    if not found or any(min(one.batch, one.length, one.count) < 1 for one in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no mix, as 8x512:6,1x777 is one")
    return found


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    words = list(sys.argv[1:] if argv is None else argv)
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    for name, usual in (("layers", 4), ("hidden", 2_048), ("heads", 32), ("kv-heads", 8)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--mix", type=_mix, default=_mix(MIX), help=f"default: {MIX}")
    parser.add_argument("--new-tokens", type=int, default=0, help="after each prompt")
    parser.add_argument("--seconds", type=float, default=115, help="for all of it")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: emulated")
    parser.add_argument("--replay", type=Path, help="search over another store, as fagen search")
    parser.add_argument("--keep", type=Path, help="a folder for all that comes out")
    parser.add_argument("--phase", choices=tuple(PHASES), help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    asked.words = words
    return asked


if __name__ == "__main__":
    sys.exit(main())
