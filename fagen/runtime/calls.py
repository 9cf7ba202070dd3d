"""Calls go in while someone counts; how often each problem and sizes comes out.

Counted are those of fagen.attention, fagen.attention_varlen and fagen.attention_decode, by what
the host has at hand.
A call counts where Python makes it: what torch.compile has traced runs without.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch._C import _is_tracing
from torch.compiler import is_compiling

from fagen.errors import FagenError
from fagen.expr import words
from fagen.problem import Problem, Sizes, VarlenTotals
from fagen.runtime import attention, decode, varlen
from fagen.runtime.call import CallKey
from fagen.vocab import CACHES

KEPT = 100_000  # different calls: a few hundred bytes each
_COUNTED = attention.ATTENTION, varlen.VARLEN, decode.DECODING

_counts: dict[tuple[Any, ...], int] = {}  # by door and what a call has at hand
_left_out: Counter[str] = Counter()
_counting = threading.Lock()


@dataclass
class Counted:
    """What was called, once it is over: how often, by problem and sizes, and what is left out."""

    calls: dict[Problem, dict[Sizes, int]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)


@contextmanager
def counting() -> Iterator[Counted]:
    """Count all calls of this process meanwhile, of any thread.  Raises FagenError where one does.

    What it yields is filled at its end.
    """
    if not _counting.acquire(blocking=False):
        raise FagenError("calls are being recorded already: one recording goes on at a time")
    counted = Counted()
    try:
        _counts.clear()
        _left_out.clear()
        for door in _COUNTED:
            door.note = partial(_note, door)
        yield counted
    finally:
        for door in _COUNTED:
            door.note = None
        try:
            for call, count in _counts.items():
                _sort(counted, call, count)
            counted.left_out.update(_left_out)
        finally:
            _counting.release()


def _note(*call: Any) -> None:
    """Count a call; of every call, so as little as there can be."""
    if is_compiling():
        _note_traced()
        return
    try:
        _counts[call] += 1
    except (KeyError, TypeError) as error:
        if _is_tracing() or isinstance(error, TypeError):
            _left_out["with symbolic sizes"] += 1
        elif len(_counts) >= KEPT:
            _left_out[f"of other sizes than the first {KEPT:,}"] += 1
        else:
            _counts[call] = 1


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note_traced() -> bool:
    """Note what torch traces, at the time it does; in the graph nothing of it is left."""
    _left_out["traced by torch.compile or torch.export, which run without Python"] += 1
    return True


def _sort(counted: Counted, call: tuple[Any, ...], count: int) -> None:
    """Put a call's count where it belongs."""
    door, *at_hand = call
    lazy, problem, sizes = _SORTS[door](*at_hand)
    if not lazy:
        counted.left_out["with a reference, for which tables have no kernels"] += count
    elif problem.cache != CACHES[0]:
        counted.left_out["over keys in pages, for which tables have no kernels"] += count
    elif problem.mask not in words.MASKS:
        counted.left_out["under a mask by its text, which tables do not know"] += count
    elif problem.score not in words.SCORES:
        counted.left_out["with a score by its text, which tables do not know"] += count
    elif problem.scale_rows is None:
        counted.left_out["in e4m3 with a schedule of their own, without scale_rows"] += count
    elif min(vars(sizes).values()) < 1:
        counted.left_out["of no rows or no keys"] += count
    elif sizes.heads % sizes.kv_heads == 0:
        by_sizes = counted.calls.setdefault(replace(problem, out_dtype=None), {})
        by_sizes[sizes] = by_sizes.get(sizes, 0) + count


def _problem(key: CallKey) -> Problem:
    assert key.problem, key
    return key.problem


def _dense(call: tuple[Any, ...]) -> tuple[bool, Problem, Sizes]:
    *start, q, k, v, causal, schedule, more = call
    width = v[2] if "columns" in more else v[3]
    key = attention.ATTENTION.key_of(*start, q[3], width, causal, schedule, *more)
    return True, _problem(key), Sizes(q[0], q[2], k[2], q[1], k[1])


def _packed(
    call: tuple[Any, ...], q: Any, v: Any, offsets: Any, longest_q: Any, longest_k: Any
) -> tuple[bool, Problem, Sizes]:
    sizes = Sizes(offsets[0] - 1, q[1], v[1], q[0], v[0])
    # for what a tensor says the host would have to wait
    longest_q, longest_k = (x if type(x) is int else 0 for x in (longest_q, longest_k))
    if min(vars(sizes).values()) > 0:
        if q[0] == v[0]:  # who means one number by both may say one
            longest_q, longest_k = longest_q or longest_k, longest_k or longest_q
        batch = min(sizes.batch, q[0], v[0])  # the others are empty
        tokens_q, longest_q = _side(q[0], longest_q, batch)
        tokens_k, longest_k = _side(v[0], longest_k, batch)
        sizes = VarlenTotals(batch, q[1], v[1], longest_q, longest_k, tokens_q, tokens_k)
    return True, _problem(varlen.VARLEN.key_of(*call)), sizes


def _side(rows: int, most: int, batch: int) -> tuple[int, int]:
    """The tokens of so many sequences and the longest, of rows some of which may be of none."""
    tokens = min(rows, most * batch) if most > 0 else rows
    return tokens, min(max(most, -(-tokens // batch)), tokens - batch + 1)


def _cached(call: tuple[Any, ...], q: Any, k: Any) -> tuple[bool, Problem, Sizes]:
    _, _, _, kv_heads, _, _, lazy, *_ = call
    problem = _problem(decode.DECODING.key_of(*decode.of_call(*call)))
    return lazy, problem, Sizes(q[0], q[2], kv_heads, q[1], k[1])


_SORTS: dict[Any, Callable[..., tuple[bool, Problem, Sizes]]] = dict(
    zip(_COUNTED, (_dense, _packed, _cached), strict=True)
)
