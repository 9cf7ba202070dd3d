"""Each public call, with tensors for it of any head dim, on any device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fagen
from fagen import flash_attn_interface as fa3
from tests.tensors import normal

LENGTHS = (13, 0, 20)


@dataclass(frozen=True)
class Door:
    """A call, what it is given, and whether its gradients are asked for."""

    call: Callable[..., Any]
    given: Callable[[int, str], tuple[Tensor, ...]]
    gradients: bool = False

    def made(self, head_dim: int = 64, device: str = "cpu") -> tuple[Tensor, ...]:
        """Return new tensors for a call."""
        return self.given(head_dim, device)

    def results(self, arguments: tuple[Tensor, ...], call: Callable[..., Any] | None = None) -> Any:
        """Return what a call gives, by another function if so asked, and its gradients."""
        call = call or self.call
        if not self.gradients:
            return flat(call(*arguments))
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in arguments]
        results = flat(call(*leaves))
        inputs = [x for x in leaves if x.requires_grad]
        return [*results, *torch.autograd.grad(sum(x.float().sum() for x in results), inputs)]


def flat(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def dense(head_dim: int, device: str, queries: int = 20, keys: int = 40) -> tuple[Tensor, ...]:
    shapes = (2, queries, 4, head_dim), (2, keys, 2, head_dim), (2, keys, 2, head_dim)
    tensors = (normal(*shape, seed=i, dtype=torch.bfloat16) for i, shape in enumerate(shapes))
    return tuple(x.to(device) for x in tensors)


def few(head_dim: int, device: str) -> tuple[Tensor, ...]:
    return (*dense(head_dim, device, queries=1), whole(device, 30, 40))


def packed(head_dim: int, device: str) -> tuple[Tensor, ...]:
    total = sum(LENGTHS)
    flattened = (x.flatten(0, 1)[:total] for x in dense(head_dim, device))
    starts = torch.tensor((0, *LENGTHS)).cumsum(0)
    return (*flattened, whole(device, *starts.tolist()))


def splits(head_dim: int, device: str) -> tuple[Tensor, ...]:
    return normal(3, 2, 20, 4, head_dim).to(device), normal(3, 2, 4, 20, seed=1).to(device)


def whole(device: str, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def in_e4m3(q: Tensor, k: Tensor, v: Tensor) -> Any:
    q8, q_descale = fagen.quantize(q, scales="head")
    k8, k_descale = fagen.quantize(k, scales="head")
    v8, v_descale = fagen.quantize(v, scales="column", layout="columns")
    descales = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return fagen.attention(q8, k8, v8, v_layout="columns", **descales)  # type: ignore[arg-type]


def varlen_in_e4m3(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Any:
    values, descales = zip(
        *(fagen.quantize(x[None], scales="head") for x in (q, k, v)), strict=True
    )
    how = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    return fagen.attention_varlen(*(x[0] for x in values), starts, causal=True, **how)


def e4m3_of_fa3(q: Tensor, k: Tensor, v: Tensor) -> Any:
    values = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    how = dict(q_descale=q.new_full((2, 2), 0.5, dtype=torch.float32), causal=True)
    return fa3.flash_attn_func(*values, window_size=(-1, 0), **how)


def varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Any:
    return fagen.attention_varlen(q, k, v, starts, causal=True)


def varlen_of_fa3(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Any:
    return fa3.flash_attn_varlen_func(q, k, v, starts, starts, 20, 20, causal=True)


def varlen_of_fa3_in_part(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, used: Tensor) -> Any:
    how = dict(seqused_q=used, seqused_k=used, causal=True)
    return fa3.flash_attn_varlen_func(q, k, v, starts, starts, 20, 20, **how)  # type: ignore[arg-type]


def qkvpacked(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return fa3.flash_attn_qkvpacked_func(
        torch.stack([q[:, :, :2], k[:, :20], v[:, :20]], 2), causal=True
    )


def passes(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Both passes of FlashAttention-3 below its calls."""
    out, lse, *_ = fa3._flash_attn_forward(q, k, v)
    gradients = tuple(map(torch.empty_like, (q, k, v)))
    fa3._flash_attn_backward(out, q, k, v, out, lse, *[None] * 6, *gradients, q.shape[-1] ** -0.5)
    return gradients


DOORS = {
    "attention": Door(lambda q, k, v: fagen.attention(q, k, v, causal=True), dense),
    "attention_lse": Door(lambda q, k, v: fagen.attention(q, k, v, return_lse=True), dense),
    "attention_gradients": Door(fagen.attention, dense, gradients=True),
    "attention_in_order": Door(
        lambda q, k, v: fagen.attention(q, k, v, deterministic=True), dense, gradients=True
    ),
    "attention_e4m3": Door(in_e4m3, dense),
    "attention_fp8": Door(fagen.attention_fp8, dense),
    "attention_varlen": Door(varlen, packed),
    "attention_varlen_gradients": Door(varlen, packed, gradients=True),
    "attention_varlen_e4m3": Door(varlen_in_e4m3, packed),
    "attention_decode": Door(lambda q, k, v, _: fagen.attention_decode(q, k, v), few),
    "attention_decode_lengths": Door(
        lambda q, k, v, used: fagen.attention_decode(q, k, v, seqused_k=used), few
    ),
    "quantize": Door(lambda q, k, v: fagen.quantize(q, rotate=True)[1], dense),
    "combine": Door(fagen.combine, splits),
    "flash_attn_func": Door(fa3.flash_attn_func, dense, gradients=True),
    "flash_attn_func_e4m3": Door(e4m3_of_fa3, dense),
    "flash_attn_varlen_func": Door(varlen_of_fa3, packed, gradients=True),
    "flash_attn_varlen_func_in_part": Door(
        varlen_of_fa3_in_part,
        lambda *call: (*packed(*call), whole(call[1], 5, 0, 9)),
        gradients=True,
    ),
    "flash_attn_qkvpacked_func": Door(qkvpacked, dense, gradients=True),
    "flash_attn_forward_and_backward": Door(passes, dense),
    "flash_attn_with_kvcache": Door(
        lambda q, k, v, used: fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used), few
    ),
    "flash_attn_with_kvcache_of_a_number": Door(
        lambda q, k, v, _: fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=30), few
    ),
    "flash_attn_combine": Door(
        lambda out, lse: fa3.flash_attn_combine(out, lse.transpose(-1, -2)), splits
    ),
}
