"""What fagen.recording writes of a run of any public calls, and what it refuses or leaves out."""

import itertools
import random
import sys
import tomllib
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

import fagen
from fagen.errors import FagenError, ScheduleError
from fagen.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache
from fagen.problem import Problem, Sizes, VarlenSizes, VarlenTotals
from fagen.process import run
from fagen.runtime.call import DOORS
from fagen.search.files import read_spaces
from fagen.search.recording import MOST_SIZES, _add, read_recording, text_of
from tests import cli_helpers, tensors
from tests.attention_helpers import qkv, quantised
from tests.fresh import without_kernels

HALF = Problem("fp16", 64, 64, "causal", None, "", 0)
FULL = replace(HALF, mask="full")
PACKED = replace(HALF, lengths="varlen")
FP8 = Problem("e4m3", 64, 64, "full", None, "columns", 32)
PACKED_FP8 = Problem("e4m3", 64, 64, "full", None, "rows", 0, lengths="varlen")
DECODED, DECODED_FULL = replace(HALF, kind="decode"), replace(FULL, kind="decode")
OFFSETS = torch.tensor([0, 30, 35, 35, 60], dtype=torch.int32)
USED = torch.tensor([3, 90], dtype=torch.int32)
normal = partial(tensors.normal, dtype=torch.float16)

Call = Callable[[], object]
Counts = dict[Problem, dict[Sizes, int]]


