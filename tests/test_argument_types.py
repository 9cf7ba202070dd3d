"""Arguments of another type than a public call takes: named, or taken for what they say."""

import math
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import fagen
from fagen.errors import DeviceError
from fagen.flash_attn_interface import (
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from tests.public_calls import GOOD
from tests.tensors import ints, normal

pytestmark = [
    pytest.mark.usefixtures("nothing_is_ready"),
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]


def half(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed, dtype=torch.float16)


Q, K, V = half(2, 5, 4, 32), half(2, 9, 2, 32, seed=1), half(2, 9, 2, 32, seed=2)
PACKED = tuple(x.flatten(0, 1) for x in (Q, K, V))
OFFSETS = ints(0, 4, 10), ints(0, 8, 18)

CALLS = {
    name: call
    for name, call in GOOD.items()
    if not name.startswith(("_", "prepare")) and "-" not in name and "qkv" not in name
}
TENSORS = [
    (call, name)
    for call, (_, arguments) in CALLS.items()
    for name, value in arguments.items()
    if isinstance(value, Tensor)
]


def refused(call: str, kind: type[Exception] = TypeError, **changes: Any) -> str:
    """What a call says that was changed so, and that it raises so much and no more."""
    function, arguments = CALLS[call]
    with pytest.raises((ValueError, TypeError)) as refusal:
        function(**{"keys": 9} if call == "reference_for" else {}, **arguments | changes)
    assert refusal.type is kind
    return str(refusal.value)


@pytest.mark.parametrize(("call", "name"), TENSORS, ids=map("-".join, TENSORS))
def test_what_is_no_tensor_is_named(call, name):
    function, arguments = CALLS[call]
    for other in (arguments[name].tolist(), "cuda", object()):
        message = refused(call, **{name: other})
        assert message.startswith(
            f"{function.__name__}: {name} is of type {type(other).__name__}; it"
        )
        assert "a torch.Tensor" in message
        assert ("torch.as_tensor(" in message) == isinstance(other, list)


@pytest.mark.parametrize(
    ("call", "changes"),  # of others test_arguments_hostile says so
    [
        *((call, {"schedule": 64}) for call in ("attention", "attention_varlen")),
        ("attention_varlen", {"schedule": {}}),
        ("attention_decode", {"schedule": 1.5}),
        ("flash_attn_func", {"softcap": "0"}),
        ("flash_attn_func", {"window_size": 3}),
        ("flash_attn_func", {"window_size": ("left", 0)}),
        ("flash_attn_varlen_func", {"max_seqlen_k": "9", "window_size": (3, -1)}),
        ("quantize", {"rotary": 10_000.0, "rotary_pairs": True}),
    ],
)
def test_what_is_no_number_and_no_word_is_named(call, changes):
    name, value = next(iter(changes.items()))
    assert f"{name} is of type {type(value).__name__}; it must be" in refused(call, **changes)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_no_kernel_reads_are_named():
    assert "k is torch.sparse_coo" in refused("attention", ValueError, k=K.to_sparse())
    nested = torch.nested.nested_tensor([PACKED[1], PACKED[1]])
    assert "k is a nested tensor; attention_varlen" in refused("attention", ValueError, k=nested)
    quantised = torch.quantize_per_tensor(K.float(), 0.1, 0, torch.qint8)
    assert "k is torch.qint8" in refused("attention_decode", ValueError, k=quantised)


@pytest.mark.parametrize(("call", "name"), TENSORS, ids=map("-".join, TENSORS))
def test_a_tensor_without_numbers_at_strides_is_named_in_every_place(call, name):
    empty = torch.nn.parameter.UninitializedParameter(dtype=torch.float16)
    assert f"{name} is a parameter that is not" in refused(call, ValueError, **{name: empty})
    buffer = torch.nn.parameter.UninitializedBuffer(dtype=torch.float16)
    assert f"{name} is a parameter that is not" in refused(call, ValueError, **{name: buffer})
    rows = [half(2, 32), half(3, 32)]
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(rows, layout=layout)
        assert f"{name} is a nested tensor" in refused(call, ValueError, **{name: nested})


@pytest.mark.parametrize("call", ["attention", "attention_decode", "attention_varlen", "combine"])
@pytest.mark.parametrize("error", [None, MemoryError()])
def test_an_emulation_without_room_says_how_much_it_asked_for_and_for_what(
    call, error, monkeypatch
):
    function, arguments = CALLS[call]
    expected = function(**arguments)  # readied

    class Full:
        """In the place of what an emulation begins with."""

        def __init__(self, *_, **__):
            if error:
                raise error
            torch.empty(1 << 50, dtype=torch.uint8)

    with monkeypatch.context() as full:
        full.setattr(torch, "autocast", Full)
        with pytest.raises(MemoryError) as refusal:
            function(**arguments)
    first, tensor = next(iter(arguments.items()))
    much = "more memory than there is" if error else f"{1 << 50:,} bytes at once"
    assert f"emulated, which took {much} for {first} {tuple(tensor.shape)}" in str(refusal.value)
    torch.testing.assert_close(function(**arguments), expected)


# ---- scales -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_a_scale_is_any_number_also_where_gradients_are_wanted(packed):
    def gradients(scale):
        leaves = [x.clone().requires_grad_() for x in (PACKED if packed else (Q, K, V))]
        attention = fagen.attention_varlen if packed else fagen.attention
        out = attention(*leaves, *(OFFSETS if packed else ()), scale=scale)
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    usual = gradients(1.0)
    for number in (1, True, numpy.float32(1), numpy.int64(1), torch.tensor(1), torch.tensor(1.0)):
        assert all(map(torch.equal, gradients(number), usual))


def test_a_scale_that_wants_a_gradient_is_refused():
    learnt = torch.nn.Parameter(torch.tensor(0.5))
    for call in ("attention", "attention_varlen", "attention_decode"):
        assert "scale requires a gradient" in refused(call, ValueError, scale=learnt)
    with torch.no_grad():
        assert torch.equal(
            fagen.attention(Q, K, V, scale=learnt), fagen.attention(Q, K, V, scale=0.5)
        )
    assert "seed is a number of 65 bits, too large" in refused("quantize", ValueError, seed=2**64)
    assert "scale is beyond all" in refused("attention", ValueError, scale=10**400)


# ---- what torch does besides calling ------------------------------------------------------------


@pytest.mark.parametrize("call", ["attention", "attention_varlen", "attention_decode"])
def test_tangents_are_refused_and_not_taken_for_zero(call):
    function, arguments = CALLS[call]
    k, rest = arguments["k"], {name: x for name, x in arguments.items() if name != "k"}
    with pytest.raises(ValueError, match="there are no forward-mode gradients"):
        torch.func.jvp(lambda k: function(k=k, **rest), (k,), (k,))
    with forward_ad.dual_level():
        assert "a tensor has a tangent" in refused(call, ValueError, k=forward_ad.make_dual(k, k))
        assert torch.equal(function(**arguments), function(**arguments))  # others pass


@pytest.mark.parametrize("call", ["attention", "attention_varlen", "attention_decode"])
def test_gradients_that_vmap_hides_are_refused(call):
    function, arguments = CALLS[call]
    k, rest = (
        torch.stack((arguments["k"], arguments["k"] * 2)),
        {x: y for x, y in arguments.items() if x != "k"},
    )
    mapped = torch.vmap(lambda k: function(k=k, **rest))
    assert torch.equal(mapped(k), torch.stack([function(k=tensor, **rest) for tensor in k]))
    with pytest.raises(ValueError, match="requires a gradient"):
        mapped(k.requires_grad_())


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_packed_sequences_are_traced_by_torch_jit():
    def attend(q, k, v):
        return fagen.attention_varlen(q, k, v, *OFFSETS)

    assert torch.equal(torch.jit.trace(attend, PACKED)(*PACKED), attend(*PACKED))


def test_what_torch_sees_no_gpu_for_is_not_readied(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match='device is "cuda:1", and torch sees no GPU'):
        fagen.prepare(dtype="fp16", head_dim=64, device="cuda:1")


# ---- over a cache -------------------------------------------------------------------------------


def test_one_length_for_all_is_any_whole_number_of_int32():
    usual = flash_attn_with_kvcache(Q, K, V, cache_seqlens=7)
    assert torch.equal(flash_attn_with_kvcache(Q, K, V, cache_seqlens=numpy.int64(7)), usual)
    with pytest.raises(TypeError, match=r"cache_seqlens is of type Size; it must be a torch\.T"):
        get_scheduler_metadata(1, 1, 1, 1, 1, 1, torch.Size((1,)))


def test_a_cache_without_keys_has_none_however_far_its_end_lies_below():
    q, lowest = half(2, 300, 2, 32), -(2**31)
    for packed in (False, True):
        query = {"q": q.flatten(0, 1), "cu_seqlens_q": ints(0, 300, 600)} if packed else {"q": q}
        out, lse = flash_attn_with_kvcache(
            **query,
            k_cache=K,
            v_cache=V,
            cache_seqlens=ints(lowest, lowest),
            cache_leftpad=ints(1, 5),
            return_softmax_lse=True,
        )
        assert not out.any() and (lse == -math.inf).all()


def test_a_reference_is_finite_or_minus_infinity():
    lse = normal(2, 4, 5)
    usual = fagen.reference_for(lse, 9)
    broken = lse.clone()
    broken[0, 1], broken[1, 2, 0], broken[:, 3] = math.nan, math.inf, -math.inf
    results = fagen.reference_for(broken, 9)
    assert results[0] == usual[0] and results[1] == fagen.reference_for(lse[1:], 9)[1]
    assert results[2].isfinite() and results[3] == -math.inf
    assert (fagen.reference_for(lse, 0) == -math.inf).all()
    assert fagen.reference_for(lse[:, :, :0], 9).tolist() == [-math.inf] * 4
    with pytest.raises(ValueError, match=r"lse has shape \(2, 4, 5\) in .* and keys \(3,\)"):
        fagen.reference_for(lse, ints(1, 2, 3))


@pytest.mark.parametrize("call", ["attention", "attention_varlen", "attention_decode"])
def test_of_no_heads_there_is_nothing(call):
    function, arguments = CALLS[call]
    none = {name: x[..., :0, :] for name, x in arguments.items() if name in "qkv"}
    assert function(**arguments | none).shape == none["q"].shape
    if call != "attention_decode":
        leaves = {name: x.clone().requires_grad_() for name, x in none.items()}
        function(**arguments | leaves).sum().backward()
        for x in leaves.values():
            assert x.grad is not None and x.grad.shape == x.shape
