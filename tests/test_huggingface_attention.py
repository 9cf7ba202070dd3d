"""fagen in transformers' models: a layer sees what its mask means, and all else is refused."""

import pytest
import torch
from torch import Tensor, nn

import fagen
from fagen.huggingface import Mask, attend
from fagen.huggingface import layer as layers
from fagen.runtime import cache, call
from tests.attention_helpers import noted
from tests.fresh import forget
from tests.huggingface_helpers import (
    Layer,
    causal,
    full,
    kernels,
    mask_from,
    register_in_a_stand_in,
    tensors,
)
from tests.op_helpers import refusal
from tests.tensors import ints, normal

pytestmark = pytest.mark.filterwarnings("ignore::fagen.UntunedWarning")


@pytest.fixture
def mask_of(monkeypatch):
    return mask_from(register_in_a_stand_in(monkeypatch))


def textbook(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention in fp64 under a mask (queries, keys): (batch, queries, heads, head dim)."""
    q, k, v = q.double(), *(tensor.double().repeat_interleave(2, 1) for tensor in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("queries", [1, 5, 9])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_layer_gets_what_its_mask_means(is_causal, queries):
    q, k, v = tensors(queries)
    mask = Mask(is_causal, queries, 9)
    out, weights = attend(Layer(is_causal), q, k, v, mask, scaling=0.25, position_ids=q)
    assert weights is None and out.shape == (2, queries, 4, 16) and out.is_contiguous()
    torch.testing.assert_close(
        out.double(), textbook(q, k, v, kernels(mask, queries, 9)[0], 0.25), atol=2e-3, rtol=0
    )


@pytest.mark.parametrize("queries", [1, 5, 200])
@pytest.mark.parametrize(
    "mask_for",
    [
        lambda queries: Mask(True, queries, 210, "", ints(3, 0)),
        lambda queries: Mask(False, queries, 210, "", ints(0, 3), ints(9, 207)),
        lambda queries: torch.stack((ints(3, 0), ints(205, 203)))[:, None, None],
    ],
)
def test_a_layer_sees_each_sequences_keys_alone(mask_for, queries):
    q, k, v = tensors(queries, 210)
    mask = mask_for(queries)
    visible = kernels(mask, queries, 210)
    for x in (k, v):
        x.masked_fill_(~visible.any(1)[:, None, :, None], float("nan"))
    out, _ = attend(Layer(True), q, k, v, mask)
    for i in range(2):
        used = [x[i : i + 1].nan_to_num(0.0) for x in (q, k, v)]
        expected = textbook(*used, visible[i], 32**-0.5).nan_to_num(0.0)[0]
        torch.testing.assert_close(out[i].double(), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("queries", [5, 150])
@pytest.mark.parametrize(
    "mask_for",
    [
        lambda queries: Mask(True, queries, 160, window=(3, 0), width=4),
        lambda queries: Mask(True, queries, 160, "", ints(3, 0), window=(6, 0), width=7),
        lambda queries: Mask(True, queries, 160, "", ints(3, 0), chunk=20),
        lambda queries: bounds((3, 0), (155, 153), 2 * 30),
        lambda queries: bounds((3, 0), (155, 153), 2 * 30 + 1),
        lambda queries: Mask(False, queries, queries, "", window=(2, 2), width=3),
        lambda queries: Mask(False, queries, queries, "", ints(1, 0), ints(4, 5), window=(1, 1)),
        lambda queries: Mask(False, queries, queries, "", window=(2, None)),
    ],
)
def test_a_layer_sees_what_its_window_or_chunk_shows(mask_for, queries):
    mask = mask_for(queries)
    keys = 160 if isinstance(mask, Tensor) else mask.keys
    q, k, v = tensors(queries, keys)
    out, _ = attend(Layer(True), q, k, v, mask)
    visible = kernels(mask, queries, keys)
    for i in range(2):
        expected = textbook(*(x[i : i + 1] for x in (q, k, v)), visible[i], 32**-0.5)
        counts = visible[i].any(1)  # of padding it is open
        if not getattr(mask, "causal", True) and mask.first is not None:
            counts &= torch.arange(queries).ge(mask.first[i]) & torch.arange(queries).lt(
                mask.end[i]
            )
        torch.testing.assert_close(out[i, counts].double(), expected[0, counts], atol=2e-3, rtol=0)
    if queries > 5:
        whole = attend(Layer(True), q, k, v, Mask(getattr(mask, "causal", True), queries, keys))[0]
        assert (whole - out).abs().max() > 0.1


@pytest.mark.parametrize("queries", [1, 5, 200])
@pytest.mark.parametrize("left", [None, 3])
def test_a_layer_caps_scores_and_has_sinks(queries, left):
    q, k, v = tensors(queries, 210)
    sinks = torch.tensor((2.0, -1.0, 0.5, 3.0), dtype=torch.float16)
    mask = Mask(True, queries, 210, "", None if left is None else ints(left, 0))
    visible = kernels(mask, queries, 210)[:, None]
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT
    scores = (2 * (scores / 2).tanh()).masked_fill(~visible, float("-inf"))
    beside = sinks.double().view(1, 4, 1, 1).expand(2, 4, queries, 1)
    weights = torch.cat((scores, beside), -1).softmax(-1)[..., :-1]
    expected = (weights @ v.double().repeat_interleave(2, 1)).transpose(1, 2)
    out, _ = attend(Layer(True), q, k, v, mask, scaling=1.0, softcap=2.0, s_aux=sinks)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=0)


def bounds(first: tuple[int, int], end: tuple[int, int], extent: int = 1) -> Tensor:
    """What a static cache's mask is: where keys begin and end, and of what shape."""
    return torch.stack((ints(*first), ints(*end)))[:, None, None].expand(-1, extent, -1, -1)


def test_each_of_packed_sequences_has_its_own_window_or_chunks():
    q, k, v = tensors(9)
    at = ints(0, 4, 9, 12, 18)
    how = dict(cu_seq_lens_q=at, cu_seq_lens_k=at, max_length_k=6)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    for mask, same in (
        (Mask(True, 9, 9, window=(1, 0), width=2), dict(window=(1, 0))),
        (Mask(True, 9, 9, chunk=2), dict(mask="chunked", chunk=2)),
        (Mask(True, 9, 9, window=(5, 0), width=6), {}),
    ):
        out, _ = attend(Layer(True), q, k, v, mask, **how)
        expected = fagen.attention_varlen(*flat, at, causal=True, **same)
        assert torch.equal(out.flatten(0, 1), expected)


@pytest.mark.parametrize("queries", [5, 9])
@pytest.mark.parametrize(
    "bounds", [(ints(3, 0), None), (ints(0, 3), ints(9, 7)), (None, ints(4, 9))]
)
def test_lengths_have_gradients(bounds, queries):
    q, k, v = (x.requires_grad_() for x in tensors(queries))
    mask = Mask(bounds[1] is None, queries, 9, "", *bounds)
    dout = normal(2, queries, 4, 16, seed=7, dtype=torch.float16)
    out, _ = attend(Layer(True), q, k, v, mask)
    with torch.no_grad():
        torch.testing.assert_close(attend(Layer(True), q, k, v, mask)[0], out, atol=2e-3, rtol=0)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    visible = kernels(mask, queries, 9)[:, None]
    scores = exact[0] @ exact[1].repeat_interleave(2, 1).mT * 32**-0.5
    sees = visible.any(-1, keepdim=True)
    weights = scores.masked_fill(~visible & sees, -torch.inf).softmax(-1) * sees
    expected = (weights @ exact[2].repeat_interleave(2, 1)).transpose(1, 2)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for x, other in zip(grads, torch.autograd.grad(expected, exact, dout.double()), strict=True):
        torch.testing.assert_close(x.double(), other, atol=4e-3, rtol=4e-3)


def test_a_static_cache_has_no_gradients():
    q, k, v = tensors(9)
    q.requires_grad_()
    bounds = torch.stack((ints(3, 0), ints(9, 9)))[:, None, None]
    assert "a static cache has no gradients" in refusal(
        lambda: attend(Layer(True), q, k, v, bounds)
    )
    with torch.no_grad():
        attend(Layer(True), q, k, v, bounds)


@pytest.mark.parametrize("is_causal", [True, False])
def test_offsets_say_which_rows_see_each_other(is_causal):
    q, k, v = tensors(9)
    at = torch.tensor((0, 4, 9, 12, 18))
    out, _ = attend(
        Layer(is_causal), q, k, v, Mask(is_causal, 9, 9), cu_seq_lens_q=at, cu_seq_lens_k=at,
        max_length_q=6, max_length_k=6, seq_idx=at,
    )  # fmt: skip
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    expected = fagen.attention_varlen(*flat, at.int(), causal=is_causal)
    assert torch.equal(out.flatten(0, 1), expected)


def test_which_function_attends(monkeypatch):
    below = ((cache, name) for name in ("attention", "attention_decode", "attention_varlen"))
    names = noted(monkeypatch, (layers, "attention"), *below)
    for queries, keys, lengths, name in (
        (9, 9, (), "attention"),
        (1, 9, (), "attention_decode"),
        (8, 9, (), "attention_decode"),
        (140, 150, (), "attention"),
        (9, 9, (ints(3, 0),), "attention_decode"),
        (140, 140, (ints(3, 0),), "attention_varlen"),
        (1, 9, (ints(3, 0), ints(9, 4)), "attention_decode"),
    ):
        names.clear()
        attend(Layer(True), *tensors(queries, keys), Mask(True, queries, keys, "", *lengths))
        assert names == [name]


def test_a_long_prompt_whose_keys_and_values_lie_otherwise_is_attended_as_packed(monkeypatch):
    q, k, v = tensors(140, 140)
    turned = v.transpose(1, 2).contiguous().transpose(1, 2)  # as gpt-oss has them at first
    mask = Mask(True, 140, 140, "", ints(3, 0))
    expected = attend(Layer(True), q, k, v, mask)[0]
    names = noted(
        monkeypatch, *((cache, name) for name in ("attention_decode", "attention_varlen"))
    )
    assert torch.equal(attend(Layer(True), q, k, turned, mask)[0], expected)
    assert names == ["attention_varlen"]


def test_the_prompt_readies_the_kernel_of_a_token(monkeypatch):
    forget(monkeypatch)
    bounds = torch.stack((ints(3, 0), ints(140, 140)))[:, None, None]
    attend(Layer(True), *tensors(140, 150), bounds)
    (key,) = (key for key in call._ready if key.problem.kind == "decode")
    assert key.derived[0].values()["rows"] == 8
    compiled = torch.compile(
        lambda *args: attend(Layer(True), *args)[0], fullgraph=True, backend="eager"
    )
    q, k, v = tensors(1, 150)
    torch.testing.assert_close(
        compiled(q, k, v, bounds + 1), attend(Layer(True), q, k, v, bounds + 1)[0]
    )


def test_a_mask_goes_through_transformers_as_its_own_do(mask_of):
    mask = mask_of()
    assert mask.contiguous() is mask and mask.ndim != 2
    assert mask_of(attention_mask=mask) is mask


def test_the_mask_counts_and_not_what_the_layer_is_by_default():
    q, k, v = tensors()
    mask = Mask(False, 5, 9)
    out, _ = attend(Layer(True), q, k, v, mask)
    turned = (x.transpose(1, 2) for x in (q, k, v))
    assert torch.equal(out, fagen.attention_decode(*turned, causal=False))


def test_no_mask_is_taken_for_full_only_where_nothing_else_can_be_meant():
    q, k, v = tensors()
    expected, _ = attend(Layer(False), q, k, v, Mask(False, 5, 9))
    assert torch.equal(attend(Layer(False), q, k, v, None)[0], expected)
    assert torch.equal(attend(Layer(True), q, k, v, None, is_causal=False)[0], expected)
    query = q[:, :, :1]
    assert torch.equal(attend(Layer(True), query, k, v, None)[0], expected[:, :1])
    for layer, flag in ((Layer(True), None), (nn.Module(), None), (Layer(False), True)):
        words = refusal(lambda layer=layer, flag=flag: attend(layer, q, k, v, None, is_causal=flag))
        assert "is causal and was given no mask" in words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(dropout=0.1), r"dropout of 0\.1.*model\.eval\(\)"),
        (dict(attention_mask=torch.zeros(2, 1, 5, 9)), r"shape \(2, 1, 5, 9\).*masks of your own"),
        (dict(attention_mask=torch.ones(2, 9)), r"shape \(2, 9\)"),
        (dict(attention_mask=Mask(True, 5, 8)), "for 5 queries and 8 keys, and Layer has 5 and 9"),
        (dict(is_causal=False), "the mask is causal, and Layer says is_causal = False"),
        (dict(sliding_window=8), "window of 8 keys, there are 9, and the mask that .* has none"),
        (
            dict(sliding_window=8, attention_mask=Mask(True, 5, 9, window=(5, 0), width=6)),
            "a window of 8 keys, there are 9, and the mask that the model asked for has one of 6",
        ),
        (dict(softcap=-1.0), "softcap is -1.0; it must be a"),
        (dict(s_aux=torch.ones(3)), "sinks has shape"),
        (dict(sinks=torch.ones(4)), "sinks: fagen knows sinks by the name s_aux"),
        (dict(position_bias=torch.ones(1)), "position_bias: no kernel adds a bias"),
        (dict(cu_seq_lens_q=ints(0, 5, 10)), "cu_seq_lens_k is missing: it must be a tensor of wh"),
        (dict(cu_seq_lens_q=9, cu_seq_lens_k=9), "cu_seq_lens_q is none: it must be a tensor"),
        (dict(seq_idx=ints(0, 0, 1)), "given seq_idx alone: cu_seq_lens_q and cu_seq_lens_k say"),
        (
            dict(
                attention_mask=Mask(True, 5, 9, "", ints(3, 0)),
                cu_seq_lens_q=ints(0, 10),
                cu_seq_lens_k=ints(0, 18),
            ),
            "beside an attention_mask with padding",
        ),
        (dict(cache=object()), "cache: no kernel reads a paged cache"),
        (dict(output_attentions=True), "output_attentions: a fused kernel never has"),
        (dict(novelty=0), "novelty: fagen does not know what it changes"),
    ],
)
def test_what_no_kernel_computes_is_refused(arguments, message):
    arguments = {"attention_mask": Mask(True, 5, 9)} | arguments
    with pytest.raises(ValueError, match=message):
        attend(Layer(True), *tensors(), **arguments)


