"""Search of decoding: what is tried and predicted, how it is timed, a whole one replayed."""

import json
import math
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean

import pytest
import torch

from fagen import search
from fagen.arch import SM90
from fagen.dispatch import tables as dispatch_table
from fagen.dispatch.choice import suited
from fagen.errors import DeviceError, ScheduleError, VerificationError
from fagen.kinds.decode import cost, proof
from fagen.kinds.decode.formulae import budget
from fagen.kinds.decode.keys import Schedule
from fagen.kinds.decode.space import SPACE
from fagen.measure import heats
from fagen.measure import inputs as measure_inputs
from fagen.measure.card import Card
from fagen.measure.heats import BRIEF, CUDNN, Kernel
from fagen.measure.rotating import ROTATED_BYTES, buffers_for, cache_bytes
from fagen.measure.timing import Call
from fagen.paths import locate
from fagen.problem import Cell, Problem, Sizes, solves
from fagen.registry import from_slug, plan_of, read
from fagen.search import lab, tasks
from fagen.search.files import read_spaces
from fagen.search.lab import REAL, Work
from fagen.search.results import told
from fagen.search.run import anchors, serving
from fagen.search.space import parse_space, space_like, survey
from fagen.search.tasks import GOOD, Compiled
from tests.cli_helpers import fagen
from tests.decode_helpers import emulated
from tests.recordings import AtOnce, record
from tests.recordings import space as space_of

TEXT = """
[decode]
dtype = "fp16"
head_dim = 64
mask = "causal"

[tile]
rows = [8, 16]

[pipeline]
stages = [4, 6]
q_stages = 2

[softmax]
speculate = true

[[shapes]]
batch = 1
heads = 32
kv_heads = 8
seqlen = 1
seqlen_k = 8192

[[shapes]]
batch = 64
heads = 32
kv_heads = 8
seqlen = 4
seqlen_k = 4096
"""
TARGET = Problem("fp16", 64, 64, "causal", kind="decode")
ROOT = locate("cli.py").parent


def values(slug: str) -> dict[str, object]:
    return Schedule.from_slug(slug).values()


# ---- the prediction -----------------------------------------------------------------------------


def measured():
    """Every time of a kernel of decoding that was measured: slug, sizes, seconds."""
    found = [
        (known["slug"], speed)
        for path in sorted(ROOT.glob("generated/decode/*/*.json"))
        for known in [json.loads(path.read_text())]
        for speed in known["speeds"]
    ]
    for name in ("decode", "decode-variants"):
        benchmark = ROOT / f"benchmarks/results/nvidia-h200-2026-11-24-{name}.json"
        found += [(row["slug"], row) for row in json.loads(benchmark.read_text())["rows"]]
    names = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k")
    return [(s, Sizes(*(of[n] for n in names)), of["microseconds"] / 1e6) for s, of in found]


