"""The arguments of an op: a wrong one is named, everywhere in the same words; the others pass.

Every way to be wrong is tried on toys in signature/test_refused.py; here, what kernels declare.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fagen.runtime.checks import checked
from tests import wrong
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
from tests.wrong import shifted

SCALE = "it must be finite and above 0 as a float32, and 1e+08 at most"

# by slug: what is changed of a good call, and what must be said of it
WRONG = f"""
{SLUG}:
  q=q[0] -> q has shape (70, 4, 64); it must be (batch, seqlen_q, heads, 64)
  k=k[..., :56] -> k has shape (2, 100, 2, 56); it must be (batch = 2, seqlen_k, kv_heads, 64)
  v=k -> v has shape (2, 100, 2, 64); it must be (batch = 2, seqlen_k = 100, kv_heads = 2, 32)
  q=q.half() -> q is not bfloat16, which this kernel takes; q.to(torch.bfloat16) converts it
  q=turned(q, 1, 3)
    -> q has stride 280 in dimension 3, which must be 1; q.contiguous() makes it so
  q=stepped(q, 0)
    -> q has stride 17924 in dimension 0, which must be a multiple of 8 elements (16 bytes)
  k=stepped(k, 1) -> k has stride 132 in dimension 1
  v=stepped(v, 2) -> v has stride 36 in dimension 2
  k=long(k), v=long(v) -> k has seqlen_k = 1073741825; it may be 1073741824 at most
  k=shifted(k) -> k does not begin at a multiple of 16 bytes; k.clone() does
  k=k[:1], v=v[:1] -> k has shape (1, 100, 2, 64); it must be (batch = 2, seqlen_k, kv_heads, 64)
  q=q[:, :, :3] -> heads = 3 must be a multiple of kv_heads = 2
  k=k[:, :, :0], v=v[:, :, :0] -> heads = 4 must be a multiple of kv_heads = 0
  scale=-1.0 -> scale is -1; {SCALE}
  scale=nan -> scale is nan; {SCALE}
  scale=1e39 -> scale is 1e+39; {SCALE}
  scale=1e-50 -> scale is 1e-50; {SCALE}
  scale=1.01e8 -> scale is 1.01e+08; {SCALE}

{COLUMNS}:
  v=by_rows(v, 100).contiguous() -> v has shape (2, 100, 2, 32);
    -> it must be (batch = 2, kv_heads = 2, 32, ceil(seqlen_k / 16) · 16 = 112)
  v=strided(v[..., :100], 7168, 3584, 112, 1)
    -> v has shape (2, 2, 32, 100); it must be (batch = 2, kv_heads = 2, 32,
    -> ceil(seqlen_k / 16) · 16 = 112)
  v=strided(v, 7680, 3840, 120, 1)
    -> v has stride 120 in dimension 2, which must be a multiple of 16 elements (16 bytes)
  q_descale=None -> q_descale is missing; this kernel has scales by block of 32 rows
  k_descale=k_descale[..., :1] -> k_descale has shape (2, 2, 1);
    -> it must be (batch = 2 or 1, kv_heads = 2 or 1, ceil(seqlen_k / 32) = 4)
  q_descale=ones(2, 4, 2) -> q_descale has shape (2, 4, 2);
    -> it must be (batch = 2 or 1, heads = 4 or 1, ceil(seqlen_q / 32) = 3)
  v_descale=ones(2, 2, 4) -> v_descale has shape (2, 2, 4);
    -> it must be (batch = 2 or 1, kv_heads = 2 or 1, 32 or 1)
  v_mean=ones(2, 4, 32) -> v_mean has shape (2, 4, 32);
    -> it must be (batch = 2 or 1, kv_heads = 2 or 1, 32 or 1)
  k_descale=strided(k_descale, 16, 8, 2)
    -> k_descale has stride 2 in dimension 2, which must be 1; k_descale.contiguous() makes

