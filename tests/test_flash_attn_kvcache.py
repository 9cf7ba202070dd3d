"""fagen.flash_attn_interface over caches: calls written for FlashAttention-3, and what they get."""

import math
from itertools import pairwise, product

import pytest
import torch

import fagen
from fagen.flash_attn_interface import (
    flash_attn_combine,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    kvcache,
)
from fagen.kinds.decode.oracle import attend
from fagen.kinds.decode.pages import in_pages
from fagen.runtime import cache
from fagen.vocab import MASKS
from tests.attention_helpers import noted
from tests.tensors import ints, normal

pytestmark = [
    pytest.mark.usefixtures("nothing_is_ready"),
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]

HALF = torch.float16
ROOM = 90
LENGTHS = {"used": ints(ROOM, 41, 0), "both": ints(ROOM, 41, 7), "one": 33, "none": None}
PADS = {"both": ints(5, 0, 12)}


def caches(queries=1, head_dim=64, head_dim_v=64):
    """q of three sequences and caches with room for ROOM keys each."""
    shapes = (queries, 8, head_dim), (ROOM, 2, head_dim), (ROOM, 2, head_dim_v)
    return tuple(normal(3, *shape, seed=seed, dtype=HALF) for seed, shape in enumerate(shapes))


def lengths_of(which):
    """What a call is given of this name."""
    return dict(cache_seqlens=LENGTHS[which], cache_leftpad=PADS.get(which))


def exact(q, k, v, which, causal):
    length = LENGTHS[which]
    used = torch.full((3,), length) if isinstance(length, int) else length
    scale, mask = q.shape[3] ** -0.5, MASKS["causal" if causal else "full"]
    return attend(q, k, v, mask=mask, scale=scale, seqused_k=used, leftpad_k=PADS.get(which))


def near(results, expected):
    """Hold that out and the log-sum-exp are right."""
    for result, exact, close in zip(results, expected, (2e-3, 1e-3)[: len(results)], strict=True):
        rtol = close if exact is expected[0] else 0
        torch.testing.assert_close(result.double(), exact, rtol=rtol, atol=close)


def hidden(x, which):
    """A cache that holds NaN wherever no key of its sequence is."""
    x = x.clone()
    length = LENGTHS[which]
    for i in range(3):
        end = ROOM if length is None else length if isinstance(length, int) else int(length[i])
        x[i, end:] = math.nan
        x[i, : int(PADS[which][i]) if which in PADS else 0] = math.nan
    return x


@pytest.fixture
def called(monkeypatch):
    """The names of the functions that calls end in."""
    below = ((cache, name) for name in ("attention", "attention_decode", "attention_varlen"))
    return noted(monkeypatch, *below, (kvcache, "attention_varlen"))


# ---- what it computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "which"), [*product((1, 5), LENGTHS), (70, "used"), (70, "both"), (70, "none")]
)
def test_it_is_attention_over_each_sequences_keys(queries, which, causal, called):
    q, k, v = caches(queries)
    k, v = hidden(k, which), hidden(v, which)
    how = dict(causal=causal, return_softmax_lse=True)
    out, lse = flash_attn_with_kvcache(q, k, v, **lengths_of(which), **how)
    expected = exact(q, k, v, which, causal)
    assert (out.dtype, out.shape) == (HALF, (3, queries, 8, 64)) and out.is_contiguous()
    assert (lse.dtype, lse.shape) == (torch.float32, (3, 8, queries)) and lse.is_contiguous()
    near((out, lse), expected)
    many = "attention" if which == "none" else "attention_varlen"
    assert called == [many if queries == 70 else "attention_decode"]


LAYOUTS = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a part of a longer cache": lambda x: torch.cat((x, x[:, :8] * math.nan), 1)[:, :ROOM],
    "K and V by turns": lambda x: torch.stack((x, x * math.nan), 2)[:, :, 0],
    "sequences first in no order": lambda x: (
        torch.stack((x, x * math.nan)).transpose(1, 2).contiguous().transpose(1, 2)[0]
    ),
    "V's own rows in memory": lambda x: torch.cat((x, x), 3)[..., :64],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("queries", [3, 70])
