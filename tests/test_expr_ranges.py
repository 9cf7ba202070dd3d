"""Which keys a row sees: intervals against brute force, names against lambdas written by hand."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from fagen.errors import ExpressionError
from fagen.expr import words
from fagen.expr.bounds import Change, change, interval, never_above
from fagen.expr.declare import scope_of
from fagen.expr.evaluate import evaluate
from fagen.expr.parse import parse, read
from fagen.expr.pictures import drawn as picture
from fagen.expr.pictures import svg
from fagen.expr.ranges import Ranges, ranges
from tests.expr_helpers import EVERYTHING, Writer, by_python, drawn, masks, used

SIZES = [(1, 1), (7, 7), (4, 9), (9, 4), (12, 1), (1, 12), (6, 0), (16, 20)]

# ---- named masks ---------------------------------------------------------------------------------

# By hand from their documentation: i a query and j a key from 0 on, m and n how many there are.
DENSE: dict[str, Callable[..., bool]] = {
    "full": lambda i, j, m, n: True,
    "causal": lambda i, j, m, n: j - i <= n - m,
    "causal_by_sequence": lambda i, j, m, n, causal_of: not causal_of[0] or j - i <= n - m,
    "window": lambda i, j, m, n, window_left, window_right: (
        -window_left <= j - (i + n - m) <= window_right
    ),
    "chunked": lambda i, j, m, n, chunk: (
        j <= i + n - m and j in range(base := (i + n - m) - (i + n - m) % chunk, base + chunk)
    ),
    "prefix": lambda i, j, m, n, prefix: j <= i + n - m or j < prefix[0],
    "document": lambda i, j, m, n, first, last: j in range(first[0][i], last[0][i]),
}


def given_for(name: str, dice: random.Random, m: int, n: int) -> dict[str, Any]:
    """What a call gives to a named mask, at random."""
    cuts = sorted(dice.randint(0, n) for _ in range(2))
    ends = [0, *cuts, n]
    documents = sorted(dice.randint(0, 2) for _ in range(m))
    of_all = {
        "causal_of": [dice.randint(0, 1)],
        "window_left": dice.choice([0, 1, 2, 5, 100, words.OPEN]),
        "window_right": dice.choice([0, 1, 3, 100, words.OPEN]),
        "chunk": dice.choice([1, 2, 3, 5, 8, 100]),
        "prefix": [dice.choice([-1, 0, 1, 3, 8, 100])],
        "first": [[ends[d] for d in documents]],
        "last": [[ends[d + 1] for d in documents]],
    }
    arguments = words.MASKS[name].expression.arguments
    return {argument: of_all[argument] for argument in arguments}


def of_rows(found: Ranges, m: int, n: int, given: dict[str, Any]) -> list[list[bool]]:
    rows = []
    for i in range(m):
        first, last = found.keys({"q_idx": i, "len_q": m, "len_k": n, "batch": 0, **given})
        rows.append([first <= j < last for j in range(n)])
    return rows


def dense_of(text: str, given: dict[str, Any]) -> list[list[bool]]:
    """What Python says of each query and key."""
    return [
        [bool(by_python(text, {**given, "q_idx": i, "k_idx": j})) for j in range(given["len_k"])]
        for i in range(given["len_q"])
    ]


@pytest.mark.parametrize("name", DENSE)
def test_a_named_mask_is_what_its_documentation_says(name: str) -> None:
    dice, word = random.Random(name), words.MASKS[name]
    for m, n in SIZES * 8:
        given = given_for(name, dice, m, n)
        dense = [[bool(DENSE[name](i, j, m, n, **given)) for j in range(n)] for i in range(m)]
        assert of_rows(word.ranges, m, n, given) == dense, given
        assert word.ranges.pairs(m, n, {"batch": 0, **given}) == sum(map(sum, dense))


def test_every_named_mask_has_a_lambda() -> None:
    assert DENSE.keys() == words.MASKS.keys()
    for word in words.MASKS.values():
        assert word.ranges.last is None or Change.BY_ROW not in word.ranges.changes


def test_the_texts_of_the_names_are_not_looser_than_their_intervals() -> None:
    causal, window, chunked, prefix = (
        words.MASKS[name].ranges for name in ("causal", "window", "chunked", "prefix")
    )
    assert (causal.first, str(causal.last)) == (None, "q_pos + 1")
    assert (str(window.first), str(window.last)) == (
        "q_pos - window_left",
        "q_pos + window_right + 1",
    )
    assert (str(chunked.first), str(chunked.last)) == ("chunk*(q_pos // chunk)", "q_pos + 1")
    assert (prefix.first, str(prefix.last)) == (None, "max(prefix[batch], q_pos + 1)")
    assert words.MASKS["full"].ranges.hides_nothing and not causal.hides_nothing


MUTANTS = [
    ("causal", "k_idx < q_pos"),
    ("causal", "k_idx <= q_idx"),
    ("causal", "k_idx <= q_pos + 1"),
    ("window", "q_pos - window_left < k_idx and k_idx <= q_pos + window_right"),
    ("window", "q_pos - window_left - 1 <= k_idx and k_idx <= q_pos + window_right"),
    ("window", "q_pos - window_left <= k_idx and k_idx < q_pos + window_right"),
    ("window", "q_idx - window_left <= k_idx and k_idx <= q_idx + window_right"),
    ("window", "q_pos - window_right <= k_idx and k_idx <= q_pos + window_left"),
    ("chunked", "k_idx <= q_pos and k_idx // chunk == q_idx // chunk"),
    ("chunked", "k_idx <= q_idx and k_idx // chunk == q_pos // chunk"),
    ("chunked", "k_idx < q_pos and k_idx // chunk == q_pos // chunk"),
    ("chunked", "k_idx // chunk == q_pos // chunk"),
    ("prefix", "k_idx <= q_pos or k_idx <= prefix[batch]"),
    ("prefix", "k_idx <= q_pos and k_idx < prefix[batch]"),
    ("document", "first[batch, q_idx] <= k_idx and k_idx <= last[batch, q_idx]"),
    ("document", "first[batch, q_idx] < k_idx and k_idx < last[batch, q_idx]"),
    ("causal_by_sequence", "causal_of[batch] == 1 or k_idx <= q_pos"),
]


@pytest.mark.parametrize(("name", "text"), MUTANTS)
def test_a_text_that_is_off_by_one_or_by_a_name_is_found_out(name: str, text: str) -> None:
    scope = {given.name: given for given in words.MASKS[name].given}
    mutant, dice = ranges(read("mask", text, scope)), random.Random(name)
    for m, n in SIZES * 8:
        given = given_for(name, dice, m, n)
        dense = [[bool(DENSE[name](i, j, m, n, **given)) for j in range(n)] for i in range(m)]
        if of_rows(mutant, m, n, given) != dense:
            return
    pytest.fail("no size of these tests tells them apart")


def test_a_window_of_a_call_is_both_its_sides() -> None:
    assert words.window(1024, causal=True) == (1023, 0)
    assert words.window(1024, causal=False) == (1023, 1023)
    assert words.window((127, 0), causal=False) == (127, 0)
    assert words.window((127, 5), causal=True) == (127, 0)
    assert words.window((None, -1), causal=False) == (words.OPEN, words.OPEN)
    for wrong in (0, -1, True, 1.5, (1,), (1, 2, 3), (-2, 0), ("1", 0), (True, 0), "12", None):
        with pytest.raises(ExpressionError):
            words.window(wrong, causal=True)  # type: ignore[arg-type]


# ---- any mask ------------------------------------------------------------------------------------


def test_intervals_of_masks_at_random_are_those_that_python_finds() -> None:
    solved = 0
    for text, dice in masks(1, 260):
        try:
            found = ranges(read("mask", text, used(text)))
        except ExpressionError:
            continue
        solved += 1
        for _ in range(2):
            m, n = dice.choice(SIZES)
            given = drawn(dice, m, n)
            assert of_rows(found, m, n, given) == dense_of(text, given), (text, given)
            for end, own in zip(found.ends, found.changes, strict=True):
                keys = [end({**given, "q_idx": i}) for i in range(m)]
                if own is not Change.BY_ROW:
                    falls = own is Change.FALLS
                    assert keys == sorted(keys, reverse=falls), (text, given)
                if own is Change.CONSTANT:
                    assert len(set(keys)) <= 1, (text, given)
    assert solved > 150


def tiles(seed, times, sizes, rising=False):
    """Ranges of drawn masks and of all words, what they are given, and how tiles are cut."""
    named = [(word.text, {p.name: p for p in word.given}) for word in words.MASKS.values()]
    texts = [(text, used(text), dice) for text, dice in masks(seed, 120)]
    texts += [(text, scope, random.Random(text)) for text, scope in named * times]
    for text, scope, dice in texts:
        try:
            found = ranges(read("mask", text, scope))
        except ExpressionError:
            continue
        if rising and {Change.FALLS, Change.BY_ROW} & {*found.changes}:
            continue
        m, n = dice.choice(SIZES[2:] * 2 + sizes)
        rows, keys = dice.choice([1, 3, 4, 8]), dice.choice([1, 2, 4, 5])
        given = drawn(dice, m, n)
        for name in (word.name for word in words.MASKS.values() if word.text == text):
            given |= given_for(name, dice, m, n)
        yield found, of_rows(found, m, n, given), given, (m, n), (rows, keys)


def is_tight(got, blocks, whole):
    """Assert that a tile's blocks are those that are seen; whether `whole` ones had no more."""
    touched = [b for b, block in enumerate(blocks) if any(map(any, block))]
    assert not touched or (got.first <= touched[0] and touched[-1] < got.last)
    for full in range(max(got.first, got.full_first), min(got.last, got.full_last)):
        assert all(all(row) for row in blocks[full])
    if not touched or not whole:
        return False
    assert touched[0] == got.first and touched[-1] == got.last - 1
    return True


