"""fagen.flash_attn_interface over caches: calls written for FlashAttention-3, and what they get."""

import math
import re
from collections.abc import Iterator
from inspect import Parameter, signature
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from fagen.flash_attn_interface import (
    flash_attn_combine,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    kvcache,
)
from fagen.kinds.decode.reference import attend
from fagen.runtime import cache
from fagen.vocab import MASKS
from tests.tensors import normal

pytestmark = [
    pytest.mark.usefixtures("nothing_is_ready"),
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]

HALF, NOTHING = torch.float16, Parameter.empty
ROOM = 90

# of hopper/flash_attn_interface.py in Dao-AILab/flash-attention at 01afd16, in their order
ARGUMENTS: dict[Any, dict[str, object]] = {
    flash_attn_with_kvcache: dict.fromkeys(("q", "k_cache", "v_cache"), NOTHING)
    | dict.fromkeys((
        *("k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx"),
        *("cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q"),
        *("rotary_seqlens", "q_descale", "k_descale", "v_descale", "softmax_scale"),
    ))
    | {"causal": False, "window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0}
    | {"rotary_interleaved": True, "scheduler_metadata": None, "num_splits": 0}
    | {"pack_gqa": None, "sm_margin": 0, "return_softmax_lse": False},
    get_scheduler_metadata: dict.fromkeys(
        ("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim"),
        NOTHING,
    )
    | {"cache_seqlens": NOTHING, "qkv_dtype": torch.bfloat16}
    | dict.fromkeys(("headdim_v", "cu_seqlens_q", "cu_seqlens_k_new", "cache_leftpad", "page_size"))
    | {"max_seqlen_k_new": 0, "causal": False, "window_size": (-1, -1), "attention_chunk": 0}
    | {"has_softcap": False, "num_splits": 0, "pack_gqa": None, "sm_margin": 0},
    flash_attn_combine: {"out_partial": NOTHING, "lse_partial": NOTHING}
    | {"out": None, "out_dtype": None},
}  # fmt: skip


@pytest.mark.parametrize("function", ARGUMENTS, ids=lambda function: function.__name__)
def test_the_arguments_are_flash_attention_3s(function: Any) -> None:
    ours = [
        (name, one.default)
        for name, one in signature(function).parameters.items()
        if one.kind is Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert ours == [*ARGUMENTS[function].items()]


# ---- what it computes ---------------------------------------------------------------------------


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def caches(
    queries: int = 1, heads: int = 8, kv_heads: int = 2, head_dim: int = 64, head_dim_v: int = 64
) -> tuple[Tensor, Tensor, Tensor]:
    """q of three sequences and caches with room for ROOM keys each."""
    return (
        normal(3, queries, heads, head_dim, dtype=HALF),
        normal(3, ROOM, kv_heads, head_dim, seed=1, dtype=HALF),
        normal(3, ROOM, kv_heads, head_dim_v, seed=2, dtype=HALF),
    )


LENGTHS = {"used": ints(ROOM, 41, 0), "both": ints(ROOM, 41, 7), "one": 33, "none": None}
PADS = {"both": ints(5, 0, 12)}


def exact(q: Tensor, k: Tensor, v: Tensor, which: str, causal: bool) -> tuple[Tensor, Tensor]:
    length = LENGTHS[which]
    used = torch.full((3,), length) if isinstance(length, int) else length
    scale, mask = q.shape[3] ** -0.5, MASKS["causal" if causal else "full"]
    return attend(q, k, v, mask=mask, scale=scale, seqused_k=used, leftpad_k=PADS.get(which))


def hidden(x: Tensor, which: str) -> Tensor:
    """A cache that holds NaN wherever no key of its sequence is."""
    x = x.clone()
    length = LENGTHS[which]
    for i in range(3):
        end = ROOM if length is None else length if isinstance(length, int) else int(length[i])
        x[i, end:] = math.nan
        x[i, : int(PADS[which][i]) if which in PADS else 0] = math.nan
    return x


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the functions that calls end in."""
    names: list[str] = []

    def noting(real: Any) -> Any:
        def noted(*given: Any, **named: Any) -> Any:
            names.append(real.__name__)
            return real(*given, **named)

        return noted

    for module, name in (
        *((cache, name) for name in ("attention", "attention_decode", "attention_varlen")),
        (kvcache, "attention_varlen"),
    ):
        monkeypatch.setattr(module, name, noting(getattr(module, name)))
    yield names


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "which"), [*product((1, 5), LENGTHS), (70, "used"), (70, "both"), (70, "none")]
)
def test_it_is_attention_over_each_sequences_keys(
    queries: int, which: str, causal: bool, called: list[str]
) -> None:
    q, k, v = caches(queries)
    k, v = hidden(k, which), hidden(v, which)
    out, lse = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=LENGTHS[which], cache_leftpad=PADS.get(which), causal=causal,
        return_softmax_lse=True,
    )  # fmt: skip
    wanted, wanted_lse = exact(q, k, v, which, causal)
    assert (out.dtype, out.shape) == (HALF, (3, queries, 8, 64)) and out.is_contiguous()
    assert (lse.dtype, lse.shape) == (torch.float32, (3, 8, queries)) and lse.is_contiguous()
    torch.testing.assert_close(out.double(), wanted, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=1e-3)
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
def test_caches_may_lie_anyhow(layout: str, queries: int) -> None:
    q, k, v = caches(queries)
    given: dict[str, Any] = dict(cache_seqlens=LENGTHS["both"], cache_leftpad=PADS["both"])
    usual = flash_attn_with_kvcache(q, k, v, causal=True, **given)
    laid_k, laid_v = LAYOUTS[layout](k), LAYOUTS[layout](v)
    found = flash_attn_with_kvcache(q, laid_k, laid_v, causal=True, **given)
    assert isinstance(found, Tensor) and isinstance(usual, Tensor)
    wanted, _ = exact(q, k, v, "both", True)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=2e-3)
    # what no packed tensor can be is decoded, which adds up in another order
    if queries == 3 or layout != "sequences first in no order":
        assert torch.equal(found, usual)


def test_one_sequence_and_head_dims_of_its_own() -> None:
    q, k, v = caches(70, head_dim=96, head_dim_v=32)
    out = flash_attn_with_kvcache(q[:1], k[:1], v[:1], cache_seqlens=33, causal=True)
    wanted, _ = exact(q, k, v, "one", True)
    torch.testing.assert_close(out.double(), wanted[:1], rtol=2e-3, atol=2e-3)  # type: ignore[union-attr]


@pytest.mark.parametrize("queries", [0, 1, 70])
@pytest.mark.parametrize(("batch", "room"), [(0, ROOM), (3, 0), (3, 1), (1, 1)])
def test_of_little_there_is_little(batch: int, room: int, queries: int) -> None:
    q, k, v = caches(queries)
    q, k, v = q[:batch], k[:batch, :room], v[:batch, :room]
    for used in (None, ints(1, 5, -3)[:batch]):
        pads = None if used is None else ints(0, 0, 0)[:batch]
        given: dict[str, Any] = dict(cache_seqlens=used, cache_leftpad=pads, causal=True)
        out, lse = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **given)
        wanted, wanted_lse = attend(
            q, k, v, mask=MASKS["causal"], scale=0.125, seqused_k=used, leftpad_k=pads
        )
        torch.testing.assert_close(out.double(), wanted, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("which", LENGTHS)
def test_queries_may_be_packed(which: str, causal: bool, called: list[str]) -> None:
    _, k, v = caches()
    laid = [LAYOUTS["a part of a longer cache"](hidden(x, which)) for x in (k, v)]
    starts = ints(0, 70, 70, 73)
    q = normal(73, 8, 64, dtype=HALF)
    out, lse = flash_attn_with_kvcache(
        q, *laid, cache_seqlens=LENGTHS[which], cache_leftpad=PADS.get(which), causal=causal,
        cu_seqlens_q=starts, max_seqlen_q=70, return_softmax_lse=True,
    )  # fmt: skip
    assert out.shape == (73, 8, 64) and lse.shape == (8, 73) and called == ["attention_varlen"]
    for i, (top, bottom) in enumerate(pairwise(starts.tolist())):
        wanted, wanted_lse = exact(q[None, top:bottom].expand(3, -1, -1, -1), k, v, which, causal)
        torch.testing.assert_close(out[top:bottom].double(), wanted[i], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(lse[:, top:bottom].double(), wanted_lse[i], rtol=0, atol=1e-3)


def test_hints_and_what_is_not_read_change_no_bit() -> None:
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
        found = flash_attn_with_kvcache(q, k, v, cache_seqlens=used, **more)  # type: ignore[arg-type]
        assert torch.equal(out, found), more  # type: ignore[arg-type]


@pytest.mark.parametrize("queries", [1, 70])
@pytest.mark.parametrize("length", [-1, 0, 33, ROOM, ROOM + 9])
def test_one_number_for_all_lengths_is_as_that_many_keys(queries: int, length: int) -> None:
    q, k, v = caches(queries)
    pads = ints(0, 5, 31)
    for more in ({}, {"cache_leftpad": pads}):
        how: dict[str, Any] = dict(causal=True, return_softmax_lse=True, **more)
        found = flash_attn_with_kvcache(q, k, v, cache_seqlens=length, **how)
        wanted = flash_attn_with_kvcache(q, k, v, cache_seqlens=ints(*[length] * 3), **how)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_one_number_for_all_lengths_takes_nothing_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[Tensor, Any]] = []
    monkeypatch.setattr(
        kvcache, "attention_cache", lambda q, k, v, **given: seen.append((k, given["seqused_k"]))
    )
    q, k, v = caches()
    flash_attn_with_kvcache(q, k, v, cache_seqlens=33)
    ((keys, lengths),) = seen
    assert lengths is None and keys.data_ptr() == k.data_ptr() and keys.shape[1] == 33


@pytest.mark.parametrize("queries", [1, 70])
def test_it_compiles_into_one_graph_that_lengths_are_given_to(
    queries: int, fresh_dynamo: None
) -> None:
    q, k, v = caches(queries)

    def call(q: Tensor, k: Tensor, v: Tensor, used: Tensor, pads: Tensor) -> Any:
        return flash_attn_with_kvcache(
            q, k, v, cache_seqlens=used, cache_leftpad=pads, causal=True, return_softmax_lse=True
        )

    call(q, k, v, ints(3, 2, 1), ints(0, 0, 0))  # readies
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for used, pads in ((ints(ROOM, 41, 0), ints(5, 0, 0)), (ints(1, 2, 3), ints(0, 1, 4))):
        found, wanted = compiled(q, k, v, used, pads), call(q, k, v, used, pads)
        assert all(map(torch.equal, found, wanted))


def test_a_length_that_is_a_number_can_be_traced(fresh_dynamo: None) -> None:
    q, k, v = caches()
    call = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    wanted = flash_attn_with_kvcache(q, k, v, cache_seqlens=33)
    assert torch.equal(call(q, k, v, cache_seqlens=33), wanted)  # type: ignore[arg-type]


# ---- combining ----------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [True, False])
def test_splits_are_combined_to_what_all_keys_give(batches: bool) -> None:
    q, k, v = caches(5)
    splits = [
        flash_attn_with_kvcache(q, k[:, a:b], v[:, a:b], return_softmax_lse=True)
        for a, b in ((0, 30), (30, 31), (31, ROOM), (0, 0))
    ]
    outs = torch.stack([out for out, _ in splits]).float()
    lses = torch.stack([lse for _, lse in splits]).transpose(-1, -2)  # (splits, B, Sq, H)
    if not batches:
        outs, lses = outs[:, 1], lses[:, 1]
    out, lse = flash_attn_combine(outs, lses)
    wanted, wanted_lse = exact(q, k, v, "none", False)
    wanted_lse = wanted_lse.transpose(1, 2)
    if not batches:
        wanted, wanted_lse = wanted[1], wanted_lse[1]
    assert out.dtype == torch.float32 and out.shape == wanted.shape
    torch.testing.assert_close(out.double(), wanted, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=1e-3)
    half, _ = flash_attn_combine(outs, lses.contiguous(), out_dtype=HALF)
    assert torch.equal(half, out.half())
    into = torch.empty_like(half)
    assert flash_attn_combine(outs, lses, into)[0] is into and torch.equal(into, half)


def test_an_out_that_does_not_fit_is_refused() -> None:
    outs, lses = torch.zeros(2, 3, 5, 4, 64), torch.zeros(2, 3, 5, 4)
    for out, dtype in ((torch.zeros(3, 5, 4, 32), None), (torch.zeros(3, 5, 4, 64), HALF)):
        with pytest.raises(ValueError, match=r"it must be \(3, 5, 4, 64\) in torch\.float"):
            flash_attn_combine(outs, lses, out, dtype)
    for out in (torch.zeros(()).expand(3, 5, 4, 64), torch.zeros(3, 5, 1, 64).expand(3, 5, 4, 64)):
        with pytest.raises(ValueError, match="several of its elements are one in memory"):
            flash_attn_combine(outs, lses, out)
    wanting = torch.zeros(3, 5, 4, 64, requires_grad=True)
    with pytest.raises(ValueError, match="out requires a gradient"):
        flash_attn_combine(outs, lses, wanting)


# ---- refused ------------------------------------------------------------------------------------

Q, K, V = caches(3)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"page_table": ints(0)}, "page_table is not there yet in fagen; caches are dense"),
        ({"block_table": ints(0)}, "block_table is not there yet in fagen; caches are dense"),
        ({"k": K}, "k is not there yet in fagen; write it to k_cache first"),
        ({"v": V}, "v is not there yet in fagen; write it to v_cache first"),
        ({"rotary_cos": Q}, "rotary_cos is not there yet in fagen; turn q before"),
        ({"rotary_sin": Q}, "rotary_sin is not there yet"),
        ({"cache_batch_idx": ints(0, 1, 2)}, "cache_batch_idx is not there yet"),
        ({"qv": Q}, "qv is not there yet in fagen; None is none"),
        ({"window_size": (64, 0)}, "window_size = (64, 0) is not there yet"),
        ({"window_size": (-1, 1)}, "window_size = (-1, 1) is not there yet"),
        ({"attention_chunk": 64}, "attention_chunk = 64 is not there yet"),
        ({"softcap": 15.0}, "softcap = 15.0 is not there yet"),
        (
            {"k_cache": K.to(torch.float8_e4m3fn)},
            "e4m3, with q_descale, k_descale and v_descale, is not there yet",
        ),
        (
            {
                "q": Q.flatten(0, 1),
                "cu_seqlens_q": ints(0, 3, 6, 9),
                "k_cache": LAYOUTS["sequences first in no order"](K),
            },
            "cu_seqlens_q over caches of shape (3, 90, 2, 64)",
        ),
    ],
)
def test_what_is_not_there_yet_is_named(more: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = dict(q=Q, k_cache=K, v_cache=V) | more
    with pytest.raises(NotImplementedError, match=re.escape(f"flash_attn_with_kvcache: {said}")):
        flash_attn_with_kvcache(**given)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": Q[0]}, "q has 3 dimensions"),
        ({"cu_seqlens_q": ints(0, 3, 6, 9)}, "q has 4 dimensions; with cu_seqlens_q it must have"),
        ({"k_cache": K[0]}, "k_cache has 3 dimensions"),
        ({"v_cache": V[:2]}, "v has shape (2, 90, 2, 64)"),
        ({"cache_seqlens": torch.tensor([1, 2, 3])}, "cache_seqlens has shape (3) in torch.int64"),
        ({"cache_seqlens": ints(1, 2)}, "cache_seqlens has shape (2) in torch.int32; it must be ("),
        ({"cache_leftpad": ints(1)}, "cache_leftpad has shape (1)"),
        (
            {"k_cache": K.transpose(1, 3).contiguous().transpose(1, 3)},
            "k has stride 180 in dimension 3",
        ),
        ({"softmax_scale": 0.0}, "softmax_scale is 0; it must be"),
        ({"q": Q.float()}, "q is float32; use fp16 or bf16"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = dict(q=Q, k_cache=K, v_cache=V) | change
    with pytest.raises(ValueError, match=re.escape(said)):
        flash_attn_with_kvcache(**given)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("leaf", ["q", "k_cache", "v_cache"])
@pytest.mark.parametrize("which", ["used", "none"])
@pytest.mark.parametrize("queries", [64, 65])  # of 256 and 260 rows
def test_a_gradient_is_refused_by_the_backward_pass_alone(
    queries: int, which: str, leaf: str, packed: bool, called: list[str]
) -> None:
    q, k, v = caches(queries)
    given: dict[str, Any] = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": LENGTHS[which]}
    if packed:
        given |= {"q": q.flatten(0, 1), "cu_seqlens_q": ints(*range(0, 3 * queries + 1, queries))}
    wanted = flash_attn_with_kvcache(**given)
    computed, given[leaf] = called.copy(), given[leaf].requires_grad_()
    out, lse = flash_attn_with_kvcache(**given, return_softmax_lse=True)
    assert torch.equal(out, wanted) and called == computed * 2  # type: ignore[arg-type]
    said = "q, k_cache or v_cache requires a gradient, and over a cache there are none: fagen.atte"
    for found in (out, lse):
        assert found.requires_grad
        with pytest.raises(NotImplementedError, match=said):
            found.sum().backward()
    with torch.no_grad():
        found = flash_attn_with_kvcache(**given)
    assert torch.equal(found, wanted) and not found.requires_grad  # type: ignore[union-attr, arg-type]


def test_it_gives_what_the_call_that_it_stands_for_does() -> None:
    used = LENGTHS["used"]
    assert isinstance(used, Tensor)
    assert torch.equal(
        flash_attn_with_kvcache(Q, K, V, cache_seqlens=used, causal=True),  # type: ignore[arg-type]
        fagen.attention_decode(Q, K, V, seqused_k=used),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("shape", [(3, 1), (1, 1), (2, 0), (0, 5)], ids=str)
def test_a_cache_of_one_row_or_of_none_is_read_for_packed_queries_too(
    shape: tuple[int, int],
) -> None:
    batch, room = shape
    wide = normal(batch, max(room, 3), 2, 64, dtype=HALF)[:, :room]  # what follows is no key
    q, offsets = normal(batch * 4, 4, 64, dtype=HALF), ints(*range(0, batch * 4 + 1, 4))
    out, lse = flash_attn_with_kvcache(
        q, wide, wide, cu_seqlens_q=offsets, cache_seqlens=9, return_softmax_lse=True
    )
    dense = q.unflatten(0, (batch, 4)) if batch else q.reshape(0, 4, 4, 64)
    right, right_lse = attend(dense, wide, wide, mask=MASKS["full"], scale=64**-0.5)
    torch.testing.assert_close(out.double(), right.flatten(0, 1), rtol=0, atol=2e-3)
    torch.testing.assert_close(
        lse.double(), right_lse.transpose(0, 1).flatten(1), rtol=0, atol=1e-4
    )