def test_caches_may_lie_anyhow(layout, queries):
    q, k, v = caches(queries)
    usual, results = (
        flash_attn_with_kvcache(q, laid(k), laid(v), causal=True, **lengths_of("both"))
        for laid in (lambda x: x, LAYOUTS[layout])
    )
    near((results,), exact(q, k, v, "both", True)[:1])
    # what no packed tensor can be is decoded, which adds up in another order
    if queries == 3 or layout != "sequences first in no order":
        assert torch.equal(results, usual)


def test_one_sequence_and_head_dims_of_its_own():
    q, k, v = caches(70, head_dim=96, head_dim_v=32)
    out = flash_attn_with_kvcache(q[:1], k[:1], v[:1], cache_seqlens=33, causal=True)
    near((out,), (exact(q, k, v, "one", True)[0][:1],))


@pytest.mark.parametrize("queries", [0, 1, 70])
@pytest.mark.parametrize(("batch", "room"), [(0, ROOM), (3, 0), (3, 1), (1, 1)])
def test_of_little_there_is_little(batch, room, queries):
    q, k, v = caches(queries)
    q, k, v = q[:batch], k[:batch, :room], v[:batch, :room]
    for used in (None, ints(1, 5, -3)[:batch]):
        pads = None if used is None else ints(0, 0, 0)[:batch]
        options = dict(cache_seqlens=used, cache_leftpad=pads, causal=True)
        results = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options)
        near(
            results,
            attend(q, k, v, mask=MASKS["causal"], scale=0.125, seqused_k=used, leftpad_k=pads),
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("which", LENGTHS)
def test_queries_may_be_packed(which, causal, called):
    _, k, v = caches()
    laid = [LAYOUTS["a part of a longer cache"](hidden(x, which)) for x in (k, v)]
    starts = ints(0, 70, 70, 73)
    q = normal(73, 8, 64, dtype=HALF)
    how = dict(cu_seqlens_q=starts, max_seqlen_q=70, causal=causal, return_softmax_lse=True)
    out, lse = flash_attn_with_kvcache(q, *laid, **lengths_of(which), **how)
    assert out.shape == (73, 8, 64) and lse.shape == (8, 73) and called == ["attention_varlen"]
    for i, (top, bottom) in enumerate(pairwise(starts.tolist())):
        expected = exact(q[None, top:bottom].expand(3, -1, -1, -1), k, v, which, causal)
        near((out[top:bottom], lse[:, top:bottom]), [x[i] for x in expected])


@pytest.mark.parametrize("shape", [(3, 1), (1, 1), (2, 0), (0, 5)], ids=str)
def test_a_cache_of_one_row_or_of_none_is_read_for_packed_queries_too(shape):
    batch, room = shape
    wide = normal(batch, max(room, 3), 2, 64, dtype=HALF)[:, :room]  # what follows is no key
    q, starts = normal(batch * 4, 4, 64, dtype=HALF), ints(*range(0, batch * 4 + 1, 4))
    results = flash_attn_with_kvcache(
        q, wide, wide, cu_seqlens_q=starts, cache_seqlens=9, return_softmax_lse=True
    )
    dense = q.unflatten(0, (batch, 4)) if batch else q.reshape(0, 4, 4, 64)
    expected, expected_lse = attend(dense, wide, wide, mask=MASKS["full"], scale=64**-0.5)
    near(results, (expected.flatten(0, 1), expected_lse.transpose(0, 1).flatten(1)))


def test_hints_and_what_is_not_read_change_no_bit():
    q, k, v = caches(3)
    used = LENGTHS["used"]
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=used)
    plan = get_scheduler_metadata(3, 3, ROOM, 8, 2, 64, used)
    assert plan.dtype == torch.int32 and plan.device == used.device and plan.numel() < 8
    descale = torch.full((3, 2), 7.0)
    for more in (
        {"num_splits": 1}, {"num_splits": 16}, {"pack_gqa": True}, {"sm_margin": 8},
        {"scheduler_metadata": plan}, {"max_seqlen_q": 3}, {"rotary_interleaved": False},
        {"cu_seqlens_k_new": ints(0, 1, 2, 3)}, {"rotary_seqlens": used},
        {"softmax_scale": 0.125}, {"window_size": [-1, 9]},
        {"q_descale": descale, "k_descale": descale, "v_descale": descale},
    ):  # fmt: skip
        assert torch.equal(out, flash_attn_with_kvcache(q, k, v, cache_seqlens=used, **more)), more
    causal = flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True)
    assert torch.equal(causal, fagen.attention_decode(q, k, v, seqused_k=used))


