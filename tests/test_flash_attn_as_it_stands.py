"""What FlashAttention-3's own tests call, as they call it: used lengths, gradients, low levels."""

import importlib
import math
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fagen import flash_attn_interface
from fagen.errors import FagenError
from fagen.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from fagen.measure.peers import installed
from tests.tensors import normal

pytestmark = [
    pytest.mark.usefixtures("nothing_is_ready"),
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]

E4M3, BF16, HALF = torch.float8_e4m3fn, torch.bfloat16, torch.float16


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of one sequence, (S, H, D), in fp64: out and the log-sum-exp (H, S)."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.mT * q.shape[2] ** -0.5
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    if causal:
        seen = seen.tril(k.shape[1] - q.shape[1])
    scores = scores.masked_fill(~seen, -math.inf)
    sees = seen.any(1)[:, None]
    weights = torch.where(sees, scores.masked_fill(~sees, 0).softmax(-1), 0.0)
    return (weights @ v).transpose(0, 1), scores.logsumexp(-1)


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype = HALF) -> None:
    close = {HALF: 4e-3, BF16: 3e-2, E4M3: 0.12}[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=close, atol=close)


# ---- the module ---------------------------------------------------------------------------------


def test_installed_it_is_what_flash_attention_3s_name_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    flash_attn_interface.install()
    flash_attn_interface.install()
    assert importlib.import_module("flash_attn_interface") is flash_attn_interface
    for name in flash_attn_interface.__all__:
        assert callable(getattr(flash_attn_interface, name))
    assert not installed("fa3")  # as a peer to be measured beside
    monkeypatch.setitem(sys.modules, "flash_attn_interface", sys)
    with pytest.raises(FagenError, match="flash_attn_interface is imported already, and is not"):
        flash_attn_interface.install()


# ---- sequences of which a part is used -----------------------------------------------------------

# where sequences begin, and what of them is used: none, some, all
AT_Q, USED_Q = ints(0, 40, 73, 73, 90, 130), ints(33, 0, 0, 17, 40)
AT_K, USED_K = ints(0, 60, 100, 130, 131, 231), ints(60, 31, 7, 0, 93)


def used(i: int) -> tuple[slice, slice]:
    q, k = int(AT_Q[i]), int(AT_K[i])
    return slice(q, q + int(USED_Q[i])), slice(k, k + int(USED_K[i]))


