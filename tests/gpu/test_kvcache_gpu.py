"""flash_attn_with_kvcache on a Hopper GPU: both kinds of kernels, strides, CUDA graphs, numbers."""

import math

import pytest
import torch

from fagen.flash_attn_interface import flash_attn_combine, flash_attn_with_kvcache
from fagen.kinds.decode.oracle import attend
from fagen.vocab import MASKS
from tests.gpu.helpers import graph_of, waiting_for_nothing
from tests.gpu.helpers import ints as lengths

pytestmark = pytest.mark.gpu

ROOM = 3_000
USED = (3_000, 1, 0, 1_777, 64)
PADS = (0, 0, 0, 1_000, 3)


def caches(queries, layout, head_dim=128, dtype=torch.bfloat16):
    """q of 16 heads; caches of 4 that hold NaN wherever no key is, keys first or heads first."""
    q = torch.randn(5, queries, 16, head_dim, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 5, ROOM, 4, head_dim, device="cuda", dtype=dtype)
    for i, (used, pad) in enumerate(zip(USED, PADS, strict=True)):
        for x in (k, v):
            x[i, used:] = math.nan
            x[i, :pad] = math.nan
    if layout == "heads first":
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    elif layout == "longer":
        k, v = (torch.cat((x, x * math.nan), 1)[:, :ROOM] for x in (k, v))
    return q, k, v


def right(q, k, v, used, pads, causal=True):
    mask, scale = MASKS["causal" if causal else "full"], q.shape[3] ** -0.5
    return attend(q, k, v, mask=mask, scale=scale, seqused_k=used, leftpad_k=pads)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", ["keys first", "heads first", "longer"])
@pytest.mark.parametrize("queries", [1, 4, 64, 65, 300])
def test_it_is_near_fp64(queries, layout, causal):
    q, k, v = caches(queries, layout)
    used, pads = lengths(*USED), lengths(*PADS)
    out, lse = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=used, cache_leftpad=pads, causal=causal, return_softmax_lse=True
    )
    expected, expected_lse = right(q, k, v, used, pads, causal)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-3)


@pytest.mark.parametrize("layout", ["keys first", "heads first", "longer"])
def test_packed_queries_are_near_fp64(layout):
    _, k, v = caches(1, layout)
    used, pads, counts = lengths(*USED), lengths(*PADS), (1, 200, 3, 0, 130)
    starts = lengths(0, 1, 201, 204, 204, 334)
    q = torch.randn(334, 16, 128, device="cuda", dtype=torch.bfloat16)
    out = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=used, cache_leftpad=pads, causal=True, cu_seqlens_q=starts
    )
    for i, (own, part) in enumerate(zip(q.split(counts), out.split(counts), strict=True)):
        one = slice(i, i + 1)
        expected, _ = right(own[None], k[one], v[one], used[one], pads[one])
        torch.testing.assert_close(part.double(), expected[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("queries", [1, 300])
def test_a_graph_is_replayed_with_other_lengths(queries):
    q, k, v = (x.nan_to_num(0.0) for x in caches(queries, "keys first"))
    used, pads = lengths(*USED), lengths(*PADS)

    def run():
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=used, cache_leftpad=pads, causal=True)

    graph, out = graph_of(run)
    for turn in range(4):
        used.copy_(lengths(*[turn * 900 + i for i in range(5)]))
        pads.copy_(lengths(*[turn * 10 - i for i in range(5)]))
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, run())
        expected, _ = right(q, k, v, used, pads)
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


def test_a_number_for_all_lengths_is_that_number_in_a_graph_too():
    q, k, v = (x.nan_to_num(0.0) for x in caches(1, "keys first"))
    outs = [flash_attn_with_kvcache(q, k, v, cache_seqlens=n) for n in (700, 701, 700)]
    assert torch.equal(outs[0], outs[2]) and not torch.equal(outs[0], outs[1])
    graph, out = graph_of(lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=700))
    for n in range(200):  # more than are kept
        flash_attn_with_kvcache(q, k, v, cache_seqlens=n)
    out.fill_(math.nan)
    graph.replay()
    assert torch.equal(out, outs[0])


def test_nothing_waits_for_the_gpu():
    q, k, v = caches(1, "keys first")
    many, *_ = caches(300, "keys first")
    used, pads = lengths(*USED), lengths(*PADS)
    for queries in (q, many):
        flash_attn_with_kvcache(queries, k, v, cache_seqlens=used, cache_leftpad=pads)
    with waiting_for_nothing():
        for queries in (q, many):
            flash_attn_with_kvcache(queries, k, v, cache_seqlens=used, cache_leftpad=pads)


def test_halves_of_the_keys_are_combined_to_all():
    q, k, v = (x.nan_to_num(0.0) for x in caches(2, "keys first"))
    parts = [
        flash_attn_with_kvcache(q, k[:, part], v[:, part], return_softmax_lse=True)
        for part in (slice(0, 1_000), slice(1_000, ROOM))
    ]
    outs = torch.stack([out.float() for out, _ in parts])
    lses = torch.stack([lse for _, lse in parts]).transpose(-1, -2)
    out, lse = flash_attn_combine(outs, lses)
    whole, whole_lse = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True)
    torch.testing.assert_close(out, whole.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, whole_lse.transpose(1, 2), rtol=0, atol=1e-3)
