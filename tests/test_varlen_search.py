"""Search over varlen sequences: sizes and shapes, what is predicted, and what is tried."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

import fagen as package
from fagen.errors import ScheduleError
from fagen.kinds.backward import cost as backward_cost
from fagen.kinds.forward import cost
from fagen.paths import locate
from fagen.problem import (
    Lengths,
    Problem,
    Sizes,
    VarlenSizes,
    flops,
    lengths_from,
    lengths_in_words,
)
from fagen.registry import from_slug
from fagen.search.declared import parse_space
from fagen.search.files import read_spaces
from fagen.search.run import anchors, serving
from fagen.search.shapes import VarlenShape
from fagen.search.space import survey
from fagen.vocab import MASKS
from tests.recordings import toml

TEXT = toml(
    attention={"dtype": "fp16", "head_dim": 64, "mask": "causal", "lengths": "varlen"},
    tile={"block_m": [128, 192], "block_n": {"from": 64, "to": 128, "step": 16}},
    warps={"producer": "warp"},
    grid={"cluster": 1, "order": "dynamic"},
    shapes=[
        {"seqlen": 4096},
        {"seqlens": {"from": 16, "to": 4096}, "tokens": 16384, "weight": 2},
        {"seqlens": [300, 5, 95], "seqlens_k": [300, 70, 95]},
    ],
)
TARGET = Problem("fp16", 64, 64, "causal", lengths="varlen")
HEAD = TEXT.partition("[[shapes]]")[0]
ROOT = locate("cli.py").parent
MIXED: Lengths = ((300, 300), (5, 70), (95, 95), (1, 1), (64, 200))


def values(slug: str) -> dict[str, Any]:
    return from_slug(slug).values()


# ---- sizes --------------------------------------------------------------------------------------


def test_sizes_of_equal_lengths_count_as_those_of_the_dense_problem():
    dense, packed = Sizes(4, 16, 4, 512, 700), VarlenSizes.of([(512, 700)] * 4, 16, 4)
    assert dense.sequences == packed.sequences and not dense.varlen and packed.varlen
    assert (packed.total_q, packed.total_k) == (dense.total_q, dense.total_k) == (2_048, 2_800)
    for mask in MASKS:
        target = replace(TARGET, mask=mask)
        assert flops(target, packed) == flops(target, dense)
    assert dense != packed and len({dense, packed}) == 2


def test_what_mixed_lengths_count_is_what_each_counts_by_itself():
    packed = VarlenSizes.of(MIXED, 4, 2)
    parts = [Sizes(1, 4, 2, q, k) for q, k in MIXED]
    assert flops(TARGET, packed) == sum(flops(TARGET, size) for size in parts)
    assert (packed.batch, packed.seqlen_q, packed.seqlen_k) == (5, 300, 300)
    assert not packed.square and VarlenSizes.of([(3, 3), (9, 9)], 1, 1).square


@pytest.mark.parametrize(
    "lengths", [MIXED, ((7, 7),) * 3 + ((7, 8),) * 2, ((0, 0),), ((1, 0), (1, 1))]
)
def test_lengths_in_words_are_read_back(lengths):
    words = lengths_in_words(lengths)
    assert lengths_from(words, len(lengths)) == lengths
    with pytest.raises(ValueError, match="is no length, or of more than"):
        lengths_from(words, len(lengths) - 1)


def test_other_lengths_are_said_in_other_words():
    some = [tuple((i * j % 97 + 1,) * 2 for i in range(60)) for j in range(1, 60)]
    words = {str(VarlenSizes.of(lengths, 4, 4)) for lengths in (*some, *(s[::-1] for s in some))}
    assert len(words) == len({*some, *(s[::-1] for s in some)})
    assert str(VarlenSizes.of([(4096, 4096)] * 4, 16, 4)) == "H=16/4 4 x 4096: 4096*4"


# ---- shapes -------------------------------------------------------------------------------------


def sizes_of(text: str, head_dim: int = 64) -> list[Sizes]:
    return [shape.sizes(head_dim) for shape in parse_space(HEAD + text).shapes]


def test_shapes_are_of_one_length_listed_or_drawn():
    even, listed, drawn = sizes_of(
        TEXT.partition("[[shapes]]")[1] + TEXT.partition("[[shapes]]")[2]
    )
    assert even == VarlenSizes.of([(4_096, 4_096)] * 4, 32, 32)
    assert drawn == VarlenSizes.of([(300, 300), (5, 70), (95, 95)], 32, 32)
    assert listed.total_q == listed.total_k == 16_384 and listed.square
    assert all(1 <= q <= 4_096 for q, _ in listed.sequences)
    (ragged,) = sizes_of(
        "[[shapes]]\nseqlen = 100\nseqlen_k = 300\nbatch = 3\nheads = 8\nkv_heads = 2"
    )
    assert ragged == VarlenSizes.of([(100, 300)] * 3, 8, 2)


def test_of_tokens_in_a_batch_each_sequence_is_shorter_by_one_ratio_than_the_last():
    text = "[[shapes]]\ntokens = 80\nbatch = 4\nheads = 4\n"
    (even,) = sizes_of(text)
    assert even == VarlenSizes.of([(20, 20)] * 4, 4, 4)
    (mixed,) = sizes_of(text + "longest = 40")
    assert mixed == VarlenSizes.of([(40, 40), (22, 22), (12, 12), (6, 6)], 4, 4)
    (keys,) = sizes_of(text + "longest_k = 40")
    assert keys.sequences == ((20, 40), (20, 22), (20, 12), (20, 6))
    (other,) = sizes_of(text + "longest = 77\ntokens_k = 400")
    assert other.sequences == ((77, 100), (1, 100), (1, 100), (1, 100))


def test_a_file_that_says_no_shapes_has_equal_mixed_and_tiny_ones():
    equal, mixed, tiny = sizes_of("", head_dim=128)
    assert equal.sequences == ((4_096, 4_096),) * 4 and equal.heads == 16
    assert mixed.total_q == 65_536 and 10 < mixed.batch < 60
    assert tiny.batch == 1_024 and {q for q, _ in tiny.sequences} == {*range(1, 65)}


def test_lengths_are_drawn_evenly_over_octaves_and_are_the_same_each_time():
    shape = VarlenShape.model_validate({"seqlens": {"from": 16, "to": 16_384}, "batch": 4_000})
    lengths = [q for q, _ in shape.each()]
    assert lengths == [q for q, _ in shape.each()] and len(lengths) == 4_000
    octaves = [sum(2**n <= q < 2 ** (n + 1) for q in lengths) for n in range(4, 14)]
    assert all(abs(count - 400) < 80 for count in octaves)
    assert min(lengths) >= 16 and max(lengths) <= 16_384


def test_a_space_is_of_packed_sequences_or_of_such_of_one_length():
    both = HEAD.replace('"varlen"', '["equal", "varlen"]')
    with pytest.raises(ScheduleError, match="lengths names both: their shapes are others, so make"):
        parse_space(both)
    dense = HEAD.replace('lengths = "varlen"', "") + "[[shapes]]\nseqlens = [3]\n"
    with pytest.raises(
        ScheduleError, match="seqlens is of varlen sequences, whose space says leng"
    ):
        parse_space(dense)
    with pytest.raises(ScheduleError, match='lengths = "varle" must be "equal" or "varlen"; did'):
        parse_space(HEAD.replace('"varlen"', '"varle"'))
    again = parse_space(HEAD.replace('"varlen"', '["varlen"]'))
    assert again.targets() == parse_space(HEAD).targets() == (TARGET,)


# ---- the prediction -----------------------------------------------------------------------------

CAUSAL = "fwd_fp16_d128_causal_m128n128_varlen_packgqa"


def test_equal_lengths_are_predicted_as_the_dense_kernel_with_the_same_order():
    for length in (512, 4_096):
        packed = VarlenSizes.of([(length, length)] * (16_384 // length), 16, 4)
        dense = Sizes(16_384 // length, 16, 4, length, length)
        for varlen, plain in (
            (CAUSAL, "fwd_fp16_d128_causal_m128n128"),
            ("bwd_fp16_d128_full_m64n128_varlen", "bwd_fp16_d128_full_m64n128"),
        ):
            seconds = backward_cost.seconds if varlen.startswith("bwd") else cost.seconds
            ours, theirs = seconds(values(varlen), packed), seconds(values(plain), dense)
            assert ours == pytest.approx(theirs, rel=0.1 if varlen.startswith("bwd") else 1e-9)


@pytest.mark.parametrize("slug", [CAUSAL, "bwd_fp16_d128_causal_m64n128_varlen"])
def test_what_is_predicted_grows_with_every_sequence_and_depends_on_no_order(slug):
    seconds = backward_cost.seconds if slug.startswith("bwd") else cost.seconds
    times = [
        seconds(values(slug), VarlenSizes.of(MIXED * (1 + count), 16, 16)) for count in range(20)
    ]
    assert all(before <= after for before, after in pairwise(times)) and times[-1] > 3 * times[0]
    mixed = seconds(values(slug), VarlenSizes.of(MIXED, 16, 16))
    assert mixed == seconds(values(slug), VarlenSizes.of(MIXED[::-1], 16, 16))


def test_one_long_sequence_among_short_ones_is_waited_for():
    long, lone = VarlenSizes.of([(9, 9)] * 50 + [(128, 30_000)], 1, 1), Sizes(1, 1, 1, 128, 30_000)
    steps, tiles = cost.grid(128, 128, "full", "dynamic", long)
    assert steps == math.ceil(30_000 / 128) == cost.grid(128, 128, "full", "dynamic", lone)[0]
    assert tiles == 1
    assert cost.grid(128, 128, "causal", "dynamic", VarlenSizes.of([(0, 5)], 4, 4)) == (0, 0)


def test_tiny_sequences_want_small_tiles_and_long_ones_large_ones():
    tiny, long = VarlenSizes.of([(60, 60)] * 1_024, 16, 16), VarlenSizes.of([(16_384,) * 2], 16, 16)
    small, large = (f"fwd_fp16_d128_full_m{m}n{n}_varlen" for m, n in ((64, 64), (128, 128)))
    assert cost.seconds(values(small), tiny) < cost.seconds(values(large), tiny)
    assert cost.seconds(values(large), long) < cost.seconds(values(small), long)


# ---- the space ----------------------------------------------------------------------------------


def test_the_committed_space_holds_what_calls_get_today():
    (declared,) = read_spaces(ROOT / "spaces/fwd_fp16_d128_varlen.toml")
    names = [target.name for target in declared.targets()]
    assert names == ["fp16_d128_full_varlen", "fp16_d128_causal_varlen"]
    for target in declared.targets():
        surveyed = survey(declared, target)
        slugs = {surveyed.schedule(point).slug for point in surveyed.points}
        usual = package.prepare_varlen(
            dtype="fp16", head_dim=128, causal=target.mask == "causal", device="cpu"
        )
        assert anchors(surveyed, declared.effort)[0] == usual and usual in slugs
        assert serving(surveyed, "NVIDIA H200") == [usual]
        assert len(surveyed.sizes) == 3 and all(size.varlen for size in surveyed.sizes)
        refused = {refusal.reason for refusal in surveyed.refusals}
        assert "rule of producer" not in refused, "what no such kernel has is not tried"
