"""fagen in transformers' models: what is attended is what was meant, and all else is refused.

transformers itself is stood in for by the few names that fagen asks of it; what it really calls
is in test_huggingface_models.py.
"""

import re
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
from fagen.runtime import cache, decode
from tests.fresh import forget
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


@pytest.fixture(autouse=True)
def asks_again() -> Iterator[None]:
    """What a test says of gradients ends with it."""
    with torch.enable_grad():
        yield


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


def kernels(mask: Mask | Tensor, queries: int, keys: int) -> Tensor:
    """What kernels let be seen, (2, queries, keys): the last query sees its sequence's last key."""
    query, key = torch.arange(queries)[:, None], torch.arange(keys)
    if isinstance(mask, Tensor):
        assert mask.dtype == torch.int32 and mask.shape == (2, 1, 1, 2)
        causal, (first, end) = True, mask.view(2, 2, 1, 1)
    else:
        assert (mask.queries, mask.keys) == (queries, keys)
        causal = mask.causal
        first = torch.zeros(2) if mask.first is None else mask.first
        end = torch.full((2,), keys) if mask.end is None else mask.end
        first, end = (each.view(2, 1, 1) for each in (first, end))
    return (key >= first) & (key < end) & ((key <= query + end - queries) | (not causal))


PADDINGS = [torch.ones(2, 7, dtype=torch.bool) for _ in range(5)]
PADDINGS[1][1, 0] = PADDINGS[2][0, 3:] = PADDINGS[3][:, 5] = PADDINGS[4][1, :] = False
PADDINGS[4][0, :2] = PADDINGS[4][0, 6:] = False


@pytest.mark.parametrize("asked", [False, True])
def test_whatever_is_accepted_is_what_was_meant(mask_of: Callable[..., Any], asked: bool) -> None:
    functions: list[tuple[Mask4, int | None]] = [(causal, None), (full, None)]
    makers = (windowed, chunked, windowed_both_ways)
    functions += [(make(size), size) for make, size in product(makers, (1, 2, 3, 4))]
    accepted: Counter[str] = Counter()
    torch.set_grad_enabled(asked)
    for queries, keys, first_query, first_key in product(
        (1, 2, 3), range(1, 6), range(5), range(3)
    ):
        query = torch.arange(first_query, first_query + queries)[:, None]
        key = torch.arange(first_key, first_key + keys)
        given = dict(q_length=queries, kv_length=keys, q_offset=first_query, kv_offset=first_key)
        for (function, size), padding in product(functions, PADDINGS):
            kept = padding[:, first_key : first_key + keys]
            meant = function(0, 0, query, key).expand(2, queries, keys) & kept[:, None]
            try:
                mask = mask_of(function, attention_mask=padding, local_size=size, **given)
            except ValueError:
                beyond = first_query + queries > first_key + keys
                is_known = function is full or (function is causal and not beyond)
                holes = any(
                    re.search("10+1", "".join(map(str, row))) for row in (kept * 1).tolist()
                )
                assert not is_known or holes
                continue
            # rows of padding do not count under a causal mask
            counts = padding[:, first_query : first_query + queries]
            counts = counts.unsqueeze(2) if function is not full else torch.tensor(True)
            seen = kernels(mask, queries, keys)
            right = torch.equal(seen & counts, meant & counts)
            refused = bool(getattr(mask, "refused", ""))
            assert right != refused if padding.all() else right or refused
            if refused:
                continue
            which = "room " * isinstance(mask, Tensor) + "padded " * (not kept.all())
            accepted[which + function.__qualname__.partition(".")[0]] += 1
    assert len(accepted) == 12 and min(accepted.values()) > 20, accepted


@pytest.mark.parametrize("asked", [False, True])
def test_a_window_that_hides_nothing_is_no_hindrance(
    mask_of: Callable[..., Mask], asked: bool
) -> None:
    torch.set_grad_enabled(asked)
    for keys in range(1, 9):
        for function in (windowed(8), chunked(8), windowed_both_ways(8)):
            mask = mask_of(function, local_size=8, q_length=keys, kv_length=keys)
            assert not mask.refused


