"""FlashAttention-3's arguments in, what fagen's calls take out, or a refusal that names one.

The first argument of what refuses is the function that was called.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fagen.arch import SM90
from fagen.expr.parse import read
from fagen.expr.words import MASKS
from fagen.runtime.argument_types import LEAST_NORMAL, flag, number, whole
from fagen.runtime.arguments import needs_gradient
from fagen.runtime.checks import shape_of

_MOST_SPLITS = 256  # that FlashAttention-3 has
_MOST_SCALE = 1e8  # that kernels take

# of both directions, as there without causal
CHUNKS = read("mask", "k_idx // chunk == q_pos // chunk", {"chunk": MASKS["chunked"].given[0]})
NO_WINDOW = (-1, -1)  # what calls are declared with: one that leaves it out is not looked at


def readable(x: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous: as it is, or a copy."""
    return x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


def written(name: str, target: Tensor | None, result: Tensor) -> Tensor:
    """Return a result, in the tensor that a caller gave for it, if there is one.

    Raises ValueError where that has another shape or dtype.
    """
    if target is None:
        return result
    if target.shape != result.shape or target.dtype != result.dtype:
        raise ValueError(
            f"{name} has shape {shape_of(target)} in {target.dtype}; it must be "
            f"{shape_of(result)} in {result.dtype}"
        )
    return target.copy_(result)


def lengths_of(
    name: str, lengths: Tensor | None, batch: int, leader: Tensor, called: str
) -> Tensor | None:
    """Return lengths as kernels take them.

    Raises ValueError where they are none of so many sequences, on the device of `leader`, which is
    called so.
    """
    if lengths is None:
        return None
    if lengths.device != leader.device:
        raise ValueError(
            f"{name} is not on the device of {called}; {name}.to({called}.device) moves it there"
        )
    if lengths.shape != (batch,) or lengths.dtype != torch.int32:
        raise ValueError(
            f"{name} has shape {shape_of(lengths)} in {lengths.dtype}; it must be (batch = "
            f"{batch}) in torch.int32"
        )
    return readable(lengths)


# ---- to be judged -------------------------------------------------------------------------------


def refuse_yet(function: str, argument: str, instead: str) -> NoReturn:
    """Raise NotImplementedError for what fagen has no kernels for yet."""
    raise NotImplementedError(f"{function}: {argument} is not there yet in fagen; {instead}")


# What is given where fagen has no kernels for it, and what to do instead.
_INSTEAD = {
    "k": "write it to k_cache first, and count it in cache_seqlens",
    "v": "write it to v_cache first, and count it in cache_seqlens",
    **dict.fromkeys(
        ("rotary_cos", "rotary_sin"), "turn q before, and keys before they are written"
    ),
    "cache_batch_idx": "k_cache[cache_batch_idx] is a copy that is taken",
}


def refuse_given(function: str, **tensors: Tensor | None) -> None:
    """Raise NotImplementedError for the first of these that is given."""
    for name, tensor in tensors.items():
        if tensor is not None:
            refuse_yet(function, name, _INSTEAD.get(name, "None is none"))


def refuse_others(
    function: str,
    qv: Tensor | None,
    attention_chunk: int,
    softcap: float,
    num_splits: int = 1,
    sm_margin: int = 0,
    pack_gqa: bool | None = None,
) -> tuple[int, float]:
    """Raise NotImplementedError for an argument that no function here has kernels for.

    Returns attention_chunk and softcap as numbers, where 0 is none.

    Raises TypeError or ValueError where it is none at all, and for a hint that is none, though
    nobody acts upon it. A number below 0 is no chunk or cap, as there, and any num_splits below 1
    leaves their number to FlashAttention-3.
    """
    if (
        (qv is pack_gqa is None and attention_chunk == 0 and softcap == 0)
        and (type(num_splits) is int and num_splits <= _MOST_SPLITS)
        and sm_margin == 0
    ):
        return 0, 0.0
    refuse_given(function, qv=qv)
    chunk, cap = whole("attention_chunk", attention_chunk), number("softcap", softcap)
    if not math.isfinite(cap):
        raise ValueError(f"softcap is {cap}; it must be finite, and 0.0 is none")
    if pack_gqa is not None:
        flag("pack_gqa", pack_gqa)
    splits, margin = whole("num_splits", num_splits), whole("sm_margin", sm_margin)
    if splits > _MOST_SPLITS:
        raise ValueError(f"num_splits is {splits}; it must be {_MOST_SPLITS} at most")
    if not 0 <= margin < SM90.sm_count:
        raise ValueError(
            f"sm_margin is {margin}; it must be 0 … {SM90.sm_count - 1}: SMs that are left to "
            "others"
        )
    return max(0, chunk), max(0.0, cap)


