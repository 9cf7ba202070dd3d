"""fagen in a layer of a model on a GPU: tensors as a cache holds them, and masks that lie there."""

from functools import partial

import pytest
import torch
from torch import nn

from fagen.huggingface import Mask, attend, mask_of
from fagen.kinds.forward.reference import reference

pytestmark = pytest.mark.gpu


def causal(batch, head, query, key):
    return key <= query


mask = partial(mask_of, {causal: True}, batch_size=2, kv_length=90, mask_function=causal)


def layer_tensors(queries):
    """Query, key and value, heads before positions: (batch, heads, positions, head dim)."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, queries, 64), (2, 2, 90, 64), (2, 2, 90, 64))
    return [torch.randn(shape, generator=generator).half().cuda() for shape in shapes]


@pytest.mark.parametrize("queries", [90, 40, 1])
def test_a_prompt_a_piece_of_one_and_a_token_are_attended_as_their_mask_says(queries):
    tensors = layer_tensors(queries)
    ones = torch.ones(2, 90, dtype=torch.bool, device="cuda")
    given = mask(q_length=queries, q_offset=90 - queries, attention_mask=ones)
    assert given == Mask(True, queries, 90)
    out, _ = attend(nn.Module(), *tensors, given)
    exact, _ = reference(*(each.transpose(1, 2) for each in tensors), mask="causal", scale=1 / 8)
    torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=2e-3)


def test_padding_on_the_gpu_is_refused():
    padded = torch.ones(2, 90, dtype=torch.bool, device="cuda")
    padded[1, :3] = False
    with pytest.raises(ValueError, match=r"hides 3 keys, in 1 of 2 sequences \(1\)"):
        mask(q_length=90, attention_mask=padded)


def test_a_chunk_whose_padding_lies_on_the_gpu_is_asked():
    none = torch.zeros(2, dtype=torch.int64, device="cuda")

    def chunked(batch, head, query, key):
        return (key - none[batch]) // 64 == (query - none[batch]) // 64

    prompt = mask(q_length=90, mask_function=chunked, local_size=64)
    assert "no more than 64 keys back or in a chunk" in prompt.refused
    token = mask(
        q_length=1, q_offset=99, kv_length=36, kv_offset=64, mask_function=chunked, local_size=64
    )
    assert token == Mask(True, 1, 36)
