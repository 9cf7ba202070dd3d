"""fagen in transformers' models: what is attended is what was meant, and all else is refused.

transformers itself is stood in for by the few names that fagen asks of it; what it really calls
is in test_huggingface_models.py.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fagen
from fagen import huggingface
from fagen.errors import ToolchainError
from fagen.huggingface import Mask, attend
from tests.op_helpers import refusal
from tests.tensors import normal

pytestmark = pytest.mark.filterwarnings("ignore::fagen.UntunedWarning")

Mask4 = Callable[[Any, Any, Any, Any], Any]


# ---- transformers, as far as it is asked --------------------------------------------------------


def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query


def full(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= 0


def windowed(size: int) -> Mask4:
    return lambda batch, head, query, key: (key <= query) & (key > query - size)


def chunked(size: int) -> Mask4:
    return lambda batch, head, query, key: (key <= query) & (key // size == query // size)


def windowed_both_ways(size: int) -> Mask4:
    return lambda batch, head, query, key: abs(query - key) <= size


def sdpa_mask(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0) -> None: ...


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What register() puts into a stand-in for transformers."""
    functions: dict[str, Any] = {}

    def interface(what: str) -> SimpleNamespace:
        return SimpleNamespace(
            register=lambda name, made: functions.update({f"{what} {name}": made})
        )

    module, masks = ModuleType("transformers"), ModuleType("transformers.masking_utils")
    module.__version__ = "5.23.0"  # type: ignore[attr-defined]
    module.AttentionInterface = interface("attention")  # type: ignore[attr-defined]
    module.AttentionMaskInterface = interface("mask")  # type: ignore[attr-defined]
    module.masking_utils = masks  # type: ignore[attr-defined]
    masks.__dict__.update(
        causal_mask_function=causal, bidirectional_mask_function=full, sdpa_mask=sdpa_mask
    )
    monkeypatch.setitem(sys.modules, "transformers", module)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masks)
    huggingface.register()
    yield functions


@pytest.fixture
def mask_of(registered: dict[str, Any]) -> Callable[..., Mask]:
    """The mask function as transformers calls it: by keywords, some of them not for fagen."""
    beside = dict(dtype=torch.bfloat16, config=None, use_vmap=False, device=torch.device("cpu"))

    def call(function: Mask4 = causal, **given: Any) -> Mask:
        both_ways = function is full or "both_ways" in function.__qualname__
        skips = {
            "allow_is_causal_skip": not both_ways,
            "allow_is_bidirectional_skip": both_ways,
        }
        sizes = dict(batch_size=2, q_length=4, kv_length=4, q_offset=0, kv_offset=0)
        found: Mask = registered["mask fagen"](
            mask_function=function, **sizes | skips | beside | given
        )
        return found

    return call


def test_both_functions_are_registered_and_twice_is_as_once(registered: dict[str, Any]) -> None:
    before = set(registered)
    huggingface.register()
    assert set(registered) == before == {"attention fagen", "mask fagen"}


def test_a_transformers_that_is_too_old_is_refused(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = sys.modules["transformers.masking_utils"]
    monkeypatch.setattr(masks, "sdpa_mask", lambda batch_size, cache_position: None)
    said = r"5\.23\.0, and fagen needs 5\.4 or later.*--upgrade"
    with pytest.raises(ToolchainError, match=said):
        huggingface.register()
    monkeypatch.delattr(sys.modules["transformers"], "masking_utils")
    monkeypatch.delitem(sys.modules, "transformers.masking_utils")
    with pytest.raises(ToolchainError, match=said):
        huggingface.register()


def test_without_transformers_its_name_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match="transformers"):
        huggingface.register()


# ---- masks --------------------------------------------------------------------------------------


def kernels(mask: Mask) -> Tensor:
    """What a kernel lets be seen, (queries, keys): the last query sees the last key."""
    query, key = torch.arange(mask.queries)[:, None], torch.arange(mask.keys)
    return (key <= query + mask.keys - mask.queries) | torch.tensor(not mask.causal)


