"""C++ of expressions, compiled for a CPU, gives what Python does: below 0 too."""

import math
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from fagen.expr import words
from fagen.expr.cpp import Names, helpers, printed
from fagen.expr.declare import scope_of
from fagen.expr.evaluate import evaluate
from fagen.expr.parse import parse, read
from fagen.expr.ranges import ranges
from fagen.expr.tree import BOOL, Lookup, Name, Node
from fagen.vocab import MASKS
from tests.expr_helpers import EVERYTHING, Writer, by_python, drawn, masks
from tests.programs import answers, compiled

STAND_INS = """\
#define __expf std::exp
#define __logf std::log
inline float tanh_approx(float x) { return std::tanh(x); }
inline float sqrt_approx(float x) { return std::sqrt(x); }
inline float __fdividef(float x, float y) { return x / y; }
"""
PROGRAM = """\
{helpers}
int main() {{
  for (int x[12];;) {{
    for (int& number : x) {{
      if (std::scanf("%d", &number) != 1) {{
        return 0;
      }}
    }}
    const auto [which, row, key, seqlen_q, seqlen_k, head, w, c, n, p, r, a] = x;
    const int per_batch[1] = {{p}}, batch = 0;
    std::vector<int> rises(seqlen_q + 1, r), any_row(seqlen_q + 1, a);
    switch (which) {{
{cases}
    }}
  }}
}}
"""
NAMES = Names.of(read("mask", "k_idx <= 1"), **{name: name for name in EVERYTHING})


def asked(dice: random.Random) -> dict[str, Any]:
    m, n = dice.choice([(5, 7), (9, 2), (1 << 20, 3), (4, 1 << 24)])
    given = drawn(dice, m if m < 10 else 1, n)
    row = dice.choice([0, 1, m - 1])
    given |= {"len_q": m, "q_idx": row, "k_idx": dice.choice([0, 1, n - 1])}
    given["rises"] = {row: dice.randint(-3, 9)}
    given["any_row"] = {row: dice.randint(-(1 << 20), 1 << 20)}
    return given


def test_whole_numbers_and_truths_compile_to_what_python_says(tmp_path: Path) -> None:
    texts = [Writer(random.Random(n)).number(3, True) for n in range(90)]
    texts += [text for text, _ in masks(3, 60)]
    nodes, cases, questions, expected = [], [], [], []
    for text in texts:
        node = parse(text, EVERYTHING)
        which = len(nodes)
        nodes.append(node)
        cases.append(f'case {which}: std::printf("%d\\n", int({printed(node, NAMES)})); break;')
        for seed in range(8):
            given = asked(random.Random(f"{which} {seed}"))
            value = by_python(text, given)
            if abs(value) >= 2**31 or not fits(node, given):
                continue
            assert evaluate(node, given) == value, text
            names = ("q_idx", "k_idx", "len_q", "len_k", "head", "w", "c", "n")
            table = (given["per_batch"][0], *given["rises"].values(), *given["any_row"].values())
            questions.append((which, *(given[name] for name in names), *table))
            expected.append(str(int(value)))
    assert len(questions) > 600 and any(value.startswith("-") for value in expected)
    code = PROGRAM.format(helpers=helpers(*nodes), cases="\n".join(cases))
    assert answers(compiled(code, tmp_path), questions) == expected


def fits(node: Node, given: dict[str, Any]) -> bool:
    """Whether no part is beyond 32 bits: what a mask is refused for, at random sizes."""
    return all(abs(evaluate(part, given)) < 2**29 for part in node.walk() if part.type != BOOL)


FLOATS = [
    "score",
    "-score*0.1 + 3",
    "50.0 * tanh(score / 50)",
    "1 / (1 + exp(-score))",
    "sqrt(abs(score)) + log(score * score + 1)",
    "where(score < 0.5, score, -inf)",
    "where(not score < 0.5, max(score, 0.25), min(score, -1, k_idx))",
    "score + 0.5 * (k_idx - q_pos) - 1e-05 * q_pos",
    "score * score * score / (2 + score**2)",
    "abs(k_idx - q_pos) * -0.125 + score",
    "(score - 1) * (score - 2) * 3",
    "score + (k_idx // 3 - (q_pos - 4) // 3) % 5",
    "inf",
]


def test_floats_compile_to_what_python_says(tmp_path: Path) -> None:
    trees = [read("score", text).tree for text in FLOATS]
    cases = "\n".join(
        f'case {i}: std::printf("%.9g\\n", double({printed(tree)})); break;'
        for i, tree in enumerate(trees)
    )
    code = f"""{STAND_INS}{helpers(*trees)}
int main() {{
  int which, row, key, seqlen_q, seqlen_k;
  for (float score; std::scanf("%d %d %d %d %d %f", &which, &row, &key, &seqlen_q, &seqlen_k,
                               &score) == 6;) {{
    switch (which) {{
{cases}
    }}
  }}
}}
"""
    questions, values = [], []
    for which, tree in enumerate(trees):
        for score in (-3.5, -0.0, 0.3, 0.5, 2.75, 60.0):
            for row, key, m, n in ((0, 0, 5, 3), (4, 6, 5, 7), (1, 2, 9, 4)):
                sizes = {"q_idx": row, "k_idx": key, "len_q": m, "len_k": n}
                exact = struct.unpack("f", struct.pack("f", score))[0]
                questions.append((which, row, key, m, n, score))
                values.append(evaluate(tree, {**sizes, "score": exact}))
    lines = answers(compiled(code, tmp_path), questions)
    for line, value, question in zip(lines, values, questions, strict=True):
        same = float(line) == value or math.isclose(float(line), value, rel_tol=2e-6, abs_tol=1e-6)
        assert same, (FLOATS[question[0]], question, line, value)


