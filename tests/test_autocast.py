"""Calls under torch.autocast: what is cast, to what, and what is taken or refused as without it."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fagen
from fagen.flash_attn_interface import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from fagen.runtime import autocast
from tests.tensors import normal

pytestmark = [
    pytest.mark.usefixtures("nothing_is_ready"),
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]

FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
# of q, k and v: all in fp32; a rotary embedding's; one that a layer norm left; two of 16 bits
OTHERS = [(FP32,) * 3, (FP32, BF16, BF16), (BF16, FP32, FP16), (FP16, FP16, BF16)]
AT = torch.tensor([0, 4, 10], dtype=torch.int32), torch.tensor([0, 8, 18], dtype=torch.int32)
LENGTHS = torch.tensor([9, 3], dtype=torch.int32)

Call = Callable[..., Any]


def packed(call: Call, *more: int) -> Call:
    """A call of varlen sequences, of tensors that are not."""
    return lambda q, k, v, **how: call(*(x.flatten(0, 1) for x in (q, k, v)), *AT, *more, **how)


# those that have gradients
TRAINED: dict[str, Call] = {
    "attention": fagen.attention,
    "attention_varlen": packed(fagen.attention_varlen),
    "flash_attn_func": flash_attn_func,
    "flash_attn_varlen_func": packed(flash_attn_varlen_func, 6, 10),
}
CALLS: dict[str, Call] = TRAINED | {
    "attention_decode": lambda q, k, v, **how: fagen.attention_decode(
        q, k, v, seqused_k=LENGTHS, **how
    ),
    "flash_attn_with_kvcache": lambda q, k, v, **how: flash_attn_with_kvcache(
        q, k, v, cache_seqlens=LENGTHS, **how
    ),
    "attention_fp8": fagen.attention_fp8,
}
# those of a vendored package for torch
PACKAGED: dict[str, Callable[[Any], Call]] = {
    "a package's attention": lambda package: package.attention,
    "a package's attention_varlen": lambda package: packed(package.attention_varlen),
    "a package's attention_decode": lambda package: (
        lambda q, k, v, **how: package.attention_decode(q, k, v, seqused_k=LENGTHS, **how)
    ),
}
PACKAGED_TRAINED = [*PACKAGED][:2]


@pytest.fixture(params=[*CALLS, *PACKAGED])
def call(request):
    """A call, by its name."""
    if request.param in CALLS:
        return CALLS[request.param]
    return PACKAGED[request.param](request.getfixturevalue("demo"))


def qkv(*dtypes: torch.dtype) -> list[Tensor]:
    """Numbers that all dtypes have, so that no cast before or after another shows."""
    shapes = ((2, 5, 4, 32), (2, 9, 2, 32), (2, 9, 2, 32))
    tensors = (normal(*shape, seed=seed).to(BF16) for seed, shape in enumerate(shapes))
    return [x.to(dtype) for x, dtype in zip(tensors, dtypes, strict=True)]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, enable_gqa=True).transpose(1, 2)


@contextmanager
def of_a_gpu(dtype: torch.dtype) -> Iterator[None]:
    """torch.autocast("cuda", dtype), which torch leaves off where there is no GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


# ---- what is cast -------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [BF16, FP16], ids=str)
@pytest.mark.parametrize("dtypes", OTHERS, ids=str)
def test_what_would_be_refused_is_cast(call, dtypes, to):
    tensors = qkv(*dtypes)
    with torch.autocast("cpu", to):
        out = call(*tensors, causal=True)
        assert out.dtype == to == sdpa(*tensors).dtype
    assert torch.equal(out, call(*(x.to(to) for x in tensors), causal=True))