def sequences(dtype: torch.dtype, head_dim_v: int = 64) -> list[Tensor]:
    shapes = (130, 6, 64), (231, 2, 64), (231, 2, head_dim_v)
    return [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("causal", [False, True])
def test_used_queries_and_keys_as_its_varlen_test_gives_them(
    dtype: torch.dtype, causal: bool
) -> None:
    q, k, v = (x.requires_grad_() for x in sequences(dtype))
    out, lse = flash_attn_varlen_func(
        q, k, v, AT_Q, AT_K, 40, 100, seqused_q=USED_Q, seqused_k=USED_K, causal=causal, qv=None,
        q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
        softcap=0.0, pack_gqa=True, num_splits=3, return_attn_probs=True,
    )  # fmt: skip
    dout = normal(130, 6, 64, seed=9, dtype=dtype)
    made = torch.autograd.grad(out, (q, k, v), dout)
    wanted, wanted_lse = torch.zeros_like(out).double(), torch.full_like(lse, -math.inf).double()
    gradients = [torch.zeros_like(x).double() for x in (q, k, v)]
    for i in range(5):
        rows, columns = used(i)
        alone = [
            x[s].detach().double().requires_grad_()
            for x, s in ((q, rows), (k, columns), (v, columns))
        ]
        one, wanted_lse[:, rows] = exact(*alone, causal)
        wanted[rows] = one.detach()
        found = torch.autograd.grad(one, alone, dout[rows].double())
        for into, s, x in zip(gradients, (rows, columns, columns), found, strict=True):
            into[s] = x
    near(out.detach(), wanted, dtype)
    torch.testing.assert_close(lse.detach().double(), wanted_lse.detach(), rtol=1e-3, atol=1e-3)
    for one, right in zip(made, gradients, strict=True):
        near(one, right, dtype)


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.long)])
def test_used_lengths_compile_into_one_graph_that_they_are_given_to(
    dynamic: bool, fresh_dynamo: None
) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, used_q: Tensor, used_k: Tensor) -> Any:
        return flash_attn_varlen_func(q, k, v, AT_Q, AT_K, 40, 100, used_q, used_k, causal=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for used in ((USED_Q, USED_K), (USED_Q // 2, USED_K)):
        leaves, others = ([x.requires_grad_() for x in sequences(HALF)] for _ in range(2))
        out, wanted = compiled(*leaves, *used), call(*others, *used)
        assert torch.equal(out, wanted)
        made, right = (
            torch.autograd.grad(x.sum(), of) for x, of in ((out, leaves), (wanted, others))
        )
        assert all(map(torch.equal, made, right))


def test_used_queries_of_a_window_that_is_a_tensor() -> None:
    given: Any = (*sequences(HALF), AT_Q, AT_K, 40, 100, USED_Q, USED_K)
    out = flash_attn_varlen_func(*given, causal=True)
    for endless in ((-1, 0), (300, -1)):
        window = torch.tensor(endless)
        assert torch.equal(flash_attn_varlen_func(*given, causal=True, window_size=window), out)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match=r"window_size = \(17, 3\) is not there yet"):
        flash_attn_varlen_func(*given, window_size=torch.tensor((17, 3)))
    with pytest.raises(ValueError, match=r"window_size is \[1\]; it must be"):
        flash_attn_varlen_func(*given, window_size=torch.tensor((1,)))
    with pytest.raises(TypeError, match="window_size is of type Tensor; it must be a sequence of"):
        flash_attn_varlen_func(*given, window_size=torch.tensor((1.5, 2.0)))


@pytest.mark.parametrize("dense", ["q", "k", "both"])
@pytest.mark.parametrize("gradient", [False, True])
def test_of_one_length_is_what_has_no_offsets(dense: str, gradient: bool) -> None:
    q, k, v = (
        normal(3, rows, heads, 64, seed=i, dtype=HALF)
        for i, (rows, heads) in enumerate(((20, 4), (50, 2), (50, 2)))
    )
    # parts of longer tensors, as caches are
    k, v = (torch.cat((x, x[:, :9] * math.nan), 1)[:, :50] for x in (k, v))
    at_q, at_k = ints(0, 20, 40, 60), ints(0, 50, 100, 150)
    used_q, used_k = ints(20, 11, 0), ints(50, 13, 8)
    leaves = [x.clone().requires_grad_(gradient) if gradient else x for x in (q, k, v)]
    packed = [x.detach().flatten(0, 1).requires_grad_(gradient) for x in leaves]
    given = [
        leaves[0] if dense in ("q", "both") else packed[0],
        *(leaves[1:] if dense in ("k", "both") else packed[1:]),
        None if dense in ("q", "both") else at_q,
        None if dense in ("k", "both") else at_k,
    ]
    more: Any = dict(seqused_q=used_q, seqused_k=used_k, causal=True, return_attn_probs=True)
    out, lse = flash_attn_varlen_func(*given, 20, 50, **more)
    wanted, wanted_lse = flash_attn_varlen_func(*packed, at_q, at_k, 20, 50, **more)
    if dense != "k":
        assert out.shape == (3, 20, 4, 64) and lse.shape == (3, 4, 20) and lse.is_contiguous()
        wanted_lse = wanted_lse.unflatten(1, (3, 20)).transpose(0, 1)
    assert torch.equal(out.reshape(wanted.shape), wanted) and torch.equal(lse, wanted_lse)
    if gradient:
        found = torch.autograd.grad(out.sum(), given[:3])
        right = torch.autograd.grad(wanted.sum(), packed)
        assert all(torch.equal(x.reshape(y.shape), y) for x, y in zip(found, right, strict=True))


def test_dense_keys_of_another_batch_are_refused() -> None:
    q, k = normal(20, 4, 64, dtype=HALF), normal(3, 50, 2, 64, dtype=HALF)
    with pytest.raises(
        ValueError, match=r"k has shape \(3, 50, 2, 64\); without cu_seqlens_k it m"
    ):
        flash_attn_varlen_func(q, k, k, ints(0, 4, 20), None, 20, 50)


# ---- gradients that are not there ----------------------------------------------------------------


def test_e4m3_that_requires_a_gradient_is_computed_and_not_taken_back() -> None:
    q, k, v = (
        normal(2, 30, heads, 64, seed=i, dtype=BF16).to(E4M3) for i, heads in enumerate((6, 2, 2))
    )
    descales: Any = {f"{x}_descale": torch.rand(2, 2) * 2 + 0.01 for x in "qkv"}
    wanted = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **descales)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    found = flash_attn_func(*leaves, causal=True, return_attn_probs=True, **descales)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other) and one.requires_grad
        with pytest.raises(
            NotImplementedError, match=r"^flash_attn_func: e4m3 tensors have no grad"
        ):
            one.float().sum().backward(retain_graph=True)
    rows = [x.flatten(0, 1).detach().requires_grad_() for x in leaves]
    at: Any = (ints(0, 30, 60), ints(0, 30, 60), 30, 30)
    out = flash_attn_varlen_func(*rows, *at, ints(30, 12), None, causal=True, **descales)
    assert torch.equal(out[:30], wanted[0][0]) and not out[42:].any()  # type: ignore[index]
    with pytest.raises(NotImplementedError, match=r"^flash_attn_varlen_func: e4m3 tensors have no"):
        out.float().sum().backward()  # type: ignore[union-attr]
    with torch.no_grad():
        assert not flash_attn_func(*leaves, **descales).requires_grad  # type: ignore[union-attr]


