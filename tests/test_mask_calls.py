"""Masks through public calls on CPU tensors, beside lambdas written by hand; refusals by name."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from fagen import flash_attn_interface as fa3
from fagen.runtime import op
from fagen.variants import described, names_of, said
from tests.mask_helpers import compiled_windows, flex
from tests.op_helpers import refused_everywhere
from tests.tensors import normal

pytestmark = [
    pytest.mark.usefixtures("nothing_is_ready"),
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]
LENGTHS = [(70, 70), (33, 100), (100, 33), (1, 40), (40, 0)]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(q: Tensor, k: Tensor, v: Tensor, sees: Any) -> tuple[Tensor, Tensor]:
    """Attention in fp64: `sees` is told a sequence, a query's position and a key."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    batch, _, queries, keys = scores.shape
    sequence = torch.arange(batch).view(-1, 1, 1, 1)
    position = torch.arange(queries).view(1, 1, -1, 1) + keys - queries
    key = torch.arange(keys).view(1, 1, 1, -1)
    visible = torch.as_tensor(sees(sequence, position, key)).expand(batch, 1, queries, keys)
    scores = scores.masked_fill(~visible, -torch.inf)
    p = scores.softmax(-1).nan_to_num(0)
    return torch.einsum("bhqk,bkhd->bqhd", p, v), scores.logsumexp(-1)


def tensors(queries: int, keys: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (batch, queries, 4, 64), (batch, keys, 2, 64), (batch, keys, 2, 64)
    q, k, v = (normal(*shape, dtype=torch.float16, seed=i) for i, shape in enumerate(shapes))
    return q, k, v


def near(results: Any, expected: tuple[Tensor, Tensor]) -> None:
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), exact, atol=4e-3, rtol=0)


WINDOWS: list[tuple[dict[str, Any], Any]] = [
    ({"causal": True, "window": 16}, lambda b, q, k: (k <= q) & (q - k < 16)),
    ({"causal": True, "window": 1}, lambda b, q, k: k == q),
    ({"window": 16}, lambda b, q, k: (q - k).abs() < 16),
    ({"window": (3, 9)}, lambda b, q, k: (q - k <= 3) & (k - q <= 9)),
    ({"window": [3, -1]}, lambda b, q, k: q - k <= 3),
    ({"window": (None, 5)}, lambda b, q, k: k - q <= 5),
    ({"window": (-1, 0)}, lambda b, q, k: k <= q),
    ({"causal": True, "window": (5, 9)}, lambda b, q, k: (k <= q) & (q - k <= 5)),
    ({"causal": True, "window": 1 << 40}, lambda b, q, k: k <= q),
]


@pytest.mark.parametrize(("call", "sees"), WINDOWS, ids=[str(call) for call, _ in WINDOWS])
def test_a_window_is_what_it_says(call, sees):
    for lengths in LENGTHS:
        q, k, v = tensors(*lengths)
        near(fagen.attention(q, k, v, **call, return_lse=True), dense(q, k, v, sees))


def test_a_window_of_sequences_one_after_another_and_of_used_queries():
    q, k, v = (normal(90, n, 64, dtype=torch.float16, seed=i) for i, n in enumerate((4, 2, 2)))
    at, used = ints(0, 30, 90), ints(30, 41)
    whole, lse = fagen.attention_varlen(q, k, v, at, causal=True, window=9, return_lse=True)
    some = fagen.attention_varlen(q, k, v, at, seqused_q=used, causal=True, window=(8, None))
    for first, last, many in ((0, 30, 30), (30, 90, 41)):
        own = q[None, first:last], k[None, first:last], v[None, first:last]
        expected = dense(*own, lambda b, i, j: (j <= i) & (i - j < 9))
        near((whole[None, first:last], lse[None, :, first:last]), expected)
        own = own[0][:, :many], *own[1:]
        out, _ = dense(*own, lambda b, i, j: (j <= i) & (i - j < 9))
        torch.testing.assert_close(
            some[None, first : first + many].double(), out, atol=4e-3, rtol=0
        )


