"""What a Plan becomes: text that is the same every time, and a hash that means the code."""

import hashlib
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from jinja2 import UndefinedError

from fagen import registry
from fagen.errors import OverBudget, ToolchainError
from fagen.paths import locate
from fagen.process import run
from fagen.render import (
    BINDING,
    HASH_WORD,
    HOST_MARK,
    KERNEL,
    Source,
    environment,
    formatted,
    kernel_text,
    render,
    token_hash,
)
from tests.backward_helpers import SPREAD as BACKWARD
from tests.combine_helpers import SPREAD as COMBINE
from tests.often import some
from tests.quantize_helpers import SPREAD as QUANTIZE
from tests.strategies import fp8_schedules, quantizers, schedules

FIRST = "fwd_fp16_d128_causal_m128n128"
QUANTISER = "quant_fp16_d128_rot"


def rendered(slug: str) -> Source:
    return render(registry.plan_of(slug))


@pytest.fixture(scope="module", params=[FIRST, QUANTISER])
def first(request: pytest.FixtureRequest) -> Source:
    return rendered(request.param)


def test_rendering_again_gives_the_same_text(first):
    code = (
        "import hashlib; from fagen.registry import from_slug, plan\n"
        "from fagen.render import render\n"
        f"source = render(plan(from_slug({first.slug!r})))\n"
        "print(hashlib.sha256((source.kernel + source.binding).encode()).hexdigest())"
    )
    elsewhere = run(
        [sys.executable, "-c", code],
        cwd=locate("cli.py").parent,
        env={"PYTHONHASHSEED": "7", "LC_ALL": "C"},
    )
    mine = hashlib.sha256((first.kernel + first.binding).encode()).hexdigest()
    assert elsewhere.stdout.strip() == mine, elsewhere.stderr


EVERY = (FIRST, QUANTISER, *BACKWARD, *COMBINE, *QUANTIZE)


@pytest.mark.parametrize("slug", some(EVERY, (FIRST, QUANTISER, *EVERY[2::4])))
def test_the_text_is_laid_out_complete_and_says_its_hash_once(slug):
    source = rendered(slug)
    assert source.kernel.count(f'"{source.hash}"') == 1
    assert HASH_WORD not in source.kernel + source.binding
    assert token_hash(source.kernel.replace(source.hash, HASH_WORD)) == source.hash
    assert f"int fagen_{slug}(" in source.kernel
    for text in (source.kernel, source.binding):
        assert formatted(text) == text
        assert text.endswith("\n") and "\t" not in text and "\n\n\n" not in text
        assert not re.search(r"[ ]+$", text, re.MULTILINE)
        assert "{%" not in text and "{{ " not in text
    assert not re.search(r"\b(None|True|False)\b", source.kernel)


def test_two_schedules_have_two_hashes(first):
    assert rendered(first.slug.replace("fp16", "bf16")).hash != first.hash


@settings(max_examples=60, deadline=None)
@given(schedules() | fp8_schedules() | quantizers())
def test_every_plan_has_words_for_all_its_choices_and_says_nothing_in_vain(schedule):
    try:
        worked = registry.plan(schedule)
    except OverBudget:
        return
    kernel = kernel_text(worked)
    binding = environment().get_template(BINDING).render(plan=worked)
    schema = re.compile(r'"[^"]*->[^"]*"')  # torch's, whose words are Python's
    for text in (kernel, schema.sub("", "\n".join(re.findall(r"^[^/].*", binding, re.M)))):
        assert "{%" not in text and "{#" not in text
        assert "None" not in text and "True" not in text and "False" not in text
    code = re.sub(r"//[^\n]*", "", kernel)
    named = set(re.findall(r"\bconstexpr (?:const )?\w+ (k[A-Z]\w*)\b", code))
    named |= set(re.findall(r"__forceinline__ [\w:<>, ]*?[&* ](\w+)\(", code))
    assert len(named) > 20
    assert {name for name in named if len(re.findall(rf"\b{name}\b", code)) == 1} == set()


@pytest.mark.parametrize(
    "slug",
    [
        "fwd_e4m3_d128_full_m128n224",
        "fwd_e4m3_d64_causal_m128n256",
        "fwd_e4m3_d128_full_m128n128_lazymax",
        "fwd_e4m3_d128_full_m128n128_t4",
        "fwd_fp16_d128_full_m128n128_onlinemax_t8",
        "quant_fp16_d48_rot",
    ],
)
def test_numbers_are_what_cpp_reads_as_floats(slug):
    kernel = rendered(slug).kernel
    assert not re.search(r"(?<![.\w])(?<!\de[-+])\d+f\b", kernel)


def test_a_name_that_the_plan_lacks_is_an_error():
    with pytest.raises(UndefinedError, match="blok_n"):
        environment().from_string("{{ plan.blok_n }}").render(plan=registry.plan_of(FIRST))


def test_a_missing_formatter_is_said_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match="pip install clang-format"):
        formatted("int x;")


# ---- the hash -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("int x = 1;  // why\n", "int  x=1;"),
        ("int x /* which */ = 1;", "int x =\n\n1;"),
        ("f(a,b)", "f( a, b )"),
        ("#define A \\\n  1\nint x;", "#define A 1\n\n\nint x;"),
        ("a << b", "a<<b"),
    ],
)
def test_layout_and_comments_do_not_change_the_hash(text, other):
    assert token_hash(text) == token_hash(other)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("int x = 1;", "int x = 2;"),
        ("intx;", "int x;"),
        ("a + +b", "a ++b"),
        ("a < < b", "a << b"),
        ('"a  b"', '"a b"'),
        ('"// a"', '"// b"'),
        ('R"(// a)"', 'R"(// b)"'),
        ("'\"' // a", "'\"' a"),
        ("1'000 // a", "1'000 a"),
        ("#define A\n(1)", "#define A (1)"),
        ("0x1p-3", "0x1p - 3"),
    ],
)
def test_everything_else_does(text, other):
    assert token_hash(text) != token_hash(other)


def test_a_comment_in_a_template_leaves_the_hash_and_a_number_changes_it(first):
    commented = first.kernel.replace(first.hash, HASH_WORD).replace("\n\n", "\n// said\n\n")
    assert token_hash(commented) == first.hash
    number = re.search(r"constexpr int k\w+ = \d+", first.kernel)[0]
    altered = first.kernel.replace(first.hash, HASH_WORD).replace(number, f"{number}1")
    assert token_hash(altered) != first.hash


def test_templates_are_found_in_a_wheel_and_in_a_checkout():
    for name in (BINDING, KERNEL):
        assert (Path(locate("templates")) / name).exists()


def test_the_launcher_has_a_hash_of_its_own(first):
    kernel, mark, host = first.kernel.partition(HOST_MARK)
    assert mark and "__global__" in kernel and "__global__" not in host
