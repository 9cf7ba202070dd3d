"""16-bit tensors of a cell in, what the kernels of the backward pass take out, and their launch."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fagen.kinds.backward.oracle import gradients
from fagen.kinds.backward.plan import Plan
from fagen.measure.gradients import attended, attended_varlen, output_gradient, varlen_lengths
from fagen.measure.inputs import mask_of, offsets, softmax_scale, usual, usual_packed
from fagen.measure.sinks import usual_sinks
from fagen.problem import Problem, Sizes
from fagen.runtime.c_interface import bind

BACKEND = "flash"  # of torch: its forward pass is quick, and its causal mask aligned as fagen's


def arguments(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, sizes: Sizes | None = None
) -> tuple[Any, ...]:
    """What the Plan's op takes for q, k and v: dout, these, a forward pass's out and lse, a scale.

    The forward pass is that of torch's FLASH_ATTENTION, or one in fp32 where that does not take
    them. Where the op takes varlen sequences these are of the lengths that `sizes` says, or of
    equal ones.
    """
    dout, scale = output_gradient(q, v), softmax_scale(plan.head_dim)
    if sizes and sizes.varlen:
        own = usual_packed(plan.mask, sizes.sequences, q.device)
        out, lse = _varlen_results(plan, q[0], k[0], v[0], sizes, own)
        at = offsets(sizes, q.device)
        return dout[0], q[0], k[0], v[0], *at, out, lse, scale, *_values(plan, own, q)
    out, lse = _results(plan, q, k, v)
    (batch, queries, heads, _), (_, keys, kv_heads, _) = q.shape, k.shape
    if plan.varlen:
        equal = Sizes(batch, heads, kv_heads, queries, keys)
        own = usual_packed(plan.mask, equal.sequences, q.device)
        dout, *qkv, out = (x.flatten(0, 1) for x in (dout, q, k, v, out))
        lse = lse.transpose(0, 1).flatten(1).contiguous()
        return dout, *qkv, *offsets(equal, q.device), out, lse, scale, *_values(plan, own, q)
    return dout, q, k, v, out, lse, scale, *given(plan, q, k)


def given(plan: Plan, q: Tensor, k: Tensor) -> tuple[Any, ...]:
    """Return what mask and score usually are given for q and k, in the order of the op."""
    of_call = usual(plan.mask, q.shape[0], q.shape[1], k.shape[1], q.device)
    return tuple(_values(plan, of_call, q))


def _values(plan: Plan, of_mask: Mapping[str, Any], q: Tensor) -> Iterator[Any]:
    """What mask and score are given, and sinks, in the order of the op, for q (B, S, H, D)."""
    yield from (of_mask[name] for name in plan.mask.given)
    yield from plan.score.usual.values()
    yield from usual_sinks(plan.sink, q.shape[2], q.device).values()


def _varlen_results(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, sizes: Sizes, given: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """out (total_q, H, Dv) and lse (H, total_q) of varlen sequences."""
    if q.is_cuda and _has_peer(plan):
        with suppress(RuntimeError):  # as torch refuses
            lengths = varlen_lengths(sizes, q.device)
            attention = attended_varlen(q, k, v, lengths, causal=plan.mask.causal)
            if attention.lse.shape == (sizes.heads, sizes.total_q):
                return attention.out, attention.lse
    outs, sums, top, first = [], [], 0, 0
    for number, (queries, keys) in enumerate(sizes.sequences):
        own = q[None, top : top + queries], *(x[None, first : first + keys] for x in (k, v))
        mask = mask_of(plan.mask, given, number, slice(top, top + queries))
        out, lse = _by_formula(replace(plan, mask=mask), *own)
        outs.append(out[0])
        sums.append(lse[0])
        top, first = top + queries, first + keys
    return torch.cat(outs), torch.cat(sums, 1)


def _results(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if q.is_cuda and _has_peer(plan):
        with suppress(RuntimeError):  # as torch refuses
            attention = attended(BACKEND, q, k, v, causal=plan.mask.causal)
            return attention.out, attention.lse
    return _by_formula(plan, q, k, v)


def _has_peer(plan: Plan) -> bool:
    alike = plan.head_dim == plan.head_dim_v and plan.score.is_plain and not plan.sink
    return alike and (plan.mask.causal or not plan.mask.by_row)


def _by_formula(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    dout = torch.zeros_like(output_gradient(q, v))
    scale = softmax_scale(plan.head_dim)
    how: dict[str, Any] = dict(mask=plan.mask, score=plan.score.as_usual, scale=scale)
    how |= usual_sinks(plan.sink, q.shape[2], q.device)
    out, lse, *_ = gradients(dout, q, k, v, **how, dtype=torch.float32)
    return out.to(q.dtype).contiguous(), lse


def outputs(plan: Plan, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Where the Plan's kernels may write the gradients of these arguments, all NaN."""
    named = dict(zip((x.name for x in plan.signature.arguments), arguments, strict=False))
    return tuple(
        torch.full_like(named[name], math.nan, memory_format=torch.contiguous_format)
        for name in ("q", "k", "v", *("sinks",) * (plan.sink is not None))
    )


def launch(
    plan: Plan, library: Path, arguments: tuple[Any, ...], into: tuple[Tensor, ...]
) -> Callable[[], None]:
    """The kernels through their C interface, on the current stream; the workspace is full of NaN.

    Arguments as of the op, in its order; what is left out at their end is null.
    """
    named = dict(zip((x.name for x in plan.signature.arguments), arguments, strict=False))
    outputs = (output.name for output in plan.signature.outputs)
    return bind(plan, library, **named, **dict(zip(outputs, into, strict=True)))


def alike(plan: Plan) -> Hashable:
    """Kernels with the same take the same arguments, and write to the same outputs."""
    return Problem.of(plan.schedule)
