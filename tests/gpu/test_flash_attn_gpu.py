"""What FlashAttention-3's own tests call, on a Hopper GPU, of sizes and numbers as theirs.

Used lengths of queries and keys with gradients; caches with rotary_seqlens; e4m3 tensors that
require gradients; three tensors in one; the two passes by themselves. An error may be twice that of
a textbook in the same dtype, by its largest element, as there.
"""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fagen.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]

E4M3, BF16, HALF = torch.float8_e4m3fn, torch.bfloat16, torch.float16
HEADS, KV_HEADS = 6, (6, 2, 1)
VARLEN = [(1, 3), (511, 1), (3, 513), (113, 203), (307, 256), (1024, 1023)]
CACHES = [(1, 339), (3, 1024), (64, 800), (16, 20000), (128, 128), (256, 512)]


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    on = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=on, device="cuda", dtype=torch.float32).to(dtype)


def whole(low: int, high: int, count: int, seed: int) -> Tensor:
    on = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(low, high, (count,), generator=on, device="cuda", dtype=torch.int32)


def textbook(q: Tensor, k: Tensor, v: Tensor, causal: bool, like: torch.dtype) -> Tensor:
    """Attention of one sequence (S, H, D), every step in one dtype; P of e4m3 rounded to it."""
    work = BF16 if like == E4M3 else like
    q, k, v = (x.to(work).transpose(0, 1) for x in (q, k, v))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ (k * q.shape[2] ** -0.5).mT
    queries, keys = scores.shape[1:]
    if causal:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        sees = seen.any(1)[:, None]
        scores = scores.masked_fill(~seen & sees, -math.inf)
    weights = scores.softmax(-1) if keys else scores
    if causal:
        weights = weights.masked_fill(~sees, 0)
    if like == E4M3:
        weights = weights.to(E4M3).to(work)
    return (weights @ v).transpose(0, 1)


def hold(found: Tensor, exact: Tensor, rounded: Tensor, times: float = 2) -> None:
    """Demand an error of `times` a textbook's, and what the dtype rounds away of a number, twice.

    A number of 0.3, as theirs: gradients may be exactly 0, where a row sees one key.
    """
    noise = abs(float(torch.tensor(0.3, dtype=found.dtype)) - 0.3)
    most = times * (rounded.double() - exact).abs().max().item() + 2 * noise
    error = (found.double() - exact).abs().max().item()
    assert error <= most, f"{error:.3g}, and {most:.3g} is allowed"