{ROWS}:
  q=q.half() -> q is not float8_e4m3fn, which this kernel takes; fagen.quantize(q) makes it so, with
  q=q[..., :48] -> q has shape (2, 70, 4, 48); it must be (batch, seqlen_q, heads, 64)
  k=strided(k, 14_400, 144, 68, 1)
    -> k has stride 68 in dimension 2, which must be a multiple of 16 elements (16 bytes);
  v=by_columns(v) -> v has shape (2, 2, 32, 112);
    -> it must be (batch = 2, seqlen_k = 100, kv_heads = 2, 32)
  k_descale=ones(2, 2, 4) -> k_descale has shape (2, 2, 4);
    -> it must be (batch = 2 or 1, kv_heads = 2 or 1, 1)
  v_descale=ones(2, 2) -> v_descale has shape (2, 2);
    -> it must be (batch = 2 or 1, kv_heads = 2 or 1, 32 or 1)
  k_mean=v_mean -> k_mean has shape (2, 2, 32);
    -> it must be (batch = 2 or 1, kv_heads = 2 or 1, 64 or 1)
  q_descale=ones(2, 2, 1) -> q_descale has shape (2, 2, 1);
    -> it must be (batch = 2 or 1, heads = 4 or 1, 1)
  q_descale=ones(2, 4, 1).double()
    -> q_descale is not float32, which this kernel takes; q_descale.to(torch.float32) conv

{PACKED}:
  cu_seqlens_k=ints(0, 1) -> cu_seqlens_k has shape (2); it must be (offsets = 7)
  seqused_k=ints(0, 1) -> seqused_k has shape (2); it must be (offsets - 1 = 6)
  q=q.float() -> q is not bfloat16
  k=turned(k, 0, 2) -> k has stride 430 in dimension 2, which must be 1

{PACKED8}:
  q_descale=ones(5, 4, 1) -> q_descale has shape (5, 4, 1);
    -> it must be (offsets - 1 = 6 or 1, heads = 4 or 1, 1)
  k_mean=ones(6, 2, 64).half() -> k_mean is not float32
  v=normal(215, 2, 32).bfloat16() -> v is not float8_e4m3fn
"""


@pytest.mark.parametrize(("slug", "change", "error", "words"), wrong.cases(WRONG))
def test_a_wrong_argument_is_named_in_the_same_words_everywhere(
    stub_op, slug, change, error, words
):
    stub = stub_op(slug)
    named = wrong.changed(change, arguments(stub.plan))
    assert refused_everywhere(stub.plan, stub.op, named).startswith(words)


@pytest.mark.parametrize(("slug", "name"), [(SLUG, "v"), (ROWS, "v_descale")])
def test_tensors_on_two_devices_are_refused(stub_op, slug, name):
    plan = stub_op(slug).plan
    with FakeTensorMode(allow_non_fake_inputs=True):
        named = arguments(plan)
        named[name] = torch.empty(named[name].shape, dtype=named[name].dtype, device="meta")
        with pytest.raises(ValueError, match=rf"{name} is not on the device of q; {name}\.to\(q"):
            checked(plan, named, have_data=False)


def test_what_the_contract_allows_is_not_refused(stub_op):
    attend, (q, k, v) = stub_op(SLUG).op, qkv()
    expected = attend(q, k, v, 0.1)[0]
    packed = torch.randn(2, 70, 12, 64).bfloat16()  # slices of one buffer
    attend(packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:, :32], 0.1)
    bhsd = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(attend(*bhsd, 0.1)[0], expected)
    attend(q, k[:, :, :1].expand(-1, -1, 2, -1), v, 0.1)  # stride 0
    tensor = torch.zeros(1000, dtype=torch.bfloat16).as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    attend(tensor, tensor, tensor[..., :32], 0.1)  # strides of single elements mean nothing
    empty = shifted(torch.zeros(8, dtype=torch.bfloat16))[:0].view(2, 0, 4, 64)
    assert attend(empty, k, v, 0.1)[0].shape == (2, 0, 4, 32)  # nor does the address of nothing
    assert attend(q[:, :, :0], k[:, :, :0], v[:, :, :0], 0.1)[1].shape == (2, 0, 70)
