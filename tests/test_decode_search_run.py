"""Search of decoding as it runs: how kernels are timed, and a whole one replayed."""

import math
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

from fagen import search
from fagen.dispatch import tables as dispatch_table
from fagen.dispatch.rows import MOST
from fagen.errors import DeviceError, VerificationError
from fagen.kinds.decode import proof
from fagen.kinds.decode.space import SPACE
from fagen.measure import inputs as measure_inputs
from fagen.measure import rounds
from fagen.measure.card import Card
from fagen.measure.rotating import ROTATED_BYTES, buffers_for, cache_bytes
from fagen.measure.rounds import BRIEF, CUDNN, Kernel
from fagen.measure.timing import Call
from fagen.problem import Cell, Sizes
from fagen.registry import plan_of, read
from fagen.search import executor, tasks
from fagen.search.executor import REAL, Work
from fagen.search.results import told
from fagen.search.tasks import GOOD, Compiled
from tests.cli_helpers import fagen
from tests.decode_helpers import emulated
from tests.recordings import AtOnce, record
from tests.recordings import space as space_of
from tests.test_decode_search import ROOT, TARGET, TEXT, values

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
    monkeypatch.setattr(rounds, "captured", captured)
    monkeypatch.setattr(rounds, "time_round", time_round)
    monkeypatch.setattr(rounds, "estimate", lambda call: 1e-6)
    monkeypatch.setattr(rounds, "buffers_for", lambda problem, sizes: 3)
    monkeypatch.setattr(rounds, "inputs", partial(measure_inputs.inputs, device="cpu"))
    monkeypatch.setattr(rounds, "_known", {})
    monkeypatch.setattr(rounds, "Clock", lambda: None)
    for cached in (rounds._inputs, rounds._turns, rounds._cudnn_in_turns):
        cached.cache_clear()
    yield made
    for cached in (rounds._inputs, rounds._turns, rounds._cudnn_in_turns):
        cached.cache_clear()


def kernel(slug: str) -> Kernel:
    return Kernel(slug, Path(f"{slug}.so"))


def test_keys_and_values_come_from_memory_in_every_call(device, monkeypatch):
    asked = []

    def refuse(name):
        asked.append(name)
        raise DeviceError("there is no cuDNN here")

    monkeypatch.setattr(rounds, "peer", refuse)
    laps = rounds.side_by_side(
        CELL, list(map(kernel, SLUGS)), kernel(SLUGS[0]), regime=BRIEF, repeats=(0, 1)
    )
    assert sorted((lap.name, lap.repeat) for lap in laps) == sorted(product(SLUGS, (0, 1)))
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

    monkeypatch.setattr(rounds, "peer", lambda name: Peer())
    laps = rounds.side_by_side(
        CELL, [kernel(SLUGS[0])], kernel(SLUGS[0]), regime=BRIEF, repeats=(0,)
    )
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
    rounds.quick_check(CELL, kernel(slug))
    assert len({keys for _, keys in device.ran}) > 4
    device.wrong.add(slug)
    with pytest.raises(VerificationError, match=r"error .* is allowed"):
        rounds.quick_check(CELL, kernel(slug))


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
    monkeypatch.setattr(search, "LocalExecutor", AtOnce)
    monkeypatch.setattr(executor, "LocalExecutor", AtOnce)
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
    assert [row.group_rows for row in rows] == [8, 16]  # one query of four heads, and four
    for row in rows:
        assert row.problem == replace(TARGET, v_layout="", scale_rows=0)
        assert row.by.startswith("fagen search") and row.rows_to == MOST
        assert read(folder / "decode" / f"{row.slug}.toml").slug == row.slug
        # bits are those of calls without a table
        assert {values(row.slug)[key] for key in ("chunks", "block_n")} == {16, 128}
        assert f"{row.group_rows} rows to a KV head: {row.slug}" in answer.output
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
    monkeypatch.setattr(rounds, "peer", lambda name: Peer())
    monkeypatch.setattr(rounds, "use_card", lambda index: Card("NVIDIA H200", "580.1", 132))
    monkeypatch.setattr(rounds, "card_id", lambda index: "a-card")
    monkeypatch.setattr(tasks, "_library", lambda made: Path(made.library))
    monkeypatch.setattr(search, "LocalExecutor", lambda work, **_: AtOnce(emulating(work)))
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