def test_whatever_is_accepted_is_what_was_meant(mask_of: Callable[..., Mask]) -> None:
    functions: list[tuple[Mask4, int | None]] = [(causal, None), (full, None)]
    makers = (windowed, chunked, windowed_both_ways)
    functions += [(make(size), size) for make, size in product(makers, (1, 2, 3, 4))]
    paddings = [torch.ones(2, 7, dtype=torch.bool) for _ in range(4)]
    paddings[1][1, 0] = paddings[2][0, 3:] = paddings[3][:, 5] = False
    accepted: Counter[str] = Counter()
    for queries, keys, first_query, first_key in product(
        (1, 2, 3), range(1, 6), range(5), range(3)
    ):
        query = torch.arange(first_query, first_query + queries)[:, None]
        key = torch.arange(first_key, first_key + keys)
        given = dict(q_length=queries, kv_length=keys, q_offset=first_query, kv_offset=first_key)
        for (function, size), padding in product(functions, paddings):
            meant = function(0, 0, query, key).expand(queries, keys)
            meant = meant & padding[:, None, first_key : first_key + keys]
            try:
                mask = mask_of(function, attention_mask=padding, local_size=size, **given)
            except ValueError:
                aligned = first_query + queries == first_key + keys
                asked = function is full or (function is causal and aligned)
                assert not (asked and padding[:, first_key : first_key + keys].all())
                continue
            assert (mask.queries, mask.keys) == (queries, keys)
            assert torch.equal(kernels(mask).expand_as(meant), meant) != bool(mask.refused)
            accepted[function.__qualname__.partition(".")[0]] += not mask.refused
    assert len(accepted) == 5 and min(accepted.values()) > 20


def test_a_window_stays_usable_where_its_cache_drops_what_it_hides(
    mask_of: Callable[..., Mask],
) -> None:
    for seen in range(9, 40):
        kept = min(seen + 1, 8)
        given = dict(q_length=1, kv_length=kept, q_offset=seen, kv_offset=seen + 1 - kept)
        assert mask_of(windowed(8), local_size=8, **given) == Mask(True, 1, kept)


def test_a_window_that_hides_a_key_is_refused_by_the_layers_that_have_it(
    mask_of: Callable[..., Mask],
) -> None:
    mask = mask_of(windowed(8), local_size=8, q_length=5, kv_length=9, q_offset=4)
    said = "no more than 8 keys back or in a chunk, and there are 9"
    assert said in refusal(lambda: attend(Layer(True), *tensors(), mask))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(attention_mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])), "hides 2 keys, in 1"),
        (dict(attention_mask=torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])), "in 2 of 2 sequences"),
        (dict(attention_mask=torch.ones(2, 3)), "ends before the keys do: 3 positions, and 4"),
        (dict(attention_mask=torch.ones(2, 4, 4)), "3 dimensions, and 2 are understood"),
        (dict(kv_length=16), "a static cache has room for keys that are not there yet"),
        (dict(q_length=1, kv_length=4, q_offset=torch.tensor(3)), "a static cache has room"),
        (dict(allow_is_causal_skip=False), "a mask of its own, which is neither causal nor full"),
        (dict(function=windowed(9)), "a mask of its own"),
        (dict(function=windowed(9), local_size=9, allow_is_causal_skip=False), "a mask of its own"),
        (dict(local_size=9, allow_is_bidirectional_skip=True), "a mask of its own"),
    ],
)  # fmt: skip
def test_a_mask_that_no_kernel_has_is_refused(
    mask_of: Callable[..., Mask], given: dict[str, Any], said: str
) -> None:
    words = refusal(lambda: mask_of(**given))
    assert said in words
    assert "attn_implementation" in words or "use the dynamic cache" in words


# ---- attention ----------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer of a model; transformers reads whether it is causal."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal


def tensors(
    queries: int = 5, keys: int = 9, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, ...]:
    """Query, key and value as a layer has them: (batch, heads, positions, head dim)."""
    shapes = ((2, 4, queries, 32), (2, 2, keys, 32), (2, 2, keys, 16))
    return tuple(normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))


