"""The masks and scores that have names: each a text, what a call gives to it, and what it is for.

A new one is a row here, a lambda in its test, and the picture in the docs that is drawn from it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fagen.errors import ExpressionError
from fagen.expr.canonical import Expression
from fagen.expr.declare import Given, parameter, table
from fagen.expr.make import number
from fagen.expr.parse import read
from fagen.expr.ranges import Ranges, ranges
from fagen.expr.tree import FLOAT, INT, MOST_GIVEN, MOST_LENGTH, Name, Table

OPEN = MOST_GIVEN  # a window's width to a side that has no end
PLAIN = "plain"  # the score that is the product, scaled


@dataclass(frozen=True)
class Word:
    """A mask or a score by its name; arguments of calls may be called otherwise than here."""

    name: str
    kind: str
    text: str
    is_for: str
    given: tuple[Name | Table, ...] = ()
    example: Mapping[str, Any] = field(default_factory=dict)  # for a picture of 12 by 12
    # what is given where nobody says: to predictions, of lengths of queries and of keys
    usual: Callable[[int, int], Mapping[str, Any]] = field(default=lambda len_q, len_k: {})
    pairs: Callable[[int, int], float] | None = None  # as FLOPs are counted, where that is no sum

    @cached_property
    def expression(self) -> Expression:
        """The text, read."""
        return self.with_constants()

    def with_constants(self, **numbers: float) -> Expression:
        """Return the text with numbers in place of parameters."""
        scope: dict[str, Given] = {given.name: given for given in self.given}
        return read(self.kind, self.text, {**scope, **{n: number(v) for n, v in numbers.items()}})

    @cached_property
    def ranges(self) -> Ranges:
        """The keys that a row sees."""
        return ranges(self.expression)

    def visible(self, len_q: int, len_k: int, given: Mapping[str, Any], rows: Any = None) -> float:
        """Return how many pairs of a query and a key count as FLOPs; see `Ranges.pairs`."""
        if self.pairs is not None:
            return self.pairs(len_q, len_k)
        return self.ranges.pairs(len_q, len_k, given, rows)


@dataclass(frozen=True)
class Eighths:
    """Of each query where its document begins, or ends: eight as long as each other."""

    len_q: int
    len_k: int
    ends: int  # 1, or 0 where they begin

    def __getitem__(self, row: Any) -> Any:
        return (row * 8 // max(1, self.len_q) + self.ends) * self.len_k // 8


def _triangle(len_q: int, len_k: int) -> float:
    """Return half a square, diagonal included: as everybody counts what is causal."""
    if len_q <= len_k:
        return len_q * len_k - len_q * len_q / 2
    return len_k * len_k / 2


def _whole(name: str, least: int, most: int = MOST_GIVEN) -> Name:
    return parameter(name, INT, least, most)


def _words(*rows: Word) -> Mapping[str, Word]:
    return {row.name: row for row in rows}


MASKS = _words(
    Word(
        "full",
        "mask",
        "True",
        "every query sees every key",
        pairs=lambda len_q, len_k: float(len_q * len_k),
    ),
    Word(
        "causal",
        "mask",
        "k_idx <= q_pos",
        "itself and what is before; the last query sees the last key",
        pairs=_triangle,
    ),
    Word(
        "causal_by_sequence",
        "mask",
        "causal_of[batch] == 0 or k_idx <= q_pos",
        "causal where a sequence's number is 1, full where it is 0",
        (table("causal_of", INT, ("batch",), {}),),
        {"causal_of": [1]},
        usual=lambda len_q, len_k: {"causal_of": [1], "batch": 0},
    ),
    Word(
        "window",
        "mask",
        "q_pos - window_left <= k_idx and k_idx <= q_pos + window_right",
        "so many keys before its own and behind it, both included",
        (_whole("window_left", 0), _whole("window_right", 0)),
        {"window_left": 3, "window_right": 1},
        usual=lambda len_q, len_k: {"window_left": min(1023, len_k // 3), "window_right": 0},
    ),
    Word(
        "chunked",
        "mask",
        "k_idx <= q_pos and k_idx // chunk == q_pos // chunk",
        "causal within chunks of so many keys",
        (_whole("chunk", 1, MOST_LENGTH),),
        {"chunk": 4},
        usual=lambda len_q, len_k: {"chunk": max(1, min(8192, len_k // 3))},
    ),
    Word(
        "prefix",
        "mask",
        "k_idx <= q_pos or k_idx < prefix[batch]",
        "causal, and every query sees the first keys of its sequence",
        (table("prefix", INT, ("batch",), {}),),
        {"prefix": [5]},
        usual=lambda len_q, len_k: {"prefix": [len_k // 4], "batch": 0},
    ),
    Word(
        "document",
        "mask",
        "first[batch, q_idx] <= k_idx and k_idx < last[batch, q_idx]",
        "documents in one sequence: of each query its document's first key, and the one behind",
        tuple(table(name, INT, ("batch", "len_q"), {}, rising=True) for name in ("first", "last")),
        {"first": [[0] * 3 + [3] * 5 + [8] * 4], "last": [[3] * 3 + [8] * 5 + [12] * 4]},
        usual=lambda len_q, len_k: {
            "first": {0: Eighths(len_q, len_k, 0)},
            "last": {0: Eighths(len_q, len_k, 1)},
            "batch": 0,
        },
    ),
)
GIVEN = tuple(name for name, word in MASKS.items() if word.given)
SCORES = _words(
    Word(PLAIN, "score", "score", "the product, scaled"),
    Word(
        "softcap",
        "score",
        "softcap * tanh(score / softcap)",
        "no score is beyond the cap",
        (parameter("softcap", FLOAT, 1e-3, 1e6),),
        usual=lambda len_q, len_k: {"softcap": 50.0},
    ),
    Word(
        "alibi",
        "score",
        "score + slopes[head] * (k_idx - q_pos)",
        "what is further away counts for less, by a slope of each head",
        (table("slopes", FLOAT, ("head",), {}),),
    ),
)


def window(width: int | tuple[int | None, int | None], causal: bool) -> tuple[int, int]:
    """Return left and right of what a call says of a window, both included.

    W is (W - 1, 0) under causal, and (W - 1, W - 1) without; of a pair None and -1 are open.
    """
    if isinstance(width, int) and not isinstance(width, bool) and width >= 1:
        left = width - 1 if width <= OPEN else OPEN
        return left, 0 if causal else left
    if not isinstance(width, tuple | list) or len(width) != 2:
        raise ExpressionError("window is a number of keys from 1 on, or (left, right)")
    left, right = (OPEN if side is None or side == -1 else side for side in width)
    for side in (left, right):
        if not isinstance(side, int) or isinstance(side, bool) or not 0 <= side <= OPEN:
            raise ExpressionError("left and right are numbers from 0 on; None or -1 is open")
    return left, 0 if causal else right
