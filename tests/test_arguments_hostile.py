"""Every scalar argument of every public call, given what it is not: judged, and by its name."""

import inspect
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import fagen
from fagen import flash_attn_interface
from fagen.errors import FagenError
from tests.public_calls import GOOD
from tests.tensors import ints
from tests.test_argument_types import CALLS, Q

pytestmark = [
    pytest.mark.usefixtures("nothing_is_ready"),
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]

HUGE = 10**5000

# what may be said for True and False, for a whole number and for any number: given, and meant
FLAGS: list[tuple[Any, bool]] = [
    *((0, False), (1, True), (False, False), (True, True)),
    *((numpy.True_, True), (numpy.False_, False), (numpy.int64(1), True)),
]
NO_FLAG = [
    *("False", "True", "", b"1", 2, -1, 10**400, HUGE, 1.0, 0.0, -0.0, 0.5, math.nan, math.inf),
    *(numpy.float32(1), numpy.float64("nan"), Fraction(1), Fraction(1, 2), 1j, object()),
    *(torch.tensor(1), torch.tensor(True), torch.tensor(1.0), torch.tensor([1])),
    *([], [1], (1, 2), {}),
]
NO_WHOLE = [
    *("0", b"1", 1.0, 0.5, math.nan, math.inf, -math.inf, 1e39, numpy.float32(1)),
    *(Fraction(1), Fraction(1, 2), 1j, object(), torch.tensor(1.0), torch.ones(2).int()),
    *([], [1], (1, 2), {}, 10**400, HUGE),
]
NO_SCALE = [
    *("1", b"1", 0, 0.0, -0.0, -1, -0.5, math.nan, math.inf, -math.inf, 1e39, 1e-50, 10**400, HUGE),
    *(numpy.float64("nan"), numpy.float32(0), Fraction(-1, 2), torch.tensor(math.nan)),
    *(torch.ones(2), torch.tensor(1j), 1j, object(), [], [1.0], (1, 2), {}),
]
NO_WORD = [*(0, 1.0, HUGE, math.nan, b"rows", "", "False", object(), [], {}, torch.tensor(1))]

FLAGGED = ("causal", "return_lse", "deterministic", "rotate", "center", "center_k", "center_v",
           "rotary_pairs", "return_attn_probs", "return_softmax_lse", "pack_gqa", "gradient",
           "unified", "rotary_interleaved", "has_softcap", "is_causal")  # fmt: skip
SCALES = ("scale", "softmax_scale", "descale")
WHOLES = ("seed", "num_splits", "sm_margin", "attention_chunk", "scale_rows", "heads", "kv_heads",
          "batch", "queries", "seqlen", "rows", "head_dim", "head_dim_v", "batch_size", "headdim",
          "headdim_v", "num_heads_q", "num_heads_kv", "page_size", "max_seqlen_k_new",
          "seqlen_k", "window_size_left", "window_size_right")  # fmt: skip
WORDS = ("scales", "layout", "v_layout", "out_dtype", "dtype")

MORE: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "quantize by head": (fagen.quantize, dict(x=Q, scales="head", descale=0.5)),
    "pick": (fagen.pick, dict(dtype="fp16", head_dim=64)),
    "get_scheduler_metadata": (
        flash_attn_interface.get_scheduler_metadata,
        dict.fromkeys(
            (
                *("batch_size", "max_seqlen_q", "max_seqlen_k"),
                *("num_heads_q", "num_heads_kv", "headdim"),
            ),
            1,
        )
        | {"cache_seqlens": ints(1)},
    ),
}
MORE |= {name: call for name, call in GOOD.items() if name not in CALLS and "-" not in name}
EVERY = CALLS | MORE
ARGUMENTS = [
    (call, name)
    for call, (function, _) in EVERY.items()
    for name in inspect.signature(function).parameters
    if name in (*FLAGGED, *SCALES, *WHOLES, *WORDS)
    # e4m3's words are refused as such beside other dtypes
    and not (call in ("attention", "attention_varlen") and name in (*WORDS, "scale_rows"))
]


