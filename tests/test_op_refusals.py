"""The arguments of an op: a wrong one is named, everywhere in the same words; the others pass.

Every way to be wrong is tried on toys in signature/test_refused.py; here, what kernels declare.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fagen.e4m3 import by_columns, by_rows
from fagen.registry import plan_of
from fagen.runtime.checks import checked
from tests.op_helpers import (
    COLUMNS,
    PACKED,
    PACKED8,
    ROWS,
    SLUG,
    arguments,
    qkv,
    refused_everywhere,
)
from tests.tensors import normal
from tests.varlen_helpers import offsets

Q, K, V = qkv()
C, R, P = (arguments(plan_of(slug)) for slug in (COLUMNS, ROWS, PACKED))


def shifted(x: Tensor) -> Tensor:
    """A tensor that begins an element behind a multiple of 16 bytes."""
    return torch.zeros(x.numel() + 8).to(x.dtype)[1 : 1 + x.numel()].view(x.shape)


def strided(x: Tensor, *strides: int) -> Tensor:
    room = x.new_zeros(sum(s * n for s, n in zip(strides, x.shape, strict=True)) + 1)
    return room.as_strided(x.shape, strides)


def stepped(x: Tensor, dimension: int) -> Tensor:
    """A tensor with a stride that is 4 elements longer."""
    strides = list(x.stride())
    strides[dimension] += 4
    return strided(x, *strides)


def long(x: Tensor) -> Tensor:
    return x[:, :1].expand(-1, (1 << 30) + 1, -1, -1)


OF_K = "it must be (batch = 2, seqlen_k, kv_heads, 64)"
OF_V = "it must be (batch = 2, seqlen_k = 100, kv_heads = 2, 32)"
BY_COLUMNS = "it must be (batch = 2, kv_heads = 2, 32, ceil(seqlen_k / 16) · 16 = 112)"
SCALE = "; it must be finite and above 0 as a float32, and 1e+08 at most"
OF_KV_HEADS = "it must be (batch = 2 or 1, kv_heads = 2 or 1, "
OF_SEQUENCES = "it must be (offsets - 1 = 6 or 1, heads = 4 or 1, 1)"

# by slug: what is changed of a good call, and what must be said of it
WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    SLUG: [
        (dict(q=Q[0]), "q has shape (70, 4, 64); it must be (batch, seqlen_q, heads, 64)"),
        (dict(k=K[..., :56]), f"k has shape (2, 100, 2, 56); {OF_K}"),
        (dict(v=K), f"v has shape (2, 100, 2, 64); {OF_V}"),
        (
            dict(q=Q.half()),
            "q is not bfloat16, which this kernel takes; q.to(torch.bfloat16) converts it",
        ),
        (
            dict(q=Q.transpose(1, 3).contiguous().transpose(1, 3)),
            "q has stride 280 in dimension 3, which must be 1; q.contiguous() makes it so",
        ),
        (
            dict(q=stepped(Q, 0)),
            "q has stride 17924 in dimension 0, which must be a multiple of 8 elements (16 bytes)",
        ),
        (dict(k=stepped(K, 1)), "k has stride 132 in dimension 1"),
        (dict(v=stepped(V, 2)), "v has stride 36 in dimension 2"),
        (
            dict(k=long(K), v=long(V)),
            "k has seqlen_k = 1073741825; it may be 1073741824 at most",
        ),
        (dict(k=shifted(K)), "k does not begin at a multiple of 16 bytes; k.clone() does"),
        (dict(k=K[:1], v=V[:1]), f"k has shape (1, 100, 2, 64); {OF_K}"),
        (dict(q=Q[:, :, :3]), "heads = 3 must be a multiple of kv_heads = 2"),
        (dict(k=K[:, :, :0], v=V[:, :, :0]), "heads = 4 must be a multiple of kv_heads = 0"),
        *(
            (dict(scale=scale), f"scale is {scale:g}{SCALE}")
            for scale in (-1.0, math.nan, 1e39, 1e-50, 1.01e8)
        ),
    ],
    COLUMNS: [
        (dict(v=by_rows(C["v"], 100).contiguous()), f"v has shape (2, 100, 2, 32); {BY_COLUMNS}"),
        (  # not filled up
            dict(v=strided(C["v"][..., :100], 7168, 3584, 112, 1)),
            f"v has shape (2, 2, 32, 100); {BY_COLUMNS}",
        ),
        (
            dict(v=strided(C["v"], 2 * 32 * 120, 32 * 120, 120, 1)),
            "v has stride 120 in dimension 2, which must be a multiple of 16 elements (16 bytes)",
        ),
        (
            dict(q_descale=None),
            "q_descale is missing; this kernel has scales by block of 32 rows",
        ),
        (
            dict(k_descale=C["k_descale"][..., :1]),
            f"k_descale has shape (2, 2, 1); {OF_KV_HEADS}ceil(seqlen_k / 32) = 4)",
        ),
        (
            dict(q_descale=torch.ones(2, 4, 2)),
            "q_descale has shape (2, 4, 2); it must be (batch = 2 or 1, heads = 4 or 1, "
            "ceil(seqlen_q / 32) = 3)",
        ),
        (
            dict(v_descale=torch.ones(2, 2, 4)),
            f"v_descale has shape (2, 2, 4); {OF_KV_HEADS}32 or 1)",
        ),
        (dict(v_mean=torch.ones(2, 4, 32)), f"v_mean has shape (2, 4, 32); {OF_KV_HEADS}32 or 1)"),
        (
            dict(k_descale=strided(C["k_descale"], 16, 8, 2)),
            "k_descale has stride 2 in dimension 2, which must be 1; k_descale.contiguous() makes",
        ),
    ],
    ROWS: [
        (
            dict(q=R["q"].half()),
            "q is not float8_e4m3fn, which this kernel takes; fagen.quantize(q) makes it so, with",
        ),
        (
            dict(q=R["q"][..., :48]),
            "q has shape (2, 70, 4, 48); it must be (batch, seqlen_q, heads, 64)",
        ),
        (
            dict(k=strided(R["k"], 14_400, 144, 68, 1)),
            "k has stride 68 in dimension 2, which must be a multiple of 16 elements (16 bytes); ",
        ),
        (dict(v=by_columns(R["v"])), f"v has shape (2, 2, 32, 112); {OF_V}"),
        (dict(k_descale=torch.ones(2, 2, 4)), f"k_descale has shape (2, 2, 4); {OF_KV_HEADS}1)"),
        (dict(v_descale=torch.ones(2, 2)), f"v_descale has shape (2, 2); {OF_KV_HEADS}32 or 1)"),
        (dict(k_mean=R["v_mean"]), f"k_mean has shape (2, 2, 32); {OF_KV_HEADS}64 or 1)"),
        (
            dict(q_descale=torch.ones(2, 2, 1)),
            "q_descale has shape (2, 2, 1); it must be (batch = 2 or 1, heads = 4 or 1, 1)",
        ),
        (
            dict(q_descale=torch.ones(2, 4, 1).double()),
            "q_descale is not float32, which this kernel takes; q_descale.to(torch.float32) conv",
        ),
    ],
    PACKED: [
        (dict(cu_seqlens_k=offsets([1])), "cu_seqlens_k has shape (2); it must be (offsets = 7)"),
        (dict(seqused_k=offsets([1])), "seqused_k has shape (2); it must be (offsets - 1 = 6)"),
        (dict(q=P["q"].float()), "q is not bfloat16"),
        (
            dict(k=P["k"].transpose(0, 2).contiguous().transpose(0, 2)),
            "k has stride 430 in dimension 2, which must be 1",
        ),
    ],
    PACKED8: [
        (dict(q_descale=torch.ones(5, 4, 1)), f"q_descale has shape (5, 4, 1); {OF_SEQUENCES}"),
        (dict(k_mean=torch.ones(6, 2, 64).half()), "k_mean is not float32"),
        (dict(v=normal(215, 2, 32).bfloat16()), "v is not float8_e4m3fn"),
    ],
}


@pytest.mark.parametrize(
    ("slug", "change", "message"),
    [(slug, *case) for slug, cases in WRONG.items() for case in cases],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_a_wrong_argument_is_named_in_the_same_words_everywhere(stub_op, slug, change, message):
    stub = stub_op(slug)
    given = arguments(stub.plan) | change
    assert refused_everywhere(stub.plan, stub.op, given).startswith(message)


@pytest.mark.parametrize(("slug", "name"), [(SLUG, "v"), (ROWS, "v_descale")])
def test_tensors_on_two_devices_are_refused(stub_op, slug, name):
    of = stub_op(slug).plan
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = arguments(of)
        given[name] = torch.empty(given[name].shape, dtype=given[name].dtype, device="meta")
        with pytest.raises(ValueError, match=rf"{name} is not on the device of q; {name}\.to\(q"):
            checked(of, given, have_data=False)


def test_what_the_contract_allows_is_not_refused(stub_op):
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
