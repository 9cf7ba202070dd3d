"""A model's masks as transformers asks for them → which of kernels' is meant, and of which keys."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fagen.huggingface.functions import Functions, Meaning
from fagen.huggingface.sequences import Sequences, begun

SDPA = 'load the model with attn_implementation="sdpa"'
EAGER = 'load the model with attn_implementation="eager"'
DYNAMIC = "use the dynamic cache, which is transformers' default"

Window = tuple[int, int | None]  # so many keys before a query's own and behind it; None: all


@dataclass(frozen=True)
class Mask:
    """Which mask was meant, in the place of a tensor: of those of kernels, and for which sizes.

    Models make masks that none of their layers have, so one that no kernel has is refused by the
    first layer that comes with it, in the words of `refused`.
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
    # what hides a key that the above does not; chunks are counted from where keys begin
    window: Window | None = None
    chunk: int | None = None
    width: int | None = field(default=None, compare=False)  # of the model's window, if it has one
    # or which keys each query sees: the first, and the one behind the last, (B, queries) in int32
    spans: tuple[Tensor, Tensor] | None = field(default=None, compare=False)
    ndim = 0  # transformers asks, before it makes a mask of a mask

    def contiguous(self) -> "Mask":
        """Return itself: transformers asks masks for it before a static cache is read."""
        return self


def mask_of(
    functions: Functions,
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
    config: object = None,
    **_: object,
) -> Mask | Tensor:
    """Return which mask is meant; transformers' arguments behind one that is bound already.

    `functions` says what transformers' own mask functions mean. Queries are at
    positions q_offset … q_offset + q_length − 1 of the sequence, keys at kv_offset … kv_offset +
    kv_length − 1; `mask_function(batch, head, query, key)` says which see which, `attention_mask`
    (batch, positions) which positions are no padding; where it is read is said at _padding.
    `local_size` is that of a window or chunk in mask_function. What may be skipped says that the
    mask is causal or full where it is not otherwise restricted.

    Over a static cache, which has room for more keys than there are, what is meant is a tensor of
    bounds: see _bounds. What a window or a chunk hides of one query says where its keys begin.

    Raises ValueError for every mask but those of kernels.
    """
    if isinstance(attention_mask, Mask):  # one that was made before a static cache is read
        return attention_mask
    may_skip = allow_is_causal_skip, allow_is_bidirectional_skip
    traced = is_compiling()
    if traced:
        seen = functions.told(mask_function, local_size, may_skip, config)
    else:
        seen = functions.read(mask_function)
    if isinstance(seen, str):
        raise ValueError(_of_its_own(seen, traced))
    if seen.chunk is not None and seen.chunk != local_size:
        raise ValueError(_of_its_own("chunks that are not the model's own", traced))
    if seen.packed is not None:
        if attention_mask is not None:
            raise ValueError(_of_its_own("varlen sequences beside an attention_mask", traced))
        return _packed(seen, q_length, kv_length)
    if seen.blocks is not None:
        if not seen.causal:
            raise ValueError(_of_its_own("blockwise_overlay", traced))
        if (q_offset, q_length) != (kv_offset, kv_length) or kv_offset:
            raise ValueError(
                "the model asks for blocks of tokens that see each other (blockwise_overlay) in a "
                f"piece of a prompt or over a static cache, and fagen has them in whole prompts "
                f"over the dynamic cache; {SDPA}"
            )
        return _spans(seen, batch_size, q_length, attention_mask, device)
    room = isinstance(q_offset, Tensor)
    if seen.causal and not room:
        beyond = kv_offset + kv_length - q_offset - q_length
        if beyond < 0:
            raise ValueError(
                f"the last of {kv_length} keys is {-beyond} before the last of {q_length} "
                f"queries; {DYNAMIC}"
            )
        room = beyond > 0
    # one query over a static cache sees all keys, but transformers lets no mask of it be skipped
    skippable = may_skip[0] if seen.causal else may_skip[1]
    if mask_function in functions.plain and not (
        skippable or (seen.causal and room and q_length == 1)
    ):
        raise ValueError(_of_its_own("one that is to be a tensor", traced))
    if not seen.causal:
        if room:
            raise ValueError(
                "a static cache is read under a full mask, and kernels take no such lengths yet: "
                f"{DYNAMIC}"
            )
        if seen.left is not None and (q_offset, q_length) != (kv_offset, kv_length):
            raise ValueError(
                f"a window to both sides is asked for {q_length} queries and {kv_length} keys, "
                f"and kernels count both from the last; {SDPA}"
            )
    if seen.chunk is not None and kv_offset and q_length > 1:
        # then chunks are counted from the one of the first query, all of which must be there
        at = 0 if isinstance(q_offset, Tensor) else q_offset
        _refuse_missing(seen.chunk, at, kv_offset)
    if room:
        ends = torch.zeros(batch_size, dtype=torch.int32, device=device)
        ends += q_offset + q_length - kv_offset
        return _bounds(seen, attention_mask, q_offset, q_length, kv_offset, kv_length, ends)
    assert isinstance(q_offset, int)
    first = end = None
    if attention_mask is not None:
        kept = _kept(attention_mask, kv_offset, kv_length)
        if kept.shape[1] < kv_length:
            raise ValueError(
                f"attention_mask ends before the keys do: {attention_mask.shape[1]} positions, "
                f"and {kv_offset + kv_length} of keys; give the mask of all that was seen"
            )
        first, end = _padding(kept, causal=seen.causal, prompt=q_length == kv_length)
    window = _window(seen, q_offset + q_length - 1 - kv_offset)
    chunk = seen.chunk if seen.chunk and q_offset + q_length > seen.chunk else None
    begin: int | Tensor = 0
    if window and seen.causal and q_length == 1:
        begin, window = kv_length - 1 - window[0], None
    if chunk:
        begin = _begin_of_chunk(seen, attention_mask, q_offset) - kv_offset
        chunk = None if q_length == 1 else chunk
    if isinstance(begin, Tensor) or begin > 0:
        none = torch.zeros(batch_size, dtype=torch.int32, device=device)
        first = torch.maximum(none if first is None else first, none + begin).int()
    return Mask(
        seen.causal, q_length, kv_length, "", first, end,
        window=window, chunk=chunk, width=seen.width,
    )  # fmt: skip