def test_one_kernel_serves_all_windows_and_a_call_without_one_has_its_own():
    q, k, v = tensors(20, 20)
    door = fagen.runtime.attention.ATTENTION
    for window in (1, 7, (3, 9), (None, 5)):
        fagen.attention(q, k, v, window=window)
        fagen.attention(q, k, v, window=window, causal=True)
    fagen.attention(q, k, v)
    names = {kernel.slug.split("_")[3] for kernel in door.known.values()}
    assert names == {"window", "causal", "full"}  # (None, 5) under causal is causal
    assert len({kernel.slug for kernel in door.known.values()}) == 3


def test_what_a_call_says_is_looked_up_by_few_calls_of_python():
    """A stand-in for time, of which two µs are allowed; modules of what runs then are others."""
    q, k, v = tensors(20, 20)
    own = "k_idx <= q_pos and q_pos - k_idx < row"
    modules = "fagen.runtime.arguments", "fagen.variants", "fagen.given"

    def calls(**how: Any) -> int:
        count = 0

        def note(frame: Any, event: str, _: Any) -> None:
            nonlocal count
            name = frame.f_globals.get("__name__", "")
            count += event == "call" and name in modules

        fagen.attention(q, k, v, **how)
        sys.setprofile(note)
        try:
            fagen.attention(q, k, v, **how)
        finally:
            sys.setprofile(None)
        return count

    for how in (
        dict(causal=True, window=4, softcap=5.0, sinks=torch.zeros(4)),
        dict(mask="prefix", prefix=ints(3, 4)),
        dict(mask=own, row=5, score="score * gain", gain=2.0),
    ):
        assert calls(**how) <= 3


FIRST, EACH = ints(20, 0), ints(1, 0)


def _chunk(positions: Tensor, chunk: int) -> Tensor:
    return torch.div(positions, chunk, rounding_mode="floor")


Width, Ends = fagen.int32(min=1), fagen.Table("int32", "batch")


@fagen.mask
def within(q_pos: Any, k_idx: Any, batch: Any, *, row: Width, ends: Ends) -> Any:  # type: ignore[valid-type]
    """What names of kernels' own C++ are called likewise."""
    return (q_pos - k_idx < row) & (k_idx < ends[batch])


MASKS: list[tuple[dict[str, Any], Any]] = [
    ({"mask": "chunked", "chunk": 8}, lambda b, q, k: (k <= q) & (_chunk(q, 8) == _chunk(k, 8))),
    ({"mask": "prefix", "prefix": FIRST}, lambda b, q, k: (k <= q) | (k < FIRST[b])),
    ({"causal": EACH}, lambda b, q, k: (k <= q) | (EACH[b] == 0)),
    (
        {"mask": "chunked", "chunk": 16, "window": 9},
        lambda b, q, k: (k <= q) & (q - k < 9) & (_chunk(q, 16) == _chunk(k, 16)),
    ),
    (
        {"mask": "prefix", "prefix": FIRST, "window": (9, 30)},
        lambda b, q, k: ((k <= q) | (k < FIRST[b])) & (q - k <= 9) & (k - q <= 30),
    ),
    (
        {"mask": "k_idx <= q_pos and q_pos - k_idx < row", "row": 5},
        lambda b, q, k: (k <= q) & (q - k < 5),
    ),
    (
        {"mask": within, "row": 20, "ends": FIRST, "causal": EACH},
        lambda b, q, k: ((k <= q) | (EACH[b] == 0)) & (q - k < 20) & (k < FIRST[b]),
    ),
    ({"mask": "k_idx <= 2 * q_pos"}, lambda b, q, k: k <= 2 * q),
]


