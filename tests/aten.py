"""torch's own passes of attention, by their real schemas, on a CPU: what stands in for a GPU's."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fagen.kinds.backward.reference import gradients
from fagen.vocab import MASKS

SEED, OFFSET = 17, 3  # of a random state, which has to come back as it was given


@contextmanager
def passes_on_a_cpu() -> Iterator[list[str]]:
    """Compute cuDNN's and FLASH_ATTENTION's ops by the reference; yield the names of those called.

    A backward pass checks that it is given what its forward pass gave.
    """
    called: list[str] = []
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
        named = {one.name: one.default_value for one in schema.arguments}
        named |= dict(zip(named, args, strict=False)) | kwargs
        return run(SimpleNamespace(**named))

    return implementation


def _computed(dout: Tensor, of: Any) -> tuple[Tensor, ...]:
    """Of tensors (B, H, S, D) what the reference has of these stored (B, S, H, D), in fp32."""
    stored = [x.transpose(1, 2) for x in (dout, of.query, of.key, of.value)]
    mask = MASKS["causal" if of.is_causal else "full"]
    return gradients(*stored, mask=mask, scale=of.scale, dtype=torch.float32)


def _forward(of: Any) -> tuple[Any, ...]:
    cudnn = hasattr(of, "compute_log_sumexp")
    assert not cudnn or (of.attn_bias is None and of.compute_log_sumexp)
    out, lse, *_ = _computed(torch.zeros_like(of.query), of)
    lse = lse[..., None] if cudnn else lse.masked_fill(lse == -math.inf, math.inf)
    out = out.to(of.query.dtype).contiguous().transpose(1, 2)
    seed, offset = torch.tensor(SEED), torch.tensor(OFFSET)
    lengths = of.query.shape[2], of.key.shape[2]
    return out, lse.contiguous(), None, None, *lengths, seed, offset, of.query.new_empty(0)


def _backward(of: Any) -> tuple[Tensor, ...]:
    assert (of.cum_seq_q, of.cum_seq_k, of.dropout_p) == (None, None, 0.0)
    assert (of.max_q, of.max_k) == (of.query.shape[2], of.key.shape[2])
    assert (int(of.philox_seed), int(of.philox_offset)) == (SEED, OFFSET)
    out, lse, *_ = _computed(torch.zeros_like(of.query), of)
    assert torch.equal(of.out, out.to(of.out.dtype).transpose(1, 2))
    assert torch.equal(of.logsumexp.flatten().abs(), lse.flatten().abs())
    *_, dq, dk, dv = _computed(of.grad_out, of)
    return tuple(x.transpose(1, 2).to(of.query.dtype) for x in (dq, dk, dv))
