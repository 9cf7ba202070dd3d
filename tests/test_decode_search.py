"""Search of decoding: what is predicted, beside what was measured, and what is tried."""

import json
import math
from itertools import product
from statistics import fmean

import pytest

from fagen import evidence
from fagen.arch import SM90
from fagen.combining import split_blocks
from fagen.dispatch.select import sized
from fagen.errors import ScheduleError
from fagen.kinds.decode import cost
from fagen.kinds.decode.keys import Schedule
from fagen.kinds.decode.rules import combines_in_shared, reads_pairs
from fagen.paths import locate
from fagen.problem import Problem, Sizes
from fagen.registry import schedules
from fagen.search.declared import parse_space, space_like
from fagen.search.files import read_spaces
from fagen.search.run import anchors, serving
from fagen.search.space import survey
from tests.recordings import toml

HEADS = {"heads": 32, "kv_heads": 8}
TEXT = toml(
    decode={"dtype": "fp16", "head_dim": 64, "mask": "causal"},
    tile={"rows": [8, 16]},
    pipeline={"stages": [4, 6], "q_stages": 2},
    softmax={"speculate": True},
    shapes=[
        {"batch": 1, **HEADS, "seqlen": 1, "seqlen_k": 8192},
        {"batch": 64, **HEADS, "seqlen": 4, "seqlen_k": 4096},
    ],
)
TARGET = Problem("fp16", 64, 64, "causal", kind="decode")
ROOT = locate("cli.py").parent


def values(slug: str) -> dict[str, object]:
    return Schedule.from_slug(slug).values()


# ---- the prediction -----------------------------------------------------------------------------


def of_six(slug: str) -> str:
    """The kernel that had this slug when five buffers, of up to 16 rows, were six."""
    schedule = Schedule.from_slug(slug)
    explicit = "stages" in schedule.settings() or schedule.tile.rows > 16
    return slug if explicit or schedule.values()["stages"] != 5 else schedule.but(stages=6).slug


