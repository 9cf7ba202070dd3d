"""What fagen.recording writes of varlen sequences, whose lengths no host reads."""

import math
import random
import tomllib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from fagen import search
from fagen.errors import ScheduleError
from fagen.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache
from fagen.paths import locate
from fagen.problem import Problem, Sizes, VarlenSizes, VarlenTotals, spread
from fagen.registry import from_slug
from fagen.runtime.attention import ATTENTION
from fagen.runtime.varlen import VARLEN
from fagen.search.files import read_spaces
from fagen.search.kinds import space_of
from fagen.search.recording import MOST_SIZES, _add, read_recording
from fagen.search.space import survey
from fagen.search.store import Store
from tests import cli_helpers, tensors
from tests.fresh import forget, without_kernels
from tests.recordings import AtOnce, record

PROBLEM = Problem("fp16", 64, 64, "causal", None, "", 0, lengths="varlen")
OFFSETS = torch.tensor([0, 30, 35, 35, 60], dtype=torch.int32)


def normal(*shape: int) -> Tensor:
    """Numbers in fp16."""
    return tensors.normal(*shape, dtype=torch.float16)


def call(q: int = 60, k: int = 60, offsets: Tensor = OFFSETS, **said: Any) -> Any:
    given = normal(q, 4, 64), normal(k, 2, 64), normal(k, 2, 64)
    return fagen.attention_varlen(*given, offsets, causal=True, **said)


def totals(batch: int, tokens: int, longest: int, *keys: int) -> VarlenTotals:
    tokens_k, longest_k = keys or (tokens, longest)
    return VarlenTotals(batch, 4, 2, longest, longest_k, tokens, tokens_k)


# ---- what is recorded ---------------------------------------------------------------------------


def test_packed_calls_are_written_beside_others_and_added_to(tmp_path):
    path, q = tmp_path / "mine.toml", normal(1, 60, 4, 64)
    for times in (1, 2):
        with fagen.recording(path):
            for _ in range(2):
                call()
            call(max_seqlen_q=30, max_seqlen_k=30)
            call(60, 100, cu_seqlens_k=OFFSETS + torch.arange(5).int() * 10, max_seqlen_k=40)
            fagen.attention(q, q, q, causal=True)
        assert read_recording(path) == {
            replace(PROBLEM, lengths="equal"): {Sizes(1, 4, 4, 60, 60): times},
            PROBLEM: {
                totals(4, 60, 15): 2 * times,
                totals(4, 60, 30): times,
                totals(4, 60, 15, 100, 40): times,
            },
        }
    call()  # which nobody records
    assert ATTENTION.note is VARLEN.note is None
    spaces = {space.targets()[0].name: space for space in read_spaces(path)}
    of = spaces["fp16_d64_causal_varlen"]
    assert [shape.weight for shape in of.shapes] == [4, 2, 2]
    even, ragged, mixed = of.sizes(of.targets()[0])
    assert even == VarlenSizes.of([(15, 15)] * 4, 4, 2)
    assert ragged == VarlenSizes.of([(15, 40), (15, 28), (15, 19), (15, 13)], 4, 2)
    assert mixed == VarlenSizes.of([(30, 30), (17, 17), (9, 9), (4, 4)], 4, 2)
    shapes = tomllib.loads(path.read_text())["space"]
    said = next(one["shapes"] for one in shapes if "lengths" in one["attention"])
    heads = {"batch": 4, "heads": 4, "kv_heads": 2}
    assert said[0] == {"tokens": 60, **heads, "weight": 4}
    assert said[1] == {"tokens": 60, "tokens_k": 100, "longest_k": 40, **heads, "weight": 2}


@pytest.mark.parametrize(
    ("said", "known"),
    [
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
        ({"q": 60, "k": 400, "max_seqlen_q": 30}, totals(4, 60, 30, 400, 100)),
        ({"q": 60, "k": 400, "max_seqlen_k": 50}, totals(4, 60, 15, 200, 50)),
        ({"q": 3, "k": 60}, totals(3, 3, 1, 60, 20)),  # one is empty at least
        ({"q": 60, "k": 1}, totals(1, 60, 60, 1, 1)),
    ],
)
def test_what_is_known_of_lengths_is_their_sum_and_what_callers_say_of_the_longest(
    tmp_path, said, known
):
    path = tmp_path / "mine.toml"
    with fagen.recording(path):
        call(**said)
    assert read_recording(path) == {PROBLEM: {known: 1}}


def test_flash_attentions_functions_say_the_longest(tmp_path):
    path = tmp_path / "mine.toml"
    q, k, cache = normal(60, 4, 64), normal(60, 2, 64), normal(4, 50, 2, 64)
    with fagen.recording(path):
        flash_attn_varlen_func(q, k, k, OFFSETS, OFFSETS, 30, 30, causal=True)
        flash_attn_with_kvcache(
            *(q, cache, cache),
            cache_seqlens=torch.full((4,), 40, dtype=torch.int32),
            cu_seqlens_q=OFFSETS,
            max_seqlen_q=30,
            causal=True,
        )
    # of a cache's lengths the host knows its room
    known = {totals(4, 60, 30): 1, totals(4, 60, 30, 200, 50): 1}
    assert read_recording(path) == {PROBLEM: known}


