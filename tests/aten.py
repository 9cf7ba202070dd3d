"""torch's own passes of attention, by their real schemas, on a CPU: what stands in for a GPU's."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fagen.kinds.backward.oracle import gradients
from fagen.vocab import MASKS

SEED, OFFSET = 17, 3  # of a random state, which has to come back as it was given


@contextmanager
def passes_on_a_cpu(called: list[str] | None = None) -> Iterator[list[str]]:
    """Compute cuDNN's and FLASH_ATTENTION's ops by the reference; yield the names of those called.

    A backward pass checks that it is given what its forward pass gave.
    """
    called = [] if called is None else called
    library = torch.library.Library("aten", "IMPL")
    for backend in ("cudnn", "flash"):
        for end, run in (("", _forward), ("_backward", _backward)):
            name = f"_scaled_dot_product_{backend}_attention{end}"
            schema = getattr(torch.ops.aten, name).default._schema
            library.impl(name, _noted(f"{backend}{end}", schema, run, called), "CPU")
    try:
        yield called
    finally:
        library._destroy()


def _noted(name: str, schema: Any, run: Any, called: list[str]) -> Any:
    """An implementation that takes all of its arguments by name, defaults among them."""

    def implementation(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        named = {argument.name: argument.default_value for argument in schema.arguments}
        named |= dict(zip(named, args, strict=False)) | kwargs
        return run(SimpleNamespace(**named))

    return implementation


def _computed(dout: Tensor, call: Any) -> tuple[Tensor, ...]:
    """Of tensors (B, H, S, D) what the reference has of these stored (B, S, H, D), in fp32."""
    stored = [x.transpose(1, 2) for x in (dout, call.query, call.key, call.value)]
    mask = MASKS["causal" if call.is_causal else "full"]
    return gradients(*stored, mask=mask, scale=call.scale, dtype=torch.float32)


def _forward(call: Any) -> tuple[Any, ...]:
    cudnn = hasattr(call, "compute_log_sumexp")
    assert not cudnn or (call.attn_bias is None and call.compute_log_sumexp)
    out, lse, *_ = _computed(torch.zeros_like(call.query), call)
    lse = lse[..., None] if cudnn else lse.masked_fill(lse == -math.inf, math.inf)
    out = out.to(call.query.dtype).contiguous().transpose(1, 2)
    seed, offset = torch.tensor(SEED), torch.tensor(OFFSET)
    lengths = call.query.shape[2], call.key.shape[2]
    return out, lse.contiguous(), None, None, *lengths, seed, offset, call.query.new_empty(0)


def _backward(call: Any) -> tuple[Tensor, ...]:
    assert (call.cum_seq_q, call.cum_seq_k, call.dropout_p) == (None, None, 0.0)
    assert (call.max_q, call.max_k) == (call.query.shape[2], call.key.shape[2])
    assert (int(call.philox_seed), int(call.philox_offset)) == (SEED, OFFSET)
    out, lse, *_ = _computed(torch.zeros_like(call.query), call)
    assert torch.equal(call.out, out.to(call.out.dtype).transpose(1, 2))
    assert torch.equal(call.logsumexp.flatten().abs(), lse.flatten().abs())
    *_, dq, dk, dv = _computed(call.grad_out, call)
    return tuple(x.transpose(1, 2).to(call.query.dtype) for x in (dq, dk, dv))


# ---- varlen sequences ---------------------------------------------------------------------------

STATE, UNUSED = torch.tensor([23, 5]), torch.empty(0)


@contextmanager
def packed_passes_on_a_cpu(called: list[str] | None = None) -> Iterator[list[str]]:
    """Compute FLASH_ATTENTION's ops over varlen sequences by the reference; yield what is called.

    A backward pass checks that it is given what its forward pass gave.
    """
    called = [] if called is None else called
    library = torch.library.Library("aten", "IMPL")
    for end, run in (("forward", _packed_forward), ("backward", _packed_backward)):
        name = f"_flash_attention_{end}"
        schema = getattr(torch.ops.aten, name).default._schema
        library.impl(name, _noted(end, schema, run, called), "CPU")
    try:
        yield called
    finally:
        library._destroy()


def _each(dout: Tensor, call: Any) -> list[tuple[Tensor, ...]]:
    """What the reference has of each sequence: out, lse, and three gradients."""
    mask = MASKS["causal" if call.is_causal else "full"]
    at_q, at_k = call.cum_seq_q.tolist(), call.cum_seq_k.tolist()
    lengths = [max(b - a for a, b in pairwise(at)) for at in (at_q, at_k)]
    assert [call.max_q, call.max_k] == lengths and call.dropout_p == 0.0
    sequences = []
    for (top, bottom), (first, last) in zip(pairwise(at_q), pairwise(at_k), strict=True):
        own = dout[top:bottom], call.query[top:bottom], call.key[first:last], call.value[first:last]
        how = dict(mask=mask, scale=call.scale, dtype=torch.float32)
        sequences.append(tuple(x[0] for x in gradients(*(x[None] for x in own), **how)))
    return sequences


def _packed_forward(call: Any) -> tuple[Any, ...]:
    shape = (*call.query.shape[:2], call.value.shape[2])
    outs, lses, *_ = zip(*_each(call.query.new_zeros(shape), call), strict=True)
    lse = torch.cat(lses, 1)
    out, lse = torch.cat(outs).to(call.query.dtype), lse.masked_fill(lse == -math.inf, math.inf)
    return out, lse, STATE.clone(), UNUSED.clone(), UNUSED.clone()


def _packed_backward(call: Any) -> tuple[Tensor, ...]:
    out, lse, *_ = _packed_forward(call)
    assert torch.equal(call.out, out) and torch.equal(call.logsumexp, lse)
    assert torch.equal(call.rng_state, STATE) and call.unused.numel() == 0
    _, _, *grads = zip(*_each(call.grad_out, call), strict=True)
    return tuple(torch.cat(x).to(call.query.dtype) for x in grads)