@pytest.mark.parametrize("queries", [1, 70])
@pytest.mark.parametrize("length", [-1, 0, 33, ROOM, ROOM + 9])
def test_one_number_for_all_lengths_is_as_that_many_keys(queries, length):
    q, k, v = caches(queries)
    for more in ({}, {"cache_leftpad": ints(0, 5, 31)}):
        results, expected = (
            flash_attn_with_kvcache(
                q, k, v, cache_seqlens=used, causal=True, return_softmax_lse=True, **more
            )
            for used in (length, ints(*[length] * 3))
        )
        for result, other in zip(results, expected, strict=True):
            torch.testing.assert_close(result, other, rtol=2e-2, atol=2e-2)


def test_one_number_for_all_lengths_takes_nothing_on_the_device(monkeypatch):
    calls = []
    monkeypatch.setattr(
        kvcache, "attention_cache", lambda q, k, v, **named: calls.append((k, named["seqused_k"]))
    )
    q, k, v = caches()
    flash_attn_with_kvcache(q, k, v, cache_seqlens=33)
    ((keys, lengths),) = calls
    assert lengths is None and keys.data_ptr() == k.data_ptr() and keys.shape[1] == 33


def test_many_queries_compile_into_one_graph_that_lengths_are_given_to(fresh_dynamo):
    q, k, v = caches(70)

    def call(q, k, v, used, pads):
        return flash_attn_with_kvcache(
            q, k, v, cache_seqlens=used, cache_leftpad=pads, causal=True, return_softmax_lse=True
        )

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for used, pads in ((ints(ROOM, 41, 0), ints(5, 0, 0)), (ints(1, 2, 3), ints(0, 1, 4))):
        assert all(map(torch.equal, compiled(q, k, v, used, pads), call(q, k, v, used, pads)))


# ---- combining ----------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [True, False])
def test_splits_are_combined_to_what_all_keys_give(batches):
    q, k, v = caches(5)
    splits = [
        flash_attn_with_kvcache(q, k[:, a:b], v[:, a:b], return_softmax_lse=True)
        for a, b in ((0, 30), (30, 31), (31, ROOM), (0, 0))
    ]
    outs = torch.stack([out for out, _ in splits]).float()
    lses = torch.stack([lse for _, lse in splits]).transpose(-1, -2)  # (splits, B, Sq, H)
    expected, wanted_lse = exact(q, k, v, "none", False)
    wanted_lse = wanted_lse.transpose(1, 2)
    if not batches:
        outs, lses, expected, wanted_lse = outs[:, 1], lses[:, 1], expected[1], wanted_lse[1]
    out, lse = flash_attn_combine(outs, lses)
    assert out.dtype == torch.float32 and out.shape == expected.shape
    near((out, lse), (expected, wanted_lse))
    half, _ = flash_attn_combine(outs, lses.contiguous(), out_dtype=HALF)
    assert torch.equal(half, out.half())
    into = torch.empty_like(half)
    assert flash_attn_combine(outs, lses, into)[0] is into and torch.equal(into, half)