def test_a_call_in_e4m3_is_of_its_layout(tmp_path):
    path = tmp_path / "mine.toml"
    (q, of_q), (k, of_k) = (fagen.quantize(normal(1, 60, heads, 64)) for heads in (4, 2))
    descales = {"q_descale": of_q, "k_descale": of_k, "v_descale": of_k}
    with fagen.recording(path):
        for out in (torch.float16, torch.bfloat16):
            fagen.attention_varlen(q[0], k[0], k[0], OFFSETS, out_dtype=out, **descales)
    problem = Problem("e4m3", 64, 64, "full", None, "rows", 0, lengths="varlen")
    assert read_recording(path) == {problem: {totals(4, 60, 15): 2}}
    (space,) = read_spaces(path)
    assert space.values["v_layout"] == ("rows",) and space.values["lengths"] == ("varlen",)


# ---- no length is read, and what it costs --------------------------------------------------------


@pytest.fixture
def no_kernels(monkeypatch):
    """What stands in for every kernel returns at once."""
    without_kernels(monkeypatch)


def test_what_cannot_be_searched_is_left_out_in_words(tmp_path, no_kernels):
    path = tmp_path / "mine.toml"
    many = torch.arange(16_386, dtype=torch.int32)
    with pytest.warns(UserWarning) as said, fagen.recording(path):
        call(0, 60)
        call(60, 60, OFFSETS[:1])
        call(16_385, 16_385, many)
        call()
    told = [str(one.message) for one in said]
    assert any("2 calls of no rows or no keys" in one for one in told), told
    assert any("1 calls of more than 16,384 sequences" in one for one in told), told
    assert read_recording(path) == {PROBLEM: {totals(4, 60, 15): 1}}


def test_a_longest_length_that_the_host_would_wait_for_is_not_known(tmp_path, no_kernels):
    path = tmp_path / "mine.toml"
    longest = torch.tensor(30, device="meta")
    for read in (int, bool, Tensor.tolist):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(longest)
    with fagen.recording(path):
        call(max_seqlen_q=longest)
    assert read_recording(path) == {PROBLEM: {totals(4, 60, 15): 1}}


# ---- the rule for lengths -----------------------------------------------------------------------