def _of_its_own(what: str, traced: bool) -> str:
    """Why a mask is refused that is none of kernels."""
    varlen = (
        ", or one of varlen sequences (position_ids that start again; traced without a cache, pass "
        "an attention_mask of ones)"
    )
    return (
        f"the model asks for a mask of its own ({what}), where tokens such as an image's may see "
        f"each other{varlen * traced}. Kernels have no such mask yet; {SDPA}"
    )


# ---- blocks of tokens ---------------------------------------------------------------------------


def _spans(
    seen: Meaning, batch: int, length: int, attention_mask: Tensor | None, device: Any
) -> Mask:
    """Return the mask of a prompt in which tokens of a block see each other: a span of each query.

    Such a block is one run of positions, so what a query sees is one as well, and neither of its
    ends ever falls from one query to the next. Nothing is read on the host but padding.
    """
    assert seen.blocks is not None
    blocks = seen.blocks[:, :length].expand(batch, -1).to(device)
    if blocks.shape[1] < length:
        raise ValueError(f"blocks of tokens end before the prompt does; {SDPA}")
    position = torch.arange(length, dtype=torch.int32, device=device).expand(batch, -1)
    none = blocks < 0
    # the last of a run: from behind, where the number changes
    changes = torch.nn.functional.pad(blocks[:, 1:] != blocks[:, :-1], (0, 1), value=True)
    ends = torch.where(changes, position, length - 1).flip(1).cummin(1).values.flip(1)
    runs = changes & ~none
    numbered = torch.where(runs, blocks, -1).sort(1).values
    again = (numbered[:, 1:] == numbered[:, :-1]) & (numbered[:, 1:] >= 0)
    _hold(~again, "tokens of a block (blockwise_overlay) are not next to each other")
    last = torch.where(none, position, ends) + 1
    first = torch.zeros_like(position)
    if seen.left is not None:
        first = (position - seen.left).clamp(min=0)
    if attention_mask is not None:
        begin, _ = _padding(_kept(attention_mask, 0, length), causal=True, prompt=True)
        first = first if begin is None else torch.maximum(first, begin[:, None])
    spans = first.int().contiguous(), last.int().contiguous()
    return Mask(True, length, length, width=seen.width, spans=spans)


