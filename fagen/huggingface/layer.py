"""A layer's tensors and what it was told of them in, its attention by fagen's calls out."""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fagen.huggingface.masks import DYNAMIC, EAGER, SDPA, Mask, bounded, capturing
from fagen.huggingface.sequences import Sequences, begun, told_by_offsets
from fagen.runtime import autocast
from fagen.runtime.argument_types import flag
from fagen.runtime.arguments import needs_gradient
from fagen.runtime.attention import attention
from fagen.runtime.cache import attention_cache
from fagen.runtime.decode import prepare_decode
from fagen.runtime.offsets import evenly
from fagen.runtime.varlen import attention_varlen

# What layers pass on beside the tensors and what changes nothing of what is computed.
HARMLESS = frozenset({
    *("cache_position", "logits_to_keep", "num_items_in_batch"),
    *("output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings"),
    *("return_dict", "use_cache"),
})  # fmt: skip

# What else layers are known to pass, and what it asks for.
UNSUPPORTED = {
    "sinks": "fagen knows sinks by the name s_aux",
    "position_bias": "no kernel adds a bias to scores",
    "cache": "no kernel reads a paged cache",
    "indices": "no kernel attends to chosen keys alone",
    "block_indices": "no kernel attends to chosen keys alone",
    "output_attentions": "a fused kernel never has the attention weights",
}


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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    deterministic: bool | None = None,
    position_ids: object = None,
    cu_seq_lens_q: object = None,
    cu_seq_lens_k: object = None,
    max_length_q: object = None,
    max_length_k: object = None,
    seq_idx: object = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Compute a layer's attention, for transformers: out (B, Sq, H, Dv), and no weights.

    query (B, H, Sq, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv). `attention_mask` is what
    mask_of(…) gave. None, from a model that made no mask, is taken where its layer says that it is
    not causal, or there is one query; else other implementations differ in what they compute.
    `softcap` and sinks, which are `s_aux` (H,), are as of fagen's calls. With deterministic
    gradients have the same bits in each pass.

    Sequences that lie one after another in a row are attended by fagen.attention_varlen: those of
    the mask, of cu_seq_lens_q and cu_seq_lens_k, (sequences + 1) over all rows of the batch, or
    those that position_ids tell of. A prompt without padding is attended by fagen.attention, and by
    attention_varlen with it where a gradient is needed; all else as a cache is: few queries by
    fagen.attention_decode, many by attention_varlen. What rows of padding hold is left open.

    Raises ValueError for a mask or an argument that no kernel takes, and as those do.
    """
    if torch.jit.is_tracing():
        raise ValueError(
            "torch.jit.trace would record that this call needs no mask, and no later one would be "
            "asked: use torch.compile or torch.export"
        )
    queries, keys, layer = query.shape[2], key.shape[2], type(module).__name__
    is_causal = None if is_causal is None else flag("is_causal", is_causal)
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
    sequences = told_by_offsets(cu_seq_lens_q, cu_seq_lens_k, max_length_k)
    if sequences is None and isinstance(attention_mask, Mask):
        sequences = attention_mask.sequences or _of_positions(
            attention_mask, position_ids, query.shape[0], queries, keys
        )
    mask = _read(module, attention_mask, queries, keys, is_causal)
    longest = keys if sequences is None or sequences.longest is None else sequences.longest
    hidden = _hidden(layer, mask, sliding_window, longest)
    scores: dict[str, Any] = {} if softcap is None else {"softcap": softcap}
    scores |= {} if s_aux is None else {"sinks": s_aux}
    causal, first, end = mask.causal, mask.first, mask.end
    if seq_idx is not None and sequences is None:
        raise ValueError(
            "attention is given seq_idx alone: cu_seq_lens_q and cu_seq_lens_k say where packed "
            "sequences begin, or position_ids that start again"
        )
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    # layers may be spread over several GPUs; on the mask's own one nothing is moved
    first, end = (offset if offset is None else offset.to(q.device) for offset in (first, end))
    given = (q, k, v) if s_aux is None else (q, k, v, s_aux)
    gradient = torch.is_grad_enabled() and needs_gradient(*given)
    ordered = deterministic is not None and flag("deterministic", deterministic)
    varlen = dict(scale=scaling, deterministic=ordered, causal=causal, **hidden, **scores)
    if sequences is not None:
        if first is not None or end is not None:
            raise ValueError(
                "cu_seq_lens_q is given beside an attention_mask with padding: varlen sequences "
                "have none"
            )
        at_q, at_k = (at.to(q.device) for at in (sequences.at_q, sequences.at_k))
        out = _rows_of(q, k, v, at_q, at_k, **varlen)
    elif mask.spans is not None:
        out = attention(q, k, v, scale=scaling, deterministic=ordered, **hidden, **scores)
    elif first is None and end is None and (gradient or queries == keys):
        out = attention(
            q, k, v, causal=causal, scale=scaling, deterministic=ordered, **hidden, **scores
        )  # fmt: skip
    elif gradient and isinstance(attention_mask, Tensor):
        raise ValueError(
            "a static cache has no gradients: call the model under torch.no_grad(), or with the "
            f"dynamic cache, or {SDPA}"
        )
    elif gradient or (hidden and not causal):
        batch = q.shape[0]
        at_q, at_k = (evenly(batch, rows, q.device) for rows in (queries, keys))
        begin = torch.zeros_like(at_k[1:]) if first is None else first
        used = (keys - begin) if end is None else (end - begin).clamp(min=0)
        at_k = torch.cat((at_k[:-1] + begin, at_k[-1:]))
        if hidden:  # a window is counted from the last query and key: those of padding are none
            at_q, varlen["seqused_q"] = at_k, used
        out = _rows_of(q, k, v, at_q, at_k, seqused_k=used, **varlen)
    else:
        if end is not None and queries > 1 and causal and not is_compiling():
            _ready_decode(q, k, v, scores)  # what follows the prompt may be compiled
        lengths: dict[str, Any] = {"seqused_k": end, "leftpad_k": first}
        out = attention_cache(
            q, k, v, causal=causal, scale=scaling, **lengths, **hidden, **scores
        )  # fmt: skip
    assert isinstance(out, Tensor)
    return out, None


def _rows_of(q: Tensor, k: Tensor, v: Tensor, at_q: Tensor, at_k: Tensor, **how: Any) -> Tensor:
    """Attend within sequences of all rows of a batch: (B, Sq, H, D) and so on."""
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
    out = attention_varlen(flat_q, flat_k, flat_v, at_q, at_k, **how)
    assert isinstance(out, Tensor)
    return out.unflatten(0, q.shape[:2])


def _ready_decode(q: Tensor, k: Tensor, v: Tensor, scores: dict[str, Any]) -> None:
    """Ready the kernel of the tokens that follow, one at a time."""
    batch, _, heads, head_dim = q.shape
    if "sinks" in scores:
        scores = scores | {"sinks": scores["sinks"].dtype}
    prepare_decode(
        dtype=q.dtype,
        head_dim=head_dim,
        head_dim_v=v.shape[3],
        heads=heads,
        kv_heads=k.shape[2],
        batch=batch,
        device=q.device,
        **scores,
    )


def _read(
    module: torch.nn.Module,
    mask: Mask | Tensor | None,
    queries: int,
    keys: int,
    is_causal: bool | None,
) -> Mask:
    """Return which mask a layer has.

    Raises ValueError for a mask that is not of these queries and keys, or that is none of kernels.
    """
    layer = type(module).__name__
    if mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if causal and queries != 1:
            raise ValueError(
                f"{layer} is causal and was given no mask, nor did the model ask fagen for one, so "
                f"which keys its {queries} queries may see is open; {SDPA}"
            )
        return Mask(False, queries, keys)
    if isinstance(mask, Tensor):
        read = bounded(mask, queries, keys)
        if read is None:
            raise ValueError(
                f"attention_mask is a tensor of shape {tuple(mask.shape)}: kernels have no masks "
                f"of your own. Leave the mask out or give it as (batch, positions); or {SDPA}"
            )
    else:
        read = mask
        if (mask.queries, mask.keys) != (queries, keys):
            raise ValueError(
                f"the mask is for {mask.queries} queries and {mask.keys} keys, and {layer} has "
                f"{queries} and {keys}; {DYNAMIC}"
            )
    if is_causal is not None and is_causal != read.causal and queries != 1:
        raise ValueError(
            f"the mask is {'causal' if read.causal else 'full'}, and {layer} says is_causal = "
            f"{is_causal}; which is meant is open; {EAGER}"
        )
    return read


def _hidden(layer: str, mask: Mask, width: int | None, longest: int) -> dict[str, Any]:
    """Return what hides keys of a sequence of so many, as fagen's calls take it.

    `width` is the layer's own word for its window. Raises ValueError where that is not the mask's,
    and where the mask is refused.
    """
    if width is not None and longest > width and width != mask.width:
        has = "none" if mask.width is None else f"one of {mask.width}"
        raise ValueError(
            f"{layer} has a window of {width} keys, there are {longest}, and the mask that the "
            f"model asked for has {has}; which is meant is open; {EAGER}"
        )
    if mask.refused:
        raise ValueError(mask.refused)
    if mask.spans is not None:
        return {"mask": "document", "first": mask.spans[0], "last": mask.spans[1]}
    if mask.chunk is not None and longest > mask.chunk:
        return {"mask": "chunked", "chunk": mask.chunk}
    if mask.window is None:
        return {}
    left, right = mask.window
    far = longest - 1
    behind = not mask.causal and right is not None and far > right
    return {"window": (left, -1 if right is None else right)} if far > left or behind else {}


def _refuse_arguments(others: dict[str, object]) -> None:
    """Refuse what a layer passed beside its tensors, where it may change what is computed."""
    for name, value in others.items():
        if name in HARMLESS or value is None or value is False:
            continue
        why = UNSUPPORTED.get(name, "fagen does not know what it changes")
        raise ValueError(f"attention is given {name}: {why}; leave it out, or {EAGER}")


def _of_positions(
    mask: Mask, position_ids: object, batch: int, queries: int, keys: int
) -> Sequences | None:
    """Return the sequences that position_ids (B or 1, S) tell of, None where there is one a row.

    transformers makes masks of them only without a cache, and leaves them to FlashAttention's
    implementations else. They tell of several where they count on by 1, or start again from where
    the row did: read on the host by the first layer, for all.
    """
    if not isinstance(position_ids, Tensor) or position_ids.ndim != 2 or is_compiling():
        return None
    if queries != keys or queries == 1 or position_ids.shape[1] != queries:
        return None
    if not mask.causal or mask.first is not None or mask.spans is not None:
        return None
    if capturing(position_ids):
        return None
    if not mask.by_positions:
        again = position_ids == position_ids[:, :1]
        on = torch.nn.functional.pad(position_ids.diff() == 1, (1, 0))
        varlen = bool(again[:, 1:].any() and on.any() and (again ^ on).all())
        mask.by_positions.append(begun(again.expand(batch, -1)) if varlen else None)
    return mask.by_positions[0]
