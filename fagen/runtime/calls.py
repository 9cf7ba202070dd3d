"""Calls of fagen.attention go in while someone counts; how often each problem and sizes comes out.

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
from fagen.problem import Problem, Sizes
from fagen.runtime import attention

KEPT = 100_000  # different calls: a few hundred bytes each

# kind of call, the shapes of q and v, the number of keys; shapes as they are: a call has no time
_Call = tuple[attention.Kind, torch.Size, torch.Size, int]

_counts: dict[_Call, int] = {}
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
        attention.note = _note
        yield found
    finally:
        attention.note = None
        for call, count in _counts.items():
            _sort(found, call, count)
        found.left_out.update(_left_out)
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


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note_traced() -> bool:
    """Note what torch traces, at the time it does; in the graph nothing of it is left."""
    _left_out["traced by torch.compile or torch.export, which run without Python"] += 1
    return True


def _note_new(kind: attention.Kind, q: torch.Size, v: torch.Size, keys: int) -> None:
    if not all(type(size) is int for size in (*q, *v, keys)):
        _left_out["with symbolic sizes"] += 1
    elif len(_counts) >= KEPT:
        _left_out[f"of other sizes than the first {KEPT:,}"] += 1
    else:
        _counts[kind, q, v, keys] = 1


def _sort(found: Counted, call: _Call, count: int) -> None:
    """Put a call's count where it belongs."""
    kind, (batch, queries, heads, _), v, keys = call
    problem = attention.problem_of(kind)
    kv_heads = v[1] if problem.v_layout == "columns" else v[2]
    if problem.scale_rows is None:
        found.left_out["in e4m3 with a schedule of their own, without scale_rows"] += count
    elif min(batch, queries, heads, kv_heads, keys) < 1:
        found.left_out["of no rows or no keys"] += count
    elif heads % kv_heads == 0:
        sizes = Sizes(batch, heads, kv_heads, queries, keys)
        of = found.calls.setdefault(replace(problem, out_dtype=None), {})
        of[sizes] = of.get(sizes, 0) + count
