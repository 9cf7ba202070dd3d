"""Keywords of other libraries at fagen's doors: each is answered with what fagen calls it."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fagen
from fagen import flash_attn_interface
from tests.tensors import normal

pytestmark = pytest.mark.usefixtures("nothing_is_ready")

Q = normal(1, 4, 2, 32, dtype=torch.float16)
ROWS, OFFSETS = Q[0], torch.tensor([0, 4], dtype=torch.int32)

GIVEN: dict[Callable[..., Any], tuple[Any, ...]] = {
    fagen.attention: (Q, Q, Q),
    fagen.attention_decode: (Q, Q, Q),
    fagen.attention_fp8: (Q, Q, Q),
    fagen.attention_varlen: (ROWS, ROWS, ROWS, OFFSETS),
    flash_attn_interface.flash_attn_func: (Q, Q, Q),
}


def refused(function: Callable[..., Any], *args: Any, **named: Any) -> str:
    with pytest.raises(TypeError) as refusal:
        function(*args, **named)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("softmax_scale", 0.1, "fagen calls it scale"),
        ("sm_scale", 0.1, "fagen calls it scale"),
        ("is_causal", True, "fagen calls it causal"),
        ("return_softmax_lse", True, "fagen calls it return_lse"),
        ("logits_soft_cap", 15.0, "fagen calls it softcap"),
        ("score_mod", None, "fagen calls it score"),
        ("window_size", (128, 0), "fagen calls it window"),
        ("attn_mask", Q, "not there yet in fagen: masks given as tensors"),
        ("dropout_p", 0.0, "not there yet in fagen: dropout; leave out one of 0.0, or"),
        (
            "alibi_slopes",
            Q,
            "not there yet in fagen: ALiBi, whose slopes are a table",
        ),
        (
            "attn_bias",
            Q,
            "not there yet in fagen: a bias for each query and key, as a",
        ),
        ("kv_indices", OFFSETS, "not there yet in fagen: keys in pages, but for"),
        ("s_aux", Q, "fagen calls it sinks"),
        ("enable_gqa", True, "leave it out, query heads share those of k and v"),
        ("layout", "bhsd", "leave it out, tensors are (batch, seqlen, heads, head_dim)"),
        ("tensor_layout", "HND", "leave it out, tensors are (batch, seqlen, heads, head_dim)"),
        ("shedule", None, "did you mean schedule?"),
        ("wholly_unknown", 1, "it takes q, k, v, "),
    ],
)
@pytest.mark.parametrize("function", [*GIVEN][:4], ids=lambda function: function.__name__)
def test_a_name_of_another_library_is_answered_with_fagens(function, name, value, message):
    words = refused(function, *GIVEN[function], **{name: value})
    assert words.startswith(f"{function.__name__}() takes no {name}: {message}")


def test_what_another_call_takes_is_answered_with_that_call():
    assert "takes no seqused_k: fagen.attention_varlen and fagen.attention_decode take one" in (
        refused(fagen.attention, Q, Q, Q, seqused_k=OFFSETS)
    )
    assert "no cache_seqlens: fagen calls it seqused_k; no soft_cap: fagen calls it softcap" in (
        refused(fagen.attention_decode, Q, Q, Q, cache_seqlens=OFFSETS, soft_cap=1.0)
    )
    func = flash_attn_interface.flash_attn_func
    assert "no scale: fagen calls it softmax_scale" in refused(func, Q, Q, Q, scale=0.1)
    assert "no sinks: fagen calls it s_aux" in refused(func, Q, Q, Q, sinks=Q)
    prepared = refused(fagen.prepare, dtype="fp16", head_dim=32, num_heads=4)
    assert prepared.startswith("prepare() takes no num_heads")


PUBLIC = [
    *(getattr(fagen, name) for name in (
        "attention", "attention_decode", "attention_fp8", "attention_varlen", "combine", "pick",
        "prepare", "prepare_decode", "prepare_varlen", "quantize", "reference_for",
    )),
    *(
        value
        for name, value in vars(flash_attn_interface).items()
        if inspect.isfunction(value) and name.startswith("flash_attn_")
        and value.__module__.startswith(flash_attn_interface.__name__)
    ),
]  # fmt: skip


@pytest.mark.parametrize("function", PUBLIC, ids=lambda function: function.__name__)
def test_every_public_call_answers(function):
    needed = {
        name: Q
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    }
    words = refused(function, **needed, alibi_slopes=Q)
    begins = f"{function.__name__}() takes no alibi_slopes: not there yet in fagen: ALiBi, whose"
    assert words.startswith(begins)
