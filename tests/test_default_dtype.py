"""Calls compute the same whatever torch's default dtype and default device are."""

from functools import cache, partial

import pytest
import torch

import fagen
from fagen import flash_attn_interface
from fagen.kinds.forward.emulate import emulate_fp8
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.plan import plan
from fagen.kinds.forward.verify.fp8 import fp8_error
from fagen.problem import Cell, Problem, Sizes
from tests.doors import DOORS, dense, flat
from tests.tensors import normal

E4M3 = torch.float8_e4m3fn
Q, K, V = dense(64, "cpu")
HALVES = tuple(x.half() for x in (Q, K, V))
VALUES, DESCALES = zip(*(fagen.quantize(x, scales="head") for x in (Q, K, V)), strict=True)
ONE = torch.tensor(1.0)
LSE = normal(2, 4, 20, seed=1)
TURNS = (normal(40, 32).bfloat16(), normal(40, 32, seed=1).bfloat16())


def transformers_attention():
    from fagen.huggingface import attend

    module = torch.nn.Module()
    module.is_causal = False
    return attend(module, *(x.transpose(1, 2) for x in (Q, K, V)), attention_mask=None)[0]


def judged_fp8():
    planned = plan(Schedule.from_slug("fwd_e4m3_d64_causal_m128n64"))

    def kernel(arguments, scale):
        return emulate_fp8(planned, *arguments[:3], scale, *arguments[3:])

    cell = Cell(Problem.of(planned.schedule), Sizes(2, 4, 2, 20, 40))
    results = fp8_error(planned, cell, kernel, *HALVES)
    errors = results.error, results.torch_error, results.lse_error
    return torch.tensor(errors, dtype=torch.float64, device="cpu")


CALLS = {name: partial(door.results, door.made()) for name, door in DOORS.items()} | {
    "attention, fp16": lambda: fagen.attention(*HALVES, return_lse=True),
    "attention, e4m3, no descales": lambda: fagen.attention(
        *VALUES, q_descale=ONE, k_descale=ONE, v_descale=ONE
    ),
    "attention, split": lambda: fagen.attention(
        Q, K, V, schedule="fwd_bf16_d64_causal_m128n128_split4_q2", causal=True
    ),
    "attention_decode with a reference": lambda: fagen.attention_decode(
        Q[:, :2], K, V, reference=fagen.reference_for(LSE, 40), return_lse=True
    ),
    "reference_for": lambda: fagen.reference_for(LSE, 1001),
    "quantize": lambda: fagen.quantize(K, rotate=True, center=True),
    "quantize by column": lambda: fagen.quantize(V, center=True, scales="column", layout="columns"),
    "quantize with a descale": lambda: fagen.quantize(K, scales="tensor", descale=0.0123),
    "quantize with a rotary embedding": lambda: fagen.quantize(K, rotate=True, rotary=TURNS),
    "flash_attn_func, e4m3": lambda: flash_attn_interface.flash_attn_func(
        *VALUES, k_descale=DESCALES[1], v_descale=DESCALES[2]
    ),
    "transformers": transformers_attention,
    "the reference": lambda: reference(Q, K, V, mask="causal", scale=0.1),
    "an e4m3 kernel's errors": judged_fp8,
}


@cache
def usual(call):
    """What a call gives by torch's own defaults."""
    return [x for x in flat(CALLS[call]()) if x is not None]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64, "meta"], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_computes_the_same_bits_whatever_torchs_defaults_are(call, default):
    expected = usual(call)
    before = torch.get_default_dtype()
    try:
        if isinstance(default, torch.dtype):
            torch.set_default_dtype(default)
        else:
            torch.set_default_device(default)
        results = [x for x in flat(CALLS[call]()) if x is not None]
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    for result, other in zip(results, expected, strict=True):
        assert result.dtype == other.dtype and result.device == other.device
        both = (x.view(torch.uint8) if x.dtype == E4M3 else x for x in (result, other))
        assert torch.equal(*both)
