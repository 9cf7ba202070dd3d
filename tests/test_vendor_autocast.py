"""What vendored packages for torch cast under torch.autocast, where not as the library itself does.

What both do is in test_autocast.py.
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fagen import vendor
from tests.test_autocast import (
    BF16,
    FP16,
    FP32,
    FP64,
    LENGTHS,
    Call,
    of_a_gpu,
    packed,
    qkv,
)
from tests.vendor_gradients import EIGHT, package
from tests.vendor_helpers import asked

FORWARD = "fwd_fp16_d32_causal_m64n64"


def attention_decode(package: ModuleType) -> Call:
    return lambda q, k, v, **how: package.attention_decode(q, k, v, seqused_k=LENGTHS, **how)


CALLS = {
    "attention": lambda package: package.attention,
    "attention_varlen": lambda package: packed(package.attention_varlen),
    "attention_decode": attention_decode,
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest, demo: ModuleType) -> Call:
    return CALLS[request.param](demo)


# ---- what is cast -------------------------------------------------------------------------------


def test_a_folder_without_gradients_casts_too(tmp_path: Any) -> None:
    tensors = qkv(FP32, FP32, FP16)
    with package(tmp_path, FORWARD) as demo:
        with torch.autocast("cpu", FP16):
            out = demo.attention(*tensors, causal=True)
        assert torch.equal(out, demo.attention(*(x.half() for x in tensors), causal=True))
        no_kernel = r"has no kernel for torch\.bfloat16, 32, 32, causal, torch\.bfloat16; it has"
        with torch.autocast("cpu", BF16), pytest.raises(ValueError, match=no_kernel):
            demo.attention(*tensors, causal=True)
        why = r"^q is torch\.float32; kernels here take torch\.float16: q\.to\(torch\.float16\) co"
        with pytest.raises(ValueError, match=why):
            demo.attention(*tensors, causal=True)


def test_a_folder_of_e4m3_alone_has_nothing_to_cast() -> None:
    texts = vendor.FORMATS["torch"](vendor.folder_of(asked("demo", "torch", EIGHT)))
    python = {path: text for path, text in texts.items() if path.startswith("python/")}
    assert "python/demo/_attention.py" in python and "python/demo/_autocast.py" not in python
    assert not [path for path in python if "autocast" in python[path]]
    assert "autocast" not in texts["README.md"]


# ---- what is not --------------------------------------------------------------------------------


def test_three_of_one_dtype_of_16_bits_are_taken_as_they_are(
    demo: ModuleType, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (demo._attention, demo._decode, demo._varlen):
        monkeypatch.setattr(module, "cast", lambda *_: pytest.fail("no call should ask"))
    tensors = qkv(FP16, FP16, FP16)
    with torch.autocast("cpu", BF16):
        out = call(*tensors, causal=True)
    assert out.dtype == FP16 and torch.equal(out, call(*tensors, causal=True))


def test_outside_of_it_fp32_is_refused_and_it_is_named(call: Call) -> None:
    for dtypes, name, to in (
        ((FP32, FP32, FP32), "q", BF16),  # the first of the folder's
        ((FP32, FP16, BF16), "q", FP16),
        ((BF16, FP32, BF16), "k", BF16),
        ((FP16, FP16, FP32), "v", FP16),
    ):
        message = (
            f"{name} is torch.float32; kernels here take torch.bfloat16 or torch.float16: "
            f"{name}.to({to}) converts it, and so does torch.autocast around the call"
        )
        for elsewhere in (torch.autocast("cpu", BF16, enabled=False), of_a_gpu(BF16)):
            with elsewhere, pytest.raises(ValueError, match=r"float32") as refusal:
                call(*qkv(*dtypes), causal=True)
            assert str(refusal.value) == message


def test_what_it_does_not_cast_is_refused_as_ever(call: Call) -> None:
    for dtypes in ((FP64,) * 3, (FP64, BF16, BF16), (BF16, BF16, FP64), (FP32, BF16, FP64)):
        with torch.autocast("cpu", BF16), pytest.raises(ValueError, match=r"bfloat16") as r:
            call(*qkv(*dtypes), causal=True)
        assert "autocast" not in str(r.value)
    with pytest.raises(ValueError, match=r"k is not bfloat16|k is torch\.float16") as r:
        call(*qkv(BF16, FP16, BF16), causal=True)
    assert "autocast" not in str(r.value)


def test_what_else_is_wrong_is_refused_in_its_own_words(demo: ModuleType) -> None:
    q, k, v = qkv(FP32, FP32, FP32)
    with torch.autocast("cpu", BF16):
        for wrong, message in (
            ({"v": v[:, :3]}, r"v has shape \(2, 3, 2, 32\); it must be"),
            ({"q": q.flatten(0, 1)}, "q has 3 dimensions"),
            ({"causal": False}, r"has no kernel for torch\.bfloat16, 32, 32, full"),
        ):
            with pytest.raises(ValueError, match=message):
                demo.attention(**{"q": q, "k": k, "v": v, "causal": True} | wrong)


def test_on_a_gpu_it_is_that_of_a_gpu(demo: ModuleType) -> None:
    cast = demo._autocast.cast
    with FakeTensorMode():
        tensors = tuple(torch.empty(2, 3, 4, 32, device="cuda") for _ in range(3))
        with torch.autocast("cpu", BF16), pytest.raises(ValueError, match=r"q is torch\.float32"):
            cast(*tensors)
        with of_a_gpu(FP16):
            assert {x.dtype for x in cast(*tensors)} == {FP16}


def test_where_there_is_no_autocast_fp32_is_refused(demo: ModuleType) -> None:
    tensors = (x.to("meta") for x in qkv(FP32, FP32, FP32))
    with pytest.raises(ValueError, match=r"q is torch\.float32"):
        demo.attention(*tensors, causal=True)
