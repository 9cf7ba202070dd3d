"""Sequences that lie one after another in a row: where they begin, by whoever tells of it."""

from dataclasses import dataclass

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