@pytest.mark.parametrize("columns", [1, 40, 59, 111])
def test_splits_of_any_head_dim_are_combined(columns):
    outs = normal(10, 5, 16, 3, columns).transpose(2, 3)[:5]  # as its test has them
    lses = normal(5, 5, 32, 3, seed=1).transpose(-1, -2)[..., :16].clone()
    lses[2:, :1] = -math.inf
    out, lse = flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)
    total = lses.logsumexp(0)
    expected = ((lses - total).exp()[..., None] * outs).sum(0)
    assert out.shape == (5, 3, 16, columns) and lse.shape == (5, 3, 16)
    torch.testing.assert_close(out.float(), expected, rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(lse, total, atol=1e-5, rtol=1e-5)
    into = torch.empty(5, 3, 16, columns, dtype=torch.bfloat16)
    assert flash_attn_combine(outs, lses, into)[0] is into and torch.equal(into, out)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("leaf", ["q", "k_cache", "v_cache"])
@pytest.mark.parametrize("which", ["used", "none"])
@pytest.mark.parametrize("queries", [64, 65])  # of 256 and 260 rows
def test_a_gradient_is_refused_by_the_backward_pass_alone(queries, which, leaf, packed, called):
    q, k, v = caches(queries)
    named = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": LENGTHS[which]}
    if packed:
        named |= {"q": q.flatten(0, 1), "cu_seqlens_q": ints(*range(0, 3 * queries + 1, queries))}
    expected = flash_attn_with_kvcache(**named)
    computed, named[leaf] = called.copy(), named[leaf].requires_grad_()
    out, lse = flash_attn_with_kvcache(**named, return_softmax_lse=True)
    assert torch.equal(out, expected) and called == computed * 2
    words = "q, k_cache or v_cache requires a gradient, and over a cache there are none: fagen.att"
    for results in (out, lse):
        assert results.requires_grad
        with pytest.raises(NotImplementedError, match=words):
            results.sum().backward()
    with torch.no_grad():
        results = flash_attn_with_kvcache(**named)
    assert torch.equal(results, expected) and not results.requires_grad


@pytest.mark.parametrize("name", ["page_table", "block_table"])
@pytest.mark.parametrize(("which", "causal"), [("both", True), ("used", False), ("one", True)])
@pytest.mark.parametrize("queries", [1, 70])
def test_a_cache_may_lie_in_pages(queries, which, causal, name):
    q, k, v = caches(queries)
    length = LENGTHS[which]
    used = torch.full((3,), length) if isinstance(length, int) else length
    call = in_pages(k, v, 16, used.int(), torch.Generator().manual_seed(0))
    table = {name: call["block_table"]}
    results = flash_attn_with_kvcache(
        *(q, call["k"], call["v"]),
        **lengths_of(which),
        **table,
        causal=causal,
        return_softmax_lse=True,
    )
    near(results, exact(q, k, v, which, causal))
    windowed = flash_attn_with_kvcache(
        *(q, call["k"], call["v"]), **lengths_of(which), **table, causal=True, window_size=(20, 0)
    )
    dense = flash_attn_with_kvcache(
        *(q, k, v), **lengths_of(which), causal=True, window_size=(20, 0)
    )
    assert (windowed - dense).abs().max() < 2e-3


def test_pages_whose_query_requires_a_gradient_give_results_and_no_gradient():
    q, k, v = caches()
    call = in_pages(k, v, 16, ints(90, 41, 0), torch.Generator().manual_seed(0))
    how = dict(cache_seqlens=ints(90, 41, 0), page_table=call["block_table"])
    out = flash_attn_with_kvcache(q.requires_grad_(), call["k"], call["v"], **how)
    with pytest.raises(NotImplementedError, match="requires a gradient"):
        out.sum().backward()