@pytest.mark.parametrize(
    ("call", "schedule"),
    [
        ("attention", {"schedule": "fwd_bf16_d32_causal_m64n64"}),
        ("attention_varlen", {"schedule": "fwd_bf16_d32_causal_m64n64_varlen"}),
        *((name, {}) for name in PACKAGED),
    ],
    indirect=["call"],
)
@pytest.mark.parametrize("dtypes", OTHERS, ids=str)
def test_other_arguments_stay_as_they_were(call, schedule, dtypes):
    how, tensors = dict(causal=True, scale=0.3, **schedule), qkv(*dtypes)
    with torch.autocast("cpu", BF16):
        out, lse = call(*tensors, **how, return_lse=True)
        assert torch.equal(call(*tensors, **how), out)
    expected = call(*(x.to(BF16) for x in tensors), **how, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("dtypes", OTHERS, ids=str)
@pytest.mark.parametrize("call", [*TRAINED, *PACKAGED_TRAINED], indirect=True)
def test_gradients_come_back_in_the_dtypes_of_their_tensors(call, dtypes):
    tensors = [x.requires_grad_() for x in qkv(*dtypes)]
    with torch.autocast("cpu", BF16):
        call(*tensors, causal=True).float().square().sum().backward()
    expected = [x.detach().to(BF16).requires_grad_() for x in tensors]
    call(*expected, causal=True).float().square().sum().backward()
    for x, exact in zip(tensors, expected, strict=True):
        assert x.grad is not None and exact.grad is not None and x.grad.dtype == x.dtype
        assert torch.equal(x.grad, exact.grad.to(x.dtype))


def test_a_projection_learns_through_it_as_through_torchs_own():
    x, results = normal(2, 9, 64), []
    for attend in (fagen.attention, sdpa):
        torch.manual_seed(0)
        layer = torch.nn.Linear(64, 3 * 64)
        with torch.autocast("cpu", BF16):
            q, k, v = layer(x).unflatten(-1, (3, 2, 32)).unbind(2)
            q, k = (turned.float() * 1.01 for turned in (q, k))  # as a rotary embedding leaves them
            out = attend(q, k, v)
        out.float().square().sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.dtype == FP32
        results.append(layer.weight.grad)
    assert torch.allclose(*results, rtol=0.05, atol=0.02 * float(results[1].abs().max()))


def test_a_model_of_transformers_may_compute_in_fp32_around_it():
    pytest.importorskip("transformers")
    from fagen.huggingface import attend

    q, k, v = (x.transpose(1, 2) for x in qkv(FP32, FP32, BF16))
    arguments = torch.nn.Identity(), q, k, v, None
    with torch.autocast("cpu", BF16):
        assert attend(*arguments, is_causal=False)[0].dtype == BF16
    with pytest.raises(ValueError, match=r"in float32: .*, or call it under torch\.autocast"):
        attend(*arguments, is_causal=False)


# ---- traced -------------------------------------------------------------------------------------


def prepare() -> None:
    how: dict[str, Any] = dict(dtype="bf16", head_dim=32, causal=True, device="cpu")
    fagen.prepare(**how, gradient=True)
    fagen.prepare_varlen(**how, gradient=True)
    fagen.prepare_decode(**how, heads=4, kv_heads=2, batch=2, queries=5)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("call", "dtypes"),
    [(name, dtypes) for name in ("attention", *PACKAGED_TRAINED) for dtypes in OTHERS]
    + [(name, OTHERS[2]) for name in [*TRAINED][1:]],
    indirect=["call"],
    ids=str,
)
def test_compiled_it_is_one_graph(fresh_dynamo, call, dtypes, inside):
    def loss(*tensors):
        out = call(*tensors, causal=True)
        return out.float().square().sum()

    def around(*tensors):
        with torch.autocast("cpu", BF16):
            return loss(*tensors)

    prepare()
    compiled = torch.compile(around if inside else loss, fullgraph=True, backend="aot_eager")
    ours = [x.requires_grad_() for x in qkv(*dtypes)]
    with torch.autocast("cpu", BF16, enabled=not inside):
        compiled(*ours).backward()
    theirs = [x.detach().to(BF16).requires_grad_() for x in ours]
    call(*theirs, causal=True).float().square().sum().backward()
    for x, exact in zip(ours, theirs, strict=True):
        assert x.grad is not None and exact.grad is not None and x.grad.dtype == x.dtype
        assert torch.equal(x.grad, exact.grad.to(x.dtype))


