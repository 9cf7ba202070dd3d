"""Train a small model with fagen's attention and with torch's, from one seed; compare the losses.

    python examples/train.py                              300 steps, on a Hopper GPU
    python examples/train.py --out curves.svg             and a picture of the losses
    python examples/train.py --json run.json              all figures, with the card
    python examples/train.py --length 512 --hidden 512 --batch 16    the GPU waits for Python
    python examples/train.py --device cpu --steps 3 --layers 1 --hidden 128 --heads 2 --length 32

The model is a small Llama: RMSNorm, RoPE, GQA, SwiGLU. Its task is to copy: the second half of each
sequence repeats the first half, which is random. Weights are fp32, under autocast to bf16; the
learning rate falls to 0. All runs start from the same weights and see the same batches. The script
prints the losses, their largest distance, and tokens per second without the first steps. torch's
gradients are not deterministic, so it trains twice with torch: the distance of these two runs is
the yardstick for fagen's.
"""

import argparse
import datetime
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import fagen

VOCABULARY = 64
WARM = 10  # steps before the clock starts
SIZES = dict(steps=300, layers=4, hidden=1024, heads=8, kv_heads=2, length=4096, batch=4)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, S, heads, D) → out


def by_fagen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by fagen's kernels, forward and backward."""
    out = fagen.attention(q, k, v, causal=True)
    assert isinstance(out, Tensor)
    return out


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by whichever of torch's backends takes it."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


class Layer(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d = heads, kv_heads, hidden // heads
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.d, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """x (B, S, hidden); `rotary` cosines and sines (S, 1, D / 2)."""
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.d))
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        x = x + self.out(attend(rotated(q, rotary), rotated(k, rotary), v).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        down: Tensor = x + self.down(functional.silu(gate) * up)
        return down


def rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE: pairs half a head apart rotate by the angles of their position."""
    (cosine, sine), (first, second) = rotary, x.chunk(2, dim=-1)
    both = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat(both, dim=-1).to(x.dtype)


class Model(nn.Module):
    """Tokens (B, S) in, logits (B, S, VOCABULARY) out."""

    def __init__(self, layers: int, hidden: int, heads: int, kv_heads: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        d = hidden // heads
        angles = torch.arange(length)[:, None] * 10_000.0 ** -(torch.arange(d // 2) * 2 / d)
        self.register_buffer("cosine", angles.cos()[:, None])
        self.register_buffer("sine", angles.sin()[:, None])

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        """The logits of each next token."""
        x, length = self.embedding(tokens), tokens.shape[1]
        rotary = self.cosine[:length], self.sine[:length]
        for layer in self.layers:
            x = layer(x, rotary, attend)
        logits: Tensor = self.head(self.norm(x))
        return logits


def train(options: argparse.Namespace, attend: Attend) -> tuple[list[float], float]:
    """Return the loss of each step, and tokens per second."""
    torch.manual_seed(0)
    model = Model(options.layers, options.hidden, options.heads, options.kv_heads, options.length)
    model.to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=options.steps)
    generator = torch.Generator().manual_seed(1)
    losses: list[Tensor] = []
    began = 0.0
    for step in range(options.steps):
        if step == min(WARM, options.steps - 1):
            _ = losses and losses[-1].item()  # waits for the GPU
            began = time.perf_counter()
        half = torch.randint(VOCABULARY, (options.batch, options.length // 2), generator=generator)
        tokens = torch.cat((half, half), dim=1).to(options.device)
        with torch.autocast(options.device, torch.bfloat16):
            logits = model(tokens[:, :-1], attend)
        copied = slice(options.length // 2 - 1, None)  # what can be known
        loss = functional.cross_entropy(
            logits[:, copied].flatten(0, 1).float(), tokens[:, 1:][:, copied].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    values = torch.stack(losses).tolist()
    timed = options.steps - min(WARM, options.steps - 1)
    return values, timed * options.batch * (options.length - 1) / (time.perf_counter() - began)


def draw(curves: dict[str, list[float]], path: str) -> None:
    """Draw losses by step, to be seen on light and on dark; needs matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with rc_context({**dict.fromkeys(inked, "#7d8590"), "svg.hashsalt": "fagen"}):
        figure = Figure(figsize=(6, 3.2), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="loss")
        for (name, losses), style in zip(curves.items(), ("-", "--", ":"), strict=True):
            axes.plot(losses, style, label=name, linewidth=1.2)
        axes.legend(frameon=False)
        # the same losses give the same file
        undated = {"Date": None} if path.endswith(".svg") else None
        figure.savefig(path, transparent=True, metadata=undated)


def record(
    options: argparse.Namespace,
    curves: dict[str, list[float]],
    speeds: dict[str, float],
    apart: dict[str, float],
) -> None:
    """Write sizes, losses and speeds, with the card, torch and the date."""
    on_gpu = options.device == "cuda"
    run = {
        "card": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "sizes": {name: getattr(options, name) for name in SIZES},
        "tokens_per_second": {name: round(speed) for name, speed in speeds.items()},
        "losses_apart_at_most": {name: round(most, 5) for name, most in apart.items()},
        "losses": {name: [round(loss, 5) for loss in losses] for name, losses in curves.items()},
    }
    Path(options.json).write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Train with both, with torch twice, and print how they compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", help="a picture of the curves: curves.svg")
    parser.add_argument("--json", help="a file for sizes, losses and tokens per second: run.json")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; -h shows sizes for --device cpu")

    curves, speeds = {}, {}
    for name, attend in {"fagen": by_fagen, "torch": by_torch, "torch again": by_torch}.items():
        curves[name], speeds[name] = train(options, attend)
    print("step" + "".join(f"{name:>13}" for name in curves))
    for step in sorted({*range(0, options.steps, max(1, options.steps // 10)), options.steps - 1}):
        print(f"{step:4}" + "".join(f"{losses[step]:13.4f}" for losses in curves.values()))
    apart = {
        name: max(abs(a - b) for a, b in zip(losses, curves["torch"], strict=True))
        for name, losses in curves.items()
        if name != "torch"
    }
    for name, most in apart.items():
        print(f"losses of {name} and torch are {most:.4f} apart at most")
    print(", ".join(f"{name} {speed:,.0f} tokens/s" for name, speed in speeds.items()))
    if options.out:
        draw(curves, options.out)
    if options.json:
        record(options, curves, speeds, apart)


if __name__ == "__main__":
    main()