def whole_tiles_before(of_sequence, batch, most, *, even):
    """What a thread block had of them when none had a tile more than others."""
    abreast = next(n for n in range(min(8, of_sequence), 0, -1) if of_sequence % n == 0)
    groups, runs = of_sequence // abreast * batch, most // abreast
    whole = -(-groups // runs)
    return whole if whole * runs <= groups + groups // 16 else 0


def timing(slug, row):
    """What a recording says of a kernel: its slug, the sizes of a call, seconds."""
    names = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k")
    return slug, Sizes(*(row[name] for name in names)), row["microseconds"] / 1e6


def of_benchmarks():
    """Timings of kernels as they were on 24 and 25 November 2026, on an NVIDIA H200."""
    for day, name in product((24, 25), ("decode", "decode-variants")):
        benchmark = ROOT / f"benchmarks/results/nvidia-h200-2026-11-{day}-{name}.json"
        meant = of_six if day == 24 else str
        for row in json.loads(benchmark.read_text())["rows"]:
            yield timing(meant(row["slug"]), row)


def of_evidence(card):
    """Timings of committed kernels as they are, on cards of this name."""
    for path in schedules("decode"):
        ran = evidence.read(path.stem)
        for speed in ran.speeds if ran and ran.card.startswith(card) else ():
            yield timing(path.stem, vars(speed))


def logs_of(timings, by, straddles):
    """The logarithm of what is predicted, over what was measured, of one kind of kernels."""
    return [
        math.log(cost.seconds(values(slug), sizes) / time)
        for slug, sizes, time in timings
        if values(slug)["by"] == by
        and bool(values(slug)["head_dim"] * 2 % SM90.l2_line_bytes) == straddles
        and not combines_in_shared(values(slug))  # newer than the fit
        and not reads_pairs(values(slug))  # likewise
        and values(slug)["cache"] != "paged"  # a copy's clocks, and the table's, are not in the fit
    ]


def assert_met(logs, off, most, times):
    assert len(logs) >= times
    assert math.sqrt(fmean(log**2 for log in logs)) < off
    assert max(map(abs, logs)) < most


# Without evidence of the same kernels, which was met more closely and is of another card by now:
# the 33 rows of head dim 96 in turns alone are off by 0.0902, its 45 in runs by 0.0762.
@pytest.mark.parametrize(
    ("by", "straddles", "off", "most", "times"),
    [
        ("round_robin", False, 0.033, 0.13, 125),
        ("stream_k", False, 0.052, 0.25, 90),
        ("round_robin", True, 0.092, 0.2, 30),  # rows that begin within lines of the L2 cache
        ("stream_k", True, 0.078, 0.2, 45),
    ],
)
def test_what_was_measured_is_met(by, straddles, off, most, times, monkeypatch):
    """By kernels whose splits were as short as a block, and stayed whole where runs had as many."""
    monkeypatch.setattr(cost, "split_blocks", lambda length, n, c, _: split_blocks(length, n, c))
    monkeypatch.setattr(cost, "whole_tiles", whole_tiles_before)
    assert_met(logs_of(of_benchmarks(), by, straddles), off, most, times)


# A second, of K and V out of memory. On an H100 as timings say; by specifications it has 3.35 TB/s
# where an H200 has 4.8, so 3.22 where the fit has 4.61. All other numbers are those of the fit.
READ_BYTES = {"NVIDIA H200": cost.READ_BYTES, "NVIDIA H100": 3.1e12}


@pytest.mark.parametrize(
    ("by", "straddles", "off", "most", "times"),
    [
        ("round_robin", False, 0.045, 0.15, 70),
        ("stream_k", False, 0.052, 0.15, 44),
        ("round_robin", True, 0.085, 0.13, 12),
        ("stream_k", True, 0.085, 0.2, 8),
    ],
)
def test_evidence_of_kernels_as_they_are_is_met_too(by, straddles, off, most, times, monkeypatch):
    """Splits are those of today, on whichever card it was that they were verified on."""
    logs = []
    for card, rate in READ_BYTES.items():
        monkeypatch.setattr(cost, "READ_BYTES", rate)
        logs += logs_of(of_evidence(card), by, straddles)
    assert_met(logs, off, most, times)


@pytest.mark.parametrize(
    ("slug", "sizes", "busiest"),
    [
        ("dec_fp16_d128_causal_r8n64", Sizes(1, 32, 8, 1, 131_072), "memory"),
        ("dec_fp16_d128_causal_r64n64", Sizes(32, 512, 8, 1, 4_096), "chain"),
    ],
)
def test_few_rows_wait_for_memory_and_many_for_the_warpgroup(slug, sizes, busiest):
    parts = vars(cost.parts(values(slug), sizes))
    assert max(parts, key=parts.__getitem__) == busiest


def test_runs_write_nothing_but_of_tiles_that_thread_blocks_begin_within():
    sizes = Sizes(144, 32, 8, 1, 2_048)
    turns, runs = (
        cost.parts(values(f"dec_fp16_d128_causal_r8n64{by}"), sizes) for by in ("", "_streamk")
    )
    # 16 splits of 4,608 rows, 129 numbers each
    assert turns.combining == pytest.approx(16 * 4_608 * 129 * 4 / cost.PARTIAL_BYTES)
    assert runs.combining == 0 and runs.chain > turns.chain
    # what is left of whole tiles, if few, is taken in turns
    for batch, partials in ((128, False), (23, False), (17, True), (34, True), (1, True)):
        whole = Sizes(batch, 32, 8, 1, 2_048)
        runs = cost.parts(values("dec_fp16_d128_causal_r8n64_streamk"), whole)
        assert (runs.combining > 0) == partials
    few = Sizes(1, 32, 8, 1, 1_024)  # a tile for each of 8 KV heads: nothing is anybody's own
    alike = [
        cost.seconds(values(f"dec_fp16_d128_causal_r8n64{by}"), few) for by in ("", "_streamk")
    ]
    assert 1.4 < alike[1] / alike[0] < 1.8  # 1.5 was measured


@pytest.mark.parametrize(
    ("better", "worse", "sizes"),
    [
        (
            "dec_fp16_d128_causal_r8n64",
            "dec_fp16_d128_causal_r8n64_s3",
            Sizes(8, 32, 8, 1, 8_192),
        ),
        ("dec_fp16_d128_causal_r8n64", "dec_fp16_d128_causal_r64n64", Sizes(32, 32, 8, 1, 4_096)),
        ("dec_fp16_d128_causal_r32n64", "dec_fp16_d128_causal_r8n64", Sizes(32, 256, 8, 1, 4_096)),
        ("dec_fp16_d128_causal_r8n64", "dec_fp16_d128_causal_r8n64_c1", Sizes(1, 32, 8, 1, 32_768)),
        ("dec_fp16_d128_causal_r8n64", "dec_fp16_d128_causal_r8n64_nospec", Sizes(1, 8, 8, 1, 64)),
    ],
)
def test_what_ought_to_be_faster_is_predicted_so(better, worse, sizes):
    assert cost.seconds(values(better), sizes) < cost.seconds(values(worse), sizes)


@pytest.mark.parametrize("rows", [8, 24, 64])
@pytest.mark.parametrize(("heads", "queries"), [(1, 1), (5, 3), (8, 2), (32, 7), (100, 1)])
def test_tiles_are_those_that_cover_all_rows(rows, heads, queries):
    surveyed = cost.dealt(
        values(f"dec_fp16_d64_causal_r{rows}n64"), Sizes(2, 3 * heads, 3, queries, 256)
    ).tiles
    tile_heads = min(heads, rows)
    positions = max(1, rows // heads)
    tiles = {
        (head // tile_heads, position // positions)
        for head in range(heads)
        for position in range(queries)
    }
    assert surveyed == len(tiles)


def test_nothing_to_read_takes_a_launch():
    assert cost.seconds(values("dec_fp16_d64_causal_r8n128"), Sizes(2, 4, 2, 1, 0)) == cost.LAUNCHES


# ---- the space ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(ROOT.glob("spaces/dec_*.toml")), ids=lambda path: path.stem)
def test_committed_spaces_hold_what_calls_get_today_and_predict_it_among_the_best(path):
    (declared,) = read_spaces(path)
    assert declared.kind == "decode"
    (target,) = declared.targets()
    assert target.name == path.stem + "_causal"
    surveyed = survey(declared, target)
    assert 0 < len(surveyed.points) < surveyed.total == declared.points
    slugs = [surveyed.schedule(point).slug for point in surveyed.points]
    assert len(set(slugs)) == len(slugs), "each schedule is one point"
    fastest = [min(times) for times in zip(*(p.seconds for p in surveyed.points), strict=True)]
    for size, best in zip(surveyed.sizes, fastest, strict=True):
        usual = sized(slugs[0], size)
        assert usual.slug in slugs
        assert cost.seconds(usual.values(), size) < 1.2 * best
    assert anchors(surveyed, declared.effort)[0] in slugs
    assert set(serving(surveyed, "NVIDIA H200")) == {
        sized(slugs[0], s).slug for s in surveyed.sizes
    }


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
@pytest.mark.parametrize("num_splits", [16, 32, 64])
def test_shapes_of_a_slug_are_calls_that_would_get_it(rows, num_splits):
    slug = f"dec_fp16_d128_causal_r{rows}n64" + ("" if num_splits == 16 else f"_c{num_splits}")
    declared = space_like(slug)
    usual = [sized(slug, shape.sizes(128)).values() for shape in declared.shapes]
    assert len(usual) == 6 and {(row["rows"], row["num_splits"]) for row in usual} == {
        (rows, num_splits)
    }


def test_a_shape_has_to_say_what_follows_from_nothing():
    text = TEXT.replace("batch = 64\n", "").replace("kv_heads = 8\nseqlen = 4\n", "seqlen = 4\n")
    with pytest.raises(ScheduleError) as refused:
        parse_space(text, "mine.toml")
    assert [line.partition(": ")[2] for line in str(refused.value).splitlines()] == [
        "shapes.1.batch is missing",
        "shapes.1.kv_heads is missing",
    ]
