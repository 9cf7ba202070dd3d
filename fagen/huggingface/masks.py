"""A model's masks as transformers asks for them → which of a kernel's two is meant, and of what."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fagen.huggingface.sequences import Apart, Sequences, begun

SDPA = 'load the model with attn_implementation="sdpa"'
EAGER = 'load the model with attn_implementation="eager"'
DYNAMIC = "use the dynamic cache, which is transformers' default"


@dataclass(frozen=True)
class Mask:
    """Which mask was meant, in the place of a tensor: of a kernel's two, and for which sizes.

    Models make masks of windows that none of their layers have, so a window that hides a key is
    refused by the first layer that comes with it, in the words of `refused`.
    """

    causal: bool  # aligned to the bottom right
    queries: int
    keys: int
    refused: str = ""
    # where each sequence's keys begin and end, (B) in int32 on the device; None: at 0, at the last
    first: Tensor | None = field(default=None, compare=False)
    end: Tensor | None = field(default=None, compare=False)
    # where sequences lie in the rows, if there are several in one
    sequences: Sequences | None = field(default=None, compare=False)
    # what position_ids say of that, once a layer has brought them: the same for all layers
    by_positions: list[Sequences | None] = field(default_factory=list, compare=False)
    ndim = 0  # transformers asks, before it makes a mask of a mask

    def contiguous(self) -> "Mask":
        """Return itself: transformers asks masks for it before a static cache is read."""
        return self


def mask_of(
    plain: dict[Callable[..., Any], bool],
    apart: "Apart",
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | Mask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **_: object,
) -> Mask | Tensor:
    """Return which mask is meant; transformers' arguments behind two that are bound already.

    `plain` says of transformers' own mask functions whether they are causal, and `apart` of what
    one of varlen sequences was put together. Queries are at
    positions q_offset … q_offset + q_length − 1 of the sequence, keys at kv_offset … kv_offset +
    kv_length − 1; `mask_function(batch, head, query, key)` says which see which, `attention_mask`
    (batch, positions) which positions are no padding; where it is read is said at _padding.
    `local_size` is that of a window or chunk in mask_function. What may be skipped says that the
    mask is causal or full where it is not otherwise restricted.

    Over a static cache, which has room for more keys than there are, what is meant is a tensor of
    bounds: see _bounds.

    Raises ValueError for every mask but the two of kernels, and those in a window or a chunk.
    """
    if isinstance(attention_mask, Mask):  # one that was made before a static cache is read
        return attention_mask
    parts = None if is_compiling() or attention_mask is not None else apart(mask_function)
    if parts is not None:
        return _packed(plain, parts, q_length, kv_length, local_size)
    causal: bool | None = None
    if local_size is None:
        causal = plain.get(mask_function) if mask_function else None
    elif allow_is_causal_skip != allow_is_bidirectional_skip:
        causal = allow_is_causal_skip  # in a window or a chunk, which mask_function is asked about
    room = isinstance(q_offset, Tensor)
    if causal and not room:
        beyond = kv_offset + kv_length - q_offset - q_length
        if beyond < 0:
            raise ValueError(
                f"the last of {kv_length} keys is {-beyond} before the last of {q_length} "
                f"queries; {DYNAMIC}"
            )
        room = beyond > 0
    # one query over a static cache sees all keys, but transformers lets no mask of it be skipped
    skippable = allow_is_causal_skip if causal else allow_is_bidirectional_skip
    if causal is None or not (skippable or (causal and room and q_length == 1)):
        traced = (
            ", or one of varlen sequences (position_ids that start again; traced without a cache, "
            "pass an attention_mask of ones)"
            if is_compiling()
            else ""
        )
        raise ValueError(
            "the model asks for a mask of its own, which is neither causal nor full, as where "
            f"tokens such as an image's see each other{traced}. Kernels have no other masks yet; "
            f"{SDPA}"
        )
    if room and (local_size is not None or not causal):
        raise ValueError(
            f"a static cache is read under a {'window' if causal else 'full mask'}, and kernels "
            f"take no such lengths yet: {DYNAMIC}"
        )
    if room:
        ends = torch.zeros(batch_size, dtype=torch.int32, device=device)
        ends += q_offset + q_length - kv_offset
        return _bounds(attention_mask, kv_offset, kv_length, ends)
    first = end = None
    if attention_mask is not None:
        kept = _kept(attention_mask, kv_offset, kv_length)
        if kept.shape[1] < kv_length:
            raise ValueError(
                f"attention_mask ends before the keys do: {attention_mask.shape[1]} positions, "
                f"and {kv_offset + kv_length} of keys; give the mask of all that was seen"
            )
        first, end = _padding(kept, causal=causal, prompt=q_length == kv_length)
    refused = ""
    last_query, last_key = q_offset + q_length - 1, kv_offset + kv_length - 1
    if local_size is not None and max(last_query, last_key) >= local_size:
        farthest = [(last_query, kv_offset)] + ([] if causal else [(q_offset, last_key)])
        if not all(_sees(mask_function, batch_size, *pair) for pair in farthest):
            refused = _hidden(local_size, kv_length)
    return Mask(causal, q_length, kv_length, refused, first, end)


# ---- padding ------------------------------------------------------------------------------------

HOLES = (
    "attention_mask hides keys between others: kernels take padding on either side of a sequence, "
    "tokens follow that on the left alone. Pad prompts on the left "
    f'(tokenizer.padding_side = "left"), or {SDPA}'
)


def _kept(attention_mask: Tensor, kv_offset: int, kv_length: int) -> Tensor:
    """Return which of these keys are no padding, (batch, keys) of bool, as far as the mask goes."""
    if attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask has {attention_mask.ndim} dimensions, and 2 are understood: "
            f"(batch, positions). Kernels have no masks of your own; {SDPA}"
        )
    return attention_mask[:, kv_offset : kv_offset + kv_length].bool()


def _padding(kept: Tensor, *, causal: bool, prompt: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return where each sequence's keys begin and end, (B) in int32; None where all of them do.

    Under a causal mask padding on the right bounds nothing: no token before it sees it, and what
    its own rows hold does not count. The host reads `kept` (B, keys) once for a prompt, and
    wherever torch is asked for gradients, whose kernels of one length are faster; never while a
    CUDA graph is captured.
    """
    first, end, whole = _ends(kept)
    if torch.is_grad_enabled() or (prompt and not capturing(kept)):
        if kept.all():
            return None, None
        if not whole.all():
            raise ValueError(HOLES)
        return None if causal and not first.any() else first, None if causal else end
    _hold(whole, HOLES)
    return first, None if causal else end