# ---- head dims that it fills up ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(8, 8), (8, 64), (64, 8), (64, 264), (64, 512)]
)
@pytest.mark.parametrize("varlen", [False, True])
def test_head_dims_that_no_kernel_has(varlen: bool, head_dim: int, head_dim_v: int) -> None:
    q, k = (normal(30, 4, head_dim, dtype=HALF), normal(41, 2, head_dim, seed=1, dtype=HALF))
    v = normal(41, 2, head_dim_v, seed=2, dtype=HALF)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if varlen:
        at: Any = (ints(0, 30), ints(0, 41), 30, 41)
        out, lse = flash_attn_varlen_func(*leaves, *at, causal=True, return_attn_probs=True)
    else:
        dense = [x[None] for x in leaves]
        out, lse = (x[0] for x in flash_attn_func(*dense, causal=True, return_attn_probs=True))
    right = [x.detach().double().requires_grad_() for x in leaves]
    wanted, wanted_lse = exact(*right, True)
    near(out.detach(), wanted.detach())
    torch.testing.assert_close(lse.detach().double(), wanted_lse.detach(), rtol=1e-3, atol=1e-3)
    dout = normal(30, 4, head_dim_v, seed=3, dtype=HALF)
    made = torch.autograd.grad(out, leaves, dout)
    for one, other in zip(made, torch.autograd.grad(wanted, right, dout.double()), strict=True):
        near(one / 8, other / 8)


@pytest.mark.parametrize("columns", [1, 40, 59, 111])
def test_splits_of_any_head_dim_are_combined(columns: int) -> None:
    outs = normal(10, 5, 16, 3, columns).transpose(2, 3)[:5]  # as its test has them
    lses = normal(5, 5, 32, 3, seed=1).transpose(-1, -2)[..., :16].clone()
    lses[2:, :1] = -math.inf
    out, lse = flash_attn_combine(outs, lses, out_dtype=BF16)
    right = lses.logsumexp(0)
    wanted = ((lses - right).exp()[..., None] * outs).sum(0)
    assert out.shape == (5, 3, 16, columns) and lse.shape == (5, 3, 16)
    near(out, wanted.double(), BF16)
    torch.testing.assert_close(lse, right, atol=1e-5, rtol=1e-5)
    into = torch.empty(5, 3, 16, columns, dtype=BF16)
    assert flash_attn_combine(outs, lses, into)[0] is into and torch.equal(into, out)


# ---- three tensors in one ------------------------------------------------------------------------


@pytest.mark.parametrize("grouped", [False, True])
def test_three_tensors_in_one_are_the_three(grouped: bool) -> None:
    shape = (2, 30, 8, 64) if grouped else (2, 30, 3, 4, 64)
    qkv = normal(*shape, dtype=HALF).requires_grad_()
    more: Any = dict(num_heads_q=4) if grouped else {}
    out, lse = flash_attn_qkvpacked_func(qkv, 0.1, True, return_attn_probs=True, **more)
    (made,) = torch.autograd.grad(out.sum() + lse.sum(), qkv)
    parts = qkv.detach().split((4, 2, 2), 2) if grouped else qkv.detach().unbind(2)
    leaves = [x.clone().requires_grad_() for x in parts]
    wanted, wanted_lse = flash_attn_func(*leaves, 0.1, True, return_attn_probs=True)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    right = torch.autograd.grad(wanted.sum() + wanted_lse.sum(), leaves)
    assert torch.equal(made, torch.cat(right, 2) if grouped else torch.stack(right, 2))


