"""What kinds verify alike: varlen sequences, hard scores, speeds beside peers or a copy."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fagen.build import Binary
from fagen.kind import Plan
from fagen.measure import families
from fagen.measure.cells import compare, speeds
from fagen.measure.sequences import Case
from fagen.measure.timing import BURST, SUSTAINED, Call, Regime, captured, time_calls
from fagen.problem import Sizes
from fagen.records import Errors, Speed
from fagen.scores import Score

LSE_TOLERANCE = 1e-3

Say = Callable[[str], None]
Kernel = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
Rows = Mapping[int, tuple[slice, slice]]  # of a sequence by number: its queries, and keys it sees

# Two sustained rounds, one in each order: with hundreds of kernels seconds of each count.
_REGIMES = (replace(SUSTAINED, rounds=2), BURST)


def scored(score: Score, scores: Tensor, rows: Tensor, seqlen_q: int, group: int) -> Tensor:
    """What scaled products (B, Hk, G rows, Sk) become, of these query rows of G heads each."""
    if score.is_plain:
        return scores
    batch, kv_heads, count, seqlen_k = scores.shape
    batches, kv_head, key = (
        torch.arange(n, device=rows.device) for n in (batch, kv_heads, seqlen_k)
    )
    of_group = torch.arange(group, device=rows.device).repeat_interleave(count // group)
    kv_head = kv_head[:, None, None]
    found: Tensor = score.whole(
        scores,
        q_idx=rows[:, None],
        k_idx=key,
        len_q=seqlen_q,
        len_k=seqlen_k,
        kv_head=kv_head,
        head=kv_head * group + of_group[:, None],
        heads=kv_heads * group,
        batch=batches[:, None, None, None],
    )
    return found


# ---- errors -------------------------------------------------------------------------------------


def share(error: Errors) -> float:
    """The largest share of what is allowed; infinite of what is no number."""
    shares = (getattr(error, name) / getattr(error, most) for name, most in error.bounds.items())
    return max(math.inf if math.isnan(share) else share for share in shares)


def hard_scores(
    plan: Any,
    kernel: Kernel,
    exact: Kernel,
    sizes: Iterable[Sizes],
    device: str,
    hard: Sequence[families.Family] = families.PROVED,
) -> Iterator[tuple[Sizes, dict[str, Any]]]:
    """Yield a 16-bit kernel's worst errors of the families of hard scores, at each size.

    They are fields of a record; torch's scores overflow there, and so does a formula in 16 bits.
    """
    for worst in families.worst(families.errors(plan, kernel, exact, sizes, hard, device)):
        names = ("error", "allowed", "lse_error", "lse_allowed")
        fields = {name: getattr(worst, name) for name in names}
        yield worst.sizes, {**vars(worst.sizes), "torch_error": 0.0, **fields}


# ---- varlen sequences ---------------------------------------------------------------------------


def judged_rows(case: Case, call: Mapping[str, Any]) -> Rows:
    """Where the queries and the keys lie of each sequence that is judged."""
    at_q, at_k = call["cu_seqlens_q"].tolist(), call["cu_seqlens_k"].tolist()
    return {
        sequence: (
            slice(at_q[sequence], at_q[sequence] + case.lengths[sequence][0]),
            slice(at_k[sequence], at_k[sequence] + case.lengths[sequence][1]),
        )
        for sequence in case.judged
    }


def one_sequence(**tensors: Tensor) -> dict[str, Tensor]:
    """Offsets of a single sequence, by the names of its tensors of q and k."""
    return {
        f"cu_seqlens_{name}": torch.tensor([0, len(x)], dtype=torch.int32, device=x.device)
        for name, x in tensors.items()
    }


# ---- speed --------------------------------------------------------------------------------------


def beside_peers(
    plan: Plan,
    binary: Binary,
    sizes: Sizes,
    progress: Say | None,
    peers: Sequence[str] = ("cudnn",),
) -> tuple[Speed, ...]:
    """Time a built kernel of attention, and its peers."""
    return speeds(compare(plan, binary, sizes, peers=peers, regimes=_REGIMES, progress=progress))


def beside_a_copy(
    launch: Callable[[], None], output: Tensor, moved: int, regime: Regime, repeats: int = 0
) -> tuple[float, float]:
    """Time a kernel and a copy of as many bytes, in turn, in seconds.

    With `repeats` a graph has so many calls: the host is slower than a small one.
    """
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def run() -> Tensor:
        launch()
        return output

    calls = {"kernel": Call(run), "copy": Call(lambda: target.copy_(source))}
    if repeats:
        calls = {name: captured(call, repeats) for name, call in calls.items()}
    times = time_calls(calls, regime)
    kernel, copy = (times[name].seconds / (repeats or 1) for name in ("kernel", "copy"))
    return kernel, copy


def each_timed(
    timed: Callable[..., Any], shapes: Iterable[tuple[Any, ...]], progress: Say | None
) -> tuple[Any, ...]:
    """Time shape after shape, with a line for each."""
    records = []
    for shape in shapes:
        records.append(timed(*shape))
        if progress:
            progress(f"  {records[-1]}")
    return tuple(records)
