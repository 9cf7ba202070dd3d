"""q, k and v in, torch's own passes out, each called by itself: results first, then gradients.

Autograd takes no part: what it costs the host is none of a backend's time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fagen.measure.inputs import offsets, softmax_scale
from fagen.problem import Sizes

Gradients = tuple[Tensor, Tensor, Tensor]
_SEED = 0x6F  # of no tensor else


@dataclass(frozen=True)
class Attended:
    """A backend's forward pass, in its own words, and what takes it back.

    `backward(dout)`, dout (B, Sq, H, Dv), gives dq, dk and dv as q, k and v are.
    """

    own_out: Tensor  # (B, H, Sq, Dv)
    own_lse: Tensor  # (B, H, Sq), or with more at its end
    backward: Callable[[Tensor], Gradients]

    @property
    def out(self) -> Tensor:
        """(B, Sq, H, Dv), contiguous."""
        return self.own_out.transpose(1, 2).contiguous()

    @property
    def lse(self) -> Tensor:
        """(B, H, Sq), contiguous; minus infinity of a row that sees no key."""
        own = self.own_lse
        rows = own.reshape(*own.shape[:2], -1)[..., : self.own_out.shape[2]]
        # for that one backend says infinity
        return rows.masked_fill(rows == math.inf, -math.inf).contiguous()


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
    how = {"is_causal": causal, "scale": softmax_scale(q.shape[-1])}
    only = {"attn_bias": None, "compute_log_sumexp": True}
    known = {argument.name for argument in forward._schema.arguments}
    results = forward(query, key, value, **how, **{n: x for n, x in only.items() if n in known})
    # by place: the random state's names differ from backend to backend, and between versions
    out, lse, cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset = results[:8]
    kept = dict(
        query=query,
        key=key,
        value=value,
        out=out,
        logsumexp=lse,
        attn_bias=None,
        cum_seq_q=cum_seq_q,
        cum_seq_k=cum_seq_k,
        max_q=max_q,
        max_k=max_k,
        philox_seed=philox_seed,
        philox_offset=philox_offset,
        dropout_p=0.0,
        **how,
    )
    taken = {argument.name for argument in backward._schema.arguments}
    kept = {name: value for name, value in kept.items() if name in taken}

    def back(dout: Tensor) -> Gradients:
        dq, dk, dv = backward(grad_out=dout.transpose(1, 2), **kept)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    return Attended(out, lse, back)


@dataclass(frozen=True)
class AttendedPacked:
    """FLASH_ATTENTION's forward pass over varlen sequences, and what takes it back.

    out is (total_q, H, Dv); `backward(dout)` gives dq, dk and dv.
    """

    out: Tensor
    own_lse: Tensor  # (H, total_q), where torch leaves nothing between sequences
    backward: Callable[[Tensor], Gradients]

    @property
    def lse(self) -> Tensor:
        """The same; minus infinity of a row that sees no key."""
        return self.own_lse.masked_fill(self.own_lse == math.inf, -math.inf)


def varlen_lengths(sizes: Sizes, device: torch.device | str) -> tuple[Tensor, Tensor, int, int]:
    """What torch is told of varlen sequences: where each begins, and the longest."""
    return *offsets(sizes, device), sizes.seqlen_q, sizes.seqlen_k


def attended_varlen(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Tensor, Tensor, int, int], *, causal: bool
) -> AttendedPacked:
    """Run torch's FLASH_ATTENTION over packed q, k and v (total, heads, D), for gradients to come.

    A causal mask is aligned to the bottom right of each sequence. Raises what torch raises.
    """
    how, scale, aten = (*lengths, 0.0, causal), softmax_scale(q.shape[-1]), torch.ops.aten
    out, lse, state, unused, _ = aten._flash_attention_forward(q, k, v, *how, False, scale=scale)

    def back(dout: Tensor) -> Gradients:
        arguments = dout, q, k, v, out, lse, *how, state, unused
        dq, dk, dv = aten._flash_attention_backward(*arguments, scale=scale)
        return dq, dk, dv

    return AttendedPacked(out, lse, back)
