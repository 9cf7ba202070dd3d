"""FlashAttention-3's arguments in, what fagen's calls take out, or a refusal that names one."""

from collections.abc import Callable, Sequence
from operator import index
from typing import NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fagen.arch import SM90
from fagen.runtime.checks import shape_of

Refuse = Callable[[str, str], NoReturn]  # an argument; what to do instead

_filled_ones: dict[tuple[int, int, torch.device, int], Tensor] = {}
_LONGEST = 2**31 - 1
_KEPT = 64  # a layer after another asks for the same one
_MOST_SPLITS = 256  # that FlashAttention-3 has


def filled(length: int, batch: int, q: Tensor) -> Tensor:
    """Return one length for a whole batch, (B) in int32 on the device of q; kept between calls.

    Raises ValueError where it is no int32.
    """
    if length > _LONGEST or length < -_LONGEST:
        raise ValueError(f"cache_seqlens is {length}, which is no int32")
    on_gpu = q.device.type == "cuda"
    capturing = on_gpu and torch.cuda.is_current_stream_capturing()
    # what a graph reads has to live as long as the graph, and a trace has no numbers
    if is_compiling() or capturing or type(q) is not Tensor:
        return torch.full((batch,), length, dtype=torch.int32, device=q.device)
    stream = torch.cuda.current_stream(q.device).cuda_stream if on_gpu else 0
    key = length, batch, q.device, stream
    if key not in _filled_ones:
        if len(_filled_ones) >= _KEPT:
            _filled_ones.clear()
        _filled_ones[key] = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    return _filled_ones[key]


def lengths_of(name: str, lengths: Tensor | None, k_cache: Tensor) -> Tensor | None:
    """Return lengths as kernels take them.  Raises ValueError where they are none of a cache."""
    if lengths is None:
        return None
    batch = k_cache.shape[0]
    if lengths.device != k_cache.device:
        raise ValueError(
            f"{name} is not on the device of k_cache; {name}.to(k_cache.device) moves it there"
        )
    if lengths.shape != (batch,) or lengths.dtype != torch.int32:
        raise ValueError(
            f"{name} has shape {shape_of(lengths)} in {lengths.dtype}; it must be (batch = "
            f"{batch}) in torch.int32"
        )
    return lengths if lengths.stride(0) == 1 else lengths.contiguous()


def refuse_yet(function: str, argument: str, instead: str) -> NoReturn:
    """Raise NotImplementedError for what fagen has no kernels for yet."""
    raise NotImplementedError(f"{function}: {argument} is not there yet in fagen; {instead}")


def refuse_missing(
    refuse: Refuse,
    qv: Tensor | None,
    attention_chunk: int,
    softcap: float,
) -> None:
    """Raise NotImplementedError for an argument that no function here has kernels for."""
    if qv is not None:
        refuse("qv", "None is none")
    if attention_chunk > 0:
        refuse(f"attention_chunk = {attention_chunk}", "0 is none")
    if softcap > 0:
        refuse(f"softcap = {softcap}", "0.0 is none")


def refuse_wrong_hints(num_splits: int, sm_margin: int) -> None:
    """Raise TypeError or ValueError for a hint that is none, though nobody acts upon it.

    Any num_splits below 1 leaves their number to FlashAttention-3.
    """
    num_splits, sm_margin = index(num_splits), index(sm_margin)  # a word has none
    if num_splits > _MOST_SPLITS:
        raise ValueError(f"num_splits is {num_splits}; it must be {_MOST_SPLITS} at most")
    if not 0 <= sm_margin < SM90.sm_count:
        raise ValueError(
            f"sm_margin is {sm_margin}; it must be 0 … {SM90.sm_count - 1}: multiprocessors that "
            "are left to others"
        )


def is_causal(
    refuse: Refuse, window: Sequence[int], queries: int, keys: int, *, causal: bool
) -> bool:
    """Whether a window and `causal` amount to the causal mask; False is no mask.

    Raises NotImplementedError where they are neither.
    """
    if len(window) != 2:
        raise ValueError(
            f"window_size is {window!r}; it must be (left, right), where -1 is no bound"
        )
    left, right = window
    # a bound within which even the row farthest from it sees all keys on that side is none
    endless_left = left < 0 or left >= keys - 1
    endless_right = right < 0 or right >= queries - 1
    if endless_left and (causal or right == 0):
        return True
    if not (endless_left and endless_right):
        refuse(f"window_size = ({left}, {right})", "(-1, -1) is none, and (-1, 0) the causal mask")
    return False


def descales_of(
    q: Tensor, sizes: tuple[int, int, int], q_descale: Tensor | None, *others: Tensor | None
) -> tuple[Tensor, ...]:
    """Turn descales of q, k and v by KV head into what fagen.attention takes: q's by head, no None.

    `sizes` are B, H and Hk. Raises ValueError for another shape, or where H is no multiple of Hk.
    """
    batch, heads, kv_heads = sizes
    given = q_descale, *others
    for name, descale in zip(("q_descale", "k_descale", "v_descale"), given, strict=True):
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
    made = q_descale, *others
    if all(descale is not None for descale in made):
        return made
    # not kept between calls: it may be of a graph that is captured, or of a trace
    one = q.new_ones((), dtype=torch.float32)
    return tuple(one if descale is None else descale for descale in made)