def wrong_for(call: str, name: str) -> list[Any]:
    if name in FLAGGED:
        return NO_FLAG
    if name == "descale":  # which may be a tensor, that nobody reads
        return [x for x in NO_SCALE if not isinstance(x, Tensor)]
    if name == "window_size_left":  # which may be both ends
        return [x for x in NO_WHOLE if not isinstance(x, tuple | Tensor)]
    if call == "pick" and name in WORDS:
        return ["", "False", "fp64"]
    return NO_SCALE if name in SCALES else NO_WHOLE if name in WHOLES else NO_WORD


def names(message: str, name: str) -> bool:
    """Whether a refusal says which argument is meant."""
    spoken = {
        "head_dim_v": "v has head_dim",
        "kv_heads": "multiple of k's",
        "dtype": "one takes fp16, bf16, e4m3",
        "is_causal": "causal",
        "window_size_left": "window_size",
        "window_size_right": "window_size",
    }
    return name in message or spoken.get(name, name) in message


@pytest.mark.parametrize(("call", "name"), ARGUMENTS, ids=map("-".join, ARGUMENTS))
def test_what_an_argument_is_not_is_refused_by_its_name(call, name):
    function, arguments = EVERY[call]
    for wrong in wrong_for(call, name):
        with pytest.raises((TypeError, ValueError, FagenError)) as refusal:
            function(**arguments | {name: wrong})
        assert refusal.type in (TypeError, ValueError) or function is fagen.pick
        if refusal.type is TypeError and function is not fagen.pick:
            assert f" is of type {type(wrong).__name__}; it must be" in str(refusal.value)
        assert names(str(refusal.value), name), (wrong, refusal.value)


@pytest.mark.parametrize(
    ("call", "name"),
    [(call, name) for call, name in ARGUMENTS if name in FLAGGED and call not in MORE],
)
def test_true_and_false_are_so_however_they_are_written(call, name):
    function, arguments = EVERY[call]
    for flag, meant in FLAGS:
        results, expected = (function(**arguments | {name: x}) for x in (flag, meant))
        pairs = zip(
            *((x if isinstance(x, tuple) else (x,)) for x in (results, expected)), strict=True
        )
        assert all(torch.equal(result, other) for result, other in pairs), flag


@pytest.mark.parametrize("call", ["attention", "attention_varlen", "attention_decode"])
def test_a_scale_is_what_it_is_as_a_float32(call):
    function, named = EVERY[call]
    least, most = 2.0**-126, 1e8
    assert torch.equal(function(**named, scale=Fraction(1, 2)), function(**named, scale=0.5))
    for scale in (least, most):
        assert function(**named, scale=scale).isfinite().all()
    # every key counts alike where all scores are 0 to the last bit
    out = function(**named | {"q": named["q"] * 0}, scale=least)
    assert torch.equal(function(**named, scale=least), out)


def test_a_descale_that_has_no_reciprocal_as_a_float32_is_refused():
    for wrong in (1e-50, 1e-40, 2.0**-127, 1e39, 3.5e38):
        with pytest.raises(ValueError, match="finite and above 0 as a float32"):
            fagen.quantize(Q, scales="head", descale=wrong)
    values, descale = fagen.quantize(Q, scales="head", descale=2.0**-126)
    assert descale.eq(2.0**-126).all() and values.float().abs().eq(448).all()
    values, _ = fagen.quantize(Q * 0, scales="head", descale=2.0**-126)
    assert not values.float().any()
    half, also = (fagen.quantize(Q, scales="head", descale=x) for x in (0.5, Fraction(1, 2)))
    assert torch.equal(half.values.float(), also.values.float())


def test_a_call_that_was_ready_judges_as_the_first_did():
    function, arguments = EVERY["attention"]
    function(**arguments, causal=True)
    for wrong in (1.0, Fraction(1), numpy.float32(1)):  # equal to True in any dictionary
        with pytest.raises(TypeError, match="causal is of type"):
            function(**arguments, causal=wrong)
