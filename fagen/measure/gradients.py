"""q, k and v in, torch's own passes out, each called by itself: results first, then gradients.

Autograd takes no part: what it costs the host is none of a backend's time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fagen.measure.inputs import offsets, softmax_scale
from fagen.problem import Sizes

Gradients = tuple[Tensor, Tensor, Tensor]
_SEED = 0x6F  # of no tensor else


@dataclass(frozen=True)
class Attended:
    """A backend's forward pass, in its own words, and what takes it back.

    `backward(dout)`, dout as `out` is, gives dq, dk and dv as q, k and v are.
    """

    own_out: Tensor  # (B, H, Sq, Dv); of varlen sequences (total_q, H, Dv)
    own_lse: Tensor  # (B, H, Sq), or with more at its end; (H, total_q)
    backward: Callable[[Tensor], Gradients]

    @property
    def out(self) -> Tensor:
        """(B, Sq, H, Dv), contiguous; (total_q, H, Dv)."""
        own = self.own_out
        return own.transpose(1, 2).contiguous() if own.dim() == 4 else own

    @property
    def lse(self) -> Tensor:
        """(B, H, Sq), contiguous; (H, total_q). Minus infinity of a row that sees no key."""
        own = self.own_lse
        if self.own_out.dim() == 4:
            own = own.reshape(*own.shape[:2], -1)[..., : self.own_out.shape[2]]
        # for that one backend says infinity
        return own.masked_fill(own == math.inf, -math.inf).contiguous()


def output_gradient(q: Tensor, v: Tensor) -> Tensor:
    """dout (B, Sq, H, Dv), N(0, 1), contiguous, the same in every call: for q and v of any seed."""
    generator = torch.Generator(device=q.device).manual_seed(_SEED)
    shape = (*q.shape[:3], v.shape[3])
    return torch.randn(shape, generator=generator, device=q.device, dtype=q.dtype)


def attended(backend: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Attended:
    """Run the forward pass of torch's `backend`, "cudnn" or "flash", for gradients to come.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv). A causal mask is aligned to the top left
    by cuDNN, to the bottom right by "flash". Raises what the backend raises.
    """
    name = f"_scaled_dot_product_{backend}_attention"
    forward, backward = (
        getattr(torch.ops.aten, f"{name}{end}").default for end in ("", "_backward")
    )
    query, key, value = (x.detach().transpose(1, 2) for x in (q, k, v))
    named = {"query": query, "key": key, "value": value, "attn_bias": None}
    named |= {"is_causal": causal, "scale": softmax_scale(q.shape[-1]), "compute_log_sumexp": True}
    results = forward(**_taken(forward, named))
    # by place: the random state's names differ from backend to backend, and between versions
    names = ["out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k"]
    names += ["philox_seed", "philox_offset"]
    kept = _taken(backward, named | dict(zip(names, results, strict=False)) | {"dropout_p": 0.0})

    def back(dout: Tensor) -> Gradients:
        dq, dk, dv = backward(grad_out=dout.transpose(1, 2), **kept)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    return Attended(results[0], results[1], back)


def _taken(op: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """What an op takes of all these."""
    names = {argument.name for argument in op._schema.arguments}
    return {name: value for name, value in arguments.items() if name in names}


def varlen_lengths(sizes: Sizes, device: torch.device | str) -> tuple[Tensor, Tensor, int, int]:
    """What torch is told of varlen sequences: where each begins, and the longest."""
    return *offsets(sizes, device), sizes.seqlen_q, sizes.seqlen_k


def attended_varlen(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Tensor, Tensor, int, int], *, causal: bool
) -> Attended:
    """Run torch's FLASH_ATTENTION over packed q, k and v (total, heads, D), for gradients to come.

    A causal mask is aligned to the bottom right of each sequence. Raises what torch raises.
    """
    how, scale, aten = (*lengths, 0.0, causal), softmax_scale(q.shape[-1]), torch.ops.aten
    out, lse, state, unused, _ = aten._flash_attention_forward(q, k, v, *how, False, scale=scale)

    def back(dout: Tensor) -> Gradients:
        arguments = dout, q, k, v, out, lse, *how, state, unused
        dq, dk, dv = aten._flash_attention_backward(*arguments, scale=scale)
        return dq, dk, dv

    return Attended(out, lse, back)