def test_blocks_of_a_tile_hold_all_that_is_seen_and_full_ones_nothing_else() -> None:
    tight = 0
    for found, seen, given, (m, n), (rows, keys) in tiles(2, 6, [(40, 33)] * 3):
        for top in range(0, m, rows):
            tile = seen[top : top + rows]
            got = found.blocks(range(top, min(m, top + rows)), keys, given)
            blocks = [[row[b : b + keys] for row in tile] for b in range(0, n, keys)]
            tight += is_tight(got, blocks, all(map(any, tile)))
    assert tight > 100


def test_rows_of_a_tiles_keys_are_all_that_see_any_and_full_ones_see_all() -> None:
    tight = 0
    some = tiles(3, 9, [(40, 33), (33, 40)] * 3, rising=True)
    for found, seen, given, (m, n), (rows, keys) in some:
        for left in range(0, n, keys):
            got = found.rows(range(left, min(n, left + keys)), rows, given)
            blocks = [
                [row[left : left + keys] for row in seen[b : b + rows]] for b in range(0, m, rows)
            ]
            tight += is_tight(got, blocks, all(map(any, seen)))
    assert tight > 100


SEVERAL = [
    ("k_idx != q_pos", "a row sees several intervals of keys, 0 … q_pos and q_pos"),
    ("k_idx < 4 or q_pos - k_idx < w and k_idx <= q_pos", "several intervals"),
    ("abs(q_pos - k_idx) >= w", "several intervals"),
    ("k_idx % 16 == 0", "k_idx % 16 picks keys inside an interval"),
    ("(q_pos - k_idx) % c == 0 and k_idx <= q_pos", "picks keys inside an interval"),
    ("per_batch[batch] * k_idx <= 3", "2\\*\\*31"),
    ("(k_idx - head) * head <= 3", "2\\*\\*31"),
    ("k_idx // c * c <= q_pos", "is no bound for k_idx: it stands there more than once"),
    ("k_idx // c + k_idx <= q_pos", "is no bound for k_idx"),
    (
        " and ".join(f"(k_idx <= {4 * i} or k_idx >= {4 * i + 2})" for i in range(8)),
        "9 more|several",
    ),
]