def test_ends_of_named_masks_compile_to_themselves(tmp_path: Path) -> None:
    lines, questions, expected = [], [], []
    for which, word in enumerate(words.MASKS.values()):
        names = Names.of(word.expression)
        given = {name: f"p{i}" for i, name in enumerate(p.name for p in word.expression.parameters)}
        assert given.items() <= names.names.items()
        found = word.ranges
        first, last = (
            printed(end, names) if end else default
            for end, default in ((found.first, "0"), (found.last, "seqlen_k"))
        )
        lines.append(f'case {which}: std::printf("%d %d\\n", {first}, {last}); break;')
        for seed in range(40):
            dice = random.Random(f"{which} {seed}")
            m, n = dice.randint(1, 30), dice.randint(0, 30)
            row, p0, p1 = dice.randrange(m), dice.randint(1, 9), dice.randint(1, 9)
            numbers = (dice.randint(-3, 20), dice.randint(-3, 20))
            values: dict[str, Any] = dict(zip(given, (p0, p1), strict=False))
            for table, number in zip(word.expression.tables, numbers, strict=False):
                values[table.name] = [number] if len(table.over) == 1 else [[number] * m]
            sizes = {"q_idx": row, "len_q": m, "len_k": n, "batch": 0}
            questions.append((which, row, m, n, p0, p1, *numbers))
            expected.append("{} {}".format(*found.keys({**sizes, **values})))
    ends = [end for word in words.MASKS.values() for end in (word.ranges.first, word.ranges.last)]
    code = f"""{helpers(*filter(None, ends))}
int main() {{
  const int batch = 0;
  for (int which, row, seqlen_q, seqlen_k, p0, p1, a, b; std::scanf("%d %d %d %d %d %d %d %d",
       &which, &row, &seqlen_q, &seqlen_k, &p0, &p1, &a, &b) == 8;) {{
    const std::vector<int> t0(100, a), t1(100, b);
    switch (which) {{
{chr(10).join(lines)}
    }}
  }}
}}
"""
    assert answers(compiled(code, tmp_path), questions) == expected


# ---- the text itself -----------------------------------------------------------------------------


def test_causal_is_the_text_that_kernels_have() -> None:
    last = words.MASKS["causal"].ranges.last
    assert last and printed(last) == "row + seqlen_k - seqlen_q + 1" == MASKS["causal"].last


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("q_idx // 4", "row / 4"),
        ("q_pos // 4", "floor_div(row + seqlen_k - seqlen_q, 4)"),
        ("q_idx % w2", "row % p0"),
        ("(q_idx - w2) % 3", "floor_mod(row - p0, 3)"),
        ("min(q_idx, w2, 3)", "min(min(3, row), p0)"),
        ("k_idx - (q_pos - k_idx)", "2 * key - (row + seqlen_k - seqlen_q)"),
        ("by_head[head]", "t0[head]"),
        ("by_row[batch, q_idx]", "t0[int64_t(batch) * seqlen_q + row]"),
        ("where(q_idx <= 3 and head <= 4, 1, w2)", "head <= 4 && row <= 3 ? 1 : p0"),
        ("1 + where(q_idx <= 3, 1, w2)", "(row <= 3 ? 1 : p0) + 1"),
    ],
)
def test_it_reads_as_a_person_would_write_it(text: str, expected: str) -> None:
    scope = scope_of(
        {"w2": {"dtype": "int32", "min": 1}},
        {
            "by_head": {"dtype": "int32", "over": ["head"]},
            "by_row": {"dtype": "int32", "over": ["batch", "len_q"]},
        },
    )
    own = {name: given for name, given in scope.items() if name in text}
    tree = parse(text, scope)
    mask = read("mask", f"{text} <= k_idx", own)
    assert printed(tree, Names.of(mask)) == expected


def test_no_name_of_a_user_is_in_it() -> None:
    for word in (*words.MASKS.values(), *words.SCORES.values()):
        text = printed(word.expression.tree, Names.of(word.expression))
        given = {n.name for n in word.expression.tree.walk() if isinstance(n, Name)}
        given |= {n.table.name for n in word.expression.tree.walk() if isinstance(n, Lookup)}
        own = given - {"head", "batch", "score"}
        spelled = set("".join(c if c.isalnum() or c == "_" else " " for c in text).split())
        assert not own & spelled


def test_a_table_is_read_as_a_kernel_wants_it_to_be() -> None:
    word = words.MASKS["document"]
    names = Names(Names.of(word.expression).names, lambda table, at: f"{table.name}({at[1]})")
    first = ranges(word.expression).first
    assert first and printed(first, names) == "first(row)"
