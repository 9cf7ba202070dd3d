"""A keyword that a public call does not have, in; the TypeError that says what fagen calls it, out.

Who comes from another library brings its names. Python refuses these without a hint, and nothing
here runs unless it would.
"""

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, NoReturn

# Names that libraries have for one thing: a call that has one of a row is told by that one.
_ALIKE = (
    ("q", "query", "queries", "query_states"),
    ("k", "key", "k_cache", "keys", "key_states"),
    ("v", "value", "v_cache", "values", "value_states"),
    ("scale", "softmax_scale", "sm_scale", "scaling", "attn_scale", "scale_qk"),
    ("causal", "is_causal", "use_causal_mask"),
    ("return_lse", "return_softmax_lse", "return_attn_probs", "return_softmax", "get_lse"),
    ("cu_seqlens_q", "cu_seqlens", "cu_seq_lens_q", "cu_seqlens_qo", "qo_indptr", "cu_seq_q"),
    ("cu_seqlens_k", "cu_seqlens_kv", "cu_seq_lens_k", "kv_indptr", "cu_seq_k"),
    ("max_seqlen_q", "max_seqlen", "max_length_q", "max_q"),
    ("max_seqlen_k", "max_seqlen_kv", "max_length_k", "max_k"),
    ("seqused_k", "cache_seqlens", "context_lens", "seq_lens", "seqlens_k", "kv_seq_lens"),
    ("seqused_q", "sequed_q"),
    ("leftpad_k", "cache_leftpad"),
    ("block_table", "block_tables", "page_table"),
    ("q_descale", "descale_q", "q_scale"),
    ("k_descale", "descale_k", "k_scale"),
    ("v_descale", "descale_v", "v_scale"),
    ("out_dtype", "output_dtype"),
    ("deterministic", "is_deterministic"),
    ("heads", "num_heads", "num_qo_heads", "num_heads_q", "nheads"),
    ("kv_heads", "num_kv_heads", "num_heads_kv", "num_key_value_heads", "nheads_k"),
    ("head_dim", "headdim", "head_size", "d"),
    ("head_dim_v", "headdim_v", "head_dim_vo", "dv"),
    ("seqlen", "seq_len", "max_seq_len"),
    ("batch", "batch_size"),
    ("window", "window_size", "sliding_window", "attention_window"),
    ("mask", "mask_mod", "mask_function"),
    ("score", "score_mod", "logits_transform"),
    (
        "softcap",
        "logits_soft_cap",
        "logit_cap",
        "soft_cap",
        "softcapping",
        "attn_logit_softcapping",
    ),
    ("sinks", "s_aux", "sink", "learnable_sink", "attn_sink", "attention_sinks"),
)

_MASKS = (
    "masks given as tensors; mask is a word, a text or a function, padding is seqused_k of "
    "attention_varlen and attention_decode"
)
_TORCHS = "torch.nn.functional.scaled_dot_product_attention"
_BIAS = (
    "a bias for each query and key, as a tensor; score takes one that is a text of positions, and "
    f"{_TORCHS} a tensor as attn_mask"
)
_ALIBI = (
    "ALiBi, whose slopes are a table of heads; one slope for all heads is a score: "
    '"score - slope * (q_pos - k_idx)"'
)
_PAGED = "keys in pages, but for fagen.attention_decode, which takes a block_table"
_DROPOUT = f"dropout; leave out one of 0.0, or call {_TORCHS}, which has dropout_p"

# What no call has, and nothing computes yet.
_NOT_YET = {
    **dict.fromkeys(("attn_mask", "attention_mask", "block_mask"), _MASKS),
    **dict.fromkeys(("custom_mask", "key_padding_mask", "packed_custom_mask"), _MASKS),
    **dict.fromkeys(("attn_bias", "bias", "position_bias", "pair_bias"), _BIAS),
    **dict.fromkeys(("alibi_slopes", "alibi", "slopes"), _ALIBI),
    **dict.fromkeys(("dropout_p", "dropout", "p_dropout", "dropout_rate"), _DROPOUT),
    **dict.fromkeys(("block_table", "block_tables", "page_table", "kv_indices"), _PAGED),
    "cache_batch_idx": "caches in another order than queries; k[cache_batch_idx] is a copy",
    "qv": "a second product of scores",
    **dict.fromkeys(("rotary_cos", "rotary_sin"), "rotary embeddings; fagen.quantize has them"),
}

_ROWS = (
    "tensors are (batch, seqlen, heads, head_dim), of attention_varlen (total, heads, head_dim), "
    "and x.transpose(1, 2) of (batch, heads, seqlen, head_dim) is taken without a copy"
)
# What is said by another argument, in another form.
_OTHERWISE = {
    **dict.fromkeys(("window_left", "window_size_left"), "window=(left, right)"),
    **dict.fromkeys(("window_right", "window_size_right"), "window=(left, right)"),
    **dict.fromkeys(("attention_chunk", "chunk_size", "chunk"), 'mask="chunked", chunk=…'),
    **dict.fromkeys(("prefix", "prefix_lengths", "prefix_lens"), 'mask="prefix", prefix=…'),
}
_SIZES = "sizes alone say how the work is shared out"

# What there is nothing to say about: it is so anyway, or of no meaning here.
_NEEDLESS = {
    "enable_gqa": "query heads share those of k and v wherever there are more of them",
    **dict.fromkeys(("layout", "tensor_layout", "qkv_format", "kv_layout", "input_layout"), _ROWS),
    **dict.fromkeys(("num_splits", "pack_gqa", "sm_margin", "gqa_parallel"), _SIZES),
    **dict.fromkeys(("scheduler_metadata", "backend", "use_tensor_cores"), _SIZES),
    "need_weights": "a fused kernel never has the attention weights",
    "training": "whether gradients are needed, tensors and torch.no_grad() say",
}


def refuse_unknown_names(function: Callable[..., Any], unknown: Iterable[str]) -> NoReturn:
    """Raise TypeError for keywords that a call does not have, with what they are called here."""
    accepted = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    called = function.__name__
    answers = "; ".join(f"no {name}: {_told(name, accepted, called)}" for name in unknown)
    raise TypeError(f"{called}() takes {answers}")


def _told(name: str, accepted: list[str], called: str) -> str:
    """What to write instead of a name, or why there is nothing."""
    rows = [row for row in _ALIKE if name in row]
    for alias in (alias for row in rows for alias in row if alias in accepted):
        return f"fagen calls it {alias}"
    if name in _OTHERWISE and "mask" in accepted:
        return f"fagen has {_OTHERWISE[name]}"
    if name in _NOT_YET:
        return f"not there yet in fagen: {_NOT_YET[name]}"
    if name in _NEEDLESS:
        return f"leave it out, {_NEEDLESS[name]}"
    alike = {name, *(other for row in rows for other in row)}
    others = [call for call, names in _of_other_calls().items() if alike & names and call != called]
    if others:
        return f"{' and '.join(others[:2])} {'take' if len(others) > 1 else 'takes'} one"
    near = get_close_matches(name, accepted, 1)
    return f"did you mean {near[0]}?" if near else f"it takes {', '.join(accepted)}"


def _of_other_calls() -> dict[str, set[str]]:
    """The arguments of fagen's calls on tensors, by name."""
    import fagen

    calls = ("attention", "attention_varlen", "attention_decode", "attention_fp8")
    return {
        f"fagen.{call}": {*inspect.signature(getattr(fagen, call)).parameters} for call in calls
    }
