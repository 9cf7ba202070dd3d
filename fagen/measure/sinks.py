"""Sinks of calls that are proved and timed, and what they make of attention without them."""

from typing import Any

import torch
from torch import Tensor

from fagen.combining import with_sink
from fagen.vocab import Dtype

_USUAL = 1.5, 6.0, -float("inf"), -2.0, 20.0, -1e30, 0.25  # in turns of heads


def usual_sinks(dtype: Dtype | None, heads: int, device: torch.device | str) -> dict[str, Tensor]:
    """Return sinks of so many heads, of all sizes, by their name; nothing where there are none."""
    if dtype is None:
        return {}
    turns = [_USUAL[head % len(_USUAL)] for head in range(heads)]
    return {"sinks": torch.tensor(turns, dtype=getattr(torch, dtype.torch), device=device)}


def beside_sinks(
    out: Tensor, lse: Tensor, sinks: Tensor | None = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Return what out (…, S, H, D) and lse (…, H, S) of keys alone are with sinks (H,), in fp64."""
    if sinks is None:
        return out, lse
    lse, of_keys = with_sink(lse.double(), sinks.double()[:, None])
    assert of_keys is not None
    return out.double() * of_keys.transpose(-1, -2)[..., None], lse


def without_key(sinks: Tensor | None = None) -> Tensor | float:
    """Return the log-sum-exp of rows (H, S) that see no key, as it spreads to them."""
    return -float("inf") if sinks is None else sinks.float()[:, None]