@pytest.mark.parametrize(("call", "sees"), MASKS, ids=[str(i) for i, _ in enumerate(MASKS)])
def test_words_texts_and_functions_are_what_they_say(call, sees):
    for lengths in LENGTHS[:3]:
        q, k, v = tensors(*lengths)
        near(fagen.attention(q, k, v, **call, return_lse=True), dense(q, k, v, sees))


FLEX = [*WINDOWS[:1], *WINDOWS[3:4], MASKS[0], MASKS[1]]


@pytest.mark.parametrize(("call", "sees"), FLEX, ids=range(len(FLEX)))
def test_flex_attention_sees_the_same(call, sees):
    for lengths in ((33, 100), (100, 33)):
        q, k, v = tensors(*lengths)
        theirs, lse = flex(q, k, v, sees)
        found = fagen.attention(q, k, v, **call, return_lse=True)
        near(found, (theirs.double(), lse.double()))


def test_documents_are_intervals_of_each_query():
    first, last = ints(0, 0, 0, 3, 3, 3, 3, 3, 8, 8), ints(3, 3, 3, 8, 8, 8, 8, 8, 10, 10)
    q, k, v = tensors(10, 10)
    given = {"first": first.repeat(2, 1), "last": last.repeat(2, 1)}
    for causal in (False, True):
        out = fagen.attention(q, k, v, mask="document", **given, causal=causal, return_lse=True)

        def sees(b: Any, i: Any, j: Any, causal: bool = causal) -> Any:
            return (first[i] <= j) & (j < last[i]) & ((j <= i) | (not causal))

        near(out, dense(q, k, v, sees))


def test_prefixes_of_used_queries_are_their_sequences():
    q, k, v = (normal(90, n, 64, dtype=torch.float16, seed=i) for i, n in enumerate((4, 2, 2)))
    at, used = ints(0, 30, 90), ints(20, 60)
    out = fagen.attention_varlen(q, k, v, at, seqused_q=used, mask="prefix", prefix=FIRST)
    own = q[None, :20], k[None, :30], v[None, :30]
    expected, _ = dense(*own, lambda b, i, j: (j <= i) | (j < 20))
    torch.testing.assert_close(out[None, :20].double(), expected, atol=4e-3, rtol=0)
    with pytest.raises(ValueError, match=r"prefix has shape \(3,\) in torch.int32; it must be"):
        wrong = ints(1, 2, 3)
        fagen.attention_varlen(q, k, v, at, seqused_q=used, mask="prefix", prefix=wrong)


def test_quantised_calls_take_windows():
    q, k, v = tensors(70, 100)
    out = fagen.attention_fp8(q, k, v, causal=True, window=40)
    exact, _ = dense(q, k, v, lambda b, i, j: (j <= i) & (i - j < 40))
    assert (out.double() - exact).abs().mean() < 0.02