def dense(problem: Problem, *sizes: int) -> tuple[Call, Problem, Sizes]:
    """A call of fagen.attention, and what is written of it."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[problem.dtype]
    batch, heads, kv_heads, queries, keys = sizes
    q = tensors.normal(batch, queries, heads, problem.head_dim, dtype=dtype)
    k = tensors.normal(batch, keys, kv_heads, problem.head_dim, dtype=dtype)
    causal = problem.mask == "causal"
    return lambda: fagen.attention(q, k, k, causal=causal), problem, Sizes(*sizes)


def packed(q: int = 60, k: int = 60, offsets: Tensor = OFFSETS, **named: Any) -> Any:
    """Call fagen.attention_varlen."""
    tensors = normal(q, 4, 64), normal(k, 2, 64), normal(k, 2, 64)
    return fagen.attention_varlen(*tensors, offsets, causal=True, **named)


def totals(batch: int, tokens: int, longest: int, *keys: int) -> VarlenTotals:
    tokens_k, longest_k = keys or (tokens, longest)
    return VarlenTotals(batch, 4, 2, longest, longest_k, tokens, tokens_k)


def decoded(queries: int = 1, keys: int = 100, **named: Any) -> Any:
    """Call fagen.attention_decode."""
    k = normal(2, keys, 2, 64)
    return fagen.attention_decode(normal(2, queries, 8, 64), k, k, **named)


def packed_fp8(out_dtype: torch.dtype) -> None:
    (q, of_q), (k, of_k) = (fagen.quantize(normal(1, 60, heads, 64)) for heads in (4, 2))
    descales = {"q_descale": of_q, "k_descale": of_k, "v_descale": of_k}
    fagen.attention_varlen(q[0], k[0], k[0], OFFSETS, out_dtype=out_dtype, **descales)


def of_cache() -> None:
    """FlashAttention's own functions: of a cache's lengths the host knows its room."""
    q, k, cache = normal(60, 4, 64), normal(60, 2, 64), normal(4, 50, 2, 64)
    flash_attn_varlen_func(q, k, k, OFFSETS, OFFSETS, 30, 30, causal=True)
    lengths = torch.full((4,), 40, dtype=torch.int32)
    how: dict[str, Any] = dict(cu_seqlens_q=OFFSETS, max_seqlen_q=30, causal=True)
    flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, **how)
    kv = normal(2, 100, 2, 64)
    flash_attn_with_kvcache(normal(2, 1, 8, 64), kv, kv, cache_seqlens=USED)


def counted(*calls: tuple[Call, Problem, Sizes]) -> tuple[list[Call], Counts]:
    """Each of these calls once more than the one before, and what is written of all."""
    counts: Counts = {}
    for times, (_, problem, sizes) in enumerate(calls, 1):
        counts.setdefault(problem, {})[sizes] = times
    return [call for times, (call, *_) in enumerate(calls, 1) for _ in range(times)], counts


ATTENTION = [
    dense(HALF, 1, 4, 2, 40, 40),
    dense(HALF, 2, 4, 4, 1, 90),
    dense(FULL, 1, 4, 2, 40, 40),
    dense(replace(HALF, dtype="bf16", head_dim=32, head_dim_v=32), 3, 2, 1, 17, 30),
]
EQUAL = dense(HALF, 1, 4, 4, 60, 60)
MIXED_KEYS = {"cu_seqlens_k": OFFSETS + torch.arange(5).int() * 10, "max_seqlen_k": 40}
EIGHT, HOW_EIGHT = quantised(scale_rows=32, layout="columns")
# Calls, and what is written of them: problems with sizes and how often.
WRITTEN: dict[str, tuple[list[Call], Counts]] = {
    "one problem": counted(*ATTENTION[:2]),
    "several": counted(*ATTENTION),
    "e4m3": (
        [lambda: fagen.attention(*EIGHT, **HOW_EIGHT)] * 2
        + [lambda: fagen.attention_fp8(*qkv(), v_layout="rows")],
        {FP8: {Sizes(2, 4, 2, 70, 200): 2}},
    ),
    "varlen": (
        [packed] * 2
        + [lambda: packed(max_seqlen_q=30, max_seqlen_k=30)]
        + [lambda: packed(60, 100, **MIXED_KEYS), EQUAL[0]],
        {
            HALF: {EQUAL[2]: 1},
            PACKED: {totals(4, 60, 15): 2, totals(4, 60, 30): 1, totals(4, 60, 15, 100, 40): 1},
        },
    ),
    "varlen in e4m3": (
        [lambda: packed_fp8(torch.float16), lambda: packed_fp8(torch.bfloat16)],
        {PACKED_FP8: {totals(4, 60, 15): 2}},
    ),
    "decode": (
        # one query sees the same keys
        [lambda: decoded(seqused_k=USED)] * 2
        + [lambda: decoded(causal=False), lambda: decoded(4, causal=False), EQUAL[0]],
        {
            DECODED: {Sizes(2, 8, 2, 1, 100): 3},
            DECODED_FULL: {Sizes(2, 8, 2, 4, 100): 1},
            HALF: {EQUAL[2]: 1},
        },
    ),
    "all sizes alike": (
        [lambda: fagen.attention_decode(*[normal(2, 4, 2, 64)] * 3)],
        {DECODED: {Sizes(2, 2, 2, 4, 4): 1}},
    ),
    "flash_attn": (
        [of_cache],
        {
            PACKED: {totals(4, 60, 30): 1, totals(4, 60, 30, 200, 50): 1},
            DECODED: {Sizes(2, 8, 2, 1, 100): 1},
        },
    ),
}
# What callers say of the longest sequence, and what is known then.
LONGEST: list[tuple[dict[str, Any], VarlenTotals]] = [
    ({}, totals(4, 60, 15)),
    ({"q": 63, "k": 63}, totals(4, 63, 16)),  # rows of no sequence are not known as such
    ({"max_seqlen_q": 30}, totals(4, 60, 30)),  # it will be that of the keys too
    ({"max_seqlen_k": 30}, totals(4, 60, 30)),
    ({"max_seqlen_q": 4_096, "max_seqlen_k": 4_096}, totals(4, 60, 57)),  # a bound
    ({"max_seqlen_q": 15}, totals(4, 60, 15)),
    ({"max_seqlen_q": 8}, totals(4, 32, 8)),  # more rows than such sequences have
    ({"max_seqlen_q": 0, "max_seqlen_k": -3}, totals(4, 60, 15)),
    ({"max_seqlen_q": True}, totals(4, 60, 15)),
    ({"max_seqlen_q": 2**70}, totals(4, 60, 57)),
    ({"max_seqlen_q": torch.tensor(30, device="meta")}, totals(4, 60, 15)),  # nobody waits for it
    ({"q": 60, "k": 400, "max_seqlen_q": 30}, totals(4, 60, 30, 400, 100)),
    ({"q": 60, "k": 400, "max_seqlen_k": 50}, totals(4, 60, 15, 200, 50)),
    ({"q": 3, "k": 60}, totals(3, 3, 1, 60, 20)),  # one is empty at least
    ({"q": 60, "k": 1}, totals(1, 60, 60, 1, 1)),
]


def nobody_records() -> bool:
    return all(door.note is None for door in DOORS.values())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mine.toml"


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for every kernel returns at once."""
    without_kernels(monkeypatch)


