"""Calls compute the same whatever torch's default dtype and default device are."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from fagen import flash_attn_interface
from fagen.kinds.forward.keys import Schedule
from fagen.kinds.forward.plan import plan
from fagen.kinds.forward.reference import reference
from fagen.kinds.forward.verify.fp8 import fp8_error
from tests.tensors import normal

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def made(dtype: torch.dtype = BF16, batch: int = 2, queries: int = 20, keys: int = 40, d: int = 64):
    shapes = (batch, queries, 4, d), (batch, keys, 2, d), (batch, keys, 2, d)
    return tuple(normal(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes))


Q, K, V = made()
HALVES = made(torch.float16)
Q8, K8, V8 = (fagen.quantize(x, scales="head") for x in (Q, K, V))
OFFSETS_Q = torch.tensor([0, 7, 20], dtype=torch.int32)
OFFSETS_K = torch.tensor([0, 25, 40], dtype=torch.int32)
LENGTHS = torch.tensor([33, 12], dtype=torch.int32)
DESCALES = dict(q_descale=Q8.descale, k_descale=K8.descale, v_descale=V8.descale)
ONE = torch.tensor(1.0)
OUTS, LSES = normal(3, 2, 20, 4, 64), normal(3, 2, 4, 20, seed=1)
TURNS = (normal(40, 32).to(BF16), normal(40, 32, seed=1).to(BF16))


def gradients() -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    out, lse = fagen.attention(*leaves, causal=True, return_lse=True)
    return torch.autograd.grad((out, lse), leaves, (Q, LSES[0]))


def varlen_gradients() -> tuple[Tensor, ...]:
    leaves = [x[0].clone().requires_grad_() for x in (Q, K, V)]
    out = fagen.attention_varlen(*leaves, OFFSETS_Q, OFFSETS_K, causal=True)
    return torch.autograd.grad(out, leaves, Q[0])


def transformers_attention() -> Any:
    from fagen.huggingface import attend

    module = torch.nn.Module()
    module.is_causal = False
    return attend(module, *(x.transpose(1, 2) for x in (Q, K, V)), attention_mask=None)[0]


def judged_fp8() -> Tensor:
    of = plan(Schedule.from_slug("fwd_e4m3_d64_causal_m128n64"))
    from fagen.kinds.forward.emulate import emulate_fp8

    def kernel(given, scale):
        return emulate_fp8(of, *given[:3], scale, *given[3:])

    from fagen.problem import Cell, Problem, Sizes

    cell = Cell(Problem.of(of.schedule), Sizes(2, 4, 2, 20, 40))
    found = fp8_error(of, cell, kernel, *HALVES)
    errors = found.error, found.torch_error, found.lse_error
    return torch.tensor(errors, dtype=torch.float64, device="cpu")


DOORS: dict[str, Callable[[], Any]] = {
    "attention": lambda: fagen.attention(Q, K, V, causal=True, scale=0.1, return_lse=True),
    "attention, fp16": lambda: fagen.attention(*HALVES, return_lse=True),
    "attention, e4m3": lambda: fagen.attention(
        Q8.values, K8.values, V8.values, return_lse=True, **DESCALES
    ),
    "attention, e4m3, no descales": lambda: fagen.attention(
        Q8.values, K8.values, V8.values, q_descale=ONE, k_descale=ONE, v_descale=ONE
    ),
    "attention, split": lambda: fagen.attention(
        Q, K, V, schedule="fwd_bf16_d64_causal_m128n128_split4_q2", causal=True
    ),
    "gradients": gradients,
    "attention_fp8": lambda: fagen.attention_fp8(Q, K, V, causal=True, return_lse=True),
    "attention_varlen": lambda: fagen.attention_varlen(
        Q[0], K[0], V[0], OFFSETS_Q, OFFSETS_K, seqused_k=LENGTHS, return_lse=True
    ),
    "attention_varlen, e4m3": lambda: fagen.attention_varlen(
        *(x.values[0] for x in (Q8, K8, V8)), OFFSETS_Q, OFFSETS_K, return_lse=True, **DESCALES
    ),
    "gradients of attention_varlen": varlen_gradients,
    "attention_decode": lambda: fagen.attention_decode(
        Q[:, :2], K, V, seqused_k=LENGTHS, return_lse=True
    ),
    "attention_decode with a reference": lambda: fagen.attention_decode(
        Q[:, :2], K, V, reference=fagen.reference_for(LSES[0], 40), return_lse=True
    ),
    "reference_for": lambda: fagen.reference_for(LSES[0], 1001),
    "combine": lambda: fagen.combine(OUTS, LSES, out_dtype=BF16),
    "quantize": lambda: fagen.quantize(K, rotate=True, center=True),
    "quantize by column": lambda: fagen.quantize(V, center=True, scales="column", layout="columns"),
    "quantize with a descale": lambda: fagen.quantize(K, scales="tensor", descale=0.0123),
    "quantize with a rotary embedding": lambda: fagen.quantize(K, rotate=True, rotary=TURNS),
    "flash_attn_func": lambda: flash_attn_interface.flash_attn_func(Q, K, V, causal=True),
    "flash_attn_func, e4m3": lambda: flash_attn_interface.flash_attn_func(
        Q8.values, K8.values, V8.values, k_descale=K8.descale, v_descale=V8.descale
    ),
    "flash_attn_varlen_func": lambda: flash_attn_interface.flash_attn_varlen_func(
        Q[0], K[0], V[0], OFFSETS_Q, OFFSETS_K, 13, 25
    ),
    "flash_attn_with_kvcache": lambda: flash_attn_interface.flash_attn_with_kvcache(
        Q[:, :1], K, V, cache_seqlens=LENGTHS, causal=True
    ),
    "flash_attn_with_kvcache, a number": lambda: flash_attn_interface.flash_attn_with_kvcache(
        Q[:, :1], K, V, cache_seqlens=30
    ),
    "flash_attn_combine": lambda: flash_attn_interface.flash_attn_combine(
        OUTS, LSES.transpose(-1, -2).contiguous()
    ),
    "transformers": transformers_attention,
    "the reference": lambda: reference(Q, K, V, mask="causal", scale=0.1),
    "an e4m3 kernel's errors": judged_fp8,
}


def tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [x for x in found if x is not None]


@cache
def usual(door: str) -> list[Tensor]:
    """What a door gives by torch's own defaults."""
    return tensors(DOORS[door]())


@pytest.mark.parametrize("default", [BF16, torch.float16, torch.float64, "meta"], ids=str)
@pytest.mark.parametrize("door", DOORS)
def test_a_call_computes_the_same_bits_whatever_torchs_defaults_are(door, default):
    expected = usual(door)
    before = torch.get_default_dtype()
    try:
        if isinstance(default, torch.dtype):
            torch.set_default_dtype(default)
        else:
            torch.set_default_device(default)
        found = tensors(DOORS[door]())
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.device == other.device
        both = (x.view(torch.uint8) if x.dtype == E4M3 else x for x in (one, other))
        assert torch.equal(*both)
