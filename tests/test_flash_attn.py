"""fagen.flash_attn_interface: calls that are written for FlashAttention-3, and what they get."""

import importlib
import math
import sys
from inspect import Parameter, signature

import pytest
import torch

import fagen
from fagen import flash_attn_interface
from fagen.errors import FagenError
from fagen.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    calls,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from fagen.kinds.backward.oracle import gradients
from fagen.kinds.forward.oracle import reference
from fagen.measure.peers import installed
from fagen.vocab import MASKS
from tests.attention_helpers import qkv
from tests.tensors import ints, normal
from tests.varlen_helpers import exact_passes, packed, packed8

pytestmark = [
    pytest.mark.usefixtures("nothing_is_ready"),
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]

E4M3, BF16, HALF = torch.float8_e4m3fn, torch.bfloat16, torch.float16

# ---- the module ---------------------------------------------------------------------------------

NEEDED = Parameter.empty
# of hopper/flash_attn_interface.py in Dao-AILab/flash-attention at 01afd16, in their order
OF_BOTH = (
    {"softmax_scale": None, "causal": False, "qv": None}
    | dict.fromkeys(("q_descale", "k_descale", "v_descale"))
    | {"window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0, "num_splits": 1}
    | {"pack_gqa": None, "deterministic": False, "sm_margin": 0, "return_attn_probs": False}
)
ARGUMENTS = {
    flash_attn_func: dict.fromkeys("qkv", NEEDED) | OF_BOTH,
    flash_attn_varlen_func: dict.fromkeys(
        ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), NEEDED
    )
    | dict.fromkeys(("seqused_q", "seqused_k"))
    | OF_BOTH,
    flash_attn_with_kvcache: dict.fromkeys(("q", "k_cache", "v_cache"), NEEDED)
    | dict.fromkeys((
        *("k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx"),
        *("cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q"),
        *("rotary_seqlens", "q_descale", "k_descale", "v_descale", "softmax_scale"),
    ))
    | {"causal": False, "window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0}
    | {"rotary_interleaved": True, "scheduler_metadata": None, "num_splits": 0}
    | {"pack_gqa": None, "sm_margin": 0, "return_softmax_lse": False},
    get_scheduler_metadata: dict.fromkeys(
        ("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim"),
        NEEDED,
    )
    | {"cache_seqlens": NEEDED, "qkv_dtype": BF16}
    | dict.fromkeys(("headdim_v", "cu_seqlens_q", "cu_seqlens_k_new", "cache_leftpad", "page_size"))
    | {"max_seqlen_k_new": 0, "causal": False, "window_size": (-1, -1), "attention_chunk": 0}
    | {"has_softcap": False, "num_splits": 0, "pack_gqa": None, "sm_margin": 0},
    flash_attn_combine: {"out_partial": NEEDED, "lse_partial": NEEDED}
    | {"out": None, "out_dtype": None},
}  # fmt: skip


@pytest.mark.parametrize("function", ARGUMENTS, ids=lambda function: function.__name__)
def test_the_arguments_are_flash_attention_3s(function):
    ours = [
        (name, one.default)
        for name, one in signature(function).parameters.items()
        if one.kind is Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert ours == [*ARGUMENTS[function].items()]


def test_installed_it_is_what_flash_attention_3s_name_imports(monkeypatch):
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


# ---- what it computes ---------------------------------------------------------------------------


def exact(q, k, v, causal=False, scale=None):
    mask = "causal" if causal else "full"
    return reference(q, k, v, mask=mask, scale=scale or q.shape[3] ** -0.5)


def near(found, wanted, dtype=HALF):
    close = {HALF: 4e-3, BF16: 3e-2, E4M3: 0.12}[dtype]
    torch.testing.assert_close(found.detach().double(), wanted.double(), rtol=close, atol=close)


def near_lse(found, wanted):
    torch.testing.assert_close(found.detach().double(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "queries", "keys"),
    [(HALF, 70, 200), (BF16, 70, 150), (BF16, 90, 40), (HALF, 1, 130), (HALF, 20, 0)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_attention_with_grouped_heads_and_a_mask_at_the_bottom_right(
    dtype, queries, keys, causal
):
    q, k, v = qkv(dtype, queries=queries, keys=keys)
    out, lse = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    assert (out.dtype, out.shape) == (dtype, (2, queries, 4, 64)) and out.is_contiguous()
    assert (lse.dtype, lse.shape) == (torch.float32, (2, 4, queries)) and lse.is_contiguous()
    wanted, wanted_lse = exact(q, k, v, causal)
    close = {HALF: 2e-3, BF16: 1.6e-2}[dtype]
    torch.testing.assert_close(out.double(), wanted, rtol=close, atol=close)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=1e-3)
    if causal and queries > keys:
        assert not out[:, : queries - keys].any()


def test_arguments_go_by_place_as_they_do_there():
    q, k, v = qkv(queries=20, keys=50)
    given = (q, k, v, 0.3, True, None, None, None, None, (-1, -1), 0, 0.0, 1, None, False, 0, False)
    wanted = exact(q, k, v, causal=True, scale=0.3)[0]
    torch.testing.assert_close(flash_attn_func(*given).double(), wanted, rtol=2e-3, atol=2e-3)


def test_what_is_about_speed_or_gradients_alone_changes_no_bit():
    q, k, v = qkv(queries=20, keys=50)
    out = flash_attn_func(q, k, v)
    for name, values in (
        ("num_splits", (-1, 0, 1, 2, 256)),
        ("sm_margin", (0, 8, 131)),
        ("pack_gqa", (None, False, True)),
        ("deterministic", (False, True)),
    ):
        for value in values:
            assert torch.equal(out, flash_attn_func(q, k, v, **{name: value})), (name, value)


@pytest.mark.parametrize(
    ("window", "causal", "is_causal"),
    [
        ((-1, -1), False, False),
        ([-1, 0], False, True),
        ((-1, 0), True, True),
        ((-1, 5), True, True),  # `causal` bounds the right
        ((49, 19), False, False),  # all 50 keys are in reach of all 20 queries
        ((49, -1), True, True),
        ((500, 0), False, True),
    ],
)
def test_a_window_that_is_a_mask_is_that_mask(window, causal, is_causal):
    (queries, keys), (left, right) = (20, 50), window
    q, k, v = qkv(queries=queries, keys=keys)
    out = flash_attn_func(q, k, v, causal=causal, window_size=window)
    assert torch.equal(out, flash_attn_func(q, k, v, causal=is_causal))
    for i in (0, queries - 1):  # what FlashAttention-3 says of a window
        here = i + keys - queries
        last = min(here + right if right >= 0 else keys, here if causal else keys, keys - 1)
        assert (here - left if left >= 0 else 0) <= 0
        assert last == (here if is_causal else keys - 1)


def test_layouts_that_it_copies_are_taken():
    tensors = qkv(queries=20, keys=50)
    turned = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in tensors]
    assert {x.stride(1) for x in turned} == {1}
    assert torch.equal(flash_attn_func(*tensors), flash_attn_func(*turned))


# ---- e4m3 ---------------------------------------------------------------------------------------

# of each batch and KV head, powers of 2 so that the e4m3 values themselves are what is rounded
SIZES = {
    "q_descale": torch.tensor([[1.0, 8.0, 0.25], [4.0, 0.5, 2.0]]),
    "k_descale": torch.tensor([[2.0, 0.125, 4.0], [0.25, 4.0, 1.0]]),
    "v_descale": torch.tensor([[1.0, 64.0, 8.0], [0.125, 1.0, 16.0]]),
}


def in_e4m3(heads=6, queries=40, keys=100):
    """Q, K and V in e4m3 of three KV heads."""
    shapes = (queries, heads), (keys, 3), (keys, 3)
    return [normal(2, *shape, 64, seed=seed).to(E4M3) for seed, shape in enumerate(shapes)]


def real(x, descale):
    """What e4m3 tensors stand for: each KV head's descale is that of all its query heads."""
    if descale is None:
        return x.double()
    return (
        x.double() * descale.repeat_interleave(x.shape[2] // descale.shape[1], 1)[:, None, :, None]
    )


def far(out, wanted):
    """The largest error of a head, root mean square relative to the head's own."""
    error, size = ((x.double().square().mean((1, 3))).sqrt() for x in (out - wanted, wanted))
    return float((error / size).max())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [3, 6, 12])
def test_descales_are_of_kv_heads_and_that_of_q_of_the_heads_that_share_one(heads, causal):
    tensors = in_e4m3(heads)
    out, lse = flash_attn_func(*tensors, causal=causal, return_attn_probs=True, **SIZES)
    assert (out.dtype, out.shape) == (BF16, (2, 40, heads, 64))
    assert (lse.dtype, lse.shape) == (torch.float32, (2, heads, 40))
    q, k, v = map(real, tensors, SIZES.values())
    wanted, wanted_lse = exact(q, k, v, causal)
    assert far(out, wanted) < 0.05
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=2e-3, atol=2e-2)
    # by the other grouping of heads, or none, it would be far off
    if heads > 3:
        mixed = real(tensors[0], SIZES["q_descale"].repeat(1, heads // 3))
        assert far(out, exact(mixed, k, v, causal)[0]) > 0.5


@pytest.mark.parametrize("missing", range(8))
def test_a_descale_that_is_none_is_one(missing):
    tensors = in_e4m3(queries=20)
    given = [None if missing >> bit & 1 else sizes for bit, sizes in enumerate(SIZES.values())]
    out = flash_attn_func(*tensors, None, False, None, *given)
    ones = [torch.ones(2, 3) if sizes is None else sizes for sizes in given]
    assert torch.equal(out, flash_attn_func(*tensors, None, False, None, *ones))
    assert far(out, exact(*map(real, tensors, given))[0]) < 0.06


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_a_descale_that_all_heads_share_is_not_copied(kv_heads, monkeypatch):
    q, k, v = in_e4m3(queries=20)
    k, v = k[:, :, :kv_heads], v[:, :, :kv_heads]
    shared, spread = torch.tensor(0.5).expand(2, kv_heads), torch.full((2, kv_heads), 0.5)
    out = flash_attn_func(q, k, v, None, False, None, shared, shared, shared)
    assert torch.equal(out, flash_attn_func(q, k, v, None, False, None, spread, spread, spread))
    assert far(out, exact(*(real(x, spread) for x in (q, k, v)))[0]) < 0.06
    monkeypatch.setattr(calls, "attention", lambda *_, **given: given)
    assert flash_attn_func(q, k, v, q_descale=shared)["q_descale"].data_ptr() == shared.data_ptr()


def test_beside_16_bits_descales_are_not_read():
    q, k, v = qkv(queries=20, keys=50)
    descales = {name: torch.full((2, 2), 7.0) for name in SIZES}
    assert torch.equal(flash_attn_func(q, k, v, **descales), flash_attn_func(q, k, v))


def test_of_packed_sequences_descales_are_of_kv_heads_too_and_may_be_left_out():
    of = packed8()
    shared = of.named["q_descale"][:, ::2]
    spread = of.named | {"q_descale": shared.repeat_interleave(2, 1)}
    how = dict(causal=True, return_attn_probs=True)
    found = flash_attn_varlen_func(*of.tensors, 70, 130, **of.named | how | {"q_descale": shared})
    wanted = fagen.attention_varlen(*of.tensors, causal=True, return_lse=True, **spread)
    assert all(map(torch.equal, found, wanted))
    ones = fagen.attention_varlen(*of.tensors, **dict.fromkeys(SIZES, torch.ones(())))
    assert torch.equal(flash_attn_varlen_func(*of.tensors, 70, 130), ones)


def test_e4m3_that_requires_a_gradient_is_computed_and_not_taken_back():
    tensors = [
        normal(2, 30, heads, 64, seed=i, dtype=BF16).to(E4M3) for i, heads in enumerate((6, 2, 2))
    ]
    descales = {name: torch.rand(2, 2) * 2 + 0.01 for name in SIZES}
    wanted = flash_attn_func(*tensors, causal=True, return_attn_probs=True, **descales)
    leaves = [x.detach().requires_grad_() for x in tensors]
    found = flash_attn_func(*leaves, causal=True, return_attn_probs=True, **descales)
    message = ": e4m3 tensors have no grad"
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other) and one.requires_grad
        with pytest.raises(NotImplementedError, match=f"^flash_attn_func{message}"):
            one.float().sum().backward(retain_graph=True)
    rows = [x.flatten(0, 1).detach().requires_grad_() for x in leaves]
    at = (ints(0, 30, 60), ints(0, 30, 60), 30, 30)
    out = flash_attn_varlen_func(*rows, *at, ints(30, 12), None, causal=True, **descales)
    assert torch.equal(out[:30], wanted[0][0]) and not out[42:].any()
    with pytest.raises(NotImplementedError, match=f"^flash_attn_varlen_func{message}"):
        out.float().sum().backward()
    with torch.no_grad():
        assert not flash_attn_func(*leaves, **descales).requires_grad


# ---- varlen sequences ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "causal"),
    [
        ({}, False),
        ({"causal": True}, True),
        ({"window_size": (-1, 0)}, True),
        ({"window_size": (129, 69)}, False),
        ({"num_splits": 0, "pack_gqa": True, "deterministic": True}, False),
        ({"num_splits": 16, "sm_margin": 8}, False),
        ({"softmax_scale": 64**-0.5, "k_descale": torch.ones(6, 2)}, False),
    ],
)
def test_packed_sequences_are_those_of_attention_varlen(more, causal):
    given = packed()
    found = flash_attn_varlen_func(*given, 70, 130, return_attn_probs=True, **more)
    wanted = fagen.attention_varlen(*given, causal=causal, return_lse=True)
    assert all(map(torch.equal, found, wanted))
    assert torch.equal(flash_attn_varlen_func(*given, 70, 130, **more), found[0])


def test_of_packed_sequences_it_copies_layouts_and_takes_used_keys():
    q, k, v, *at = packed()
    used = ints(5, 3, 20, 0, 0, 32)
    turned = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in (q, k, v)]
    out = flash_attn_varlen_func(*turned, *at, 70, 130, seqused_k=used)
    assert torch.equal(out, fagen.attention_varlen(q, k, v, *at, seqused_k=used))


