"""A built kernel of decoding and sizes in, its time beside cuDNN's and FlashAttention-2's out.

Keys and values come from memory, not from the L2 cache, and leave no dirty lines there: a CUDA
graph goes round through so many buffers of them that none is left of the time before.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fagen.kinds.decode.plan import Plan
from fagen.measure.inputs import softmax_scale
from fagen.measure.timing import Call, Regime, captured, time_calls
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
    """Time a built kernel and its peers on all keys."""
    return timed_together({plan.slug: (plan, library)}, sizes)[plan.slug]


def timed_together(
    kernels: Mapping[str, tuple[Plan, Path]], sizes: Sizes, *, eager: bool = False
) -> dict[str, DecodeSpeed]:
    """Time built kernels of one problem, and their peers, on the same tensors, each in turn.

    With `eager` the host launches each call, else a CUDA graph all of them.
    """
    plan = next(iter(kernels.values()))[0]
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
    # scores are N(0, 1): a good reference
    reference = torch.zeros(sizes.heads, device="cuda")
    more = {
        slug: {"reference": reference} if of.unified else {} for slug, (of, _) in kernels.items()
    }
    calls = {
        slug: _rotating(
            (
                bind(
                    of,
                    library,
                    **dict(q=q, k=k, v=v, out=out) | more[slug],
                    scale=softmax_scale(of.head_dim),
                )
                for k, v in pairs
            ),
            eager,
        )
        for slug, (of, library) in kernels.items()
    }
    for name, backend in PEERS.items():
        if made := _peer(backend, q, pairs, eager):
            calls[name] = made
    times = time_calls(calls, BRIEF)
    microseconds = {name: timing.seconds / buffers * 1e6 for name, timing in times.items()}
    return {
        slug: DecodeSpeed(
            batch=sizes.batch,
            seqlen_q=sizes.seqlen_q,
            seqlen_k=sizes.seqlen_k,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            megabytes=each * plan.dtype.bytes / 1e6,
            microseconds=microseconds[slug],
            spread=times[slug].spread,
            cudnn_microseconds=microseconds.get("cudnn"),
            fa2_microseconds=microseconds.get("fa2"),
        )
        for slug in kernels
    }


def _rotating(enqueues: Iterable[Enqueue], eager: bool) -> Call:
    """All of them as one call, or one graph, which keeps what they use."""
    kept = tuple(enqueues)

    def run() -> object:
        for enqueue in kept:
            enqueue()
        return kept

    return Call(run) if eager else captured(Call(run), 1)


def _peer(
    backend: SDPBackend, q: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], eager: bool
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
            return _rotating((partial(attend, k, v) for k, v in pairs), eager)
    except RuntimeError:
        return None