def test_three_tensors_in_one_of_another_shape_are_refused() -> None:
    for shape, more, said in (
        ((2, 30, 8, 64), {}, "it must be (batch, seqlen, 3, heads, head_dim)"),
        ((2, 30, 2, 4, 64), {}, "it must be (batch, seqlen, 3, heads, head_dim)"),
        ((2, 30, 8, 64), {"num_heads_q": 5}, "num_heads_q + 2 · kv_heads"),
        ((2, 30, 8, 64), {"num_heads_q": 10}, "num_heads_q + 2 · kv_heads"),
    ):
        with pytest.raises(ValueError) as refusal:
            flash_attn_qkvpacked_func(normal(*shape, dtype=HALF), **more)  # type: ignore[arg-type]
        assert said in str(refusal.value) and "qkv has shape" in str(refusal.value)


# ---- below the calls -----------------------------------------------------------------------------

NOTHING: Any = (None,) * 6  # lengths, where there are none


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("older", [False, True])
def test_the_two_passes_by_themselves_are_those_of_the_call(
    older: bool, deterministic: bool
) -> None:
    q, k, v = (
        normal(2, rows, heads, 64, seed=i, dtype=BF16)
        for i, (rows, heads) in enumerate(((20, 6), (50, 2), (50, 2)))
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    dout = normal(2, 20, 6, 64, seed=5, dtype=BF16)
    right = torch.autograd.grad(wanted, leaves, dout)
    bounds: Any = {"window_size": (-1, -1)} if older else {}
    out, lse, *rest = _flash_attn_forward(q, k, v, softmax_scale=0.125, causal=True, **bounds)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    assert [x.numel() for x in rest] == [0, 0]
    into = [torch.empty_like(x) for x in (q, k, v)]
    given: Any = (dout, q, k, v, out, lse, *NOTHING, *into, 0.125, True)
    found = _flash_attn_backward(*given, deterministic=deterministic, softcap=0.0, **bounds)
    sums = found[3] if older else found
    assert all(map(torch.equal, into, right))
    if older:
        assert all(x is y for x, y in zip(found, into, strict=False))
    near(sums, (dout.double() * out.double()).sum(-1).transpose(1, 2), BF16)  # type: ignore[arg-type]
    leaf = q.clone().requires_grad_()
    _flash_attn_forward(leaf, k, v, causal=True)[0].backward(dout)
    assert torch.equal(leaf.grad, right[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [False, True])
def test_the_passes_of_used_lengths_are_those_of_the_call(causal: bool) -> None:
    leaves = [x.requires_grad_() for x in sequences(HALF)]
    of: Any = dict(seqused_q=USED_Q, seqused_k=USED_K, causal=causal)
    wanted, wanted_lse = flash_attn_varlen_func(
        *leaves, AT_Q, AT_K, 40, 100, return_attn_probs=True, **of
    )
    dout = normal(130, 6, 64, seed=5, dtype=HALF)
    right = torch.autograd.grad(wanted, leaves, dout)
    q, k, v = (x.detach() for x in leaves)
    at: Any = dict(cu_seqlens_q=AT_Q, cu_seqlens_k=AT_K, max_seqlen_q=40, max_seqlen_k=100)
    target = torch.empty_like(wanted)
    out, lse, *_ = _flash_attn_forward(q, k, v, out_=target, **at, **of)
    assert out is target and torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    into = [torch.empty_like(x) for x in (q, k, v)]
    lengths: Any = (AT_Q, AT_K, USED_Q, USED_K, 40, 100)
    _flash_attn_backward(dout, q, k, v, out, lse, *lengths, *into, None, causal)
    assert all(map(torch.equal, into, right))
    # and of sequences of one length
    dense = [x[:120].unflatten(0, (3, 40)) for x in (q, k, v)]
    used_k = ints(40, 13, 2)
    out, lse, *_ = _flash_attn_forward(*dense, seqused_k=used_k, causal=causal)
    cached = flash_attn_with_kvcache(*dense, cache_seqlens=used_k, causal=causal)
    assert torch.equal(out, cached)  # type: ignore[arg-type]
    made = _flash_attn_backward(
        torch.ones_like(out), *dense, out, lse, None, None, None, used_k, None, None,
        softmax_scale=0.125, causal=causal, window_size=(-1, -1),
    )  # fmt: skip
    parted = [x.clone().requires_grad_() for x in dense]
    again = flash_attn_varlen_func(*parted, None, None, 40, 40, None, used_k, causal=causal)
    right = torch.autograd.grad(again.sum(), parted)  # type: ignore[union-attr]
    for one, other in zip(made, right, strict=False):
        near(one, other.double())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"q": normal(2, 5, 4, 64).to(E4M3)}, "_flash_attn_backward: e4m3 is not there yet"),
        ({"window_size_left": 1}, "_flash_attn_backward: window_size = (1, -1) is not there yet"),
        ({"softcap": 15.0}, "_flash_attn_backward: softcap = 15.0 is not there yet"),
    ],
)
def test_what_the_backward_pass_lacks_is_named(changes: dict[str, Any], said: str) -> None:
    x = normal(2, 5, 4, 64, dtype=HALF)
    given = dict(dout=x, q=x, k=x, v=x, out=x, softmax_lse=torch.zeros(2, 4, 5)) | changes
    with pytest.raises(NotImplementedError) as refusal:
        _flash_attn_backward(**given)
    assert str(refusal.value).startswith(said)