def test_flash_attentions_windows_are_these():
    q, k, v = tensors(33, 100)
    for more in ({}, {"causal": True}):
        theirs = fa3.flash_attn_func(q, k, v, window_size=(7, 3), **more)
        assert torch.equal(theirs, fagen.attention(q, k, v, window=(7, 3), **more))
    at = ints(0, 33), ints(0, 100)
    packed = fa3.flash_attn_varlen_func(q[0], k[0], v[0], *at, 33, 100, window_size=(7, 3))
    own = fagen.attention(q, k, v, window=(7, 3))
    torch.testing.assert_close(packed, own[0], atol=2e-3, rtol=0)
    cached = fa3.flash_attn_with_kvcache(
        q[:, :2], k, v, cache_seqlens=ints(100, 60), causal=True, window_size=(7, 0)
    )
    used = fagen.attention(q[1:, :2], k[1:, :60], v[1:, :60], causal=True, window=8)
    torch.testing.assert_close(cached[1:], used, atol=2e-3, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attentions_chunks_are_these(causal):
    q, k, v = tensors(33, 100)
    out = fa3.flash_attn_func(q, k, v, causal=causal, attention_chunk=16, window_size=(9, 40))

    def sees(b: Any, i: Any, j: Any) -> Any:
        near_by = (i - j <= 9) & (j - i <= (0 if causal else 40))
        return (_chunk(i, 16) == _chunk(j, 16)) & near_by

    torch.testing.assert_close(out.double(), dense(q, k, v, sees)[0], atol=4e-3, rtol=0)


DECODED = [*WINDOWS[:6], *MASKS]


@pytest.mark.parametrize(("call", "sees"), DECODED, ids=[str(i) for i, _ in enumerate(DECODED)])
def test_decoding_takes_them_over_the_keys_of_a_sequence(call, sees):
    used, before = ints(50, 40), ints(10, 0)
    for queries in (1, 3):
        q, k, v = tensors(queries, 60)
        how = {"causal": False, **call} if "mask" not in call else call
        out = fagen.attention_decode(q, k, v, seqused_k=used, leftpad_k=before, **how)
        for number in range(2):
            own = slice(number, number + 1), slice(int(before[number]), int(used[number]))

            def of_one(b: Any, i: Any, j: Any, number: int = number) -> Any:
                return sees(b + number, i, j)

            expected, _ = dense(q[own[0]], k[own], v[own], of_one)
            torch.testing.assert_close(out[own[0]].double(), expected, atol=4e-3, rtol=0)


def test_what_is_anded_has_the_name_of_the_word_that_it_is():
    def call(**how: Any) -> Any:
        names = "window", "mask", "softcap", "score"
        causal, own = how.pop("causal", False), [how.pop(name, None) for name in names]
        found = said(fagen.attention, causal, *own, None, how)
        return names_of(found.variant)[0], found.values

    each = ints(1, 0)
    assert call() == ("full", ())
    assert call(causal=True, mask="causal") == call(mask="k_idx <= q_pos") == ("causal", ())
    assert call(window=5) == ("window", (4, 4))
    assert call(causal=each) == ("causal_by_sequence", (each,))
    assert call(causal=each, window=(None, 0)) == ("causal", ())
    assert call(causal=True, mask="chunked", chunk=8) == ("chunked", (8,))
    assert call(mask="prefix", prefix=each) == ("prefix", (each,))
    assert call(causal=True, mask="prefix", prefix=each) == ("causal", ())
    name, values = call(mask="chunked", chunk=8, window=3)
    assert name.startswith("mask") and values == (8, 2, 2)
    assert call(mask="chunked", chunk=9, window=4) == (name, (9, 3, 3))
    assert call(mask="k_idx < len_k") == ("full", ())
    what = True, None, "window", None, None, None, {}
    assert described(fagen.prepare, *what) == ("window", "plain", "")

    @fagen.mask
    def near_by(q_pos: Any, k_idx: Any, *, width: Width) -> Any:  # type: ignore[valid-type]
        return (k_idx <= q_pos) & (q_pos - k_idx < width)

    assert call(mask=near_by, width=21)[1] == (21,)


Q = normal(1, 4, 2, 64, dtype=torch.float16)
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"window": 0}, ValueError, "window is 0; it must be a number of keys from 1 on"),
    ({"window": (-2, 0)}, ValueError, r"window is \(-2, 0\); it must be a number of keys"),
    ({"window": (1, 2, 3)}, ValueError, r"window is \(1, 2, 3\)"),
    ({"window": "a"}, ValueError, 'window is "a"'),
    ({"mask": "chunkd"}, ValueError, "did you mean chunked"),
    ({"mask": "window"}, ValueError, 'mask is "window", which window says: leave mask out'),
    ({"mask": "chunked"}, ValueError, "chunk is missing, which the mask takes"),
    ({"mask": "chunked", "chunk": 0}, ValueError, "chunk is 0; it must be a whole number from 1"),
    ({"mask": "chunked", "chunk": 2.5}, ValueError, "chunk is 2.5; it must be a whole number"),
    ({"mask": "prefix", "prefix": [1]}, ValueError, "prefix is of type list; it must be a torch.T"),
    ({"mask": lambda q_pos, k_idx: True}, ValueError, "mask is a function; write @fagen.mask"),
    ({"mask": Q}, TypeError, "mask is of type Tensor"),
    ({"mask": "k_idx <= widt"}, ValueError, "mask: column 10: widt is not known"),
    ({"mask": "k_idx % 3 == 0"}, ValueError, "mask: k_idx % 3 <= 0"),
    ({"mask": "k_idx <= far", "far": Q}, ValueError, "far is a tensor, and a text does not say"),
    ({"mask": "k_idx <= heads", "heads": 3}, ValueError, "heads is a word of the language"),
    ({"chunk": 3}, TypeError, r'attention\(\) takes no chunk: fagen has mask="chunked", chunk='),
    ({"window_left": 3}, TypeError, r"takes no window_left: fagen has window=\(left, right\)"),
    ({"dropout_p": 0.1}, TypeError, "takes no dropout_p: not there yet in fagen: dropout"),
    ({"bias": Q}, TypeError, "takes no bias: not there yet in fagen: a bias"),
    ({"causal": Q > 0}, ValueError, r"causal of several sequences is int32 \(batch,\)"),
    (
        {"mask": "prefix", "prefix": ints(1, 2)},
        ValueError,
        r"prefix has shape \(2\); it must be \(batch = 1\)",
    ),
    ({"mask": "prefix", "prefix": Q[0, :1, 0, 0]}, ValueError, "prefix is not int32"),
    ({"mask": "k_idx <= q_pos - head"}, ValueError, "head may be an index of a table only"),
    ({"mask": "k_idx <= len_k - q_pos"}, ValueError, "its keys do not move on from row to row"),
    ({"causal": "a"}, TypeError, "causal is of type str; it must be True or False or a torch.T"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_wrong_argument_of_a_mask_is_named(call, error, words):
    with pytest.raises(error, match=words):
        fagen.attention(Q, Q, Q, **call)


def gradients(out: Tensor, lse: Tensor, leaves: Any) -> tuple[Tensor, ...]:
    """Of something of both, where rows see a key."""
    seen = lse > -torch.inf
    weights = normal(*out.shape, dtype=torch.float16, seed=7).to(out)
    used = (out * weights * seen.transpose(1, 2)[..., None]).sum() + lse[seen].square().sum() / 64
    return torch.autograd.grad(used, leaves)


BACKWARD = [*WINDOWS[:1], *WINDOWS[3:6], *MASKS]


@pytest.mark.parametrize(("call", "sees"), BACKWARD, ids=range(len(BACKWARD)))
def test_gradients_are_those_of_what_is_seen(call, sees):
    for lengths in LENGTHS[:3]:
        leaves = tuple(x.requires_grad_() for x in tensors(*lengths))
        exact = tuple(x.detach().double().requires_grad_() for x in leaves)
        found = gradients(*fagen.attention(*leaves, **call, return_lse=True), leaves)
        # a row that sees no key sees one here, of whose gradients nothing counts
        blind = dense(*exact, sees)[1] == -torch.inf

        def shown(b: Any, i: Any, j: Any, blind: Tensor = blind) -> Any:
            return sees(b, i, j) | (blind[:, :1, :, None] & (j == 0))

        out, lse = dense(*exact, shown)
        expected = gradients(out, lse.masked_fill(blind, -torch.inf), exact)
        for ours, true in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.double(), true, atol=8e-3, rtol=4e-3)


