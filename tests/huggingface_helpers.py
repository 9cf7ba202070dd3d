"""transformers as far as fagen asks it, masks as it makes them, and a layer with its tensors."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fagen import huggingface
from fagen.huggingface import Mask
from fagen.huggingface.masks import bounded
from tests.tensors import normal

Mask4 = Callable[[Any, Any, Any, Any], Any]


def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query


def full(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= 0


# As transformers makes its mask functions: known by what they hold, and by their code.


def and_masks(*mask_functions: Mask4) -> Mask4:
    def all_of(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = torch.tensor(True)
        for function in mask_functions:
            seen = seen & function(batch, head, query, key)
        return seen

    return all_of


def or_masks(*mask_functions: Mask4) -> Mask4:
    def any_of(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = torch.tensor(False)
        for function in mask_functions:
            seen = seen | function(batch, head, query, key)
        return seen

    return any_of


def sliding_window_overlay(sliding_window: int) -> Mask4:
    return lambda batch, head, query, key: key > query - sliding_window


def sliding_window_bidirectional_overlay(sliding_window: int) -> Mask4:
    return lambda batch, head, query, key: abs(query - key) <= sliding_window


def chunked_overlay(chunk_size: int, left_padding: Tensor) -> Mask4:
    def same(batch: Any, head: Any, query: Any, key: Any) -> Any:
        query, key = (position - left_padding[batch] for position in (query, key))
        return key // chunk_size == query // chunk_size

    return same


def blockwise_overlay(block_sequence_ids: Tensor) -> Mask4:
    def same(batch: Any, head: Any, query: Any, key: Any) -> Any:
        one, other = (block_sequence_ids[batch, position] for position in (query, key))
        return (one == other) & (one >= 0)

    return same


def windowed(size: int) -> Mask4:
    return and_masks(sliding_window_overlay(size), causal)


def windowed_both_ways(size: int) -> Mask4:
    return and_masks(sliding_window_bidirectional_overlay(size), full)


def chunked(size: int, left_padding: Tensor | None = None) -> Mask4:
    none = torch.zeros(2, dtype=torch.int64)
    return and_masks(chunked_overlay(size, none if left_padding is None else left_padding), causal)


def sdpa_mask(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0) -> None: ...


def register_in_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand in for transformers by what fagen asks of it; return what register() puts there.

    What transformers really calls is in test_huggingface_models.py.
    """
    functions: dict[str, Any] = {}

    def interface(what: str) -> SimpleNamespace:
        return SimpleNamespace(
            register=lambda name, function: functions.update({f"{what} {name}": function})
        )

    module, masks = ModuleType("transformers"), ModuleType("transformers.masking_utils")
    module.__version__ = "5.23.0"  # type: ignore[attr-defined]
    module.AttentionInterface = interface("attention")  # type: ignore[attr-defined]
    module.AttentionMaskInterface = interface("mask")  # type: ignore[attr-defined]
    module.masking_utils = masks  # type: ignore[attr-defined]
    masks.__dict__.update(
        causal_mask_function=causal,
        bidirectional_mask_function=full,
        sdpa_mask=sdpa_mask,
        and_masks=and_masks,
        or_masks=or_masks,
        blockwise_overlay=blockwise_overlay,
        sliding_window_overlay=sliding_window_overlay,
        sliding_window_bidirectional_overlay=sliding_window_bidirectional_overlay,
        chunked_overlay=chunked_overlay,
    )
    monkeypatch.setitem(sys.modules, "transformers", module)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masks)
    huggingface.register()
    return functions


def mask_from(registered: dict[str, Any]) -> Callable[..., Mask]:
    """The mask function as transformers calls it: by keywords, some of them not for fagen."""
    beside = dict(dtype=torch.bfloat16, config=None, use_vmap=False, device=torch.device("cpu"))

    def call(function: Mask4 = causal, both_ways: bool = False, **how: Any) -> Mask:
        both_ways |= function is full
        skips = {
            "allow_is_causal_skip": not both_ways,
            "allow_is_bidirectional_skip": both_ways,
        }
        sizes = dict(batch_size=2, q_length=4, kv_length=4, q_offset=0, kv_offset=0)
        mask: Mask = registered["mask fagen"](
            mask_function=function, **sizes | skips | beside | how
        )
        return mask

    return call


def kernels(mask: Mask | Tensor, queries: int, keys: int) -> Tensor:
    """What kernels let be seen, (2, queries, keys): the last query sees its sequence's last key."""
    query, key = torch.arange(queries)[:, None], torch.arange(keys)
    if isinstance(mask, Tensor):
        assert mask.dtype == torch.int32 and mask.shape[::2] == (2, 1) and mask.shape[3] == 2
        read = bounded(mask, queries, keys)
        assert read is not None
        mask = read
    assert (mask.queries, mask.keys) == (queries, keys)
    first = torch.zeros(2) if mask.first is None else mask.first
    end = torch.full((2,), keys) if mask.end is None else mask.end
    first, end = (bound.view(2, 1, 1) for bound in (first, end))
    place = query + (end if mask.causal else keys) - queries
    seen = (key >= first) & (key < end) & ((key <= place) | (not mask.causal))
    if mask.window is not None:
        left, right = (keys if side is None else side for side in mask.window)
        seen &= (key >= place - left) & (key <= place + right)
    if mask.spans is not None:
        first, last = (end[:, :, None] for end in mask.spans)
        return (key >= first) & (key < last)
    if mask.chunk is not None:
        seen &= (key - first) // mask.chunk == (place - first) // mask.chunk
    return seen


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
