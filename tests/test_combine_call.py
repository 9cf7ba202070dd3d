"""fagen.combine on CPU tensors: what it takes and gives, and how it refuses what it cannot do."""

import math

import pytest
import torch

import fagen
from fagen.kinds.combine.oracle import combine
from tests.tensors import normal

OUTS, LSES = normal(3, 2, 5, 4, 32), normal(3, 2, 4, 5, seed=1)
COUNTS = torch.tensor([1, 3], dtype=torch.int32)
ENDS = torch.tensor([0, 2, 5], dtype=torch.int32)


def test_it_combines_what_attention_gave_for_parts_of_the_keys():
    q, k, v = (normal(2, n, 4, 64, seed=n, dtype=torch.float16) for n in (7, 90, 90 + 1))
    v = v[:, :90]
    whole = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2).double() for t in (q, k, v))
    ).transpose(1, 2)
    parts = [fagen.attention(q, k[:, s], v[:, s], return_lse=True) for s in _thirds(90)]
    out, lse = fagen.combine(*(torch.stack(tensors) for tensors in zip(*parts, strict=True)))
    assert out.dtype == torch.float16 and out.shape == q.shape
    assert (out.double() - whole).abs().max() < 2e-3
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 8
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-3)


def _thirds(length: int) -> list[slice]:
    return [slice(first, first + length // 3) for first in range(0, length, length // 3)]


@pytest.mark.parametrize("out_dtype", [None, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_go_with_each_other(dtype, out_dtype):
    out, lse = fagen.combine(OUTS.to(dtype), LSES, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or dtype) and lse.dtype == torch.float32
    expected, expected_lse = combine(OUTS.to(dtype), LSES)
    assert torch.allclose(out.double(), expected, atol=4 * torch.finfo(out.dtype).eps)
    assert torch.allclose(lse.double(), expected_lse, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sinks_join_behind_the_last_split(dtype):
    sinks = torch.tensor((0.5, -math.inf, 40.0, -3.0), dtype=dtype)
    out, lse = fagen.combine(OUTS, LSES, sinks=sinks)
    expected, expected_lse = combine(OUTS, LSES, sinks=sinks)
    assert torch.allclose(out.double(), expected, atol=1e-6)
    assert torch.allclose(lse.double(), expected_lse, atol=1e-5)
    plain = fagen.combine(OUTS, LSES)
    assert torch.equal(out[:, :, 1], plain[0][:, :, 1])  # of minus infinity to the bit
    alone = fagen.combine(OUTS[:, 0], LSES[:, 0], sinks=sinks)
    assert torch.equal(alone[0], out[0]) and torch.equal(alone[1], lse[0])
    call = dict(num_splits=COUNTS, cu_seqlens=ENDS)
    packed = fagen.combine(OUTS[:, 0], LSES[:, 0], sinks=sinks, **call)
    assert torch.allclose(
        packed[0].double(), combine(OUTS[:, 0], LSES[:, 0], **call, sinks=sinks)[0], atol=1e-6
    )


def test_rows_without_a_batch_are_one_of_it():
    out, lse = fagen.combine(OUTS[:, 0], LSES[:, 0])
    whole, whole_lse = fagen.combine(OUTS, LSES)
    assert torch.equal(out, whole[0]) and torch.equal(lse, whole_lse[0])


def test_packed_sequences_have_splits_of_their_own():
    outs, lses = OUTS[:, 0].clone(), LSES[:, 0].clone()
    outs[1:, :2] = math.nan
    lses[1:, :, :2] = math.nan
    out, lse = fagen.combine(outs, lses, num_splits=COUNTS, cu_seqlens=ENDS)
    assert torch.equal(out[:2], outs[0, :2]) and torch.equal(lse[:, :2], lses[0, :, :2])
    expected, _ = combine(outs[:, 2:], lses[:, :, 2:])
    assert torch.allclose(out[2:].double(), expected, atol=1e-6)


def test_strides_are_free():
    outs = normal(3, 5, 2, 4, 64).transpose(1, 2)[..., 32:]
    lses = normal(2, 3, 4, 5, seed=1).transpose(0, 1)
    for result, other in zip(
        fagen.combine(outs, lses), fagen.combine(outs.contiguous(), lses.contiguous()), strict=True
    ):
        assert torch.equal(result, other)


@pytest.mark.parametrize("shape", [(0, 2, 5, 4, 32), (3, 0, 5, 4, 32), (3, 2, 0, 4, 32)])
def test_nothing_combines_to_nothing(shape):
    splits, batch, seqlen, heads, _ = shape
    out, lse = fagen.combine(torch.empty(shape), torch.empty(splits, batch, heads, seqlen))
    assert torch.equal(out, torch.zeros(shape[1:]))
    assert torch.equal(lse, torch.full((batch, heads, seqlen), -math.inf))