def test_gradients_of_documents_one_after_another():
    """Each has a prefix, or windows: as its own call does."""
    at, masks = ints(0, 30, 90), (dict(mask="prefix", prefix=FIRST), dict(window=(9, 3)))
    for call in masks:
        q, k, v = (normal(90, n, 64, dtype=torch.float16, seed=i) for i, n in enumerate((4, 2, 2)))
        leaves = tuple(x.requires_grad_() for x in (q, k, v))
        out = fagen.attention_varlen(*leaves, at, **call)
        whole = torch.autograd.grad(out.square().sum(), leaves)
        for number, own in enumerate((slice(0, 30), slice(30, 90))):
            each = {n: x[number : number + 1] if n == "prefix" else x for n, x in call.items()}
            parts = tuple(x[None, own].detach().requires_grad_() for x in leaves)
            alone = torch.autograd.grad(fagen.attention(*parts, **each).square().sum(), parts)
            for ours, theirs in zip(whole, alone, strict=True):
                torch.testing.assert_close(ours[own], theirs[0], atol=4e-3, rtol=4e-3)


def test_a_compiled_window_has_gradients():
    leaves = tuple(x.requires_grad_() for x in tensors(20, 20))

    def used(q: Tensor, k: Tensor, v: Tensor, width: int) -> Tensor:
        return fagen.attention(q, k, v, causal=True, window=width).square().sum()

    compiled = torch.compile(used, fullgraph=True, backend="aot_eager")
    for width in (5, 7, 9):
        found = torch.autograd.grad(compiled(*leaves, width), leaves)
        for ours, theirs in zip(
            found, torch.autograd.grad(used(*leaves, width), leaves), strict=True
        ):
            assert torch.equal(ours, theirs)


