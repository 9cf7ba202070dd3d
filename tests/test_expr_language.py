"""The language of masks and scores: what is read, what is refused and where, one text for each."""

import inspect
import random
import time
from collections.abc import Callable

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fagen
from fagen.errors import ExpressionError
from fagen.expr import declare, make, words
from fagen.expr.canonical import all_of
from fagen.expr.declare import RESERVED, scope_of
from fagen.expr.parse import parse, read
from fagen.expr.trace import (
    Table,
    Traced,
    TracedTable,
    clamp,
    float32,
    int32,
    mask,
    maximum,
    minimum,
    score,
    tanh,
    where,
)
from fagen.expr.tree import LANGUAGE
from tests.expr_helpers import EVERYTHING, PARAMETERS, TABLES, Writer, masks, used

SCOPE = {
    **EVERYTHING,
    **scope_of(
        {"cap": 50.0, "soft": {"dtype": "float32", "min": 0.1}},
        {
            "bias": {"dtype": "float32", "over": ["head", 257], "gradient": True},
            "slopes": {"dtype": "float32", "over": ["head"]},
        },
    ),
}


def canonical(kind: str, text: str) -> str:
    return read(kind, text, used(text, SCOPE)).text


# ---- one text for each expression ----------------------------------------------------------------

SAME = [
    ("0 <= q_pos - k_idx < w", "q_pos - k_idx < w and k_idx <= q_pos"),
    ("k_idx<=q_pos", "  q_pos  >=\n k_idx "),
    ("k_idx < q_pos", "not q_pos <= k_idx"),
    ("k_idx + 1 <= q_pos", "k_idx < q_pos"),
    ("2*k_idx <= 2*q_pos + 1", "k_idx <= q_pos"),
    ("k_idx // c == q_pos // c", "q_pos // c <= k_idx // c and k_idx // c <= q_pos // c"),
    ("not (k_idx < 3 or q_idx == 5)", "k_idx >= 3 and q_idx != 5"),
    ("(k_idx - 1) * (2 + 1) <= c", "3 * k_idx <= 3 + c"),
    ("c * (q_idx + 1) <= k_idx", "c + c * q_idx <= k_idx"),
    ("where(w == 0, k_idx, n) <= q_pos", "where(w != 0, n, k_idx) <= q_pos"),
    ("max(k_idx, 3, q_idx) <= w", "max(q_idx, max(3, k_idx)) <= w"),
    ("where(w == 0, k_idx <= 1, k_idx <= 2)", "w != 0 and k_idx <= 2 or k_idx <= 1 and w == 0"),
    ("abs(q_pos - k_idx) <= w", "abs(k_idx - q_pos) <= w"),
    ("True and k_idx <= 4 and k_idx <= 4", "k_idx <= 2 + 2"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_masks_that_are_one_have_one_text_and_one_key(one: str, other: str) -> None:
    first, second = (read("mask", text, used(text, SCOPE)) for text in (one, other))
    assert first == second and first.key == second.key
    assert parse(first.text, SCOPE) == first.tree


SCORES = [
    ("cap * tanh(score / cap)", "50.0*tanh(0.02*score)"),
    ("tanh(score / 50) * 50", "50.0*tanh(0.02*score)"),
    ("score + slopes[head] * (k_idx - q_pos)", "score + slopes[head]*(k_idx - q_pos)"),
    ("score**3 - -score", "score + score*score*score"),
    ("2", "2.0"),
    ("q_idx * k_idx", None),  # which is beyond whole numbers
    ("1.0 * q_idx * k_idx", "1.0*k_idx*q_idx"),
    ("0.0 + q_idx - k_idx + score", "score + q_idx - k_idx"),
    ("0.5 - q_idx", "0.5 - q_idx"),
    ("where(k_idx <= 4, score, -inf)", "where(k_idx <= 4, score, -inf)"),
    ("where(score > 0, score, 0.1*score)", "where(0.0 < score, score, 0.1*score)"),
    ("sigmoid(score)", "0.5*tanh(0.5*score) + 0.5"),
    ("-soft / score", "-(soft / score)"),
    ("-(q_idx // 3)", "-(q_idx // 3)"),
    ("-(q_idx % 3) - k_idx // 2", "-(k_idx // 2) - q_idx % 3"),
    ("-3 // (1 + q_idx) + -(q_idx // 2) * 2", "-3 // (q_idx + 1) - 2*(q_idx // 2)"),
    ("exp(log(2.0)) * score", "2.0*score"),
    ("min(score, 3, 2.5)", "min(2.5, score)"),
    ("max(q_idx, k_idx) + score", "score + max(k_idx, q_idx)"),
    ("0.1 * (score + 3)", "0.1*(score + 3.0)"),
]


@pytest.mark.parametrize(("text", "expected"), SCORES)
def test_a_score_has_one_text_that_reads_back(text: str, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(ExpressionError, match=r"2\*\*31"):
            canonical("score", text)
        return
    tree = read("score", text, used(text, SCOPE)).tree
    assert tree.text == expected
    assert read("score", expected, used(expected, SCOPE)).tree == tree


def test_masks_at_random_read_back_as_what_they_are() -> None:
    for text, _ in masks(11, 400):
        tree = parse(text, SCOPE)
        assert parse(tree.text, SCOPE) == tree, text


FLOATS = st.recursive(
    st.sampled_from(["score", "k_idx", "q_pos", "soft", "slopes[head]", "2", "0.5", "w", "-1.5"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), inner).map(
            lambda parts: f"({parts[0]}) {parts[1]} ({parts[2]})"
        ),
        st.tuples(st.sampled_from(["tanh", "abs", "exp", "-", "sqrt"]), inner).map(
            lambda parts: f"{parts[0]}({parts[1]})"
        ),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(
            lambda parts: f"{parts[0]}({parts[1]}, {parts[2]})"
        ),
        st.tuples(inner, inner, inner).map(lambda p: f"where({p[0]} <= {p[1]}, {p[2]}, {p[0]})"),
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(FLOATS)
def test_scores_at_random_read_back_as_what_they_are(text: str) -> None:
    try:
        tree = read("score", text, used(text, SCOPE)).tree
    except ExpressionError:  # a division by 0, say
        return
    again = make.as_float(parse(tree.text, SCOPE))
    assert again == tree and hash(again) == hash(tree)


def test_keys_of_today_are_those_of_tomorrow() -> None:
    """A key is in slugs and in caches: whoever changes the text of an expression changes these."""
    keys = {word.name: word.expression.key for word in words.MASKS.values()}
    assert keys == {
        "full": "ef04672c1c",
        "causal": "e68f494054",
        "causal_by_sequence": "ec6b9a2e9b",
        "window": "9dd3685009",
        "chunked": "d7b6e8a999",
        "prefix": "8f280a6e08",
        "document": "245ef0cf2a",
    }
    assert words.SCORES["softcap"].with_constants(softcap=50).text == "50.0*tanh(0.02*score)"


def test_what_a_call_gives_is_in_the_key() -> None:
    text = "q_pos - k_idx < w"
    keys = {
        read("mask", text, scope_of({"w": said}, {})).key
        for said in (8, 9, {"dtype": "int32"}, {"dtype": "int32", "min": 1})
    }
    assert len(keys) == 4


def test_masks_are_joined_where_they_declare_alike() -> None:
    window, causal = (words.MASKS[name].expression for name in ("window", "causal"))
    joined = window & causal
    assert joined.arguments == ("window_left", "window_right")
    scope = {given.name: given for given in window.given}
    assert joined == read("mask", f"({window}) and ({causal})", scope)
    other = read("mask", "k_idx <= q_pos + chunk", scope_of({"chunk": {"dtype": "int32"}}, {}))
    with pytest.raises(ExpressionError, match="two masks declare chunk, and not alike"):
        all_of(words.MASKS["chunked"].expression, other)
    with pytest.raises(ExpressionError, match="is a score"):
        all_of(causal, words.SCORES["plain"].expression)


# ---- refusals ------------------------------------------------------------------------------------

REFUSED = [
    ("mask", "0 <= q_pos - k_idx < windw", "column 22: windw is not known"),
    ("mask", "q_pso <= k_idx", "column 1: q_pso is not known; did you mean q_pos?"),
    ("mask", "score <= k_idx", r"a mask cannot depend on score: put where\(…, score, -inf\)"),
    ("mask", "k_idx <= 0.5 * q_idx", r"0.5\*q_idx is a float; write q_idx // 2"),
    ("mask", "k_idx <= slopes[head]", "a mask counts in whole numbers"),
    ("mask", "k_idx - q_pos", "a mask is true or false: compare k_idx - q_pos"),
    ("mask", "4096 * q_idx * batch <= k_idx", r"batch\*q_idx may pass 2\*\*31"),
    ("mask", "128 * w * w <= k_idx", r"w\*w may pass 2\*\*31: declare min and max of w"),
    ("mask", "any_row[q_idx - 1] <= k_idx", "any_row has as many columns as len_q says; q_idx - 1"),
    ("mask", "any_row[k_idx] <= 3", "k_idx may be outside: clamp it"),
    ("mask", "any_row <= k_idx", r"column 1: any_row is a table: any_row\[len_q\]"),
    ("mask", "any_row[q_idx, 0] <= k_idx", "any_row has 1 dimension: len_q"),
    ("mask", "k_idx // n <= 3", "// takes a divisor above 0, and n may be less"),
    ("mask", "k_idx % 0 <= 3", "column 1: % takes a divisor above 0"),
    ("mask", "k_idx <= q_pos & w <= 3", "column 10: write and"),
    ("mask", "~k_idx <= 3", "column 1: write not"),
    ("mask", "k_idx and q_idx", "and takes truths, and k_idx is a number; compare it"),
    (
        "mask",
        "(k_idx <= 3) + 1 <= 2",
        r"column 1: \+ takes numbers, and k_idx <= 3 is true or false",
    ),
    ("mask", "k_idx ** 2 <= q_idx", r"powers are of floats; write k_idx \* k_idx"),
    ("mask", "k_idx <= 2147483648", "column 10: whole numbers are below 2"),
    ("mask", "min(k_idx) <= 3", "column 1: min takes 2 or more, not 1"),
    ("mask", "tanh <= k_idx", "column 1: tanh is a function"),
    ("mask", "floor(k_idx) <= 3", "column 1: floor is not known"),
    ("mask", "", "column 1: this is no expression"),
    ("mask", "k_idx <=", "this is no expression"),
    (
        "score",
        "score // 2",
        "score's derivative would be nought or nowhere: // takes whole numbers",
    ),
    ("score", "score <= 1", "a score is a number"),
    ("score", "score + (k_idx <= 3)", r"\+ takes numbers, and k_idx <= 3 is true or false"),
    ("score", "score ** k_idx", "an exponent is a whole number that is written out"),
    ("score", "score ** 9", "exponents go from 0 to 8"),
    ("score", "score / 0", "column 1: this divides by 0"),
    ("score", "inf - inf", "this has no value"),
    ("score", "log(-1)", r"log\(-1.0\) has no value"),
    ("score", "1e39 * score", "1e\\+39 is beyond what fp32 holds"),
    (
        "score",
        "where(k_idx <= 3, score, -1e30)",
        "-1e\\+30 would be a score like any other; write -inf",
    ),
    (
        "score",
        "score + bias[head, k_idx - q_pos + 128]",
        "bias has 257 columns; k_idx - q_pos \\+ 128",
    ),
    ("score", "score + bias[head, clamp(k_idx - q_pos, -128, 129) + 128]", "clamp it"),
    ("score", "score + bias[head, 0.5]", "bias is read at whole numbers, and 0.5 is none"),
]


@pytest.mark.parametrize(("kind", "text", "message"), REFUSED)
def test_what_is_refused_says_why_and_where(kind: str, text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        read(kind, text, used(text, SCOPE))


def test_an_index_that_is_clamped_to_its_table_is_taken() -> None:
    for index in (
        "clamp(k_idx - q_pos, -128, 128) + 128",
        "min(max(k_idx - q_pos + 128, 0), 256)",
        "abs(k_idx - q_pos) % 257",
        "where(k_idx <= q_pos, 0, 256)",
    ):
        canonical("score", f"score + bias[head, {index}]")
    scope = scope_of(
        {"buckets": {"dtype": "int32", "min": 1}},
        {"by_bucket": {"dtype": "float32", "over": ["head", "buckets"]}},
    )
    for index in ("min(abs(q_pos - k_idx), buckets - 1)", "abs(q_pos - k_idx) % buckets"):
        expression = read("score", f"score + by_bucket[head, {index}]", scope)
        assert expression.arguments == ("buckets", "by_bucket")


def test_what_is_declared_is_of_use() -> None:
    with pytest.raises(ExpressionError, match="w is declared, and nothing uses it"):
        read("mask", "k_idx <= q_pos", scope_of({"w": {"dtype": "int32"}}, {}))
    read("mask", "k_idx <= q_pos", scope_of({"w": 8}, {}))  # a constant may be


BAD_NAMES = (
    "q_idx",
    "score",
    "window",
    "q",
    "scale",
    "class",
    "if",
    "int",
    "Big",
    "_a",
    "min",
    "inf",
)


@pytest.mark.parametrize("name", [*BAD_NAMES, "a-b", "a" * 41, "", "é", "match", "template"])
def test_names_that_mean_something_else_are_not_declared(name: str) -> None:
    with pytest.raises(ExpressionError):
        scope_of({name: 3}, {})


@pytest.mark.parametrize(
    ("parameters", "tables"),
    [
        ({"w": "8"}, {}),
        ({"w": {"dtype": "int64"}}, {}),
        ({"w": {"dtype": "int32", "least": 3}}, {}),
        ({"w": {"dtype": "int32", "min": 3, "max": 2}}, {}),
        ({"w": {"dtype": "int32", "min": 0.5}}, {}),
        ({"w": {"dtype": "float32", "min": float("nan")}}, {}),
        ({"w": 2**31}, {}),
        ({}, {"t": 3}),
        ({}, {"t": {"dtype": "int32"}}),
        ({}, {"t": {"dtype": "int32", "over": []}}),
        ({}, {"t": {"dtype": "int32", "over": ["rows"]}}),
        ({}, {"t": {"dtype": "int32", "over": [0]}}),
        ({}, {"t": {"dtype": "int32", "over": [True]}}),
        ({}, {"t": {"dtype": "float32", "over": ["head"], "rising": True}}),
        ({"t": 3}, {"t": {"dtype": "int32", "over": ["head"]}}),
        ({"w": {"dtype": "int32"}}, {"t": {"dtype": "int32", "over": ["w"]}}),  # w may be 0
    ],
)
def test_a_declaration_that_says_nothing_sensible_is_refused(parameters, tables) -> None:
    with pytest.raises(ExpressionError):
        scope_of(parameters, tables)


def test_no_argument_of_a_call_can_be_declared() -> None:
    calls = ("attention", "attention_fp8", "attention_varlen", "attention_decode", "combine")
    prepared = ("prepare", "prepare_varlen", "prepare_decode", "pick", "quantize")
    for call in (*calls, *prepared):
        for name in inspect.signature(getattr(fagen, call)).parameters:
            known = name in ("batch", "heads", "head") or RESERVED.fullmatch(name)
            assert known, f"{name} of {call}"
            with pytest.raises(ExpressionError):
                declare.check_name(name)


# ---- hostile text --------------------------------------------------------------------------------

HOSTILE = [
    "__import__('os').getcwd()",
    "().__class__.__bases__[0].__subclasses__()",
    "k_idx.real",
    "(lambda: k_idx)()",
    "[k_idx for k_idx in (1, 2)]",
    "f'{k_idx}'",
    "k_idx if q_idx else 3",
    "(k_idx := 3) <= 4",
    "min(*q_idx)",
    "min(k_idx, key=q_idx)",
    "eval(k_idx)",
    "k_idx @ q_idx",
    "k_idx << 3 <= 4",
    "k_idx is 3",
    "k_idx in (1, 2)",
    "k_idx <= 'a'",
    "k_idx <= 1j",
    "k_idx <= ...",
    "k_idx <= None",
    "any_row[1:2] <= 3",
    "k_idx <= 3 # and more",
    "k_idx <= 3\\\n and 1",
    "ｋ_idx <= 3",
    "k_idx <= 3; q_idx",
    "k_idx <= 3) or (1",
    "k_idx\x00 <= 3",
    "\x1b[31m",
    "await k_idx",
    "yield",
    "9**9**9**9 <= k_idx",
    "(" * 300 + "k_idx" + ")" * 300 + " <= 3",
    "-" * 990 + "1",
    "not " * 240 + "k_idx <= 3",
    "k_idx <= " + "9" * 900,
    "1" + "+1" * 499,
    "k_idx <= " + "min(" * 80 + "1" + ",1)" * 80,
    "k_idx<1" + " and k_idx<1" * 82,
    "k_idx <= q_pos" + " " * 1000,
    "where(" * 30 + "k_idx==q_idx" + ",k_idx,1)==2" * 30,
    "(q_idx+k_idx+w+n+c)*(q_idx+k_idx+w+n+c)*(q_idx+k_idx+w+n+c)*(q_idx+w)<=3",
    "[" * 60 + "]" * 60,
    "any_row[" * 90,
    "{**k_idx}",
    "k_idx <= 0x" + "f" * 800,
    "a" * 1000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:24])
def test_hostile_text_is_refused_at_once_and_without_a_trace_of_it(text: str) -> None:
    best = 1.0
    for _ in range(3):
        start = time.perf_counter()
        with pytest.raises(ExpressionError) as refusal:
            read("mask", text, SCOPE)
        best = min(best, time.perf_counter() - start)
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 400
    assert best < 0.01


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.text("kqp_idxswn0123456789.,()[]+-*/%<>=!&| minaxbor", max_size=60) | st.text(max_size=20)
)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        read("mask", text, SCOPE)
    except ExpressionError as error:
        assert str(error).isprintable()


# ---- functions -----------------------------------------------------------------------------------


def test_a_function_is_the_text_that_it_would_be() -> None:
    @mask
    def window(q_pos, k_idx, *, width: int32(min=1, max=1 << 20)):
        return (k_idx <= q_pos) & (q_pos - k_idx < width)

    said = scope_of({"width": {"dtype": "int32", "min": 1, "max": 1 << 20}}, {})
    assert window == read("mask", "0 <= q_pos - k_idx < width", said)
    assert window.key == read("mask", "0 <= q_pos - k_idx < width", said).key

    @score
    def t5(score, head, q_pos, k_idx, *, bias: Table("float32", "head", 257, gradient=True)):
        return score + bias[head, clamp(k_idx - q_pos, -128, 128) + 128]

    text = "score + bias[head, clamp(k_idx - q_pos, -128, 128) + 128]"
    assert t5 == read("score", text, {"bias": SCOPE["bias"]})

    cap = numpy.float32(50)  # of the closure: a constant

    @score
    def capped(score, *, c=cap, d: int = 2, e: float32(min=1.0)):
        return tanh(score / c) * c + d * e

    said = scope_of({"e": {"dtype": "float32", "min": 1.0}}, {})
    assert capped == read("score", "50.0 * tanh(score / 50) + 2 * e", said)

    @mask
    def everything(q_idx, k_idx, q_pos, *, w: "int32(min=0)", any_row: "Table('int32', 'len_q')"):
        near = abs(q_pos - k_idx) <= 3 + w
        return ~(near | (k_idx == 1)) & (minimum(k_idx, w) % 3 != 0) | (any_row[q_idx] > k_idx)

    tables = {"any_row": {"dtype": "int32", "over": ["len_q"]}}
    said = scope_of({"w": {"dtype": "int32", "min": 0}}, tables)
    near = "abs(q_pos - k_idx) <= 3 + w or k_idx == 1"
    text = f"not ({near}) and min(k_idx, w) % 3 != 0 or any_row[q_idx] > k_idx"
    assert everything == read("mask", text, said)


def test_a_dimension_of_a_table_may_be_a_number_that_a_call_gives() -> None:
    over = Table("float32", "head", "buckets")

    @score
    def by_bucket(score, head, k_idx, *, by: over, buckets: int32(min=1)):
        return score + by[head, k_idx % buckets]

    assert by_bucket.arguments == ("buckets", "by")
    assert by_bucket.declarations.endswith("by: float32[head, buckets]")


def test_functions_at_random_are_the_texts_that_they_would_be() -> None:
    names = {
        **{name: Traced(node) for name, node in LANGUAGE.items()},
        **{name: Traced(EVERYTHING[name]) for name in PARAMETERS},
        **{name: TracedTable(EVERYTHING[name]) for name in TABLES},
        "min": minimum,
        "max": maximum,
        "where": where,
        "abs": abs,
    }
    traced = 0
    for seed in range(300):
        text = Writer(random.Random(seed)).number(3, True)
        value = eval(text, {"__builtins__": {}}, names)
        traced += isinstance(value, Traced)
        assert getattr(value, "node", None) == parse(text, SCOPE) or isinstance(value, int)
    assert traced > 250


def test_operators_work_either_way_round() -> None:
    @mask
    def m(q_idx, k_idx):
        return (10 - k_idx <= 3 * q_idx) & (100 // (q_idx + 1) >= k_idx) & (1 + k_idx > -q_idx)

    assert m == read("mask", "10-k_idx <= 3*q_idx and 100//(q_idx+1) >= k_idx and 1+k_idx > -q_idx")

    @score
    def s(score, k_idx):
        return 1 / score - 2**3 * score**2 + where(k_idx < 3, 1.0, 2 - score)

    assert s == read("score", "1/score - 8*score**2 + where(k_idx < 3, 1.0, 2 - score)")


def _if(q_pos, k_idx):
    return k_idx if k_idx <= q_pos else q_pos


def _chain(q_pos, k_idx):
    return 0 <= k_idx <= q_pos


def _and(q_pos, k_idx):
    return k_idx <= q_pos and k_idx >= 3


def _builtin(q_pos, k_idx):
    return max(k_idx, q_pos) <= 3


def _range(k_idx):
    return [3, 4, 5][k_idx] <= 3


def _tensor(q_pos, k_idx):
    return k_idx <= torch.arange(3) + q_pos


def _array(q_pos, k_idx):
    return numpy.arange(3) + k_idx <= q_pos


def _indexed(q_idx, k_idx):
    return torch.arange(9)[q_idx] <= k_idx


def _nothing(k_idx):
    k_idx <= 3  # noqa: B015


def _undeclared(k_idx, *, width):
    return k_idx <= width


def _taken(k_idx, *, scale: int32):
    return k_idx <= scale


def _many(k_idx):
    for _ in range(10_000):
        k_idx = k_idx * k_idx + 1
    return k_idx <= 3


def _star(*args):
    return args[0] <= 3


def _text(k_idx):
    return k_idx <= "3"


def _table(k_idx, *, t: Table("int32", "len_q")):
    return t <= k_idx


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_if, "a traced value has no truth yet: write &, |, ~ or fagen.where"),
        (_chain, "has no truth yet"),
        (_and, "has no truth yet"),
        (_builtin, "has no truth yet"),
        (_range, "a traced value is no number yet"),
        (_tensor, "_tensor: a tensor in a closure: pass it as a Table argument"),
        (_array, "_array: a tensor in a closure"),
        (_indexed, "a traced value is no number yet"),
        (_nothing, "_nothing: returns nothing"),
        (_undeclared, "width is no name of the language, so it is annotated with fagen.int32"),
        (_taken, "scale is an argument of fagen's calls"),
        (_many, "is more than 64 products|is too large"),
        (_star, "args has no name that a call could give it by"),
        (_text, "str is nothing of the language"),
        (_table, "t is a table: index it|not supported"),
    ],
)
def test_what_cannot_be_traced_says_what_to_write(function: Callable, message: str) -> None:
    with pytest.raises((ExpressionError, TypeError), match=message):
        mask(function)


def test_writers_of_these_tests_write_all_there_is() -> None:
    text = " ".join(Writer(random.Random(n)).mask(3) for n in range(300))
    for word in ("k_idx", "//", "%", "min", "max", "abs", "where", "and", "or", "not", "rises"):
        assert word in text
