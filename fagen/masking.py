"""What a call says of the keys that are seen, in; a mask's name and what its kernel is given, out.

`causal`, `window` and `mask` are and-ed, and so is what belongs to each: a word's own arguments, a
text's or a function's, by name. Values have no say in which kernel that is: one of windows serves
all of them. Needs no torch, for `pick` asks too; torch.compile traces it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

from fagen.argument_names import refuse_unknown_names
from fagen.errors import ExpressionError
from fagen.expr import words
from fagen.expr.canonical import Expression, all_of
from fagen.expr.declare import check_name, parameter
from fagen.expr.parse import read
from fagen.expr.ranges import ranges
from fagen.expr.tree import FLOAT, INT, Lookup, Name, Node, Table
from fagen.expr.words import OPEN, Word
from fagen.toml_lines import near_word, shown
from fagen.vocab import declare

WINDOW, BY_SEQUENCE = "window", "causal_by_sequence"
_SAID = {WINDOW: "window", BY_SEQUENCE: "causal as an int32 tensor"}
# words of `mask`: what the others are, calls say by arguments of their own
CALLED = tuple(word for word in words.MASKS if word not in _SAID)

Window = int | tuple[int | None, int | None] | None
# an argument of a mask: its name, its type, least and most of a number, or of a tensor over what
Argument = tuple[str, str, Any, Any, str]
_NO_WINDOW = OPEN, OPEN


class Seen(NamedTuple):
    """A mask by its name, as problems and schedules have it, and what a kernel of it is given.

    The values are in the order of `Expression.given`, as an op takes them behind the scale.
    """

    mask: str
    values: tuple[Any, ...]
    by_sequence: tuple[str, ...]  # of each a name, where it has a number of each sequence


def seen(
    function: Callable[..., Any], causal: Any, window: Any, mask: Any, given: Mapping[str, Any]
) -> Seen:
    """Return what a call says; `causal` is a truth, or a tensor of one for each sequence.

    Raises TypeError for a name that neither the call nor its mask has, ValueError for an argument
    that is missing or wrong, and for a mask that no kernel computes. Of tensors the op will say.
    """
    ends = _ends(function, window, causal is True)
    is_flag = isinstance(causal, bool)
    name, own, order, by_sequence = _together(function, is_flag, ends, mask, given)
    if not is_flag and str(causal.dtype) != "torch.int32":
        why = "causal of several sequences is int32 (batch,), 1 causal and 0 full"
        raise _refused(function, f"{why}: causal.to(torch.int32) converts it")
    values = {"window_left": ends[0], "window_right": ends[1], "causal_of": causal}
    for argument in own:
        values[argument[0]] = _value(function, mask, argument, given)
    return Seen(name, tuple([values[each] for each in order]), by_sequence)


def named(
    function: Callable[..., Any], causal: bool, window: Any, mask: Any, given: Mapping[str, Any]
) -> str:
    """Return the name of the mask of calls that give more than is known here.

    `mask` may be any word.  Raises as `seen` does, but not for what is missing.
    """
    ends = _ends(function, window, causal)
    if mask == WINDOW:  # of which causal is one end
        ends = _NO_WINDOW
    return _together(function, True, ends, mask, given, any_word=True)[0]


def _together(
    function: Callable[..., Any],
    is_flag: bool,
    ends: tuple[int, int],
    mask: Any,
    given: Mapping[str, Any],
    *,
    any_word: bool = False,
) -> tuple[str, tuple[Argument, ...], tuple[str, ...], tuple[str, ...]]:
    """What `_known` has, of a mask that is one, and given what is its own."""
    if not (mask is None or isinstance(mask, str | Expression)):
        if callable(mask):
            raise _refused(function, f"mask is a function; write @fagen.mask above {mask.__name__}")
        raise TypeError(
            f"{function.__name__}: mask is of type {type(mask).__name__}; it must be a word, a "
            "text, or what @fagen.mask makes of a function"
        )
    types: tuple[tuple[str, str], ...] = ()
    if given and isinstance(mask, str) and mask not in words.MASKS:
        types = tuple([(name, _type_of(function, name, given[name], mask)) for name in given])
    left, right = ends
    part = WINDOW  # of numbers that torch has as symbols too
    if left == OPEN and right == OPEN:
        part = ""
    elif left == OPEN and right == 0:
        part = "causal"
    parts = (part,) if is_flag else (part, BY_SEQUENCE)
    refusal, *known = _known(parts, mask, types, any_word)
    if refusal:
        raise _refused(function, refusal)
    name, own, order, by_sequence = known
    names = [argument[0] for argument in own]
    if unknown := [each for each in given if each not in names]:
        refuse_unknown_names(function, unknown)
    return name, own, order, by_sequence


# ---- windows -------------------------------------------------------------------------------------


def _ends(function: Callable[..., Any], window: Any, causal: bool) -> tuple[int, int]:
    """How far a window goes to the left and to the right; OPEN without one."""
    if window is None:
        return OPEN, 0 if causal else OPEN
    pair = isinstance(window, tuple | list)
    try:
        return words.window(tuple(map(_whole, window)) if pair else _whole(window), causal)
    except ExpressionError:
        raise _refused(
            function,
            f"window is {shown(window)}; it must be a number of keys from 1 on, its own among "
            f"them, or (left, right) from 0 to {OPEN}, both included, where None or -1 is open",
        ) from None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(value: Any) -> Any:
    """A whole number of NumPy's as Python's; all else stays."""
    if isinstance(value, int) or not isinstance(value, Integral):
        return value
    return int(value)


# ---- masks ---------------------------------------------------------------------------------------


def _known(
    parts: tuple[str, ...],
    mask: str | Expression | None,
    types: tuple[tuple[str, str], ...],
    any_word: bool,
) -> tuple[Any, ...]:
    """What is worked out once of a mask, whatever its values, or a refusal before all else.

    Its name, what `mask` itself is given, the names of all that its kernel is given, and these
    again where they are a number of each sequence, else "". `types` are of a text's arguments.
    """
    key = parts, mask, types, any_word
    found = _found.get(key)
    if found is None:
        try:
            own = _read(mask, types, any_word=any_word)
            both = all_of(*(words.MASKS[part].expression for part in parts if part), own)
            found = "", *_described(own, both)
        except ExpressionError as error:
            found = f"mask: {error}" if error.sentence else str(error), "", (), (), ()
        except ValueError as error:
            found = str(error), "", (), (), ()
        _found[key] = found
    return found


_found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
# torch.compile calls it as it is, and keeps what it returns
_known._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _described(own: Expression, both: Expression) -> tuple[Any, ...]:
    name = name_of(both)
    is_word = name in words.MASKS
    given = words.MASKS[name].expression.given if is_word else _declared(name, both)
    over = [isinstance(x, Table) and x.over == ("batch",) for x in given]
    by_sequence = tuple(x.name * is_one for x, is_one in zip(given, over, strict=True))
    return name, tuple(map(_argument, own.given)), tuple(x.name for x in given), by_sequence


def _declared(name: str, mask: Expression) -> tuple[Name | Table, ...]:
    """Have schedules know a text by a name; return what it is given, in the order of an op.

    What a user has named goes by other names there, which C++ has for nothing else.
    """
    _refuse_what_no_kernel_has(mask)
    called = {x.name: x.name if x in _OF_WORDS else f"mask_{x.name}" for x in mask.given}
    text = re.sub(r"[A-Za-z_]\w*", lambda found: called.get(found[0], found[0]), mask.text)
    given = tuple(replace(x, name=called[x.name]) for x in mask.given)
    word = Word(name, "mask", text, "a text of a call", given, usual=partial(_usual, given))
    declare(word)
    by_name = {called[x.name]: x for x in mask.given}
    return tuple(by_name[x.name] for x in word.expression.given)


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


def _usual(given: tuple[Name | Table, ...], len_q: int, len_k: int) -> dict[str, Any]:
    """What a mask is taken to be given, where nobody says."""
    usual: dict[str, Any] = {"batch": 0}
    for x in given:
        if isinstance(x, Name):
            usual[x.name] = min(max(int(x.least), 1024), int(x.most))
        else:
            usual[x.name] = (
                [len_k // 2] if len(x.over) == 1 else {0: words.Eighths(len_q, len_k, 1)}
            )
    return usual


_OF_WORDS = {given for word in words.MASKS.values() for given in word.given}
_READ = {(("batch",), ("batch",)), (("batch", "len_q"), ("batch", "q_idx"))}
_NOT_OF_KEYS = "head", "kv_head", "heads", "batch"


def _argument(given: Name | Table) -> Argument:
    if isinstance(given, Table):
        return given.name, given.type, None, None, given.extents
    return given.name, given.type, given.least, given.most, ""


def name_of(mask: Expression) -> str:
    """Return the word that shows the same keys, else what a text is called by."""
    keys = ranges(mask)
    for word in words.MASKS.values():
        same = word.ranges.first == keys.first and word.ranges.last == keys.last
        if word.expression.key == mask.key or (same and {*word.expression.given} <= {*mask.given}):
            return word.name
    return f"mask{mask.key}"


def _read(
    mask: str | Expression | None, types: tuple[tuple[str, str], ...], *, any_word: bool
) -> Expression:
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
    scope = {name: parameter(check_name(name), type_) for name, type_ in types if type_}
    return read("mask", mask, scope)


def _type_of(function: Callable[..., Any], name: str, value: Any, text: str) -> str:
    """What a value shows of the type of a text's argument; "" where the text has none such."""
    if name not in re.findall(r"[A-Za-z_]\w*", text):
        return ""
    if hasattr(value, "shape"):
        raise _refused(
            function,
            f"{name} is a tensor, and a text does not say over what; a function under @fagen.mask "
            f'does: {name}: fagen.Table("int32", "batch")',
        )
    if isinstance(value, bool) or not isinstance(value, float | Integral):
        raise _refused(function, f"{name} is {shown(value)}; it must be a number")
    return FLOAT if isinstance(value, float) else INT


