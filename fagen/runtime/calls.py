"""Calls go in while someone counts; how often each problem and sizes comes out.

Counted are those of fagen.attention, fagen.attention_varlen and fagen.attention_decode, by what
the host has at hand.
A call counts where Python makes it: what torch.compile has traced runs without.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.compiler import is_compiling

from fagen.errors import FagenError
from fagen.problem import PackedTotals, Problem, Sizes
from fagen.runtime import attention, decode, varlen

KEPT = 100_000  # different calls: a few hundred bytes each

# kind of call, the shapes of q and v, the number of keys; shapes as they are: a call has no time
_Call = tuple[attention.Kind, torch.Size, torch.Size, int]
# kind of call, the shapes of q and v, offsets, the longest that callers say, or 0
_PackedCall = tuple[varlen.Key, torch.Size, torch.Size, int, int, int]
# what a call has at hand, the shapes of q and k
_DecodeCall = tuple[tuple[Any, ...], torch.Size, torch.Size]

_counts: dict[_Call | _PackedCall | _DecodeCall, int] = {}
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
    found = Counted()
    try:
        _counts.clear()
        _left_out.clear()
        attention.note, varlen.note, decode.note = _note, _note_packed, _note
        yield found
    finally:
        attention.note = varlen.note = decode.note = None
        try:
            for call, count in _counts.items():
                _sort(found, call, count)
            found.left_out.update(_left_out)
        finally:
            _counting.release()


def _note(*call: Any) -> None:
    """Count a call; of every call, so as little as there can be."""
    if is_compiling():
        _note_traced()
        return
    try:
        _counts[call] += 1
    except (KeyError, TypeError):
        _note_new(*call)


def _note_packed(
    key: varlen.Key, q: torch.Size, v: torch.Size, offsets: int, longest_q: Any, longest_k: Any
) -> None:
    """The same of packed sequences."""
    if type(longest_q) is not int:  # for what a tensor says the host would have to wait
        longest_q = 0
    if type(longest_k) is not int:
        longest_k = 0
    _note(key, q, v, offsets, longest_q, longest_k)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note_traced() -> bool:
    """Note what torch traces, at the time it does; in the graph nothing of it is left."""
    _left_out["traced by torch.compile or torch.export, which run without Python"] += 1
    return True


def _note_new(*call: Any) -> None:
    kind, q, v, *sizes = call
    if not all(type(size) is int for size in (*q, *v, *sizes)):
        _left_out["with symbolic sizes"] += 1
    elif len(_counts) >= KEPT:
        _left_out[f"of other sizes than the first {KEPT:,}"] += 1
    elif not kind:
        _left_out["of fagen.attention_decode under torch.func"] += 1
    else:
        _counts[kind, q, v, *sizes] = 1


def _sort(found: Counted, call: _Call | _PackedCall | _DecodeCall, count: int) -> None:
    """Put a call's count where it belongs."""
    lazy = True
    if len(call) == 3:
        (*_, lazy, _, _), (batch, queries, heads, _), (_, keys, kv_heads, _) = call
        problem, sizes = decode.problem_of(call[0]), Sizes(batch, heads, kv_heads, queries, keys)
    else:
        problem, sizes = _dense(call) if len(call) == 4 else _packed(call)
    if not lazy:
        found.left_out["with a reference, for which tables have no kernels"] += count
    elif problem.scale_rows is None:
        found.left_out["in e4m3 with a schedule of their own, without scale_rows"] += count
    elif min(vars(sizes).values()) < 1:
        found.left_out["of no rows or no keys"] += count
    elif sizes.heads % sizes.kv_heads == 0:
        of = found.calls.setdefault(replace(problem, out_dtype=None), {})
        of[sizes] = of.get(sizes, 0) + count


def _dense(call: _Call) -> tuple[Problem, Sizes]:
    kind, (batch, queries, heads, _), v, keys = call
    problem = attention.problem_of(kind)
    kv_heads = v[1] if problem.v_layout == "columns" else v[2]
    return problem, Sizes(batch, heads, kv_heads, queries, keys)


def _packed(call: _PackedCall) -> tuple[Problem, Sizes]:
    kind, (queries, heads, _), (keys, kv_heads, _), offsets, longest_q, longest_k = call
    sizes = Sizes(offsets - 1, heads, kv_heads, queries, keys)
    if min(vars(sizes).values()) > 0:
        if queries == keys:  # who means one number by both may say one
            longest_q, longest_k = longest_q or longest_k, longest_k or longest_q
        batch = min(sizes.batch, queries, keys)  # the others are empty
        tokens_q, longest_q = _side(queries, longest_q, batch)
        tokens_k, longest_k = _side(keys, longest_k, batch)
        sizes = PackedTotals(batch, heads, kv_heads, longest_q, longest_k, tokens_q, tokens_k)
    return varlen.problem_of(kind), sizes


def _side(rows: int, most: int, batch: int) -> tuple[int, int]:
    """The tokens of so many sequences and the longest, of rows some of which may be of none."""
    tokens = min(rows, most * batch) if most > 0 else rows
    return tokens, min(max(most, -(-tokens // batch)), tokens - batch + 1)