@pytest.mark.parametrize(("text", "message"), SEVERAL)
def test_what_is_no_interval_is_refused(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        ranges(read("mask", text, used(text)))


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("k_idx < len_k", "the mask hides nothing"),
        ("k_idx < 0 and k_idx <= q_pos", "no query sees a key"),
        ("k_idx <= q_pos - w and k_idx > q_pos", "no query sees a key"),
        ("k_idx <= q_pos", ""),
    ],
)
def test_what_cannot_be_meant_is_warned_of(text: str, warning: str) -> None:
    found = ranges(read("mask", text, used(text))).warning
    assert found.startswith(warning) and bool(found) == bool(warning)


def test_documents_by_their_numbers_are_refused_with_the_way_out() -> None:
    by_key = {"of_key": {"dtype": "int32", "over": ["len_k"]}}
    by_query = {"of_query": {"dtype": "int32", "over": ["len_q"]}}
    mask = read("mask", "of_key[k_idx] == of_query[q_idx]", scope_of({}, by_key | by_query))
    with pytest.raises(ExpressionError, match="as tables: mask document"):
        ranges(mask)


def test_cases_are_counted() -> None:
    text = " and ".join(f"(k_idx < c - {9 * i} or k_idx > w + {9 * i + 5})" for i in range(8))
    with pytest.raises(ExpressionError, match=r"cases of inequalities; give it as a table|several"):
        ranges(read("mask", text, used(text)))