# where sequences begin, and what of them is used: none, some, all
AT_Q, USED_Q = ints(0, 40, 73, 73, 90, 130), ints(33, 0, 0, 17, 40)
AT_K, USED_K = ints(0, 60, 100, 130, 131, 231), ints(60, 31, 7, 0, 93)
USED = dict(seqused_q=USED_Q, seqused_k=USED_K)


def sequences(dtype=HALF):
    shapes = (130, 6, 64), (231, 2, 64), (231, 2, 64)
    return [normal(*shape, seed=i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("causal", [False, True])
def test_used_queries_and_keys_as_its_varlen_test_gives_them(dtype, causal):
    leaves = sequences(dtype)
    out, lse = flash_attn_varlen_func(
        *leaves, AT_Q, AT_K, 40, 100, **USED, causal=causal, qv=None,
        q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
        softcap=0.0, pack_gqa=True, num_splits=3, return_attn_probs=True,
    )  # fmt: skip
    dout = normal(130, 6, 64, seed=9, dtype=dtype)
    found = out, *torch.autograd.grad(out, leaves, dout)
    used = dict(used_q=USED_Q.tolist(), used_k=USED_K.tolist())
    wanted, wanted_lse, *right = exact_passes(leaves, (AT_Q, AT_K), dout, causal=causal, **used)
    near_lse(lse, wanted_lse)
    for one, other in zip(found, (wanted, *right), strict=True):
        near(one, other, dtype)


def test_used_queries_of_a_window_that_is_a_tensor():
    given = (*sequences(), AT_Q, AT_K, 40, 100, USED_Q, USED_K)
    out = flash_attn_varlen_func(*given, causal=True)
    for endless in ((-1, 0), (300, -1)):
        window = torch.tensor(endless)
        assert torch.equal(flash_attn_varlen_func(*given, causal=True, window_size=window), out)


@pytest.mark.parametrize("dense", ["q", "k", "both"])
@pytest.mark.parametrize("gradient", [False, True])
def test_of_one_length_is_what_has_no_offsets(dense, gradient):
    q, k, v = (
        normal(3, rows, heads, 64, seed=i, dtype=HALF)
        for i, (rows, heads) in enumerate(((20, 4), (50, 2), (50, 2)))
    )
    # parts of longer tensors, as caches are
    k, v = (torch.cat((x, x[:, :9] * math.nan), 1)[:, :50] for x in (k, v))
    at_q, at_k = ints(0, 20, 40, 60), ints(0, 50, 100, 150)
    leaves = [x.clone().requires_grad_(gradient) if gradient else x for x in (q, k, v)]
    packed = [x.detach().flatten(0, 1).requires_grad_(gradient) for x in leaves]
    given = [*packed, at_q, at_k]
    if dense != "k":
        given[0], given[3] = leaves[0], None
    if dense != "q":
        given[1:3], given[4] = leaves[1:], None
    more = dict(seqused_q=ints(20, 11, 0), seqused_k=ints(50, 13, 8))
    more |= dict(causal=True, return_attn_probs=True)
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


# ---- head dims that it fills up ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(8, 8), (8, 64), (64, 8), (64, 264), (64, 512)]
)
@pytest.mark.parametrize("varlen", [False, True])
def test_head_dims_that_no_kernel_has(varlen, head_dim, head_dim_v):
    shapes = (30, 4, head_dim), (41, 2, head_dim), (41, 2, head_dim_v)
    leaves = [normal(*shape, seed=i, dtype=HALF).requires_grad_() for i, shape in enumerate(shapes)]
    how = dict(causal=True, return_attn_probs=True)
    if varlen:
        out, lse = flash_attn_varlen_func(*leaves, ints(0, 30), ints(0, 41), 30, 41, **how)
    else:
        out, lse = (x[0] for x in flash_attn_func(*(x[None] for x in leaves), **how))
    dout = normal(30, 4, head_dim_v, seed=3, dtype=HALF)
    made = torch.autograd.grad(out, leaves, dout)
    dense = (x.detach()[None] for x in (dout, *leaves))
    wanted, wanted_lse, *right = gradients(*dense, mask=MASKS["causal"], scale=head_dim**-0.5)
    near(out, wanted[0])
    near_lse(lse, wanted_lse[0])
    for one, other in zip(made, right, strict=True):
        near(one / 8, other[0] / 8)


# ---- three tensors in one ------------------------------------------------------------------------


@pytest.mark.parametrize("grouped", [False, True])
def test_three_tensors_in_one_are_the_three(grouped):
    shape = (2, 30, 8, 64) if grouped else (2, 30, 3, 4, 64)
    qkv = normal(*shape, dtype=HALF).requires_grad_()
    more = dict(num_heads_q=4) if grouped else {}
    out, lse = flash_attn_qkvpacked_func(qkv, 0.1, True, return_attn_probs=True, **more)
    (made,) = torch.autograd.grad(out.sum() + lse.sum(), qkv)
    parts = qkv.detach().split((4, 2, 2), 2) if grouped else qkv.detach().unbind(2)
    leaves = [x.clone().requires_grad_() for x in parts]
    wanted, wanted_lse = flash_attn_func(*leaves, 0.1, True, return_attn_probs=True)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    right = torch.autograd.grad(wanted.sum() + wanted_lse.sum(), leaves)
    assert torch.equal(made, torch.cat(right, 2) if grouped else torch.stack(right, 2))


# ---- below the calls -----------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("older", [False, True])
def test_the_two_passes_by_themselves_are_those_of_the_call(older, deterministic):
    leaves = [x.requires_grad_() for x in qkv(BF16, queries=20, keys=50)]
    q, k, v = (x.detach() for x in leaves)
    wanted, wanted_lse = flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    dout = normal(2, 20, 4, 64, seed=5, dtype=BF16)
    right = torch.autograd.grad(wanted, leaves, dout)
    bounds = {"window_size": (-1, -1)} if older else {}
    out, lse, *rest = _flash_attn_forward(q, k, v, softmax_scale=0.125, causal=True, **bounds)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    assert [x.numel() for x in rest] == [0, 0]
    into = [torch.empty_like(x) for x in (q, k, v)]
    given = (dout, q, k, v, out, lse, *(None,) * 6, *into, 0.125, True)
    found = _flash_attn_backward(*given, deterministic=deterministic, softcap=0.0, **bounds)
    assert all(map(torch.equal, into, right))
    if older:
        assert all(x is y for x, y in zip(found, into, strict=False))
    sums = (dout.double() * out.double()).sum(-1).transpose(1, 2)
    near(found[3] if older else found, sums, BF16)
    leaf = q.clone().requires_grad_()
    _flash_attn_forward(leaf, k, v, causal=True)[0].backward(dout)
    assert torch.equal(leaf.grad, right[0])


@pytest.mark.parametrize("causal", [False, True])
def test_the_passes_of_used_lengths_are_those_of_the_call(causal):
    leaves = sequences()
    of = USED | dict(causal=causal)
    wanted, wanted_lse = flash_attn_varlen_func(
        *leaves, AT_Q, AT_K, 40, 100, return_attn_probs=True, **of
    )
    dout = normal(130, 6, 64, seed=5, dtype=HALF)
    right = torch.autograd.grad(wanted, leaves, dout)
    q, k, v = (x.detach() for x in leaves)
    at = dict(cu_seqlens_q=AT_Q, cu_seqlens_k=AT_K, max_seqlen_q=40, max_seqlen_k=100)
    target = torch.empty_like(wanted)
    out, lse, *_ = _flash_attn_forward(q, k, v, out_=target, **at, **of)
    assert out is target and torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    into = [torch.empty_like(x) for x in (q, k, v)]
    lengths = (AT_Q, AT_K, USED_Q, USED_K, 40, 100)
    _flash_attn_backward(dout, q, k, v, out, lse, *lengths, *into, None, causal)
    assert all(map(torch.equal, into, right))
    # and of sequences of one length
    dense = [x[:120].unflatten(0, (3, 40)) for x in (q, k, v)]
    used_k = ints(40, 13, 2)
    out, lse, *_ = _flash_attn_forward(*dense, seqused_k=used_k, causal=causal)
    cached = flash_attn_with_kvcache(*dense, cache_seqlens=used_k, causal=causal)
    assert torch.equal(out, cached)
    made = _flash_attn_backward(
        torch.ones_like(out), *dense, out, lse, None, None, None, used_k, None, None,
        softmax_scale=0.125, causal=causal, window_size=(-1, -1),
    )  # fmt: skip
    parted = [x.clone().requires_grad_() for x in dense]
    again = flash_attn_varlen_func(*parted, None, None, 40, 40, None, used_k, causal=causal)
    for one, other in zip(made, torch.autograd.grad(again.sum(), parted), strict=False):
        near(one, other)