@pytest.mark.parametrize("name", ["is_causal", "deterministic"])
def test_a_word_is_no_flag(name):
    for wrong in ("False", 1.0, []):
        with pytest.raises(TypeError, match=f"{name} is of type .*; it must be True or False"):
            attend(Layer(True), *tensors(), Mask(True, 5, 9), **{name: wrong})


def test_an_argument_that_asks_for_nothing_is_passed_over():
    out, _ = attend(
        Layer(True), *tensors(), Mask(True, 5, 9),
        softcap=None, output_attentions=False, sliding_window=9, use_cache=True, dropout=0.0,
    )  # fmt: skip
    assert torch.equal(out, attend(Layer(True), *tensors(), Mask(True, 5, 9))[0])


def test_float32_is_refused_with_what_to_do():
    mask = Mask(True, 5, 9)
    words = refusal(lambda: attend(Layer(True), *tensors(dtype=torch.float32), mask))
    assert "load it with dtype=torch.bfloat16" in words


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated")
def test_what_would_forget_to_look_at_masks_is_refused():
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"use torch\.compile or torch\.export"):
        torch.jit.trace(lambda q: attend(Layer(False), q, k, v, None)[0], q)


def test_a_compiled_call_computes_the_same_and_refuses_the_same(mask_of):
    q, k, v = tensors()
    layer = Layer(True)

    def call(q, function, padding=None):
        queries = q.shape[2]
        sizes = dict(q_length=queries, kv_length=9, q_offset=9 - queries)
        mask = mask_of(function, attention_mask=padding, **sizes)
        return attend(layer, q, k, v, mask)[0]

    compiled, ones = torch.compile(call, backend="eager"), torch.ones(2, 9, dtype=torch.bool)
    expected = attend(layer, q, k, v, Mask(True, 5, 9))[0]
    attend(layer, q[:, :, 2:], k, v, Mask(True, 3, 9))  # readies the kernel of fewer rows
    attend(layer, q, k, v, Mask(False, 5, 9))
    assert torch.equal(compiled(q, causal), expected)
    assert torch.equal(compiled(q[:, :, 2:], causal), expected[:, 2:])
    assert torch.equal(compiled(q, full), attend(layer, q, k, v, Mask(False, 5, 9))[0])
    assert torch.equal(compiled(q, causal, ones), expected)
    padding = ones.clone()
    padding[0, :2] = False
    assert torch.equal(compiled(q, causal, padding), call(q, causal, padding))
    padding[0, 4] = False
    assert "hides keys between others" in refusal(lambda: compiled(q, causal, ~padding))
    with pytest.raises(Exception, match="shape"):
        torch.compile(lambda mask: attend(layer, q, k, v, mask)[0], backend="eager")(ones)
