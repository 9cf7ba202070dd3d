"""Sequences that lie one after another in a row: where they begin, by whoever tells of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """Where sequences begin that lie one after another, and the end of the last: rows of a batch.

    Offsets are (sequences + 1) in int32 on the device, over all rows of the batch.
    """

    at_q: Tensor
    at_k: Tensor
    longest: int | None = None  # of keys, where the host knows it


# Takes a mask function apart: the one that each sequence has, and which sequence each position is
# of, (B, S); None where it is not one of varlen sequences.
Apart = Callable[[Any], "tuple[Any, Tensor] | None"]


def taker(masks: Any) -> Apart:
    """Return what takes transformers' masks of varlen sequences apart; `masks` is masking_utils.

    They are known by their code, never by what they do: one that is put together otherwise, of this
    release or another, is none of them.
    """
    try:
        both = masks.and_masks().__code__
        same = masks.packed_sequence_mask_function(None).__code__
    except AttributeError:
        return lambda function: None
    remap = getattr(masks, "remap_positions_for_packed_sequence", None)
    anew: Any = remap(None, None).__code__ if remap else None

    def apart(function: Any) -> tuple[Any, Tensor] | None:
        parts = _held(function, both).get("mask_functions", ())
        if len(parts) != 2:
            return None
        numbers = _held(parts[1], same).get("packed_sequence_mask")
        if not isinstance(numbers, Tensor):
            return None
        return _held(parts[0], anew).get("mask_function", parts[0]), numbers

    return apart


def _held(function: Any, code: Any) -> dict[str, Any]:
    """What a function of this code was made with, by name; nothing of another's."""
    if code is None or getattr(function, "__code__", None) is not code:
        return {}
    cells = (cell.cell_contents for cell in function.__closure__)
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


def begun(begins: Tensor) -> Sequences:
    """Return sequences of which each position (B, S) says whether it is the first; a host read."""
    at = begins.flatten().nonzero().flatten()
    at = torch.nn.functional.pad(at, (0, 1), value=begins.numel()).int()
    return Sequences(at, at, int(at.diff().max()) if begins.numel() else 0)


def told_by_offsets(
    cu_seq_lens_q: object, cu_seq_lens_k: object, longest: object
) -> Sequences | None:
    """Return the sequences that a layer was told of by offsets; None where it was not.

    Raises ValueError where one of both is missing, or is none.
    """
    if cu_seq_lens_q is None and cu_seq_lens_k is None:
        return None
    for name, at in (("cu_seq_lens_q", cu_seq_lens_q), ("cu_seq_lens_k", cu_seq_lens_k)):
        if not isinstance(at, Tensor) or at.ndim != 1 or at.is_floating_point():
            state = "missing" if at is None else "none"
            raise ValueError(
                f"{name} is {state}: it must be a tensor of whole numbers, where each sequence "
                "begins and the end of the last, and cu_seq_lens_q and cu_seq_lens_k go together"
            )
    assert isinstance(cu_seq_lens_q, Tensor) and isinstance(cu_seq_lens_k, Tensor)
    length = longest if isinstance(longest, int) else None
    return Sequences(cu_seq_lens_q.int(), cu_seq_lens_k.int(), length)