JOINED = [
    ("k_idx <= q_pos or k_idx <= q_pos + w", None, "q_pos + w + 1"),
    ("k_idx >= q_pos - w and k_idx >= q_pos", "q_pos", None),
    ("k_idx < len_k and k_idx >= 0", None, None),
    ("k_idx < len_k - 1", None, "len_k - 1"),
    ("k_idx <= 2 or k_idx >= 2", None, None),
    ("k_idx <= 2 or k_idx >= 3", None, None),
    ("q_pos - 4 <= k_idx <= q_pos or q_pos <= k_idx <= q_pos + w", "q_pos - 4", "q_pos + w + 1"),
    ("k_idx // c <= q_pos // c", None, "c + c*(q_pos // c)"),
    ("k_idx // c >= q_pos // c - 1", "c*(q_pos // c) - c", None),
    ("3*k_idx + 2 <= 2*q_pos", None, "(2*q_pos - 2) // 3 + 1"),
    ("where(head == 3, k_idx <= q_pos, k_idx >= 7)", "where(head == 3, 0, 7)", None),
    ("where(per_batch[batch] == 0, k_idx <= q_pos, abs(q_pos - k_idx) <= w)", None, None),
    ("k_idx < 0", "0", "0"),
    ("False", "0", "0"),
    (
        "k_idx <= q_pos and k_idx // 4 == q_pos // 4 or q_pos - 8 < k_idx <= q_pos",
        *("q_pos - 7", "q_pos + 1"),
    ),
]


@pytest.mark.parametrize(("text", "first", "last"), JOINED)
def test_intervals_are_joined_where_they_touch(text: str, first: str | None, last: str | None):
    found = ranges(read("mask", text, used(text)))
    if "where" not in text:
        assert [end and str(end) for end in (found.first, found.last)] == [first, last]
    dice = random.Random(text)
    for m, n in SIZES * 3:
        given = drawn(dice, m, n)
        assert of_rows(found, m, n, given) == dense_of(text, given)