@pytest.mark.parametrize(("calls", "counts"), WRITTEN.values(), ids=WRITTEN)
def test_every_problem_and_size_that_was_called_is_written_with_how_often(
    path: Path, calls: list[Call], counts: Counts
) -> None:
    for times in (1, 2):  # the second recording is added to the first
        with fagen.recording(path):
            assert path.exists() == (times == 2)
            for call in calls:
                call()
        many = {p: {size: n * times for size, n in by.items()} for p, by in counts.items()}
        assert read_recording(path) == many
    calls[0]()  # which nobody records
    assert read_recording(path) == many and nobody_records()
    targets = {target for space in read_spaces(path) for target in space.targets()}
    # and nothing else is searched
    assert targets == {replace(problem, v_layout=None, scale_rows=None) for problem in counts}
    if any(problem.kind == "decode" for problem in counts):
        answer = cli_helpers.fagen("search", path, "--dry-run")
        assert answer.exit_code == 0 and "dec_fp16_d64_causal: " in answer.output, answer.output


@pytest.mark.parametrize(("named", "totals"), LONGEST)
def test_what_is_known_of_lengths_is_their_sum_and_what_callers_say_of_the_longest(
    path: Path, no_kernels: None, named: dict[str, Any], totals: VarlenTotals
) -> None:
    with fagen.recording(path):
        packed(**named)
    assert read_recording(path) == {PACKED: {totals: 1}}


def test_a_file_is_a_space_for_each_problem_in_plain_toml(path: Path) -> None:
    with fagen.recording(path):
        for name in ("varlen", "e4m3", "varlen in e4m3", "decode"):
            for call in WRITTEN[name][0]:
                call()
    spaces = {space.targets()[0].name: space for space in read_spaces(path)}
    several = spaces["fp16_d64_causal_varlen"]
    assert [shape.weight for shape in several.shapes] == [2, 1, 1]
    even, ragged, mixed = several.sizes(several.targets()[0])
    assert even == VarlenSizes.of([(15, 15)] * 4, 4, 2)
    assert ragged == VarlenSizes.of([(15, 40), (15, 28), (15, 19), (15, 13)], 4, 2)
    assert mixed == VarlenSizes.of([(30, 30), (17, 17), (9, 9), (4, 4)], 4, 2)
    eight, packed_eight = spaces["e4m3_d64_full"], spaces["e4m3_d64_full_varlen"]
    assert eight.values["scale_rows"] == (32,) and eight.values["v_layout"] == ("columns",)
    assert packed_eight.values["v_layout"] == ("rows",)
    assert packed_eight.values["lengths"] == ("varlen",)
    tables = tomllib.loads(path.read_text())["space"]
    shapes = {tuple(table.get("attention", {}).items()): table["shapes"] for table in tables}
    half = {"dtype": "fp16", "head_dim": 64, "mask": "causal"}
    heads = {"batch": 4, "heads": 4, "kv_heads": 2}
    assert shapes[tuple((half | {"lengths": "varlen"}).items())][:2] == [
        {"tokens": 60, **heads, "weight": 2},
        {"tokens": 60, "tokens_k": 100, "longest_k": 40, **heads, "weight": 1},
    ]
    (shape,) = shapes[tuple(half.items())]
    assert shape == {"seqlen": 60, "batch": 1, "heads": 4, "weight": 2}