@pytest.mark.parametrize(
    ("by", "straddles", "off", "most", "times"),
    [
        ("turn", False, 0.035, 0.13, 130),
        ("run", False, 0.045, 0.13, 60),
        ("turn", True, 0.09, 0.13, 8),  # rows that begin within lines of the L2 cache
        ("run", True, 0.05, 0.09, 8),
    ],
)
def test_what_was_measured_is_met(by, straddles, off, most, times):
    logs = [
        math.log(cost.seconds(values(slug), sizes) / time)
        for slug, sizes, time in measured()
        if values(slug)["by"] == by
        and bool(values(slug)["head_dim"] * 2 % SM90.l2_line_bytes) == straddles
    ]
    assert len(logs) >= times
    assert math.sqrt(fmean(log**2 for log in logs)) < off
    assert max(map(abs, logs)) < most


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
        cost.parts(values(f"dec_fp16_d128_causal_r8n64{by}"), sizes) for by in ("", "_runs")
    )
    # 16 chunks of 4,608 rows, 129 numbers each
    assert turns.merge == pytest.approx(16 * 4_608 * 129 * 4 / cost.PARTIAL_BYTES)
    # 264 thread blocks that hand on half of the chunks of a tile of 4 rows
    assert runs.merge == pytest.approx(264 * 8 * 4 * 129 * 4 / cost.PARTIAL_BYTES)
    assert runs.merge < 0.2 * turns.merge and runs.chain > turns.chain  # chunks are folded
    # 128 sequences are 3 or 4 whole tiles for each thread block
    for batch, partials in ((128, False), (32, False), (35, True), (1, True)):
        whole = Sizes(batch, 32, 8, 1, 2_048)
        runs = cost.parts(values("dec_fp16_d128_causal_r8n64_runs"), whole)
        assert (runs.merge > 0) == partials
    few = Sizes(1, 32, 8, 1, 1_024)  # a tile for each of 8 KV heads: nothing is anybody's own
    alike = [cost.seconds(values(f"dec_fp16_d128_causal_r8n64{by}"), few) for by in ("", "_runs")]
    assert 1.4 < alike[1] / alike[0] < 1.7  # 1.55 was measured


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
    found = cost.dealt(
        values(f"dec_fp16_d64_causal_r{rows}n64"), Sizes(2, 3 * heads, 3, queries, 256)
    ).tiles
    tile_heads = min(heads, rows)
    positions = max(1, rows // heads)
    tiles = {
        (head // tile_heads, position // positions)
        for head in range(heads)
        for position in range(queries)
    }
    assert found == len(tiles)


def test_nothing_to_read_takes_a_launch():
    assert cost.seconds(values("dec_fp16_d64_causal_r8n128"), Sizes(2, 4, 2, 1, 0)) == cost.LAUNCHES


# ---- the space ----------------------------------------------------------------------------------


def test_what_does_not_fit_is_what_the_ledgers_say():
    refused = 0
    for said in list(product(*SPACE.defaults.values()))[::37]:
        keys = dict(zip(SPACE.defaults, said, strict=True))
        for head_dim in (64, 96, 256):
            schedule = Schedule.make(dtype="fp16", head_dim=head_dim, mask="causal", **keys)
            over = [(one.name, one.total, one.limit) for one in budget(schedule).over()]
            assert list(SPACE.sums(schedule.values())) == over
            assert {name for name, *_ in over} <= {*SPACE.budgets}
            refused += bool(over)
    assert refused


@pytest.mark.parametrize("path", sorted(ROOT.glob("spaces/dec_*.toml")), ids=lambda path: path.stem)
def test_committed_spaces_hold_what_calls_get_today_and_predict_it_among_the_best(path):
    (declared,) = read_spaces(path)
    assert declared.kind == "decode"
    (target,) = declared.targets()
    assert target.name == path.stem + "_causal"
    found = survey(declared, target)
    assert 0 < len(found.points) < found.total == declared.points
    slugs = [found.schedule(point).slug for point in found.points]
    assert len(set(slugs)) == len(slugs), "each schedule is one point"
    fastest = [min(times) for times in zip(*(p.seconds for p in found.points), strict=True)]
    for size, best in zip(found.sizes, fastest, strict=True):
        usual = suited(slugs[0], size)
        assert usual.slug in slugs
        assert cost.seconds(usual.values(), size) < 1.2 * best
    assert anchors(found, declared.effort)[0] in slugs
    assert set(serving(found, "NVIDIA H200")) == {suited(slugs[0], s).slug for s in found.sizes}


def test_a_slug_stands_for_what_might_beat_it():
    declared = space_like("dec_bf16_d72_causal_r8n64_c20")
    sizes = [shape.sizes(72) for shape in declared.shapes]
    assert {suited("dec_bf16_d72_causal_r8n64_c20", s).slug for s in sizes} <= {
        "dec_bf16_d72_causal_r8n64",
        "dec_bf16_d72_causal_r8n64_runs",
    }
    assert declared.targets() == (Problem("bf16", 72, 72, "causal", kind="decode"),)
    assert declared.effort.anchor == "dec_bf16_d72_causal_r8n64_c20"
    assert {key: declared.values[key] for key in SPACE.defaults} == SPACE.defaults


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
@pytest.mark.parametrize("chunks", [16, 32, 64])
def test_shapes_of_a_slug_are_calls_that_would_get_it(rows, chunks):
    slug = f"dec_fp16_d128_causal_r{rows}n64" + ("" if chunks == 16 else f"_c{chunks}")
    declared = space_like(slug)
    usual = [suited(slug, shape.sizes(128)).values() for shape in declared.shapes]
    assert len(usual) == 6 and {(one["rows"], one["chunks"]) for one in usual} == {(rows, chunks)}


def test_a_shape_has_to_say_what_follows_from_nothing():
    text = TEXT.replace("batch = 64\n", "").replace("kv_heads = 8\nseqlen = 4\n", "seqlen = 4\n")
    with pytest.raises(ScheduleError) as refused:
        parse_space(text, "mine.toml")
    assert [line.partition(": ")[2] for line in str(refused.value).splitlines()] == [
        "shapes.1.batch is missing",
        "shapes.1.kv_heads is missing",
    ]


def test_of_the_same_problem_forward_kernels_may_be_searched_beside():
    other = '[attention]\ndtype = "fp16"\nhead_dim = 64\nmask = "causal"\n'
    spaces = [parse_space(text, f"{n}.toml") for n, text in enumerate((TEXT, other))]
    search.files.refuse_twice(spaces)
    names = [target.name for one in spaces for target in one.targets()]
    assert names == ["dec_fp16_d64_causal", "fp16_d64_causal"]
    kernel, plain = (
        from_slug("dec_fp16_d64_causal_r8n128"),
        from_slug("fwd_fp16_d64_causal_m128n128"),
    )
    asked = replace(TARGET, out_dtype="fp16", v_layout="", scale_rows=0)
    assert solves(kernel, asked) and not solves(plain, asked)
    # a call of attention may be served by either
    assert all(solves(one, replace(asked, kind="forward")) for one in (kernel, plain))


# ---- timing -------------------------------------------------------------------------------------

CELL = Cell(TARGET, Sizes(2, 8, 2, 1, 300))
SLUGS = ("dec_fp16_d64_causal_r8n128", "dec_fp16_d64_causal_r16n64_c8_runs")


@pytest.fixture
def device(monkeypatch):
    """A device on which kernels are emulated; it notes whose turn it was, and on which keys."""

    class Device:
        ran: list[tuple[str, int]]
        wrong: set[str]
        captured: int

    made = Device()
    made.ran, made.wrong, made.captured = [], set(), 0

    def bind(of, library, *, lse=None, **given):
        assert library == Path(f"{of.slug}.so")

        def launch():
            made.ran.append((of.slug, given["k"].data_ptr()))
            into = lse if lse is not None else torch.empty(0)
            rest = {name: one for name, one in given.items() if name != "out"}
            shape = given["q"].shape
            into = into if lse is not None else torch.empty(shape[0], shape[2], shape[1])
            emulated(of)(**rest, out=given["out"], lse=into)
            if of.slug in made.wrong:
                given["out"][0, 0, 0, 0] += 1

        return launch

    def captured(call, runs):
        assert runs == 1
        made.captured += 1
        return call

    def time_round(call, regime, each, clock):
        call.run()
        return 6e-3, []

    monkeypatch.setattr(proof, "bind", bind)
    monkeypatch.setattr(proof, "call", lambda of, library, **given: bind(of, library, **given)())
    monkeypatch.setattr(heats, "captured", captured)
    monkeypatch.setattr(heats, "time_round", time_round)
    monkeypatch.setattr(heats, "estimate", lambda call: 1e-6)
    monkeypatch.setattr(heats, "buffers_for", lambda problem, sizes: 3)
    monkeypatch.setattr(heats, "inputs", partial(measure_inputs.inputs, device="cpu"))
    monkeypatch.setattr(heats, "_known", {})
    monkeypatch.setattr(heats, "Clock", lambda: None)
    for cached in (heats._inputs, heats._turns, heats._cudnn_in_turns):
        cached.cache_clear()
    yield made
    for cached in (heats._inputs, heats._turns, heats._cudnn_in_turns):
        cached.cache_clear()


def kernel(slug: str) -> Kernel:
    return Kernel(slug, Path(f"{slug}.so"))


def test_keys_and_values_come_from_memory_in_every_call(device, monkeypatch):
    asked = []

    def refuse(name):
        asked.append(name)
        raise DeviceError("there is no cuDNN here")

    monkeypatch.setattr(heats, "peer", refuse)
    laps = heats.heat(CELL, list(map(kernel, SLUGS)), kernel(SLUGS[0]), regime=BRIEF, rounds=(0, 1))
    assert sorted((lap.name, lap.round) for lap in laps) == sorted(product(SLUGS, (0, 1)))
    # six milliseconds went to three calls
    assert {lap.seconds for lap in laps} == {2e-3} == {lap.anchor_seconds for lap in laps}
    assert device.captured == 3 and asked == [CUDNN]  # graphs: two kernels and the anchor
    for slug in SLUGS:
        of = [keys for name, keys in device.ran if name == slug]
        assert len(set(of)) == 3, "each turn has keys of its own"
        assert all(one != other for one, other in pairwise(of))
    assert len({keys for _, keys in device.ran}) == 3, "all kernels have the same"


def test_cudnn_goes_through_the_same_keys_without_a_mask(device, monkeypatch):
    bound = []

    class Peer:
        def bind(self, cell, q, k, v):
            bound.append((cell.problem.mask, k.data_ptr()))
            return Call(lambda: device.ran.append((CUDNN, k.data_ptr())))

    monkeypatch.setattr(heats, "peer", lambda name: Peer())
    laps = heats.heat(CELL, [kernel(SLUGS[0])], kernel(SLUGS[0]), regime=BRIEF, rounds=(0,))
    assert {lap.name for lap in laps} == {SLUGS[0], CUDNN}
    assert {mask for mask, _ in bound} == {"full"}
    ours, theirs = ([keys for name, keys in device.ran if name == who] for who in (SLUGS[0], CUDNN))
    assert theirs == [keys for _, keys in bound] and set(ours) == set(theirs)


def test_there_are_ten_times_as_many_keys_as_the_l2_cache_holds():
    for sizes in (Sizes(1, 32, 8, 1, 1_024), Sizes(32, 32, 8, 1, 4_096)):
        each = cache_bytes(TARGET, sizes)
        assert each == 2 * sizes.batch * sizes.seqlen_k * 8 * 64 * 2
        assert buffers_for(TARGET, sizes) * each >= ROTATED_BYTES
    assert buffers_for(TARGET, Sizes(1, 1, 1, 1, 1)) == 512, "and not a million of the smallest"


@pytest.mark.parametrize("slug", [*SLUGS, "dec_fp16_d64_causal_r8n64_c3_unified"])
def test_a_right_kernel_passes_the_quick_check_and_a_wrong_one_does_not(device, slug):
    heats.quick_check(CELL, kernel(slug))
    assert len({keys for _, keys in device.ran}) > 4
    device.wrong.add(slug)
    with pytest.raises(VerificationError, match=r"error .* is allowed"):
        heats.quick_check(CELL, kernel(slug))


@pytest.mark.parametrize("sizes", [Sizes(128, 32, 8, 1, 2_048), Sizes(1, 512, 1, 1, 131_072)])
def test_what_is_checked_is_like_what_is_timed_and_never_large(sizes):
    for slug in SLUGS:
        of = plan_of(slug)
        *_, like = proof._quick(of, sizes)
        assert like.heads == sizes.heads and like.seqlen_q == sizes.seqlen_q
        assert like.batch <= 3 and like.seqlen_k <= min(sizes.seqlen_k, 32_768)


# ---- a whole search, replayed -------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A recorded search of decoding."""
    path = tmp_path_factory.mktemp("recorded") / "recorded.sqlite"
    return record(path, kernels=40, text=TEXT)


@pytest.fixture
def replayed(recorded, tmp_path, monkeypatch):
    """What a replay of it found."""
    monkeypatch.setattr(search, "LocalLab", AtOnce)
    monkeypatch.setattr(lab, "LocalLab", AtOnce)
    store = tmp_path / "found.sqlite"
    search.search([space_of(TEXT)], store, recorded=recorded)
    return store


def test_a_replay_finds_the_fastest(recorded, replayed):
    (best,), (one,) = search.found(recorded), search.found(replayed)
    assert one.target == TARGET and one.kind == "decode"
    assert all(slug.startswith("dec_fp16_d64_causal_") for slug in one.marks.slugs())
    assert one.lead and best.lead and one.lead.slug == best.lead.slug
    assert one.correlation is not None and one.correlation > 0.5
    assert any(f"{one.lead.slug}: " in line for line in told(one))


def test_what_was_found_is_written_where_calls_of_decoding_read_it(replayed, tmp_path):
    folder = tmp_path / "mine"
    answer = fagen("search", "report", replayed, "--write", folder)
    assert answer.exit_code == 0, answer.output
    rows = dispatch_table.table_at(folder / "dispatch.toml")
    assert [row.group for row in rows] == [8, 16]  # one query of four heads, and four
    for row in rows:
        assert row.problem == replace(TARGET, v_layout="", scale_rows=0)
        assert row.by.startswith("fagen search") and math.isinf(row.rows)
        assert read(folder / "decode" / f"{row.slug}.toml").slug == row.slug
        # bits are those of calls without a table
        assert {values(row.slug)[key] for key in ("chunks", "block_n")} == {16, 128}
        assert f"{row.group} rows to a KV head: {row.slug}" in answer.output
    page = replayed.with_suffix(".html").read_text()
    assert "fp16, head dim 64, causal, decode" in page and "16 rows to a KV head" in page


def test_of_each_group_that_is_written_which_is_fastest_there(recorded):
    (best,) = search.found(recorded)
    for (group, most, slug), size in zip(best.groups(), best.sizes, strict=True):
        alike = [
            one
            for one in best.marks.slugs()
            if all(values(one)[key] == values(slug)[key] for key in SPACE.promised)
        ]
        assert math.isinf(most) and group == 4 * size.seqlen_q if group > 8 else group == 8
        assert slug == min(alike, key=lambda one: best.marks.at(one, size, "brief"))


def test_a_dry_run_says_what_is_refused_and_predicted():
    answer = fagen("search", ROOT / "spaces/dec_fp16_d128.toml", "--dry-run")
    assert answer.exit_code == 0, answer.output
    assert re.search(r"dec_fp16_d128_causal: [\d,]+ points, \d+ fit\n", answer.output)
    assert "refused: shared memory of a thread block" in answer.output
    assert " µs  dec_fp16_d128_causal_r" in answer.output


SMALL = """
[decode]
dtype = "fp16"
head_dim = 64
mask = "causal"

[tile]
rows = [8, 16]
block_n = 128

[split]
chunks = 4
by = ["turn", "run"]

[pipeline]
stages = 4
q_stages = 2

[softmax]
speculate = true

[grid]
blocks = 2

[search]
long_runs = false

[[shapes]]
batch = 1
heads = 4
kv_heads = 2
seqlen = 1
seqlen_k = 130

[[shapes]]
batch = 2
heads = 4
kv_heads = 2
seqlen = 3
seqlen_k = 40
"""


def test_a_search_compiles_checks_and_times_real_schedules(device, tmp_path, monkeypatch):
    """All but compiler and clock: kernels are emulated, and one of them is wrong."""

    class Peer:
        def bind(self, cell, q, k, v):
            return Call(lambda: None)

    def compiled(slug: str) -> Compiled:
        return Compiled(slug, plan_of(slug).slug, "nvcc 13.0", GOOD, library=f"{slug}.so")

    def emulating(recorded: object) -> Work:
        return replace(
            REAL,
            compile=compiled,
            source_hash=lambda slug: slug,
            compiler=lambda: "nvcc 13.0",
            card=lambda index: ("NVIDIA H200", "580.1"),
        )

    quick = replace(proof.TRIAL, quick=lambda plan, sizes: [Sizes(2, 4, 2, 1, 70)])
    monkeypatch.setattr(proof, "PROOF", replace(proof.PROOF, trial=quick))
    monkeypatch.setattr(heats, "peer", lambda name: Peer())
    monkeypatch.setattr(heats, "use_card", lambda index: Card("NVIDIA H200", "580.1", 132))
    monkeypatch.setattr(heats, "card_id", lambda index: "a-card")
    monkeypatch.setattr(tasks, "_library", lambda made: Path(made.library))
    monkeypatch.setattr(search, "LocalLab", lambda work, **_: AtOnce(emulating(work)))
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "cache"))
    device.wrong.add("dec_fp16_d64_causal_r16n128_c4_s4")
    store = tmp_path / "found.sqlite"
    search.search([space_of(SMALL)], store)
    (found,) = search.found(store)
    assert set(found.wrong) == device.wrong
    assert all("is allowed" in said for said in found.wrong.values())
    # the space's other one, what such calls get today, and the committed kernel beside all; in runs
    # so few keys are predicted to take too long
    assert set(found.marks.slugs()) > {"dec_fp16_d64_causal_r8n128_c4_s4"}
    assert found.anchor == "dec_fp16_d64_causal_r8n128" and found.over_peer == pytest.approx(1)
    assert found.lead and math.isclose(found.marks.seconds(found.lead.slug, found.sizes[0]), 2e-3)