# ---- what a mask is given ------------------------------------------------------------------------


def _value(
    function: Callable[..., Any], mask: Any, argument: Argument, given: Mapping[str, Any]
) -> Any:
    """What is given for an argument of a mask, as a kernel takes it."""
    name, type_, _, _, extents = argument
    if name not in given:
        what = f"{type_}, a tensor over ({extents})" if extents else f"one number, {type_}"
        raise _refused(function, f"{name} is missing, which the mask takes: {what}")
    value = given[name]
    if not extents:
        return _number(function, value, argument)
    if not hasattr(value, "is_cuda"):
        raise _refused(
            function,
            f"{name} is of type {type(value).__name__}; it must be a torch.Tensor over "
            f"({extents}): torch.tensor({name}, dtype=torch.{type_}, device=q.device) makes one",
        )
    return value


def _number(function: Callable[..., Any], value: Any, argument: Argument) -> Any:
    """A parameter's value, between its ends."""
    name, type_, least, most, _ = argument
    number = _whole(value)
    is_right = _is_whole(number) or (type_ == FLOAT and isinstance(number, float))
    if not (is_right and least <= number <= most):
        kind = "a whole number" if type_ == INT else "a number"
        raise _refused(
            function, f"{name} is {shown(value)}; it must be {kind} from {least} to {most}"
        )
    return float(number) if type_ == FLOAT else number


def _refused(function: Callable[..., Any], why: str) -> ValueError:
    """What to raise of what a call says of its mask."""
    return ValueError(f"{function.__name__}: {why}")