# ---- windows and chunks -------------------------------------------------------------------------


def _window(seen: Meaning, before: int) -> Window | None:
    """Return the window, None where it hides nothing of so many keys before and behind."""
    if seen.left is None and seen.right is None:
        return None
    left = before if seen.left is None else seen.left
    right = before if seen.right is None or seen.causal else seen.right
    if min(left, right) >= before:
        return None
    return left, 0 if seen.causal else seen.right


def _refuse_missing(chunk: int, position: int, missing: int) -> None:
    """Raise ValueError where a chunk's first keys may be missing, of the one of a position."""
    if missing > max(position - chunk + 1, 0):
        raise ValueError(
            f"the first {missing} keys are missing under chunks of {chunk}, so where the first one "
            f"begins is open; {DYNAMIC}"
        )


def _begin_of_chunk(
    seen: Meaning, attention_mask: Tensor | None, position: int | Tensor
) -> int | Tensor:
    """Return at which position the chunk of a position begins, of each sequence if they differ.

    Chunks are counted from the first token that is no padding, as transformers does.
    """
    assert seen.chunk is not None
    origin: int | Tensor = 0
    if attention_mask is not None:
        origin = (attention_mask.cumsum(1) == 0).sum(1) if seen.origin is None else seen.origin
    return position - (position - origin) % seen.chunk


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
    seen: Meaning,
    attention_mask: Tensor | None,
    q_offset: int | Tensor,
    q_length: int,
    kv_offset: int,
    kv_length: int,
    ends: Tensor,
) -> Tensor:
    """Return where keys begin and end in a static cache: (2, W, 1, B) in int32, on the device.

    transformers hands this tensor back, which has 4 dimensions as its own masks, also through a
    compiled model. `ends`, (B) in int32, are those of the last query; nothing is read on the host.
    W says what else hides keys, as the shape of a tensor is known while torch traces: see bounded.
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
    extent = 1
    if seen.left is not None:
        extent = 2 * (seen.left + 1)
        if q_length == 1:
            first = torch.maximum(first, ends - 1 - seen.left)
    elif seen.chunk is not None:
        begin = _begin_of_chunk(seen, attention_mask, q_offset) - kv_offset
        first = torch.maximum(first, torch.zeros_like(ends) + begin).int()
        extent = 1 if q_length == 1 else 2 * seen.chunk + 1
    return torch.stack((first, ends))[:, None, None].expand(-1, extent, -1, -1)


def bounded(mask: Tensor, queries: int, keys: int) -> Mask | None:
    """Return what a tensor of bounds says; None of another tensor.

    Its second extent is 1, or 2 W under a window of W keys, or 2 C + 1 under chunks of C.
    """
    if mask.dtype != torch.int32 or mask.ndim != 4 or (mask.shape[0], mask.shape[2]) != (2, 1):
        return None
    size, is_chunk = divmod(mask.shape[1], 2)
    width = None if is_chunk else size
    hides = queries > 1 and keys > size > 0
    return Mask(
        True, queries, keys, "", mask[0, 0, 0], mask[1, 0, 0],
        window=(size - 1, 0) if width and hides else None,
        chunk=size if is_chunk and hides else None, width=width,
    )  # fmt: skip


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


def _packed(seen: Meaning, queries: int, keys: int) -> Mask:
    """Return the mask of varlen sequences; the host reads where they begin."""
    numbers = seen.packed
    assert numbers is not None
    first = torch.ones_like(numbers[:, :1], dtype=torch.bool)
    sequences = begun(torch.cat((first, numbers[:, 1:] != numbers[:, :-1]), 1))
    longest = sequences.longest or 0
    refused, chunk = "", seen.chunk if seen.chunk and longest > seen.chunk else None
    if seen.chunk and not seen.anew and numbers.shape[1] > seen.chunk:
        refused = (
            "this transformers counts chunks from the row's begin, and kernels from each "
            f"sequence's: python -m pip install --upgrade transformers, or {SDPA}"
        )
    return Mask(
        seen.causal, queries, keys, refused, sequences=sequences,
        window=_window(seen, longest - 1), chunk=chunk, width=seen.width,
    )  # fmt: skip