def extents() -> list[tuple[int, int, int]]:
    """Tokens, sequences and the longest: all of few tokens, and some of many."""
    found = [
        (tokens, batch, longest)
        for tokens in range(1, 20)
        for batch in range(1, tokens + 1)
        for longest in range(-(-tokens // batch), tokens - batch + 2)
    ]
    dice = random.Random(0)
    for _ in range(1_000):
        batch = int(2 ** dice.uniform(0, 10))
        tokens = int(batch * 2 ** dice.uniform(0, 10))
        least, most = -(-tokens // batch), tokens - batch + 1
        found.append((tokens, batch, dice.choice((least, most, dice.randint(least, most)))))
    for tokens in (16_384, 16_385, 2**20 - 1, 2**20):
        least, most = -(-tokens // 16_384), tokens - 16_384 + 1
        near = {least, min(least + 1, most), max(most - 1, least), most}
        found += [(tokens, 16_384, longest) for longest in near]
    return found


def test_lengths_that_are_taken_have_the_sum_the_number_and_the_longest():
    for tokens, batch, longest in extents():
        lengths = spread(tokens, batch, longest)
        assert len(lengths) == batch and sum(lengths) == tokens, (tokens, batch, longest)
        assert lengths[0] == max(lengths) == longest and min(lengths) >= 1
        assert lengths == sorted(lengths, reverse=True)
        known = totals(batch, tokens, longest)
        assert VarlenTotals.of(known) == known and [q for q, _ in known.sequences] == lengths


def test_lengths_that_are_taken_fall_by_one_ratio():
    assert spread(400, 4, 100) == [100] * 4 and spread(403, 4, 400) == [400, 1, 1, 1]
    lengths = spread(65_536, 22, 16_384)
    ratios = [after / before for before, after in pairwise(lengths)]
    assert all(abs(ratio - ratios[0]) < 0.02 for ratio in ratios[:12])


DRAWN: dict[str, Callable[[random.Random], list[int]]] = {
    "octaves": lambda dice: [int(2 ** dice.uniform(4, 14)) for _ in range(22)],
    "even": lambda dice: [dice.randint(1, 2_048) for _ in range(64)],
    "prompts": lambda dice: [
        min(8_192, max(1, int(math.exp(dice.gauss(5.5, 1))))) for _ in range(64)
    ],
    "few long": lambda dice: [
        dice.randint(2_048, 4_096) if dice.random() < 0.1 else dice.randint(8, 64)
        for _ in range(64)
    ],
}


@pytest.mark.parametrize("lengths", DRAWN)
def test_for_these_lengths_nearly_the_same_kernel_is_predicted_best_as_for_the_true_ones(lengths):
    (space,) = read_spaces(locate("cli.py").parent / "spaces/fwd_fp16_d128_varlen.toml")
    predictor = space_of(space.kind).predictor
    dice, more = random.Random(lengths), []
    for target in space.targets():
        found = survey(space, target)
        kernels = [from_slug(found.schedule(point).slug).values() for point in found.points]
        for _ in range(6):
            true = VarlenSizes.of([(n, n) for n in DRAWN[lengths](dice)], 16, 16)
            sizes = VarlenTotals.of(true)
            predict = predictor([true, VarlenSizes.of(sizes.sequences, 16, 16)])
            times = [predict(kernel) for kernel in kernels]
            chosen, _ = min(times, key=lambda time: time[1])
            more.append(chosen / min(time[0] for time in times))
    assert max(more) <= 1.06 and sum(more) / len(more) <= 1.01


# ---- files --------------------------------------------------------------------------------------

HEAD = '[attention]\ndtype = "fp16"\nhead_dim = 64\nmask = "causal"\nlengths = "varlen"\n'


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ("[[shapes]]\nseqlens = [30, 5, 25]\n", "the space of fp16_d64_causal_varlen says more"),
        ("[[shapes]]\nseqlens = { from = 16, to = 4096 }\n", "than a recording does, whose calls"),
        ("", "says more than a recording does"),
        ("[[shapes]]\ntokens = 60\nbatch = 4\n[tile]\nblock_m = 64\n", "name another file"),
        ("[[shapes]]\ntokens = 60\n", r"mine\.toml:6: shapes\.0\.seqlen is missing, or seqlens, "),
        ("[[shapes]]\ntokens = 60\nbatch = 4\nlongest = 58\n", r":9: shapes\.0\.longest = 58: of "),
    ],
)
def test_a_file_that_says_lengths_is_refused_before_the_run(tmp_path, shapes, said):
    path = tmp_path / "mine.toml"
    path.write_text(HEAD + shapes)
    with pytest.raises(ScheduleError, match=said), fagen.recording(path):
        raise AssertionError("the run has begun")
    assert path.read_text() == HEAD + shapes and VARLEN.note is None


def test_sequences_of_one_length_say_no_more_than_a_recording(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(HEAD + "[[shapes]]\nseqlen = 15\nbatch = 4\nheads = 4\nkv_heads = 2\n")
    with fagen.recording(path):
        call()
    assert read_recording(path) == {PROBLEM: {totals(4, 60, 15): 2}}


def test_a_backward_space_is_no_recording(tmp_path):
    path = tmp_path / "mine.toml"
    shape = "[[shapes]]\ntokens = 60\nbatch = 4\n"
    path.write_text(HEAD.replace("attention", "backward") + shape)
    with pytest.raises(ScheduleError, match="says more than a recording"):
        read_recording(path)


def test_of_very_many_sizes_those_nearly_alike_count_as_one(tmp_path):
    path, dice = tmp_path / "mine.toml", random.Random(0)
    sizes: dict[Sizes, int] = {}
    while len(sizes) < 2_000:
        batch = dice.randint(1, 64)
        tokens = dice.randint(batch, 8_192)
        sizes[totals(batch, tokens, dice.randint(-(-tokens // batch), tokens - batch + 1))] = 3
    assert _add(path, {PROBLEM: sizes}, {}) == []
    (found,) = read_recording(path).values()
    assert 8 < len(found) <= MOST_SIZES and sum(found.values()) == 6_000


def test_what_a_search_finds_for_a_recording_is_what_packed_calls_are_then_served_by(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(search, "LocalExecutor", AtOnce)
    forget(monkeypatch)
    path = tmp_path / "mine.toml"
    with fagen.recording(path):
        call(max_seqlen_q=30)
        call(600, 600, OFFSETS * 10)
    text = path.read_text() + "[tile]\nblock_m = [64, 128]\nblock_n = [64, 96, 128]\n"
    path.write_text(text)  # which takes less time
    store = record(tmp_path / "recorded.sqlite", kernels=40, text=text)
    answer = cli_helpers.fagen(
        *("search", "run", path, "--replay", store, "--store", tmp_path / "found.sqlite"),
        *("--write", tmp_path / "fagen"),
    )
    assert answer.exit_code == 0, answer.output
    (row,) = tomllib.loads((tmp_path / "fagen" / "dispatch.toml").read_text())["kernel"]
    forget(monkeypatch)
    taken = fagen.prepare_varlen(dtype="fp16", head_dim=64, causal=True, device="cpu")
    assert taken == row["slug"] and "_varlen" in taken
    times = dict[str, list[float]]()
    with Store(store, read_only=True) as recorded:
        for timed in recorded.timed():
            if timed.source_hash:
                times.setdefault(timed.time.slug, []).append(math.log(timed.time.seconds))
    assert sum(times[taken]) <= min(map(sum, times.values())) + len(times[taken]) * 0.03
