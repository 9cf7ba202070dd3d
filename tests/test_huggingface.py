"""fagen in transformers' models: it is registered; a mask is what was meant, or is refused."""

import re
import sys
from collections import Counter
from itertools import product

import pytest
import torch
from torch import Tensor

from fagen import huggingface
from fagen.errors import ToolchainError
from fagen.huggingface import Mask, attend, masks
from tests.huggingface_helpers import (
    Layer,
    Mask4,
    causal,
    full,
    kernels,
    mask_from,
    register_in_a_stand_in,
    tensors,
)
from tests.op_helpers import refusal


@pytest.fixture(autouse=True)
def asks_again():
    """What a test says of gradients ends with it."""
    with torch.enable_grad():
        yield


@pytest.fixture
def registered(monkeypatch):
    return register_in_a_stand_in(monkeypatch)


@pytest.fixture
def mask_of(registered):
    return mask_from(registered)


# ---- registration -------------------------------------------------------------------------------


def test_both_functions_are_registered_and_twice_is_as_once(registered):
    before = set(registered)
    huggingface.register()
    assert set(registered) == before == {"attention fagen", "mask fagen"}


def test_a_transformers_that_is_too_old_is_refused(registered, monkeypatch):
    masks = sys.modules["transformers.masking_utils"]
    monkeypatch.setattr(masks, "sdpa_mask", lambda batch_size, cache_position: None)
    message = r"5\.23\.0, and fagen needs 5\.4 or later.*--upgrade"
    with pytest.raises(ToolchainError, match=message):
        huggingface.register()
    monkeypatch.delattr(sys.modules["transformers"], "masking_utils")
    monkeypatch.delitem(sys.modules, "transformers.masking_utils")
    with pytest.raises(ToolchainError, match=message):
        huggingface.register()


def test_without_transformers_its_name_is_in_the_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match="transformers"):
        huggingface.register()


# ---- masks --------------------------------------------------------------------------------------


def windowed(size: int) -> Mask4:
    return lambda batch, head, query, key: (key <= query) & (key > query - size)


def chunked(size: int) -> Mask4:
    return lambda batch, head, query, key: (key <= query) & (key // size == query // size)


def windowed_both_ways(size: int) -> Mask4:
    return lambda batch, head, query, key: abs(query - key) <= size


PADDINGS = [torch.ones(2, 7, dtype=torch.bool) for _ in range(5)]
PADDINGS[1][1, 0] = PADDINGS[2][0, 3:] = PADDINGS[3][:, 5] = PADDINGS[4][1, :] = False
PADDINGS[4][0, :2] = PADDINGS[4][0, 6:] = False


@pytest.mark.parametrize("grad_enabled", [False, True])
def test_whatever_is_accepted_is_what_was_meant(mask_of, grad_enabled):
    functions = [(causal, None), (full, None)]
    makers = (windowed, chunked, windowed_both_ways)
    functions += [(make(size), size) for make, size in product(makers, (1, 2, 3, 4))]
    accepted = Counter()
    torch.set_grad_enabled(grad_enabled)
    for queries, keys, first_query, first_key in product(
        (1, 2, 3), range(1, 6), range(5), range(3)
    ):
        query = torch.arange(first_query, first_query + queries)[:, None]
        key = torch.arange(first_key, first_key + keys)
        sizes = dict(q_length=queries, kv_length=keys, q_offset=first_query, kv_offset=first_key)
        for (function, size), padding in product(functions, PADDINGS):
            kept = padding[:, first_key : first_key + keys]
            meant = function(0, 0, query, key).expand(2, queries, keys) & kept[:, None]
            try:
                mask = mask_of(function, attention_mask=padding, local_size=size, **sizes)
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
            visible = kernels(mask, queries, keys)
            same = torch.equal(visible & counts, meant & counts)
            refused = bool(getattr(mask, "refused", ""))
            assert same != refused if padding.all() else same or refused
            if refused:
                continue
            which = "room " * isinstance(mask, Tensor) + "padded " * (not kept.all())
            accepted[which + function.__qualname__.partition(".")[0]] += 1
    assert len(accepted) == 12 and min(accepted.values()) > 20, accepted


@pytest.mark.parametrize("grad_enabled", [False, True])
def test_a_window_that_hides_nothing_is_no_hindrance(mask_of, grad_enabled):
    torch.set_grad_enabled(grad_enabled)
    for keys in range(1, 9):
        for function in (windowed(8), chunked(8), windowed_both_ways(8)):
            mask = mask_of(function, local_size=8, q_length=keys, kv_length=keys)
            assert not mask.refused


def test_only_prompts_are_read_on_the_host(mask_of, monkeypatch):
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
    monkeypatch.setattr(masks, "_hold", lambda conditions, message: None)
    with torch.no_grad(), torch.device("meta"):
        ones = torch.ones(2, 4, dtype=torch.bool)
        for more in (dict(q_length=1, q_offset=3), dict(kv_length=9)):
            mask_of(attention_mask=ones, **more | {"device": "meta"})


def test_what_a_gpu_is_to_say_is_as_short_as_torch_takes():
    assert len(masks.HOLES.encode()) < 255  # torch._assert_async of a CUDA tensor


def test_a_window_stays_usable_where_its_cache_drops_what_it_hides(mask_of):
    for tokens in range(9, 40):
        kept = min(tokens + 1, 8)
        sizes = dict(q_length=1, kv_length=kept, q_offset=tokens, kv_offset=tokens + 1 - kept)
        assert mask_of(windowed(8), local_size=8, **sizes) == Mask(True, 1, kept)


def test_a_window_that_hides_a_key_is_refused_by_the_layers_that_have_it(mask_of):
    mask = mask_of(windowed(8), local_size=8, q_length=5, kv_length=9, q_offset=4)
    message = "no more than 8 keys back or in a chunk, and there are 9"
    assert message in refusal(lambda: attend(Layer(True), *tensors(), mask))


@pytest.mark.parametrize(
    ("arguments", "message"),
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
def test_a_mask_that_no_kernel_has_is_refused(mask_of, arguments, message):
    words = refusal(lambda: mask_of(**arguments))
    assert message in words
    assert "attn_implementation" in words or "use the dynamic cache" in words


def test_a_padding_mask_that_ends_too_soon_is_refused(mask_of):
    short = torch.ones(2, 3)
    words = refusal(lambda: mask_of(attention_mask=short))
    assert "ends before the keys do: 3 positions, and 4" in words
    words = refusal(lambda: mask_of(attention_mask=short, kv_length=9))
    assert "ends before the queries do" in words
