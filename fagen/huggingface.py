"""A model's masks and tensors as transformers hands them over → fagen.attention, or a refusal.

transformers calls two functions of an attention implementation: one makes the masks, once for all
layers, and the other attends, in each layer. Here the first makes no mask but tells which of the
two that kernels have, causal or full, was meant; what is neither is refused. So no call that should
have been masked ever runs without its mask.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fagen.errors import ToolchainError
from fagen.runtime.attention import attention

NAME = "fagen"
OLDEST = "5.4"  # the first transformers that tells a mask function where the queries begin

SDPA = 'load the model with attn_implementation="sdpa"'
EAGER = 'load the model with attn_implementation="eager"'
STATIC = (
    "a static cache has room for keys that are not there yet: use the dynamic cache, which is "
    "transformers' default"
)

# What layers pass on beside the tensors and what changes nothing of what is computed.
HARMLESS = frozenset({
    *("cache_position", "deterministic", "logits_to_keep", "num_items_in_batch"),
    *("output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings"),
    *("position_ids", "return_dict", "use_cache"),
})  # fmt: skip

# What else layers are known to pass, and what it asks for.
PACKED = "sequences packed into one row need variable lengths, which no kernel has yet"
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


def register() -> None:
    """Make "fagen" an attn_implementation of transformers' models, in this process.

    Calls of it are as of fagen.attention: fp16 or bf16. A mask that no kernel
    has, an argument that no kernel takes and one that fagen does not know are refused with a
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
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: object,
) -> Mask:
    """Return which mask is meant; transformers' arguments, of which the first is bound already.

    `plain` says of transformers' own mask functions whether they are causal. Queries are at
    positions q_offset … q_offset + q_length − 1 of the sequence, keys at kv_offset … kv_offset +
    kv_length − 1; `mask_function(batch, head, query, key)` says which see which, `attention_mask`
    (batch, positions) which positions are no padding, and is read, which waits for the GPU.
    `local_size` is that of a window or chunk in mask_function. What may be skipped says that the
    mask is causal or full where it is not otherwise restricted.

    Raises ValueError for every mask but the two of kernels, and those in a window or a chunk.
    """
    causal: bool | None = None
    if local_size is None:
        causal = plain.get(mask_function) if mask_function else None
    elif allow_is_causal_skip != allow_is_bidirectional_skip:
        causal = allow_is_causal_skip  # in a window or a chunk, which mask_function is asked about
    if isinstance(q_offset, Tensor) or (causal and q_offset + q_length != kv_offset + kv_length):
        raise ValueError(
            f"the last of {kv_length} keys is not at the position of the last of {q_length} "
            f"queries; {STATIC}"
        )
    skippable = allow_is_causal_skip if causal else allow_is_bidirectional_skip
    if causal is None or not skippable:
        traced = (
            "; traced without a cache, pass an attention_mask of ones" if is_compiling() else ""
        )
        raise ValueError(
            "the model asks for a mask of its own, which is neither causal nor full: packed "
            f"sequences (position_ids that start again{traced}), or tokens such as an image's that "
            f"see each other. Kernels have no other masks yet; {SDPA}"
        )
    if attention_mask is not None:
        _refuse_padding(attention_mask, kv_offset, kv_length)
    last_query, last_key = q_offset + q_length - 1, kv_offset + kv_length - 1
    if local_size is not None and max(last_query, last_key) >= local_size:
        farthest = [(last_query, kv_offset)] + ([] if causal else [(q_offset, last_key)])
        if not all(_sees(mask_function, batch_size, *pair) for pair in farthest):
            refused = (
                f"the model sees no more than {local_size} keys back or in a chunk, and there are "
                f"{kv_length}: kernels have no such window yet. Up to {local_size} tokens it "
                f"hides nothing; for more, {SDPA}"
            )
            return Mask(causal, q_length, kv_length, refused)
    return Mask(causal, q_length, kv_length)


