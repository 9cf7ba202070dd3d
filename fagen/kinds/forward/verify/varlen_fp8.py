"""Varlen sequences quantised for an e4m3 kernel, and its errors on them by the rule of `fp8`.

Each sequence that is judged has descales and means of its own; those of others are NaN, as their
bytes are.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fagen.e4m3 import to_e4m3
from fagen.kinds.forward.operands import Operands, operands, real
from fagen.kinds.forward.oracle import reference
from fagen.kinds.forward.plan import Plan
from fagen.kinds.forward.verify.fp8 import LSE_TOLERANCE, by_the_rule
from fagen.kinds.forward.verify.textbook import textbook
from fagen.measure.numerics import largest

_NAN_BYTES = (0x7F, 0xFF)  # all that there are

# By turns: V by column and both means, one number for each head, and None, which is 1.
_WAYS: tuple[dict[str, Any] | None, ...] = ({"centered": "kv"}, {"v_scales": "head"}, None)

Rows = Mapping[int, tuple[slice, slice]]  # of a sequence by number: its queries, and keys it sees


class Quantised(NamedTuple):
    """What a kernel takes, by name, and what that is of each sequence that is judged."""

    given: dict[str, Any]
    sequences: dict[int, Operands]


class Errors(NamedTuple):
    """Of all sequences that are judged; `right`: rows that see no key are zeros."""

    error: float
    beside: float
    allowed: float
    lse_error: float
    lse_allowed: float
    right: bool


def quantised(of: Plan, given: Mapping[str, Any], rows: Rows, turn: int) -> Quantised:
    """Quantise q (total_q, H, D), k (total_k, Hk, D) and v (total_k, Hk, Dv), NaN but for `rows`.

    `given` has offsets and scale too, as the kernel takes them; `turn` tells how descales are
    given.
    """
    how = _WAYS[turn % len(_WAYS)]
    of_each = {}
    for one, (queries, keys) in rows.items():
        numbers = given["q"][None, queries], given["k"][None, keys], given["v"][None, keys]
        of_each[one] = _unscaled(*numbers) if how is None else operands(of, *numbers, **how)
    made = {name: _nan_bytes(given[name]) for name in ("q", "k", "v")}
    for one, (queries, keys) in rows.items():
        for name, place in (("q", queries), ("k", keys), ("v", keys)):
            made[name][place] = getattr(of_each[one], name)[0]
    batch = given["cu_seqlens_q"].shape[0] - 1
    beside = dict.fromkeys(Operands._fields[3:])
    if how is not None:
        beside |= {name: _by_sequence(name, of_each, batch) for name in beside}
    return Quantised({**given, **made, **beside}, of_each)


def errors_of(of: Plan, varlen: Quantised, rows: Rows, out: Tensor, lse: Tensor) -> Errors:
    """Hold out (total_q, H, Dv) and lse (H, total_q) against fp64 and a textbook's attention."""
    scale = varlen.given["scale"]
    ours, theirs, true, off = [], [], [], [0.0]
    right = True
    for one, (queries, _) in rows.items():
        sequence = varlen.sequences[one]
        found, log_sum = out[queries], lse[:, queries]
        exact, exact_log_sum = (
            x[0] for x in reference(*real(of, sequence), mask=of.mask.name, scale=scale)
        )
        seen = ~(exact_log_sum == -math.inf).all(0)
        right &= bool((found[~seen] == 0).all() and (log_sum[:, ~seen] == -math.inf).all())
        ours.append(found[seen].double())
        theirs.append(textbook(of, sequence, scale)[0][seen].double())
        true.append(exact[seen])
        off.append(largest(log_sum[:, seen] - exact_log_sum[:, seen]))
    judged = by_the_rule(torch.cat(ours), torch.cat(theirs), torch.cat(true))
    lse_error = float(
        torch.tensor(off, dtype=torch.float64, device="cpu").max()
    )  # NaN, where one is that
    return Errors(*judged, lse_error, LSE_TOLERANCE, right)


def _unscaled(*tensors: Tensor) -> Operands:
    ones = (torch.ones(1, 1, 1, dtype=torch.float32, device=x.device) for x in tensors)
    return Operands(*map(to_e4m3, tensors), *ones)


def _nan_bytes(x: Tensor) -> Tensor:
    """As many bytes of e4m3, each a NaN, by turns along the rows one and the other."""
    turns = torch.tensor(_NAN_BYTES, dtype=torch.uint8, device=x.device)
    by_row = turns[torch.arange(x.shape[0], device=x.device) % len(turns)]
    return by_row[:, None, None].expand(x.shape).contiguous().view(torch.float8_e4m3fn)


def _by_sequence(name: str, of_each: Mapping[int, Operands], batch: int) -> Tensor | None:
    """The numbers of all sequences, (batch, heads, …); NaN for those that have none."""
    found = {one: getattr(operands, name) for one, operands in of_each.items()}
    some: Tensor | None = next(iter(found.values()), None)
    if some is None:
        return None
    every = some.new_full((batch, *some.shape[1:]), math.nan)
    for one, numbers in found.items():
        every[one] = numbers[0]
    return every