def apart(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "head_dim"), [(BF16, 64), (BF16, 128), (HALF, 96), (E4M3, 128)])
def test_used_lengths_of_queries_and_keys(dtype: torch.dtype, head_dim: int, causal: bool) -> None:
    for (queries, keys), kv_heads in product(VARLEN, KV_HEADS):
        batch, seed = 9, queries + keys + kv_heads
        lengths = [
            whole(max(1, most - 20), most + 1, batch, seed + i)
            for i, most in enumerate((queries, keys))
        ]
        lengths[1][::5] = 0
        used = [(x - whole(0, 20, batch, seed + 7 + i)).clamp(min=0) for i, x in enumerate(lengths)]
        at_q, at_k = map(apart, lengths)
        totals = [int(x.sum()) for x in lengths]
        q = draw(totals[0], HEADS, head_dim, dtype=dtype, seed=seed)
        k, v = (draw(totals[1], kv_heads, head_dim, dtype=dtype, seed=seed + i) for i in (1, 2))
        descales: Any = {}
        if dtype == E4M3:
            on = torch.Generator("cuda").manual_seed(seed)
            descales = {
                f"{x}_descale": torch.rand(batch, kv_heads, generator=on, device="cuda") * 2
                for x in "qkv"
            }
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = flash_attn_varlen_func(
            *leaves, at_q, at_k, queries, keys, used[0], used[1], causal=causal, num_splits=3,
            pack_gqa=True, window_size=torch.tensor((-1, -1)), return_attn_probs=True, **descales,
        )  # fmt: skip
        dout = draw(*out.shape, dtype=out.dtype, seed=seed + 3)
        exact, rounded = torch.zeros_like(out).double(), torch.zeros_like(out)
        expected, plain = (
            [torch.zeros_like(x, dtype=t) for x in leaves] for t in (torch.float64, out.dtype)
        )
        for i in range(batch):
            rows = slice(int(at_q[i]), int(at_q[i] + used[0][i]))
            columns = slice(int(at_k[i]), int(at_k[i] + used[1][i]))
            parts = [x[s].detach() for x, s in zip(leaves, (rows, columns, columns), strict=True)]
            if descales:
                group = HEADS // kv_heads
                sizes = [descales[f"{x}_descale"][i] for x in "qkv"]
                sizes[0] = sizes[0].repeat_interleave(group)
                parts = [x.float() * size[:, None] for x, size in zip(parts, sizes, strict=True)]
            of_fp64, of_dtype = (torch.float64, exact, expected), (dtype, rounded, plain)
            for work, outs, gradients in (of_fp64, of_dtype):
                if not columns.stop - columns.start:
                    continue
                step = BF16 if work == E4M3 else work
                mine = [x.to(step).requires_grad_() for x in parts]
                made = textbook(*mine, causal, work)
                outs[rows] = made.detach()
                if dtype != E4M3:
                    found = torch.autograd.grad(made, mine, dout[rows].to(step))
                    for into, s, x in zip(gradients, (rows, columns, columns), found, strict=True):
                        into[s] = x
            if i + 1 < batch:
                assert not out[rows.stop : int(at_q[i + 1])].any()
                assert (lse[:, rows.stop : int(at_q[i + 1])] == -math.inf).all()
        hold(out, exact, rounded)
        if dtype == E4M3:
            with pytest.raises(NotImplementedError, match="e4m3 tensors have no gradients yet"):
                out.sum().backward()
            continue
        made = torch.autograd.grad(out, leaves, dout)
        for one, other, third in zip(made, expected, plain, strict=True):
            hold(one, other, third)
        into = [torch.full_like(x, math.nan) for x in leaves]
        detached = [x.detach() for x in leaves]
        given: Any = (at_q, at_k, used[0], used[1], queries, keys, *into, None, causal)
        _flash_attn_backward(dout, *detached, out.detach(), lse.detach(), *given)
        for one, other, third in zip(into, expected, plain, strict=True):
            hold(one, other, third)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_cache_with_rotary_lengths_and_no_rotary_embedding(packed: bool, causal: bool) -> None:
    for (queries, keys), kv_heads, padded in product(CACHES, (6, 3, 1), (False, True)):
        batch, seed = 5, queries + keys + kv_heads
        q = draw(batch, queries, HEADS, 128, dtype=BF16, seed=seed)
        k, v = (draw(batch, keys, kv_heads, 128, dtype=BF16, seed=seed + i) for i in (1, 2))
        lengths = whole(1, keys + 1, batch, seed)
        pads = whole(0, keys, batch, seed + 1).minimum(lengths - 1) if padded else None
        counts = whole(max(1, queries - 20), queries + 1, batch, seed + 2)
        counts = counts if packed else torch.full_like(counts, queries)
        rows = torch.cat([x[: int(n)] for x, n in zip(q, counts, strict=True)]) if packed else q
        at = apart(counts) if packed else None
        plan = get_scheduler_metadata(
            batch, queries, keys, HEADS, kv_heads, 128, lengths, q.dtype, headdim_v=128,
            cu_seqlens_q=at, cache_leftpad=pads, causal=causal, window_size=(-1, -1),
        )  # fmt: skip
        for splits, metadata in ((0, None), (3, plan)):
            out, _lse, *_ = flash_attn_with_kvcache(
                rows.requires_grad_(), k, v, None, None, qv=None, rotary_cos=None, rotary_sin=None,
                cache_seqlens=lengths, cache_batch_idx=None, cache_leftpad=pads, page_table=None,
                cu_seqlens_q=at, cu_seqlens_k_new=None, max_seqlen_q=queries if packed else None,
                rotary_seqlens=lengths, causal=causal, window_size=(-1, -1), attention_chunk=0,
                rotary_interleaved=True, scheduler_metadata=metadata, num_splits=splits,
                return_softmax_lse=True,
            )  # fmt: skip
            flat = out.detach().reshape(-1, HEADS, 128)
            begin = 0
            exact, rounded = torch.zeros_like(flat).double(), torch.zeros_like(flat)
            for i, count in enumerate(counts.tolist()):
                first = 0 if pads is None else int(pads[i])
                seen = slice(first, int(lengths[i]))
                given = q[i, :count], k[i, seen], v[i, seen]
                exact[begin : begin + count] = textbook(*given, causal, torch.float64)
                rounded[begin : begin + count] = textbook(*given, causal, BF16)
                begin += count
            hold(flat, exact, rounded)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_e4m3_that_requires_a_gradient(head_dim: int, causal: bool) -> None:
    for (queries, keys), kv_heads in product(
        [(1, 1), (113, 203), (1024, 1023), (384, 256)], KV_HEADS
    ):
        batch, seed = 9, queries + keys + kv_heads
        q = draw(batch, queries, HEADS, head_dim, dtype=E4M3, seed=seed).requires_grad_()
        k, v = (
            draw(batch, keys, kv_heads, head_dim, dtype=E4M3, seed=seed + i).requires_grad_()
            for i in (1, 2)
        )
        on = torch.Generator("cuda").manual_seed(seed)
        sizes = [torch.rand(batch, kv_heads, generator=on, device="cuda") * 2 for _ in "qkv"]
        out = flash_attn_func(
            q, k, v, causal=causal, q_descale=sizes[0], k_descale=sizes[1], v_descale=sizes[2],
            pack_gqa=False, num_splits=3,
        )  # fmt: skip
        assert isinstance(out, Tensor) and out.requires_grad
        exact, rounded = torch.zeros_like(out).double(), torch.zeros_like(out)
        sizes[0] = sizes[0].repeat_interleave(HEADS // kv_heads, 1)
        for i in range(batch):
            given = [
                x[i].detach().float() * size[i, :, None]
                for x, size in zip((q, k, v), sizes, strict=True)
            ]
            exact[i] = textbook(*(x.double() for x in given), causal, torch.float64)
            rounded[i] = textbook(*given, causal, E4M3)
        hold(out.detach(), exact, rounded)
        with pytest.raises(NotImplementedError, match="e4m3 tensors have no gradients yet"):
            out.sum().backward()


@pytest.mark.parametrize("head_dim_v", [128, 512])
def test_three_tensors_in_one_and_the_passes_by_themselves(head_dim_v: int) -> None:
    qkv = draw(9, 256, 3, HEADS, 128, dtype=BF16, seed=1).requires_grad_()
    out, lse = flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
    dout = draw(*out.shape, dtype=BF16, seed=2)
    (made,) = torch.autograd.grad(out, qkv, dout)
    q, k, v = (x.contiguous() for x in qkv.detach().unbind(2))
    again, lse_again, *rest = _flash_attn_forward(q, k, v, causal=True)
    assert torch.equal(again, out) and torch.equal(lse_again, lse)
    assert [x.numel() for x in rest] == [0, 0]
    into = [torch.full_like(x, math.nan) for x in (q, k, v)]
    found = _flash_attn_backward(
        dout, q, k, v, out.detach(), lse.detach(), None, None, None, None, None, None, *into,
        128**-0.5, True, window_size=(-1, -1), softcap=0.0, deterministic=True,
    )  # fmt: skip
    torch.testing.assert_close(torch.stack(found[:3], 2), made, atol=2e-2, rtol=2e-2)
    wide = draw(9, 203, 2, head_dim_v, dtype=BF16, seed=3)
    q, k = draw(9, 113, HEADS, 64, dtype=BF16, seed=4), draw(9, 203, 2, 64, dtype=BF16, seed=5)
    out = flash_attn_func(q, k, wide, causal=True)
    exact = torch.stack(
        [textbook(*(x[i] for x in (q, k, wide)), True, torch.float64) for i in range(9)]
    )
    rounded = torch.stack([textbook(*(x[i] for x in (q, k, wide)), True, BF16) for i in range(9)])
    hold(out, exact, rounded)  # type: ignore[arg-type]
