"""Sinks on a Hopper GPU: what calls give, beside one more column by hand, and in a graph."""

import math

import pytest
import torch
from torch import Tensor

import fagen
from tests.gpu.helpers import graph_of
from tests.test_sinks import by_hand

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]

DEVICE = "cuda"
HEADS, KV_HEADS = 8, 2
SINKS = (0.5, 7.0, -math.inf, 3e4, -1e30, -3.0, 2.0, 0.0)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


def tensors(batch: int, queries: int, keys: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    rows = ((queries, HEADS), (keys, KV_HEADS), (keys, KV_HEADS))
    return [normal(batch, *own, dim, dtype=dtype, seed=seed) for seed, own in enumerate(rows)]


def sinks_in(dtype: torch.dtype) -> Tensor:
    return torch.tensor(SINKS, device=DEVICE).to(dtype)


def near(queries: int, keys: int, left: int) -> Tensor:
    """Which keys (columns) a causal row sees, so many before its own at most."""
    row = torch.arange(queries, device=DEVICE)[:, None] + keys - queries
    key = torch.arange(keys, device=DEVICE)
    return (key <= row) & (key >= row - left)


def check(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], seen: Tensor) -> None:
    none = ~seen.any(-1)
    assert (found[0][:, none] == 0).all()
    assert torch.equal(found[1][..., none], exact[1][..., none].float())
    torch.testing.assert_close(found[0].double(), exact[0], atol=1e-2, rtol=2e-2)
    torch.testing.assert_close(found[1].double(), exact[1], atol=1e-3, rtol=1e-6)


@pytest.mark.parametrize("sink", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (128, torch.float16)])
def test_attention_has_one_more_logit_and_graphs_see_it_edited_in_place(dim, dtype, sink):
    for queries, keys, left in ((300, 700, 127), (700, 300, 127), (5, 2_000, 2_000)):
        q, k, v = tensors(2, queries, keys, dim, dtype)
        sinks, seen = sinks_in(sink), near(queries, keys, left)

        def call(q=q, k=k, v=v, sinks=sinks, left=left):
            return fagen.attention(
                q, k, v, causal=True, window=(left, 0), sinks=sinks, return_lse=True
            )

        scale = dim**-0.5
        check(call(), by_hand(q, k, v, seen, sinks, scale), seen)
        graph, found = graph_of(call)
        sinks.copy_(sinks.roll(3))
        graph.replay()
        check(found, by_hand(q, k, v, seen, sinks, scale), seen)


def test_varlen_sequences_and_e4m3_have_sinks():
    lengths = ((300, 300), (1, 900), (0, 5), (70, 20), (513, 513))
    sinks = sinks_in(torch.bfloat16)
    parts = [tensors(1, *length, 64, torch.bfloat16) for length in lengths]
    q, k, v = (torch.cat([x[0] for x in own]) for own in zip(*parts, strict=True))
    ends = torch.tensor([(0, 0), *lengths], device=DEVICE).cumsum(0).int()
    at_q, at_k = (x.contiguous() for x in ends.unbind(1))
    out, lse = fagen.attention_varlen(
        *(q, k, v, at_q, at_k), causal=True, window=128, sinks=sinks, return_lse=True
    )
    for number, (length, own) in enumerate(zip(lengths, parts, strict=True)):
        rows, seen = slice(int(at_q[number]), int(at_q[number + 1])), near(*length, 127)
        exact = by_hand(*own, seen, sinks, 0.125)
        check((out[None, rows], lse[None, :, rows]), exact, seen)
    q, k, v = tensors(1, 300, 300, 64, torch.bfloat16)
    found = fagen.attention_fp8(q, k, v, causal=True, sinks=sinks)
    exact, _ = by_hand(q, k, v, near(300, 300, 300), sinks, 0.125)
    assert (found.double() - exact).square().mean() < 4e-3


@pytest.mark.parametrize("dim", [64, 128])
def test_decoding_has_sinks_behind_the_last_split(dim):
    used = (9_000, 1, 0, 700, 4_097)
    sinks = sinks_in(torch.bfloat16)
    q, k, v = tensors(len(used), 2, max(used), dim, torch.bfloat16)
    lengths = torch.tensor(used, dtype=torch.int32, device=DEVICE)
    out, lse = fagen.attention_decode(
        q, k, v, seqused_k=lengths, causal=True, sinks=sinks, return_lse=True
    )
    for number, length in enumerate(used):
        rows, seen = slice(number, number + 1), near(2, length, length)
        exact = by_hand(q[rows], k[rows, :length], v[rows, :length], seen, sinks, dim**-0.5)
        check((out[rows], lse[rows]), exact, seen)


def test_parts_that_are_merged_have_their_sinks_at_last():
    sinks = sinks_in(torch.float32)
    q, k, v = tensors(2, 70, 900, 128, torch.bfloat16)
    parts = [
        fagen.attention(q, k[:, own], v[:, own], return_lse=True)
        for own in (slice(0, 200), slice(200, 900))
    ]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    found = fagen.combine(outs, lses, sinks=sinks)
    seen = near(70, 900, 900) | True
    check(found, by_hand(q, k, v, seen, sinks, 128**-0.5), seen)
