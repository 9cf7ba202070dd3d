"""A model's masks and tensors as transformers hands them over → fagen's calls, or a refusal.

transformers calls two functions of an attention implementation: one makes the masks, once for all
layers, and the other attends, in each layer. Here the first makes no mask but tells which of the
two that kernels have, causal or full, was meant, and where each sequence's keys begin and end; what
is neither is refused. So no call that should have been masked ever runs without its mask.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fagen.errors import ToolchainError
from fagen.runtime import autocast
from fagen.runtime.arguments import needs_gradient
from fagen.runtime.attention import attention
from fagen.runtime.cache import attention_cache
from fagen.runtime.decode import prepare_decode

NAME = "fagen"
OLDEST = "5.4"  # the first transformers that tells a mask function where the queries begin

SDPA = 'load the model with attn_implementation="sdpa"'
EAGER = 'load the model with attn_implementation="eager"'
DYNAMIC = "use the dynamic cache, which is transformers' default"

# What layers pass on beside the tensors and what changes nothing of what is computed.
HARMLESS = frozenset({
    *("cache_position", "logits_to_keep", "num_items_in_batch"),
    *("output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings"),
    *("position_ids", "return_dict", "use_cache"),
})  # fmt: skip

# What else layers are known to pass, and what it asks for.
PACKED = "sequences packed into one row are fagen.attention_varlen's, which models do not call yet"
UNSUPPORTED = {
    "softcap": "no kernel caps scores",
    "s_aux": "no kernel has attention sinks",
    "sinks": "no kernel has attention sinks",
    "position_bias": "no kernel adds a bias to scores",
    "cache": "no kernel reads a paged cache",
    "indices": "no kernel attends to chosen keys alone",
    "block_indices": "no kernel attends to chosen keys alone",
    "output_attentions": "a fused kernel never has the attention weights",
    "cu_seq_lens_q": PACKED,
    "cu_seq_lens_k": PACKED,
    "max_length_q": PACKED,
    "max_length_k": PACKED,
    "seq_idx": PACKED,
}


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
    ndim = 0  # transformers asks, before it makes a mask of a mask

    def contiguous(self) -> "Mask":
        """Return itself: transformers asks masks for it before a static cache is read."""
        return self


def register() -> None:
    """Make "fagen" an attn_implementation of transformers' models, in this process.

    Calls of it are as of fagen.attention and fagen.attention_decode: fp16 or bf16. A mask that no
    kernel has, an argument that no kernel takes and one that fagen does not know are refused with a
    ValueError when the model is called. Registering again changes nothing.

    Raises ModuleNotFoundError without transformers, ToolchainError where it is older than 5.4.
    """
    import transformers

    try:
        from transformers import masking_utils

        known = "q_offset" in inspect.signature(masking_utils.sdpa_mask).parameters
    except ImportError:
        known = False
    if not known:
        raise ToolchainError(
            f"transformers is {transformers.__version__}, and fagen needs {OLDEST} or later: "
            "python -m pip install --upgrade transformers"
        )
    plain = {
        masking_utils.causal_mask_function: True,
        masking_utils.bidirectional_mask_function: False,
    }
    transformers.AttentionMaskInterface.register(NAME, partial(mask_of, plain))
    transformers.AttentionInterface.register(NAME, attend)


def mask_of(
    plain: dict[Callable[..., Any], bool],
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
    """Return which mask is meant; transformers' arguments, of which the first is bound already.

    `plain` says of transformers' own mask functions whether they are causal. Queries are at
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
            "; traced without a cache, pass an attention_mask of ones" if is_compiling() else ""
        )
        raise ValueError(
            "the model asks for a mask of its own, which is neither causal nor full: packed "
            f"sequences (position_ids that start again{traced}), or tokens such as an image's that "
            f"see each other. Kernels have no other masks yet; {SDPA}"
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
            refused = (
                f"the model sees no more than {local_size} keys back or in a chunk, and there are "
                f"{kv_length}: kernels have no such window yet. Up to {local_size} tokens it "
                f"hides nothing; for more, {SDPA}"
            )
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
    wherever torch is asked for gradients, which kernels of lengths have not; never while a CUDA
    graph is captured.
    """
    first, end, whole = _ends(kept)
    if torch.is_grad_enabled() or (prompt and not _capturing(kept)):
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


def _hold(conditions: Tensor, said: str) -> None:
    """Raise ValueError unless all hold: on a GPU and traced an assertion of the device instead."""
    if conditions.device.type == "cpu" and not is_compiling():
        if not conditions.all():
            raise ValueError(said)
    else:
        torch._assert_async(conditions.all(), said)


def _capturing(x: Tensor) -> bool:
    return bool(x.device.type == "cuda" and torch.cuda.is_current_stream_capturing())


# ---- windows ------------------------------------------------------------------------------------


def _sees(mask_function: Any, batch_size: int, query: int, key: int) -> bool:
    """Whether a query sees a key, by their positions, in every sequence of the batch."""
    batch, position = torch.arange(batch_size), torch.tensor((0, query, key))
    return bool(mask_function(batch, position[0], position[1], position[2]).all())


# ---- attention ----------------------------------------------------------------------------------


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    deterministic: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Compute a layer's attention, for transformers: out (B, Sq, H, Dv), and no weights.

    query (B, H, Sq, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv). `attention_mask` is what
    mask_of(…) gave. None, from a model that made no mask, is taken where its layer says that it is
    not causal, or there is one query; else other implementations differ in what they compute.
    With deterministic gradients have the same bits in each pass.

    A prompt without padding is attended by fagen.attention, all else as a cache is: few queries by
    fagen.attention_decode, many by fagen.attention_varlen. What rows of padding hold is left open.

    Raises ValueError for a mask or an argument that no kernel takes, and as those do.
    """
    if torch.jit.is_tracing():
        raise ValueError(
            "torch.jit.trace would record that this call needs no mask, and no later one would be "
            "asked: use torch.compile or torch.export"
        )
    queries, keys, layer = query.shape[2], key.shape[2], type(module).__name__
    _refuse_arguments(others)
    if dropout != 0:
        raise ValueError(
            f"attention has a dropout of {dropout}, which no kernel has: call model.eval(), or set "
            "the configuration's attention_dropout to 0"
        )
    query, key, value = autocast.cast(query, key, value)
    if query.dtype == torch.float32:
        raise ValueError(
            "the model computes attention in float32: load it with dtype=torch.bfloat16, or "
            "float16, or call it under torch.autocast"
        )
    causal, first, end = _meant(module, attention_mask, queries, keys, is_causal)
    if sliding_window is not None and keys > sliding_window:
        raise ValueError(
            f"{layer} has a window of {sliding_window} keys, and there are {keys}: kernels have no "
            f"windows yet; {SDPA}"
        )
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    # layers may be spread over several GPUs; on the mask's own one nothing is moved
    first, end = (each if each is None else each.to(q.device) for each in (first, end))
    gradient = torch.is_grad_enabled() and needs_gradient(q, k, v)
    if first is None and end is None and (gradient or queries == keys):
        out = attention(q, k, v, causal=causal, scale=scaling, deterministic=bool(deterministic))
    elif gradient:
        raise ValueError(
            "padding has no gradients yet, but on the right under a causal mask, and a static "
            f"cache has none: call the model under torch.no_grad(), or {SDPA}"
        )
    else:
        if end is not None and queries > 1 and causal and not is_compiling():
            _ready_decode(q, k, v)  # what follows the prompt may be compiled
        out = attention_cache(q, k, v, seqused_k=end, leftpad_k=first, causal=causal, scale=scaling)
    assert isinstance(out, Tensor)
    return out, None


def _ready_decode(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Ready the kernel of the tokens that follow, one at a time."""
    batch, _, heads, head_dim = q.shape
    prepare_decode(
        dtype=q.dtype,
        head_dim=head_dim,
        head_dim_v=v.shape[3],
        heads=heads,
        kv_heads=k.shape[2],
        batch=batch,
        device=q.device,
    )


def _meant(
    module: torch.nn.Module,
    mask: Mask | Tensor | None,
    queries: int,
    keys: int,
    is_causal: bool | None,
) -> tuple[bool, Tensor | None, Tensor | None]:
    """Return whether a layer's mask is causal, and where each sequence's keys begin and end.

    Raises ValueError for a mask that is not of these queries and keys, or that is none of kernels.
    """
    layer = type(module).__name__
    if mask is None:
        told = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if told and queries != 1:
            raise ValueError(
                f"{layer} is causal and was given no mask, nor did the model ask fagen for one, so "
                f"which keys its {queries} queries may see is open; {SDPA}"
            )
        return False, None, None
    if isinstance(mask, Tensor):
        if mask.dtype != torch.int32 or mask.shape[:3] != (2, 1, 1):
            raise ValueError(
                f"attention_mask is a tensor of shape {tuple(mask.shape)}: kernels have no masks "
                f"of your own. Leave the mask out or give it as (batch, positions); or {SDPA}"
            )
        found = True, mask[0].flatten(), mask[1].flatten()
    else:
        if mask.refused:
            raise ValueError(mask.refused)
        if (mask.queries, mask.keys) != (queries, keys):
            raise ValueError(
                f"the mask is for {mask.queries} queries and {mask.keys} keys, and {layer} has "
                f"{queries} and {keys}; {DYNAMIC}"
            )
        found = mask.causal, mask.first, mask.end
    if is_causal is not None and is_causal != found[0] and queries != 1:
        raise ValueError(
            f"the mask is {'causal' if found[0] else 'full'}, and {layer} says is_causal = "
            f"{is_causal}; which is meant is open; {EAGER}"
        )
    return found


def _refuse_arguments(others: dict[str, object]) -> None:
    """Refuse what a layer passed beside its tensors, where it may change what is computed."""
    for name, given in others.items():
        if name in HARMLESS or given is None or given is False:
            continue
        why = UNSUPPORTED.get(name, "fagen does not know what it changes")
        raise ValueError(f"attention is given {name}: {why}; leave it out, or {EAGER}")