# ---- what rules say of numbers -------------------------------------------------------------------


def test_rules_of_values_and_of_rows_hold_for_numbers_at_random() -> None:
    for seed in range(300):
        dice = random.Random(seed)
        text = Writer(dice).number(3)
        node = parse(text, EVERYTHING)
        least, most = interval(node)
        for _ in range(3):
            m, n = dice.choice(SIZES)
            given = drawn(dice, m, n)
            values = [by_python(text, {**given, "q_idx": i}) for i in range(m)]
            assert [evaluate(node, {**given, "q_idx": i}) for i in range(m)] == values
            assert all(least <= value <= most for value in values)
            own = change(node)
            if own is not Change.BY_ROW:
                pairs = list(pairwise(values))
                assert all(b <= a for a, b in pairs) or own is not Change.FALLS, text
                assert all(a <= b for a, b in pairs) or own is not Change.RISES, text
                assert all(a == b for a, b in pairs) or own is not Change.CONSTANT, text


def test_what_is_never_above_never_is() -> None:
    known = 0
    for seed in range(600):
        dice = random.Random(f"pair {seed}")
        one, other = Writer(dice).number(2), Writer(dice).number(1)
        forms = ("{a}|max({b}, {a})", "min({a}, {b})|{a}", "{a}|{a} + w", "c*(({a}) // c)|{a}")
        left, right = dice.choice([*forms, "{a}|{b}"]).format(a=one, b=other).split("|")
        try:
            if not never_above(parse(left, EVERYTHING), parse(right, EVERYTHING)):
                continue
        except ExpressionError:
            continue
        known += 1
        for _ in range(6):
            m, n = dice.choice(SIZES)
            given = drawn(dice, m, n) | {"q_idx": dice.randrange(m)}
            assert by_python(left, given) <= by_python(right, given), (left, right)
    assert known > 300


def test_of_tensors_a_mask_says_the_same_as_of_numbers() -> None:
    for text, dice in masks(5, 80):
        try:
            mask = read("mask", text, used(text))
        except ExpressionError:
            continue
        m, n = dice.choice(SIZES)
        given = drawn(dice, m, n)
        dense = dense_of(text, given)
        tables = {name: torch.tensor(given[name]) for name in ("per_batch", "rises", "any_row")}
        index = {"q_idx": torch.arange(m)[:, None], "k_idx": torch.arange(n)[None]}
        whole = torch.as_tensor(evaluate(mask.tree, {**given, **tables, **index}))
        assert whole.expand(m, n).tolist() == dense, text


def test_visible_pairs_are_counted_alike_with_and_without_torch() -> None:
    for name, word in words.MASKS.items():
        dice = random.Random(name)
        for m, n in SIZES:
            given = {"batch": 0, **given_for(name, dice, m, n)}
            tensors = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in given.items()}
            counted = word.ranges.pairs(m, n, tensors, rows=torch.arange(m))
            assert counted == word.ranges.pairs(m, n, given)


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(TypeError, match="chunk is missing"):
        words.MASKS["chunked"].ranges.keys({"q_idx": 3, "len_q": 4, "len_k": 4})


def test_a_picture_shows_what_is_seen() -> None:
    window = words.MASKS["window"]
    assert (
        picture(window.expression, 3, 4, {"window_left": 1, "window_right": 0})
        == "■■··\n·■■·\n··■■"
    )
    drawing = svg(window.expression, 3, 4, {"window_left": 1, "window_right": 0})
    assert drawing.count("<rect") == 4 and "k_idx &lt;= q_pos" in drawing
    for word in words.MASKS.values():
        lines = picture(word.expression, 12, 12, word.example).splitlines()
        assert len(lines) == 12 and {len(line) for line in lines} == {12}