def test_what_the_passes_are_given_wrongly_is_named() -> None:
    x = normal(2, 5, 4, 64, dtype=HALF)
    given: Any = dict(dout=x, q=x, k=x, v=x, out=x, softmax_lse=torch.zeros(2, 4, 5))
    for changes, said in (
        ({"dk": x[:1]}, "dk has shape (1, 5, 4, 64)"),
        ({"dv": x.bfloat16()}, "dv has shape (2, 5, 4, 64) in torch.bfloat16"),
        ({"dout": x[:1]}, "dout has shape (1, 5, 4, 64); it must be out's"),
        ({"softmax_scale": math.nan}, "softmax_scale is nan"),
    ):
        with pytest.raises(ValueError) as refusal:
            _flash_attn_backward(**given | changes)
        assert said in str(refusal.value)
    with pytest.raises(ValueError, match=r"out_ has shape \(1, 5, 4, 64\)"):
        _flash_attn_forward(x, x, x, out_=x[:1].clone())
    for name in ("k_new", "page_table", "kv_batch_idx", "rotary_cos"):
        with pytest.raises(NotImplementedError, match="is not there yet in fagen"):
            _flash_attn_forward(x, x, x, **{name: x})
    with pytest.raises(NotImplementedError, match="seqused_q over a cache is not there yet"):
        _flash_attn_forward(x, x, x, seqused_q=ints(1, 2), leftpad_k=ints(0, 1))


def test_a_cache_as_its_test_calls_it() -> None:
    q, k, v = (
        normal(3, rows, heads, 64, seed=i, dtype=BF16)
        for i, (rows, heads) in enumerate(((3, 6), (70, 2), (70, 2)))
    )
    lengths, pads = ints(70, 9, 33), ints(4, 0, 20)
    for at in (None, ints(0, 3, 5, 9)):
        out, _lse, *rest = flash_attn_with_kvcache(
            q if at is None else q.flatten(0, 1), k, v, None, None, qv=None, rotary_cos=None,
            rotary_sin=None, cache_seqlens=lengths, cache_batch_idx=None, cache_leftpad=pads,
            page_table=None, cu_seqlens_q=at, cu_seqlens_k_new=None,
            max_seqlen_q=None if at is None else 4, rotary_seqlens=lengths, causal=True,
            window_size=(-1, -1), attention_chunk=0, rotary_interleaved=False,
            scheduler_metadata=None, num_splits=3, return_softmax_lse=True,
        )  # fmt: skip
        assert not rest
        starts = [0, 3, 6, 9] if at is None else at.tolist()
        flat = out.reshape(9, 6, 64)
        for i, (top, bottom) in enumerate(pairwise(starts)):
            seen = slice(int(pads[i]), int(lengths[i]))
            rows = q.flatten(0, 1)[top:bottom]
            near(flat[top:bottom], exact(rows, k[i, seen], v[i, seen], True)[0], BF16)