def test_a_compiled_window_is_one_graph():
    q, k, v = tensors(20, 20)
    graphs = []

    def counted(module: Any, _: Any) -> Any:
        graphs.append(module)
        return module.forward

    calls: list[dict[str, Any]] = [
        {"causal": True, "window": 5},
        {"window": (3, None)},
        {"mask": "prefix", "prefix": FIRST},
        {"causal": EACH},
        {"mask": within, "row": 7, "ends": FIRST},
    ]
    for call in calls:
        compiled = torch.compile(
            lambda q, k, v, call=call: fagen.attention(q, k, v, **call),
            fullgraph=True,
            backend=counted,
        )
        for _ in range(2):
            assert torch.equal(compiled(q, k, v), fagen.attention(q, k, v, **call))
    assert len(graphs) == len(calls)


def test_a_compiled_graph_is_for_all_windows():
    q, k, v = tensors(20, 20)
    compiled, graphs = compiled_windows(k, v)
    for width in (5, 7, 9, 11):
        assert torch.equal(compiled(q, width), fagen.attention(q, k, v, causal=True, window=width))
    assert len(graphs) == 2  # of the first, and then of any


def test_preparing_and_picking_tell_masks_apart():
    of = {"dtype": "bf16", "head_dim": 128}
    slugs = [
        fagen.prepare(**of, window=1024),
        fagen.prepare(**of, causal=True, window=(7, 0)),
        fagen.prepare(**of, mask="window"),
        fagen.pick(**of, causal=True, window=9).slug,
        fagen.pick(**of, mask="window").slug,
    ]
    assert {slug.split("_")[3] for slug in slugs} == {"window"}
    assert "_causal_" in fagen.prepare(**of, window=(None, 0))
    assert "_prefix_" in fagen.prepare_decode(**of, heads=8, queries=4, mask="prefix")
    assert "_chunked_" in fagen.pick(**of, kind="decode", mask="chunked").slug
    assert "_chunked_" in fagen.prepare_varlen(**of, mask="chunked", chunk=9)
    with pytest.raises(fagen.ScheduleError, match="did you mean chunked"):
        fagen.pick(**of, mask="chunkd")
    with pytest.raises(TypeError, match=r'prepare\(\) takes no chunk: fagen has mask="chunked"'):
        fagen.prepare(**of, chunk=3)