def _bounds(
    attention_mask: Tensor | None,
    kv_offset: int,
    kv_length: int,
    ends: Tensor,
) -> Tensor:
    """Return where keys begin and end in a static cache: (2, 1, 1, B) in int32, on the device.

    transformers hands this tensor back, which has 4 dimensions as its own masks, also through a
    compiled model. `ends`, (B) in int32, are those of the last query; nothing is read on the host.
    """
    first = torch.zeros_like(ends)
    if attention_mask is not None:
        kept = _kept(attention_mask, kv_offset, kv_length)
        first, _, whole = _ends(kept)
        _hold(whole, HOLES)
        _hold(
            ends <= kept.shape[1],
            "attention_mask ends before the queries do; give the mask of all that was seen",
        )
    return torch.stack((first, ends))[:, None, None]


def _ends(kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return where each sequence's keys begin and end, and whether none between them is hidden.

    kept (B, keys); (B) each, the first two in int32. Without a key one begins where all end.
    """
    keys = kept.shape[1]
    position = torch.arange(keys, dtype=torch.int32, device=kept.device)
    first = torch.where(kept, position, keys).amin(1)
    end = torch.where(kept, position + 1, 0).amax(1)
    return first, end, kept.sum(1) == (end - first).clamp(min=0)


def _hold(conditions: Tensor, message: str) -> None:
    """Raise ValueError unless all hold: on a GPU and traced an assertion of the device instead."""
    if conditions.device.type == "cpu" and not is_compiling():
        if not conditions.all():
            raise ValueError(message)
    else:
        torch._assert_async(conditions.all(), message)


def capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is captured, so that nothing of x can be read."""
    return bool(x.device.type == "cuda" and torch.cuda.is_current_stream_capturing())


# ---- sequences in one row -----------------------------------------------------------------------


def _packed(
    plain: dict[Callable[..., Any], bool],
    parts: tuple[Any, Tensor],
    queries: int,
    keys: int,
    local_size: int | None,
) -> Mask:
    """Return the mask of varlen sequences; the host reads where they begin.

    Raises ValueError where a sequence's own is none of the two that kernels have.
    """
    function, numbers = parts
    refused, causal = "", plain.get(function)
    first = torch.ones_like(numbers[:, :1], dtype=torch.bool)
    sequences = begun(torch.cat((first, numbers[:, 1:] != numbers[:, :-1]), 1))
    if causal is None and local_size is not None:
        causal = True  # so are all windows and chunks of varlen sequences
        longest = sequences.longest or 0
        if longest > local_size or not _sees(function, 1, longest - 1, 0):
            refused = _hidden(local_size, longest)
    if causal is None:
        raise ValueError(
            "the model asks for varlen sequences (position_ids that start again) under a mask of "
            f"its own, which is neither causal nor full; {SDPA}"
        )
    return Mask(causal, queries, keys, refused, sequences=sequences)


# ---- windows ------------------------------------------------------------------------------------


def _hidden(local_size: int, keys: int) -> str:
    """Why a window or chunk of that size is refused."""
    return (
        f"the model sees no more than {local_size} keys back or in a chunk, and there are {keys}: "
        f"kernels have no such window yet. Up to {local_size} tokens it hides nothing; for more, "
        f"{SDPA}"
    )


def _sees(mask_function: Any, batch_size: int, query: int, key: int) -> bool:
    """Whether a query sees a key, by their positions, in every sequence of the batch."""
    batch = torch.arange(batch_size, device="cpu")
    position = torch.tensor((0, query, key), device="cpu")
    return bool(mask_function(batch, position[0], position[1], position[2]).all())