def test_what_was_called_before_the_body_raised_is_written(path: Path) -> None:
    call, problem, sizes = ATTENTION[0]
    with pytest.raises(ZeroDivisionError), fagen.recording(path):
        call()
        raise ZeroDivisionError
    assert read_recording(path) == {problem: {sizes: 1}} and nobody_records()
    q = normal(1, 40, 4, 20)
    with fagen.recording(path), pytest.raises(ValueError, match="head_dim 20"):
        fagen.attention(q, q, q)
    assert read_recording(path) == {problem: {sizes: 1}}


def test_weights_stay_finite_whatever_is_added(path: Path) -> None:
    call, problem, sizes = ATTENTION[0]
    text = text_of({problem: {sizes: 1.7e308}})
    path.write_text(text + text[text.index("[[shapes]]") :])  # the same size twice
    for _ in range(2):
        with fagen.recording(path):
            call()
        assert read_recording(path) == {problem: {sizes: sys.float_info.max}}
    path.write_text(text_of({problem: {sizes: 0.1}}))
    with fagen.recording(path):
        call()
    assert read_recording(path) == {problem: {sizes: 1.1}}


@pytest.mark.long
def test_processes_that_record_into_one_file_at_a_time_lose_nothing(path: Path) -> None:
    code = (
        "import sys, torch, fagen\n"
        "q = torch.zeros(1, 8, 2, 64, dtype=torch.float16)\n"
        "for _ in range(100):\n"
        "    with fagen.recording(sys.argv[1]):\n"
        "        fagen.attention(q, q, q)\n"
    )
    argv, root = [sys.executable, "-c", code, path], str(cli_helpers.ROOT)
    with ThreadPoolExecutor() as pool:
        ran = list(pool.map(lambda _: run(argv, env={"PYTHONPATH": root}), range(3)))
    assert [done.returncode for done in ran] == [0] * 3, ran[0].stderr
    assert [*read_recording(path).values()] == [{Sizes(1, 2, 2, 8, 8): 300}]


# ---- files that are no recordings ----------------------------------------------------------------

HEAD = '[attention]\ndtype = "fp16"\nhead_dim = 64\nmask = "causal"\n'
ONE, MANY = HEAD + "[[shapes]]\nseqlen = 40\n", HEAD + 'lengths = "varlen"\n'
SOME = "[[shapes]]\ntokens = 60\nbatch = 4\n"
NO_RECORDINGS = [
    (ONE + "[tile]\nblock_m = 128\n", "the space of fp16_d64_causal says more than a rec"),
    (ONE + "[search]\ncompile = 9\n", "name another file"),
    (ONE.replace('"causal"', '["causal", "full"]'), "says more than a recording"),
    ("a = [", r"mine\.toml:1: this is not TOML"),
    ("[quantize]\nhead_dim = 64\n", "not searched"),
    (MANY.replace("attention", "backward") + SOME, "says more than a recording"),
    (MANY + "[[shapes]]\nseqlens = [30, 5, 25]\n", "the space of fp16_d64_causal_varlen says more"),
    (MANY + "[[shapes]]\nseqlens = { from = 16, to = 4096 }\n", "than a recording does, whose cal"),
    (MANY, "says more than a recording does"),
    (MANY + SOME + "[tile]\nblock_m = 64\n", "name another file"),
    (MANY + "[[shapes]]\ntokens = 60\n", r"\.toml:6: shapes\.0\.seqlen is missing, or seqlens, "),
    (MANY + SOME + "longest = 58\n", r":9: shapes\.0\.longest = 58: of "),
]


@pytest.mark.parametrize(("text", "message"), NO_RECORDINGS)
def test_a_file_that_no_recording_has_written_is_refused_before_the_run(
    path: Path, text: str, message: str
) -> None:
    path.write_text(text)
    with pytest.raises(ScheduleError, match=message), fagen.recording(path):
        raise AssertionError("the run has begun")
    assert path.read_text() == text and nobody_records()


