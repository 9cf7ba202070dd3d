"""A built kernel of decoding and sizes in, its time beside cuDNN's and FlashAttention-2's out.

Keys and values come from memory, not from the L2 cache, and leave no dirty lines there: a CUDA
graph goes round through so many buffers of them that none is left of the time before.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fagen.kinds.decode.plan import Plan
from fagen.measure.inputs import softmax_scale
from fagen.measure.timing import Call, Regime, time_calls
from fagen.problem import Sizes
from fagen.records import DecodeSpeed
from fagen.runtime.c_interface import bind

ROTATED_BYTES = 480 * 10**6  # ten times what the L2 cache holds
LEAST_BUFFERS = 2
# what memory limits draws too little power for the clock to fall: short runs do
BRIEF = Regime("brief", idle=0.0, warm=0.010, timed=0.040, rounds=5)
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}

Enqueue = Callable[[], Any]


def timed(plan: Plan, library: Path, sizes: Sizes) -> DecodeSpeed:
    """Time a built kernel and its peers on all keys, each call by itself in turn."""
    dtype = getattr(torch, plan.dtype.torch)
    shape = sizes.batch, sizes.seqlen_k, sizes.kv_heads
    each = sizes.batch * sizes.seqlen_k * sizes.kv_heads * (plan.head_dim + plan.head_dim_v)
    buffers = max(LEAST_BUFFERS, -(-ROTATED_BYTES // (each * plan.dtype.bytes)))
    rows = sizes.batch, sizes.seqlen_q, sizes.heads
    normal = partial(torch.randn, device="cuda", dtype=dtype)
    q = normal(*rows, plan.head_dim)
    pairs = [
        (normal(*shape, plan.head_dim), normal(*shape, plan.head_dim_v)) for _ in range(buffers)
    ]
    out = torch.empty(*rows, plan.head_dim_v, device="cuda", dtype=dtype)

    def ours(k: Tensor, v: Tensor) -> Enqueue:
        return bind(plan, library, q=q, k=k, v=v, scale=softmax_scale(plan.head_dim), out=out)

    calls = {"ours": _rotating(ours(k, v) for k, v in pairs)}
    for name, backend in PEERS.items():
        if made := _peer(plan, backend, q, pairs):
            calls[name] = made
    times = time_calls(calls, BRIEF)
    times = {
        name: replace(timing, seconds=timing.seconds / buffers) for name, timing in times.items()
    }
    return DecodeSpeed(
        batch=sizes.batch,
        seqlen_q=sizes.seqlen_q,
        seqlen_k=sizes.seqlen_k,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        megabytes=each * plan.dtype.bytes / 1e6,
        microseconds=times["ours"].seconds * 1e6,
        spread=times["ours"].spread,
        cudnn_microseconds=times["cudnn"].seconds * 1e6 if "cudnn" in times else None,
        fa2_microseconds=times["fa2"].seconds * 1e6 if "fa2" in times else None,
    )


def _rotating(enqueues: Iterable[Enqueue]) -> Call:
    """All of them as one graph."""
    kept = tuple(enqueues)
    for enqueue in kept:
        enqueue()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for enqueue in kept:
            enqueue()

    def replay(_held: object = kept) -> None:
        graph.replay()

    return Call(replay)


def _peer(
    plan: Plan, backend: SDPBackend, q: Tensor, pairs: list[tuple[Tensor, Tensor]]
) -> Call | None:
    """One of torch's backends on the same tensors; None where it refuses them.

    Of several queries without a mask: none of torch's is aligned to the bottom right.
    """
    query = q.transpose(1, 2)

    def attend(k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            query, k.transpose(1, 2), v.transpose(1, 2), enable_gqa=q.shape[2] != k.shape[2]
        )

    try:
        with sdpa_kernel(backend):
            return _rotating(partial(attend, k, v) for k, v in pairs)
    except RuntimeError:
        return None