def scale_of(softmax_scale: Any) -> float | None:
    """Return softmax_scale as fagen takes it.

    Raises TypeError for no number, ValueError for one that is nothing to multiply scores by in
    fp32.
    """
    if softmax_scale is None:
        return None
    scale = (
        softmax_scale if type(softmax_scale) is float else number("softmax_scale", softmax_scale)
    )
    if isinstance(scale, float | int) and not LEAST_NORMAL <= scale <= _MOST_SCALE:
        raise ValueError(
            f"softmax_scale is {scale:g}; it must be finite and above 0 as a float32, and "
            f"{_MOST_SCALE:g} at most"
        )
    return scale


def variant_of(
    function: str,
    window: Any,
    queries: Any,
    keys: Any,
    *,
    causal: bool,
    chunk: int = 0,
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> dict[str, Any]:
    """Return as fagen's calls take it, by name, what is seen and how it is scored, `causal` first.

    A window is two whole numbers, or a tensor of two on the CPU. One that hides nothing between so
    many queries and keys is none.
    """
    if window is NO_WINDOW and not chunk and not softcap and s_aux is None:
        return {"causal": causal}
    causal = causal if causal is False or causal is True else flag("causal", causal)
    how: dict[str, Any] = {"causal": causal}
    if softcap:
        how["softcap"] = softcap
    if s_aux is not None:
        how["sinks"] = s_aux
    if chunk:
        how |= {"mask": "chunked" if causal else CHUNKS, "chunk": chunk}
    if type(window) is tuple and window == (-1, -1):
        return how
    value = window
    if isinstance(window, Tensor):
        if is_compiling() or window.device.type != "cpu":
            refuse_yet(function, "window_size as a tensor", "two numbers are read")
        window = window.tolist()
    try:
        bounds = [whole("window_size", bound) for bound in window]
    except TypeError:
        raise TypeError(
            f"{function}: window_size is of type {type(value).__name__}; it must be a sequence of "
            "two whole numbers"
        ) from None
    if len(bounds) != 2:
        raise ValueError(
            f"window_size is {window!r}; it must be (left, right), where -1 is no bound"
        )
    left, right = bounds
    # a bound within which even the row farthest from it sees all keys on that side is none
    endless_left = left < 0 or left >= keys - 1
    endless_right = right < 0 or right >= queries - 1
    if endless_left and (causal or right == 0):
        how["causal"] = True
    elif not (endless_left and endless_right):
        how["window"] = None if endless_left else left, None if endless_right else right
    return how


def given(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Return those that are there."""
    return tuple([tensor for tensor in tensors if tensor is not None])


def is_variant(how: dict[str, Any]) -> bool:
    """Whether what `variant_of` returns is more than causal, or than nothing."""
    return len(how) > 1


def descales_of(
    q: Tensor, sizes: tuple[int, int, int], q_descale: Tensor | None, *others: Tensor | None
) -> dict[str, Tensor]:
    """Turn descales of q, k and v by KV head into what fagen.attention takes: q's by head, no None.

    `sizes` are B, H and Hk. Raises ValueError for another shape, or where H is no multiple of Hk.
    """
    batch, heads, kv_heads = sizes
    names = "q_descale", "k_descale", "v_descale"
    for name, descale in zip(names, (q_descale, *others), strict=True):
        if descale is not None and descale.shape != (batch, kv_heads):
            raise ValueError(
                f"{name} has shape {shape_of(descale)}; it must be (batch = {batch}, kv_heads = "
                f"{kv_heads}), of q too; fagen.attention and attention_varlen take others"
            )
    if q_descale is not None and heads != kv_heads:
        if kv_heads == 0 or heads % kv_heads != 0:
            raise ValueError(f"heads = {heads} must be a multiple of kv_heads = {kv_heads}")
        if kv_heads == 1 or q_descale.stride(1) == 0:
            q_descale = q_descale[:, :1]  # one for all heads: nothing to copy
        else:
            q_descale = q_descale.repeat_interleave(heads // kv_heads, 1)
    descales = dict(zip(names, (q_descale, *others), strict=True))
    # not kept between calls: it may be of a graph that is captured, or of a trace
    unit = (
        None
        if all(x is not None for x in descales.values())
        else q.new_ones((), dtype=torch.float32)
    )
    return {name: unit if descale is None else descale for name, descale in descales.items()}


# ---- without gradients --------------------------------------------------------------------------


class _Forward(torch.autograd.Function):  # type: ignore[misc]
    """What a call computes where tensors require gradients that no kernel has."""

    @staticmethod
    def forward(ctx: Any, refusal: str, run: Callable[[], Any], *_: Tensor) -> Any:
        ctx.refusal = refusal
        return run()

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> NoReturn:
        raise NotImplementedError(ctx.refusal)


def forward_only(
    refusal: str, tensors: tuple[Tensor, ...], call: Callable[..., Any], *args: Any, **named: Any
) -> Any:
    """Return what a call computes; a backward pass through it is refused, in these words.

    `tensors` are those that may require a gradient. Where torch.compile traces, the call itself has
    to refuse.
    """
    if torch.is_grad_enabled() and needs_gradient(*tensors) and not is_compiling():
        return _Forward.apply(refusal, partial(call, *args, **named), *tensors)
    return call(*args, **named)