def _refuse_padding(attention_mask: Tensor, kv_offset: int, kv_length: int) -> None:
    """Refuse a mask (batch, positions) that hides one of these keys, or does not reach them."""
    if attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask has {attention_mask.ndim} dimensions, and 2 are understood: "
            f"(batch, positions). Kernels have no masks of your own; {SDPA}"
        )
    kept = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    if kept.shape[1] < kv_length:
        raise ValueError(
            f"attention_mask ends before the keys do: {attention_mask.shape[1]} positions, and "
            f"{kv_offset + kv_length} of keys; {STATIC}, and give the mask of all that was seen"
        )
    if not kept.all():
        padded = [row for row, whole in enumerate(kept.all(1).tolist()) if not whole]
        rows = ", ".join(map(str, padded[:4])) + (", …" if len(padded) > 4 else "")
        raise ValueError(
            f"attention_mask hides {int((~kept).sum())} keys, in {len(padded)} of {kept.shape[0]} "
            f"sequences ({rows}): kernels take no padded batches yet. Call the model with "
            f"sequences of one length at a time, without padding, or {SDPA}"
        )


def _sees(mask_function: Any, batch_size: int, query: int, key: int) -> bool:
    """Whether a query sees a key, by their positions, in every sequence of the batch."""
    batch, position = torch.arange(batch_size), torch.tensor((0, query, key))
    return bool(mask_function(batch, position[0], position[1], position[2]).all())


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
    **others: object,
) -> tuple[Tensor, None]:
    """Compute a layer's attention, for transformers: out (B, Sq, H, Dv), and no weights.

    query (B, H, Sq, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv). `attention_mask` is what
    mask_of(…) gave. None, from a model that made no mask, is taken where its layer says that it is
    not causal, or there is one query; else other implementations differ in what they compute.

    Raises ValueError for a mask or an argument that no kernel takes, and as fagen.attention does.
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
    if query.dtype == torch.float32:
        raise ValueError(
            "the model computes attention in float32: load it with dtype=torch.bfloat16, or float16"
        )
    if attention_mask is None:
        told = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if told and queries != 1:
            raise ValueError(
                f"{layer} is causal and was given no mask, nor did the model ask fagen for one, so "
                f"which keys its {queries} queries may see is open; {SDPA}"
            )
        causal = False
    elif isinstance(attention_mask, Mask):
        if attention_mask.refused:
            raise ValueError(attention_mask.refused)
        causal = attention_mask.causal
        meant = attention_mask.queries, attention_mask.keys
        if meant != (queries, keys):
            raise ValueError(
                f"the mask is for {meant[0]} queries and {meant[1]} keys, and {layer} has "
                f"{queries} and {keys}; {STATIC}"
            )
        if is_causal is not None and is_causal != causal and queries != 1:
            raise ValueError(
                f"the mask is {'causal' if causal else 'full'}, and {layer} says is_causal = "
                f"{is_causal}; which is meant is open; {EAGER}"
            )
    else:
        raise ValueError(
            f"attention_mask is a tensor of shape {tuple(attention_mask.shape)}: kernels have no "
            "masks of your own. Leave the mask out or give it as (batch, positions), where it is "
            f"all ones; or {SDPA}"
        )
    if sliding_window is not None and keys > sliding_window:
        raise ValueError(
            f"{layer} has a window of {sliding_window} keys, and there are {keys}: kernels have no "
            f"windows yet; {SDPA}"
        )
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    out = attention(q, k, v, causal=causal, scale=scaling)
    assert isinstance(out, Tensor)
    return out, None


def _refuse_arguments(others: dict[str, object]) -> None:
    """Refuse what a layer passed beside its tensors, where it may change what is computed."""
    for name, given in others.items():
        if name in HARMLESS or given is None or given is False:
            continue
        why = UNSUPPORTED.get(name, "fagen does not know what it changes")
        raise ValueError(f"attention is given {name}: {why}; leave it out, or {EAGER}")
