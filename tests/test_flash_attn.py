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
from fagen.measure.peers import installed
from fagen.vocab import MASKS
from tests.attention_helpers import qkv
from tests.tensors import ints, normal
from tests.varlen_helpers import packed, packed8
from tests.wrong import turned

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
        (name, parameter.default)
        for name, parameter in signature(function).parameters.items()
        if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
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


# ---- what it computes is what fagen's calls do ---------------------------------------------------

# of each batch and KV head, powers of 2 so that the e4m3 values themselves are what is rounded
A = torch.tensor([[1.0, 8.0, 0.25], [4.0, 0.5, 2.0]])
SIZES = {"q_descale": A, "k_descale": A.flip(0) / 4, "v_descale": A.flip(1) * 8}


def in_e4m3(heads=6, queries=40, keys=100):
    """Q, K and V in e4m3 of three KV heads."""
    shapes = (queries, heads), (keys, 3), (keys, 3)
    return [normal(2, *shape, 64, seed=seed).to(E4M3) for seed, shape in enumerate(shapes)]


def of_heads(descale, heads=6):
    """That of q's query heads, of one for each KV head."""
    return descale.repeat_interleave(heads // descale.shape[1], 1)


OF_E4M3 = packed8()
TENSORS = {
    "dense": dict(zip("qkv", qkv(), strict=True)),
    "e4m3": dict(zip((*"qkv", *"abc"), (*in_e4m3(), *SIZES.values()), strict=True)),
    "packed": dict(zip("qkv", packed()[:3], strict=True)),
    "packed e4m3": dict(zip("qkv", OF_E4M3.tensors[:3], strict=True)) | OF_E4M3.named,
}
NAMES = vars(torch) | dict(
    func=flash_attn_func,
    varlen=flash_attn_varlen_func,
    attention=fagen.attention,
    attention_varlen=fagen.attention_varlen,
    of_heads=of_heads,
    turned=turned,
    in_bf16=torch.Tensor.bfloat16,
    ints=ints,
    at=packed()[3:],
    used=ints(5, 3, 20, 0, 0, 32),
    used_q=ints(5, 0, 33, 3, 1, 70),
    one=torch.ones(()),
    both=dict(return_attn_probs=True),
    lse=dict(return_lse=True),
)

# by what they are called with: what FlashAttention-3's calls give to the bit, gradients too
SAME = """
dense:
  func(q, k, v, **both) == attention(q, k, v, **lse)
  func(q, k, v, causal=True, **both) == attention(q, k, v, causal=True, **lse)
  func(q[:, :1], k, v, causal=True, **both) == attention(q[:, :1], k, v, causal=True, **lse)
  func(q, k[:, :40], v[:, :40], causal=True) == attention(q, k[:, :40], v[:, :40], causal=True)
  func(q, k[:, :0], v[:, :0], **both) == attention(q, k[:, :0], v[:, :0], **lse)
  func(*map(in_bf16, (q, k, v)), **both) == attention(*map(in_bf16, (q, k, v)), **lse)
  func(q, k, v, 0.3, True, None, None, None, None, (-1, -1), 0, 0.0, 1, None, False, 0, False)
    == attention(q, k, v, scale=0.3, causal=True)
  func(q, k, v, num_splits=-1, sm_margin=8, pack_gqa=True) == attention(q, k, v)
  func(q, k, v, num_splits=256, sm_margin=131, pack_gqa=False) == attention(q, k, v)
  func(q, k, v, num_splits=0, deterministic=True) == attention(q, k, v)
  func(q, k, v, window_size=(-1, -1)) == attention(q, k, v)
  func(q, k, v, window_size=[-1, 0]) == attention(q, k, v, causal=True)
  func(q, k, v, window_size=(-1, 0), causal=True) == attention(q, k, v, causal=True)
  func(q, k, v, window_size=(-1, 5), causal=True) == attention(q, k, v, causal=True)
  func(q, k, v, window_size=(199, 69)) == attention(q, k, v)
  func(q, k, v, window_size=(199, -1), causal=True) == attention(q, k, v, causal=True)
  func(q, k, v, window_size=(500, 0)) == attention(q, k, v, causal=True)
  func(turned(q, 1, 3), turned(k, 1, 3), turned(v, 1, 3)) == attention(q, k, v)
  func(q, k, v, q_descale=full((2, 2), 7.0), v_descale=full((2, 2), 7.0)) == attention(q, k, v)

e4m3:
  func(q, k, v, q_descale=a, k_descale=b, v_descale=c, causal=True, **both)
    == attention(q, k, v, q_descale=of_heads(a), k_descale=b, v_descale=c, causal=True, **lse)
  func(q[:, :, :3], k, v, q_descale=a, k_descale=b, v_descale=c)
    == attention(q[:, :, :3], k, v, q_descale=a, k_descale=b, v_descale=c)
  func(cat((q, q), 2), k, v, q_descale=a, k_descale=b, v_descale=c)
    == attention(cat((q, q), 2), k, v, q_descale=of_heads(a, 12), k_descale=b, v_descale=c)
  func(q, k, v) == attention(q, k, v, q_descale=one, k_descale=one, v_descale=one)
  func(q, k, v, None, False, None, a)
    == attention(q, k, v, q_descale=of_heads(a), k_descale=one, v_descale=one)
  func(q, k, v, k_descale=b) == attention(q, k, v, q_descale=one, k_descale=b, v_descale=one)
  func(q, k, v, v_descale=c) == attention(q, k, v, q_descale=one, k_descale=one, v_descale=c)
  func(q, k, v, q_descale=a, v_descale=c)
    == attention(q, k, v, q_descale=of_heads(a), k_descale=one, v_descale=c)
  func(q, k, v, q_descale=full((2, 3), 0.5)) == func(q, k, v, q_descale=(one / 2).expand(2, 3))
  func(q, k[:, :, :1], v[:, :, :1], q_descale=full((2, 1), 0.5))
    == func(q, k[:, :, :1], v[:, :, :1], q_descale=(one / 2).expand(2, 1))

packed:
  varlen(q, k, v, *at, 70, 130, **both) == attention_varlen(q, k, v, *at, **lse)
  varlen(q, k, v, *at, 70, 130, causal=True, **both)
    == attention_varlen(q, k, v, *at, causal=True, **lse)
  varlen(q, k, v, *at, 70, 130, window_size=(-1, 0))
    == attention_varlen(q, k, v, *at, causal=True)
  varlen(q, k, v, *at, 70, 130, window_size=(129, 69)) == attention_varlen(q, k, v, *at)
  varlen(q, k, v, *at, 70, 130, num_splits=0, pack_gqa=True, deterministic=True)
    == attention_varlen(q, k, v, *at)
  varlen(q, k, v, *at, 70, 130, num_splits=16, sm_margin=8, k_descale=ones(6, 2))
    == attention_varlen(q, k, v, *at)
  varlen(q, k, v, *at, 70, 130, softmax_scale=64**-0.5) == attention_varlen(q, k, v, *at)
  varlen(turned(q, 0, 2), turned(k, 0, 2), v, *at, 70, 130, seqused_k=used)
    == attention_varlen(q, k, v, *at, seqused_k=used)
  varlen(q, k, v, *at, 70, 130, used_q, window_size=tensor((300, -1)))
    == attention_varlen(q, k, v, *at, seqused_q=used_q)
  varlen(q, k, v, *at, 70, 130, used_q, used, 0.2, True, None, None, None, None, (-1, -1), 0, 0.0,
    3, True, False, 0, True)
    == attention_varlen(q, k, v, *at, seqused_q=used_q, seqused_k=used, scale=0.2,
    causal=True, **lse)
  varlen(q, k, v, *at, 70, 130, window_size=tensor((-1, 0)))
    == attention_varlen(q, k, v, *at, causal=True)

packed e4m3:
  varlen(q, k, v, *at, 70, 130) == attention_varlen(q, k, v, *at, q_descale=one,
    k_descale=one, v_descale=one)
  varlen(q, k, v, *at, 70, 130, q_descale=q_descale[:, ::2], k_descale=k_descale,
    v_descale=v_descale, causal=True, **both)
    == attention_varlen(q, k, v, *at, q_descale=of_heads(q_descale[:, ::2], 4),
    k_descale=k_descale, v_descale=v_descale, causal=True, **lse)
"""


def same_cases():
    """The cases of the table: what tensors are called so, and both sides."""
    for section in SAME.strip().split("\n\n"):
        name, _, lines = section.partition(":\n")
        for line in lines.replace("\n    ", " ").splitlines():
            yield pytest.param(name, *line.strip().split(" == "), id=line.strip())


@pytest.mark.parametrize(("case", "ours", "fagens"), [*same_cases()])
def test_it_is_fagens_call_and_its_gradients(case, ours, fagens):
    both = []
    for expression in (ours, fagens):
        tensors = {n: x.detach().clone() for n, x in TENSORS[case].items()}
        leaves = [x.requires_grad_() for x in tensors.values() if x.dtype == HALF]
        results = eval(expression, NAMES | tensors)
        results = results if isinstance(results, tuple) else (results,)
        assert all(x.is_contiguous() for x in results)
        total = sum(x.float().masked_fill(x == -math.inf, 0).sum() for x in results)
        both.append((*results, *(torch.autograd.grad(total, leaves) if leaves else ())))
    assert all(map(torch.equal, *both)) and [x.dtype for x in both[0]] == [x.dtype for x in both[1]]


def test_a_descale_that_all_heads_share_is_not_copied(monkeypatch):
    shared = torch.tensor(0.5).expand(2, 3)
    monkeypatch.setattr(calls, "attention", lambda *_, **arguments: arguments)
    arguments = flash_attn_func(*in_e4m3(), q_descale=shared)
    assert arguments["q_descale"].data_ptr() == shared.data_ptr()


def near(result, expected, dtype=HALF):
    close = {HALF: 4e-3, BF16: 3e-2, E4M3: 0.12}[dtype]
    torch.testing.assert_close(result.detach().double(), expected.double(), rtol=close, atol=close)


def near_lse(result, expected):
    torch.testing.assert_close(result.detach().double(), expected, rtol=1e-3, atol=1e-3)


def test_e4m3_that_requires_a_gradient_is_computed_and_not_taken_back():
    tensors = [
        normal(2, 30, heads, 64, seed=i, dtype=BF16).to(E4M3) for i, heads in enumerate((6, 2, 2))
    ]
    descales = {name: torch.rand(2, 2) * 2 + 0.01 for name in SIZES}
    expected = flash_attn_func(*tensors, causal=True, return_attn_probs=True, **descales)
    leaves = [x.detach().requires_grad_() for x in tensors]
    results = flash_attn_func(*leaves, causal=True, return_attn_probs=True, **descales)
    message = ": e4m3 tensors have no grad"
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result, other) and result.requires_grad
        with pytest.raises(NotImplementedError, match=f"^flash_attn_func{message}"):
            result.float().sum().backward(retain_graph=True)
    rows = [x.flatten(0, 1).detach().requires_grad_() for x in leaves]
    at = (ints(0, 30, 60), ints(0, 30, 60), 30, 30)
    out = flash_attn_varlen_func(*rows, *at, ints(30, 12), None, causal=True, **descales)
    assert torch.equal(out[:30], expected[0][0]) and not out[42:].any()
    with pytest.raises(NotImplementedError, match=f"^flash_attn_varlen_func{message}"):
        out.float().sum().backward()
    with torch.no_grad():
        assert not flash_attn_func(*leaves, **descales).requires_grad


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"softcap": 2.0}, {"softcap": 2.0}),
        ({"window_size": (5, 3)}, {"window": (5, 3)}),
        ({"causal": True, "attention_chunk": 8}, {"mask": "chunked", "chunk": 8}),
        ({"causal": True, "softcap": 2.0, "s_aux": torch.ones(6)}, {}),
    ],
)
def test_windows_caps_and_sinks_have_the_gradients_of_attention(theirs, ours):
    q, k, v = (normal(2, 30, heads, 64, seed=i, dtype=BF16) for i, heads in enumerate((6, 2, 2)))
    sinks = theirs.get("s_aux")
    ours = ours or {"causal": True, "softcap": 2.0, "sinks": sinks}
    leaves = [x.requires_grad_() for x in (q, k, v, *(() if sinks is None else (sinks,)))]
    wanted, found = (
        torch.autograd.grad(call(q, k, v, **how).float().square().sum(), leaves)
        for call, how in ((fagen.attention, ours), (flash_attn_func, theirs))
    )
    assert all(map(torch.equal, wanted, found))
    if sinks is None and "attention_chunk" not in theirs:
        out, lse = fagen.attention(q, k, v, return_lse=True, **ours)
        dout, into = (2 * out).detach(), [torch.empty_like(x) for x in leaves]
        bounds = theirs.get("window_size", (-1, -1))
        named = dict(zip(("dq", "dk", "dv"), into, strict=True))
        named |= dict(window_size=bounds, softcap=theirs.get("softcap", 0.0))
        _flash_attn_backward(dout, *leaves, out.detach(), lse.detach(), **named)
        for target, own in zip(into, wanted, strict=True):
            torch.testing.assert_close(target, own)