def textbook(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Attention in fp64 under a mask (queries, keys): (batch, queries, heads, head dim)."""
    q, k, v = q.double(), *(each.double().repeat_interleave(2, 1) for each in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("queries", [1, 5, 9])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_layer_gets_what_its_mask_means(is_causal: bool, queries: int) -> None:
    q, k, v = tensors(queries)
    mask = Mask(is_causal, queries, 9)
    out, weights = attend(Layer(is_causal), q, k, v, mask, scaling=0.25, position_ids=q)
    assert weights is None and out.shape == (2, queries, 4, 16) and out.is_contiguous()
    torch.testing.assert_close(
        out.double(), textbook(q, k, v, kernels(mask), 0.25), atol=2e-3, rtol=0
    )


def test_the_mask_counts_and_not_what_the_layer_is_by_default() -> None:
    q, k, v = tensors()
    given = Mask(False, 5, 9)
    out, _ = attend(Layer(True), q, k, v, given)
    expected = fagen.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    assert torch.equal(out, expected)


def test_no_mask_is_taken_for_full_only_where_nothing_else_can_be_meant() -> None:
    q, k, v = tensors()
    expected, _ = attend(Layer(False), q, k, v, Mask(False, 5, 9))
    assert torch.equal(attend(Layer(False), q, k, v, None)[0], expected)
    assert torch.equal(attend(Layer(True), q, k, v, None, is_causal=False)[0], expected)
    one = q[:, :, :1]
    assert torch.equal(attend(Layer(True), one, k, v, None)[0], expected[:, :1])
    for layer, told in ((Layer(True), None), (nn.Module(), None), (Layer(False), True)):
        words = refusal(lambda layer=layer, told=told: attend(layer, q, k, v, None, is_causal=told))
        assert "is causal and was given no mask" in words


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(dropout=0.1), r"dropout of 0\.1.*model\.eval\(\)"),
        (dict(attention_mask=torch.zeros(2, 1, 5, 9)), r"shape \(2, 1, 5, 9\).*masks of your own"),
        (dict(attention_mask=torch.ones(2, 9)), r"shape \(2, 9\)"),
        (dict(attention_mask=Mask(True, 5, 8)), "for 5 queries and 8 keys, and Layer has 5 and 9"),
        (dict(is_causal=False), "the mask is causal, and Layer says is_causal = False"),
        (dict(sliding_window=8), "a window of 8 keys, and there are 9"),
        (dict(softcap=50.0), "softcap: no kernel caps scores"),
        (dict(s_aux=torch.ones(4)), "s_aux: no kernel has attention sinks"),
        (dict(position_bias=torch.ones(1)), "position_bias: no kernel adds a bias"),
        (dict(cu_seq_lens_q=torch.ones(1)), "cu_seq_lens_q: sequences packed into one row"),
        (dict(max_length_k=9), "max_length_k: sequences packed into one row"),
        (dict(cache=object()), "cache: no kernel reads a paged cache"),
        (dict(output_attentions=True), "output_attentions: a fused kernel never has"),
        (dict(novelty=0), "novelty: fagen does not know what it changes"),
    ],
)
def test_what_no_kernel_computes_is_refused(given: dict[str, Any], said: str) -> None:
    given = {"attention_mask": Mask(True, 5, 9)} | given
    with pytest.raises(ValueError, match=said):
        attend(Layer(True), *tensors(), **given)


def test_an_argument_that_asks_for_nothing_is_passed_over() -> None:
    out, _ = attend(
        Layer(True), *tensors(), Mask(True, 5, 9),
        softcap=None, output_attentions=False, sliding_window=9, use_cache=True, dropout=0.0,
    )  # fmt: skip
    assert torch.equal(out, attend(Layer(True), *tensors(), Mask(True, 5, 9))[0])


def test_float32_is_refused_with_what_to_do() -> None:
    mask = Mask(True, 5, 9)
    words = refusal(lambda: attend(Layer(True), *tensors(dtype=torch.float32), mask))
    assert "load it with dtype=torch.bfloat16" in words


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated")
def test_what_would_forget_to_look_at_masks_is_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"use torch\.compile or torch\.export"):
        torch.jit.trace(lambda q: attend(Layer(False), q, k, v, None)[0], q)


def test_a_compiled_call_computes_the_same_and_refuses_the_same(
    mask_of: Callable[..., Mask],
) -> None:
    q, k, v = tensors()
    layer = Layer(True)

    def call(q: Tensor, function: Mask4, padding: Tensor | None = None) -> Tensor:
        queries = q.shape[2]
        sizes = dict(q_length=queries, kv_length=9, q_offset=9 - queries)
        mask = mask_of(function, attention_mask=padding, **sizes)
        return attend(layer, q, k, v, mask)[0]

    compiled, ones = torch.compile(call, backend="eager"), torch.ones(2, 9, dtype=torch.bool)
    expected = attend(layer, q, k, v, Mask(True, 5, 9))[0]
    assert torch.equal(compiled(q, causal), expected)
    assert torch.equal(compiled(q[:, :, 2:], causal), expected[:, 2:])
    assert torch.equal(compiled(q, full), attend(layer, q, k, v, Mask(False, 5, 9))[0])
    assert torch.equal(compiled(q, causal, ones), expected)
    padding = ones.clone()
    padding[0, :2] = False
    assert "hides 2 keys" in refusal(lambda: compiled(q, causal, padding))
    with pytest.raises(Exception, match="shape"):
        torch.compile(lambda mask: attend(layer, q, k, v, mask)[0], backend="eager")(ones)
