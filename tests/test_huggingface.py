"""fagen in transformers' models: it is registered; a mask is what was meant, or is refused."""

import re
import sys
from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from fagen import huggingface
from fagen.errors import ToolchainError
from fagen.huggingface import Mask, masks
from tests.huggingface_helpers import (
    and_masks,
    blockwise_overlay,
    causal,
    chunked,
    full,
    kernels,
    mask_from,
    or_masks,
    register_in_a_stand_in,
    sliding_window_overlay,
    windowed,
    windowed_both_ways,
)
from tests.op_helpers import refusal

IMAGE = torch.tensor([[-1, 0, 0, -1]] * 2)


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


PADDINGS = [torch.ones(2, 7, dtype=torch.bool) for _ in range(5)]
PADDINGS[1][1, 0] = PADDINGS[2][0, 3:] = PADDINGS[3][:, 5] = PADDINGS[4][1, :] = False
PADDINGS[4][0, :2] = PADDINGS[4][0, 6:] = False


@pytest.mark.parametrize("grad_enabled", [False, True])
def test_whatever_is_accepted_is_what_was_meant(mask_of, grad_enabled):
    accepted = Counter()
    torch.set_grad_enabled(grad_enabled)
    for queries, keys, first_query, first_key in product(
        (1, 2, 3), range(1, 6), range(5), range(3)
    ):
        query = torch.arange(first_query, first_query + queries)[:, None]
        key = torch.arange(first_key, first_key + keys)
        sizes = dict(q_length=queries, kv_length=keys, q_offset=first_query, kv_offset=first_key)
        beyond = first_query + queries > first_key + keys
        for padding, kind, size in product(PADDINGS, KINDS, (1, 2, 3, 4)):
            kept = padding[:, first_key : first_key + keys]
            if kind is causal or kind is full:
                function, size = kind, None
            elif kind is chunked:  # from the first token that is no padding
                function = chunked(size, (padding.cumsum(1) == 0).sum(1))
            else:
                function = kind(size)
            meant = function(torch.arange(2)[:, None, None], 0, query, key)
            meant = meant.expand(2, queries, keys) & kept[:, None]
            both_ways = kind is windowed_both_ways
            try:
                mask = mask_of(
                    function, both_ways, attention_mask=padding, local_size=size, **sizes
                )
            except ValueError:
                whole = (first_query, queries) == (first_key, keys)
                is_known = whole if both_ways else kind is full or not beyond
                is_known &= kind is not chunked or not first_key
                holes = any(
                    re.search("10+1", "".join(map(str, row))) for row in (kept * 1).tolist()
                )
                assert not is_known or holes
                continue
            # rows of padding do not count under a causal mask
            counts = padding[:, first_query : first_query + queries]
            counts = counts.unsqueeze(2) if kind is not full else torch.tensor(True)
            visible = kernels(mask, queries, keys)
            assert torch.equal(visible & counts, meant & counts), (kind, size, sizes, padding)
            which = "room " * isinstance(mask, Tensor) + "padded " * (not kept.all())
            accepted[which + kind.__name__] += 1
    assert len(accepted) == 16 and min(accepted.values()) > 20, accepted


KINDS = (causal, full, windowed, chunked, windowed_both_ways)


@pytest.mark.parametrize("grad_enabled", [False, True])
def test_a_window_that_hides_nothing_is_no_hindrance(mask_of, grad_enabled):
    torch.set_grad_enabled(grad_enabled)
    for keys in range(1, 9):
        for make in (windowed, chunked, windowed_both_ways):
            both_ways = make is windowed_both_ways
            mask = mask_of(make(8), both_ways, local_size=8, q_length=keys, kv_length=keys)
            assert mask == Mask(not both_ways, keys, keys)


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


def test_a_window_is_none_where_its_cache_drops_what_it_hides(mask_of):
    for tokens in range(9, 40):
        kept = min(tokens + 1, 8)
        sizes = dict(q_length=1, kv_length=kept, q_offset=tokens, kv_offset=tokens + 1 - kept)
        assert mask_of(windowed(8), local_size=8, **sizes) == Mask(True, 1, kept)