def test_a_call_with_a_window_is_recorded_as_one():
    from fagen.runtime.calls import counting

    q, k, v = tensors(20, 20)
    with counting() as counted:
        for window in (5, 6, (3, 2)):
            fagen.attention(q, k, v, window=window)
    ((problem, sizes),) = counted.calls.items()
    assert problem.mask == "window"
    assert [*sizes.values()] == [3]
    with counting() as counted:
        fagen.attention(q, k, v, mask="k_idx <= q_pos and q_pos - k_idx < row", row=3)
    assert not counted.calls and sum(counted.left_out.values()) == 1


# ---- ops ----------------------------------------------------------------------------------------

OPS: dict[str, tuple[Any, ...]] = {
    "fwd_fp16_d64_window_m64n64": (3, 1 << 30),
    "fwd_fp16_d64_prefix_m64n64": (FIRST,),
    "dec_fp16_d64_window_r8n64": (3, 1),
    "fwd_fp16_d64_window_m64n64_softcap_sinkbf16": (3, 1, 2.0, torch.zeros(4).bfloat16()),
    "fwd_fp16_d64_causal_m64n64_sinkfp32": (torch.zeros(4),),
    "dec_fp16_d64_causal_r8n64_softcap_sinkfp16": (2.0, torch.zeros(4).half()),
}


@pytest.mark.usefixtures("comparable")
@pytest.mark.parametrize("slug", [*OPS])
def test_opcheck_finds_nothing(stub_op, slug):
    stub, tables = stub_op(slug), OPS[slug]
    for queries, keys in ((70, 100), (1, 1), (0, 5), (3, 0)):
        call = (*tensors(queries, keys), 0.125, *tables)
        for each in (stub.op, stub.out_only, op.emulated(slug)):
            torch.library.opcheck(each, call)


@pytest.mark.usefixtures("comparable")
def test_what_a_score_and_sinks_are_given_is_refused_alike_in_python_and_in_cpp(stub_op):
    stub = stub_op("fwd_fp16_d64_causal_m64n64_softcap_sinkfp32")
    named = dict(zip("qkv", tensors(5, 5), strict=True), scale=0.125, softcap=2.0)
    for wrong in (0.0, float("nan"), 2e6):
        call = {**named, "softcap": wrong, "sinks": torch.zeros(4)}
        assert "softcap is" in refused_everywhere(stub.plan, stub.op, call)
    for sinks, expected in (
        (torch.zeros(3), "sinks has shape (3); it must be (heads = 4)"),
        (torch.zeros(4).half(), "sinks is not float32, which this kernel takes"),
        (torch.zeros(8)[::2], "sinks has stride 2 in dimension 0, which must be 1"),
    ):
        assert expected in refused_everywhere(stub.plan, stub.op, {**named, "sinks": sinks})


@pytest.mark.usefixtures("comparable")
def test_what_a_mask_is_given_is_refused_alike_in_python_and_in_cpp(stub_op):
    stub = stub_op("fwd_fp16_d64_window_m64n64")
    named = dict(zip("qkv", tensors(5, 5), strict=True), scale=0.125, window_left=3, window_right=1)
    for name in ("window_left", "window_right"):
        for wrong in (-1, (1 << 30) + 1):
            words = refused_everywhere(stub.plan, stub.op, {**named, name: wrong})
            assert f"{name} is {wrong}; it must be from 0 to 1073741824" in words
    stub = stub_op("fwd_fp16_d64_prefix_m64n64")
    named = dict(zip("qkv", tensors(5, 5), strict=True), scale=0.125)
    for wrong, expected in (
        (ints(1), "prefix has shape (1); it must be (batch = 2)"),
        (ints(1, 2).long(), "prefix is not int32, which this kernel takes"),
        (ints(1, 2)[:, None], "prefix has"),
    ):
        assert expected in refused_everywhere(stub.plan, stub.op, {**named, "prefix": wrong})