# ---- varlen sequences ---------------------------------------------------------------------------


# where sequences begin, and what of them is used: none, some, all
AT_Q, USED_Q = ints(0, 40, 73, 73, 90, 130), ints(33, 0, 0, 17, 40)
AT_K, USED_K = ints(0, 60, 100, 130, 131, 231), ints(60, 31, 7, 0, 93)
USED = dict(seqused_q=USED_Q, seqused_k=USED_K)


def sequences(dtype=HALF):
    shapes = (130, 6, 64), (231, 2, 64), (231, 2, 64)
    return [normal(*shape, seed=i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]


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
    arguments = [*packed, at_q, at_k]
    if dense != "k":
        arguments[0], arguments[3] = leaves[0], None
    if dense != "q":
        arguments[1:3], arguments[4] = leaves[1:], None
    more = dict(seqused_q=ints(20, 11, 0), seqused_k=ints(50, 13, 8))
    more |= dict(causal=True, return_attn_probs=True)
    out, lse = flash_attn_varlen_func(*arguments, 20, 50, **more)
    expected, wanted_lse = flash_attn_varlen_func(*packed, at_q, at_k, 20, 50, **more)
    if dense != "k":
        assert out.shape == (3, 20, 4, 64) and lse.shape == (3, 4, 20) and lse.is_contiguous()
        wanted_lse = wanted_lse.unflatten(1, (3, 20)).transpose(0, 1)
    assert torch.equal(out.reshape(expected.shape), expected) and torch.equal(lse, wanted_lse)
    if gradient:
        grads = torch.autograd.grad(out.sum(), arguments[:3])
        theirs = torch.autograd.grad(expected.sum(), packed)
        assert all(torch.equal(x.reshape(y.shape), y) for x, y in zip(grads, theirs, strict=True))


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
    grads = torch.autograd.grad(out, leaves, dout)
    dense = (x.detach()[None] for x in (dout, *leaves))
    expected, wanted_lse, *theirs = gradients(*dense, mask=MASKS["causal"], scale=head_dim**-0.5)
    near(out, expected[0])
    near_lse(lse, wanted_lse[0])
    for grad, other in zip(grads, theirs, strict=True):
        near(grad / 8, other[0] / 8)


# ---- three tensors in one ------------------------------------------------------------------------


@pytest.mark.parametrize("grouped", [False, True])
def test_three_tensors_in_one_are_the_three(grouped):
    shape = (2, 30, 8, 64) if grouped else (2, 30, 3, 4, 64)
    qkv = normal(*shape, dtype=HALF).requires_grad_()
    more = dict(num_heads_q=4) if grouped else {}
    out, lse = flash_attn_qkvpacked_func(qkv, 0.1, True, return_attn_probs=True, **more)
    (grad,) = torch.autograd.grad(out.sum() + lse.sum(), qkv)
    parts = qkv.detach().split((4, 2, 2), 2) if grouped else qkv.detach().unbind(2)
    leaves = [x.clone().requires_grad_() for x in parts]
    expected, wanted_lse = flash_attn_func(*leaves, 0.1, True, return_attn_probs=True)
    assert torch.equal(out, expected) and torch.equal(lse, wanted_lse)
    theirs = torch.autograd.grad(expected.sum() + wanted_lse.sum(), leaves)
    assert torch.equal(grad, torch.cat(theirs, 2) if grouped else torch.stack(theirs, 2))


# ---- below the calls -----------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("older", [False, True])
def test_the_two_passes_by_themselves_are_those_of_the_call(older, deterministic):
    leaves = [x.requires_grad_() for x in qkv(BF16, queries=20, keys=50)]
    q, k, v = (x.detach() for x in leaves)
    expected, wanted_lse = flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    dout = normal(2, 20, 4, 64, seed=5, dtype=BF16)
    expected_grads = torch.autograd.grad(expected, leaves, dout)
    bounds = {"window_size": (-1, -1)} if older else {}
    out, lse, *rest = _flash_attn_forward(q, k, v, softmax_scale=0.125, causal=True, **bounds)
    assert torch.equal(out, expected) and torch.equal(lse, wanted_lse)
    assert [x.numel() for x in rest] == [0, 0]
    into = [torch.empty_like(x) for x in (q, k, v)]
    arguments = (dout, q, k, v, out, lse, *(None,) * 6, *into, 0.125, True)
    results = _flash_attn_backward(*arguments, deterministic=deterministic, softcap=0.0, **bounds)
    assert all(map(torch.equal, into, expected_grads))
    if older:
        assert all(x is y for x, y in zip(results, into, strict=False))
    sums = (dout.double() * out.double()).sum(-1).transpose(1, 2)
    near(results[3] if older else results, sums, BF16)
    leaf = q.clone().requires_grad_()
    _flash_attn_forward(leaf, k, v, causal=True)[0].backward(dout)
    assert torch.equal(leaf.grad, expected_grads[0])


@pytest.mark.parametrize("causal", [False, True])
def test_the_passes_of_used_lengths_are_those_of_the_call(causal):
    leaves = sequences()
    options = USED | dict(causal=causal)
    expected, wanted_lse = flash_attn_varlen_func(
        *leaves, AT_Q, AT_K, 40, 100, return_attn_probs=True, **options
    )
    dout = normal(130, 6, 64, seed=5, dtype=HALF)
    expected_grads = torch.autograd.grad(expected, leaves, dout)
    q, k, v = (x.detach() for x in leaves)
    at = dict(cu_seqlens_q=AT_Q, cu_seqlens_k=AT_K, max_seqlen_q=40, max_seqlen_k=100)
    target = torch.empty_like(expected)
    out, lse, *_ = _flash_attn_forward(q, k, v, out_=target, **at, **options)
    assert out is target and torch.equal(out, expected) and torch.equal(lse, wanted_lse)
    into = [torch.empty_like(x) for x in (q, k, v)]
    lengths = (AT_Q, AT_K, USED_Q, USED_K, 40, 100)
    _flash_attn_backward(dout, q, k, v, out, lse, *lengths, *into, None, causal)
    assert all(map(torch.equal, into, expected_grads))
    # and of sequences of one length
    dense = [x[:120].unflatten(0, (3, 40)) for x in (q, k, v)]
    used_k = ints(40, 13, 2)
    out, lse, *_ = _flash_attn_forward(*dense, seqused_k=used_k, causal=causal)
    cached = flash_attn_with_kvcache(*dense, cache_seqlens=used_k, causal=causal)
    assert torch.equal(out, cached)
    results = _flash_attn_backward(
        torch.ones_like(out), *dense, out, lse, None, None, None, used_k, None, None,
        softmax_scale=0.125, causal=causal, window_size=(-1, -1),
    )  # fmt: skip
    parted = [x.clone().requires_grad_() for x in dense]
    again = flash_attn_varlen_func(*parted, None, None, 40, 40, None, used_k, causal=causal)
    for result, other in zip(results, torch.autograd.grad(again.sum(), parted), strict=False):
        near(result, other)
