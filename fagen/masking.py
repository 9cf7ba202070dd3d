"""What a call says of the keys that are seen, in; a mask's name and what its kernel is given, out.

`causal`, `window` and `mask` are and-ed, and so is what belongs to each: a word's own arguments, a
text's or a function's, by name. Values have no say in which kernel that is: one of windows serves
all of them. Needs no torch, for `pick` asks too; torch.compile traces it.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from fagen.errors import ExpressionError
from fagen.expr import words
from fagen.expr.canonical import Expression, all_of
from fagen.expr.ranges import ranges
from fagen.expr.tree import FLOAT, INT, Lookup, Name, Node, Table
from fagen.expr.words import OPEN
from fagen.given import (
    Argument,
    Types,
    arguments,
    declared,
    outcome,
    read_text,
    refuse_other_types,
    refused,
    types_of,
    value,
    whole,
)
from fagen.toml_lines import near_word, shown
from fagen.vocab import declare

WINDOW, BY_SEQUENCE = "window", "causal_by_sequence"
_SAID = {WINDOW: "window", BY_SEQUENCE: "causal as an int32 tensor"}
# words of `mask`: what the others are, calls say by arguments of their own
CALLED = tuple(word for word in words.MASKS if word not in _SAID)

Window = int | tuple[int | None, int | None] | None
_NO_WINDOW = OPEN, OPEN


class Masked(NamedTuple):
    """A mask by its name, as problems and schedules have it, and what it is given.

    `order` names what its kernel is given, in the order of an op, and `by_sequence` these again
    where they are a number of each sequence, else "". `own` is what `mask` itself is given.
    """

    name: str
    own: tuple[Argument, ...]
    order: tuple[str, ...]
    by_sequence: tuple[str, ...]
    ends: tuple[int, int]  # of a window


def masked(
    function: Callable[..., Any], causal: Any, window: Any, mask: Any, given: Mapping[str, Any]
) -> Masked:
    """Return the mask of a call; `causal` is a truth, or a tensor of one for each sequence.

    Raises ValueError for what says no mask, or one that no kernel computes.
    """
    is_flag = isinstance(causal, bool)
    if not is_flag and str(causal.dtype) != "torch.int32":
        why = "causal of several sequences is int32 (batch,), 1 causal and 0 full"
        raise refused(function, f"{why}: causal.to(torch.int32) converts it")
    ends = _ends(function, window, causal is True)
    return _together(function, is_flag, ends, mask, given, any_word=False)


def described(
    function: Callable[..., Any], causal: bool, window: Any, mask: Any, given: Mapping[str, Any]
) -> Masked:
    """Return the mask of calls that give more than is known here; `mask` may be any word.

    Raises as `masked` does.
    """
    ends = _ends(function, window, causal)
    if mask == WINDOW:  # of which causal is one end
        ends = _NO_WINDOW
    return _together(function, True, ends, mask, given, any_word=True)


def values_of(
    function: Callable[..., Any], said: Masked, causal: Any, given: Mapping[str, Any]
) -> list[Any]:
    """Return what a kernel of a mask is given, in the order of an op."""
    values = {"window_left": said.ends[0], "window_right": said.ends[1], "causal_of": causal}
    for argument in said.own:
        values[argument[0]] = value(function, "mask", argument, given)
    return [values[name] for name in said.order]


def _together(
    function: Callable[..., Any],
    is_flag: bool,
    ends: tuple[int, int],
    mask: Any,
    given: Mapping[str, Any],
    *,
    any_word: bool,
) -> Masked:
    refuse_other_types(function, "mask", mask)
    types: Types = ()
    if given and isinstance(mask, str) and mask not in words.MASKS:
        types = types_of(function, "mask", mask, given)
    left, right = ends
    part = WINDOW  # of numbers that torch has as symbols too
    if left == OPEN and right == OPEN:
        part = ""
    elif left == OPEN and right == 0:
        part = "causal"
    parts = (part,) if is_flag else (part, BY_SEQUENCE)
    refusal, name, own, order, by_sequence = _known(parts, mask, types, any_word)
    if refusal:
        raise refused(function, refusal)
    return Masked(name, own, order, by_sequence, ends)


# ---- windows -------------------------------------------------------------------------------------


def _ends(function: Callable[..., Any], window: Any, causal: bool) -> tuple[int, int]:
    """How far a window goes to the left and to the right; OPEN without one."""
    if window is None:
        return OPEN, 0 if causal else OPEN
    pair = isinstance(window, tuple | list)
    try:
        return words.window(tuple(map(whole, window)) if pair else whole(window), causal)
    except ExpressionError:
        raise refused(
            function,
            f"window is {shown(window)}; it must be a number of keys from 1 on, its own among "
            f"them, or (left, right) from 0 to {OPEN}, both included, where None or -1 is open",
        ) from None


# ---- masks ---------------------------------------------------------------------------------------


def _known(
    parts: tuple[str, ...], mask: str | Expression | None, types: Types, any_word: bool
) -> tuple[Any, ...]:
    """What is worked out once of a mask, whatever its values, or a refusal before all else.

    The others are as Masked has them. `types` are of a text's arguments.
    """
    key = parts, mask, types, any_word
    found = _found.get(key)
    if found is None:

        def work() -> tuple[Any, ...]:
            own = _read(mask, types, any_word=any_word)
            both = all_of(*(words.MASKS[part].expression for part in parts if part), own)
            return _described(own, both)

        found = _found[key] = outcome("mask", work, ("", (), (), ()))
    return found


_found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
# torch.compile calls it as it is, and keeps what it returns
_known._dynamo_marked_constant = True  # type: ignore[attr-defined]


def named(mask: Expression) -> str:
    """Return what schedules call a mask, which is known from then on.

    Raises ExpressionError for one that no kernel computes.
    """
    return str(_described(mask, mask)[0])


def _described(own: Expression, both: Expression) -> tuple[Any, ...]:
    name = name_of(both)
    if name in words.MASKS:
        order = tuple(x.name for x in words.MASKS[name].expression.given)
    else:
        _refuse_what_no_kernel_has(both)
        word, order = declared(both, name, _OF_WORDS, partial(_usual, both))
        declare(word)
    of_batch = {x.name for x in both.tables if x.over == ("batch",)}
    by_sequence = tuple([x * (x in of_batch) for x in order])
    return name, arguments(own), order, by_sequence


def _refuse_what_no_kernel_has(mask: Expression) -> None:
    """Raise ExpressionError for what masks of kernels are not given."""
    inside: list[Node] = []
    for node in mask.tree.walk():
        if not isinstance(node, Lookup):
            continue
        at = tuple(index.text for index in node.args)
        if node.type != INT or (node.table.over, at) not in _READ:
            raise ExpressionError(
                f"{node.text}: so far masks read int32 tables over batch, at batch, or over batch "
                "and len_q, at batch and q_idx"
            )
        inside += node.args
    others = [x for x in mask.tree.walk() if isinstance(x, Name) and x.name in _NOT_OF_KEYS]
    if len(others) > sum(x.name in _NOT_OF_KEYS for x in inside if isinstance(x, Name)):
        raise ExpressionError(f"{others[0].name} may be an index of a table only, so far")
    if floats := [x.name for x in mask.parameters if x.type == FLOAT]:
        raise ExpressionError(f"{floats[0]} is a float; masks are given whole numbers")


def _usual(mask: Expression, called: Mapping[str, str], len_q: int, len_k: int) -> dict[str, Any]:
    """What a mask is taken to be given, where nobody says."""
    usual: dict[str, Any] = {"batch": 0}
    for x in mask.given:
        if isinstance(x, Table):
            each = [len_k // 2] if len(x.over) == 1 else {0: words.Eighths(len_q, len_k, 1)}
            usual[called[x.name]] = each
        else:
            usual[called[x.name]] = min(max(int(x.least), 1024), int(x.most))
    return usual


_OF_WORDS = {given for word in words.MASKS.values() for given in word.given}
_READ = {(("batch",), ("batch",)), (("batch", "len_q"), ("batch", "q_idx"))}
_NOT_OF_KEYS = "head", "kv_head", "heads", "batch"


def name_of(mask: Expression) -> str:
    """Return the word that shows the same keys, else what a text is called by."""
    keys = ranges(mask)
    for word in words.MASKS.values():
        same = word.ranges.first == keys.first and word.ranges.last == keys.last
        if word.expression.key == mask.key or (same and {*word.expression.given} <= {*mask.given}):
            return word.name
    return f"mask{mask.key}"


def _read(mask: str | Expression | None, types: Types, *, any_word: bool) -> Expression:
    """What `mask` itself says.  Raises ExpressionError, or ValueError in words."""
    if mask is None:
        return words.MASKS["full"].expression
    if isinstance(mask, Expression):
        if mask.kind != "mask":
            raise ValueError(f"mask is the score {mask.text}; @fagen.mask makes masks")
        return mask
    if mask in CALLED or (any_word and mask in words.MASKS):
        return words.MASKS[mask].expression
    if mask in _SAID:
        raise ValueError(f'mask is "{mask}", which {_SAID[mask]} says: leave mask out')
    if re.fullmatch(r"\w*", mask) and mask not in ("True", "False"):
        near = near_word(mask, CALLED)
        mean = f"; did you mean {near}?" if near else ""
        raise ValueError(
            f"mask is {shown(mask)}; it must be one of {', '.join(CALLED)}, a text of q_pos and "
            f"k_idx, or what @fagen.mask makes of a function{mean}"
        )
    return read_text("mask", mask, types)
