"""A built kernel of decoding and sizes in, its time beside cuDNN's and FlashAttention-2's out."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fagen.kinds.decode.pages import usual_pages
from fagen.kinds.decode.plan import Plan
from fagen.measure.inputs import usual
from fagen.measure.rotating import BRIEF, rotated
from fagen.measure.sinks import usual_sinks
from fagen.problem import Sizes
from fagen.records import DecodeSpeed

__all__ = ["BRIEF", "timed", "timed_together"]


def caches(plan: Plan, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """K and V, each sequence's in rows of its own, as a kernel takes them: maybe as pages."""
    if not plan.paged:
        return {"k": k, "v": v}
    return dict(zip(("k", "v", "block_table", "seqused_k"), usual_pages(k, v), strict=True))


def timed(plan: Plan, library: Path, sizes: Sizes) -> DecodeSpeed:
    """Time a built kernel and its peers on all keys."""
    return timed_together({plan.slug: (plan, library)}, sizes)[plan.slug]


def timed_together(
    kernels: Mapping[str, tuple[Plan, Path]], sizes: Sizes, *, eager: bool = False
) -> dict[str, DecodeSpeed]:
    """Time built kernels of one problem, and their peers, on the same tensors, each in turn.

    With `eager` the host launches each call, else a CUDA graph all of them.
    """
    # scores are N(0, 1): a good reference
    reference = {"reference": torch.zeros(sizes.heads, device="cuda")}
    more = {
        slug: usual(plan.mask, sizes.batch, sizes.seqlen_q, sizes.seqlen_k, "cuda")
        | {**plan.score.usual}
        | usual_sinks(plan.sink, sizes.heads, "cuda")
        | (reference if plan.fixed else {})
        for slug, (plan, _) in kernels.items()
    }
    timing = rotated(kernels, sizes, more=more, caches=caches, eager=eager)
    return {
        slug: DecodeSpeed(
            batch=sizes.batch,
            seqlen_q=sizes.seqlen_q,
            seqlen_k=sizes.seqlen_k,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            megabytes=timing.megabytes,
            microseconds=timing.microseconds[slug],
            spread=timing.spread[slug],
            cudnn_microseconds=timing.microseconds.get("cudnn"),
            fa2_microseconds=timing.microseconds.get("fa2"),
        )
        for slug in kernels
    }