def test_only_prompts_are_read_on_the_host(
    mask_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ones = torch.ones(2, 4, dtype=torch.bool)
    with torch.no_grad():
        prompt = mask_of(attention_mask=ones)
        token = mask_of(attention_mask=ones, q_length=1, q_offset=3)
        room = mask_of(attention_mask=ones, kv_length=9)
        later = mask_of(attention_mask=ones, kv_length=9, q_length=1, q_offset=torch.tensor(3))
    assert prompt.first is None and prompt.end is None
    assert token.first.tolist() == [0, 0] and token.end is None
    assert room.flatten(1).tolist() == later.flatten(1).tolist() == [[0, 0], [4, 4]]
    # on a device that cannot be read, as a GPU's while a graph is captured
    monkeypatch.setattr(huggingface, "_hold", lambda conditions, said: None)
    with torch.no_grad(), torch.device("meta"):
        ones = torch.ones(2, 4, dtype=torch.bool)
        for more in (dict(q_length=1, q_offset=3), dict(kv_length=9)):
            mask_of(attention_mask=ones, **more | {"device": "meta"})


def test_what_a_gpu_is_to_say_is_as_short_as_torch_takes() -> None:
    assert len(huggingface.HOLES.encode()) < 255  # torch._assert_async of a CUDA tensor


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
        (dict(attention_mask=torch.tensor([[0, 1, 0, 1], [1, 1, 1, 1]])), "hides keys between"),
        (
            dict(attention_mask=torch.tensor([[1, 0, 1, 1]] * 2), kv_length=9),
            "attention_mask hides keys between others",
        ),
        (dict(attention_mask=torch.ones(2, 4, 4)), "3 dimensions, and 2 are understood"),
        (dict(kv_length=3), "the last of 3 keys is 1 before the last of 4 queries"),
        (
            dict(function=windowed(9), local_size=9, kv_length=16),
            "a static cache is read under a window",
        ),
        (
            dict(function=full, kv_length=16, q_offset=torch.tensor(3)),
            "a static cache is read under a full mask",
        ),
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


def test_a_padding_mask_that_ends_too_soon_is_refused(mask_of: Callable[..., Any]) -> None:
    short = torch.ones(2, 3)
    words = refusal(lambda: mask_of(attention_mask=short))
    assert "ends before the keys do: 3 positions, and 4" in words
    words = refusal(lambda: mask_of(attention_mask=short, kv_length=9))
    assert "ends before the queries do" in words


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
        out.double(), textbook(q, k, v, kernels(mask, queries, 9)[0], 0.25), atol=2e-3, rtol=0
    )


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("queries", [1, 5, 200])
@pytest.mark.parametrize(
    "made",
    [
        lambda queries: Mask(True, queries, 210, "", ints(3, 0)),
        lambda queries: Mask(False, queries, 210, "", ints(0, 3), ints(9, 207)),
        lambda queries: torch.stack((ints(3, 0), ints(205, 203)))[:, None, None],
    ],
)
def test_a_layer_sees_each_sequences_keys_alone(made: Callable[[int], Any], queries: int) -> None:
    q, k, v = tensors(queries, 210)
    mask = made(queries)
    seen = kernels(mask, queries, 210)
    for x in (k, v):
        x.masked_fill_(~seen.any(1)[:, None, :, None], float("nan"))
    out, _ = attend(Layer(True), q, k, v, mask)
    for i in range(2):
        used = [x[i : i + 1].nan_to_num(0.0) for x in (q, k, v)]
        wanted = textbook(*used, seen[i], 32**-0.5).nan_to_num(0.0)[0]  # type: ignore[call-arg,misc,arg-type]
        torch.testing.assert_close(out[i].double(), wanted, atol=2e-3, rtol=0)


def test_lengths_have_no_gradients() -> None:
    q, k, v = tensors(9)
    q.requires_grad_()
    mask = Mask(True, 9, 9, "", ints(3, 0))
    assert "call the model under torch.no_grad()" in refusal(
        lambda: attend(Layer(True), q, k, v, mask)
    )
    with torch.no_grad():
        attend(Layer(True), q, k, v, mask)
    out, _ = attend(Layer(True), q, k, v, Mask(True, 9, 9))
    assert out.requires_grad


def test_which_function_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def noting(real: Any) -> Any:
        def noted(*given: Any, **named: Any) -> Any:
            names.append(real.__name__)
            return real(*given, **named)

        return noted

    monkeypatch.setattr(huggingface, "attention", noting(huggingface.attention))
    for name in ("attention", "attention_decode", "attention_varlen"):
        monkeypatch.setattr(cache, name, noting(getattr(cache, name)))
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


def test_the_prompt_readies_the_kernel_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, decode)
    bounds = torch.stack((ints(3, 0), ints(140, 140)))[:, None, None]
    attend(Layer(True), *tensors(140, 150), bounds)
    (key,) = decode._ready
    assert key[5] == 8  # rows
    compiled = torch.compile(
        lambda *given: attend(Layer(True), *given)[0], fullgraph=True, backend="eager"
    )
    q, k, v = tensors(1, 150)
    torch.testing.assert_close(
        compiled(q, k, v, bounds + 1), attend(Layer(True), q, k, v, bounds + 1)[0]
    )


def test_a_mask_goes_through_transformers_as_its_own_do(mask_of: Callable[..., Any]) -> None:
    mask = mask_of()
    assert mask.contiguous() is mask and mask.ndim != 2
    assert mask_of(attention_mask=mask) is mask


def test_the_mask_counts_and_not_what_the_layer_is_by_default() -> None:
    q, k, v = tensors()
    given = Mask(False, 5, 9)
    out, _ = attend(Layer(True), q, k, v, given)
    turned = (x.transpose(1, 2) for x in (q, k, v))
    assert torch.equal(out, fagen.attention_decode(*turned, causal=False))


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