@pytest.mark.parametrize(
    ("call", "dynamic"),
    [(name, None) for name in ("attention", "attention_varlen", "attention_decode")]
    + [(name, True) for name in PACKAGED],
    indirect=["call"],
)
def test_compiled_without_gradients_it_is_one_graph_too(fresh_dynamo, call, dynamic):
    prepare()
    tensors = qkv(FP32, BF16, BF16)
    for more in ({}, {"return_lse": True}):
        compiled = torch.compile(
            lambda *args, more=more: call(*args, causal=True, **more),
            fullgraph=True,
            dynamic=dynamic,
            backend="aot_eager",
        )
        with torch.autocast("cpu", BF16):
            results, expected = compiled(*tensors), call(*tensors, causal=True, **more)
        pairs = zip(results, expected, strict=True) if more else [(results, expected)]
        assert all(torch.equal(a, b) for a, b in pairs)


class Model(torch.nn.Module):
    """Attention under an autocast of its own."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            out: Any = self.call(q, k, v, causal=True)
        return out


@pytest.mark.parametrize("call", ["attention", "a package's attention"], indirect=True)
@pytest.mark.parametrize("strict", [False, True])
def test_exported_the_casts_stand_in_the_program(fresh_dynamo, call, strict):
    prepare()
    model, tensors = Model(call), qkv(FP32, FP32, BF16)
    exported = torch.export.export(model, tuple(tensors), strict=strict)
    assert torch.equal(exported.module()(*tensors), model(*tensors))


# ---- what is not --------------------------------------------------------------------------------


def test_three_of_one_dtype_of_16_bits_are_taken_as_they_are(call):
    tensors = qkv(FP16, FP16, FP16)
    with torch.autocast("cpu", BF16):
        out = call(*tensors, causal=True)
    assert out.dtype == FP16 and torch.equal(out, call(*tensors, causal=True))


def test_outside_of_it_fp32_is_refused_and_it_is_named(call):
    tensors = qkv(FP32, FP32, FP32)
    message = "converts? it, and so does torch.autocast around the call$"
    for elsewhere in (torch.autocast("cpu", BF16, enabled=False), of_a_gpu(BF16)):
        with elsewhere, pytest.raises(ValueError, match=rf"q is (torch\.)?float32; .*{message}"):
            call(*tensors, causal=True)
    with pytest.raises(ValueError, match=r"k[is ]* .*converts it"):
        call(*qkv(BF16, FP32, BF16), causal=True)


def test_what_it_does_not_cast_is_refused_as_ever(call):
    for dtypes in ((FP64,) * 3, (FP64, BF16, BF16), (BF16, BF16, FP64)):
        with torch.autocast("cpu", BF16), pytest.raises(ValueError, match=r"bfloat16|float16") as r:
            call(*qkv(*dtypes), causal=True)
        assert "autocast" not in str(r.value)


def test_what_else_is_wrong_is_refused_in_its_own_words():
    q, k, v = qkv(FP32, FP32, FP32)
    with torch.autocast("cpu", BF16):
        for wrong, message in (
            ({"v": v[:, :3]}, "v has shape (2, 3, 2, 32); it must be"),
            ({"scale": -1.0}, "scale is -1; it must be finite and above 0"),
            ({"q_descale": torch.ones(())}, "descales, means, v_layout, scale_rows and out_dtype"),
            ({"q": q.flatten(0, 1)}, "q has 3 dimensions"),
        ):
            with pytest.raises(ValueError, match=re.escape(message)):
                fagen.attention(**{"q": q, "k": k, "v": v} | wrong)


def test_on_a_gpu_it_is_that_of_a_gpu():
    with FakeTensorMode():
        tensors = tuple(torch.empty(2, 3, 4, 32, device="cuda") for _ in range(3))
        with torch.autocast("cpu", BF16):
            assert autocast.cast(*tensors) == tensors
        with of_a_gpu(FP16):
            assert {x.dtype for x in autocast.cast(*tensors)} == {FP16}
