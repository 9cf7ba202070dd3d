"""Every public call with arguments that it takes, by its name; behind a dash others of it."""

from collections.abc import Callable
from typing import Any

import torch

import fagen
from fagen import flash_attn_interface as fa3
from tests.attention_helpers import qkv, quantised
from tests.tensors import ints, normal
from tests.varlen_helpers import packed, packed8

E4M3, HALF = torch.float8_e4m3fn, torch.float16

DENSE = dict(zip("qkv", qkv(), strict=True))
(Q8, K8, V8), HOW = quantised()
AT = "cu_seqlens_q", "cu_seqlens_k"
VARLEN = dict(zip((*"qkv", *AT), packed(), strict=True))
USED = dict(seqused_k=ints(5, 3, 20, 0, 0, 32))
OF_E4M3 = packed8()
VARLEN8 = dict(zip((*"qkv", *AT), OF_E4M3.tensors, strict=True))
ONE_LENGTH = normal(2, 5, 4, 64, dtype=HALF)
FEW = {
    name: normal(2, rows, 8, 64, seed=i, dtype=HALF)
    for i, (name, rows) in enumerate((("q", 1), ("k", 70), ("v", 70)))
} | dict(seqused_k=ints(70, 33), leftpad_k=ints(0, 1))
CACHES = {
    name: normal(3, rows, heads, 64, seed=i, dtype=HALF)
    for i, (name, rows, heads) in enumerate((("q", 3, 8), ("k_cache", 90, 2), ("v_cache", 90, 2)))
} | dict(cache_seqlens=ints(90, 41, 0), cache_leftpad=ints(5, 0, 12))
OUTS, LSES = normal(3, 2, 5, 4, 32), normal(3, 2, 4, 5, seed=1)
SPLITS = dict(outs=OUTS[:, 0], lses=LSES[:, 0], num_splits=ints(1, 3), cu_seqlens=ints(0, 2, 5))
FA3_8 = {n: normal(2, s, h, 64, seed=i).to(E4M3) for i, (n, s, h) in enumerate(
    (("q", 40, 6), ("k", 100, 3), ("v", 100, 3))
)} | {"q_descale": torch.ones(2, 3)}  # fmt: skip
LONGEST = dict(max_seqlen_q=70, max_seqlen_k=130)
PASSES = dict.fromkeys(("dout", "q", "k", "v", "out"), ONE_LENGTH)
PREPARED = dict(dtype="fp16", head_dim=64, device="cpu")

GOOD: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "attention": (fagen.attention, DENSE),
    "e4m3": (fagen.attention, dict(q=Q8, k=K8, v=V8) | HOW),
    "attention_fp8": (fagen.attention_fp8, DENSE),
    "attention_varlen": (fagen.attention_varlen, VARLEN | USED),
    "attention_varlen-e4m3": (fagen.attention_varlen, VARLEN8 | OF_E4M3.named),
    "attention_decode": (fagen.attention_decode, FEW),
    "combine": (fagen.combine, dict(outs=OUTS, lses=LSES)),
    "combine-varlen": (fagen.combine, SPLITS),
    "quantize": (fagen.quantize, dict(x=DENSE["q"])),
    "reference_for": (fagen.reference_for, dict(lse=normal(2, 4, 5))),
    "prepare": (fagen.prepare, PREPARED),
    "prepare_varlen": (fagen.prepare_varlen, PREPARED),
    "prepare_decode": (fagen.prepare_decode, PREPARED | {"heads": 8}),
    "flash_attn_func": (fa3.flash_attn_func, DENSE),
    "flash_attn_func-causal": (fa3.flash_attn_func, DENSE | {"causal": True}),
    "flash_attn_func-e4m3": (fa3.flash_attn_func, FA3_8),
    "flash_attn_varlen_func": (fa3.flash_attn_varlen_func, VARLEN | LONGEST),
    "flash_attn_varlen_func-e4m3": (fa3.flash_attn_varlen_func, VARLEN8 | LONGEST),
    "flash_attn_varlen_func-window": (
        fa3.flash_attn_varlen_func,
        VARLEN | LONGEST | dict(seqused_q=ints(5, 0, 33, 3, 1, 70)),
    ),
    "flash_attn_qkvpacked_func": (
        fa3.flash_attn_qkvpacked_func,
        dict(qkv=ONE_LENGTH, num_heads_q=2),
    ),
    "flash_attn_with_kvcache": (fa3.flash_attn_with_kvcache, CACHES),
    "flash_attn_combine": (
        fa3.flash_attn_combine,
        dict(out_partial=torch.zeros(2, 3, 5, 4, 64), lse_partial=torch.zeros(2, 3, 5, 4)),
    ),
    "_flash_attn_forward": (fa3._flash_attn_forward, dict.fromkeys("qkv", ONE_LENGTH)),
    "_flash_attn_backward": (
        fa3._flash_attn_backward,
        PASSES | dict(softmax_lse=torch.zeros(2, 4, 5)),
    ),
}