def test_of_one_query_a_window_or_a_chunk_is_where_its_keys_begin(mask_of):
    token = dict(q_length=1, kv_length=20, q_offset=19, kv_offset=0)
    mask = mask_of(windowed(8), local_size=8, **token)
    assert (mask, mask.first.tolist(), mask.width) == (Mask(True, 1, 20), [12, 12], 8)
    mask = mask_of(chunked(8), local_size=8, **token)
    assert (mask, mask.first.tolist()) == (Mask(True, 1, 20), [16, 16])


IMAGES = torch.tensor([[-1, -1, -1, 0, 0, 0, 1, 1, -1], [-1, -1, 2, 2, 2, 2, -1, 3, -1]])


@pytest.mark.parametrize("size", [None, 1, 2, 3, 5])
@pytest.mark.parametrize("pad", [0, 2])
def test_tokens_of_a_block_see_each_other(mask_of, size, pad):
    function = or_masks(causal, blockwise_overlay(IMAGES))
    if size is not None:
        function = and_masks(function, sliding_window_overlay(size))
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[1, :pad] = False
    mask = mask_of(function, attention_mask=padding, q_length=9, kv_length=9)
    where = torch.arange(9)
    meant = function(torch.arange(2)[:, None, None], 0, where[:, None], where)
    counts = padding[:, :, None]
    assert torch.equal(kernels(mask, 9, 9) & counts, meant & padding[:, None] & counts)
    for end in mask.spans:
        assert end.dtype == torch.int32 and (end.diff(dim=1) >= 0).all()


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
            dict(function=windowed_both_ways(9), both_ways=True, local_size=9, q_length=2),
            "a window to both sides is asked for 2 queries and 4 keys",
        ),
        (
            dict(function=full, kv_length=16, q_offset=torch.tensor(3)),
            "a static cache is read under a full mask",
        ),
        (
            dict(function=chunked(3), local_size=3, q_offset=2, kv_offset=2),
            "the first 2 keys are missing under chunks of 3",
        ),
        (dict(allow_is_causal_skip=False), "a mask of its own (one that is to be a tensor)"),
        (dict(function=blockwise_overlay(IMAGE)), "a mask of its own (blockwise_overlay)"),
        (
            dict(function=and_masks(causal, or_masks(causal, blockwise_overlay(IMAGE)))),
            "a mask of its own (blockwise_overlay)",
        ),
        (
            dict(function=or_masks(windowed(2), blockwise_overlay(IMAGE)), local_size=2),
            "a mask of its own (or_masks)",
        ),
        (
            dict(function=or_masks(causal, blockwise_overlay(IMAGE)), kv_length=9),
            "(blockwise_overlay) in a piece of a prompt",
        ),
        (
            dict(function=or_masks(causal, blockwise_overlay(torch.tensor([[0, -1, 0, -1]])))),
            "tokens of a block (blockwise_overlay) are not next to each other",
        ),
        (
            dict(function=and_masks(windowed(9), blockwise_overlay(IMAGE)), local_size=9),
            "a mask of its own (blockwise_overlay)",
        ),
        (dict(function=lambda *_: True, local_size=4), "a mask of its own (<lambda>)"),
        (dict(function=partial(causal)), "a mask of its own (partial)"),
        (dict(function=chunked(9), local_size=8), "(chunks that are not the model's own)"),
        (dict(function=and_masks(chunked(9), chunked(9)), local_size=9), "two of a kind"),
    ],
)  # fmt: skip
def test_a_mask_that_no_kernel_has_is_refused(mask_of, arguments, message):
    words = refusal(lambda: mask_of(**arguments))
    assert message in words
    if "next to each other" in words:
        return
    assert "attn_implementation" in words or "use the dynamic cache" in words


def test_a_padding_mask_that_ends_too_soon_is_refused(mask_of):
    short = torch.ones(2, 3)
    words = refusal(lambda: mask_of(attention_mask=short))
    assert "ends before the keys do: 3 positions, and 4" in words
    words = refusal(lambda: mask_of(attention_mask=short, kv_length=9))
    assert "ends before the queries do" in words
