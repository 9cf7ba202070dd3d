"""Attention by one schedule, on real tensors: its error against fp64, and on a GPU its time.

python examples/demo.py schedules/forward/fwd_fp16_d128_causal_m128n128.toml
"""

import sys

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

import fagen
from fagen.kinds.forward.oracle import reference

if len(sys.argv) != 2 or not sys.argv[1].endswith(".toml"):
    sys.exit(__doc__)
schedule = fagen.read_schedule(sys.argv[1])
if schedule.kind != "forward" or schedule.attention.dtype == "e4m3":
    sys.exit(f"{schedule.slug}: the demo calls fagen.attention in 16 bits; name such a schedule")
attention = schedule.attention
causal = attention.mask == "causal"
dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[attention.dtype]

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
device = "cuda" if hopper else "cpu"
batch, heads, kv_heads, seqlen = (4, 16, 16, 4096) if hopper else (1, 4, 2, 1000)

torch.manual_seed(0)
q = torch.randn(batch, seqlen, heads, attention.head_dim, device=device, dtype=dtype)
k = torch.randn(batch, seqlen, kv_heads, attention.head_dim, device=device, dtype=dtype)
v = torch.randn(batch, seqlen, kv_heads, attention.head_dim_v, device=device, dtype=dtype)
scale = attention.head_dim**-0.5


def ours() -> torch.Tensor:
    """The kernel of the schedule; on CPU tensors the schedule is emulated, tile by tile."""
    return fagen.attention(q, k, v, causal=causal, schedule=schedule)


def torchs() -> torch.Tensor:
    """torch's own attention, which wants heads before sequence."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    grouped = heads != kv_heads
    out = scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2)


def error(out: torch.Tensor) -> float:
    """max |out - fp64|."""
    return (out - exact).abs().max().item()


where = torch.cuda.get_device_name() if hopper else "a CPU; no Hopper GPU here, so it is emulated"
print(f"{schedule.slug} on {where}")
print(f"{batch} x {seqlen} tokens, {heads} heads of {attention.head_dim}, {kv_heads} of K and V")

exact, _ = reference(q, k, v, mask=attention.mask, scale=scale)
print(f"largest error against fp64: {error(ours()):.1e}, torch's own {error(torchs()):.1e}")

if hopper:
    for name, call in {"fagen": ours, "torch": torchs}.items():
        timed = Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=0.5)
        print(f"time of a call: {name} {timed.median * 1e3:.3f} ms")