def test_a_place_where_no_file_can_be_is_refused_before_the_run(path: Path) -> None:
    for where, message in [
        (path.parent / "nowhere" / "mine.toml", "there is no folder"),
        (path.parent, "is a folder"),
    ]:
        with pytest.raises(FagenError, match=message), fagen.recording(where):
            raise AssertionError("the run has begun")
    call, problem, sizes = ATTENTION[1]
    with fagen.recording(path):
        with pytest.raises(FagenError, match="one recording goes on at a time"):
            fagen.recording(path.with_name("third.toml")).__enter__()
        call()
    assert read_recording(path) == {problem: {sizes: 1}}


def test_sequences_of_one_length_say_no_more_than_a_recording(path: Path) -> None:
    path.write_text(MANY + "[[shapes]]\nseqlen = 15\nbatch = 4\nheads = 4\nkv_heads = 2\n")
    with fagen.recording(path):
        packed()
    assert read_recording(path) == {PACKED: {totals(4, 60, 15): 2}}


# ---- what is left out ----------------------------------------------------------------------------


def test_what_cannot_be_searched_is_left_out_in_words(path: Path, no_kernels: None) -> None:
    many = torch.arange(16_386, dtype=torch.int32)
    q, k = torch.empty(1, 0, 4, 64).half(), torch.empty(1, 5, 4, 64).half()
    with pytest.warns(UserWarning) as warned, fagen.recording(path):
        fagen.attention(q, k, k)
        packed(0, 60)
        packed(60, 60, OFFSETS[:1])
        packed(16_385, 16_385, many)
        decoded(reference=torch.zeros(8))
        decoded(0)
    messages = "\n".join(str(warning.message) for warning in warned)
    for message in (
        "4 calls of no rows or no keys",
        "1 calls of more than 16,384 sequences",
        "1 calls with a reference, for which tables have no",
    ):
        assert message in messages
    assert not path.exists()
    with pytest.warns(UserWarning, match="no call of fagen.attention"), fagen.recording(path):
        pass
    assert not path.exists()
    with pytest.warns(UserWarning, match="2 calls of no rows"), fagen.recording(path):
        decoded(0)
        packed(0, 60)
        decoded()
    assert read_recording(path) == {DECODED: {Sizes(2, 8, 2, 1, 100): 1}}


def test_symbolic_sizes_are_skipped_with_a_note(path: Path) -> None:
    fagen.prepare(dtype="fp16", head_dim=64)

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = fagen.attention(q, k, v)
            assert isinstance(out, Tensor)
            return out

    with warnings.catch_warnings(record=True) as warned, fagen.recording(path):
        warnings.simplefilter("always")
        fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        keys_open = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.STATIC, DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 2]
        )
        opened = [fake.from_tensor(tensor, symbolic_context=keys_open) for tensor in qkv()[1:]]
        with fake:
            out = fagen.attention(fake.from_tensor(qkv()[0], static_shapes=True), *opened)
            assert isinstance(out, Tensor) and out.shape == qkv()[0].shape
        keys = torch.export.Dim("keys")
        shapes = ({}, {1: keys}, {1: keys})
        torch.export.export(Model(), qkv(), dynamic_shapes=shapes, strict=False)
        fagen.attention(*qkv())
    messages = "\n".join(str(warning.message) for warning in warned)
    assert "calls with symbolic sizes" in messages
    assert "calls traced by torch.compile or torch.export" in messages
    assert list(read_recording(path).values()) == [{Sizes(2, 4, 2, 70, 200): 1}]


# ---- many sizes ----------------------------------------------------------------------------------


def test_of_very_many_sizes_those_nearly_alike_count_as_one(path: Path, no_kernels: None) -> None:
    q, k = torch.empty(1, 1, 4, 64).half(), torch.empty(1, 3_000, 2, 64).half()
    with fagen.recording(path):
        for keys in range(1, 3_001):
            fagen.attention(q, k[:, :keys], k[:, :keys])
        for _ in range(10_000):
            fagen.attention(q, k[:, :777], k[:, :777])
    (weights,) = read_recording(path).values()
    assert MOST_SIZES / 2 < len(weights) <= MOST_SIZES
    assert sum(weights.values()) == 13_000
    assert max(weights, key=weights.__getitem__) == Sizes(1, 4, 2, 1, 777)
    kept = sorted(size.seqlen_k for size in weights)
    assert kept[-1] > 2_800 and max(b / a for a, b in itertools.pairwise(kept[8:])) < 1.3


