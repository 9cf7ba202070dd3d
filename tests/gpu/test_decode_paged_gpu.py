"""Decoding over pages on a Hopper GPU: bits of dense caches, graphs whose tables are edited."""

import math
from functools import partial

import pytest
import torch

import fagen
from fagen.kinds.decode.pages import in_pages
from tests.gpu.helpers import graph_of
from tests.gpu.helpers import ints as lengths

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]

KEYS = 3_000


def caches(batch=5, queries=1, heads=32, kv_heads=8, head_dim=128, dtype=torch.float16):
    q = torch.randn(batch, queries, heads, head_dim, device="cuda", dtype=dtype)
    k, v = torch.randn(2, batch, KEYS, kv_heads, head_dim, device="cuda", dtype=dtype)
    return q, k, v


def paged(k, v, page_size, used):
    generator = torch.Generator(device="cuda").manual_seed(7)
    return in_pages(k, v, page_size, used, generator) | {"seqused_k": used}


@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 48, 64, 256, 528])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("more", [{}, {"window": (1000, 0)}, {"leftpad_k": (5, 0, 170, 0, 64)}])
def test_pages_give_the_bits_of_a_dense_cache(page_size, head_dim, more):
    q, k, v = caches(head_dim=head_dim)
    used = lengths(KEYS, 0, 1_700, 1, 64)
    more = {x: lengths(*y) if x == "leftpad_k" else y for x, y in more.items()}
    expected = fagen.attention_decode(q, k, v, seqused_k=used, return_lse=True, **more)
    result = fagen.attention_decode(q, **paged(k, v, page_size, used), return_lse=True, **more)
    assert all(map(torch.equal, result, expected))


def test_a_graph_is_replayed_while_lengths_grow_and_the_table_is_edited():
    q, *_ = caches()
    page_size, entries = 16, 100
    pools = torch.randn(2, 5 * entries, page_size, 8, 128, device="cuda").half()
    table = torch.full((5, entries), -1, dtype=torch.int32, device="cuda")
    used = lengths(1, 1, 1, 1, 1)
    call = dict(block_table=table, seqused_k=used, return_lse=True)
    graph, results = graph_of(partial(fagen.attention_decode, q, *pools, **call))
    for ends in ((1, 17, 0, 300, 16), (500, 1, 1_600, 64, 1_599), (0,) * 5, (1_600,) * 5):
        used.copy_(lengths(*ends))
        order = torch.randperm(5 * entries, device="cuda").int().view(5, entries)
        begins = torch.arange(entries, device="cuda") * page_size
        table.copy_(order.masked_fill(begins >= used[:, None], 2**31 - 1))
        for result in results:
            result.fill_(math.nan)
        graph.replay()
        rows = (x[order.long()].flatten(1, 2) for x in pools)
        expected = fagen.attention_decode(q, *rows, seqused_k=used, return_lse=True)
        assert all(map(torch.equal, results, expected)), ends


def test_pages_may_be_far_apart_and_tables_hostile():
    page_size, stride = 16, 2**31 + 64  # elements
    flat = torch.empty(2 * stride + page_size * 2 * 128, dtype=torch.float16, device="cuda")
    k = flat.as_strided((3, page_size, 2, 128), (stride, 256, 128, 1))
    k.copy_(torch.randn(3, page_size, 2, 128))
    v = torch.randn(3, 2, page_size, 128, device="cuda").half().transpose(1, 2)
    q, used = torch.randn(1, 1, 8, 128, device="cuda").half(), lengths(41)
    for entries in ((2, 0, 1), (1, 2, 0), (2, 3, -5), (2**31 - 1, -(2**31), 1)):
        rows = [
            torch.cat([x[i] if 0 <= i < 3 else torch.zeros_like(x[0]) for i in entries])[None]
            for x in (k, v)
        ]
        result = fagen.attention_decode(
            q, k, v, block_table=lengths(*entries).view(1, 3), seqused_k=used
        )
        assert torch.equal(result, fagen.attention_decode(q, *rows, seqused_k=used)), entries
