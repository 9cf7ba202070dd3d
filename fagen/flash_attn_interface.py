"""FlashAttention-3's forward calls in, fagen's answers out, in FlashAttention-3's layout.

Code that imports from `flash_attn_interface` runs with `fagen.flash_attn_interface` instead. Names,
order and defaults of arguments are those of FlashAttention-3's module; what fagen has no kernels
for yet raises NotImplementedError, which names the argument or the function.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from fagen.runtime.arguments import E4M3, needs_gradient, refuse_rank
from fagen.runtime.attention import attention
from fagen.runtime.checks import shape_of
from fagen.runtime.varlen import attention_varlen

Refuse = Callable[[str, str], NoReturn]  # an argument; what to do instead


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(softmax_scale · q kᵀ) v, as FlashAttention-3's function of this name does.

    q (B, Sq, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv) in fp16, bf16 or e4m3; H a multiple of
    Hk. softmax_scale is 1/√D if left out. The causal mask is aligned to the bottom right. Of
    tensors whose last dimension is not contiguous a copy is made.

    q_descale, k_descale and v_descale, (B, Hk) each in fp32, are what e4m3 tensors are to be
    multiplied by; that of q is of all query heads of a KV head; None is 1. Beside 16-bit tensors
    they are not read. window_size is (left, right), where a negative number is no bound: windows
    that amount to no mask or to the causal one are taken.

    These change nothing here: pack_gqa, which is about the order of the work; num_splits of 1 or
    less, since the keys of a row are never split; deterministic, since the same call gives the same
    bits anyway, but where a gradient is needed: that of q is a sum in any order.

    Returns out (B, Sq, H, Dv), in q's dtype or of e4m3 in bf16, and with return_attn_probs also the
    log-sum-exp (B, H, Sq) in fp32, natural logarithm: zeros and minus infinity for a row that sees
    no key.

    Raises NotImplementedError for qv, other windows, attention_chunk and softcap above 0,
    num_splits above 1, an sm_margin other than 0, and deterministic where a gradient is needed;
    ValueError for a wrong argument; and what else fagen.attention raises.
    """
    if not q.dim() == k.dim() == v.dim() == 4:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            refuse_rank(name, tensor)
    refuse = partial(_refuse, "flash_attn_func")
    _refuse_missing(refuse, qv, attention_chunk, softcap, num_splits, sm_margin)
    if deterministic and torch.is_grad_enabled() and needs_gradient(q, k, v):
        refuse("a deterministic gradient of q", "without its last bits may differ")
    causal = _is_causal(refuse, window_size, q.shape[1], k.shape[1], causal=causal)
    if q.dtype == E4M3:
        q_descale, k_descale, v_descale = _descales(q, k, q_descale, k_descale, v_descale)
    else:
        q_descale = k_descale = v_descale = None
    return attention(
        q if q.stride(3) == 1 else q.contiguous(),
        k if k.stride(3) == 1 else k.contiguous(),
        v if v.stride(3) == 1 else v.contiguous(),
        causal=causal,
        scale=softmax_scale,
        return_lse=return_attn_probs,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of packed sequences, as FlashAttention-3's function of this name does.

    q (total_q, H, D), k (total_k, Hk, D) and v (total_k, Hk, Dv) in fp16 or bf16; cu_seqlens_q and
    cu_seqlens_k (B + 1), seqused_k (B) in int32; see fagen.attention_varlen. Of tensors whose last
    dimension is not contiguous a copy is made.

    max_seqlen_q and max_seqlen_k only tell which window_size is no window: lengths are read on the
    device. Descales, pack_gqa and num_splits of 1 or less change nothing here, nor does
    deterministic, as of flash_attn_func.

    Returns out (total_q, H, Dv) in q's dtype, and with return_attn_probs also the log-sum-exp (H,
    total_q) in fp32, natural logarithm: zeros and minus infinity for a row that sees no key.

    Raises NotImplementedError for what flash_attn_func has not either, e4m3 and seqused_q;
    ValueError for a wrong argument; and what else fagen.attention_varlen does.
    """
    refuse = partial(_refuse, "flash_attn_varlen_func")
    _refuse_missing(refuse, qv, attention_chunk, softcap, num_splits, sm_margin)
    if seqused_q is not None:
        refuse("seqused_q", "None is none")
    if q.dtype == E4M3:
        refuse("e4m3", "flash_attn_func takes one sequence of it at a time, q[None, begin:end]")
    if deterministic and torch.is_grad_enabled() and needs_gradient(q, k, v):
        refuse("a deterministic gradient of q", "without its last bits may differ")
    return attention_varlen(
        q if q.stride(-1) == 1 else q.contiguous(),
        k if k.stride(-1) == 1 else k.contiguous(),
        v if v.stride(-1) == 1 else v.contiguous(),
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k=seqused_k,
        causal=_is_causal(refuse, window_size, max_seqlen_q, max_seqlen_k, causal=causal),
        scale=softmax_scale,
        return_lse=return_attn_probs,
    )


def _refuse(function: str, argument: str, instead: str) -> NoReturn:
    raise NotImplementedError(f"{function}: {argument} is not there yet in fagen; {instead}")


def _refuse_missing(
    refuse: Refuse,
    qv: Tensor | None,
    attention_chunk: int,
    softcap: float,
    num_splits: int,
    sm_margin: int,
) -> None:
    """Raise NotImplementedError for an argument that no function here has kernels for."""
    if qv is not None:
        refuse("qv", "None is none")
    if attention_chunk > 0:
        refuse(f"attention_chunk = {attention_chunk}", "0 is none")
    if softcap > 0:
        refuse(f"softcap = {softcap}", "0.0 is none")
    if num_splits > 1:
        refuse(f"num_splits = {num_splits}", "with 1 or 0 the same is computed without splits")
    if sm_margin != 0:
        refuse(f"sm_margin = {sm_margin}", "0 is none: a kernel takes all SMs")


def _is_causal(
    refuse: Refuse, window: Sequence[int], queries: int, keys: int, *, causal: bool
) -> bool:
    """Whether a window and `causal` amount to the causal mask; False is no mask.

    Raises NotImplementedError where they are neither.
    """
    left, right = window
    # a bound within which even the row farthest from it sees all keys on that side is none
    endless_left = left < 0 or left >= keys - 1
    endless_right = right < 0 or right >= queries - 1
    if endless_left and (causal or right == 0):
        return True
    if not (endless_left and endless_right):
        refuse(f"window_size = ({left}, {right})", "(-1, -1) is none, and (-1, 0) the causal mask")
    return False


def _descales(
    q: Tensor, k: Tensor, q_descale: Tensor | None, *others: Tensor | None
) -> tuple[Tensor, ...]:
    """Turn descales of q, k and v by KV head into what fagen.attention takes: q's by head, no None.

    Raises ValueError for another shape, or where H is no multiple of Hk.
    """
    (batch, _, heads, _), kv_heads = q.shape, k.shape[2]
    given = q_descale, *others
    for name, descale in zip(("q_descale", "k_descale", "v_descale"), given, strict=True):
        if descale is not None and descale.shape != (batch, kv_heads):
            raise ValueError(
                f"{name} has shape {shape_of(descale)}; it must be (batch = {batch}, kv_heads = "
                f"{kv_heads}), of q too; fagen.attention takes others"
            )
    if q_descale is not None and heads != kv_heads:
        if kv_heads == 0 or heads % kv_heads != 0:
            raise ValueError(f"heads = {heads} must be a multiple of kv_heads = {kv_heads}")
        if kv_heads == 1 or q_descale.stride(1) == 0:
            q_descale = q_descale[:, :1]  # one for all heads: nothing to copy
        else:
            q_descale = q_descale.repeat_interleave(heads // kv_heads, 1)
    made = q_descale, *others
    if all(descale is not None for descale in made):
        return made
    # not kept between calls: it may be of a graph that is captured, or of a trace
    one = q.new_ones((), dtype=torch.float32)
    return tuple(one if descale is None else descale for descale in made)


# ---- of that module, and not there yet ----------------------------------------------------------


def _not_there(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a function of this name that says that it is not there, and what to do instead."""
    said = f"{name} is not there yet in fagen; {instead}"

    def refuse(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(said)

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Raise NotImplementedError: {said}."
    return refuse


flash_attn_qkvpacked_func = _not_there(
    "flash_attn_qkvpacked_func", "flash_attn_func takes *qkv.unbind(-3) without a copy"
)
flash_attn_with_kvcache = _not_there(
    "flash_attn_with_kvcache",
    "fagen.attention_decode takes k_cache, v_cache, and cache_seqlens as seqused_k",
)
flash_attn_combine = _not_there(
    "flash_attn_combine", "fagen.combine computes it; its lses are (splits, batch, heads, seqlen)"
)
get_scheduler_metadata = _not_there(
    "get_scheduler_metadata", "flash_attn_func needs none: leave scheduler_metadata out"
)
