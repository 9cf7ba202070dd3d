"""Measure what fp8 costs in accuracy, on a CPU: kernels are emulated, nothing is built or launched.

    python benchmarks/fp8_accuracy.py                   what each part of it is worth: ~1 minute
    python benchmarks/fp8_accuracy.py --long            error against length, by accumulator: ~5
    python benchmarks/fp8_accuracy.py --out /tmp/x.json   figures as JSON beside the table

The experiment is the FlashAttention-3 paper's: Q, K and V are N(0, 1), and to one entry of a
thousand N(0, 100), by variance, is added; what is measured is the root mean square error of the
output against fp64 attention over the same 16-bit tensors. The paper does not say at which length;
here every query sees 4,096 keys, and fewer queries than keys are computed, since they are alike.

--long has no outliers, and V's mean is 1: output and sums keep their size whatever the length, and
as errors of single elements average out, what the accumulator loses is seen.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fagen import emulator
from fagen.plan import Plan, plan
from fagen.quantizer.reference import by_columns, random_signs, rotate, rounded
from fagen.schedule import Schedule

OUTLIERS = 0.001  # of all entries
OUTLIER_DEVIATION = 10.0
LENGTHS = tuple(1024 << power for power in range(8))  # to 128k
PROMOTIONS = (1, 4, 16)  # blocks

Tensors = tuple[Tensor, Tensor, Tensor]


def tensors(asked: argparse.Namespace, seed: int, keys: int) -> Tensors:
    """Make Q, K and V in fp16: with outliers, or, for long sums, V about 1 instead of 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(length: int, mean: float = 0.0) -> Tensor:
        shape = (1, length, asked.heads, asked.head_dim)
        x = torch.randn(shape, generator=generator) + mean
        if asked.long:
            return x.half()
        chosen = torch.rand(shape, generator=generator) < OUTLIERS
        return (x + torch.randn(shape, generator=generator) * OUTLIER_DEVIATION * chosen).half()

    return normal(asked.queries), normal(keys), normal(keys, 1.0 if asked.long else 0.0)


def standard_fp16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in three steps, with what lies between them in fp16."""
    queries, keys, values = (x.transpose(1, 2).float() for x in (q, k, v))
    scores = (queries @ keys.mT).half() * q.shape[-1] ** -0.5
    weights = scores.float().softmax(-1).half()
    return (weights.float() @ values).half().transpose(1, 2)


def planned(asked: argparse.Namespace, **keys: object) -> Plan:
    """Plan the schedule that is emulated, or one that differs from it in some keys."""
    tile = dict(head_dim=asked.head_dim, mask="full", block_m=128, block_n=asked.block_n)
    return plan(Schedule.make(**tile | keys))


def fp16(worked: Plan) -> Callable[..., Tensor]:
    """Attention as a kernel of fp16 computes it."""
    return lambda q, k, v: emulator.emulate(worked, q, k, v, q.shape[-1] ** -0.5)[0]


def fp8(worked: Plan, *, rotated: bool, hopper_sums: bool = False) -> Callable[..., Tensor]:
    """Attention as a kernel of e4m3 computes it, of tensors that are quantised for it."""
    scales, scale_rows = worked.schedule.fp8.scales, worked.scale_rows

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        if rotated:
            signs = random_signs(q.shape[-1])
            q, k = rotate(q, signs), rotate(k, signs)
        made = [rounded(x, scales, scale_rows) for x in (q, k, v)]
        q, k, v = (x.values for x in made)
        v = v if worked.v_rows else by_columns(v)
        descales = [x.descale for x in made]
        return emulator.emulate_fp8(worked, q, k, v, scale, *descales, hopper_sums=hopper_sums)[0]

    return attend


def parts(asked: argparse.Namespace) -> dict[str, Callable[..., Tensor]]:
    """What is compared, by name."""
    common = dict(dtype="e4m3", out_dtype="fp16")
    by_block = planned(asked, **common, scales="block")
    by_tensor = planned(asked, **common, scales="tensor")
    hopper = dict(hopper_sums=asked.hopper_sums)
    return {
        "fp16, standard attention": standard_fp16,
        "fp16, fagen": fp16(planned(asked, dtype="fp16", output="v_space")),
        "fp8, baseline: a scale per tensor": fp8(by_tensor, rotated=False, **hopper),
        "fp8, complete: rotated, a scale per block": fp8(by_block, rotated=True, **hopper),
        "fp8, without scales per block": fp8(by_tensor, rotated=True, **hopper),
        "fp8, without rotation": fp8(by_block, rotated=False, **hopper),
    }


def error(attend: Callable[..., Tensor], asked: argparse.Namespace, keys: int) -> float:
    """Return the root mean square error of all seeds' outputs."""
    squares = []
    for seed in range(asked.seeds):
        q, k, v = tensors(asked, seed, keys)
        exact, _ = emulator.reference(q, k, v, causal=False, scale=q.shape[-1] ** -0.5)
        squares.append((attend(q, k, v).double() - exact).square().mean())
    return float(torch.stack(squares).mean().sqrt())


def compare(asked: argparse.Namespace) -> dict[str, float]:
    """Print what each part is worth."""
    found = {}
    baseline = 0.0
    print("| | RMSE | of the baseline |\n|---|---|---|")
    for name, attend in parts(asked).items():
        found[name] = error(attend, asked, asked.keys)
        baseline = found[name] if "baseline" in name else baseline
        ratio = f"1 / {baseline / found[name]:.2f}" if baseline else ""
        print(f"| {name} | {found[name]:.2e} | {ratio} |", flush=True)
    return found


def lengthen(asked: argparse.Namespace) -> dict[str, float]:
    """Print the complete kernel's error against the number of keys, by how PV is added up."""
    found: dict[str, float] = {}
    names = ["fp32", *(f"Hopper's, promoted every {64 * n} keys" for n in PROMOTIONS), "Hopper's"]
    print(f"| keys | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for keys in LENGTHS:
        if keys > asked.longest:
            break
        row = []
        for promote in (None, *PROMOTIONS, 0):
            worked = planned(
                asked,
                dtype="e4m3",
                out_dtype="fp16",
                scales="block",
                scale_rows=64,
                block_n=64,  # a second O takes its registers
                promote=promote or 0,
            )
            attend = fp8(worked, rotated=True, hopper_sums=promote is not None)
            row.append(error(attend, asked, keys))
        found |= {f"{keys} keys, {name}": rmse for name, rmse in zip(names, row, strict=True)}
        print(f"| {keys:,} | {' | '.join(f'{rmse:.3e}' for rmse in row)} |", flush=True)
    return found


def main(words: list[str] | None = None) -> int:
    """Run what was asked for; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--long", action="store_true", help="error against length instead")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="where --long ends")
    parser.add_argument("--keys", type=int, default=4096)
    parser.add_argument("--queries", type=int, help="1024, or 64 with --long")
    parser.add_argument("--heads", type=int, help="8, or 1 with --long")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-n", type=int, default=128)
    parser.add_argument("--seeds", type=int, help="4, or 1 with --long")
    parser.add_argument("--hopper-sums", action="store_true", help="14-bit sums; very slow")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    asked = parser.parse_args(words)
    asked.queries = asked.queries or (64 if asked.long else 1024)
    asked.heads = asked.heads or (1 if asked.long else 8)
    asked.seeds = asked.seeds or (1 if asked.long else 4)
    found = (lengthen if asked.long else compare)(asked)
    if asked.out:
        asked.out.write_text(json.dumps({"rmse": found, "of": str(asked)}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
