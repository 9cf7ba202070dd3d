"""The arguments of an op: a wrong one is named, everywhere in the same words; the others pass."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fagen.runtime import op
from fagen.runtime.checks import checked
from tests.op_helpers import SLUG, qkv, refusal
from tests.stubs import StubOp


@dataclass(frozen=True)
class Wrong:
    """A call that must be refused, made from a good one, and what must be said of it."""

    name: str
    change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    said: str
    scale: float = 0.1
    needs_data: bool = False


def shifted(tensor: Tensor) -> Tensor:
    room = tensor.new_zeros(tensor.numel() + 8)
    return room[1 : 1 + tensor.numel()].view(tensor.shape)


def stepped(tensor: Tensor, dimension: int) -> Tensor:
    strides = list(tensor.stride())
    strides[dimension] += 4
    room = tensor.new_zeros(tensor.numel() * 2)
    return room.as_strided(tensor.shape, strides)


WRONG = [
    Wrong(
        "q_rank",
        lambda q, k, v: (q[0], k, v),
        "q has shape (70, 4, 64); it must be (batch, seqlen_q, heads, 64)",
    ),
    Wrong("q_scalar", lambda q, k, v: (q[0, 0, 0, 0], k, v), "q has shape (); it must be ("),
    Wrong(
        "k_columns",
        lambda q, k, v: (q, k[..., :56], v),
        "k has shape (2, 100, 2, 56); it must be (batch = 2, seqlen_k, kv_heads, 64)",
    ),
    Wrong(
        "v_columns",
        lambda q, k, v: (q, k, k),
        "v has shape (2, 100, 2, 64); it must be (batch = 2, seqlen_k = 100, kv_heads = 2, 32)",
    ),
    Wrong(
        "q_dtype",
        lambda q, k, v: (q.half(), k, v),
        "q is not bfloat16, which this kernel takes; q.to(torch.bfloat16) converts it",
    ),
    Wrong("v_dtype", lambda q, k, v: (q, k, v.float()), "v is not bfloat16"),
    Wrong(
        "q_last",
        lambda q, k, v: (q.transpose(1, 3).contiguous().transpose(1, 3), k, v),
        "q has stride 280 in dimension 3, which must be 1; q.contiguous() makes it so",
    ),
    Wrong(
        "q_batch_stride",
        lambda q, k, v: (stepped(q, 0), k, v),
        "q has stride 17924 in dimension 0, which must be a multiple of 8 elements (16 bytes)",
    ),
    Wrong("k_seq_stride", lambda q, k, v: (q, stepped(k, 1), v), "k has stride 132 in dimension 1"),
    Wrong("v_head_stride", lambda q, k, v: (q, k, stepped(v, 2)), "v has stride 36 in dimension 2"),
    Wrong(
        "too_long",
        lambda q, k, v: (
            q,
            k[:, :1].expand(-1, (1 << 30) + 1, -1, -1),
            v[:, :1].expand(-1, (1 << 30) + 1, -1, -1),
        ),
        "k has seqlen_k = 1073741825; it may be 1073741824 at most",
    ),
    Wrong(
        "k_address",
        lambda q, k, v: (q, shifted(k), v),
        "k does not begin at a multiple of 16 bytes; k.clone() does",
        needs_data=True,
    ),
    Wrong(
        "k_batch",
        lambda q, k, v: (q, k[:1], v[:1]),
        "k has shape (1, 100, 2, 64); it must be (batch = 2, seqlen_k, kv_heads, 64)",
    ),
    Wrong(
        "v_keys",
        lambda q, k, v: (q, k, v[:, :9]),
        "v has shape (2, 9, 2, 32); it must be (batch = 2, seqlen_k = 100, kv_heads = 2, 32)",
    ),
    Wrong(
        "v_heads",
        lambda q, k, v: (q, k, v[:, :, :1]),
        "v has shape (2, 100, 1, 32); it must be (batch = 2, seqlen_k = 100, kv_heads = 2, 32)",
    ),
    Wrong(
        "v_batch",
        lambda q, k, v: (q, k, v[:1]),
        "v has shape (1, 100, 2, 32); it must be (batch = 2, seqlen_k = 100, kv_heads = 2, 32)",
    ),
    Wrong(
        "heads",
        lambda q, k, v: (q[:, :, :3], k, v),
        "heads = 3 must be a multiple of kv_heads = 2",
    ),
    Wrong(
        "no_kv_heads",
        lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]),
        "heads = 4 must be a multiple of kv_heads = 0",
    ),
    *(
        Wrong(
            f"scale_{scale:g}",
            lambda q, k, v: (q, k, v),
            f"scale is {scale:g}; it must be finite and above 0 as a float32, and 1e+08 at most",
            scale=scale,
        )
        for scale in (0.0, -1.0, math.nan, math.inf, 1e39, 1e-50, 3e38, 1.01e8)
    ),
    Wrong("scale_nan_with_a_sign", lambda q, k, v: (q, k, v), "scale is nan; it", -math.nan),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_a_wrong_argument_is_named_in_the_same_words_everywhere(
    stub_op: Callable[[str], StubOp], wrong: Wrong
) -> None:
    of, arguments = stub_op(SLUG), wrong.change(*qkv())
    calls = [
        lambda: of.op(*arguments, wrong.scale),  # C++, through Autograd
        lambda: of.below(*arguments, wrong.scale),  # C++
        lambda: of.alone(*arguments, wrong.scale),
        lambda: op.emulated(SLUG)(*arguments, wrong.scale),  # Python
        lambda: checked(of.plan, dict(zip("qkv", arguments, strict=True), scale=wrong.scale)),
    ]
    said = [refusal(call) for call in calls]
    if not wrong.needs_data:
        with FakeTensorMode() as mode:
            arguments = [mode.from_tensor(x) for x in arguments]  # which the calls read anew
            said += [refusal(call) for call in calls[:4]]
    assert set(said) == {said[0]}
    assert said[0].startswith(f"fagen::{SLUG}: {wrong.said}")


def test_tensors_on_two_devices_are_refused(stub_op: Callable[[str], StubOp]) -> None:
    with FakeTensorMode():
        q, k, v = (t.to("cpu") for t in (torch.empty(t.shape, dtype=t.dtype) for t in qkv()))
        elsewhere = torch.empty(v.shape, dtype=v.dtype, device="meta")
        given = dict(q=q, k=k, v=elsewhere, scale=0.1)
        with pytest.raises(ValueError, match=r"v is not on the device of q; v\.to\(q\.device\)"):
            checked(stub_op(SLUG).plan, given, have_data=False)


def test_what_the_contract_allows_is_not_refused(stub_op: Callable[[str], StubOp]) -> None:
    attend, (q, k, v) = stub_op(SLUG).op, qkv()
    expected = attend(q, k, v, 0.1)[0]
    packed = torch.randn(2, 70, 12, 64).bfloat16()  # slices of one buffer
    attend(packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:, :32], 0.1)
    bhsd = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(attend(*bhsd, 0.1)[0], expected)
    attend(q, k[:, :, :1].expand(-1, -1, 2, -1), v, 0.1)  # stride 0
    one = torch.zeros(1000, dtype=torch.bfloat16).as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    attend(one, one, one[..., :32], 0.1)  # strides of single elements mean nothing
    empty = shifted(torch.zeros(8, dtype=torch.bfloat16))[:0].view(2, 0, 4, 64)
    assert attend(empty, k, v, 0.1)[0].shape == (2, 0, 4, 32)  # nor does the address of nothing
    assert attend(q[:, :, :0], k[:, :, :0], v[:, :, :0], 0.1)[1].shape == (2, 0, 70)
