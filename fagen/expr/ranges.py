"""A mask in, the keys that each row sees out: one interval, with its ends as nodes.

Comparisons are solved for k_idx, exactly, by rounding quotients down; truths join and cut these.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from fagen.errors import ExpressionError
from fagen.expr import logic, make
from fagen.expr.bounds import Change, change, never_above
from fagen.expr.canonical import Expression
from fagen.expr.evaluate import function_of
from fagen.expr.rules import check_numbers
from fagen.expr.tree import INT, K_IDX, LEN_K, Constant, Node, Operation

MOST_CASES = 64
MOST_COMPARED = 12  # intervals, each with each: to see whether two touch
K = K_IDX.name

# [first, last) of a row; None: from the first key on, up to the last one
Keys = tuple[Node | None, Node | None]
ALL: Keys = (None, None)


@dataclass(frozen=True)
class Ranges:
    """The keys first … last - 1 that a row sees; ends are not cut off at 0 and len_k.

    None: every row sees the first key, or the last one. A row whose last is not above its first
    sees none.
    """

    first: Node | None
    last: Node | None

    @property
    def hides_nothing(self) -> bool:
        """Whether every row sees all keys."""
        return self.first is None and self.last is None

    @property
    def shows_nothing(self) -> bool:
        """Whether no row sees a key, as far as structure tells."""
        return _is_empty((self.first, self.last))

    @property
    def warning(self) -> str:
        """What a user may not have meant; "" for nothing."""
        if self.hides_nothing:
            return 'the mask hides nothing: "full" is the same and faster'
        return "no query sees a key" if self.shows_nothing else ""

    @property
    def changes(self) -> tuple[Change, Change]:
        """How the first and the last key change from row to row."""
        first, last = (change(end) if end else Change.CONSTANT for end in (self.first, self.last))
        return first, last

    @cached_property
    def ends(self) -> tuple[Callable[[Mapping[str, Any]], Any], Callable[[Mapping[str, Any]], Any]]:
        """Functions of what is given, q_idx and the lengths among it: first and last."""
        return function_of(self.first or make.ZERO), function_of(self.last or LEN_K)

    def keys(self, given: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return first and last of numbers or of tensors, as they are before they are cut off."""
        first, last = self.ends
        return first(given), last(given)

    def pairs(self, len_q: int, len_k: int, given: Mapping[str, Any], rows: Any = None) -> int:
        """Return how many pairs of a query and a key are visible; `rows`: a tensor of all q_idx."""
        sizes = {**given, "len_q": len_q, "len_k": len_k}
        first, last = self.ends
        if rows is not None:
            sizes["q_idx"] = rows
            none = rows * 0
            seen = (last(sizes) + none).clamp(0, len_k) - (first(sizes) + none).clamp(0, len_k)
            return int(seen.clamp(min=0).sum())
        total = 0
        for sizes["q_idx"] in range(len_q):
            total += max(0, min(len_k, last(sizes)) - max(0, first(sizes)))
        return total

    def blocks(self, rows: range, n: int, given: Mapping[str, Any]) -> "Blocks":
        """Return the blocks of n keys that rows see, all of which are below len_q."""
        len_k = given["len_k"]
        if not rows:
            return Blocks(0, 0, 0, 0)
        sizes = {**given}
        ends = []
        for end, own in zip(self.ends, self.changes, strict=True):
            whole = rows if own is Change.BY_ROW else (rows[0], rows[-1])
            keys = [min(max(0, end(sizes)), len_k) for sizes["q_idx"] in whole]
            ends.append((min(keys), max(keys)))
        (first, full_first), (full_last, last) = ends
        first, last = first // n, -(-last // n)
        return Blocks(first, -(-full_first // n), full_last // n, max(first, last))

    def rows(self, keys: range, m: int, given: Mapping[str, Any]) -> "Blocks":
        """Return the blocks of m rows that see any of these keys, where no end falls: `rows_of`."""
        sizes = {**given}

        def ends(row: int) -> tuple[int, int]:
            sizes["q_idx"] = row
            first, last = self.keys(sizes)
            return first, min(last, given["len_k"])

        return rows_of(ends, given["len_q"], keys, m)


@dataclass(frozen=True)
class Blocks:
    """Blocks first … last - 1 of keys that some row sees, and those that all rows see whole.

    Or of rows: those that see any of some keys, and those of which every row sees all.
    """

    first: int
    full_first: int
    full_last: int
    last: int


def rows_of(ends: Callable[[int], tuple[int, int]], len_q: int, keys: range, m: int) -> Blocks:
    """Return the blocks of m rows, of len_q, that see any of these keys.

    `ends` are a row's first key and the one behind its last. Neither falls from row to row, so that
    they are found by bisection, as kernels do it.
    """

    def until(key: int, end: int) -> int:
        return bisect_right(range(len_q), key, key=lambda row: ends(row)[end])

    seeing, full = until(keys[0], 1), until(keys[-1], 1)
    left, gone = until(keys[0], 0), until(keys[-1], 0)
    first, last = seeing // m, -(-gone // m)
    return Blocks(first, -(-full // m), left // m, max(first, last) if seeing < gone else first)


def ranges(mask: Expression) -> Ranges:
    """Return the interval that each row sees.  Raises ExpressionError for masks with several."""
    intervals = _joined(_solved(mask.tree))
    if not intervals:
        return Ranges(make.ZERO, make.ZERO)
    if len(intervals) > 1:
        named = " and ".join(_shown(keys) for keys in intervals[:3])
        more = f" and {len(intervals) - 3} more" if len(intervals) > 3 else ""
        raise ExpressionError(
            f"a row sees several intervals of keys, {named}{more}: so far kernels have masks of one"
        )
    (found,) = intervals
    for end in found:
        if end is not None:
            check_numbers(end)
    return Ranges(*found)


def _shown(keys: Keys) -> str:
    first, last = keys
    return f"{make.shortened(str(first or 0))} … {make.shortened(str(last or LEN_K))}"


# ---- truths --------------------------------------------------------------------------------------


def _solved(node: Node) -> list[Keys]:
    """Return intervals of which a row sees the keys; those that overlap for sure are one."""
    if K not in node.names:
        return _under(node)
    assert isinstance(node, Operation)
    if node.op == "or":
        return _switched(node) or _joined([keys for arg in node.operands for keys in _solved(arg)])
    if node.op == "and":
        return _all(node.operands)
    left, right = node.operands
    if node.op == "==":
        return _all((logic.at_most(left, right), logic.at_most(right, left)))
    return _at_most_zero(make.subtract(left, right), str(node))


def _switched(node: Operation) -> list[Keys] | None:
    """Return the intervals of what is one mask in some rows, and another in all others."""
    if len(node.operands) != 2:
        return None
    conditions, masks = [], []
    for operand in node.operands:
        joined = isinstance(operand, Operation) and operand.op == "and"
        parts = operand.args if joined else (operand,)
        conditions.append(logic.both(*(part for part in parts if K not in part.names)))
        masks.append(logic.both(*(part for part in parts if K in part.names)))
    if logic.negated(conditions[0]) != conditions[1]:
        return None
    return _either_way(conditions[0], *map(_solved, masks))


def _under(condition: Node) -> list[Keys]:
    """Return all keys under a condition on the row."""
    if isinstance(condition, Constant):
        return [ALL] if condition.value else []
    return [(None, logic.where(condition, LEN_K, make.ZERO))]


def _all(nodes: tuple[Node, ...]) -> list[Keys]:
    """Return what lies in one interval of each node."""
    cases: list[Keys] = [ALL]
    for node in nodes:
        own = _solved(node)
        _count(len(cases) * len(own))
        cases = _joined([_cut(a, b) for a in cases for b in own])
    return cases


def _count(cases: int) -> None:
    if cases > MOST_CASES:
        raise ExpressionError(f"is {cases} cases of inequalities; give it as a table of blocks")


def _cut(one: Keys, other: Keys) -> Keys:
    """Return what two intervals share."""
    first = _extreme(make.maximum, one[0], other[0])
    return first, _extreme(make.minimum, one[1], other[1])


def _extreme(pick: Callable[..., Node], one: Node | None, other: Node | None) -> Node | None:
    """Return the larger first or the smaller last, one of the two where that is known."""
    if one is None or other is None:
        return one if other is None else other
    if never_above(one, other):
        return other if pick is make.maximum else one
    if never_above(other, one):
        return one if pick is make.maximum else other
    return pick(one, other)


def _joined(intervals: list[Keys]) -> list[Keys]:
    """Return the intervals, those that touch for sure joined and those that are empty left out."""
    kept = [keys for keys in map(_plain, dict.fromkeys(intervals)) if not _is_empty(keys)]
    _count(len(kept))
    few = len(kept) <= MOST_COMPARED
    for one, other in combinations(kept, 2):
        joined = _of_one_end(one, other) or (
            few and (_touching(one, other) or _touching(other, one))
        )
        if joined:
            return _joined([joined, *(keys for keys in kept if keys not in (one, other))])
    return kept


def _plain(keys: Keys) -> Keys:
    """Return an interval without ends that are beyond all keys."""
    first, last = keys
    if first is not None and never_above(first, make.ZERO):
        first = None
    if last is not None and never_above(LEN_K, last):
        last = None
    return first, last


def _is_empty(keys: Keys) -> bool:
    first, last = keys[0] or make.ZERO, keys[1] or LEN_K
    return never_above(last, first)


def _of_one_end(one: Keys, other: Keys) -> Keys | None:
    """Return the one interval that two are which share an end."""
    if one[0] == other[0]:
        return one[0], _wider(make.maximum, one[1], other[1])
    if one[1] == other[1]:
        return _wider(make.minimum, one[0], other[0]), one[1]
    return None


def _touching(one: Keys, other: Keys) -> Keys | None:
    """Return the one interval that two are of which the other begins in the first."""
    first, last = one[0] or make.ZERO, one[1] or LEN_K
    begins = other[0] or make.ZERO
    if never_above(first, begins) and never_above(begins, last):
        return one[0], _wider(make.maximum, one[1], other[1])
    return None


def _wider(pick: Callable[..., Node], one: Node | None, other: Node | None) -> Node | None:
    if one is None or other is None:
        return None
    if never_above(one, other):
        return other if pick is make.maximum else one
    if never_above(other, one):
        return one if pick is make.maximum else other
    return pick(one, other)


# ---- comparisons ---------------------------------------------------------------------------------


def _at_most_zero(difference: Node, shown: str) -> list[Keys]:
    """Return where a whole number is at most 0."""
    if K not in difference.names:
        return _under(logic.at_most(difference, make.ZERO))
    terms, plus = make.linear(difference)
    ours = [(factor, term) for factor, term in terms if K in term.names]
    rest = make.weighted([pair for pair in terms if pair not in ours], plus)
    split = next((pair for pair in ours if _is_split(pair[1])), None)
    if split:
        others = make.subtract(difference, make.weighted([split]))
        return _by_cases(*split, others, shown)
    if len(ours) > 1:
        raise _not_linear(shown, [term for _, term in ours])
    (factor, term), *_ = ours
    if term == K_IDX:
        return [_bounded(factor, rest)]
    if isinstance(term, Operation) and term.op == "//" and K not in term.operands[1].names:
        dividend, divisor = term.operands
        return _of_quotient(factor, dividend, divisor, rest, shown)
    raise _not_linear(shown, [term])


def _bounded(factor: int, rest: Node) -> Keys:
    """Return where factor · k + rest <= 0."""
    if factor > 0:  # k <= -rest / factor, rounded down
        below = make.floor_divide(make.negate(rest), make.number(factor))
        return None, make.add(below, make.ONE)
    # k >= rest / -factor, rounded up
    return make.negate(make.floor_divide(make.negate(rest), make.number(-factor))), None


def _of_quotient(factor: int, dividend: Node, divisor: Node, rest: Node, shown: str) -> list[Keys]:
    """Return where factor · (dividend // divisor) + rest <= 0."""
    first, last = _bounded(factor, rest)
    if last is not None:  # dividend < divisor · last
        return _at_most_zero(
            make.add(make.subtract(dividend, make.multiply(divisor, last)), make.ONE), shown
        )
    assert first is not None  # dividend >= divisor · first
    return _at_most_zero(make.subtract(make.multiply(divisor, first), dividend), shown)


_SPLIT = ("min", "max", "abs", "where")


def _is_split(term: Node) -> bool:
    return isinstance(term, Operation) and term.op in _SPLIT


def _by_cases(factor: int, term: Node, others: Node, shown: str) -> list[Keys]:
    """Return where factor · term + others <= 0, of a term that is one of several."""
    assert isinstance(term, Operation)

    def case(one: Node) -> list[Keys]:
        return _at_most_zero(make.add(others, make.weighted([(factor, one)])), shown)

    operands = term.operands
    if term.op == "where":
        condition, yes, no = operands
        return _either_way(condition, case(yes), case(no))
    if term.op == "abs":
        operands = (operands[0], make.negate(operands[0]))
    every = (term.op == "min") == (factor < 0)  # the largest of the sums must be at most 0
    if not every:
        return _joined([keys for operand in operands for keys in case(operand)])
    found: list[Keys] = [ALL]
    for operand in operands:
        own = case(operand)
        _count(len(found) * len(own))
        found = _joined([_cut(a, b) for a in found for b in own])
    return found


def _either_way(condition: Node, yes: list[Keys], no: list[Keys]) -> list[Keys]:
    """Return the intervals of one of two cases: where each has one, and rows decide, one."""
    if K in condition.names:
        both_ways = [(_solved(condition), yes), (_solved(logic.negated(condition)), no)]
        _count(sum(len(a) * len(b) for a, b in both_ways))
        return _joined([_cut(a, b) for when, then in both_ways for a in when for b in then])
    if len(yes) == len(no) == 1:
        (first, last), (first_no, last_no) = yes[0], no[0]
        return [
            (
                _plain_where(condition, first, first_no, make.ZERO),
                _plain_where(condition, last, last_no, LEN_K),
            )
        ]
    when, otherwise = _under(condition)[0], _under(logic.negated(condition))[0]
    return _joined([*(_cut(when, keys) for keys in yes), *(_cut(otherwise, keys) for keys in no)])


def _plain_where(condition: Node, yes: Node | None, no: Node | None, end: Node) -> Node | None:
    return None if yes is no is None else logic.where(condition, yes or end, no or end)


def _not_linear(shown: str, terms: list[Node]) -> ExpressionError:
    """Return what is wrong with keys that no inequality picks."""
    text = make.shortened(shown)
    for part in _parts(terms):
        if isinstance(part, Operation) and part.op == "%":
            why = f"{part} picks keys inside an interval"
            return ExpressionError(f"{text}: {why}, for which there are no kernels yet")
        if part.type == INT and not isinstance(part, Operation) and part != K_IDX and part.args:
            why = f"{part} is known of single keys only"
            give = "give each query's first and last key as tables: mask document"
            return ExpressionError(f"{text}: {why}; {give}")
    why = "it stands there more than once, or times another number"
    return ExpressionError(f"{text} is no bound for k_idx: {why}")


def _parts(terms: list[Node]) -> Iterator[Node]:
    for term in terms:
        yield from (part for part in term.walk() if K in part.names)
