"""Built kernels and sizes in, their times on keys that come from memory, beside torch's out.

Keys and values come from memory, not from the L2 cache, and leave no dirty lines there: a CUDA
graph goes round through so many buffers of them that none is left of the time before.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fagen.kind import Plan
from fagen.measure.inputs import inputs, softmax_scale
from fagen.measure.timing import Call, Regime, captured, time_calls
from fagen.problem import Cell, Problem, Sizes
from fagen.runtime.c_interface import bind, workspace_for
from fagen.vocab import DTYPES

ROTATED_BYTES = 480 * 10**6  # ten times what the L2 cache holds
LEAST_BUFFERS, MOST_BUFFERS = 2, 512  # the most are of 1 MB
# what memory limits draws too little power for the clock to fall: short runs do
BRIEF = Regime("brief", idle=0.0, warm=0.010, timed=0.040, rounds=5)
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
NOTHING: Mapping[str, Mapping[str, Any]] = {}

Enqueue = Callable[[], Any]


def _rows(plan: Any, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """K and V as a call takes them, with what belongs to them: as they are."""
    return {"k": k, "v": v}


class Rotated(NamedTuple):
    """Microseconds of a call, by slug and by peer, their spread, and the megabytes of K and V."""

    microseconds: dict[str, float]
    spread: dict[str, float]
    megabytes: float


def cache_bytes(problem: Problem, sizes: Sizes) -> int:
    """Return the bytes of K and V."""
    columns = problem.head_dim + problem.head_dim_v
    return sizes.batch * sizes.seqlen_k * sizes.kv_heads * columns * DTYPES[problem.dtype].bytes


def buffers_for(problem: Problem, sizes: Sizes) -> int:
    """Return how many K and V there have to be, so that none is left in the L2 cache."""
    buffers = -(-ROTATED_BYTES // max(1, cache_bytes(problem, sizes)))
    return min(max(LEAST_BUFFERS, buffers), MOST_BUFFERS)


def rotated(
    kernels: Mapping[str, tuple[Plan, Path]],
    sizes: Sizes,
    regime: Regime = BRIEF,
    peers: Mapping[str, SDPBackend] = PEERS,
    *,
    more: Mapping[str, Mapping[str, Any]] = NOTHING,
    caches: Callable[[Any, Tensor, Tensor], dict[str, Tensor]] = _rows,
    eager: bool = False,
) -> Rotated:
    """Time built kernels of one problem, and peers, on the same tensors, each in turn.

    Any kernels that take q, k, v and a scale, and what `more` has for their slugs; a peer that
    refuses them is left out. `caches` are K and V as a kernel takes them. With `eager` the host
    launches each call, else a CUDA graph all.
    """
    problem = Problem.of(next(iter(kernels.values()))[0].schedule)
    q, pairs = turns(Cell(problem, sizes))
    out = q.new_empty(*q.shape[:3], problem.head_dim_v)
    scale = softmax_scale(problem.head_dim)
    calls = {}
    for slug, (plan, library) in kernels.items():
        arguments = {"q": q, "scale": scale, "out": out, **more.get(slug, {})}
        # as an allocator does, which peers call and fagen's ops: calls in turn take the same memory
        workspace = workspace_for(plan, library, **caches(plan, *pairs[0]), **arguments)
        bound = (
            bind(plan, library, workspace=workspace, **caches(plan, *pair), **arguments)
            for pair in pairs
        )
        calls[slug] = in_turns(bound, eager=eager)
    for name, backend in peers.items():
        if call := _peer(backend, q, pairs, eager):
            calls[name] = call
    times = time_calls(calls, regime)
    return Rotated(
        {name: timing.seconds / len(pairs) * 1e6 for name, timing in times.items()},
        {name: timing.spread for name, timing in times.items()},
        cache_bytes(problem, sizes) / 1e6,
    )


def turns(cell: Cell) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], ...]]:
    """One Q, and so many K and V that none is left in the L2 cache when its turn comes again."""
    first, *others = (inputs(cell, seed=n) for n in range(buffers_for(cell.problem, cell.sizes)))
    return first[0], (first[1:], *(copies[1:] for copies in others))


def in_turns(
    enqueues: Iterable[Enqueue],
    *,
    eager: bool = False,
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Call:
    """All of them as one call, or one graph, which keeps what they use."""
    kept = tuple(enqueues)

    def run() -> object:
        for enqueue in kept:
            enqueue()
        return kept

    call = Call(run, within)
    return call if eager else captured(call, 1)


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
        calls = (partial(attend, k, v) for k, v in pairs)
        call = in_turns(calls, eager=eager, within=partial(sdpa_kernel, backend))
        call.once()  # a refusal comes here
    except RuntimeError:
        return None
    return call