def test_of_very_many_sizes_of_varlen_sequences_likewise(path: Path) -> None:
    dice, sizes = random.Random(0), dict[Sizes, int]()
    while len(sizes) < 2_000:
        batch = dice.randint(1, 64)
        tokens = dice.randint(batch, 8_192)
        sizes[totals(batch, tokens, dice.randint(-(-tokens // batch), tokens - batch + 1))] = 3
    assert _add(path, {PACKED: sizes}, {}) == []
    (weights,) = read_recording(path).values()
    assert 8 < len(weights) <= MOST_SIZES and sum(weights.values()) == 6_000


def test_a_recording_of_very_many_problems_can_be_read_back(path: Path) -> None:
    sizes = {Sizes(1, 4, 4, n, n): 0.25 for n in range(1, 33)}
    problems = [
        Problem(dtype, d, d, mask, None, "", 0)
        for dtype, d, mask in itertools.product(
            ("fp16", "bf16"), (16, 32, 64, 128), ("full", "causal")
        )
    ]
    path.write_text(text_of(dict.fromkeys(problems[:-1], sizes)))
    left_out = pytest.warns(UserWarning, match="not recorded: 1 calls of bfloat16, head_dim 128")
    first, other = problems[0], replace(problems[0], head_dim=40, head_dim_v=40)
    with left_out, fagen.recording(path):
        for problem in (*[first] * 9, *[other] * 9, problems[-1]):
            dense(problem, 1, 4, 4, 5, 5)[0]()
    recorded = read_recording(path)
    assert len(recorded) == 16 and recorded[first][Sizes(1, 4, 4, 5, 5)] == 9.25
    assert all(set(recorded[problem]) == set(sizes) for problem in problems[:-1])


# ---- files of several spaces ---------------------------------------------------------------------

SPACE = '[[space]]\n[space.attention]\ndtype = "fp16"\nhead_dim = {}\nmask = "full"\n'
MORE = "[space.build]\nmax_spill_bytes = {{ from = 0, to = 3 }}\n"  # times as many points


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SPACE.format(64) + SPACE.format(20), r"mine\.toml:9: attention\.head_dim = 20"),
        (SPACE.format(64) + "[[space.shapes]]\nseqlen = 0\n", r":7: shapes\.0\.seqlen = 0"),
        (SPACE.format(64) + SPACE.format(64), "fp16_d64_full is searched in another space too"),
        (SPACE.format(64) + "[tile]\nblock_m = 64\n", r":6: tile stands beside \[\[space\]\]"),
        ("space = 3\n", r"mine\.toml:1: several spaces are \[\[space\]\] tables"),
        ("space = [1]\n", r"mine\.toml:1: several spaces are"),
        ("space = []\n", "0 spaces; a file has 1 to 64"),
        ("".join(map((SPACE + MORE).format, range(16, 256, 8))), "points in 30 spaces"),
    ],
)
def test_a_file_of_several_spaces_is_refused_where_it_is_wrong(
    path: Path, text: str, message: str
) -> None:
    path.write_text(text)
    with pytest.raises(ScheduleError, match=message):
        read_spaces(path)
    answer = cli_helpers.fagen("search", path, "--dry-run")
    assert answer.exit_code == 1 and str(path) in answer.output.replace("mine.toml: ", f"{path} ")


def test_two_files_for_one_problem_are_refused_before_anything_is_searched(path: Path) -> None:
    files = path.with_name("a.toml"), path.with_name("b.toml")
    for file in files:
        file.write_text(SPACE.format(64))
    answer = cli_helpers.fagen("search", *files, "--store", path.with_name("s.sqlite"))
    assert answer.exit_code == 1 and "also" not in answer.output
    assert "b.toml: fp16_d64_full is searched in another space too, of a.toml" in answer.output
    assert not path.with_name("s.sqlite").exists()
